"""What `python -m searchrl_jax.evaluate` does: a policy answers questions."""

import collections
from collections.abc import Mapping
import contextlib
import logging
import pathlib
import re
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags
from rich import console, table

from searchrl_jax import checks, lookup
from searchrl_jax.data import core as data
from searchrl_jax.devices import cluster
from searchrl_jax.engines.weights import sync
from searchrl_jax.evaluate import controls, files, grading
from searchrl_jax.learn import entropy
from searchrl_jax.models import parameters
from searchrl_jax.rewards import judge as judges
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.run import build, command, services
from searchrl_jax.sources.none import NoSource
from searchrl_jax.store import checkpoint, folders, progress, records, remote
from searchrl_jax.store.writer import Writer, environment
from searchrl_jax.types import Question

# What is defined here is the calling command's: `--help` shows it.
flags.disclaim_key_flags()

RESULTS = records.EVAL, files.ROWS, files.MANIFEST


class Loaded(NamedTuple):
  """The objects of an evaluation."""

  tok: Any
  opener: services.Opener  # of engine and source
  scorer: entropy.Entropies | None  # if config.env.search_when needs it
  judge: Any  # rewards.judge.Judge, if config.judge.url is set


def evaluators(config, sets, have: Loaded, writer, with_controls: bool):
  """Returns {name: evaluator}: 'eval', and the controls if requested.

  The controls: passages of another question, random ones, none, and no search.
  """
  source = have.opener.source
  variants = {'eval': (config, source)}
  if with_controls:
    off = config.copy_and_resolve_references()
    off.env.update(max_turns=0, real_searches=0, search_when='always')
    questions = [q for qs in sets.values() for q in qs]
    variants['shuffled'] = config, controls.shuffled(source, questions)
    variants['random'] = config, controls.Random(source, questions)
    variants['empty'] = config, controls.empty(source)
    variants['no_search'] = off, source
  shared = {'engine': have.opener.engine, 'runner': have.opener.loop.run}
  shared |= {'judge': have.judge, 'writer': writer}
  out = {}
  for name, (varied, source) in variants.items():
    env = build.environment(varied, have.tok)
    if have.scorer:
      env.entropy = lambda ids: have.scorer([ids])[0].entropy
    out[name] = grading.Evaluator(
      sets, config=varied, env=env, source=source, name=name, **shared
    )
  return out


def majority(questions: list[Question]) -> float:
  """Exact match of the best constant answer, the most frequent one."""
  counts = collections.Counter()
  for q in questions:
    counts.update({metrics.normalise(a) for a in q.answers})
  return max(counts.values(), default=0) / max(len(questions), 1)


@contextlib.contextmanager
def loaded(config, workdir: str, out: str, which: str = 'latest', loop=None):
  """Opens what evaluating a run folder or an HF checkpoint needs.

  loop: see `services.opened`.

  Raises:
    ConfigError: a field of the config; nothing was opened.
  """
  checks.check_engine(config)
  module = config.engine.module
  lookup.require(
    cluster.size() == 1 or module == 'jax',
    f'config.engine.module={module!r}: evaluate in one process, which may use '
    'the servers of several nodes (config.engine.url)',
  )
  tok = build.tokenizer(config, workdir or out)
  cfg = parameters.model_config(config, tok.vocab_size, tok.needed)
  services.check_engine(config, cfg)
  mesh = build.mesh(config)
  if config.env.search_when == 'entropy':  # beside the decoder, the scorer
    services.require_alone(config, mesh, "config.env.search_when='entropy'")
  if workdir:
    params = parameters.restore(config, workdir, cfg, mesh, which)
  else:
    params = parameters.initial(config, cfg, mesh)
  with services.opened(config, out, cfg, mesh, loop) as opener:
    judge = opener.open(judges.make(config))
    messages = ({'role': 'user', 'content': 'who ?'},)
    question = Question('canary', 'who ?', messages=messages)
    canary = sync.canary_ids(build.environment(config, tok), [question])
    opener.engine = opener.open_engine(tok, canary, params)
    opener.open_source(tok)
    scorer = None
    if config.env.search_when == 'entropy':
      longest = config.env.max_tokens
      scorer = entropy.Entropies(
        cfg,
        params,
        mesh=mesh,
        # For greedy samples: the temperature of training.
        temperature=config.eval.temperature or config.rollout.temperature,
        lengths=[n for n in config.batch.lengths if n < longest] + [longest],
        head_chunk=config.batch.head_chunk,
      )
    del params  # the engine has its own
    yield Loaded(tok, opener, scorer, judge)


