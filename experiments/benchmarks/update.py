"""One policy update against the same in plain torch: tokens/s and memory.

    python -m experiments.benchmarks.update --out=FILE.json

Loss on half of the positions, backward, clipped norm, AdamW; float32; a
Qwen2 layout. The peer is `update_torch.py` (its head: see there) under the
better of 1 and 2 threads. Each side runs in a process of its own, so that
the peak resident memory, imports and compilation included, is its own; the
processes take turns, a few updates at a time. About ten minutes.

What is timed on our side is `Updater.step`: from NumPy microbatch to new
parameters and metrics (entropy, KL, mismatch) on the host.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import time

from absl import app
from absl import flags

from experiments.benchmarks import common
from experiments.benchmarks.update_torch import peak_bytes

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = {
  '1m': dict(
    d_model=128, layers=4, heads=4, kv_heads=2, d_ff=416, vocab=2048,
    rows=32, length=256, head_chunk=4096, updates=4,
  ),
  '28m': dict(
    d_model=512, layers=8, heads=8, kv_heads=4, d_ff=1664, vocab=2048,
    rows=32, length=256, head_chunk=4096, updates=1,
  ),
  '152k': dict(
    d_model=128, layers=4, heads=4, kv_heads=2, d_ff=416, vocab=151_936,
    rows=8, length=256, head_chunk=128, updates=2,
  ),
}
# (bar, goal)
BARS = {
  'update_1m': (1.1, 1.3), 'update_28m': (1.0, 1.3), 'update_152k': (3.0, 5.0),
  'update_152k_memory': (0.35, 0.25),
}

_OUT = flags.DEFINE_string('out', None, 'JSON file to write')
_PEER = flags.DEFINE_string(
  'peer', '.venv-parity/bin/python', 'Python with torch and transformers'
)
_CASES = flags.DEFINE_list('cases', list(CASES), 'which cases to run')
_REPS = flags.DEFINE_integer('reps', 3, 'interleaved repetitions', 3)
_WORKER = flags.DEFINE_string('worker', '', 'internal: be our side of a case')
_ANYWAY = flags.DEFINE_bool(
  'anyway', False, 'run on a busy machine; the figures are marked so'
)


def worker(case: dict) -> None:
  """Our side: the protocol of update_torch.py."""
  # Here, so that the process that minds the others stays small.
  import jax
  import numpy as np

  from configs import common as configs
  from searchrl_jax import batching
  from searchrl_jax import optim
  from searchrl_jax import update
  from searchrl_jax.models import decoder

  c = configs.base()
  B, T = case['rows'], case['length']
  c.batch.lengths, c.batch.tokens = (T,), B * T
  c.batch.loss_fraction, c.batch.head_chunk = 0.5, case['head_chunk']
  cfg = decoder.DecoderConfig(
    vocab_size=case['vocab'], d_model=case['d_model'],
    n_layers=case['layers'], n_heads=case['heads'],
    n_kv_heads=case['kv_heads'],
    head_dim=case['d_model'] // case['heads'], d_ff=case['d_ff'],
    qkv_bias=True,
  )
  params = jax.jit(
    lambda key: decoder.init_params(cfg, key)
  )(jax.random.key(0))
  u = update.Updater(
    cfg, c.batch, temperature=1.0, tx=optim.make(c.optim, 1000, params),
    objective=update.policy_objective(c),
  )
  state = u.init(params)
  count = cfg.n_params
  del params
  rng = np.random.default_rng(0)

  def batch():
    b = batching.empty(B, T)
    b.ids[:] = rng.integers(0, case['vocab'], (B, T))
    b.lengths[:] = T
    order = rng.random((B, T - 1)).argsort(1).argsort(1)
    b.mask[:, 1:] = order < T // 2
    b.rows[:] = np.arange(B)
    b.behaviour_logps[b.mask] = -8.0
    [b] = batching.set_advantages([b], rng.normal(size=B))
    return b

  for line in sys.stdin:
    seconds = []
    for _ in range(int(line)):
      b = batch()
      start = time.perf_counter()
      state, metrics = u.step(state, [b])
      seconds.append(time.perf_counter() - start)
      if not metrics['finite']:
        raise RuntimeError(f'the update is not finite: {metrics}')
    out = {
      'seconds': seconds, 'peak_bytes': peak_bytes(), 'parameters': count,
      'version': f'jax {jax.__version__}',
    }
    print(json.dumps(out), flush=True)


class Side:
  """A process that runs updates when told to."""

  def __init__(self, name: str, command: list[str]):
    self.name, self.seconds, self.last = name, [], {}
    self.process = subprocess.Popen(
      command, cwd=ROOT, text=True, stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
    )

  def run(self, updates: int) -> list[float]:
    self.process.stdin.write(f'{updates}\n')
    self.process.stdin.flush()
    line = self.process.stdout.readline()
    if not line:
      raise RuntimeError(
        f'{self.name} ended with status {self.process.wait()}; its message '
        'is above'
      )
    self.last = json.loads(line)
    return self.last['seconds']

  def close(self) -> None:
    self.process.stdin.close()
    self.process.wait()


def measure(name: str, case: dict) -> dict:
  """All sides of one case, in turns; tokens/s from the median update."""
  peer = str(ROOT / 'experiments/benchmarks/update_torch.py')
  if not pathlib.Path(ROOT, _PEER.value).exists():
    raise app.UsageError(
      f'--peer={_PEER.value} does not exist; `make test-parity` makes '
      '.venv-parity, or name a Python with torch and transformers'
    )
  sides = [Side('jax', [
    sys.executable, '-m', 'experiments.benchmarks.update', f'--worker={name}'
  ])]
  kinds = [('torch', False)]
  if name == '152k':
    kinds.append(('torch_gathered', True))
  for kind, gathered in kinds:
    fields = json.dumps(case | {'gathered': gathered})
    for threads in (1, 2):
      sides.append(Side(
        f'{kind}_{threads}', [_PEER.value, peer, fields, str(threads)]
      ))
  try:
    for side in sides:
      side.run(2)  # compilation, allocator, Adam's state
    for _ in range(_REPS.value):
      for side in sides:
        side.seconds += side.run(case['updates'])
  finally:
    for side in sides:
      side.close()
  tokens = case['rows'] * case['length']
  out = {'tokens': tokens, **case, 'sides': {}}
  for side in sides:
    out['sides'][side.name] = {
      'seconds': side.seconds,
      'tokens_per_s': tokens / statistics.median(side.seconds),
      'peak_bytes': side.last['peak_bytes'],
      'parameters': side.last['parameters'],
      'version': side.last['version'],
    }
  return out


def best(case: dict, kind: str) -> dict:
  """The better thread count of a peer."""
  return max(
    (v for k, v in case['sides'].items() if k.rpartition('_')[0] == kind),
    key=lambda v: v['tokens_per_s'],
  )


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if _WORKER.value:
    return worker(CASES[_WORKER.value])
  if not _OUT.value:
    raise app.UsageError('--out=FILE.json is needed')
  unknown = set(_CASES.value) - set(CASES)
  if unknown:
    raise app.UsageError(f'--cases: {sorted(unknown)} not in {list(CASES)}')
  results = {name: measure(name, CASES[name]) for name in _CASES.value}
  values = {}
  for name, case in results.items():
    ours, peer = case['sides']['jax'], best(case, 'torch')
    values[f'update_{name}'] = ours['tokens_per_s'] / peer['tokens_per_s']
    if name == '152k':
      values['update_152k_memory'] = ours['peak_bytes'] / peer['peak_bytes']
  return results, values


if __name__ == '__main__':
  app.run(main)
