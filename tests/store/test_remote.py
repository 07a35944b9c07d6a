"""Files at locations that fsspec opens, and run folders at gs://."""

from concurrent import futures
import contextlib
import os
import pathlib
import shutil
import time

import fsspec
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.data import core as data
from searchrl_jax.store import checkpoint, folders, records, remote
from tests import gcs, tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv(remote.CACHE, str(tmp_path / 'cache'))
  remote.open_run.cache_clear()


@pytest.fixture(scope='module')
def bucket():
  with gcs.emulator():
    yield f'gs://{gcs.BUCKET}'


def test_data_is_fetched_once_and_again_if_it_changes():
  fs = fsspec.filesystem('memory')
  fs.pipe_file('/sets/20240101/nq.jsonl', b'one\n')
  fs.pipe_file('/sets/20240101/more/x.jsonl', b'two\n')
  path = data.resolve('memory://sets/20240101/nq.jsonl', tiny.config().data)
  assert open(path).read() == 'one\n' and path.endswith('/nq.jsonl')
  before = os.stat(path)
  assert data.resolve('memory://sets/20240101/nq.jsonl', None) == path
  assert os.stat(path).st_ino == before.st_ino  # the file was not replaced
  time.sleep(0.01)
  fs.pipe_file('/sets/20240101/nq.jsonl', b'ONE\n')
  remote.fetch('memory://sets/20240101/nq.jsonl')
  assert open(path).read() == 'ONE\n'
  folder = remote.fetch('memory://sets/20240101')
  assert open(f'{folder}/more/x.jsonl').read() == 'two\n'
  fs.rm('/sets/20240101/nq.jsonl')
  remote.fetch('memory://sets/20240101')
  assert os.listdir(folder) == ['more']
  with pytest.raises(records.RunError, match='none/x.jsonl'):
    data.resolve('memory://none/x.jsonl', None)


def test_a_run_folder_is_a_bucket_and_a_folder():
  for wrong in ('s3://bucket/run', 'gs://bucket', 'gs://bucket/'):
    with pytest.raises(records.RunError, match='gs://BUCKET/FOLDER'):
      remote.open_run(wrong)


@pytest.fixture
def location(tmp_path, monkeypatch):
  """gs://b/run, as files of this machine."""
  fs, root = fsspec.filesystem('file', auto_mkdir=True), tmp_path / 'bucket'
  opened = lambda where: (fs, where.replace('gs:/', str(root)))
  monkeypatch.setattr(remote, '_open', opened)
  return root / 'b' / 'run'


def test_a_command_that_reads_brings_no_old_file_back(location):
  metrics = location / 'metrics.jsonl'
  records.write_text(metrics, 'one')
  folder = remote.open_run('gs://b/run')
  records.write_text(metrics, 'one two')
  remote.open_run.__wrapped__('gs://b/run')  # of another command
  remote._same.clear()  # which has a memory of its own
  records.write_text(metrics, 'one two three')
  os.utime(metrics, (time.time() + 60,) * 2)
  records.write_text(f'{folder}/evaluate_1/eval.json', 'new')
  remote.push(folder)
  assert metrics.read_text() == 'one two three'
  assert (location / 'evaluate_1' / 'eval.json').read_text() == 'new'


def test_what_another_command_writes_is_not_pruned(location):
  folder = remote.open_run('gs://b/run')
  left, mine = f'{folder}/old', f'{folder}/evaluate_1'
  records.write_text(f'{left}/x', '')
  with folders.locked(mine):
    records.write_text(f'{mine}/config.json', '{}')
    remote.open_run.__wrapped__('gs://b/run')
  assert os.path.exists(f'{mine}/config.json')
  assert not os.path.exists(f'{left}/x')


def test_a_first_push_may_end_anywhere(location, monkeypatch):
  start = lambda: remote.open_run.__wrapped__('gs://b/run', writes=True)
  write = lambda x: [records.write_text(x / name, name) for name in 'ab']
  made = 'tokenizer', 'process_000/world_3'

  def make(folder):
    records.require_ours(folder)
    for name in made:
      path = pathlib.Path(folder, name)
      folders.make(path, write)
      assert sorted(p.name for p in path.iterdir()) == ['.made', 'a', 'b']
    records.write_text(f'{folder}/environment.json', '{"starts": [{}]}')
    records.write_text(f'{folder}/config.json', '{}')
    records.write_text(f'{folder}/eval/step_00000000.parquet', '')

  fs, _ = remote._open('gs://b/run')
  put, left = fs.put_file, 0

  def end(local, path):
    nonlocal left
    left -= 1
    if left < 0:
      raise OSError('killed')
    put(local, path)

  monkeypatch.setattr(fs, 'put_file', end)
  for n in range(11):
    shutil.rmtree(location, ignore_errors=True)
    make(folder := start())
    records.write_text(f'{folder}/metrics.jsonl', '{}')
    remote._same.clear()
    left = n
    with (
      pytest.raises(records.RunError) if n < 10 else contextlib.nullcontext()
    ):
      remote.push(folder)
    # Whoever finds it finds the rest.
    assert (location / 'metrics.jsonl').exists() == (n == 10)
    shutil.rmtree(folder)  # another machine
    make(start())
  # What somebody put there stays.
  readme = location / 'tokenizer' / 'README.md'
  readme.write_text('mine')
  start()
  assert pathlib.Path(folder, 'tokenizer', 'README.md').exists()


