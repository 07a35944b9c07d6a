"""The recipes on atlas: what is asked, read and written, and what is not."""

import json

import pytest

from configs import ttrl
from experiments.arena import arms, recipes, results
from searchrl_jax.data import core as data
from searchrl_jax.run.lookup import ConfigError
from searchrl_jax.sweeps import core

# The phase.


def test_the_phase_is_a_sweep_of_configs_that_can_run():
  found = arms.get_sweep(recipes.PHASE)
  core.check(found)
  for arm in found.arms:
    c = arm.config(2)
    assert c.seed == c.data.world_seed == 2
    assert c.rollout.questions * c.rollout.group == 128
    assert c.data.world.to_dict() == dict(train=300, heldout=150, known=40)
  with pytest.raises(ConfigError, match="'recipes' is of atlas"):
    arms.get_sweep('recipes,base=search_r1')


def test_rows_are_in_the_table_and_in_no_claim(tmp_path):
  values = {'hard/em': 0.4, 'before/hard/em': 0.1}
  runs = {'recipes': {'ttrl': {'0': {'values': values}}}}
  results.write(runs, tmp_path, {}, '--phase=recipes')
  written = json.loads((tmp_path / 'results.json').read_text())
  row = written['table']['recipes']['ttrl']
  assert row['hard/em']['mean'] == 0.4
  assert row['before/hard/em']['mean'] == 0.1
  assert all(record['n_seeds'] == 0 for record in written['claims'])


@pytest.mark.parametrize(
  'module, arg, says',
  [(ttrl, 'base=atlas,model=m', "model='m' with base=atlas")],
)
def test_arguments_that_cannot_be_are_named(module, arg, says):
  with pytest.raises(ValueError, match=says):
    module.get_config(arg)


def test_ttrl_trains_on_what_the_arms_are_evaluated_on():
  c = ttrl.get_config('base=atlas,seed=1')
  (trained,) = data.load_sets(c.data.train, c.data).values()
  (asked,) = data.load_sets(c.data.eval, c.data).values()
  assert [q.text for q in trained] == [q.text for q in asked]
  assert len(trained) == 300
  assert (c.reward.vote.votes, c.reward.vote.train) == (16, 8)
