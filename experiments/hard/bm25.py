"""What BM25 finds of supporting passages with the question's own text.

  python -m experiments.hard.bm25 --config=configs/hard.py:questions=tau2 \\
    --out=experiments/hard/bm25.json

The baseline of a policy with n searches of config.source.k passages. `whole`:
one search with the whole text, of which a server reads 256 words, for n k
passages; `sentences`: a search with each of its n longest sentences. `mean` is
that of the recall, as `evaluate` has it.
"""

import re

from absl import flags

from experiments import common
from retrieval.corpus import read_corpus
from retrieval.index.bm25 import BM25Index
from retrieval.serve import protocol
from searchrl_jax.data import core as data
from searchrl_jax.rewards import scores
from searchrl_jax.run import build, command

BUDGETS = 1, 2, 4, 8


def sentences(text: str, n: int) -> list[str]:
  return sorted(re.split(r'(?<=[.!?])\s+|\n+', text), key=len)[-n:]


def rows(questions, index, ids, k: int) -> list[dict]:
  """A row for each budget and kind of query. ids: of the passages."""

  def recall(q, queries: list[str], most: int) -> float:
    # What a server of the usual limits reads.
    read = [protocol.cut(query, limits) for query in queries]
    found, _ = index.search(read, most)
    shown = {ids[i] for row in found for i in row if i >= 0}
    return len(shown & {*q.supporting}) / len({*q.supporting})

  out, limits = [], protocol.Limits()
  for n in BUDGETS:
    found = {
      'whole': [recall(q, [q.text], n * k) for q in questions],
      'sentences': [recall(q, sentences(q.text, n), k) for q in questions],
    }
    for kind, values in found.items():
      mean = scores.bootstrap(values, resamples=2000, seed=0)._asdict()
      out.append(dict(searches=n, passages=n * k, query=kind) | mean)
  return out


def main():
  config, before = _CONFIG.value, common.environment()
  corpus = read_corpus(build.corpus(config, ''))
  sets = data.load_sets(config.data.eval, config.data)
  asked = [q for qs in sets.values() for q in qs if q.supporting]
  found = rows(asked, BM25Index(corpus.contents), corpus.ids, config.source.k)
  common.report(_OUT.value, 'hard_bm25', found, [], before)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  command.run(main)
