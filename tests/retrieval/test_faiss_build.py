"""Builds of FAISS indexes: in little memory, and killed anywhere."""

import os
import resource
import signal
import subprocess
import sys
import types

import faiss
import numpy as np
import pytest

from retrieval import files
from retrieval.index import dense_faiss, faiss_build
from retrieval.index.dense_faiss import DenseFaiss
from tests import memory
from tests.conftest import ROOT
from tests.retrieval.vectors import clustered, unit

pytestmark = pytest.mark.slow

VECTORS = clustered(1200, 16, spread=0.3)
# Lists in use: all, few, none but some; below a transform; a graph; refined.
LISTED = (
  'IVF16,Flat',
  'IVF300,Flat',
  'IVF16,PQ4x4',
  'IVF16,SQ8',
  'PCA8,IVF16,Flat',
  'IVF16_HNSW8,Flat',
)
GROWN = ('HNSW8', 'PCA8,HNSW8', 'IVF16,Flat,RFlat', 'PQ4x4', 'SQ8')
FACTORIES = ('Flat', *LISTED, *GROWN)
OPTIONS = dict(
  identity={'of': 'test'},
  threads=1,
  block=100,
  train=1000,
  shard_bytes=100 * 72,
)


@pytest.fixture(scope='module', autouse=True)
def one_thread():
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(1)
  yield
  faiss.omp_set_num_threads(before)


def build(path, factory, vectors=VECTORS, **given):
  dense_faiss.build(vectors, factory, path, **{**OPTIONS, **given})
  return contents(path)


def contents(path):
  lists = faiss_build.lists_path(path)
  return path.read_bytes(), lists.exists() and lists.read_bytes()


def names(factory):
  return {'a', 'a.ivfdata'} if factory in LISTED else {'a'}


def direct(factory, vectors=VECTORS):
  """What FAISS alone makes of the same."""
  rows = np.sort(
    np.random.default_rng(0).choice(
      len(vectors), 1000, replace=False, shuffle=False
    )
  )
  index = faiss.index_factory(
    vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT
  )
  if ivf := faiss.try_extract_index_ivf(index):
    if hasattr(faiss.downcast_index(ivf), 'pq'):
      faiss.downcast_index(ivf).do_polysemous_training = False
  if not index.is_trained:
    index.train(vectors[rows])
  for at in range(0, len(vectors), 100):
    index.add(vectors[at : at + 100])
  return index


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
  folder = tmp_path_factory.mktemp('expected')
  found = {}
  for factory in FACTORIES:
    (folder / factory).mkdir()
    found[factory] = build(folder / factory / 'a', factory)
  return found


@pytest.mark.parametrize('factory', FACTORIES)
def test_the_index_is_the_one_that_faiss_makes(factory, tmp_path):
  made = build(tmp_path / 'a', factory)
  alone = direct(factory)
  assert {p.name for p in tmp_path.iterdir()} == names(factory)
  if factory not in LISTED:
    faiss.write_index(alone, str(tmp_path / 'b'))
    assert made[0] == (tmp_path / 'b').read_bytes()
    return
  same_lists(faiss_build.read(tmp_path / 'a'), alone)


def same_lists(index, alone):
  assert index.ntotal == alone.ntotal
  a, b = map(faiss.extract_index_ivf, (index, alone))
  for i in range(a.nlist):
    n = b.invlists.list_size(i)
    assert a.invlists.list_size(i) == n
    for get, width in (('get_ids', 1), ('get_codes', a.code_size)):
      x, y = (
        (
          faiss.rev_swig_ptr(getattr(ivf.invlists, get)(i), n * width).tolist()
          for ivf in (a, b)
          if n
        )
        if n
        else (0, 0)
      )
      assert x == y


def test_one_vector_and_few_lists_in_use(tmp_path):
  one = clustered(2, 16)[:1]
  build(tmp_path / 'flat', 'Flat', one)
  assert DenseFaiss(tmp_path / 'flat', None).search_vectors(one, 1)[0] == 0
  # 1200 vectors that are all alike lie in one list of 16.
  same = np.tile(one, (1200, 1))
  build(tmp_path / 'a', 'IVF16,Flat', same)
  same_lists(faiss_build.read(tmp_path / 'a'), direct('IVF16,Flat', same))


def test_float16_is_written_as_float32(tmp_path):
  half = VECTORS.astype(np.float16)
  assert build(tmp_path / 'a', 'Flat', half) == build(
    tmp_path / 'b', 'Flat', half.astype(np.float32)
  )


