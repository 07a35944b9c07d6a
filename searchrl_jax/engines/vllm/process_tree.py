"""A process and all its descendants, which end with this process.

vLLM's server is three processes: the API, the engine core and a worker for
each device. If the API is killed by force, the other two keep running and keep
the device's memory. `ProcessTree` therefore signals the whole process group,
and a guard process, in a separate session, ends the group if this process is
killed.
"""

import contextlib
import functools
import os
import signal
from subprocess import DEVNULL, PIPE, STDOUT, Popen
import time

import psutil

_POLL_S = 0.1

# A shell's commands, with the number of the group and `grace_s`. Only this
# process holds the write end of the guard's stdin, so `cat` returns when this
# process ends for any reason.
_GUARD = 'cat; kill -s TERM -- -$0 && sleep $1 && kill -s KILL -- -$0'


class ProcessTree:
  """A command, running as the leader of its own process group."""

  def __init__(
    self, command: list[str], env: dict[str, str], log, grace_s: float
  ):
    """Starts `command`.

    Args:
      log: an open file for its output.
      grace_s: seconds from SIGTERM to SIGKILL.
    """
    self._grace_s = grace_s
    # In a separate session, so that Ctrl-C reaches only this process, which can
    # then save and stop the group.
    start = functools.partial(Popen, start_new_session=True)
    self._process = start(
      command, env=env, stdin=DEVNULL, stdout=log, stderr=STDOUT
    )
    self.pid = self._process.pid  # of the command, and the group's number
    # The command's exit status (-n: killed by signal n), None if it runs.
    self.poll = self._process.poll
    guard = ['sh', '-c', _GUARD, str(self.pid), str(grace_s)]
    self._guard = start(guard, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL)

  def members(self) -> list[int]:
    """The running processes of the group, without zombies."""
    out = []
    for process in psutil.process_iter(['status']):
      with contextlib.suppress(ProcessLookupError):
        # A zombie holds no memory, and its parent may never reap it.
        runs = process.info['status'] != psutil.STATUS_ZOMBIE
        if runs and os.getpgid(process.pid) == self.pid:
          out.append(process.pid)
    return out

  def stop(self) -> None:
    """Ends every process of the group: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
      if self.members():
        with contextlib.suppress(ProcessLookupError):
          os.killpg(self.pid, number)
      deadline = time.monotonic() + self._grace_s
      while self.members() and time.monotonic() < deadline:
        self.poll()
        time.sleep(_POLL_S)
    self._process.wait()
    # Last, so that the guard ends the group if this process is killed before.
    self._guard.kill()
    self._guard.wait()
    self._guard.stdin.close()
