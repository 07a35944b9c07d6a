"""Waiting and time, on machines that are busy with something else."""

import asyncio
import time


async def until(condition, seconds=30):
  """Waits for it; asserts that it comes."""
  async with asyncio.timeout(seconds):
    while not condition():
      await asyncio.sleep(0.002)


def within(seconds, call, tries=5):
  """The result of call(), which must take no longer at least once.

  What waits for something else, a longer timeout say, never ends so early; a
  busy machine is late now and then, but not `tries` times.
  """
  took = []
  while len(took) < tries:
    begun = time.monotonic()
    result = call()
    took.append(time.monotonic() - begun)
    if took[-1] < seconds:
      return result
  raise AssertionError(f'took {took} s; expected less than {seconds} s')
