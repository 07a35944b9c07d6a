"""The trained policy, with its reference and critic if it has them.

`Learner` owns the arrays; `update.Updater` compiles the programs.
"""

from collections.abc import Mapping, Sequence
import time
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.learn import batching, objectives, optim, update
from searchrl_jax.learn import credit as credits
from searchrl_jax.learn import critic as critics
from searchrl_jax.learn import teacher as teachers
from searchrl_jax.learn.credit import Credit
from searchrl_jax.models import flops, lora, parameters, pretrained
from searchrl_jax.rewards import core as rewards


class Outputs(NamedTuple):
  """Of a step before its first update; the lists have an array [B, T] for each
  microbatch of each minibatch."""

  old: list  # log-probs of the policy; None: not needed
  ref: list  # of the reference policy; None: not needed
  values: list | None  # of the critic
  told: teachers.Said = teachers.Said({}, {})  # by a teacher


class Learner:
  """Parameters, optimizer states and updates of a run (`trained` of `Session`).

  Args:
    config: the whole.
    cfg: the policy's `DecoderConfig`.
    mesh: the devices.
    roles: role -> config of its updates, in their order; all roles share the
      parameters, the optimizer and the critic. None: one role, ''.
    supervised: the optimizer's config and number of updates, for training on
      given text instead of config.algorithm.

  Attributes:
    updater: of the last role.
    frozen: parameters that stay as they started, {} without adapters; shapes
      before `start` or `restore`.
    shards: devices along which the rows of a microbatch lie.
  """

  def __init__(
    self,
    config: ConfigDict,
    cfg: Any,
    mesh: Any,
    *,
    roles: Mapping[str, ConfigDict] | None = None,
    supervised: tuple[ConfigDict, int] | None = None,
  ):
    self._config, self.cfg, self.mesh = config, cfg, mesh
    lookup.require(
      config.model.dtype != 'float16',
      "config.model.dtype='float16': gradients of tokens are below what it "
      "holds, and would be 0; use 'bfloat16' or 'float32'",
    )
    self._roles, self._supervised = dict(roles or {'': config}), supervised
    updates = sum(map(optim.updates, self._roles.values()))
    self._optim, self._updates = supervised or (config.optim, updates)
    tx = optim.make(self._optim, self._updates)
    temperature = 1.0 if supervised else config.rollout.temperature
    n = config.env.max_contexts
    shared = dict(tx=tx, mesh=mesh, temperature=temperature, contexts=n)
    replays = config.engine.record_routes and not supervised
    self._updaters: dict[str, update.Updater] = {}
    for role, c in self._roles.items():
      goal = objectives.supervised() if supervised else objectives.policy(c)
      self._updaters[role] = self.updater = update.Updater(
        cfg, config.batch, objective=goal, replays=replays, **shared
      )
    taught = not supervised and any(map(self._taught, self._roles))
    lookup.require(
      config.teacher.columns.k <= cfg.vocab_size,
      f'config.teacher.columns.k={config.teacher.columns.k} ids of a '
      f'vocabulary of {cfg.vocab_size}: use fewer',
    )
    weights = config.teacher.weights if taught else 'live'
    self._teacher_weights = weights
    self._has_ref = not supervised and (
      weights == 'frozen'
      or any(c.algorithm.kl != 'none' for c in self._roles.values())
    )
    self._critic = None
    if config.critic.lr and not supervised:
      fields = own_optim(config, config.critic)
      self._critic_optim = fields
      self._critic = self._updaters['critic'] = update.Updater(
        critics.config(cfg),
        config.batch,
        temperature=1.0,
        mesh=mesh,
        contexts=n,
        tx=optim.make(fields, max(optim.critic_updates(config), 1)),
        objective=objectives.value(config),
      )
    self._ref = self.updater.shapes if self._has_ref else {}
    self.shards = self.updater.shards
    self._seconds = self._flops = 0.0
    self._freeze(self.updater.frozen)

  # The life of a run.

  def _freeze(self, frozen: dict) -> None:
    self.frozen = frozen
    for updater in self._updaters.values():  # the critic shares the policy's
      updater.frozen = frozen

  @property
  def params(self) -> Any:
    """Of the policy, all."""
    return lora.join(self._state.params, self.frozen)

  def like(self) -> dict:
    critic = self._critic and self._critic.abstract
    tree = {'state': self.updater.abstract, 'critic': critic}
    return tree | self._own_teacher(self.updater.shapes)

  def _own_teacher(self, params) -> dict:
    """Those of a teacher whose weights change apart from the policy's."""
    own = self._teacher_weights in ('copy', 'ema')
    return {'teacher': params} if own else {}

  @property
  def fixed(self) -> dict[str, dict]:
    """Subfolder of the run -> parameters that never change, {} for none."""
    return {parameters.BASE: self.frozen, 'reference': self._ref}

  def restore(self, tree: dict, fixed: dict) -> None:
    self._freeze(fixed[parameters.BASE])
    self._ref = fixed['reference']
    self._state, self._critic_state = tree['state'], tree['critic']
    self._teacher = tree.get('teacher')

  def start(self, params: Any) -> None:
    """From these parameters; a critic, from config.critic.path or the same.

    Raises:
      ConfigError: config.critic.path is no folder, or holds another model.
    """
    trained, frozen = lora.split(self.cfg, params)
    self._freeze(frozen)
    self._state = self.updater.init(trained)
    # An update donates the state: the reference owns a copy, of the adapters
    # alone if there are any.
    trained = self._state.params
    self._ref = update.copy(trained) if self._has_ref else {}
    self._teacher = self._own_teacher(update.copy(trained)).get('teacher')
    self._critic_state = None
    if self._critic:
      path = self._config.critic.path
      if path:
        folder = parameters.local(path, 'config.critic.path')
        with lookup.of(f'config.critic.path={path!r}'):
          _, trained = pretrained.load(folder, self.mesh, cfg=self.cfg)
      fresh = critics.init(trained, self._critic.cfg)
      self._critic_state = self._critic.init(fresh)

  def tree(self) -> dict:
    tree = {'state': self._state, 'critic': self._critic_state}
    return tree | self._own_teacher(self._teacher)

  def compile(self) -> dict[str, update.Updater]:
    """Compiles every program from shapes; returns the updaters by role.

    The critic's has the role 'critic'. No parameter is needed.
    """
    for role, updater in self._updaters.items():
      values = updater is self._critic
      asked = values or self._has_ref or self.needs_old(role)
      updater.warmup(score=asked or self._taught(role))
    return self._updaters

  def warmup(self) -> None:
    self.compile()
    if not self._supervised:
      devices = self.mesh.size if self.mesh else jax.device_count()
      self._peak = flops.peak_flops() * devices

  # A step.

  def needs_old(self, role: str = '') -> bool:
    """Whether log-probs before the step's first update are computed."""
    algorithm = self._roles[role].algorithm
    objective = self._updaters[role].objective
    taught = 'delta' in credits.needs(algorithm.advantage)
    return objective.needs_old or algorithm.kl == 'reward' or taught

  def _taught(self, role: str) -> bool:
    """Whether the role's advantages, or its loss, take what a teacher says."""
    config = self._roles[role]
    taken = credits.needs(config.algorithm.advantage)
    return bool(config.teacher.columns.k or {'delta', 'gold'} & {*taken})

  def outputs(
    self,
    batch: batching.StepBatch,
    timer,
    role: str = '',
    asked: Sequence[teachers.Asked | teachers.Columns] = (),
  ) -> Outputs:
    """Log-probs and values of a step's rows, and what its teacher says."""
    config, updater = self._roles[role], self._updaters[role]
    minibatches, arrays, metrics = batch.minibatches, {}, {}
    columns = compared = None
    none = [None] * len(minibatches)

    def of(wanted, updater, params):
      return updater.outputs(params, minibatches) if wanted else none

    with timer('score'):
      old = of(self.needs_old(role), updater, self._state.params)
      ref = of(config.algorithm.kl != 'none', updater, self._ref)
      values = None
      if config.critic.lr:
        values = self._critic.outputs(self._critic_state.params, minibatches)
      own = None
      if asked and self.needs_old(role):
        own = batching.unpacked(minibatches, old, batch.masks)
      weights = {'live': self._state.params, 'frozen': self._ref}
      for question in asked:
        params = weights.get(self._teacher_weights, self._teacher)
        if isinstance(question, teachers.Columns):
          both = self._state.params, params
          columns, more = teachers.compare(question, batch, updater, *both)
          compared = np.array([w.any() for w in question.weights], bool)
        else:
          scored = updater.outputs(params, question.minibatches)
          arrays[question.name], more = question.read(scored, own)
        metrics |= more
    told = teachers.Said(arrays, metrics, columns, compared)
    return Outputs(old, ref, values, told)

  def update(
    self, minibatches: Sequence, outputs: Outputs, credit: Credit, run, role=''
  ) -> dict[str, float]:
    """The updates of a step: every minibatch, config.algorithm.epochs times.

    Args:
      minibatches: of microbatches.
      outputs: of them.
      credit: advantages of the trajectories, and targets of the critic.
      run: the `Session`: its step, timers and check of non-finite updates.
      role: whose.

    Returns:
      means over the updates ('_max': the largest), by name.

    Raises:
      NonFinite: nothing was updated; the batch is in the run's folder.
    """
    config, updater = self._roles[role], self._updaters[role]
    timer, per_update = run.writer.timer, []
    if minibatches:
      self._move_schedules(role, run.step)
    for _ in range(config.algorithm.epochs):
      for i, mini in enumerate(minibatches):
        metrics = {}
        if config.critic.lr:
          filled = batching.set_advantages(mini, credit.targets)
          with timer('critic'):
            self._critic_state, metrics = self._critic.step(
              self._critic_state, filled, outputs.values[i]
            )
          run.check_finite(metrics, filled)
          metrics = objectives.explained(metrics)
        # At first only the critic is trained: its values are still near 0.
        if run.step >= config.critic.pretrain_steps:
          filled = batching.set_advantages(mini, credit.advantages)
          begin = time.monotonic()
          with timer('update'):
            columns = outputs.told.columns
            told = [columns[i]] if columns else []
            self._state, learned = updater.step(
              self._state, filled, outputs.old[i], outputs.ref[i], *told
            )
          run.check_finite(learned, filled)
          self._seconds += time.monotonic() - begin
          self._flops += flops.update_flops(self.cfg, mini)
          metrics |= learned
        per_update.append(metrics)
    # Not every update has tokens at every depth.
    names = dict.fromkeys(name for metrics in per_update for name in metrics)
    found = {k: [m[k] for m in per_update if k in m] for k in names}
    largest = lambda name: name.partition('/')[0].endswith('_max')
    join = lambda name: np.max if largest(name) else rewards.mean
    return {name: join(name)(values) for name, values in found.items()}

  def move_teacher(self, step: int) -> None:
    """Moves a teacher's own weights, after all updates of a step."""
    teacher, new = self._config.teacher, self._state.params
    if self._teacher_weights == 'ema':
      self._teacher = _towards(self._teacher, new, np.float32(teacher.rate))
    elif self._teacher_weights == 'copy' and (step + 1) % teacher.every == 0:
      self._teacher = update.copy(new)

  def _move_schedules(self, role: str, step: int) -> None:
    """To where a role's updates of a step begin, if none of any fell away."""
    each = {name: optim.step_updates(c) for name, c in self._roles.items()}
    names = [*each]
    earlier = sum(each[name] for name in names[: names.index(role)])
    steps = max(step - self._config.critic.pretrain_steps, 0)
    at = steps * sum(each.values()) + earlier
    moved = optim.move(self._optim, self._state.opt_state, at)
    self._state = self._state._replace(opt_state=moved)
    if self._roles[role].critic.lr:
      old, at = self._critic_state, step * each[role]
      moved = optim.move(self._critic_optim, old.opt_state, at)
      self._critic_state = old._replace(opt_state=moved)

  def record(
    self, batch: batching.StepBatch, outputs: Outputs, credit: Credit, role=''
  ) -> dict[str, Any]:
    """Keywords of `Writer.trajectories` for a step."""
    logps = None
    if self.needs_old(role):  # of no minibatch: nothing is kept
      logps = batching.unpacked(batch.minibatches, outputs.old, batch.masks)
    return {
      'groups': batch.groups,
      'rewards': batch.reward,
      'kept': batch.kept,
      'advantages': credit.advantages,
      'trainer_logps': logps,
    }

  def step(self, mini: Sequence) -> dict[str, float]:
    """One supervised update; see `Updater.step`."""
    self._state, metrics = self.updater.step(self._state, mini)
    return metrics

  def rates(self) -> dict[str, float]:
    """Learning rate of the last update, and model FLOPs utilisation (MFU) of
    the updates since the last call."""
    done, seconds = self._flops, self._seconds
    self._flops = self._seconds = 0.0
    rate = optim.schedule(self._optim, self._updates)
    share = done / seconds / self._peak if self._peak and seconds else 0.0
    last = max(optim.scheduled(self._state.opt_state) - 1, 0)
    return {'train/lr': float(rate(last)), 'train/mfu': share}


@jax.jit
def _towards(old, new, rate):
  """old + rate (new - old), of trees of parameters."""
  return jax.tree.map(lambda a, b: a + rate.astype(a.dtype) * (b - a), old, new)


def own_optim(config: ConfigDict, part: ConfigDict) -> ConfigDict:
  """config.optim with the rate, schedule and decay of `part` of the config."""
  out = config.optim.copy_and_resolve_references()
  for name in ('lr', 'schedule', 'warmup', 'weight_decay'):
    out[name] = part[name]
  return out
