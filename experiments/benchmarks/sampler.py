"""Tokens/s of the in-process sampler against transformers' generate, on CPU.

  python -m experiments.benchmarks.sampler --out=sampler.json

64 distinct random prompts of 64 tokens, 64 new tokens each, sampled at
temperature 1 with log-probs, prefill included (all prompts in one call, on
both sides), Qwen2 layout in float32. Both
sides make a batch in turns; the peer (`sampler_torch.py`, a process of its
own) runs with 1 and with 2 threads, and the better median counts. Tokens/s is
new tokens by the median time.

`bare` is one loop of 64 steps over weights and caches of the same sizes, with
the matrix products only: no prefill, positions, writes to the caches, draw, or
host. It runs all rows in one program, where the sampler may use two lanes
(`engines.jax.device.lanes`). `of_bare` is the sampler's tokens/s divided by
that of `bare`; `host` is the share of a batch in which the device is idle.
"""

import asyncio
import functools
import json
import pathlib
import statistics
import subprocess
import time

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from searchrl_jax import schema as config_lib
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import caches as kv
from searchrl_jax.engines.jax import decode
from searchrl_jax.engines.jax.sampler import JaxSampler
from searchrl_jax.models import decoder
from searchrl_jax.types import Prompt

ROWS, PROMPT, NEW = 64, 64, 64
BAR = 2.5
CHUNK = 16  # tokens between looks of the host
CASES = {
  '1m': dict(
    vocab_size=2048,
    d_model=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    d_ff=416,
  ),
  '28m': dict(
    vocab_size=2048,
    d_model=512,
    n_layers=8,
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    d_ff=1792,
  ),
}


class Ids:
  """No stop strings are used, so ids need no text."""

  vocab_size = 2048

  def token_bytes(self, token_id: int) -> bytes:
    return b''


class Ours:
  """One batch through the engine's own interface."""

  def __init__(self, case: dict):
    cfg = decoder.DecoderConfig(**case, family='qwen2')
    config = config_lib.base().engine
    config.slots, config.max_len, config.chunk = ROWS, PROMPT + NEW, CHUNK
    config.prefill_rows = ROWS
    params = decoder.init_params(cfg, jax.random.key(0))
    self.parameters = cfg.n_params
    self._engine = JaxSampler(cfg, params, Ids(), config)
    self._rng = np.random.default_rng(0)
    self.host = []  # seconds of each batch outside the device's calls

  def __call__(self) -> float:
    prompts = self._rng.integers(Ids.vocab_size, size=(ROWS, PROMPT)).tolist()
    seeds = self._rng.integers(2**31, size=ROWS).tolist()

    async def one(ids, seed):
      handle = self._engine.open(Prompt(tuple(ids)))
      done = await self._engine.generate(
        handle, Sampling(max_tokens=NEW, seed=seed)
      )
      self._engine.close(handle)
      return len(done.logps)

    async def main():
      return await asyncio.gather(*map(one, prompts, seeds))

    before, start = self._device(), time.perf_counter()
    counts = asyncio.run(main())
    seconds = time.perf_counter() - start
    self.host.append(seconds - (self._device() - before))
    assert counts == [NEW] * ROWS
    return seconds

  def _device(self) -> float:
    stats = self._engine.stats()
    return stats['seconds_prefill'] + stats['seconds_decode']


