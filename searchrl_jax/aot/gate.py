"""The programs of a run, compiled for a topology and checked.

The programs are those that the run itself compiles (`Learner.compile`, the
in-process engine's `Programs`), for devices that `aot/topology.py` describes.
Memory, collectives and kernels are the compiler's; seconds are an estimate from
the chip's data sheet.
"""

from collections.abc import Iterator
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from searchrl_jax import checks
from searchrl_jax.aot import costs, hlo
from searchrl_jax.aot.topology import GIB, Topology, parse, prepare
from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import caches, decode, live, ragged
from searchrl_jax.learn.learner import Learner
from searchrl_jax.models import flops, packed_cudnn, parameters
from searchrl_jax.run import build

BUDGET = 0.9  # of a device's memory
MIB = 2**20
# Tokens of a sequence while it is decoded, of engine.max_len, on average: 1,024
# of 4,608.
CONTEXT = 2 / 9
# The index of Search-R1: e5-base-v2 and Wikipedia of 2018.
ENCODER = (30522, 768, 12, 12, 3072, 512, 2, 1e-12, 0)
PASSAGES = 21_015_324
QUERIES = 512, 16  # in one call, and candidates for each


_FIX = (
  '; raise config.mesh.fsdp or config.mesh.tensor, lower config.batch.tokens, '
  'config.engine.slots or config.engine.max_len, or set '
  "config.model.remat='block'"
)


class Check(NamedTuple):
  """A property that a full-size program must have."""

  program: str
  what: str
  good: bool
  found: str


