"""Values that a field of the config may have, whatever the others are."""

import importlib
import operator
import re

import pytest

from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from tests.test_configs import RECIPES

REFUSED = (
  ('batch.lengths', (16, 8, 32)),
  ('batch.lengths', ()),
  ('batch.lengths', (1, 8)),
  ('batch.loss_fraction', 0.0),
  ('batch.loss_fraction', 1.5),
  ('batch.tokens', 0),
  ('batch.head_chunk', 0),
  ('algorithm.epochs', 0),
  ('algorithm.tis_mode', 'mash'),
  ('algorithm.clip_low', -0.1),
  ('algorithm.clip_low', 1.1),
  ('algorithm.clip_high', -0.1),
  ('algorithm.clip_dual', 0.5),
  ('algorithm.tis_floor', 1.5),
  ('critic.clip', -1.0),
  ('critic.schedule', 'step'),
  ('optim.schedule', 'step'),
  ('optim.lr', 0.0),
  ('optim.warmup', -1),
  ('rollout.group', 0),
  ('rollout.search_attempts', 0),
  ('rollout.concurrency', -1),
  ('rollout.refill', -1),
  ('rollout.max_staleness', -1),
  ('rollout.mismatch_alarm', -1.0),
  ('checkpoint.keep', 0),
  ('env.real_searches', -2),
  ('env.information', 'both'),
  ('env.search_when', 'never'),
  ('env.answer', 'box'),
  ('env.max_turns', -1),
  ('env.max_turn_tokens', 0),
  ('data.prompt', 'asis'),
  ('source.k', 0),
  ('source.attempts', 0),
  ('source.simulator.noise_from', -0.1),
  ('source.simulator.noise_to', 1.5),
  ('source.simulator.steps', 0),
  ('source.simulator.attempts', 0),
  ('source.simulator.temperature', -1.0),
  ('source.simulator.base', 1.0),
  ('judge.attempts', 0),
  ('judge.concurrency', 0),
  ('judge.max_tokens', 0),
  ('judge.timeout', 0.0),
  ('judge.max_failed', 1.5),
  ('engine.max_len', 0),
  ('eval.n', 0),
  ('algorithm.tis_cap', 0.0),
  ('eval.bootstrap', 0),
  ('eval.questions', -1),
  ('eval.temperature', -1.0),
  ('eval.top_p', 0.0),
  ('log.wandb', 'on'),
)


@pytest.mark.parametrize('field, value', REFUSED)
def test_a_value_is_refused_by_its_field(field, value):
  config = schema.base()
  schema.check(config)
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ConfigError, match=re.escape(f'{field}={value!r}')):
    schema.check(config)


def test_a_choice_that_is_none_is_told_with_a_near_one():
  config = schema.base()
  config.algorithm.kl = 'los'
  with pytest.raises(ConfigError, match="config.algorithm.kl='los'.*'loss'"):
    schema.check(config)


@pytest.mark.parametrize('old, new', schema.RENAMED.items())
def test_a_renamed_field_is_refused_with_its_new_name(old, new):
  config = schema.base()
  operator.attrgetter(new)(config)
  part, name = old.split('.')
  config.update({part: {name: 1}})  # in a recipe, or a run folder
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
