"""Contexts that change: what a trajectory may forget, and what it carries over.

  drop     observations older than the newest `keep` are dropped
  summary  where the context is full, the policy is asked for a block with what
           it found, and goes on with this block alone
  attempts several attempts in sequence, with the policy's reflection between
           them, after MR-Search (arXiv 2603.11327). An attempt sees the prompt
           and earlier reflections; with contexts=1, all before it, as in the
           paper. The last answer earns the reward; the paper rewards each

The mechanism is in text/env.py. All contexts of a trajectory share its one
advantage, and losses count trajectories (`types.Trajectory.rows`), as in
ReSum-GRPO (arXiv 2509.13313), which trains on each context alone.

Arguments: kind, contexts (at most), keep, attempts, note (sampled tokens of a
summary or reflection), limit (tokens of a context; 0: that of the base), and
those of the base.
"""

import math

from configs.methods import core

KINDS = ('drop', 'summary', 'attempts')


def get_config(arg=None):
  known = dict(kind='summary', contexts=4, keep=1, attempts=2, note=0, limit=0)
  return core.on_base(arg, change, **known)


def change(c, a):
  kind = core.chosen('kind', a.kind, dict(zip(KINDS, KINDS)))
  c.name = 'contexts'
  core.set_algorithm(c, core.GRPO)
  env = c.env
  env.template = 'contexts' if c.model.path else 'micro_contexts'
  env.max_contexts = a.contexts
  if a.contexts > 1:  # a prefix tree has trajectories of one context
    c.batch.prefix_tokens = 0
  # All contexts of a trajectory are in one microbatch.
  rows = math.ceil(a.contexts / c.batch.loss_fraction)
  c.batch.tokens = max(c.batch.tokens, rows * c.batch.lengths[-1])
  if a.limit:
    env.max_tokens = a.limit
  if kind == 'drop':
    env.keep_observations = a.keep
    return
  block = {'summary': 'summary', 'attempts': 'reflection'}[kind]
  block = block if c.model.path else 'refine'
  env.max_note_tokens = a.note or env.max_turn_tokens
  if kind == 'summary':
    env.on_full = block
  else:
    env.on_answer, env.attempts = block, a.attempts
