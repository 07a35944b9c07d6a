r"""What the text of a mathematical answer means, and when two mean the same.

latex2sympy parses a formula, and math-verify compares two: it simplifies,
solves equations, and knows sets. `notation` rewrites what people write around a
formula, and this module decides where these packages (1.11.0, 0.9.0) are wrong:
  * Numbers: they round decimals to 6 places and compare others to within
    1e-15, so that all small numbers are equal. Here decimals and fractions are
    exact; a number that has no finite decimal (1/3, pi) equals a decimal of
    the same first six digits; all else is compared to 40 digits.
  * Spaces: 1 234 is a product to them, and 1 4/5 is 4/5. Here separators of
    thousands and mixed numbers are read, and other numbers side by side are no
    answer.
  * Unicode: they do not know 5², ½ and full-width digits, which are read here.
  * Letters: no = on, AB = BA, and 3t = 3 as t is a unit. Here a text of letters
    is a word, unless it may be a product of variables (xy), and a unit is a
    word or an abbreviation behind a number. The m of 3 m is a unit only beside
    one that is surely a unit (300 cm).
  * Order: (2, 1) = {1, 2}. Here a pair is no list of answers.
  * Equations: 2x + 3y = 5 is 5, and two without a real solution are one. Here
    only a name can be left out (x = 5, f(2) = 5).
  * Times, bases, repeating decimals, degrees in an angle function, i: suffixes
    and bases are dropped, and i is a variable.

A unit or the base of a numeral may be left out; where both texts have one, they
have to agree (1 m = 100 cm). What SymPy does not know as a unit agrees with the
same word alone. 50% is both 50 and 0.5. So equality is not transitive.
"""

import functools
import re
from typing import Any, NamedTuple

import latex2sympy2_extended as latex
import math_verify
from math_verify import grader
import sympy
from sympy.core.function import AppliedUndef
from sympy.physics import units

from experiments.ttrl import notation


def equal(a: str, b: str) -> bool:
  """Whether both are mathematics, and of one value; never raises.

  It may take for ever, or all memory: `mathematics.equal` does not.
  """
  try:
    x, y = parse(a), parse(b)
    return x is not None and y is not None and _same(x, y)
  except Exception:  # of SymPy, anything: a model wrote this
    return False


class Measured(NamedTuple):
  """A value with its unit, or with the base of its numeral."""

  value: Any
  unit: sympy.Expr


class Clock(NamedTuple):
  """A time of the day, or a ratio that looks like one."""

  hour: int
  rest: tuple[int, int]  # minutes, seconds
  half: str  # a, p; empty = not said
  value: Any  # as a ratio, or of the hour alone; None = it is a time


def parse(text: str) -> Any:
  """Returns what a text means; None if it is no mathematics.

  Returns:
    A SymPy object, Measured, Clock, a list of these (in any order), or a list
    of tuples of these (in order).

  Raises:
    Exception: of any kind, from the parser.
  """
  groups = [
    [
      _element(sign)
      for part in notation.split(group, ',')
      for sign in notation.signs(part)
    ]
    for group in notation.split(notation.cleaned(text), ';')
  ]
  found = sum(groups, [])
  if any(value is None for value in found):
    return None
  if len(groups) > 1 and min(map(len, groups)) > 1:
    return [tuple(group) for group in groups]  # x=1, y=2; x=3, y=4
  return found[0] if len(found) == 1 else found or None


# ---- One of the answers.

