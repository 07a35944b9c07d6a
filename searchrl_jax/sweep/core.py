"""What a sweep is: arms with named changes of a config, seeds, worlds.

A file configs/sweeps/NAME.py has a function

  def get_sweep(arg: str | None = None) -> Sweep

whose argument follows the file's name (`NAME.py:scale=0.1`). `sweep` makes a
`Sweep` of changes: a list of (name, fields), or `grid`. An arm, a seed and a
world are a run. Seeds to choose settings with (`tuning_seeds`) are apart from
those that are reported, and from others, which replicate.

Every warm start (for each seed and world, or one for all) and every run is a
stage, 'warm/NAME/CASE' and 'arms/NAME/CASE', with a folder of this name. CASE
is 'SEED', or 'WORLD-SEED' in a sweep with worlds.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import pathlib
import re
from typing import Any, TypeVar

from ml_collections import ConfigDict

from searchrl_jax import checks, lookup, schema
from searchrl_jax.evaluate import policy as evaluate

T = TypeVar('T')
Config = Callable[[int], ConfigDict]  # of a seed
# (config, run folder, output folder) -> scores by name.
Evaluation = Callable[[ConfigDict, str, str], Mapping[str, float]]
# What a run's seed is for.
REPORT, TUNING, REPLICATION = 'report', 'tuning', 'replication'


def evaluation(fields: Mapping[str, object]) -> Evaluation:
  """`evaluate` with fields of the arm's config changed, {'env.k': value}."""
  return functools.partial(_evaluate, dict(fields))


