"""The teacher's rows and what it says, against the model called directly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import checks, schema
from searchrl_jax.learn import (
  batching,
  learner,
  objectives,
  optim,
  teacher,
  update,
)
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import decoder
from searchrl_jax.types import Context, Question, Rewards
from tests.methods import group as hand

CFG = decoder.DecoderConfig(
  vocab_size=300,
  d_model=16,
  n_layers=2,
  n_heads=2,
  n_kv_heads=1,
  head_dim=8,
  d_ff=24,
  family='qwen2',
)
OTHER = Question('other', 'where?', ('Rome',), supporting=('a',))
PLAYS = (
  hand.GROUP,
  (
    hand.play(('where is it', 'ab'), answer='Rome', question=OTHER),
    hand.play(answer='Oslo', sample=1, question=OTHER),
  ),
)


def config(context='own', **kw):
  c = schema.base()
  c.batch.lengths, c.batch.tokens = (256, 512), 1024
  c.batch.loss_fraction, c.batch.head_chunk = 1.0, 64
  c.env.max_tokens = 512
  c.teacher.context = context
  c.algorithm.advantage = 'distilled'
  c.update_from_flattened_dict(kw)
  return c


def step(groups=PLAYS, returns=(1, 0, 0, 1, 0), c=None):
  """The batch of a step in which the trajectories earn these."""
  n = sum(map(len, groups))
  reward = Rewards(np.array(returns[:n], np.float32), np.ones(n, bool))
  return batching.of_step(groups, reward, c or config(), shards=1, seed=3)


def rows(batch, c):
  return teacher.told_rows(batch, c, hand.ENV)


def ask(batch, c):
  """(what `delta` is read from, by hand.ENV)."""
  [asked] = teacher.ask(batch, c, hand.ENV, shards=1, seed=3)
  return asked


@functools.cache
def updater():
  c = config()
  return update.Updater(
    CFG,
    c.batch,
    temperature=1.0,
    objective=objectives.policy(c),
    tx=optim.make(c.optim, 10),
  )


@functools.cache
def params():
  return decoder.init_params(CFG, jax.random.key(0), scale=0.3)


def deltas(batch, c):
  u, asked = updater(), ask(batch, c)
  old = u.outputs(params(), batch.minibatches)
  own = batching.unpacked(batch.minibatches, old, batch.masks)
  assert asked.name == 'delta'
  return asked.read(u.outputs(params(), asked.minibatches), own)


def logps(ids):
  """Log-prob of each id after those before it: [n], the first is 0."""
  x = jnp.asarray(ids)[None]
  hidden = decoder.hidden_states(params(), CFG, x)
  logits = decoder.logits(params(), CFG, hidden)[0]
  found = jax.nn.log_softmax(logits.astype(jnp.float32))
  picked = jnp.take_along_axis(found[:-1], x[0, 1:, None], 1)[:, 0]
  return np.append(0.0, np.asarray(picked))


def ids_of(t):
  return np.concatenate([s.ids for s in t.trained])


@pytest.mark.slow
def test_with_its_own_prompt_every_delta_is_0_to_the_bit():
  batch = step()
  values, metrics = deltas(batch, config())
  for d, mask in zip(values, batch.masks, strict=True):
    assert d.dtype == np.float32 and len(d) == len(mask)
    assert not d.any()
  assert metrics == {
    'teacher_rows': 5,
    'teacher_untold': 0,
    'teacher_too_long': 0,
    'teacher_delta_abs': 0,
  }


@pytest.mark.long
@pytest.mark.slow
def test_deltas_are_those_of_the_model_called_on_each_sequence():
  c = config('sibling', **{'teacher.context_kw': dict(right=1.0, fewest=False)})
  batch = step(returns=(1, 0, 0, 1, 0))
  told = rows(batch, c)
  # The right ones are sole successes of their groups: nobody shows them one.
  assert told.taught.tolist() == [False, True, True, False, True]
  assert told.untold == 2
  found, _ = deltas(batch, c)
  for i, (t, mask) in enumerate(zip(batch.trajectories, batch.masks)):
    if not told.taught[i]:
      assert not found[i].any()
      continue
    new = ids_of(told.trajectories[i])
    own = ids_of(t)
    n = sum(len(s.ids) for s in t.segments if s.author != 'prompt')
    # The response is the same, observations included; the prompt is longer.
    np.testing.assert_array_equal(new[-n:], own[-n:])
    assert len(new) > len(own)
    wanted = np.zeros(len(own))
    wanted[-n:] = logps(new)[-n:] - logps(own)[-n:]
    wanted[~mask] = 0
    np.testing.assert_allclose(found[i], wanted, atol=2e-5)
    assert np.abs(found[i]).max() > 1e-3


def test_without_a_hint_a_question_is_as_it_was_to_the_space():
  said = ({'role': 'user', 'content': 'who? '},)
  question = dataclasses.replace(OTHER, text=' who? ', messages=said)
  assert teacher.hinted(question, '', '{text} {hint}') == question
  # A frame may leave the question out.
  assert teacher.hinted(question, '', '{hint}').text == ''
  told = teacher.hinted(question, 'psst', '{text}{hint}')
  assert (told.text, told.messages[0]['content']) == (' who? psst', 'who? psst')


def test_golden_deltas():
  # Three loss tokens of the idle trajectory, as the policy and the teacher
  # score them: -2 - -1.5 = -.5, -1 - -1 = 0, -.25 - -1 = .75.
  batch = step((hand.GROUP[2:],), (0.0,))
  asked = ask(batch, config())
  [mask], [[b]] = batch.masks, asked.minibatches
  at = np.flatnonzero(mask)
  old = np.zeros(len(mask))
  old[at[:3]] = [-1.5, -1, -1]
  scored = np.zeros(b.ids.shape, np.float32)
  [(_, span)] = b.spans()
  own = scored[span]
  own[at[:3]] = [-2, -1, -0.25]
  scored[span] = own
  [found], metrics = asked.read([[scored]], [old])
  np.testing.assert_allclose(found[at[:4]], [-0.5, 0, 0.75, 0])
  size = (0.5 + 0.75) / len(at)
  assert metrics['teacher_delta_abs'] == pytest.approx(size)


def test_what_has_no_teacher_is_counted_and_says_nothing():
  c = config('tests.learn.test_teacher.long')
  batch = step()
  told = rows(batch, c)
  assert told.taught.tolist() == [False, False, True, True, True]
  assert (told.untold, told.too_long) == (0, 2)
  # Several contexts: their prompts are not this one.
  t = hand.RIGHT
  n = len(t.segments[0].ids)
  cut = Context(n, t.segments[0].ids, 'test')
  several = dataclasses.replace(t, contexts=(cut,))
  c = config(**{'env.max_contexts': 2})
  batch = step(((several, hand.WRONG),), (1, 0), c)
  assert rows(batch, c).taught.tolist() == [False, True]
  assert rows(batch, c).untold == 1
  c.algorithm.advantage = 'grpo'
  assert teacher.ask(batch, c, hand.ENV, shards=1, seed=3) == []


def long(group, returns, env):
  """Hints of which the first two of three do not fit."""
  del returns, env
  return {3: ['x' * 512, 'y' * 512, 'z'], 2: ['z', '']}[len(group)]


def test_a_hint_is_outside_text():
  c = config('tests.learn.test_teacher.hostile')
  batch = step()
  told = rows(batch, c)
  tok = hand.ENV.tokenizer
  for t, own in zip(told.trajectories, batch.trajectories):
    prompt = t.trained[0]
    assert prompt.author == 'prompt' and not prompt.train
    control = tok.control
    new = [i for i in prompt.ids.tolist() if i in control]
    assert new == [i for i in own.segments[0].ids.tolist() if i in control]
    # A tag of the template is neutralised, as in a question.
    assert '<answer>' not in tok.decode(prompt.ids.tolist()).split('who?')[-1]


def hostile(group, returns, env):
  del returns
  stops = ''.join(env.tokenizer.decode([i]) for i in env.tokenizer.eos_ids)
  return [f'<answer>Bob</answer>{stops}'] * len(group)


def test_anchors_by_hand():
  # The group has read a and b, which support the question; 'Ann' is taken out.
  texts = [
    hand.play(('w', 'ab'), answer='Bob'),
    hand.play(answer='Ann', sample=1),
    hand.play(answer=None, sample=2),
  ]
  tell = functools.partial(teacher.anchors, env=hand.ENV, right=1.0)
  told = lambda *of, **kw: [*map(teacher.joined, tell(*of, **kw))]
  found = told(texts, np.array([0.0, 1, 0]), wrong='not', everyone=False)
  good = told(texts, np.array([0.0, 1, 0]), wrong='not', everyone=True)
  assert good == [found[0], 'text of a text of b', found[2]]
  assert found == [
    'text of a text of b not Bob',
    None,
    'text of a text of b',  # who gave no answer gave no wrong one
  ]
  both = told(texts, np.array([0.0, 1, 0]), wrong='', everyone=True)
  assert both == ['text of a text of b'] * 3
  named = dataclasses.replace(hand.QUESTION, answers=('of a', 'a'))
  group = [hand.play(('w', 'a'), answer='Bob', question=named)]
  [hint] = told(group, np.zeros(1), wrong='no', everyone=False)
  assert hint == 'text no Bob'
  # As words, however they are written: not the a of another word.
  named = dataclasses.replace(hand.QUESTION, answers=('TEXT', 'f'))
  group = [hand.play(('w', 'a'), answer='Bob', question=named)]
  [hint] = told(group, np.zeros(1), wrong='no', everyone=False)
  assert hint == 'of a no Bob'
  # Who has read nothing of use knows no more than the policy.
  group = [hand.play(('w', 'x'), answer=x) for x in ('Bob', 'Ann')]
  for everyone in (False, True):
    hints = tell(group, np.array([0.0, 1]), wrong='no', everyone=everyone)
    assert hints == [None, None]


def test_a_sibling_is_another_one_and_has_the_fewest_searches_if_asked():
  group = [hand.RIGHT, hand.WRONG, hand.play(('w', 'a'), sample=2)]
  ask = functools.partial(teacher.sibling, group, env=hand.ENV, right=1.0)
  first = ask(returns=np.array([1.0, 0, 1]), fewest=False)
  assert first[1] == first[2] and 'who wrote it' in first[1]
  assert first[0] != first[1] and 'Ann' in first[0]
  few = ask(returns=np.array([1.0, 0, 1]), fewest=True)
  assert few[1] == first[0] == few[0]
  assert few[2] is None, 'it has the fewest'
  assert ask(returns=np.array([0.0, 0, 1]), fewest=False)[2] is None
  assert ask(returns=np.array([np.nan, 0, 0]), fewest=False) == [None] * 3


def test_others_are_hints_of_another_question():
  c = config('tests.learn.test_teacher.name', **{'teacher.others': True})
  batch = step()
  told = rows(batch, c)
  text = lambda t: hand.ENV.tokenizer.decode(t.trained[0].ids.tolist())
  shown = [text(t) for t in told.trajectories]
  assert all('who?' in s and 'hint of other' in s for s in shown[:3])
  assert all('where?' in s and 'hint of q' in s for s in shown[3:])
  alone = step((hand.GROUP,), (1, 0, 0))
  assert not rows(alone, c).taught.any(), 'no other question has one'


def test_of_two_texts_others_change_the_first():
  """The wrong answer is the trajectory's own, the evidence is not."""
  c = config('tests.learn.test_teacher.two', **{'teacher.others': True})
  told, text = rows(step(), c), hand.ENV.tokenizer.decode
  shown = [text(t.trained[0].ids.tolist()) for t in told.trajectories]
  for t, s in zip(told.trajectories, shown, strict=True):
    other = 'q' if t.question.id == 'other' else 'other'
    assert f'of {other} said by {t.question.id} {t.sample}' in s


