"""The training loop, top to bottom:

    rollouts -> rewards -> batch -> scores -> advantages -> update -> publish

  python -m searchrl_jax.train --config=configs/quickstart.py --workdir=runs/x

The same command again continues where the run stopped. Another scheme
(self-play) forks this file under experiments/; it does not add flags to it.
"""

from collections.abc import Callable
import functools
import itertools

import numpy as np

from searchrl_jax import checks
from searchrl_jax.data import core as data
from searchrl_jax.devices import cluster
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluate import grading, health
from searchrl_jax.learn import advantages, batching, credit
from searchrl_jax.learn.learner import Learner
from searchrl_jax.models import parameters
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rewards import judge as judges
from searchrl_jax.rollout import collector
from searchrl_jax.rollout.chains import greedy, refill_config, rollout
from searchrl_jax.rollout.core import RolloutStats
from searchrl_jax.run import build, command
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
  asked = {
    'data.train': stream.questions,
    'data.eval': [*itertools.chain(*sets.values())],
  }
  questions = [*itertools.chain(*asked.values())]
  build.require_same(config, questions)
  tok = build.tokenizer(config, workdir)
  env = build.environment(config, tok)
  checks.check_prompts(env, questions)

  # Policy, reference and critic; the last checkpoint, or the start.
  mesh = build.mesh(config)
  cfg = parameters.model_config(config, tok.vocab_size)
  learner = Learner(config, cfg, mesh)
  steps, max_staleness = config.train.steps, config.rollout.max_staleness
  rollouts = collector.Collector(
    stream,
    questions=config.rollout.questions,
    steps=steps,
    max_staleness=max_staleness,
  )
  with Session(
    config,
    workdir,
    'train',
    learner,
    limits=(steps, config.train.seconds, config.checkpoint.every),
    states={'stream': rollouts},
    unused=rollouts,
    contents=build.contents(config, asked),
  ) as run:
    source = run.open_source(tok)
    judge = run.open(judges.make(config))
    engine = run.open_engine(tok, sync.canary_ids(env, stream.questions))
    services = {'env': env, 'engine': engine, 'source': source}
    run.evaluator = sets and grading.Evaluator(
      sets,
      config=config,
      **services,
      writer=run.writer,
      runner=run.signals.run,
      judge=judge,
    )
    rewarded = functools.partial(
      rewards_of, config.reward, env, tok, engine, source, judge
    )
    play = functools.partial(
      rollout, **services, seed=config.seed, score=rewarded
    )
    rollouts.open(run.signals, functools.partial(play, config=config.rollout))
    run.begin()

    while not run.done:
      # Questions -> groups of trajectories -> rewards.
      with run.unfinished(functools.partial(rollouts.give_back, run.step)):
        groups, stats, reward = collect(run, config, rollouts, rewarded)
        baseline = greedy_returns(run, config, groups, play, rewarded)
        run.rest()

      # Rewards -> fixed-shape microbatches -> log-probs, values -> advantages.
      with run.writer.timer('batch'):
        batch = batching.of_step(
          groups,
          reward,
          config,
          shards=learner.shards,
          seed=(config.seed, run.step),
        )
      scores = learner.scores(batch.minibatches, run.writer.timer)
      given = credit.assign(config, batch, **scores._asdict(), greedy=baseline)

      # Advantages -> loss -> update; `end_step` publishes the weights.
      learned = learner.update(batch.minibatches, scores, given, run)
      metrics = {
        **{f'train/{k}': v for k, v in (learned | given.metrics).items()},
        **{f'reward/{k}': rewards.mean(v) for k, v in reward.parts.items()},
        **{f'batch/{k}': v for k, v in batch.counts.items()},
        **stats.metrics(),
        **health.signs(groups, env, batch.returns, reward.valid),
        **collector.staleness(groups, run.step, max_staleness),
        'time/engine_idle': rollouts.idle_seconds(),
        'reward': rewards.mean(batch.returns[reward.valid]),
        **learner.rates(),
      }
      run.end_step(
        metrics,
        [learner.record(batch, scores, given)],
        reward='reward',
        em='reward/em',
        searches='health/searches',
        gradient_groups='train/gradient_groups',
        tok_s='rollout/tokens_per_second',
        eval_em='eval/em',
      )
    rollouts.stop()
  return run.metrics


async def rewards_of(terms, env, tok, engine, source, judge, groups, step):
  """The rewards of groups of a step, by the terms of config.reward.

  A sampler may await it on the event loop, while the run does other things.
  """
  context = rewards.RewardContext(step, env, tok, engine, source, judge)
  return await rewards.combine(terms, groups, context)


def collect(run, config, rollouts, rewarded: Callable):
  """The groups of the step, statistics of their rollouts, and their rewards.

  config.rollout.refill: up to so many rounds of further questions in place of
  groups whose rewards are all equal (DAPO, arXiv 2503.14476, section 3.2).
  """
  take = functools.partial(rollouts.take, run.step)
  count = functools.partial(rollouts.count, config.rollout.group)
  groups, stats, reward = played(run, take, rewarded, 'rollout', count)
  for _ in range(config.rollout.refill):
    group_ids, kept, _ = batching.kept_of(groups, reward, config)
    short = config.rollout.questions - len(np.unique(group_ids[kept]))
    if not short:
      break
    again = refill_config(config, groups, short)
    take = functools.partial(rollouts.more, run.step, short, config=again)
    more, seen, earned = played(run, take, rewarded, 'rollout', count)
    reward = rewards.join(reward, earned)
    groups, stats = groups + more, stats + seen
  return groups, stats, reward


def played(run, take: Callable, rewarded: Callable, timer: str, count=None):
  """The groups of all processes, statistics of their rollouts, their rewards.

  take: gives this process's `Rollout`; an error of one process is one of all.
  count: how much of it is done, see `Writer.phase`.
  """

  def own():
    with run.writer.timer(timer, count):
      groups, stats = take()
    if not groups:
      return groups, stats, None
    with run.writer.timer('reward'):
      return groups, stats, run.signals.run(rewarded(groups, run.step))

  groups, stats, reward = zip(*cluster.gather(timer, own))
  together = functools.reduce(RolloutStats.beside, stats)
  earned = functools.reduce(rewards.join, filter(None, reward))
  return [*itertools.chain(*groups)], together, earned


def greedy_returns(run, config, groups, play: Callable, rewarded: Callable):
  """Returns of one greedy answer to each question, if the advantages take them.

  NaN where the answer failed (ReMax, arXiv 2310.10505).
  """
  if 'greedy' not in credit.needs(config.algorithm.advantage):
    return None
  questions = [group[0].question for group in groups]

  def answers():
    own = cluster.part(questions)
    return run.signals.run(play(own, config=greedy(config), step=run.step))

  _, _, reward = played(run, answers, rewarded, 'greedy')
  return np.where(reward.valid, advantages.returns(reward.value), np.nan)


def main():
  train(_CONFIG.value, _WORKDIR.value)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir(opens={'writes': True})
  command.define_cluster()
  command.run(main)
