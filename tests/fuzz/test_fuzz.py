"""A few cases of each fuzzer; `python -m tests.fuzz` tries them for an hour.

Runs of configs and kills take a minute each, and are made there alone.
"""

import collections
import random

import pytest

from tests.fuzz import configs, packed, plays

pytestmark = pytest.mark.slow


def short(n: int) -> random.Random:
  return random.Random(f'short/{n}')


@pytest.mark.long
def test_plays():
  ends = collections.Counter(plays.case(short(n)) for n in range(100))
  assert {'answer', 'eos', 'turns', 'tokens'} <= {*ends}, ends


@pytest.mark.long
def test_packed_rows():
  assert packed.case(short(1)) != 'near a bound'


def test_configs_are_accepted_or_refused_by_field():
  found = [
    configs.accepted(configs.draw(short(n), 'http://127.0.0.1:9'))
    for n in range(60)
  ]
  assert 10 < sum(found) < 50
