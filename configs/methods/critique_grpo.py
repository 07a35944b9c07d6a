"""Critique-GRPO: attempts are criticised and refined; the best one joins.

arXiv 2506.03106; zhangxy-2019/critique-GRPO. All but one of a group are
attempts. The policy is shown each with a critique (whether it was right, and
the first golden answer), and tries again. The first of these refinements that
earns most takes the last place of the group, behind the plain prompt. Its
tokens are foreign there, with LUFFY's objective p / (p + 0.1) A (luffy.py).
GRPO among all, entropy 0.001, no KL. Argument:

  grounded  True: a refinement that states the answer, in a query too, before
            the question or a passage does is left out. False, as released

Departs from the release: no model writes the critique. Failed attempts are not
refined, and where no refinement is left, another attempt has its place
(`rollout/traces`: those placed, `rollout/traces_left_out`: the others).
"""

import dataclasses

import numpy as np

from configs.methods import core
from searchrl_jax.learn import advantages, teacher
from searchrl_jax.rewards import blocks, scores
from searchrl_jax.rollout import revise, traces

# The critique, and the verdict on what is right, and on what is wrong.
FULL = (
  'An earlier attempt:\n{attempt}\nIt is {verdict}; the right answer is '
  '{answer}. Answer the question again, and search for what the answer needs.',
  ('right', 'wrong'),
)
MICRO = '{attempt} {verdict} answer {answer}', ('found', 'no')  # known words


def get_config(arg=None):
  return core.on_base(arg, change, grounded=True)


def change(c, a):
  c.name, full = 'critique_grpo', bool(c.model.path)
  fields = dict(loss='mixed', foreign_objective='configs.methods.luffy.shaped')
  core.set_algorithm(c, core.GRPO | fields | dict(entropy_coef=0.001))
  c.rollout.sampler = 'configs.methods.critique_grpo.critiqued'
  c.rollout.critique, c.rollout.critique_words = FULL if full else MICRO
  c.rollout.grounded = a.grounded
  # For refinements, whose prompt has the attempt.
  c.env.max_tokens *= 2
  c.engine.max_len = max(c.engine.max_len, c.env.max_tokens)
  core.make_room(c)


async def critiqued(questions, services, *, critique, critique_words, grounded):
  """The sampler; meta['refines'] of a refinement: the attempt's sample."""
  env = services.env
  slots = services.slots()

  async def refined(t, plain):
    """What comes of the critique of an attempt; None: it is left out."""
    question, golds = t.question, t.question.answers
    text = revise.shown(env, t)[len(question.text) :].strip()
    verdict = critique_words[scores.exact_match(env.answer(t), golds) == 0]
    hint = critique.format(attempt=text, verdict=verdict, answer=golds[0])
    try:
      asked = teacher.hinted(question, hint, '{text} {hint}')
      start = env.reset(asked, services.role)
    except ValueError:  # it is too long
      return None
    found = await services.fresh(slots, start, t.sample, ['refined'])
    if found.failed or (grounded and blocks.recited(found, env, question)):
      return None
    found = teacher.plainly(found, question, plain[0], refines=t.sample)
    return traces.by_teacher(found)

  async def group(question, plain, samples):
    *own, last = samples
    tried = await services.gather(services.fresh(slots, plain, n) for n in own)
    alive = [t for t in tried if not t.failed]
    made = await services.gather(refined(t, plain) for t in alive)
    good = [t for t in made if t is not None]
    counts = dict(traces=bool(good), traces_left_out=len(made) - len(good))
    services.count((question.id, last), **counts)
    if good:
      earned = await services.reward([(t,) for t in good])
      value = np.where(earned.valid, advantages.returns(earned.value), -np.inf)
      best = dataclasses.replace(good[np.argmax(value)], sample=last)
    else:
      best = await services.fresh(slots, plain, last)
    services.record(*tried, best)

  return await services.whole(questions, group)


def _check(config):
  at, words = 'config.rollout.critique', config.critique_words
  core.lookup.require_format(
    at, config.critique, 'attempt', 'verdict', 'answer'
  )
  core.lookup.require(len(words) == 2, f'{at}_words={words}: give two')


critiqued.needs, critiqued.foreign, critiqued.check = ('answers',), True, _check
