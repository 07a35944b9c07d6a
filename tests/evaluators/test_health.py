import pytest

from searchrl_jax.evaluators import health
from searchrl_jax.types import Question
from tests.fakes import FakeSource, make_env, run_script

ENV = make_env()
THINK = '<think>a</think>'


def question():
  return Question('q', 'Who is it?', ('Ann',))


def test_health():
  question_ = Question('q', 'Who is it?', ('Ann',))

  def one(*turns, **kw):
    return run_script(turns, env=ENV, question=question_, **kw)

  good = one(THINK + '<search>Who is it?</search>', '<answer>Ann</answer>')
  cut = one('<think>' + 'abcd' * 49, *['<answer>x</answer>'])
  failed = one(
    '<search>a</search>', source=FakeSource(fails=lambda q, attempt: True)
  )
  found = health.signs([(good, cut), (failed,)], ENV, [0.5, 0.5, 0.0])
  assert found['health/failed'] == 1
  assert found['health/searches'] == 0.5 and found['health/copied'] == 1.0
  assert found['health/valid_format'] == 0.5
  assert found['health/answered'] == 1.0 and found['health/guessed'] == 0.5
  assert found['health/invalid_actions'] == 0.5
  # '<think>a</think>' has 16 bytes; the other thought is the turn's 200
  # tokens, that is 7 + 193 of its bytes and more that was cut off.
  assert found['health/think_tokens'] == (16 + 200) / 2
  assert found['health/zero_variance'] == 1.0  # one group of two, both 0.5
  assert set(found) >= {'health/repetition', 'health/end_tokens'}


def test_zero_variance_looks_at_each_group_without_failed_ones():
  def one(failed=False):
    source = FakeSource(fails=lambda q, attempt: True) if failed else None
    turn = '<search>a</search>' if failed else '<answer>x</answer>'
    return run_script((turn,), env=ENV, question=question(), source=source)

  a, bad = one(), one(failed=True)
  groups = [(a, a), (a, a), (a, a, bad), (a, bad)]
  values = [0, 1, 1, 1, 0, 0, 9, 1, 1]
  found = health.signs(groups, ENV, values)
  # Groups: mixed, equal, equal but for the failed one, too small: 2 of 3.
  assert found['health/zero_variance'] == pytest.approx(2 / 3)


def test_repetition():
  def of(*turns):
    trajectory = run_script(turns, env=ENV, question=question())
    return health.repetition(trajectory)

  # 'abcdabcdabcd</...' cannot be told apart from its tags, so: 4-grams of
  # 'xyxyxyxy' + '<answer>z</answer>'. 26 bytes give 23 4-grams; xyxy occurs 3
  # times and yxyx 2 times, 3 repeats; the closing tag repeats 'answ', 'nswe',
  # 'swer', 'wer>': 4 more. 7 / 23.
  assert of('xyxyxyxy<answer>z</answer>') == pytest.approx(7 / 23)
  # Turns are not joined, yet what was said in one counts in the next.
  assert of('<search>a</search>', '<search>a</search>',
            '<answer>z</answer>') > 0.3
