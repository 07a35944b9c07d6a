"""Co-rewarding-I: the majority answers to a question label it in other words.

arXiv 2508.00410; tmlr-group/Co-rewarding. No golden answers, as in TTRL
(configs/ttrl.py), but an answer earns 1 if it is the most frequent one to the
same question in other words: what only one wording makes a majority think does
not reward itself. Arguments:

  labels         votes; golden: the base's reward, on the same questions
  max_abstained  allowed share of questions without a vote

Departs from both: the wordings are two neighbouring questions of the data with
the same meta['pair'], kept in order (data.shuffle=False); the paper has a model
rephrase questions. A question whose other wording has no majority is left out
and counted ('abstained'), where the release pays 0; so is one of which failed
searches could have changed a majority. In atlas, whose other wording is "What
is the home of the teacher of Mira Dok?", the warm start has to have both. It is

  python -m searchrl_jax.sft --config=configs/methods/co_rewarding.py \\
    --workdir=runs/reworded --config.train.init=runs/skills

for a baseline, too. All of a group vote and are trained on. The algorithm is
GRPO; the release has groups of 8 and a KL of .005.
"""

import collections

from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.rewards import ablations, equivalence, vote
from searchrl_jax.rewards.core import require


def get_config(arg=None):
  return core.on_base(arg, change, labels='votes', max_abstained=0.5)


def change(c, a):
  c.name = 'co_rewarding'
  ablations.choose(a, labels=('votes', 'golden'))
  core.set_algorithm(c, core.GRPO)
  c.data.shuffle = False
  for fields in c.data.train.values():
    if fields.module == 'searchrl_jax.worlds.atlas':
      fields.pairs = True
  core.script(c, reworded=0.5)
  if a.labels == 'golden':
    return
  group = c.rollout.get_ref('group')
  fields = dict(fn='configs.methods.co_rewarding.crossed', weight=1.0)
  fields |= dict(votes=group, train=group, match=c.eval.get_ref('match'))
  c.reward = dict(vote=fields | dict(max_abstained=a.max_abstained))


async def crossed(groups, context, *, votes, train, match, max_abstained):
  """1 if the answer is the most frequent one to the other wording.

  Arguments, parts and errors are those of `rewards.vote.majority`;
  'majority_ratio' is the share of the other's label among the votes here. A
  question without its other wording is a RewardError, too.
  """
  del max_abstained  # of a step: `vote.check_step`
  pairs = collections.defaultdict(list)
  for group in groups:
    pairs[group[0].question.meta['pair']].append(group[0].question.id)
  for name, ids in pairs.items():
    what = f'of meta[pair]={name!r}, this step has {ids} on this process: put '
    what += 'both wordings side by side, and an even number on each process'
    require(len(ids) == 2, what)
  other = {a: b for ids in pairs.values() for a, b in (ids, ids[::-1])}
  same, labels = equivalence.function(match), {}

  def own(keys, question, step):
    labels[question.id] = vote.most_frequent(keys, question, step)
    return labels[question.id]

  def others(keys, question, step):
    del step
    label = labels.get(other[question.id])
    # An answer that equals it stands for it here.
    alike = (key for key in keys if label and key and same(label, key))
    return next(alike, label)

  vote.labelled(groups, context, own, votes, train, match)
  return vote.labelled(groups, context, others, votes, train, match)


def _check(config, fields):
  vote.check(config, fields)
  n, shuffle = config.rollout.questions, config.data.shuffle
  what = f'config.data.shuffle={shuffle} with config.rollout.questions={n}: '
  what += 'both wordings have to be in one step; use False, an even number'
  lookup.require(not shuffle and n % 2 == 0, what)


crossed.needs, crossed.check = ('meta.pair',), _check
crossed.compares_group = crossed.needs_step = True
crossed.check_step = vote.check_step
