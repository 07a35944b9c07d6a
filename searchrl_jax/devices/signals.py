"""The event loop of a run, its signals, and the errors that stop it early.

Rollouts run on one event loop in a thread of its own, so that they continue
while the main thread updates. The main thread starts coroutines on it, and may
wait for them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent import futures
import contextlib
import logging
import os
import signal
import threading
import time
from typing import Any

_ANSWER = (
  'sampling ends now, and an update at its end; then the run is saved. Another '
  'signal ends it at once'
)
PATIENCE = 30.0  # seconds in which what is cancelled has to end
CAUGHT = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


class Stopped(Exception):
  """A signal came; the run is saved, the same command resumes it."""


class NonFinite(RuntimeError):
  """The loss or the gradient is not finite; nothing was updated."""


class Mismatch(RuntimeError):
  """Trainer and engine differ by more than the alarm; the run is saved."""


@contextlib.contextmanager
def after(first: BaseException | None) -> Iterator[None]:
  """Makes an error of the block a note of `first`, if there is one."""
  try:
    yield
  except Exception as e:
    if first is None:
      raise
    first.add_note(f'After that: {e}')


class Loop:
  """An event loop in a thread; a context manager."""

  def __enter__(self):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='event loop', daemon=True
    )
    self._thread.start()
    self._last: list[Callable[[], Awaitable]] = []
    return self

  def __exit__(self, kind, error, _):
    """Cancels what still runs, then calls the functions of `at_exit`."""
    try:
      with after(error):
        self.finish(self._end())
    finally:
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join()
      self._loop.close()

  def at_exit(self, function: Callable[[], Awaitable]) -> None:
    """Calls and awaits `function` at the end; the last one is first."""
    self._last.append(function)

  def open(self, service):
    """Checks a service (a source, a judge), and closes it at the end."""
    self.at_exit(service.close)
    return self.finish(service.check())

  def start(self, coroutine: Coroutine) -> futures.Future:
    """Starts a coroutine; the future gets its result or error."""
    return asyncio.run_coroutine_threadsafe(_guarded(coroutine), self._loop)

  def finish(self, coroutine: Coroutine):
    """Runs a coroutine to its end and returns its result."""
    return self.start(coroutine).result()

  run = finish  # a signal ends it, see `Signals`

  def cancel(self, *started: futures.Future) -> None:
    """Cancels what `start` started and waits until it has cleaned up."""
    if started:
      self.finish(self._cancel(started))

  async def _cancel(self, started):
    for future in started:
      future.cancel()
    # A cancelled future is done before its task has ended.
    await asyncio.sleep(0)
    end = time.monotonic() + PATIENCE
    while left := [t for t in _others() if t.cancelling()]:
      if time.monotonic() > end:
        return _leave(left)
      await asyncio.sleep(0.001)

  async def _end(self):
    others = _others()
    for task in others:
      task.cancel()
    ended = asyncio.gather(*others, return_exceptions=True)
    await asyncio.wait([ended], timeout=PATIENCE)
    _leave(t for t in others if not t.done())
    first = None
    for function in reversed(self._last):
      try:
        with after(first):
          await function()
      except Exception as e:  # the others still have to end
        first = e
    if first:
      raise first


def _leave(tasks: Iterable[asyncio.Task]) -> None:
  """Says which do not end although they were cancelled, as a program may."""
  for task in tasks:
    logging.warning('left alone, as it does not end: %s', task.get_coro())


async def gather(work: Iterable[Coroutine]) -> list[Any]:
  """Runs concurrently; results in order. An error cancels the others."""
  try:
    # Waits for cancelled ones, which free what they hold as they end.
    async with asyncio.TaskGroup() as group:
      tasks = [group.create_task(x) for x in work]
  except BaseExceptionGroup as e:
    first = e.exceptions[0]
    raise first from first.__cause__
  return [task.result() for task in tasks]


class Held:
  """A context in a task of its own, because what enters it has to leave it.

  Attributes:
    ready: future of what the context gives.
    users: how many there are. last: whether there will be no others.
  """

  def __init__(
    self, context: contextlib.AbstractAsyncContextManager, what: str
  ):
    """what: a name, for messages."""
    self.users, self.last, self._over = 0, False, asyncio.Event()
    self.ready = asyncio.get_running_loop().create_future()
    self.task = asyncio.create_task(self._run(context, what))

  async def _run(self, context, what: str) -> None:
    try:
      async with context as found:
        self.ready.set_result(found)
        await self._over.wait()
    except Exception as e:
      if self.ready.done():  # what its users have got from it stays
        return logging.warning('%s did not end well: %r', what, e)
      self.ready.set_exception(e)

  @property
  def usable(self) -> bool:
    """Whether this loop may use it."""
    here = self.task.get_loop() is asyncio.get_running_loop()
    return here and not self.last and not self.task.done()

  @contextlib.contextmanager
  def used(self) -> Iterator[None]:
    """Counts a user. After an error there are no others, and the last of them
    ends it."""
    self.users += 1
    try:
      yield
    except Exception:
      self.last = True
      raise
    finally:
      self.users -= 1
      if self.last and not self.users:
        self.end()

  def end(self) -> None:
    self._over.set()
    if not self.ready.done():
      self.task.cancel()


def _others() -> set[asyncio.Task]:
  """The other tasks of this loop."""
  return asyncio.all_tasks() - {asyncio.current_task()}


async def _guarded(coroutine):
  try:
    return await coroutine
  except (SystemExit, KeyboardInterrupt) as e:
    # They would end the loop, and the caller would wait for ever.
    raise RuntimeError(f'{type(e).__name__} on the event loop') from e


class Signals(Loop):
  """A signal stops a rollout at once, and an update at its end.

  For the main thread. The first signal is handled here; a second one has the
  effect that it had before.
  """

  def __init__(self):
    self.stop = False
    self._waits_for: futures.Future | None = None

  def __enter__(self):
    super().__enter__()
    self._before = {s: signal.signal(s, self._handle) for s in CAUGHT}
    return self

  def __exit__(self, *error):
    self._release()
    super().__exit__(*error)

  def _release(self):
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _handle(self, signum, frame):
    del frame
    self._release()
    # Not `print`: the signal may have come in the middle of one.
    name = signal.Signals(signum).name
    os.write(2, f'\n{name}: {_ANSWER}\n'.encode())
    self.interrupt()

  def interrupt(self):
    """Stops as a signal does; may be called in another thread."""
    self.stop = True
    future = self._waits_for  # the main thread may end the wait meanwhile
    if future is not None:
      future.cancel()

  def wait(self, future: futures.Future):
    """The result of what `start` started; a signal cancels it.

    Raises:
      Stopped: a signal came before or meanwhile.
    """
    self._waits_for = future
    try:
      if self.stop:  # checked after the assignment: a signal may come between
        raise Stopped('stopped by a signal')
      # Python handles a signal between two of its instructions. One that comes
      # just before this thread blocks would else wait for the future's end.
      while not future.done():
        futures.wait([future], timeout=1)
      return future.result()
    except BaseException as e:
      self.cancel(future)
      if isinstance(e, futures.CancelledError) and self.stop:
        raise Stopped('stopped by a signal in a rollout') from None
      raise
    finally:
      self._waits_for = None

  def run(self, coroutine: Coroutine):
    """`wait` for a coroutine."""
    if self.stop:
      coroutine.close()
      raise Stopped('stopped by a signal')
    return self.wait(self.start(coroutine))
