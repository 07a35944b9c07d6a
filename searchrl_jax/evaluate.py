"""Evaluates a run folder or a Hugging Face checkpoint; trains nothing.

  python -m searchrl_jax.evaluate --workdir=runs/quickstart
  python -m searchrl_jax.evaluate --workdir=runs/quickstart \\
    --config.data.world_seed=7 --controls
  python -m searchrl_jax.evaluate \\
    --config=configs/wiki_nq.py:model=/path/to/checkpoint --out=runs/theirs
  python -m searchrl_jax.evaluate --workdir=runs/other \\
    --manifest=runs/theirs/manifest.json

With --workdir the config is the run's own; --config.* changes fields of it.
Greedy by default (config.eval.temperature = 0): the same trajectories every
time, in whatever order the questions come.
"""

import contextlib
import hashlib
import json
import pathlib
import sys
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags
from rich import console, table

from searchrl_jax.data import core as data
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluators import ledger, passk
from searchrl_jax.learn import checks, scoring
from searchrl_jax.rewards import judge as judges
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.run import build, command, lookup, records
from searchrl_jax.run.signals import Loop
from searchrl_jax.run.writer import Writer, environment
from searchrl_jax.sources.core import SourceError
from searchrl_jax.sources.shuffled import Shuffled
from searchrl_jax.types import Question

SHOWN = (
  'em',
  'f1',
  'sub_em',
  'recall_any',
  'recall_all',
  'parsed',
  'valid_format',
  'guessed',
  'copied',
  'searches',
  'real_searches',
  'tokens',
  'truncated',
  'certainty',
  'judged',
)

# What a score is, where its name does not say it; shares are of questions.
LABELS = {
  'em': 'exact match',
  'f1': 'F1',
  'sub_em': 'answer contained',
  'recall_any': 'a support found',
  'recall_all': 'all supports found',
  'valid_format': 'valid format',
  'guessed': 'answered unsearched',
  'copied': 'queries that copy',
  'searches': 'searches per question',
  'tokens': 'tokens sampled',
  'truncated': 'cut by a budget',
  'certainty': 'self-certainty (nats)',
  'real_searches': 'of them real',
  'judged': 'right by the judge',
}


class Loaded(NamedTuple):
  """What an evaluation runs with."""

  tok: Any
  engine: Any
  source: Any
  run: Any  # runs a coroutine that uses them
  identity: dict  # of the retrieval server; {} if it does not say
  # Of these parameters, if best_of or search_when needs it.
  scorer: scoring.Scorer | None
  judge: Any  # rewards.judge.Judge, if config.judge.url names one


def evaluators(config, sets, have: Loaded, writer, with_controls: bool):
  """{name: evaluator}: 'eval', and the controls if asked for.

  The controls: passages swapped between questions, and no search.
  """

  def make(name, config, source=have.source):
    env = build.environment(config, have.tok)
    if have.scorer:  # entropy-guided search asks for it
      env.entropy = lambda ids: have.scorer([ids])[0].entropy
    return passk.make(
      config,
      sets,
      env=env,
      source=source,
      engine=have.engine,
      writer=writer,
      run=have.run,
      name=name,
      scorer=have.scorer,
      judge=have.judge,
    )

  if not with_controls:
    return {'eval': make('eval', config)}
  off = config.copy_and_resolve_references()
  off.env.update(max_turns=0, real_searches=0, search_when='always')
  questions = [q for qs in sets.values() for q in qs]
  return {
    'eval': make('eval', config),
    'shuffled': make('shuffled', config, Shuffled(have.source, questions)),
    'no_search': make('no_search', off),
  }


def majority(questions: list[Question]) -> float:
  """EM of the best constant answer: the share of the most frequent one."""
  counts = {}
  for q in questions:
    for a in {metrics.normalise(a) for a in q.answers}:
      counts[a] = counts.get(a, 0) + 1
  return max(counts.values(), default=0) / max(len(questions), 1)


