"""ReSeek: the policy judges what each search has found.

arXiv 2510.00568 (ICML 2026); no code, and the values of its reward were not
found. After an observation the policy writes a block `judge`. The algorithm is
GRPO; beside the outcome of the base recipe, a judgement earns

    + match      if it is the ideal one
    - mismatch   else; also if there is none, or it cannot be read

The ideal one is "found" if a passage of the observation is a supporting one.
Credit lies on the last segment of the turn that judges. Arguments:

  match, mismatch  .1 each
  version  sound: divided by the number of observations, so that further
           searches, which are easy to judge, earn nothing
           as_written: added up

Departs from the paper: observations that are judged useless stay (there, the
context of the next action lacks them; whether the loss has them is not said),
and the ideal judgement is exact, where the paper has a reranker's score above a
threshold. In atlas judgements have the tags of notes, as its vocabulary has no
others, and the warm start has to have learned them. It is

  python -m searchrl_jax.sft --config=configs/methods/reseek.py \\
    --workdir=runs/judged --config.train.init=runs/skills

for a baseline (match=0,mismatch=0), too. At full size the template is `judge`.
"""

from ml_collections import ConfigDict
import numpy as np

from configs.methods import core
from searchrl_jax.rewards import ablations, blocks, progress, scores
from searchrl_jax.rewards.core import flat
from searchrl_jax.text import prompts
from searchrl_jax.types import Rewards
from searchrl_jax.worlds import atlas_traces


def get_config(arg=None):
  known = dict(match=0.1, mismatch=0.1, version='sound')
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'reseek'
  core.set_algorithm(c, core.GRPO)
  if 'judge' not in prompts.load(c.env.template).kinds:
    c.env.template = 'judge' if c.model.path else 'micro_judge'
  core.script(c, judged=1.0)
  fields = dict(match=a.match, mismatch=a.mismatch, version=a.version)
  fields['words'] = ('yes', 'no') if c.model.path else atlas_traces.JUDGED
  fn = 'configs.methods.reseek.judgements'
  c.reward.judge = ConfigDict(dict(fn=fn, weight=1.0, block='judge') | fields)


async def judgements(
  groups, context, *, block, words, match, mismatch, version
):
  """What the judgements of each trajectory earn, at segments.

  Args:
    groups, context: see rewards/core.py.
    block: name of the template's block for judgements.
    words: of an observation with a supporting passage, and of another.
    match, mismatch, version: see the module.

  Returns:
    Parts: accuracy, the share of ideal judgements; NaN without an observation.
  """
  trajectories = flat(groups)
  valid = np.array([not t.failed for t in trajectories], bool)
  value = [np.zeros(len(t.trained), np.float32) for t in trajectories]
  accuracy = np.full(len(valid), np.nan, np.float32)
  for i in np.flatnonzero(valid):
    t, said = trajectories[i], {}
    for b in context.env.blocks(t):
      if b.author == 'policy' and b.kind == block and b.complete:
        said.setdefault(b.turn, scores.key(b.text))  # the first of a turn
    at, golds = progress.last_segments(t), {*t.question.supporting}
    # The last observation may have no turn after it.
    read = [r for r in progress.readings(t) if r.searched and r.turn + 1 in at]
    ideal = [words[0 if golds & {*r.passages} else 1] for r in read]
    right = [said.get(r.turn + 1) == word for r, word in zip(read, ideal)]
    share = len(read) if version == 'sound' else 1
    for r, ok in zip(read, right):
      value[i][at[r.turn + 1]] += (match if ok else -mismatch) / share
    if read:
      accuracy[i] = np.mean(right)
  return Rewards(tuple(value), valid, 'segment', {'accuracy': accuracy})


def _check(config, fields):
  blocks.check_block(config, fields)
  ablations.choose(fields, version=('sound', 'as_written'))


judgements.needs, judgements.check = ('supporting',), _check
judgements.observes = 'source'
