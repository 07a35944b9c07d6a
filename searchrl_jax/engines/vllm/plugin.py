"""Runs inside a vLLM worker: loads published weights, computes checksums.

vLLM mixes `Worker` into its own worker class,

  --worker-extension-cls searchrl_jax.engines.vllm.plugin.Worker

and POST /collective_rpc calls its methods. Loading uses vLLM's own loaders, and
checksums read the tensors used for computing, so an error in one cannot hide an
error in the other. The module depends on three properties of vLLM 0.32:

* On CPU a linear layer packs its matrix for oneDNN and drops the original, so
  no parameter shows the values in use. The checksums multiply unit vectors
  instead, which returns every element exactly but takes long. The function
  that multiplies holds the packed copy in its closure; without one, the layer
  computes with its parameter.
* On CPU the output head packs its own copy even of an embedding that it is
  tied to; vLLM's reload does not update it. `searchrl_load` packs it again.
* A tensor that is missing in a reload keeps its old value, with a warning.

This module imports no JAX, and torch and vLLM only when they are used.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import numpy as np

from searchrl_jax.engines.weights import published
from searchrl_jax.engines.weights.published import Published
from searchrl_jax.models import hf_config, hf_tensors

# Parts of vLLM's fused layers: (layer, its n-th part).
_FUSED = {
  'q_proj': ('qkv_proj', 0),
  'k_proj': ('qkv_proj', 1),
  'v_proj': ('qkv_proj', 2),
  'gate_proj': ('gate_up_proj', 0),
  'up_proj': ('gate_up_proj', 1),
}
# Elements hashed at once: on CPU they stay in the cache.
_BLOCK, _BLOCK_ELSE = 1 << 18, 1 << 24
_PROBE = 1 << 22  # elements of one product with unit vectors


class Worker:
  """Mixed into vLLM's worker; arguments and results are JSON."""

  def searchrl_describe(self) -> dict[str, Any]:
    """The served model: its fields, dtype, and the version that is `loaded`,
    None before `searchrl_load`."""
    config = self.model_config
    weights = getattr(self, '_searchrl_published', None)
    about = {
      'dtype': _dtype_name(config.dtype),
      'loaded': weights and weights.version,
    }
    served = config.hf_config.to_dict()
    return hf_config.parse_config(served, strict=False) | about

  def searchrl_load(self, path: str) -> None:
    """Loads a publication of the served model, tensor by tensor, in place.

    The server must be paused, and the caller must drop the caches.

    Raises:
      PublishedError: see `published.open_published`; the worker is unchanged
        unless a tensor's own data is damaged.
    """
    weights = published.open_published(path)
    self._searchrl_published = None
    model = self.model_runner.get_model()
    try:
      self.reload_weights(
        weights_iterator=_torch_tensors(weights, _tied(model))
      )
    except BaseException:
      from vllm.model_executor.model_loader.reload import layerwise

      # Repairs the layers that the failed reload has taken apart.
      layerwise.finalize_layerwise_reload(model, self.model_config)
      raise
    if _tied(model):
      head = model.lm_head
      head.quant_method.process_weights_after_loading(head)
    self._searchrl_published = weights

  def searchrl_checksums(self) -> dict[str, list]:
    """{our tensor name: [dtype, shape, low, high]} of the weights in use.

    Two uint32 sums over the elements that this worker holds, with their
    indices in our layout: those of all workers add up to the checksum of
    engines/weights/checksum.py. A tied head is reported as 'head', in the
    embedding's layout.

    Raises:
      RuntimeError: no publication has been loaded.
    """
    weights = getattr(self, '_searchrl_published', None)
    if weights is None:
      raise RuntimeError('no publication has been loaded into this worker')
    model = self.model_runner.get_model()
    sums: dict[str, list[int]] = {}
    for module, kind, parts in _modules(model, weights):
      # The values in use: first column, block [columns, all rows].
      for first, block in _blocks(module, kind, self.model_config.dtype):
        for part in parts:
          total = sums.setdefault(part.path, [0, 0])
          low, high = _sums(block[:, part.rows], part, first)
          total[0] += low
          total[1] += high
    shapes = {'head': weights.shapes['embed'], **weights.shapes}
    return self._searchrl_report(sums, shapes)

  def searchrl_adapter_checksums(
    self, shapes: dict[str, list[int]]
  ) -> dict[str, list]:
    """The same of the adapter in use, which has a slot alone.

    shapes: our tensor name -> shape, of the adapter.
    """
    model = self.model_runner.get_model()
    sums: dict[str, list[int]] = {name: [0, 0] for name in shapes}
    ours = {k: tuple(v) for k, v in shapes.items()}
    table = hf_tensors.table(ours, self._searchrl_published.config)
    for name, tensor in table.items():
      *parents, leaf, kind, _ = name.split('.')
      leaf, n = _FUSED.get(leaf, (leaf, 0))
      module = model.get_submodule('.'.join([*parents, leaf]))
      part = _adapter_part(module.base_layer, tensor, n, kind)
      if part is None:
        continue
      if kind == 'lora_A':  # [rank, columns], in a slot for larger ranks
        held = module.lora_a_stacked[n][0, 0, : tensor.shape[0]]
      else:
        held = module.lora_b_stacked[n][0, 0, :, : tensor.shape[1]]
      low, high = _sums(held.T, part, 0)
      sums[tensor.path][0] += low
      sums[tensor.path][1] += high
    return self._searchrl_report(sums, shapes)

  def _searchrl_report(self, sums, shapes) -> dict[str, list]:
    dtype = _dtype_name(self.model_config.dtype)
    return {
      name: [dtype, list(shapes[name]), *(s & 0xFFFFFFFF for s in total)]
      for name, total in sums.items()
    }


