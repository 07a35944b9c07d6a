"""What all benchmarks share: the machine is judged before they load it."""

import subprocess
import sys

import pytest

from experiments import common
from tests.conftest import ROOT

CODE = """
import os, sys
heavy = []
def load():
  heavy.append({'jax', 'numpy', 'absl'} & {*sys.modules})
  return len(heavy) / 10, 0, 0
os.getloadavg = load
import experiments.NAME
from experiments import common
print(heavy, common.require_idle(max_load=0.15))
print(common.environment()['load_before'])
"""


@pytest.mark.parametrize(
  'name', ['common', 'benchmarks.sampler', 'benchmarks.resume']
)
def test_the_load_is_read_before_heavy_imports(name):
  done = subprocess.run(
    [sys.executable, '-c', CODE.replace('NAME', name)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.stdout.split('\n')[:2] == ['[set()] 0.1', '0.1'], done.stderr


def test_no_benchmark_reads_the_load_itself():
  reading = [
    path.name
    for path in (ROOT / 'experiments/benchmarks').glob('*.py')
    if 'getloadavg' in path.read_text()
  ]
  assert reading == ['__init__.py']


def test_a_command_names_no_folder_of_its_machine(monkeypatch):
  given = '--only=a,b', '--workdir=/home/me/arena', '--out', '/tmp/out.json'
  config = '--config=/home/me/c.py:model=/home/me/Qwen,data=gs://bucket/data'
  monkeypatch.setattr('sys.argv', ['/venv/bin/x.py', *given, config])
  assert common.command('experiments.rows') == (
    'python -m experiments.rows --only=a,b --workdir=runs/arena '
    '--out runs/out.json '
    '--config=runs/c.py:model=runs/Qwen,data=gs://bucket/data'
  )
