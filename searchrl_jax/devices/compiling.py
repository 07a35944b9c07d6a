"""Compiles several programs at a time."""

from collections.abc import Iterable
from concurrent import futures
import os

import jax


def concurrently(
  lowered: Iterable[jax.stages.Lowered], at_once: bool = True
) -> list:
  """The compiled programs, in order; at_once=False: one after another.

  XLA compiles without Python's lock, and most of one program on one core. A
  call of the function that was lowered, with arguments of these shapes and
  places, finds its program.
  """
  threads = os.cpu_count() if at_once else 1
  with futures.ThreadPoolExecutor(threads, 'compile') as pool:
    return list(pool.map(lambda program: program.compile(), lowered))
