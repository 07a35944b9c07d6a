"""compose.yaml and the Dockerfiles name files, flags and fields that exist."""

import fnmatch
import re
import types

import pytest
import yaml

from searchrl_jax.data import core as data
from searchrl_jax.engines.vllm import launcher
from tests import here
from tests.conftest import ROOT

DOCKERFILES = ('Dockerfile', 'Dockerfile.sidecar')


def resolved(text: str) -> str:
  """compose.yaml with the defaults of its variables; those without: 'given'."""
  text = re.sub(r'\$\{\w+:\?(?:\$\$|[^}])*\}', 'given', text)
  return re.sub(r'\$\{\w+:-([^}]*)\}', r'\1', text)


SERVICES = yaml.safe_load(resolved((ROOT / 'compose.yaml').read_text()))[
  'services'
]


def instructions(dockerfile: str) -> list[list[str]]:
  """Each instruction as words, its continued lines joined."""
  text = (ROOT / dockerfile).read_text().replace('\\\n', ' ')
  lines = [x for x in text.splitlines() if x and not x.startswith('#')]
  return [line.split() for line in lines]


@pytest.mark.parametrize('dockerfile', DOCKERFILES)
def test_what_is_copied_exists_and_reaches_the_builder(dockerfile):
  ignored = (ROOT / '.dockerignore').read_text().splitlines()
  assert '*' in ignored
  kept = [x[1:] for x in ignored if x.startswith('!')]
  copied = [
    source
    for name, *rest in instructions(dockerfile)
    if name == 'COPY'
    for source in rest[:-1]
  ]
  assert copied
  for source in copied:
    assert (ROOT / source).exists(), source
    assert any(fnmatch.fnmatch(source, pattern) for pattern in kept), source


@pytest.mark.parametrize('name', SERVICES)
def test_what_compose_builds_has_its_arguments(name):
  build = SERVICES[name].get('build')
  if not build:
    assert SERVICES[name]['image'] in [
      s['image'] for s in SERVICES.values() if 'build' in s
    ]
    return
  file = build.get('dockerfile', 'Dockerfile')
  known = {w[1].split('=')[0] for w in instructions(file) if w[0] == 'ARG'}
  assert {*build['args']} <= known


@pytest.mark.parametrize(
  'name, further, missing',
  [
    ('retrieval', ['--port=0'], '/data/corpus.jsonl.gz'),
    ('trainer', [], '/data/model'),
  ],
)
def test_commands_of_compose_are_accepted(
  name, further, missing, tmp_path, monkeypatch
):
  """They fail at a file of /data: flags and fields were read."""
  # No questions, which come before the model.
  stream = types.SimpleNamespace(questions=[])
  monkeypatch.setattr(data, 'open_stream', lambda *_: stream)
  monkeypatch.setattr(data, 'load_sets', lambda *_: {})
  python, dash_m, module, *command = SERVICES[name]['command']
  assert (python, dash_m) == ('python', '-m')
  if name == 'trainer':
    further = [*further, f'--workdir={tmp_path}']

  def run(*wrong):
    done = here.run(module, *command, *further, *wrong)
    assert done.returncode
    return done.stdout + done.stderr

  assert missing in run().splitlines()[-1]
  said = run('--prot=1')
  assert 'prot' in said and missing not in said


def test_the_sidecar_and_the_trainer_agree():
  args = launcher.parse(SERVICES['sidecar']['command'])
  flags = dict(x.split('=', 1) for x in args.vllm)
  assert {*flags} == {'--dtype', '--max_model_len'}  # vLLM's own
  given = dict(x.split('=', 1) for x in SERVICES['trainer']['command'][3:])
  assert given['--config.engine.url'] == f'http://127.0.0.1:{args.port}'
  assert given['--config.engine.dtype'] == flags['--dtype']
  assert (
    f'--port={given["--config.source.url"][-4:]}'
    in (SERVICES['retrieval']['command'])
  )


@pytest.mark.parametrize(
  'name, path', [('retrieval', '/ready'), ('sidecar', '/health')]
)
def test_health_is_asked_at_the_port_that_is_served(name, path):
  service = SERVICES[name]
  (port,) = [x[7:] for x in service['command'] if x.startswith('--port=')]
  assert f'http://127.0.0.1:{port}{path}' in service['healthcheck']['test'][-1]


def test_no_service_is_reached_from_outside():
  for name, service in SERVICES.items():
    assert 'ports' not in service, name
    shared = service.get('network_mode') == 'service:retrieval'
    assert shared or service['networks'] == ['inside'], name
  networks = yaml.safe_load((ROOT / 'compose.yaml').read_text())['networks']
  assert networks == {'inside': {'internal': True}}


def test_the_file_for_gpus_names_services():
  text = (ROOT / 'compose.gpu.yaml').read_text()
  assert {*yaml.safe_load(text)['services']} <= {*SERVICES}
