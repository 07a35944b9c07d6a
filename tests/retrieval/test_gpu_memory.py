"""The share of each GPU that JAX allocates at its start."""

import os
import subprocess
import sys

import pytest

from retrieval.serve import gpu_memory
from tests.conftest import ROOT

GB, FRACTION = 10**9, 'XLA_PYTHON_CLIENT_MEM_FRACTION'


@pytest.fixture
def machine(tmp_path, monkeypatch):
  """A machine whose nvidia-smi names the GPUs, in MiB, of `sizes`."""
  for name in (*gpu_memory._USERS, 'JAX_PLATFORMS', 'CUDA_VISIBLE_DEVICES'):
    monkeypatch.delenv(name, raising=False)

  def make(*sizes):
    smi = tmp_path / 'nvidia-smi'
    lines = ''.join(f'echo {size}\n' for size in sizes)
    smi.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n{lines}')
    smi.chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    return tmp_path / 'asked'

  yield make
  for name in gpu_memory._USERS:
    os.environ.pop(name, None)


def test_vectors_are_shared_and_models_are_not(machine):
  machine(143771, 143771)
  said = gpu_memory.limit(32 * GB, 1 * GB)
  needed = 17 * GB + gpu_memory._WORK
  assert float(os.environ[FRACTION]) == pytest.approx(
    needed / (143771 << 20), abs=1e-4
  )
  assert '20.2 GB of each of 2 GPUs' in said
  assert 'XLA_PYTHON_CLIENT_PREALLOCATE' not in os.environ


def test_only_what_is_visible_is_asked_for(machine, monkeypatch):
  asked = machine(81559)
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')
  gpu_memory.limit(200 * GB, 0)
  assert '--id=3' in asked.read_text()
  assert os.environ[FRACTION] == '0.95'  # `dense_jax` says that it is too much


def test_without_an_answer_it_grows(machine, monkeypatch, tmp_path):
  monkeypatch.setenv('PATH', str(tmp_path))
  assert gpu_memory.limit(1, 1) == 'XLA_PYTHON_CLIENT_PREALLOCATE=false'
  assert os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] == 'false'


@pytest.mark.parametrize('name', [*sorted(gpu_memory._USERS), 'JAX_PLATFORMS'])
def test_what_the_user_set_stays(name, machine, monkeypatch):
  machine(81559)
  monkeypatch.setenv(name, 'cpu')
  before = dict(os.environ)
  assert gpu_memory.limit(GB, GB) == '' and dict(os.environ) == before


def test_it_comes_before_jax():
  code = (
    'import sys, retrieval.serve.searcher, retrieval.index.folder; '
    "sys.exit('jax' in sys.modules)"
  )
  subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)
