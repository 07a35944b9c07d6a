"""Trains the program and the native environment, and writes the table.

  python -m experiments.agents.run --workdir=runs/agents [--seeds=0]

One warm start, then two arms of three seeds (rows.py). The same command goes on
where it stopped; results.json and curves.png are in --out.
"""

from absl import flags

from experiments import rows
from searchrl_jax.run import command
from searchrl_jax.sweep import runner


def main():
  out = f'{_OUT.value}/results.json'
  rows.run('experiments.agents.rows', out, by='experiments.agents.run')


if __name__ == '__main__':
  runner.define_flags()
  _OUT = flags.DEFINE_string(
    'out', 'experiments/agents', 'Folder of results.json and curves.png.'
  )
  command.run(main)
