"""Attention over the live part of a TPU's cache, interpreted on a CPU."""

import dataclasses
import functools

import jax
from jax._src import literals
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_tpu
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import caches, decode, device, live, ragged
from searchrl_jax.models import decoder
from searchrl_jax.models.experts import Sizes
from tests.engines.common import CFG

pytestmark = pytest.mark.slow

kernel = jax_tpu.kernel
TINY = dataclasses.replace(CFG, head_dim=128, dtype='bfloat16', attention='xla')
S = 6 * ragged.PAGE  # of a slot


@pytest.fixture
def tpu(monkeypatch):
  """Interprets the kernel, whose indices have no shape for the interpreter."""
  call = functools.partial(pl.pallas_call, interpret=True)
  monkeypatch.setattr(kernel.pl, 'pallas_call', call)
  monkeypatch.setattr(literals.TypedInt, 'shape', (), raising=False)
  # Not `jax.jit` of it, which would remember what it has traced.
  traced = jax_tpu.ragged_paged_attention.__wrapped__
  monkeypatch.setattr(jax_tpu, 'ragged_paged_attention', traced)
  with sharding.compiling_for('tpu'):
    yield


def made(slots, kv_heads=2, seed=0):
  """Keys and values [slots, S, K, H]."""
  rng = np.random.default_rng(seed)
  draw = lambda: rng.normal(size=(slots, S, kv_heads, 128))
  return [jnp.asarray(draw(), jnp.bfloat16) for _ in range(2)]


def queries(rows, tokens, heads=4, seed=1):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(rows, tokens, heads, 128)), jnp.bfloat16)