class Asked(NamedTuple):
  """What an evaluation asks.

  about: what decides its results beside the config, by content: see `Writer`.
  manifest: the file that names the questions; '' = none.
  """

  sets: dict[str, list[Question]]
  about: dict[str, Any]
  manifest: str


def asked(
  config, workdir: str, *, which='latest', with_controls=False, manifest=''
) -> Asked:
  """Reads what an evaluation asks; loads no model.

  Args:
    config: the whole config.
    workdir: run folder; '' = the parameters of the config.
    which: 'latest', a step, or 'best', which leaves out the set that chose it.
    with_controls: also evaluate the controls; see `evaluators`.
    manifest: a manifest.json, to use exactly its questions and corpus.
  """
  checks.check_engine(config)
  checks.check_evaluation(config)
  about: dict[str, Any] = {'--controls': with_controls}
  if workdir:
    # A run may go on meanwhile, and disks show it to processes at other times.
    def saved():
      step = checkpoint.of_run(config, workdir).resolve(which)
      return step, parameters.digest(workdir, step)

    step, weights = cluster.first('checkpoint', saved)
    about |= {'--checkpoint': step, 'weights': weights}
  else:
    weights = folders.digest(parameters.contents(config))
    about |= {'--checkpoint': '', 'weights': weights}
  wanted = files.read_manifest(manifest) if manifest else None
  sets = data.load_sets(config.data.eval, config.data)
  if wanted:
    # These decide the result; its commit, judge and checkpoint do not.
    decides = {name: wanted[name] for name in ('sets', 'corpus')}
    about['--manifest'] = folders.digest(decides)
    sets = files.frozen(sets, wanted, manifest)
  selecting = checks.selecting(config) if which == 'best' else ''
  sets.pop(selecting, None)
  lookup.require(
    sets,
    f'--checkpoint=best leaves out the set {selecting!r}, by which it is chosen'
    ', and config.data.eval has no other: name a step, or latest',
  )
  questions = [q for own in sets.values() for q in own]
  about |= build.contents(config, {'data.eval': questions})
  if with_controls:
    # Raises now if there are too few different answers.
    controls.shuffled(NoSource(), questions)
  return Asked(sets, about, manifest)


def warn_of_template(workdir: str, about: Mapping[str, Any]) -> None:
  """Warns if the file of a run's template is not what the run was trained with.

  about: of `asked`.
  """
  name = 'config.env.template'
  found = about[name]
  for start in records.starts(workdir):
    found = start['contents'].get(name, found)
  if found != about[name]:
    logging.warning(
      f'{name} has another content than the run in {workdir} was trained with: '
      f'{found} there and {about[name]} now'
    )


def evaluate(config, workdir: str, out: str, **how: Any) -> dict[str, float]:
  """Evaluates config.data.eval; returns scores and costs.

  Writes OUT/eval.json (which also has the seconds and the checkpoint),
  OUT/manifest.json, OUT/rows.jsonl and the trajectories.

  Args:
    config: the whole config.
    workdir: run folder; '' = the parameters of the config.
    out: folder for the results.
    **how: which, with_controls and manifest, as `asked` takes them.
  """
  return answer(config, workdir, out, asked(config, workdir, **how))


