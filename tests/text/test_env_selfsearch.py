"""information='policy' with real searches: how many, which, and what stays."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.text.env import Search
from searchrl_jax.text.parser import within
from searchrl_jax.types import Segment
from tests import scripted
from tests.scripted import make, passage, play

TOK = scripted.tokenizer('bpe')


def own(n):
  return (
    f'<think>t{n}</think><search>query {n}</search>'
    f'<information>told {n}</information>'
  )


END = '<think>so</think><answer>Ann</answer>'


def selfsearch(**fields):
  return make(TOK, max_turns=0, information='policy', **fields)


def searched(env, scripts):
  """The trajectory, and the queries that were sent."""
  state, actions = play(env, scripts, [passage('found')])
  sent = [r.query for a in actions if isinstance(a, Search) for r in a.requests]
  return env.trajectory(state), sent


def informed(env, trajectory):
  return [
    (b.author, b.text)
    for b in env.blocks(trajectory)
    if b.kind == 'information'
  ]


WHOLE = own(1) + own(2) + own(3) + END


@pytest.mark.parametrize('real', [0, 1, 2, 3, -1])
def test_the_first_k_searches_are_real(real):
  env = selfsearch(real_searches=real)
  count = 3 if real < 0 else real
  # A policy that is told goes on with its next thought, else tells itself.
  heads = [own(n + 1).partition('<information>')[0] for n in range(count)]
  rest = ''.join(own(n) for n in (1, 2, 3)[count:]) + END
  t, sent = searched(env, [*heads, rest])
  assert sent == ['query 1', 'query 2', 'query 3'][:count]
  assert informed(env, t) == [('environment', '[1] Title: found')] * count + [
    ('policy', f'told {n}') for n in (1, 2, 3)[count:]
  ]
  assert (t.end, env.answer(t), t.invalid_actions) == ('answer', 'Ann', 0)
  assert len(t.searches) == count
  for s in t.segments:  # what was told is never learnt, nor is it the policy's
    assert s.train == (s.author == 'policy' and s.kind != 'information')


def test_without_real_searches_nothing_changes():
  """One generation that stops at the answer alone, as in training."""
  env = selfsearch()
  state, actions = play(env, [WHOLE])
  assert [type(a).__name__ for a in actions] == ['Generate', 'Done']
  assert actions[0].stops == ('</answer>',)
  state, actions = play(
    selfsearch(real_searches=-1), [own(1).partition('<information>')[0], END]
  )
  assert actions[0].stops == ('</search>', '</answer>')


def test_the_end_of_a_turn_is_trained_on_within_ones_own_information():
  t, _ = searched(selfsearch(), [own(1).partition('told')[0] + 'Ann wrote'])
  *_, before, last = t.segments
  assert (before.kind, before.train) == ('information', False)
  assert last.ids.tolist() == [TOK.eos_ids[0]] and last.train


def test_a_search_that_is_not_sent_begins_no_turn():
  t, _ = searched(selfsearch(real_searches=-1), ['a </search>', ' b' + END])
  assert t.turns == 1


@pytest.mark.parametrize(
  'quoted',
  [
    '<think>a </search> b</think>',
    '<information>x</search>y</information>',
    'loose </search> text',
  ],
)
def test_a_quoted_search_tag_ends_no_turn(quoted):
  env = selfsearch(real_searches=-1)
  head, _, tail = quoted.partition('</search>')
  t, sent = searched(env, [head + '</search>', tail + END])
  assert (sent, env.answer(t), t.invalid_actions) == ([], 'Ann', 0)
  assert (
    TOK.decode([i for s in t.segments if s.author == 'policy' for i in s.ids])
    == quoted + END
  )


class Unsure:
  """Entropies by the query's number, and what was asked of it."""

  def __init__(self, *values):
    self.values, self.asked = values, []

  def __call__(self, ids):
    self.asked.append(TOK.decode(ids))
    out = np.full(len(ids), 100.0)  # outside the query: not to be counted
    text, at = b'', [len(b'')]
    for i in ids:
      text += TOK.token_bytes(i)
      at.append(len(text))
    start = text.rindex(b'<search>') + len(b'<search>')
    end = text.rindex(b'</search>')
    for n in range(len(ids)):
      if at[n + 1] > start and at[n] < end:
        out[n] = self.values[len(self.asked) - 1]
    return out


