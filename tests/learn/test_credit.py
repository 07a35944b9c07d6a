"""What each advantage function is handed, with the arithmetic shown."""

import collections
import contextlib
import functools
import types

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from configs import algorithms
from searchrl_jax import schema
from searchrl_jax.learn import (
  advantages,
  batching,
  credit,
  learner,
  teacher,
  update,
)
from searchrl_jax.models import parameters
from searchrl_jax.store import records
from searchrl_jax.types import Question, Rewards, Segment, Trajectory


def trajectory(q: int, sample: int) -> Trajectory:
  """Five tokens: a prompt of 1, 2 of the policy, 1 read, 1 of the policy."""

  def segment(ids, author, train):
    logps = np.full(len(ids), -1.0, np.float32) if train else None
    return Segment(
      np.array(ids, np.int32), author, 'other', train=train, logps=logps
    )

  return Trajectory(
    Question(f'q{q}', ''),
    (
      segment([1], 'prompt', False),
      segment([2, 3], 'policy', True),
      segment([4], 'environment', False),
      segment([5], 'policy', True),
    ),
    (),
    'answer',
    sample=sample,
  )


GROUPS = [tuple(trajectory(q, s) for s in range(2)) for q in range(2)]
IDS = np.array([0, 0, 1, 1])
MASK = np.array([False, True, True, False, True])


def make(name, **fields):
  c = schema.base()
  c.algorithm.update(getattr(algorithms, name))
  c.batch.lengths, c.batch.tokens = (8,), 32
  c.update_from_flattened_dict(fields)
  flat = [t for g in GROUPS for t in g]
  kept = np.ones(4, bool)
  return c, batching.make(flat, kept, IDS, c.batch), kept


def step(reward, kept, minibatches):
  flat = [t for g in GROUPS for t in g]
  return batching.StepBatch(
    GROUPS,
    flat,
    reward,
    advantages.returns(reward.value),
    IDS,
    kept,
    {},
    batching.masks(flat),
    minibatches,
  )


def arrays(minibatches, per_row):
  """Array [B, T] for each microbatch from one [5] for each trajectory."""
  out = []
  for mini in minibatches:
    out.append([])
    for b in mini:
      x = np.zeros(b.ids.shape, np.float32)
      for r, at in b.spans():
        x[at] = per_row[r]
      out[-1].append(x)
  return out


def test_every_array_has_who_takes_it():
  assert {name: credit.needs(name) for name in advantages.NAMES} == {
    'grpo': (),
    'dr_grpo': (),
    'rloo': (),
    'reinforce': (),
    'whitened': (),
    'whitened_tokens': ('mask',),
    'reinforce_pp_baseline': (),
    'lite_ppo': (),
    'remax': ('greedy',),
    'gae': ('mask', 'critic'),
    'turn_normalised': ('mask', 'structure'),
    'distilled': ('delta',),
    'given': (),
    'zero': (),
    'grpo_within': ('structure',),
  }


def test_whole_trajectories_see_returns_less_the_kl_of_all_their_tokens():
  # k1 = old - ref = -1 + 1.5 = 0.5 for each of 3 loss tokens: 1.5, times the
  # coefficient 0.1 is 0.15. Leave one out of rewards less 0.15: 1 - 0 = 1.
  c, minis, kept = make('RLOO', **{'algorithm.kl_coef': 0.1})
  reward = Rewards(np.float32([1, 0, 0, 0]), np.ones(4, bool))
  old = arrays(minis, [np.full(5, -1.0)] * 4)
  ref = arrays(minis, [np.full(5, -1.5)] * 2 + [np.full(5, -2.0)] * 2)
  found = credit.assign(
    c, step(reward, kept, minis), old=old, ref=ref, values=None, greedy=None
  )
  np.testing.assert_allclose(found.advantages, [1, -1, 0, 0], atol=1e-6)
  assert found.targets is None
  # kl_ref: (2 x 3 x 0.5 + 2 x 3 x 1.0) / 12 tokens. The second of two groups
  # has no advantage other than 0.
  assert found.metrics == {
    'kl_ref': pytest.approx(0.75),
    'gradient_groups': 0.5,
  }


