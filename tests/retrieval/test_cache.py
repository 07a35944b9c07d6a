"""Recorded answers: exact, shared, kept through kills, never made up."""

import concurrent.futures
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from retrieval.core import Found, LocalSearcher, SearchFailed
from retrieval.web.cache import FORMAT, Recorded, StoreError
from tests.conftest import ROOT
from tests.retrieval.fakes import Source

pytestmark = pytest.mark.slow


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'answers.db'


def replayed(path, queries, k, **options):
  store = Recorded(None, path, **options)
  try:
    return store.search(queries, k)
  finally:
    store.close()


def recorded(source, path, queries, k):
  store = Recorded(source, path)
  try:
    return store.search(queries, k)
  finally:
    store.close()


def exact(answers):
  """What tells two answers apart to the last bit."""
  return [
    [(f.id, f.contents, type(f.score), f.score.hex()) for f in answer]
    for answer in answers
  ]


def test_a_recorded_answer_is_not_asked_for_again(path):
  source = Source()
  store = Recorded(source, path)
  first = store.search(['a', 'b', 'a'], 2)
  assert source.asked == [('a', 2), ('b', 2)]
  assert store.search(['b', 'c', 'a'], 2)[::2] == [first[1], first[0]]
  assert source.asked[2:] == [('c', 2)]
  store.close()
  assert source.closed


def test_replay_answers_alone_and_the_same(path):
  queries = ['a', 'b', '', 'a']
  answers = recorded(Source(), path, queries, 3)
  store = Recorded(None, path)
  assert store.identity == Source().identity
  assert exact(store.search(queries, 3)) == exact(answers)
  store.close()


def test_an_index_is_recorded_like_any_searcher(path, corpus):
  from retrieval.index.bm25 import BM25Index

  searcher = LocalSearcher(corpus, BM25Index(corpus.contents))
  plain = searcher.search(['hamlet', 'zzz'], 3)
  assert plain[0] and plain[1] == []
  assert exact(recorded(searcher, path, ['hamlet', 'zzz'], 3)) == exact(plain)
  assert exact(replayed(path, ['hamlet', 'zzz'], 3)) == exact(plain)


@pytest.mark.parametrize('query, k', [('b', 2), ('a', 1), ('a', 3), ('A', 2)])
def test_a_miss_in_replay_is_a_failure_that_names_it(path, query, k):
  recorded(Source(), path, ['a'], 2)
  (failed,) = replayed(path, [query], k)
  assert isinstance(failed, SearchFailed) and failed.retry_after_s is None
  for part in (repr(query), f'k={k}', str(path)):
    assert part in str(failed)


def test_a_miss_leaves_the_rest_of_the_batch(path):
  (answer,) = recorded(Source(), path, ['a'], 2)
  store = Recorded(None, path)
  got = store.search(['x', 'a', 'x\x1b[31m\n' + 'y' * 999], 2)
  assert got[1] == answer
  assert isinstance(got[0], SearchFailed)
  text = str(got[2])
  assert '\x1b' not in text and '\n' not in text and len(text) < 500
  store.close()


def test_an_honest_empty_answer_is_recorded(path):
  source = Source({'nothing': []})
  assert recorded(source, path, ['nothing'], 3) == [[]]
  assert replayed(path, ['nothing'], 3) == [[]]


def test_failures_are_handed_on_and_never_stored(path):
  failed = SearchFailed('quota', 5.0)
  source = Source({'bad': failed})
  store = Recorded(source, path)
  got = store.search(['bad', 'good'], 1)
  assert got[0] is failed and got[1][0].id == 'good-1'
  assert isinstance(replayed(path, ['bad'], 1)[0], SearchFailed)
  source.answers.clear()  # it works again
  assert store.search(['bad'], 1)[0][0].id == 'bad-1'
  store.close()
  assert replayed(path, ['bad'], 1)[0][0].id == 'bad-1'


def test_what_may_be_another_next_time_is_not_stored(path):
  found = [Found('1', 'text', 1.0), Found('2', 'snippet', 0.5, transient=True)]
  source = Source({'a': found})
  store = Recorded(source, path)
  assert store.search(['a', 'b'], 2)[0] is found
  assert isinstance(replayed(path, ['a'], 2)[0], SearchFailed)
  source.answers.clear()
  assert store.search(['a', 'b'], 2)[0][0].id == 'a-1'
  assert [query for query, _ in source.asked] == ['a', 'b', 'a']
  store.close()
  assert replayed(path, ['a'], 2)[0][0].id == 'a-1'


