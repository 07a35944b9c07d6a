"""The same weights in three engines: the same greedy ids, near log-probs.

  make sidecar && make test-parity
  python -m experiments.benchmarks.agreement --out=agreement.json

100 distinct random prompts of 32 tokens, 64 new tokens, a random Qwen2 model
of 1.1 million parameters whose distributions are neither flat nor one-hot.
Greedy in float32: the ids of `jax_sampler`, of a vLLM server on CPU and of
transformers' generate are compared. Where two part, the choice was a tie if
the trainer's own log-probs of the two tokens there differ by less than 1e-5:
those are counted and shown; anything else fails the bar. At temperature 1: the
log-probs that vLLM recorded of what it sampled, against those that
`jax_sampler` gives the same ids, in float32 and in bfloat16.
"""

import asyncio
import json
import pathlib
import subprocess
import tempfile

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from experiments import common
from experiments.benchmarks.engines import make_tokenizer
from experiments.benchmarks.sampler import CASES
from searchrl_jax import schema as config_lib
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import sampler
from searchrl_jax.engines.vllm import client
from searchrl_jax.engines.weights import sync
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


def measure(dtype: str, folder: pathlib.Path, peer: str) -> list[dict]:
  cfg = decoder.DecoderConfig(**CASES['1m'], family='qwen2')
  params = decoder.init_params(cfg, jax.random.key(0), scale=0.1)
  tok = make_tokenizer(folder / 'tokenizer')
  config = config_lib.base().engine
  config.dtype, config.max_len = dtype, LENGTH + NEW
  config.canary_tolerance = 1e-3 if dtype == 'float32' else 0.2
  prompts = (
    np.random.default_rng(2)
    .integers(cfg.vocab_size, size=(PROMPTS, LENGTH))
    .tolist()
  )
  logps, rows = sync.forward_logps(cfg), []
  with Loop() as loop:
    engines = {}
    for name, module in (('jax_sampler', sampler), ('vllm', client)):
      engine = module.make(cfg, params, tok, config, None, folder / name)
      loop.at_exit(engine.shutdown)
      loop.run(
        sync.sync_and_verify(
          engine,
          params,
          1,
          prompts[0],
          lambda ids: logps(params, ids),
          config.canary_tolerance,
        )
      )
      engines[name] = engine
    ours, theirs = engines['jax_sampler'], engines['vllm']
    if dtype == 'float32':
      greedy = {
        name: loop.run(sample(engine, prompts, 0.0))[0]
        for name, engine in engines.items()
      }
      greedy['transformers'] = transformers(cfg, params, prompts, folder, peer)
      for name in ('vllm', 'transformers'):
        parted = partings(
          cfg, params, prompts, greedy['jax_sampler'], greedy[name]
        )
        rows.append(
          {
            'what': f'greedy ids, jax_sampler and {name}',
            'dtype': dtype,
            'same': PROMPTS - len(parted),
            'ties': sum(p['tie'] for p in parted),
            'partings': parted,
          }
        )

    async def compare():
      ids, recorded = await sample(theirs, prompts, 1.0)
      scored = await asyncio.gather(
        *(ours.score([*p, *c]) for p, c in zip(prompts, ids, strict=True))
      )
      return np.concatenate(
        [
          np.abs(np.asarray(a, np.float64) - b[LENGTH:])
          for a, b in zip(recorded, scored, strict=True)
        ]
      )

    apart = loop.run(compare())
  rows.append(
    {
      'what': 'log-probs of what vllm sampled, by jax_sampler',
      'dtype': dtype,
      'mean_abs': float(apart.mean()),
      'max_abs': float(apart.max()),
      'tokens': len(apart),
      'outside_10_percent': float((apart > np.log(1.1)).mean()),
    }
  )
  return rows


def transformers(cfg, params, prompts, folder, peer: str) -> list[list[int]]:
  pretrained.save(folder / 'exported', cfg, params)
  (folder / 'prompts.json').write_text(json.dumps(prompts))
  subprocess.run(
    [
      peer,
      str(pathlib.Path(__file__).with_name('agreement_torch.py')),
      str(folder / 'exported'),
      str(folder / 'prompts.json'),
      str(NEW),
      str(folder / 'greedy.json'),
    ],
    check=True,
  )
  return json.loads((folder / 'greedy.json').read_text())


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if not pathlib.Path(_PEER.value).exists():
    raise app.UsageError(
      f'--peer_python={_PEER.value} does not exist; `make test-parity` makes '
      '.venv-parity, or name a Python with torch and transformers'
    )
  before, rows = common.environment(), []
  for dtype in ('float32', 'bfloat16'):
    with tempfile.TemporaryDirectory() as folder:
      rows += measure(dtype, pathlib.Path(folder), _PEER.value)
  bars = [
    common.bar(
      f'agreement_{r["what"].split()[-1]}', r['same'] + r['ties'], PROMPTS
    )
    for r in rows
    if 'same' in r
  ] + [
    common.bar('agreement_logps', r['mean_abs'], 1e-4, at_most=True)
    for r in rows
    if 'mean_abs' in r and r['dtype'] == 'float32'
  ]
  common.report(_OUT.value, 'agreement', rows, bars, before)


if __name__ == '__main__':
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write')
  _PEER = flags.DEFINE_string(
    'peer_python',
    '.venv-parity/bin/python',
    'a Python with torch and transformers (make test-parity makes it)',
  )
  app.run(main)
