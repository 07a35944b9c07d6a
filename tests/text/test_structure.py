"""Turns, spans and labels of trajectories, and what is broadcast over them."""

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.learn import advantages, batching
from searchrl_jax.text import structure
from searchrl_jax.types import (
  Passage,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
)
from tests import scripted


def segment(n, author, kind='other', train=None):
  train = author in ('policy', 'teacher') if train is None else train
  return Segment(np.arange(n, dtype=np.int32), author, kind, train=train)


def search(turn, *ids, error=False, tool='search'):
  request = SearchRequest('q', 3, turn=turn, tool=tool)
  if error:
    return SearchError(request, 'timeout', '')
  return SearchResult(request, tuple(Passage(i, '', '') for i in ids))


def searching(*found, sample=0, note=0, train=None, **fields):
  """Prompt of 2, then think 1, search 2, observation 3 for each; answer 2."""
  segments = [segment(2, 'prompt')]
  if note:
    segments.append(segment(note, 'environment'))
  for _ in found:
    segments += [
      segment(1, 'policy', 'think'),
      segment(2, 'policy', 'search'),
      segment(3, 'environment', 'information', train),
    ]
  segments.append(segment(2, 'policy', 'answer'))
  searches = tuple(search(i, *ids) for i, ids in enumerate(found))
  fields = {'segments': tuple(segments), 'searches': searches, **fields}
  return Trajectory(Question('q', '?'), end='answer', sample=sample, **fields)


def of(*trajectories):
  return structure.of(trajectories, batching.masks(trajectories))


def test_spans_have_turns_and_passages():
  [spans] = of(searching('ab', 'c')).spans
  assert [
    (s.start, s.end, s.turn, s.segment.kind, s.passages) for s in spans
  ] == [
    (0, 2, -1, 'other', ()),
    (2, 3, 0, 'think', ()),
    (3, 5, 0, 'search', ()),
    (5, 8, 0, 'information', ('a', 'b')),
    (8, 9, 1, 'think', ()),
    (9, 11, 1, 'search', ()),
    (11, 14, 1, 'information', ('c',)),
    (14, 16, 2, 'answer', ()),
  ]


def test_turns_are_the_environments_own():
  """Two searches with an invalid action between them, then an answer."""
  env = scripted.make(scripted.tokenizer('bpe'), max_turns=3)
  look = '<search> the book </search>'
  state, _ = scripted.play(
    env,
    [look, 'hm', f'so {look}', '<answer> Ann </answer>'],
    [scripted.passage('x', id='a'), scripted.passage('y', id='b')],
  )
  t = env.trajectory(state)
  s = of(t)
  assert s.number.tolist() == [0, 1, 2, 3]
  assert [r.request.turn for r in t.searches] == [0, 2]
  shown = [x for x in s.spans[0] if x.segment.kind == 'information']
  assert [(x.turn, x.passages) for x in shown] == [
    (0, ('a', 'b')),
    (2, ('a', 'b')),
  ]
  searched = [x.turn for x in s.spans[0] if x.segment.kind == 'search']
  assert searched == [b.turn for b in env.blocks(t) if b.kind == 'search']


def test_a_turn_begins_after_the_environment_alone():
  # A note before the first turn answers nothing; a teacher writes a prefix.
  t = searching(
    segments=(
      segment(2, 'prompt'),
      segment(1, 'environment'),
      segment(2, 'teacher', 'think'),
      segment(1, 'policy', 'think'),
      segment(1, 'environment'),  # feedback
      segment(2, 'environment'),  # and a note
      segment(2, 'policy', 'answer'),
    )
  )
  s = of(t)
  assert [x.turn for x in s.spans[0]] == [-1, -1, 0, 0, 0, 0, 1]
  assert s.number.tolist() == [0, 1] and s.start.tolist() == [3, 9]
  assert s.turns[0].tolist() == [-1] * 3 + [0] * 3 + [-1] * 3 + [1, 1]


def test_several_queries_share_an_observation():
  t = searching('ab', 'd')
  t = dataclasses.replace(
    t, searches=(search(0, 'a'), search(0, 'b', 'a'), search(1))
  )
  found = [s.passages for s in of(t).spans[0] if s.segment.kind != 'other']
  assert found == [(), (), ('a', 'b', 'a'), (), (), (), ()]


