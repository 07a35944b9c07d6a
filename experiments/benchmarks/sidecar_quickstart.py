"""The quickstart's policy, trained through a vLLM server and in process.

  make sidecar
  python -m experiments.benchmarks.sidecar_quickstart \\
    --workdir=runs/sidecar_quickstart --out=sidecar_quickstart.json

One warm start, then GRPO twice, and nothing but config.engine.module differs.
The model has 4 heads of 32 where the quickstart has 8 of 16, which vLLM's
attention on CPU does not take. Each stage resumes. The bar: exact match
through vLLM lies within the interval of the run in process, or that within
the other's.
"""

import json
import pathlib

from absl import flags

from configs import quickstart
from experiments import common
from experiments.benchmarks import harness
from searchrl_jax import sft, train
from searchrl_jax.run import services
from searchrl_jax.sweep import stages

ENGINES = ('jax', 'vllm')


def measure() -> list[dict]:
  config, rows = quickstart.get_config(), []
  config.model.arch.num_attention_heads = 4
  config.model.arch.num_key_value_heads = 4
  config.model.arch.head_dim = 32
  config.train.steps = _STEPS.value
  folder = pathlib.Path(_WORKDIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  with services.retrieval(config, str(folder)) as url:
    config.source.url = url
    sft.sft(config, str(folder / 'warm'))
    for module in ENGINES:
      run = config.copy_and_resolve_references()
      run.train.init = str(folder / 'warm')
      run.engine.module = module
      home, clock = folder / module, stages.Clock(folder / f'{module}.json')
      with clock('run'):
        train.train(run, str(home))
      lines = [json.loads(x) for x in (home / 'metrics.jsonl').open()]
      seen = [x for x in lines if 'eval/em' in x]
      trained = [x for x in lines if 'reward' in x]
      rows.append(
        {
          'engine': module,
          'em_before': seen[0]['eval/em'],
          'em_after': seen[-1]['eval/em'],
          'low': seen[-1]['eval/em/low'],
          'high': seen[-1]['eval/em/high'],
          'seconds': clock.seconds['run'],
          'mismatch_max': max(x['train/mismatch_max'] for x in trained),
          'canary_max_diff': max(x['sync/canary_max_diff'] for x in trained),
          'sync_s': sum(x['time/sync'] for x in trained) / len(trained),
          'em_curve': [[x['step'] + 1, x['eval/em']] for x in seen],
        }
      )
      print(common.table(rows[-1:]), flush=True)
  return rows


def bars(rows) -> list[dict]:
  here, there = rows
  within = (
    here['low'] <= there['em_after'] <= here['high']
    or there['low'] <= here['em_after'] <= there['high']
  )
  return [common.bar('sidecar_quickstart', float(within), 1.0)]


if __name__ == '__main__':
  _WORKDIR = flags.DEFINE_string(
    'workdir', 'runs/sidecar_quickstart', 'Where the runs go.'
  )
  _STEPS = flags.DEFINE_integer('steps', 60, 'Of GRPO.', 1)
  harness.run('sidecar_quickstart', measure, bars, timed=lambda: False)
