"""Critic, greedy baseline, rounds and unmasked observations, through the loop.

Each run is killed once and resumed: its parameters are those of a run that
was not, bit by bit.
"""

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import algorithms
from configs.methods import core as methods
from configs.methods import igpo
from searchrl_jax import train
from searchrl_jax.learn import critic as critics
from searchrl_jax.learn import update
from searchrl_jax.models import parameters
from searchrl_jax.run import build
from searchrl_jax.store import checkpoint, records
from tests import tiny
from tests.loop.test_train import Killed, lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]


def config(url, algorithm, reward, **fields):
  c = tiny.config(url)
  c.algorithm.update(getattr(algorithms, algorithm))
  c.reward = ConfigDict(dict(r=dict(fn=f'tests.tiny.{reward}', weight=1.0)))
  c.data.eval = ConfigDict()
  c.update_from_flattened_dict(fields)
  return c


def saved(c, workdir):
  """Everything a checkpoint holds, as one list of arrays."""
  tok = build.tokenizer(c, str(workdir))
  cfg = parameters.model_config(c, tok.vocab_size)
  mesh = build.mesh(c)
  like = {'state': {'params': parameters.shapes(cfg, mesh)}}
  if c.critic.lr:
    like['critic'] = {
      'params': parameters.shapes(critics.config(cfg), mesh, critics)
    }
  found = checkpoint.of_run(c, str(workdir)).restore(
    like, 'latest', fingerprint=None, partial=True
  )
  return jax.tree.map(np.asarray, found.state)


def run_twice(c, folder, monkeypatch, nth):
  """A whole run, and one killed at the nth update and resumed."""
  train.train(c, str(folder / 'whole'))
  real, calls = update.Updater.step, []

  def killed(*args, **kw):
    calls.append(1)
    if len(calls) == nth:
      raise Killed
    return real(*args, **kw)

  with monkeypatch.context() as m:
    m.setattr(update.Updater, 'step', killed)
    with pytest.raises(Killed):
      train.train(c, str(folder / 'killed'))
  train.train(c, str(folder / 'killed'))
  one, two = (saved(c, folder / x) for x in ('whole', 'killed'))
  for (path, a), b in zip(
    jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True
  ):
    np.testing.assert_array_equal(a, b, err_msg=str(path))
  a, b = (
    [*records.read(folder / x / 'trajectories')] for x in ('whole', 'killed')
  )
  assert [(r.step, r.trajectory.id) for r in a] == [
    (r.step, r.trajectory.id) for r in b
  ]
  steps = lines(folder / 'whole' / 'metrics.jsonl')
  return one, [s for s in steps if s['step'] >= 0], a


@pytest.mark.long
def test_ppo_by_turns_with_observations_in_the_loss(url, tmp_path, monkeypatch):
  c = config(
    url,
    'PPO',
    'by_turn',
    **{
      'critic.lr': 1e-3,
      'critic.pretrain_steps': 1,
      'env.train_observations': True,
      'algorithm.minibatches': 2,
    },
  )
  # Updates: two of the critic alone, then critic and policy in turns.
  state, steps, kept = run_twice(c, tmp_path, monkeypatch, 6)
  assert state['critic']['params']['value'].any()
  assert 'train/entropy' not in steps[0], 'the critic alone learns at first'
  for name in (
    'train/entropy',
    'train/critic_loss',
    'train/kl_ref',
    'train/critic_explained_variance',
    'time/critic',
  ):
    assert name in steps[1], name
  # A second update of the critic in a step starts from values that are not 0.
  assert steps[2]['train/critic_value'] != 0
  read = [
    s for r in kept for s in r.trajectory.segments if s.author != 'policy'
  ]
  assert any(s.train for s in read if s.author == 'environment')
  assert not any(s.train for s in read if s.author == 'prompt')
  # Two updates a step: the trainer scores before the first, observations in
  # the loss included, and about as the engine did.
  for r in kept:
    logps = np.concatenate(
      [
        np.full(len(s.ids), np.nan) if s.logps is None else s.logps
        for s in r.trajectory.segments
      ]
    )
    learnt = np.concatenate(
      [np.full(len(s.ids), s.train) for s in r.trajectory.segments]
    )
    assert (np.isfinite(r.trainer_logps) == learnt).all()
    both = np.isfinite(logps)
    np.testing.assert_allclose(
      r.trainer_logps[both], logps[both], rtol=2e-3, atol=1e-3
    )
  # Nothing was recorded of them: their weight is 1, their mismatch 0.
  assert steps[2]['train/mismatch_max'] < 1e-3


