"""Contexts that change: what the engine holds, and what is trained."""

import dataclasses
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import read, types
from searchrl_jax.learn import batching
from searchrl_jax.rewards.answer import valid_format
from searchrl_jax.text import parser, prompts
from searchrl_jax.text.states import Done, Generate
from searchrl_jax.types import SearchResult
from tests import scripted
from tests.scripted import QUESTION, make, passage

SEARCH = '<think>hm</think><search>book {}</search>'
ANSWER = '<answer>Ann</answer>'
BLOCKS = {
  'summary': {
    'tags': ['<summary>', '</summary>'],
    'ask': '\nSay what you know.\n',
    'then': '\nGo on.\n',
  },
  'reflection': {
    'tags': ['<reflection>', '</reflection>'],
    'ask': '\nWhat went wrong?\n',
    'then': '\nAgain.\n',
  },
}


def template():
  data = dataclasses.asdict(prompts.load('base')) | {'blocks': BLOCKS}
  name = data.pop('name')
  plain = {k: [*v] if isinstance(v, tuple) else v for k, v in data.items()}
  return prompts.parse(plain, name, 'tests')


def play(env, scripts, passages=()):
  """Plays scripts as `scripted.play` does, with a sequence that the actions
  make: returns the trajectory and the sequence before each generation."""
  state, action = env.reset(QUESTION)
  sequence, seen = [*action.prompt.ids], []
  scripts = iter(scripts)
  while not isinstance(action, Done):
    if isinstance(action, Generate):
      if action.keep is not None:
        del sequence[action.keep :]
      sequence += action.append
      assert sequence == [i for s in state.sequence for i in s.ids.tolist()]
      assert len(sequence) == state.length <= env.config.max_tokens
      assert len(sequence) + action.max_tokens <= env.config.max_tokens
      seen.append([*sequence])
      event = scripted.sample(env, action, next(scripts))
      sequence += event.ids.tolist()
    else:
      event = [SearchResult(r, tuple(passages[: r.k])) for r in action.requests]
    state, action = env.step(state, event)
  trajectory = env.trajectory(state)
  own = parser.blocks(state.segments, env.template, env.tokenizer)
  assert env.blocks(trajectory) == own
  check_rows(trajectory, seen)
  return trajectory, seen


def check_rows(trajectory, seen):
  """Each sampled token is trained once, after exactly what it was sampled
  after."""
  parts = batching.tokens_of(0, trajectory)
  trained = [i for p in parts for i in p.ids[p.mask].tolist()]
  sampled = [s for s in trajectory.segments if s.author == 'policy']
  assert trained == [i for s in sampled for i in s.ids.tolist()]
  logps = np.concatenate([p.logps[p.mask] for p in parts])
  assert (logps == np.concatenate([s.logps for s in sampled])).all()
  before = {
    tuple(p.ids[:n].tolist())
    for p in parts
    for n in np.flatnonzero(p.mask)
    if not p.mask[n - 1]
  }
  assert before <= {*map(tuple, seen)}
  for p in parts:
    for n in np.flatnonzero(p.mask):
      row = trajectory.before(p.start + n - p.prompt)
      assert row.tolist() == p.ids[:n].tolist()


def text(env, ids):
  return env.tokenizer.decode(ids)


def test_an_observation_replaces_those_before_it():
  tok = scripted.tokenizer('bpe')
  env = make(tok, max_contexts=9, keep_observations=1, dropped='gone')
  scripts = [SEARCH.format(n) for n in range(3)] + [ANSWER]
  t, seen = play(env, scripts, [passage('by Ann')])
  shown = '\n<information>\n[1] Title: by Ann\n</information>\n'
  gone = '\n<information>\ngone\n</information>\n'
  prompt, *ends = (text(env, ids) for ids in seen)
  assert ends == [
    prompt + scripts[0] + shown,
    prompt + scripts[0] + gone + scripts[1] + shown,
    prompt + scripts[0] + gone + scripts[1] + gone + scripts[2] + shown,
  ]
  # All is in the record once, and the contexts begin before the observation.
  whole = text(env, np.concatenate([s.ids for s in t.segments]))
  assert whole == prompt + ''.join(s + shown for s in scripts[:3]) + ANSWER
  assert [c.reason for c in t.contexts] == ['dropped'] * 2
  assert text(env, t.contexts[0].prompt) == ends[1].removesuffix(shown)
  assert (t.end, env.answer(t)) == ('answer', 'Ann')


