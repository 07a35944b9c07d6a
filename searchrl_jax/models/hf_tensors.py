"""Tensors of Hugging Face checkpoints: their names, shapes and places here."""

from collections.abc import Mapping
import dataclasses
import math
import re
from typing import Any

from searchrl_jax.models import families

# What names of tensors begin with -> in a model of text alone. The first of:
# text and images by transformers 4 and 5, and the same without a head; text
# without a head (AutoModel).
_PREFIXES = {
  'language_model.model.': 'model.',
  'language_model.lm_head.': 'lm_head.',
  'model.language_model.': 'model.',
  'language_model.': 'model.',
  **{f'{x}.': f'model.{x}.' for x in ('embed_tokens', 'layers', 'norm')},
}
# Images, and layers that predict several tokens.
_NOT_TEXT = re.compile(
  r'(model\.)?(vision_tower|multi_modal_projector|visual|mtp)\.'
)
# What torch.compile, data-parallel training and checkpointed activations put
# between the parts of a name.
_WRAPPERS = re.compile(
  r'(?<![^.])(_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)'
  r'\.'
)


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of a checkpoint and where it lives in the parameters.

  Projections are [out, in] in the checkpoint and [in..., out...] in our
  parameters, with the heads split; `n_in` is the number of our leading axes
  that form `in`, and 0 means that nothing is transposed.
  """

  name: str  # 'model.layers.3.self_attn.q_proj.weight'
  shape: tuple[int, ...]  # of the checkpoint's tensor
  path: str  # 'layers/q'
  # Index on the leading axis of our array, or of a layer and an expert on its
  # two; None: not stacked.
  layer: int | tuple[int, int] | None
  ours: tuple[int, ...]  # our shape, without L, and without E of experts
  n_in: int = 0

  def to_ours(self, x):
    """A view of the checkpoint's tensor in our layout (numpy)."""
    return (x.T if self.n_in else x).reshape(self.ours)

  def to_hf(self, x):
    """The inverse, of our array or a block of it along our axis `n_in`."""
    if not self.n_in:
      return x.reshape(-1, *self.shape[1:])
    return x.reshape(self.shape[-1], -1).T


_INPUTS = 'qkv', 'z', 'b', 'a'  # projections of a delta net
_MLP = 'gate', 'up', 'down'
# Our name -> (theirs, number of our leading axes that are their `in`).
_NAMES = {
  'embed': ('model.embed_tokens.weight', 0),
  'attn_norm': ('input_layernorm.weight', 0),
  **{x: (f'self_attn.{x}_proj.weight', 1) for x in 'qkv'},
  **{f'{x}_bias': (f'self_attn.{x}_proj.bias', 0) for x in 'qkv'},
  **{f'{x}_norm': (f'self_attn.{x}_norm.weight', 0) for x in 'qk'},
  'o': ('self_attn.o_proj.weight', 2),
  **{f'delta_{x}': (f'linear_attn.in_proj_{x}.weight', 1) for x in _INPUTS},
  'delta_conv': ('linear_attn.conv1d.weight', 0),
  'delta_a_log': ('linear_attn.A_log', 0),
  'delta_dt_bias': ('linear_attn.dt_bias', 0),
  'delta_norm': ('linear_attn.norm.weight', 0),
  'delta_o': ('linear_attn.out_proj.weight', 2),
  'mlp_norm': ('post_attention_layernorm.weight', 0),
  **{x: (f'mlp.{x}_proj.weight', 1) for x in _MLP},
  'router': ('mlp.gate.weight', 1),
  **{f'experts_{x}': (f'mlp.experts.{{}}.{x}_proj.weight', 1) for x in _MLP},
  'final_norm': ('model.norm.weight', 0),
  'head': ('lm_head.weight', 1),
}
# Those of adapters are PEFT's: '...q_proj.lora_A.weight'.
_NAMES |= {
  f'{x}_lora_{kind}': (
    name.replace('.weight', f'.lora_{kind.upper()}.weight'),
    n,
  )
  for x, (name, n_in) in [*_NAMES.items()]
  if n_in and x != 'head'
  for kind, n in (('a', n_in), ('b', 1))
}
TIED_HEAD = 'lm_head.weight'  # may be present, equal to the embedding


def text_name(name: str) -> str:
  """A tensor's name in a model of text alone; '': it has none."""
  name = _WRAPPERS.sub('', name)
  for prefix, own in _PREFIXES.items():
    if name.startswith(prefix):
      return own + name.removeprefix(prefix)
  return '' if _NOT_TEXT.match(name) else name


def table(
  shapes: Mapping[str, tuple[int, ...]], fields: Mapping[str, Any]
) -> dict[str, Tensor]:
  """Every tensor of a checkpoint by its name, in the order of the layers.

  Args:
    shapes: our path -> shape, stacked, as `decoder.param_table` gives them:
      of the whole model, or of its layers alone.
    fields: `families.FIELDS` of the model.
  """
  layers = {
    path: families.layers_with(fields, path.removeprefix('layers/'))
    for path in shapes
    if path.startswith('layers/')
  }
  places: list[tuple[str, int | None]] = [('embed', None)] * ('embed' in shapes)
  places += [
    (path, i)
    for i in range(fields['n_layers'])
    for path, own in layers.items()
    if i in own
  ]
  places += [(p, None) for p in ('final_norm', 'head') if p in shapes]
  names, out = {**_NAMES, **families.FAMILIES[fields['family']].names}, {}
  for path, layer in places:
    name, n_in = names[path.split('/')[-1]]
    shape = tuple(shapes[path])
    at: list[int | tuple[int, int] | None] = [None]
    if layer is not None:
      name, shape = f'model.layers.{layer}.{name}', shape[1:]
      at = [layers[path].index(layer)]
    if '{}' in name:  # of each expert
      at, shape = [(*at, j) for j in range(shape[0])], shape[1:]
    hf = shape
    if n_in:
      hf = (math.prod(shape[n_in:]), math.prod(shape[:n_in]))
    elif path.endswith('_bias'):
      hf = (math.prod(shape),)
    for j, place in enumerate(at):
      own = name.format(j)
      out[own] = Tensor(own, hf, path, place, shape, n_in)
  return out
