"""Search self-play: the loop of searchrl_jax/train.py, forked.

    answers -> proposer's rollouts -> rules -> verification -> solver's rollouts
    -> opposed rewards -> proposer's update -> solver's update -> publish

  python -m experiments.ssp.train --config=configs/ssp.py --workdir=runs/x

One set of weights and one optimizer. Both roles' trajectories are sampled with
the weights before the step's first update; the second update's importance
weights, against the engine's log-probs, correct for the first one. The same
command again continues where the run stopped, with what had ended of its step.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import NamedTuple

from ml_collections import ConfigDict
import numpy as np

from experiments.ssp import game, start, verify
from experiments.ssp.game import PROPOSER, SOLVER, VERIFIER
from experiments.ssp.pool import Pool
from searchrl_jax import checks, lookup
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import require_needs
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluate import grading
from searchrl_jax.learn import batching, credit, teacher
from searchrl_jax.learn.learner import Learner
from searchrl_jax.models import parameters
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rewards import judge as judges
from searchrl_jax.rollout import collector
from searchrl_jax.rollout.chains import greedy, rollout
from searchrl_jax.rollout.core import RolloutStats
from searchrl_jax.run import build, command
from searchrl_jax.run.session import Session
from searchrl_jax.store import folders
from searchrl_jax.types import Group, Rewards, Trajectory


class Step(NamedTuple):
  """The samples of a step."""

  proposed: list[Group]
  asked: list  # the questions of `solved`, dummies included
  solved: list[Group]
  reward: dict[str, Rewards]  # of each role
  shares: dict[str, float]
  metrics: dict[str, float]


class Sampler:
  """Samples the trajectories of a step, of all roles.

  It keeps those that have ended of an unfinished step (`unused` of `Session`).

  Args:
    config: the whole.
    envs: role -> its environment.
    stream: of answers.
    pool: of earlier questions.
    oracle: see `game.proposal_metrics` and `game.hop_term`.
  """

  def __init__(self, config: ConfigDict, envs, stream, pool: Pool, oracle):
    self._config, self._envs, self._stream = config, envs, stream
    self._pool, self._oracle = pool, oracle
    self._ended = collector.Ended()

  def open(self, run: Session, engines, judge, reader) -> None:
    """Sets the services; call it before `sample`."""
    self._run, self._engines = run, engines
    self._judge, self._reader = judge, reader

  def encode(self) -> bytes:
    return collector.encode({self._run.step: self._ended.kept()})

  def decode(self, data: bytes) -> None:
    self._ended = collector.Ended(t for _, t in collector.decode(data))

  def begin(self) -> None:
    """Starts a step."""
    self._cursor = self._stream.state()
    self._stats: list[RolloutStats] = []

  def give_back(self, usable: bool) -> list[Trajectory]:
    """Undoes a step that failed; returns its trajectories that had ended."""
    self._stream.restore(self._cursor)
    ended = self._ended.all()
    if not usable:
      self._ended = collector.Ended()
    return ended

  def finish(self) -> None:
    """The step was trained on."""
    self._ended = collector.Ended()

  def sample(self) -> Step:
    """Proposals, those that stand, and their solutions."""
    config, s, step = self._config, self._config.selfplay, self._run.step
    slots = config.rollout.questions * s.n
    proposed, proposals = self._propose(0)
    for round_ in range(1, s.resample + 1):
      if sum(not p.reason for p in proposals) >= s.min_valid * slots:
        break
      groups, more = self._propose(round_)
      proposed, proposals = proposed + groups, proposals + more
    stand = [p.question for p in proposals if not p.reason][:slots]
    lost = [p.trajectory.question for p in proposals if p.reason]
    rng = game.rng(config, step, 'fill')
    reused, dummies = game.fill(stand, slots, config, self._pool, rng, lost)
    asked = [*stand, *reused, *dummies]
    solved = self._play(SOLVER, asked, config.rollout) if asked else []
    reward = {}
    if solved:
      with self._run.writer.timer('reward'):
        reward[SOLVER] = self._run.signals.run(self._rewards(solved, step))
    shares = game.rates(solved, reward[SOLVER]) if solved else {}
    reward[PROPOSER] = game.opposed(proposals, shares, config, self._oracle)
    new = [shares[q.id] for q in stand if q.id in shares]
    metrics = {
      **sum(self._stats, RolloutStats()).metrics(),
      **game.proposal_metrics(proposals, self._oracle),
      'selfplay/reused': len(reused),
      'selfplay/dummies': len(dummies),
      'selfplay/solver_success': np.mean(new) if new else np.nan,
      'selfplay/proposer_reward': game.mean_of(reward[PROPOSER]),
      'selfplay/pool': len(self._pool),
      **game.solved(
        solved, reward.get(SOLVER), self._envs[SOLVER], config.eval.match
      ),
    }
    return Step(proposed, asked, solved, reward, shares, metrics)

  def _propose(self, round_: int):
    """The proposals of one batch of answers, by the rules and verified."""
    config, step = self._config, self._run.step
    answers = self._stream.next(config.rollout.questions)
    if round_:  # an answer may come again in a step
      answers = [dataclasses.replace(q, id=f'{q.id}+{round_}') for q in answers]
    own = game.role_config(config, PROPOSER).rollout
    groups = self._play(PROPOSER, game.briefs(answers, config, step), own)
    rng = game.rng(config, step, f'hops{round_}')
    groups = game.numbered(groups, config, rng)
    env, reader = self._envs[PROPOSER], self._envs[VERIFIER]
    proposals = [game.read(t, env, config, step) for g in groups for t in g]
    if config.selfplay.verifier != 'none':
      rng = game.rng(config, step, f'verify{round_}')
      proposals = verify.verify(proposals, reader, config, rng, self._answers)
    return groups, proposals

  def _answers(self, questions) -> list[str | None]:
    """Answers of the verifier, without a search."""
    if self._reader:
      with self._run.writer.timer('verify'):
        return self._run.signals.run(self._reader.answers(questions))
    groups = self._play(VERIFIER, questions, greedy(self._config))
    return [self._envs[VERIFIER].answer(t) for (t,) in groups]

  def _play(self, role: str, questions, config_rollout) -> list[Group]:
    run = self._run
    with run.writer.timer(f'rollout_{role}'):
      found = run.signals.run(
        rollout(
          questions,
          env=self._envs[role],
          engine=self._engines[role],
          source=run.source,
          config=config_rollout,
          seed=self._config.seed,
          step=run.step,
          role=role,
          on_trajectory=self._ended.keep,
          ended=self._ended.named(role),
          # The solver's sampler alone may ask.
          reward=functools.partial(self._rewards, whole=False),
          with_routes=role != VERIFIER,
        )
      )
    self._stats.append(found.stats)
    return found.groups

  async def _rewards(
    self, groups: Sequence[Group], step: int, whole: bool = True
  ) -> Rewards:
    """The solver's, of groups of a step; see `rewards.combine`."""
    run, env = self._run, self._envs[SOLVER]
    context = rewards.RewardContext(
      step, env, env.tokenizer, run.engine, run.source, self._judge
    )
    terms = self._config.reward
    return await rewards.combine(terms, groups, context, whole)


