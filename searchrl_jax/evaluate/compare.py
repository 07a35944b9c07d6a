"""Compares evaluations question by question.

  python -m searchrl_jax.evaluate.compare BASE OTHER    # of `evaluate`
  python -m searchrl_jax.evaluate.compare BASE OTHER MORE --out=comparison.json
  python -m searchrl_jax.evaluate.compare BASE BASE:no_search  # a control

Each folder after the first is compared with the first. Samples of a question
are averaged. Differences have a paired bootstrap interval over questions; wins
and losses have an exact two-sided sign test, which for right-or-wrong answers
(EM of one sample) is McNemar's. The p-values are not corrected for multiple
tests: of twenty slices, one is below 0.05 by chance.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

from absl import flags
from rich import console, table
from scipy import stats

from searchrl_jax import checks, lookup
from searchrl_jax.evaluate import files, grading
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.run import command
from searchrl_jax.store import records

# Entries of a manifest that must be equal, and entries of which differences are
# shown.
SAME = ('sets', 'corpus', 'sampling')
SHOWN = (
  'index',
  'k',
  'source',
  'tools',
  'judge',
  'env',
  'template',
  'checkpoint',
  'commit',
)


def read(spec: str) -> tuple[dict, list[grading.Row]]:
  """Manifest and rows of 'FOLDER' or 'FOLDER:EVALUATION'."""
  folder, evaluation = spec, 'eval'
  if not pathlib.Path(spec).is_dir() and ':' in spec:
    folder, evaluation = spec.rsplit(':', 1)
  manifest = files.read_manifest(pathlib.Path(folder) / files.MANIFEST)
  return manifest, files.read_rows(folder, evaluation)


def require_comparable(a: str, b: str, manifests, allow: Sequence[str]):
  """Raises ConfigError if entries differ that must be equal; names them."""
  one, other = manifests
  apart = {}
  for name in SAME:
    if name not in allow:
      apart |= lookup.differences(one[name], other[name], name)
  if apart:
    # Different ids are more informative than their digests.
    plain = [
      k
      for k in apart
      if not (k.endswith('sha256') and f'{k.rpartition(".")[0]}.ids' in apart)
    ]
    lines = [
      f'{k}: {_brief(apart[k][0], apart[k][1])} and '
      + _brief(apart[k][1], apart[k][0])
      for k in plain
    ]
    raise checks.ConfigError(
      f'{a} and {b} cannot be compared; they differ in '
      + '; '.join(lines)
      + '. Evaluate one of them again with --manifest of the other and its '
      'config.eval, or give --allow='
      + ','.join(dict.fromkeys(k.split('.')[0] for k in apart))
    )


def _brief(value: Any, other: Any = None) -> str:
  if isinstance(value, list) and isinstance(other, list):
    alone = [v for v in value if v not in set(other)][:1]
    return f'{len(value)} ids' + ''.join(f' ({v!r} here alone)' for v in alone)
  text = repr(value)
  return text if len(text) <= 60 else text[:57] + '...'


def compare(
  a: Sequence[grading.Row],
  b: Sequence[grading.Row],
  *,
  scores: Sequence[str],
  resamples: int,
  seed: int,
) -> dict[str, dict[str, dict[str, float]]]:
  """{score: {slice: figures}} of b against a.

  Slices: 'all', and by set, source and hops if there are several; a slice with
  the questions of an earlier slice is left out. Figures: `n` paired questions,
  `unpaired` ones (with a score on one side only, for example because all
  samples failed), the means `a` and `b`, their `difference` b - a with `low`
  and `high`, `wins` of b, `losses`, `ties` and `p`.
  """
  out = {}
  for score in scores:
    theirs = grading.by_question(b, score)
    by_slice, seen = {}, []
    for label, rows in grading.slices(a, 'all').items():
      questions = {(row.set, row.question) for row in rows}
      ours = grading.by_question(rows, score)
      keys = [key for key in ours if key in theirs]
      if not keys or questions in seen:
        continue
      seen.append(questions)
      x, y = [ours[k] for k in keys], [theirs[k] for k in keys]
      wins = sum(v > u for u, v in zip(x, y, strict=True))
      losses = sum(v < u for u, v in zip(x, y, strict=True))
      n = wins + losses
      apart = [v - u for u, v in zip(x, y, strict=True)]
      interval = metrics.bootstrap(apart, resamples=resamples, seed=seed)
      by_slice[label.removeprefix('all/')] = {
        'n': len(keys),
        'unpaired': len(ours.keys() ^ (theirs.keys() & questions)),
        'a': sum(x) / len(x),
        'b': sum(y) / len(y),
        'difference': interval.mean,
        'low': interval.low,
        'high': interval.high,
        'wins': wins,
        'losses': losses,
        'ties': len(keys) - wins - losses,
        'p': stats.binomtest(wins, n).pvalue if n else 1.0,
      }
    out[score] = by_slice
  return out


def against(
  specs: Sequence[str],
  *,
  scores: Sequence[str],
  resamples: int,
  seed: int,
  allow: Sequence[str] = (),
) -> list[dict]:
  """Compares each of `specs` after the first with the first.

  Args:
    specs: FOLDER or FOLDER:EVALUATION.
    scores, resamples, seed: as `compare` takes them.
    allow: entries of SAME that may differ.

  Returns:
    For each {'a', 'b', 'differs': {path: (of a, of b)}, 'scores': see
    `compare`}.

  Raises:
    ConfigError: two of them cannot be compared.
  """
  (base, base_rows), *others = map(read, specs)
  out = []
  for spec, (manifest, rows) in zip(specs[1:], others, strict=True):
    require_comparable(specs[0], spec, (base, manifest), allow)
    out.append(
      {
        'a': specs[0],
        'b': spec,
        'differs': {
          k: v
          for name in (*SHOWN, *allow)
          for k, v in lookup.differences(
            base.get(name), manifest.get(name), name
          ).items()
        },
        'scores': compare(
          base_rows, rows, scores=scores, resamples=resamples, seed=seed
        ),
      }
    )
  return out


def show(comparison: dict, out=None) -> None:
  """Prints a table per score, with a row per slice, then other differences."""
  out = out or console.Console()
  out.print(f'A = {comparison["a"]}\nB = {comparison["b"]}', markup=False)
  for score, slices in comparison['scores'].items():
    shown = table.Table(title=f'{score}: B - A (95% paired bootstrap)')
    for i, name in enumerate(
      ('questions', 'n', 'A', 'B', 'difference', 'wins', 'losses', 'ties', 'p')
    ):
      shown.add_column(
        name,
        justify='right' if i else 'left',
        overflow='ellipsis' if i else 'fold',
      )
    for label, f in slices.items():
      shown.add_row(
        label,
        f'{f["n"]}' + (f' (-{f["unpaired"]})' if f['unpaired'] else ''),
        f'{f["a"]:.3f}',
        f'{f["b"]:.3f}',
        f'{f["difference"]:+.3f} [{f["low"]:+.3f}, {f["high"]:+.3f}]',
        *(str(f[k]) for k in ('wins', 'losses', 'ties')),
        f'{f["p"]:.2g}',
      )
    out.print(shown)
  for path, (x, y) in comparison['differs'].items():
    out.print(f'{path}: {_brief(x)} -> {_brief(y)}', markup=False)


def main():
  specs, allow = _FOLDERS.value, _ALLOW.value
  if len(specs) < 2:
    raise checks.ConfigError(
      'give two or more folders that `evaluate` wrote; the first is the '
      'baseline'
    )
  for name, known, what in (
    *((s, grading.SCORES, 'scores') for s in _SCORES.value),
    *((s, SAME, 'allow') for s in allow),
  ):
    if name not in known:
      raise checks.ConfigError(f'--{what}={name}: {lookup.near(name, known)}')
  if _RESAMPLES.value < 1:
    raise checks.ConfigError(f'--resamples={_RESAMPLES.value}: at least 1')
  comparisons = against(
    specs,
    scores=_SCORES.value,
    allow=allow,
    resamples=_RESAMPLES.value,
    seed=_SEED.value,
  )
  for comparison in comparisons:
    show(comparison)
  if _OUT.value:
    records.write_json(
      _OUT.value,
      {
        'resamples': _RESAMPLES.value,
        'seed': _SEED.value,
        'comparisons': comparisons,
      },
    )


if __name__ == '__main__':
  _FOLDERS = flags.DEFINE_list(
    'folders',
    [],
    'Folders that `evaluate` wrote, or FOLDER:EVALUATION for a '
    'control; the flag name may be omitted.',
  )
  _SCORES = flags.DEFINE_list(
    'scores', ['em', 'f1', 'sub_em'], 'Scores of rows.jsonl to compare.'
  )
  _ALLOW = flags.DEFINE_list(
    'allow',
    [],
    'Parts of the manifest that may differ: sets, corpus, sampling.',
  )
  _OUT = flags.DEFINE_string('out', '', 'Also write the figures as JSON.')
  _RESAMPLES = flags.DEFINE_integer('resamples', 10000, 'Of the bootstrap.')
  _SEED = flags.DEFINE_integer('seed', 0, 'Of the bootstrap.')
  command.run(main, positional=_FOLDERS)