def test_contexts_that_are_used_up_grow():
  env = make(scripted.tokenizer('bpe'), max_contexts=2, keep_observations=1)
  scripts = [SEARCH.format(n) for n in range(3)] + [ANSWER]
  t, seen = play(env, scripts, [passage('by Ann')])
  assert len(t.contexts) == 1
  assert text(env, seen[3]).count('by Ann') == 2


def test_a_summary_replaces_the_history_when_the_context_is_full():
  tok = scripted.tokenizer('bpe')
  fields = dict(max_contexts=3, on_full='summary', max_note_tokens=40)
  prompt = len(make(tok, template()).reset(QUESTION)[0].segments[0].ids)
  fields |= dict(max_tokens=prompt + 190, max_turn_tokens=60)
  env = make(tok, template(), **fields)
  note = '<summary>Ann?</summary>'
  scripts = [SEARCH.format(0), note, SEARCH.format(1), note, ANSWER]
  t, seen = play(env, scripts, [passage('by Ann ' * 6)])
  assert [c.reason for c in t.contexts] == ['summary', 'summary']
  first = text(env, seen[0])
  assert text(env, seen[1]).endswith('</information>\n\nSay what you know.\n')
  # What asks for it is no observation.
  found = [s for s in t.segments if s.kind == 'information']
  assert found and not any('Say' in text(env, s.ids) for s in found)
  assert text(env, seen[2]) == f'{first}{note}\nGo on.\n'
  assert text(env, seen[4]) == f'{first}{note}\nGo on.\n'
  blocks = [(b.kind, b.turn) for b in env.blocks(t) if b.author == 'policy']
  assert blocks == [
    ('think', 0), ('search', 0), ('summary', 1), ('think', 2), ('search', 2),
    ('summary', 3), ('answer', 4),
  ]  # fmt: skip
  assert [s.request.turn for s in t.searches] == [0, 2]
  assert (t.turns, t.invalid_actions, t.end) == (5, 0, 'answer')


def test_a_summary_that_is_not_closed_is_carried_and_counted():
  tok = scripted.tokenizer('bpe')
  prompt = len(make(tok, template()).reset(QUESTION)[0].segments[0].ids)
  fields = dict(max_contexts=2, on_full='summary', max_note_tokens=12)
  fields |= dict(max_tokens=prompt + 130, max_turn_tokens=60)
  env = make(tok, template(), **fields)
  scripts = [SEARCH.format(0), '<summary>' + 'the cat ' * 20, ANSWER]
  t, seen = play(env, scripts, [passage('by Ann')])
  assert t.invalid_actions == 1
  assert '</summary>\nGo on.\n' in text(env, seen[2])
  assert env.answer(t) == 'Ann'


