"""A process and all its descendants, which never outlive this process.

vLLM's server is three processes: the API, the engine core and a worker for
each device. Killed by force, the API leaves the other two behind, with the
device's memory. So the whole group is ended together, and a guard, in a
session of its own, ends it when this process is killed by force.
"""

import os
import signal
import subprocess
import sys
import time

import psutil

_POLL_S = 0.1

# Its stdin is a pipe that this process alone holds open: it ends with us.
_GUARD = """
import os, signal, sys, time
group, seconds = int(sys.argv[1]), float(sys.argv[2])
sys.stdin.buffer.read()
try:
  os.killpg(group, signal.SIGTERM)
  time.sleep(seconds)
  os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
  pass
"""


class Group:
  """A command, running as the leader of a process group of its own."""

  def __init__(
    self, command: list[str], env: dict[str, str], log, grace_s: float
  ):
    """Starts `command`.

    Args:
      log: an open file that gets its output.
      grace_s: seconds from SIGTERM to SIGKILL.
    """
    self._grace_s = grace_s
    self._process = subprocess.Popen(
      command,
      env=env,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      self._guard = subprocess.Popen(
        [sys.executable, '-S', '-c', _GUARD, str(self.pid), str(grace_s)],
        stdin=subprocess.PIPE,
        start_new_session=True,
      )
    except BaseException:
      os.killpg(self.pid, signal.SIGKILL)
      raise

  @property
  def pid(self) -> int:
    """Of the command, and the group's number."""
    return self._process.pid

  def poll(self) -> int | None:
    """The command's exit status (-n: killed by signal n), None if it runs."""
    return self._process.poll()

  def members(self) -> list[int]:
    """The processes of the group that still run."""
    out = []
    for process in psutil.process_iter(['status']):
      try:
        # A zombie holds nothing; who has to reap it may never do so.
        if (
          os.getpgid(process.pid) == self.pid
          and process.info['status'] != psutil.STATUS_ZOMBIE
        ):
          out.append(process.pid)
      except ProcessLookupError:
        continue
    return out

  def stop(self) -> None:
    """Ends every process of the group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
      self._signal(number)
      deadline = time.monotonic() + self._grace_s
      while self.members() and time.monotonic() < deadline:
        self._process.poll()
        time.sleep(_POLL_S)
    self._process.wait()
    # Only now: until here the guard stood in for us.
    self._guard.kill()
    self._guard.wait()
    self._guard.stdin.close()

  def _signal(self, number: int) -> None:
    if self.members():
      try:
        os.killpg(self.pid, number)
      except ProcessLookupError:
        pass
