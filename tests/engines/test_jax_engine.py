"""The in-process engine: exact, complete, and it ends."""

import asyncio
import dataclasses
import functools
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.engines.core import (
  EngineError,
  Sampling,
  SyncError,
  WeightsUpdate,
)
from searchrl_jax.engines.handles import StopFinder
from searchrl_jax.engines.jax import caches, decode, device
from searchrl_jax.models import attention, decoder
from searchrl_jax.text import tokenizer
from tests.clock import until
from tests.engines.common import CFG, make_engine, make_params
from tests.engines.contract import EngineContract, bits, once, prompt

pytestmark = [pytest.mark.slow, pytest.mark.exact]


class TestContract(EngineContract):
  tolerance = 1e-5


async def load(engine, params, version):
  await engine.sync(WeightsUpdate(params, version))
  await engine.resume()


@functools.partial(jax.jit, static_argnums=2)
def full_logits(params, ids, cfg):
  hidden = decoder.hidden_states(params, cfg, ids)
  return decoder.logits(params, cfg, hidden)


def full_logps(ids, temperature=1.0, params=None, cfg=CFG):
  """Log-probs [T, V] of the next token, by the uncached decoder and numpy."""
  params = make_params(cfg=cfg) if params is None else params
  padded = np.zeros((1, 64), np.int32)  # one program for all lengths
  padded[0, : len(ids)] = ids
  x = np.asarray(full_logits(params, padded, cfg), np.float64)[0, : len(ids)]
  x = x / temperature
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def filled(cfg, lengths, max_len, seed=0):
  """q [B, 1, ...] at the last positions, and caches that hold the rest."""
  rng, B = np.random.default_rng(seed), len(lengths)
  ((k, v), *_) = caches.make(cfg, B, max_len)
  q = rng.normal(size=(B, 1, cfg.n_heads, cfg.head_dim)).astype(np.float32)
  fill = lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
  return q, fill(k), fill(v), np.array(lengths)[:, None] - 1


@pytest.mark.parametrize('kv_heads', [4, 2])
@pytest.mark.parametrize('block', [4, 100])  # three blocks, or one
def test_attention_through_the_cache_in_either_layout(
  kv_heads, block, monkeypatch
):
  """Keys lie otherwise where each query has keys of its own."""
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': block})
  cfg = dataclasses.replace(CFG, n_kv_heads=kv_heads)
  B, T, S = 3, 7, 11
  (cache, *_), at = caches.make(cfg, B, S), np.arange(T)
  assert (cache[0].shape == cache[1].shape) == (kv_heads == 4)
  assert cache[1].shape[2] == (12 if block == 4 else 11)
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.normal(size=(B, T, n, cfg.head_dim)), jnp.float32)
    for n in (cfg.n_heads, kv_heads, kv_heads)
  )
  positions = np.tile(at, (B, 1))
  slots = np.array([2, 0, 1])  # row r is written to slot slots[r]
  cache = caches.write(cfg, cache, slots, positions, (k, v), None)
  got = caches.attend(cfg, q, [x[slots] for x in cache], positions)
  wanted = attention.causal(q, k, v, np.full(B, T))
  np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize('window', [1, 5, 40])
@pytest.mark.parametrize('block', [4, 100])
def test_a_window_through_the_cache(window, block, monkeypatch):
  """Each row at a place of its own; blocks before all windows are not read."""
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': block})
  lengths = [17, 18, 23, 31]
  q, k, v, at = filled(CFG, lengths, 32)
  got = caches.attend(CFG, q, (k, v), at, window)
  keys = k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)
  for b, n in enumerate(lengths):
    first = max(0, n - window)
    some = [x[b : b + 1, first:n] for x in keys]
    whole = np.repeat(q[b : b + 1], n - first, 1)  # of which the last counts
    want = attention.causal(whole, *some, np.array([n - first]))[:, -1]
    np.testing.assert_allclose(got[b], want, atol=1e-6)
  # Blocks that no window reaches, where there are several.
  unread = max(0, 17 - window) // 4 * 4 if block == 4 else 0
  dark = k.at[..., :unread].set(np.nan), v.at[:, :, :unread].set(np.nan)
  again = caches.attend(CFG, q, dark, at, window)
  np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize('named', [True, False])
@pytest.mark.parametrize('window', [0, 20])
@pytest.mark.parametrize('kv_heads', [4, 2])
def test_how_far_other_rows_are_does_not_show_in_a_row(
  kv_heads, window, named, monkeypatch
):
  """Bit by bit: blocks that a row has not come to add exactly nothing.

  named: the rows of the cache are; else it has them in this order.
  """
  monkeypatch.setattr(caches, 'PART_BYTES', 0)
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': 16})
  monkeypatch.setattr(caches, 'PART', 4)
  cfg = dataclasses.replace(CFG, n_kv_heads=kv_heads)
  q, k, v, near = filled(cfg, [3, 16, 17, 40, 5, 1, 160, 97], 160)
  slots = lambda order: order if named else None
  attend = jax.jit(lambda *x: caches.attend(cfg, *x[:3], window, slots=x[3]))
  want, rng = (
    attend(q, (k, v), near, slots(np.arange(8))),
    np.random.default_rng(0),
  )
  for _ in range(20):
    # Four rows, elsewhere, beside others at other places.
    at = np.where(np.arange(8)[:, None] < 4, near, rng.integers(160, size=1))
    order = rng.permutation(8)
    held = (k, v) if named else (k[order], v[order])
    got = attend(q[order], held, at[order], slots(order))
    np.testing.assert_array_equal(got[np.argsort(order)][:4], want[:4])