def answer(config, workdir: str, out: str, what: Asked) -> dict[str, float]:
  """`evaluate`, of what is asked."""
  sets, about, manifest = what
  wanted = files.read_manifest(manifest) if manifest else None
  folder, with_controls = pathlib.Path(out), about['--controls']
  lookup.require(
    not (folder / records.CHECKPOINTS).exists(),
    f'--out={out} is the folder of a run, which keeps its logs; use another',
  )
  if workdir:
    warn_of_template(workdir, about)
  build.require_same_run(config, [q for qs in sets.values() for q in qs])
  if wanted:
    config = config.copy_and_resolve_references()
    config.eval.questions = 0
  with contextlib.ExitStack() as stack:
    stack.enter_context(folders.locked_once(out))
    before = records.starts(folder)  # of an evaluation
    for path in (folder / name for name in RESULTS):
      records.require(
        before or not path.exists(),
        f'{path} is in the way: no evaluation wrote it. Use another --out',
      )
    with progress.phase('model and services', config.log.progress):
      model = loaded(config, workdir, out, about['--checkpoint'])
      have = stack.enter_context(model)
    identity = have.opener.identity
    if identity.get('corpus'):
      about = about | {'corpus': identity['corpus']}
    writer = stack.enter_context(Writer(out, config, contents=about))
    if cluster.main():
      # One that is made again, and killed, leaves none of the former one's.
      for name in RESULTS:
        (folder / name).unlink(missing_ok=True)
    if wanted:
      files.check_corpus(wanted, identity, manifest)
    runs = evaluators(config, sets, have, writer, with_controls)
    results = {name: evaluator.collect(0) for name, evaluator in runs.items()}
    values, seconds = {}, {}
    for name, found in results.items():
      values |= dict(found.values) | dict(files.costs(found, name))
      seconds[f'{name}/cost/seconds'] = found.seconds
    writer.write(0, values | seconds)
    step, measured = {}, config.train.init or config.model.path
    if workdir:
      step['checkpoint'] = about['--checkpoint']
      measured = f'{workdir} step {about["--checkpoint"]}'
    if not cluster.main():
      return values
    files.write_rows(folder, results)
    content = files.manifest(
      runs['eval'].sets,
      config,
      template=build.template(config),
      identity=identity,
      commit=environment()['commit'],
      checkpoint=measured,
    )
    records.write_json(folder / files.MANIFEST, content)
    records.write_json(folder / records.EVAL, values | seconds | step)
    remote.push_all()  # before another command may prune this folder
  return values


def show(values, out=None) -> None:
  """Prints a table per evaluation (rows: scores, columns: slices), then costs.

  A slice with the same values as an earlier one (a single source, sources that
  are hops) is left out.
  """
  out = out or console.Console()
  tables: dict = {}  # evaluation -> slice -> score -> text
  costs: dict = {}  # evaluation, or a set of it -> cost -> text
  for key, value in values.items():
    label, _, name = key.rpartition('/')
    if f'{key}/n' in values:
      evaluation, _, part = label.partition('/')
      cells = tables.setdefault(evaluation, {}).setdefault(part or 'all', {})
      low, high, n = (values[f'{key}/{x}'] for x in ('low', 'high', 'n'))
      digits = 1 if abs(value) >= 10 else 3
      cells[name] = f'{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]'
      if name == 'em':
        cells['questions'] = f'{n:.0f}'
    elif label.endswith('/cost'):
      text = f'{value:,.{1 if name == "seconds" else 0}f}'
      costs.setdefault(label.removesuffix('/cost'), {})[name] = text
  for evaluation, slices in tables.items():
    shown: dict = {}
    for part, cells in slices.items():
      shown |= {} if cells in shown.values() else {part: cells}
    _print(out, f'{evaluation} (95% bootstrap intervals)', shown)
  _print(out, 'costs, as sums', costs)


def _print(out, title: str, columns) -> None:
  """Prints columns, {head: {row: text}}, as a table."""
  heads = ['', *(table.Column(head, justify='right') for head in columns)]
  shown = table.Table(*heads, title=title)
  for name in dict.fromkeys(name for c in columns.values() for name in c):
    shown.add_row(name, *(c.get(name, '') for c in columns.values()))
  out.print(shown)


def define_config_and_workdir():
  """Defines --config and --workdir; returns their holders.

  --config is a file, or, without one, the config of the run in --workdir.
  """
  workdir = command.define_workdir(required=False, opens={})
  others = command.parse_defined()
  given = any(re.match('--?config(=|$)', arg) for arg in others)
  if given or not workdir.value:
    return command.define_config(), workdir
  command.define_data_dir()
  try:
    config = build.load_config(workdir.value)
  except checks.ConfigError as e:
    command.fail(str(e))
  return config_flags.DEFINE_config_dict('config', config), workdir


def default_out(config, workdir: str, what: Asked) -> str:
  """Returns a folder for this config, checkpoint and what is asked."""
  content = [records.plain(config), what.about]
  # Of process 0, where URLs and folders of the others differ.
  digest = cluster.first('folder', lambda: folders.digest(content)[:8])
  step = what.about['--checkpoint']
  return str(pathlib.Path(workdir) / f'evaluate_{step}_{digest}')
