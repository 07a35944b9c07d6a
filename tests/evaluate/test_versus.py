"""Policies of two recipes, asked the same questions by one command."""

import json

import pytest

from searchrl_jax import sft
from searchrl_jax.evaluate import versus
from searchrl_jax.store import records
from tests import test_commands, tiny

pytestmark = pytest.mark.slow


def configs():
  """Of two runs: one searches, the other answers its own searches."""
  for name in ('searches', 'recalls'):
    config = tiny.config()
    config.source.corpus = 'world'
    config.sft.data.update(dict(n=20, worlds=2, train=40, relations=3))
    config.sft.steps, config.sft.warmup = 1, 0
    config.env.max_turns, config.env.max_turn_tokens = 3, 24
    config.env.max_tokens = config.engine.max_len = 192
    config.batch.lengths = (192,)
    if name == 'recalls':
      config.env.information = 'policy'
      config.env.max_turns, config.env.max_turn_tokens = 0, 160
      config.eval.questions = 1  # its own sampling does not count
    yield name, config


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Their folders, of which nothing but the config is read."""
  folder = tmp_path_factory.mktemp('runs')
  for name, config in configs():
    records.write_json(folder / name / 'config.json', config.to_dict())
  return [str(folder / name) for name, _ in configs()]


@pytest.mark.long
def test_one_command_holds_any_two_runs_against_each_other(tmp_path):
  runs = [str(tmp_path / name) for name, _ in configs()]
  for run, (_, config) in zip(runs, configs()):
    sft.sft(config, run)
  out = tmp_path / 'versus'
  text, _ = test_commands.command('evaluate.versus', *runs, f'--out={out}')
  assert '[2/2]' in text and 'B - A' in text
  (found,) = json.loads((out / 'versus.json').read_text())
  folders = [found['a'], found['b']]
  manifests = [json.loads(open(f'{f}/manifest.json').read()) for f in folders]
  assert manifests[0]['sets'] == manifests[1]['sets']
  assert manifests[0]['corpus'] == manifests[1]['corpus'] is not None
  assert (
    found['scores']['em']['all']['n']
    == len(manifests[0]['sets']['micro']['ids'])
    > 1
  )
  assert found['differs']['env.information'] == ['source', 'policy']


def test_searches_are_real_unless_told_otherwise(runs):
  asked = versus.build.load_config(runs[0])
  asked.source.url = 'http://127.0.0.1:9'
  config = versus.config_for(runs[1], asked, False)
  assert config.env.real_searches == -1
  assert config.source.module == 'service'
  assert config.source.url == asked.source.url
  assert config.eval == asked.eval and config.data.eval == asked.data.eval
  assert versus.config_for(runs[1], asked, True).env.real_searches == 0


def test_a_run_brings_no_dials_and_no_servers_of_its_own(runs, tmp_path):
  config = json.loads(open(f'{runs[0]}/config.json').read())
  config['judge']['url'] = config['engine']['url'] = 'http://127.0.0.1:9'
  config['engine'].update(module='vllm', sync='delta')
  config['source']['dials'] = {'empty': 0.5}
  (tmp_path / 'config.json').write_text(json.dumps(config))
  asked = versus.build.load_config(runs[0])
  for dials in {}, {'rank': 0.25}:
    asked.source.dials = dials
    found = versus.config_for(str(tmp_path), asked, False)
    assert found.source.dials.to_dict() == dials
    assert found.judge.url == found.engine.url == ''
    assert (found.engine.module, found.engine.sync) == ('jax', 'full')


def test_questions_without_a_corpus_are_answered_without_searches(runs):
  asked = versus.build.load_config(runs[0])
  asked.source.module = 'none'
  config = versus.config_for(runs[0], asked, False)
  assert (config.source.module, config.env.max_turns) == ('none', 0)
  versus.evaluate.checks.check_engine(config)


def test_one_run_alone_is_refused(runs, tmp_path):
  _, err = test_commands.command(
    'evaluate.versus', runs[0], f'--out={tmp_path}', status=2
  )
  assert 'two or more' in err


def test_a_run_of_an_older_schema_gets_neutral_fields(runs, tmp_path):
  config = json.loads(open(f'{runs[0]}/config.json').read())
  del config['judge'], config['rollout']['refill']
  (tmp_path / 'config.json').write_text(json.dumps(config))
  found = versus.build.load_config(str(tmp_path))
  assert found.judge.url == '' and found.rollout.refill == 0
  assert found == versus.build.load_config(runs[0])
