"""The training loop, top to bottom:

    rollouts -> rewards -> batch -> log-probs -> advantages -> update -> publish

  python -m searchrl_jax.train --config=configs/quickstart.py --workdir=runs/x

The same command again continues where the run stopped. Another scheme
(self-play) forks this file under experiments/; it does not add flags to it.
"""

import itertools

import numpy as np

from searchrl_jax import checks
from searchrl_jax.data import core as data
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluate import grading, health
from searchrl_jax.learn import advantages, batching, credit, teacher
from searchrl_jax.learn.learner import Learner
from searchrl_jax.models import parameters
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rewards import judge as judges
from searchrl_jax.rollout import collector
from searchrl_jax.run import build, command, services
from searchrl_jax.run.session import Session
from searchrl_jax.store import folders


def train(config, workdir: str) -> dict[str, float]:
  """Trains to config.train.steps; returns the last metrics.

  Raises:
    ConfigError, DataError, ...: before anything is trained.
    NonFinite: the loss is not finite; the batch is in the run folder.
    SyncError: the engine does not hold the weights that were published.
    Mismatch: trainer and engine differ beyond the alarm; the run is saved.
    RolloutError: the search service failed too often; the run is saved.
    Stopped: by a signal; the run is saved.
  """
  checks.check(config)
  with folders.locked_once(workdir):
    return _train(config, workdir)


def _train(config, workdir: str) -> dict[str, float]:
  """`train`, in a folder that this process has."""
  # Data, tokens, environment: everything that can fail early.
  stream = data.open_stream(config.data, config.seed)
  sets = config.data.eval and data.load_sets(config.data.eval, config.data)
  checks.check_data(config, stream.questions)
  held_out = [*itertools.chain(*sets.values())]
  asked = {'data.train': stream.questions, 'data.eval': held_out}
  questions = [*stream.questions, *held_out]
  build.require_same_run(config, questions)
  tok = build.tokenizer(config, workdir)
  env = build.environment(config, tok)
  checks.check_prompts(env, questions)

  # Policy, reference and critic; the last checkpoint, or the start.
  mesh = build.mesh(config)
  cfg = parameters.model_config(config, tok.vocab_size, tok.needed)
  services.check_engine(config, cfg)
  learner = Learner(config, cfg, mesh)
  rollouts = collector.Collector(config, stream, batching.useful)
  with Session(
    config,
    workdir,
    'train',
    learner,
    limits=(config.train.steps, config.train.seconds, config.checkpoint.every),
    states={'stream': rollouts},
    unused=rollouts,
    contents=build.contents(config, asked),
  ) as run:
    source = run.open_source(tok)
    judge = run.open(judges.make(config))
    engine = run.open_engine(tok, sync.canary_ids(env, stream.questions))
    shared = dict(env=env, engine=engine, source=source, judge=judge)
    run.evaluator = sets and grading.Evaluator(
      sets, config=config, writer=run.writer, runner=run.signals.run, **shared
    )
    context = rewards.RewardContext(tokenizer=tok, **shared)
    rollouts.open(run.signals, run.writer.timer, context)
    run.begin()

    while not run.done:
      # Questions -> groups of trajectories -> rewards.
      with run.unfinished(rollouts.give_back):
        groups, stats, reward = rollouts.take(run.step)
        baseline = greedy_returns(config, rollouts, groups)
        run.rest()

      # Rewards -> fixed-shape microbatches -> log-probs, values -> advantages.
      with run.writer.timer('batch'):
        seed = config.seed, run.step
        batch = batching.of_step(
          groups, reward, config, shards=learner.shards, seed=seed
        )
        asked = teacher.ask(
          batch, config, env, shards=learner.shards, seed=seed
        )
      outputs = learner.outputs(batch, run.writer.timer, asked=asked)
      given = credit.assign(config, batch, **outputs._asdict(), greedy=baseline)

      # Advantages -> loss -> update; `end_step` publishes the weights.
      learned = learner.update(batch.minibatches, outputs, given, run)
      learner.move_teacher(run.step)
      metrics = {
        **{f'train/{k}': v for k, v in (learned | given.metrics).items()},
        **{f'reward/{k}': rewards.mean(v) for k, v in reward.parts.items()},
        **{f'batch/{k}': v for k, v in batch.counts.items()},
        **stats.metrics(),
        **health.signs(
          groups, env, batch.returns, reward.valid, match=config.eval.match
        ),
        **collector.staleness(groups, run.step, config.rollout.max_staleness),
        'time/engine_idle': rollouts.idle_seconds(),
        'reward': rewards.mean(batch.returns[reward.valid]),
        **learner.rates(),
      }
      run.end_step(
        metrics,
        [learner.record(batch, outputs, given)],
        reward='reward',
        em='reward/em',
        searches='health/searches',
        gradient_groups='train/gradient_groups',
        tok_s='rollout/tokens_per_second',
        eval_em='eval/em',
      )
    rollouts.stop()
  return run.metrics


def greedy_returns(config, rollouts, groups):
  """Returns of one greedy answer to each question, if the advantages take them.

  NaN where the answer failed (ReMax, arXiv 2310.10505).
  """
  if 'greedy' not in credit.needs(config.algorithm.advantage):
    return None
  reward = rollouts.baseline(groups)
  return np.where(reward.valid, advantages.returns(reward.value), np.nan)


def main():
  train(_CONFIG.value, _WORKDIR.value)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir(opens={'writes': True})
  command.define_cluster()
  command.run(main)
