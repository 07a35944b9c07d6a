"""Runs inside a vLLM worker: loads published weights, computes checksums.

vLLM mixes `Worker` into its own worker class,

  --worker-extension-cls searchrl_jax.engines.vllm.plugin.Worker

and POST /collective_rpc calls its methods. Loading uses vLLM's own loaders, and
checksums read the tensors used for computing, so an error in one cannot hide an
error in the other. The module depends on five properties of vLLM 0.32:

* On CPU a linear layer packs its matrix for oneDNN and drops the original, so
  no parameter shows the values in use. The checksums multiply unit vectors
  instead, which returns every element exactly but takes long. The function
  that multiplies holds the packed copy in its closure; without one, the layer
  computes with its parameter.
* On CPU the output head packs its own copy even of an embedding that it is
  tied to; vLLM's reload does not update it. `searchrl_load` packs it again.
* A tensor that is missing in a reload keeps its old value, with a warning.
* A delta net's `A_log` is float32 whatever the dtype, its norm is not
  (`families.SERVED`). On some CPUs its convolution is packed.
* On CPU the experts of a layer are packed when it is loaded first, and a reload
  leaves plain matrices where the kernel expects packed ones. `searchrl_load`
  packs them.

This module imports no JAX, and torch and vLLM only when they are used.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import math
import pathlib
import re
from typing import Any

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.engines.vllm import hashes
from searchrl_jax.engines.weights import delta, published
from searchrl_jax.engines.weights.published import Published
from searchrl_jax.models import families, hf_config, hf_tensors

# Parts of vLLM's fused layers: (layer, its n-th part).
_FUSED = {
  'q_proj': ('qkv_proj', 0),
  'k_proj': ('qkv_proj', 1),
  'v_proj': ('qkv_proj', 2),
  'gate_proj': ('gate_up_proj', 0),
  'up_proj': ('gate_up_proj', 1),
  'in_proj_qkv': ('in_proj_qkvz', range(3)),  # three of its parts
  'in_proj_z': ('in_proj_qkvz', 3),
  'in_proj_b': ('in_proj_ba', 0),
  'in_proj_a': ('in_proj_ba', 1),
}
# Matrices of an expert -> vLLM's tensor of all experts, and the part of an
# expert's rows there; None: all of them.
_EXPERT = re.compile(r'(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight')
_EXPERTS = {'gate': ('w13_weight', 0), 'up': ('w13_weight', 1)}
_EXPERTS['down'] = ('w2_weight', None)
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

  def searchrl_load(self, path: str, changes: str = '') -> None:
    """Loads a publication of the served model, tensor by tensor, in place.

    The server must be paused, and the caller must drop the caches.

    changes: the folder of a difference, to which the publication is brought
      first. A worker alone that holds its base, unpacked, takes over only what
      changed.

    Raises:
      PublishedError: see `published.open_published` and `delta.bring`; the
        worker is unchanged unless a tensor's own data is damaged.
    """
    before, changed = getattr(self, '_searchrl_published', None), None
    model = self.model_runner.get_model()
    if hasattr(model, 'get_mamba_state_shape_from_config'):
      what = 'a server of a model with delta nets has one worker: one GPU'
      lookup.require(self.parallel_config.world_size == 1, what, RuntimeError)
    if changes:
      alone = self.parallel_config.world_size == 1
      fast = bool(before) and alone and _plain(model, before)
      copy = pathlib.Path(path), pathlib.Path(changes)
      weights, base, changed = delta.bring(*copy, locate=fast)
    else:
      weights = published.open_published(path)
    experts = [(module, _experts_isa(module)) for module in model.modules()]
    packed = [(module, isa) for module, isa in experts if isa]
    for module, _ in packed:
      _check_width(module)
    self._searchrl_published = None
    if changed is not None and before.version == base:
      _change(model, changed)
      self._searchrl_published = weights
      return
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
    for module, isa in packed:
      for x in (module.w13_weight.data, module.w2_weight.data):
        x.copy_(_pack_experts(isa, x))
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
      name: [
        families.dtype_of(name, dtype, families.SERVED),
        list(shapes[name]),
        *(s & 0xFFFFFFFF for s in total),
      ]
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
    module, kind, n = _find(name)
    if isinstance(tensor.layer, tuple):  # a layer and an expert
      layer, expert = tensor.layer
      at = layer * weights.shapes[tensor.path][1] + expert
      tensor = dataclasses.replace(tensor, layer=at)
    groups.setdefault((module, kind), []).append((tensor, n))
  for (name, kind), members in groups.items():
    module = _own(model.get_submodule(name))
    parts = [_part(module, tensor, n) for tensor, n in members]
    yield module, kind, [part for part in parts if part is not None]


def _find(name: str) -> tuple[str, str, Any]:
  """The module with a tensor of a checkpoint, the name of its tensor there, and
  which part of that it is: a number, several, or an expert's number and one."""
  if found := _EXPERT.fullmatch(name):
    kind, n = _EXPERTS[found[3]]
    return f'{found[1]}.routed_experts', kind, (int(found[2]), n)
  *parents, leaf, kind = name.split('.')
  leaf, n = _FUSED.get(leaf, (leaf, 0))
  return '.'.join([*parents, leaf]), kind, n