def test_a_start_that_fetches_a_run_has_it_to_itself(location, monkeypatch):
  records.write_text(location / 'metrics.jsonl', 'one')
  pull, said = remote._pull, []

  def slow(where, folder, skip):
    with futures.ThreadPoolExecutor() as threads:
      with pytest.raises(records.RunError) as error:
        threads.submit(folders.locked(folder).__enter__).result()
    said.append(str(error.value))
    return pull(where, folder, skip)

  monkeypatch.setattr(remote, '_pull', slow)
  folder = remote.open_run('gs://b/run', writes=True)
  assert 'in use' in said[0]
  with contextlib.ExitStack() as stack, futures.ThreadPoolExecutor() as threads:
    threads.submit(stack.enter_context, folders.locked(folder)).result()
    monkeypatch.setattr(remote, '_pull', pull)
    with pytest.raises(records.RunError, match='gs://b/run: .*in use'):
      remote.open_run.__wrapped__('gs://b/run//', writes=True)


@gcs.needed
def test_files_of_a_run_go_there_and_come_back(bucket, tmp_path, monkeypatch):
  where = f'{bucket}/runs/files'
  folder = remote.open_run(where, writes=True)
  with open(f'{folder}/metrics.jsonl', 'w') as file:
    file.write('{"step": 0}\n')
  for name in ('a/step_00000000.parquet', 'a/step_00000001_p001.parquet'):
    records.write_text(f'{folder}/{name}', name)
  records.write_text(f'{folder}/published/00000001/x', 'weights')
  records.write_text(f'{folder}/process_001/log', 'of another process')
  remote.push(folder)
  fs = fsspec.filesystem('gs')
  names = {
    x.partition('/runs/files/')[2] for x in fs.find(f'{gcs.BUCKET}/runs')
  }
  assert names == {'metrics.jsonl', 'a/step_00000000.parquet'}
  written = fs.info(f'{where}/metrics.jsonl')['generation']
  remote.push(folder)  # nothing changed
  assert fs.info(f'{where}/metrics.jsonl')['generation'] == written

  monkeypatch.setenv(remote.CACHE, str(tmp_path / 'other'))
  remote.open_run.cache_clear()
  again = remote.open_run(where, writes=True)
  assert again != folder and sorted(os.listdir(again)) == [
    '.location',
    '.lock',
    'metrics.jsonl',
  ]
  reader = remote.open_run(where, steps=True)
  assert os.path.exists(f'{reader}/a/step_00000000.parquet')

  # A resume writes the step again; a command that reads the run later, without
  # its trajectories, has the former file and does not bring it back.
  records.write_text(f'{again}/a/step_00000000.parquet', 'again')
  remote.push(again)
  remote.open_run.cache_clear()
  assert remote.open_run(where) == reader
  remote.push_all()
  assert fs.cat(f'{where}/a/step_00000000.parquet') == b'again'
  fs.rm(f'{where}/a/step_00000000.parquet')
  remote.open_run.cache_clear()
  remote.open_run(where, steps=True)
  assert not os.path.exists(f'{reader}/a/step_00000000.parquet')


@pytest.mark.long
@gcs.needed
def test_checkpoints_at_a_bucket_are_complete_or_absent(bucket, monkeypatch):
  folder = remote.open_run(f'{bucket}/runs/saved', writes=True)
  saver = checkpoint.Checkpointer(
    remote.place(folder) / 'checkpoints', 2, 'score'
  )
  state = {'x': jnp.arange(6.0).reshape(2, 3), 'n': np.array(7)}
  for step, score in ((1, 0.5), (2, 0.1), (3, 0.2), (4, 0.3)):
    how = dict(extras={'at': step}, metrics={'score': score}, fingerprint={})
    saver.save(step, state, **how)
  assert saver.steps() == [1, 3, 4] and saver.best() == 1
  saver.amend(4, {'score': 0.9}, at=5)
  assert saver.best() == 4
  found = saver.restore(state, 'latest', fingerprint={})
  assert found.extras == {'at': 5}
  np.testing.assert_array_equal(found.state['x'], state['x'])
  # A save that was killed.
  (saver.folder / '00000004' / 'commit_success.txt').unlink()
  assert saver.latest() == 3
  # Another machine is writing this one.
  other = saver.folder / '00000009' / 'part'
  other.write_text('half of it')
  saver.save(4, state, **how)
  assert saver.latest() == 4
  saver.delete(saver.steps())
  assert saver.steps() == [] and other.read_text() == 'half of it'
  assert [path.name for path in saver.folder.glob('*')] == ['00000009']


@gcs.needed
def test_a_bucket_that_is_not_there_is_named(bucket):
  with pytest.raises(records.RunError, match='none/run.*bucket'):
    remote.open_run('gs://none/run', writes=True)
