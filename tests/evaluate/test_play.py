"""Events of a question that is played equal its trajectory."""

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from searchrl_jax.rollout.core import RolloutError
from searchrl_jax.types import SearchError, SearchRequest, SearchResult, Segment
from tests import fakes, viewed
from tests.endpoint import speaking

PARTS = (
  '<think>', '</think>', '<search>', '</search>', '<answer>', '</answer>', 'x',
  ' who', 'é', '€', '<', '</', '\n', '<information>',
)  # fmt: skip


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return viewed.tokenizer(tmp_path_factory.mktemp('tok'))


def played(tok, turns, **how):
  """What was told of a policy that says these turns, and the trajectory."""
  seen, events = {}, []

  def script(before, seed):
    return turns[seen.setdefault(before, len(seen)) % len(turns)]

  player = speaking.player(tok, script, '', **how)
  tell = lambda name, event: events.append(event)
  return events, asyncio.run(player.play('who?', tell, 'q')), player


def runs(segments):
  """(author, kind, ids) of segments, neighbours of equal ones as one."""
  name = lambda s: (s.author, s.kind)
  return [
    (*key, [i for s in run for i in s.ids.tolist()])
    for key, run in itertools.groupby(segments, name)
  ]


@settings(max_examples=100)
@given(
  st.lists(
    st.lists(st.sampled_from(PARTS), max_size=9).map(''.join),
    min_size=1,
    max_size=3,
  )
)
def test_the_text_and_its_blocks_are_those_of_the_trajectory(tok, turns):
  events, t, player = played(tok, turns)
  told = [e for e in events if isinstance(e, Segment)]
  wanted = [s for s in t.segments if s.author != 'prompt']
  # There is no event for the note in the prompt.
  first = next(n for n, s in enumerate(wanted) if s.author == 'policy')
  assert runs(told) == runs(wanted[first:])
  for segment in told:  # characters come whole
    assert '\ufffd' not in tok.decode(segment.ids)
  others = [type(e) for e in events if not isinstance(e, Segment)]
  assert others == [SearchRequest, SearchResult] * len(t.searches)
  assert player.have.opener.engine.opened == 0


def test_a_search_that_fails_is_told_and_raised(tok):
  source = fakes.FakeSource(fails=lambda query, attempt: True)
  with pytest.raises(RolloutError, match='late: who'):
    played(tok, ['<search>who</search>'], source=source)


def test_events_come_in_order(tok):
  turns = ['<think>hm</think><search>who</search>', '<answer>Ann</answer>']
  events, t, player = played(tok, turns)
  kinds = [
    e.kind if isinstance(e, Segment) else type(e).__name__ for e in events
  ]
  assert [k for k, _ in itertools.groupby(kinds)] == [
    'think', 'search', 'SearchRequest', 'SearchResult', 'information', 'answer',
  ]  # fmt: skip
  assert player.env.answer(t) == 'Ann' and t.end == 'answer'
  assert not any(isinstance(e, SearchError) for e in events)