def test_an_index_with_lists_can_be_moved(tmp_path):
  build(tmp_path / 'a', 'IVF16,Flat')
  assert str(tmp_path).encode() not in (tmp_path / 'a').read_bytes()
  (tmp_path / 'x').mkdir()
  for name in names('IVF16,Flat'):
    (tmp_path / name).rename(tmp_path / 'x' / name)
  (tmp_path / 'x/a.ivfdata').chmod(0o444)
  index = DenseFaiss(tmp_path / 'x/a', None, nprobe=16)
  assert (index.search_vectors(VECTORS, 1)[0][:, 0] == np.arange(1200)).all()
  # FAISS would map and read past the end.
  (tmp_path / 'x/a.ivfdata').chmod(0o644)
  os.truncate(tmp_path / 'x/a.ivfdata', 5000)
  with pytest.raises(dense_faiss.FaissError, match='a.ivfdata.*5000'):
    DenseFaiss(tmp_path / 'x/a', None)


class Killed(BaseException):
  pass


def kill_at(monkeypatch, count):
  """Stops the build when the blocks from row `count` on are asked for."""
  real, read = dense_faiss.blocks, []

  def blocks(vectors, size, start=0):
    for first, part in real(vectors, size, start):
      if count is not None and first >= count:
        raise Killed
      read.append(first)
      yield first, part

  monkeypatch.setattr(dense_faiss, 'blocks', blocks)
  return read


@pytest.mark.long
@pytest.mark.parametrize('at', [0, 100, 700, 1100])
@pytest.mark.parametrize('factory', FACTORIES)
def test_what_is_done_is_not_done_again(
  factory, at, expected, tmp_path, monkeypatch
):
  trained = []
  train = dense_faiss._train
  monkeypatch.setattr(
    dense_faiss, '_train', lambda *args: trained.append(1) or train(*args)
  )
  with monkeypatch.context() as m:
    kill_at(m, at)
    with pytest.raises(Killed):
      build(tmp_path / 'a', factory)
  assert not (tmp_path / 'a').exists()
  read = kill_at(monkeypatch, None)
  assert build(tmp_path / 'a', factory) == expected[factory]
  # Shards of 100 to 900 vectors, by the width of their codes.
  assert at - 900 < read[0] <= at if factory in LISTED else read[0] == 0
  assert read[-1] == 1100 and len(trained) <= 1
  assert {p.name for p in tmp_path.iterdir()} == names(factory)


@pytest.mark.parametrize(
  'change',
  [
    dict(identity={'of': 'others'}),
    dict(vectors=VECTORS[:1100]),
    dict(vectors=VECTORS.astype(np.float16)),
    dict(seed=1),
    dict(block=50),
    dict(identity=None),
  ],
)
@pytest.mark.parametrize('factory', ['Flat', 'IVF16,Flat', 'HNSW8'])
def test_other_work_starts_over(factory, change, tmp_path, monkeypatch):
  with monkeypatch.context() as m:
    kill_at(m, 700)
    with pytest.raises(Killed):
      build(tmp_path / 'a', factory, -VECTORS)
  change = dict(vectors=VECTORS) | change
  (tmp_path / 'b').mkdir()
  assert build(tmp_path / 'a', factory, **change) == build(
    tmp_path / 'b/a', factory, **change
  )


