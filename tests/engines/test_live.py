"""Attention over the live part of a cache, its kernel interpreted on a CPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import caches, decode, live
from tests.engines.common import CFG, make_params

pytestmark = pytest.mark.slow

B, K, G, H, S = 5, 2, 3, 64, 640  # five blocks
LAST = np.array([0, 127, 128, 400, S - 1], np.int32)
attend = functools.partial(live.attend, interpret=True)


def made(dtype=np.float32, time=2, G=G, H=H):
  rng = np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k, v = draw(B, K, G, H), draw(B, K, S, H), draw(B, K, S, H)
  if dtype == np.float32:
    q /= np.sqrt(H)  # as `attention.grouped_queries` has it
  k = k.swapaxes(2, 3) if time == 3 else k
  return [jnp.asarray(x, dtype) for x in (q, k, v)]


def expected(q, k, v, window=0, time=2):
  """In float64, one row after another."""
  half = q.dtype != jnp.float32
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  if time == 3:
    k = k.swapaxes(2, 3)
  if half:
    q /= np.sqrt(q.shape[-1])
  out = np.zeros(q.shape)
  for b, last in enumerate(LAST):
    first = max(last - window + 1, 0) if window else 0
    own = slice(first, last + 1)
    s = np.einsum('kgh,ksh->kgs', q[b], k[b, :, own])
    w = np.exp(s - s.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    out[b] = np.einsum('kgs,ksh->kgh', w, v[b, :, own])
  return out


@pytest.mark.parametrize('time', [2, 3])
@pytest.mark.parametrize('window', [0, 1, 129, 300])
def test_it_is_softmax_over_what_a_row_sees(time, window):
  q, k, v = made(time=time)
  found, _ = attend(q, k, v, LAST, window, time)
  np.testing.assert_allclose(found, expected(q, k, v, window, time), atol=2e-6)


@pytest.mark.parametrize(
  'dtype, off, G, H',
  [
    (jnp.float32, 2e-6, 1, 128),
    (jnp.float32, 2e-6, 4, 256),
    (jnp.float16, 2e-3, 16, 64),
    (jnp.bfloat16, 2e-2, 4, 256),
  ],
)
def test_precisions_and_sizes(dtype, off, G, H):
  """Half precision is scaled after the product."""
  q, k, v = made(dtype, G=G, H=H)
  found, _ = attend(q, k, v, LAST)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected(q, k, v), atol=off)


@pytest.mark.parametrize(
  'window, size', [(0, 128), (1, 128), (129, 128), (300, 128), (300, 32)]
)
def test_only_blocks_that_a_row_sees_are_read(window, size, monkeypatch):
  """What is beyond them may be anything, and the kernel's own count says so."""
  monkeypatch.setattr(live, '_BYTES', size * H * 4)
  q, k, v = made()
  found, counts = attend(q, k, v, LAST, window)
  at = np.arange(S) // size
  first = np.maximum(LAST - window + 1, 0) if window else 0 * LAST
  first, last = first // size, LAST // size
  dead = (at < first[:, None]) | (at > last[:, None])
  spoilt = [jnp.where(dead[:, None, :, None], jnp.nan, x) for x in (k, v)]
  again, _ = attend(q, *spoilt, LAST, window)
  assert np.array_equal(found, again)
  counts = np.asarray(counts).sum(-1)
  assert np.array_equal(counts, np.broadcast_to(last - first + 1, (K, B)).T)
  # As the gate has it.
  share = np.mean(counts) * size / S
  op = f'jit(f)/{live.scope(window, size, B, B)}/pallas_call'
  assert live.share(op, LAST, S) == pytest.approx(share)
  assert live.share('jit(f)/dot', LAST, S) == 1


