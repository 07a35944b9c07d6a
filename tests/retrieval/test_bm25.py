import collections
import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import types
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from retrieval.index import bm25
from retrieval.index.bm25 import Analyzer, BM25Index
from tests.conftest import ROOT
from tests.memory import Peak

pytestmark = pytest.mark.slow

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


def test_golden_score_of_search_r1():
  # The same texts with k1 = 0.9, b = 0.4.
  # Text 1: norm = 0.9 * (1 - 0.4 + 0.4 * 3 / 2.5) = 0.9 * 1.08 = 0.972
  #   score = ln 2 * 2 / (2 + 0.972) = 0.693147 * 0.672948 = 0.466452
  # Text 0: norm = 0.9 * (0.6 + 0.4 * 2 / 2.5) = 0.9 * 0.92 = 0.828
  #   score = ln 2 / 1.828 = 0.379183
  given = dict(
    bm25_preset='search_r1', k1=None, b=None, analyzer='auto', **PLAIN
  )
  options = bm25.options(types.SimpleNamespace(**given))
  assert options == dict(k1=0.9, b=0.4, **PLAIN)
  found = ranked(BM25Index(TEXTS, **options), 'fish')
  assert [i for i, _ in found] == [1, 0]
  assert found[0][1] == pytest.approx(0.466452, abs=1e-6)
  assert found[1][1] == pytest.approx(0.379183, abs=1e-6)
  # A parameter that is given goes before the preset, 0 too.
  given |= dict(b=0.0, analyzer='scripts')
  options = bm25.options(types.SimpleNamespace(**given))
  assert options['b'] == 0 and options['analyzer'] == 'scripts'


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
  'bm25_mapped': lambda texts: mapped(texts),
}


def mapped(texts):
  with tempfile.TemporaryDirectory() as folder:
    return BM25Index.build(texts, folder)  # mapped files outlive their names


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
  np.testing.assert_array_equal(index.search(queries[::-1], 200)[0], ids[::-1])


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
    (dict(analyzer='x'), 'words, scripts'),
  ],
)
def test_bad_options(options, said):
  with pytest.raises(ValueError, match=said):
    BM25Index(['x'], **options)


def test_spans_mark_what_matched():
  text = 'Swimming, the SWIM!'
  assert Analyzer().spans(text, {'swim'}) == [(0, 8), (14, 18)]
  other = Analyzer(kind='scripts')
  assert other.spans(text, {'swim'}) == [(0, 8), (14, 18)]
  marked = lambda text, query: [
    text[start:end] for start, end in other.spans(text, {*other(query)})
  ]
  assert marked('中国的首都是北京。', '北京') == ['北京']
  assert marked('A Cafe\u0301 in 2020年', 'caf\u00e9 ２０２０') == [
    'Cafe\u0301', '2020',
  ]  # fmt: skip


# Passages that have almost the same letters, of which the first is asked for.
SCRIPTS = {
  'Chinese': (
    ['北京是中华人民共和国的首都。', '南京是江苏省的省会。', '猫喜欢吃鱼。'],
    ['中国的首都是哪里', '首都', '北京'],
  ),
  'one letter': (['猫は動物です。', '犬は動物です。'], ['猫', '猫？']),
  'Japanese': (
    ['東京は日本の首都です。', '京都は日本の古い都です。', 'ｶﾞｽ'],
    ['日本の首都', '東京', '日本の首都はどこですか'],
  ),
  'half width': (['ガスの料金', '水道の料金'], ['ｶﾞｽ', 'カ\u3099ス']),
  'Korean': (
    ['서울은 대한민국의 수도이다.', '부산은 항구 도시이다.'],
    ['대한민국 수도', '서울', '서울의 인구'],
  ),
  'Korean, NFD': (
    [unicodedata.normalize('NFD', '서울은 수도이다.'), '부산은 도시이다.'],
    ['서울', unicodedata.normalize('NFD', '서울')],
  ),
  'Thai': (
    ['กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย', 'เชียงใหม่เป็นจังหวัดทางภาคเหนือ'],
    ['เมืองหลวงของประเทศไทย', 'กรุงเทพ', 'เมืองหลวงคือที่ไหน'],
  ),
  'Hindi': (
    ['दिल्ली भारत की राजधानी है।', 'दिल की बात भारी है।', 'भर दो'],
    ['दिल्ली', 'राजधानी', 'भारत की राजधानी'],
  ),
  'Bopomofo': (['ㄅㄆㄇㄈ', 'ㄉㄊㄋㄌ'], ['ㄆㄇ']),
  'Yi': (['ꆈꌠꁱꂷ', 'ꀀꀁꀂ'], ['ꌠꁱ']),
  'full width': (['２０２０年のＴＶ', '２０２１年'], ['2020', 'tv']),
  'mixed': (['The Great Wall, 长城', '长江是河流。'], ['长城', 'great wall']),
}


