"""The training loop, top to bottom:

    questions -> rollouts -> rewards -> advantages -> batch -> update -> sync

  python -m searchrl_jax.train --config=configs/quickstart.py --workdir=runs/x

The same command again goes on where the run stopped. Another scheme (self-play,
tree search) forks this file under experiments/; it does not add flags to it.
"""

import dataclasses
import pathlib
import time

from absl import flags
import jax
import numpy as np

from searchrl_jax.data import core as data
from searchrl_jax.engines.core import SyncError
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluators import health, passk
from searchrl_jax.learn import (
  advantages,
  batching,
  checks,
  credit,
  dryrun,
  objectives,
  optim,
  update,
)
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout import collector
from searchrl_jax.rollout.chains import further, greedy, rollout
from searchrl_jax.run import build, command, flops
from searchrl_jax.run.signals import Mismatch, NonFinite, Signals, Stopped
from searchrl_jax.run.writer import Writer
from searchrl_jax.sources.core import require_same


def train(config, workdir: str) -> dict[str, float]:
  """Trains to config.train.steps; returns the last metrics.

  Raises:
    checks.ConfigError, data.DataError, ...: before anything is trained.
    NonFinite: the loss is not finite; the batch is in the run folder.
    SyncError: the engine does not hold the weights that were published.
    Mismatch: trainer and engine disagree beyond the alarm; a checkpoint is
      saved.
    RolloutError: the search service failed too often; a checkpoint is saved.
    Stopped: by a signal; a checkpoint is saved.
  """
  checks.check(config)

  # ---- Data, tokens, environment: everything that can fail early.
  stream = data.open_stream(config.data, config.seed)
  heldout = (
    data.load_sets(config.data.eval, config.data) if config.data.eval else {}
  )
  build.check_rewards(config, stream.questions)
  tok = build.tokenizer(config, workdir)
  env = build.environment(config, tok)
  checks.check_prompts(
    env, [*stream.questions, *(q for qs in heldout.values() for q in qs)]
  )

  # ---- Model and optimizer, on the mesh.
  mesh = build.mesh(config)
  cfg = build.model_config(config, tok.vocab_size)
  updates = optim.updates(config)
  shapes = build.shapes(cfg, mesh)
  tx = optim.make(config.optim, updates, shapes)
  updater = update.Updater(
    cfg,
    config.batch,
    temperature=config.rollout.temperature,
    tx=tx,
    objective=objectives.policy(config),
    mesh=mesh,
  )
  needs_ref = config.algorithm.kl != 'none'
  critic, critic_shapes = (
    build.critic_updater(config, cfg, mesh)
    if config.critic.lr
    else (None, None)
  )

  # ---- The last checkpoint of this folder; the start, if there is none.
  saver = build.saver(config, workdir)
  aside = pathlib.Path(workdir) / 'ended.bin'
  fingerprint = {'stage': 'train', **dataclasses.asdict(cfg)}
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
    served = saved.extras.get('served', {})
    step, ended = saved.step, collector.kept(aside, saved.step)
    if ended is None:
      ended = saved.arrays['ended'].tobytes()
  else:
    state = updater.init(build.parameters(config, cfg, mesh))
    # The step donates its state, so the reference owns a copy.
    ref = update.copy(state.params) if needs_ref else None
    critic_state = critic and critic.init(
      build.critic(config, cfg, state.params, mesh)
    )
    step, served, ended = 0, {}, b''

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
    judge = build.judge(config)
    if judge:
      signals.at_exit(judge.close)
      signals.finish(judge.check())
    about = signals.finish(source.check()).get('identity', {})
    require_same(served, about)
    engine = build.engine(config, cfg, state.params, tok, mesh, workdir)
    signals.at_exit(engine.shutdown)
    evaluator = heldout and passk.make(
      config,
      heldout,
      env=env,
      engine=engine,
      source=source,
      writer=writer,
      run=signals.run,
      judge=judge,
    )
    scores_old = updater.objective.needs_old or config.algorithm.kl == 'reward'
    with writer.timer('compile'):
      updater.warmup(state, score=scores_old or ref is not None)
      if critic:
        critic.warmup(critic_state, score=True)
      engine.warmup()
    peak = flops.peak_flops(measure=True) * jax.device_count()
    trainer_logps = sync.forward_logps(cfg, mesh)
    canary = sync.canary_ids(env, stream.questions)
    started = time.monotonic()

    # Questions -> groups of trajectories, through real searches: of this
    # step, and of the next ones if config.rollout.max_staleness is above 0.
    def play(questions, config_rollout=config.rollout, **step):
      return rollout(
        questions,
        env=env,
        engine=engine,
        source=source,
        config=config_rollout,
        seed=config.seed,
        **step,
      )

    rollouts = collector.Collector(
      signals,
      stream,
      play,
      questions=config.rollout.questions,
      steps=config.train.steps,
      max_staleness=config.rollout.max_staleness,
    )
    rollouts.restore(ended)

    # Trajectories -> rewards.
    def rewarded(groups):
      with writer.timer('reward'):
        return signals.run(
          rewards.combine(
            config.reward,
            groups,
            rewards.RewardContext(step, env, tok, engine, source, judge),
          )
        )

    def keep(reward, groups):
      group_ids = np.repeat(np.arange(len(groups)), [len(g) for g in groups])
      return group_ids, *batching.keep(
        advantages.returns(reward.value),
        reward.valid,
        group_ids,
        drop_zero_variance=config.algorithm.drop_zero_variance,
      )

    def collect():
      with writer.timer('rollout'):
        groups, stats = rollouts.take(step)
      reward = rewarded(groups)
      for _ in range(config.rollout.refill):
        group_ids, kept, _ = keep(reward, groups)
        short = config.rollout.questions - len(np.unique(group_ids[kept]))
        if not short:
          break
        with writer.timer('rollout'):
          more = rollouts.more(
            step, short, config_rollout=further(config, groups, short)
          )
        reward = rewards.join(reward, rewarded(more.groups))
        groups, stats = groups + more.groups, stats + more.stats
      baseline = None
      if 'greedy' in credit.needs(config.algorithm.advantage):
        with writer.timer('greedy'):
          found = signals.run(
            play([g[0].question for g in groups], greedy(config), step=step)
          )
        alone = rewarded(found.groups)
        baseline = np.where(
          alone.valid, advantages.returns(alone.value), np.nan
        )
      return groups, stats, reward, baseline

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
      ended = collector.encode(rollouts.ended())
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
            'stream': rollouts.cursor(),
            'served': about,
            'version': step,
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
      try:
        groups, stats, reward, baseline = collect()
        signals.finish(engine.rest())
      except Exception as e:  # a service, a signal, a question too long
        # Nothing of this step was used: the next start takes it again.
        ended = rollouts.put_back(step, usable=not isinstance(e, SyncError))
        save(metrics)
        # For whoever looks for the cause; that start writes them anew.
        writer.trajectories(step, [ended])
        raise
      trajectories = rewards.flat(groups)

      # Rewards -> advantages -> fixed-shape microbatches.
      with writer.timer('batch'):
        values, valid = advantages.returns(reward.value), reward.valid
        group_ids, kept, counts = keep(reward, groups)
        batches = batching.make(
          trajectories,
          kept,
          group_ids,
          config,
          shards=updater.shards,
          seed=(config.seed, step),
        )
      # Log-probs before the step's first update, the reference's, values.
      with writer.timer('score'):
        none = [None] * len(batches)
        old = updater.scores(state.params, batches) if scores_old else none
        refs = updater.scores(ref, batches) if ref is not None else none
        before = critic and critic.scores(critic_state.params, batches)
      given = credit.assign(
        config,
        groups,
        reward,
        kept,
        group_ids,
        batches,
        old=old,
        ref=refs,
        values=before,
        greedy=baseline,
      )

      # Batch -> loss -> update.
      alone = step < config.critic.alone  # the critic, of values near 0 yet
      seconds, done, per_update = 0.0, 0.0, []
      for _ in range(config.algorithm.epochs):
        for i, mini in enumerate(batches):
          found = {}
          if critic:
            filled = batching.set_advantages(mini, given.targets)
            with writer.timer('critic'):
              critic_state, found = critic.step(critic_state, filled, before[i])
            check_finite(found, workdir, step, filled)
            found = objectives.explained(found)
          if not alone:
            filled = batching.set_advantages(mini, given.advantages)
            begin = time.monotonic()
            with writer.timer('update'):
              state, learned = updater.step(state, filled, old[i], refs[i])
            check_finite(learned, workdir, step, filled)
            seconds += time.monotonic() - begin
            done += flops.update_flops(cfg, mini)
            found |= learned
          per_update.append(found)
      step += 1

      # Updated weights -> engine, verified. If that fails, or a signal came,
      # the step is kept all the same: the update is whole.
      report, failure = None, None
      try:
        signals.finish(engine.wake())
        if not signals.stop:
          report = publish()
      except Exception as e:
        failure = e

      metrics = {
        **{
          f'train/{k}': over(k)([m[k] for m in per_update])
          for k in (per_update[0] if per_update else ())
        },
        **{f'train/{k}': v for k, v in given.metrics.items()},
        **{
          f'reward/{k}': float(np.nanmean(v)) for k, v in reward.parts.items()
        },
        **{f'batch/{k}': v for k, v in counts.items()},
        **stats.metrics(),
        **health.signs(groups, env, values, valid),
        **collector.staleness(groups, step - 1, config.rollout.max_staleness),
        'time/engine_idle': rollouts.idle_seconds(),
        'reward': float(values[valid].mean()) if valid.any() else 0.0,
        'train/lr': float(
          optim.schedule(config.optim, updates)(max(int(state.step) - 1, 0))
        ),
        'train/mfu': done / seconds / peak if peak and seconds else 0.0,
        'sync/canary_max_diff': report.canary_max_diff if report else np.nan,
      }
      alarm = config.rollout.mismatch_alarm
      apart = metrics.get('train/mismatch_abs', 0.0)
      if 0 < alarm < apart and failure is None:
        failure = Mismatch(
          f'step {step - 1}: log-probs of trainer and engine differ by {apart} '
          f'on average (config.rollout.mismatch_alarm={alarm}); saved. Raise '
          'the alarm (0 = none) to go on, or start again with a lower '
          'rollout.max_staleness, or one dtype for model and engine'
        )
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
        writer.trajectories(
          step - 1,
          groups,
          reward,
          kept=kept,
          advantages=given.advantages,
          trainer_logps=batching.rows(
            batches, old, batching.masks(trajectories)
          )
          if scores_old
          else None,
          every=config.log.trajectories_every,
        )
      # Before the save: a resume drops what is of steps that were not saved.
      metrics = writer.write(step - 1, metrics)
      every = config.checkpoint.every
      best = evaluated and config.checkpoint.best
      if last or best or (every and step % every == 0):
        save(metrics)
      writer.progress(
        metrics,
        reward='reward',
        em='reward/em',
        searches='health/searches',
        tok_s='rollout/tokens_per_second',
        eval_em='eval/em',
      )
      if failure is not None:
        raise failure
      if signals.stop:
        raise Stopped(f'stopped by a signal after step {step}; saved')
      if late:
        break
    rollouts.stop()
  return metrics