def test_a_searcher_that_raises_stores_nothing(path):
  class Broken(Source):
    def search(self, queries, k):
      raise RuntimeError('down')

  with pytest.raises(RuntimeError, match='down'):
    recorded(Broken(), path, ['a'], 1)
  recorded(Source(), path, ['b'], 1)
  assert isinstance(replayed(path, ['a'], 1)[0], SearchFailed)


def test_a_searcher_that_loses_an_answer_stores_nothing(path):
  class Short(Source):
    def search(self, queries, k):
      return super().search(queries, k)[1:]

  with pytest.raises(ValueError):
    recorded(Short(), path, ['a', 'b'], 1)
  assert isinstance(replayed(path, ['b'], 1)[0], SearchFailed)


@pytest.mark.parametrize('score', [float('nan'), float('inf')])
def test_a_score_that_is_no_number_is_refused(path, score):
  with pytest.raises(ValueError):
    recorded(Source({'a': [Found('1', 'x', score)]}), path, ['a'], 1)


def test_float32_scores_keep_their_value(path):
  score = np.float32(0.1)
  source = Source({'a': [Found('1', 'x', score)], 'b': [Found('1', 'x', 2)]})
  first = recorded(source, path, ['a', 'b'], 1)
  assert first[0][0].score == float(score) != 0.1
  # What is answered first is what is answered later, types included.
  assert exact(replayed(path, ['a', 'b'], 1)) == exact(first)


# st.text leaves surrogates out by itself; two lone ones that would pair up
# are the hard case.
TEXT = st.text(st.characters(exclude_categories=()), max_size=8) | (
  st.sampled_from(['\ud83d\ude00', '\U0001f600', '\ud83d', '\x00', '\u2028'])
)
SCORE = st.floats(allow_nan=False, allow_infinity=False)
FOUND = st.builds(Found, TEXT, TEXT, SCORE)


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
  st.dictionaries(TEXT, st.lists(FOUND, max_size=4), max_size=6),
  st.integers(1, 10**9),
  st.dictionaries(TEXT, TEXT | SCORE | st.none(), max_size=3),
)
def test_any_answer_comes_back_to_the_byte(answers, k, identity):
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'a.db')
    source = Source(answers, {'i': identity})
    queries = list(answers)
    assert exact(recorded(source, path, queries, k)) == (
      exact(answers.values())
    )
    assert exact(replayed(path, queries, k)) == exact(answers.values())
    store = Recorded(None, path)
    assert store.identity == {'i': identity}
    store.close()


def test_pairs_of_surrogates_are_not_the_character(path):
  pair, character = '\ud83d\ude00', '\U0001f600'
  recorded(Source({pair: [Found(pair, pair, 1.0)]}), path, [pair], 1)
  assert replayed(path, [pair], 1)[0][0].id == pair != character
  assert isinstance(replayed(path, [character], 1)[0], SearchFailed)


def test_identities_do_not_mix(path):
  one = Source({'a': [Found('one', '', 1.0)]}, {'index': 1})
  two = Source({'a': [Found('two', '', 1.0)]}, {'index': 2})
  for source in (one, two):
    assert recorded(source, path, ['a'], 1) == [source.answers['a']]
  with pytest.raises(StoreError, match='2 of the') as e:
    Recorded(None, path)
  assert '{"index":1}' in str(e.value) and str(path) in str(e.value)
  sha256 = hashlib.sha256(b'{"index":2}').hexdigest()
  for name in (sha256, sha256[:8]):
    assert replayed(path, ['a'], 1, identity=name)[0][0].id == 'two'
  with pytest.raises(StoreError, match="0 of .*'xyz'"):
    Recorded(None, path, identity='xyz')


def test_the_order_of_an_identity_does_not_count(path):
  source = Source(identity={'a': 1, 'b': {'c': 2, 'd': 3}})
  recorded(source, path, ['q'], 1)
  other = Source(identity={'b': {'d': 3, 'c': 2}, 'a': 1})
  recorded(other, path, ['q'], 1)
  assert other.asked == []


def test_an_absent_store_is_not_replayed(path):
  with pytest.raises(StoreError, match='unable to open'):
    Recorded(None, path)
  assert not path.exists()
  Recorded(Source(), path).close()
  recorded_nothing = Recorded(None, path)
  assert isinstance(recorded_nothing.search(['a'], 1)[0], SearchFailed)
  recorded_nothing.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
  path = tmp_path / 'no' / 'a.db'
  with pytest.raises(StoreError, match='unable to open') as e:
    Recorded(Source(), path)
  assert str(path) in str(e.value)


