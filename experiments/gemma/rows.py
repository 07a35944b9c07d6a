"""The arms of the experiment, as a sweep; `run` makes what it needs first.

  python -m searchrl_jax.sweep --workdir=runs/gemma/sweep \\
    --sweep=experiments/gemma/rows.py:model=runs/gemma/small,\\
made=runs/gemma/made --only=grpo_good

Questions: `tune` chooses settings, selects epochs and draws the curve; `dev`,
683 questions of Natural Questions, is reported. Training has none of them, but
for TTRL, which asks 160 without their answers and is reported on the others.
`method=NAME` adds arms: a row of the arena, with its default setting, `grpo`,
and the row with the hints of other questions, if it has hints, all from a warm
start of which half has some (`questions.traces`).
"""

from collections.abc import Callable, Mapping
import functools
import pathlib
from typing import Any

from ml_collections import ConfigDict

from configs import gemma
from experiments import rows
from experiments.arena import plans, second
from experiments.gemma import documents, selfplay
from searchrl_jax import lookup, schema
from searchrl_jax.data import core as data
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.sweep import core

MODULE = 'experiments.gemma'
# File of the data, and the questions of it.
SETS = {
  'dev': ('qa_dev.jsonl.gz', {'source': 'nq*'}),
  'tune': ('qa_train.jsonl.gz', {'part': 'tune', 'n': 300}),
  'train': ('qa_train.jsonl.gz', {'part': 'train'}),
  # What TTRL asks, without answers, and the others.
  'asked': ('qa_dev.jsonl.gz', {'source': 'nq*', 'n': 160}),
  'rest': ('qa_dev.jsonl.gz', {'source': 'nq*', 'n': 160, 'rest': True}),
  'hotpotqa': ('qa_dev.jsonl.gz', {'source': 'hotpot*'}),
  '2wiki': ('qa_dev.jsonl.gz', {'source': '2wiki*'}),
  'musique': ('qa_dev.jsonl.gz', {'source': 'musique*'}),
}
ROLLOUTS = {'eval.temperature': 1.0}
# Numbers of traces of supervised arms. 'tune' chooses one (`results.chosen`).
READING = (256, 1024)
MORE = {'good': (512, 2048), 'hesitant': (512,)}
TRAINED = {'grpo_hesitant': 'hesitant', 'grpo_good': 'good'}  # arm -> its start


def asked(name: str, module: str = 'questions', **fields) -> ConfigDict:
  """A set of questions as `config.data.eval` has it."""
  path, chosen = SETS[name]
  own = {'module': f'{MODULE}.{module}', 'path': path, **chosen, **fields}
  return ConfigDict({name: own})


def on(name: str, fields: Mapping[str, Any] | None = None, **of):
  """An evaluation on one set; fields of the config that it changes.

  of: of the set, such as module='baselines'.
  """
  return functools.partial(_evaluate, name, of, dict(fields or {}))


def _evaluate(name: str, of: dict, fields: dict, config, workdir, out):
  changed = config.copy_and_resolve_references()
  changed.data.eval = asked(name, **of)
  changed.eval.questions = 0
  changed.update_from_flattened_dict(fields)
  if changed.source.module != 'service':
    corpus = changed.source.corpus
    changed.source.corpus = data.resolve(corpus, changed.data)
  return evaluate.evaluate(changed, workdir, out)


def learning(c: ConfigDict, module: str, n: int) -> ConfigDict:
  """The config of a warm start with n traces of a module, each once."""
  path = 'qa_train.jsonl.gz'
  c.sft.data = ConfigDict(
    dict(module=f'{MODULE}.{module}', path=path, n=n, seed=0)
  )
  c.sft.steps = n // c.sft.rows
  return c


def first(run: core.Evaluation) -> core.Evaluation:
  """Of seed 0 alone: these take an hour, and no interval is over seeds."""
  return functools.partial(_first, run)


def _first(run: core.Evaluation, config, workdir, out):
  return {} if config.seed else run(config, workdir, out)


def controls(config, workdir, out):
  """No search, random passages, those of other questions, and none.

  Of 200 questions: these are five evaluations.
  """
  changed = config.copy_and_resolve_references()
  changed.data.eval, changed.eval.questions = asked('dev', n=200), 0
  return evaluate.evaluate(changed, workdir, out, with_controls=True)


