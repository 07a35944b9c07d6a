"""Tokens/s of the in-process engine against transformers' generate, on CPU.

  python -m experiments.benchmarks.sampler --out=sampler.json

64 distinct random prompts of 64 tokens, 64 new tokens each, sampled at
temperature 1 with log-probs, prefill included (all prompts in one call, on
both sides), Qwen2 layout in float32. Both sides make a batch in turns; the peer
(`torch_peers.generate`) runs with 1 and with 2 threads, and the better median
counts. Tokens/s is new tokens by the median time.

`first` is a batch of one new token each, which is prefill; the rest of `jax` is
decoding (`decode`). `bare` is one loop of 64 steps over weights and caches of
the same sizes, with the matrix products only: no prefill, positions, writes to
the caches, draw, or host. It runs all rows in one program, where the sampler
may use two lanes (`engines.jax.device.lanes`). `of_bare` is tokens/s of
decoding divided by those of `bare`; `host` is the share of a batch in which the
device is idle. `quarter` is decoding at a quarter of a longer cache.
"""

import asyncio
from collections.abc import Callable, Coroutine
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from experiments.benchmarks import harness, models
from searchrl_jax import schema as config_lib
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import caches as kv
from searchrl_jax.engines.jax import decode
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.models import decoder, products
from searchrl_jax.types import Prompt

ROWS, PROMPT, NEW = 64, 64, 64
BAR, BARE_BAR = 2.5, 0.9
LONG = 1024  # the cache of `quarter`
CHUNK = 16  # tokens between looks of the host
WARM = 2  # batches: compilation, allocator


class Ids:
  """No stop strings are used, so ids need no text."""

  vocab_size = 2048

  def token_bytes(self, token_id: int) -> bytes:
    return b''


def batch(
  engine, rng: np.random.Generator, prompt: int = PROMPT, new: int = NEW
) -> Coroutine:
  """Draws prompts; returns what samples for them through the contract."""
  prompts = rng.integers(Ids.vocab_size, size=(ROWS, prompt)).tolist()
  seeds = rng.integers(2**31, size=ROWS).tolist()

  async def one(ids, seed):
    handle = engine.open(Prompt(tuple(ids)))
    done = await engine.generate(handle, Sampling(max_tokens=new, seed=seed))
    engine.close(handle)
    assert len(done.logps) == new

  async def everyone():
    await asyncio.gather(*map(one, prompts, seeds))

  return everyone()


class Ours:
  """The seconds of one batch."""

  def __init__(
    self,
    cfg: decoder.DecoderConfig,
    prompt: int = PROMPT,
    new: int = NEW,
    max_len: int = PROMPT + NEW,
  ):
    self._sizes = prompt, new
    config = config_lib.base().engine
    config.slots, config.max_len, config.chunk = ROWS, max_len, CHUNK
    config.prefill_rows = ROWS
    params = decoder.init_params(cfg, jax.random.key(0))
    self._engine = JaxEngine(cfg, params, Ids(), config)
    self._rng = np.random.default_rng(0)
    self.host = []  # seconds of each batch outside the device's calls

  def __call__(self) -> float:
    work = batch(self._engine, self._rng, *self._sizes)
    before, start = self._device(), time.perf_counter()
    asyncio.run(work)
    seconds = time.perf_counter() - start
    self.host.append(seconds - (self._device() - before))
    return seconds

  def _device(self) -> float:
    stats = self._engine.stats()
    return stats['seconds_prefill'] + stats['seconds_decode']


def bare(cfg: decoder.DecoderConfig) -> Callable[[], float]:
  """Times the products of matrices of NEW steps, and little else."""
  weights = decode.load(decoder.init_params(cfg, jax.random.key(0)), cfg)
  caches = kv.make(cfg, ROWS, PROMPT + NEW)
  last = np.full((ROWS, 1), PROMPT + NEW - 1)
  x = jnp.zeros((ROWS, 1, cfg.d_model))

  @jax.jit
  def loop(weights, caches, x):
    def step(_, x):
      for p, cache in zip(weights['layers'], caches):
        q, k, v = (products.dense(x, p[name]) for name in 'qkv')
        o = kv.attend(cfg, q, cache, last)
        o = o + jnp.repeat(k + v, cfg.n_heads // cfg.n_kv_heads, 2)
        x = x + products.dense(o, p['o'], 2)
        h = products.dense(x, p['gate']) * products.dense(x, p['up'])
        x = x + products.dense(h, p['down'])
      return x + decoder.logits(weights, cfg, x)[..., : cfg.d_model]

    return jax.lax.fori_loop(0, NEW, step, x)

  run = lambda: loop(weights, caches, x).block_until_ready()
  return lambda: harness.seconds(run)


def measure(size: str) -> list[dict]:
  cfg = models.config(size)
  fields = dict(model=models.SIZES[size], rows=ROWS, prompt=PROMPT, new=NEW)
  long = dict(prompt=(LONG - 2 * NEW) // 4, max_len=LONG)
  with harness.peers('generate', **fields) as peers:
    ours = Ours(cfg)
    sides = {
      'jax': ours,
      'first': Ours(cfg, new=1),
      'bare': bare(cfg),
      'quarter': Ours(cfg, **long),
      'quarter_first': Ours(cfg, **long, new=1),
      **peers,
    }
    seconds = harness.turns(sides, warm=WARM)
    about = peers['torch_1'].about
  taken = {k: statistics.median(v) for k, v in seconds.items()}
  speed = {k: ROWS * NEW / taken[k] for k in ('jax', 'bare', *peers)}
  for name, whole, first in (
    ('decode', 'jax', 'first'),
    ('quarter', 'quarter', 'quarter_first'),
  ):
    speed[name] = ROWS * (NEW - 1) / (taken[whole] - taken[first])
  row = {
    'case': size,
    'parameters': cfg.n_params,
    'peer_parameters': about['parameters'],
    **{f'{k}_tokens_per_s': v for k, v in speed.items()},
    'ratio': speed['jax'] / speed[harness.better(speed)],
    'of_bare': speed['decode'] / speed['bare'],
    'host': statistics.median(
      host / total
      for host, total in zip(ours.host[WARM:], seconds['jax'], strict=True)
    ),
    'model': models.SIZES[size],
    'seconds': seconds,
    'peer': about,
  }
  return [row]


def bars(rows) -> list[dict]:
  kinds = ('sampler', 'ratio', BAR), ('sampler_bare', 'of_bare', BARE_BAR)
  return [
    common.bar(f'{name}_{r["case"]}', r[field], bar)
    for name, field, bar in kinds
    for r in rows
  ]


if __name__ == '__main__':
  harness.run('sampler', measure, bars, cases=models.SMALL, reps=5, peer=True)
