"""Attention over the live part of a cache, its kernels interpreted on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.engines.jax import live

B, K, G, H, S = 5, 2, 3, 64, 640  # five blocks
LAST = np.array([0, 127, 128, 400, S - 1], np.int32)
KERNELS = pytest.mark.parametrize('platform', ['gpu', 'tpu'])


def made(dtype=np.float32, time=2, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(B, K, G, H), draw(B, K, S, H), draw(B, K, S, H)
  if dtype == np.float32:
    q /= np.sqrt(H)  # as `attention.grouped_queries` has it
  k = k.swapaxes(2, 3) if time == 3 else k
  return [jnp.asarray(x, dtype) for x in (q, k, v)]


def expected(q, k, v, window, time):
  """In float64, one row after another."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  if time == 3:
    k = k.swapaxes(2, 3)
  out = np.zeros((B, K, G, H))
  for b, last in enumerate(LAST):
    first = max(last - window + 1, 0) if window else 0
    own = slice(first, last + 1)
    s = np.einsum('kgh,ksh->kgs', q[b], k[b, :, own])
    w = np.exp(s - s.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    out[b] = np.einsum('kgs,ksh->kgh', w, v[b, :, own])
  return out


@KERNELS
@pytest.mark.parametrize('time', [2, 3])
@pytest.mark.parametrize('window', [0, 1, 100, 129, 300])
def test_it_is_softmax_over_what_a_row_sees(platform, time, window):
  q, k, v = made(time=time)
  how = dict(window=window, time=time, platform=platform, interpret=True)
  found, _ = live.attend(q, k, v, LAST, **how)
  np.testing.assert_allclose(found, expected(q, k, v, window, time), atol=2e-6)


@KERNELS
def test_half_precision_is_scaled_after_the_product(platform):
  q, k, v = made(jnp.bfloat16)
  how = dict(platform=platform, interpret=True)
  found, _ = live.attend(q, k, v, LAST, **how)
  want = expected(np.asarray(q, np.float64) / np.sqrt(H), k, v, 0, 2)
  np.testing.assert_allclose(found, want, atol=2e-2)


@KERNELS
@pytest.mark.parametrize('window', [0, 1, 100, 129, 300])
def test_only_blocks_that_a_row_sees_are_read(platform, window):
  """What is beyond them may be anything, and the kernel's own count says so."""
  q, k, v = made()
  how = dict(window=window, platform=platform, interpret=True)
  found, counts = live.attend(q, k, v, LAST, **how)
  at = np.arange(S) // live.BLOCK
  first = np.maximum(LAST - window + 1, 0) if window else 0 * LAST
  first, last = first // live.BLOCK, LAST // live.BLOCK
  dead = (at < first[:, None]) | (at > last[:, None])
  spoilt = [jnp.where(dead[:, None, :, None], jnp.nan, x) for x in (k, v)]
  again, _ = live.attend(q, *spoilt, LAST, **how)
  assert np.array_equal(found, again)
  counts = np.asarray(counts).sum(-1)
  assert np.array_equal(counts, np.broadcast_to(last - first + 1, (K, B)).T)


@KERNELS
def test_a_row_depends_on_itself_alone(platform):
  """Bit for bit, whatever shares the batch."""
  q, k, v = made()
  how = dict(platform=platform, interpret=True)
  found, _ = live.attend(q, k, v, LAST, **how)
  others = [x.at[jnp.arange(B) != 3].set(7.0) for x in (q, k, v)]
  last = np.where(np.arange(B) == 3, LAST, S - 1).astype(np.int32)
  again, _ = live.attend(*others, last, **how)
  assert np.array_equal(found[3], again[3])


def test_runs_share_a_long_row(monkeypatch):
  """Few rows are cut into runs, many are not; the results are close."""
  q, k, v = made()
  how = dict(platform='gpu', interpret=True)
  several, counts = live.attend(q, k, v, LAST, **how)
  assert counts.shape == (B, K, 5)
  monkeypatch.setattr(live, '_PROGRAMS', B * K)
  one, counts = live.attend(q, k, v, LAST, **how)
  assert counts.shape == (B, K, 1)
  np.testing.assert_allclose(one, several, atol=1e-6)


def test_kernels_are_for_shapes_that_they_can_read():
  shape = lambda s, h: jax.ShapeDtypeStruct((1, 1, s, h), jnp.float32)
  fits = lambda s, h: live.fits(shape(s, h), shape(s, h))
  assert fits(640, 64) and fits(256, 256)
  assert not fits(640, 80) and not fits(650, 64) and not fits(128, 64)