@pytest.mark.parametrize('rows', [11, 13, 17])
def test_rows_that_fill_no_part_are_read_together(rows, monkeypatch):
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': 16})
  rng = np.random.default_rng(0)
  q, k, v, at = filled(CFG, rng.integers(1, 161, rows), 160)
  want = caches.attend(CFG, q, (k, v), at)  # small blocks: all rows at once
  monkeypatch.setattr(caches, 'PART_BYTES', 0)
  attend = lambda *x: caches.attend(CFG, *x)
  np.testing.assert_allclose(attend(q, (k, v), at), want, atol=1e-6)
  # Of the blocks that a step reads, keys and values.
  program = str(jax.make_jaxpr(attend)(q, (k, v), at))
  sizes = {int(n) for n in re.findall(r'f32\[(\d+),2,16,8\] = gather', program)}
  assert sizes == {-(-rows // -(-rows // caches.PART))}


@pytest.mark.parametrize('window', [0, 20])
def test_a_row_reads_the_blocks_that_it_sees(window, monkeypatch):
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': 16})
  monkeypatch.setattr(caches, 'PART', 1)  # else what those beside it see, too
  q, k, v, at = filled(CFG, [3, 16, 17, 40, 5, 1, 160, 97], 160)
  attend = jax.jit(
    lambda *x: caches.attend(CFG, *x, window, slots=jnp.arange(8))
  )
  want = attend(q, (k, v), at)
  low = np.maximum(at - window + 1, 0) // 16 * 16 if window else 0 * at
  place = np.arange(160)
  dark = (place < low) | (place >= at // 16 * 16 + 16)
  assert dark.mean() > 0.5
  k = jnp.where(dark[:, None, None], np.nan, k)
  v = jnp.where(dark[:, None, :, None], np.nan, v)
  np.testing.assert_array_equal(attend(q, (k, v), at), want)


@pytest.mark.parametrize('kv_heads', [4, 2])
def test_an_accelerator_reads_the_cache_of_a_token_at_once(
  kv_heads, monkeypatch
):
  """No loop over blocks, and the result is that of one."""
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': 16, 'gpu': 16})
  cfg = dataclasses.replace(CFG, n_kv_heads=kv_heads)
  q, k, v, at = filled(cfg, [3, 16, 17, 40, 5, 160], 160)
  attend = lambda q, *at: caches.attend(cfg, q, (k, v), *at)
  wanted = attend(q, at)
  with sharding.compiling_for('gpu'):
    program = str(jax.make_jaxpr(attend)(q, at))
    got = attend(q, at)
    two = np.repeat(q, 2, 1), np.repeat(at, 2, 1)
    assert 'while' in str(jax.make_jaxpr(attend)(*two))
  assert 'while' not in program
  np.testing.assert_allclose(got, wanted, atol=1e-6)
  # Bit by bit: positions that a row has not come to add nothing.
  with sharding.compiling_for('gpu'):
    far = attend(q, np.maximum(at, 99 * (np.arange(6)[:, None] > 3)))
  np.testing.assert_array_equal(far[:4], got[:4])


def test_scores_that_wait_share_a_call(engine, monkeypatch):
  rng = np.random.default_rng(0)
  rows = [rng.integers(0, 90, n).tolist() for n in (5, 9, 31, 33, 60, 9, 8, 32)]
  sizes, real = [], engine._device.score

  def counted(*sequences):
    sizes.append(len(sequences))
    return real(*sequences)

  monkeypatch.setattr(engine._device, 'score', counted)

  async def alone():
    return [await engine.logps(row) for row in rows]

  async def together():
    return await asyncio.gather(*map(engine.logps, rows))

  one = asyncio.run(alone())
  assert sizes == [1] * 8
  sizes.clear()
  for a, b in zip(one, asyncio.run(together()), strict=True):
    np.testing.assert_array_equal(a, b)
  assert sum(sizes) == 8 and len(sizes) < 8 and not engine._scores


@pytest.mark.parametrize('temperature', [1.0, 0.6, 0.0])
def test_cached_equals_full_forward(engine, temperature):
  async def main():
    handle = engine.open(prompt(engine, 20))
    done = await engine.generate(
      handle, Sampling(max_tokens=9, temperature=temperature, seed=1)
    )
    engine.append(handle, range(17))
    more = await engine.generate(
      handle, Sampling(max_tokens=8, temperature=temperature, seed=1)
    )
    ids = handle.ids
    engine.close(handle)
    return ids, done, more

  ids, done, more = asyncio.run(main())
  want = full_logps(ids, temperature or 1.0)
  for start, part in ((20, done), (46, more)):
    at = np.arange(start, start + len(part.ids))
    assert [ids[i] for i in at] == part.ids.tolist()
    np.testing.assert_allclose(part.logps, want[at - 1, part.ids], atol=1e-5)
    if temperature == 0:
      assert part.ids.tolist() == want[at - 1].argmax(-1).tolist()


@pytest.mark.long
@pytest.mark.parametrize('block', [8, 128])
def test_local_layers_with_forks_and_cuts(block, monkeypatch):
  """Windows of 7 tokens; what is cut off and said again is as if never said."""
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': block})
  cfg = dataclasses.replace(
    CFG, family='gemma3_text', n_layers=5, window=7, global_every=2
  )
  engine = make_engine(cfg=cfg, slots=2)
  sampling = Sampling(max_tokens=12, temperature=0.9, seed=4)

  async def main():
    handle = engine.open(prompt(engine, 30))
    first = await engine.generate(handle, sampling)
    fork = engine.fork(handle)
    engine.truncate(fork, 33)
    again = await engine.generate(
      fork, dataclasses.replace(sampling, max_tokens=9)
    )
    engine.append(handle, range(9))
    more = await engine.generate(handle, sampling)
    return handle.ids, first, again, more, await engine.logps(handle.ids)

  ids, first, again, more, scored = asyncio.run(main())
  assert again.ids.tolist() == first.ids[3:].tolist()
  np.testing.assert_allclose(again.logps, first.logps[3:], atol=1e-5)
  want = full_logps(ids, 0.9, cfg=cfg)
  for start, part in ((30, first), (51, more)):
    at = np.arange(start, start + len(part.ids))
    np.testing.assert_allclose(part.logps, want[at - 1, part.ids], atol=1e-5)
  plain = full_logps(ids, cfg=cfg)[np.arange(len(ids) - 1), ids[1:]]
  np.testing.assert_allclose(scored[1:], plain, atol=1e-5)


# --- The draw.


def test_threefry_known_answers():
  # Random123's kat_vectors, threefry2x32 with 20 rounds.
  for key, count, want in (
    (0x00000000, 0x00000000, (0x6B200159, 0x99BA4EFE)),
    (0xFFFFFFFF, 0xFFFFFFFF, (0x1CB996FC, 0xBB002BE7)),
  ):
    k, c = jnp.uint32(key), jnp.uint32(count)
    got = decode.threefry((k, k), (c, c))
    assert tuple(int(w) for w in got) == want


draw = jax.jit(decode.draw)


def draw_many(logits, n, **changes):
  """n draws of one distribution: ids [n], logps [n]."""
  state = decode.idle_state(n)
  for name, value in changes.items():
    state[name][:] = value
  state['seed'][:, 1] = 7
  u = decode.uniforms(jnp.asarray(state['seed']), jnp.arange(n))
  x = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits)))
  state = jax.tree.map(jnp.asarray, state)
  ids, logps = draw(x, u, state)
  return np.asarray(ids), np.asarray(logps)


