"""Benchmarks, one module each.

Python runs this file before any of them, so that it sees what the machine did
before the benchmark's own start: importing JAX alone would count as load.
"""

import os

LOAD = os.getloadavg()[0]  # of the last minute
