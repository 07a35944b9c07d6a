import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from retrieval.corpus import CorpusError, Document, read_corpus
from retrieval.index.store import open_store, write_store
from tests.conftest import ROOT
from tests.memory import Peak
from tests.retrieval.conftest import PASSAGES, write_corpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def large(tmp_path_factory):
  """40,000 passages of 500 characters, as JSONL."""
  path = tmp_path_factory.mktemp('large') / 'c.jsonl'
  with open(path, 'w') as f:
    for i in range(40_000):
      contents = f'"Title {i}"\n' + f'{i:09} ' * 49
      f.write(json.dumps({'id': f'p{i}', 'contents': contents}) + '\n')
  return path


def test_has_the_face_of_a_corpus(corpus, corpus_path, tmp_path):
  store = write_store(corpus_path, tmp_path / 'c.arrow')
  assert store.sha256 == corpus.sha256
  assert store.path == str(tmp_path / 'c.arrow')
  assert len(store) == len(store.ids) == len(store.contents) == len(PASSAGES)
  assert tuple(store.ids) == corpus.ids
  assert tuple(store.contents) == corpus.contents
  assert [store[i] for i in range(len(store))] == [
    corpus[i] for i in range(len(corpus))
  ]
  assert store[np.int64(3)] == corpus[3] == store[3 - len(store)]
  assert store.contents[2:5] == list(corpus.contents[2:5])
  assert 'p' not in store.ids and '3' in store.ids
  with pytest.raises(IndexError):
    store[len(store)]
  assert os.listdir(tmp_path) == ['c.arrow']


def test_a_store_can_be_read_and_stored_again(corpus, corpus_path, tmp_path):
  write_store(corpus_path, tmp_path / 'a')
  assert read_corpus(tmp_path / 'a').sha256 == corpus.sha256
  again = write_store(tmp_path / 'a', tmp_path / 'b')
  assert again.sha256 == corpus.sha256


@pytest.mark.long
def test_neither_writing_nor_reading_holds_the_corpus(large, tmp_path):
  """20 MB of text in many batches, and far less anonymous memory."""
  write_store(large, tmp_path / 'warm')  # imports and pools
  with Peak() as written:
    store = write_store(large, tmp_path / 'c.arrow')
  assert os.path.getsize(store.path) > 20e6
  with Peak() as read:
    store = open_store(tmp_path / 'c.arrow')
    assert sum(len(c) for c in store.contents) > 20e6
    for i in np.random.default_rng(0).integers(0, len(store), 2000).tolist():
      assert store[i].contents.startswith(f'"Title {i}"\n')
  # A batch as Python strings and as Arrow, and 8 bytes for each id.
  assert written.peak - written.start < 12e6
  assert read.peak - read.start < 8e6
  with Peak() as whole:  # as much memory does show (mapped: no pool has it)
    held = np.frombuffer(''.join(store.contents).encode(), np.uint8).copy()
  assert whole.peak - whole.start > 20e6 < held.size


def test_batches_meet_without_a_seam(large, tmp_path):
  store = write_store(large, tmp_path / 'c.arrow')
  for i in (0, 4095, 4096, 4097, 39_999):
    assert store.ids[i] == f'p{i}'
  assert store.ids[4094:4099] == [f'p{i}' for i in range(4094, 4099)]


@pytest.mark.parametrize('keep', [0, 7, 100, 0.3, 0.7, -1, -10])
def test_cut_short_is_refused(corpus_path, tmp_path, keep):
  path = tmp_path / 'c.arrow'
  write_store(corpus_path, path)
  whole = path.read_bytes()
  path.write_bytes(whole[: int(keep * len(whole)) if 0 < keep < 1 else keep])
  with pytest.raises(CorpusError) as error:
    open_store(path)
  assert str(path) in str(error.value) and 'build_index' in str(error.value)


def test_what_is_no_store_is_refused(corpus_path, tmp_path):
  import pyarrow as pa

  with pytest.raises(CorpusError, match='absent'):
    open_store(tmp_path / 'absent')
  with pytest.raises(CorpusError, match='build_index'):
    open_store(corpus_path)
  table = pa.table({'id': ['a'], 'contents': ['b']})
  with pa.ipc.new_file(str(tmp_path / 'other'), table.schema) as writer:
    writer.write_table(table)
  with pytest.raises(CorpusError, match='other.*count'):
    open_store(tmp_path / 'other')


def test_a_bad_source_leaves_what_was_there(corpus, corpus_path, tmp_path):
  out = tmp_path / 'out'
  out.mkdir()
  write_store(corpus_path, out / 'c.arrow')
  bad = write_corpus(tmp_path / 'bad', [*PASSAGES, PASSAGES[0]])
  with pytest.raises(CorpusError, match="bad:8: .*'0'"):
    write_store(bad, out / 'c.arrow')
  assert open_store(out / 'c.arrow').sha256 == corpus.sha256
  assert os.listdir(out) == ['c.arrow']


def test_a_killed_writer_leaves_no_store(large, tmp_path):
  code = """
import os, sys
from retrieval.index import store
read = store.iter_documents
def dying(path):
  for i, document in enumerate(read(path)):
    if i == 20_000:
      os.kill(os.getpid(), 9)
    yield document
store.iter_documents = dying
store.write_store(*sys.argv[1:])
"""
  out = tmp_path / 'c.arrow'
  done = subprocess.run(
    [sys.executable, '-c', code, str(large), str(out)], cwd=ROOT
  )
  assert done.returncode == -signal.SIGKILL
  assert os.listdir(tmp_path) == ['c.arrow.part']
  assert (tmp_path / 'c.arrow.part').stat().st_size > 5e6
  with pytest.raises(CorpusError, match='c.arrow.part'):
    open_store(tmp_path / 'c.arrow.part')
  write_store(large, out)  # and does not stand in the way
  assert os.listdir(tmp_path) == ['c.arrow']


def test_document_of_a_store_is_plain_text(corpus_path, tmp_path):
  document = write_store(corpus_path, tmp_path / 'c.arrow')[3]
  assert document == Document('3', document.contents)
  assert type(document.id) is type(document.contents) is str
