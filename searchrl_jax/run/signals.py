"""The event loop of a run, and why a run stops early: save first, then go.

Rollouts live on one event loop in a thread of its own, so that they go on
while the main thread updates. The main thread gives it coroutines and waits
for them, or does not.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
import logging
import signal
import threading

_log = logging.getLogger(__name__)


class Stopped(Exception):
  """A signal came; the run is saved, the same command goes on with it."""


class NonFinite(RuntimeError):
  """The loss or the gradient is not finite; nothing was updated."""


class Mismatch(RuntimeError):
  """Trainer and engine disagree beyond the alarm; the run is saved."""


class Loop:
  """An event loop in a thread; a context manager."""

  def __enter__(self):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='event loop', daemon=True
    )
    self._thread.start()
    self._last: list[Callable[[], Awaitable]] = []
    self._tasks: set[asyncio.Task] = set()
    return self

  def __exit__(self, kind, *_):
    """Ends what still runs, then does what `at_exit` was given."""
    try:
      self.finish(self._end())
    except Exception as e:
      if kind is None:
        raise
      _log.warning('while ending: %s', e)  # the first error tells more
    finally:
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join()
      self._loop.close()

  def at_exit(self, function: Callable[[], Awaitable]) -> None:
    """Awaited at the end, last given first: closes what the loop serves."""
    self._last.append(function)

  def start(self, coroutine: Coroutine) -> futures.Future:
    """Runs it beside whatever else; its result or error is the future's."""
    return asyncio.run_coroutine_threadsafe(self._kept(coroutine), self._loop)

  def finish(self, coroutine: Coroutine):
    """Runs it to its end and returns its result."""
    return self.start(coroutine).result()

  def cancel(self, *started: futures.Future) -> None:
    """Ends what `start` began and waits until it has cleaned up."""
    if started:
      self.finish(self._cancel(started))

  def run(self, coroutine: Coroutine):
    """The same as `finish`; whoever interrupts the wait ends it."""
    future = self.start(coroutine)
    try:
      return future.result()
    except BaseException:
      if not future.done():
        self.cancel(future)
      raise

  async def _kept(self, coroutine):
    task = asyncio.current_task()
    self._tasks.add(task)
    try:
      return await coroutine
    except (SystemExit, KeyboardInterrupt) as e:
      # They would end the loop, and whoever waits would wait for ever.
      raise RuntimeError(f'{type(e).__name__} on the event loop') from e
    finally:
      self._tasks.discard(task)

  async def _cancel(self, started):
    for future in started:
      future.cancel()
    # A future that is cancelled says so before its task has ended.
    await asyncio.sleep(0)
    me = asyncio.current_task()
    while any(t is not me and t.cancelling() for t in self._tasks):
      await asyncio.sleep(0.001)

  async def _end(self):
    me = asyncio.current_task()
    others = [t for t in asyncio.all_tasks() if t is not me]
    for task in others:
      task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    errors = []
    for function in reversed(self._last):
      try:
        await function()
      except Exception as e:  # the others still have to end
        errors.append(e)
    if errors:
      raise errors[0]


class Signals(Loop):
  """A signal ends a rollout at once and an update at its end.

  For the main thread. The first signal is minded; a second one kills as
  usual.
  """

  def __init__(self):
    self.stop = False
    self._waits_for: futures.Future | None = None

  def __enter__(self):
    super().__enter__()
    self._before = {
      s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)
    }
    return self

  def __exit__(self, *error):
    self._release()
    super().__exit__(*error)

  def _release(self):
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _handle(self, signum, frame):
    del signum, frame
    self.stop = True
    self._release()
    if self._waits_for is not None:
      self._waits_for.cancel()

  def wait(self, future: futures.Future):
    """The result of what `start` began; a signal ends it.

    Raises:
      Stopped: a signal came before or meanwhile.
    """
    if self.stop:
      raise Stopped('stopped by a signal')
    self._waits_for = future
    try:
      return future.result()
    except futures.CancelledError:
      self.cancel(future)
      raise Stopped('stopped by a signal in a rollout') from None
    except BaseException:
      self.cancel(future)
      raise
    finally:
      self._waits_for = None

  def run(self, coroutine: Coroutine):
    """`wait` for a coroutine."""
    if self.stop:
      coroutine.close()
      raise Stopped('stopped by a signal')
    return self.wait(self.start(coroutine))
