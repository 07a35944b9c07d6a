"""Long phases are told; short ones, and other processes, are silent."""

import io
import re
import threading
import time

import pytest

from searchrl_jax.devices import cluster
from searchrl_jax.store.progress import Progress


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  for name, seconds in (('tick', 0.01), ('every', 0.1), ('patience', 0.05)):
    monkeypatch.setattr(Progress, name, seconds)


def wait(out: io.StringIO, text: str) -> None:
  end = time.monotonic() + 20
  while text not in out.getvalue():
    assert time.monotonic() < end, out.getvalue()
    time.sleep(0.005)


def test_a_log_has_lines_of_the_innermost_phase():
  out, done = io.StringIO(), []
  with Progress(out) as shown, shown.phase('evaluate'):
    wait(out, 'evaluate: 00:00\n')
    with shown.phase('eval', lambda: (len(done), 8)):
      wait(out, '0/8')
      done += [1, 2]
      wait(out, '2/8')
  lines = out.getvalue().split('\n')
  assert re.match(r'eval:  25%\|.*\| 2/8 \[00:0\d<', lines[-2]), lines
  assert '\r' not in out.getvalue() and '\x1b' not in out.getvalue()


def test_lines_are_as_far_apart_as_they_may_be():
  out = io.StringIO()
  shown = Progress(out)  # its thread is not started
  with shown.phase('compile'):
    (phase,) = shown._phases
    shown.print('a step')  # says enough
    begin = shown._printed
    for now, n in ((0.09, 0), (0.11, 1), (0.2, 1), (0.22, 2)):
      shown._show(phase, begin + now)
      assert out.getvalue().count('compile') == n


def test_a_terminal_has_a_bar_that_goes_away():
  out = Terminal()
  with Progress(out) as shown:
    with shown.phase('rollout', lambda: (3, 4)):
      wait(out, '3/4')
    drawn = out.getvalue()
    assert '75%' in drawn and drawn.endswith('   \r')  # erased
    assert '\n' not in drawn
    with shown.phase('update'):
      pass
    assert out.getvalue() == drawn  # too short to tell


def test_nothing_is_told_where_it_is_not_wanted(monkeypatch):
  out, before = io.StringIO(), threading.active_count()
  for shown, main in ((False, True), (True, False)):
    monkeypatch.setattr(cluster, 'main', lambda main=main: main)
    with Progress(out, shown) as told, told.phase('compile'):
      told.print('text')
      time.sleep(0.2)
      assert threading.active_count() == before
  assert out.getvalue() == ''


def test_a_phase_costs_next_to_nothing():
  with Progress(io.StringIO()) as shown:
    begin = time.thread_time()
    for _ in range(1000):
      with shown.phase('update'):
        pass
    # The shortest update of a quickstart takes 50 ms.
    assert (time.thread_time() - begin) / 1000 < 0.5e-3


def test_an_error_ends_the_phase():
  out = io.StringIO()
  with Progress(out) as shown:
    with pytest.raises(ZeroDivisionError), shown.phase('x'):
      raise ZeroDivisionError
    assert shown._phases == []
