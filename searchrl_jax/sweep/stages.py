"""Runs one stage of a sweep: a warm start, or an arm of one case."""

from collections.abc import Iterator
import contextlib
import json
import os
import pathlib
import signal
import threading
import time

from ml_collections import ConfigDict

from searchrl_jax import lookup, sft
from searchrl_jax.data import core as data
from searchrl_jax.devices import cluster
from searchrl_jax.models import parameters
from searchrl_jax.run import build, services
from searchrl_jax.store import folders, records, writer
from searchrl_jax.sweep import core
from searchrl_jax.sweep.core import Arm, Start, Sweep

# Fields that `sft` does not read, so they do not change a warm start.
UNREAD = (
  'algorithm', 'eval', 'judge', 'reward', 'rollout', 'selfplay',
  'train.seconds', 'train.steps',
)  # fmt: skip
ENDS = 'sft.seconds', 'train.seconds'
EVALUATION = 'evaluation.json'  # what was measured, beside values.json


class Clock:
  """Seconds of each stage; what a resumed stage takes adds up."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    self.seconds = json.loads(path.read_text()) if path.exists() else {}

  @contextlib.contextmanager
  def __call__(self, stage: str) -> Iterator[None]:
    begin = time.monotonic()
    try:
      yield
    finally:
      spent = self.seconds.get(stage, 0.0) + time.monotonic() - begin
      self.seconds[stage] = spent
      records.write_json(self._path, self.seconds)


def config_of(sweep: Sweep, stage: str, workdir: pathlib.Path) -> ConfigDict:
  """The stage's config, with the folders of the warm starts that it needs."""
  one, case = sweep.stage(stage)
  seed, world = core.parse(case)
  config = one.config(seed)
  if world is not None:
    config.data.world_seed = world
  needs = sweep.needs(stage).items()
  config.update_from_flattened_dict(
    {field: str(workdir / start / 'run') for field, start in needs}
  )
  return config


# JSON of the parts of a config that name questions and templates -> digests.
_contents: dict[str, dict[str, str]] = {}


def contents(sweep: Sweep, stage: str, workdir: pathlib.Path) -> dict[str, str]:
  """What the stage's config names, by content: 'config.FIELD' -> digest.

  What this machine does not have is left out: data of another one, warm starts
  that are not complete.
  """
  config = config_of(sweep, stage, workdir)
  one, _ = sweep.stage(stage)
  sets = {'data.train': config.data.train, 'data.eval': config.data.eval}
  sets = {} if isinstance(one, Start) else {k: v for k, v in sets.items() if v}
  templates = config.env.template, config.rollout.refiner
  parts = [*sets], config.data, templates, config.source
  key = json.dumps(records.plain(parts))
  if key not in _contents:
    found = {}
    with contextlib.suppress(ValueError, OSError, RuntimeError, ImportError):
      for field, named in sets.items():
        loaded = data.load_sets(named, config.data).values()
        found[field] = [q for questions in loaded for q in questions]
      _contents[key] = build.contents(config, found)
  out = dict(_contents.get(key, {}))
  for field, start in sweep.needs(stage).items():
    if (workdir / start / 'done.json').exists():
      out[f'config.{field}'] = parameters.digest(str(workdir / start / 'run'))
  return {field: value for field, value in out.items() if value}


def done(sweep: Sweep, stage: str, workdir: pathlib.Path) -> bool:
  """Whether a stage is complete.

  Raises:
    ConfigError: it was run with another config, or with other contents of
      what that names.
  """
  folder = workdir / stage
  if not (folder / 'done.json').exists():
    return False
  about = json.loads((folder / 'done.json').read_text())
  before = records.plain(records.filled(about['config']))
  now = records.plain(config_of(sweep, stage, workdir))
  one, _ = sweep.stage(stage)
  free = tuple(f'{x}.' for x in (UNREAD if isinstance(one, Start) else ()))
  for field, (old, new) in lookup.differences(before, now).items():
    moved = field in sweep.needs(stage) and _within(old) == _within(new)
    # Where a finished stage ended depends on its time.
    other = field not in ENDS and writer.is_free(field)
    lookup.require(
      moved or other or f'{field}.'.startswith(free),
      f'{folder} was run with another config: {field} was {old!r} and is '
      f'{new!r} now; remove that folder, or set another --workdir',
    )
  made = about['contents']  # {} of a config that names nothing
  named = contents(sweep, stage, workdir) if made else {}
  lookup.require_contents(folder, made, named)
  if isinstance(one, Start):
    return True
  lookup.require(
    not one.train or about.get('loop', one.loop) == one.loop,
    f'{folder} was trained by {about.get("loop")!r}, and {one.loop!r} is the '
    'loop now; remove that folder, or set another --workdir',
  )
  return all(
    _measured(folder / variant, measure)
    for variant, measure in one.evaluations.items()
  )


