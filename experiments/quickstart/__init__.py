"""The quickstart: its stages (run.py) and the figures of a run."""

import searchrl_jax  # noqa: F401  starts `-m` commands with huge pages
