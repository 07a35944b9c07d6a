"""Anonymous resident memory of this process, for tests of memory bounds."""

import ctypes
import gc
import re
import threading
import time

_SECONDS = 0.005  # between samples
_LIBC = ctypes.CDLL(None)
_PR_SET_THP_DISABLE = 41


def anonymous() -> int:
  """Bytes of resident memory that no file backs (Linux)."""
  with open('/proc/self/smaps_rollup') as f:
    return int(re.search(r'Anonymous:\s+(\d+) kB', f.read())[1]) * 1024


def trim():
  """Gives freed memory back, so that using it again is seen."""
  gc.collect()
  _LIBC.malloc_trim(0)


class Peak:
  """Samples while its block runs; `peak`, `start`, `end` in bytes."""

  def __enter__(self):
    # A page of 2 MB would count whole, however little of it is used.
    _LIBC.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    trim()
    self.start = self.peak = anonymous()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run)
    self._thread.start()
    return self

  def __exit__(self, *exc):
    self._stop.set()
    self._thread.join()
    _LIBC.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)
    self.end = anonymous()
    self.peak = max(self.peak, self.end)

  def _run(self):
    while not self._stop.is_set():
      self.peak = max(self.peak, anonymous())
      time.sleep(_SECONDS)