@pytest.mark.parametrize('name', SCRIPTS)
def test_every_script_is_found(name, saved):
  texts, queries = SCRIPTS[name]
  # A few such passages among English ones are enough.
  texts = ['The capital of France is Paris.'] * 100 + texts
  for index in (BM25Index(texts), BM25Index.open(saved(texts))):
    assert index.parameters['analyzer'] == 'scripts'
    for query in queries:
      assert ranked(index, query)[0][0] == 100, query
    assert ranked(index, 'the capitals')[0][0] == 0


@pytest.mark.parametrize(
  'rare, queries',
  [
    ('Zu\u0308rich lies on a lake.', ['Z\u00fcrich', 'Zu\u0308rich']),
    ('The film of ２０２０', ['2020', '２０２０']),
  ],
)
def test_words_are_found_in_every_unicode_form(rare, queries, saved):
  texts = ['Zu is rich.'] * 500 + [rare]
  for index in (BM25Index(texts), BM25Index.open(saved(texts))):
    assert index.parameters['analyzer'] == 'words'
    assert [ranked(index, query)[0][0] for query in queries] == [500, 500]
  assert BM25Index([rare]).analyzer.kind == 'words'
  span = Analyzer().spans('Of ２０２０.', {'2020'})
  assert span == [(3, 7)]


def test_a_letter_keeps_its_marks():
  """A day (दिन) is not in the world (दुनिया), of the letters द, न and य."""
  index = BM25Index(['दुनिया', 'दिन'])
  assert [i for i, _ in ranked(index, 'दिन')] == [1]
  assert Analyzer(kind='scripts')('दुनिया') == ['दुनिया']


def test_english_is_what_it_was(saved):
  rare = ['Ti\u0301khon (Ти\u0301хон)', 'Tokyo (東京)', 'नमस्ते']
  texts = [text + ' naïve' for text in many_texts()] + rare
  index = BM25Index(texts)
  assert index.parameters['analyzer'] == 'words'
  for text in texts:
    one_form = unicodedata.normalize('NFC', text)
    assert index.analyzer.words(text) == re.findall(r'\w+', one_form.lower())
  # A query in another Unicode form finds what is written in the usual one.
  for query in ('nai\u0308ve', 'ｎaïve', '東京'):
    assert ranked(index, query), query
  folder = saved(SCRIPTS['Yi'][0], analyzer='words')
  assert ranked(BM25Index.open(folder), SCRIPTS['Yi'][1][0]) == []


def test_a_query_that_cannot_find_anything_is_named_once(capsys):
  index = BM25Index(['Paris is a city'])
  index.search(['Paris', 'London', '', '首都', '首都は', '?!', 'the', ' '], 3)
  asked = capsys.readouterr().err.splitlines()
  assert [line.split("'")[1] for line in asked] == ['首都', '?!']
  assert '--analyzer=scripts' in asked[0]


def test_scores_are_those_of_bm25s_to_the_bit():
  import bm25s

  texts = many_texts(3000)
  index = BM25Index(texts, k1=0.9, b=0.4, **PLAIN)
  terms = {}
  rows = [[terms.setdefault(w, len(terms)) for w in t.split()] for t in texts]
  model = bm25s.BM25(k1=0.9, b=0.4, method='lucene')
  model.index((rows, terms), create_empty_token=False, show_progress=False)
  for word, term in terms.items():
    want = np.zeros(len(texts), np.float32)
    span = slice(*model.scores['indptr'][term : term + 2])
    want[model.scores['indices'][span]] = model.scores['data'][span]
    got = np.zeros_like(want)
    ids, scores = index.search([word], len(texts))
    got[ids[ids >= 0]] = scores[ids >= 0]
    np.testing.assert_array_equal(got, want)


def test_blocks_do_not_show(monkeypatch):
  texts = many_texts()
  whole = BM25Index(texts)
  monkeypatch.setattr('retrieval.index.bm25._BLOCK', 7)
  monkeypatch.setattr('retrieval.index.bm25._WORDS', 5)  # words are forgotten
  queries = [f'word{i} word{i + 1}' for i in range(50)]
  for one, two in zip(
    whole.search(queries, 99), BM25Index(texts).search(queries, 99)
  ):
    np.testing.assert_array_equal(one, two)


def added_up(texts, queries, k):
  """BM25Index.search by NumPy over the whole corpus, term by term."""
  index = BM25Index(texts, **PLAIN)
  ids = np.full((len(queries), k), -1)
  scores = np.full((len(queries), k), -np.inf, np.float32)
  for row, query in enumerate(queries):
    counts = collections.Counter(query.split())
    totals = np.zeros(len(texts), np.float32)
    for span, count in sorted((index._edges(w), n) for w, n in counts.items()):
      part = slice(span[0], span[-1])
      added = index._values[part]
      totals[index._rows[part]] += added if count == 1 else count * added
    best = np.argsort(-totals, kind='stable')[:k]
    best = best[totals[best] > 0]
    ids[row, : len(best)], scores[row, : len(best)] = best, totals[best]
  return ids, scores


