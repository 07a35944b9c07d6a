"""What `make quickstart` runs: sft, train and evaluate, one after another.

  python -m experiments.quickstart.run --workdir=runs/quickstart [--controls]

A generated world, a real retrieval server in a process of its own, a warm
start on scripted traces, GRPO on questions and answers alone, and a greedy
evaluation on people never asked about before. Every stage resumes.
"""

import contextlib
import json
import pathlib

from absl import flags
import jax
from rich import console, table
from rich import text as rich_text

from configs import quickstart as recipe
from searchrl_jax import sft, train, view
from searchrl_jax.ask import OTHER, STYLES, printable
from searchrl_jax.data import core as data
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.run import build, command, services
from searchrl_jax.store import checkpoint, folders, records
from searchrl_jax.sweep.stages import Clock

# What the project promises of this command; `summary.json` tells what came.
BARS = (
  ('n_eval', 'at least', 400),
  ('em_one_hop', 'at least', 0.60),
  ('gain', 'at least', 0.20),
  ('parse_rate_before', 'at least', 0.90),
  ('em_no_search', 'at most', 0.10),
  ('em_shuffled_passages', 'at most', 0.10),
  ('em_majority_answer', 'at most', 0.05),
)


def quickstart(config, workdir: str, *, controls: bool = False) -> dict:
  """Runs every stage; returns (and writes) the summary."""
  out = console.Console()
  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  # Stages compile the same programs: the second one reads them from disk.
  jax.config.update('jax_compilation_cache_dir', str(folder / 'compiled'))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  clock = Clock(folder / 'seconds.json')

  with contextlib.ExitStack() as stack:
    stack.enter_context(folders.locked_once(workdir))
    out.rule('1. a world and its retrieval server')
    with clock('world'):
      url = stack.enter_context(services.retrieval(config, workdir))
      config.source.url = url
      sets = data.load_sets(config.data.eval, config.data)
    questions = [q for qs in sets.values() for q in qs]
    out.print(
      f'world {config.data.world_seed}: {len(questions)} held-out questions, '
      f'such as\n  {questions[0].text}  ({questions[0].answers[0]})\n'
      f'searches go to {url}'
    )

    out.rule('2. warm start: supervised, on scripted traces')
    with clock('warm_start'):
      warm = config.copy_and_resolve_references()
      warm.model.lora.rank = 0  # adapters start from the same warm start
      sft.sft(warm, str(folder / 'warm'))

    out.rule('3. reinforcement learning: questions and answers alone')
    run = config.copy_and_resolve_references()
    run.train.init = str(folder / 'warm')
    with clock('reinforcement_learning'):
      train.train(run, workdir)

    out.rule('4. controls: no search; wrong passages; none')
    step = checkpoint.of_run(run, workdir).latest()
    evaluation = folder / f'evaluation_{step}'
    with clock('controls'):
      after = evaluate.evaluate(
        run, workdir, str(evaluation), with_controls=True
      )
    within = sum(clock.seconds.values())

    sft_only = None
    if controls:
      out.rule(
        '5. control: good traces instead of RL, as long as its first start'
      )
      with clock('sft_only'):
        sft_only = _sft_only(config, folder, clock.seconds)

  steps = [json.loads(x) for x in (folder / 'metrics.jsonl').open()]
  before = next(s for s in steps if 'eval/em' in s)
  summary = {
    **_summary(before, after, questions, sft_only),
    'seconds_total': round(within, 1),
    'seconds': {k: round(v, 1) for k, v in clock.seconds.items()},
  }
  summary['bars'] = []
  for name, sense, bar in BARS:
    value = summary[name]
    holds = value >= bar if sense == 'at least' else value <= bar
    judged = dict(name=name, value=value, sense=sense, bar=bar, holds=holds)
    summary['bars'].append(judged)
  records.write_json(folder / 'summary.json', summary)
  _plot(steps, folder / 'learning_curve.png')
  tok = build.tokenizer(config, workdir)
  _show_trajectories(out, evaluation / 'eval', tok)
  _show_table(out, before, after, summary)
  out.print(f'learning curve: {folder / "learning_curve.png"}')
  out.print(f'figures:        {folder / "summary.json"}')
  out.print(f'trajectories:   {view.write(workdir, folder / "report.html")}')
  out.print(f'ask it:         python -m searchrl_jax.serve --workdir={workdir}')
  return summary


def _sft_only(config, folder: pathlib.Path, seconds: dict) -> dict:
  """Good traces instead of RL, from the same warm start, as long."""
  # Kept: a second start measures other seconds, and goes on all the same.
  path = folder / 'sft_only.json'
  if not path.exists():
    as_long = seconds['reinforcement_learning']
    # The clock ends it, before so many steps are done.
    steps = int(config.sft.steps * 3 * as_long / seconds['warm_start'])
    records.write_json(path, {'seconds': as_long, 'steps': steps})
  plan = json.loads(path.read_text())
  more = config.copy_and_resolve_references()
  more.train.init = str(folder / 'warm')
  more.sft.good_only = True
  more.sft.seconds, more.sft.steps = plan['seconds'], plan['steps']
  more.sft.schedule = 'constant'
  more.sft.lr = config.optim.lr
  workdir = str(folder / 'sft_only')
  if 'trained' not in plan:  # each start would have as much time again
    sft.sft(more, workdir)
    plan['trained'] = checkpoint.of_run(more, workdir).latest()
    records.write_json(path, plan)
  return evaluate.evaluate(more, workdir, str(folder / 'sft_only_evaluation'))


