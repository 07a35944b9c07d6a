"""Runs, evaluates and summarises a recipe's table of arms x seeds; resumable.

  python -m experiments.rows --row=experiments.search_r1.rows \\
    --workdir=runs/search_r1 --out=experiments/search_r1/results.json \\
    [--only=grpo,ppo] [--seeds=0]

--row names a module with ROW, a `Row`. Every warm start (one for each seed or
one for all, shared by arms) and every arm runs in a separate process, one at a
time. An interrupted stage resumes, a complete one is skipped. Arms of one world
share a retrieval server. The JSON has the results so far, of all arms:

  environment, command
  warm   name -> seed -> {seconds, commit}
  arms   name -> seeds: seed -> {seconds, commit, values, curve}
                 mean:  values -> {mean, low, high, n} over seeds
  bars   [{name, value, bar, holds}]; value is null if an arm is missing

`values` are {evaluation: {score: value}}: 'before' (the arm's first evaluation,
before any update), 'after', 'gain' (after - before) and further evaluations of
the arm. Intervals are Student's t over seeds, 95%. curves.png is in the folder
of the JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

from absl import flags
from ml_collections import ConfigDict

from experiments import table
from experiments.benchmarks import common
from experiments.quickstart.run import Clock
from experiments.table import Bar
from searchrl_jax import evaluate, sft
from searchrl_jax.learn.checks import ConfigError
from searchrl_jax.run import build, command, lookup, records, schema, writer

Config = Callable[[int], ConfigDict]  # of a seed
# (config, run folder, output folder) -> scores by name.
Evaluation = Callable[[ConfigDict, str, str], Mapping[str, float]]


def evaluation(fields: Mapping[str, object]) -> Evaluation:
  """`evaluate` with fields of the arm's config changed, {'env.k': value}."""

  def run(config, workdir, out):
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(dict(fields))
    return evaluate.evaluate(changed, workdir, out)

  return run


@dataclasses.dataclass(frozen=True)
class Start:
  """A warm start, by `sft`: one for each seed, or for all.

  config: of a seed. init: another warm start that it continues; '' = none.
  folders: {config field: name of a warm start}: sets the field to its run
  folder. shared: all seeds use the warm start of seed 0.
  """

  config: Config
  init: str = ''
  folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
  shared: bool = False

  @property
  def needs(self) -> dict[str, str]:
    return {**({'train.init': self.init} if self.init else {}), **self.folders}


@dataclasses.dataclass(frozen=True)
class Arm:
  """One line of the table.

  name: in the results, and of the folder. config: of a seed. warm: the warm
  start that it continues; '' = train.init of its config. train: False = only
  evaluates the warm start. evaluations: of the result; 'after' is compared with
  'before'. folders: {config field: name of a warm start}: sets the field to its
  run folder, as `warm` sets train.init. loop: the dotted name of a function
  train(config, workdir), for a scheme with its own loop.
  """

  name: str
  config: Config
  warm: str = ''
  train: bool = True
  evaluations: Mapping[str, Evaluation] = dataclasses.field(
    default_factory=lambda: {'after': evaluation({})}
  )
  seeds: Sequence[int] = (0, 1, 2)
  folders: Mapping[str, str] = dataclasses.field(default_factory=dict)
  loop: str = 'train.train'

  @property
  def needs(self) -> dict[str, str]:
    return {**({'train.init': self.warm} if self.warm else {}), **self.folders}