def test_a_last_search_without_an_observation():
  t = searching('a')
  whole = dataclasses.replace(t, segments=t.segments[:3])
  for last in (search(0, 'a'), search(0, error=True)):  # no room; failed
    [spans] = of(dataclasses.replace(whole, searches=(last,))).spans
    assert [s.passages for s in spans] == [(), (), ()]


def test_observations_that_no_search_explains_are_named():
  t = dataclasses.replace(searching('a', 'b', sample=3), searches=())
  with pytest.raises(ValueError, match='q/solver/3 .*2 of 2'):
    of(t)
  t = searching('a', 'b')
  t = dataclasses.replace(t, train_context=t.segments[:3] + t.segments[4:])
  with pytest.raises(ValueError, match='1 of 2 .* 2 turns'):
    of(t)


def test_turns_are_those_of_the_segments_that_are_trained():
  # Sampled with a hint of 4 more tokens in the prompt.
  t = searching('a')
  hinted = (segment(6, 'prompt'), *t.segments[1:])
  s = of(dataclasses.replace(t, segments=hinted, train_context=t.segments))
  assert s.start.tolist() == [2, 8]
  # A turn without a loss token is counted, and not listed.
  untrained = tuple(
    dataclasses.replace(x, train=x.kind == 'answer') for x in t.segments
  )
  s = of(dataclasses.replace(t, segments=untrained))
  assert (s.number.tolist(), s.start.tolist()) == ([1], [8])


@pytest.mark.parametrize('train', [False, True])
def test_values_of_turns_land_on_their_loss_tokens(train):
  """Also where observations are in the loss: they are no one's turn."""
  a, b = searching('a', train=train), searching(train=train, note=1)
  s = of(a, b)
  assert (s.owner.tolist(), s.number.tolist()) == ([0, 0, 1], [0, 1, 0])
  first, second = s.over_tokens(np.array([1.0, 2.0, 3.0]))
  assert first.dtype == np.float32
  assert first.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 2, 2]
  assert second.tolist() == [0, 0, 0, 3, 3]


def test_golden_totals_and_discounts():
  s = of(searching('a'), searching())
  # 9 comes before the first turn. 1 at the search's last token and 2 at the
  # observation's are the first turn's; 4 the second's. Of the other: 0.5.
  values = [np.zeros(10), np.zeros(4)]
  values[0][[1, 4, 7, 9]] = 9, 1, 2, 4
  values[1][3] = 0.5
  totals = s.totals(values)
  assert totals.tolist() == [3, 4, 0.5]
  # 3 + 4/2, 4 | 0.5: nothing leaks from one trajectory into another.
  assert s.discounted(totals, 0.5).tolist() == [5, 4, 0.5]
  assert totals.tolist() == [3, 4, 0.5]


@settings(max_examples=40, deadline=None)
@given(
  st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 2**16)
)
def test_properties_of_turns(searches, seed):
  ts = [searching(*'abc'[:n], sample=i) for i, n in enumerate(searches)]
  masks = batching.masks(ts)
  s = structure.of(ts, masks)
  rng = np.random.default_rng(seed)
  assert len(s.owner) == sum(searches) + len(ts)
  values = rng.normal(size=len(s.owner))
  rows = s.over_tokens(values)
  for i, (row, mask, t) in enumerate(zip(rows, masks, ts)):
    assert len(row) == len(t) and not row[~mask].any() and row[mask].all()
    # One value for each turn, in order, from its first loss token on.
    assert (
      row[s.start[s.owner == i]] == np.float32(values[s.owner == i])
    ).all()
    assert len(set(row[mask])) == (s.owner == i).sum()
  earned = [rng.normal(size=len(t)) for t in ts]
  for i, value in enumerate(earned):
    value[:2] = 0.0
    np.testing.assert_allclose(
      s.discounted(s.totals(earned), 1.0)[s.owner == i][0],
      value.sum(),
      atol=1e-9,
    )


def test_anchors_are_what_was_read():
  feedback = searching(
    segments=(
      segment(2, 'prompt'),
      segment(1, 'policy', 'think'),
      segment(1, 'environment'),
      segment(2, 'policy', 'answer'),
    )
  )
  nothing = searching('')
  noted = searching(note=1)  # the same text, but nothing was done before it
  s = of(
    *(searching('ab', 'c'), searching('ba'), searching('c'), nothing),
    *(feedback, noted),
  )
  first, ab, c, empty, told, note = range(6)
  want = [first, ab, c, first, ab, first, c, first, empty, first, told, note]
  assert s.labels('anchor').tolist() == want


