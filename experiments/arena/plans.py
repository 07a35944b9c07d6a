"""A comparison of the arena: methods, their settings, and the phases.

A `Batch` is a comparison: methods, and the warm start that they have in common;
arms.py and second.py have one each. A row is a method: its file in
configs/methods/, the argument that scales its shaping with three values, and
its claims, against the outcome-only row with the same estimator. Phases:

  assay     before any method is judged: GRPO from each mixture of the warm
            start, with exact credit for turns, and with that credit shuffled
            (oracle.py), on ASSAY seeds; three of them from other mixtures than
            that of the comparison
  tune      each row with three learning rates, KL coefficients and scales, one
            value changed at a time, on TUNING seeds; rows without a scale have
            as many trials; rows with the rate of another (`Method.rate`) have
            none of these, and are tuned after it: run both phases twice
  confirm   the best trial of each row where it is not the default, and the
            default, on CONFIRMING seeds: the best of noisy means is so by
            chance, too
  pilot     each row as tuned on PILOT seeds: the spread of paired differences,
            which says how many reporting seeds are needed
  report    each row as tuned, its controls, further runs of those that claims
            are against, these with default settings where the tuning chose
            others, and GRPO on a corpus that lacks passages, on the reporting
            seeds
  stress    each row as tuned, but for STRESS x the base's learning rate
  mixtures  each row as tuned, from the other warm starts
  recipes   rows outside the comparison (recipes.py)

Arms of a seed share its world, warm start and questions, and play as many
trajectories; the tokens that they sample are among the values (leaves of a tree
share some). Another base recipe can take the place of atlas, with a source,
data and model of its own, no warm start, and the settings tuned on atlas:
`--base=base=search_r1,model=Qwen/Qwen2.5-3B`.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs import atlas as recipe
from experiments.arena import measure, oracle, recipes
from experiments.arena.verdicts import MARGIN, Claim
from searchrl_jax import lookup
from searchrl_jax.sweep import core
from searchrl_jax.worlds import atlas_traces

TUNED = 'tuned.json'
ASSAY = (100, 101, 102, 103, 104, 105)
TUNING, CONFIRMING = ASSAY[:2], ASSAY[2:]
PILOT = (200, 201, 202, 203)
REPORTING = tuple(range(12))  # the pilot needs 8; the rest is for Holm's p
CONTROLS = REPORTING[:6]  # which no verdict needs, but for those of GRPO
MIXES = tuple(mix for mix in atlas_traces.MIXES if mix != 'skills')
FEW = REPORTING[:3]  # of what no claim is about
RATES = (1.0, 0.5, 2.0)  # x the learning rate of the base recipe
MORE_RATES = (0.25, 4.0)  # for arms without a scale
KLS = (0.0, 0.003, 0.03)
STRESS = 4  # x the learning rate of the base recipe, for all rows
MISSING = 0.1  # share of passages that the incomplete corpus lacks
ALIKE = 0.1  # of the baseline's tokens in training: others need a baseline more


@dataclasses.dataclass(frozen=True)
class Method:
  """A row.

  scale: an argument of the file, or a field of the config, that scales its
  shaping, and three values, the default first; None = outcome only. claims:
  see verdicts.py; fixed before the reporting seeds run. file: in
  configs/methods/; '' = the name. fields: of the config, in all its arms.
  controls: name -> fields of the config: 'shuffled' credit says nothing about
  what earned it, 'oracle' credit is exact, 'at_end' comes too late to tell
  turns apart. repeats: further runs of each reporting seed, of a row that
  claims are against. arg: further arguments of the file. start: the row whose
  config has the traces of its warm start; '' = the batch's. evaluation: in the
  place of `measure.measured`. aside: no claim is about it; it is not tuned, and
  has FEW seeds; later: those beside FEW, for a row that was picked by its FEW
  results. rate: the row whose learning rate it has, as tuned; '': it is tuned
  for one of its own. guided: what it samples in training is not the policy's
  own single attempts, so that 'run/em' is not compared.
  """

  name: str
  scale: tuple[str, tuple[float, ...]] | None = None
  claims: tuple[Claim, ...] = ()
  file: str = ''
  arg: str = ''
  start: str = ''
  evaluation: core.Evaluation | None = None
  aside: bool = False
  later: bool = False
  rate: str = ''
  guided: bool = False
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  controls: Mapping[str, Mapping[str, Any]] = dataclasses.field(
    default_factory=dict
  )
  repeats: int = 0

  @property
  def default(self) -> dict[str, float]:
    out = {'lr': RATES[0], 'kl': KLS[0]}
    return out | ({'scale': self.scale[1][0]} if self.scale else {})

  @property
  def again(self) -> tuple[str, ...]:
    """The arms of its further runs."""
    return tuple(f'{self.name}-{n + 2}' for n in range(self.repeats))

  def trials(
    self, kls: tuple[float, ...] = KLS, rate: float = RATES[0]
  ) -> Iterator[dict[str, float]]:
    """Settings to try: the default, and each with one value changed."""
    values = {'lr': RATES if self.scale else RATES + MORE_RATES, 'kl': kls}
    if self.rate:
      del values['lr']
    if self.scale:
      values['scale'] = self.scale[1]
    yield (first := self.default | {'lr': rate})
    for field, options in values.items():
      yield from (first | {field: value} for value in options[1:])


TRIALS = 'tune', 'confirm'  # the phases that choose settings
OF_ANY_BASE = 'pilot', 'report', 'stress'  # others need atlas's warm starts
NAMES = 'assay', *TRIALS, 'pilot', 'report', 'stress', 'mixtures'


def config(
  row: Method,
  setting: Mapping[str, float],
  fields: Mapping[str, Any],
  base: str,
  seed: int,
) -> ConfigDict:
  """The config of a row with a setting.

  fields: further changes; `seed` is added to the case's, which the world keeps.
  base: arguments of the base recipe.
  """
  name, value = row.scale[0] if row.scale else '', setting.get('scale')
  fields = {**row.fields, **fields, 'seed': seed + fields.get('seed', 0)}
  if setting['kl']:
    fields |= {'algorithm.kl': 'loss', 'algorithm.kl_coef': setting['kl']}
    if base:  # atlas was tuned with the rows' own (../LOG.md, 2026-12-02)
      fields['algorithm.kl_estimator'] = 'k3'
  parts = [f'seed={seed}', base, row.arg]
  if '.' in name:
    fields[name] = value
  elif name:
    parts.append(f'{name}={value}')
  module = importlib.import_module(f'configs.methods.{row.file or row.name}')
  argument = ','.join(filter(None, parts))
  c = core.changed(lambda _: module.get_config(argument), fields, seed)
  c.optim.lr *= setting['lr']
  return c


def _evaluation(plan: 'Plan') -> core.Evaluation:
  if 'source.dials' in plan.fields:
    return measure.on_whole_corpus
  return plan.row.evaluation or measure.measured


class Plan(NamedTuple):
  """An arm before it has a config. seeds: () = all of its phase."""

  name: str
  row: Method
  setting: Mapping[str, float]
  fields: Mapping[str, Any] = {}
  mix: str = ''  # of the warm start; '' = the batch's
  seeds: tuple[int, ...] = ()


def _atlas(mix: str, seed: int) -> ConfigDict:
  return recipe.get_config(f'mix={mix},seed={seed}')


@dataclasses.dataclass(frozen=True)
class Batch:
  """Rows that are compared with each other.

  file: of this package, whose get_sweep has the phases. folder: of tuned.json,
  runs.csv and results. names: of its phases. start: (mixture, seed) -> config
  of a warm start. change: called with the config of each arm, and its row.
  mixes: of the warm start; `mix` is the first. kls: coefficients that the
  tuning tries. first: of the reporting seeds: no batch reports on those of
  another, whose results have chosen its rows. score: what the assay is about,
  and what rows are compared by beside their claims. margin: differences of it
  below this do not matter. window: of GRPO's score, which leaves room to both
  sides. by_tokens: whether rows with claims have a further baseline that
  samples as many tokens, where theirs differ by more than ALIKE. tuned_first:
  the assay has GRPO as tuned, and comes after `confirm`.
  """

  methods: tuple[Method, ...]
  file: str
  folder: pathlib.Path
  names: tuple[str, ...]
  start: Callable[[str, int], ConfigDict] = _atlas
  change: Callable[[ConfigDict, Method], None] = lambda config, row: None
  mixes: tuple[str, ...] = MIXES
  kls: tuple[float, ...] = KLS
  first: int = 0
  score: str = 'hard/em'
  margin: float = MARGIN
  window: tuple[float, float] = (0.3, 0.7)
  by_tokens: bool = False
  tuned_first: bool = False

  def goal(self, row: Method) -> Claim:
    """What its settings are chosen by: its first claim, or the score."""
    score = Claim(row.name, '', self.score, margin=self.margin)
    return (*row.claims, score)[0]

  def baseline(self, row: Method) -> Method:
    """The row without a method from the same warm start."""
    same = [x for x in self.methods if x.start == row.start]
    plain = [x for x in same if x.name != row.start]
    return (plain if row.start else same)[0]

  def as_many_tokens(self, row: Method) -> str:
    """The arm of its baseline with as many tokens."""
    return f'{self.baseline(row).name}-as-{row.name}'

  @property
  def mix(self) -> str:
    """Of the warm starts of all phases but the first and the last."""
    return self.mixes[0]

  @property
  def reporting(self) -> tuple[int, ...]:
    return tuple(self.first + seed for seed in REPORTING)

  @property
  def few(self) -> tuple[int, ...]:
    """Of what no claim is about."""
    return self.reporting[: len(FEW)]

  def seeds(self, row: Method) -> tuple[int, ...]:
    """Of a row that is aside; () of others, which have all of a phase."""
    late = self.reporting[len(FEW) :]
    return (late if row.later else self.few) if row.aside else ()

  @property
  def claims(self) -> tuple[Claim, ...]:
    return tuple(claim for row in self.methods for claim in row.claims)

  @property
  def rows(self) -> tuple[Method, ...]:
    """Those that claims are about, or against."""
    return tuple(row for row in self.methods if not row.aside)

  @property
  def phases(
    self,
  ) -> dict[str, tuple[Callable[[], Iterator[Plan]], tuple[int, ...]]]:
    """Name -> its plans, and its seeds."""
    seeds = dict(assay=ASSAY, tune=TUNING, confirm=CONFIRMING, pilot=PILOT)
    seeds |= dict.fromkeys(('report', 'stress'), self.reporting)
    seeds['mixtures'] = self.few
    return {
      name: (getattr(self, name), seeds[name])
      for name in self.names
      if name != recipes.PHASE
    }

  def chosen(self, what: str, row: Method, phase: str) -> Any:
    path = self.folder / TUNED
    known = json.loads(path.read_text()) if path.exists() else {}
    lookup.require(
      row.name in known.get(what, {}),
      f'{TUNED} has no {what} of {row.name!r}: run --phase={phase} first',
    )
    return known[what][row.name]

  def tuned(self, row: Method) -> Mapping[str, float]:
    """The setting that the tuning chose.

    Raises:
      ConfigError: it has not run.
    """
    if not row.aside:
      return self.chosen('settings', row, 'confirm')
    return row.default | {'lr': self.rate(row)}

  def rate(self, row: Method) -> float:
    """The learning rate of its trials, or of an aside.

    Raises:
      ConfigError: it is that of another row, whose tuning has not run.
    """
    base = [x for x in self.methods if x.name == row.rate]
    return self.tuned(base[0])['lr'] if base else RATES[0]

  @property
  def tunable(self) -> tuple[Method, ...]:
    """Rows that have a rate by now: others are tuned when it is known."""
    out = []
    for row in self.rows:
      with contextlib.suppress(lookup.ConfigError):
        self.rate(row)
        out.append(row)
    return tuple(out)

  def share(self, row: Method) -> float:
    """Tokens that a row as tuned samples in training, of the baseline's."""
    return self.chosen('share', row, 'confirm')

  def assayed(self, mix: str) -> tuple[int, ...]:
    """Seeds of the assay from a mixture."""
    return ASSAY if mix == self.mix else ASSAY[:3]

  def assay(self) -> Iterator[Plan]:
    grpo = self.methods[0]
    setting = self.tuned(grpo) if self.tuned_first else grpo.default
    for mix in self.mixes:
      for name, fields in {'grpo': {}, **oracle.ARMS}.items():
        seeds = self.assayed(mix)
        yield Plan(f'{name}-{mix}', grpo, setting, fields, mix, seeds)

  def tune(self) -> Iterator[Plan]:
    for row in self.tunable:
      first, *others = row.trials(self.kls, self.rate(row))
      yield Plan(row.name, row, first)
      for setting in others:
        changed = (f'{k}={v}' for k, v in setting.items() if v != first[k])
        yield Plan(','.join([row.name, *changed]), row, setting)

  def confirm(self) -> Iterator[Plan]:
    for row in self.tunable:
      default, best = row.name, self.chosen('best', row, 'tune')
      if best != default:
        yield from (p for p in self.tune() if p.name in (default, best))

  def pilot(self) -> Iterator[Plan]:
    for row in self.methods:
      yield Plan(row.name, row, self.tuned(row), seeds=self.seeds(row))

  def report(self) -> Iterator[Plan]:
    yield from self.pilot()
    for row in self.methods:
      for n, name in enumerate(row.again, 1):
        again = {'seed': 10_000 * n}  # of samples and the questions' order
        yield Plan(name, row, self.tuned(row), again)
      if row.repeats and self.tuned(row) != row.default:
        yield Plan(f'{row.name}-default', row, row.default)
    named = {claim.against for claim in self.claims}
    some = self.reporting[: len(CONTROLS)]
    for row in self.methods:
      for name, fields in row.controls.items():
        arm, seeds = f'{row.name}-{name}', some if row.scale else ()
        seeds = () if arm in named else self.seeds(row) or seeds
        yield Plan(arm, row, self.tuned(row), fields, seeds=seeds)
    for row in self.rows if self.by_tokens else ():
      base = self.baseline(row)
      arm, share = self.as_many_tokens(row), self.share(row)
      unlike = row.claims and abs(share - 1) > ALIKE
      if arm in named or unlike:
        questions = round(recipe.get_config().rollout.questions * share)
        fields = {'rollout.questions': questions}
        seeds = () if arm in named else some
        yield Plan(arm, base, self.tuned(base), fields, seeds=seeds)
    if 'grpo-missing' in named:
      grpo = self.methods[0]
      lacks = {'source.dials': {'missing': MISSING}}
      yield Plan('grpo-missing', grpo, self.tuned(grpo), lacks)

  def stress(self) -> Iterator[Plan]:
    judged = [claim for claim in self.claims if claim.phase == 'stress']
    needed = {name for c in judged for name in (c.method, c.against)}
    for plan in self.pilot():
      setting = {**plan.setting, 'lr': STRESS}
      seeds = () if plan.name in needed else self.few
      if plan.name in needed or not plan.row.aside:
        yield plan._replace(setting=setting, seeds=seeds)

  def mixtures(self) -> Iterator[Plan]:
    for mix in self.mixes:
      for plan in self.pilot() if mix != self.mix else ():
        yield plan._replace(name=f'{plan.name}-{mix}', mix=mix)

  def start_of(self, name: str, seed: int) -> ConfigDict:
    """The config of a warm start: a mixture, `skills`, or a row."""
    own = [row for row in self.methods if row.start == row.name == name]
    if not own:
      return self.start(name, seed)
    c = config(own[0], own[0].default, {}, f'mix={self.mix}', seed)
    self.change(c, own[0])
    return c

  def config(self, plan: Plan, base: str, seed: int) -> ConfigDict:
    c = config(plan.row, plan.setting, plan.fields, base, seed)
    self.change(c, plan.row)
    return c

  def sweep(self, phase: str, base: str = '') -> core.Sweep:
    """The arms of a phase.

    base: arguments of another base recipe.

    Raises:
      ConfigError: there is no such phase, or it is of atlas alone.
    """
    known = ', '.join(self.names)
    lookup.require(phase in self.names, f'phase {phase!r}: one of {known}')
    message = f'phase {phase!r} is of atlas: leave --base out'
    lookup.require(not base or phase in OF_ANY_BASE, message)
    if phase == recipes.PHASE:
      return recipes.get_sweep()
    make, seeds = self.phases[phase]
    plans, warm = [*make()], {}
    if not base:
      starts = {plan.row.start or plan.mix or self.mix: 0 for plan in plans}
      for name in {'skills': 0} | starts:
        init = '' if name == 'skills' else 'skills'
        warm[name] = core.Start(functools.partial(self.start_of, name), init)
    arms = [
      core.Arm(
        # Phases share a folder, and with it warm starts.
        f'stress-{plan.name}' if phase == 'stress' else plan.name,
        functools.partial(self.config, plan, base),
        (plan.row.start or plan.mix or self.mix) if warm else '',
        evaluations={'after': _evaluation(plan)},
        seeds=plan.seeds or seeds,
      )
      for plan in plans
    ]
    curves = {'reward': 'reward', 'health/searches': 'searches'}
    return core.Sweep(warm, arms, measure.SCORES + measure.TRAINING, curves)

  def get_sweep(self, arg=None) -> core.Sweep:
    """PHASE, or PHASE with arguments of the base recipe: 'report,model=...'."""
    phase, _, base = (arg or 'report').partition(',')
    return self.sweep(phase, base)