@pytest.mark.parametrize(
  'entropies, real',
  [
    ((1.0, 2.0, 3.0), [1, 2, 3]),
    ((3.0, 2.0, 1.0), [1]),
    ((1.0, 1.0, 2.0), [1, 3]),  # not above the one before: not asked
    ((2.0, 1.0, 1.5), [1, 3]),  # the one before counts, real or not
  ],
)
def test_a_later_query_is_real_where_it_is_less_sure(entropies, real):
  env = selfsearch(real_searches=-1, search_when='entropy')
  env.entropy = Unsure(*entropies)
  scripts, text = [], ''
  for n in (1, 2, 3):
    scripts.append(text + own(n).partition('<information>')[0])
    text = (
      ''
      if n in real
      else '<information>' + own(n).partition('<information>')[2]
    )
  t, sent = searched(env, [*scripts, text + END])
  assert sent == [f'query {n}' for n in real]
  assert informed(env, t) == [
    ('environment', '[1] Title: found')
    if n in real
    else ('policy', f'told {n}')
    for n in (1, 2, 3)
  ]
  assert len(env.entropy.asked) == 3 and t.end == 'answer'
  # What was asked for is the whole sequence up to the query.
  assert all(text.endswith('</search>') for text in env.entropy.asked)
  assert env.entropy.asked[0].startswith(TOK.decode(t.segments[0].ids))


def test_a_token_that_begins_the_tag_and_ends_a_thought(monkeypatch):
  pieces = [
    b'Q',
    b'<think>',
    b'a</think',
    b'><',
    b'search>',
    b'q',
    b'r',
    b'</search>',
  ]
  env = selfsearch(real_searches=-1, search_when='entropy')
  monkeypatch.setattr(env.tokenizer, 'token_bytes', pieces.__getitem__)
  env.entropy = lambda ids: np.arange(len(ids), dtype=float)

  def segment(ids, author, kind):
    return Segment(np.array(ids, np.int32), author, kind)

  # '><' is the thought's, for its first byte is; tokens 5 and 6 are the query.
  found = env._entropy(
    (
      segment([0], 'prompt', 'other'),
      segment([1, 2, 3], 'policy', 'think'),
      segment([4, 5, 6, 7], 'policy', 'search'),
    )
  )
  assert found == 5.5


def test_k_bounds_the_guided_searches_too():
  env = selfsearch(real_searches=1, search_when='entropy')
  env.entropy = Unsure(1.0, 2.0)
  _, sent = searched(env, [own(1).partition('<information>')[0], own(2) + END])
  assert sent == ['query 1'] and len(env.entropy.asked) == 1


def test_without_the_policys_entropies_it_says_who_gives_them():
  env = selfsearch(real_searches=-1, search_when='entropy')
  with pytest.raises(ValueError, match='searchrl_jax.evaluate'):
    play(env, [own(1)])


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(real_searches=1), "information='source'"),
    (dict(search_when='entropy'), "information='source'"),
    (dict(information='policy', search_when='entropy'), 'env.real_searches'),
    (
      dict(information='policy', real_searches=1, max_observation_tokens=2),
      'max_observation_tokens=2',
    ),
  ],
)
def test_fields_that_cannot_be(fields, message):
  with pytest.raises(ValueError, match=message):
    make(TOK, **fields)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.text('ab<>/'))
def test_within_is_every_token_with_text_of_the_last_block(cuts, query):
  if '</s>' in query or '<s>' in query or not query:
    return
  text = f'<s>x</s><s>{query}</s>'
  at, pieces = 0, []
  for n in [*cuts, len(text)]:
    if text[at : at + n]:
      pieces.append(text[at : at + n].encode())
    at += n
  start, place, want = len('<s>x</s><s>'), 0, []
  for n, piece in enumerate(pieces):
    if set(range(place, place + len(piece))) & set(
      range(start, start + len(query))
    ):
      want.append(n)
    place += len(piece)
  assert within(pieces, '<s>', '</s>') == want
