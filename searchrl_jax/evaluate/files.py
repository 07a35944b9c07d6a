"""Files of an evaluation that allow a comparison with another one.

manifest.json  questions, corpus, sampling, template, checkpoint, commit
rows.jsonl     one line per trajectory: its scores (`grading.Row`) and the name
               of the `evaluation` ('eval', or a control)
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax import lookup
from searchrl_jax.data.checks import DataError
from searchrl_jax.evaluate import grading
from searchrl_jax.store import records
from searchrl_jax.text import prompts
from searchrl_jax.types import SEARCH, Question

MANIFEST, ROWS = 'manifest.json', 'rows.jsonl'
_SAMPLING = ('n', 'temperature', 'top_p', 'seed', 'match')
_COSTS = (
  'sampled_tokens prompt_tokens observation_tokens searches trajectories'
).split()


def manifest(
  sets: Mapping[str, Sequence[Question]],
  config: ConfigDict,
  *,
  template: prompts.Template,
  identity: Mapping[str, Any],
  checkpoint: str,
  commit: str | None,
) -> dict[str, Any]:
  """Returns the content of manifest.json.

  Args:
    sets: name -> questions.
    config: the whole config.
    template: of the prompt.
    identity: of the retrieval server; {} = unknown.
    checkpoint: where the parameters were read from.
    commit: of the source code.
  """
  identity = dict(identity)
  return {
    'sets': {name: _frozen(qs) for name, qs in sorted(sets.items())},
    'corpus': identity.pop('corpus', None),
    'sampling': {name: config.eval[name] for name in _SAMPLING},
    'index': identity or None,
    'k': config.source.k,
    'source': config.source.module,
    'tools': records.plain(config.tools) or None,
    'judge': {k: config.judge[k] for k in ('url', 'model')},
    'env': records.plain(config.env),
    'template': template.digest,
    'checkpoint': checkpoint,
    'commit': commit,
  }


def _frozen(questions: Sequence[Question]) -> dict[str, Any]:
  # Different texts or answers are not visible in the ids alone.
  content = json.dumps([[q.id, q.text, q.answers] for q in questions])
  digest = hashlib.sha256(content.encode()).hexdigest()
  return grading.asked(questions) | {'content_sha256': digest}


def read_manifest(path: os.PathLike | str) -> dict[str, Any]:
  """Reads manifest.json.

  Raises:
    FileNotFoundError, DataError: the file is absent, or not a manifest.
  """
  with lookup.of(f'{path} is not a manifest of `evaluate`', DataError):
    content = json.loads(pathlib.Path(path).read_text())
    good = {'sets', 'corpus', 'sampling'} <= {*content}
    lookup.require(good, 'it lacks sets, corpus or sampling')
  return content


def frozen(
  sets: Mapping[str, Sequence[Question]], manifest: Mapping[str, Any], path: str
) -> dict[str, list[Question]]:
  """Selects exactly the questions of a manifest.

  Raises:
    DataError: a set or a question is missing, or a question has another text or
      other golden answers.
  """
  out = {}
  for name, wanted in manifest['sets'].items():
    what = f'{path} names the set {name!r}, and config.data.eval has {[*sets]}'
    lookup.require(name in sets, what, DataError)
    by_id = {q.id: q for q in sets[name]}
    out[name] = [by_id[id] for id in wanted['ids'] if id in by_id]
    absent = [id for id in wanted['ids'] if id not in by_id]
    lookup.require(
      _frozen(out[name]) == wanted,
      f'{path}: of the set {name!r}, {len(absent)} of {wanted["n"]} questions '
      f'are not in config.data.eval ({absent[:3]}), or have other texts or '
      'golden answers; use the data files of the manifest',
      DataError,
    )
  return out


def check_corpus(
  manifest: Mapping[str, Any], identity: Mapping[str, Any], path: str
) -> None:
  """Compares the corpus of a manifest with that of the server.

  Raises:
    DataError: they differ; names both.
  """
  wanted, served = manifest['corpus'], identity.get('corpus')
  if wanted is None or served is None:
    logging.warning(
      f'{path} names the corpus {wanted} and the server {served}: not compared'
    )
  elif wanted != records.plain(served):
    raise DataError(
      f'{path} names another corpus: {wanted}, but {served} on the server; '
      'serve that corpus, or evaluate without --manifest'
    )


def costs(
  evaluation: grading.Evaluation, name: str
) -> Iterator[tuple[str, float]]:
  """Yields 'NAME/cost/WHAT', and 'NAME/set=X/cost/WHAT' if there are more sets.

  Sums over trajectories, including failed ones: tokens that the policy
  sampled, of prompts, and of observations and feedback; number of queries.
  """
  names = {'policy': 'sampled_tokens', 'prompt': 'prompt_tokens'}
  sums: dict[str, dict[str, float]] = {}
  flat = [t for group in evaluation.groups for t in group]
  for row, trajectory in zip(evaluation.rows, flat, strict=True):
    for label in (name, f'{name}/set={row.set}'):
      own = sums.setdefault(label, dict.fromkeys(_COSTS, 0.0))
      own['trajectories'] += 1
      own['searches'] += len(trajectory.calls(SEARCH))
      for s in trajectory.segments:
        own[names.get(s.author, 'observation_tokens')] += len(s.ids)
  for label in sums if len(sums) > 2 else [name]:
    for what, value in sums[label].items():
      yield f'{label}/cost/{what}', value


def write_rows(folder: pathlib.Path, evaluations: Mapping) -> None:
  """Writes rows.jsonl."""
  lines = [
    json.dumps(records.plain({'evaluation': name} | dataclasses.asdict(row)))
    for name, evaluation in evaluations.items()
    for row in evaluation.rows
  ]
  records.write_text(folder / ROWS, ''.join(line + '\n' for line in lines))


def read_all(folder: os.PathLike | str) -> dict[str, list[grading.Row]]:
  """Reads rows.jsonl: evaluation -> rows.

  Raises:
    FileNotFoundError, DataError: there is none, or it is damaged.
  """
  path = pathlib.Path(folder) / ROWS
  absent = dict.fromkeys(grading.SCORES, grading.NAN) | {'vote': None}
  out: dict[str, list[grading.Row]] = {}
  for number, line in enumerate(path.read_text().splitlines(), 1):
    try:
      known = {k: v for k, v in json.loads(line).items() if v is not None}
      rows = out.setdefault(known.pop('evaluation'), [])
      rows.append(grading.Row(**absent | known))
    except (ValueError, KeyError, TypeError) as e:
      raise DataError(f'{path}:{number}: no row of `evaluate` ({e!r})') from e
  return out


def read_rows(
  folder: os.PathLike | str, evaluation: str = 'eval'
) -> list[grading.Row]:
  """Reads the rows of one evaluation.

  Raises:
    DataError: there are none.
  """
  out, path = read_all(folder), pathlib.Path(folder) / ROWS
  has = ', '.join(map(repr, out)) or 'none at all'
  what = f'{path} has no rows of {evaluation!r}; it has {has}'
  lookup.require(evaluation in out, what, DataError)
  return out[evaluation]
