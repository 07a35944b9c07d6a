"""Hostile plays of every template, against a parser of the tests' own.

A policy writes tags, halves of tags, control tokens and attacks; questions,
passages and texts of tools are attacks too. What must hold whatever happens:
ids are recorded as they were written, kinds, blocks, actions and train flags
are those of `tests.text.test_parser.reference`, no query is empty, nothing from
outside makes a tag or a control token, and no limit is exceeded.
"""

import itertools
import random

import numpy as np

from searchrl_jax.text import env as envs
from searchrl_jax.text import parser, prompts, untrusted
from searchrl_jax.types import Passage, Question, SearchError, SearchResult
from tests import fakes, scripted
from tests.conftest import shared_data
from tests.text.test_adversarial import CORPUS, template
from tests.text.test_parser import reference

# With blocks of every sort, and several queries at once.
OWN = fakes.TEMPLATE | {
  'blocks': {
    'note': ['<note>', '</note>'],
    'calc': {'tags': ['<calc>', '</calc>'], 'tool': 'calculator'},
    'ask': {'tags': ['<ask>', '</ask>'], 'ends': True},
  },
  'stops': ['</search>', '</answer>', '</calc>', '</ask>'],
}
TEMPLATES = [template(p.stem) for p in sorted(prompts.TEMPLATES.glob('*.json'))]
# Calls are fuzzed by tests/text/test_calls.py: they need a chat template.
TEMPLATES = [t for t in TEMPLATES if not t.calls]
TEMPLATES.append(prompts.parse(OWN, 'own', 'tests/fuzz/plays.py'))
ATTACKS = [text for text in CORPUS.values() if len(text) < 1000]
WORDS = ('a', ' b', '\n', '<', '</', '>', '>\n', '><', ' ', ';', 'x;y; ;x')
WORDS += ('Paris', '日本', r'\boxed{5}', r'\boxed{', '}')


def make(rng: random.Random):
  """A random tokenizer, and arguments of `scripted.make` but max_tokens."""
  data = shared_data()
  real = [n for n in scripted.NAMES[1:] if data and (data / n).is_dir()]
  tok = scripted.tokenizer(rng.choice(['bpe', *real]))
  layout = rng.choice(TEMPLATES)
  acts = any(kind.acts for kind in layout.blocks)
  least = untrusted.Observer(tok, layout).least
  return tok, dict(
    template=layout,
    k=rng.randint(1, 3),
    information='policy' if rng.random() < 0.3 and not acts else 'source',
    answer=rng.choice(['tags', 'tags', 'boxed']),
    max_turns=rng.randrange(4),
    max_turn_tokens=rng.randint(1, 80),
    max_observation_tokens=least + rng.randrange(150),
    train_observations=rng.random() < 0.5,
    train_information=rng.random() < 0.5,
  )


def scribble(rng: random.Random, env) -> list[int]:
  """What the policy wants to write, as ids."""
  tok, pairs = env.tokenizer, list(env.template.tags.values())
  tags, control = [*itertools.chain(*pairs)], sorted(tok.control)
  ids, text = [], ''
  for _ in range(rng.randrange(12)):
    kind, tag = rng.randrange(10), rng.choice(tags)
    half = rng.randrange(1, len(tag)) if len(tag) > 1 else 1
    if kind < 3:
      opening, closing = rng.choice(pairs)
      text += opening + rng.choice(WORDS) + closing
    elif kind < 9:
      words = [tag, tag[:half], tag[half:], tag.upper(), rng.choice(ATTACKS)]
      text += rng.choice([*words, *rng.sample(WORDS, 5)])
    if kind == 9 or rng.random() < 0.3:  # a token ends here
      ids += tok.encode(text)
      ids += [rng.choice(control)] if kind == 9 and control else []
      text = ''
  return ids + tok.encode(text)


def answers(rng: random.Random, requests) -> list:
  def attack():
    return rng.choice([*ATTACKS, 'a passage'])

  found = []
  for r in requests:
    if rng.random() < 0.1:
      found.append(SearchError(r, 'timeout', 'late'))
    elif r.tool != 'search':
      found.append(SearchResult(r, (), text=attack()))
    else:
      shown = [Passage(attack(), attack(), attack()) for _ in range(r.k)]
      found.append(SearchResult(r, tuple(shown[: rng.randint(0, r.k)])))
  return found


def expected(env, found, may_search: bool):
  """The action of a turn with these blocks: its kind of block, and queries."""
  for name, inner, complete in found:
    kind = env.template.kinds.get(name)
    text = inner.decode('utf-8', 'replace')
    if kind is None or not complete:
      continue
    if kind.ends:
      return kind, []
    if kind.acts and may_search:
      separator = env.template.query_separator if name == 'search' else ''
      parts = text.split(separator) if separator else [text]
      queries = [q.strip() for q in parts if q.strip()]
      queries = [q for i, q in enumerate(queries) if q not in queries[:i]]
      if queries:
        return kind, queries[: env.template.max_queries]
  return None, []