def _summary(before, after, questions, sft_only) -> dict:
  def interval(values, name='eval/em'):
    return [values[f'{name}/low'], values[f'{name}/high']]

  return {
    'em_before': before['eval/em'],
    'em_after': after['eval/em'],
    'ci95_before': interval(before),
    'ci95_after': interval(after),
    'em_one_hop': after['eval/hops=1/em'],
    'em_two_hop': after['eval/hops=2/em'],
    'em_one_hop_before': before['eval/hops=1/em'],
    'em_two_hop_before': before['eval/hops=2/em'],
    'em_sft_only': sft_only and sft_only['eval/em'],
    'ci95_sft_only': sft_only and interval(sft_only),
    'em_no_search': after['no_search/em'],
    'em_shuffled_passages': after['shuffled/em'],
    'em_majority_answer': evaluate.majority(questions),
    'parse_rate_before': before['eval/parsed'],
    'parse_rate_after': after['eval/parsed'],
    'guess_rate_before': before['eval/guessed'],
    'guess_rate_after': after['eval/guessed'],
    'n_eval': int(after['eval/em/n']),
    'searches_per_question': after['eval/searches'],
    'gain': after['eval/em'] - before['eval/em'],
    'intervals_disjoint': after['eval/em/low'] > before['eval/em/high'],
  }


def _show_table(out, before, after, summary) -> None:
  shown = table.Table(title=f'held-out questions (n = {summary["n_eval"]})')
  for name in ('', 'before', 'after', '95% interval after'):
    shown.add_column(name, justify='left' if not name else 'right')

  for label, key in (
    ('exact match', 'eval/em'),
    ('  one hop', 'eval/hops=1/em'),
    ('  two hops', 'eval/hops=2/em'),
    ('parsed', 'eval/parsed'),
    ('guessed without a search', 'eval/guessed'),
    ('searches per question', 'eval/searches'),
    ('search off', 'no_search/em'),
    ('passages swapped', 'shuffled/em'),
    ('random passages', 'random/em'),
    ('no passages', 'empty/em'),
  ):
    was = f'{before[key]:.3f}' if key in before else ''  # no controls
    bounds = f'{after[f"{key}/low"]:.3f} to {after[f"{key}/high"]:.3f}'
    shown.add_row(label, was, f'{after[key]:.3f}', bounds)
  frequent = f'{summary["em_majority_answer"]:.3f}'
  shown.add_row('most frequent answer', '', frequent, '')
  if summary['em_sft_only'] is not None:
    low, high = summary['ci95_sft_only']
    alone, bounds = f'{summary["em_sft_only"]:.3f}', f'{low:.3f} to {high:.3f}'
    shown.add_row('good traces instead of RL', '', alone, bounds)
  out.print(shown)
  for bar in summary['bars']:
    if not bar['holds']:
      out.print(
        f'[bold red]not reached[/]: {bar["name"]} is {bar["value"]:.3f}, '
        f'promised is {bar["sense"]} {bar["bar"]}'
      )
  out.print(f'{summary["seconds_total"] / 60:.1f} minutes in all')


def _plot(steps, path: pathlib.Path) -> None:
  # Here and not above: matplotlib takes a second that --help need not wait.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 4))
  left, right = figure.subplots(1, 2)
  trained = [s for s in steps if 'reward/em' in s]
  at = [s['step'] + 1 for s in trained]
  rewards = [s['reward/em'] for s in trained]
  left.plot(at, rewards, color='0.7', label='sampled, train questions')
  seen = [s for s in steps if 'eval/em' in s]
  for key, label, color in (
    ('eval/hops=1/em', 'greedy, held out, one hop', 'C0'),
    ('eval/hops=2/em', 'greedy, held out, two hops', 'C1'),
  ):
    x = [s['step'] + 1 for s in seen]
    left.plot(x, [s[key] for s in seen], 'o-', color=color, label=label)
    low, high = ([s[f'{key}/{end}'] for s in seen] for end in ('low', 'high'))
    left.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
  left.set(xlabel='GRPO step', ylabel='exact match', ylim=(0, 1))
  left.legend(frameon=False, loc='lower right')
  for key, label in (
    ('health/searches', 'searches per question'),
    ('health/guessed', 'guessed without a search'),
    ('health/invalid_actions', 'invalid actions'),
  ):
    right.plot(at, [s.get(key, 0) for s in trained], label=label)
  right.set(xlabel='GRPO step', ylabel='per trajectory', ylim=(0, None))
  right.legend(frameon=False)
  for axis in (left, right):
    axis.spines[['top', 'right']].set_visible(False)
  figure.tight_layout()
  figure.savefig(path, dpi=130)


def _show_trajectories(out, path: pathlib.Path, tok, count: int = 3) -> None:
  """The first few, their first two hops first, coloured by kind."""
  every = [record.trajectory for record in records.read(path)]
  two = [t for t in every if t.question.hops == 2]
  one = [t for t in every if t.question.hops == 1]
  for trajectory in (two[:1] + one)[:count]:
    question = trajectory.question
    out.rule(f'[dim]{question.id}[/] (answer: {", ".join(question.answers)})')
    for segment in trajectory.segments:
      style = STYLES.get(segment.kind, OTHER)
      if segment.author == 'prompt':
        style = 'bold'
      text = printable(tok.decode(segment.ids))
      out.print(rich_text.Text(text, style), end='')
    out.print()


def main():
  config = recipe.get_config(_CONFIG_ARG.value)
  quickstart(config, _WORKDIR.value, controls=_CONTROLS.value)


if __name__ == '__main__':
  _WORKDIR = command.define_workdir()
  _CONFIG_ARG = flags.DEFINE_string(
    'arg', '', 'Argument of configs/quickstart.py, such as seed=1.'
  )
  _CONTROLS = flags.DEFINE_bool(
    'controls', False, 'Also train on good traces for as long as RL took.'
  )
  command.run(main)