def test_groups_that_only_a_teacher_moves_carry_a_gradient():
  c, minis, kept = make('GRPO')
  c.algorithm.advantage, c.algorithm.advantage_kw = 'zero', {}
  reward = Rewards(np.float32([1, 0, 0, 0]), np.ones(4, bool))
  share = {}
  for compared in ((0, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 1)):
    told = teacher.Said({}, {}, compared=np.array(compared, bool))
    found = credit.assign(
      c, step(reward, kept, minis), old=None, ref=None, values=None,
      greedy=None, told=told,
    )  # fmt: skip
    share[compared] = found.metrics['gradient_groups']
  assert [*share.values()] == [0, 0.5, 1]


def test_gae_sees_what_each_token_earned_and_its_own_kl():
  # No discount: returns to go. Row 0 earns 1 at its last token, 0.2 at its
  # first; KL 0.5 a token, times 0.1: each loss token costs 0.05.
  #   rewards 0.15, -0.05, 0.95;  to go 1.05, 0.90, 0.95;  V = 0.5
  c, minis, kept = make('PPO', **{'algorithm.kl_coef': 0.1})
  c.algorithm.advantage_kw.whiten = False
  given = np.zeros((4, 5), np.float32)
  given[0, 1], given[0, 4] = 0.2, 1.0
  reward = Rewards(tuple(given), np.ones(4, bool), 'token')
  old = arrays(minis, [np.full(5, -1.0)] * 4)
  ref = arrays(minis, [np.full(5, -1.5)] * 4)
  values = arrays(minis, [np.full(5, 0.5)] * 4)
  found = credit.assign(
    c, step(reward, kept, minis), old=old, ref=ref, values=values, greedy=None
  )
  np.testing.assert_allclose(
    found.targets[0], [0, 1.05, 0.90, 0, 0.95], rtol=1e-6
  )
  np.testing.assert_allclose(
    found.advantages[0], [0, 0.55, 0.40, 0, 0.45], rtol=1e-5
  )
  np.testing.assert_allclose(  # nothing earned: 3, 2, 1 times -0.05
    found.targets[1], [0, -0.15, -0.10, 0, -0.05], rtol=1e-6
  )


@pytest.mark.parametrize('at', ['trajectory', 'segment', 'token'])
def test_the_place_of_a_reward_shows_token_by_token(at):
  # 1 for the second turn, 0.5 for the first, where it can be told apart.
  value = {
    'trajectory': np.float32([1.5] * 4),
    'segment': (np.float32([0, 0.5, 0, 1]),) * 4,
    'token': (np.float32([0, 0, 0.5, 0, 1]),) * 4,
  }[at]
  c, minis, kept = make(
    'REINFORCE_PP',
    **{
      'algorithm.advantage': 'whitened_tokens',
      'algorithm.kl': 'none',
      'algorithm.kl_coef': 0.0,
    },
  )
  c.algorithm.advantage_kw = dict(gamma=1.0, eps=0.0)
  found = credit.assign(
    c,
    step(Rewards(value, np.ones(4, bool), at), kept, minis),
    old=[None],
    ref=[None],
    values=None,
    greedy=None,
  ).advantages[0]
  if at == 'trajectory':  # to go: 1.5 everywhere, no spread
    assert not found.any()
  else:  # to go: 1.5 1.5 1; mean 4/3, std sqrt(1/18)
    want = np.array([0, 1 / 6, 1 / 6, 0, -1 / 3]) / np.sqrt(1 / 18)
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_what_is_left_out_of_the_batch_is_in_no_statistic():
  c, _, kept = make('PPO')
  c.algorithm.kl, c.algorithm.kl_coef = 'none', 0.0
  kept[2:] = False
  flat = [t for g in GROUPS for t in g]
  minis = batching.make(flat, kept, IDS, c.batch)
  values = arrays(minis, [np.zeros(5)] * 4)

  def advantage(last):
    reward = Rewards(np.float32([1, 0, last, last]), np.ones(4, bool))
    return credit.assign(
      c,
      step(reward, kept, minis),
      old=[None],
      ref=[None],
      values=values,
      greedy=None,
    ).advantages

  for a, b in zip(advantage(0.0), advantage(7.0)):
    np.testing.assert_array_equal(a, b)
  assert not advantage(7.0)[2].any()