def check_action(env, action, wanted, queries) -> None:
  if wanted is None:
    allowed = ('eos', 'turns', 'tokens') + ('answer',) * (
      env.config.answer == 'boxed'
    )
    assert not isinstance(action, envs.Search)
    assert isinstance(action, envs.Generate) or action.end in allowed
  elif wanted.ends:
    assert action == envs.Done('answer')
  elif action != envs.Done('tokens'):  # no room for an observation
    assert [r.query for r in action.requests] == queries and queries
    assert {r.tool for r in action.requests} == {wanted.tool}


def check_segments(env, t, plain: str) -> None:
  """Kinds, blocks, train flags and outside text of a finished trajectory.

  plain: the prompt of a harmless question.
  """
  tok, c, layout = env.tokenizer, env.config, env.template
  tags, blocks, turn = parser.tags_of(layout), [], -1
  start = ''.join(tok.decode(s.ids) for s in t.segments if s.author == 'prompt')
  thought = start.rstrip().endswith(layout.think[0])
  for own, run in itertools.groupby(t.segments, lambda s: s.author == 'policy'):
    run = [*run]
    if own:
      turn += 1
      pieces = [tok.token_bytes(i) for s in run for i in s.ids.tolist()]
      first = 'think' if turn == 0 and thought else 'other'
      kinds, found = reference(pieces, first, tags)
      assert [s.kind for s in run for _ in s.ids] == kinds
      blocks += [(*block, turn) for block in found]
    for s in run:
      quoted = s.kind == 'information' and c.information == 'policy'
      if own:
        # What ends a turn is learnt, whatever it stands in.
        ends = s is run[-1] and s.ids.tolist()[-1] in tok.eos_ids
        assert s.train == (not quoted or c.train_information or ends)
      else:
        assert s.train == (turn >= 0 and c.train_observations)
        check_outside(env, s)
  mine = [b for b in env.blocks(t) if b.author == 'policy']
  assert [(b.kind, b.text, b.complete, b.turn) for b in mine] == [
    (kind, inner.decode('utf-8', 'replace').strip(), complete, n)
    for kind, inner, complete, n in blocks
  ]
  if c.answer == 'tags':
    said = [b.text for b in mine if b.kind == 'answer' and b.complete]
    assert env.answer(t) == (said[-1] if said else None)
  for tag in itertools.chain(*layout.tags.values()):
    assert start.count(tag) == plain.count(tag)


def check_outside(env, segment) -> None:
  tok, layout = env.tokenizer, env.template
  if segment.author == 'prompt':
    return
  ours = layout.observation + layout.invalid + layout.last_turn
  control = set(segment.ids.tolist()) & tok.control
  assert control <= set(tok.encode_template(ours))
  if segment.kind == 'information':
    assert len(segment.ids) <= env.config.max_observation_tokens
    text = tok.decode(segment.ids)
    for tag in itertools.chain(*layout.tags.values()):
      assert text.count(tag) <= layout.observation.count(tag), tag


def case(rng: random.Random, serve=None) -> str:
  """One play; returns how it ended."""
  del serve
  tok, how = make(rng)
  env = scripted.make(tok, **how, max_tokens=10**6)
  plain = tok.decode(env.reset(Question('q', 'x'))[0].segments[0].ids)
  asked = Question('q', rng.choice([*ATTACKS, 'who']), ('Ann',))
  room = len(env.reset(asked)[1].prompt.ids) + 1 + rng.randrange(500)
  env = scripted.make(tok, **how, max_tokens=room)
  state, action = env.reset(asked)
  ids = list(action.prompt.ids)
  while not isinstance(action, envs.Done):
    if isinstance(action, envs.Generate):
      assert 1 <= action.max_tokens <= env.config.max_turn_tokens
      event = scripted.sample(env, action, scribble(rng, env))
      ids += event.ids.tolist()
      before, block = state, state.parser.block
      state, action = env.step(state, event)
      if env.config.information == 'source':
        pieces = [tok.token_bytes(i) for i in event.ids.tolist()]
        _, found = reference(pieces, block, parser.tags_of(env.template))
        turns = before.turn < env.config.max_turns
        check_action(env, action, *expected(env, found, turns))
    else:
      assert env.config.information == 'source'
      event = answers(rng, action.requests)
      state, action = env.step(state, event)
    ids += action.append if isinstance(action, envs.Generate) else []
    written = np.concatenate([s.ids for s in state.segments]).tolist()
    assert written == ids and state.length == len(ids) <= room
    assert state.turn <= env.config.max_turns
  t = env.trajectory(state)
  check_segments(env, t, plain)
  return t.end
