"""MR-Search: several attempts in sequence, each rewarded, with reflections.

arXiv 2603.11327; tengxiao1/MR-Search. After each answer but the last the policy
writes what went wrong, and tries again. Each attempt earns its exact match. It
is compared with the same attempt of the others of the group, as in leave one
out, without a division, and a token gets the sum over its attempt and the later
ones. One that was not begun, because tokens ran out, has earned 0. The
reflection belongs to the attempt that it begins. Arguments:

  attempts  at a question
  contexts  1: all stay in one context, as in the paper; else at most so many,
            each of which begins with the prompt and the reflections so far
  note      tokens of a reflection; 0: those of a turn
  tokens    of a context; 0: those of the base recipe, times `attempts` where
            contexts = 1

Departs from both: an attempt that ends without an answer ends the trajectory
(the release begins the next one); what went wrong is a block of its own, with a
limit (the release asks to try again, and the next attempt follows); one update
a step (two). The release samples with top_p 0.95 and does not correct for it,
which this system refuses. Its part for the whole trajectory is off there.

In atlas the warm start, of a baseline too, has scripted attempts:

  python -m searchrl_jax.sft --config=configs/methods/mr_search.py:base=atlas \\
    --workdir=runs/attempts --config.train.init=runs/skills
"""

from ml_collections import ConfigDict
import numpy as np

from configs import algorithms
from configs.methods import contexts, core
from searchrl_jax.learn.advantages import by_cell


def get_config(arg=None):
  known = dict(attempts=3, contexts=1, note=0, tokens=0)
  return core.on_base(arg, change, **known)


def change(c, a):
  tokens = a.tokens or c.env.max_tokens * (a.attempts if a.contexts == 1 else 1)
  c.engine.max_len = max(c.engine.max_len, tokens)
  core.make_room(c, tokens)
  fields = dict(kind='attempts', keep=0, limit=tokens)
  own = {name: a[name] for name in ('attempts', 'contexts', 'note')}
  contexts.change(c, ConfigDict(fields | own))
  c.name = 'mr_search'
  name = 'configs.methods.mr_search.by_attempt'
  fields = dict(advantage=name, advantage_kw={}, aggregation='token')
  core.set_algorithm(c, algorithms.GRPO | fields)
  c.reward = ConfigDict(dict(em=dict(fn='answer.each_attempt', weight=1.0)))
  core.script(c, attempts=a.attempts)


def by_attempt(values, valid, group_ids, mask, structure):
  """A_k = sum over attempts j >= k of r_j - mean of the others' r_j.

  Args:
    values, valid, group_ids, mask, structure: see `advantages`. values: what
      each token earned, B arrays [n].
  """
  del mask  # so that `values` are of tokens
  s, number = structure, attempts(structure)
  earned = np.zeros((number.max(initial=0) + 1, len(valid)))
  np.add.at(earned, (number, s.owner), s.totals(values))
  less = lambda x, v: (v - x.mean()) * (len(x) / (len(x) - 1))
  a = [by_cell(x, valid, group_ids, less) for x in earned]
  later = np.cumsum(a[::-1], 0)[::-1]
  return s.over_tokens(later[number, s.owner])


def attempts(structure) -> np.ndarray:
  """int [N]: the attempt that each turn belongs to."""
  s = structure
  known = [_attempts(t, own) for t, own in zip(s.trajectories, s.spans)]
  found = [known[i][n] for i, n in zip(s.owner, s.number)]
  return np.array(found, int).reshape(-1)


def _attempts(trajectory, spans) -> list[int]:
  turns = spans[-1].turn + 1 if spans else 0
  return trajectory.meta.get('attempt') or [0] * turns


by_attempt.needs_group = True
