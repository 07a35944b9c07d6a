"""`python -m searchrl_jax.doctor`: what it checks, and what it says."""

import functools
from importlib import metadata
import io
import types

import psutil
import pytest
from rich import console

from configs import search_r1
from searchrl_jax import doctor
from searchrl_jax.aot import costs
from searchrl_jax.models import parameters
from searchrl_jax.run import build
from tests import scripted, tiny

pytestmark = pytest.mark.slow


def examined(config, workdir):
  """{name: (mark, text)} of the printed lines, the problems, the report."""
  out = console.Console(file=io.StringIO(), soft_wrap=True)
  bad, report = doctor.examine(config, str(workdir), out)
  lines = [line.split(maxsplit=2) for line in out.file.getvalue().splitlines()]
  return {name: (mark, text) for mark, name, text in lines}, bad, report


@pytest.mark.long
def test_a_config_that_works(tmp_path):
  found, bad, report = examined(tiny.config(), tmp_path / 'run')
  assert bad == [] and list(found) == [name for name, *_ in doctor.CHECKS]
  assert {mark for mark, _ in found.values()} == {'ok'}
  assert found['questions'][1].startswith('train 240, micro 4')
  assert "-> ['" in found['search'][1]  # the titles of real passages
  for part in ('Memory of one device', 'Memory of the host', 'One step'):
    assert part in report
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
  found, bad, report = examined(config, tmp_path)
  assert bad == ['versions', 'questions', 'tokenizer'] and report == ''
  assert 'optax>=0.2.8 (here: 0.1): `pip install -U`' in found['versions'][1]
  assert "split='bogus' must be one of" in found['questions'][1]
  assert "config.model.tokenizer='/nowhere': no such" in found['tokenizer'][1]
  assert found['search'] == ('skipped', 'it needs questions, tokenizer')
  assert found['model'] == ('skipped', 'it needs tokenizer')


@pytest.mark.long
def test_services_and_room(tmp_path, monkeypatch):
  config = tiny.config('http://127.0.0.1:9')
  config.source.attempts = 1
  config.judge.url = 'http://127.0.0.1:9/v1'
  config.checkpoint.keep = 10**9
  memory = psutil.virtual_memory()
  monkeypatch.setattr(
    psutil, 'virtual_memory', lambda: memory._replace(available=2**20)
  )
  found, bad, report = examined(config, tmp_path / 'run' / 'deeper')
  assert bad == ['disk', 'memory', 'search', 'judge']
  assert 'Memory of one device' in report  # what takes how much
  assert (
    'choose another --workdir, or lower config.checkpoint.keep'
    in (found['disk'][1])
  )
  assert 'lower config.batch.tokens' in found['memory'][1]
  assert 'http://127.0.0.1:9' in found['search'][1]
  # What has no room is not loaded.
  assert found['checkpoint'] == ('skipped', 'it needs memory')


def test_what_a_run_writes_once_needs_room_too(tmp_path, monkeypatch):
  monkeypatch.setattr(doctor, 'GIB', 1)  # bytes are printed

  def once(**fields):
    """Bytes beside the checkpoints, of which there are keep + 1."""
    config, needs = tiny.config(), []
    config.update_from_flattened_dict(fields)
    have = types.SimpleNamespace(config=config, workdir=tmp_path)
    have.cfg = parameters.model_config(config, 64)
    have.mesh = build.mesh(config)
    for keep in 1, 2:
      config.checkpoint.keep = keep
      needs.append(float(doctor.disk(have).split()[2]))
    return 3 * needs[0] - 2 * needs[1]

  model = 4 * parameters.model_config(tiny.config(), 64).n_params
  assert once() == 0
  assert once(**{'algorithm.kl': 'loss', 'algorithm.kl_coef': 0.1}) == model
  assert once(**{'model.lora.rank': 2}) == model  # the frozen base


def test_tags_that_the_tokenizer_hides_are_a_problem(tmp_path, monkeypatch):
  tok = scripted.altered(tmp_path, special=['<search>', '</search>'])
  config = tiny.config()
  config.model.tokenizer = tok.path
  names = ('config', 'questions', 'tokenizer', 'prompts')
  some = [check for check in doctor.CHECKS if check[0] in names]
  monkeypatch.setattr(doctor, 'CHECKS', some)
  found, bad, _ = examined(config, tmp_path / 'run')
  assert bad == ['prompts']
  # The user's folder is named, not the copy that the check made.
  assert f'tokenizer {tok.path}: ' in found['prompts'][1]
  assert "'</search>'] of the template 'micro'" in found['prompts'][1]


@pytest.mark.long
def test_a_policy_that_answers_its_own_searches_needs_no_service(tmp_path):
  config = tiny.config()
  config.source.module = 'none'
  config.env.information = 'policy'
  found, bad, _ = examined(config, tmp_path)
  assert bad == []
  assert found['search'] == ('ok', 'the policy answers its own searches')


def test_a_shape_by_name_is_reported_on_and_not_loaded(tmp_path, monkeypatch):
  config = search_r1.get_config('model=qwen2.5-3b')
  config.mesh.data = config.mesh.fsdp = 1
  names = 'config', 'devices', 'tokenizer', 'model', 'memory', 'checkpoint'
  some = [check for check in doctor.CHECKS if check[0] in names]
  monkeypatch.setattr(doctor, 'CHECKS', some)
  # Its update is not compiled here, and the memory may be what it needs.
  uncompiled = functools.partial(costs.of_run, working=0)
  monkeypatch.setattr(costs, 'of_run', uncompiled)
  room = psutil.virtual_memory()._replace(available=2**50)
  monkeypatch.setattr(psutil, 'virtual_memory', lambda: room)
  found, bad, report = examined(config, tmp_path)
  assert found['tokenizer'][0] == 'skipped' and 'ok' == found['model'][0]
  assert bad == ['checkpoint']
  assert 'is a shape for reports' in found['checkpoint'][1]
  assert 'vocabulary 151,936' in report  # the shape's own


def test_a_topology_asks_for_a_tokenizer_where_it_sets_the_vocabulary():
  assert doctor.vocabulary(search_r1.get_config('model=qwen2.5-3b')) == 1
  assert doctor.vocabulary(tiny.config()) > 1  # the words of the world
