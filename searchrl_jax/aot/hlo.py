"""What a compiled program does, read from the text that XLA prints of it.

XLA's cost analysis is absent for GPUs and counts the body of a loop once. Here
every instruction counts as often as the loops around it run.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

import numpy as np

_BITS = {'pred': 8, 'u4': 4, 's4': 4, 'c64': 64, 'c128': 128, 'token': 0}
_COLLECTIVES = (
  'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all',
  'collective-permute', 'collective-broadcast', 'ragged-all-to-all',
)  # fmt: skip
# Instructions, and custom calls of XLA's compiler for TPUs, that move no data.
_FREE = {
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while',
  'conditional', 'call', 'after-all', 'partition-id', 'replica-id',
  'opt-barrier', 'async-start', 'async-update', 'async-done', 'AllocateBuffer',
  'ConcatBitcast', 'AsyncCollectiveDone', 'AssumeGatherIndicesInBound',
}  # fmt: skip
_SLICES = ('dynamic-slice', 'gather', 'slice')  # read what they return
# Write the operand of this number into their first one, where it is.
_IN_PLACE = {'dynamic-update-slice': 1, 'scatter': 2}


class Shape(NamedTuple):
  dtype: str
  dims: tuple[int, ...]
  near: bool = False  # in the on-chip memory of a TPU, not in its HBM

  @property
  def nbytes(self) -> int:
    bits = _BITS.get(self.dtype)
    if bits is None:
      bits = int(re.search(r'\d+', self.dtype)[0])
    return math.prod(self.dims) * bits // 8

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.dims))}]'


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction. op: the JAX operation that it comes from."""

  name: str
  opcode: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  called: tuple[str, ...]
  trips: int | None  # of a loop; None: XLA does not say
  target: str  # of a custom call
  op: str
  group: tuple[int, ...]  # of a collective
  channel: str = ''  # of a collective
  # Of an integer constant; the number of a parameter, or of a tuple's element.
  value: int | None = None

  @property
  def results(self) -> tuple[Shape, ...]:
    """Its shapes, without the operands that an asynchronous start returns."""
    count = len(self.operands)
    if self.opcode == 'copy-start':  # (result, operand, context)
      return self.shapes[:1]
    if self.opcode.endswith('-start') and self.opcode != 'all-reduce-start':
      # (operands, results, ...): as many results as operands.
      return self.shapes[count : 2 * count]
    return self.shapes

  @property
  def nbytes(self) -> int:
    return sum(shape.nbytes for shape in self.results)

  @property
  def stored(self) -> int:
    """Bytes of its results in the device's memory."""
    return sum(shape.nbytes for shape in self.results if not shape.near)


class Collective(NamedTuple):
  """A collective operation of one device.

  nbytes: of its result. times: how often it runs; loop: whether in a loop.
  sent: bytes that the device sends, in a ring. group: the devices of the first
  group (empty: all).
  """

  kind: str
  shapes: tuple[Shape, ...]
  nbytes: int
  times: int
  loop: bool
  op: str
  sent: int = 0
  group: tuple[int, ...] = ()


