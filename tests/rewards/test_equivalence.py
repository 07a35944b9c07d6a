"""Which answers are one: as text, or by a function."""

import pytest

from searchrl_jax.rewards import equivalence

NEAR = 'tests.rewards.test_equivalence.near'


def near(a: str, b: str) -> bool:
  """Numbers at most 1 apart: an equality that does not carry over."""
  try:
    return abs(float(a) - float(b)) <= 1
  except ValueError:
    return False


def test_an_answer_joins_the_first_that_it_is_equal_to():
  found = equivalence.keys(['1', '3', '2', 'x', None, '', '3.0'], NEAR)
  assert found == ['1', '3', '1', None, None, None, '3']
  assert equivalence.correct('2', ['9', '3'], NEAR) == 1
  assert equivalence.correct('2', ['9'], NEAR) == 0
  assert equivalence.correct('x', ['x'], NEAR) == 0
  assert equivalence.correct(None, ['1'], NEAR) == 0


def test_text_is_its_normal_form():
  answers = ['The Cat!', 'cat', 'N.Y.C.', 'New York City', '', None, 'A']
  assert equivalence.keys(answers, 'text') == [
    'cat',
    'cat',
    'nyc',
    'new york city',
    None,
    None,
    'a',
  ]
  assert equivalence.correct('the cat', ['Cat'], 'text') == 1


@pytest.mark.parametrize('match', ['math', 'nowhere.equal', f'{NEAR}er'])
def test_a_match_that_is_no_function_names_the_fix(match):
  with pytest.raises(ValueError, match=f"match='{match}'.*mathematics.equal"):
    equivalence.keys(['1'], match)