def _part(module, tensor: hf_tensors.Tensor, n) -> Part | None:
  """The n-th part of a module; None: another worker reports it."""
  rows, first_row, first_column = _local(module, n)
  return rows and _place(tensor, rows, first_row, first_column)


def _place(tensor, rows: slice, first_row: int, first_column: int) -> Part:
  n_rows = tensor.shape[0]
  n_columns = math.prod(tensor.shape[1:])
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


def _local(module, n) -> tuple[slice | None, int, int]:
  """The rows of the n-th part in the module's tensor, and the first row and
  column in the whole tensor. The rows are None if another worker reports them.
  """
  from vllm.model_executor.layers import linear
  from vllm.model_executor.layers import vocab_parallel_embedding as vocab

  if isinstance(module, vocab.VocabParallelEmbedding):
    own = module.shard_indices
    return slice(0, own.num_org_elements), own.org_vocab_start_index, 0
  if isinstance(n, tuple):
    return _local_expert(module, *n)
  rank = getattr(module, 'tp_rank', None)
  whole = isinstance(module, linear.ReplicatedLinear)  # a router
  # A norm is replicated; a delta net, which has vectors of its own, is whole
  # (see `searchrl_load`).
  if rank is None or whole or not hasattr(module, 'output_partition_sizes'):
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
  own = n if isinstance(n, range) else range(n, n + 1)
  begin, size = sum(sizes[: own.start]), sum(sizes[own.start : own.stop])
  return slice(begin, begin + size), rank * size, 0


def _local_expert(module, expert: int, n) -> tuple[slice, int, int]:
  """The same of a matrix of an expert, in the rows of all of the layer."""
  how = module.moe_config.moe_parallel_config
  what = 'workers divide each expert: leave --enable-expert-parallel out'
  lookup.require(how.ep_size == 1, what, RuntimeError)
  first = how.tp_rank * module.intermediate_size_per_partition
  if n is None:  # the columns of the down projection are cut
    rows = module.w2_weight.shape[1]
    return slice(expert * rows, (expert + 1) * rows), 0, first
  rows = module.w13_weight.shape[1] // 2
  begin = (2 * expert + n) * rows
  return slice(begin, begin + rows), first, 0