def test_greedy_answers_are_remaxs_baseline():
  c, minis, kept = make('REMAX')
  reward = Rewards(np.float32([1, 0, 1, 1]), np.ones(4, bool))
  found = credit.assign(
    c,
    step(reward, kept, minis),
    old=[None],
    ref=[None],
    values=None,
    greedy=np.array([0.25, np.nan]),
  )
  np.testing.assert_allclose(found.advantages, [0.75, -0.25, 0, 0])


def test_turns_are_compared_within_the_group():
  # Turns earn, of question 0: 0 then 3, and 2 then 3; of question 1: 1 then 1.
  # All four turns of question 0: mean 2, squares 4 + 1 + 0 + 1 = 6, biased
  # std sqrt(3/2) = s; z = -2/s 1/s, and 0 1/s. With gamma 1/2 the first turns
  # get z_0 + z_1 / 2 = -1.5/s and 0.5/s. Question 1 has equal turns: 0.
  # With the same turn alone: 0 2 has mean 1 and std 1; 3 3 is equal: z = -1 0,
  # and 1 0.
  value = [(0, 0, 0, 3), (0, 2, 0, 3), (0, 1, 0, 1), (0, 1, 0, 1)]
  reward = Rewards(
    tuple(np.float32(v) for v in value), np.ones(4, bool), 'segment'
  )
  s = np.sqrt(1.5)
  for same_turn, want in (
    (False, [[-1.5 / s, 1 / s], [0.5 / s, 1 / s]]),
    (True, [[-1, 0], [1, 0]]),
  ):
    c, minis, kept = make('RLOO')
    c.algorithm.update(kl='none', kl_coef=0.0, advantage='turn_normalised')
    c.algorithm.advantage_kw = dict(
      gamma=0.5, eps=0.0, ddof=0, same_turn=same_turn
    )
    found = credit.assign(
      c,
      step(reward, kept, minis),
      old=[None],
      ref=[None],
      values=None,
      greedy=None,
    ).advantages
    # Tokens 1 2 are the first turn, 4 the second; 0 and 3 are no one's.
    for row, (first, second) in zip(found, [*want, (0, 0), (0, 0)]):
      np.testing.assert_allclose(
        row, [0, first, first, 0, second], rtol=1e-6, atol=1e-7
      )
    [batch] = batching.set_advantages(minis[0], found)
    np.testing.assert_allclose(
      batch.advantages[0, :5],
      [0, want[0][0], want[0][0], 0, want[0][1]],
      rtol=1e-6,
    )
    assert not batch.advantages[~batch.mask].any()


def test_a_turn_left_out_of_the_batch_is_in_no_statistic():
  c, minis, kept = make('RLOO')
  c.algorithm.update(kl='none', kl_coef=0.0, advantage='turn_normalised')
  c.algorithm.advantage_kw = dict(gamma=1.0, eps=0.0, ddof=0, same_turn=True)
  kept[1] = False

  def advantage(last):
    value = tuple(np.float32([0, r, 0, 0]) for r in (1, last, 1, 3))
    return credit.assign(
      c,
      step(Rewards(value, np.ones(4, bool), 'segment'), kept, minis),
      old=[None],
      ref=[None],
      values=None,
      greedy=None,
    ).advantages

  got = advantage(0.0)
  for a, b in zip(got, advantage(7.0)):
    np.testing.assert_array_equal(a, b)
  assert not got[0].any() and not got[1].any()  # alone; left out
  np.testing.assert_allclose(got[3], [0, 1, 1, 0, 0], atol=1e-6)