_INSTRUCTION = re.compile(r'\s+(?:ROOT )?(%?[\w.-]+) = (.*)')
_SHAPE = re.compile(r'\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
_CALLED = re.compile(
  r'\b(?:calls|body|condition|to_apply|branch_computations|'
  r'true_computation|false_computation)=(?:\{([^}]*)\}|(%?[\w.-]+))'
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Program:
  """A compiled program.

  Args:
    text: `jax.stages.Compiled.as_text()`.
    unknown: how often a loop of unknown length runs.
    once: whether loops that are in no other one count as one step of theirs.
    reads: the share of its operands that a kernel of a JAX operation reads.
  """

  def __init__(
    self,
    text: str,
    unknown: int = 1,
    once: bool = False,
    reads: Callable[[str], float] = lambda op: 1.0,
  ):
    self._unknown, self._once, self._reads = unknown, once, reads
    self.computations: dict[str, dict[str, Instruction]] = {}
    self.entry, current = '', None
    header = re.search(r'\bnum_partitions=(\d+)', text)
    self.devices = int(header[1]) if header else 1
    for line in text.splitlines():
      if line[:1] not in ' }' and line.endswith('{') and '->' in line:
        name = line.removeprefix('ENTRY ').split(' ')[0].lstrip('%')
        current = self.computations[name] = {}
        if line.startswith('ENTRY'):
          self.entry = name
      elif current is not None and (match := _INSTRUCTION.match(line)):
        found = _instruction(match[1], match[2])
        current[found.name] = found

  @functools.cached_property
  def times(self) -> dict[str, tuple[int, bool, bool]]:
    """Computation -> how often it runs, whether in a loop, and whether in a
    branch of a condition, all of which count.

    Without those that a fusion or a reduction applies.
    """
    out: dict[str, tuple[int, bool, bool]] = {}
    waiting = [(self.entry, 1, False, False)]
    while waiting:
      name, times, loop, branch = waiting.pop()
      before, looped, _ = out.get(name, (0, False, False))
      out[name] = before + times, loop or looped, branch
      for i in self.computations[name].values():
        if i.opcode == 'while':
          trips = 1 if self._once and not loop else self._trips(i)
          waiting += [(c, times * trips, True, branch) for c in i.called]
        elif i.opcode in ('call', 'conditional', 'async-start'):
          inside = branch or i.opcode == 'conditional'
          waiting += [(c, times, loop, inside) for c in i.called]
    return out

  def _trips(self, loop: Instruction) -> int:
    """How often a loop runs. XLA's compiler for TPUs does not print it: there,
    the bound that the condition compares a counter from 0 with, by what the
    body adds to it (2 in a ring whose steps XLA has unrolled)."""
    if loop.trips is not None:
      return loop.trips
    condition, body = (self.computations[c] for c in loop.called)
    *_, root = condition.values()
    *_, result = body.values()
    bounds = _values(condition, root.operands, 'constant')
    if root.opcode != 'compare' or not bounds:
      return self._unknown
    counters = _values(condition, root.operands, 'get-tuple-element')
    steps: list[int] = []
    if counters and result.opcode == 'tuple':
      after = body.get(result.operands[counters[0]])
      if after and after.opcode == 'add':
        steps = _values(body, after.operands, 'constant')
    # 0: it counts down.
    return -(-bounds[0] // (steps[0] if steps else 1)) or self._unknown

  def instructions(self) -> Iterator[Instruction]:
    """Every instruction that runs."""
    for name in self.times:
      yield from self.computations[name].values()

  def collectives(self) -> list[Collective]:
    """Largest first."""
    out: list[Collective] = []
    seen: set[str] = set()
    # A body comes before the loops in it, where parts of a collective may be.
    for name, (times, loop, _) in self.times.items():
      for i, members in self._communicating(name, seen):
        kind = i.opcode.removesuffix('-start')
        given = [members[o] for o in i.operands if o in members]
        sent = max(i.nbytes, sum(g.nbytes for g in given))
        if kind != 'collective-permute':
          sent -= sent // max(len(i.group) or self.devices, 1)
        if kind == 'all-reduce':  # scatters, then gathers
          sent *= 2
          # XLA gathers small tensors on TPUs as a sum of parts, zero elsewhere.
          if given and all(self._root(g).opcode in _IN_PLACE for g in given):
            kind = 'all-gather'
        about = kind, i.results, i.nbytes, times, loop, i.op, sent, i.group
        out.append(Collective(*about))
    return sorted(out, key=lambda c: -c.nbytes * c.times)

  def _communicating(
    self, name: str, seen: set[str]
  ) -> Iterator[tuple[Instruction, dict]]:
    """The collectives of a computation, each with its neighbours.

    On TPUs, the steps of one that runs beside other work are in several
    fusions, with the same channel, which is `seen` after the first. Outside
    fusions, all that JAX's `shard_map` asks for have the same channel.
    """
    for i in self.computations[name].values():
      place = self.computations[name]
      inside = [i]
      if i.opcode == 'fusion':
        place = self.computations[i.called[0]]
        inside = list(place.values())
      for c in inside:
        if c.opcode.removesuffix('-start') in _COLLECTIVES:
          if c is i or not c.channel or c.channel not in seen:
            yield c, place
          seen.add(c.channel)

  def _root(self, i: Instruction) -> Instruction:
    """The last instruction of a fusion; another instruction itself."""
    if i.opcode != 'fusion':
      return i
    return list(self.computations[i.called[0]].values())[-1]

  def largest(self, count: int) -> list[tuple[int, Shape, str]]:
    """The largest results of kernels: (bytes, shape, operation)."""
    found: dict[tuple[Shape, str], int] = {}
    for i in self.instructions():
      for shape in () if i.opcode in _FREE else i.results:
        if not shape.near:
          found[shape, i.op or i.name] = shape.nbytes
    ranked = sorted(found.items(), key=lambda item: -item[1])[:count]
    return [(size, *key) for key, size in ranked]

  def targets(self) -> list[str]:
    """Names of the library kernels."""
    names = dict.fromkeys(i.target for i in self.instructions())
    return [*filter(None, names)]

  def traffic(self, where=lambda loop, branch: True, near: int = 0) -> int:
    """Bytes that kernels read and write in memory. Of an operand of which a
    kernel reads slices alone, the slices.

    where: (whether in a loop, whether in a branch) -> whether it counts.
    near: of a cache. A kernel reads another's result from it if the result and
      all that was moved since are no more than that; a result is written to
      memory in any case.
    """
    total = 0
    for name, (times, *place) in self.times.items():
      if where(*place):
        total += times * self._through(self.computations[name], near)
    return total

  def _through(self, members: dict[str, Instruction], near: int) -> int:
    """`traffic` of a computation; a scheduled one lists kernels in order."""
    moved = 0
    made: dict[str, int] = {}  # the result of a kernel -> `moved` after it
    for i in members.values():
      if i.opcode in ('bitcast', 'get-tuple-element'):
        if i.operands[0] in made:
          made[i.name] = made[i.operands[0]]
      elif i.opcode not in _FREE and i.target not in _FREE:
        held = {
          operand
          for operand in i.operands
          if operand in made
          and members[operand].nbytes + moved - made[operand] <= near
        }
        if not i.opcode.endswith('-done'):
          moved += self._moved(i, members, held)
        made[i.name] = moved
    return moved

  def _moved(
    self, i: Instruction, members: dict[str, Instruction], held: set[str]
  ) -> int:
    """Bytes of one kernel. held: the operands that it reads from a cache."""
    inner: dict[str, Instruction] = {}
    if i.opcode == 'fusion':
      inner = self.computations[i.called[0]]
    # In the text they stand in any order.
    parameters = {p.value: p for p in inner.values() if p.opcode == 'parameter'}
    total = 0
    for at, operand in enumerate(i.operands):
      size = members[operand].stored if operand in members else 0
      if at in parameters:
        size = min(size, _sliced(parameters[at], inner, size))
      elif i.opcode.removesuffix('-start') in _SLICES and not at:
        size = min(size, i.nbytes)
      elif i.opcode in _IN_PLACE and not at:
        size = 0
      if i.target:
        size = round(size * self._reads(i.op))
      total += size * (operand not in held)
    root = self._root(i)
    if root.opcode in _IN_PLACE:
      update = root.operands[_IN_PLACE[root.opcode]]
      return total + (inner or members)[update].nbytes * (i.stored > 0)
    return total + i.stored


def _sliced(parameter: Instruction, inner: dict, whole: int) -> int:
  """Bytes of a fusion's parameter that are read: `whole`, or its slices."""
  users = [i for i in inner.values() if parameter.name in i.operands]
  total = 0
  for user in users:
    if user.opcode == 'bitcast':
      total += _sliced(user, inner, whole)
    elif user.opcode in _SLICES:
      total += user.nbytes
    elif user.opcode not in _IN_PLACE or user.operands[0] != parameter.name:
      return whole
  return total


def _closing(text: str, depth: int, end: str) -> int:
  """Where `end` closes, or follows, the brackets open in `text`."""
  for at, char in enumerate(text):
    depth += (char in '([{') - (char in ')]}')
    if char == end and not depth:
      return at
  return len(text)


def _instruction(name: str, rest: str) -> Instruction:
  """Parses what follows 'NAME = '."""
  at = _closing(rest, 0, ' ')  # a shape may be a tuple
  head, rest = rest[:at], rest[at + 1 :]
  opcode, _, rest = rest.partition('(')
  at = _closing(rest, 1, ')')
  inside, attributes = rest[:at], rest[at + 1 :]
  called: list[str] = []
  for match in _CALLED.finditer(attributes):
    called += re.findall(r'[\w.-]+', match[1] or match[2])
  trips = _TRIPS.search(attributes)
  target = re.search(r'custom_call_target="([^"]*)"', attributes)
  op = re.search(r'op_name="([^"]*)"', attributes)
  channel = re.search(r'channel_id=(\d+)', attributes)
  return Instruction(
    name.lstrip('%'),
    opcode,
    tuple(
      Shape(dtype, tuple(int(n) for n in dims.split(',') if n), 'S(' in layout)
      for dtype, dims, layout in _SHAPE.findall(head)
    ),
    tuple(o.lstrip('%') for o in re.findall(r'%[\w.-]+', inside)),
    tuple(called),
    int(trips[1]) if trips else None,
    target[1] if target else '',
    op[1] if op else '',
    _group(attributes),
    channel[1] if channel else '',
    _value(opcode, inside, attributes),
  )


def _values(
  place: dict[str, Instruction], names: Sequence[str], opcode: str
) -> list[int]:
  """Of those of the named instructions that have the opcode and a value."""
  found = (place[name] for name in names if name in place)
  return [i.value for i in found if i.opcode == opcode and i.value is not None]


def _value(opcode: str, inside: str, attributes: str) -> int | None:
  if opcode == 'get-tuple-element':
    inside = re.search(r'\bindex=(\d+)', attributes)[1]
  elif opcode not in ('constant', 'parameter'):
    return None
  return int(inside) if inside.isdecimal() else None


def _grid(sizes: str, order: str | None = None) -> np.ndarray:
  """The devices, of an array of these sizes with its axes in this order."""
  shape = [int(n) for n in sizes.split(',')]
  grid = np.arange(math.prod(shape)).reshape(shape)
  return grid.transpose([int(n) for n in order.split(',')] if order else None)


def _group(attributes: str) -> tuple[int, ...]:
  """The first group of devices of replica_groups.

  XLA prints it as a list {{0,1},{2,3}}, as [2,2]<=[2,2]T(1,0), or as axes
  mesh['a'=2,'b'=2] {'a'}, with device_ids=([2,2]T(1,0)) if in another order.
  """
  _, _, text = attributes.partition('replica_groups=')
  if match := re.match(r'\{\{([\d,]+)\}', text):
    return tuple(map(int, match[1].split(',')))
  listed = r'\[(\d+),\d+\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?'
  if match := re.match(listed, text):
    grid = _grid(match[2], match[3])
    return tuple(grid.reshape(int(match[1]), -1)[0].tolist())
  order = r'(?:, device_ids=\((\[[^)]*(?:\([\d,]+\))?)\))?'
  if match := re.match(rf'mesh\[([^]]+)\]{order} *\{{([^}}]*)\}}', text):
    axes = re.findall(r"('\w+')=(\d+)", match[1])
    sizes = [int(size) for _, size in axes]
    grid = _grid(*re.findall(r'[\d,]+', match[2] or str(math.prod(sizes))))
    inside = [slice(None) if axis in match[3] else 0 for axis, _ in axes]
    return tuple(grid.reshape(sizes)[tuple(inside)].ravel().tolist())
  return ()


def dot_flops(jaxpr: Any, times: int = 1) -> int:
  """FLOPs of the matrix products of a traced program on all devices.

  Loops count by their length (a `while` once), branches by the largest,
  attention kernels by their products (4 B N T S H forward, 10 backward), and
  kernels of Pallas by what they declare, where they do.
  """
  total = 0
  for eqn in jaxpr.eqns:
    name, repeats = eqn.primitive.name, 1
    if name == 'dot_general':
      (contracted, _), _ = eqn.params['dimension_numbers']
      left = eqn.invars[0].aval.shape
      products = 2 * times * math.prod(left[d] for d in contracted)
      total += products * math.prod(eqn.outvars[0].aval.shape)
      continue
    if name.startswith('dot_product_attention'):
      B, T, N, H = eqn.invars[0].aval.shape
      S = eqn.invars[1].aval.shape[1]
      products = 10 if 'bwd' in name else 4
      total += products * times * B * N * T * S * H
      continue
    if name == 'scan':
      repeats = eqn.params['length']
    if name == 'pallas_call':
      if declared := eqn.params['cost_estimate']:
        total += times * declared.flops
        continue
      repeats = math.prod(eqn.params['grid_mapping'].grid)
    if name == 'shard_map':  # its shapes are those of one device
      mesh, manual = eqn.params['mesh'], eqn.params['newly_manual_axes']
      repeats = math.prod(mesh.shape[axis] for axis in manual)
    inner = [
      getattr(p, 'jaxpr', p)
      for value in eqn.params.values()
      for p in (value if isinstance(value, (tuple, list)) else (value,))
      if hasattr(getattr(p, 'jaxpr', p), 'eqns')
    ]
    counts = [dot_flops(p, times * repeats) for p in inner]
    total += max(counts, default=0) if name == 'cond' else sum(counts)
  return total
