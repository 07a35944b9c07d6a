"""ECHO: GRPO that also learns what the tools answer.

arXiv 2605.24517; PrimeIntellect-ai/prime-rl, algo/echo.py. The loss is GRPO's
over the policy's tokens plus coefficient x the mean cross entropy of the tokens
of observations. They are in the loss (env.train_observations) with an advantage
of their own, whose gradient is that of cross entropy; both parts have their own
number of tokens as divisor. Texts of the environment that no tool wrote
(feedback, notes) have weight 0; a term of entropy or KL, which would count
them, is refused. Argument:

  scale    the coefficient

Departs from both: with several updates of a step a token of an observation is
clipped as the others are; the tags around an observation are learnt with it.
It learns the corpus by heart: compare what the
policy answers without a search (`evaluate --controls`).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax.learn.advantages import normalised, returns


def get_config(arg=None):
  return core.on_base(arg, change, scale=0.1)


def change(c, a):
  c.name = 'echo'
  kw = dict(scale=a.scale, eps=1e-6, ddof=1)
  name = 'configs.methods.echo.with_observations'
  fields = dict(advantage=name, advantage_kw=kw, aggregation='token')
  fields['entropy_coef'] = 0.0
  core.set_algorithm(c, algorithms.GRPO | fields)
  c.env.train_observations = True


def with_observations(
  values,
  valid,
  group_ids,
  structure,
  mask,
  *,
  scale: float,
  eps: float,
  ddof: int,
):
  """GRPO's advantage, and one of observations; see the module.

  The loss is a mean over all loss tokens, N of them, of which the policy wrote
  P and tools O: its advantages are multiplied by N / P, and those of
  observations are scale N / O.
  """
  valid = np.asarray(valid, bool)
  a = normalised(returns(values), valid, group_ids, eps=eps, ddof=ddof)
  wrote = [turn >= 0 for turn in structure.turns]
  read = [np.zeros(len(m), bool) for m in mask]
  for tokens, spans in zip(read, structure.spans, strict=True):
    for span in spans:
      tokens[span.start : span.end] = span.observes
  read = [r & m for r, m in zip(read, mask, strict=True)]
  count = lambda chosen: sum(int(x.sum()) for x, ok in zip(chosen, valid) if ok)
  n, p, o = count(mask), max(count(wrote), 1), max(count(read), 1)
  return [
    (ok * (w * x * n / p + r * scale * n / o)).astype(np.float32)
    for x, w, r, ok in zip(a, wrote, read, valid, strict=True)
  ]


def _check(config, fields):
  del fields
  how = config.algorithm.aggregation
  core.lookup.require(
    how == 'token',
    f'config.algorithm.aggregation={how!r}: both parts are means over tokens; '
    "use 'token'",
  )
  a = config.algorithm
  core.lookup.require(
    not a.entropy_coef and a.kl != 'loss',
    f'config.algorithm.entropy_coef={a.entropy_coef}, kl={a.kl!r}: a term of '
    "the loss would count observations; use 0 and 'none'",
  )


with_observations.check = _check
with_observations.needs_group = with_observations.divides_by_spread = True
with_observations.observes = 'source'