@dataclasses.dataclass(frozen=True)
class Part:
  """The position of a block [rows, columns] of a module's tensor in ours.

  An element (row, column) of the block has the index `start` + row *
  `row_step` + column * `column_step` in our stacked tensor.
  """

  path: str  # our tensor name
  rows: slice  # of the module's own tensor
  start: int
  row_step: int
  column_step: int


def _modules(model, weights: Published) -> Iterator[tuple[Any, str, list]]:
  """Each module of this worker, 'weight' or 'bias', and the parts of our
  tensors that it holds."""
  groups: dict[tuple[str, str], list] = {}
  table = dict(weights.table)
  # A head that computes with the embedding itself has no values of its own.
  if weights.config['tied'] and (not _tied(model) or _packed(model.lm_head)):
    embed = next(iter(table.values()))
    table[hf_tensors.TIED_HEAD] = dataclasses.replace(embed, path='head')
  for name, tensor in table.items():
    *parents, leaf, kind = name.split('.')
    leaf, n = _FUSED.get(leaf, (leaf, 0))
    module = '.'.join([*parents, leaf])
    groups.setdefault((module, kind), []).append((tensor, n))
  for (name, kind), members in groups.items():
    module = _own(model.get_submodule(name))
    parts = [_part(module, tensor, n) for tensor, n in members]
    yield module, kind, [part for part in parts if part is not None]


def _part(module, tensor: hf_tensors.Tensor, n: int) -> Part | None:
  """The n-th part of a module; None: another worker reports it."""
  rows, first_row, first_column = _local(module, n)
  return rows and _place(tensor, rows, first_row, first_column)


def _place(tensor, rows: slice, first_row: int, first_column: int) -> Part:
  n_rows = tensor.shape[0]
  n_columns = tensor.shape[1] if len(tensor.shape) > 1 else 1
  steps = (1, n_rows) if tensor.n_in else (n_columns, 1)
  layer = (tensor.layer or 0) * n_rows * n_columns
  start = layer + first_row * steps[0] + first_column * steps[1]
  return Part(tensor.path, rows, start, *steps)


def _adapter_part(module, tensor, n: int, kind: str) -> Part | None:
  """The part of the n-th adapter of a module; None: another reports it.

  The side of the adapter that lies along the module's cut is cut with it, the
  other one is the same for all workers.
  """
  from vllm.model_executor.layers import linear

  rows, first_row, first_column = _local(module, n)
  inputs = isinstance(module, linear.RowParallelLinear)
  if inputs != (kind == 'lora_A') and module.tp_rank or rows is None:
    return None
  if inputs:
    return _place(tensor, slice(None), 0, first_column * (kind == 'lora_A'))
  return _place(tensor, slice(None), first_row * (kind == 'lora_B'), 0)


def _own(module):
  """The layer itself, without what vLLM wraps around it for adapters."""
  return getattr(module, 'base_layer', module)


def _local(module, n: int) -> tuple[slice | None, int, int]:
  """The rows of the n-th part in the module's tensor, and the first row and
  column in the whole tensor. The rows are None if another worker reports them.
  """
  from vllm.model_executor.layers import linear
  from vllm.model_executor.layers import vocab_parallel_embedding as vocab

  if isinstance(module, vocab.VocabParallelEmbedding):
    own = module.shard_indices
    return slice(0, own.num_org_elements), own.org_vocab_start_index, 0
  rank = getattr(module, 'tp_rank', None)
  if rank is None:  # a norm: replicated
    from vllm.distributed import get_tensor_model_parallel_rank

    return (None if get_tensor_model_parallel_rank() else slice(None)), 0, 0
  if isinstance(module, linear.RowParallelLinear):
    return slice(None), 0, rank * module.input_size_per_partition
  sizes = list(module.output_partition_sizes)
  if isinstance(module, linear.QKVParallelLinear):
    kv = module.num_kv_heads * module.head_size
    sizes = [module.num_heads * module.head_size, kv, kv]
    if n:
      rank, replica = divmod(rank, module.num_kv_head_replicas)
      if replica:
        return None, 0, 0
  begin = sum(sizes[:n])
  return slice(begin, begin + sizes[n]), rank * sizes[n], 0