def truncated(logits, temperature, top_k, top_p):
  """The kept distribution, by sorting, in float64."""
  x = np.asarray(logits, np.float64) / temperature
  p = np.exp(x - x.max())
  order = np.argsort(-p, kind='stable')
  keep = np.zeros(len(p), bool)
  keep[order[: top_k or len(p)]] = True
  p = np.where(keep, p, 0) / p[keep].sum()
  before = np.cumsum(p[order]) - p[order]
  keep[order] &= before < top_p
  return np.where(keep, p, 0) / p[keep].sum()


def chi_square(ids, p):
  """Pearson's statistic less its mean, in standard deviations."""
  n, counts = len(ids), np.bincount(ids, minlength=len(p))
  assert counts[p == 0].sum() == 0
  big = n * p >= 5
  seen = np.append(counts[big], counts[~big].sum())
  want = np.append(n * p[big], n * p[~big].sum())
  seen, want = seen[want > 0], want[want > 0]
  freedom = len(want) - 1
  stat = ((seen - want) ** 2 / want).sum()
  return (stat - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize('vocab', [90, 1000])
@pytest.mark.parametrize(
  'temperature, top_k, top_p',
  [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 12, 1.0), (1.0, 0, 0.8), (1.3, 20, 0.9)],
)
def test_frequencies_and_logps(vocab, temperature, top_k, top_p):
  logits = np.random.default_rng(vocab).normal(0, 2, vocab)
  p = truncated(logits.astype(np.float32), temperature, top_k, top_p)
  n = 40_000 if vocab == 90 else 10_000
  ids, logps = draw_many(
    logits, n, inv_temperature=1 / temperature, top_k=top_k, top_p=top_p
  )
  assert abs(chi_square(ids, p)) < 4
  np.testing.assert_allclose(logps, np.log(p[ids]), atol=1e-5)


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_what_truncation_keeps(platform):
  """Of each row for itself; a logit of -inf is the last. Ties are kept."""
  rng = np.random.default_rng(0)
  k = np.array([0, 0, 0, 1, 7, 300, 7, 20, 1], np.int32)
  p = np.array([1, 0.9, 1e-6, 1, 1, 1, 0.6, 0.97, 0.5], np.float32)
  x = rng.normal(0, 3, (len(k), 300)).astype(np.float32)
  x[:, 5] = -np.inf
  with sharding.compiling_for(platform):
    cut = jax.jit(lambda *x: decode.truncation(*x))(x, k, p)
    ties = decode.truncation(jnp.zeros((2, 9)), k[4:6], p[6:8])
  kept = np.asarray(decode.ordered(x)) >= np.asarray(cut)[:, None]
  for row, k_, p_, found in zip(x, k, p, kept, strict=True):
    wanted = truncated(row, 1.0, k_, p_) > 0
    wanted[5] = not k_ % 300 and p_ == 1  # nothing is cut
    np.testing.assert_array_equal(found, wanted)
  assert (np.asarray(ties) == 0).all()


def test_frequencies_through_the_engine(engine):
  """4,000 seeds of one position, with a slot's own settings beside others."""
  start = prompt(engine, 5)

  async def main():
    kinds = [dict(), dict(top_k=9, temperature=0.8), dict(top_p=0.7)]
    handles = [engine.open(start) for _ in range(3)]
    out = [[], [], []]

    async def many(i):
      for seed in range(1500):
        done = await engine.generate(
          handles[i], Sampling(max_tokens=1, seed=seed, **kinds[i])
        )
        out[i].append(int(done.ids[0]))
        engine.truncate(handles[i], 5)

    await asyncio.gather(*map(many, range(3)))
    for h in handles:
      engine.close(h)
    return out

  free, by_k, by_p = asyncio.run(main())
  logits = full_logps(start.ids)[-1]
  assert abs(chi_square(free, truncated(logits, 1.0, 0, 1.0))) < 4
  assert abs(chi_square(by_k, truncated(logits, 0.8, 9, 1.0))) < 4
  assert abs(chi_square(by_p, truncated(logits, 1.0, 0, 0.7))) < 4


