"""Samplers through the loop: they train, and a run that was cut goes on."""

import dataclasses
import os
import signal
import time

import jax
import numpy as np
import pytest

from searchrl_jax import train
from searchrl_jax.devices import signals
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import parameters
from searchrl_jax.rollout import collector, revise
from searchrl_jax.run import build
from searchrl_jax.store import records
from tests import tiny
from tests.loop.test_algorithms import saved
from tests.loop.test_train import EXPERTS, lines
from tests.rollout.test_samplers import turns

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]

TREE = dict(sampler='tree', group=3, trees=1, rounds=2)


def config(url, **rollout):
  c = tiny.config(url)
  c.rollout.update(rollout)
  c.env.max_turns = 2  # three turns, two of which a leaf may part after
  c.eval.every = 0
  c.train.steps = 2
  return c


def sampled(folder):
  """Everything that was recorded of trajectories, but for seconds."""
  return [
    (
      r.step,
      r.trajectory.id,
      dict(r.trajectory.meta),
      r.reward,
      [
        (s.ids.tolist(), s.logps is None or s.logps.tolist())
        for s in r.trajectory.segments
      ],
    )
    for r in records.read(folder / 'trajectories')
  ]


def same(c, one, two):
  a, b = saved(c, one), saved(c, two)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y)
  assert sampled(one) == sampled(two)


@pytest.fixture(scope='module')
def tree(url, tmp_path_factory):
  folder = tmp_path_factory.mktemp('tree')
  c = config(url, **TREE)
  train.train(c, str(folder))
  return c, folder


@pytest.mark.long
def test_experts_of_leaves_are_replayed(url, tmp_path):
  c = config(url, **TREE)
  c.model.arch.update(EXPERTS)
  c.engine.record_routes = True
  train.train(c, str(tmp_path))
  for step in lines(tmp_path / 'metrics.jsonl'):
    assert step['train/routes_unknown'] == 0
    assert step['train/routes_differ'] < 0.05


def test_trees_train_with_grpo(tree):
  c, folder = tree
  steps = lines(folder / 'metrics.jsonl')
  assert [s['step'] for s in steps] == [0, 1]
  assert c.algorithm.advantage == 'grpo'
  assert all(s['train/grad_norm'] > 0 for s in steps)
  # The trainer agrees with what the engine recorded of forks.
  assert max(s['train/mismatch_max'] for s in steps) < 1e-3
  kept = [*records.read(folder / 'trajectories')]
  assert len(kept) == 2 * 4 * 3 and all(r.kept for r in kept)
  leaves = [r.trajectory for r in kept if r.trajectory.meta['node']]
  assert leaves
  generations = sum(s['rollout/generations'] for s in steps)
  nodes = {
    (r.step, r.trajectory.question.id, p)
    for r in kept
    for p in r.trajectory.meta['path']
  }
  assert generations == len(nodes) < sum(r.trajectory.turns for r in kept)
  fresh = parameters.initial(c, *_model(c, folder))
  learnt = saved(c, folder)['state']['params']
  changed = jax.tree.map(lambda a, b: bool((a != b).any()), fresh, learnt)
  assert any(jax.tree.leaves(changed))


def _model(c, folder):
  tok = build.tokenizer(c, str(folder))
  return parameters.model_config(c, tok.vocab_size), build.mesh(c)


