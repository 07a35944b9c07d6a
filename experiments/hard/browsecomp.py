"""BrowseComp-Plus (arXiv 2508.06600): its questions, run files and scores.

  python -m experiments.hard.browsecomp --evaluation=runs/bcp \\
    --folder=BrowseComp-Plus

reads an evaluation of configs/hard.py:questions=browsecomp and writes, into its
folder, browsecomp/run_ID.json, a file for each question as their clients write
them, and browsecomp.json with their metrics, in percent:

  accuracy    right replies; one that is not complete is wrong. A reply is right
              by config.judge, or, without one, if it contains the answer
  recall      of the evidence of a question, what searches have shown
  cited, cited_right  of the evidence, what a reply cites; of what it cites,
              the evidence. Means over the replies that cite
  calibration of 100 replies or more, else 0: the root mean square of confidence
              less accuracy in bins of 100 by confidence. Their script leaves
              out the last bin, and so does this; calibration_whole does not

--folder is a clone of their repository with decrypted questions, and is what
`load`, a data module, takes as its path.
"""

import collections
from collections.abc import Mapping, Sequence
import json
import math
import pathlib
import re
from typing import Any

from absl import flags
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.data import jsonl
from searchrl_jax.data.checks import choose, make_question
from searchrl_jax.evaluate import files
from searchrl_jax.run import build, command
from searchrl_jax.sources import open as opening
from searchrl_jax.store import records
from searchrl_jax.types import SEARCH, Question, Trajectory

QUESTIONS = 'data/browsecomp_plus_decrypted.jsonl'
EVIDENCE = 'topics-qrels/qrel_evidence.txt'
_CITED = re.compile(r'\[[^\[\]]*\]|【[^【】]*】')
_CONFIDENCE = re.compile(r'confidence\W*?(\d+(?:\.\d+)?)', re.IGNORECASE)


def load(path: str, n=0, seed=0) -> list[Question]:
  """Draws n questions of a clone, 0 = all; evidence is what supports one."""
  wanted, found = evidence(path), []
  for at, row in jsonl.read(f'{path}/{QUESTIONS}'):
    question = make_question(
      at,
      id=row['query_id'],
      text=row['query'],
      answers=[row['answer']],
      source='browsecomp_plus',
      supporting=wanted.get(str(row['query_id'])),
    )
    found.append((at, question))
  return choose(found, path=path, n=n, seed=seed)


def evidence(path: str) -> dict[str, list[str]]:
  """Question id -> ids of documents, from their file in TREC's layout."""
  out = collections.defaultdict(list)
  for line in pathlib.Path(path, EVIDENCE).read_text().splitlines():
    question, _, document, _ = line.split()
    out[question].append(document)
  return dict(out)


def run_of(trajectory: Trajectory, env, model: str = '') -> dict[str, Any]:
  """A run file, of a trajectory that has not failed."""
  calls = trajectory.searches  # without an error
  ids = [p.id for found in calls for p in found.passages]
  reply, items = env.answer(trajectory), []
  own = [b for b in env.blocks(trajectory) if b.author == 'policy']
  thoughts = [b for b in own if b.kind == 'think']
  for turn in range(trajectory.turns):
    items += [_item('reasoning', [b.text]) for b in thoughts if b.turn == turn]
    items += [_call(s) for s in calls if s.request.turn == turn]
  if reply:
    items.append(_item('output_text', reply))
  return {
    'metadata': {'model': model},
    'query_id': trajectory.question.id,
    'tool_call_counts': collections.Counter(s.request.tool for s in calls),
    'status': 'completed' if reply else 'incomplete',
    'retrieved_docids': [*dict.fromkeys(ids)],
    'result': items,
  }


def _item(kind: str, output, tool=None, arguments=None) -> dict[str, Any]:
  about = {'type': kind, 'tool_name': tool, 'arguments': arguments}
  return about | {'output': output}


