"""Full-size programs through XLA's compiler for GPUs (make test-aot)."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.aot


@pytest.mark.parametrize('topology, fsdp', [('h200:1x8', 8), ('h100:4x8', 32)])
def test_the_update_and_the_sampler_of_3b_hold(topology, fsdp):
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'searchrl_jax.aot',
      f'--topology={topology}',
      '--config=configs/search_r1.py:model=qwen2.5-3b',
      '--config.batch.lengths=(4608,)',
      '--config.mesh.data=1',
      f'--config.mesh.fsdp={fsdp}',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  verdicts = done.stdout.partition('\nChecks\n')[2].splitlines()
  assert sum(' holds ' in line for line in verdicts) >= 12
  assert not [line for line in verdicts if ' MISSED ' in line]
  assert any('memory' in line and 'GiB' in line for line in verdicts)