@pytest.mark.parametrize('vocab', [1, 9, 90])
def test_edges_of_the_stream_never_give_an_impossible_id(vocab):
  edge = np.float32([0.0, 2.0**-24, 0.5, 1 - 2.0**-24])
  u = tuple(jnp.asarray(x.ravel()) for x in np.meshgrid(edge, edge))
  state = jax.tree.map(jnp.asarray, decode.idle_state(16))
  only = np.full(vocab, -np.inf, np.float32)
  only[vocab // 2] = 0.0
  peaked = np.where(np.isinf(only), np.float32(-80), only)
  ids, logps = draw(jnp.tile(only, (16, 1)), u, state)
  assert set(ids.tolist()) == {vocab // 2} and set(logps.tolist()) == {0.0}
  ids, logps = draw(jnp.tile(peaked, (16, 1)), u, state)
  assert set(ids.tolist()) <= set(range(vocab))
  assert np.isfinite(np.asarray(logps)).all()


def test_greedy_takes_the_lowest_of_ties():
  logits = np.zeros(90)
  logits[[17, 18, 40]] = 3.0
  ids, logps = draw_many(logits, 3, greedy=True)
  assert ids.tolist() == [17, 17, 17]
  want = np.log(np.exp(3) / (3 * np.exp(3) + 87))
  np.testing.assert_allclose(logps, want, atol=1e-6)


# --- Stops.


def test_stop_finder_across_tokens():
  find = StopFinder(('</search>', '</s'))
  assert [find(t) for t in (b'a <', b'/', b'search')] == [None, None, '</s']
  find = StopFinder(('</search>', 'zzz'))
  parts = (b'<', b'/se', b'</search', b'>\n')
  assert [find(t) for t in parts] == [None, None, None, '</search>']


def scripted(cfg, chain):
  """Weights that follow `chain`, a cycle of distinct ids, greedily.

  The layers add nothing (o and down are 0), so that id chain[i], embedded as
  basis vector i, meets a head whose row i prefers chain[i + 1].
  """
  params = decoder.init_params(cfg, jax.random.key(0), scale=0.0)
  chain = np.asarray(chain)
  rows = np.arange(len(chain))
  params['embed'] = params['embed'].at[chain, rows].set(1.0)
  params['head'] = params['head'].at[rows, np.roll(chain, -1)].set(1.0)
  return params


def test_stops_inside_merged_tokens_of_qwen(data_dir):
  """`>` merges with what follows; the ids stay exactly what was sampled."""
  path = data_dir / 'qwen_tokenizer'
  if not path.exists():
    pytest.skip(f'no {path}')
  tok = tokenizer.load(path)
  cfg = decoder.DecoderConfig(tok.vocab_size, 8, 1, 1, 1, 8, 8, tied=False)
  engine = make_engine(params=scripted(cfg, [0, 1]), cfg=cfg, tokenizer=tok)
  for i, tail in enumerate(('\n', '\n\n', '.', '</')):
    ids = tok.encode(f'<search>who</search>{tail}')
    who = tok.encode('who')[0]
    close = ids[ids.index(who) + 1 :]
    assert tok.token_bytes(close[-1]) == f'>{tail}'.encode()  # it did merge
    asyncio.run(load(engine, scripted(cfg, [who, *close]), i))
    done = asyncio.run(
      once(
        engine,
        ids[: ids.index(who) + 1],
        Sampling(
          max_tokens=20, temperature=0.0, stops=('</search>', '</answer>')
        ),
      )
    )
    assert done.stop == '</search>'
    assert done.ids.tolist() == close
  assert engine.stats()['discarded_tokens'] > 0  # the chunk had run on


# --- Slots: shared prefixes, eviction, no deadlock.


def test_a_group_prefills_its_prompt_once():
  engine = make_engine()
  start = prompt(engine, 21)

  async def main():
    first = engine.open(start)
    handles = [engine.fork(first) for _ in range(5)]
    handles += [engine.open(start) for _ in range(4)]
    out = await asyncio.gather(
      *[
        engine.generate(h, Sampling(max_tokens=5, seed=i))
        for i, h in enumerate(handles)
      ]
    )
    for h in (first, *handles):
      engine.close(h)
    return out

  group = asyncio.run(main())
  stats = engine.stats()
  assert stats['prefilled_tokens'] == 20
  assert stats['prefix_hits'] == 8 and stats['prefix_tokens'] == 160
  assert stats['recomputed_tokens'] == 0
  alone = asyncio.run(once(engine, start.ids, Sampling(max_tokens=5, seed=7)))
  assert bits(alone) == bits(group[7])


async def twin(engine, i):
  """Three turns that several trajectories begin alike; returns every bit."""
  rng, handle = np.random.default_rng(i), engine.open(prompt(engine, 8))
  out = []
  for _ in range(3):
    # Greedy: samples differ where the tokens before them do.
    done = await engine.generate(
      handle, Sampling(max_tokens=6, temperature=0.0, limit=64)
    )
    out.append(bits(done))
    engine.truncate(handle, len(handle) - int(rng.random() < 0.3))
    # One of two texts, which differ in their first token.
    engine.append(handle, [rng.integers(2), *range(1, 5 + rng.integers(2))])
    if rng.random() < 0.3:  # before anything of it is prefilled
      parent, handle = handle, engine.fork(handle)
      engine.close(parent)
    if rng.random() < 0.3:  # within what was appended, perhaps
      # A truncated turn: what is appended now is another prefill.
      await engine.generate(handle, Sampling(max_tokens=1, limit=64))
      engine.truncate(handle, len(handle) - 3)
      engine.append(handle, [3, 4])
    await asyncio.sleep(0.001 * rng.integers(3))
  engine.close(handle)
  return out


@pytest.mark.long
def test_what_two_samples_are_given_alike_is_computed_once(monkeypatch):
  monkeypatch.setattr(device, 'PIECE', 16)
  count = 24
  engine = make_engine(slots=6)

  async def main(order):
    found = await asyncio.gather(*[twin(engine, i) for i in order])
    return dict(zip(order, found))

  want = {}
  for i in range(count):
    want |= asyncio.run(main([i]))
  alone = engine.stats()
  for order in (range(count), range(count)[::-1]):
    assert asyncio.run(asyncio.wait_for(main(order), 300)) == want
  stats = engine.stats()
  computed = (stats['prefilled_tokens'] - alone['prefilled_tokens']) / 2
  assert computed < 0.7 * alone['prefilled_tokens']
  assert stats['evictions'] > 0 and stats['recomputed_tokens'] == 0


async def computed_of(engine, *handles):
  """Tokens that are prefilled where each of them is given the same three."""
  before = engine.stats()['prefilled_tokens']
  for handle in handles:
    engine.append(handle, [7, 8, 9])
    await engine.generate(handle, Sampling(max_tokens=1))
  return engine.stats()['prefilled_tokens'] - before


def test_what_was_sampled_is_not_taken_for_what_was_given(engine):
  """Equal ids, of which one handle sampled two that the other was given."""
  start, given = prompt(engine, 8), [1, 2, 3, 4, 5, 6]

  async def cut(handle, ids, keep, n):
    """Prefills ids, goes back to the first `keep` of them, samples n."""
    whole = len(handle) + keep
    engine.append(handle, ids)
    for tokens in (1, n):
      sampling = Sampling(max_tokens=tokens, temperature=0.0)
      done = await engine.generate(handle, sampling)
      if tokens == 1:
        engine.truncate(handle, whole)
    return done.ids.tolist()

  async def main():
    one, two = engine.open(start), engine.open(start)
    sampled = await cut(one, given, 3, 4)
    await cut(two, [*given[:3], *sampled[:2], 6], 5, 2)
    assert one.ids == two.ids
    computed = await computed_of(engine, one, two)
    engine.close(one)
    engine.close(two)
    return computed

  assert asyncio.run(main()) == 6  # three for each


def test_a_fork_of_what_was_given_is_not_taken_for_what_was_sampled(engine):
  start, greedy = prompt(engine, 8), {'temperature': 0.0}

  async def main():
    one, given = engine.open(start), engine.open(start)
    done = await engine.generate(one, Sampling(max_tokens=3, **greedy))
    engine.append(given, done.ids[:2])
    await engine.generate(given, Sampling(max_tokens=1, **greedy))
    two = engine.fork(given)
    assert one.ids == two.ids
    computed = await computed_of(engine, one, two)
    for handle in (one, given, two):
      engine.close(handle)
    return computed

  assert asyncio.run(main()) == 6  # three for each


async def searching(engine, i, search, limit=0):
  """Three turns with a search between them; returns every bit of it."""
  handle = engine.open(prompt(engine, 8, seed=i // 2))
  out = []
  for turn in range(3):
    done = await engine.generate(
      handle, Sampling(max_tokens=4 + (i + turn) % 5, seed=i, limit=limit)
    )
    out.append(bits(done))
    engine.append(handle, await search(engine, i, turn))
  engine.close(handle)
  return out


async def quick(engine, i, turn):
  await asyncio.sleep(0.001 * ((7 * i + 3 * turn) % 5))
  return [1 + i, 2 + turn, 3]


async def nested(engine, i, turn):
  """A search that asks the same engine, while its caller holds a slot."""
  done = await once(engine, [1 + i, 2 + turn], Sampling(max_tokens=3, seed=i))
  return done.ids.tolist()


@pytest.mark.parametrize('search', [quick, nested])
def test_evictions_do_not_show_and_nobody_waits_for_ever(search, by_rows):
  async def main(engine, count, order):
    running = {
      i: asyncio.create_task(searching(engine, i, search)) for i in order
    }
    out = await asyncio.wait_for(asyncio.gather(*running.values()), 300)
    return dict(zip(running, out))

  engine = make_engine(slots=4, **by_rows)
  # Alone, each trajectory keeps its slot.
  want = {i: asyncio.run(main(engine, 1, [i]))[i] for i in range(11)}
  assert engine.stats()['evictions'] == 0
  for order in (range(11), range(10, -1, -1)):
    assert asyncio.run(main(engine, 11, order)) == want
  stats = engine.stats()
  assert stats['evictions'] > 0 and stats['restored_tokens'] > 0
  assert stats['recomputed_tokens'] == 0


@pytest.mark.parametrize('search', [quick, nested])
@pytest.mark.parametrize('slots, paused', [(1, 0), (2, 3)])
def test_what_begins_fits_into_slots_and_host_memory(
  search, slots, paused, monkeypatch
):
  """Nobody waits for ever, whatever the searches of the others wait for."""
  monkeypatch.setattr(device, 'PIECE', 16)
  limit, size, own = 48, 48, 64  # tokens; `own` of a call that others wait for
  budget = (paused * size + own) * device.bytes_per_token(CFG)
  engine = make_engine(slots=slots, host_gib=budget / 2**30)
  assert engine.capacity(limit) == slots + paused
  away, most = set(), [0]

  async def counted(engine, i, turn):
    away.add(i)
    most[0] = max(most[0], len(away))
    try:
      return await search(engine, i, turn)
    finally:
      away.discard(i)

  async def main(engine, limit, order):
    found = await asyncio.wait_for(
      asyncio.gather(*[searching(engine, i, counted, limit) for i in order]),
      300,
    )
    return dict(zip(order, found))

  want, ample = {}, make_engine(slots=slots)
  for i in range(9):
    want |= asyncio.run(main(ample, 0, [i]))
  most[0] = 0
  for order in (range(9), range(8, -1, -1)):
    assert asyncio.run(main(engine, limit, order)) == want
  stats = engine.stats()
  assert stats['host_bytes'] <= budget and stats['recomputed_tokens'] == 0
  assert 0 < most[0] <= slots + paused
  assert (stats['evictions'] > 0) == (paused > 0 or search is nested)
  assert engine._table._sizes == {} and engine._table._paused == 0


async def branching(engine, i, slots, synced):
  """Two branches of a prompt that four share; returns every bit of them."""
  limit = 48
  parent = engine.open(prompt(engine, 5 + i // 4, seed=i // 4))

  def call(handle, n):
    return engine.generate(handle, Sampling(max_tokens=n, seed=i, limit=limit))

  async def sample(handle, n):
    async with slots:
      done = await call(handle, n)
    return bits(done)

  out = [await sample(parent, 3 + i % 5)]
  engine.append(parent, [1 + i, 2, 3])
  child = engine.fork(parent)
  engine.truncate(child, len(child) - 1 - i % 4)
  whole = len(parent)
  async with slots:  # a call of the engine in any case, which may show
    lost = asyncio.create_task(call(parent, 9))
    await asyncio.sleep(0.001 * (i % 7))
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
  engine.truncate(parent, whole)
  for _ in range(2):
    out += await asyncio.gather(sample(parent, 3), sample(child, 2 + i % 4))
    await synced.wait()
  engine.close(parent)
  engine.close(child)
  return out


def test_neither_lane_nor_order_shows(monkeypatch, by_rows):
  """64 slots on a CPU are two lanes."""
  monkeypatch.setattr(device, 'PIECE', 16)
  count, paused = 56, 56
  budget = (paused * 48 + 80) * device.bytes_per_token(CFG)

  async def main(at_once, order):
    engine = make_engine(slots=64, host_gib=budget / 2**30, **by_rows)
    slots, synced = asyncio.Semaphore(at_once), asyncio.Barrier(count + 1)
    running = [
      asyncio.create_task(branching(engine, i, slots, synced)) for i in order
    ]
    await synced.wait()
    await load(engine, make_params(1), 1)
    await synced.wait()
    found = dict(zip(order, await asyncio.gather(*running)))
    assert engine._device._lanes == 2 and engine._table._sizes == {}
    return found, engine.stats()['evictions']

  want, _ = asyncio.run(main(1, range(count)))
  evictions = 0
  for at_once, order in ((7, range(count)), (count, range(count)[::-1])):
    found, n = asyncio.run(asyncio.wait_for(main(at_once, order), 300))
    assert found == want
    evictions += n
  assert evictions > 0


@pytest.mark.parametrize('count', [1, 3, 9, 17])
def test_what_is_not_exact_costs_what_is_active(count, monkeypatch):
  """The same tokens, within rounding, from calls of fewer rows."""
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': 16})
  engines = [
    make_engine(slots=24, prefill_rows=8, exact=exact)
    for exact in (True, False)
  ]
  sizes = {'decode': [], 'fresh': [], 'extend': []}
  programs = engines[1]._device._programs

  def watched(name, real):
    def call(weights, caches, *args):
      rows = args[0]['token'] if name == 'decode' else args[0]
      sizes[name].append(len(rows))
      return real(weights, caches, *args)

    return call

  names = {n: watched(n, getattr(programs, n)) for n in sizes}
  spied = types.SimpleNamespace(**names)
  monkeypatch.setattr(engines[1]._device, '_programs', spied)

  async def one(engine, i):
    handle, out = engine.open(prompt(engine, 9, seed=i)), []
    for _ in range(2):
      sampling = Sampling(max_tokens=5 + i % 3, temperature=0.0)
      out.append(await engine.generate(handle, sampling))
      engine.append(handle, range(4))
    engine.close(handle)
    return out

  async def everyone(engine):
    return await asyncio.gather(*[one(engine, i) for i in range(count)])

  exact, other = (asyncio.run(everyone(engine)) for engine in engines)
  for a, b in zip(sum(exact, []), sum(other, []), strict=True):
    assert a.ids.tolist() == b.ids.tolist()
    np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)
  # 24 slots are halved, and the 8 rows of a prefill are quartered.
  assert max(sizes['decode']) == {1: 4, 3: 4, 9: 12, 17: 24}[count]
  prefills = {1: {1}, 3: {8}, 9: {8, 1}, 17: {8, 1}}[count]
  assert {*sizes['fresh']} == {*sizes['extend']} == prefills


def test_what_is_not_exact_is_refused_on_a_mesh():
  mesh = sharding.make_mesh(devices=jax.devices()[:2])
  with pytest.raises(EngineError, match='engine.exact=False is for one CPU'):
    make_engine(mesh=mesh, exact=False)


def test_host_memory_for_less_than_one_sequence_is_refused():
  with pytest.raises(EngineError, match='host_gib=1e-06'):
    make_engine(host_gib=1e-6)


@pytest.mark.parametrize('length, pieces', [(15, 1), (16, 1), (17, 2)])
def test_an_eviction_moves_what_is_cached_and_no_more(
  length, pieces, monkeypatch
):
  monkeypatch.setattr(device, 'PIECE', 16)
  engine = make_engine(slots=1)

  async def main():
    handle = engine.open(prompt(engine, length))
    # The last token of a sequence is not in the cache.
    await engine.generate(handle, Sampling(max_tokens=1))
    await once(engine, [1, 2], Sampling(max_tokens=1))
    moved = engine.stats()['host_bytes']
    engine.close(handle)
    return moved

  moved = asyncio.run(main())
  assert moved == pieces * 16 * device.bytes_per_token(CFG)


def test_paused_sequences_leave_host_memory_with_their_weights():
  engine = make_engine(slots=1)

  async def main():
    handle = engine.open(prompt(engine))
    await engine.generate(handle, Sampling(max_tokens=2))
    await once(engine, [1, 2], Sampling(max_tokens=1))
    assert handle.rows.box is not None
    await load(engine, make_params(1), 1)
    assert handle.rows is None and engine._table._paused == 0
    engine.close(handle)

  asyncio.run(main())


def test_probes_come_first_and_earlier_steps_before_later_ones():
  engine, order = make_engine(), []

  async def call(step, **more):
    await once(
      engine, [1, 2], Sampling(max_tokens=6, limit=12, priority=step, **more)
    )
    order.append(step)

  async def main():
    calls = [asyncio.create_task(call(5)) for _ in range(400)]
    await until(lambda: engine._active)
    calls += [asyncio.create_task(call(4)) for _ in range(40)]
    calls.append(asyncio.create_task(call(9, probe=True)))
    await asyncio.sleep(0)
    begun = len(order) + len(engine._active)
    await asyncio.wait_for(asyncio.gather(*calls), 300)
    return begun

  # Beside the last of them, other slots may decode what comes next.
  begun = asyncio.run(main()) + 3
  assert begun < 40 and len(order) == 441
  assert order.index(9) <= begun
  last = len(order) - order[::-1].index(4)
  assert order[:last].count(5) <= begun


def test_a_probe_is_served_where_calls_hold_all_room(monkeypatch):
  """Or a sync that a call waits for would wait for that call."""
  monkeypatch.setattr(device, 'PIECE', 16)
  size = device.bytes_per_token(CFG) * 64 / 2**30
  engine = make_engine(slots=2, max_len=64, host_gib=2 * size)

  async def main():
    for i in range(engine.capacity(64)):
      await engine.generate(
        engine.open(prompt(engine, 3, i)),
        Sampling(max_tokens=2, seed=i, limit=64),
      )
    call = asyncio.create_task(
      once(engine, [5, 6], Sampling(max_tokens=60, seed=9))
    )
    await until(lambda: engine._active)
    await engine.sync(WeightsUpdate(make_params(1), 1))
    assert not call.done()
    await asyncio.wait_for(
      once(engine, [7, 8], Sampling(max_tokens=2, temperature=0.0, probe=True)),
      60,
    )
    await engine.resume()
    await asyncio.wait_for(call, 60)

  asyncio.run(main())


def test_what_has_begun_goes_on_before_anything_begins(monkeypatch):
  """With room for one: it comes back from its search, and the others wait."""
  monkeypatch.setattr(device, 'PIECE', 16)
  tokens = 64 * device.bytes_per_token(CFG)
  engine, order = make_engine(slots=1, host_gib=tokens / 2**30), []

  async def play(step):
    handle = engine.open(prompt(engine, 8, seed=step))
    for turn in range(2):
      await engine.generate(
        handle, Sampling(max_tokens=4, limit=32, priority=step)
      )
      order.append((step, turn))
      await asyncio.sleep(0.01)
    engine.close(handle)

  async def main():
    await asyncio.gather(*[play(step) for step in (2, 1, 0)])

  asyncio.run(asyncio.wait_for(main(), 300))
  first = order[0][0]
  rest = sorted({0, 1, 2} - {first})
  assert order == [(s, turn) for s in (first, *rest) for turn in (0, 1)]


def test_one_slot_is_enough():
  """Parent, fork and a stranger take turns in a single slot."""
  engine = make_engine(slots=1)

  async def main():
    start = prompt(engine)
    parent, other = engine.open(start), engine.open(prompt(engine, 4, seed=9))
    sampling = Sampling(max_tokens=5, temperature=0.0)
    first = await engine.generate(parent, sampling)
    child = engine.fork(parent)
    out = await asyncio.gather(
      *[engine.generate(h, sampling) for h in (child, other, parent)]
    )
    assert bits(out[0]) == bits(out[2])
    whole = [*start.ids, *first.ids.tolist()]
    fresh = await once(engine, whole, sampling)
    assert fresh.ids.tolist() == out[0].ids.tolist()
    for h in (parent, child, other):
      engine.close(h)

  asyncio.run(asyncio.wait_for(main(), 300))
  assert engine._table._held == {} and len(engine._table._free) == 1


@pytest.mark.parametrize('length', [1, 2, 63])
def test_prompts_of_every_length(length):
  engine = make_engine(max_len=64)
  ids = prompt(engine, length).ids
  done = asyncio.run(once(engine, ids, Sampling(max_tokens=1, seed=2)))
  want = full_logps(ids)[-1, done.ids[0]]
  np.testing.assert_allclose(done.logps[0], want, atol=1e-5)


def test_prompts_longer_than_one_prefill(monkeypatch):
  monkeypatch.setattr(decode, 'MAX_WIDTH', 16)
  engine = make_engine()
  ids = prompt(engine, 50).ids
  done = asyncio.run(once(engine, ids, Sampling(max_tokens=3, seed=2)))
  want = full_logps([*ids, *done.ids.tolist()])
  np.testing.assert_allclose(
    done.logps, want[np.arange(49, 52), done.ids], atol=1e-5
  )


# --- The driver.


def slow(monkeypatch, engine, seconds=0.02):
  """Makes each chunk take a while."""
  real = engine._device.decode

  def decode_slowly(state):
    time.sleep(seconds)
    return real(state)

  monkeypatch.setattr(engine._device, 'decode', decode_slowly)


def test_a_cancelled_call_leaves_the_handle_as_it_was(engine, monkeypatch):
  slow(monkeypatch, engine)

  async def main():
    start = prompt(engine)
    handle = engine.open(start)
    task = asyncio.create_task(
      engine.generate(handle, Sampling(max_tokens=50, seed=1))
    )
    await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match='generating'):
      engine.append(handle, [1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    assert len(handle) == len(start.ids)
    again = await engine.generate(handle, Sampling(max_tokens=9, seed=1))
    fresh = await once(engine, start.ids, Sampling(max_tokens=9, seed=1))
    assert again.ids.tolist() == fresh.ids.tolist()
    engine.close(handle)

  asyncio.run(main())
  assert engine._active == {} and engine._waiting == []


def test_a_run_that_ends_in_the_middle_harms_no_later_one(monkeypatch):
  engine = make_engine()
  slow(monkeypatch, engine)
  handle = engine.open(prompt(engine))

  async def leave():
    asyncio.ensure_future(
      engine.generate(handle, Sampling(max_tokens=50, seed=1))
    )
    await asyncio.sleep(0.05)

  asyncio.run(leave())  # cancels the call and the driver
  sampling = Sampling(max_tokens=9, seed=1)
  again = asyncio.run(engine.generate(handle, sampling))
  fresh = asyncio.run(once(engine, handle.ids[:7], sampling))
  assert again.ids.tolist() == fresh.ids.tolist()


def test_a_fork_after_new_weights_has_the_room_of_its_parent():
  """A tree holds all its handles: one that waits for room waits for ever."""
  engine = make_engine()
  handle = engine.open(prompt(engine))
  asyncio.run(engine.generate(handle, Sampling(max_tokens=3, seed=1)))
  asyncio.run(load(engine, make_params(1), 1))
  sizes, child = engine._table._sizes, engine.fork(handle)
  assert sizes[child] == sizes[handle] > 0


def test_a_chunk_begins_when_those_who_come_back_at_once_are_back(monkeypatch):
  """Two callers of 4 turns, of a chunk each, that pause in between.

  The first pause tells the engine that they are soon back: the second caller is
  one chunk late there, and then their turns are played together.
  """
  engine = make_engine(slots=2, chunk=4)
  slow(monkeypatch, engine, 1.0)

  async def caller(n):
    handle = engine.open(prompt(engine, seed=n))
    for turn in range(4):
      await engine.generate(handle, Sampling(max_tokens=4, seed=turn))
      await asyncio.sleep(0.02 * (n + 1))
    engine.close(handle)

  async def main():
    await asyncio.gather(caller(0), caller(1))

  asyncio.run(main())
  chunks = engine.stats()['decode_steps'] / 4
  assert chunks == 1 + 4  # 1 + 3 + 3 if each slot waits for its next chunk


def test_no_nan_of_old_weights_is_left_in_the_caches():
  """Masked positions have weight 0, but 0 x NaN is NaN."""
  engine = make_engine()
  ask = lambda e: once(e, [1, 2, 3], Sampling(max_tokens=4, seed=5))
  want = asyncio.run(ask(make_engine()))
  made = engine._device
  made._caches = jax.tree.map(lambda x: x * np.nan, made._caches)
  asyncio.run(load(engine, make_params(), 1))
  found = asyncio.run(ask(engine))
  np.testing.assert_array_equal(found.logps, want.logps)
  assert found.ids.tolist() == want.ids.tolist()


def test_logps_that_are_not_finite_are_refused():
  engine = make_engine()
  asyncio.run(
    load(engine, jax.tree.map(lambda x: x * np.nan, make_params()), 1)
  )
  with pytest.raises(EngineError, match='config.engine.dtype'):
    asyncio.run(once(engine, [1, 2, 3], Sampling(max_tokens=4)))


def test_a_device_failure_reaches_every_caller(monkeypatch):
  engine = make_engine()

  def broken(state):
    raise RuntimeError('out of memory')

  async def main():
    calls = [once(engine, [i + 1, 2], Sampling(max_tokens=3)) for i in range(5)]
    return await asyncio.gather(*calls, return_exceptions=True)

  with monkeypatch.context() as m:
    m.setattr(engine._device, 'decode', broken)
    for error in asyncio.run(asyncio.wait_for(main(), 300)):
      assert isinstance(error, EngineError)
      assert 'out of memory' in str(error)
  for done in asyncio.run(main()):  # and it works again
    assert len(done.ids) == 3


def test_after_a_failure_in_one_lane_none_runs(monkeypatch):
  engine = make_engine(slots=64)
  made, ended = engine._device, []
  decode = made._programs.decode

  def broken(weights, caches, state):
    if caches is made._caches[0]:
      raise RuntimeError('out of memory')
    time.sleep(0.2)
    out = decode(weights, caches, state)
    ended.append(1)
    return out

  programs = types.SimpleNamespace(**vars(made._programs) | {'decode': broken})
  monkeypatch.setattr(made, '_programs', programs)
  with pytest.raises(EngineError, match='out of memory'):
    asyncio.run(once(engine, [1, 2], Sampling(max_tokens=3)))
  assert made._lanes == 2 and ended == [1]


def test_the_loop_stays_live_while_decoding(engine, monkeypatch):
  slow(monkeypatch, engine)

  async def main():
    ticks = 0

    async def tick():
      nonlocal ticks
      while True:
        await asyncio.sleep(0)
        ticks += 1

    ticker = asyncio.create_task(tick())
    await once(engine, [1, 2, 3], Sampling(max_tokens=40))
    ticker.cancel()
    return ticks

  assert asyncio.run(main()) > 100


# --- Weights.


def test_versions_after_a_sync_in_the_middle():
  engine = make_engine()
  old, new = make_params(0), make_params(1)
  start = prompt(engine)

  async def main():
    paused = engine.open(prompt(engine, 9, seed=3))
    first = await engine.generate(paused, Sampling(max_tokens=4, seed=1))
    handle = engine.open(start)
    task = asyncio.create_task(
      engine.generate(handle, Sampling(max_tokens=50, seed=1))
    )
    while engine.stats()['generated_tokens'] < 4 + 12:
      await asyncio.sleep(0)
    await engine.sync(WeightsUpdate(new, 7))
    assert engine.version == 7
    written = engine.stats()['generated_tokens']
    # Held: a probe is served, and nobody else.
    probe = await once(engine, start.ids, Sampling(max_tokens=3, probe=True))
    assert set(probe.versions.tolist()) == {7}
    assert engine.stats()['generated_tokens'] == written + 3
    assert not task.done()
    await engine.resume()
    done = await task
    more = await engine.generate(paused, Sampling(max_tokens=4, seed=1))
    ids = paused.ids
    engine.close(handle)
    engine.close(paused)
    return first, done, more, ids

  first, done, more, ids = asyncio.run(main())
  assert set(first.versions.tolist()) == {0}
  assert set(more.versions.tolist()) == {7}
  n = int((done.versions == 0).sum())
  assert 12 <= n < 50 and (np.diff(done.versions) >= 0).all()
  # Each token has the log-prob of the weights that its version names, given
  # a cache that is wholly theirs.
  whole = [*start.ids, *done.ids.tolist()]
  at = np.arange(6, 6 + 50)
  want = np.where(
    np.arange(50) < n,
    full_logps(whole, params=old)[at, done.ids],
    full_logps(whole, params=new)[at, done.ids],
  )
  np.testing.assert_allclose(done.logps, want, atol=1e-5)
  at = np.arange(len(ids) - 5, len(ids) - 1)
  np.testing.assert_allclose(
    more.logps, full_logps(ids, params=new)[at, more.ids], atol=1e-5
  )
  assert engine.stats()['recomputed_tokens'] > 0


def test_weights_of_another_model_are_refused_whole():
  engine = make_engine()
  before = engine.checksums()
  params = make_params(1)
  for change, match in (
    (lambda p: p['layers'].pop('q_bias'), "'layers/q_bias' has shape None"),
    (lambda p: p.update(head=p['embed']), "'head' has shape .*for None"),
    (lambda p: p.update(embed=p['embed'].T), "'embed'.*\\(32, 90\\)"),
  ):
    bad = {**params, 'layers': dict(params['layers'])}
    change(bad)
    with pytest.raises(SyncError, match=match):
      asyncio.run(engine.sync(WeightsUpdate(bad, 1)))
  assert engine.checksums() == before and engine.version == 0


def test_the_engine_owns_its_weights():
  params = make_params()
  engine = make_engine(params=params)
  want = asyncio.run(once(engine, [1, 2], Sampling(max_tokens=4)))
  for leaf in jax.tree.leaves(params):
    leaf.delete()
  got = asyncio.run(once(engine, [1, 2], Sampling(max_tokens=4)))
  assert got.ids.tolist() == want.ids.tolist()


# --- Compilation.


@pytest.mark.parametrize(
  'exact', [True, pytest.param(False, marks=pytest.mark.long)]
)
def test_nothing_compiles_after_warmup(exact, monkeypatch):
  monkeypatch.setattr(device, 'PIECE', 16)
  # Of few slots, or there would be one size.
  engine = make_engine(slots=4 if exact else 6, exact=exact)
  engine.warmup()
  weights = make_params(2)
  asyncio.run(load(engine, weights, 0))  # as a run does before its first step
  compiled = []

  def listen(name, *_, **about):
    if name == '/jax/core/compile/backend_compile_duration':
      compiled.append(about)

  jax.monitoring.register_event_duration_secs_listener(listen)
  rng = np.random.default_rng(0)

  async def trajectory(seed):
    handle = engine.open(
      prompt(engine, int(rng.integers(1, 28)), seed=int(rng.integers(4)))
    )
    for _ in range(2):
      await engine.generate(
        handle,
        Sampling(
          max_tokens=int(rng.integers(1, 9)),
          seed=seed,
          temperature=float(rng.choice([0.0, 0.5, 1.0])),
          top_p=float(rng.choice([0.9, 1.0])),
          top_k=int(rng.choice([0, 5])),
          stops=('ab',),
          stop_ids=(3, 4),
        ),
      )
      engine.append(handle, rng.integers(0, 90, rng.integers(1, 5)))
      await asyncio.sleep(0.01)  # others take its slot
    await engine.logps(handle.ids)
    engine.close(handle)

  async def step(n):
    await asyncio.gather(*[trajectory(10 * n + i) for i in range(7)])
    # Which trajectories find their prompt in a cache depends on time; a fork
    # always does.
    handle = engine.open(prompt(engine, 27))
    await engine.generate(handle, Sampling(max_tokens=3, seed=0))
    forks = [engine.fork(handle) for _ in range(2)]
    # One before its parent goes on, and one after it is gone.
    for one in (forks[0], handle, forks[1]):
      await engine.generate(one, Sampling(max_tokens=3, seed=1))
      engine.close(one)

  try:
    for n in range(20):
      asyncio.run(step(n))
      if n % 5 == 4:
        asyncio.run(load(engine, weights, n))
    assert compiled == []
    stats = engine.stats()
    assert stats['restored_tokens'] > 0 and stats['prefix_hits'] > 0
    jax.jit(lambda x: x + n)(1.0)  # the listener does listen
    assert compiled
  finally:
    jax.monitoring.clear_event_listeners()
