"""A calculator: exact arithmetic, answered with text.

  config.tools.calculator = dict(module='calculator', cost=0.0)

Numbers, + - * / ** (or ^) and parentheses are computed as fractions, so 0.1 +
0.2 is 0.3. If a text cannot be computed, the answer is the reason, which the
policy reads. The length of the text and the size of every intermediate number
are bounded, so no input takes long.
"""

import ast
from collections.abc import Mapping, Sequence
from fractions import Fraction
import operator
import re
from typing import Any

from searchrl_jax.sources.core import Answer, Source
from searchrl_jax.text import calls
from searchrl_jax.types import SearchRequest, SearchResult

LENGTH = 200  # characters of an expression
BITS = 512  # of a numerator or denominator: about 154 digits
DECIMALS = 20  # digits after the point of a result that is not a fraction


class Unusable(ValueError):
  """The text cannot be computed; the message tells the policy why."""


def compute(expression: str) -> Fraction:
  """The value of an expression.

  Raises:
    Unusable: it is not an expression, or a number in it becomes too large.
  """
  text = ' '.join(expression.replace('^', '**').split())
  if len(text) > LENGTH:
    raise Unusable(f'longer than {LENGTH} characters')
  if not re.fullmatch(r'[0-9.+\-*/() ]+', text):
    raise Unusable('only numbers, + - * / ^ and parentheses are known')
  try:
    return _value(ast.parse(text, mode='eval').body, text)
  except (SyntaxError, RecursionError, MemoryError) as e:
    raise Unusable('not an expression') from e
  except ZeroDivisionError as e:
    raise Unusable('division by zero') from e


def _value(node: ast.AST, text: str) -> Fraction:
  match node:
    case ast.Constant(value=int() | float()):
      # Not node.value: a float is not the decimal that was written.
      value = Fraction(ast.get_source_segment(text, node) or '')
    case ast.UnaryOp() if type(node.op) in _OPERATORS:
      value = _OPERATORS[type(node.op)](_value(node.operand, text))
    case ast.BinOp() if type(node.op) in _OPERATORS:
      apply = _OPERATORS[type(node.op)]
      value = apply(_value(node.left, text), _value(node.right, text))
    case _:
      raise Unusable('only numbers, + - * / ^ and parentheses are known')
  if _bits(value) > BITS:
    raise Unusable('a number is too large')
  return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
  if exponent.denominator != 1:
    raise Unusable('an exponent must be a whole number')
  # A number of b bits is at least 2^(b-1): this bounds the power from below,
  # and twice this from above.
  if (_bits(base) - 1) * abs(exponent) > BITS:
    raise Unusable('a number is too large')
  return base**exponent.numerator


def _bits(value: Fraction) -> int:
  return max(value.numerator.bit_length(), value.denominator.bit_length())


_OPERATORS = {ast.UAdd: operator.pos, ast.USub: operator.neg, ast.Pow: _power}
_OPERATORS |= {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.truediv}


def shown(value: Fraction) -> str:
  """A whole number, a decimal of up to DECIMALS digits, or a fraction."""
  if value.denominator == 1:
    return str(value.numerator)
  whole, rest = divmod(abs(value.numerator), value.denominator)
  for n in range(1, DECIMALS + 1):
    digits, left = divmod(rest * 10**n, value.denominator)
    if not left:
      return f'{"-" * (value < 0)}{whole}.{digits:0{n}}'
  return f'{value} (about {float(value):.6g})'


class Calculator(Source):
  """Answers every request; cost: of each call."""

  def __init__(self, cost: float):
    self._cost = cost

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    told = [(request, _answer(request.query)) for request in requests]
    return [SearchResult(r, (), text=text, cost=self._cost) for r, text in told]


def _answer(query: str) -> str:
  try:
    return shown(compute(query))
  except Unusable as e:
    return f'error: {e}'


def functions(config: Any) -> list[Mapping]:
  text = {'type': 'string', 'description': 'Such as (1 + 2.5) * 3 ^ 2.'}
  named = {'properties': {'expression': text}, 'required': ['expression']}
  about = 'Computes with + - * / ^ and parentheses, exactly.'
  return [calls.schema('calculator', about, {'type': 'object'} | named)]


def make(config: Any, **_: object) -> Calculator:
  """The tool of `config.tools.NAME` (module='calculator', cost)."""
  return Calculator(float(config.cost))
