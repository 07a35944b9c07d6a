"""Full-size programs through XLA's compiler for GPUs (make test-aot)."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.aot


def report(topology, config, *fields):
  """What the gate prints, and the lines of its checks."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'searchrl_jax.doctor',
      f'--topology={topology}',
      f'--config={config}',
      '--config.batch.lengths=(4608,)',
      *fields,
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout, done.stdout.partition('\nChecks\n')[2].splitlines()


@pytest.mark.parametrize(
  'topology, machine, slots',
  [('h200:1x8', 'h200x8', 128), ('h100:4x8', 'h100x8x4', 64)],
)
def test_the_programs_of_3b_hold(topology, machine, slots):
  config = f'configs/search_r1.py:model=qwen2.5-3b,machine={machine}'
  text, verdicts = report(topology, config)
  assert sum(' holds ' in line for line in verdicts) >= 12
  assert not [line for line in verdicts if ' MISSED ' in line]
  assert any('memory' in line and 'GiB' in line for line in verdicts)
  # A device holds the slots of its own process, of eight devices.
  assert f'buffer bf16[{slots},2,5120,128]' in text
  assert '\nsearch: arguments 3.9' in text  # of 30 GiB on eight devices


def test_a_token_reads_weights_and_cache_once():
  """Of six layers of the 7B, beside adapters, which XLA would join with copies
  of the weights."""
  sizes = dict(
    hidden_size=3584,
    num_hidden_layers=6,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    tie_word_embeddings=False,
  )
  _, verdicts = report(
    'h200:1x1',
    'experiments/gpu/recipe.py',
    *(f'--config.model.arch.{name}={size}' for name, size in sizes.items()),
    '--config.engine.slots=256',
    '--config.model.lora.rank=32',
  )
  (line,) = [line for line in verdicts if 'untruncated token reads' in line]
  assert ' holds ' in line