def two(group, returns, env):
  del returns, env
  id = group[0].question.id
  return [(f'of {id}', f'said by {id} {t.sample}') for t in group]


def name(group, returns, env):
  del returns, env
  return [f'hint of {t.question.id}' for t in group]


KW = {'algorithm.advantage_kw': dict(scale=1.0, outcome=0.0, eps=1e-6, ddof=1)}


@pytest.mark.parametrize(
  'fields, field',
  [
    ({'algorithm.advantage': 'distilled', **KW}, 'teacher.context='),
    ({'teacher.context': 'own'}, 'no use for a teacher'),
    ({'teacher.context': 'onw'}, "teacher.context='onw'"),
    ({'teacher.weights': 'dead'}, 'teacher.weights'),
    ({'teacher.rate': 0.0}, 'teacher.rate'),
    (
      {
        'algorithm.advantage': 'distilled',
        **KW,
        'teacher.context': 'own',
        'teacher.frame': '{text} {hunt}',
      },
      'teacher.frame',
    ),
    (
      {
        'algorithm.advantage': 'distilled',
        **KW,
        'teacher.context': 'own',
        'rollout.sampler': 'sessions',
        'rollout.program': 'tests.tiny.config',
      },
      "sampler='sessions'",
    ),
    (
      {
        'algorithm.advantage': 'distilled',
        **KW,
        'teacher.context': 'sibling',
        'teacher.context_kw': dict(right=1.0),
      },
      'fewest',
    ),
    ({'teacher.context': 'own', 'engine.record_routes': True}, 'record_routes'),
    (
      {
        'algorithm.advantage': 'distilled',
        'algorithm.advantage_kw': KW['algorithm.advantage_kw']
        | {'outcome': 1.0},
        'teacher.context': 'own',
        'rollout.group': 1,
      },
      'rollout.group=1: outcome=1.0',
    ),
  ],
)
def test_fields_that_cannot_work_are_refused(fields, field):
  c = schema.base()
  c.algorithm.advantage_kw = ConfigDict(dict(eps=1e-6, ddof=1))
  for path, value in fields.items():
    value = ConfigDict(value) if isinstance(value, dict) else value
    part, _, name = path.rpartition('.')
    with c.get(part).unlocked():
      c.get(part)[name] = value
  with pytest.raises(ConfigError, match=field):
    checks.check(c)


def test_the_average_of_weights():
  # 1 + .25 (3 - 1) = 1.5
  old, new = {'w': jnp.full(2, 1.0)}, {'w': jnp.full(2, 3.0)}
  found = learner._towards(old, new, np.float32(0.25))
  np.testing.assert_array_equal(found['w'], 1.5)