class Bare:
  """The products of matrices of NEW steps, and little else."""

  def __init__(self, case: dict):
    cfg = decoder.DecoderConfig(**case, family='qwen2')
    weights = decode.load(decoder.init_params(cfg, jax.random.key(0)), cfg)
    caches = kv.make(cfg, ROWS, PROMPT + NEW)
    last = np.full((ROWS, 1), PROMPT + NEW - 1)

    @jax.jit
    def loop(weights, caches, x):
      def step(_, x):
        for p, cache in zip(weights['layers'], caches):
          q, k, v = (decoder.dense(x, p[name]) for name in 'qkv')
          o = kv.attend(cfg, q, *cache, last)
          o = o + jnp.repeat(k + v, cfg.n_heads // cfg.n_kv_heads, 2)
          x = x + decoder.dense(o, p['o'], 2)
          h = decoder.dense(x, p['gate']) * decoder.dense(x, p['up'])
          x = x + decoder.dense(h, p['down'])
        return x + decoder.logits(weights, cfg, x)[..., : cfg.d_model]

      return jax.lax.fori_loop(0, NEW, step, x)

    x = jnp.zeros((ROWS, 1, cfg.d_model))
    self._loop = functools.partial(loop, weights, caches, x)

  def __call__(self) -> float:
    start = time.perf_counter()
    self._loop().block_until_ready()
    return time.perf_counter() - start


class Peer:
  """The other process: one line in, one batch, one line out."""

  def __init__(self, case: dict, threads: int):
    fields = dict(case, rows=ROWS, prompt=PROMPT, new=NEW)
    script = pathlib.Path(__file__).with_name('sampler_torch.py')
    self._process = subprocess.Popen(
      [_PEER.value, str(script), json.dumps(fields), str(threads)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    self.about = self._read()

  def _read(self) -> dict:
    line = self._process.stdout.readline()
    if not line:
      raise RuntimeError(
        f'{_PEER.value} ended with status {self._process.wait()}; its error '
        'stands above'
      )
    return json.loads(line)

  def __call__(self) -> float:
    self._process.stdin.write('go\n')
    self._process.stdin.flush()
    return self._read()['seconds']

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()


def measure(name: str) -> dict:
  case = CASES[name]
  sides = {'jax': Ours(case), 'bare': Bare(case)}
  try:
    for threads in (1, 2):
      sides[f'torch_{threads}'] = Peer(case, threads)
    for side in sides.values():  # compilation, allocator
      side()
      side()
    seconds = common.interleave(sides, _REPS.value)
  finally:
    for side in sides.values():
      if isinstance(side, Peer):
        side.close()
  speed = {k: ROWS * NEW / statistics.median(v) for k, v in seconds.items()}
  return {
    'case': name,
    'parameters': sides['jax'].parameters,
    'peer_parameters': sides['torch_1'].about['parameters'],
    **{f'{k}_tokens_per_s': v for k, v in speed.items()},
    'ratio': speed['jax'] / max(speed['torch_1'], speed['torch_2']),
    'of_bare': speed['jax'] / speed['bare'],
    'host': statistics.median(
      host / total
      for host, total in zip(
        sides['jax'].host[-_REPS.value :], seconds['jax'], strict=True
      )
    ),
    'model': case,
    'seconds': seconds,
    'peer': sides['torch_1'].about,
  }


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if unknown := set(_CASES.value) - set(CASES):
    raise app.UsageError(f'--cases: {sorted(unknown)} not in {list(CASES)}')
  if not pathlib.Path(_PEER.value).exists():
    raise app.UsageError(
      f'--peer_python={_PEER.value} does not exist; `make test-parity` makes '
      '.venv-parity, or name a Python with torch and transformers'
    )
  common.require_idle(allow=_LOAD.value)
  before = common.environment()
  rows = [measure(name) for name in _CASES.value]
  bars = [common.bar(f'sampler_{r["case"]}', r['ratio'], BAR) for r in rows]
  common.report(_OUT.value, 'sampler', rows, bars, before)


if __name__ == '__main__':
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  _LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')
  _REPS = flags.DEFINE_integer('reps', 5, 'Repetitions.', lower_bound=3)
  _CASES = flags.DEFINE_list('cases', ['1m', '28m'], 'Which models.')
  _PEER = flags.DEFINE_string(
    'peer_python',
    '.venv-parity/bin/python',
    'A Python with torch and transformers (make test-parity makes it).',
  )
  app.run(main)
