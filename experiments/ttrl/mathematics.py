r"""When two answers are one number, set, interval, expression, word, ...

0.5, 1/2 and \frac{2}{4} are one answer, and so are sets in any order.
`values.py` says what is read and what is compared.

A few tokens can ask for more than any computer has (a tower of powers), and
limits in Python are signals: they reach a main thread alone, and none while one
big operation runs. So `values` works in a process of its own, which is ended
when it takes too long; such an answer is equal to nothing.
"""

import functools
import json
import pathlib
import subprocess
import sys
import threading

SECONDS = 5.0  # for one comparison; usual ones take milliseconds
_MEMORY = 4 << 30  # bytes of its address space


class _Checker:
  """`values` in a process of its own; thread-safe."""

  def __init__(self):
    self._lock, self._process = threading.Lock(), None

  def ask(self, a: str, b: str) -> bool | None:
    """Whether they are equal; None if that takes more than SECONDS."""
    with self._lock:
      if self._process is None or self._process.poll() is not None:
        self._process = subprocess.Popen(
          [sys.executable, '-m', __name__, str(SECONDS)],
          text=True,
          cwd=pathlib.Path(__file__).parents[2],
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          start_new_session=True,  # Ctrl-C is for the run, which ends this
        )
        if not self._process.stdout.readline():
          raise RuntimeError(
            'answers of mathematics need the package math-verify, which did '
            'not start (its error stands above); pip install -r '
            'requirements.txt'
          )
      try:
        self._process.stdin.write(json.dumps([a, b]) + '\n')
        self._process.stdin.flush()
        said = self._process.stdout.readline()
      except BrokenPipeError:  # it was ended, by whatever
        said = ''
      if not said:
        self._process.wait()
      return {'True\n': True, 'False\n': False}.get(said)


_CHECKER = _Checker()


@functools.lru_cache(maxsize=1 << 17)
def equal(a: str, b: str) -> bool:
  """Whether both are mathematics, and of one value."""
  if a > b:
    return equal(b, a)  # symmetric, even where time runs out
  return known(a) and known(b) and (a == b or bool(_CHECKER.ask(a, b)))


@functools.lru_cache(maxsize=1 << 16)
def known(text: str) -> bool:
  """Whether it is mathematics, of a value that can be told from another."""
  return bool(_CHECKER.ask(text, text)) and (
    _CHECKER.ask(text, '1') is not None
  )


def serve(seconds: float) -> None:
  """Answers [a, b] with True or False, a JSON line each, until input ends.

  One that takes longer ends this process, unanswered.
  """
  import logging
  import resource
  import signal

  from experiments.ttrl import values

  out, sys.stdout = sys.stdout, sys.stderr
  logging.disable()  # that math-verify's own limits are off
  resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
  values.equal('1', '2')  # the first is slow, and nobody's fault
  print('ready', file=out, flush=True)
  for line in sys.stdin:
    # Nobody handles it, so the kernel ends this process, whatever it does.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    found = values.equal(*json.loads(line))
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(found, file=out, flush=True)


if __name__ == '__main__':
  serve(float(sys.argv[1]))
