"""configs/algorithms.py: every dict is whole, and does what its paper says.

Golden losses and gradients are torch's (tests/golden/make_algorithms.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import algorithms as configs
from configs import quickstart
from searchrl_jax import checks, schema
from searchrl_jax.learn import advantages, losses, objectives
from tests.conftest import ROOT
from tests.golden import algorithms

NAMES = sorted(n for n in vars(configs) if n.isupper() and n[0] != '_')
# What is in the way of a run, and what the error says.
REFUSED = {
  'DR_GRPO': 'algorithm.horizon=0',
  'PPO': "advantage='gae'.*config.critic.lr=0.0",
}


def with_algorithm(config, name, **kw):
  config.algorithm.update(getattr(configs, name))
  config.update_from_flattened_dict(kw)
  return config


def test_every_algorithm_is_there():
  assert {n.lower() for n in NAMES} == set(algorithms.CASES) - {'ppo_dual'}


@pytest.mark.parametrize('name', NAMES)
def test_a_dict_has_fields_of_the_schema_and_all_that_any_has(name):
  found = getattr(configs, name)
  assert type(found) is dict
  assert set(found) == set(configs.GRPO)
  assert set(found) <= set(schema.base().algorithm)


@pytest.mark.parametrize('name', NAMES)
def test_a_dict_passes_the_checks_or_is_refused_for_its_reason(name):
  config = with_algorithm(quickstart.get_config(), name)
  if name not in REFUSED:
    checks.check(config)
    return
  with pytest.raises(checks.ConfigError, match=REFUSED[name]):
    checks.check(config)


def test_dr_grpo_runs_with_its_horizon():
  checks.check(
    with_algorithm(
      quickstart.get_config(), 'DR_GRPO', **{'algorithm.horizon': 72}
    )
  )


@pytest.mark.parametrize(
  'name, change, message',
  [
    ('LITE_PPO', {'rollout.group': 1}, 'rollout.group=1'),
    ('REINFORCE_PP_BASELINE', {'rollout.group': 1}, 'rollout.group=1'),
    ('CISPO', {'algorithm.clip_dual': 3.0}, 'clip_dual=3.0'),
    ('REINFORCE', {'algorithm.ratio': 'product'}, "ratio='product'"),
    ('DAPO', {'algorithm.clip_dual': 0.5}, 'clip_dual=0.5: above 1'),
    ('PPO', {'critic.lr': 1e-5, 'critic.clip': -1.0}, 'critic.clip=-1.0'),
    (
      'PPO',
      {'critic.lr': 1e-5, 'critic.pretrain_steps': 60},
      'critic.pretrain_steps=60',
    ),
    ('GRPO', {'critic.pretrain_steps': 5}, 'critic.pretrain_steps=5'),
    (
      'LITE_PPO',
      {'algorithm.kl': 'reward', 'algorithm.kl_coef': 0.1},
      "kl='reward'.*'lite_ppo'",
    ),
    ('REMAX', {'algorithm.drop_zero_variance': True}, "advantage='remax'"),
    (
      'REINFORCE',
      {'algorithm.drop_zero_variance': True, 'rollout.group': 1},
      'drop_zero_variance .*False',
    ),
    (
      'PPO',
      {'critic.lr': 1e-5, 'critic.schedule': 'step'},
      "critic.schedule='step'",
    ),
    ('RLOO', {'critic.lr': 1e-5}, "'rloo'.*critic.*lr=1e-05"),
    ('GSPO', {'rollout.refill': 2}, 'drop_zero_variance=False'),
    ('DAPO', {'rollout.refill': 2, 'rollout.max_staleness': 1}, 'staleness=1'),
    ('DAPO', {'rollout.refill': -1}, 'refill=-1'),
    ('REINFORCE', {'algorithm.advantage': 'lite_ppo'}, "kw .*'eps'"),
    ('LITE_PPO', {'algorithm.advantage': 'rloo'}, 'kw.(eps|ddof).*rloo'),
  ],
)
def test_what_cannot_work_is_refused_at_the_start(name, change, message):
  config = with_algorithm(quickstart.get_config(), name, **change)
  with pytest.raises(checks.ConfigError, match=message):
    checks.check(config)


TURNS = dict(
  advantage='turn_normalised',
  advantage_kw=dict(gamma=1.0, eps=1e-6, ddof=1, same_turn=True),
)


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(advantage='tests.tiny.first_tern'), "'first_turn'"),
    (dict(advantage='tests.tyny.first_turn'), "'tests.tyny'"),
    (dict(advantage_kw={}), "kw .*'scale'"),
    (dict(advantage_kw=dict(scale=1.0, scael=1.0)), 'kw.scael'),
    (dict(advantage='tests.tiny.too_few'), 'values, valid and group_ids'),
    (dict(advantage='tests.tiny.unknown_array'), "'masks'.*'mask'"),
    (dict(drop_zero_variance=True), 'drop_zero_variance .*False'),
    (TURNS | dict(drop_zero_variance=True), 'drop_zero_variance .*False'),
    (TURNS | dict(kl='reward', kl_coef=0.1), "kl='reward'.*'turn"),
    (TURNS | dict(advantage_kw={}), "kw .*'gamma'"),
  ],
)
def test_what_an_advantage_of_ones_own_cannot_be(change, message):
  config = with_algorithm(quickstart.get_config(), 'REINFORCE')
  config.algorithm.update(
    advantage='tests.tiny.first_turn', advantage_kw=dict(scale=1.0)
  )
  checks.check(config)
  for field, value in change.items():
    config.algorithm[field] = value
  with pytest.raises(checks.ConfigError, match=message):
    checks.check(config)


@pytest.mark.parametrize('name', ['turn_normalised', 'tests.tiny.first_turn'])
def test_what_compares_trajectories_needs_two(name):
  config = with_algorithm(
    quickstart.get_config(), 'REINFORCE', **{'rollout.group': 1}
  )
  config.algorithm.advantage = name
  with pytest.raises(checks.ConfigError, match='rollout.group=1'):
    checks.check(config)


def test_a_critic_needs_the_discounts_of_its_returns():
  config = with_algorithm(
    quickstart.get_config(), 'REINFORCE', **{'critic.lr': 1e-5}
  )
  config.algorithm.advantage = 'tests.tiny.critic_without_fields'
  with pytest.raises(checks.ConfigError, match='gamma and lam'):
    checks.check(config)


def test_ppo_runs_with_a_critic_and_dapo_with_rounds():
  checks.check(
    with_algorithm(quickstart.get_config(), 'PPO', **{'critic.lr': 1e-5})
  )
  checks.check(
    with_algorithm(quickstart.get_config(), 'DAPO', **{'rollout.refill': 2})
  )


def test_one_answer_a_question_will_do_without_groups():
  for name in ('REINFORCE', 'REINFORCE_PP'):
    checks.check(
      with_algorithm(quickstart.get_config(), name, **{'rollout.group': 1})
    )


def case_config(name: str):
  """The config of a case; the engine's log-probs are the trainer's."""
  dual = name == 'ppo_dual'
  config = with_algorithm(schema.base(), 'PPO' if dual else name.upper())
  config.algorithm.minibatches = 2  # off policy: old log-probs count
  config.algorithm.horizon = algorithms.HORIZON
  config.algorithm.clip_dual = algorithms.DUAL if dual else 0.0
  if name.startswith('ppo'):
    config.algorithm.advantage_kw.update(
      gamma=algorithms.GAMMA, lam=algorithms.LAM
    )
  return config


def case_advantages(name: str, x) -> np.ndarray:
  """[B, 1], or [B, T] where each token has its own."""
  a = case_config(name).algorithm
  arrays = {'gae': [x['mask'], x['critic']], 'remax': [x['greedy']]}.get(
    a.advantage, []
  )
  found = getattr(advantages, a.advantage)(
    x['rewards'],
    np.ones(len(x['rewards']), bool),
    x['group_ids'],
    *arrays,
    **a.advantage_kw,
  )
  found = np.stack(found)
  return found if found.ndim == 2 else found[:, None]


def case_loss(name: str, x):
  """Our loss and its gradient to the log-probs [B, T]."""
  objective = objectives.policy(case_config(name))
  arrays = {
    'mask': x['mask'],
    'old': x['old_logps'],
    'behaviour_logps': x['old_logps'],
    'ref': x['ref_logps'],
    'advantages': np.broadcast_to(case_advantages(name, x), x['mask'].shape),
  }
  arrays = {k: jnp.asarray(v) for k, v in arrays.items()}

  def loss(logps):
    value, _ = objective.fn(logps, jnp.zeros_like(logps), arrays)
    value = losses.aggregate(value, x['mask'], objective.aggregation)
    return value / losses.denominator(
      [x['mask']], objective.aggregation, objective.horizon
    )

  return jax.value_and_grad(loss)(jnp.asarray(x['logps']))


def far(a, b) -> float:
  """The norm of the difference, relative to b's."""
  a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
  return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize('name', algorithms.CASES)
def test_golden_advantage_loss_and_gradient(name):
  x = algorithms.inputs(name)
  with np.load(ROOT / 'tests/golden/algorithms.npz') as golden:
    want = {k: golden[f'{name}/{k}'] for k in ('advantages', 'loss', 'grad')}
  mask = x['mask']
  ours = np.broadcast_to(case_advantages(name, x), mask.shape)
  theirs = np.broadcast_to(want['advantages'], mask.shape)
  assert far(ours[mask], theirs[mask]) <= 1e-5
  loss, grad = case_loss(name, x)
  assert far(loss, want['loss']) <= 1e-5
  assert far(grad, want['grad']) <= 1e-5
