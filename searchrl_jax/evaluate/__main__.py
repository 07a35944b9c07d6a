"""Evaluates a run folder or a Hugging Face checkpoint.

  python -m searchrl_jax.evaluate --workdir=runs/quickstart
  python -m searchrl_jax.evaluate --workdir=runs/quickstart \\
    --config.data.world_seed=7 --controls
  python -m searchrl_jax.evaluate \\
    --config=configs/wiki_nq.py:model=/path/to/checkpoint --out=runs/theirs
  python -m searchrl_jax.evaluate --workdir=runs/other \\
    --manifest=runs/theirs/manifest.json

With --workdir the config is that of the run; --config.* changes its fields.
Decoding is greedy by default (config.eval.temperature = 0): trajectories are
reproducible and do not depend on the order of the questions.
"""

import json
import pathlib

from absl import flags

from searchrl_jax import lookup
from searchrl_jax.devices import cluster
from searchrl_jax.evaluate import policy
from searchrl_jax.run import command
from searchrl_jax.store import records


def main():
  config, workdir, out = _CONFIG.value, _WORKDIR.value, _OUT.value
  lookup.require(workdir or out, '--out is required without --workdir')
  how = {'which': _CHECKPOINT.value, 'manifest': _MANIFEST.value}
  how['with_controls'] = _CONTROLS.value
  what = policy.asked(config, workdir, **how)
  out = out or policy.default_out(config, workdir, what)
  policy.answer(config, workdir, out, what)
  if not cluster.main():
    return
  policy.show(json.loads(pathlib.Path(out, records.EVAL).read_text()))
  print(f'trajectories and figures: {out}')


if __name__ == '__main__':
  _CONFIG, _WORKDIR = policy.define_config_and_workdir()
  _OUT = command.define_out(
    '', 'Folder for the results; default: a folder in --workdir.'
  )
  _CHECKPOINT = command.define_checkpoint()
  _CONTROLS = flags.DEFINE_bool(
    'controls', False, 'Also without search, and with wrong or no passages.'
  )
  _MANIFEST = flags.DEFINE_string(
    'manifest', '', 'Of an evaluation: exactly its questions, on its corpus.'
  )
  command.define_cluster()
  command.run(main)