def test_attempts_follow_each_other_with_reflections():
  fields = dict(max_contexts=3, attempts=3, on_answer='reflection')
  fields |= dict(max_note_tokens=60, max_turns=1)
  env = make(scripted.tokenizer('bpe'), template(), **fields)
  notes = [f'<reflection>try {n}</reflection>' for n in range(2)]
  wrong = '<answer>Bob</answer>'
  scripts = [SEARCH.format(0), wrong, notes[0], SEARCH.format(1), wrong]
  t, seen = play(env, [*scripts, notes[1], ANSWER], [passage('by Ann')])
  first = text(env, seen[0])
  assert text(env, seen[2]).endswith('<answer>Bob</answer>\nWhat went wrong?\n')
  assert text(env, seen[3]) == f'{first}{notes[0]}\nAgain.\n'
  assert text(env, seen[6]) == f'{first}{notes[0]}{notes[1]}\nAgain.\n'
  assert (t.end, env.answer(t), len(t.searches)) == ('answer', 'Ann', 2)
  # One turn that may search in each attempt, and one that may not.
  env = make(scripted.tokenizer('bpe'), template(), **fields)
  state, action = env.reset(QUESTION)
  for script in (SEARCH.format(0), None, wrong, notes[0]):
    event = (
      [SearchResult(r, ()) for r in action.requests]
      if script is None
      else scripted.sample(env, action, script)
    )
    state, action = env.step(state, event)
  assert '</search>' in action.stops and state.used == 0


def test_attempts_may_share_a_context():
  fields = dict(attempts=2, on_answer='reflection', max_note_tokens=60)
  env = make(scripted.tokenizer('bpe'), template(), max_turns=1, **fields)
  note = '<reflection>no</reflection>'
  t, seen = play(env, ['<answer>Bob</answer>', note, ANSWER])
  assert text(env, seen[2]).endswith(
    f'<answer>Bob</answer>\nWhat went wrong?\n{note}\nAgain.\n'
  )
  assert (t.contexts, env.answer(t)) == ((), 'Ann')


def test_a_note_keeps_a_tag_that_begins_in_the_token_before():
  tok = scripted.tokenizer('bpe')
  first = tok.encode(' <reflection>')[0]
  assert tok.token_bytes(first) == b' <'  # is of what stands before the block
  fields = dict(max_contexts=2, attempts=2, on_answer='reflection')
  env = make(tok, template(), max_note_tokens=60, **fields)
  note = '<reflection>no</reflection>'
  t, seen = play(env, ['<answer>Bob</answer>', f'Hm, {note}', ANSWER])
  assert text(env, seen[2]) == f'{text(env, seen[0])}{note}\nAgain.\n'


def test_an_answer_in_a_note_ends_no_attempt():
  """Neither in a summary nor in a reflection."""
  tok = scripted.tokenizer('bpe')
  fields = dict(max_contexts=4, attempts=2, on_answer='reflection')
  fields |= dict(on_full='summary', max_note_tokens=60, max_turn_tokens=60)
  prompt = len(make(tok, template()).reset(QUESTION)[0].segments[0].ids)
  env = make(tok, template(), max_tokens=prompt + 210, **fields)
  note = '<answer>Bob</answer><{0}>x</{0}>'
  scripts = [SEARCH.format(0), note.format('summary'), ANSWER]
  scripts += [note.format('reflection'), '<answer>Zed</answer>']
  t, _ = play(env, scripts, [passage('by Ann ' * 6)])
  assert [c.reason for c in t.contexts] == ['summary', 'reflection']
  assert [b.text for b in env.answers(t)] == ['Ann', 'Zed']
  assert t.meta['attempt'] == [0, 0, 0, 1, 1]
  # The last context is full before there is an answer: a note's is none.
  scripts = [SEARCH.format(0), note.format('summary'), 'the cat ' * 99]
  fields |= dict(max_contexts=2, attempts=1, on_answer='')
  env = make(tok, template(), max_tokens=prompt + 210, max_turns=0, **fields)
  t, _ = play(env, ['the cat sat ' * 30, *scripts[1:]])
  assert env.answer(t) is None
  of = dict(env=dict(answer='tags'), data=dict(prompt='template'))
  run = SimpleNamespace(
    _template=env.template, tokenizer=tok, config=ConfigDict(of)
  )
  assert read.Run.answer(run, t) is None


