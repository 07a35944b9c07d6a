"""Kills a training run (SIGKILL) and compares what the resumed one becomes.

  python -m experiments.benchmarks.resume --out=resume.json

Three kills, each in a process of its own: in the middle of an update, of a
save and of a rollout. The parameters, the optimizer's moments and every
sampled token of the resumed run must be those of the uninterrupted one, bit
for bit. Bar: resume_bitwise = 3 of 3.
"""

import hashlib
import itertools
import os
import pathlib
import signal
import subprocess
import tempfile
import threading

from experiments import common
from experiments.benchmarks import harness
from retrieval import process
from searchrl_jax import train
from searchrl_jax.learn import update
from searchrl_jax.rollout import collector
from searchrl_jax.store import checkpoint, records
from searchrl_jax.worlds import microworld
from tests import tiny

# Whose function, its name, which of its calls, and the seconds after which the
# process is killed: the call has begun its work, and all of them take longer.
PLACES = {
  'update': (update.Updater, 'step', 3, 0.001),
  'save': (checkpoint.Checkpointer, 'save', 2, 0.01),
  'rollout': (collector, 'rollout', 3, 0.005),
}


def doomed(place: str, folder: str, url: str) -> None:
  """Trains; kills itself once it is inside `place`, unless it was killed."""
  config = tiny.config(url)
  config.train.steps = 4
  mark = pathlib.Path(folder).with_suffix('.killed')
  if place and not mark.exists():
    owner, name, nth, delay = PLACES[place]
    real, calls = getattr(owner, name), itertools.count(1)

    def die():
      mark.touch()
      os.kill(os.getpid(), signal.SIGKILL)

    def call(*args, **kw):
      if next(calls) == nth:
        threading.Timer(delay, die).start()
      return real(*args, **kw)

    setattr(owner, name, call)
  train.train(config, folder)


def digest(folder: str) -> dict[str, str]:
  """Hashes of the final state and of everything that was sampled."""
  saved = checkpoint.of_run(tiny.config(), folder)
  step, state = saved.latest(), hashlib.sha256()
  for value in common.stored(saved.folder / f'{step:08d}').values():
    state.update(value.tobytes())
  sampled = hashlib.sha256()
  for record in records.read(pathlib.Path(folder) / 'trajectories'):
    t = record.trajectory
    sampled.update(f'{record.step} {t.id}'.encode())
    for s in t.segments:
      sampled.update(s.ids.tobytes())
      sampled.update(b'' if s.logps is None else s.logps.tobytes())
  return {
    'step': step,
    'state': state.hexdigest(),
    'sampled': sampled.hexdigest(),
  }


def run(place: str, folder: str, url: str) -> int:
  """The exit status of a run that is killed in `place`, or goes on."""
  # The model compiles once for all of them.
  compiled = pathlib.Path(folder).parent / 'compiled'
  return harness.child(
    doomed,
    place,
    folder,
    url,
    env={'JAX_COMPILATION_CACHE_DIR': str(compiled)},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  ).returncode


def measure() -> list[dict]:
  rows = []
  with tempfile.TemporaryDirectory() as scratch:
    root = pathlib.Path(scratch)
    world = microworld.generate(3, **tiny.WORLD)
    corpus = microworld.write(world, root / 'world')['corpus']
    with process.start_server(corpus, log_path=root / 'log') as server:
      whole = str(root / 'whole')
      if status := run('', whole, server.url):
        raise RuntimeError(f'the uninterrupted run ended with status {status}')
      wanted = digest(whole)
      for place in PLACES:
        folder = str(root / place)
        killed = run(place, folder, server.url)
        resumed = run(place, folder, server.url)
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
  return rows


def bars(rows) -> list[dict]:
  held = sum(r['bitwise'] for r in rows)
  return [common.bar('resume_bitwise', held, len(PLACES))]


if __name__ == '__main__':
  harness.run('resume', measure, bars)