def test_anchors_tell_texts_of_tools_apart():
  def told(text):
    t = searching('')
    (answer,) = t.searches
    answer = dataclasses.replace(answer, text=text)
    return dataclasses.replace(t, searches=(answer,))

  s = of(told('4 km'), told('error: no unit'), told('4 km'))
  first, four, first_, error, *again = s.labels('anchor').tolist()
  assert again == [first, four] and first == first_ and four != error


def test_what_two_tools_found_is_not_the_same():
  cases = itertools.product(('a', ''), ('search', 'web'))
  found = [search(0, *ids, tool=tool) for ids, tool in cases]
  s = of(*(dataclasses.replace(searching('a'), searches=(x,)) for x in found))
  assert len(set(s.labels('anchor')[1::2].tolist())) == 4
  shown = [spans[3] for spans in s.spans]
  assert [x.searched for x in shown] == [True, False] * 2
  assert [x.passages for x in shown] == [('a',), (), (), ()]


def test_labels_of_roles_and_of_samplers():
  ts = [
    searching('a', role='proposer', meta={'tree': 7, 'node': [1, 2]}),
    searching(sample=1, meta={'tree': 3, 'node': ('1',)}),
    searching('a', sample=2, meta={'tree': 7, 'node': [1, 3]}),
  ]
  s = of(*ts)
  assert s.labels('role').tolist() == [0, 0, 1, 1, 1]
  assert s.labels('tree').tolist() == [0, 0, 1, 0, 0]
  assert s.labels('node').tolist() == [0, 1, 2, 0, 3]
  with pytest.raises(ValueError, match=r"q/proposer/0: meta\['treee'\]=None"):
    s.labels('treee')
  few = dataclasses.replace(ts[0], meta={'node': [1]})
  with pytest.raises(ValueError, match='2 turns'):
    of(few).labels('node')
  # A search failed before the sampler could tell.
  failed = dataclasses.replace(ts[0], end='failed', meta={})
  assert of(ts[2], failed).labels('node').tolist() == [0, 1, 2, 2]


def test_turns_of_one_anchor_are_compared():
  """GiGPO's step advantage: R discounted, normalised by what was read."""
  s = of(searching('a'), searching('a'), searching('b'))
  returns = np.array([1.0, 0.0, 4.0])
  left = np.array([1, 0, 1, 0, 1, 0])  # turns that follow
  x = 0.5**left * returns[s.owner]  # 0.5 1 | 0 0 | 2 4
  cells = [np.zeros(3, int)[s.owner], s.labels('anchor')]
  got = advantages.normalised(x, np.ones(6, bool), cells, eps=0.0, ddof=0)
  # First turns 0.5 0 2: mean 5/6, squares 17/4, variance 17/12 - 25/36 = 26/36.
  std = np.sqrt(26 / 36)
  want = [-1 / 3 / std, 1, -5 / 6 / std, -1, 7 / 6 / std, 0]  # 'b' is alone
  np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_no_turns_at_all():
  s = of(searching(segments=(segment(3, 'prompt'),)))
  assert s.labels('anchor').shape == s.totals([np.ones(3)]).shape == (0,)
  assert s.over_tokens(np.zeros(0))[0].tolist() == [0, 0, 0]
  none = structure.of([], [])
  assert none.over_tokens(none.discounted(none.totals([]), 0.5)) == []


def test_an_order_is_uniform_and_the_same_again():
  def order(sample, step):
    return structure.order(searching(sample=sample), 4, step).tolist()

  drawn = np.array([order(s, t) for s in range(20) for t in range(10)])
  assert drawn.tolist() == [order(s, t) for s in range(20) for t in range(10)]
  # Each turn has each credit about as often: 1/4 of 200 is 50, deviation 6.
  for turn in drawn.T:
    assert all(25 < (turn == x).sum() < 75 for x in range(4))


def test_shuffled_values_stay_in_their_trajectory():
  ts = [searching('a', 'b', 'c', sample=i) for i in range(6)]
  s = of(*ts)
  x = np.arange(24.0)
  moved = s.shuffled(x)
  assert (np.sort(moved.reshape(6, 4), 1) == x.reshape(6, 4)).all()
  assert (moved != x).any()
