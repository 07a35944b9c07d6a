"""Every recipe: what its config says of itself."""

import importlib

import pytest

from configs.methods import (
  calib_adv,
  ikea,
  otc,
  parallel_search,
  r_search,
  search_r2,
  step_search,
)
from experiments.ssrl import reward as graded
from searchrl_jax import checks, lookup
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import load_sets
from searchrl_jax.learn import teacher
from searchrl_jax.rewards import answer, guarded, progress
from searchrl_jax.rewards import core as rewards
from searchrl_jax.types import Question
from tests import tiny
from tests.conftest import ROOT

FULL = 'model=x'
RECIPES = {
  'atlas': ('', 'mix=skills', 'mix=hasty', 'mix=wanderer'),
  'gemma': ('', 'start=hesitant', 'machine=gpu'),
  'hard': (
    '',
    FULL,
    f'{FULL},questions=tau2',
    f'{FULL},questions=browsecomp,folder=x',
  ),
  'quickstart': ('', 'hybrid=1'),
  'search_r1': ('', 'algorithm=ppo', FULL, f'{FULL},baseline=rag'),
  'seven': ('', FULL),
  'small': ('',),
  'ssp': ('', 'arm=golds', FULL),
  'ssrl': ('', FULL),
  'ttrl': (
    '',
    'base=ssrl',
    'base=math',
    FULL,
    f'{FULL},base=ssrl',
    f'{FULL},base=math,path=AIME,heldout=AMC',
  ),
  'wiki_nq': ('', FULL),
  'zerosearch': ('', 'learns=simulator', FULL),
}


def test_every_recipe_is_here():
  files = (ROOT / 'configs').glob('*.py')
  assert sorted(RECIPES) == sorted(
    p.stem for p in files if 'def get_config' in p.read_text()
  )


METHODS = sorted(
  p.stem
  for p in (ROOT / 'configs' / 'methods').glob('*.py')
  if 'def get_config' in p.read_text()
)


@pytest.mark.parametrize('name', METHODS)
def test_every_method_changes_every_base(name):
  module = importlib.import_module(f'configs.methods.{name}')
  for base in ('atlas', f'search_r1,{FULL}', 'gemma'):
    c = module.get_config(f'base={base},seed=4')
    assert (c.name, c.seed) == (name, 4)
    assert c.algorithm.kl == 'none', 'experiments/arena sets it'
    checks.check(c)
  c = module.get_config()
  c.data.world.update(train=40, heldout=40)
  checks.check_data(c, load_sets(c.data.train, c.data)['atlas'])
  with pytest.raises(ValueError, match="'wieght'"):
    module.get_config('wieght=1')
  # A test of its own, that is deleted with it.
  assert name == 'grpo' or (ROOT / f'tests/methods/test_{name}.py').exists()


READING = (
  'trace igpo gigpo calib_adv echo clip_delta inforage reseek global_rag '
  'r_search'
).split()
PROGRAM = {
  'rollout.sampler': 'sessions',
  'rollout.program': 'tests.tiny.config',
}


@pytest.mark.parametrize('name', READING)
@pytest.mark.parametrize('fields', [{'env.information': 'policy'}, PROGRAM])
def test_what_reads_observations_is_refused_without_any(name, fields):
  c = importlib.import_module(f'configs.methods.{name}').get_config()
  c.update_from_flattened_dict(fields)
  (field, value), *_ = fields.items()
  with pytest.raises(ValueError, match=f'config.{field}={value!r}'):
    rewards.check(c)
    checks.check(c)


def test_a_format_is_not_read_in_what_a_program_asks():
  c = tiny.config()
  form = dict(fn='answer.format_valid', weight=0.2, require_think=False)
  c.reward.format = form
  rewards.check(c)
  c.update_from_flattened_dict(PROGRAM)
  with pytest.raises(rewards.RewardError, match="reward.format.*'sessions'"):
    rewards.check(c)
  c.env.max_turns = 0  # the program searches nothing
  rewards.check(c)