def test_odd_paths_are_paths(tmp_path):
  path = tmp_path / 'a?mode=memory&b#c%20 ü.db'
  recorded(Source(), path, ['a'], 1)
  assert path.exists()
  assert replayed(path, ['a'], 1)[0][0].id == 'a-1'


@pytest.mark.parametrize('source', [Source(), None])
@pytest.mark.parametrize('content', [b'{"id": "0"}\n' * 99, b'\x00' * 4096])
def test_a_file_that_is_no_database_is_left_alone(path, source, content):
  path.write_bytes(content)
  with pytest.raises(StoreError) as e:
    Recorded(source, path)
  assert str(path) in str(e.value)
  assert path.read_bytes() == content


@pytest.mark.parametrize('source', [Source(), None])
def test_a_foreign_database_is_left_alone(path, source):
  db = sqlite3.connect(path)
  db.execute('CREATE TABLE answers (mine TEXT)')
  db.commit()
  db.close()
  before = path.read_bytes()
  with pytest.raises(StoreError, match='no store') as e:
    Recorded(source, path)
  assert str(path) in str(e.value)
  assert path.read_bytes() == before


def test_another_format_is_refused(path):
  recorded(Source(), path, ['a'], 1)
  db = sqlite3.connect(path)
  db.execute(f'PRAGMA user_version = {FORMAT + 1}')
  db.close()
  with pytest.raises(StoreError, match=f'format {FORMAT + 1}'):
    Recorded(None, path)


def test_a_changed_bit_is_noticed(path):
  source = Source({'a': [Found('1', 'contents of the passage', 1.0)]})
  recorded(source, path, ['a'], 1)
  content = path.read_bytes()
  assert content.count(b'contents of the passage') == 1
  path.write_bytes(content.replace(b'of the passage', b'of the message'))
  with pytest.raises(StoreError, match='SHA-256') as e:
    replayed(path, ['a'], 1)
  assert str(path) in str(e.value)


def test_an_answer_under_another_key_is_noticed(path):
  recorded(Source(), path, ['a', 'b'], 1)
  db = sqlite3.connect(path)
  rows = db.execute('SELECT key, sha256, answer FROM answers').fetchall()
  for (key, *_), (_, *value) in zip(rows, rows[::-1], strict=True):
    db.execute(
      'UPDATE answers SET sha256=?, answer=? WHERE key=?', (*value, key)
    )
  db.commit()
  db.close()
  with pytest.raises(StoreError, match='SHA-256'):
    replayed(path, ['a'], 1)


@pytest.mark.parametrize('kept', [0.1, 0.5, 0.9])
def test_a_store_cut_short_never_answers_wrongly(path, kept):
  queries = [f'query {i}' for i in range(300)]
  truth = recorded(Source(), path, queries, 5)
  content = path.read_bytes()
  path.write_bytes(content[: int(kept * len(content))])
  try:
    got = replayed(path, queries, 5)
  except StoreError as error:
    assert str(path) in str(error)
  else:
    assert all(
      isinstance(g, SearchFailed) or g == t for g, t in zip(got, truth)
    )
    assert any(isinstance(g, SearchFailed) for g in got)


def test_a_folder_nobody_may_write_is_replayed(path, monkeypatch):
  recorded(Source(), path, ['a'], 1)
  monkeypatch.setattr(os, 'access', lambda *_: False)
  before = sorted(os.listdir(path.parent))
  store = Recorded(None, path)
  assert store.search(['a'], 1)[0][0].id == 'a-1'
  assert sorted(os.listdir(path.parent)) == before
  store.close()


def test_a_replay_writes_nothing(path):
  recorded(Source(), path, ['a'], 1)
  before = path.read_bytes()
  replayed(path, ['a', 'b'], 1)
  assert path.read_bytes() == before


def test_many_threads_share_one_store(path):
  source, errors = Source(), []
  shared = Recorded(source, path)
  queries = [f'q{i}' for i in range(40)]

  def work(mine):
    try:
      store = shared if mine % 2 else Recorded(Source(), path)
      for query in queries[mine:] + queries[:mine]:
        assert store.search([query], 2)[0][0].id == f'{query}-1'
      if store is not shared:
        store.close()
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert errors == []
  assert len(source.asked) == len(set(source.asked)) <= 40
  shared.close()
  assert all(answer for answer in replayed(path, queries, 2))