_LETTER = notation.LETTER
_WORD = re.compile(rf'(?=.*{_LETTER}.*{_LETTER})(?:{_LETTER}|[ \'.,:!?()-])+')
_SHORT = re.compile(rf'{_LETTER}{{2,3}}(?: +{_LETTER}{{1,3}})*')
_PRODUCT = re.compile('[a-dw-z]+|[b-df-hj-np-tv-z]+')  # spell no word
_GLUED = re.compile(r'[\w)}]\s*\\text\{|\\text\{[^{}]*\}\s*[\w\\({]')
_CLOCK = re.compile(
  r'(\d{1,2})(?:\s*:\s*([0-5]\d)(?:\s*:\s*([0-5]\d))?)?\s*(?:([ap])\.?\s?m)?\.?',
  re.IGNORECASE,
)
_NUMERAL = re.compile(r'(-?(?=[A-F]*\d)[\dA-F]+)\s*_\s*\{?\s*(\d\d?)\s*\}?')
_MONEY = re.compile(r'(-?)\s*\\?\$\s*(.+)', re.DOTALL)
_UNIT = r'(?:\\text\{[^{}]*\}|\^\\circ|\\?%)\s*(?:\^\s*\{?-?\d\}?)?'
_MEASURED = re.compile(
  rf'(.*?[\w)}}\]|!])\s*((?:(?:/|\\cdot)?\s*{_UNIT}\s*)+)', re.DOTALL
)
_ANGLE = re.compile(r'\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])')
_LETTER_I = re.compile(r'(\\text\{[^{}]*\}|\\[A-Za-z]+|\w*_\{?\w*)|[iI]')
_COUNTED_I = re.compile(r'_\s*\{\s*i\s*[=\\]')  # by a sum
_NORMAL = latex.NormalizationConfig(
  basic_latex=True, malformed_operators=True, nits=True, boxed='none'
)


@functools.lru_cache(maxsize=1 << 14)
def _element(text):
  """What it means; None if it is no mathematics."""
  if m := notation.TEXT.fullmatch(text):
    if _WORD.fullmatch(m[1]):
      return _word(m[1])
    text = notation.marked(m[1])
  if _SHORT.fullmatch(text) and not _PRODUCT.fullmatch(text):
    return _word(text)
  if m := _CLOCK.fullmatch(re.sub(r'\\text|[{}]', '', text)):
    hour, *rest, half = m.groups(default='')
    if int(hour) <= 24 and (rest[0] or half):
      minute, second = (int(n or 0) for n in rest)
      is_time = second or (half and minute) or not (half or minute)
      value = None if is_time else sympy.Rational(int(hour), minute or 1)
      return Clock(int(hour), (minute, second), half.lower(), value)
  if m := _NUMERAL.fullmatch(text):
    plain = m[1].strip('-').isdecimal()
    value = sympy.Integer(m[1]) if plain else sympy.Symbol(m[1])
    return Measured(value, sympy.Symbol(f'base {m[2]}'))
  unit = None
  if m := _MONEY.fullmatch(text):
    text, unit = m[1] + m[2], _DOLLAR
  angle = bool(_ANGLE.search(text))
  if angle:
    text = re.sub(r'\\text\{deg(?:rees?)?\}', r'^\\circ ', text)
  m = _MEASURED.fullmatch(text)
  if m and not (angle and 'circ' in m[2]):
    text, unit = m[1], _unit(m[2])
  value = None if _GLUED.search(text) else _formula(text, angle)
  if value is None or unit is None:
    return value
  name = _named(value)
  return Measured(name[1] if name else value, unit)


def _word(text):
  words = re.findall(rf'{_LETTER}+', text.casefold())
  return sympy.Symbol(' '.join(words), real=True)


def _formula(text, angle):
  """The SymPy object of a formula; None if it has no value."""
  numbers = _LETTER_I.sub(lambda m: m[1] or '{I}', text)
  first = text if _COUNTED_I.search(text) else numbers
  for attempt in dict.fromkeys((first, text)):
    try:
      value = latex.latex2sympy(
        attempt,
        is_real=True,
        convert_degrees=angle,
        normalization_config=_NORMAL,
      )
    except Exception:  # of the parser, anything
      continue
    if not isinstance(value, sympy.Basic | sympy.MatrixBase):
      return None
    return None if value.has(sympy.nan, sympy.zoo) else value
  return None


_TOKENS = re.compile(rf'{_LETTER}+|\^\s*\{{?-?\d\}}?|[/%€£¥]')
_BASE = [units.meter, units.kilogram, units.second, units.ampere, units.kelvin]
_PERCENT, _DOLLAR = sympy.symbols('percent dollar', positive=True)
_OURS = {'percent': _PERCENT, 'dollar': _DOLLAR, 'cent': _DOLLAR / 100}
_OURS |= {'mph': units.mile / units.hour, 'week': 7 * units.day}
_NAMES = dict(
  pair.split('=')
  for pair in (
    '%=percent percentage=percent pct=percent circ=degree in=inch oz=ounce '
    'lb=pound sec=second min=minute hr=hour yr=year'
  ).split()
)


