"""The mesh and the logical axis rules.

Arrays name their axes by meaning ('embed', 'heads', 'batch', ...); the rules
map meaning to the mesh axes (data, fsdp, tensor). A dimension that its mesh
axes do not divide is replicated (KV heads on a wide tensor axis are the usual
case). The constraint helpers do nothing without a mesh.
"""

import collections
from collections.abc import Sequence
import contextlib
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.devices import cluster

AXES = ('data', 'fsdp', 'tensor')

RULES = {
  'batch': ('data', 'fsdp'),
  'time': (),
  'layers': (),
  'vocab': ('tensor',),
  'embed': ('fsdp',),  # of a parameter; activations use 'features'
  'features': (),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'head_dim': (),
  'mlp': ('tensor',),
  'experts': ('tensor', 'fsdp'),  # along fsdp gathered for a product
  'served_experts': ('tensor',),  # of an engine, which gathers no weights
  'channels': ('tensor',),  # of a convolution
  'norm': (),
  'rank': (),  # of an adapter
  None: (),
}


_target: list[tuple[str, int]] = []


@contextlib.contextmanager
def compiling_for(platform: str, own: Sequence = ()):
  """Compiles for devices that are only described (`topology`).

  Args:
    platform: what `platform()` returns.
    own: the devices of a process; (): all.
  """
  _target.append((platform, own))
  try:
    yield
  finally:
    _target.pop()


