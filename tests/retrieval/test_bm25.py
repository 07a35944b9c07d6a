import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrieval.bm25 import Analyzer, BM25Index

TEXTS = ('red fish', 'blue fish fish', 'red red blue bird', 'green')
PLAIN = dict(stemmer='none', stop_words='none')


def ranked(index, query, k=10):
  ids, scores = index.search([query], k)
  return [
    (i, s)
    for i, s in zip(ids[0].tolist(), scores[0].tolist(), strict=True)
    if i >= 0
  ]


def test_golden_score():
  # P = 4, mean length (2 + 3 + 4 + 1) / 4 = 2.5, k1 = 1.2, b = 0.75.
  # "fish" is in df = 2: idf = ln(1 + (4 - 2 + 0.5) / (2 + 0.5)) = ln 2.
  # Text 1 has it tf = 2 times in 3 words:
  #   norm = 1.2 * (1 - 0.75 + 0.75 * 3 / 2.5) = 1.2 * 1.15 = 1.38
  #   score = ln 2 * 2 / (2 + 1.38) = 0.693147 * 0.591716 = 0.410146
  # Text 0, tf = 1 of 2 words: norm = 1.2 * (0.25 + 0.6) = 1.02
  #   score = ln 2 / 2.02 = 0.343142
  index = BM25Index(TEXTS, k1=1.2, b=0.75, **PLAIN)
  found = ranked(index, 'fish')
  assert [i for i, _ in found] == [1, 0]
  assert found[0][1] == pytest.approx(math.log(2) * 2 / 3.38, rel=1e-6)
  assert found[0][1] == pytest.approx(0.410146, abs=1e-6)
  assert found[1][1] == pytest.approx(0.343142, abs=1e-6)
  # A word twice in the query counts twice.
  assert ranked(index, 'fish FISH')[0][1] == pytest.approx(0.820292, abs=1e-6)


def reference(texts, query, k1, b):
  """BM25 (Lucene), word by word in float64."""
  docs = [text.split() for text in texts]
  mean = sum(map(len, docs)) / len(docs)
  scores = []
  for doc in docs:
    score = 0.0
    for word in query.split():
      df = sum(word in other for other in docs)
      tf = doc.count(word)
      if tf:
        idf = math.log(1 + (len(docs) - df + 0.5) / (df + 0.5))
        score += idf * tf / (tf + k1 * (1 - b + b * len(doc) / mean))
    scores.append(score)
  return scores


words = st.lists(st.sampled_from('ab cd ef gh ij kl'.split()), max_size=8)


@settings(max_examples=60, deadline=None)
@given(
  st.lists(words, min_size=1, max_size=40),
  words,
  st.integers(1, 50),
  st.sampled_from([(1.2, 0.75), (0.9, 0.4), (0.0, 0.0), (2.0, 1.0)]),
)
def test_agrees_with_the_formula(docs, query, k, parameters):
  texts, query = [' '.join(doc) for doc in docs], ' '.join(query)
  k1, b = parameters
  index = BM25Index(texts, k1=k1, b=b, **PLAIN)
  found = ranked(index, query, k)
  want = reference(texts, query, k1, b) if any(docs) else [0.0] * len(texts)
  assert len(found) == min(k, sum(s > 0 for s in want))
  got = [s for _, s in found]
  np.testing.assert_allclose(got, [want[i] for i, _ in found], rtol=1e-5)
  np.testing.assert_allclose(
    got, sorted(want, reverse=True)[: len(got)], rtol=1e-5
  )


# The contract of every index: factories of an index over given texts.
INDEXES = {
  'bm25': lambda texts: BM25Index(texts),
  'bm25_plain': lambda texts: BM25Index(texts, k1=0.9, b=0.4, **PLAIN),
}


@pytest.fixture(params=INDEXES)
def make(request):
  return INDEXES[request.param]


def many_texts(n=1000):
  rng = np.random.default_rng(0)
  vocabulary = [f'word{i}' for i in range(50)]
  return [
    ' '.join(rng.choice(vocabulary, rng.integers(1, 12))) for _ in range(n)
  ]


def test_contract_shapes_and_order(make):
  index = make(many_texts())
  queries = ['word1 word2', 'nothing', '', 'word3']
  ids, scores = index.search(queries, 7)
  assert ids.shape == scores.shape == (4, 7)
  assert ids.dtype == np.int64 and scores.dtype == np.float32
  assert (ids[1:3] == -1).all() and np.isneginf(scores[1:3]).all()
  assert (ids[[0, 3]] >= 0).all() and (ids < len(index)).all()
  assert (scores[[0, 3]] > 0).all()
  assert (np.diff(scores[[0, 3]]) <= 0).all()
  assert index.parameters['name']