@pytest.mark.parametrize('last, valid', [(ANSWER, True), ('Ann', False)])
def test_each_attempt_has_the_form_of_one(last, valid):
  fields = dict(attempts=2, on_answer='reflection', max_note_tokens=60)
  env = make(scripted.tokenizer('bpe'), template(), max_turns=1, **fields)
  note = '<think>hm</think><reflection>no</reflection>'
  scripts = [SEARCH.format(0), '<think>a</think><answer>Bob</answer>', note]
  scripts += [SEARCH.format(1), f'<think>b</think>{last}']
  t, _ = play(env, scripts, [passage('by Ann')])
  assert valid_format(t, env, require_think=True) == valid


def test_what_is_left_out_makes_room_for_what_is_found():
  tok = scripted.tokenizer('bpe')
  fields = dict(max_contexts=3, keep_observations=1, dropped='gone')
  wanted = make(tok, **fields)
  t, seen = play(wanted, [SEARCH.format(0), ANSWER], [passage('by Ann ' * 20)])
  # The first observation fills the sequence; without it there is room again.
  full = len(seen[1]) + len(tok.encode(SEARCH.format(1))) + 4
  env = make(tok, max_tokens=full, **fields)
  scripts = [SEARCH.format(0), SEARCH.format(1), ANSWER]
  t, seen = play(env, scripts, [passage('by Ann ' * 20)])
  assert (len(t.searches), len(t.contexts)) == (2, 1)


@given(
  st.lists(
    st.sampled_from(
      [SEARCH.format(1), ANSWER, '<think>no', 'the cat sat on the mat ' * 9,
       '<summary>a</summary>', '<reflection>b</reflection>', '']
    ),
    max_size=30,
  ),
  st.integers(2, 5),
  st.integers(0, 2),
  st.sampled_from(['', 'summary']),
  st.integers(1, 3),
  st.integers(60, 400),
)  # fmt: skip
@settings(max_examples=60)
def test_whatever_the_policy_writes(
  scripts, contexts, keep, on_full, attempts, room
):
  if not keep and not on_full and attempts == 1:
    keep = 1
  tok = scripted.tokenizer('bpe')
  prompt = len(make(tok, template()).reset(QUESTION)[0].segments[0].ids)
  asks = on_full or attempts > 1
  fields = dict(max_contexts=contexts, keep_observations=keep, on_full=on_full)
  fields |= dict(attempts=attempts, max_note_tokens=12 if asks else 0)
  fields |= dict(on_answer='reflection' if attempts > 1 else '')
  fields |= dict(max_tokens=prompt + room, max_turn_tokens=40, max_turns=3)
  env = make(tok, template(), max_observation_tokens=60, **fields)
  endless = [*scripts, *[ANSWER] * 40]
  t, _ = play(env, endless, [passage('by Ann ' * 5)])
  assert len(t.contexts) < contexts
  assert all(len(p.ids) <= prompt + room for p in batching.tokens_of(0, t))


@pytest.mark.parametrize(
  'fields, named',
  [
    (dict(keep_observations=1), 'max_contexts=1'),
    (dict(attempts=2), 'attempts=2'),
    (
      dict(max_contexts=2, on_full='think', max_note_tokens=9),
      "on_full='think'.*summary",
    ),
    (dict(max_contexts=2, on_full='summary'), 'max_note_tokens=0'),
    (
      dict(max_contexts=2, keep_observations=1, information='policy'),
      'information',
    ),
  ],
)
def test_fields_that_do_not_go_together_are_named(fields, named):
  with pytest.raises(ValueError, match=named):
    make(scripted.tokenizer('bpe'), template(), **fields)


def test_a_cut_of_segments_is_that_of_their_tokens():
  new = lambda *ids: types.Segment(np.array(ids, np.int32), 'policy', 'think')
  segments = new(1, 2, 3), new(4), new(5, 6)
  for start in range(7):
    for stop in [None, *range(start, 8)]:
      got = [s.ids.tolist() for s in types.cut(segments, start, stop)]
      assert sum(got, []) == [1, 2, 3, 4, 5, 6][start:stop]
      assert all(got)
