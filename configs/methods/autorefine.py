"""AutoRefine: notes after each search, rewarded where the answer is wrong.

Shi et al., arXiv 2505.11277 (NeurIPS 2025). After an observation the policy
writes what matters in a block `refine`. The reward is the answer's F1, else .1
if the notes hold a golden answer, else 0 (rewards/blocks.py). Departures:

  * The reward is monotone in the answer, and notes hold whole words of a golden
    answer. version='as_released' has neither: an F1 below .1 is worth less than
    0, and "no" is found in "know".
  * The release's format term is left out, as its scripts set it to 0.
  * Passages come between the tags of the template, not `documents`.

The algorithm is GRPO; the release has 5 trajectories of 5 turns and a KL of
.001. At full size the template is `refine`.
Arguments: bonus, outcome (f1, em: that of the base recipe), version (sound,
as_released), credit (rewards/ablations.py; 'oracle': notes that state each
needed fact and nothing else), and those of the base.
"""

from configs.methods import core
from searchrl_jax.rewards import ablations
from searchrl_jax.text import prompts


def get_config(arg=None):
  known = dict(bonus=0.1, outcome='f1', version='sound', credit='own')
  return core.on_base(arg, change, **known)


def change(c, a):
  c.name = 'autorefine'
  core.set_algorithm(c, core.GRPO)
  ablations.choose(a, version=('sound', 'as_released'))
  if c.model.path and 'refine' not in prompts.load(c.env.template).kinds:
    c.env.template = 'refine'
  sound = a.version == 'sound'
  c.reward = dict(
    autorefine=dict(
      fn='blocks.outcome_or_evidence',
      weight=1.0,
      outcome=a.outcome,
      block='refine',
      bonus=a.bonus,
      evidence='words' if sound else 'substring',
      monotone=sound,
      credit=a.credit,
    )
  )
