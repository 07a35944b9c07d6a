"""Memory of processes, and disk of folders (Linux)."""

import contextlib
import pathlib
import threading

_SECONDS = 0.02  # between two looks of `Peak`


def of(field: str, pid: int | str = 'self') -> int:
  """A field of a process's status in bytes: VmRSS, VmHWM (the peak), RssAnon.

  RssAnon is memory that no file backs, RssFile that mapped from files.
  """
  status = pathlib.Path(f'/proc/{pid}/status').read_text()
  return int(status.partition(f'{field}:')[2].split()[0]) << 10


def restart_peak(pid: int | str = 'self') -> None:
  """VmHWM counts from now on."""
  pathlib.Path(f'/proc/{pid}/clear_refs').write_text('5')


def used(folder: pathlib.Path) -> int:
  """Bytes that files take on the disk, holes left out."""
  total = 0
  for path in folder.rglob('*'):
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
      total += path.stat().st_blocks * 512
  return total


class Peak:
  """The most memory that no file backs, and disk, while its block runs.

  Attributes:
    start: bytes of memory before.
    bytes: the most bytes of memory.
    disk: the most bytes of the files in the folder, if one was given.
  """

  def __init__(self, folder: pathlib.Path | None = None):
    self._folder = folder

  def __enter__(self):
    self.start = self.bytes = of('RssAnon')
    self.disk, self._done = 0, threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def __exit__(self, *unused):
    self._done.set()
    self._thread.join()

  def _watch(self):
    while True:
      self.bytes = max(self.bytes, of('RssAnon'))
      if self._folder:
        self.disk = max(self.disk, used(self._folder))
      if self._done.wait(_SECONDS):
        return