def _unit(text):
  """A product of units, and of words that are none; None if it says nothing."""
  unit, last, sign, power = sympy.S.One, sympy.S.One, 1, 1
  for token in _TOKENS.findall(text.replace(r'\text', ' ')):
    if last == units.degree:
      token = {'C': 'Celsius', 'F': 'Fahrenheit'}.get(token, token)
    token = _NAMES.get(token.lower().removesuffix('s'), token)
    word = token.lower()
    if word in ('/', 'per'):
      sign = -1
    elif word in ('square', 'sq', 'cubic', 'cu'):
      power = 2 if word[0] == 's' else 3
    elif token[0] == '^':
      unit *= last ** (int(token.strip('^{ }')) - 1)
    elif word not in ('cdot', 'unit', 'units'):
      last = _known(token) or sympy.Symbol(word.removesuffix('s'))
      last, power = last ** (sign * power), 1
      unit *= last
  return None if unit == 1 else unit


def _known(name):
  """SymPy's unit of this name, in any number; None if there is none."""
  name = re.sub('(?<=met|lit)re', 'er', name)
  for one in (name, name.lower(), name.lower().removesuffix('s')):
    unit = _OURS.get(one, getattr(units, one, None))
    if isinstance(unit, units.Quantity | sympy.Symbol | sympy.Mul):
      return unit
  return None


# ---- Equality.

# Of a decimal and a number that has no finite one: six digits, rounded.
_TOLERANCE = sympy.Rational(5, 10**6)
_DIGITS = 50  # of irrational numbers, of which the last ten may be wrong
_NOISE = sympy.Rational(1, 10**40)
# Of two, the answer of the earlier kind is the first.
_KINDS = (Clock, Measured, list, sympy.Tuple | tuple)
_COMPARABLE = (
  sympy.Set | sympy.logic.boolalg.Boolean,  # equations, inequalities
  sympy.MatrixBase | sympy.MatrixExpr,
)


def _same(x, y) -> bool:
  """Whether two parsed answers are one."""
  if x is y:
    return True
  p, q = _named(x), _named(y)
  if p and q:
    return _same(p[1], q[1]) if p[0] == q[0] else _verified(x, y)
  if (p or q) and not (grader.is_relation(x) and grader.is_relation(y)):
    return _same(p[1], y) if p else _same(x, q[1])
  x, y = (list(z.args) if isinstance(z, sympy.FiniteSet) else z for z in (x, y))
  x, y = sorted((x, y), key=lambda z: [not isinstance(z, k) for k in _KINDS])
  match x, y:
    case Clock(), Clock():
      if not (x.half or y.half):
        return x == y
      return x.rest == y.rest and not _hours(x).isdisjoint(_hours(y))
    case Clock(), _:
      if x.half and isinstance(y, Measured):  # 5 pm is no 5 cm
        return False
      return x.value is not None and _same(x.value, y)
    case Measured(), Measured():
      ratio = sympy.simplify(units.convert_to(x.unit / y.unit, _BASE))
      return bool(ratio.is_number) and _same(
        x.value if ratio == 1 else _exact(x.value) * ratio, y.value
      )
    case Measured(), _:
      return (
        _same(x.value, y)
        or (x.unit == _PERCENT and _same(_exact(x.value) / 100, y))
        or ((letters := _lettered(y)) is not None and _same(x, letters))
      )
    case list(), _:
      y = y if isinstance(y, list) else [y]
      return all(any(_same(p, q) for q in y) for p in x) and all(
        any(_same(p, q) for p in x) for q in y
      )
    case sympy.Tuple() | tuple(), sympy.Tuple() | tuple():
      return len(x) == len(y) and all(map(_same, x, y))
    case sympy.Tuple() | tuple(), sympy.Interval():
      # (1, 2) was taken for an open interval.
      return bool(y.left_open and y.right_open) and _same(x, (y.start, y.end))
    case sympy.Interval(), sympy.Interval():
      alike = (x.left_open, x.right_open) == (y.left_open, y.right_open)
      return alike and _same(x.start, y.start) and _same(x.end, y.end)
    case sympy.MatrixBase(), sympy.MatrixBase():
      return x.shape == y.shape and all(map(_same, x.flat(), y.flat()))
    case sympy.Expr(), sympy.Expr():
      return _same_expression(x, y)
  return any(
    isinstance(x, kind) and isinstance(y, kind) for kind in _COMPARABLE
  ) and _verified(x, y)