class Program:
  """A compiled program with what its text says.

  Attributes:
    arguments, temporary: bytes of one device; temporary includes results that
      do not take the place of a donated argument.
    flops: of the matrix products, on one device.
    useful: those that a gradient over rows of one sequence each needs
      (`flops.of_rows`); 0 where that is not known.
    hlo: hlo.Program.
    sizes: of the mesh's axes, by name.
    chunk: tokens of a call of decoding.
    context: tokens of a sequence on average, where only they are read; else 0.
    idle: bytes of the arguments that a token does not need: what of the caches
      is not live, and all but a row for each slot of an untied embedding.
  """

  chunk, context, idle = 1, 0.0, 0.0

  def __init__(
    self,
    name: str,
    traced: Any,
    compiled: Any,
    mesh: Any,
    unknown: int = 1,
    **how: Any,
  ):
    self.name, self.sizes = name, dict(mesh.shape)
    # The loop of decoding is over tokens: one.
    once = name == 'decode'
    self.hlo = hlo.Program(compiled.as_text(), unknown, once, **how)
    memory = compiled.memory_analysis()
    self.arguments = memory.argument_size_in_bytes
    kept = memory.output_size_in_bytes - memory.alias_size_in_bytes
    self.temporary = memory.temp_size_in_bytes + kept
    self.flops, self.useful = hlo.dot_flops(traced.jaxpr) / mesh.size, 0.0
    self.collectives = self.hlo.collectives()

  def axes(self, collective: hlo.Collective) -> set[str]:
    """The axes of the mesh along which its devices differ."""
    group = collective.group or range(self.hlo.devices)
    places = np.unravel_index(group, tuple(self.sizes.values()))
    return {a for a, at in zip(self.sizes, places) if len(set(at)) > 1}

  def seconds(self, topology: Topology) -> dict[str, float]:
    """An estimate for each resource alone; the run takes at least the longest.

    A collective over several nodes uses the network ports of all its devices.
    """
    chip, node, links = topology.chip, topology.node, 0.0
    for c in self.collectives:
      group = c.group or range(self.hlo.devices)
      near = sum(d // node == group[0] // node for d in group)
      rate = chip.link
      if near < len(group):
        rate = min(rate, near * chip.network)
      links += c.sent * c.times / rate
    return {
      'products': self.flops / flops.peak_flops(chip),
      'memory': self.hlo.traffic() / chip.bandwidth,
      'links': links,
    }


def programs(config, cfg, mesh) -> Iterator[Program]:
  """Every program of a run of `config`, compiled for the mesh's devices."""
  for role, updater in Learner(config, cfg, mesh).compile().items():
    for key, compiled in updater.programs.items():
      # 'apply', or ('accumulate', (B, T)).
      name = (key,) if isinstance(key, str) else (key[0], str(key[1][1]))
      title = '/'.join([role, *name]).lstrip('/')
      program = Program(title, updater.traced[key], compiled, mesh)
      if name[0] == 'accumulate' and role != 'critic':
        B, T = key[1]
        program.useful = flops.of_rows(cfg, [T] * B, B * T) / mesh.size
      yield program
  own = sharding.own_mesh(mesh)  # of one process, as engine and search have it
  if config.engine.module == 'jax':
    yield from _sampler(config.engine, cfg, own)
  if config.source.module == 'service' and config.source.corpus != 'world':
    yield _search(own)


def _sampler(engine, cfg, mesh) -> Iterator[Program]:
  cfg = decode.served(cfg, engine)
  parts = sharding.parts(mesh, engine.slots)
  shape = decode.Shape(
    engine.slots, engine.max_len, engine.chunk, engine.prefill_rows, parts
  )
  jitted = decode.programs(cfg, shape, mesh)
  sizes = engine.slots, engine.max_len, mesh, engine.chunk
  cache = caches.abstract(cfg, *sizes)
  pairs = {i: x for i, x in enumerate(cache) if i not in cfg.delta_layers}
  S = caches.length(engine.max_len)
  # Sequences of all lengths up to twice the average: the last position of each.
  last = np.arange(round(2 * CONTEXT * engine.max_len))
  held = decode.abstract(cfg, mesh), cache
  blocks = S // caches.block_size()
  width = shape.widths[-1]
  one = np.zeros(shape.rows(width), np.int32)
  rows = np.zeros((len(one), width), np.int32), one, one, one, one
  for name, program, unknown, new, *arguments in (
    ('decode', jitted.decode, 1, 1, decode.idle_state(engine.slots)),
    (f'prefill/{width}', jitted.fresh, 1, width, *rows),
    # Its attention loops over blocks.
    (f'prefill/{width}/extend', jitted.extend, blocks, width, *rows),
  ):
    ends = np.minimum(last + new, S) - 1
    reads = lambda op, ends=ends: live.share(op, ends, S)
    traced = program.trace(*held, *arguments)
    compiled = traced.lower().compile()
    found = Program(name, traced, compiled, mesh, unknown, reads=reads)
    if any(live.NAME in i.op for i in found.hlo.instructions()):
      found.context = np.mean(last + 1)
    if name == 'decode':
      found.chunk = engine.chunk
      for i, pair in pairs.items():
        seen = np.mean(np.minimum(last + 1, cfg.window_of(i) or S))
        found.idle += (1 - seen / S) * costs.nbytes(pair)
      if not cfg.tied:
        used = min(1.0, engine.slots / cfg.vocab_size)
        found.idle += (1 - used) * costs.nbytes(held[0]['embed'])
    yield found


def _search(mesh) -> Program:
  """The search of a service on the devices, over PASSAGES by an E5 encoder."""
  from retrieval.index import bert, dense_jax  # only needed here

  encoder = bert.BertConfig(*ENCODER)
  traced = dense_jax.trace(mesh, encoder, 'e5', PASSAGES, *QUERIES)
  return Program('search', traced, traced.lower().compile(), mesh)


def verify(program: Program, cfg, topology) -> list[Check]:
  """What must hold of one program."""
  out: list[Check] = []

  def check(what, good, found=''):
    out.append(Check(program.name, what, bool(good), found))

  def moved(kinds, where=lambda c: True):
    chosen = [c for c in program.collectives if c.kind in kinds and where(c)]
    return sum(c.nbytes * c.times for c in chosen)

  name = program.name.split('/')
  gather, scatter = ('all-gather',), ('reduce-scatter', 'all-reduce')
  # On TPUs a product may gather its operand, or scatter its result, in a ring.
  ring = ('collective-permute',)

  def float32(c):
    return any(s.dtype == 'f32' for s in c.shapes)

  def weights(c):  # or caches; not the gradient of the embedding
    large = c.nbytes * c.times >= MIB
    return large and not c.op.endswith('scatter-add')

  def wide(c):
    return weights(c) and float32(c)

  if 'accumulate' in name or 'score' in name:
    length = int(name[-1])
    # Hidden states of that length, or a device's part of them, look alike.
    alike = cfg.d_model in (length, length * program.sizes['fsdp'])
    least = cfg.n_heads if alike else 1
    square = [
      str(shape)
      for _, shape, _ in program.hlo.largest(10**9)
      if shape.dtype == 'f32'
      and shape.dims[-2:] == (length, length)
      and math.prod(shape.dims[:-2]) >= least
    ]
    check('no float32 scores of all pairs', not square, ', '.join(square[:2]))
    if cfg.dtype != 'float32':
      kernels = ' '.join(program.hlo.targets())
      wanted = ['fmhaSoftmax'] if topology.gpu else ['tpu_custom_call']
      if 'accumulate' in name and topology.gpu:
        wanted.append('fmhaSoftmaxBackward')
      used = all(kernel in kernels for kernel in wanted)
      check(f'attention by {" and ".join(wanted)}', used, kernels)
      rows = program.sizes['data'] * program.sizes['fsdp']
      scores = 4 * rows * length  # which every process reads whole
      alone = lambda c: c.nbytes == scores and not c.loop
      size = moved(gather, lambda c: wide(c) and not alone(c))
      check('no float32 gathers of weights', not size, f'{size / MIB:,.0f} MiB')
  if 'accumulate' in name and program.hlo.devices > 1:
    size = moved(gather, weights)
    size += moved(ring, lambda c: weights(c) and not float32(c))
    copies = size * program.sizes['tensor'] / (2 * cfg.n_params)
    check('weights gathered at most 2.2 times', copies <= 2.2, f'{copies:.2f}')
    # Along tensor, activations are reduced.
    layers = [
      c
      for c in program.collectives
      if c.kind in scatter or c.kind in ring and float32(c)
      if c.loop and c.sent >= MIB and program.axes(c) - {'tensor'}
    ]
    if program.sizes['fsdp'] > 1:
      # Along data, shards are then added up.
      kinds = {c.kind for c in layers if 'fsdp' in program.axes(c)}
      check(
        'gradients are reduce-scattered, not all-reduced',
        kinds and 'all-reduce' not in kinds or cfg.lora and not kinds,
        ', '.join(sorted(kinds)) or 'none of a layer is reduced',
      )
    narrow = sorted({s.dtype for c in layers for s in c.shapes} - {'f32'})
    check('gradients are reduced in float32', not narrow, ', '.join(narrow))
  if name[0] in ('decode', 'prefill'):

    def logits(c):  # of the slots, gathered along tensor for the draw
      slots, rest = divmod(math.prod(c.shapes[0].dims), cfg.vocab_size)
      return float32(c) and not rest and slots < cfg.d_model

    size = moved(gather, lambda c: c.nbytes >= MIB and not logits(c))
    check('no gathers of weights or caches', not size, f'{size / MIB:,.0f} MiB')
  if name[0] == 'decode':
    # In branches are greedy slots and truncation, which sweeps the logits. Half
    # of a GPU's cache is left to what else is read.
    token = lambda loop, branch: loop and not branch
    begin = lambda loop, branch: not loop
    near = topology.chip.cache // 2
    share, most, once = (
      program.hlo.traffic(*how) / (program.arguments - program.idle)
      for how in ((token, near), (token, 0), (begin, near))
    )
    what = 'an untruncated token reads at most 1.3 times weights and live cache'
    found = f'{share:.2f} ({most:.2f} if the cache of the chip kept nothing'
    found += f'; a chunk of {program.chunk} reads {once:.2f} more, once)'
    check(what, share <= 1.3, found)
  return out


def describe(program: Program, topology: Topology) -> list[str]:
  """Lines on one program for the report."""
  seconds, useful, contexts = program.seconds(topology), '', ''
  if program.useful:
    useful = f' (useful {program.useful / 1e12:,.2f})'
  if program.context:
    contexts = f' with contexts of {program.context:,.0f} tokens on average'
  slowest = max(seconds, key=seconds.__getitem__)
  lines = [
    f'{program.name}: arguments {program.arguments / GIB:.2f} GiB, temporary '
    f'{program.temporary / GIB:.2f} GiB, products '
    f'{program.flops / 1e12:,.2f} TFLOP{useful}; estimate '
    f'{1e3 * seconds[slowest]:,.1f} ms ({slowest}){contexts}'
  ]
  groups: dict[tuple, list[int]] = {}
  for c in program.collectives:
    dtypes = '+'.join(sorted({s.dtype for s in c.shapes}))
    total = groups.setdefault((c.kind, dtypes, c.loop), [0, 0])
    total[0] += c.times
    total[1] += c.nbytes * c.times
  for (kind, dtypes, loop), (times, nbytes) in groups.items():
    lines.append(
      f'  {kind} {dtypes}: {nbytes / MIB:,.1f} MiB in {times:,} calls'
      f'{", in a loop" if loop else ""}'
    )
  for nbytes, shape, op in program.hlo.largest(3):
    lines.append(f'  buffer {shape}: {nbytes / MIB:,.1f} MiB, {op[-60:]}')
  return lines


def show(config, name: str, vocab_size: int) -> int:
  """Prints what a run of `config` needs on a topology; returns the exit code.

  Memory counts what is resident at the same time, with the temporaries of the
  program that needs most. The code is 2 if that is more than BUDGET.

  Raises:
    ConfigError: no such topology, or one that does not fit config.mesh.
  """
  checks.check(config)
  topology = parse(name)
  prepare()
  jax.config.update('jax_platforms', 'cpu')
  # What was compiled for a device that is not here cannot be loaded.
  jax.config.update('jax_enable_compilation_cache', False)
  if topology.gpu:
    live.compiling_for_hopper()
  else:
    ragged.compiling_for(topology.chip.device_kind)
  platform, devices = 'gpu' if topology.gpu else 'tpu', topology.devices()
  with (
    sharding.compiling_for(platform, topology.own(devices)),
    packed_cudnn.compiling_for_hopper(),
  ):
    mesh = build.mesh(config, devices)
    cfg = parameters.model_config(config, vocab_size)
    found, most = [], 0
    print(f'{topology.name}: compiles for {mesh.size} devices', flush=True)
    for program in programs(config, cfg, mesh):
      print('\n'.join(describe(program, topology)), flush=True)
      found += verify(program, cfg, topology)
      # The result of `zeros` is the accumulator, which `of_run` counts.
      if not program.name.endswith('zeros'):
        most = max(most, program.temporary)
    needs = costs.of_run(config, cfg, mesh, working=most)
    print(f'\n{costs.render(config, cfg, mesh, needs)}\n\nChecks')
  total, memory = needs.device['in all'], topology.chip.memory
  over = total > BUDGET * memory
  said = f'{total / GIB:.1f} of {memory / GIB:.0f} GiB' + (_FIX if over else '')
  what = f'at most {BUDGET:.0%} of the memory is used'
  found.insert(0, Check('memory', what, not over, said))
  width = max(len(c.program) for c in found) + 2
  for c in found:
    verdict = 'holds' if c.good else 'MISSED'
    print(f'  {c.program:<{width}}{verdict:<8}{c.what}: {c.found or "yes"}')
  return 2 * over