# --- Steps in which little or nothing is kept.


class Programs:
  """In place of `update.Updater`: computes nothing."""

  shapes: dict = {}
  frozen: dict = {}
  shards = 1

  def __init__(self, cfg, batch, *, objective, **_):
    self.objective = objective

  def outputs(self, params, minibatches):
    score = lambda b: np.where(b.mask, np.float32(-1.0), 0)
    return [[score(b) for b in mini] for mini in minibatches]

  def step(self, state, batches, old=None, ref=None):
    assert batches and any(b.mask.any() for b in batches)
    return state, collections.defaultdict(float, loss=0.5, finite=1.0)


@functools.cache
def made(name, kl, minibatches, epochs, dropped):
  """A config and its learner."""
  c, *_ = make(name)
  c.algorithm.update(
    kl=kl,
    kl_estimator='k3' if kl == 'loss' else c.algorithm.kl_estimator,
    kl_coef=0.1 * (kl != 'none'),
    minibatches=minibatches,
    epochs=epochs,
    drop_zero_variance=dropped,
    horizon=5,
  )
  c.model.arch.update(
    model_type='llama',
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
  )
  c.critic.lr = 1e-3 if 'critic' in credit.needs(c.algorithm.advantage) else 0.0
  with pytest.MonkeyPatch.context() as m:
    m.setattr(update, 'Updater', Programs)
    found = learner.Learner(c, parameters.model_config(c, 300), None)
  found._state = found._critic_state = update.TrainState({}, (), 0)
  found._peak = 0.0
  return c, found


@pytest.mark.long
@settings(max_examples=200)
@given(st.data())
def test_a_step_keeps_what_can_be_used_if_that_is_nothing_too(data):
  draw = lambda *values: data.draw(st.sampled_from(values))
  names = [n for n in vars(algorithms) if n.isupper() and n[0] != '_']
  name, kl = draw(*names), draw('none', 'loss', 'reward')
  c, own = made(name, kl, draw(1, 2), draw(1, 2), draw(False, True))
  at = draw('trajectory', 'segment', 'token')
  size = {'trajectory': (), 'segment': (4,), 'token': (5,)}[at]
  each = draw((0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 2, 2), (3, 1, 0, 2))
  value = [np.full(size, x, np.float32) for x in each]
  valid = np.array(data.draw(st.lists(st.booleans(), min_size=4, max_size=4)))
  valid &= draw(False, True)
  reward = Rewards(np.array(value) if not size else tuple(value), valid, at)

  run = types.SimpleNamespace(step=0, check_finite=lambda *_: None)
  run.writer = types.SimpleNamespace(timer=lambda _: contextlib.nullcontext())
  batch = batching.of_step(GROUPS, reward, c, shards=1, seed=0)
  outputs = own.outputs(batch, run.writer.timer)
  found = credit.assign(
    c, batch, **outputs._asdict(), greedy=np.array([np.nan, 1.0])
  )
  learned = own.update(batch.minibatches, outputs, found, run)
  row = own.record(batch, outputs, found)
  kept = row['kept']
  assert not (kept & ~valid).any()
  assert bool(learned) == bool(batch.minibatches) == kept.any()
  for i in range(4):
    assert np.isfinite(found.advantages[i]).all()
    assert kept[i] or not np.any(found.advantages[i])
  logps = row['trainer_logps']
  assert (logps is None) == (not own.needs_old())
  rows = [
    records.Record(
      0,
      batch.trajectories[i],
      kept=kept[i],
      advantages=found.advantages[i],
      trainer_logps=None if logps is None else logps[i],
    )
    for i in range(4)
  ]
  written = [*records.read(records.encode(rows))]
  assert [r.kept for r in written] == kept.tolist()
  for r in written:
    assert (r.advantages is not None) == r.kept
    assert (r.trainer_logps is not None) == (r.kept and own.needs_old())