def _blocks(module, kind: str, dtype) -> Iterator[tuple[int, Any]]:
  """(first column, block [columns, all rows]) of the values in use."""
  import torch
  from vllm.model_executor.layers import vocab_parallel_embedding as vocab

  tensor = getattr(module, kind)
  lookup = type(module) is vocab.VocabParallelEmbedding
  if kind == 'weight' and _packed(module) and not lookup:
    whole = not hasattr(module, 'input_size_per_partition')  # a router
    width = module.input_size if whole else module.input_size_per_partition
    step = max(1, _PROBE // sum(module.output_partition_sizes))
    for first in range(0, width, step):
      units = torch.zeros(min(step, width - first), width, dtype=dtype)
      units[:, first:].fill_diagonal_(1)
      yield first, module.quant_method.apply(module, units, bias=None)
    return
  if hasattr(module, '_cpu_unpacked_conv_weight'):
    from vllm import _custom_ops as ops

    shape = module._cpu_unpacked_conv_weight.shape
    at = _places(shape, tensor.dtype, ops.causal_conv1d_weight_pack)
    tensor = _unpacked(tensor.flatten(), at).reshape(shape)
  elif isa := _experts_isa(module):
    pack = functools.partial(_pack_experts, isa)
    at = _places((1, *tensor.shape[1:]), tensor.dtype, pack)  # of each the same
    tensor = _unpacked(tensor.flatten(1), at).reshape(tensor.shape)
  dtype = torch.float32 if kind == 'A_log' else dtype  # see families.SERVED
  tensor = tensor.detach().to(dtype)
  yield 0, tensor[None] if tensor.ndim == 1 else tensor.flatten(0, -2).T


def _places(shape, dtype, pack):
  """Where the elements of a packed tensor of `shape` were: int64 [elements].

  A copy that vLLM may keep beside it is of no use to tell what is in use. The
  places are read off the packed digits of indices, which bfloat16 holds
  exactly.
  """
  import torch

  index = torch.arange(math.prod(shape)).reshape(shape)
  digits = ((index >> n & 255).to(dtype) for n in (0, 8, 16, 24))
  return sum(pack(x).long() << 8 * i for i, x in enumerate(digits)).flatten()


def _unpacked(tensor, at):
  """Elements of packed rows [..., elements] at their places `at`."""
  import torch

  out = torch.empty_like(tensor)
  out[..., at] = tensor.detach()
  return out


def _experts_isa(module) -> str:
  """The instructions of a CPU for which a layer's experts are packed; ''."""
  kernel = getattr(getattr(module, 'quant_method', None), 'moe_kernel', None)
  experts = getattr(kernel, 'fused_experts', None)
  plain = getattr(experts, '_use_zentorch', False)
  return '' if plain else getattr(experts, 'isa', '')


def _check_width(module) -> None:
  """Raises RuntimeError if vLLM has padded a layer's experts."""
  d_ff = module.intermediate_size_per_partition
  lookup.require(
    module.w13_weight.shape[1] == 2 * d_ff,
    f'vLLM pads experts of {d_ff} columns when it loads them first, and does '
    'not when it reloads: on a CPU, d_ff of each worker is a multiple of 32',
    RuntimeError,
  )


def _pack_experts(isa: str, tensor):
  from vllm import _custom_ops as ops

  return ops.cpu_prepack_moe_weight(tensor, isa)


def _sums(block, part: Part, first: int) -> tuple[int, int]:
  """The two sums of engines/weights/checksum.py, modulo 2^32."""
  start = part.start + first * part.column_step
  return hashes.sums(block, start, part.column_step, part.row_step)


def _plain(model, weights: Published) -> bool:
  """Whether the model computes with the tensors of the checkpoint as they are,
  but for those that vLLM fuses."""
  ties = _tied(model) == weights.config['tied']
  return ties and not any(map(_packed, model.modules()))


def _change(model, changed: Mapping[str, delta.Changed]) -> None:
  """Takes over what changed of a checkpoint into a model that is `_plain`.

  changed: by Hugging Face name.
  """
  import torch

  for name, (at, bits) in changed.items():
    path, kind, n = _find(name)
    module = model.get_submodule(path)
    held = getattr(module, kind).detach().view(torch.int16)
    rows, *_ = _local(module, n)
    part = held.view(-1)[(rows.start or 0) * held[0].numel() :]
    new = torch.from_numpy(bits.view(np.int16)).to(held.device)
    part[torch.from_numpy(at).to(held.device)] = new


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
