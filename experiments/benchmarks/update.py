"""One policy update against the same in plain torch: tokens/s and memory.

    python -m experiments.benchmarks.update --out=FILE.json

Loss on half of the positions, backward, clipped norm, AdamW; float32; a
Qwen2 layout. The peer is `update_torch.py` (its head: see there) under the
better of 1 and 2 threads, in its default environment; `huge_pages_ratio` is
against the same torch with the setting that our Makefile exports
(`HUGE_PAGES`). The sides take turns, each turn a new process, so
that the peak resident memory, imports and compilation included, is its own,
and nobody holds memory while another is timed (the kernel takes back pages of
idle processes, and to fault them in again costs either side a third). The
first updates of a process are not counted. About twenty minutes.

What is timed on our side is `Updater.step`: from NumPy microbatch to new
parameters and metrics (entropy, KL, mismatch) on the host.
"""

import json
import os
import statistics
import subprocess
import sys
import time

from absl import app, flags

from experiments import common
from experiments.benchmarks.update_torch import peak_bytes

HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
CASES = {
  '1m': dict(
    d_model=128,
    layers=4,
    heads=4,
    kv_heads=2,
    d_ff=416,
    vocab=2048,
    rows=32,
    length=256,
    head_chunk=1024,
    updates=6,
  ),
  '28m': dict(
    d_model=512,
    layers=8,
    heads=8,
    kv_heads=2,
    d_ff=1792,
    vocab=2048,
    rows=32,
    length=256,
    head_chunk=1024,
    updates=2,
  ),
  '152k': dict(
    d_model=128,
    layers=4,
    heads=4,
    kv_heads=2,
    d_ff=416,
    vocab=151_936,
    rows=8,
    length=256,
    head_chunk=32,
    updates=4,
  ),
}
WARM_UP = 2  # compilation, allocators, Adam's moments
# name -> (bar, goal, whether smaller is better)
BARS = {
  'update_1m': (1.1, 1.3, False),
  'update_28m': (1.0, 1.3, False),
  'update_152k': (3.0, 5.0, False),
  'update_152k_memory': (0.35, 0.25, True),
}

_OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
_LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')
_REPS = flags.DEFINE_integer('reps', 4, 'Repetitions.', lower_bound=3)
_CASES = flags.DEFINE_list('cases', list(CASES), 'Which cases.')
_PEER = flags.DEFINE_string(
  'peer_python',
  '.venv-parity/bin/python',
  'A Python with torch and transformers (make test-parity makes it).',
)
_WORKER = flags.DEFINE_string('worker', '', 'Internal: be our side of a case.')


def worker(case: dict) -> None:
  """Our side: the protocol of update_torch.py."""
  # Here, so that the process that minds the others stays small.
  import jax
  import numpy as np

  from searchrl_jax import schema as configs
  from searchrl_jax.learn import batching, objectives, optim, update
  from searchrl_jax.models import decoder

  c = configs.base()
  B, T = case['rows'], case['length']
  c.batch.lengths, c.batch.tokens = (T,), B * T
  c.batch.loss_fraction, c.batch.head_chunk = 0.5, case['head_chunk']
  cfg = decoder.DecoderConfig(
    vocab_size=case['vocab'],
    d_model=case['d_model'],
    n_layers=case['layers'],
    n_heads=case['heads'],
    n_kv_heads=case['kv_heads'],
    head_dim=case['d_model'] // case['heads'],
    d_ff=case['d_ff'],
    family='qwen2',
    scan_unroll=case['layers'],
  )
  params = jax.jit(lambda key: decoder.init_params(cfg, key))(jax.random.key(0))
  u = update.Updater(
    cfg,
    c.batch,
    temperature=1.0,
    tx=optim.make(c.optim, 1000),
    objective=objectives.policy(c),
  )
  state = u.init(params)
  count = cfg.n_params
  del params
  rng = np.random.default_rng(0)

  def batch():
    b = batching.empty(c.batch, T)
    b.ids[:] = rng.integers(0, case['vocab'], (B, T))
    first = np.arange(B) * (len(b.owner) // B)  # one sequence in each row
    b.starts[first], b.lengths[first] = 0, T
    order = rng.random((B, T - 1)).argsort(1).argsort(1)
    b.mask[:, 1:] = order < T // 2
    b.owner[first] = np.arange(B)
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
      'seconds': seconds,
      'peak_bytes': peak_bytes(),
      'parameters': count,
      'version': f'jax {jax.__version__}',
    }
    print(json.dumps(out), flush=True)


