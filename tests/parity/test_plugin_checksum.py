"""The sums that a vLLM worker takes are those of engines/weights/checksum.

Those of a CPU, and those of other devices, here also of tensors on a CPU.
"""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip('torch', reason='make test-parity')
import torch  # noqa: E402

from searchrl_jax.engines.vllm import hashes  # noqa: E402
from searchrl_jax.engines.vllm import plugin as vllm_plugin  # noqa: E402
from searchrl_jax.engines.weights import checksum  # noqa: E402

pytestmark = pytest.mark.parity
DTYPES = ('float32', 'bfloat16', 'float16')


@pytest.fixture(params=['_on_host', '_on_device'], autouse=True)
def used(request, monkeypatch):
  """One way to compute them, and not the other."""
  calls, compute = [], getattr(hashes, request.param)

  def counted(*args):
    calls.append(request.param)
    return compute(*args)

  monkeypatch.setattr(hashes, '_on_host', counted)
  yield
  assert calls


def stack(dtype, *shape):
  """[L, in, out], with zeros of both signs."""
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  x[:, 0, :2] = (0.0, -0.0)
  return jnp.asarray(x, dtype)


def to_torch(x):
  return torch.from_numpy(np.array(x, np.float32)).to(
    getattr(torch, x.dtype.name)
  )


def part(x, layer, row=0, column=0):
  """Theirs is [out, in], ours [L, in, out]."""
  _, n_in, n_out = x.shape
  start = layer * n_in * n_out + row + column * n_out
  return vllm_plugin.Part('q', slice(None), start, 1, n_out)


def text(x, sums):
  low, high = (sum(s) & 0xFFFFFFFF for s in zip(*sums))
  shape = list(x.shape)
  return checksum.combine([{'q': [x.dtype.name, shape, low, high]}])


@pytest.mark.parametrize('transposed', [False, True])
@pytest.mark.parametrize('dtype', DTYPES)
def test_layers_add_up_to_the_stack(dtype, transposed):
  x, got = stack(dtype, 3, 10, 7), []
  for i, layer in enumerate(x):
    layer = to_torch(layer)
    if transposed:  # in memory
      layer = layer.T.contiguous().T
    got.append(vllm_plugin._sums(layer, part(x, i), 0))
  assert text(x, got) == checksum.checksums({'q': x})


@pytest.mark.parametrize('block', [1, 5, 8, 1 << 20])
def test_blocks_of_any_size_add_up(block, monkeypatch):
  for name in ('_BLOCK', '_BLOCK_ELSE'):
    monkeypatch.setattr(hashes, name, block)
  x = stack('float32', 1, 10, 7)
  got = [vllm_plugin._sums(to_torch(x[0]), part(x, 0), 0)]
  assert text(x, got) == checksum.checksums({'q': x})


def test_shards_of_workers_and_probed_columns_add_up():
  x = stack('bfloat16', 2, 12, 8)
  got = []
  for layer in range(2):
    whole = to_torch(x[layer])
    for row in (0, 4):  # two workers
      for first in (0, 5, 10):  # columns probed some at a time
        block = whole[first : first + 5, row : row + 4]
        got.append(vllm_plugin._sums(block, part(x, layer, row), first))
  assert text(x, got) == checksum.checksums({'q': x})
  # Two others, which split the columns.
  got = [
    vllm_plugin._sums(
      to_torch(x[layer])[column : column + 6], part(x, layer, 0, column), 0
    )
    for layer in range(2)
    for column in (0, 6)
  ]
  assert text(x, got) == checksum.checksums({'q': x})


def test_an_index_past_32_bits_wraps():
  x = stack('float32', 1, 3, 5)
  near = part(x, 0)
  far = vllm_plugin.Part('q', slice(None), 1 << 32, 1, 5)
  at = vllm_plugin.Part('q', slice(None), 1, 1, 5)
  sums = [vllm_plugin._sums(to_torch(x[0]), p, 0) for p in (near, far, at)]
  assert (
    [s & 0xFFFFFFFF for s in sums[0]]
    == [s & 0xFFFFFFFF for s in sums[1]]
    != [s & 0xFFFFFFFF for s in sums[2]]
  )


def test_what_is_hashed_is_left_alone():
  x = stack('float32', 1, 4, 4)
  tensor = to_torch(x[0])
  before = tensor.clone()
  vllm_plugin._sums(tensor, part(x, 0), 0)
  assert tensor.view(torch.int32).equal(before.view(torch.int32))
