"""The mesh and the logical axis rules.

Arrays name their axes by meaning ('embed', 'heads', 'batch', ...); the rules
map meaning to the mesh axes (data, fsdp, tensor). A dimension that its mesh
axes do not divide is replicated (KV heads on a wide tensor axis are the usual
case). The constraint helpers do nothing without a mesh.
"""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

AXES = ('data', 'fsdp', 'tensor')

RULES = {
  'batch': ('data', 'fsdp'),
  'time': None,
  'layers': None,
  'vocab': 'tensor',
  'embed': 'fsdp',  # of a parameter; activations use 'features'
  'features': None,
  'heads': 'tensor',
  'kv_heads': 'tensor',
  'head_dim': None,
  'mlp': 'tensor',
  'norm': None,
}


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None):
  """A (data, fsdp, tensor) mesh; one size may be -1, 'what is left'.

  Sizes without a -1 may ask for fewer devices than there are: the first ones.

  Raises:
    ValueError: the sizes ask for more devices than there are, or do not
      divide them.
  """
  devices = jax.devices() if devices is None else list(devices)
  sizes = [data, fsdp, tensor]
  if any(s == 0 or s < -1 for s in sizes) or sizes.count(-1) > 1:
    raise ValueError(
      f'mesh sizes {dict(zip(AXES, sizes))}: positive, at most one -1'
    )
  if -1 in sizes:
    rest = math.prod(s for s in sizes if s != -1)
    if len(devices) % rest:
      raise ValueError(
        f'config.mesh: {len(devices)} devices are not divisible by {rest}'
      )
    sizes[sizes.index(-1)] = len(devices) // rest
  count = math.prod(sizes)
  if count > len(devices):
    raise ValueError(
      f'config.mesh {dict(zip(AXES, sizes))} needs {count} devices; there '
      f'are {len(devices)}'
    )
  grid = np.asarray(devices[:count]).reshape(sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def spec(mesh: Mesh, axes, shape) -> PartitionSpec:
  """PartitionSpec of an array whose dimensions are named `axes`."""
  if len(axes) != len(shape):
    raise ValueError(f'axes {axes} do not name the dimensions {shape}')
  out = []
  for axis, size in zip(axes, shape):
    rule = None if axis is None else RULES[axis]
    names = (rule,) if isinstance(rule, str) else (rule or ())
    names = tuple(n for n in names if mesh.shape[n] > 1)
    ways = math.prod(mesh.shape[n] for n in names)
    if not names or size % ways:
      out.append(None)
    else:
      out.append(names[0] if len(names) == 1 else names)
  return PartitionSpec(*out)


def named(mesh: Mesh, axes, shape) -> NamedSharding:
  return NamedSharding(mesh, spec(mesh, axes, shape))


def constrain(x, mesh: Mesh | None, *axes):
  """Pins the layout of an activation inside jit."""
  if mesh is None or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, named(mesh, axes, x.shape))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())
