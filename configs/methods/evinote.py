"""EviNote-RAG: notes that entail the answer.

arXiv 2509.00877; Da1yuqin/EviNoteRAG. After reading, the policy writes notes
with *key words* marked. The reward is

    F1(answer), else .1 if the notes are marked, else 0
      + scale x P(the last note entails that a golden answer is right)

The first line is AutoRefine's reward with another condition, the second the
term of R-Search that reads evidence, here notes (rewards/blocks.py). Arguments:

  bonus    .1
  scale    of the second line
  outcome  f1, em: that of the base recipe
  reader   what takes the place of P: facts, words, judge; see r_search.py
  version  sound: asterisks stand in pairs in the policy's last note, and the
           reward is monotone in the answer
           as_released: any note earns the bonus, and an F1 below .1 is worth
           less than 0. (The release looks for marks from the prompt on, whose
           own are paired, so that a note without any passes.)
  credit   of the bonus: own, shuffled (rewards/ablations.py)

Departs from both: P, which the release takes from an inference model with the
first golden answer; there, pairs that this model cannot take (empty, or of more
than 512 characters) are dropped and later probabilities go to other
trajectories. Hyphens mark what is uncertain; they are not counted, since words
have them. atlas has notes (`refine`) and no asterisk: there only as_released
pays the bonus. At full size the template is `summary`. The algorithm is GRPO;
the release has 5 trajectories of 4 turns and a KL of .001.
"""

from configs.methods import core
from searchrl_jax.rewards import ablations
from searchrl_jax.text import prompts


def get_config(arg=None):
  known = dict(bonus=0.1, scale=1.0, outcome='f1', reader='')
  return core.on_base(arg, change, **known, version='sound', credit='own')


def change(c, a):
  c.name = 'evinote'
  core.set_algorithm(c, core.GRPO)
  ablations.choose(
    a, version=('sound', 'as_released'), credit=('own', 'shuffled')
  )
  block = 'summary' if c.model.path else 'refine'
  if c.model.path and block not in prompts.load(c.env.template).kinds:
    c.env.template = 'summary'
  sound = a.version == 'sound'
  reader = a.reader or ('words' if c.model.path else 'facts')
  c.reward = dict(
    evinote=dict(
      fn='blocks.outcome_or_evidence',
      weight=1.0,
      outcome=a.outcome,
      block=block,
      bonus=a.bonus,
      evidence='marked' if sound else 'any',
      monotone=sound,
      credit=a.credit,
    ),
    entailed=dict(
      fn='blocks.informs', weight=a.scale, block=block, reader=reader
    ),
  )
