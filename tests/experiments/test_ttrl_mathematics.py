"""Which answers are one as mathematics, whatever a model wrote."""

import json
import signal
import subprocess

import pytest

from experiments.ttrl import mathematics
from searchrl_jax.rewards import equivalence

pytestmark = pytest.mark.slow

MATH = 'experiments.ttrl.mathematics.equal'


@pytest.mark.parametrize(
  'a, b',
  [
    ('0.5', r'\frac12'),
    (r'\frac{2}{4}', '1/2'),
    ('1,000', '1000'),
    (r'4\frac{2}{3}', r'\frac{14}{3}'),
    ('x = 5', '5'),
    ('5', 'x = 5'),
    (r'\{1, 2\}', '2, 1'),
    ('x^2 - 1', '(x-1)(x+1)'),
    (r'12\text{ cm}', '12'),
    (r'\left( 3, \frac{\pi}{2} \right)', r'(3,\frac{\pi}{2})'),
    # GPQA's letters, in every coat.
    ('A', '(A)'),
    ('A', r'\text{A}'),
    (r'\text{Evelyn}', r'\text{evelyn}'),
  ],
)
def test_one_value_is_one_answer(a, b):
  assert mathematics.equal(a, b) and mathematics.equal(b, a)
  assert equivalence.correct(a, [b], MATH) == 1
  assert equivalence.keys([a, b], MATH) == [a, a]


@pytest.mark.parametrize(
  'a, b',
  [
    (r'\frac{14}{3}', '3'),
    ('(1, 2)', '(2, 1)'),
    ('B', 'C'),
    ('p - q', 'q - p'),
    (r'\infty', r'-\infty'),
    (r'\text{east}', r'\text{west}'),
  ],
)
def test_other_values_are_other_answers(a, b):
  assert not mathematics.equal(a, b) and not mathematics.equal(b, a)
  assert equivalence.keys([a, b], MATH) == [a, b]


@pytest.mark.parametrize(
  'text',
  ['', ' ', '}{', '((((', 'Evelyn', 'Bobu Ralen', 'the answer is', '3 apples'],
)
def test_what_is_no_mathematics_says_nothing(text):
  """The package alone takes words for products: anagrams would be equal."""
  assert equivalence.keys([text], MATH) == [None]
  assert equivalence.correct(text, [text, text[::-1]], MATH) == 0
  assert equivalence.correct(None, ['5'], MATH) == 0


def test_an_answer_joins_the_first_that_it_is_equal_to():
  # To math-verify 50% is both 50 and 0.5, which are two.
  assert equivalence.keys(['50', '0.5', r'50\%'], MATH) == ['50', '0.5', '50']
  assert equivalence.keys([r'50\%', '50', None, '0.5'], MATH) == [
    r'50\%',
    r'50\%',
    None,
    r'50\%',
  ]


@pytest.fixture
def checker(monkeypatch):
  monkeypatch.setattr(mathematics, 'SECONDS', 1.0)
  made = mathematics._Checker()
  yield made
  made._process.kill()


def test_what_never_ends_is_ended_and_the_next_is_answered(checker):
  """Answers are a model's, and training waits for them."""
  assert checker.ask('1', '1.0')
  first = checker._process
  assert checker.ask('30000000!', '5') is None
  assert first.returncode == -signal.SIGALRM
  assert checker.ask('1', '1.0') and checker._process.pid != first.pid


def test_a_process_that_is_gone_is_started_again(checker):
  assert checker.ask('1', '1.0')
  checker._process.kill()
  checker._process.wait()
  assert checker.ask('2', '4/2')


def test_an_answer_that_takes_too_long_costs_that_once(monkeypatch):
  asked = []

  class Slow:
    def ask(self, a, b):
      asked.append((a, b))
      return None if 'slow' in (a, b) and a != b else a == b

  monkeypatch.setattr(mathematics, '_CHECKER', Slow())
  for cached in (mathematics.equal, mathematics.known):
    cached.cache_clear()
  votes = ['3', 'slow', '4', 'slow', 'slow']
  assert equivalence.keys(votes, MATH) == ['3', None, '4', None, None]
  assert [pair for pair in asked if 'slow' in pair] == [
    ('slow', 'slow'),
    ('slow', '1'),
  ]
  for cached in (mathematics.equal, mathematics.known):
    cached.cache_clear()


def test_towers_do_not_stop_a_run(checker):
  for tower in (
    '9^{9^{9^9}}',
    r'\sum_{k=1}^{10^{12}} k^k',
    '(' * 3000,
    '1' * 100_000,
    r'\boxed{' * 1000,
    '2^{2^{40}}',
    '}' * 9 + '\n\n"',
  ):
    assert not checker.ask(tower, '5'), tower
    assert checker.ask('5.0', '5')


def test_the_absence_of_the_package_is_named(monkeypatch):
  real = subprocess.Popen

  def start(command, **kw):
    return real([command[0], '-c', 'raise SystemExit(1)'], **kw)

  monkeypatch.setattr(subprocess, 'Popen', start)
  with pytest.raises(RuntimeError, match='math-verify, which did not start'):
    mathematics._Checker().ask('1', '1')


def test_every_golden_answer_of_math_500_is_itself(data_dir):
  records = json.loads((data_dir / 'math500.json').read_text())
  golds = [r['answer'] for r in records]
  wrong = [g for g in golds if not equivalence.correct(g, [g], MATH)]
  assert wrong == [] and len(golds) == 500
