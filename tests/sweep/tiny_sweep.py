"""Three arms small enough to run in a test; the last one fails."""

import json

from searchrl_jax.store import records
from searchrl_jax.sweep import core, stages
from tests.experiments import tiny_row


def config(seed: int):
  c = tiny_row.config(seed)
  c.train.steps = 5
  c.eval.every = 2
  return c


def get_sweep(arg=None):
  del arg
  return core.sweep(
    config,
    [
      ('base', {}),
      ('kl', {'algorithm.kl': 'loss', 'algorithm.kl_coef': 0.5}),
      ('broken', {'data.eval.micro.n': 10**6}),
    ],
    seeds=(0,),
    curves={'eval/tokens': 'tokens', 'reward': 'reward'},
  )


def complete(made, workdir, stage, before, after):
  """What a run leaves whose EM went from `before` to `after` in two steps."""
  folder = workdir / stage
  plain = records.plain(stages.config_of(made, stage, workdir))
  records.write_json(
    folder / 'done.json',
    {'config': plain, 'contents': {}, 'commit': 'c', 'code': 'd'},
  )
  records.write_json(folder / 'seconds.json', {'train': 1.0})
  records.write_json(folder / 'after/values.json', {'eval/em': after, 'x': 1})
  steps = [
    {'step': -1, 'eval/em': before},
    {'step': 0, 'reward': 0.5},
    {'step': 1, 'reward': 1.0, 'eval/em': after},
  ]
  text = ''.join(f'{json.dumps(step)}\n' for step in steps)
  records.write_text(folder / 'run/metrics.jsonl', text)
