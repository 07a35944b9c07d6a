"""Critic, greedy baseline, rounds and unmasked observations, through the loop.

Each run is killed once and resumed: its parameters are those of a run that
was not, bit by bit.
"""

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import algorithms
from searchrl_jax import train
from searchrl_jax.learn import update
from searchrl_jax.models import critic as critics
from searchrl_jax.run import build, records
from tests import tiny
from tests.test_train import Killed, lines


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
  cfg = build.model_config(c, tok.vocab_size)
  mesh = build.mesh(c)
  like = {'state': {'params': build.shapes(cfg, mesh)}}
  if c.critic.lr:
    like['critic'] = {
      'params': build.shapes(critics.config(cfg), mesh, critics)
    }
  found = build.saver(c, str(workdir)).restore(
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


def test_ppo_by_turns_with_observations_in_the_loss(url, tmp_path, monkeypatch):
  c = config(
    url,
    'PPO',
    'by_turn',
    **{
      'critic.lr': 1e-3,
      'critic.alone': 1,
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
