"""The in-process engine against a vLLM server on CPU, through one interface.

  make sidecar
  python -m experiments.benchmarks.engines --out=engines.json

Both are engines of the contract (engines/core.py) under the same rollouts,
with the same Qwen2 weights in float32, verified by `sync`. `single`: 64
distinct random prompts of 64 tokens, 64 new ones each, sampled with log-probs.
`multi`: `multiturn`'s trajectories of 1 to 4 searches of 200 ms +- 100 ms, 96
of them through 64 slots. `quarter`: 48 of them, 16 at a time. Tokens/s is
sampled tokens by the median time. In process it is measured with
`engine.exact` (`jax`) and without (`jax_inexact`).

Each model is served twice, by a vLLM whose worker has 1 thread (what it takes
on two cores) and by one that has 2; the better median counts. All sides make a
batch in turns. What HTTP, JSON and two more processes cost is vLLM's as this
project uses it, so it is in the figure.
"""

from collections.abc import Iterator
import contextlib
import os
import pathlib
import statistics
import tempfile
import time
from unittest import mock

import jax
import numpy as np

from experiments import common
from experiments.benchmarks import harness, models, multiturn
from experiments.benchmarks.sampler import PROMPT, ROWS, Ids, batch
from searchrl_jax import schema as config_lib
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines.jax import engine as in_process
from searchrl_jax.engines.vllm import client
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder
from searchrl_jax.text import tokenizer

TRAJECTORIES, BAR = 96, 1.5
QUARTER = {'1m': 1.0, '28m': 0.9}  # bars, of the engine that is not exact


def make_tokenizer(folder: pathlib.Path) -> None:
  """A BPE of 2,048 entries over random words: vLLM asks for one."""
  rng = np.random.default_rng(0)
  letters = np.array(list('abcdefghijklmnopqrstuvwxyz'))
  texts = [
    ' '.join(
      ''.join(rng.choice(letters, rng.integers(2, 9))) for _ in range(200)
    )
    for _ in range(200)
  ]
  tokenizer.train_bpe(texts, Ids.vocab_size, folder)


def start(loop: Loop, module, cfg, params, config, folder: pathlib.Path):
  """An engine of a module with these weights, verified; `loop` ends it.

  config: `config.engine`. folder: for its files; a tokenizer lies beside it.
  """
  tok = tokenizer.load(folder.parent / 'tokenizer')
  engine = module.make(cfg, params, tok, config, None, folder)
  loop.at_exit(engine.shutdown)
  engine.warmup()
  canary = np.random.default_rng(1).integers(Ids.vocab_size, size=PROMPT)
  logps = sync.forward_logps(cfg)
  loop.run(
    sync.sync_and_verify(
      engine,
      params,
      1,
      canary.tolist(),
      lambda ids: logps(params, ids),
      config.canary_tolerance,
    )
  )
  return engine


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
  """Sets how many threads a vLLM that is started inside computes with."""
  several = {
    'VLLM_CPU_OMP_THREADS_BIND': f'0-{count - 1}',
    'VLLM_CPU_NUM_OF_RESERVED_CPU': '0',
  }
  with mock.patch.dict(os.environ, several if count > 1 else {}):
    yield


class Side:
  """One engine: makes a batch, says tokens and seconds."""

  def __init__(self, loop: Loop, engine):
    self._loop, self.engine = loop, engine
    self._rng = np.random.default_rng(0)

  def single(self) -> dict:
    return self._timed(batch(self.engine, self._rng))

  def multi(self) -> dict:
    return self._turns(TRAJECTORIES, 0)

  def quarter(self) -> dict:
    return self._turns(TRAJECTORIES // 2, ROWS // 4)

  def _turns(self, count: int, concurrency: int) -> dict:
    items = multiturn.questions(count, int(self._rng.integers(2**31)))
    return self._timed(multiturn.free(self.engine, items, concurrency, 0.2))

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


def measure(size: str) -> list[dict]:
  cfg = models.config(size)
  params = decoder.init_params(cfg, jax.random.key(0))
  config = config_lib.base().engine
  config.slots, config.chunk, config.prefill_rows = ROWS, 16, ROWS
  config.max_len = multiturn.LIMIT
  sides, rows = {}, []
  with tempfile.TemporaryDirectory() as name, Loop() as loop:
    folder = pathlib.Path(name)
    make_tokenizer(folder / 'tokenizer')
    for side, module, count in (
      ('jax', in_process, 1),
      ('jax_inexact', in_process, 1),
      ('vllm_1', client, 1),
      ('vllm_2', client, 2),
    ):
      config.exact = side != 'jax_inexact'
      with threads(count):
        engine = start(loop, module, cfg, params, config, folder / side)
      sides[side] = Side(loop, engine)
    for kind in ('single', 'multi', 'quarter'):
      found = harness.turns(
        {name: getattr(side, kind) for name, side in sides.items()}, warm=1
      )
      rates = {
        name: statistics.median(r['tokens'] / r['seconds'] for r in runs)
        for name, runs in found.items()
      }
      peer = rates[harness.better(rates, 'vllm')]
      rows.append(
        {
          'case': size,
          'turns': kind,
          'parameters': cfg.n_params,
          **{f'{name}_tokens_per_s': rate for name, rate in rates.items()},
          'ratio': rates['jax'] / peer,
          'inexact_ratio': rates['jax_inexact'] / peer,
          'repetitions': found,
          'model': models.SIZES[size],
        }
      )
      print(common.table(rows[-1:]), flush=True)
  return rows


def bars(rows) -> list[dict]:
  """For a single turn, and for a quarter of the slots; the rest is beside."""
  of = {(r['turns'], r['case']): r for r in rows}
  return [
    common.bar(f'engines_{case}', r['ratio'], BAR)
    if turns == 'single'
    else common.bar(
      f'engines_{turns}_{case}', r['inexact_ratio'], QUARTER[case]
    )
    for (turns, case), r in of.items()
    if turns != 'multi'
  ]


if __name__ == '__main__':
  harness.run('engines', measure, bars, cases=models.SMALL, reps=3)