def _evaluate(fields: dict, config, workdir: str, out: str):
  changed = config.copy_and_resolve_references()
  changed.update_from_flattened_dict(fields)
  return evaluate.evaluate(changed, workdir, out)


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


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Arms and their warm starts.

  arms: the first is the baseline of paired differences. scores: last parts of
  the names of scores to keep ('em' of 'eval/hops=2/em'). curves: metric ->
  label, one panel of curves.png each; the first is the score of the tables.
  worlds: values of data.world_seed, each with every seed; () = the configs'.
  """

  warm: Mapping[str, Start]
  arms: Sequence[Arm]
  scores: Sequence[str]
  curves: Mapping[str, str]
  worlds: Sequence[int] = ()
  tuning_seeds: Sequence[int] = ()

  def arm(self, name: str) -> Arm:
    return _named('arm', name, {arm.name: arm for arm in self.arms})

  def start(self, name: str) -> Start:
    return _named('warm start', name, self.warm)

  def stage(self, stage: str) -> tuple[Arm | Start, str]:
    """What a stage runs, and its case."""
    kind, name, case = stage.split('/')
    return (self.start if kind == 'warm' else self.arm)(name), case

  def needs(self, stage: str) -> dict[str, str]:
    """{config field: the stage whose run folder is its value}."""
    one, case = self.stage(stage)
    init = one.warm if isinstance(one, Arm) else one.init
    names = {**({'train.init': init} if init else {}), **one.folders}
    return {
      field: f'warm/{name}/{0 if self.start(name).shared else case}'
      for field, name in names.items()
    }

  def seeds(self, arm: Arm, wanted: Sequence[int] = ()) -> list[int]:
    """Those of `wanted` that an arm lists, and those that no arm lists.

    () = those that it lists, which are reported.
    """
    listed = {seed for one in self.arms for seed in one.seeds}
    wanted = wanted or arm.seeds
    return [s for s in wanted if s in arm.seeds or s not in listed]

  def purpose(self, arm: Arm, case: str) -> str:
    seed, _ = parse(case)
    if seed in arm.seeds:
      return REPORT
    return TUNING if seed in self.tuning_seeds else REPLICATION


def _named(what: str, name: str, known: Mapping[str, T]) -> T:
  if name not in known:  # sought only then: `run` asks ten times a second
    raise lookup.ConfigError(f'{what} {name!r}: {lookup.near(name, known)}')
  return known[name]


def parse(case: str | int) -> tuple[int, int | None]:
  """(seed, world) of a case; an int is a seed."""
  world, _, seed = str(case).rpartition('-')
  return int(seed), int(world) if world else None


def plan(
  sweep: Sweep, arms: Sequence[Arm], seeds: Sequence[int] = ()
) -> list[str]:
  """The stages for `arms`, seed by seed, each after those that it needs.

  seeds: () = those that are reported.

  Raises:
    ConfigError: there are none.
  """
  out: list[str] = []
  chosen = {arm.name: sweep.seeds(arm, seeds) for arm in arms}
  for seed in sorted({s for own in chosen.values() for s in own}):
    for world in sweep.worlds or ('',):
      for name, own in chosen.items():
        if seed in own:
          case = f'{world}-{seed}' if sweep.worlds else seed
          out += before(sweep, f'arms/{name}/{case}')
  lookup.require(
    out, f'--seeds={[*seeds]}: other arms list them, and no chosen one'
  )
  return list(dict.fromkeys(out))


def before(sweep: Sweep, stage: str) -> list[str]:
  """The stages that a stage needs, in order, and itself."""
  needed = [s for n in sweep.needs(stage).values() for s in before(sweep, n)]
  return [*needed, stage]


def needed(
  sweep: Sweep, stages: Sequence[str], kept: Collection[str]
) -> list[str]:
  """The runs of `stages` that are not kept elsewhere, and what these need."""
  left = [s for s in stages if s.startswith('arms/') and s not in kept]
  return [*dict.fromkeys(one for stage in left for one in before(sweep, stage))]


def named(x, packages=True) -> Any:
  """What a function is and does, for JSON.

  packages: False: a module's last name alone, as a file is loaded under it.

  Raises:
    ConfigError: its name does not say it.
  """
  if isinstance(x, functools.partial):
    return [*(named(y, packages) for y in (x.func, *x.args)), x.keywords]
  if not callable(x):
    return x
  module = x.__module__ if packages else x.__module__.rpartition('.')[2]
  name = f'{module}.{getattr(x, "__qualname__", "<object>")}'
  lookup.require(
    '<' not in name,
    f'evaluation {name}: its name does not say what it does; use a function of '
    'a module, or functools.partial of one',
  )
  return name


# ---- Changes of a config.


def grid(fields: Mapping[str, Sequence]) -> list[tuple[str, dict]]:
  """Every combination of values, named 'lr=0.001,kl_coef=0.1'."""
  return [
    (
      ','.join(f'{f.rpartition(".")[2]}={v}' for f, v in zip(fields, values)),
      dict(zip(fields, values)),
    )
    for values in itertools.product(*fields.values())
  ]


def sweep(
  config: Config,
  changes: Sequence[tuple[str, Mapping[str, Any]]],
  *,
  seeds: Sequence[int],
  tuning_seeds: Sequence[int] = (),
  worlds: Sequence[int] = (),
  warm: bool = True,
  scores: Sequence[str] = ('em', 'f1', 'searches', 'parsed', 'tokens'),
  curves: Mapping[str, str] | None = None,
) -> Sweep:
  """Arms that change fields of one config.

  Args:
    config: of a seed.
    changes: (name, fields) of each arm; fields are dotted, {'optim.lr': 1e-3},
      or parts of a config, {'algorithm': algorithms.DAPO}.
    warm: whether `sft` of the unchanged config comes first, for each case.
  """
  return Sweep(
    warm={'warm': Start(config)} if warm else {},
    arms=[
      Arm(
        name,
        functools.partial(changed, config, fields),
        'warm' if warm else '',
        seeds=seeds,
      )
      for name, fields in changes
    ],
    scores=scores,
    curves=curves or {'eval/em': 'exact match', 'reward': 'reward'},
    worlds=worlds,
    tuning_seeds=tuning_seeds,
  )


def changed(make: Config, fields: Mapping[str, Any], seed: int) -> ConfigDict:
  config = make(seed)
  for field, value in _flat(fields, schema.base()):
    part: Any = config
    for name in field.split('.'):
      known = part if isinstance(part, ConfigDict) else ()
      lookup.require(
        name in known,
        f'config has no field {field!r}; {lookup.near(name, known)}',
      )
      part, home = part[name], part
    where = f'config.{field}={value!r}'
    with lookup.of(where, caught=(TypeError, AttributeError)):
      home[name] = ConfigDict(value) if isinstance(part, ConfigDict) else value
  return config


def _flat(fields, known, at: str = '') -> Iterator[tuple[str, Any]]:
  """Dotted fields and values.

  A part whose fields the schema leaves free (algorithm.advantage_kw) is a
  value.
  """
  for name, value in fields.items():
    part = known
    for step in name.split('.'):
      part = part.get(step) if isinstance(part, ConfigDict) else None
    if isinstance(part, ConfigDict) and part and hasattr(value, 'items'):
      yield from _flat(value, part, f'{at}{name}.')
    else:
      yield at + name, value


# ---- Files of sweeps.


def load(spec: str) -> Sweep:
  """The sweep of a file, after `check`; see `read`."""
  made = read(spec)
  with lookup.of(spec):
    check(made)
  return made


def read(spec: str) -> Sweep:
  """The sweep of FILE.py[:ARG], or of a module by its dotted name.

  A module may have ROW, a `Sweep`, in place of get_sweep.

  Raises:
    ConfigError: there is no such file, or it has no sweep.
  """
  path, _, arg = spec.partition(':')
  with lookup.of(spec, caught=(ValueError, ModuleNotFoundError)):
    if path.endswith('.py'):
      file = pathlib.Path(path)
      known = map(str, file.parent.glob('[!_]*.py'))
      lookup.require(
        file.is_file(), f'no such file; {lookup.near(path, known)}'
      )
      found = importlib.util.spec_from_file_location(file.stem, file)
      module = importlib.util.module_from_spec(found)
      found.loader.exec_module(module)
    else:
      module = importlib.import_module(path)
    make = getattr(module, 'get_sweep', None)
    made = make(arg or None) if make else getattr(module, 'ROW', None)
    lookup.require(made, 'it has neither get_sweep nor ROW')
  return made


def check(made: Sweep) -> None:
  """Refuses what cannot run, before anything does.

  Raises:
    ConfigError: two arms of one name, a seed that is tuned with and reported,
      or a config that `train` would refuse; names the arm.
  """
  names = [arm.name for arm in made.arms]
  for name in names:
    lookup.require(
      names.count(name) == 1,
      f'two arms are named {name!r}; give one of them another name',
    )
    lookup.require(
      re.fullmatch(r'[\w.,=+-]+', name),
      f'arm {name!r} names a folder; use letters, digits and any of .,=+-',
    )
  for arm in made.arms:
    both = sorted({*arm.seeds} & {*made.tuning_seeds})
    lookup.require(
      not both,
      f'arm {arm.name!r}: seeds {both} are tuned with and reported; what was '
      'chosen by a seed has to be reported on others',
    )
    with lookup.of(f'arm {arm.name!r}'):
      trained = arm.train and arm.loop == 'train.train'
      fit = checks.check if trained else checks.check_engine
      fit(arm.config([*arm.seeds, 0][0]))
