"""IGPO: a turn earns what its search adds to the likelihood of the answer.

arXiv 2510.14967; GuoqingWang1/IGPO. Phi_t = exp(mean log-prob of the tokens of
the golden answer after what was read up to search t), which the policy itself
gives; search t earns Phi_t - Phi_(t-1), the last turn the outcome. All turns of
a group are normalised together, summed with a discount for each later turn, and
broadcast over the turn. Arguments:

  version  as_written
           as_released: mean and deviation for each position of a token over the
           group, and a sum that each observation cuts, so that a turn keeps its
           own reward alone
  scale    of the gains, against the outcome
  oracle   True: Phi is exact, the share of supporting passages found
  frame    text between history and answer, such as '<answer>'; '' = the
           template's opening tag of an answer

Departs from both: the outcome is the base recipe's, where they take F1; the
first golden answer counts; a history without room for it keeps the last Phi;
the discount is 1 (advantage_kw.gamma), as no value of theirs was found. The
engine scores with its latest weights, those that are to be updated, and at
temperature 1, whatever config.rollout.temperature is.
"""

import asyncio

from ml_collections import ConfigDict
import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn.advantages import normalised
from searchrl_jax.rewards import progress

VERSIONS = {
  'as_written': dict(
    advantage='turn_normalised',
    advantage_kw=dict(gamma=1.0, eps=1e-6, ddof=1, same_turn=False),
  ),
  'as_released': dict(
    advantage='configs.methods.igpo.by_position',
    advantage_kw=dict(eps=1e-6, ddof=1),
  ),
}


def get_config(arg=None):
  return core.on_base(
    arg, change, version='as_written', scale=1.0, oracle=False, frame=''
  )


def change(c, a):
  version = core.chosen('version', a.version, VERSIONS)
  c.name = 'igpo'
  core.set_algorithm(c, algorithms.GRPO | version | dict(aggregation='token'))
  likelihood = dict(
    phi='configs.methods.igpo.likelihood', phi_kw=dict(frame=a.frame)
  )
  phi = {} if a.oracle else likelihood
  c.reward.progress = ConfigDict(core.PROGRESS | phi | dict(scale=a.scale))


async def likelihood(trajectories, context, *, frame: str):
  """Phi of histories, float [1 + observations] each; in (0, 1]."""
  tok, engine, known = context.tokenizer, context.engine, {}
  opened = tok.encode_template(frame or context.env.template.answer[0])

  async def of(ids: tuple, n: int):
    return float(np.exp((await engine.logps(ids))[-n:].mean()))

  wanted = []
  for t in trajectories:
    gold = tok.encode(f' {t.question.answers[0]}')
    rows = [
      (*t.before(n).tolist(), *opened, *gold) for n in progress.histories(t)
    ]
    wanted.append(rows)
    known |= {r: len(gold) for r in rows if len(r) <= engine.max_len}
  found = await asyncio.gather(*(of(r, n) for r, n in known.items()))
  phi = dict(zip(known, found))
  out = []
  for rows in wanted:
    levels = [0.0]
    for row in rows:
      levels.append(phi.get(row, levels[-1]))
    out.append(np.array(levels[1:]))
  return out


likelihood.needs = ('answers',)
likelihood.needs_step = True  # the weights that are to be updated


def by_position(values, valid, group_ids, mask, *, eps: float, ddof: int):
  """As released: statistics by position, each turn keeps its own reward."""
  width, valid = max(map(len, values)), np.asarray(valid, bool)
  x = np.array([np.pad(v, (0, width - len(v))) for v in values], np.float64)
  z = np.stack(
    [normalised(v, valid, group_ids, eps=eps, ddof=ddof) for v in x.T], 1
  )
  out = []
  for row, m in zip(z, mask):
    a, later = np.zeros(len(m), np.float32), 0.0
    for t in reversed(range(len(m))):
      a[t] = later = (row[t] + later) * m[t]
    out.append(a)
  return out


by_position.needs_group = by_position.divides_by_spread = True
