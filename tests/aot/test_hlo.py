"""Topologies, and what the text of a compiled program says."""

import functools
import pathlib

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import pytest

from searchrl_jax.aot import hlo, topology
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import grouped

# A loop of 3 steps, each of which gathers a weight of 4 x 8 bfloat16 and calls
# a library kernel, with a loop of unknown length inside.
DATA = pathlib.Path(__file__).parents[1] / 'data'
TEXT = (DATA / 'loop.hlo').read_text()
# As XLA prints it for TPUs: a loop of 3 steps by its condition alone, a gather
# in two fusions, a gather as a sum, and results in on-chip memory (S(1)).
TPU = (DATA / 'tpu.hlo').read_text()
# Likewise: 3 layers. In each a ring of 8 steps, two in every turn of its loop,
# sends parts of 2 x 8 bfloat16, and a gather of 16 x 8 runs beside it.
RING = (DATA / 'ring.hlo').read_text()


def test_collectives_count_as_often_as_their_loops_run():
  reduce, gather = sorted(
    hlo.Program(TEXT).collectives(), key=lambda c: c.times
  )
  # The result alone: 4 x 8 x 2 bytes.
  assert (gather.kind, gather.nbytes, gather.times) == ('all-gather', 64, 3)
  assert gather.loop and gather.op == 'jit(f)/while/body/dot'
  assert (reduce.kind, reduce.nbytes, reduce.times) == ('all-reduce', 32, 1)
  assert not reduce.loop


def test_kernels_of_a_library_are_named():
  assert hlo.Program(TEXT).targets() == ['__cudnn$fmhaSoftmax']