@dataclasses.dataclass(frozen=True)
class Row:
  """A recipe's table.

  scores: last parts of the names of scores to keep ('em' of 'eval/hops=2/em').
  curves: metric -> label, one panel of curves.png each.
  """

  warm: Mapping[str, Start]
  arms: Sequence[Arm]
  bars: Sequence[Bar]
  scores: Sequence[str]
  curves: Mapping[str, str]

  def arm(self, name: str) -> Arm:
    for arm in self.arms:
      if arm.name == name:
        return arm
    raise ConfigError(
      f'arm {name!r}: {lookup.near(name, [a.name for a in self.arms])}'
    )

  def start(self, name: str) -> Start:
    if name not in self.warm:
      raise ConfigError(f'warm start {name!r}: {lookup.near(name, self.warm)}')
    return self.warm[name]

  def warm_stage(self, name: str, seed: int) -> str:
    """The stage of a warm start that stages with `seed` use."""
    return f'warm/{name}/{0 if self.start(name).shared else seed}'


# Fields that `sft` does not read, so they do not change a warm start.
UNREAD = ('eval', 'judge', 'reward', 'selfplay', 'train.steps')

# ---- Stages: 'warm/NAME/SEED' and 'arms/NAME/SEED', each with a folder.


def plan(row: Row, arms: Sequence[Arm], seeds: Sequence[int]) -> list[str]:
  """The stages for `arms`, seed by seed, each after those that it needs."""
  out = []

  def add(stage, needs):
    seed = int(stage.rsplit('/', 1)[1])
    for name in needs.values():
      add(row.warm_stage(name, seed), row.start(name).needs)
    out.append(stage)

  for seed in sorted({s for arm in arms for s in arm.seeds}):
    for arm in arms:
      if seed in arm.seeds and (not seeds or seed in seeds):
        add(f'arms/{arm.name}/{seed}', arm.needs)
  return list(dict.fromkeys(out))


def config_of(row: Row, stage: str, workdir: pathlib.Path) -> ConfigDict:
  """The stage's config, with the folders of the warm starts that it needs."""
  kind, name, seed = stage.split('/')
  one = row.start(name) if kind == 'warm' else row.arm(name)
  config = one.config(int(seed))
  config.update_from_flattened_dict(
    {
      field: str(workdir / row.warm_stage(start, int(seed)) / 'run')
      for field, start in one.needs.items()
    }
  )
  return config


def done(row: Row, stage: str, workdir: pathlib.Path) -> bool:
  """Whether a stage is complete.

  Raises:
    ConfigError: it was run with another config.
  """
  folder = workdir / stage
  if not (folder / 'done.json').exists():
    return False
  before = json.loads((folder / 'done.json').read_text())['config']
  # Fields added to the schema since then get their neutral values.
  known = schema.base()
  known.update(before)
  before = records.plain(known)
  now = records.plain(config_of(row, stage, workdir))
  kind, name, _ = stage.split('/')
  one = row.start(name) if kind == 'warm' else row.arm(name)
  free = (*writer.MAY_DIFFER, *(UNREAD if kind == 'warm' else ()))
  free = tuple(f'{field}.' for field in free)
  for field, (old, new) in writer.differences(before, now).items():
    moved = field in one.needs and _within(old) == _within(new)
    if not moved and not f'{field}.'.startswith(free):
      raise ConfigError(
        f'{folder} was run with another config: {field} was {old!r} and is '
        f'{new!r} now; remove that folder, or set another --workdir'
      )
  return kind == 'warm' or all(
    (folder / variant / 'values.json').exists() for variant in one.evaluations
  )


def _within(run: str) -> tuple[str, ...]:
  """The parts of warm/NAME/SEED/run, without the folder of the table."""
  return pathlib.PurePath(run).parts[-4:]


def run_stage(row: Row, stage: str, workdir: pathlib.Path, url: str) -> None:
  """Trains and evaluates one stage; resumes an interrupted one."""
  kind, name, _ = stage.split('/')
  folder = workdir / stage
  config = config_of(row, stage, workdir)
  plain = records.plain(config)
  config.source.url = url
  clock = Clock(folder / 'seconds.json')
  arm = row.arm(name) if kind == 'arms' else None
  run = str(folder / 'run')
  if not (folder / 'done.json').exists():
    if arm is None or arm.train:
      with clock('train'):
        loop = lookup.function('searchrl_jax', arm.loop) if arm else sft.sft
        loop(config, run)
    records.write_json(
      folder / 'done.json',
      {'config': plain, 'commit': common.environment()['commit']},
    )
  if arm is None:
    return
  # An arm without training is its warm start, or a Hugging Face folder ('').
  run = run if arm.train else config.train.init
  for variant, measure in arm.evaluations.items():
    out = folder / variant
    if (out / 'values.json').exists():
      continue
    with clock('evaluate'):
      values = measure(config, run, str(out))
    records.write_json(out / 'values.json', values)