@pytest.mark.parametrize('seed', range(4))
def test_a_row_depends_on_itself_alone(seed):
  """Bit for bit, whatever shares the batch and wherever the row is in it."""
  rng = np.random.default_rng(seed)
  dtype = (jnp.float32, jnp.bfloat16)[seed % 2]
  q, k, v = made(dtype)
  window, row, place = (0, 150)[seed // 2], *rng.integers(0, B, 2)
  found, _ = attend(q, k, v, LAST, window)
  others = [jnp.asarray(rng.normal(0, 9, x.shape), dtype) for x in (q, k, v)]
  mixed = [x.at[place].set(own[row]) for x, own in zip(others, (q, k, v))]
  last = rng.integers(0, S, B).astype(np.int32)
  last[place] = LAST[row]
  again, _ = attend(*mixed, last, window)
  assert np.array_equal(found[row], again[place])


@pytest.mark.parametrize('runs, run', [(1, 5), (2, 3), (3, 2), (5, 1)])
@pytest.mark.parametrize('window', [0, 129])
def test_runs_share_a_long_row(monkeypatch, runs, run, window):
  """Few rows are cut into runs of blocks, many are not."""
  q, k, v = made()
  monkeypatch.setattr(live, '_PROGRAMS', B * K * runs)
  found, counts = attend(q, k, v, LAST, window)
  assert counts.shape == (B, K, runs) and np.max(counts) <= run
  np.testing.assert_allclose(found, expected(q, k, v, window), atol=2e-6)


def through(mesh=None, time=1, S=256, dtype=np.float32, keys=None, **sizes):
  """(program of `caches.attend`, its arguments) for 4 rows."""
  cfg = dataclasses.replace(CFG, **dict(head_dim=64) | sizes)
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
  axes = {'batch': 4, 'kv_heads': cfg.n_kv_heads, 'time': S}
  axes['head_dim'] = cfg.head_dim
  k, v = (draw(*map(axes.get, names)) for names in caches.axes(cfg))
  q = draw(4, time, cfg.n_heads, cfg.head_dim).astype(keys or dtype)
  at = jnp.asarray([[0], [127], [128], [S - 1]]) + jnp.zeros((1, time), int)

  def f(q, k, v, at):
    return caches.attend(cfg, q, (k, v), at, mesh=mesh)

  return sharding.by_rows(f, mesh, 4, (0, 0, 0, 0), 0), (q, k, v, at)


def by_kernel(f, arguments) -> bool:
  anew = jax.jit(lambda *x: f(*x))  # whatever it was compiled for before
  return live.NAME in anew.lower(*arguments).as_text(debug_info=True)


@pytest.fixture
def interpreted(monkeypatch):
  monkeypatch.setattr(live, 'attend', attend)
  with sharding.compiling_for('gpu'):
    yield


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_a_gpu_reads_what_is_live(interpreted, kv_heads, dtype):
  f, arguments = through(dtype=dtype, n_kv_heads=kv_heads)
  assert by_kernel(f, arguments)
  got = f(*arguments)
  with sharding.compiling_for('cpu'):
    assert not by_kernel(f, arguments)
    off = 1e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(
      *(np.asarray(x, np.float32) for x in (got, f(*arguments))), atol=off
    )


@pytest.mark.parametrize(
  'change',
  [
    dict(time=2),  # tokens at once
    dict(S=200),  # no whole blocks
    dict(S=128),  # one block
    dict(head_dim=80),
    dict(n_heads=34),  # 17 queries of a head
    dict(dtype=jnp.bfloat16, keys=jnp.float32),
  ],
)
def test_what_the_kernel_does_not_take(interpreted, change):
  assert not by_kernel(*through(**change))


def test_no_such_kernel_for_tpus_and_old_gpus(monkeypatch):
  for platform in ('cpu', 'tpu'):
    with sharding.compiling_for(platform):
      assert not by_kernel(*through())

  class Device:
    compute_capability = '7.5'

  with sharding.compiling_for('gpu'):
    for version, good in (('7.5', 0), ('8.0', 1), ('12.0', 1), ('gfx942', 0)):
      Device.compute_capability = version
      monkeypatch.setattr(jax, 'local_devices', lambda: [Device])
      q = jax.ShapeDtypeStruct((4, 2, 2, 1, 64), jnp.float32)
      v = jax.ShapeDtypeStruct((4, 2, 256, 64), jnp.float32)
      assert live.fits(q, v) == good


@pytest.mark.skipif(jax.device_count() < 8, reason='needs eight devices')
@pytest.mark.parametrize(
  'shape',
  [
    (4, 1, 1),  # by rows
    (2, 2, 1),
    (8, 1, 1),  # which the rows do not divide into
    (1, 1, 2),  # by heads
    (1, 1, 4),  # which the kv heads do not divide into
    (2, 1, 2),  # by both
  ],
)
def test_each_device_has_its_own_part(interpreted, shape):
  alone, arguments = through()
  mesh = sharding.make_mesh(*shape)
  f, _ = through(mesh)
  assert by_kernel(f, arguments)
  np.testing.assert_allclose(
    jax.jit(f)(*arguments), alone(*arguments), atol=1e-6
  )


@pytest.mark.long
def test_a_sampled_token_depends_on_its_slot_alone(interpreted):
  """Ids and log-probs of a whole step, bit for bit."""
  cfg = dataclasses.replace(CFG, head_dim=64)
  shape = decode.Shape(slots=4, max_len=256, chunk=3, prefill_rows=2)
  weights = decode.load(make_params(cfg=cfg), cfg)
  run = jax.jit(functools.partial(decode.decode, cfg=cfg, shape=shape))

  def sampled(seed):
    rng = np.random.default_rng(seed)
    held = [
      tuple(jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in pair)
      for pair in caches.abstract(cfg, 4, 256)
    ]
    own = np.random.default_rng(9)
    held = [
      tuple(x.at[1].set(own.normal(size=x.shape[1:])) for x in pair)
      for pair in held
    ]
    state = decode.idle_state(4) | dict(
      token=rng.integers(0, 90, 4).astype(np.int32),
      length=rng.integers(1, 250, 4).astype(np.int32),
      left=rng.integers(0, 5, 4).astype(np.int32),
      seed=rng.integers(0, 99, (4, 2)).astype(np.uint32),
    )
    for name, value in dict(token=7, length=200, left=3, seed=5).items():
      state[name][1] = value
    _, ids, logps, counts, _ = run(weights, held, state)
    return [np.asarray(x[..., 1]) for x in (ids, logps, counts)]

  first = sampled(0)
  assert first[2] == 3
  for seed in (1, 2, 3):
    for a, b in zip(first, sampled(seed), strict=True):
      assert np.array_equal(a, b)
