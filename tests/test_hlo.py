"""Topologies, and what the text of a compiled program says."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from searchrl_jax.run import hlo, topology
from searchrl_jax.run.lookup import ConfigError

# A loop of 3 steps, each of which gathers a weight of 4 x 8 bfloat16 and calls
# a library kernel, with a loop of unknown length inside.
TEXT = (pathlib.Path(__file__).parent / 'data' / 'loop.hlo').read_text()


def test_collectives_count_as_often_as_their_loops_run():
  reduce, gather = sorted(
    hlo.Program(TEXT).collectives(), key=lambda c: c.times
  )
  # The result alone: 4 x 8 x 2 bytes.
  assert (gather.kind, gather.nbytes, gather.times) == ('all-gather', 64, 3)
  assert gather.loop and gather.op == 'jit(f)/while/body/dot'
  assert (reduce.kind, reduce.nbytes, reduce.times) == ('all-reduce', 32, 1)
  assert not reduce.loop


def test_kernels_of_a_library_are_counted():
  assert hlo.Program(TEXT).targets() == {'__cudnn$fmhaSoftmax': 3}


def test_traffic_counts_slices_and_inner_loops():
  # A step: gather 32 + 96 (its result is a tuple of both), row: a slice of 32
  # and an index of 4 read, 32 written; kernel 32 + 32; inner step 64 + 32.
  step = (32 + 96) + (32 + 4 + 32) + (32 + 32)
  inner = 64 + 32
  last = 32 + 32
  assert hlo.Program(TEXT).traffic() == 3 * (step + inner) + last
  assert hlo.Program(TEXT, inner=5).traffic() == 3 * (step + 5 * inner) + last
  assert hlo.Program(TEXT).traffic(lambda _, loop: not loop) == last


def test_the_largest_buffers_come_first():
  size, shape, _ = hlo.Program(TEXT).largest(1)[0]
  assert (size, str(shape)) == (64, 'bf16[4,8]')


def test_a_real_program_is_read():
  @jax.jit
  def f(x, w):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

  shapes = (jnp.zeros((4, 8)), jnp.zeros((5, 8, 8)))
  program = hlo.Program(f.lower(*shapes).compile().as_text())
  assert {times for times, loop in program.times.values() if loop} <= {5, 6}
  assert program.traffic() > 5 * 8 * 8 * 4  # the weights at least
  assert not program.collectives()
  # 5 products of 4 x 8 by 8 x 8: 2 * 4 * 8 * 8 each.
  assert hlo.dot_flops(f.trace(*shapes).jaxpr) == 5 * 2 * 4 * 8 * 8
  # Backwards two products of that size more for each.
  gradient = jax.jit(jax.grad(lambda w: f(shapes[0], w).sum()))
  traced = gradient.trace(shapes[1])
  assert hlo.dot_flops(traced.jaxpr) == 3 * 5 * 2 * 4 * 8 * 8


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
