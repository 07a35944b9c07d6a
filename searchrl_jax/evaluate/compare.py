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

from searchrl_jax import lookup
from searchrl_jax.evaluate import files, grading
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.run import command
from searchrl_jax.store import records

# Entries of a manifest that must be equal, and entries of which differences are
# shown.
SAME = ('sets', 'corpus', 'sampling')
SHOWN = (
  'index', 'k', 'source', 'tools', 'judge', 'env', 'template', 'checkpoint',
  'commit',
)  # fmt: skip


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
  apart = _apart(one, other, [name for name in SAME if name not in allow])
  # Different ids are more informative than their digests.
  lines = [
    f'{k}: {_brief(x, y)} and {_brief(y, x)}'
    for k, (x, y) in apart.items()
    if not (k.endswith('sha256') and f'{k.rpartition(".")[0]}.ids' in apart)
  ]
  names = dict.fromkeys(k.split('.')[0] for k in apart)
  lookup.require(
    not apart,
    f'{a} and {b} cannot be compared; they differ in {"; ".join(lines)}. '
    'Evaluate one of them again with --manifest of the other and its '
    f'config.eval, or give --allow={",".join(names)}',
  )


def _apart(one: dict, other: dict, names: Sequence[str]) -> dict[str, list]:
  """The entries in which two manifests differ: {path: [of one, of other]}."""
  parts = [lookup.differences(one.get(k), other.get(k), k) for k in names]
  return {path: values for part in parts for path, values in part.items()}


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
      # Of all questions; only rows of A say which are of a slice.
      known = {*theirs} if label == 'all' else theirs.keys() & questions
      x, y = [ours[k] for k in keys], [theirs[k] for k in keys]
      wins = sum(v > u for u, v in zip(x, y, strict=True))
      losses = sum(v < u for u, v in zip(x, y, strict=True))
      n = wins + losses
      apart = [v - u for u, v in zip(x, y, strict=True)]
      interval = metrics.bootstrap(apart, resamples=resamples, seed=seed)
      by_slice[label.removeprefix('all/')] = {
        'n': len(keys),
        'unpaired': len(ours.keys() ^ known),
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
  specs: Sequence[str], *, allow: Sequence[str] = (), **how: Any
) -> list[dict]:
  """Compares each of `specs` after the first with the first.

  Args:
    specs: FOLDER or FOLDER:EVALUATION.
    allow: entries of SAME that may differ.
    **how: scores, resamples and seed, as `compare` takes them.

  Returns:
    For each {'a', 'b', 'differs': {path: [of a, of b]}, 'scores': see
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
        'differs': _apart(base, manifest, (*SHOWN, *allow)),
        'scores': compare(base_rows, rows, **how),
      }
    )
  return out


def show(comparison: dict, out=None) -> None:
  """Prints a table per score, with a row per slice, then other differences."""
  out = out or console.Console()
  out.print(f'A = {comparison["a"]}\nB = {comparison["b"]}', markup=False)
  for score, slices in comparison['scores'].items():
    shown = table.Table(title=f'{score}: B - A (95% paired bootstrap)')
    shown.add_column('questions', overflow='fold')
    for name in ('n', 'A', 'B', 'difference', 'wins', 'losses', 'ties', 'p'):
      shown.add_column(name, justify='right')
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
  lookup.require(
    len(specs) >= 2,
    'give two or more folders that `evaluate` wrote; the first is the baseline',
  )
  for name, known, what in (
    *((s, grading.SCORES, 'scores') for s in _SCORES.value),
    *((s, SAME, 'allow') for s in allow),
  ):
    hint = lookup.near(name, known)
    lookup.require(name in known, f'--{what}={name}: {hint}')
  how = {'resamples': _RESAMPLES.value, 'seed': _SEED.value}
  comparisons = against(specs, scores=_SCORES.value, allow=allow, **how)
  for comparison in comparisons:
    show(comparison)
  if _OUT.value:
    records.write_json(_OUT.value, how | {'comparisons': comparisons})


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
  _RESAMPLES = flags.DEFINE_integer('resamples', 10000, 'Of the bootstrap.', 1)
  _SEED = flags.DEFINE_integer('seed', 0, 'Of the bootstrap.')
  command.run(main, positional=_FOLDERS)
