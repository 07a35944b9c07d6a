"""Which answers are one as mathematics, whatever a model wrote."""

import json
import signal
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from experiments.ttrl import math500, mathematics, values
from searchrl_jax.rewards import equivalence

pytestmark = pytest.mark.slow

MATH = 'experiments.ttrl.mathematics.equal'
# What stands between 1 and 234 in a number.
SEPARATORS = (
  r'\thinspace |\medspace |\thickspace |\negthinspace |\negmedspace |\enspace |'
  r"\hspace{1mm}|\, |{\,}|{ }|{}|\mathord{,}|\mathpunct{,}|_|\_|'|٬"
).split('|')


@pytest.mark.parametrize(
  'a, b',
  [
    ('0.5', r'\frac12'),
    (r'\frac{2}{4}', '1/2'),
    (r'4\frac{2}{3}', r'\frac{14}{3}'),
    ('1 4/5', '9/5'),
    ('x = 5', '5'),
    ('5', 'x = 5'),
    ('f(2) = 5', '5'),
    (r'\{1, 2\}', '2, 1'),
    ('x = 1 or x = 2', '1, 2'),
    (r'1 \pm \sqrt2', r'1-\sqrt2, 1+\sqrt2'),
    ('p=5,q=2;p=7,q=2', '(5,2),(7,2)'),
    ('x^2 - 1', '(x-1)(x+1)'),
    ('x', r'\frac{2x}{2}'),
    ('x^2/4 + y^2/3 = 1', 'x^2/16 + y^2/12 = 1/4'),
    (r'-2 \le x \le 7', '[-2,7]'),
    (r'\left( 3, \frac{\pi}{2} \right)', r'(3,\frac{\pi}{2})'),
    # Separators of thousands, decimal commas, numbers of programs.
    ('1,000', '1000'),
    (r'1\,234', '1234'),
    ('1 234 567.5', '1,234,567.5'),
    (r'12{,}345', r'12,\!345'),
    ('x = 1,234', '1234'),
    *((f'1{mark}234', '1234') for mark in SEPARATORS),
    ('1_000_000', '1000000'),
    (r'(1{,}234, 5)', '(1234, 5)'),
    (r'3.141\,592', '3.141592'),
    ('0{,}5', '0.5'),
    ('1e3', '1000'),
    ('6.72e-05', '.0000672'),
    ('5 million', '5000000'),
    ('2**10', '1024'),
    ('x**2', 'x^2'),
    # Unicode.
    ('√2', r'\sqrt{2}'),
    ('√16', '4'),
    ('√1,600', '40'),
    ('2 + √13', r'2+\sqrt{13}'),
    ('sqrt 144', '12'),
    ('2·3', '6'),
    ('5²', '25'),
    ('x²', 'x^2'),
    ('3 × 10⁻⁸', r'3\times 10^{-8}'),
    ('101₂', '101_2'),
    ('½', '0.5'),
    ('1½', '3/2'),
    ('１／２', '0.5'),
    ('＋5', '5'),
    ('(−∞, 3)', r'(-\infty,3)'),
    ('x ∈ ℝ', r'x \in \mathbb{R}'),
    ('∅', r'\emptyset'),
    ('9.8 m/s²', r'9.8\text{ m}/\text{s}^2'),
    (r'5\text{ cm²}', '5 cm²'),
    # Decimals that do not end.
    (r'0.\overline{3}', r'\frac13'),
    (r'0.1\bar6', '1/6'),
    ('0.(3)', '0.333...'),
    (r'0.\dot14285\dot7', '1/7'),
    ('0.166667', '1/6'),
    ('(1.41421, 1)', r'(\sqrt2, 1)'),
    # Units, where they are left out or say the same.
    (r'12\text{ cm}', '12'),
    ('12 inches', r'12\text{ in}'),
    (r'15\mbox{ cm}^2', '15 square centimeters'),
    (r'1\text{ m}', '100 cm'),
    ('36 km/h', r'10\text{ m}/\text{s}'),
    (r'\$0.50', '50 cents'),
    ('5 apples', '5'),
    ('90 degrees', r'90^\circ'),
    ('90°', '90'),
    (r'20^\circ\text{C}', '20'),
    (r'20^\circ\text{C}', '20°C'),
    ('72 °F', '72 degrees Fahrenheit'),
    (r'\sin 30^\circ', '0.5'),
    (r'\sin 30\text{ degrees}', '0.5'),
    ('50 percent', '0.5'),
    ('20 per cent', r'20\%'),
    ('$36$', r'36^\circ'),
    ('$5', '500 cents'),
    ('3 m', '300 cm'),
    ('x = 3 m', '300 cm'),
    ('3 m', r'3\text{ m}'),
    ('5 metres', '5 m'),
    ('3 g', '3 grams'),
    ('1 kg', '1000 g'),
    ('2 L', '2000 mL'),
    ('100 km', '100000 m'),
    ('5 cubic meters', '5 m^3'),
    (r'12\text{ in}', r'1\text{ ft}'),
    ('60 min', '1 h'),
    ('1 day', '24 hours'),
    ('1 week', '7 days'),
    ('3 apples and 4 pears', '4 pears, 3 apples'),
    ('204_{5}', '204'),
    # Complex numbers.
    ('i^2', '-1'),
    ('(1+i)^2', '2i'),
    ('(1+i)x', 'x + ix'),
    (r'e^{i\pi}', '-1'),
    (r'\sum_{i=1}^{3} i', '6'),
    (r'3+4\text{i}', '3+4i'),
    # Times.
    ('2:30 pm', r'2\!:\!30\text{ p.m.}'),
    ('14:30', '2:30 PM'),
    ('12:00', '12:00 am'),
    ('5:12', r'\frac{5}{12}'),
    # Words, and GPQA's letters, in every coat.
    (r'\text{Evelyn}', 'evelyn.'),
    (r'\text{no solution}', 'No solution'),
    ('Ann and Bob', 'Bob and Ann'),
    ('xy', 'yx'),
    ('A', '(A)'),
    ('A', r'\text{(A)}.'),
    ('A', r'\mathbf{A}'),
    ('A', r'\boldsymbol{A}'),
    # Other spellings of a formula.
    ('sqrt(2)', r'\sqrt2'),
    (r'\frac 1 2', '0.5'),
    (r'(\pm1,2)', '(1,2),(-1,2)'),
    (r'\varnothing', r'\emptyset'),
    (r'\mathbb R', r'\mathbb{R}'),
    (r'\vec v', r'\vec{v}'),
    (r'\{1, 2, \dots\}', r'\{1,2,…\}'),
    # Closing punctuation and other dress.
    ('25.', '25'),
    ('25?', '25'),
    ('２５。', '25'),
    ('= 25', '25'),
    ('≈ 3.14', '3.14'),
    (r'\approx3.14', '3.14'),
    (r'$\frac12$.', '0.5'),
    (r'\boxed{(2,1)}', '(2, 1),'),
    ('**73**', '73'),
    ('−5', '-5'),
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
    ('0.5', '5'),
    ('p - q', 'q - p'),
    (r'\infty', r'-\infty'),
    # Small and large numbers.
    (r'1.6\times 10^{-19}', r'9.1\times 10^{-31}'),
    (r'\frac{1}{2004!}', r'\frac{1}{2006!}'),
    (r'\frac{2^{2005}+1}{3\cdot2^{2006}}', r'\frac{1}{3\cdot2^{2006}}'),
    (r'10^{-20}\pi', r'2\cdot 10^{-20}\pi'),
    ('10^{-20}x', r'2\cdot 10^{-20}x'),
    ('(10^{-20}, 1)', '(0, 1)'),
    ('10^{50}', '10^{50}+1'),
    ('.0000672', '.0000671'),
    ('16386.20', '16386.17'),
    ('100000.5', '100000'),
    ('0.3333', '1/3'),
    # Spaces and letters.
    (r'1\,234', '235'),
    ('1 234 567', '802'),
    *((f'1{mark}234', '235') for mark in SEPARATORS),
    ('1_000_000', '1'),
    ('10²', '102'),
    ('1½', '11/2'),
    ('101₂', '1012'),
    ('ℝ', 'R'),
    ('no', 'on'),
    ('AB', 'BA'),
    ('II', '-1'),
    (r'\text{east}', r'\text{west}'),
    ('B', 'C'),
    ('3t', '3'),
    ("f'(x)", 'f(x)'),
    # Order.
    ('(1, 2)', '(2, 1)'),
    ('(2,1)', '1,2'),
    ('(2,1)', r'\{1,2\}'),
    ('(1,234)', '1234'),
    ('[1,2]', '(1,2)'),
    ('1, 2, …', '1, 2'),
    (r'\{1, 2, \ldots\}', r'\{1, 2\}'),
    (r'1+2+\cdots+n', 'n+3'),
    # Units, bases, times.
    ('12 inches', '12 cm'),
    (r'\$36', r'36^\circ'),
    ('3 m', '3 cm'),
    ('m', '1 meter'),
    ('20°C', '20°F'),
    ('7 weeks', '7 days'),
    ('5 euros', '5 dollars'),
    ('5 meters', '5 apples'),
    ('3 apples and 4 pears', '4 apples and 3 pears'),
    ('40_9', '40_8'),
    ('1A3_{16}', '3A1_{16}'),
    ('2:30 pm', '2:30 am'),
    ('5 pm', '5 am'),
    ('5 pm', '5 cm'),
    ('2:30', '1:15'),
    # An equation is no number, and two without a solution are not one.
    ('2x+3y=5', '5'),
    ('x=5', 'y=5'),
    ('x^2+1=0', 'x^2+2=0'),
  ],
)
def test_other_values_are_other_answers(a, b):
  assert not mathematics.equal(a, b) and not mathematics.equal(b, a)
  assert equivalence.keys([a, b], MATH) == [a, b]