@pytest.mark.parametrize('ended', [1, 8])
def test_a_step_of_trees_that_is_cut_is_resumed(
  tree, tmp_path, monkeypatch, ended
):
  """Bitwise; trees that were whole are not sampled again."""
  c, folder = tree
  c = c.copy_and_resolve_references()
  c.rollout.concurrency = 3  # one tree after another
  real, told = collector.rollout, []
  default = signal.getsignal(signal.SIGTERM)

  async def cut(*args, on_trajectory, step, **kw):
    def tell(trajectory):
      on_trajectory(trajectory)
      told.append(trajectory.id)
      if step == 1 and len(told) == 12 + ended:
        os.kill(os.getpid(), signal.SIGTERM)
        # The run restores this when it has seen the signal; until then, no
        # further tree may end.
        while signal.getsignal(signal.SIGTERM) != default:
          time.sleep(0.01)

    return await real(*args, on_trajectory=tell, step=step, **kw)

  monkeypatch.setattr(collector, 'rollout', cut)
  with pytest.raises(signals.Stopped):
    train.train(c, str(tmp_path))
  before = told[12:]
  # Trees are told of as they are whole.
  assert ended <= len(before) < 12 and len(before) % 3 == 0
  told.clear()
  told.extend([''] * 99)  # no further signal
  train.train(c, str(tmp_path))
  again = told[99:]
  assert len(again) == 12 - len(before) and not {*again} & {*before}
  same(c, folder, tmp_path)


def test_trees_of_steps_ahead_are_used_whole(url, tmp_path):
  c = config(url, **TREE, max_staleness=1)
  c.train.steps = 3
  train.train(c, str(tmp_path))
  kept = [*records.read(tmp_path / 'trajectories')]
  assert len(kept) == 3 * 4 * 3
  leaves = {(r.step, r.trajectory.id): r.trajectory for r in kept}
  parted = 0
  for (step, _), t in leaves.items():
    sample, _, turn = t.meta['node'].partition('.')
    if not turn:
      continue  # it starts from the prompt
    other = leaves[step, f'{t.question.id}/solver/{sample}']
    shared = int(turn) + 1
    # Ids, log-probs and the versions of the weights that sampled them.
    assert turns(t)[:shared] == turns(other)[:shared]
    parted += 1
  assert parted


@pytest.mark.long
def test_a_sampler_of_ones_own_is_given_the_rewards_of_the_config(
  url, tmp_path
):
  c = config(url, sampler='tests.samplers.best', attempts=3)
  c.log.trajectories_every = 1
  train.train(c, str(tmp_path / 'best'))
  best = [r.reward for r in records.read(tmp_path / 'best' / 'trajectories')]
  assert len(best) == 2 * 4 * 2
  c = config(url)
  train.train(c, str(tmp_path / 'chains'))
  chain = [r.reward for r in records.read(tmp_path / 'chains' / 'trajectories')]
  # In the first step both have the same weights and the first attempt in
  # common.
  pairs = [*zip(best[:8], chain[:8], strict=True)]
  assert all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)
  first = lines(tmp_path / 'best' / 'metrics.jsonl')[0]
  assert first['rollout/trajectories'] == 8


