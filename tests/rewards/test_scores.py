import itertools
import math
import re
import string
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.rewards import equivalence
from searchrl_jax.rewards import scores as metrics


def squad_normalise(s):
  """SQuAD's evaluation script, step by step."""
  s = ''.join(c for c in s.lower() if c not in set(string.punctuation))
  return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', s).split())


@pytest.mark.parametrize(
  'text, normal',
  [
    ('The  Beatles!', 'beatles'),
    ('U.S.-based', 'usbased'),  # deleted, not replaced by a space
    ('an apple a day', 'apple day'),
    ('anthem', 'anthem'),  # articles are whole words
    ('Émile’s', 'émile’s'),  # ASCII punctuation alone
    ('the', ''),
    ('  \n ', ''),
  ],
)
def test_normalise_golden(text, normal):
  assert metrics.normalise(text) == normal


FORMS = 'NFC', 'NFD', 'NFKC', 'NFKD'


# No full-width forms, nor punctuation of other scripts (two brackets become
# such in NFC).
ALIKE = st.characters(
  max_codepoint=0xFF00, exclude_characters=f'{metrics._IDEOGRAPHIC}\u2329\u232a'
)


@given(st.text(st.characters(max_codepoint=127)), st.text(ALIKE))
def test_normalise_is_squads(ascii_text, text):
  assert metrics.normalise(ascii_text) == squad_normalise(ascii_text)
  one_form = unicodedata.normalize('NFC', text)
  assert metrics.normalise(text) == squad_normalise(one_form)


@given(st.text(), st.sampled_from(['NFC', 'NFD']))
def test_the_unicode_form_of_an_answer_does_not_matter(text, form):
  assert metrics.key(unicodedata.normalize(form, text)) == metrics.key(text)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize(
  'gold', ['Beyoncé', 'à propos', '２０２０', 'ガス', 'ｶﾞｽ']
)
def test_scores_compare_both_sides_in_one_form(gold, form):
  said = unicodedata.normalize(form, gold)
  for pair in ((gold, said), (said, gold)):
    assert metrics.exact_match(pair[0], [pair[1]])
    assert metrics.f1(f'it is {pair[0]}', [pair[1]]) > 0
    assert metrics.sub_exact_match(f'it is {pair[0]}.', [pair[1]])
    assert metrics.states(f'it is {pair[0]}.', [pair[1]])
    one, other = equivalence.keys(pair, equivalence.TEXT)
    assert one == other is not None
  assert not metrics.exact_match('Beyonce', ['Beyoncé'])


@pytest.mark.parametrize(
  'text, gold',
  [
    ('中国的首都是北京市。', '北京'),
    ('夏目漱石は東京で生まれた', '東京'),
    ('서울은 대한민국의 수도이다', '서울'),
    ('he said no', 'no'),
  ],
)
def test_words_are_found_in_scripts_without_spaces_too(text, gold):
  assert metrics.states(text, ['', gold]) and metrics.f1(text, [gold]) > 0
  assert not metrics.exact_match(text, [gold])


TEXTS = st.lists(
  st.sampled_from(
    ['the', 'a', 'U.S.', "o'n", 'Café', 'no', '東京', '京', '-', '" ', ' ']
  )
).map(''.join)


@given(TEXTS, st.lists(TEXTS, max_size=2))
def test_whole_words_are_found_wherever_they_stand(text, golds):
  """By the words of the whole text, which a missing one makes needless."""
  padded = lambda x: f' {" ".join(metrics.words(x))} '
  want = any(metrics.normalise(g) and padded(g) in padded(text) for g in golds)
  assert metrics.states(text, golds) == want


def test_scores_of_scripts_without_spaces():
  # Of letters: 2 common ones of 3 and 2.
  assert metrics.f1('北京市', ['北京']) == 0.8
  assert metrics.f1('北京', ['東京']) == 0.5
  assert metrics.exact_match('北京。', ['北京']) == 1
  assert metrics.exact_match('「東京」', ['東京']) == 1
  assert not metrics.states('京北', ['北京'])
  # Words with spaces are compared as before.
  assert not metrics.states('known', ['no'])
  assert not metrics.states('the known', ['', 'the', '!'])
  assert metrics.f1('known', ['no']) == 0


@pytest.mark.parametrize('gold, other', [('10⁵', '105'), ('1½', '11⁄2')])
def test_a_raised_digit_is_another(gold, other):
  assert not metrics.exact_match(other, [gold])
  assert not metrics.exact_match(gold, [other])


def test_exact_match_over_several_golds():
  assert metrics.exact_match('the Eiffel Tower.', ['Louvre', 'Eiffel tower'])
  assert not metrics.exact_match('Eiffel', ['Louvre', 'Eiffel tower'])
  assert not metrics.exact_match(None, ['x'])
  assert not metrics.exact_match('x', [])