@pytest.mark.parametrize('shard, few', [(64, 0), (448, 0), (1 << 22, 9999)])
def test_shards_and_threads_do_not_show(monkeypatch, shard, few):
  texts = many_texts()  # 1000, no multiple of 448
  queries = [f'word{i} word{i + 1} word{i * i % 50}' for i in range(49)]
  queries += ['word1 ' * 3 + 'word2', ' '.join(f'word{i}' for i in range(50))]
  for k in (1, 10, 1000):
    want = added_up(texts, queries, k)
    monkeypatch.setattr(bm25, '_SHARD', shard)
    monkeypatch.setattr(bm25, '_FEW', few)
    got = BM25Index(texts, **PLAIN).search(queries, k)
    monkeypatch.undo()
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


def test_a_tiny_index_compiles_nothing_and_adds_up_the_same(monkeypatch):
  texts, queries = many_texts()[:300], ['word1 word2', 'word3', 'nothing']
  got = BM25Index(texts, **PLAIN).search(queries, 300)
  monkeypatch.setattr(bm25, '_TINY', 0)
  want = BM25Index(texts, **PLAIN).search(queries, 300)
  np.testing.assert_array_equal(got[0], want[0])
  np.testing.assert_array_equal(got[1], want[1])
  monkeypatch.undo()
  fresh = bm25.numba.njit(nogil=True)(bm25._add.py_func)
  monkeypatch.setattr(bm25, '_add', fresh)
  assert (BM25Index(texts, **PLAIN).search(queries, 3)[0][0] >= 0).all()
  assert not fresh.signatures


@pytest.mark.parametrize('queries', [['word1'], ['word1', 'word2']])
def test_threads_search_at_once(monkeypatch, queries):
  """The shards of one query, and the queries of a batch on one shard."""
  monkeypatch.setattr(bm25, '_FEW', 0)
  monkeypatch.setattr(bm25.numba.config, 'NUMBA_NUM_THREADS', 2)
  monkeypatch.setattr(bm25, '_SHARD', 512 if len(queries) == 1 else 1024)
  index = BM25Index(many_texts(), **PLAIN)
  met, add = threading.Barrier(2, timeout=60), bm25._add

  def wait(*args):
    met.wait()
    add(*args)

  monkeypatch.setattr(bm25, '_add', wait)
  assert (index.search(queries, 3)[0] >= 0).all()


def test_a_query_without_terms_compiles_all_that_others_need(
  monkeypatch, tmp_path
):
  # A server's warm-up asks for words that no passage may have.
  fresh = bm25.numba.njit(nogil=True)(bm25._add.py_func)
  monkeypatch.setattr(bm25, '_add', fresh)
  index = BM25Index.build(many_texts(), tmp_path, **PLAIN)
  assert ranked(index, 'nothing') == []
  assert ranked(index, 'word1') and ranked(BM25Index(TEXTS, **PLAIN), 'fish')
  assert len(fresh.signatures) == 1


def test_a_search_that_fails_leaves_the_next_one_whole(monkeypatch):
  monkeypatch.setattr(bm25, '_FEW', 0)
  index = BM25Index(many_texts(), **PLAIN)
  queries = [f'word{i}' for i in range(20)]
  want = index.search(queries, 5)

  def fail(*args):
    raise MemoryError('no room')

  with monkeypatch.context() as patch:
    patch.setattr(bm25, '_top', fail)
    with pytest.raises(MemoryError, match='no room'):
      index.search(queries, 5)
  np.testing.assert_array_equal(index.search(queries, 5), want)


def test_a_forked_process_searches_too():
  script = """
import os
from retrieval.index import bm25
bm25._FEW = 0  # several threads
index = bm25.BM25Index(['red fish', 'blue fish', 'green bird'])
queries = ['fish', 'bird']
want = index.search(queries, 3)[0].tolist()
if child := os.fork():
  raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(index.search(queries, 3)[0].tolist() != want)
"""
  env = dict(os.environ, NUMBA_NUM_THREADS='2')
  command = [sys.executable, '-c', script]
  # In a group of its own: a child that hangs is killed too.
  process = subprocess.Popen(command, env=env, cwd=ROOT, process_group=0)
  try:
    assert process.wait(60) == 0
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def saved(tmp_path):
  """Puts an index into a folder."""

  def run(texts, folder=tmp_path / 'bm25', **options):
    BM25Index.build(texts, folder, **options)
    return folder

  return run


