"""Search self-play: the loop of searchrl_jax/train.py, forked.

    answers -> proposer's rollouts -> rules -> verification -> solver's rollouts
    -> opposed rewards -> proposer's update -> solver's update -> sync

  python -m experiments.ssp.train --config=configs/ssp.py --workdir=runs/x

One set of weights and one optimizer. Both roles' trajectories are sampled with
the weights before the step's first update; the second update's importance
weights, against the engine's log-probs, correct for the first one. The same
command again goes on where the run stopped, with what had ended of its step.
"""

import dataclasses
import pathlib
import time
from typing import NamedTuple

from absl import flags
import jax
from ml_collections import ConfigDict
import numpy as np

from experiments.ssp import game, start, verify
from experiments.ssp.game import PROPOSER, SOLVER, VERIFIER
from experiments.ssp.pool import Pool
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import require_answers
from searchrl_jax.engines.core import SyncError
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluators import passk
from searchrl_jax.learn import (
  advantages,
  batching,
  checks,
  credit,
  objectives,
  optim,
  update,
)
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout import collector
from searchrl_jax.rollout.chains import RolloutStats, greedy, rollout
from searchrl_jax.run import build, command, flops, lookup
from searchrl_jax.run.signals import Signals, Stopped
from searchrl_jax.run.writer import Writer
from searchrl_jax.sources.core import require_same
from searchrl_jax.train import check_finite, over
from searchrl_jax.types import Group, Rewards


class Role(NamedTuple):
  config: ConfigDict  # see game.role_config
  updater: update.Updater


class Step(NamedTuple):
  """What a step has sampled."""

  proposals: list[game.Proposal]
  proposed: list[Group]
  asked: list  # the questions of `solved`, dummies included
  solved: list[Group]
  reward: dict[str, Rewards]  # of each role
  shares: dict[str, float]
  metrics: dict[str, float]


