"""Real questions, real passages: warm start, RL, and the bare question.

  python -m experiments.search_r1.wiki --workdir=runs/wiki_nq --minutes=60 \\
    --out=experiments/search_r1/wiki.json

Runs configs/wiki_nq.py from scratch: supervised warm start, GRPO, and greedy
evaluation of both on the dev questions; in the same run, what a search with
the bare question finds. Every stage resumes. `bars` in the JSON:

  recall_nq     any supporting passage among all results on NQ, less what the
                bare question finds (at least -0.05)
  format_valid  strict (at least 0.95)
  f1_gain       answer F1 of RL minus warm start, over the same questions: the
                low end of the paired 95% interval (above 0)
"""

import asyncio
import pathlib

from absl import flags
from ml_collections import ConfigDict

from configs import wiki_nq
from experiments import common
from searchrl_jax import sft, train
from searchrl_jax.data import core as data
from searchrl_jax.evaluate import grading
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rewards import scores
from searchrl_jax.run import build, command, services
from searchrl_jax.store import records
from searchrl_jax.sweep import stages

SCORES = (
  'em',
  'f1',
  'recall_any',
  'recall_all',
  'valid_format',
  'copied',
  'guessed',
  'searches',
)


def bare(questions, source, k: int) -> dict[str, dict[str, float]]:
  """{question id: {recall_any, recall_all}} of one search with the question."""
  found = sft.searcher(source, asyncio.run)([q.text for q in questions], k)
  out = {}
  for q, passages in zip(questions, found, strict=True):
    ids = {p.id for p in passages}
    hits = [float(s in ids) for s in q.supporting] or [0.0]
    out[q.id] = {'recall_any': max(hits), 'recall_all': min(hits)}
  return out


def interval(values) -> list[float]:
  """The mean over questions, and its bounds."""
  return list(scores.bootstrap(values, resamples=2000, seed=0))[:3]


def rows_of(folder: str, env):
  """The scored trajectories that an evaluation wrote."""
  found = records.read(pathlib.Path(folder, 'eval'))
  return grading.score([record.trajectory for record in found], env)


def run(workdir: str, minutes: float) -> dict:
  config = wiki_nq.get_config()
  folder = pathlib.Path(workdir)
  clock = stages.Clock(folder / 'seconds.json')
  with services.retrieval(config, workdir) as url:
    config.source.url = url
    warm = config.copy_and_resolve_references()
    warm.sft.seconds = minutes * 60 * 0.7
    with clock('warm_start'):
      # Each start would have as much time again; RL goes on from the first.
      if not records.begun(folder / 'rl'):
        sft.sft(warm, str(folder / 'warm'))
    learn = config.copy_and_resolve_references()
    learn.train.init = str(folder / 'warm')
    learn.train.seconds = minutes * 60 * 0.3
    learn.data.eval = ConfigDict()  # evaluated below, once
    # Nor has RL, once it has ended: `seconds` are of each start.
    trained = folder / 'trained'
    if not trained.exists():
      with clock('reinforcement_learning'):
        train.train(learn, str(folder / 'rl'))
      trained.touch()
    evaluations = {}
    with clock('evaluation'):
      for name in ('warm', 'rl'):
        own = str(folder / name)
        asked = evaluate.asked(config, own)
        evaluations[name] = evaluate.default_out(config, own, asked)
        evaluate.answer(config, own, evaluations[name], asked)
    source = services.source(config, url)
    sets = data.load_sets(config.data.eval, config.data)
    questions = [q for qs in sets.values() for q in qs]
    baseline = bare(questions, source, config.source.k)
    asyncio.run(source.close())

  env = build.environment(config, build.tokenizer(config, str(folder / 'rl')))
  scored = {name: rows_of(out, env) for name, out in evaluations.items()}
  table = []
  for source_name in ('all', *sorted({q.source for q in questions})):
    ids = [q.id for q in questions if source_name in ('all', q.source)]
    row = {'source': source_name, 'n': len(ids)}
    for score in ('recall_any', 'recall_all'):
      found = [baseline[i][score] for i in ids]
      row[f'bare question {score}'] = interval(found)
    for name, rows in scored.items():
      part = [r for r in rows if r.question in set(ids)]
      for score in SCORES:
        values = list(grading.by_question(part, score).values())
        if values:
          row[f'{name} {score}'] = interval(values)
    table.append(row)
  f1 = {name: grading.by_question(rows, 'f1') for name, rows in scored.items()}
  both = sorted(set(f1['rl']) & set(f1['warm']))
  gain = scores.bootstrap(
    [f1['rl'][k] - f1['warm'][k] for k in both], resamples=10_000, seed=0
  )
  nq = next(r for r in table if r['source'].startswith('nq'))
  recall = nq['rl recall_any'][0] - nq['bare question recall_any'][0]
  return {
    'table': table,
    'seconds': clock.seconds,
    'f1_gain': list(gain)[:3],
    'f1_gain_n': gain.n,
    'bars': [
      common.bar('recall_nq', recall, -0.05),
      common.bar('format_valid', table[0]['rl valid_format'][0], 0.95),
      common.bar('f1_gain', gain.low, 0.0, strict=True),
    ],
  }


def main():
  environment = common.environment()
  results = run(_WORKDIR.value, _MINUTES.value)
  for row in results['table']:
    print(f'\n{row["source"]} (n = {row["n"]})')
    for name, value in row.items():
      if isinstance(value, list):
        print(f'  {name:<28}{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]')
  for bar in results['bars']:
    print(bar)
  if _OUT.value:
    records.write_json(_OUT.value, {'environment': environment, **results})


if __name__ == '__main__':
  _WORKDIR = command.define_workdir()
  _MINUTES = flags.DEFINE_float(
    'minutes', 60.0, 'For training: seven tenths for the warm start.'
  )
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  command.run(main)
