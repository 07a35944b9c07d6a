"""GlobalRAG: a plan of the look-ups, and what came of each.

arXiv 2510.20548; CarnegieBin/GlobalRAG. The policy plans which relations to
look up, and notes what it finds for each. The reward is exact match

    + w (.1 form + .5 nodes + .5 structure + .5 steps)

    nodes      the share of the needed relations that the plan names
    structure  1 if the plan is the needed one, step by step
    steps      the mean over needed relations of the F1 of what is noted; 0 for
               a relation that the plan does not name
    w          1 / (1 + exp((n / N - .9) / .2)) at step n of N, from .99 to .38

A plan is "teacher; home", or "visited & visited" of look-ups that do not need
each other; the first block of its name counts. Arguments:

  scale    of all terms but exact match
  anneal   False: w = 1
  version  sound: N = train.steps, and a planned relation without a note is 0
           as_released: N = 50 however long the run is, so that w is .03 after
           80 steps; one planned relation without a note makes `steps` 0

Departs from both: plans are compared with the facts of a generated world, word
by word, not by embeddings and edits; blocks do not nest. In atlas the plan is
the first thought, and notes (`refine`) are steps. The warm start has to have
learned plans. It is

  python -m searchrl_jax.sft --config=configs/methods/global_rag.py \\
    --workdir=runs/planned --config.train.init=runs/skills

for a baseline (scale=0), too. At full size the template is `plan`. The
algorithm is GRPO; the release has 5 trajectories of 4 turns and a KL of .001.
"""

import collections
import math

from configs.methods import core
from searchrl_jax.rewards import ablations, answer, blocks, scores
from searchrl_jax.rewards.core import per_trajectory
from searchrl_jax.text import prompts


def get_config(arg=None):
  return core.on_base(arg, change, scale=1.0, anneal=True, version='sound')


def change(c, a):
  c.name = 'global_rag'
  core.set_algorithm(c, core.GRPO)
  plan, step = ('plan', 'step') if c.model.path else ('think', 'refine')
  if c.model.path and plan not in prompts.load(c.env.template).kinds:
    c.env.template = 'plan'
  core.script(c, planned=1.0)
  steps = 50 if a.version == 'as_released' else c.train.get_ref('steps')
  fields = dict(plan=plan, step=step, steps=steps if a.anneal else 0)
  fields |= dict(weight=a.scale, version=a.version)
  c.reward = dict(
    em=dict(fn='answer.em', weight=1.0),
    plan=dict(fn='configs.methods.global_rag.reward', **fields),
  )


async def reward(groups, context, *, plan, step, steps, version):
  """w times the terms in brackets; `steps` is N, 0 for w = 1."""
  past = (context.step / steps - 0.9) / 0.2 if steps else -math.inf
  w = 1 / (1 + math.exp(min(past, 99.0)))

  def reward(t):
    facts = t.question.meta['facts']
    names = [scores.key(relation) for _, relation, _ in facts]
    needed = [names] if t.question.meta['parallel'] else [[n] for n in names]
    [said, *_] = [*blocks.texts(t, context, plan), '']
    said = [[*map(scores.key, s.split('&'))] for s in said.split(';')]
    named = collections.Counter(name for together in said for name in together)
    notes = blocks.texts(t, context, step, read=True)
    told = [
      blocks.fact_f1(notes, relation, value)
      for name, (_, relation, value) in zip(names, facts)
      if named[name]
    ]
    found = sum(x or 0.0 for x in told) / len(facts)
    if version == 'as_released' and None in told:
      found = 0.0
    nodes = (named & collections.Counter(names)).total() / len(names)
    form = answer.valid_format(t, context.env, require_think=False)
    value = w * (0.1 * form + 0.5 * (nodes + (said == needed) + found))
    parts = dict(form=form, nodes=nodes, structure=said == needed)
    return dict(value=value, steps=found, **parts)

  return per_trajectory(groups, reward)


def _check(config, fields):
  for name in ('plan', 'step'):
    blocks.check_block(config, dict(block=fields[name]))
  ablations.choose(fields, version=('sound', 'as_released'))


reward.needs, reward.check = ('meta.facts', 'meta.parallel'), _check
reward.observes = 'source'