def _blocks(module, kind: str, dtype) -> Iterator[tuple[int, Any]]:
  """(first column, block [columns, all rows]) of the values in use."""
  import torch
  from vllm.model_executor.layers import vocab_parallel_embedding as vocab

  tensor = getattr(module, kind)
  lookup = type(module) is vocab.VocabParallelEmbedding
  if kind == 'weight' and _packed(module) and not lookup:
    width = module.input_size_per_partition
    step = max(1, _PROBE // sum(module.output_partition_sizes))
    for first in range(0, width, step):
      units = torch.zeros(min(step, width - first), width, dtype=dtype)
      units[:, first:].fill_diagonal_(1)
      yield first, module.quant_method.apply(module, units, bias=None)
    return
  tensor = tensor.detach().to(dtype)
  yield 0, tensor[None] if tensor.ndim == 1 else tensor.T


def _sums(block, part: Part, first: int) -> tuple[int, int]:
  """The two sums of engines/weights/checksum.py, in wrapping int32."""
  import torch

  device, start = block.device, part.start + first * part.column_step
  outer, inner = part.column_step, part.row_step
  if block.stride(0) == 1:  # a transposed matrix: in the order of its memory
    block, outer, inner = block.T, inner, outer
  inner_index = _steps(block.shape[1], inner, 0, device)
  low_sum = high_sum = 0
  step = _BLOCK if device.type == 'cpu' else _BLOCK_ELSE
  step = max(1, step // block.shape[1])
  for i in range(0, len(block), step):
    bits = _bits(block[i : i + step])
    index = _steps(len(bits), outer, start + i * outer, device)
    hashes = _mix(bits + index[:, None] + inner_index)
    low_sum = low_sum + hashes.sum(dtype=torch.int32)
    hashes ^= bits
    high_sum = high_sum + _mix(hashes).sum(dtype=torch.int32)
  return int(low_sum), int(high_sum)


def _steps(n: int, step: int, start: int, device):
  """(start + i * step) * 0x9E3779B1 for i < n, in wrapping int32 [n]."""
  import torch

  index = np.arange(n, dtype=np.uint64) * np.uint64(step) + np.uint64(start)
  index = (index & np.uint64(0xFFFFFFFF)) * np.uint64(0x9E3779B1)
  return torch.from_numpy(index.astype(np.uint32).view(np.int32)).to(device)


def _bits(x):
  """The bits of float32 or a 16-bit float as int32; -0.0 as 0.0."""
  import torch

  x = x.contiguous()
  if x.dtype == torch.float32:
    bits = x.view(torch.int32)
    return bits.masked_fill(bits == -(1 << 31), 0)
  bits = x.view(torch.int16).to(torch.int32) & 0xFFFF
  return bits.masked_fill_(bits == 1 << 15, 0)


def _mix(h):
  """MurmurHash3's finaliser, in place."""
  # A shift of int32 copies the sign bit, which the masks remove.
  h ^= (h >> 16).bitwise_and_(0xFFFF)
  h *= 0x85EBCA6B - (1 << 32)
  h ^= (h >> 13).bitwise_and_(0x7FFFF)
  h *= 0xC2B2AE35 - (1 << 32)
  h ^= (h >> 16).bitwise_and_(0xFFFF)
  return h


def _torch_tensors(weights: Published, tied: bool):
  """(name, torch tensor) of each tensor that the served model loads."""
  import torch

  for name, array in weights.tensors(tied):
    if array.dtype.name == 'bfloat16':  # numpy knows it from ml_dtypes only
      yield name, torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
      yield name, torch.from_numpy(array)


def _tied(model) -> bool:
  """Whether the served model's head is its embedding."""
  head = getattr(model, 'lm_head', None)
  embed = getattr(model.model, 'embed_tokens', None)
  return getattr(head, 'weight', None) is getattr(embed, 'weight', 0)


def _packed(module) -> bool:
  """Whether a linear layer computes with a packed copy of its matrix."""
  multiply = getattr(_own(module), 'cpu_linear', None)
  return bool(getattr(multiply, '__closure__', None))


def _dtype_name(dtype) -> str:
  return str(dtype).removeprefix('torch.')
