"""Packed rows: each sequence as if it were alone."""

import dataclasses
import functools
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.models import attention, decoder, packed_cudnn
from tests.learn.test_update import CFG
from tests.models.test_deltanet import CFG as HYBRID
from tests.models.test_experts import CFG as EXPERTS
from tests.models.test_experts import Sizes

pytestmark = pytest.mark.slow

T, M = 200, 8  # four blocks of queries


def rows(seed, B=2):
  """ids [B, T], starts [B, M], and the sequences that they consist of."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, CFG.vocab_size, (B, T)).astype(np.int32)
  starts, parts = np.full((B, M), T, np.int32), []
  for b in range(B):
    at = 0
    for m in range(M):
      n = int(rng.integers(1, 90))
      if at + n > T:
        break
      starts[b, m] = at
      parts.append((b, slice(at, at + n)))
      at += n
  return ids, starts, parts


@functools.partial(jax.jit, static_argnums=1)
def forward(p, cfg, ids, starts):
  return decoder.hidden_states(p, cfg, ids, starts=starts)


@functools.partial(jax.jit, static_argnums=1)
def alone(p, cfg, ids):
  return decoder.hidden_states(p, cfg, ids)


# Periods of two layers and one that remains; windows within the sequences.
LOCAL = dataclasses.replace(
  CFG, family='gemma3_text', n_layers=3, window=30, global_every=2
)


@pytest.mark.long
@pytest.mark.parametrize(
  'cfg, scale, atol',
  [
    (CFG, 0.3, 3e-5),
    (LOCAL, 0.3, 3e-5),
    (HYBRID, 0.1, 2e-6),
    # Of all experts: a choice between two may turn by rounding.
    (dataclasses.replace(EXPERTS, moe=Sizes(4, 4, 8, False)), 0.3, 3e-5),
  ],
  ids=['global', 'local', 'delta', 'experts'],
)
@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_hidden_states_are_those_of_the_sequence_alone(cfg, scale, atol, seed):
  ids, starts, parts = rows(seed)
  p = decoder.init_params(cfg, jax.random.key(0), scale=scale)
  found = np.asarray(forward(p, cfg, ids, starts))
  assert np.isfinite(found).all()
  for b, at in parts:
    n = at.stop - at.start
    one = np.zeros((1, T), np.int32)
    one[0, :n] = ids[b, at]
    want = alone(p, cfg, one)[0, :n]
    np.testing.assert_allclose(found[b, at], want, rtol=1e-5, atol=atol)


@pytest.mark.parametrize(
  'cfg', [CFG, HYBRID, EXPERTS], ids=['attention', 'delta', 'experts']
)
def test_a_token_changes_no_bit_of_another_sequence(cfg):
  ids, starts, parts = rows(3)
  p = decoder.init_params(cfg, jax.random.key(0), scale=0.3)
  before = np.asarray(forward(p, cfg, ids, starts))
  for b, at in parts[:4]:
    other = ids.copy()
    other[b, at.start] = (other[b, at.start] + 1) % CFG.vocab_size
    changed = (np.asarray(forward(p, cfg, other, starts)) != before).any(-1)
    assert changed[b, at].all()
    changed[b, at] = False
    if at.stop == max(p.stop for c, p in parts if c == b):
      changed[b, at.stop :] = False  # padding continues the last one
    assert not changed.any()


def test_segments_and_positions_golden():
  found = attention.packed(
    jnp.array([[0, 3, 4, 8], [8, 8, 8, 8]], jnp.int32), 8
  )
  np.testing.assert_array_equal(
    found.segments, [[0, 0, 0, 1, 2, 2, 2, 2], [0] * 8]
  )
  np.testing.assert_array_equal(
    found.positions, [[0, 1, 2, 0, 0, 1, 2, 3], [*range(8)]]
  )


def heads(rng, n):
  x = rng.normal(size=(2, 16, n, 8))
  return jnp.asarray(x, jnp.bfloat16)


def test_cudnn_gets_every_token_of_packed_rows():
  """What the private function of the pinned JAX is called with."""
  starts = jnp.array([[0, 5, 9, 16], [16, 16, 16, 16]], jnp.int32)
  rng = np.random.default_rng(0)
  q, k = heads(rng, 4), heads(rng, 2)
  with mock.patch.object(
    packed_cudnn._fused, 'dot_product_attention'
  ) as called:
    packed_cudnn.attention(q, k, k, starts)
  (_, keys, _), given = called.call_args
  # Padding belongs to the sequence before it, and an empty row is one.
  np.testing.assert_array_equal(
    given['q_seqlen'], [[5, 4, 7, -1], [16, -1, -1, -1]]
  )
  np.testing.assert_array_equal(
    given['q_offsets'], [[0, 5, 9, -1, -1], [0, -1, -1, -1, -1]]
  )
  np.testing.assert_array_equal(given['kv_offsets'], given['q_offsets'])
  np.testing.assert_array_equal(given['kv_seqlen'], given['q_seqlen'])
  # Query head n reads key head n // 2.
  np.testing.assert_array_equal(keys, np.asarray(k)[:, :, [0, 0, 1, 1]])


@pytest.mark.long
def test_the_program_for_hopper_has_packed_attention_forward_and_backward():
  """The pinned JAX lowers it; the compiler is not needed for that."""
  starts = jnp.array([[0, 5, 9, 16], [16, 16, 16, 16]], jnp.int32)
  rng = np.random.default_rng(0)
  q, k = heads(rng, 4), heads(rng, 2)
  packing = attention.packed(starts, 16)

  def loss(q, k, v):
    o = attention.causal(q, k, v, None, 'cudnn', packing)
    return jnp.sum(o.astype(jnp.float32))

  def text():
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k)
    return traced.lower(lowering_platforms=('cuda',)).as_text()

  with (
    sharding.compiling_for('gpu'),
    packed_cudnn.compiling_for_hopper(),
    mock.patch.object(
      packed_cudnn._fused, 'check_cudnn_version', return_value=91000
    ),
  ):
    assert packed_cudnn.available()
    program = text()
  assert '__cudnn$fmhaSoftmax' in program
  assert '__cudnn$fmhaSoftmaxBackward' in program
  # Before Hopper, and where JAX has no such function: XLA with a mask.
  assert not packed_cudnn.available()
  jax.clear_caches()
  with mock.patch.object(attention.logging, 'warning') as warned:
    assert '__cudnn' not in text()
  warned.assert_called()