def platform() -> str:
  """What programs are compiled for: 'cpu', 'gpu' or 'tpu'."""
  return _target[-1][0] if _target else jax.default_backend()


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None):
  """A (data, fsdp, tensor) mesh; one size may be -1, 'what is left'.

  Sizes without a -1 may ask for fewer devices than there are: the first ones.

  Raises:
    ValueError: the sizes ask for more devices than there are, do not divide
      them, or take more of one process than of another.
  """
  devices = devices or _in_order()
  sizes, count = [data, fsdp, tensor], len(devices)
  known = math.prod(s for s in sizes if s != -1)
  lookup.require(
    all(s > 0 or s == -1 for s in sizes)
    and sizes.count(-1) <= 1
    and (count % known == 0 if -1 in sizes else known <= count),
    f'config.mesh {dict(zip(AXES, sizes))} with {count} devices: sizes are '
    'positive, or one is -1, and they divide the devices or need no more',
  )
  sizes = [count // known if s == -1 else s for s in sizes]
  used = devices[: math.prod(sizes)]
  taken = collections.Counter(d.process_index for d in used)
  by_process = [taken[i] for i in sorted({d.process_index for d in devices})]
  lookup.require(
    cluster.size() == 1 or len({*by_process}) == 1,
    f'config.mesh {dict(zip(AXES, sizes))} takes {by_process} devices of the '
    f'{len(by_process)} processes, in their order, and has to take equally '
    'many: set one size to -1, start fewer processes, or give each as many '
    'devices (CUDA_VISIBLE_DEVICES)',
  )
  grid = np.asarray(used).reshape(sizes)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def _in_order() -> list:
  """All devices, those of a process together.

  The last axes of a mesh, which communicate most, then lie within a process as
  far as it has devices.
  """
  devices = jax.devices()
  if cluster.size() == 1:
    return devices
  return sorted(devices, key=lambda d: (d.process_index, d.id))


def own_mesh(mesh: Mesh) -> Mesh:
  """The mesh of this process's devices, for what each process does alone.

  `mesh` itself, if it is of one process. The devices lie along data, and along
  tensor as far as `mesh` has that axis within a process.
  """
  if mesh is not None and _target:
    devices = list(_target[-1][1]) or list(mesh.devices.flat)
    if len(devices) >= mesh.size:
      return mesh
  elif mesh is None or not mesh.is_multi_process:
    return mesh
  else:
    here = jax.process_index()
    devices = [d for d in mesh.devices.flat if d.process_index == here]
  tensor = math.gcd(mesh.shape['tensor'], len(devices))
  return make_mesh(-1, 1, tensor, devices)


@functools.lru_cache(maxsize=None)  # compiles once, not at every sync
def _cast(dtypes: tuple[str, ...], layouts: tuple[NamedSharding, ...]):
  def cast(leaves):
    return [x.astype(dtype) for x, dtype in zip(leaves, dtypes, strict=True)]

  return jax.jit(cast, out_shardings=list(layouts))


def own_copy(tree, mesh: Mesh, layout, dtypes=None):
  """Arrays on a mesh of several processes, whole on each of them.

  All processes have to call it, as it communicates.

  Args:
    tree: of arrays on `mesh`.
    mesh: of all processes, each with as many devices.
    layout: the shardings on `own_mesh(mesh)`.
    dtypes: a tree of names, of the copy; None: those of the arrays.
  """
  own = own_mesh(mesh)
  every = Mesh(
    mesh.devices.reshape(-1, *own.devices.shape),
    ('process', *AXES),
    axis_types=(AxisType.Auto,) * 4,
  )
  layouts = [NamedSharding(every, s.spec) for s in jax.tree.leaves(layout)]
  leaves, structure = jax.tree.flatten(tree)
  dtypes = dtypes or jax.tree.map(lambda x: x.dtype.name, tree)
  cast = _cast((*jax.tree.leaves(dtypes),), tuple(layouts))
  whole = structure.unflatten(cast(leaves))

  def here(x, sharding):
    shards = [s.data for s in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)

  return jax.tree.map(here, whole, layout)


def spec(mesh: Mesh, axes, shape) -> PartitionSpec:
  """PartitionSpec of an array whose dimensions are named `axes`."""
  out: list = []
  for axis, size in zip(axes, shape, strict=True):
    names = tuple(
      n for n in RULES[axis] if mesh.shape[n] > 1 and n not in mesh.manual_axes
    )
    if not names or size % math.prod(mesh.shape[n] for n in names):
      names = ()
    out.append(names if len(names) > 1 else names[0] if names else None)
  return PartitionSpec(*out)


def named(mesh: Mesh, axes, shape) -> NamedSharding:
  return NamedSharding(mesh, spec(mesh, axes, shape))


def undivided(mesh: Mesh | None):
  """The mesh here, and its axes that no `shard_map` around this divides.

  No axes without a mesh of several devices.
  """
  here = jax.sharding.get_abstract_mesh()  # not empty within `by_rows`
  mesh = mesh if here.empty else here
  if mesh is None or mesh.size == 1:
    return mesh, set()
  return mesh, {a for a in AXES if a not in mesh.manual_axes}


def triton() -> bool:
  """Whether Pallas compiles by Triton for all that is compiled for.

  It needs GPUs of NVIDIA's Ampere family or newer. Others that only compile
  have no number, and are taken for that.
  """

  def good(device) -> bool:
    version = getattr(device, 'compute_capability', '8.0').partition('.')[0]
    return version.isdecimal() and int(version) >= 8

  return platform() == 'gpu' and all(map(good, jax.local_devices()))


def constrain(x, mesh: Mesh | None, *axes):
  """Pins the layout of an activation inside jit."""
  if mesh is None or mesh.size == 1:
    return x
  mesh, left = undivided(mesh)
  if not left:
    return x
  return jax.lax.with_sharding_constraint(x, named(mesh, axes, x.shape))


def parts(mesh: Mesh | None, rows: int) -> int:
  """How many parts `rows` of a batch are cut into; 1: each device has all."""
  n = math.prod(mesh.shape[a] for a in RULES['batch']) if mesh else 1
  return n if rows % n == 0 else 1


def by_rows(f, mesh: Mesh | None, rows: int, ins, outs):
  """`f` over each part of a batch of `rows` by itself: no collectives.

  ins, outs: of arguments and results, the dimension that holds the rows (-1:
  the same for all parts). `f` sees its own rows; an axis `tensor` of several
  devices is left to the compiler, or to a `shard_map` within. Where the batch
  is in one part, `f` itself.
  """
  if parts(mesh, rows) == 1:
    return f
  batch = spec(mesh, ('batch',), (rows,))
  ins, outs = jax.tree.map(
    lambda d: PartitionSpec(*[None] * d, *(batch if d >= 0 else ())),
    (ins, outs),
  )
  return jax.shard_map(
    f,
    mesh=mesh,
    in_specs=ins,
    out_specs=outs,
    axis_names={a for a in AXES if a in RULES['batch'] or mesh.shape[a] == 1},
    check_vma=False,
  )


def own_rows(rows, n: int):
  """Numbers of rows of the whole batch as those of this part's n; n: not here.

  Without `by_rows`: as they are.
  """
  if jax.sharding.get_abstract_mesh().empty:
    return rows
  at = rows - jax.lax.axis_index(RULES['batch']) * n
  return jnp.where((at >= 0) & (at < n), at, n)


def total(x):
  """The sum over all parts of `by_rows`; without it, x."""
  here = jax.sharding.get_abstract_mesh()
  return x if here.empty else jax.lax.psum(x, RULES['batch'])


def put(x, layout: NamedSharding | None, **how) -> jax.Array:
  """An array that every process has, on the device(s); each puts its part.

  how: keywords of `jax.device_put`.
  """
  if layout is None or layout.is_fully_addressable:
    return jax.device_put(x, layout, **how)
  # device_put would compare the values of all processes.
  return jax.make_array_from_callback(x.shape, layout, lambda at: x[at])


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())
