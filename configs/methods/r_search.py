"""R-Search: evidence from which another reader finds the answer, too.

arXiv 2506.04185; QingFei1/R-Search. Before its answer the policy writes what
proves it, in a block of its own. The reward is, with 2.4 as the most,

    F1(answer) + F1(what a frozen reader answers with the evidence alone)
      + form x (answer well-formed + evidence well-formed)

Evidence is well-formed if there is one block of it, after an observation. Of
several blocks the last is read, as in the release. Arguments:

  form     .2, of either form
  outcome  f1, em: that of the base recipe
  reader   facts: exact, the words after the relation that the question asks for
           (rewards/blocks.py), the default in a generated world. words: whether
           the evidence states a golden answer, the default elsewhere. judge:
           the verdict of config.judge on the evidence as an answer
  version  sound; as_released: a trajectory without search and evidence has the
           form of evidence, too

Departs from both: the reader. The release asks a model of another family for an
answer, with the whole prompt as the question, and stops where it says nothing.
An answer is well-formed if no action was invalid; text after it cannot occur.
Evidence of atlas is its notes (`refine`), which its warm start writes for each
look-up; at full size the template is `cited`. The release has 5 trajectories
(GRPO) of 4 turns, a KL of .001, and learning rates that rise for 95 % of the
steps.
"""

from configs.methods import core
from searchrl_jax.rewards import ablations, blocks
from searchrl_jax.rewards.core import per_trajectory
from searchrl_jax.text import prompts
from searchrl_jax.types import SEARCH


def get_config(arg=None):
  known = dict(form=0.2, outcome='f1', reader='', version='sound')
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'r_search'
  core.set_algorithm(c, core.GRPO)
  ablations.choose(a, outcome=blocks.OUTCOMES)
  block = 'evidence' if c.model.path else 'refine'
  if c.model.path and block not in prompts.load(c.env.template).kinds:
    c.env.template = 'cited'
  reader = a.reader or ('words' if c.model.path else 'facts')
  c.reward = dict(
    **{a.outcome: dict(fn=f'answer.{a.outcome}', weight=1.0)},
    evidence=dict(fn='blocks.informs', weight=1.0, block=block, reader=reader),
    form=dict(
      fn='configs.methods.r_search.form',
      weight=a.form,
      block=block,
      version=a.version,
    ),
  )


async def form(groups, context, *, block: str, version: str):
  """1 for a well-formed answer and 1 for well-formed evidence; see above."""

  def reward(t):
    answer = context.env.answer(t) is not None and not t.invalid_actions
    written = blocks.texts(t, context, block)
    if version == 'as_released':
      evidence = len(written) == 1 or not (written or t.calls(SEARCH))
    else:
      evidence = len(written) == len(blocks.texts(t, context, block, True)) == 1
    return dict(value=answer + evidence, answer=answer, evidence=evidence)

  return per_trajectory(groups, reward)


def _check(config, fields):
  blocks.check_block(config, fields)
  ablations.choose(fields, version=('sound', 'as_released'))


form.check, form.observes = _check, 'source'
