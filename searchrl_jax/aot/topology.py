"""Accelerators that are not there: devices that XLA can compile for.

XLA's compilers for NVIDIA GPUs and for TPUs run on a machine without either.
They need the packages of requirements-aot.txt and no device; `prepare` must run
before JAX is imported. This module does not import JAX.
"""

import dataclasses
import math
import os
import re

from searchrl_jax.lookup import ConfigError, require


@dataclasses.dataclass(frozen=True)
class Chip:
  """One device, by the manufacturer's data sheet; FLOP/s are in `models/flops`.

  device_kind: JAX's name. memory: bytes. bandwidth: of memory, bytes/s. link:
  bytes/s in one direction to devices of the same node (NVLink) or slice (ICI).
  network: bytes/s of one device to other nodes (0: there are none). cache: in
  bytes, of the one before the memory; 0: the compiler says what is near.
  """

  device_kind: str
  memory: int
  bandwidth: float
  link: float
  network: float = 0.0
  cache: int = 0


GIB = 2**30
L2 = 50 * 2**20  # of Hopper
CHIPS = {
  'h100': Chip('NVIDIA H100 80GB HBM3', 80 * GIB, 3.35e12, 450e9, 50e9, L2),
  'h200': Chip('NVIDIA H200 141GB HBM3e', 141 * GIB, 4.8e12, 450e9, 50e9, L2),
  'v5e': Chip('TPU v5 lite', 16 * GIB, 0.819e12, 200e9),
  'v5p': Chip('TPU v5', 95 * GIB, 2.765e12, 600e9),
  'v6e': Chip('TPU v6 lite', 32 * GIB, 1.64e12, 448e9),
}
# What XLA's compiler for NVIDIA GPUs asks about a device of the Hopper family
# (stream_executor.GpuTargetConfigProto).
_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024   threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472
  threads_per_core_limit: 2048    core_count: 132   fpus_per_core: 128
  block_dim_limit_x: 2147483647   block_dim_limit_y: 65535
  block_dim_limit_z: 65535        memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {cache}         clock_rate_ghz: 1.98
  device_memory_size: {memory}    shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  runtime_version: "12.9.0" driver_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  device_address_bits: 64 device_vendor: "NVIDIA Corporation"
  name: "{device_kind}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device_kind}"
"""


@dataclasses.dataclass(frozen=True)
class Topology:
  """`name`, for instance h200:4x8 (nodes x GPUs) or v5p:2x2x4 (a slice)."""

  name: str
  chip: Chip
  sizes: tuple[int, ...]

  @property
  def gpu(self) -> bool:
    return self.chip.device_kind.startswith('NVIDIA')

  @property
  def node(self) -> int:
    """Devices that `chip.link` connects; the others are behind the network."""
    return self.sizes[1] if self.gpu else len(self)

  def own(self, devices: list) -> list:
    """The devices of one process: a node of GPUs, or a host of a slice.

    XLA refuses to compile for a part of some slices, so a host is described as
    a slice of its own.
    """
    if self.gpu or len(self) <= 4:
      return devices[: self.node]
    sizes = (2, 2, 1)[: len(self.sizes)]
    name = f'{self.name.partition(":")[0]}:{"x".join(map(str, sizes))}'
    return Topology(name, self.chip, sizes).devices()

  def __len__(self) -> int:
    return math.prod(self.sizes)

  def devices(self) -> list:
    """Descriptions of the devices, for a mesh to compile for.

    Raises:
      ConfigError: the compiler is not installed, or knows no such slice.
    """
    from jax.experimental import topologies

    chip = self.chip
    if self.gpu:
      arguments = {
        'platform': 'cuda',
        'topology_name': self.name.partition(':')[0],
        'topology': 'x'.join(map(str, (*self.sizes, 1))),
        'target_config': _HOPPER.format(**dataclasses.asdict(chip)),
      }
    else:
      arguments = {'platform': 'tpu', 'topology_name': self.name}
    try:
      found = topologies.get_topology_desc(**arguments).devices
    except Exception as e:
      raise ConfigError(
        f'--topology={self.name}: {e}. The compilers for GPUs and TPUs are in '
        'the environment of `make aot`; TPU slices have the shapes that Google '
        'Cloud offers'
      ) from e
    # As a run of several processes has them.
    return sorted(found, key=lambda d: (d.process_index, d.id))


def parse(name: str) -> Topology:
  """The topology of this name.

  Raises:
    ConfigError: no such chip, or sizes that it cannot have.
  """
  chip, _, sizes = name.partition(':')
  require(
    chip in CHIPS and re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', sizes),
    f'--topology={name!r}: write CHIP:SIZES, such as h200:4x8 (4 nodes of 8 '
    f'GPUs) or v5e:8x8; the chips are {", ".join(CHIPS)}',
  )
  counts = tuple(map(int, sizes.split('x')))
  wanted = 3 if chip == 'v5p' else 2
  require(
    len(counts) == wanted,
    f'--topology={name!r}: {chip} takes {wanted} sizes, not {len(counts)}',
  )
  return Topology(name, CHIPS[chip], counts)


def prepare() -> None:
  """Sets what the compilers read from the environment, before JAX is there."""
  flags = os.environ.get('XLA_FLAGS', '')
  os.environ |= {
    'JAX_PLATFORMS': 'cpu',
    'CUDA_VISIBLE_DEVICES': '',
    'TPU_SKIP_MDS_QUERY': '1',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-16',
    # Autotuning runs kernels, which needs a device.
    'XLA_FLAGS': f'--xla_gpu_autotune_level=0 {flags}',
  }
