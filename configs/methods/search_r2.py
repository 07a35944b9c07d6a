"""Search-R2: a refiner cuts attempts where they went wrong, and is trained.

arXiv 2602.03647; no code was found, and the paper was not read in full. The
policy writes an attempt, then reads it in another role and accepts it, or names
its first faulty step, from which it is sampled again, once (rollout/revise.py).
What an attempt earns as it ends, the verdict on it earns too:

    right answer x (1 + bonus x share of its searches with new evidence)

Attempts are compared with the other attempts of the question, verdicts with the
other verdicts (GRPO). Attempts are trained whole: what stands before the cut,
and what was sampled in place of what was cut; of verdicts, the reply. Argument:

  bonus    of a share of 1

The sound reading of what the sources leave open: one reply accepts or names a
step, where the paper has a discriminator and a trimmer; a reply without a step
accepts, and earns 0; what was cut has earned nothing, and is not trained. New
evidence is a supporting passage that no earlier search of the attempt found;
in the paper a model judges what was found. Left out are verdicts on attempts
that a service failed, and those without room for a turn. A group has twice the
trajectories of the base recipe, half of them verdicts; evaluation has no
refiner. In atlas the warm start, of a baseline too, has scripted verdicts:

  python -m searchrl_jax.sft --config=configs/methods/search_r2.py \\
    --workdir=runs/refined --config.train.init=runs/skills
"""

import dataclasses

import numpy as np

from configs.methods import core
from searchrl_jax import lookup, types
from searchrl_jax.rewards import scores
from searchrl_jax.rewards.core import flat, per_trajectory
from searchrl_jax.worlds import atlas


def get_config(arg=None):
  return core.on_base(arg, change, bonus=1.0)


def change(c, a):
  c.name = 'search_r2'
  core.set_algorithm(c, core.GRPO | dict(advantage='grpo_within'))
  c.algorithm.advantage_kw.label = 'role'
  c.rollout.sampler, c.rollout.group = 'revise', 2 * c.rollout.group
  c.rollout.refiner = 'refiner' if c.model.path else 'micro_refiner'
  fn = 'configs.methods.search_r2.reward'
  c.reward = dict(r2=dict(fn=fn, weight=1.0, bonus=a.bonus))
  core.script(c, refined=0.3)


async def reward(groups, context, *, bonus):
  """What attempts earn as they end, and the verdicts on them; see the module.

  Returns:
    Parts, of attempts: em; evidence, the share above; draft, exact match before
    the cut; cut. Of verdicts: asked, of attempts that did not fail; unread;
    named, whether it is the first fault of an attempt that was wrong.
  """
  ended = {(t.question.id, t.sample): t for t in flat(groups)}
  of = lambda t: ended[t.question.id, t.meta.get('on', t.sample)]

  def earned(t):
    own, golds, needed = of(t), t.question.answers, t.question.supporting
    right = scores.exact_match(context.env.answer(own), golds)
    draft = scores.exact_match(own.meta['draft'], golds)
    new = atlas.progress(needed, own.meta['found']).count('new')
    searches = {s.request.turn for s in own.calls(types.SEARCH)}
    evidence = new / max(len(searches), 1)
    names = 'em evidence draft cut asked unread named'
    out = dict.fromkeys(names.split(), np.nan)
    out['value'] = right * (1 + bonus * evidence)
    if own is t:
      out |= dict(em=right, evidence=evidence, draft=draft)
      out['cut'] = float(t.meta['cut'] > 0)
    elif not own.failed:
      out['asked'] = float(t.meta['asked'])
    if own is not t and t.meta['asked']:
      step, fault = t.meta['step'], atlas.fault(needed, t.meta['found'])
      out['value'] *= step is not None
      out['unread'] = float(step is None)
      out['named'] = np.nan if draft else float(step == fault)
    return out

  earnings = per_trajectory(groups, earned)
  asked = [t.meta.get('asked', True) and not of(t).failed for t in flat(groups)]
  return dataclasses.replace(earnings, valid=earnings.valid & np.array(asked))


def _check(config, fields):
  del fields
  name = config.rollout.sampler
  what = f"config.rollout.sampler={name!r} has no verdicts: use 'revise'"
  lookup.require(name == 'revise', what)


reward.needs, reward.check = ('answers', 'supporting'), _check
reward.observes = 'searches'