async def likelihood(trajectories, context, *, frame):
  """IGPO's, of the weights that are about to be updated."""
  assert context.engine.version == context.step
  return await igpo.likelihood(trajectories, context, frame=frame)


@pytest.mark.long
def test_credit_of_searches_reaches_the_critic(url, tmp_path):
  """Exact and by likelihood; the compiled programs are those of PPO above."""
  c = config(
    url,
    'PPO',
    'shortness',
    **{
      'critic.lr': 1e-3,
      'critic.pretrain_steps': 1,
      'algorithm.minibatches': 2,
      'rollout.sampler': 'tests.samplers.scripted',
    },
  )
  gain = dict(phi=f'{__name__}.likelihood', phi_kw=dict(frame=''), weight=2.0)
  c.reward = ConfigDict(
    dict(
      em=dict(fn='answer.em', weight=1.0),
      gain=methods.PROGRESS | gain,
      search=methods.PROGRESS | dict(scale=0.5),
    )
  )
  train.train(c, str(tmp_path))
  steps = [s for s in lines(tmp_path / 'metrics.jsonl') if s['step'] >= 0]
  assert len(steps) == 3
  assert all(s['train/mismatch_max'] < 1e-3 for s in steps[1:])
  gains = {s['reward/gain'] for s in steps}
  assert len(gains) == 3 and 0.0 not in gains, 'each step has other weights'
  assert steps[1]['train/grad_norm'] > 0
  for s in steps:
    # One of two samples reads the first passage that its question needs.
    assert s['reward/em'] == 0.5 and 0.25 <= s['reward/search/phi'] <= 0.5
    assert s['reward/search'] == pytest.approx(0.5 * s['reward/search/phi'])
    total = s['reward/em'] + s['reward/search'] + 2 * s['reward/gain']
    assert s['reward'] == pytest.approx(total, rel=1e-5)


@pytest.mark.long
def test_remax_learns_from_greedy_answers(url, tmp_path):
  c = config(url, 'REMAX', 'odd', **{'rollout.group': 1, 'train.steps': 2})
  train.train(c, str(tmp_path))
  kept = [
    (r.reward, np.nanmax(r.advantages), np.nanmin(r.advantages))
    for r in records.read(tmp_path / 'trajectories')
  ]
  for reward, most, least in kept:  # the greedy answer earned 0 or 1
    assert most == least and most in (reward, reward - 1.0)
  assert len({most for _, most, _ in kept}) > 1
  assert 'time/greedy' in lines(tmp_path / 'metrics.jsonl')[-1]


@pytest.mark.long
def test_dapo_fills_up_for_groups_of_equal_rewards(url, tmp_path, monkeypatch):
  c = config(url, 'DAPO', 'odd', **{'rollout.refill': 2})
  _, steps, kept = run_twice(c, tmp_path, monkeypatch, 2)
  for step in range(c.train.steps):
    by_question = {}
    for r in kept:
      if r.step == step:
        by_question.setdefault(r.trajectory.question.id, []).append(r)
    assert all(len(group) == 2 for group in by_question.values())
    varied = [
      len({r.reward for r in group}) > 1 for group in by_question.values()
    ]
    # What all earned alike was left out, and says so.
    for group, differs in zip(by_question.values(), varied, strict=True):
      assert {r.kept for r in group} == {differs}
      assert {r.advantages is not None for r in group} == {differs}
    varied = sum(varied)
    assert varied <= 4
    # Filled up, or both rounds used.
    assert varied == 4 or len(by_question) > 6
    assert steps[step]['batch/groups'] == len(by_question)
    assert steps[step]['train/sequences'] == 2 * varied
  assert any(s['batch/groups'] > 4 for s in steps)