class Servers:
  """A retrieval server for each world, started at the first `url` call."""

  def __init__(self, workdir: pathlib.Path):
    self._folder, self._urls = workdir / 'worlds', {}
    self._stack = contextlib.ExitStack()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    return self._stack.__exit__(*error)

  def url(self, config: ConfigDict) -> str:
    world = {
      k: config.data[k] for k in ('dir', 'world_module', 'world_seed', 'world')
    }
    key = json.dumps(
      records.plain(
        {'corpus': config.source.corpus, 'url': config.source.url, **world}
      )
    )
    if key not in self._urls:
      folder = str(self._folder / str(len(self._urls)))
      self._urls[key] = self._stack.enter_context(
        build.retrieval(config, folder)
      )
    return self._urls[key]


def spawn(module: str, stage: str, workdir: pathlib.Path, url: str) -> None:
  """Calls `run_stage` in a new process, which saves and ends with this one.

  Raises:
    ConfigError: the process failed; it has printed its error.
  """
  process = subprocess.Popen(
    [
      sys.executable,
      '-m',
      'experiments.rows',
      f'--row={module}',
      f'--workdir={workdir}',
      f'--stage={stage}',
      f'--url={url}',
    ],
    # Closes when this process ends for any reason. In a new session, Ctrl-C
    # reaches only this process.
    stdin=subprocess.PIPE,
    start_new_session=True,
  )
  try:
    status = process.wait()
  finally:
    process.stdin.close()
    process.wait()
  if status:
    raise ConfigError(
      f'{stage} ended with status {status}; see its error above. The same '
      'command resumes it'
    )


def end_with_parent() -> None:
  """Sends SIGTERM to this process when standard input closes: see `spawn`."""

  def watch():
    while os.read(0, 1):  # sys.stdin's own lock would outlive the process
      pass
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=watch, daemon=True).start()


# ---- Results.


def collect(row: Row, workdir: pathlib.Path) -> dict:
  """{arm: {'seeds', 'mean'}} of all complete stages."""
  out = {}
  for arm in row.arms:
    seeds = {
      str(seed): _seed(row, arm, workdir / f'arms/{arm.name}/{seed}')
      for seed in arm.seeds
      if done(row, f'arms/{arm.name}/{seed}', workdir)
    }
    if seeds:
      out[arm.name] = {'seeds': seeds, 'mean': table.means(seeds)}
  return out


def starts(row: Row, workdir: pathlib.Path) -> dict:
  """{warm start: {seed: its seconds and commit}} of the complete ones."""
  out = {}
  for stage in plan(row, row.arms, ()):
    kind, name, seed = stage.split('/')
    if kind == 'warm' and (workdir / stage / 'done.json').exists():
      out.setdefault(name, {})[seed] = _about(workdir / stage)
  return out


def _about(folder: pathlib.Path) -> dict:
  return {
    'seconds': json.loads((folder / 'seconds.json').read_text()),
    'commit': json.loads((folder / 'done.json').read_text())['commit'],
  }


