"""The whole experiment: the model, its warm starts, GRPO, controls, the table.

  python -m experiments.gemma.run --workdir=runs/gemma
  ... --only=grpo_good,grpo_hesitant --seeds=0
  ... --report                 nothing is trained: the table of what is done
  ... --keep                   other runs that --out has stay in its results
  ... --model=FOLDER           another small model, in place of the fetched one
  ... --method=NAME --only=hinted,method_grpo,method_NAME   a row of the arena

It needs corpus.jsonl.gz, qa_train.jsonl.gz and qa_dev.jsonl.gz in --data_dir
(or SEARCHRL_DATA), or others in these formats (docs/data.md). The same command
goes on where it stopped. In --workdir are

  model, small   the fetched model, and its version with fewer entries
  made           prompts with examples, and the model's answers from memory
  warm, arms     the stages (searchrl_jax.sweep)

All that is done so far is in results.json (`results`) of --out, by default
--workdir; report.html beside each trained run shows its trajectories.
"""

import json
import os
import pathlib

from absl import flags

from experiments import common
from experiments.gemma import baselines, carry, questions, results, rows
from searchrl_jax import fetch, lookup, prune, read, schema, view
from searchrl_jax.data import core as data
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.models import parameters, pretrained
from searchrl_jax.run import build, command
from searchrl_jax.store import records
from searchrl_jax.sweep import runner as sweep

MODEL = 'gemma-3-270m'
# Others whose words the small version keeps, where they are.
MORE = 'popqa_test_1000.jsonl', 'gsm8k_train.jsonl.gz'
TEMPLATE = str(common.ROOT / 'searchrl_jax/text/templates/plain.json')
SHOTS = 4  # examples of a prompt
# Questions that are answered from memory: the warm start asks them in the order
# of their draw (`questions.traces`), and the longest, `more_hesitant_512`, goes
# through some 1,300.
MEMORY = 1400
# Of `made`: the model's config.json, MEMORY, which questions of dev are short.
ABOUT = 'about.json'


def require_data() -> pathlib.Path:
  """The folder of the data.

  Raises:
    ConfigError: a file is missing.
  """
  folder = pathlib.Path(data.data_dir(schema.base().data))
  missing = [name for name in carry.DATA if not (folder / name).is_file()]
  lookup.require(
    not missing,
    f'{folder} lacks {", ".join(missing)}; name a folder that has them with '
    '--data_dir (docs/data.md has the formats)',
  )
  return folder


def small(folder: pathlib.Path, texts: pathlib.Path, workdir) -> None:
  """Fetches the model and makes its small version, where they are not there."""
  whole = workdir / 'model'
  if (folder / 'config.json').exists():
    return
  print(fetch.fetch(MODEL, whole, 'float32'), flush=True)
  named = [texts / name for name in (*carry.DATA, *MORE)]
  there = [str(path) for path in named if path.exists()]
  print(prune.prune(str(whole), str(folder), there, [TEMPLATE], 4), flush=True)


def prepare(made: pathlib.Path, folder: pathlib.Path, model: str) -> None:
  """Prompts with examples, and what the model answers from memory.

  Raises:
    ConfigError: `made` is of another model, other data, or another MEMORY.
  """
  about = made / ABOUT
  of = {
    'model': pretrained.read_json(model),
    'weights': parameters.digest(model),
    'data': [parameters.digest(str(folder / name)) for name in carry.DATA],
    'memory': MEMORY,
  }
  if not about.exists():
    records.write_json(about, of | {'short_dev': sorted(results.short_dev())})
  known = json.loads(about.read_text())
  lookup.require(
    {key: known.get(key, value) for key, value in of.items()} == of,
    f'{made} was made with another model than {model}, other data than in '
    f'{folder}, or another number of questions from memory than {MEMORY}: '
    'choose another --workdir, or remove that folder',
  )
  for name, passage in (('closed_book', False), ('rag', True)):
    path = made / f'{name}.json'
    if not path.exists():
      baselines.few_shot(str(folder), path, SHOTS, passage)
  book = made / 'closed_book.jsonl'
  if book.exists():
    return
  arm = rows.get_sweep(f'model={model},made={made}').arm('closed_book')
  config, out = arm.config(0), made / 'from_memory'
  config.data.eval = rows.asked('train')
  config.data.eval.train.n, config.eval.questions = MEMORY, 0
  print(f'{MEMORY} questions from memory ...', flush=True)
  evaluate.evaluate(config, '', str(out))
  env = build.environment(config, build.tokenizer(config, str(out)))
  lines = []
  for record in records.read(out / 'eval'):
    said = env.answer(record.trajectory)
    if said and len(said.split()) <= questions.WORDS:
      question = record.trajectory.question.id
      lines.append(json.dumps({'id': question, 'answer': said.strip()}) + '\n')
  records.write_text(book, ''.join(lines))


def main():
  workdir = pathlib.Path(flags.FLAGS.workdir).resolve()
  model = pathlib.Path(_MODEL.value or workdir / 'small').resolve()
  made, out = workdir / 'made', pathlib.Path(_OUT.value or workdir)
  # This process computes little on a GPU, and its stages need the memory.
  os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
  environment = common.environment()
  if not _REPORT.value:
    texts = require_data()
    if _MODEL.value:
      pretrained.read_json(model)  # there is such a folder
    else:
      small(model, texts, workdir)
    prepare(made, texts, str(model))
  spec = f'experiments/gemma/rows.py:model={model},made={made}'
  spec += f',method={_METHOD.value}' if _METHOD.value else ''
  table = rows.get_sweep(spec.partition(':')[2])
  planned = sweep.chosen(table, flags.FLAGS.only, flags.FLAGS.seeds)
  lookup.require(
    (made / ABOUT).exists(), f'{workdir} has no run yet; leave --report out'
  )
  known = json.loads((made / ABOUT).read_text())
  about = {
    'environment': environment,
    'vocabulary': known['model']['vocab_size'],
  }
  short = {*known['short_dev']}
  keep = _KEEP.value
  report = lambda: results.write(table, workdir, out, about, short, keep)
  if keep:
    results.earlier(out, about['vocabulary'])  # refuses now, not at the end
  try:
    if not _REPORT.value:
      sweep.run(spec, table, planned, workdir, after=report)
  finally:
    print(results.show(report()))
    for done in sorted((workdir / 'arms').glob('*/*/done.json')):
      run = done.parent / 'run'
      if (run / read.TRAIN).exists():
        print(view.write(str(run), done.parent / 'report.html'))


if __name__ == '__main__':
  sweep.define_flags()
  _MODEL = flags.DEFINE_string('model', '', 'A small model that is there.')
  _REPORT = flags.DEFINE_bool('report', False, 'Only write the table.')
  _METHOD = flags.DEFINE_string('method', '', 'A row of the arena, as an arm.')
  _OUT = command.define_out('', 'Folder of results.json.')
  _KEEP = flags.DEFINE_bool(
    'keep', False, 'Keep the other runs that --out has.'
  )
  command.run(main)