GOLD = {'source.module': f'{MODULE}.baselines'}
# pass@8 of 200 questions at the rollouts' temperature.
PASS = ROLLOUTS | {'eval.n': 8, 'eval.k': (1, 8)}
POLICY = {'after': on('dev'), 'sampled': on('dev', ROLLOUTS)}
START = POLICY | {'gold': on('dev', GOLD), 'pass': on('dev', PASS, n=200)}
START |= {name: on(name) for name in ('hotpotqa', '2wiki', 'musique')}
# A demonstration in the question's text, that of another question, and none.
HINTS = {'told': 'own', 'mistold': 'others', 'untold': ''}
TOLD = POLICY | {
  name: on('tune', found=True, n=200, told=told) for name, told in HINTS.items()
}
# The first is what the table of a sweep shows.
TTRL = {'after': on('rest'), 'asked': on('asked')}
# A simulator's prompt has the answers, so evaluations search the index.
REAL = {'source.module': 'service'}
SEARCHED = {'after': on('dev', REAL), 'sampled': on('dev', REAL | ROLLOUTS)}
# 20 steps of 8 x 8.
SHORT = {'train.steps': 20, 'rollout.questions': 8}


def get_sweep(arg=None):
  known = dict(model='gemma-small', made='', steps=60, method='')
  a = schema.parse_arg(arg, **known)
  made = pathlib.Path(a.made).resolve()

  def config(start='good', fields: Mapping[str, Any] | None = None):
    def of(seed: int):
      book = made / 'closed_book.jsonl'
      c = gemma.get_config(
        f'model={a.model},seed={seed},start={start},closed_book={book}'
      )
      c.train.steps = a.steps
      c.eval.every, c.eval.questions = 20, 200
      c.update_from_flattened_dict(dict(fields or {}))
      return c

    return of

  def prompted(template: str, passage: bool, seed: int):
    c = config()(seed)
    c.env.template = str(made / template)
    c.env.max_turns = 0
    c.env.max_tokens = c.engine.max_len = 768 if passage else 256
    c.engine.slots = 32
    return c

  def reading(n: int, seed: int):
    """Fine-tuned on n questions to answer from the passage in its prompt."""
    c = config()(seed)
    c.env.template = str(pathlib.Path(__file__).with_name('rag.json'))
    c.env.max_turns = 0
    return learning(c, 'baselines', n)

  def more(start: str, n: int, seed: int):
    """n more traces of the warm start in place of RL."""
    c = config(start)(seed)
    c.sft.data.n += n
    c.sft.steps = c.sft.data.n // c.sft.rows
    return c

  def ttrl(seed: int):
    """Rewarded by the vote of eight samples, on questions of 'asked'."""
    c = config(fields=SHORT)(seed)  # each of 160 questions once
    c.data.train = asked('asked')
    del c.reward.em, c.reward.f1
    group = c.rollout.group
    c.reward.vote = ConfigDict(
      dict(
        fn='vote.majority',
        weight=1.0,
        votes=group,
        train=group,
        match='text',
        max_abstained=0.5,
      )
    )
    return c

  def own(seed: int):
    """The policy writes what its searches find (SSRL)."""
    c = config(fields=SHORT)(seed)
    c.env.information = 'policy'
    c.env.max_turns, c.env.max_turn_tokens = 0, 256
    return c

  def changed(change: Callable[[ConfigDict], None]):
    """A config of SHORT, changed by a function of it."""

    def of(seed: int):
      c = config(fields=SHORT)(seed)
      change(c)
      return c

    return of

  def hinted(seed: int):
    """`hesitant`, and as many good traces of hinted questions."""
    c = config('hesitant')(seed)
    c.sft.data.hinted = 0.5
    c.sft.data.n, c.sft.steps = 2 * c.sft.data.n, 2 * c.sft.steps
    return c

  def method(row: plans.Method, others: bool, seed: int):
    """40 steps of 8 x 8. others: hints are those of other questions."""
    book = made / 'closed_book.jsonl'
    base = f'base=gemma,model={a.model},start=hesitant,closed_book={book}'
    c = plans.config(row, row.default, {}, base, seed)
    c.train.steps, c.rollout.questions = 40, 8
    c.eval.every, c.eval.questions = 20, 200
    c.data.train.nq.told = 'meta'
    # As often in a run as in the arena, whose runs have ten steps.
    c.teacher.every, c.teacher.rate = c.train.steps // 4, 4 / c.train.steps
    c.teacher.others = others
    return c

  def simulator(seed: int):
    """Of ZeroSearch: it learns to write passages."""
    c = config()(seed)
    c.env.template = documents.TEMPLATE
    c.env.max_turn_tokens = documents.TOKENS
    return learning(c, 'documents', 512)

  def roles(seed: int):
    """Of self-play: solver, proposer and verifier."""
    return learning(config()(seed), 'selfplay', 384)

  real = {
    'env.information': 'source',
    'env.max_turns': 2,
    'env.max_turn_tokens': 48,
  }
  lora = {'model.lora.rank': 32, 'optim.lr': 2e-4}
  good, hesitant = config('good'), config('hesitant')
  readers = {n: functools.partial(reading, n) for n in READING}
  longer = {
    f'more_{start}_{n}': functools.partial(more, start, n)
    for start, sizes in MORE.items()
    for n in sizes
  }
  starts = {'good': good, 'hesitant': hesitant, 'own': own, 'hinted': hinted}
  starts |= {f'reading_{n}': of for n, of in readers.items()} | longer
  starts |= {'simulator': simulator, 'roles': roles}
  batches = second.BATCHES.values()
  # Those that need no warm start or evaluation of their own.
  known = {x.name: x for b in batches for x in b.methods if not x.start}
  names = dict.fromkeys(('grpo', a.method)) if a.method else ()
  unknown = [name for name in names if name not in known]
  message = f'method={a.method!r}: a row of the arena from its warm start; '
  lookup.require(not unknown, message + lookup.near(a.method, known))
  compared = [known[name] for name in names]
  passage = functools.partial(on, module='baselines')
  read = {'after': passage('dev'), 'gold': passage('dev', gold=True)}
  both = {'after': on('dev'), 'real': on('dev', real)}
  baseline = functools.partial(rows.Arm, train=False, seeds=(0,))
  arms = (
    baseline(
      'closed_book',
      functools.partial(prompted, 'closed_book.json', False),
      evaluations={'after': on('dev')},
    ),
    baseline(
      'rag_few_shot',
      functools.partial(prompted, 'rag.json', True),
      evaluations=read,
    ),
    *(
      baseline(
        f'rag_fine_tuned_{n}',
        of,
        f'reading_{n}',
        evaluations=read | {'tune': passage('tune')},
      )
      for n, of in readers.items()
    ),
    baseline('good', good, 'good', evaluations=START),
    baseline('hesitant', hesitant, 'hesitant', evaluations=START),
    *(
      rows.Arm(
        arm,
        starts[start],
        start,
        evaluations={
          name: run if name in POLICY else first(run)
          for name, run in {**POLICY, 'controls': controls, **START}.items()
        },
        seeds=(0, 1),
      )
      for arm, start in TRAINED.items()
    ),
    rows.Arm(
      'lora_good', config('good', lora), 'good', evaluations=POLICY, seeds=(0,)
    ),
    rows.Arm('ttrl', ttrl, 'good', evaluations=TTRL, seeds=(0,)),
    baseline('own', own, 'own', evaluations=both),
    rows.Arm('ssrl', own, 'own', evaluations=both, seeds=(0,)),
    rows.Arm(
      'zerosearch',
      changed(documents.simulate),
      'good',
      evaluations=SEARCHED,
      seeds=(0,),
      folders={'source.simulator.path': 'simulator'},
    ),
    baseline('roles', roles, 'roles', evaluations=POLICY),
    rows.Arm(
      'ssp',
      changed(selfplay.play),
      'roles',
      evaluations=POLICY,
      seeds=(0,),
      loop='experiments.ssp.train.train',
    ),
    *(
      baseline(name, of, name, evaluations=POLICY | {'tune': on('tune')})
      for name, of in longer.items()
    ),
    *(
      (baseline('hinted', hinted, 'hinted', evaluations=TOLD),) if names else ()
    ),
    *(
      rows.Arm(
        f'method_{row.name}{"-others" if others else ""}',
        functools.partial(method, row, others),
        'hinted',
        evaluations=POLICY,
        seeds=(0,),
      )
      for row in compared
      for others in (False, True)[
        : 1 + bool(method(row, True, 0).teacher.context)
      ]
    ),
  )
  return rows.Row(
    warm={name: rows.Start(of, shared=True) for name, of in starts.items()},
    arms=arms,
    scores=('em', 'f1', 'searches', 'found', 'em_found', 'tokens', 'pass'),
    curves={'eval/em': 'exact match, 200 tuning questions', 'reward': 'reward'},
  )
