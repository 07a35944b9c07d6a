import contextlib
import dataclasses

import pytest

from configs import algorithms, quickstart
from searchrl_jax.lookup import ConfigError
from searchrl_jax.sweep import core, stages
from tests import tiny
from tests.conftest import ROOT


def config(seed):
  c = tiny.config()
  c.seed = seed
  return c


def sweep(*changes, seeds=(0, 1), **fields):
  return core.sweep(config, changes, seeds=seeds, **fields)


def changed(fields):
  (arm,) = sweep(('a', fields)).arms
  return arm.config(3)


def test_fields_of_a_part_and_dotted_ones_are_changed():
  c = changed({'optim.lr': 0.5, 'batch.lengths': (48, 96)})
  assert (c.optim.lr, c.batch.lengths, c.seed) == (0.5, (48, 96), 3)
  c = changed({'algorithm': algorithms.DAPO})
  assert c.algorithm.clip_high == 0.28
  # The schema leaves these free: a value as a whole, not merged.
  assert c.algorithm.advantage_kw.to_dict() == dict(eps=1e-6, ddof=1)
  c = changed({'reward': {'em': dict(fn='answer.em', weight=2.0)}})
  assert c.reward.to_dict() == {'em': dict(fn='answer.em', weight=2.0)}
  assert changed({'reward.length.weight': 3.0}).reward.length.weight == 3.0


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'optim.lrr': 1.0}, "arm 'b': .*'optim.lrr'.*'lr'"),
    ({'optm': {'lr': 1.0}}, "'optm'.*'optim'"),
    ({'optim': {'lrr': 1.0}}, "'optim.lrr'.*'lr'"),
    ({'optim.lr.x': 1.0}, "'optim.lr.x'"),
    ({'reward.lenght.weight': 1.0}, "'reward.lenght.weight'.*length"),
    ({'optim.lr': 'high'}, "arm 'b': config.optim.lr='high'"),
    ({'algorithm': 'dapo'}, "config.algorithm='dapo'"),
    ({'algorithm.kl': 'los'}, "config.algorithm.kl='los'.*'loss'"),
    ({'rollout.group': 1}, 'rollout.group=1'),
  ],
)
def test_what_train_would_refuse_is_refused_first(fields, message):
  with pytest.raises(ConfigError, match=message):
    core.check(sweep(('a', {}), ('b', fields)))


def test_names_and_seeds_that_are_not_apart_are_refused():
  with pytest.raises(ConfigError, match="arms .*'a'"):
    core.check(sweep(('a', {}), ('a', {'optim.lr': 1.0})))
  with pytest.raises(ConfigError, match="arm 'a/b'"):
    core.check(sweep(('a/b', {})))
  with pytest.raises(ConfigError, match=r'seeds \[1\]'):
    core.check(sweep(('a', {}), tuning_seeds=(1, 2)))


def test_a_grid_has_every_combination():
  found = core.grid({'optim.lr': (0.1, 1), 'algorithm.kl': ('none', 'loss')})
  assert found == [
    ('lr=0.1,kl=none', {'optim.lr': 0.1, 'algorithm.kl': 'none'}),
    ('lr=0.1,kl=loss', {'optim.lr': 0.1, 'algorithm.kl': 'loss'}),
    ('lr=1,kl=none', {'optim.lr': 1, 'algorithm.kl': 'none'}),
    ('lr=1,kl=loss', {'optim.lr': 1, 'algorithm.kl': 'loss'}),
  ]


def test_seeds_that_no_arm_lists_are_every_arms():
  made = sweep(('a', {}), ('b', {}), tuning_seeds=(100,), warm=False)
  arms = [made.arms[0], dataclasses.replace(made.arms[1], seeds=(0,))]
  made = dataclasses.replace(made, arms=arms)
  every = lambda seeds: core.plan(made, made.arms, seeds)
  assert every(()) == ['arms/a/0', 'arms/b/0', 'arms/a/1']
  assert every((1, 11)) == ['arms/a/1', 'arms/a/11', 'arms/b/11']
  assert every((100,)) == ['arms/a/100', 'arms/b/100']
  with pytest.raises(ConfigError, match=r'--seeds=\[1\]'):
    core.plan(made, arms[1:], (1,))
  purposes = [made.purpose(arms[1], case) for case in ('0', '1', '11', '100')]
  assert purposes == ['report', 'replication', 'replication', 'tuning']


def test_every_world_has_every_seed(tmp_path):
  made = sweep(('a', {}), seeds=(0, 1), worlds=(5, 7))
  planned = core.plan(made, made.arms)
  assert planned == [
    f'{kind}/{case}'
    for case in ('5-0', '7-0', '5-1', '7-1')
    for kind in ('warm/warm', 'arms/a')
  ]
  c = stages.config_of(made, 'arms/a/7-1', tmp_path)
  assert (c.data.world_seed, c.seed) == (7, 1)
  assert c.train.init == str(tmp_path / 'warm/warm/7-1/run')
  assert stages.config_of(made, 'warm/warm/5-0', tmp_path).data.world_seed == 5
  assert core.parse('7-1') == (1, 7) and core.parse('11') == (11, None)


def test_files_of_sweeps_are_found_with_their_argument(tmp_path):
  found = sorted((ROOT / 'configs/sweeps').glob('[!_]*.py'))
  assert found
  for path in found:
    assert len(core.load(str(path)).arms) > 1
  made = core.load(f'{ROOT}/configs/sweeps/kl.py:scale=0.1')
  full = quickstart.get_config()
  c = made.arm('kl=0.1').config(2)
  assert (c.train.steps, c.sft.steps) == (6, full.sft.steps / 10)
  assert (c.seed, c.algorithm.kl_coef) == (2, 0.1)
  with pytest.raises(ConfigError, match='k.py: .*kl.py'):
    core.load(f'{ROOT}/configs/sweeps/k.py')
  with pytest.raises(ConfigError, match='get_sweep'):
    core.load('tests.conftest')
  with pytest.raises(ConfigError, match='tests.nothing'):
    core.load('tests.nothing')


def test_a_server_is_started_for_each_world_that_needs_one(
  tmp_path, monkeypatch
):
  made = []

  @contextlib.contextmanager
  def retrieval(c, folder):
    made.append(folder)
    yield '' if c.source.module == 'simulated' else folder

  monkeypatch.setattr(stages.services, 'retrieval', retrieval)
  simulated = config(0)
  simulated.source.module = 'simulated'
  with stages.Servers(tmp_path) as servers:
    found = [servers.url(c) for c in (simulated, config(0), config(0))]
    assert servers.url(simulated) == ''
  assert found == ['', made[1], made[1]] and len(made) == 2