@pytest.mark.parametrize(
  'text',
  [
    '',
    ' ',
    '.',
    '}{',
    '((((',
    '1/0',
    '12 34',
    r'12\quad 345',
    '1_0000',
    '1.234.567',
    '0x1F',
    'half of 4',
  ],
)
def test_what_is_no_mathematics_says_nothing(text):
  assert equivalence.keys([text], MATH) == [None]
  assert equivalence.correct(text, [text, text[::-1]], MATH) == 0
  assert equivalence.correct(None, ['5'], MATH) == 0


NUMBERS = st.builds(
  lambda sign, whole, end: sign + str(whole) + end,
  st.sampled_from(['', '-']),
  st.integers(1, 10**9),
  st.sampled_from(['', '.5', '.0625', r'\pi', r'\sqrt{7}', 'x^2', '^2']),
)
ANSWERS = (
  NUMBERS
  | st.sampled_from(
    'even|\\text{no one}|AB|\\frac{3}{7}|2+3i|x=4|7_8|3:05'.split('|')
  )
  | st.builds(
    lambda form, parts: form % ', '.join(parts),
    st.sampled_from(['%s', '(%s)', r'\{%s\}', '[%s, 10^{12}]']),
    st.lists(NUMBERS, min_size=2, max_size=3),
  )
)
DRESS = st.sampled_from(
  (
    r'%s.|%s?|%s。|= %s|$%s$|\boxed{%s}| %s ,|\(%s\).|\displaystyle %s|**%s**'
  ).split('|')
)
# No powers and factorials: what takes for ever is tested elsewhere.
PIECES = [*'0123456789.,;:+-*/=<>_{}()[]|$%\'" abixyE\n°é\ud800²₁½…∞＝'] + (
  r'\frac \sqrt \text{ \pm \, \left( \infty \overline{ \sin ^\circ \{ \cup '
  r'and cm even pm 10 1/2 ** \thinspace m'
).split()
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map(''.join)


