"""Compiles several programs at a time."""

from collections.abc import Iterable
from concurrent import futures
import os

import jax


def concurrently(lowered: Iterable[jax.stages.Lowered]) -> list:
  """The compiled programs, in order.

  XLA compiles without Python's lock, and most of one program on one core. A
  call of the function that was lowered, with arguments of these shapes and
  places, finds its program.
  """
  with futures.ThreadPoolExecutor(os.cpu_count(), 'compile') as pool:
    return list(pool.map(lambda program: program.compile(), lowered))
