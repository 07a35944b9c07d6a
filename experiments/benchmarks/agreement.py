"""The same weights in three engines: the same greedy ids, near log-probs.

  make sidecar && make test-parity
  python -m experiments.benchmarks.agreement --out=agreement.json

100 distinct random prompts of 32 tokens, 64 new tokens, a random Qwen2 model
of 1.1 million parameters whose distributions are neither flat nor one-hot.
Greedy in float32: the ids of `jax`, of a vLLM server on CPU and of
transformers' generate are compared. Where two part, the choice was a tie if
the trainer's own log-probs of the two tokens there differ by less than 1e-5:
those are counted and shown; anything else fails the bar. At temperature 1: the
log-probs that vLLM recorded of what it sampled, against those that
`jax` gives the same ids, in float32 and in bfloat16.
"""

import asyncio
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from experiments.benchmarks import engines, harness, models
from searchrl_jax import schema as config_lib
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import engine as in_process
from searchrl_jax.engines.vllm import client
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.types import Prompt

PROMPTS, LENGTH, NEW, TIE = 100, 32, 64, 1e-5


async def sample(engine, prompts, temperature: float):
  """(ids, log-probs) of each prompt, [64] each."""

  async def one(i, ids):
    handle = engine.open(Prompt(tuple(ids)))
    try:
      return await engine.generate(
        handle, Sampling(max_tokens=NEW, temperature=temperature, seed=i)
      )
    finally:
      engine.close(handle)

  done = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
  return [d.ids.tolist() for d in done], [d.logps for d in done]


def partings(cfg, params, prompts, ours, theirs) -> list[dict]:
  """Where two greedy continuations part, and by how much the tokens differ."""

  @jax.jit
  def last(ids):
    hidden = decoder.hidden_states(params, cfg, ids[None])
    return jax.nn.log_softmax(decoder.logits(params, cfg, hidden[0]))

  out = []
  for i, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
    if a == b:
      continue
    at = next(n for n in range(NEW) if a[n] != b[n])
    # Padded on the right, which a causal model does not see: one program.
    ids = [*prompt, *a][: LENGTH + NEW]
    row = last(jnp.asarray(ids))[LENGTH + at - 1]
    gap = abs(float(row[a[at]]) - float(row[b[at]]))
    out.append({'prompt': i, 'at': at, 'gap': gap, 'tie': gap < TIE})
  return out


def greedy_rows(cfg, params, prompts, greedy) -> list[dict]:
  """The ids of the in-process engine against those of each other engine."""
  rows = []
  for name in ('vllm', 'transformers'):
    parted = partings(cfg, params, prompts, greedy['jax'], greedy[name])
    rows.append(
      {
        'what': f'greedy ids, jax and {name}',
        'dtype': 'float32',
        'same': PROMPTS - len(parted),
        'ties': sum(p['tie'] for p in parted),
        'partings': parted,
      }
    )
  return rows


async def apart(ours, theirs, prompts) -> np.ndarray:
  """|difference| of the log-probs of each token that `theirs` samples."""
  ids, recorded = await sample(theirs, prompts, 1.0)
  scored = await asyncio.gather(
    *(ours.logps([*p, *c]) for p, c in zip(prompts, ids, strict=True))
  )
  return np.concatenate(
    [
      np.abs(np.asarray(a, np.float64) - b[LENGTH:])
      for a, b in zip(recorded, scored, strict=True)
    ]
  )


def measure(dtype: str) -> list[dict]:
  cfg = models.config('1m')
  params = decoder.init_params(cfg, jax.random.key(0), scale=0.1)
  config = config_lib.base().engine
  config.dtype, config.max_len = dtype, LENGTH + NEW
  config.canary_tolerance = 1e-3 if dtype == 'float32' else 0.2
  rng, rows = np.random.default_rng(2), []
  prompts = rng.integers(cfg.vocab_size, size=(PROMPTS, LENGTH)).tolist()
  with tempfile.TemporaryDirectory() as scratch, Loop() as loop:
    folder = pathlib.Path(scratch)
    engines.make_tokenizer(folder / 'tokenizer')
    both = {
      name: engines.start(loop, module, cfg, params, config, folder / name)
      for name, module in (('jax', in_process), ('vllm', client))
    }
    if dtype == 'float32':
      greedy = {
        name: loop.run(sample(engine, prompts, 0.0))[0]
        for name, engine in both.items()
      }
      exported = str(folder / 'exported')
      pretrained.save(exported, cfg, params)
      with harness.torch_peer('greedy', 2, folder=exported, new=NEW) as peer:
        greedy['transformers'] = peer(prompts)
      rows += greedy_rows(cfg, params, prompts, greedy)
    differences = loop.run(apart(*both.values(), prompts))
  rows.append(
    {
      'what': 'log-probs of what vllm sampled, by jax',
      'dtype': dtype,
      'mean_abs': float(differences.mean()),
      'max_abs': float(differences.max()),
      'tokens': len(differences),
      'outside_10_percent': float((differences > np.log(1.1)).mean()),
    }
  )
  return rows


def bars(rows) -> list[dict]:
  out = []
  for r in rows:
    if 'same' in r:
      name = f'agreement_{r["what"].split()[-1]}'
      out.append(common.bar(name, r['same'] + r['ties'], PROMPTS))
    elif r['dtype'] == 'float32':
      out.append(
        common.bar('agreement_logps', r['mean_abs'], 1e-4, at_most=True)
      )
  return out


if __name__ == '__main__':
  harness.run(
    'agreement',
    measure,
    bars,
    cases=('float32', 'bfloat16'),
    peer=True,
    timed=lambda: False,
  )
