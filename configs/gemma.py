"""Gemma 3 270M (base) searches Wikipedia for real questions.

  python -m searchrl_jax.fetch gemma-3-270m --out=gemma-3-270m
  python -m searchrl_jax.prune --model=gemma-3-270m --out=gemma-small ...
  python -m searchrl_jax.sft --config=configs/gemma.py:model=gemma-small \\
    --workdir=runs/good
  python -m searchrl_jax.train --config=configs/gemma.py:model=gemma-small \\
    --workdir=runs/grpo --config.train.init=runs/good

on two cores, in some hours; `python -m experiments.gemma.run` (make realistic)
does all of it, with controls. docs/real_model.md tells it. It needs the files
corpus.jsonl.gz, qa_train.jsonl.gz and qa_dev.jsonl.gz of config.data.dir, or
others in these formats (docs/data.md). Every run is reported as it is after its
last step; no checkpoint is selected. Arguments:

  model    a Hugging Face folder; the figures are of the small version (`prune`)
  start    of the warm start: good, all attempts search and answer right; or
           hesitant, many answer questions that begin with who, when or where
           at once from memory, and some search for too little
  closed_book  the answers from memory, for start=hesitant
  machine  cpu; gpu: 32 x 8 trajectories a step
  seed
"""

from ml_collections import ConfigDict

from configs import machines, wiki_nq
from searchrl_jax import schema

# Of the attempts of start='hesitant': it trusts its memory for some kinds of
# questions. Fixed by the greedy search rate on tuning questions before any RL:
# experiments/LOG.md has the trials.
HESITANT = dict(memory=0.57, known=('who', 'when', 'where'), poor=0.05)


def get_config(arg=None):
  a = schema.parse_arg(
    arg,
    model='gemma-small',
    start='good',
    closed_book='',
    machine='cpu',
    seed=0,
  )
  for name, known in (
    ('start', ('good', 'hesitant')),
    ('machine', ('cpu', 'gpu')),
  ):
    if a[name] not in known:
      raise ValueError(
        f'config argument {name}={a[name]!r}: one of {", ".join(known)}'
      )
  c = wiki_nq.get_config(f'model={a.model},size=small')
  c.name, c.seed = 'gemma', a.seed
  module = 'experiments.gemma.questions'
  # Where no passage with the answer is found, few groups have a gradient
  # (experiments/LOG.md).
  asked = dict(module=module, path='qa_train.jsonl.gz', part='train')
  asked |= dict(short=False, found=True)
  c.data.train = ConfigDict(dict(nq=asked))
  c.data.eval = ConfigDict(
    dict(tune=dict(module=module, path='qa_train.jsonl.gz', part='tune', n=0))
  )
  if a.machine == 'gpu':
    machines.small_on_gpu(c)
    # An evaluation takes seconds: also of the questions that are reported.
    c.data.eval.tune.n = 300
    c.data.eval.dev = ConfigDict(dict(module=module, path='qa_dev.jsonl.gz'))
  # F1 alone also pays for answers that are longer than the right ones.
  c.reward.em.weight = 0.5
  c.reward.f1 = ConfigDict(dict(fn='answer.f1', weight=0.5))
  c.reward.format = ConfigDict(
    dict(fn='answer.format_valid', weight=0.1, require_think=False)
  )
  c.sft.data = ConfigDict(
    dict(
      module=module,
      path='qa_train.jsonl.gz',
      n=128,
      seed=0,
      k=1,
      memory=0.0,
      known=(),
      poor=0.0,
      closed_book=a.closed_book,
      read=75,
    )
  )
  if a.start == 'hesitant':
    c.sft.data.update(HESITANT)
  c.sft.steps = 16
  c.sft.rows = 8
  # Each update has all kinds of traces. Otherwise what the policy prefers in
  # the end seems to depend on their order (experiments/LOG.md).
  c.sft.order = 'given'
  c.sft.lr = 2e-5
  c.sft.warmup = 2
  return c