def train(config, workdir: str) -> dict[str, float]:
  """Trains to config.train.steps; returns the last metrics.

  Raises:
    checks.ConfigError, data.DataError, ...: before anything is trained.
    The rest as searchrl_jax.train.train; JudgeError where a judge verifies.
  """
  start.check(config)
  s = config.selfplay

  # ---- Data, tokens, environments: everything that can fail early.
  stream = data.open_stream(config.data, config.seed)
  heldout = (
    data.load_sets(config.data.eval, config.data) if config.data.eval else {}
  )
  require_answers(stream.questions, 'self-play')
  build.check_rewards(config, stream.questions)
  tok = build.tokenizer(config, workdir)
  envs = game.environments(config, tok)
  briefs = game.briefs(stream.questions, config)
  checks.check_prompts(envs[PROPOSER], briefs)
  checks.check_prompts(envs[SOLVER], [q for qs in heldout.values() for q in qs])
  pool = Pool(s, start.fingerprint(config, stream, envs))
  oracle = s.oracle and lookup.function('searchrl_jax', s.oracle)(config)

  # ---- Model and optimizer, on the mesh.
  mesh = build.mesh(config)
  cfg = build.model_config(config, tok.vocab_size)
  learning = (SOLVER,) if s.frozen else (PROPOSER, SOLVER)  # in this order
  configs = {role: game.role_config(config, role) for role in learning}
  updates = sum(map(optim.updates, configs.values()))
  shapes = build.shapes(cfg, mesh)
  tx = optim.make(config.optim, updates, shapes)
  roles = {
    role: Role(
      c,
      update.Updater(
        cfg,
        config.batch,
        temperature=config.rollout.temperature,
        tx=tx,
        objective=objectives.policy(c),
        mesh=mesh,
      ),
    )
    for role, c in configs.items()
  }
  updater = roles[SOLVER].updater
  needs_ref = any(c.algorithm.kl != 'none' for c in configs.values())
  critic, critic_shapes = (
    build.critic_updater(config, cfg, mesh)
    if config.critic.lr
    else (None, None)
  )

  # ---- The last checkpoint of this folder; the start, if there is none.
  saver = build.saver(config, workdir)
  aside = pathlib.Path(workdir) / 'ended.bin'
  fingerprint = {'stage': 'selfplay', **dataclasses.asdict(cfg)}
  first = build.parameters(config, cfg, mesh) if s.frozen else None
  asks = first and sync.manifest(first)  # who proposes, if it is frozen
  kept = {}  # (role, question id, sample) -> what has ended of this step
  seen = []  # and all of it, failures too
  if saver.latest() is not None:
    like = {
      'state': updater.abstract(shapes),
      'ref': shapes if needs_ref else None,
    }
    if critic:
      like['critic'] = critic.abstract(critic_shapes)
    saved = saver.restore(like, 'latest', fingerprint=fingerprint)
    state, ref = saved.state['state'], saved.state['ref']
    critic_state = saved.state.get('critic')
    stream.restore(saved.extras['stream'])
    pool.restore(saved.extras['pool'])
    served, step = saved.extras['served'], saved.step
    start.require_start(saved.extras.get('frozen'), asks, config)
    ended = collector.kept(aside, step)
    kept = game.ended(
      saved.arrays['ended'].tobytes() if ended is None else ended
    )
  else:
    state = updater.init(build.parameters(config, cfg, mesh))
    # The step donates its state, so the reference owns a copy.
    ref = update.copy(state.params) if needs_ref else None
    critic_state = critic and critic.init(
      build.critic(config, cfg, state.params, mesh)
    )
    step, served = 0, {}

  with (
    build.retrieval(config, workdir) as url,
    Writer(
      workdir,
      config,
      step=step,
      steps=config.train.steps,
      about={
        'devices': [str(d) for d in jax.devices()],
        'parameters': cfg.n_params,
      },
    ) as writer,
    Signals() as signals,
  ):
    source = build.source(config, url, lambda: engine, tok, mesh, workdir)
    signals.at_exit(source.close)
    about = signals.finish(source.check()).get('identity', {})
    require_same(served, about)
    judge = build.judge(config)
    if judge:
      signals.at_exit(judge.close)
      signals.finish(judge.check())
    reader = s.verifier == 'judge' and verify.Reader(
      config.judge, pathlib.Path(workdir) / 'readings.jsonl'
    )
    if reader:
      signals.at_exit(reader.close)
      signals.finish(reader.check())
    canary = sync.canary_ids(envs[PROPOSER], briefs)
    engine = build.engine(config, cfg, state.params, tok, mesh, workdir)
    signals.at_exit(engine.shutdown)
    engines = {role: engine for role in envs}
    if s.frozen:  # who proposes stays as it started
      engines[PROPOSER] = build.engine(
        config, cfg, first, tok, mesh, f'{workdir}/frozen'
      )
      signals.at_exit(engines[PROPOSER].shutdown)
      signals.finish(
        build.first_weights(config, engines[PROPOSER], cfg, first, mesh, canary)
      )
    evaluator = heldout and passk.make(
      config,
      heldout,
      env=envs[SOLVER],
      engine=engine,
      source=source,
      writer=writer,
      run=signals.run,
      judge=judge,
    )
    with writer.timer('compile'):
      for role in roles.values():
        role.updater.warmup(state, score=needs_old(role) or ref is not None)
      if critic:
        critic.warmup(critic_state, score=True)
      for one in dict.fromkeys(engines.values()):
        one.warmup()
    peak = flops.peak_flops(measure=True) * jax.device_count()
    trainer_logps = sync.forward_logps(cfg, mesh)
    started = time.monotonic()

    # ---- A step's trajectories.
    def play(role, questions, config_rollout, stats):
      def keep(t):
        seen.append(t)
        if not t.failed:  # for the fault of a service: is tried again
          kept[role, t.question.id, t.sample] = t

      with writer.timer(f'rollout_{role}'):
        found = signals.run(
          rollout(
            questions,
            env=envs[role],
            engine=engines[role],
            source=source,
            config=config_rollout,
            seed=config.seed,
            step=step,
            role=role,
            on_trajectory=keep,
            ended={name[1:]: t for name, t in kept.items() if name[0] == role},
          )
        )
      stats.append(found.stats)
      return found.groups

    def rewarded(groups):
      with writer.timer('reward'):
        return signals.run(
          rewards.combine(
            config.reward,
            groups,
            rewards.RewardContext(
              step, envs[SOLVER], tok, engine, source, judge
            ),
          )
        )

    def read(questions, stats):
      """Answers of the reader, without a search."""
      if reader:
        with writer.timer('verify'):
          return signals.run(reader.answers(questions))
      groups = play(VERIFIER, questions, greedy(config), stats)
      return [envs[VERIFIER].answer(t) for (t,) in groups]

    def propose(round_, stats):
      """The proposals of one batch of answers, by the rules and verified."""
      answers = stream.next(config.rollout.questions)
      if round_:  # an answer may come again in a step
        answers = [
          dataclasses.replace(q, id=f'{q.id}+{round_}') for q in answers
        ]
      groups = play(
        PROPOSER,
        game.briefs(answers, config),
        game.role_config(config, PROPOSER).rollout,
        stats,
      )
      proposals = [
        game.read(t, envs[PROPOSER], config, step) for g in groups for t in g
      ]
      if s.verifier != 'none':
        proposals = verify.verify(
          proposals,
          envs[VERIFIER],
          config,
          game.rng(config, step, f'verify{round_}'),
          lambda questions: read(questions, stats),
        )
      return groups, proposals

    def collect() -> Step:
      stats = []
      slots = config.rollout.questions * s.n
      proposed, proposals = propose(0, stats)
      for round_ in range(1, s.resample + 1):
        if sum(not p.reason for p in proposals) >= s.min_valid * slots:
          break
        groups, more = propose(round_, stats)
        proposed, proposals = proposed + groups, proposals + more
      stand = [p.question for p in proposals if not p.reason][:slots]
      reused, dummies = game.fill(
        stand,
        slots,
        config,
        pool,
        game.rng(config, step, 'fill'),
        [p.trajectory.question for p in proposals if p.reason],
      )
      asked = [*stand, *reused, *dummies]
      solved = play(SOLVER, asked, config.rollout, stats) if asked else []
      reward = {SOLVER: rewarded(solved)} if solved else {}
      shares = game.rates(solved, reward[SOLVER]) if solved else {}
      reward[PROPOSER] = game.opposed(proposals, shares, config)
      new = [shares[q.id] for q in stand if q.id in shares]
      return Step(
        proposals,
        proposed,
        asked,
        solved,
        reward,
        shares,
        {
          **sum(stats, RolloutStats()).metrics(),
          **game.told(proposals, oracle),
          'selfplay/reused': len(reused),
          'selfplay/dummies': len(dummies),
          'selfplay/solver_success': np.mean(new) if new else np.nan,
          'selfplay/proposer_reward': game.mean_of(reward[PROPOSER]),
          'selfplay/pool': len(pool),
        },
      )

    # ---- Trajectories -> rewards -> advantages -> update, of one role.
    def learn(role, groups, reward):
      nonlocal state, critic_state, seconds, done
      c, own = roles[role]
      trajectories = rewards.flat(groups)
      group_ids = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
      usable, counts = batching.keep(
        advantages.returns(reward.value),
        reward.valid,
        group_ids,
        drop_zero_variance=c.algorithm.drop_zero_variance,
      )
      with writer.timer('batch'):
        batches = batching.make(
          trajectories,
          usable,
          group_ids,
          c,
          shards=own.shards,
          seed=(config.seed, step, list(roles).index(role)),
        )
      with writer.timer('score'):
        none = [None] * len(batches)
        old = none
        if needs_old(roles[role]):
          old = own.scores(state.params, batches)
        refs = own.scores(ref, batches) if c.algorithm.kl != 'none' else none
        before = (
          critic.scores(critic_state.params, batches) if (c.critic.lr) else None
        )
      given = credit.assign(
        c,
        groups,
        reward,
        usable,
        group_ids,
        batches,
        old=old,
        ref=refs,
        values=before,
        greedy=None,
      )
      per_update = []
      for _ in range(c.algorithm.epochs):
        for i, mini in enumerate(batches):
          found = {}
          if c.critic.lr:
            filled = batching.set_advantages(mini, given.targets)
            with writer.timer('critic'):
              critic_state, found = critic.step(critic_state, filled, before[i])
            check_finite(found, workdir, step, filled)
            found = objectives.explained(found)
          if step >= c.critic.alone:
            filled = batching.set_advantages(mini, given.advantages)
            begin = time.monotonic()
            with writer.timer('update'):
              state, learned = own.step(state, filled, old[i], refs[i])
            check_finite(learned, workdir, step, filled)
            seconds += time.monotonic() - begin
            done += flops.update_flops(cfg, mini)
            found |= learned
          per_update.append(found)
      return {
        'kept': usable,
        'advantages': given.advantages,
        'trainer_logps': batching.rows(
          batches, old, batching.masks(trajectories)
        )
        if needs_old(roles[role])
        else None,
      }, {
        **{
          f'{role}/{k}': over(k)([m[k] for m in per_update])
          for k in (per_update[0] if per_update else ())
        },
        **{f'{role}/{k}': v for k, v in given.metrics.items()},
        **{f'{role}/{k}': v for k, v in counts.items()},
      }

    def publish():
      with writer.timer('sync'):
        return signals.finish(
          sync.sync_and_verify(
            engine,
            state.params,
            step,
            canary,
            lambda ids: trainer_logps(state.params, ids),
            config.engine.canary_tolerance,
          )
        )

    def evaluate():
      with writer.timer('evaluate'):
        # Labelled by the last step done, as the metrics are.
        return dict(evaluator.run(step - 1)) if evaluator else {}

    def save(metrics):
      ended = collector.encode({step: list(kept.values())})
      if step in saver.steps():
        collector.keep(aside, step, ended)
        return
      with writer.timer('checkpoint'):
        writer.flush()
        saver.save(
          step,
          {'state': state, 'ref': ref}
          | ({'critic': critic_state} if critic else {}),
          metrics=metrics,
          extras={
            'stream': stream.state(),
            'pool': pool.state(),
            'served': about,
            'version': step,
            'frozen': asks,
          },
          arrays={'ended': np.frombuffer(ended, np.uint8)},
          fingerprint=fingerprint,
        )

    publish()
    metrics = {}
    if step == 0 and config.eval.every:
      metrics = evaluate()
      writer.write(-1, metrics)

    # ---- The loop.
    while step < config.train.steps:
      cursor = stream.state()
      seen[:] = kept.values()
      try:
        found = collect()
        signals.finish(engine.rest())
      except Exception as e:  # a service, a signal, a question too long
        # Nothing of this step was used: the next start takes it again.
        stream.restore(cursor)
        if isinstance(e, SyncError):
          kept.clear()
        save(metrics)
        writer.trajectories(step, [seen])
        raise

      # The proposer's update first, as the game has it.
      seconds, done, learned, given = 0.0, 0.0, {}, {}
      groups = {PROPOSER: found.proposed, SOLVER: found.solved}
      for role in roles:
        if role == SOLVER and step < s.solver_from or not groups[role]:
          continue
        given[role], told = learn(role, groups[role], found.reward[role])
        learned |= told
      pool.add([q for q in found.asked if q.source != game.DUMMY], found.shares)
      step += 1
      pool.tick(step)
      kept.clear()

      # Updated weights -> engine, verified. If that fails, or a signal came,
      # the step is kept all the same: the updates are whole.
      report, failure = None, None
      try:
        signals.finish(engine.wake())
        if not signals.stop:
          report = publish()
      except Exception as e:
        failure = e

      metrics = {
        **learned,
        **found.metrics,
        **game.solved(found.solved, found.reward.get(SOLVER), envs[SOLVER]),
        'train/lr': float(
          optim.schedule(config.optim, updates)(max(int(state.step) - 1, 0))
        ),
        'train/mfu': done / seconds / peak if peak and seconds else 0.0,
        'sync/canary_max_diff': report.canary_max_diff if report else np.nan,
      }
      late = 0 < config.train.seconds < time.monotonic() - started
      last = step == config.train.steps or late
      every, evaluated = config.eval.every, False
      due = last or (every and step % every == 0)
      if due and evaluator and not signals.stop and failure is None:
        try:
          metrics |= evaluate()
          evaluated = True
        except Stopped:
          pass  # minded below, after the save
        except Exception as e:
          failure = e  # raised below: the step itself is whole
      last = last or signals.stop or failure is not None
      with writer.timer('write'):
        for role in groups:
          writer.trajectories(
            step - 1,
            groups[role],
            found.reward.get(role),
            part=role,
            every=config.log.trajectories_every,
            **given.get(role, {}),
          )
      # Before the save: a resume drops what is of steps that were not saved.
      metrics = writer.write(step - 1, metrics)
      every = config.checkpoint.every
      best = evaluated and config.checkpoint.best
      if last or best or (every and step % every == 0):
        save(metrics)
      writer.progress(
        metrics,
        proposer='selfplay/proposer_reward',
        solver='selfplay/solver_success',
        valid='selfplay/valid_share',
        hops='selfplay/hops',
        eval_em='eval/em',
      )
      if failure is not None:
        raise failure
      if signals.stop:
        raise Stopped(f'stopped by a signal after step {step}; saved')
      if late:
        break
  return metrics


def needs_old(role: Role) -> bool:
  in_reward = role.config.algorithm.kl == 'reward'
  return role.updater.objective.needs_old or in_reward


def main():
  config, workdir = _CONFIG.value, _WORKDIR.value
  if _DRY_RUN.value:
    print(start.report(config, build.tokenizer(config, workdir).vocab_size))
    return
  train(config, workdir)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir()
  _DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Print memory and the arithmetic of a step, then stop.'
  )
  command.run(main)
