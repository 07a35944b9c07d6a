"""CalibAdv: GRPO that spares good searches of wrong trajectories.

arXiv 2604.18235; wujwyi/CalibAdv. A is GRPO's. Soft penalty: where A < 0, the
tokens of a turn get A (1 - q). q is the share of the passages of its search
that are in the silver set and were not seen before; 0 for a turn without a
search, in a malformed trajectory, after a thought like an earlier one, or with
two or more passages seen before. The silver set: what the trajectories with the
best score of the group have read, if that is high enough. Rebalance: over the
last turns of a group, the positive advantages are scaled to the sum of the
negative ones; if there are none of one sign, they are all 0. Arguments:

  version  sound: only last turns that answer are rebalanced; ratio is that of
           positive to negative sums
           as_released: a run cut short too; the inverse of ratio
  soft, rebalance  False: without this part
  silver   group; oracle: Question.supporting
  ratio    lambda; 1 = equal sums

Departs from both: passages are compared by id, thoughts by token, where they
take text and words; a trajectory without an answer, or with an invalid action,
is malformed. Their third part, a thinking tag in the prompt, is off in their
script too. The outcome is the base recipe's (they: F1 behind a format check).
"""

import numpy as np

from configs import algorithms
from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.learn.advantages import normalised, returns
from searchrl_jax.rewards import ablations

VERSIONS = {'sound': False, 'as_released': True}


def get_config(arg=None):
  known = dict(soft=True, rebalance=True, silver='group', ratio=1.0)
  return core.on_base(arg, change, version='sound', **known)


def change(c, a):
  c.name = 'calib_adv'
  kw = {name: a[name] for name in ('soft', 'rebalance', 'silver', 'ratio')}
  kw |= dict(released=core.chosen('version', a.version, VERSIONS))
  kw |= dict(least=0.7, similar=0.5, eps=1e-6, ddof=1, shuffle=False)
  name = 'configs.methods.calib_adv.calibrated'
  fields = dict(advantage=name, advantage_kw=kw, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)


def calibrated(
  values,
  valid,
  group_ids,
  structure,
  *,
  soft: bool,
  rebalance: bool,
  silver: str,
  ratio: float,
  released: bool,
  least: float,
  similar: float,
  eps: float,
  ddof: int,
  shuffle: bool,
):
  """GRPO's advantage, calibrated by turn; see the module.

  Args:
    values, valid, group_ids, structure: see `searchrl_jax.learn.advantages`.
    least: score that makes a silver set.
    similar: thoughts more alike than this are repeated; 1 = none are.
    shuffle: control: a trajectory's q go to its turns at random.
  """
  s, score, valid = structure, returns(values), np.asarray(valid, bool)
  group, owner = np.asarray(group_ids), structure.owner
  a = normalised(score, valid, group, eps=eps, ddof=ddof)[owner]
  answers = np.array([t.end == 'answer' for t in s.trajectories]) & valid
  good = answers & [not t.invalid_actions for t in s.trajectories]
  if soft:
    q = np.zeros(len(owner))
    for g in np.unique(group[good]):
      members = np.flatnonzero(good & (group == g))
      best = score[valid & (group == g)].max()
      silvers = members[(score[members] == best) & (best >= least)]
      found = {p for i in silvers for x in s.spans[i] for p in x.passages}
      if silver == 'oracle':
        found = {*s.trajectories[members[0]].question.supporting}
      for i in members:
        worth = quality(s.spans[i], found, similar)
        at = np.flatnonzero(owner == i)
        q[at] = [worth.get(n, 0.0) for n in s.number[at]]
    q = s.shuffled(q) if shuffle else q
    a = np.where(a < 0, a * (1 - q), a)
  if rebalance:
    tokens = np.bincount(np.concatenate(s.turns) + 1, minlength=len(owner) + 1)
    last = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    last &= valid[owner] if released else answers[owner]
    for g in np.unique(group):
      at = last & (group[owner] == g)
      up, down = ((tokens[1:] * a)[at & (f * a > 0)].sum() for f in (1, -1))
      if not (up and down):
        a[at] = 0.0
      else:
        a[at & (a > 0)] *= -down / up * (1 / ratio if released else ratio)
  return s.over_tokens(a)


def quality(spans, silver, similar: float) -> dict[int, float]:
  """q of each turn with a search, of a well-formed trajectory."""
  seen, thoughts, out = set(), {}, {}
  for span in spans:
    if span.acts and span.segment.kind == 'think':
      thoughts.setdefault(span.turn, []).extend(span.segment.ids.tolist())
    elif span.observes and span.passages:
      now = thoughts.get(span.turn, [])
      earlier = [x for n, x in thoughts.items() if n < span.turn]
      # Without the first and last token, which are tags or parts of them.
      repeats = any(alike(now[1:-1], x[1:-1]) > similar for x in earlier)
      repeats |= len({*span.passages} & seen) > 1
      new = ({*span.passages} & {*silver}) - seen
      out[span.turn] = 0.0 if repeats else len(new) / len(span.passages)
      seen |= {*span.passages}
  return out


def alike(a, b) -> float:
  """1 - edit distance / length of the longer, 0 to 1."""
  d = np.arange(len(b) + 1)
  for i, x in enumerate(a, 1):
    best = np.minimum(d[1:] + 1, d[:-1] + (np.asarray(b) != x))
    d = np.minimum.accumulate(np.append(i, best) - np.arange(len(d)))
    d = d + np.arange(len(d))
  return 1 - d[-1] / max(len(a), len(b), 1)


def _needs(fields):
  return ('supporting',) if fields['silver'] == 'oracle' else ()


def _check(config, fields):
  del config
  ablations.choose(fields, silver=('group', 'oracle'))
  ratio = fields['ratio']
  lookup.require(ratio > 0, f'ratio={ratio} must be above 0')


calibrated.needs, calibrated.check = _needs, _check
calibrated.needs_group = True
calibrated.observes = lambda fields: 'source' if fields['soft'] else ''
calibrated.divides_by_spread = True