def _seed(row: Row, arm: Arm, folder: pathlib.Path) -> dict:
  def kept(values):
    return {
      name: value
      for name, value in values.items()
      if name.rsplit('/', 1)[-1] in row.scores and value is not None
    }

  values = {
    variant: kept(json.loads((folder / variant / 'values.json').read_text()))
    for variant in arm.evaluations
  }
  curve = {}
  if arm.train:
    steps = list(_lines(folder / 'run' / 'metrics.jsonl'))
    before = kept(steps[0]) if steps[0]['step'] == -1 else {}
    if before:
      values = {
        'before': before,
        **values,
        'gain': {
          k: v - before[k] for k, v in values['after'].items() if k in before
        },
      }
    curve = {
      name: [[s['step'] + 1, s[name]] for s in steps if s.get(name) is not None]
      for name in row.curves
    }
  return {**_about(folder), 'values': values, 'curve': curve}


def _lines(path: pathlib.Path) -> Iterator[dict]:
  with path.open() as lines:
    yield from map(json.loads, lines)


def write(row: Row, workdir: pathlib.Path, out: str, environment) -> dict:
  """Returns the results; writes them to `out` ('' = not) with curves.png."""
  arms = collect(row, workdir)
  record = {
    'environment': environment,
    'command': ' '.join(['python', '-m', 'experiments.rows', *sys.argv[1:]]),
    'warm': starts(row, workdir),
    'arms': arms,
    'bars': table.judge(row.bars, arms),
  }
  if out:
    records.write_json(out, record)
    table.plot(row.curves, arms, pathlib.Path(out).with_name('curves.png'))
  return record


def run(
  module: str,
  workdir: str,
  out: str = '',
  *,
  only: Sequence[str] = (),
  seeds: Sequence[int] = (),
) -> dict:
  """Runs the missing stages; returns (and writes) the results."""
  row, folder = load(module), pathlib.Path(workdir)
  chosen = [row.arm(name) for name in only] or list(row.arms)
  stages = plan(row, chosen, seeds)
  if not stages:
    raise ConfigError(f'--seeds={list(seeds)}: no chosen arm has such a seed')
  environment = common.environment()
  # Check all stages first, so that one of another config fails at the start.
  left = [stage for stage in stages if not done(row, stage, folder)]
  collect(row, folder)  # also checks the arms that are not chosen
  with Servers(folder) as servers:
    for n, stage in enumerate(left, 1):
      print(f'[{n}/{len(left)}] {stage}', flush=True)
      spawn(module, stage, folder, servers.url(config_of(row, stage, folder)))
      write(row, folder, out, environment)
  return write(row, folder, out, environment)


def load(module: str) -> Row:
  """ROW of a module by its dotted name."""
  try:
    return importlib.import_module(module).ROW
  except ModuleNotFoundError as e:
    raise ConfigError(f'--row={module}: {e}') from e
  except AttributeError as e:
    raise ConfigError(f'--row={module}: it has no ROW') from e


def main():
  workdir = pathlib.Path(_WORKDIR.value)
  if _STAGE.value:
    import jax

    end_with_parent()
    # Stages compile the same programs.
    jax.config.update('jax_compilation_cache_dir', str(workdir / 'compiled'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
    run_stage(load(_ROW.value), _STAGE.value, workdir, _URL.value)
    return
  record = run(
    _ROW.value,
    _WORKDIR.value,
    _OUT.value,
    only=_ONLY.value,
    seeds=[int(s) for s in _SEEDS.value],
  )
  row = load(_ROW.value)
  print(table.show(record['arms'], [f'after:{c}' for c in row.curves]))
  for bar in record['bars']:
    print(bar)


if __name__ == '__main__':
  _ROW = flags.DEFINE_string('row', None, 'Module with ROW.', required=True)
  _WORKDIR = command.define_workdir()
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  _ONLY = flags.DEFINE_list('only', [], 'Arms to run; default: all.')
  _SEEDS = flags.DEFINE_list('seeds', [], 'Seeds to run; default: all.')
  _STAGE = flags.DEFINE_string('stage', '', 'Runs only this stage (internal).')
  _URL = flags.DEFINE_string('url', '', 'The retrieval server of the stage.')
  command.define_data_dir()
  command.run(main)