@contextlib.contextmanager
def loaded(config, workdir: str, out: str, which: str = 'latest'):
  """Yields what a run folder or an HF checkpoint is evaluated with."""
  tok = build.tokenizer(config, workdir or out)
  cfg = build.model_config(config, tok.vocab_size)
  mesh = build.mesh(config)
  lookup.require(
    config.env.search_when != 'entropy'
    or mesh.size == 1
    or config.engine.module != 'jax_sampler',
    f"config.env.search_when='entropy' on a mesh of {mesh.size} devices: "
    'scoring a query and decoding the others are two programs at a time, '
    'which can wait for each other for ever; use one device '
    '(CUDA_VISIBLE_DEVICES=0 and config.mesh.fsdp=1, tensor=1), or '
    "search_when='always'",
  )
  if workdir:
    params = build.restore_params(config, workdir, cfg, mesh, which)
  else:
    params = build.parameters(config, cfg, mesh)
  with build.retrieval(config, out) as url, Loop() as loop:
    engine = build.engine(config, cfg, params, tok, mesh, out)
    loop.at_exit(engine.shutdown)
    source = build.source(config, url, lambda: engine, tok, mesh, out)
    loop.at_exit(source.close)
    judge = judges.make(config)
    if judge:
      loop.at_exit(judge.close)
      loop.run(judge.check())
    loop.run(
      build.first_weights(
        config,
        engine,
        cfg,
        params,
        mesh,
        sync.canary_ids(
          build.environment(config, tok),
          [
            Question(
              id='canary',
              text='who ?',
              messages=({'role': 'user', 'content': 'who ?'},),
            )
          ],
        ),
      )
    )
    try:
      about = loop.run(source.check())
    except SourceError as e:
      if not config.source.url or not config.source.corpus:
        raise
      raise SourceError(
        f'{e} Or give --config.source.url= (empty), which starts one over '
        f'config.source.corpus={config.source.corpus!r}.'
      ) from e
    scorer = None
    if config.eval.best_of or config.env.search_when == 'entropy':
      longest = config.env.max_tokens
      scorer = scoring.Scorer(
        cfg,
        params,
        mesh=mesh,
        # Greedy samples have entropies too: of the policy as it is trained.
        temperature=config.eval.temperature or config.rollout.temperature,
        lengths=[n for n in config.batch.lengths if n < longest] + [longest],
        head_chunk=config.batch.head_chunk,
      )
    yield Loaded(
      tok,
      engine,
      source,
      loop.run,
      dict(about.get('identity') or {}),
      scorer,
      judge,
    )


def evaluate(
  config,
  workdir: str,
  out: str,
  *,
  which: str = 'latest',
  with_controls: bool = False,
  manifest: str = '',
) -> dict[str, float]:
  """Evaluates config.data.eval; returns scores and what they cost.

  Writes OUT/eval.json, where what differs from time to time stands beside
  them (seconds, the checkpoint), OUT/manifest.json, OUT/rows.jsonl and the
  trajectories.

  Args:
    which: 'latest', a step, or 'best': without the set that selected it.
    manifest: a manifest.json: exactly its questions, on its corpus.
  """
  checks.check_engine(config)
  passk.check(config)
  folder = pathlib.Path(out)
  lookup.require(
    not (folder / records.CHECKPOINTS).exists(),
    f'--out={out} is the folder of a run, whose logs would be written over; '
    'give a folder of its own',
  )
  wanted = ledger.read_manifest(manifest) if manifest else None
  sets = data.load_sets(config.data.eval, config.data)
  if wanted:
    sets = ledger.frozen(sets, wanted, manifest)
    config = config.copy_and_resolve_references()
    config.eval.questions = 0
  if which == 'best':
    sets.pop(checks.selecting(config), None)
  if with_controls:
    Shuffled(None, [q for qs in sets.values() for q in qs])  # or an error now
  with (
    loaded(config, workdir, out, which) as have,
    Writer(out, config) as writer,
  ):
    if wanted:
      ledger.check_corpus(wanted, have.identity, manifest)
    runs = evaluators(config, sets, have, writer, with_controls)
    found = {name: evaluator.collect(0) for name, evaluator in runs.items()}
    values, seconds = {}, {}
    for name, evaluation in found.items():
      values |= dict(evaluation.values)
      values |= dict(ledger.costs(evaluation, name))
      seconds[f'{name}/cost/seconds'] = evaluation.seconds
    writer.write(0, values | seconds)
    about = {}
    if workdir:
      about['checkpoint'] = build.saver(config, workdir).resolve(which)
    ledger.write_rows(folder, found)
    records.write_json(
      folder / ledger.MANIFEST,
      ledger.manifest(
        runs['eval'].sets,
        config,
        template=build.template(config),
        identity=have.identity,
        commit=environment()['commit'],
        checkpoint=(
          f'{workdir} step {about["checkpoint"]}'
          if workdir
          else config.train.init or config.model.path
        ),
      ),
    )
    records.write_json(folder / 'eval.json', values | seconds | about)
  return values