def _call(found) -> dict[str, Any]:
  tool, query = found.request.tool, found.request.query
  if tool == SEARCH:
    hits = found.passages
    hits = [dict(docid=p.id, score=p.score, snippet=p.text) for p in hits]
    arguments, output = {'query': query}, json.dumps(hits)
  else:
    arguments, output = {'docid': opening.read(query)[0]}, found.text
  return _item('tool_call', output, tool, json.dumps(arguments))


def scores(
  runs: Sequence[Mapping], wanted: Mapping, right: Mapping[str, bool]
) -> dict[str, float]:
  """The metrics of run files.

  Args:
    runs: as `run_of` makes them.
    wanted: see `evidence`.
    right: question id -> whether the reply is right; without a verdict, none.
  """
  recall, cites, confidence, verdicts = [], [], [], []
  for run in runs:
    own = {*wanted.get(run['query_id'], ())}
    if own:
      recall.append(len(own & {*run['retrieved_docids']}) / len(own))
    if run['status'] != 'completed':
      continue
    reply = run['result'][-1]['output']
    cited = {*re.findall(r'\d+', ' '.join(_CITED.findall(reply)))}
    if cited:
      hit = len(cited & own)
      cites.append((hit / max(len(own), 1), hit / len(cited)))
    if run['query_id'] in right:
      said = _CONFIDENCE.search(reply)
      confidence.append(min(float(said[1]), 100.0) if said else 100.0)
      verdicts.append(right[run['query_id']])
  mean = lambda values: 100 * math.fsum(values) / max(len(values), 1)
  return {
    'n': len(runs),
    'accuracy': 100 * sum(verdicts) / max(len(runs), 1),
    'recall': mean(recall),
    'cited': mean([share for share, _ in cites]),
    'cited_right': mean([share for _, share in cites]),
    'calibration': calibration(confidence, verdicts),
    'calibration_whole': calibration(confidence, verdicts, whole=True),
  }


def calibration(
  confidence: Sequence[float], right: Sequence[bool], *, size=100, whole=False
) -> float:
  """See the module. confidence: percent. whole: with the last bin."""
  n = len(confidence)
  if n < size:
    return 0.0
  order = np.argsort(confidence)
  gaps = (np.asarray(confidence) / 100 - np.asarray(right, float))[order]
  bins = np.split(gaps, range(size, n - n % size, size))
  # The last one has the rest.
  used = bins if whole else bins[:-1]
  squares = (own.mean() ** 2 * len(own) / n for own in used)
  return 100 * math.sqrt(math.fsum(squares))


def main():
  out = pathlib.Path(_EVALUATION.value)
  config = build.load_config(str(out))
  what = f'config.eval.n={config.eval.n}: a question has one run file; use 1'
  lookup.require(config.eval.n == 1, f'--evaluation={out} has {what}')
  env = build.environment(config, build.tokenizer(config, str(out)))
  model = files.read_manifest(out / files.MANIFEST)['checkpoint']
  found = (record.trajectory for record in records.read(out / 'eval'))
  runs = [run_of(t, env, model) for t in found if not t.failed]
  for run in runs:
    name = f'run_{run["query_id"]}.json'
    records.write_json(out / 'browsecomp' / name, run)
  score = 'judged' if config.judge.url else 'sub_em'
  rows = ((r.question, getattr(r, score)) for r in files.read_rows(out))
  right = {question: bool(value) for question, value in rows if value == value}
  result = scores(runs, evidence(_FOLDER.value), right) | {'right_by': score}
  records.write_json(out / 'browsecomp.json', result)
  print(json.dumps(result, indent=2))


if __name__ == '__main__':
  _EVALUATION = flags.DEFINE_string('evaluation', None, 'Its folder.')
  _FOLDER = flags.DEFINE_string('folder', None, 'A clone of BrowseComp-Plus.')
  flags.mark_flags_as_required(['evaluation', 'folder'])
  command.run(main)