def test_an_open_index_answers_as_the_one_saved(saved):
  texts, options = many_texts(), dict(k1=0.9, b=0.4, stop_words='none')
  built, opened = (
    BM25Index(texts, **options),
    BM25Index.open(saved(texts, **options)),
  )
  assert opened.parameters == built.parameters
  assert len(opened) == len(built)
  queries = ['word1 word2 word2', 'nothing', '', 'WORD3', 'wörd \ud800' * 99]
  for one, two in zip(built.search(queries, 50), opened.search(queries, 50)):
    np.testing.assert_array_equal(one, two)


def test_a_corpus_without_terms_is_saved_too(saved):
  assert ranked(BM25Index.open(saved(['the', '?!'])), 'the') == []


def test_saving_over_an_open_index_leaves_it_what_it_was(saved):
  folder = saved(['red fish', 'blue'])
  opened = BM25Index.open(folder)
  saved(many_texts(), folder)
  assert [i for i, _ in ranked(opened, 'fish')] == [0]
  assert len(BM25Index.open(folder)) == 1000


@pytest.mark.parametrize(
  'name', ['values', 'rows', 'starts', 'hashes', 'terms']
)
@pytest.mark.parametrize('keep', [0, 100, 0.5, -1])
def test_an_index_cut_short_is_refused(saved, name, keep):
  folder = saved(many_texts())
  path = folder / f'{name}.npy'
  whole = path.read_bytes()
  path.write_bytes(whole[: int(keep * len(whole)) if keep == 0.5 else keep])
  with pytest.raises(ValueError, match='damaged') as error:
    BM25Index.open(folder)
  assert str(folder) in str(error.value) and 'build_index' in str(error.value)


@pytest.mark.parametrize(
  'name', ['terms', 'hashes', 'values', 'starts', 'rows']
)
def test_a_damaged_index_is_refused(saved, name):
  folder = saved(many_texts())
  path = folder / f'{name}.npy'
  whole = bytearray(path.read_bytes())
  whole[len(whole) * 3 // 4] ^= 0x40
  path.write_bytes(whole)
  with pytest.raises(ValueError, match='sample_sha256'):
    BM25Index.open(folder)


def test_what_is_no_index_is_refused(saved):
  folder = saved(many_texts())
  about = folder / 'bm25.json'
  record = json.loads(about.read_text())
  for change, said in (
    ({'format': 1}, 'format 1'),
    ({'lengths': record['lengths'] | {'rows': 3}}, 'rows.npy'),
    ({'parameters': {'k2': 1}}, 'damaged'),
    ({'lengths': {}}, 'damaged'),
  ):
    about.write_text(json.dumps(record | change))
    with pytest.raises(ValueError, match=said):
      BM25Index.open(folder)
  (folder / 'rows.npy').unlink()
  about.write_text(json.dumps(record))
  with pytest.raises(ValueError, match='damaged .*rows.npy'):
    BM25Index.open(folder)
  about.unlink()
  with pytest.raises(ValueError, match='no bm25.json'):
    BM25Index.open(folder)


def test_a_build_that_fails_leaves_no_index(saved):
  folder = saved(['red fish'])

  class Broken(list):
    def __iter__(self):
      yield 'red'
      raise OSError('gone')

  with pytest.raises(OSError, match='gone'):
    BM25Index.build(Broken('ab'), folder)
  with pytest.raises(ValueError, match='no bm25.json'):
    BM25Index.open(folder)


class Texts:
  """Of an index of 64 MB, made as they are read."""

  def __len__(self):
    return 80_000

  def __iter__(self):
    for i in range(len(self)):
      yield ' '.join(f'w{j}' for j in range(i % 100, i % 100 + 100))


def memory_of(folder):
  """(bytes of an index, those that building it took, a search of it)."""
  bm25._BLOCK = 2000
  # Compiles, which a tiny index would not.
  BM25Index.build(['warm'] * 999, folder / 'warm').search(['warm'], 1)
  with Peak() as building:
    index = BM25Index.build(Texts(), folder / 'bm25', analyzer='words', **PLAIN)
  size = sum(f.stat().st_size for f in (folder / 'bm25').iterdir())
  with Peak() as searching:
    for i in range(200):
      index.search([f'w{i}'], 3)
  return size, *(m.peak - m.start for m in (building, searching))


@pytest.mark.long
def test_building_in_files_and_searching_them_take_little_memory(tmp_path):
  # In a process of its own: what other tests left running takes some too.
  fresh = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(1, fresh) as pool:
    size, building, searching = pool.submit(memory_of, tmp_path).result()
  assert size > 62e6
  assert building < 40e6
  assert searching < 8e6


@pytest.mark.long
def test_ranks_the_real_corpus(data_dir):
  """Recall@3 on NQ dev is a figure of the data's README: 0.789."""
  import gzip

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