def over(metric: str):
  """How the updates of a step make one number of a metric."""
  return np.max if metric.endswith('_max') else mean


def mean(values) -> float:
  """Of those that are known."""
  known = [v for v in values if not np.isnan(v)]
  return float(np.mean(known)) if known else float('nan')


def check_finite(found, workdir: str, step: int, batches) -> None:
  """Keeps the batch of an update that was not done, and stops."""
  if not found['finite']:
    path = save_batch(workdir, step, batches)
    raise NonFinite(
      f'step {step}: the loss or its gradient is not finite; nothing was '
      f'updated. The batch is in {path}'
    )


def save_batch(workdir: str, step: int, batches) -> pathlib.Path:
  """What a non-finite update was given, as .npz: one array a field."""
  path = pathlib.Path(workdir) / f'nonfinite_step{step}.npz'
  arrays = {
    f'{i}/{name}': value
    for i, b in enumerate(batches)
    for name, value in vars(b).items()
  }
  np.savez(path, **arrays)
  return path


def main():
  config, workdir = _CONFIG.value, _WORKDIR.value
  if _DRY_RUN.value:
    tok = build.tokenizer(config, workdir)
    print(dryrun.report(config, tok.vocab_size))
    return
  train(config, workdir)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir()
  _DRY_RUN = flags.DEFINE_bool(
    'dry_run',
    False,
    'Print memory for each device and the arithmetic prompts -> trajectories '
    '-> microbatches -> updates, then stop.',
  )
  command.run(main)
