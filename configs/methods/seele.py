"""SEELE: hints as long as half of the attempts need, fitted in rounds.

arXiv 2509.06923, not read; no code was found. A hint is the first turns of a
trace of the data, with what they find; the policy goes on from there. A group
is sampled in rounds. After each, a curve of accuracy over the hint's share x,

    P(x) = c + (1 - c) / (1 + exp(-a (x - b)))

says which hint has P nearest to 1/2. GRPO among all rounds; the tokens of a
hint are imitated, each with the weight of an advantage of 1. Arguments:

  rounds  of a group
  within  True: an attempt is compared with those of its round alone
  traces  where they are, see configs/methods/luffy.py

The sound reading of what the sources leave open: GRPO compares all rounds, not
the last alone; each attempt with a hint imitates it; the first round has none.
So few attempts fit many curves: P is the mean over a grid of them, by their
likelihood. Right is exact match; what a service failed is in no fit. A hint has
whole turns, never the one that answers; without a trace that can be played
there is none. `rollout/traces` counts those with a hint; `reward/em` has them.
"""

import dataclasses
import functools

import numpy as np

from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.rewards import scores
from searchrl_jax.rollout import traces as played

# Of the curves: how steep, where, and what guesses earn.
GRID = (4.0, 8.0, 16.0), np.linspace(-0.5, 1.5, 17), (0.0, 0.1, 0.2)


def get_config(arg=None):
  return core.on_base(arg, change, rounds=4, within=False, traces='')


def change(c, a):
  c.name, objective = 'seele', 'configs.methods.seele.imitated'
  fields = dict(loss='mixed', foreign_objective=objective)
  core.set_algorithm(c, core.GRPO | fields)
  if a.within:
    c.algorithm.advantage = 'grpo_within'
    c.algorithm.advantage_kw.label = 'round'
  c.rollout.sampler = 'configs.methods.seele.scaffolded'
  c.rollout.traces = core.traces_of(c, a.traces)
  c.rollout.hint_rounds = a.rounds


def imitated(logps, old_logps, advantages):
  """The objective of tokens of hints, [B, T]; see `losses.mixed`."""
  del old_logps, advantages
  return logps


imitated.imitates = True  # whatever its group earns


async def scaffolded(questions, services, *, traces, hint_rounds):
  """The sampler. meta has `hint`, its turns, and `round`."""
  attempt = functools.partial(services.fresh, services.slots())
  answer, of_question = services.env.answer, played.source_of(traces)

  async def group(question, plain, samples):
    name, known = (question.id, samples[-1]), of_question(question)
    starts = [plain, *await played.starts(services, question, known, name[1])]
    tried = []
    for i, own in enumerate(np.array_split(samples, hint_rounds)):
      alive = [t for t in tried if not t.failed]
      right = [scores.exact_match(answer(t), question.answers) for t in alive]
      n = fitted([t.meta['hint'] for t in alive], right, len(starts))
      new = (attempt(starts[n], x, ['hint'] * (n > 0)) for x in own.tolist())
      for t in await services.gather(new):
        meta = {**t.meta, 'hint': n, 'round': i}
        tried.append(dataclasses.replace(t, meta=meta))
      services.count(name, traces=len(own) * (n > 0))
    services.record(*tried)

  return await services.whole(questions, group)


def fitted(hints, right, turns, grid=GRID):
  """How many of `turns` the next hint has; hints, right: of attempts, [n]."""
  a, b, c = (x.reshape(-1, 1) for x in np.meshgrid(*grid))
  p = c + (1 - c) / (1 + np.exp(-a * (np.arange(turns) / turns - b)))
  weights = np.where(np.array(right) > 0, p[:, hints], 1 - p[:, hints]).prod(1)
  off = np.abs(weights @ p / weights.sum() - 0.5)
  return int(off.argmin()) if hints else 0


def _check(config):
  n, group = config.hint_rounds, config.group
  what = f'config.rollout.hint_rounds={n}: between 1 and group={group}'
  lookup.require(1 <= n <= group, what)


scaffolded.check, scaffolded.needs = _check, played.needs
scaffolded.foreign = True
scaffolded.cells = lambda c: {'round': c.group // c.hint_rounds}