def test_text_that_normalises_to_nothing():
  assert metrics.exact_match('A', ['a'])  # a blood group
  for said in ('(A)', 'A.', '"a"'):  # as '(B)' matches 'B'
    assert metrics.exact_match(said, ['A']) == metrics.f1(said, ['A']) == 1.0
  assert metrics.exact_match('!!', ['!!']) and not metrics.exact_match('!', '?')
  assert not metrics.exact_match('the', ['a'])  # '' == '' in SQuAD's
  assert not metrics.exact_match('', ['the'])
  assert not metrics.exact_match(' ', [' '])
  assert not metrics.sub_exact_match('anything', ['the', '!!'])
  assert not metrics.sub_exact_match('', ['the'])
  assert metrics.f1('the', ['an']) == 0.0


def test_f1_golden():
  # 'tall tower paris' against 'tower in paris': 2 common words of 3 and 3:
  # precision 2/3, recall 2/3, F1 2/3.
  assert metrics.f1('the tall tower, Paris', ['Tower in Paris']) == (
    pytest.approx(2 / 3)
  )
  # The bag keeps counts: 'x x y' and 'x z' share one x: 2*1/(3+2).
  assert metrics.f1('x x y', ['x z']) == pytest.approx(0.4)
  # The best gold counts.
  assert metrics.f1('x', ['y', 'x y', 'x']) == 1.0


def test_sub_exact_match():
  assert metrics.sub_exact_match('It was Niels Bohr, in 1913', ['Niels Bohr'])
  assert not metrics.sub_exact_match('Niels', ['Niels Bohr'])


@pytest.mark.parametrize(
  'n, c, k', [(4, 1, 2), (10, 3, 5), (6, 6, 1), (5, 0, 5)]
)
def test_pass_at_k_is_the_mean_over_subsets(n, c, k):
  flags = [True] * c + [False] * (n - c)
  subsets = list(itertools.combinations(flags, k))
  expected = sum(map(any, subsets)) / len(subsets)
  assert metrics.pass_at_k(n, c, k) == pytest.approx(expected)


def test_pass_at_k_golden():
  # 1 - C(3, 2) / C(4, 2) = 1 - 3/6.
  assert metrics.pass_at_k(4, 1, 2) == pytest.approx(0.5)
  assert metrics.pass_at_k(4, 3, 2) == 1.0  # any two hold a right one


@given(
  st.lists(st.sampled_from(['a', 'b', 'c', None]), min_size=1, max_size=7),
  st.data(),
)
def test_maj_at_k_is_the_mean_over_subsets(votes, data):
  k = data.draw(st.integers(1, len(votes)))
  right = {'a', 'c'}
  total = 0.0
  subsets = list(itertools.combinations(votes, k))
  for subset in subsets:
    counts = {v: subset.count(v) for v in subset if v is not None}
    if counts:
      best = [v for v in counts if counts[v] == max(counts.values())]
      total += sum(v in right for v in best) / len(best)
  found = metrics.maj_at_k(votes, [v in right for v in votes], k)
  assert found == pytest.approx(total / len(subsets))


def test_bootstrap_matches_the_binomial():
  # 400 zeros and ones with mean 0.3: the standard error is
  # sqrt(0.3 * 0.7 / 400) = 0.0229, so 95% lie within 0.3 +- 0.0449.
  values = [1.0] * 120 + [0.0] * 280
  found = metrics.bootstrap(values, resamples=4000, seed=1)
  assert found.mean == pytest.approx(0.3) and found.n == 400
  assert found.low == pytest.approx(0.3 - 0.0449, abs=0.006)
  assert found.high == pytest.approx(0.3 + 0.0449, abs=0.006)
  assert found == metrics.bootstrap(values, resamples=4000, seed=1)
  assert found != metrics.bootstrap(values, resamples=4000, seed=2)


def test_bootstrap_chunks_do_not_show(monkeypatch):
  values = np.arange(50.0)
  whole = metrics.bootstrap(values, resamples=301, seed=3)
  monkeypatch.setattr(metrics, '_CHUNK', 120)  # 2 rows at a time
  parts = metrics.bootstrap(values, resamples=301, seed=3)
  assert parts == whole


def test_bootstrap_of_nothing_and_of_one():
  assert math.isnan(metrics.bootstrap([], resamples=10, seed=0).mean)
  assert metrics.bootstrap([2.0], resamples=10, seed=0) == (2.0, 2.0, 2.0, 1)


def test_differences_of_pairs_have_a_narrower_interval():
  rng = np.random.default_rng(0)
  b = rng.normal(size=200)
  a = b + 0.05 + 0.01 * rng.normal(size=200)
  paired = metrics.bootstrap(a - b, resamples=500, seed=0)
  assert 0.04 < paired.low < paired.mean < paired.high < 0.06
  assert metrics.bootstrap(a, resamples=500, seed=0).low < 0
