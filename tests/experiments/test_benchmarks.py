"""What all benchmarks share: the harness, and when the load is read."""

import asyncio
import json
import math
import mmap
import os
import subprocess
import sys
import time
import types

import pytest

from experiments import common
from experiments.benchmarks import harness, memory, models, multiturn
from searchrl_jax.lookup import ConfigError
from tests.conftest import ROOT
from tests.fakes import FakeEngine

pytestmark = pytest.mark.slow

LOADED = """
import os, sys
heavy = []
def load():
  heavy.append({'jax', 'numpy', 'absl'} & {*sys.modules})
  return len(heavy) / 10, 0, 0
os.getloadavg = load
import experiments.NAME
from experiments import common
print(heavy, common.LOAD)
print(common.environment()['load_before'])
"""
# A benchmark of two cases.
EXAMPLE = """
from experiments import common
from experiments.benchmarks import harness

def inputs():
  return (harness.require_file(FILE, 'make it'),)

def measure(case, file):
  return [{'case': case, 'file': file.name, 'value': 2.0}]

def bars(rows):
  return [common.bar(f'value_{r["case"]}', r['value'], 3.0) for r in rows]

harness.run('example', measure, bars, cases='ab', reps=3, inputs=inputs)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess:
  command = [sys.executable, '-c', code, *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
  'name', ['common', 'benchmarks.harness', 'benchmarks.sampler']
)
def test_the_load_is_read_before_heavy_imports(name):
  done = python(LOADED.replace('NAME', name))
  assert done.stdout.split('\n')[:2] == ['[set()] 0.1', '0.1'], done.stderr


def test_no_benchmark_reads_the_load_itself():
  reading = [
    path.name
    for path in (ROOT / 'experiments/benchmarks').glob('*.py')
    if 'getloadavg' in path.read_text()
  ]
  assert reading == ['__init__.py']


def test_a_busy_machine_is_refused_unless_allowed(monkeypatch):
  monkeypatch.setattr(common, 'LOAD', 0.31)
  with pytest.raises(ConfigError, match='load 0.31.*--allow_load'):
    harness.require_idle()
  harness.require_idle(allow=True)
  monkeypatch.setattr(common, 'LOAD', 0.3)
  harness.require_idle()


def test_a_benchmark_writes_its_record(tmp_path):
  out = tmp_path / 'out.json'
  code = EXAMPLE.replace('FILE', "'README.md'")
  done = python(code, '--allow_load', '--cases=b', f'--out={out}')
  assert done.returncode == 0, done.stderr  # although the bar does not hold
  assert 'value_b: 2 (bar 3) DOES NOT HOLD' in done.stdout
  record = json.loads(out.read_text())
  assert record['benchmark'] == 'example'
  assert record['environment'].keys() > {'cpu', 'commit', 'load_before'}
  assert record['rows'] == [{'case': 'b', 'file': 'README.md', 'value': 2.0}]
  assert record['bars'] == [
    {'name': 'value_b', 'value': 2.0, 'bar': 3.0, 'holds': False}
  ]


@pytest.mark.parametrize(
  'file, argument, named',
  [
    ('no_such_data', '--allow_load', 'no_such_data does not exist: make it'),
    ('README.md', '--cases=a,c', 'there are a, b'),
  ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(
  file, argument, named
):
  done = python(EXAMPLE.replace('FILE', repr(file)), argument)
  assert done.returncode == 2 and done.stdout == ''
  (line,) = done.stderr.splitlines()
  assert named in line


def test_sides_take_turns(monkeypatch):
  monkeypatch.setattr(harness.flags, 'FLAGS', types.SimpleNamespace(reps=2))
  calls = []

  def side(name):
    calls.append(name)
    return len(calls)

  sides = {name: lambda name=name: side(name) for name in 'ab'}
  assert harness.turns(sides, warm=1) == {'a': [3, 5], 'b': [4, 6]}
  assert ''.join(calls) == 'ababab'
  assert harness.turns(sides, each=2)['b'] == [8, 10, 12, 14]


def test_the_faster_of_one_and_two_threads_counts():
  speed = {'jax': 9.0, 'torch_1': 2.0, 'torch_2': 1.0, 'vllm_2': 3.0}
  assert harness.better(speed) == 'torch_1'
  assert harness.against(speed, 'per_s') == {
    'per_s': 9.0, 'torch_per_s': 2.0, 'torch_threads': 1, 'ratio': 4.5
  }  # fmt: skip
  assert harness.better(speed | {'vllm_1': 1.0}, 'vllm') == 'vllm_2'


def test_trajectories_with_searches_are_played(monkeypatch):
  monkeypatch.setattr(multiturn.Ids, 'vocab_size', 256)
  items, engine = multiturn.questions(5, 0), FakeEngine(lambda *said: 'said')
  played = asyncio.run(multiturn.free(engine, items, seconds=0.0))
  assert len(played.groups) == engine.opened == 5 and not engine.handles
  searches = sum(len(q.meta['lengths']) - 1 for q in items)
  assert engine.appended == searches * multiturn.OBSERVATION > 0


def test_a_function_runs_apart():
  assert harness.apart(math.hypot, 3, 4) == 5.0
  assert harness.apart(os.getenv, 'GIVEN', env={'GIVEN': 'x'}) == 'x'
  with pytest.raises(RuntimeError, match='sqrt ended with status 1'):
    harness.apart(math.sqrt, -1)


def test_a_process_answers_lines_of_json():
  code = 'print(0, flush=True); print(2 * int(input()), flush=True)'
  with harness.Process([sys.executable, '-c', code]) as process:
    assert (process.about, process(4)) == (0, 8)
  with pytest.raises(RuntimeError, match='ended with status 3'):
    harness.Process([sys.executable, '-c', 'raise SystemExit(3)'])


@pytest.mark.skipif(sys.platform != 'linux', reason='/proc')
def test_the_peak_of_a_block_is_seen():
  size = 64 << 20
  # Of the system, not of what this process has freed before.
  own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
  with memory.Peak() as peak, mmap.mmap(-1, size, own) as block:
    block.write(bytes(size))
    time.sleep(0.2)  # it looks every 0.02 s
  assert peak.bytes - peak.start > 0.9 * size


def test_a_model_may_differ_in_a_field():
  assert models.config('1m').n_params == 1_099_904
  assert models.config('28m').n_params == 28_326_400
  assert models.config('1m', d_ff=512).d_ff == 512


def test_a_command_names_no_folder_of_its_machine(monkeypatch):
  given = '--only=a,b', '--workdir=/home/me/arena', '--out', '/tmp/out.json'
  config = '--config=/home/me/c.py:model=/home/me/Qwen,data=gs://bucket/data'
  monkeypatch.setattr('sys.argv', ['/venv/bin/x.py', *given, config])
  assert common.command('experiments.rows') == (
    'python -m experiments.rows --only=a,b --workdir=runs/arena '
    '--out runs/out.json '
    '--config=runs/c.py:model=runs/Qwen,data=gs://bucket/data'
  )