def train(config, workdir: str) -> dict[str, float]:
  """Trains to config.train.steps; returns the last metrics.

  Raises:
    As searchrl_jax.train.train; JudgeError where a judge verifies.
  """
  start.check(config)
  with folders.locked_once(workdir):
    return _train(config, workdir)


def _train(config, workdir: str) -> dict[str, float]:
  """`train`, in a folder that this process has."""
  s = config.selfplay

  # Data, tokens, environments: everything that can fail early.
  stream = data.open_stream(config.data, config.seed)
  sets = config.data.eval and data.load_sets(config.data.eval, config.data)
  require_needs([('self-play', game.briefs, s.hops)], stream.questions)
  rewards.check(config, stream.questions)
  tok = build.tokenizer(config, workdir)
  envs = game.environments(config, tok)
  briefs = game.briefs(stream.questions, config, 0)
  checks.check_prompts(envs[PROPOSER], briefs)
  asked = [*itertools.chain(*sets.values())]
  checks.check_prompts(envs[SOLVER], asked)
  pool = Pool(s, start.fingerprint(config, stream, envs))
  oracle = s.oracle and lookup.function('searchrl_jax', s.oracle)(config)

  # One set of weights; the roles that learn, in the order of their updates.
  mesh = build.mesh(config)
  cfg = parameters.model_config(config, tok.vocab_size, tok.needed)
  learning = (SOLVER,) if s.frozen else (PROPOSER, SOLVER)
  roles = {role: game.role_config(config, role) for role in learning}
  learner = Learner(config, cfg, mesh, roles=roles)
  first = parameters.initial(config, cfg, mesh) if s.frozen else None
  frozen = start.Frozen(first and sync.checksums(first), config)
  sampler = Sampler(config, envs, stream, pool, oracle)
  questions = {'data.train': stream.questions, 'data.eval': asked}
  templates = ('env.template', 'selfplay.template', 'selfplay.reader')
  with Session(
    config,
    workdir,
    'selfplay',
    learner,
    limits=(config.train.steps, config.train.seconds, config.checkpoint.every),
    states={'stream': stream, 'pool': pool, 'frozen': frozen},
    unused=sampler,
    contents=build.contents(config, questions, templates),
  ) as run:
    run.open_source(tok)
    judge = run.open(judges.make(config))
    reader = None
    if s.verifier == 'judge':
      readings = run.workdir / 'readings.jsonl'
      reader = run.open(verify.Reader(config.judge, readings))
    canary = sync.canary_ids(envs[PROPOSER], briefs)
    engines = dict.fromkeys(envs, run.open_engine(tok, canary))
    if s.frozen:  # the proposer stays as it started
      engines[PROPOSER] = run.open_engine(tok, canary, first, 'frozen')
    run.evaluator = sets and grading.Evaluator(
      sets,
      config=config,
      env=envs[SOLVER],
      engine=run.engine,
      source=run.source,
      writer=run.writer,
      runner=run.signals.run,
      judge=judge,
    )
    sampler.open(run, engines, judge, reader)
    run.begin()

    while not run.done:
      sampler.begin()
      with run.unfinished(sampler.give_back):
        found = sampler.sample()
        run.signals.finish(run.engine.rest())

      # The proposer's update first, as the game has it.
      metrics, records = dict(found.metrics), {}
      groups = {PROPOSER: found.proposed, SOLVER: found.solved}
      for i, (role, c) in enumerate(roles.items()):
        if role == SOLVER and run.step < s.solver_from or not groups[role]:
          continue
        seed = config.seed, run.step, i
        with run.writer.timer('batch'):
          batch = batching.of_step(
            groups[role],
            found.reward[role],
            c,
            shards=learner.shards,
            seed=seed,
          )
          asked = teacher.ask(
            batch, c, envs[role], shards=learner.shards, seed=seed
          )
        outputs = learner.outputs(batch, run.writer.timer, role, asked)
        given = credit.assign(c, batch, **outputs._asdict(), greedy=None)
        learned = learner.update(batch.minibatches, outputs, given, run, role)
        learned |= given.metrics | dict(batch.counts)
        metrics |= {f'{role}/{k}': v for k, v in learned.items()}
        records[role] = learner.record(batch, outputs, given, role)
      learner.move_teacher(run.step)
      pool.add([q for q in found.asked if q.source != game.DUMMY], found.shares)
      sampler.finish()
      pool.tick(run.step + 1)
      run.end_step(
        metrics | learner.rates(),
        [
          {
            'groups': groups[role],
            'rewards': found.reward.get(role),
            **records.get(role, {}),
            'part': role,
          }
          for role in groups
        ],
        proposer='selfplay/proposer_reward',
        solver='selfplay/solver_success',
        valid='selfplay/valid_share',
        hops='selfplay/hops',
        eval_em='eval/em',
      )
  return run.metrics


def main():
  train(_CONFIG.value, _WORKDIR.value)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir(opens={'writes': True})
  command.run(main)
