"""Builds of FAISS indexes: in little memory, and killed anywhere."""

import json
import os
import resource
import signal
import subprocess
import sys
import types

import faiss
import numpy as np
import pytest

from retrieval import dense_faiss, faiss_build, files
from retrieval.dense_faiss import DenseFaiss
from tests import memory
from tests.conftest import ROOT
from tests.retrieval.vectors import clustered, unit

VECTORS = clustered(1200, 16, spread=0.3)
# Lists in use: all, few, none but some; below a transform; a graph; refined.
LISTED = (
  'IVF16,Flat', 'IVF300,Flat', 'IVF16,PQ4x4', 'IVF16,SQ8', 'PCA8,IVF16,Flat',
  'IVF16_HNSW8,Flat',
)
GROWN = ('HNSW8', 'PCA8,HNSW8', 'IVF16,Flat,RFlat', 'PQ4x4', 'SQ8')
FACTORIES = ('Flat', *LISTED, *GROWN)
OPTIONS = dict(
  identity={'of': 'test'}, threads=1, block=100, train=1000,
  shard_bytes=100 * 72, checkpoint_s=0.0,
)


@pytest.fixture(scope='module', autouse=True)
def one_thread():
  before = faiss.omp_get_max_threads()
  faiss.omp_set_num_threads(1)
  yield
  faiss.omp_set_num_threads(before)


def build(path, factory, vectors=VECTORS, **given):
  dense_faiss.build(vectors, factory, path, **{**OPTIONS, **given})
  return path.read_bytes()


def direct(path, factory, vectors=VECTORS):
  """What FAISS alone makes and writes of the same."""
  rows = np.sort(np.random.default_rng(0).choice(
    len(vectors), 1000, replace=False, shuffle=False
  ))
  index = faiss.index_factory(
    vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT
  )
  if ivf := faiss.try_extract_index_ivf(index):
    if hasattr(faiss.downcast_index(ivf), 'pq'):
      faiss.downcast_index(ivf).do_polysemous_training = False
    ivf.nprobe = round(ivf.nlist ** 0.5)
  if not index.is_trained:
    index.train(vectors[rows])
  for at in range(0, len(vectors), 100):
    index.add(vectors[at:at + 100])
  if 'HNSW' in factory:
    faiss.ParameterSpace().set_index_parameter(index, 'efSearch', 64)
  faiss.write_index(index, str(path))
  return path.read_bytes()


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
  folder = tmp_path_factory.mktemp('direct')
  return {f: direct(folder / 'a', f) for f in FACTORIES}


@pytest.mark.parametrize('factory', FACTORIES)
def test_the_file_is_the_one_that_faiss_writes(factory, expected, tmp_path):
  assert build(tmp_path / 'a', factory) == expected[factory]
  assert [p.name for p in tmp_path.iterdir()] == ['a']


def test_one_vector_and_few_lists_in_use(tmp_path):
  one = clustered(2, 16)[:1]
  build(tmp_path / 'flat', 'Flat', one)
  assert DenseFaiss(tmp_path / 'flat', None).search_vectors(one, 1)[0] == 0
  # 1200 vectors that are all alike lie in one list of 16: a sparse table.
  same = np.tile(one, (1200, 1))
  assert build(tmp_path / 'a', 'IVF16,Flat', same) == direct(
    tmp_path / 'b', 'IVF16,Flat', same)


class Killed(BaseException):
  pass


@pytest.fixture
def often(monkeypatch):
  """Records progress after each block, in no time."""
  monkeypatch.setattr(faiss_build, '_SYNC', 1)
  stopped = types.SimpleNamespace(monotonic=lambda: 0.0)
  monkeypatch.setattr(faiss_build, 'time', stopped)


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