@pytest.mark.parametrize(
  'fn, fields, refused',
  [
    # By a program's calls, the policy's own information, without searches, and
    # by a program that is said to search nothing.
    (answer.search_r1_format, {}, (True, False, False, False)),
    (graded.graded, {}, (True, False, False, False)),
    (graded.binary, {}, (True, False, False, False)),
    (parallel_search.reward, {}, (True, True, True, True)),
    (r_search.form, {}, (True, True, True, True)),
    (guarded.found, {}, (True, True, True, True)),
    (guarded.covered, {}, (True, True, True, True)),
    (progress.progress, {}, (True, True, True, True)),
    (calib_adv.calibrated, {'soft': True}, (True, True, True, True)),
    (calib_adv.calibrated, {'soft': False}, (False, False, False, False)),
    # Searches are recorded however they are asked for.
    (otc.reward, {}, (False, True, True, False)),
    (ikea.reward, {}, (False, True, True, False)),
    (search_r2.reward, {}, (False, True, True, False)),
    (step_search.end, {'key': 1.0}, (False, True, True, False)),
    (step_search.end, {'key': 0.0}, (False, False, False, False)),
    (teacher.anchors, {}, (False, True, True, False)),
    (teacher.queries, {}, (False, True, True, False)),
    (answer.em, {}, (False, False, False, False)),
  ],
)
def test_what_a_function_reads_has_to_be_there(fn, fields, refused):
  assert not rewards.unobserved(tiny.config(), fn, fields)
  none = {'env.max_turns': 0}
  changes = PROGRAM, {'env.information': 'policy'}, none, PROGRAM | none
  for change, blind in zip(changes, refused, strict=True):
    c = tiny.config()
    c.update_from_flattened_dict(change)
    assert bool(rewards.unobserved(c, fn, fields)) == blind, change


@pytest.mark.parametrize(
  'name, arg', [(name, arg) for name, args in RECIPES.items() for arg in args]
)
def test_no_recipe_selects_by_what_it_reports(name, arg):
  """All of data.eval is reported (design 5.13)."""
  module = importlib.import_module(f'configs.{name}')
  c = module.get_config(arg)
  assert checks.selecting(c) not in c.data.eval
  assert 'selected' in module.__doc__
  # The whole state is written at these steps alone.
  assert c.checkpoint.best == '' and c.checkpoint.every >= 5


def needy(logps, old_logps, behaviour_logps, advantages, mask):
  """A loss that needs a key of each question, and a field of the config."""


def _refuse(config, fields):
  assert not fields
  lookup.require(config.rollout.group > 2, 'group=2: use 3 or more')


needy.needs, needy.check = ('meta.known',), _refuse


def test_advantages_and_losses_say_what_they_need():
  c = tiny.config()
  c.algorithm.update(loss='tests.test_configs.needy', tis='none')
  with pytest.raises(
    checks.ConfigError, match='config.algorithm.loss: group=2: use 3'
  ):
    checks.check(c)
  c.rollout.group = 3
  checks.check(c)
  asked = Question('q', 'who?', meta={'known': True})
  checks.check_data(c, [asked])
  with pytest.raises(DataError, match="'q-1'.*meta.*algorithm.loss"):
    checks.check_data(c, [asked, Question('q-1', 'who?')])


def test_contexts_that_nothing_begins_are_refused():
  c = tiny.config()
  c.env.max_contexts, c.batch.tokens = 3, 480
  with pytest.raises(checks.ConfigError, match='max_contexts=3: nothing'):
    checks.check(c)
  c.rollout.update(sampler='sessions', program='sh agent.sh')
  checks.check(c)  # its history may change


def test_syncs_of_what_changed_need_servers_and_16_bits():
  c = tiny.config()
  c.engine.update(module='vllm', dtype='bfloat16', sync='delta')
  c.engine.canary_tolerance = 0.02
  checks.check(c)
  for changes in (
    {'engine.module': 'jax'},
    {'engine.dtype': 'float32'},
    {'model.lora.rank': 2},
  ):
    other = c.copy_and_resolve_references()
    other.update_from_flattened_dict(changes)
    with pytest.raises(checks.ConfigError, match="config.engine.sync='delta'"):
      checks.check(other)


@pytest.mark.parametrize(
  'best',
  ['eval/em', 'eval/f1', 'eval/set=micro', 'reward/em', 'eval/hops=2/em'],
)
def test_selecting_by_all_that_is_reported_is_refused(best):
  c = tiny.config()
  c.checkpoint.best = best
  with pytest.raises(checks.ConfigError, match=f"best='{best}'.*set=NAME/em"):
    checks.check(c)


def test_a_set_may_be_kept_to_select_by():
  c = tiny.config()
  for best in ('micro', 'absent'):
    c.checkpoint.best = f'eval/set={best}/em'
    with pytest.raises(checks.ConfigError, match=f"'{best}'.*config.data.eval"):
      checks.check(c)
  c.data.eval.other = c.data.eval.micro
  c.checkpoint.best = 'eval/set=micro/em'
  checks.check(c)
  assert checks.selecting(c) == 'micro'
