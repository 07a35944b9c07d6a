"""What an evaluation leaves on disk, so that another can be held against it.

manifest.json  which questions, on which corpus, sampled how, by what
rows.jsonl     one line a trajectory: its scores (`answer.Row`), and which
               `evaluation` they are of ('eval', a control)
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

from searchrl_jax.data.checks import DataError
from searchrl_jax.evaluators import answer
from searchrl_jax.run import records
from searchrl_jax.text import prompts
from searchrl_jax.types import Group, Question

MANIFEST, ROWS = 'manifest.json', 'rows.jsonl'
_log = logging.getLogger(__name__)


def manifest(
  sets: Mapping[str, Sequence[Question]],
  config: ConfigDict,
  *,
  template: prompts.Template,
  identity: Mapping[str, Any],
  checkpoint: str,
  commit: str | None,
) -> dict[str, Any]:
  """What was evaluated, as JSON.

  Args:
    sets: the questions themselves, by set.
    config: the whole config.
    template: the prompt's.
    identity: of the retrieval server; {} if it does not say who it is.
    checkpoint: what the parameters were read from.
    commit: of this source.
  """
  identity = dict(identity)
  return {
    'sets': {name: _frozen(qs) for name, qs in sorted(sets.items())},
    'corpus': identity.pop('corpus', None),
    'sampling': {
      k: config.eval[k] for k in ('n', 'temperature', 'top_p', 'seed', 'match')
    },
    'index': identity or None,
    'k': config.source.k,
    'source': config.source.module,
    'judge': {k: config.judge[k] for k in ('url', 'model')},
    'env': records.plain(config.env),
    'template': hashlib.sha256(repr(template).encode()).hexdigest(),
    'checkpoint': checkpoint,
    'commit': commit,
  }


def _frozen(questions: Sequence[Question]) -> dict[str, Any]:
  content = json.dumps([[q.id, q.text, q.answers] for q in questions])
  ids = [q.id for q in questions]
  return {
    'n': len(ids),
    'sha256': answer.digest(ids),
    # Of ids, texts and golden answers.
    'content_sha256': hashlib.sha256(content.encode()).hexdigest(),
    'ids': ids,
  }


def read_manifest(path: os.PathLike | str) -> dict[str, Any]:
  """
  Raises:
    DataError: the file is absent or no manifest.
  """
  try:
    found = json.loads(pathlib.Path(path).read_text())
    if not {'sets', 'corpus', 'sampling'} <= found.keys():
      raise ValueError('it lacks sets, corpus or sampling')
  except OSError as e:
    raise DataError(
      f'{path}: {e.strerror}; `evaluate` writes it into its --out'
    ) from e
  except (ValueError, AttributeError) as e:
    raise DataError(f'{path} is no manifest of `evaluate`: {e}') from e
  return found


def frozen(
  sets: Mapping[str, Sequence[Question]], manifest: Mapping[str, Any], path: str
) -> dict[str, list[Question]]:
  """Exactly the questions of a manifest.

  Raises:
    DataError: a set or a question that is not there, or one whose text or
      golden answers are others.
  """
  out = {}
  for name, wanted in manifest['sets'].items():
    if name not in sets:
      raise DataError(
        f'{path} names the set {name!r}, and config.data.eval has '
        f'{", ".join(map(repr, sets))}'
      )
    known = {q.id: q for q in sets[name]}
    absent = [id for id in wanted['ids'] if id not in known]
    if absent:
      raise DataError(
        f'{path}: {len(absent)} of {wanted["n"]} questions of the set '
        f'{name!r} are not in config.data.eval (the first: {absent[0]!r}); '
        'give the files that it was made from'
      )
    out[name] = [known[id] for id in wanted['ids']]
    if _frozen(out[name]) != wanted:
      raise DataError(
        f'{path}: the set {name!r} has the same ids with other texts or '
        'golden answers; give the files that it was made from'
      )
  return out


def check_corpus(
  manifest: Mapping[str, Any], identity: Mapping[str, Any], path: str
) -> None:
  """
  Raises:
    DataError: the server's corpus is another one; names both.
  """
  wanted, served = manifest['corpus'], identity.get('corpus')
  if wanted is None or served is None:
    _log.warning(
      '%s is of the corpus %s and the server says %s: not compared',
      path,
      wanted,
      served,
    )
  elif wanted != records.plain(served):
    raise DataError(
      f'{path} is of another corpus: {wanted} there, {served} on the server; '
      'serve that one, or evaluate without --manifest'
    )


def costs(
  evaluation: answer.Evaluation, name: str
) -> Iterator[tuple[str, float]]:
  """Yields 'NAME/cost/WHAT', and 'NAME/set=X/cost/WHAT' if sets are several.

  Sums over trajectories, failed ones included: tokens that the policy
  sampled, of prompts, and of observations and feedback; queries.
  """
  parts: dict[str, list] = {}
  flat = [t for group in evaluation.groups for t in group]
  for row, trajectory in zip(evaluation.rows, flat, strict=True):
    parts.setdefault(f'{name}/set={row.set}', []).append(trajectory)
  for label, trajectories in ({name: flat} | parts).items():
    if label == name or len(parts) > 1:
      for what, value in _costs(trajectories).items():
        yield f'{label}/cost/{what}', value


def _costs(trajectories: Group) -> dict[str, float]:
  tokens = dict.fromkeys(('sampled', 'prompt', 'observation'), 0.0)
  names = {'policy': 'sampled', 'prompt': 'prompt'}
  for trajectory in trajectories:
    for s in trajectory.segments:
      tokens[names.get(s.author, 'observation')] += len(s.ids)
  return {f'{k}_tokens': v for k, v in tokens.items()} | {
    'searches': float(sum(len(t.searches) for t in trajectories)),
    'trajectories': float(len(trajectories)),
  }


def write_rows(
  folder: pathlib.Path, evaluations: Mapping[str, answer.Evaluation]
) -> None:
  records.write_text(
    folder / ROWS,
    ''.join(
      json.dumps(records.plain({'evaluation': name} | dataclasses.asdict(row)))
      + '\n'
      for name, evaluation in evaluations.items()
      for row in evaluation.rows
    ),
  )


def read_rows(
  folder: os.PathLike | str, evaluation: str = 'eval'
) -> list[answer.Row]:
  """
  Raises:
    DataError: there are none, or none of this evaluation.
  """
  path = pathlib.Path(folder) / ROWS
  out, names, i = [], {}, 0
  try:
    with open(path) as f:
      for line in f:
        i += 1
        fields = json.loads(line)
        name = fields.pop('evaluation')
        names[name] = None
        if name == evaluation:
          # A score that came later than this file is unknown here.
          unknown = dict.fromkeys(answer.SCORES, answer.NAN)
          found = {k: v for k, v in fields.items() if v is not None}
          out.append(answer.Row(**{'vote': None} | unknown | found))
  except OSError as e:
    raise DataError(
      f'{path}: {e.strerror}; give a folder that `evaluate` wrote'
    ) from e
  except (ValueError, KeyError, TypeError) as e:
    raise DataError(f'{path}:{i}: no row of `evaluate` ({e})') from e
  if not out:
    raise DataError(
      f'{path} has no rows of {evaluation!r}; it has '
      f'{", ".join(map(repr, names)) or "none at all"}'
    )
  return out