@pytest.mark.parametrize('at', [0, 100, 700, 1100])
@pytest.mark.parametrize('factory', FACTORIES)
def test_what_is_done_is_not_done_again(
  factory, at, expected, tmp_path, monkeypatch, often
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
  assert read[0] == at or factory in LISTED and at - 900 < read[0] <= at
  assert read[-1] == 1100 and len(trained) <= 1
  assert [p.name for p in tmp_path.iterdir()] == ['a']


@pytest.mark.parametrize('change', [
  dict(identity={'of': 'others'}), dict(vectors=VECTORS[:1100]),
  dict(vectors=VECTORS.astype(np.float16)), dict(seed=1), dict(block=50),
  dict(identity=None),
])
@pytest.mark.parametrize('factory', ['Flat', 'IVF16,Flat', 'HNSW8'])
def test_other_work_starts_over(
  factory, change, tmp_path, monkeypatch, often
):
  with monkeypatch.context() as m:
    kill_at(m, 700)
    with pytest.raises(Killed):
      build(tmp_path / 'a', factory, -VECTORS)
  change = dict(vectors=VECTORS) | change
  assert build(tmp_path / 'a', factory, **change) == build(
    tmp_path / 'b', factory, **change)


def test_without_identity_nothing_is_kept(tmp_path, monkeypatch):
  for factory in ('Flat', 'IVF16,Flat', 'HNSW8'):
    with monkeypatch.context() as m:
      kill_at(m, 700)
      with pytest.raises(Killed):
        build(tmp_path / 'a', factory, identity=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('left', [0, 20, 5000])
def test_a_flat_part_cut_short_starts_over(
  left, expected, tmp_path, monkeypatch, often
):
  with monkeypatch.context() as m:
    kill_at(m, 700)
    with pytest.raises(Killed):
      build(tmp_path / 'a', 'Flat')
  os.truncate(tmp_path / 'a.build/part', left)
  assert build(tmp_path / 'a', 'Flat') == expected['Flat']


@pytest.mark.parametrize('factory', ['IVF16,Flat', 'HNSW8'])
def test_a_damaged_piece_is_named(factory, tmp_path, monkeypatch, often):
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
  for size in (10, 30_000, len(expected[factory]) - 1):
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
  with pytest.raises(files.FilesError, match='needs .* are free'):
    build(tmp_path / 'a', factory)
  assert not read


@pytest.fixture
def disk(tmp_path, monkeypatch):
  """A disk of `size` bytes for the files of a test."""
  found = types.SimpleNamespace(size=1 << 30, used=lambda: sum(
    path.stat().st_size for path in tmp_path.rglob('*') if path.is_file()
  ))
  monkeypatch.setattr(
    files.shutil, 'disk_usage',
    lambda path: types.SimpleNamespace(free=found.size - found.used()),
  )
  return found


def test_lists_half_written_are_room_for_the_next_try(
  expected, tmp_path, monkeypatch, disk
):
  def commit(file, part, final):
    if part.name == 'part':
      file.flush()
      raise Killed
    real(file, part, final)

  real = files.commit
  with monkeypatch.context() as m:
    m.setattr(files, 'commit', commit)
    with pytest.raises(Killed):
      build(tmp_path / 'a', 'IVF16,Flat')
  assert (tmp_path / 'a.build/part').stat().st_size > 1200 * 72
  disk.size = disk.used()
  assert build(tmp_path / 'a', 'IVF16,Flat') == expected['IVF16,Flat']


@pytest.mark.parametrize('told', [True, False])
def test_a_build_goes_on_without_a_checkpoint_that_finds_no_room(
  told, expected, tmp_path, monkeypatch, often, disk, capfd
):
  def save(index, final):
    if not told and index.ntotal > 800 and final.name == 'start.index':
      raise files.FilesError('the disk is full')
    saved.append((index.ntotal, (tmp_path / 'a.build/start.index').exists()))
    real(index, final)

  real, saved = faiss_build.save, []
  monkeypatch.setattr(faiss_build, 'save', save)
  disk.size = int(1.3 * len(expected['HNSW8'])) if told else 1 << 30
  assert build(tmp_path / 'a', 'HNSW8') == expected['HNSW8']
  # Two of 700 or 800 vectors find room at once, and the whole beside neither.
  assert [n for n, _ in saved] == [*range(0, 801, 100), 1200]
  assert saved[-1] == (1200, not told)
  assert 'HNSW8: goes on without a checkpoint: ' in capfd.readouterr().err


def test_checkpoints_take_a_tenth_of_the_time(tmp_path, monkeypatch):
  clock, saved = [0.0], []

  def save(index, final):
    if final.name == 'start.index' and index.ntotal:
      clock[0] += 7
      saved.append(index.ntotal)
    real(index, final)

  def blocks(vectors, size, start=0):
    for found in every(vectors, size, start):
      yield found
      clock[0] += 10

  real, every = faiss_build.save, dense_faiss.blocks
  monkeypatch.setattr(faiss_build, 'save', save)
  monkeypatch.setattr(dense_faiss, 'blocks', blocks)
  monkeypatch.setattr(
    faiss_build, 'time', types.SimpleNamespace(monotonic=lambda: clock[0])
  )
  build(tmp_path / 'a', 'HNSW8', block=20, checkpoint_s=95.0)
  # A block ends each 10 s: at 100 s, then where 95 s have gone by since.
  assert saved == [220, 420, 620, 820, 1020]
  saved.clear()
  build(tmp_path / 'a', 'HNSW8', block=20, checkpoint_s=0.0)
  # 70 s after each, ten times what it took.
  assert saved == [20, *range(160, 1200, 140)]


KILLED = '''
import sys, types
import numpy as np
sys.path.insert(0, {root!r})
from retrieval import dense_faiss, faiss_build
from tests.retrieval.test_faiss_build import OPTIONS
real = dense_faiss.blocks
def blocks(*args):
  for first, part in real(*args):
    if first == 700:
      print('here', flush=True)
      sys.stdin.read()
    yield first, part
dense_faiss.blocks, faiss_build._SYNC = blocks, 1
faiss_build.time = types.SimpleNamespace(monotonic=lambda: 0.0)
dense_faiss.build(np.load({vectors!r}, mmap_mode='r'), {factory!r}, {path!r},
                  **OPTIONS)
'''


@pytest.mark.parametrize('factory', ['Flat', 'IVF16,Flat', 'HNSW8'])
def test_kill_9_and_again_gives_the_same_bytes(
  factory, expected, tmp_path, monkeypatch
):
  np.save(tmp_path / 'v.npy', VECTORS)
  process = subprocess.Popen(
    [sys.executable, '-c', KILLED.format(
      root=str(ROOT), vectors=str(tmp_path / 'v.npy'), factory=factory,
      path=str(tmp_path / 'a'),
    )], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
  )
  assert process.stdout.readline() == b'here\n'
  process.send_signal(signal.SIGKILL)
  process.communicate()
  if factory == 'Flat':
    done = json.loads((tmp_path / 'a.build/done.json').read_text())
    assert done == {'done': 700}
  read = kill_at(monkeypatch, None)
  assert build(tmp_path / 'a', factory) == expected[factory]
  assert read[0] >= 600


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
@pytest.mark.parametrize('factory, share', [
  # Of the bytes of the vectors: a block; the sample and a shard; all of it
  # and its links, where arrays that double took twice that.
  ('Flat', 0.0), ('IVF64,Flat', 0.3), ('HNSW4', 1.4),
])
def test_peak_memory_against_the_index(factory, share, tmp_path):
  count = 12_000 if factory == 'HNSW4' else 60_000
  vectors = unit(np.random.default_rng(0).standard_normal(
    (count, 256), np.float32
  ))
  np.save(tmp_path / 'v.npy', vectors)
  size = vectors.nbytes
  del vectors
  vectors = np.load(tmp_path / 'v.npy', mmap_mode='r')
  options = OPTIONS | dict(
    train=3000, block=512, shard_bytes=size // 20, checkpoint_s=3600.0
  )
  # What a first build loads and keeps.
  dense_faiss.build(vectors[:3000], factory, tmp_path / 'b', **options)
  with memory.Peak() as peak:
    dense_faiss.build(vectors, factory, tmp_path / 'a', **options)
  assert (tmp_path / 'a').stat().st_size > size
  assert peak.peak - peak.start < share * size + 4e6


@pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
def test_a_resume_has_its_checkpoint_in_memory_once(
  tmp_path, monkeypatch, often
):
  np.save(tmp_path / 'v.npy', unit(np.random.default_rng(0).standard_normal(
    (12_000, 256), np.float32
  )))
  vectors = np.load(tmp_path / 'v.npy', mmap_mode='r')
  build(tmp_path / 'b', 'HNSW4', vectors[:3000], block=1500)
  with monkeypatch.context() as m:
    kill_at(m, 9000)
    with pytest.raises(Killed):
      build(tmp_path / 'a', 'HNSW4', vectors, block=3000)
  size = (tmp_path / 'a.build/start.index').stat().st_size
  assert size > 0.75 * vectors.nbytes
  read = kill_at(monkeypatch, None)
  with memory.Peak() as peak:
    dense_faiss.build(
      vectors, 'HNSW4', tmp_path / 'a', **OPTIONS | {'block': 3000}
    )
  assert read == [9000]
  assert peak.peak - peak.start < 1.3 * vectors.nbytes + 4e6