def show(values, out=None) -> None:
  """Prints a table for each evaluation: a row a score, a column a slice.

  A slice that holds the same questions as another one before it (a single
  source, sources that are hops) is left out. What they cost comes last.
  """
  out = out or console.Console()
  labels = [k.removesuffix('/em') for k in values if k.endswith('/em')]
  labels = labels or [
    k.removesuffix('/f1') for k in values if k.endswith('/f1')
  ]
  extra = sorted(
    {k.rsplit('/', 1)[-1] for k in values if '@' in k.rsplit('/', 1)[-1]},
    key=lambda name: (name.split('@')[0], int(name.split('@')[1])),
  )
  names = (*SHOWN, *extra)
  for evaluation in dict.fromkeys(label.split('/')[0] for label in labels):
    columns = {}  # scores -> label: equal columns once
    for label in labels:
      if label.split('/')[0] == evaluation:
        scores = tuple(
          values.get(f'{label}/{name}{part}')
          for name in names
          for part in ('', '/low', '/high', '/n')
        )
        columns.setdefault(scores, label)
    shown = table.Table(title=f'{evaluation} (95% bootstrap intervals)')
    shown.add_column('score')
    for label in columns.values():
      shown.add_column(
        label.removeprefix(f'{evaluation}/') if '/' in label else 'all',
        justify='right',
      )
    for name in names:
      cells = [_cell(values, f'{label}/{name}') for label in columns.values()]
      if any(cells):
        shown.add_row(LABELS.get(name, name), *cells)
    shown.add_row(
      'questions',
      *(
        f'{values.get(f"{label}/em/n", values.get(f"{label}/f1/n", 0)):.0f}'
        for label in columns.values()
      ),
    )
    out.print(shown)
  took = _costs(values)
  if took.row_count:
    out.print(took)


def _costs(values) -> table.Table:
  """What it took: a row a cost, a column an evaluation or a set of one."""
  shown = table.Table(title='what it took, in sums')
  shown.add_column('cost')
  found, labels = {}, {}
  for key, value in values.items():
    label, _, what = key.partition('/cost/')
    if what:
      digits = 1 if what == 'seconds' else 0
      found.setdefault(what, {})[label] = f'{value:,.{digits}f}'
      labels[label] = None
  for label in labels:
    shown.add_column(label, justify='right')
  for what, by in found.items():
    shown.add_row(
      what.replace('_', ' '), *(by.get(label, '') for label in labels)
    )
  return shown


def _cell(values, key: str) -> str:
  if key not in values:
    return ''
  digits = 1 if abs(values[key]) >= 10 else 3
  low, high = values[f'{key}/low'], values[f'{key}/high']
  return f'{values[key]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]'


def define_config_or_run():
  """--config=FILE, or the config of --workdir with --config.* changes."""
  given = [
    a for a in sys.argv[1:] if a.split('=')[0] in ('--config', '-config')
  ]
  workdir = [
    sys.argv[i + 1] if '=' not in a else a.split('=', 1)[1]
    for i, a in enumerate(sys.argv[1:], 1)
    if a.split('=')[0] in ('--workdir', '-workdir')
    and ('=' in a or i + 1 < len(sys.argv))
  ]
  if given or not workdir:
    return command.define_config(required=False)
  command.define_data_dir()
  try:
    return config_flags.DEFINE_config_dict(
      'config', build.load_config(workdir[-1])
    )
  except checks.ConfigError as e:
    print(f'error: {e}', file=sys.stderr)
    sys.exit(2)


def default_out(config, workdir: str, which: str, manifest: str) -> str:
  """A folder of its own for each checkpoint, manifest and changed fields."""
  text = json.dumps(command.to_dict(config), sort_keys=True, default=str)
  digest = hashlib.sha256((text + manifest).encode()).hexdigest()[:8]
  step = build.saver(config, workdir).resolve(which)
  return str(pathlib.Path(workdir) / f'evaluate_{step}_{digest}')


def main():
  config, workdir, out = _CONFIG.value, _WORKDIR.value, _OUT.value
  lookup.require(
    config is not None, 'give --workdir=RUN, or --config=FILE and --out'
  )
  lookup.require(workdir or out, '--out is needed where there is no --workdir')
  out = out or default_out(config, workdir, _CHECKPOINT.value, _MANIFEST.value)
  evaluate(
    config,
    workdir,
    out,
    which=_CHECKPOINT.value,
    with_controls=_CONTROLS.value,
    manifest=_MANIFEST.value,
  )
  show(json.loads((pathlib.Path(out) / 'eval.json').read_text()))
  print(f'trajectories and figures: {out}')


if __name__ == '__main__':
  _CONFIG = define_config_or_run()
  _WORKDIR = command.define_workdir(required=False)
  _OUT = flags.DEFINE_string(
    'out', '', 'Where to write; default: a folder in --workdir.'
  )
  _CHECKPOINT = flags.DEFINE_string(
    'checkpoint',
    'latest',
    'Which checkpoint of --workdir: latest, best, or a step.',
  )
  _CONTROLS = flags.DEFINE_bool(
    'controls',
    False,
    'Also evaluate without search, and with passages '
    'swapped between questions.',
  )
  _MANIFEST = flags.DEFINE_string(
    'manifest',
    '',
    'A manifest.json of an evaluation: exactly its questions, on its corpus.',
  )
  command.run(main)