def test_whoever_stores_first_answers_for_all(path):
  """Two that ask at once must both give what a replay will give."""
  two = Recorded(Source({'a': [Found('two', '', 1.0)]}), path)

  class Slow(Source):
    def search(self, queries, k):
      assert two.search(['a'], 1)[0][0].id == 'two'  # overtakes
      return [[Found('one', '', 1.0)]]

  one = Recorded(Slow(), path)
  assert one.search(['a'], 1)[0][0].id == 'two'
  one.close()
  two.close()
  assert replayed(path, ['a'], 1)[0][0].id == 'two'


WRITER = """
import sys
from retrieval.web.cache import Recorded
from tests.retrieval.fakes import Source
store = Recorded(Source(), sys.argv[1])
print('ready', flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2]), int(sys.argv[3])):
  store.search([f'q{i}'], 3)
  print(i, flush=True)
"""


def writer(path, low, high):
  return subprocess.Popen(
    [sys.executable, '-c', WRITER, str(path), str(low), str(high)],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )


def test_two_processes_share_a_store_made_by_both(path):
  both = [writer(path, 0, 60), writer(path, 30, 90)]
  for process in both:
    assert process.stdout.readline() == 'ready\n'
  for process in both:
    process.stdin.write('\n')
    process.stdin.flush()
  for process in both:
    process.communicate(timeout=60)
    assert process.returncode == 0
  queries = [f'q{i}' for i in range(90)]
  assert replayed(path, queries, 3) == Source().search(queries, 3)


def test_a_kill_in_the_middle_leaves_a_readable_store(path):
  process = writer(path, 0, 10**9)
  assert process.stdout.readline() == 'ready\n'
  process.stdin.write('\n')
  process.stdin.flush()
  for _ in range(50):
    done = int(process.stdout.readline())
  process.send_signal(signal.SIGKILL)
  process.communicate(timeout=30)
  queries = [f'q{i}' for i in range(done + 1)]
  # All that was answered is there, whatever was under way.
  assert replayed(path, queries, 3) == Source().search(queries, 3)
  recorded(Source(), path, ['more'], 3)
  assert replayed(path, queries, 3) == Source().search(queries, 3)


def test_what_could_not_be_stored_is_not_asked_again(path):
  source = Source()
  store = Recorded(source, path)
  store._db.execute('PRAGMA busy_timeout = 10')
  db = sqlite3.connect(path, isolation_level=None)
  db.execute('BEGIN EXCLUSIVE')
  with pytest.raises(StoreError, match='locked') as e:
    store.search(['a'], 1)
  assert str(path) in str(e.value)
  asked = list(source.asked)
  with pytest.raises(StoreError, match='locked'):
    store.search(['b'], 1)
  assert source.asked == asked
  db.execute('ROLLBACK')
  db.close()
  assert store.search(['a'], 1)[0][0].id == 'a-1'
  assert source.asked == asked
  store.close()


def test_a_batch_is_asked_whole(path):
  source, sizes = Source(), []
  whole = source.search
  source.search = lambda queries, k: (
    sizes.append(len(queries)) or whole(queries, k)
  )
  queries = [f'q{i}' for i in range(1000)]
  recorded(source, path, queries, 1)
  recorded(source, path, [*queries, 'more'], 1)
  assert sizes == [1000, 1]


def test_threads_ask_together_but_nothing_twice(path):
  source = Source()
  source.threads = 3
  whole, both, go = source.search, threading.Barrier(3), threading.Event()

  def search(queries, k):
    found = whole(queries, k)
    both.wait(60)  # 'a' and 'b' are under way at once
    go.wait(60)
    return found

  source.search = search
  store = Recorded(source, path)
  assert store.threads == 3
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    answers = [pool.submit(store.search, [query], 1) for query in 'aba']
    both.wait(60)
    go.set()
    first, _, again = (answer.result(60) for answer in answers)
  assert first == again and sorted(source.asked) == [('a', 1), ('b', 1)]
  store.close()


def test_without_a_path_the_store_is_temporary(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('SQLITE_TMPDIR', str(tmp_path))
  source = Source()
  store = Recorded(source, '')
  first = store.search(['a'], 2)
  assert store.search(['a'], 2) == first and source.asked == [('a', 2)]
  store.close()
  assert os.listdir(tmp_path) == []


def test_keys_are_hashes_of_canonical_json(path):
  """The format: what another program needs to read a store."""
  recorded(Source(identity={'b': 1, 'a': 'ü'}), path, ['q'], 2)
  db = sqlite3.connect(path)
  (key,) = db.execute('SELECT key FROM answers').fetchone()
  identity = '{"a":"ü","b":1}'
  parts = json.dumps(
    [1, identity, 'q', 2], ensure_ascii=False, separators=(',', ':')
  )
  assert key == hashlib.sha256(parts.encode()).digest()
  db.close()