@pytest.mark.long
def test_traces_train_beside_what_the_policy_sampled(url, tmp_path):
  c = config(url, sampler='traces', traces='tests.samplers.told', group=3)
  fn = 'configs.methods.luffy.shaped'
  c.algorithm.update(loss='mixed', foreign_objective=fn, minibatches=2)
  c.log.trajectories_every = 1
  train.train(c, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  kept = [*records.read(tmp_path / 'trajectories')]
  told = [r for r in kept if r.trajectory.foreign]
  # A search for the person does not find what a question of two hops needs.
  lacks = [r for r in kept if len(r.trajectory.question.supporting) > 1]
  assert told and lacks and not {*map(id, told)} & {*map(id, lacks)}
  for name, n in ('traces', len(told)), ('traces_left_out', len(lacks) / 3):
    assert sum(s[f'rollout/{name}'] for s in steps) == n
  for r in told:
    t = r.trajectory
    assert t.sample == 2 and r.kept and r.reward is not None
    assert [s.request.query for s in t.searches] == [t.question.meta['path'][0]]
    mine = [s for s in t.segments if s.author == 'teacher']
    assert all(s.train and s.logps is s.versions is None for s in mine)
    # Scored by the trainer, as all that it learns from.
    train_ = np.concatenate([np.full(len(s.ids), s.train) for s in t.segments])
    assert (np.isfinite(r.trainer_logps) == train_).all()
  for s in steps:
    assert 0 < s['train/foreign'] < 1 and s['train/grad_norm'] > 0
    assert 0 < s['train/foreign_prob'] < 1
    # Of the policy's tokens, which the engine sampled.
    assert s['train/mismatch_max'] < 1e-3 and s['staleness/max'] == 0
    assert s['train/tis_weight'] == pytest.approx(1, abs=1e-3)


@pytest.mark.long
def test_what_a_teacher_wrote_trains_within_and_in_place_of_attempts(
  url, tmp_path
):
  """Hints of SEELE, and refinements of Critique-GRPO, on a tiny model."""
  seele = dict(hint_rounds=2, traces='tests.samplers.told')
  words = dict(critique='{attempt} {verdict} {answer}', grounded=False)
  critique = words | dict(critique_words=('found', 'no'))
  for name, objective, fields in (
    ('seele.scaffolded', 'seele.imitated', seele),
    ('critique_grpo.critiqued', 'luffy.shaped', critique),
  ):
    c = config(url, sampler=f'configs.methods.{name}', group=4, **fields)
    fn = f'configs.methods.{objective}'
    c.algorithm.update(loss='mixed', foreign_objective=fn, minibatches=2)
    c.log.trajectories_every = 1
    train.train(c, str(tmp_path / name))
    kept = [*records.read(tmp_path / name / 'trajectories')]
    told = [r for r in kept if r.trajectory.foreign]
    assert len(kept) == 2 * 4 * 4 and 0 < len(told) < len(kept), name
    for r in told:
      mask = [np.full(len(s.ids), s.train) for s in r.trajectory.trained]
      assert (np.isfinite(r.trainer_logps) == np.concatenate(mask)).all()
    steps = lines(tmp_path / name / 'metrics.jsonl')
    assert sum(s['rollout/traces'] for s in steps) == len(told)
    for s in steps:
      assert 0 < s['train/foreign'] < 1 and s['train/grad_norm'] > 0
      # Of the policy's tokens, behind hints, too.
      assert s['train/mismatch_max'] < 1e-3


@pytest.mark.long
def test_cut_attempts_train_beside_the_verdicts_on_them(
  url, tmp_path, monkeypatch
):
  """What the policy says is noise here: every first attempt is cut."""
  real = revise._verdict

  async def named(*args):
    t = await real(*args)
    first = t.meta['asked'] and t.meta['on'] == 0
    return dataclasses.replace(t, meta={**t.meta, 'step': 1 if first else None})

  monkeypatch.setattr(revise, '_verdict', named)
  c = config(url, sampler='revise', group=4, refiner='micro_refiner')
  kw = dict(label='role', eps=1e-6, ddof=1)
  c.algorithm.update(advantage='grpo_within', advantage_kw=kw, minibatches=2)
  c.log.trajectories_every = 1
  train.train(c, str(tmp_path))
  kept = [*records.read(tmp_path / 'trajectories')]
  assert len(kept) == 2 * 4 * 4
  roles = [r.trajectory.role for r in kept]
  assert roles == ['solver', 'solver', 'refiner', 'refiner'] * 8
  cut = [r.trajectory for r in kept if r.trajectory.meta.get('cut')]
  assert len(cut) >= 6 and {t.sample for t in cut} == {0}
  for r in kept:
    mask = [np.full(len(s.ids), s.train) for s in r.trajectory.segments]
    assert (np.isfinite(r.trainer_logps) == np.concatenate(mask)).all()
  steps = lines(tmp_path / 'metrics.jsonl')
  for s in steps:
    assert s['train/mismatch_max'] < 1e-3 and s['train/grad_norm'] > 0
  generations = sum(r.trajectory.turns for r in kept)
  assert sum(s['rollout/generations'] for s in steps) > generations


def test_a_sampler_that_cannot_work_is_refused_at_the_start(url, tmp_path):
  for fields in (dict(sampler='forest'), TREE | dict(group=4)):
    with pytest.raises(ConfigError, match='config.rollout'):
      train.train(config(url, **fields), str(tmp_path))
  assert not (tmp_path / 'metrics.jsonl').exists()