@pytest.mark.long
@pytest.mark.parametrize(
  'algorithm, reward, fields',
  [
    ('DAPO', 'same', {'algorithm.minibatches': 2, 'rollout.refill': 1}),
    ('RLOO', 'unusable', {}),  # a KL in the reward
  ],
)
def test_a_step_in_which_nothing_is_kept_is_a_step(
  url, tmp_path, algorithm, reward, fields
):
  c = config(url, algorithm, reward, **{'train.steps': 2, **fields})
  train.train(c, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  assert [s['step'] for s in steps] == [-1, 0, 1]
  kept = [*records.read(tmp_path / 'trajectories')]
  for s in steps[1:]:
    assert s['train/gradient_groups'] == 0.0 and 'train/loss' not in s
    assert s['reward'] == (1.0 if reward == 'same' else None)
    assert s['reward/r/half'] == (0.5 if reward == 'same' else None)
    assert s['batch/groups'] * 2 == sum(r.step == s['step'] for r in kept)
  assert not any(r.kept for r in kept)
  assert all(r.advantages is r.trainer_logps is None for r in kept)
  assert checkpoint.of_run(c, str(tmp_path)).latest() == 2


def by_turns(record):
  """The advantages of each turn's loss tokens; none elsewhere."""
  turns, at, answered = [], 0, True
  for s in record.trajectory.segments:
    here = np.asarray(record.advantages[at : at + len(s.ids)], np.float64)
    at += len(s.ids)
    assert (np.isnan(here) == (not s.train)).all()
    if s.author == 'policy':
      turns += [[]] if answered else []
      turns[-1] += here.tolist()
    answered = s.author != 'policy'
  return turns


@pytest.mark.long
def test_an_advantage_by_dotted_path_sees_turns(url, tmp_path):
  c = config(url, 'REINFORCE', 'shortness', **{'train.steps': 2})
  c.algorithm.advantage = 'tests.tiny.first_turn'
  c.algorithm.advantage_kw = dict(scale=0.25)
  train.train(c, str(tmp_path))
  groups = {}
  for r in records.read(tmp_path / 'trajectories'):
    groups.setdefault((r.step, r.trajectory.question.id), []).append(r)
  assert len(groups) == 8
  several = nonzero = 0
  for group in groups.values():
    mean = np.mean([r.reward for r in group])
    for r in group:
      first, *others = by_turns(r)
      # The records hold float16.
      np.testing.assert_allclose(first, 0.25 * (r.reward - mean), rtol=1e-3)
      assert not any(map(any, others))
      several += bool(others)
      nonzero += first[0] != 0
  assert several and nonzero
  assert np.isfinite(lines(tmp_path / 'metrics.jsonl')[-1]['train/loss'])


@pytest.mark.long
def test_turns_are_compared_with_those_of_their_number(url, tmp_path):
  c = config(url, 'REINFORCE', 'by_turn', **{'train.steps': 1})
  c.algorithm.advantage = 'turn_normalised'
  c.algorithm.advantage_kw = dict(gamma=0.5, eps=0.0, ddof=0, same_turn=True)
  train.train(c, str(tmp_path))
  groups, several = {}, 0
  for r in records.read(tmp_path / 'trajectories'):
    groups.setdefault(r.trajectory.question.id, []).append(r)
  for group in groups.values():
    turns = [by_turns(r) for r in group]
    assert all(len(set(turn)) == 1 for row in turns for turn in row)
    a, b = ([turn[0] for turn in row] for row in turns)
    # Of two trajectories the better turn has z = 1, the other -1, equal ones
    # 0; a second turn that only one has: 0. With gamma 1/2: z_0 + z_1 / 2.
    z = [
      (row[0] - 0.5 * row[1], row[1]) if len(row) > 1 else (row[0], 0)
      for row in (a, b)
    ]
    for mine, other in zip(*z):
      assert mine == -other and mine in (-1, 0, 1)
    if min(len(a), len(b)) == 1:
      assert z[0][1] == 0
    several += len(a) == len(b) == 2 and z[0][1] != 0
  assert several