def test_contract_prefix_and_batch_do_not_show(make):
  index = make(many_texts())
  queries = [f'word{i} word{i + 1} word{i + 7}' for i in range(30)]
  ids, scores = index.search(queries, 200)
  for k in (1, 3, 8, 50, 199):
    short, values = index.search(queries, k)
    np.testing.assert_array_equal(short, ids[:, :k])
    np.testing.assert_array_equal(values, scores[:, :k])
  for row, query in enumerate(queries):
    np.testing.assert_array_equal(index.search([query], 200)[0][0], ids[row])
  np.testing.assert_array_equal(
    index.search(queries[::-1], 200)[0], ids[::-1]
  )


def test_contract_ties_come_in_corpus_order(make):
  index = make(['other'] + ['same words'] * 700)
  ids, scores = index.search(['same'], 650)
  assert ids[0].tolist() == list(range(1, 651))
  assert len(set(scores[0].tolist())) == 1


def test_contract_k_beyond_the_corpus(make):
  index = make(['apple pear', 'apple', 'plum'])
  ids, scores = index.search(['apple'], 10**9)
  assert ids.shape == (1, 3)
  assert sorted(ids[0, :2].tolist()) == [0, 1] and ids[0, 2] == -1
  with pytest.raises(ValueError, match='k=0'):
    index.search(['apple'], 0)


def test_contract_no_queries(make):
  ids, scores = make(['apple']).search([], 3)
  assert ids.shape == scores.shape == (0, 1)


def test_order_of_words_cannot_show():
  index = BM25Index(many_texts())
  query = [f'word{i}' for i in range(12)]
  one = index.search([' '.join(query)], 50)
  two = index.search([' '.join(reversed(query))], 50)
  np.testing.assert_array_equal(one[0], two[0])
  np.testing.assert_array_equal(one[1], two[1])


def test_options_change_what_matches():
  texts = ['The swimmers swam', 'a swimming pool']
  assert len(ranked(BM25Index(texts), 'swim')) == 1  # swimmer is another stem
  assert ranked(BM25Index(texts, stemmer='none'), 'swim') == []
  assert ranked(BM25Index(texts), 'the') == []
  assert len(ranked(BM25Index(texts, stop_words='none'), 'the')) == 1
  # The form asked for is not in the corpus, its stem is.
  assert [i for i, _ in ranked(BM25Index(texts), 'swims')] == [1]


def test_single_characters_are_words():
  assert ranked(BM25Index(['Henry V', 'Henry IV']), 'v')[0][0] == 0


@pytest.mark.parametrize('text', ['', '... !?', 'the of and', '\x00\ud800'])
def test_corpus_without_any_term(text):
  index = BM25Index([text, text])
  assert ranked(index, 'the anything ' + text) == []


@pytest.mark.parametrize(
  'options, said',
  [
    (dict(stemmer='klingon'), 'klingon.*english'),
    (dict(stop_words='x'), 'english_plus'),
    (dict(k1=-1), 'k1=-1'),
    (dict(k1=float('nan')), 'k1=nan'),
    (dict(b=1.5), 'b=1.5'),
  ],
)
def test_bad_options(options, said):
  with pytest.raises(ValueError, match=said):
    BM25Index(['x'], **options)
  with pytest.raises(ValueError, match='at least one'):
    BM25Index([])


def test_spans_mark_what_matched():
  text = 'Swimming, the SWIM!'
  assert Analyzer().spans(text, {'swim'}) == [(0, 8), (14, 18)]


def test_ranks_the_real_corpus(data_dir):
  """Recall@3 on NQ dev is a figure of the data's README: 0.789."""
  import gzip
  import json

  from retrieval.corpus import read_corpus

  corpus = read_corpus(data_dir / 'corpus.jsonl.gz')
  with gzip.open(data_dir / 'qa_dev.jsonl.gz', 'rt') as f:
    questions = [json.loads(line) for line in f]
  questions = [q for q in questions if q['source'].startswith('nq')]
  index = BM25Index(corpus.contents)
  ids, _ = index.search([q['question'] for q in questions], 3)
  hits = [
    any(corpus.ids[i] in q['supporting_ids'] for i in row if i >= 0)
    for row, q in zip(ids, questions, strict=True)
  ]
  assert np.mean(hits) >= 0.78  # measured: 0.807
