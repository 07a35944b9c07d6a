"""`python -m searchrl_jax.doctor`: what it checks, and what it says."""

from importlib import metadata
import io

import psutil
import pytest
from rich import console

from searchrl_jax import doctor
from tests import scripted, tiny

pytestmark = pytest.mark.slow


def examined(config, workdir):
  """{name: (mark, text)} of the printed lines, and the problems."""
  out = console.Console(file=io.StringIO(), soft_wrap=True)
  bad = doctor.examine(config, str(workdir), out)
  lines = [line.split(maxsplit=2) for line in out.file.getvalue().splitlines()]
  return {name: (mark, text) for mark, name, text in lines}, bad


def test_a_config_that_works(tmp_path):
  found, bad = examined(tiny.config(), tmp_path / 'run')
  assert bad == [] and list(found) == [name for name, *_ in doctor.CHECKS]
  assert {mark for mark, _ in found.values()} == {'ok'}
  assert found['questions'][1].startswith('train 240, micro 4')
  assert "-> ['" in found['search'][1]  # the titles of real passages
  assert list(tmp_path.iterdir()) == []


def test_every_problem_is_named_and_what_depends_on_it_is_skipped(
  tmp_path, monkeypatch
):
  config = tiny.config('http://127.0.0.1:9')
  config.source.attempts = 1
  config.model.tokenizer = '/nowhere'
  config.data.train.micro.split = 'bogus'
  version = metadata.version
  monkeypatch.setattr(
    metadata, 'version', lambda n: '0.1' if n == 'optax' else version(n)
  )
  found, bad = examined(config, tmp_path)
  assert bad == ['versions', 'questions', 'tokenizer']
  assert 'optax>=0.2.8 (here: 0.1): `pip install -U`' in found['versions'][1]
  assert "split='bogus' must be one of" in found['questions'][1]
  assert "config.model.tokenizer='/nowhere': no such" in found['tokenizer'][1]
  assert found['search'] == ('skipped', 'it needs questions, tokenizer')


def test_services_and_room(tmp_path, monkeypatch):
  config = tiny.config('http://127.0.0.1:9')
  config.source.attempts = 1
  config.judge.url = 'http://127.0.0.1:9/v1'
  config.checkpoint.keep = 10**9
  memory = psutil.virtual_memory()
  monkeypatch.setattr(
    psutil, 'virtual_memory', lambda: memory._replace(available=2**20)
  )
  found, bad = examined(config, tmp_path / 'run' / 'deeper')
  assert bad == ['disk', 'memory', 'search', 'judge']
  assert (
    'choose another --workdir, or lower config.checkpoint.keep'
    in (found['disk'][1])
  )
  assert 'lower config.batch.tokens' in found['memory'][1]
  assert 'http://127.0.0.1:9' in found['search'][1]
  assert found['generation'][0] == 'ok'


def test_tags_that_the_tokenizer_hides_are_a_problem(tmp_path, monkeypatch):
  tok = scripted.altered(tmp_path, special=['<search>', '</search>'])
  config = tiny.config()
  config.model.tokenizer = tok.path
  names = ('config', 'questions', 'tokenizer', 'prompts')
  some = [check for check in doctor.CHECKS if check[0] in names]
  monkeypatch.setattr(doctor, 'CHECKS', some)
  found, bad = examined(config, tmp_path / 'run')
  assert bad == ['prompts']
  # The user's folder is named, not the copy that the check made.
  assert f'tokenizer {tok.path}: ' in found['prompts'][1]
  assert "'</search>'] of the template 'micro'" in found['prompts'][1]


def test_a_policy_that_answers_its_own_searches_needs_no_service(tmp_path):
  config = tiny.config()
  config.source.module = 'none'
  config.env.information = 'policy'
  found, bad = examined(config, tmp_path)
  assert bad == []
  assert found['search'] == ('ok', 'the policy answers its own searches')