@settings(max_examples=40)
@given(ANSWERS, DRESS)
def test_an_answer_is_itself_in_any_dress(answer, dress):
  assert values.equal(answer, answer)
  assert values.equal(answer, dress % answer)


@settings(max_examples=100)
@given(TEXTS, TEXTS | ANSWERS)
def test_equality_is_symmetric_and_never_raises(a, b):
  found = values.equal(a, b)
  assert values.equal(b, a) is found
  assert mathematics.equal(a, b) is mathematics.equal(b, a) is found


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


def test_a_process_that_is_gone_is_started_again(checker, monkeypatch):
  assert checker.ask('1', '1.0')
  checker._process.kill()
  checker._process.wait()
  with monkeypatch.context() as m:  # it goes between the look and the question
    m.setattr(checker._process, 'poll', lambda: None)
    assert checker.ask('2', '4/2') is None
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


@pytest.mark.long
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
  with pytest.raises(RuntimeError, match='math-verify'):
    mathematics._Checker().ask('1', '1')


@pytest.mark.long
def test_every_golden_answer_of_math_500_is_itself(data_dir):
  records = json.loads((data_dir / 'math500.json').read_text())
  golds = [r['answer'] for r in records]
  wrong = [
    (gold, dress)
    for gold in golds
    for dress in ('%s', '%s.', '%s。', '= %s', r'\boxed{%s}')
    if not equivalence.correct(dress % gold, [gold], MATH)
  ]
  assert wrong == [] and len(golds) == 500


def test_golden_answers_of_math_500_that_are_equal_have_a_reason():
  for answer, other, reason in math500.read():
    assert mathematics.equal(answer, other) and reason