def _lettered(x):
  """3 m as Measured, since its m may be a unit; None if it can be none."""
  if not isinstance(x, sympy.Mul):
    return None  # m alone is a variable
  known = {symbol: _known(symbol.name) for symbol in x.free_symbols}
  value, letters = _exact(x).as_independent(*known, as_Add=False)
  if None in known.values() or letters.as_powers_dict().keys() - known.keys():
    return None  # 3 x, or 3 (m + 1)
  return Measured(value, letters.xreplace(known))


def _hours(clock):
  """The hours of the day that a time may mean."""
  if clock.half:
    return {clock.hour % 12 + 12 * (clock.half == 'p')}
  return {(clock.hour + more) % 24 for more in (0, 12 * (clock.hour <= 12))}


def _named(x):
  """Returns (name, value) of x = 5, f(2) = 5 or 2 + 3 = 5; None of others."""
  if not grader.is_equation(x):
    return None
  name = grader.take_first_relation(x).lhs
  value = grader.take_last_relation(x).rhs
  is_name = (
    isinstance(name, AppliedUndef)
    or (latex.is_expr_of_only_symbols(name) and not name.has(sympy.Add))
    or not (name.free_symbols or value.free_symbols)
  )
  return (name, value) if is_name else None


def _same_expression(x, y):
  if x.is_Rational and y.is_Rational:
    return x == y
  a, b = _exact(x), _exact(y)
  if a == b:
    return True
  if a.is_infinite or b.is_infinite:
    return False
  symbols = sorted(a.free_symbols | b.free_symbols, key=str)
  if not symbols and 0 in (a, b):
    return bool((a - b).equals(0))
  # At one point they show that they differ, long before they are simplified.
  point = {symbol: 3 * n + 5 for n, symbol in enumerate(symbols)}
  gap = _gap(a.subs(point), b.subs(point))
  if symbols or gap is None:
    return (gap is None or bool(gap <= _NOISE)) and _verified(a, b)
  if any(
    z.has(sympy.Float) and _is_finite(c) and not _is_finite(d)
    for z, c, d in ((x, a, b), (y, b, a))
  ):
    return bool(gap <= _TOLERANCE)
  return not (a.is_Rational and b.is_Rational) and bool(gap <= _NOISE)


def _exact(x):
  """An expression without decimals, evaluated."""
  x = _fractions(x)
  try:
    return x.doit()
  except Exception:  # of SymPy, anything
    return x


def _fractions(x):
  """An expression or set with decimals as fractions."""
  return x.xreplace({f: sympy.Rational(str(f)) for f in x.atoms(sympy.Float)})


def _is_finite(x):
  """Whether a number can be written as a decimal."""
  return x.is_Rational and 10 ** x.q.bit_length() % x.q == 0


def _gap(p, q):
  """The relative difference of two numbers; None if that says nothing."""
  if not (p.is_Rational and q.is_Rational):
    p, q = p.evalf(_DIGITS), q.evalf(_DIGITS)
  size = sympy.Max(abs(p), abs(q))
  if 0 in (p, q) or not (abs(p - q).is_comparable and size.is_comparable):
    return None
  return abs(p - q) / size


def _verified(x, y):
  """What math-verify says of equations, sets, and expressions of variables."""
  x, y = (_fractions(z) if isinstance(z, sympy.Set) else z for z in (x, y))
  if isinstance(x, sympy.Eq) and isinstance(y, sympy.Eq):
    # It solves them, also in complex numbers, unless the symbols are real.
    x, y = (
      z.xreplace({s: sympy.Symbol(s.name) for s in z.free_symbols})
      for z in (x, y)
    )
  return any(  # it allows the second more forms than the first
    math_verify.verify(p, q, numeric_precision=100, timeout_seconds=None)
    for p, q in ((x, y), (y, x))
  )