def expected(q, k, v, at, window=0):
  """In float64, of rows of their own."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  G = q.shape[2] // k.shape[2]
  out = np.zeros(q.shape)
  for r, t in np.ndindex(*at.shape):
    last = at[r, t]
    own = slice(max(0, last - window + 1) if window else 0, last + 1)
    for n in range(q.shape[2]):
      s = k[r, own, n // G] @ q[r, t, n] / np.sqrt(128)
      w = np.exp(s - s.max())
      out[r, t, n] = w @ v[r, own, n // G] / w.sum()
  return out


LAST = np.array([[0], [255], [256], [700], [S - 1]])


@pytest.mark.parametrize('window', [0, 1, 256, 300])
@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_it_is_softmax_over_what_a_row_sees(tpu, kv_heads, window):
  k, v = made(5, kv_heads)
  q = queries(5, 1)
  got = ragged.attend(q, ragged.pairs(k, v), LAST, window)
  want = expected(q, k, v, LAST, window)
  np.testing.assert_allclose(np.asarray(got, float), want, atol=0.02)


@pytest.mark.parametrize('window', [0, 40])
@pytest.mark.parametrize('tokens', [16, 50])
def test_rows_of_several_tokens_in_slots_of_their_own(tpu, tokens, window):
  """Some are read with tokens of another row; some lie past the end."""
  k, v = made(5)
  q, slots = queries(4, tokens), np.array([4, 0, 3, 9])  # the last: any row
  at = np.array([[0], [250], [S - 5], [S - tokens]]) + np.arange(tokens)
  got = ragged.attend(q, ragged.pairs(k, v), at, window, slots)
  want = expected(q, k[slots % 5], v[slots % 5], np.minimum(at, S - 1), window)
  good = (at < S) & (slots < 5)[:, None]
  np.testing.assert_allclose(
    np.asarray(got, float)[good], want[good], atol=0.02
  )
  assert np.isfinite(np.asarray(got, float)).all()


@pytest.mark.parametrize('window', [0, 40, 300])
@pytest.mark.parametrize('last', [LAST, [[159]], [[256]], [[S - 1]]])
def test_pages_that_are_copied(tpu, monkeypatch, last, window):
  """What is beyond what a row sees may be anything; the gate's share says how
  often pages are copied. Several queries are one row's: what the kernel carries
  from one block of them to the next, the interpreter drops."""
  count, start = [], kernel.MultiPageAsyncCopyDescriptor.start

  def counted(self):
    jax.debug.callback(lambda: count.append(1))
    start(self)

  rows, tokens = len(last), 1 if len(last) > 1 else 160
  at = np.array(last) + np.arange(1 - tokens, 1)
  k, v = made(rows)
  q, cache = queries(rows, tokens), ragged.pairs(k, v)
  size = ragged.PAGE * (1 if window else 2)
  block, low = np.arange(S) // size, at[:, :1] - window + 1
  first = np.maximum(low if window else 0, 0) // size
  dead = (block < first) | (block > at[:, -1:] // size)
  spoilt = jnp.where(dead[..., None, None], jnp.nan, cache)
  run = lambda *x: ragged.attend(*x, at, window)
  with monkeypatch.context() as patch:
    patch.setattr(kernel.MultiPageAsyncCopyDescriptor, 'start', counted)
    again = run(q, spoilt)
    jax.effects_barrier()
  got = run(q, cache)
  np.testing.assert_array_equal(*(np.asarray(x, float) for x in (got, again)))
  op = jax.jit(run).lower(q, cache).as_text(debug_info=True)
  blocks = live.share(op, at[:, -1], S) * rows * S / size
  assert len(count) == pytest.approx(blocks)


@pytest.mark.parametrize('window', [0, 150])
def test_a_row_depends_on_itself_alone(tpu, window):
  """Bit for bit, whatever shares the batch and wherever the row is in it."""
  rng = np.random.default_rng(0)
  k, v = made(5)
  q, cache = queries(5, 1), ragged.pairs(k, v)
  want = ragged.attend(q, cache, LAST, window)
  for row in range(5):
    place = rng.integers(5)
    other, pages = queries(5, 1, seed=2 + row), ragged.pairs(*made(5, seed=row))
    at = rng.integers(0, S, (5, 1))
    at[place] = LAST[row]
    other = other.at[place].set(q[row])
    pages = pages.at[place].set(cache[row])
    got = ragged.attend(other, pages, at, window)
    np.testing.assert_array_equal(
      *(np.asarray(x, float) for x in (got[place], want[row]))
    )


def play(cfg, mesh=None):
  """The largest log-probs after each of two tokens, and the caches."""
  B, P = 4, 300
  parts = sharding.parts(mesh, B)
  p = decode.Programs(cfg, decode.Shape(B, S, 1, 32, parts), mesh)
  params = decoder.init_params(cfg, jax.random.key(0), scale=0.3)
  weights, cache = decode.load(params, cfg, mesh), caches.make(cfg, B, S, mesh)
  ids = np.random.default_rng(0).integers(0, cfg.vocab_size, (B, P + 40))
  order = np.array([1, 0, 3, 2], np.int32)  # each in the part of its slot
  count, zero = np.array([40, 7, 1, 30], np.int32), np.zeros(B, np.int32)
  ids, start = ids.astype(np.int32), np.full(B, P, np.int32)
  cache = p.fresh(weights, cache, ids[:, :P], order, zero, start, zero)
  cache = p.extend(weights, cache, ids[:, P:], order, start, count, zero)
  state, largest = decode.idle_state(B), []
  state['left'][:], state['greedy'][:] = 1, True
  for i in (1, 2):
    state['token'][order] = ids[:, -i]
    state['length'][order] = P + count + i
    cache, _, logps, *_ = p.decode(weights, cache, state)
    largest.append(np.asarray(logps))
  return np.concatenate(largest), cache


@functools.cache
def wanted(cfg):
  """By the programs of a CPU, whose caches are two."""
  with sharding.compiling_for('cpu'):
    return play(cfg)


@pytest.mark.parametrize('kv_heads, window', [(2, 0), (1, 70)])
def test_programs_write_and_read_the_one_cache(tpu, kv_heads, window):
  how = dict(window=window, global_every=2) if window else {}
  cfg = dataclasses.replace(TINY, n_kv_heads=kv_heads, **how)
  (found, got), (logps, want) = play(cfg), wanted(cfg)
  np.testing.assert_allclose(found, logps, atol=0.05)
  for (one,), (k, v) in zip(got, want):
    both = ragged.pairs(k.transpose(0, 3, 1, 2), v.swapaxes(1, 2))
    one, both = (np.asarray(x, float) for x in (one, both))
    np.testing.assert_allclose(one, both, rtol=0.02, atol=0.05)
  # Pieces of the cache leave and come back.
  fresh, slots = caches.make(cfg, 4, S), np.array([1, 3], np.int32)
  piece = device.read_piece(cfg, got, slots, np.int32(256), 128, None)
  fresh = device.write_piece(cfg, fresh, piece, slots, np.int32(256), None)
  for (one,), (back,) in zip(got, fresh):
    expect = np.zeros(one.shape)
    expect[slots, 256:384] = np.asarray(one, float)[slots, 256:384]
    np.testing.assert_array_equal(np.asarray(back, float), expect)


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
@pytest.mark.parametrize('data, tensor', [(2, 2), (1, 4), (3, 2)])
def test_devices_have_their_own_heads(tpu, data, tensor):
  """Or all, if `tensor` divides no kv heads; slots that `data` does not divide
  are on all devices too."""
  mesh = sharding.make_mesh(data, 1, tensor)
  found, ((cache,), *_) = play(TINY, mesh)
  np.testing.assert_allclose(found, wanted(TINY)[0], atol=0.05)
  slots, heads = (4 if n > 2 else 4 // n for n in (data, tensor))
  assert cache.sharding.shard_shape(cache.shape) == (slots, S, heads, 128)


@pytest.mark.parametrize(
  'change',
  [
    dict(head_dim=64),
    dict(head_dim=256),
    dict(dtype='float32'),
    dict(n_heads=6, n_kv_heads=6),
  ],
)
def test_what_the_kernel_does_not_take(tpu, change):
  assert ragged.fits(TINY)
  cfg = dataclasses.replace(TINY, **change)
  assert not ragged.fits(cfg) and len(caches.axes(cfg)) == 2


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
def test_heads_that_it_takes_on_one_device_alone(tpu):
  """24 kv heads, but not the six of each of four devices."""
  cfg = dataclasses.replace(TINY, n_heads=24, n_kv_heads=24)
  mesh = sharding.make_mesh(1, 1, 4)
  assert ragged.fits(cfg) and not ragged.fits(cfg, mesh)
  np.testing.assert_allclose(play(cfg, mesh)[0], play(cfg)[0], atol=0.05)


def test_routes_lie_beside_the_one_cache(tpu):
  cfg = dataclasses.replace(
    TINY, family='qwen3_moe', moe=Sizes(8, 2, 24, True), keeps_routes=True
  )
  (cache, *_), (k, v) = caches.make(cfg, 3, S), made(3)
  at = np.tile(np.arange(5), (3, 1))
  put = cfg, cache, np.array([2, 0, 1]), at
  chosen = jnp.asarray(np.random.default_rng(0).integers(0, 8, (3, 5, 2)))
  new = caches.write(*put, (k[:, :5], v[:, :5]), None)
  new += caches.write_routes(*put, [chosen], None)
  assert [x.shape for x in new] == [x.shape for x in cache]
  np.testing.assert_array_equal(new[1][2, 0, :5], chosen[0])
  assert caches.write_routes(*put, [], None) == cache[-1:]
