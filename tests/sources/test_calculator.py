"""The calculator: exact, bounded, and never a failed trajectory."""

import asyncio
from fractions import Fraction
import random
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import pytest

from searchrl_jax.sources import calculator
from searchrl_jax.types import SearchRequest


def answered(query):
  tool = calculator.make(ConfigDict(dict(cost=0.5)), seed=0)
  request = SearchRequest(query, 3, tool='calculator')
  (result,) = asyncio.run(tool.search([request]))
  assert result.request is request and result.passages == ()
  assert result.cost == 0.5
  return result.text


@pytest.mark.parametrize(
  'query, text',
  [
    ('2 + 3 * 4', '14'),
    ('(2 + 3) * 4', '20'),
    ('0.1 + 0.2', '0.3'),  # not 0.30000000000000004
    ('.5 - 1.', '-0.5'),
    ('12345678901234567890 * 10', '123456789012345678900'),
    ('1 / 8', '0.125'),
    ('-1 / 40', '-0.025'),
    ('22 / 7', '22/7 (about 3.14286)'),
    ('-10 / 3', '-10/3 (about -3.33333)'),
    ('2 ^ 10', '1024'),
    ('2 ** 3 ** 2', '512'),
    ('-2 ^ 2', '-4'),
    ('4 ^ -2', '0.0625'),
    ('1 ^ 99999999999999999999', '1'),
    ('.' + '0' * 22 + '1', '1/1' + '0' * 23 + ' (about 1e-23)'),
    ('1 +\n 1', '2'),
    ('- - + 3', '3'),
    # What the policy reads in place of a failure:
    ('1 / (2 - 2)', 'error: division by zero'),
    ('0 ^ -1', 'error: division by zero'),
    ('2 ^ 0.5', 'error: an exponent must be a whole number'),
    ('2 ^ 513', 'error: a number is too large'),
    ('9 ^ 9 ^ 9 ^ 9', 'error: a number is too large'),
    ('9' * 200, 'error: a number is too large'),
    ('1' + '+1' * 100, 'error: longer than 200 characters'),
    ('1e999999999', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('10 % 3', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('7 // 2', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('2(3)', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('...', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('()', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('exit()', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('1 2', 'error: not an expression'),
    ('(1', 'error: not an expression'),
    ('(' * 200, 'error: not an expression'),
    ('007', 'error: not an expression'),
    ('1 \x00', 'error: only numbers, + - * / ^ and parentheses are known'),
    ('１', 'error: only numbers, + - * / ^ and parentheses are known'),
  ],
)  # fmt: skip
def test_what_the_policy_reads(query, text):
  assert answered(query) == text


def expression(rng, depth):
  """(text, value by Python's own fractions) of a random expression."""
  if not depth:
    n = rng.randrange(1, 100)
    return str(n), Fraction(n)
  (a, x), (b, y) = (
    expression(rng, depth - 1),
    expression(rng, rng.randrange(depth)),
  )
  op = rng.choice('+-*/') if y else '*'
  value = {'+': lambda: x + y, '-': lambda: x - y,
           '*': lambda: x * y, '/': lambda: x / y}[op]()  # fmt: skip
  return f'({a}{op}{b})', value


def test_it_agrees_with_fractions():
  rng = random.Random(0)
  for _ in range(300):
    text, value = expression(rng, 3)
    assert calculator.compute(text) == value
    shown = calculator.shown(value).partition(' ')[0]
    assert Fraction(shown) == value  # what is shown is exact


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet='0123456789.+-*/^() e', max_size=220) | st.text())
def test_any_text_is_answered_soon(text):
  begin = time.thread_time()
  assert answered(text)
  assert time.thread_time() - begin < 1


@pytest.mark.parametrize('operator', ['*', '**', '-', '/', '+', '('])
def test_the_longest_text_of_one_operator(operator):
  begin = time.thread_time()
  for number in ('9', '99', '', '.1'):
    text = (number + operator) * 200
    for length in (199, 200):
      assert answered(f'{text[: length - 1]}9')
  assert time.thread_time() - begin < 1