@pytest.mark.parametrize(
  'groups, group',
  [
    ('{{0,2,4,6},{1,3,5,7}}', (0, 2, 4, 6)),
    ('[2,4]<=[8]', (0, 1, 2, 3)),
    ('[2,4]<=[4,2]T(1,0)', (0, 2, 4, 6)),
    ("mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}", (0, 1, 2, 3)),
    ("mesh['data'=2,'fsdp'=4] {'data'}", (0, 4)),
    ("mesh['data'=2,'fsdp'=4] {'data','fsdp'}", tuple(range(8))),
    # Its axes are those of the devices 0, 4, 1, 5, 2, 6, 3, 7.
    ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}", (0, 1, 2, 3)),
    ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", (0, 4)),
    ('{}', ()),
  ],
)
def test_groups_of_a_collective(groups, group):
  text = f"""HloModule m, num_partitions=8
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %all = f32[8]{{0}} all-reduce(%x), replica_groups={groups}
}}"""
  (found,) = hlo.Program(text).collectives()
  assert found.group == group
  n = len(group) or 8
  assert found.sent == 2 * (32 - 32 // n)


def test_what_collectives_send():
  """A reduce-scatter sends what it is given, not the part that it returns."""
  text = r"""HloModule m, num_partitions=4
ENTRY %main (x: f32[16], y: bf16[8,4]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[8,4]{1,0} parameter(1)
  %scatter = ((f32[16]{0}, bf16[8,4]{1,0}), (f32[4]{0}, bf16[2,4]{1,0})) \
reduce-scatter-start(%x, %y), replica_groups={}, dimensions={0}
  %pass = (f32[16]{0}, f32[16]{0}) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,0}}
}""".replace('\\\n', '')
  program = hlo.Program(text)
  passed, scattered = program.collectives()
  assert (scattered.nbytes, scattered.sent) == (16 + 16, 3 * (16 + 16))
  assert (passed.nbytes, passed.sent) == (64, 64)
  # Operands once: 64 + 64 read and 16 + 16 written, 64 read and 64 written.
  assert program.traffic() == 128 + 32 + 128


def test_products_of_parts_count_for_all_devices():
  f = jax.shard_map(
    jnp.dot,
    mesh=jax.sharding.AbstractMesh((4, 2), ('data', 'tensor')),
    in_specs=(P('data'), P()),
    out_specs=P('data'),
    axis_names={'data'},
    check_vma=False,
  )
  traced = jax.jit(f).trace(jnp.zeros((8, 4)), jnp.zeros((4, 16)))
  assert hlo.dot_flops(traced.jaxpr) == 2 * 8 * 4 * 16


def test_traffic_counts_slices_and_inner_loops():
  # A step: gather 32 + 64, row: a slice of 32 and an index of 4 read, 32
  # written; kernel 32 + 32; inner step 64 + 32.
  step = (32 + 64) + (32 + 4 + 32) + (32 + 32)
  inner = 64 + 32
  last = 32 + 32
  assert hlo.Program(TEXT).traffic() == 3 * (step + inner) + last
  assert hlo.Program(TEXT, unknown=5).traffic() == 3 * (step + 5 * inner) + last
  assert hlo.Program(TEXT).traffic(lambda loop, _: not loop) == last


def test_parameters_of_a_fusion_are_known_by_their_numbers():
  """XLA prints them in any order: of x a slice is read, y whole."""
  text = """HloModule m
%fused (p0: f32[16], p1: f32[4]) -> f32[4] {
  %p1 = f32[4]{0} parameter(1)
  %p0 = f32[16]{0} parameter(0)
  %part = f32[4]{0} slice(%p0), slice={[0:4]}
  ROOT %sum = f32[4]{0} add(%part, %p1)
}
ENTRY %main (x: f32[16], y: f32[4]) -> f32[4] {
  %x = f32[16]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  ROOT %sum = f32[4]{0} fusion(%x, %y), kind=kLoop, calls=%fused
}"""
  assert hlo.Program(text).traffic() == 16 + 16 + 16


def test_small_results_stay_near():
  """Until more is moved than the cache holds; they are written all the same.

  Bytes: `small` reads 32 + 8 and writes 32 + 128; `again` reads 32 + 128 + 32
  and writes 64; `last` reads 64 twice and writes 64; `late` reads 32 twice and
  writes 32. A cache of 256 has all but x and y; of 128 not `part` for `late`,
  since `again` and `last` moved 32 + 64 + 64; of 64 not `rest` either; of 32
  not `again`.
  """
  text = """HloModule m
ENTRY %main (x: f32[8], y: f32[2]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[2]{0} parameter(1)
  %small = (f32[8]{0}, f32[32]{0}) custom-call(%x, %y), custom_call_target="k"
  %part = f32[8]{0} get-tuple-element(%small), index=0
  %rest = f32[32]{0} get-tuple-element(%small), index=1
  %again = f32[16]{0} concatenate(%part, %rest, %x)
  %last = f32[16]{0} add(%again, %again)
  ROOT %late = f32[8]{0} add(%part, %part)
}"""
  everywhere = lambda loop, branch: True
  traffic = functools.partial(hlo.Program(text).traffic, everywhere)
  least = (40 + 160) + (32 + 64) + 64 + 32
  assert traffic(256) == least
  assert traffic(128) == least + 64
  assert traffic(64) == least + 64 + 128
  assert traffic(32) == least + 64 + 128 + 2 * 64
  assert traffic(0) == least + 64 + 128 + 2 * 64 + 32


def test_kernels_that_read_a_part_are_known_by_their_operation():
  text = """HloModule m
ENTRY %main (x: f32[8]) -> f32[2] {
  %x = f32[8]{0} parameter(0)
  %y = f32[2]{0} custom-call(%x), custom_call_target="k", \
metadata={op_name="jit(f)/half/kernel"}
  ROOT %z = f32[2]{0} custom-call(%x), custom_call_target="k", \
metadata={op_name="jit(f)/kernel"}
}""".replace('\\\n', '')
  reads = lambda op: 0.5 if 'half' in op else 1.0
  assert hlo.Program(text, reads=reads).traffic() == 16 + 8 + 32 + 8
  assert hlo.Program(text).traffic() == 2 * (32 + 8)


def test_branches_are_told_apart():
  text = r"""HloModule m
%copied (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %copy = f32[8]{0} copy(%x)
}
ENTRY %main (p: pred[], y: f32[8]) -> f32[8] {
  %p = pred[] parameter(0)
  %y = f32[8]{0} parameter(1)
  %z = f32[8]{0} conditional(%p, %y, %y), true_computation=%copied, \
false_computation=%copied
  ROOT %sum = f32[8]{0} add(%z, %y)
}""".replace('\\\n', '')
  program = hlo.Program(text)
  assert program.traffic() == 2 * 64 + 96
  assert program.traffic(lambda loop, branch: not branch) == 96


def test_the_largest_buffers_come_first():
  size, shape, _ = hlo.Program(TEXT).largest(1)[0]
  assert (size, str(shape)) == (64, 'bf16[4,8]')


def test_a_real_program_is_read():
  @jax.jit
  def f(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  shapes = (jnp.zeros((4, 8)), jnp.zeros((5, 8, 8)))
  program = hlo.Program(f.lower(*shapes).compile().as_text())
  assert {times for times, loop, _ in program.times.values() if loop} <= {5, 6}
  assert program.traffic() > 5 * 8 * 8 * 4  # the weights at least
  assert not program.collectives()
  # 5 products of 4 x 8 by 8 x 8: 2 * 4 * 8 * 8 each.
  assert hlo.dot_flops(f.trace(*shapes).jaxpr) == 5 * 2 * 4 * 8 * 8
  # Backwards two products of that size more for each.
  gradient = jax.jit(jax.grad(lambda w: f(shapes[0], w).sum()))
  traced = gradient.trace(shapes[1])
  assert hlo.dot_flops(traced.jaxpr) == 3 * 5 * 2 * 4 * 8 * 8


def test_a_gather_in_several_fusions_of_a_tpu_counts_once():
  fused, summed = hlo.Program(TPU).collectives()
  assert (fused.kind, fused.nbytes, fused.times) == ('all-gather', 128, 3)
  assert fused.op == 'jit(f)/while/body/dot' and fused.loop
  # A sum of parts with zeros is a gather that sends as an all-reduce does:
  # 8 x 4 x 2 bytes, three quarters of them twice.
  assert (summed.kind, summed.nbytes, summed.sent) == ('all-gather', 64, 96)


def test_a_ring_whose_steps_are_unrolled_counts_its_turns():
  gather, *sent = hlo.Program(RING).collectives()
  assert [c.kind for c in sent] == 2 * ['collective-permute']
  # 3 layers x 8 / 2 turns, of 2 x 8 x 2 bytes.
  assert [(c.times, c.nbytes) for c in sent] == 2 * [(12, 32)]
  # Once a layer, although its steps are in the ring.
  assert (gather.kind, gather.times, gather.nbytes) == ('all-gather', 3, 256)
  # Of one layer.
  gather, *sent = hlo.Program(RING, once=True).collectives()
  assert [c.times for c in (gather, *sent)] == [1, 4, 4] and gather.loop


@pytest.mark.parametrize(
  'bound, step, turns', [(8, 2, 4), (7, 2, 4), (7, 1, 7)]
)
def test_turns_of_a_ring(bound, step, turns):
  text = RING.replace(
    '%eight = u32[]{:T(128)} constant(8)',
    f'%eight = u32[]{{:T(128)}} constant({bound})',
  )
  text = text.replace(
    '%two = u32[]{:T(128)} constant(2)',
    f'%two = u32[]{{:T(128)}} constant({step})',
  )
  times = {c.times for c in hlo.Program(text).collectives()}
  assert times == {3, 3 * turns}


def test_a_loop_that_counts_down_is_of_unknown_length():
  text = RING.replace('constant(8)', 'constant(0)')
  times = {c.times for c in hlo.Program(text, unknown=9).collectives()}
  assert times == {3, 3 * 9}


def test_collectives_of_a_shard_map_share_a_channel_and_all_count():
  @jax.jit
  def f(x):
    def turn(_, y):
      return jax.lax.psum(y, 'a')

    def inner(x):
      rows = jax.lax.all_gather(x, 'a').sum(0)
      return jax.lax.fori_loop(0, 5, turn, jax.lax.psum(rows, 'a') + 1)

    return jax.shard_map(
      inner, mesh=mesh, in_specs=P('a'), out_specs=P(), check_vma=False
    )(x)

  mesh = jax.sharding.Mesh(jax.devices()[:4], 'a')
  text = f.lower(jnp.ones((4, 8))).compile().as_text()
  found = hlo.Program(text).collectives()
  assert sorted((c.kind, c.times) for c in found) == [
    ('all-gather', 1),
    ('all-reduce', 1),
    ('all-reduce', 5),
  ]


def test_on_chip_memory_of_a_tpu_is_no_traffic():
  program = hlo.Program(TPU)
  # A step: 32 read and written by the start, 32 read by the end, 256 read by
  # the copy and 64 by the slice, 256 written by the kernel.
  step = (32 + 32) + 32 + 256 + 64 + 256
  # Scalars: two broadcasts, two indices, a comparison and its result.
  scalars = 4 + 4 + 2 * 4 + 2 * 4 + 1
  assert program.traffic() == 3 * (step + scalars)
  assert {str(shape) for _, shape, _ in program.largest(9)} == {
    'f32[8,8]',
    'bf16[2,8]',
    'pred[]',
  }


@pytest.mark.parametrize('tile', [1, 16])
def test_products_of_rows_and_their_gradients_count_as_one_of_matrices(tile):
  """3 products of 2 R I O, whatever loops the kernels have."""
  R, I, O = 128, 32, 48

  def total(x, w, counts):
    return grouped.product(grouped.How(tile), x, w, counts).sum()

  f = jax.jit(jax.grad(total, (0, 1)))
  shapes = (R, I), (2, I, O)
  arrays = [jax.ShapeDtypeStruct(shape, 'float32') for shape in shapes]
  traced = f.trace(*arrays, jax.ShapeDtypeStruct((2,), 'int32'))
  assert hlo.dot_flops(traced.jaxpr) == 3 * 2 * R * I * O


def test_products_of_a_pallas_kernel_count_once_for_each_step_of_its_grid():
  def kernel(x, w, o):
    o[...] = jnp.dot(x[...], w[...])

  f = pl.pallas_call(
    kernel,
    grid=(4,),
    in_specs=[
      pl.BlockSpec((2, 8), lambda i: (i, 0)),
      pl.BlockSpec((8, 16), lambda i: (0, 0)),
    ],
    out_specs=pl.BlockSpec((2, 16), lambda i: (i, 0)),
    out_shape=jax.ShapeDtypeStruct((8, 16), jnp.float32),
  )
  traced = jax.jit(f).trace(jnp.zeros((8, 8)), jnp.zeros((8, 16)))
  assert hlo.dot_flops(traced.jaxpr) == 2 * 8 * 8 * 16


@pytest.mark.parametrize(
  'name, devices, node',
  [('h200:4x8', 32, 8), ('h100:1x8', 8, 8), ('v5e:8x8', 64, 64),
   ('v5p:2x2x4', 16, 16)],
)  # fmt: skip
def test_topologies(name, devices, node):
  found = topology.parse(name)
  assert (len(found), found.node) == (devices, node)


@pytest.mark.parametrize(
  'name', ['h300:1x8', 'h200', 'h200:8', 'h200:0x8', 'v5p:4x4', 'v5e:8x8x1']
)
def test_what_is_no_topology_is_refused(name):
  with pytest.raises(ConfigError, match='--topology='):
    topology.parse(name)
