"""The in-process sampler against a vLLM server on CPU, through one interface.

  make sidecar
  python -m experiments.benchmarks.engines --out=engines.json

Both are engines of the contract (engines/core.py) under the same rollouts,
with the same Qwen2 weights in float32, verified by `sync`. Single turn: 64
distinct random prompts of 64 tokens, 64 new ones each, sampled with log-probs.
Multi-turn: `multiturn`'s trajectories of 1 to 4 searches of 200 ms +- 100 ms,
96 of them through 64 slots. Tokens/s is sampled tokens by the median time.

Each model is served twice, by a vLLM whose worker has 1 thread (what it takes
on two cores) and by one that has 2; the better median counts. All sides make a
batch in turns. What HTTP, JSON and two more processes cost is vLLM's as this
project uses it, so it is in the figure.
"""

import asyncio
from collections.abc import Iterator
import contextlib
import os
import pathlib
import statistics
import tempfile
import time

from absl import app, flags
import jax
import numpy as np

from experiments import common
from experiments.benchmarks import multiturn
from experiments.benchmarks.sampler import CASES, NEW, PROMPT, ROWS
from searchrl_jax import schema as config_lib
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import sampler as jax_sampler
from searchrl_jax.engines.vllm import client
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.text import tokenizer
from searchrl_jax.types import Prompt

VOCAB, TRAJECTORIES, BAR = 2048, 96, 1.5


def make_tokenizer(folder: pathlib.Path) -> tokenizer.Tokenizer:
  """A BPE of 2,048 entries over random words: vLLM asks for one."""
  rng = np.random.default_rng(0)
  letters = np.array(list('abcdefghijklmnopqrstuvwxyz'))
  texts = [
    ' '.join(
      ''.join(rng.choice(letters, rng.integers(2, 9))) for _ in range(200)
    )
    for _ in range(200)
  ]
  tokenizer.train_bpe(texts, VOCAB, folder)
  return tokenizer.load(folder)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
  """Sets how many threads a vLLM that is started inside computes with."""
  if count == 1:
    yield
    return
  given = {
    'VLLM_CPU_OMP_THREADS_BIND': f'0-{count - 1}',
    'VLLM_CPU_NUM_OF_RESERVED_CPU': '0',
  }
  before = {name: os.environ.get(name) for name in given}
  os.environ |= given
  try:
    yield
  finally:
    for name, value in before.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value


class Side:
  """One engine: makes a batch, says tokens and seconds."""

  def __init__(self, loop: Loop, engine):
    self._loop, self.engine = loop, engine
    self._rng = np.random.default_rng(0)

  def single(self) -> dict:
    prompts = self._rng.integers(VOCAB, size=(ROWS, PROMPT)).tolist()
    seeds = self._rng.integers(2**31, size=ROWS).tolist()

    async def one(ids, seed):
      handle = self.engine.open(Prompt(tuple(ids)))
      done = await self.engine.generate(
        handle, Sampling(max_tokens=NEW, seed=seed)
      )
      self.engine.close(handle)
      return len(done.logps)

    async def batch():
      return await asyncio.gather(*map(one, prompts, seeds))

    return self._timed(batch())

  def multi(self) -> dict:
    config = config_lib.base().rollout
    config.group = 1
    items = multiturn.questions(
      TRAJECTORIES, seed=int(self._rng.integers(2**31))
    )
    return self._timed(
      rollout(
        items,
        env=multiturn.ScriptedEnv(),
        engine=self.engine,
        source=multiturn.SlowSource(0.2),
        config=config,
        seed=0,
        step=0,
      )
    )

  def _timed(self, coroutine) -> dict:
    before = self.engine.stats()
    begin = time.monotonic()
    self._loop.run(coroutine)
    seconds = time.monotonic() - begin
    counted = {k: v - before[k] for k, v in self.engine.stats().items()}
    return {
      'seconds': seconds,
      'tokens': counted['generated_tokens'],
      'prefilled_tokens': counted['prefilled_tokens'],
    }


def measure(case: str, folder: pathlib.Path, reps: int) -> list[dict]:
  cfg = decoder.DecoderConfig(**CASES[case], family='qwen2')
  params = decoder.init_params(cfg, jax.random.key(0))
  tok = make_tokenizer(folder / 'tokenizer')
  config = config_lib.base().engine
  config.slots, config.chunk, config.prefill_rows = ROWS, 16, ROWS
  config.max_len = multiturn.LIMIT
  canary = np.random.default_rng(1).integers(VOCAB, size=64).tolist()
  logps = sync.forward_logps(cfg)
  sides, rows = {}, []
  with Loop() as loop:
    for name in ('jax', 'vllm_1', 'vllm_2'):
      kind, _, count = name.partition('_')
      module = client if kind == 'vllm' else jax_sampler
      with threads(int(count or 1)):
        engine = module.make(cfg, params, tok, config, None, folder / name)
      loop.at_exit(engine.shutdown)
      engine.warmup()
      loop.run(
        sync.sync_and_verify(
          engine,
          params,
          1,
          canary,
          lambda ids: logps(params, ids),
          config.canary_tolerance,
        )
      )
      sides[name] = Side(loop, engine)
    for kind in ('single', 'multi'):
      for side in sides.values():
        getattr(side, kind)()
      found = common.interleave(
        {name: getattr(side, kind) for name, side in sides.items()}, reps
      )
      rates = {
        name: statistics.median(r['tokens'] / r['seconds'] for r in runs)
        for name, runs in found.items()
      }
      rows.append(
        {
          'case': case,
          'turns': kind,
          'parameters': cfg.n_params,
          **{f'{name}_tokens_per_s': rate for name, rate in rates.items()},
          'ratio': rates['jax'] / max(rates['vllm_1'], rates['vllm_2']),
          'repetitions': found,
          'model': CASES[case],
        }
      )
      print(common.table(rows[-1:]), flush=True)
  return rows


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  common.require_idle(allow=_ALLOW.value)
  before, rows = common.environment(), []
  for case in _CASES.value:
    with tempfile.TemporaryDirectory() as folder:
      rows += measure(case, pathlib.Path(folder), _REPS.value)
  # The bar is for the single turn; the rest stands beside it.
  bars = [
    common.bar(f'engines_{r["case"]}', r['ratio'], BAR)
    for r in rows
    if r['turns'] == 'single'
  ]
  common.report(_OUT.value, 'engines', rows, bars, before)


if __name__ == '__main__':
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write')
  _REPS = flags.DEFINE_integer('reps', 3, 'interleaved repetitions', 1)
  _CASES = flags.DEFINE_list('cases', ['1m', '28m'], 'which models')
  _ALLOW = flags.DEFINE_bool(
    'allow_load', False, 'run on a busy machine; the load stands in the file'
  )
  app.run(main)
