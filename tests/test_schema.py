"""Values that a field of the config may have, whatever the others are."""

import importlib
import operator

import pytest

from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from tests.test_configs import RECIPES

REFUSED = (
  ('batch.lengths', (16, 8, 32), 'increasing'),
  ('batch.lengths', (), 'increasing'),
  ('batch.lengths', (1, 8), 'each at least 2'),
  ('batch.loss_fraction', 0.0, 'above 0 to 1'),
  ('batch.loss_fraction', 1.5, 'above 0 to 1'),
  ('batch.tokens', 0, 'at least 1'),
  ('batch.head_chunk', 0, 'at least 1'),
  ('algorithm.epochs', 0, 'at least 1'),
  ('algorithm.kl', 'los', "did you mean 'loss'"),
  ('algorithm.tis_mode', 'mash', "did you mean 'mask'"),
  ('algorithm.clip_low', -0.1, 'a distance from 1'),
  ('algorithm.clip_low', 1.1, 'a distance from 1'),
  ('algorithm.clip_high', -0.1, 'a distance from 1'),
  ('algorithm.clip_dual', 0.5, 'above 1'),
  ('algorithm.tis_floor', 1.5, '0 to 1'),
  ('critic.clip', -1.0, 'at least 0'),
  ('critic.schedule', 'step', 'there are: constant, cosine, linear'),
  ('optim.schedule', 'step', 'there are: constant, cosine, linear'),
  ('optim.lr', 0.0, 'above 0'),
  ('optim.warmup', -1, 'at least 0'),
  ('rollout.group', 0, 'at least 1'),
  ('rollout.search_attempts', 0, 'at least 1'),
  ('rollout.concurrency', -1, 'at least 0'),
  ('rollout.refill', -1, 'at least 0'),
  ('rollout.max_staleness', -1, 'at least 0'),
  ('rollout.mismatch_alarm', -1.0, 'at least 0'),
  ('checkpoint.keep', 0, 'at least 1'),
  ('env.real_searches', -2, '-1 for all'),
  ('env.information', 'both', 'there are: policy, source'),
  ('env.search_when', 'never', 'there are: always, entropy'),
  ('env.answer', 'box', "did you mean 'boxed'"),
  ('env.max_turns', -1, 'at least 0'),
  ('env.max_turn_tokens', 0, 'at least 1'),
  ('data.prompt', 'asis', "did you mean 'as_is'"),
  ('source.k', 0, 'at least 1'),
  ('source.attempts', 0, 'at least 1'),
  ('source.simulator.noise_from', -0.1, '0 to 1'),
  ('source.simulator.noise_to', 1.5, '0 to 1'),
  ('source.simulator.steps', 0, 'at least 1'),
  ('source.simulator.attempts', 0, 'at least 1'),
  ('source.simulator.temperature', -1.0, 'at least 0'),
  ('source.simulator.base', 1.0, 'at least 1.001'),
  ('judge.attempts', 0, 'at least 1'),
  ('judge.concurrency', 0, 'at least 1'),
  ('judge.max_tokens', 0, 'at least 1'),
  ('judge.timeout', 0.0, 'above 0'),
  ('judge.max_failed', 1.5, '0 to 1'),
  ('engine.max_len', 0, 'at least 1'),
  ('eval.n', 0, 'at least 1'),
  ('algorithm.tis_cap', 0.0, 'above 0'),
  ('eval.bootstrap', 0, 'at least 1'),
  ('eval.questions', -1, 'at least 0'),
  ('eval.temperature', -1.0, 'at least 0'),
  ('eval.top_p', 0.0, 'above 0 to 1'),
  ('log.wandb', 'on', 'there are: disabled, offline, online'),
)


@pytest.mark.parametrize('field, value, message', REFUSED)
def test_a_value_is_refused_by_its_field(field, value, message):
  config = schema.base()
  schema.check(config)
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ConfigError, match=f'config.{field}=.*{message}'):
    schema.check(config)


@pytest.mark.parametrize('old, new', schema.RENAMED.items())
def test_a_renamed_field_is_refused_with_its_new_name(old, new):
  config = schema.base()
  operator.attrgetter(new)(config)
  config.update_from_flattened_dict({old: 1})  # in a recipe, or a run folder
  with pytest.raises(ConfigError, match=f'config.{old} .*config.{new}'):
    schema.check(config)


def test_no_field_is_in_two_ranges():
  named = [f for fields, _, _ in schema.RANGES for f in fields.split()]
  assert len(set(named)) == len(named)
  assert not set(named) & set(schema.CHOICES)
  for field in named:  # a number or, of batch.lengths, a tuple of them
    value = operator.attrgetter(field)(schema.base())
    assert not isinstance(value, (str, bool))


@pytest.mark.parametrize(
  'name, arg', [(name, arg) for name, args in RECIPES.items() for arg in args]
)
def test_every_recipe_passes(name, arg):
  module = importlib.import_module(f'configs.{name}')
  schema.check(module.get_config(arg))
