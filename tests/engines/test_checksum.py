"""Checksums add up over workers, and show what a server can show."""

import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.weights import checksum
from tests import memory


def report(text: str) -> list:
  """What one worker that holds the whole tensor reports."""
  kind, sums = text.split(':')
  dtype, dims = kind.rstrip(']').split('[')
  return [
    dtype,
    [int(d) for d in dims.split(',')],
    int(sums[:8], 16),
    int(sums[8:], 16),
  ]


def ones(*shape):
  return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def test_sums_of_workers_add_up_and_wrap():
  got = checksum.combine(
    [
      {'q': ['float32', [2, 3], 0xFFFFFFFF, 1]},
      {'q': ['float32', [2, 3], 2, 0x10], 'k': ['float32', [1], 7, 8]},
    ]
  )
  assert got == {
    'q': 'float32[2,3]:0000000100000011',
    'k': 'float32[1]:0000000700000008',
  }


def test_one_worker_reports_what_the_trainer_computes():
  want = checksum.checksums({'embed': ones(4, 3), 'layers/q': ones(2, 3)})
  assert checksum.combine([{k: report(v) for k, v in want.items()}]) == want


def test_a_copy_of_the_tied_head_shows_only_if_it_differs():
  sums = checksum.checksums({'embed': ones(4, 3)})
  embed = report(sums['embed'])
  assert checksum.combine([{'embed': embed, 'head': embed}]) == sums
  old = [*embed[:3], embed[3] ^ 1]
  assert set(checksum.combine([{'embed': embed, 'head': old}])) == {
    'embed',
    'head',
  }


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_minus_zero_is_zero_and_nothing_else_is(dtype):
  def of(*values):
    return checksum.checksums({'x': jnp.asarray(values, dtype)})

  assert of(0.0, -0.0, 1.0) == of(-0.0, 0.0, 1.0)
  assert of(0.0, 1.0) != of(0.0, -1.0)
  tiny = float(jnp.finfo(dtype).tiny)
  assert of(0.0) != of(tiny) != of(-tiny)


@pytest.mark.long
def test_a_checksum_writes_no_hashes_to_memory():
  x = jnp.ones((4, 1 << 22), jnp.float32)  # 64 MiB
  checksum.checksums({'x': x})  # compiles
  with memory.Peak() as peak:
    for _ in range(5):
      checksum.checksums({'x': x})
  assert peak.peak - peak.start < x.nbytes / 4