def _measured(folder: pathlib.Path, measure: core.Evaluation) -> bool:
  """Whether there are values of an evaluation.

  Raises:
    ConfigError: they are those of another one.
  """
  if not (folder / 'values.json').exists():
    return False
  about = folder / EVALUATION
  now = _definition(measure)
  before = json.loads(about.read_text()) if about.exists() else now
  lookup.require(
    now is None or before == now,
    f'{folder} has the values of another evaluation: {before}, and {now} now; '
    'remove that folder, or set another --workdir',
  )
  return True


def _definition(measure: core.Evaluation):
  """`core.named`, as JSON has it; None where that says too little."""
  try:
    return json.loads(json.dumps(core.named(measure, packages=False)))
  except (lookup.ConfigError, TypeError):
    return None


def _within(run: str) -> tuple[str, ...]:
  """The parts of warm/NAME/CASE/run, without the folder of the sweep."""
  return pathlib.PurePath(run).parts[-4:]


def run_stage(
  sweep: Sweep, stage: str, workdir: pathlib.Path, url: str
) -> None:
  """Trains and evaluates one stage; resumes an interrupted one.

  url: of the retrieval server; '' = as the config has it.
  """
  # A process whose sweep was killed saves before it ends.
  with folders.locked(workdir / stage, wait=True):
    _run_stage(sweep, stage, workdir, url)


def _run_stage(sweep, stage: str, workdir: pathlib.Path, url: str) -> None:
  folder, config = workdir / stage, config_of(sweep, stage, workdir)
  # In a queue, a stage begins also where one before it has failed.
  for start in sweep.needs(stage).values():
    finished = (workdir / start / 'done.json').exists()
    message = (
      f'{stage} starts from {start}, which is not complete: run it first'
    )
    lookup.require(finished, message)
  plain = records.plain(config)
  config.source.url = url or config.source.url
  clock = Clock(folder / 'seconds.json')
  one, _ = sweep.stage(stage)
  arm = one if isinstance(one, Arm) else None
  run = str(folder / 'run')
  if not (folder / 'done.json').exists():
    content = {'config': plain, 'contents': contents(sweep, stage, workdir)}
    # Before it trains: files may change meanwhile.
    commit = writer.environment()['commit'] or 'none'
    about = {'commit': commit, 'code': cluster.code()}
    if arm is None or arm.train:
      with clock('train'):
        loop = lookup.function('searchrl_jax', arm.loop) if arm else sft.sft
        loop(config, run)
      if arm:
        content['loop'] = arm.loop
    records.write_json(folder / 'done.json', content | about)
  if arm is None:
    return
  # An arm without training is its warm start, or a Hugging Face folder ('').
  run = run if arm.train else config.train.init
  for variant, measure in arm.evaluations.items():
    out = folder / variant
    if _measured(out, measure):
      continue
    defined = _definition(measure)
    with clock('evaluate'):
      values = measure(config, run, str(out))
    if defined is not None:
      records.write_json(out / EVALUATION, defined)
    records.write_json(out / 'values.json', values)


class Servers(contextlib.ExitStack):
  """A retrieval server for each world and kind of source, started by `url`."""

  def __init__(self, workdir: pathlib.Path):
    super().__init__()
    self._folder, self._urls = workdir / 'worlds', {}

  def url(self, config: ConfigDict) -> str:
    data, source = config.data, config.source
    world = data.dir, data.world_module, data.world_seed, data.world
    where = source.module, source.corpus, source.url
    key = json.dumps(records.plain([*where, *world]))
    if key not in self._urls:
      folder = str(self._folder / str(len(self._urls)))
      server = services.retrieval(config, folder)
      self._urls[key] = self.enter_context(server)
    return self._urls[key]


def end_with_parent() -> None:
  """Sends SIGTERM to this process when standard input closes."""

  def watch():
    while os.read(0, 1):  # sys.stdin's own lock would outlive the process
      pass
    os.kill(os.getpid(), signal.SIGTERM)

  threading.Thread(target=watch, daemon=True).start()
