"""Kills a training run (SIGKILL) and compares what the resumed one becomes.

  python -m experiments.benchmarks.resume --out=resume.json

Three kills, each in a process of its own: in the middle of an update, of a
save and of a rollout. The parameters, the optimizer's moments and every
sampled token of the resumed run must be those of the uninterrupted one, bit
for bit. Bar: resume_bitwise = 3 of 3.
"""

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from absl import app, flags

from experiments import common

PLACES = ('update', 'save', 'rollout')

_OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
_LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')


def child(place: str, folder: str, url: str) -> None:
  """Trains; kills itself once it is inside `place`, unless it was killed."""
  import threading

  from searchrl_jax import train
  from searchrl_jax.learn import update
  from searchrl_jax.store import checkpoint
  from tests import tiny

  config = tiny.config(url)
  config.train.steps = 4
  mark = pathlib.Path(folder).with_suffix('.killed')
  if place and not mark.exists():
    seen = {'n': 0}

    def die_soon(seconds):
      def die():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

      threading.Timer(seconds, die).start()

    def doomed(owner, name, nth, seconds):
      real = getattr(owner, name)

      def call(*args, **kw):
        seen['n'] += 1
        if seen['n'] == nth:
          die_soon(seconds)
        return real(*args, **kw)

      setattr(owner, name, call)

    # The delay lets the call begin its work; all of them take longer.
    if place == 'update':
      doomed(update.Updater, 'step', 3, 0.001)
    elif place == 'save':
      doomed(checkpoint.Checkpointer, 'save', 2, 0.01)
    else:
      doomed(train, 'rollout', 3, 0.005)
  train.train(config, folder)


def digest(folder: str) -> dict[str, str]:
  """Hashes of the final state and of everything that was sampled."""
  import jax
  import numpy as np

  from searchrl_jax.learn import objectives, optim, update
  from searchrl_jax.models import parameters
  from searchrl_jax.run import build
  from searchrl_jax.store import checkpoint, records
  from tests import tiny

  config = tiny.config()
  tok = build.tokenizer(config, folder)
  cfg = parameters.model_config(config, tok.vocab_size)
  mesh = build.mesh(config)
  params = parameters.initial(config, cfg, mesh)
  updater = update.Updater(
    cfg,
    config.batch,
    temperature=1.0,
    mesh=mesh,
    tx=optim.make(config.optim, 4),
    objective=objectives.policy(config),
  )
  saved = checkpoint.of_run(config, folder).restore(
    {'state': updater.init(params)}, 'latest', fingerprint=None, partial=True
  )
  state = hashlib.sha256()
  for leaf in jax.tree.leaves(saved.state):
    state.update(np.asarray(leaf).tobytes())
  sampled = hashlib.sha256()
  for record in records.read(pathlib.Path(folder) / 'trajectories'):
    t = record.trajectory
    sampled.update(f'{record.step} {t.id}'.encode())
    for s in t.segments:
      sampled.update(s.ids.tobytes())
      sampled.update(b'' if s.logps is None else s.logps.tobytes())
  return {
    'step': saved.step,
    'state': state.hexdigest(),
    'sampled': sampled.hexdigest(),
  }


def run_child(place: str, folder: str, url: str) -> int:
  # The model compiles once for all children.
  compiled = pathlib.Path(folder).parent / 'compiled'
  env = dict(os.environ, JAX_COMPILATION_CACHE_DIR=str(compiled))
  return subprocess.run(
    [
      sys.executable,
      '-m',
      'experiments.benchmarks.resume',
      '--child',
      place,
      folder,
      url,
    ],
    env=env,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ).returncode


def main(argv):
  del argv
  if not _LOAD.value:
    common.require_idle()
  environment = common.environment()
  from retrieval import process
  from searchrl_jax.worlds import microworld
  from tests import tiny

  with tempfile.TemporaryDirectory() as scratch:
    root = pathlib.Path(scratch)
    world = microworld.generate(3, **tiny.WORLD)
    corpus = microworld.write(world, root / 'world')['corpus']
    with process.start_server(corpus, log_path=root / 'log') as server:
      whole = str(root / 'whole')
      status = run_child('', whole, server.url)
      if status:
        raise SystemExit(f'the uninterrupted run failed with status {status}')
      wanted = digest(whole)
      rows = []
      for place in PLACES:
        folder = str(root / place)
        killed = run_child(place, folder, server.url)
        resumed = run_child(place, folder, server.url)
        got = digest(folder)
        rows.append(
          {
            'killed in': place,
            'status': killed,
            'resumed': resumed,
            'bitwise': killed == -signal.SIGKILL and got == wanted,
            **got,
          }
        )
  held = sum(r['bitwise'] for r in rows)
  bars = [common.bar('resume_bitwise', held, 3)]
  common.report(_OUT.value, 'resume', rows, bars, environment)


if __name__ == '__main__':
  if sys.argv[1:2] == ['--child']:
    child(*sys.argv[2:5])
  else:
    app.run(main)
