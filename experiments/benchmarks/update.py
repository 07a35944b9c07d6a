"""One policy update against the same in plain torch: tokens/s and memory.

    python -m experiments.benchmarks.update --out=FILE.json
    python -m experiments.benchmarks.update --cases=28m --out=FILE.json

Loss on half of the positions, backward, clipped norm, AdamW; float32; a
Qwen2 layout. The peer is `torch_peers.update` (its head: see there) under the
better of 1 and 2 threads, in its default environment, or with the huge pages
that our Makefile exports (--peer_huge_pages). The sides take turns, each turn a
new process, so that the peak resident memory, imports and compilation included,
is its own, and nobody holds memory while another is timed (the kernel takes
back pages of idle processes, and to fault them in again costs either side a
third). The first updates of a process are not counted.

What is timed on our side is `Updater.step`: from NumPy microbatch to new
parameters and metrics (entropy, KL, mismatch) on the host.

Either command takes at most eight minutes. `152k_gathered` is against torch
code that picks the loss positions before the head.
"""

import statistics
import time

from absl import flags

from experiments import common
from experiments.benchmarks import harness, memory, models

HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
LARGE_VOCABULARY = models.SIZES['1m'] | {'vocab_size': 151_936}
_ROWS = dict(rows=32, length=256, head_chunk=1024)
_FEW_ROWS = dict(rows=8, length=256, head_chunk=32)
CASES = {
  '1m': dict(model=models.SIZES['1m'], updates=6, **_ROWS),
  '28m': dict(model=models.SIZES['28m'], updates=1, **_ROWS),
  '152k': dict(model=LARGE_VOCABULARY, updates=2, **_FEW_ROWS),
  '152k_gathered': dict(
    model=LARGE_VOCABULARY, updates=2, gathered=True, **_FEW_ROWS
  ),
}
WARM = 2  # compilation, allocators, Adam's moments
# name -> (bar, goal, whether smaller is better)
BARS = {
  'update_1m': (1.1, 1.3, False),
  'update_28m': (1.0, 1.3, False),
  'update_152k': (3.0, 5.0, False),
  'update_152k_memory': (0.35, 0.25, True),
}


def ours(case: dict) -> dict:
  """Our side, in a process of its own; answers as `torch_peers.update`."""
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
  model = case['model']
  cfg = decoder.DecoderConfig(
    **model, family='qwen2', scan_unroll=model['n_layers']
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
  del params
  rng = np.random.default_rng(0)

  def batch():
    b = batching.empty(c.batch, T)
    b.ids[:] = rng.integers(0, cfg.vocab_size, (B, T))
    first = np.arange(B) * (len(b.owner) // B)  # one sequence in each row
    b.starts[first], b.lengths[first] = 0, T
    order = rng.random((B, T - 1)).argsort(1).argsort(1)
    b.mask[:, 1:] = order < T // 2
    b.owner[first] = np.arange(B)
    b.behaviour_logps[b.mask] = -8.0
    [b] = batching.set_advantages([b], rng.normal(size=B))
    return b

  seconds = []
  for _ in range(WARM + case['updates']):
    b = batch()
    start = time.perf_counter()
    state, metrics = u.step(state, [b])
    seconds.append(time.perf_counter() - start)
    if not metrics['finite']:
      raise RuntimeError(f'the update is not finite: {metrics}')
  return {
    'seconds': seconds,
    'peak_bytes': memory.of('VmHWM'),
    'parameters': cfg.n_params,
    'jax': jax.__version__,
  }


def torch(case: dict, threads: int) -> dict:
  """The peer's turn."""
  env = HUGE_PAGES if _PEER_HUGE_PAGES.value else {}
  with harness.torch_peer('update', threads, env, **case) as peer:
    return peer(WARM + case['updates'])


def measure(name: str) -> list[dict]:
  case = CASES[name]
  turns = harness.turns(
    {
      'jax': lambda: harness.apart(ours, case, env=HUGE_PAGES),
      'torch_1': lambda: torch(case, 1),
      'torch_2': lambda: torch(case, 2),
    }
  )
  seconds = {
    side: [statistics.median(turn['seconds'][WARM:]) for turn in done]
    for side, done in turns.items()
  }
  tokens = case['rows'] * case['length']
  speed = {k: tokens / statistics.median(v) for k, v in seconds.items()}
  peak = {k: max(t['peak_bytes'] for t in v) for k, v in turns.items()}
  peer = harness.better(speed)
  row = {
    'case': name,
    **harness.against(speed, 'tokens_per_s'),
    'peak_mb': peak['jax'] / 1e6,
    'torch_peak_mb': peak[peer] / 1e6,
    'memory_ratio': peak['jax'] / peak[peer],
    'peer_huge_pages': _PEER_HUGE_PAGES.value,
    'fields': case,
    'seconds': seconds,
    'peak_bytes': peak,
    'last_turns': {side: done[-1] for side, done in turns.items()},
  }
  return [row]


def bars(rows) -> list[dict]:
  values = {f'update_{r["case"]}': r['ratio'] for r in rows}
  values |= {f'update_{r["case"]}_memory': r['memory_ratio'] for r in rows}
  return [
    common.bar(name, values[name], bar, at_most=at_most) | {'goal': goal}
    for name, (bar, goal, at_most) in BARS.items()
    if name in values
  ]


if __name__ == '__main__':
  _PEER_HUGE_PAGES = flags.DEFINE_bool(
    'peer_huge_pages', False, 'Torch has huge pages, too.'
  )
  harness.run(
    'update',
    measure,
    bars,
    cases=CASES,
    default=('1m', '152k'),
    reps=3,
    peer=True,
  )
