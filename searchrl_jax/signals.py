"""Why a run stops early, and how signals are minded: save first, then go."""

import asyncio
import signal


class Stopped(Exception):
  """A signal came; the run is saved, the same command goes on with it."""


class NonFinite(RuntimeError):
  """The loss or the gradient is not finite; nothing was updated."""


class Signals:
  """A signal ends a rollout at once and an update at its end.

  A context manager, for the main thread. The first signal is minded; a
  second one kills as usual.
  """

  def __init__(self):
    self.stop = False
    self._loop = self._task = None

  def __enter__(self):
    self._before = {
      s: signal.signal(s, self._handle)
      for s in (signal.SIGTERM, signal.SIGINT)
    }
    return self

  def __exit__(self, *_):
    self._release()

  def _release(self):
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _handle(self, signum, frame):
    del signum, frame
    self.stop = True
    self._release()
    if self._loop is not None:
      self._loop.call_soon_threadsafe(self._task.cancel)

  def run(self, coroutine):
    """asyncio.run, ended by a signal.

    Raises:
      Stopped: a signal came before or during the run.
    """
    async def main():
      self._loop = asyncio.get_running_loop()
      self._task = asyncio.current_task()
      try:
        if self.stop:
          coroutine.close()
          raise Stopped('stopped by a signal')
        return await coroutine
      except asyncio.CancelledError:
        raise Stopped('stopped by a signal in a rollout') from None
      finally:
        self._loop = self._task = None

    # (asyncio puts its own SIGINT handler only in place of Python's.)
    return asyncio.run(main())