def test_without_identity_nothing_is_kept(tmp_path, monkeypatch):
  for factory in ('Flat', 'IVF16,Flat', 'HNSW8'):
    with monkeypatch.context() as m:
      kill_at(m, 700)
      with pytest.raises(Killed):
        build(tmp_path / 'a', factory, identity=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('factory', ['IVF16,Flat', 'HNSW8'])
def test_a_damaged_piece_is_named(factory, tmp_path, monkeypatch):
  with monkeypatch.context() as m:
    kill_at(m, 700)
    with pytest.raises(Killed):
      build(tmp_path / 'a', factory)
  piece = sorted((tmp_path / 'a.build').glob('*.index'))[0]
  os.truncate(piece, piece.stat().st_size // 2)
  with pytest.raises(files.FilesError, match='damaged.*remove .*a.build'):
    build(tmp_path / 'a', factory)


@pytest.mark.parametrize('factory', ['Flat', 'IVF16,Flat', 'HNSW8'])
def test_a_disk_that_fills_up(factory, expected, tmp_path):
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  largest = max(len(x) for x in expected[factory] if x)
  for size in (10, 30_000, largest - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
      with pytest.raises(files.FilesError, match='cannot be written'):
        build(tmp_path / 'a', factory)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / 'a').exists()
  assert build(tmp_path / 'a', factory) == expected[factory]


@pytest.mark.parametrize('factory', ['Flat', 'IVF16,Flat', 'HNSW8'])
def test_a_disk_too_small_is_told_first(factory, tmp_path, monkeypatch):
  usage = types.SimpleNamespace(free=1000)
  monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: usage)
  read = kill_at(monkeypatch, None)
  with pytest.raises(files.FilesError, match='needs .* GB'):
    build(tmp_path / 'a', factory)
  assert not read


@pytest.fixture
def disk(tmp_path, monkeypatch):
  """A disk of `size` bytes for the files of a test."""
  found = types.SimpleNamespace(
    size=1 << 30,
    used=lambda: sum(
      path.stat().st_size for path in tmp_path.rglob('*') if path.is_file()
    ),
  )
  monkeypatch.setattr(
    files.shutil,
    'disk_usage',
    lambda path: types.SimpleNamespace(free=found.size - found.used()),
  )
  return found


def test_lists_half_written_are_room_for_the_next_try(
  expected, tmp_path, monkeypatch, disk
):
  def commit(file, part, final):
    if part.name == 'lists':
      raise Killed
    real(file, part, final)

  real = files.commit
  with monkeypatch.context() as m:
    m.setattr(files, 'commit', commit)
    with pytest.raises(Killed):
      build(tmp_path / 'a', 'IVF16,Flat')
  assert (tmp_path / 'a.build/lists').stat().st_size >= 1200 * 72
  disk.size = disk.used()
  assert build(tmp_path / 'a', 'IVF16,Flat') == expected['IVF16,Flat']


KILLED = """
import sys
import numpy as np
sys.path.insert(0, {root!r})
from retrieval.index import dense_faiss
from tests.retrieval.test_faiss_build import OPTIONS
real = dense_faiss.blocks
def blocks(*args):
  for first, part in real(*args):
    if first == 700:
      print('here', flush=True)
      sys.stdin.read()
    yield first, part
dense_faiss.blocks = blocks
dense_faiss.build(np.load({vectors!r}, mmap_mode='r'), {factory!r}, {path!r},
                  **OPTIONS)
"""


@pytest.mark.parametrize('factory', ['Flat', 'IVF16,Flat', 'HNSW8'])
def test_kill_9_and_again_gives_the_same_bytes(
  factory, expected, tmp_path, monkeypatch
):
  np.save(tmp_path / 'v.npy', VECTORS)
  process = subprocess.Popen(
    [
      sys.executable,
      '-c',
      KILLED.format(
        root=str(ROOT),
        vectors=str(tmp_path / 'v.npy'),
        factory=factory,
        path=str(tmp_path / 'a'),
      ),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    cwd=ROOT,
  )
  assert process.stdout.readline() == b'here\n'
  process.send_signal(signal.SIGKILL)
  process.communicate()
  read = kill_at(monkeypatch, None)
  assert build(tmp_path / 'a', factory) == expected[factory]
  assert read[0] >= 600 or factory != 'IVF16,Flat'


@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize(
  'factory, share',
  [
    # Of the bytes of the vectors: a block; the sample and a shard; all of it
    # and its links, where arrays that double took twice that.
    ('Flat', 0.0),
    ('IVF64,Flat', 0.3),
    ('HNSW4', 1.4),
  ],
)
def test_peak_memory_against_the_index(factory, share, tmp_path):
  count = 12_000 if factory == 'HNSW4' else 60_000
  vectors = unit(
    np.random.default_rng(0).standard_normal((count, 256), np.float32)
  )
  np.save(tmp_path / 'v.npy', vectors)
  size = vectors.nbytes
  del vectors
  vectors = np.load(tmp_path / 'v.npy', mmap_mode='r')
  options = OPTIONS | dict(train=3000, block=512, shard_bytes=size // 20)
  # What a first build loads and keeps.
  dense_faiss.build(vectors[:3000], factory, tmp_path / 'b', **options)
  with memory.Peak() as peak:
    dense_faiss.build(vectors, factory, tmp_path / 'a', **options)
  assert sum(map(len, filter(None, contents(tmp_path / 'a')))) > size
  assert peak.peak - peak.start < share * size + 4e6