class Side:
  """Runs updates in a new process each turn."""

  def __init__(self, name: str, command: list[str], updates: int, env: dict):
    self.name, self.updates, self.last = name, updates, {}
    self.command, self.env = command, os.environ | env
    self.peak_bytes = 0

  def __call__(self) -> float:
    """The median seconds of the updates after the first two."""
    done = subprocess.run(
      self.command,
      cwd=common.ROOT,
      env=self.env,
      text=True,
      input=f'{WARM_UP + self.updates}\n',
      stdout=subprocess.PIPE,
    )
    if done.returncode:
      raise RuntimeError(
        f'{self.name} ended with status {done.returncode}; its message is above'
      )
    self.last = json.loads(done.stdout)
    self.peak_bytes = max(self.peak_bytes, self.last['peak_bytes'])
    return statistics.median(self.last['seconds'][WARM_UP:])


def measure(name: str) -> dict:
  """All sides of one case, in turns: a row of the report."""
  case = CASES[name]
  script = str(common.ROOT / 'experiments/benchmarks/update_torch.py')
  ours = [
    sys.executable,
    '-m',
    'experiments.benchmarks.update',
    f'--worker={name}',
  ]
  sides = {'jax': Side('jax', ours, case['updates'], HUGE_PAGES)}
  for kind in ('torch', 'gathered') if name == '152k' else ('torch',):
    fields = json.dumps(case | {'gathered': kind == 'gathered'})
    for side, threads, env in (
      (f'{kind}_1', 1, {}),
      (f'{kind}_2', 2, {}),
      (f'{kind}_huge', 2, HUGE_PAGES),
    ):
      command = [_PEER.value, script, fields, str(threads)]
      sides[side] = Side(side, command, case['updates'], env)
  seconds = common.interleave(sides, _REPS.value)
  tokens = case['rows'] * case['length']
  speed = {k: tokens / statistics.median(v) for k, v in seconds.items()}

  def better(kind):
    return max((f'{kind}_{n}' for n in (1, 2)), key=speed.get)

  peer = better('torch')
  peak = {k: side.peak_bytes for k, side in sides.items()}
  row = {
    'case': name,
    'tokens_per_s': speed['jax'],
    'torch_tokens_per_s': speed[peer],
    'torch_threads': int(peer[-1]),
    'ratio': speed['jax'] / speed[peer],
    'huge_pages_ratio': speed['jax'] / speed['torch_huge'],
    'peak_mb': peak['jax'] / 1e6,
    'torch_peak_mb': peak[peer] / 1e6,
    'memory_ratio': peak['jax'] / peak[peer],
  }
  if name == '152k':
    careful = better('gathered')
    row |= {
      'gathered_ratio': speed['jax'] / speed[careful],
      'gathered_memory_ratio': peak['jax'] / peak[careful],
    }
  return row | {
    'fields': case,
    'seconds': seconds,
    'peak_bytes': peak,
    'parameters': {k: s.last['parameters'] for k, s in sides.items()},
    'versions': {k: s.last['version'] for k, s in sides.items()},
  }


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  if _WORKER.value:
    return worker(CASES[_WORKER.value])
  unknown = sorted(set(_CASES.value) - set(CASES))
  if unknown:
    raise app.UsageError(f'--cases={unknown}: there are {list(CASES)}')
  if not (common.ROOT / _PEER.value).exists():
    raise app.UsageError(
      f'--peer_python={_PEER.value} does not exist; `make test-parity` makes '
      'it, or name a Python with torch and transformers'
    )
  common.require_idle(allow=_LOAD.value)
  before = common.environment()
  rows = [measure(name) for name in _CASES.value]
  values = {f'update_{r["case"]}': r['ratio'] for r in rows}
  values |= {
    f'update_{r["case"]}_memory': r['memory_ratio']
    for r in rows
    if r['case'] == '152k'
  }
  bars = [
    common.bar(k, v, BARS[k][0], at_most=BARS[k][2]) | {'goal': BARS[k][1]}
    for k, v in values.items()
  ]
  common.report(_OUT.value, 'update', rows, bars, before)


if __name__ == '__main__':
  app.run(main)
