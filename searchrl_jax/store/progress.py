"""Shows the progress of long phases: a bar on a terminal, lines in a log.

A thread prints it. The work itself only names the phase that it is in, so that
printing takes none of its time and changes no figure.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import sys
import threading
import time
from typing import Any, TextIO

from retrieval import files
from searchrl_jax.devices import cluster

Count = Callable[[], tuple[int, int]]  # done, in all (0 = unknown)


@dataclasses.dataclass(eq=False)
class _Phase:
  name: str
  count: Count | None
  begin: float


class Progress:
  """Shows the innermost phase that runs; a context manager.

  On a terminal a phase has a bar after `patience` seconds. Elsewhere a line
  follows whenever nothing was printed for `every` seconds. Of several
  processes, process 0 alone prints.
  """

  patience, every, tick = 2.0, 30.0, 1.0

  def __init__(self, out: TextIO | None = None, shown: bool = True):
    self._out = sys.stderr if out is None else out
    self._screen, self._shown = self._out.isatty(), shown and cluster.main()
    self._phases: list[_Phase] = []
    self._bar: Any = None
    self._shown_phase: _Phase | None = None  # whose bar it is
    self._printed = time.monotonic()
    self._lock, self._stop = threading.Lock(), threading.Event()

  def __enter__(self) -> 'Progress':
    if self._shown:
      self._thread = threading.Thread(
        target=self._watch, name='progress', daemon=True
      )
      self._thread.start()
    return self

  def __exit__(self, *error):
    self._stop.set()
    if self._shown:
      self._thread.join()

  @contextlib.contextmanager
  def phase(self, name: str, count: Count | None = None) -> Iterator[None]:
    """The block is a phase; `count` is asked how far it is."""
    phase = _Phase(name, count, time.monotonic())
    self._phases.append(phase)
    try:
      yield
    finally:
      self._phases.remove(phase)
      if self._shown_phase is phase:
        with self._lock:
          self._close()

  def print(self, text: str) -> None:
    """Prints a text, not across a bar."""
    if self._shown:
      with self._lock:
        self._close()
        print(text, file=self._out, flush=True)
        self._printed = time.monotonic()

  def _watch(self) -> None:
    while not self._stop.wait(self.tick):
      with self._lock:
        for phase in self._phases[-1:]:
          self._show(phase, time.monotonic())

  def _show(self, phase: _Phase, now: float) -> None:
    due = now - phase.begin >= self.patience
    if not self._screen:
      due = now - self._printed >= self.every
    if not due:
      return
    done, total = phase.count() if phase.count else (0, 0)
    if self._shown_phase is not phase:
      self._close()
      self._shown_phase = phase
      self._bar = files.progress(
        total or None,
        phase.name,
        unit='it',
        stream=self._out,
        unit_scale=False,
        delay=1e-9,  # shown by `refresh` below, erased by `close`
        leave=False,
        **({} if phase.count else {'bar_format': '{desc}: {elapsed}'}),
      )
      self._bar.start_t = time.time() - (now - phase.begin)
    self._bar.n, self._bar.total = done, total or None
    self._bar.refresh()
    self._printed = now

  def _close(self) -> None:
    if self._bar is not None:
      self._bar.close()
      self._printed = time.monotonic()
    self._bar = self._shown_phase = None


@contextlib.contextmanager
def phase(name: str, shown: bool) -> Iterator[None]:
  """A phase of its own, before there is a run folder."""
  with Progress(shown=shown) as progress, progress.phase(name):
    yield
