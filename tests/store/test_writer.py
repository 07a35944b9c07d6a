from concurrent import futures
import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from searchrl_jax.run import build
from searchrl_jax.store import folders, records, writer
from searchrl_jax.store.records import Record, RunError
from searchrl_jax.types import (
  Passage,
  Question,
  Rewards,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
)
from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def config(**log):
  c = schema.base()
  c.log.tensorboard = False
  c.log.update(log)
  return c


def open_writer(folder, c=None, **kw):
  return writer.Writer(folder, c or config(), out=io.StringIO(), **kw)


def trajectory(sample=0, end='answer'):
  rng = np.random.default_rng(sample)
  question = Question(
    'nq-1', 'who?', ('A', 'B'), 'nq', 2, ('p1', 'p2'),
    ({'role': 'user', 'content': 'who?'},), {'year': 1912},
  )  # fmt: skip
  request = SearchRequest('q \u2028 ü', 3, question, 'nq-1/solver/0', 0, 5)
  segments = (
    Segment(np.array([1, 2, 3], np.int32), 'prompt', 'other'),
    Segment(
      np.array([4, 5], np.int32), 'policy', 'search', 'policy', True,
      np.float32(-5 * rng.random(2)), np.array([7, 8], np.int32),
    ),
    Segment(
      np.array([6], np.int32), 'policy', 'answer', 'policy', True,
      np.array([-0.0], np.float32), np.array([8], np.int32),
    ),
  )  # fmt: skip
  searches = (
    SearchResult(request, (Passage('p1', 'T', 'text\n', 0.25),), 0.5),
    SearchError(request, 'timeout', 'http://x: late'),
  )
  return Trajectory(
    question, segments, searches, end, sample, 'solver', 1, 2, 0.75,
    segments[:1], {'hint': 'none'},
  )  # fmt: skip


def same(a, b):
  """Equality of records that hold arrays: values, types and shapes."""
  if dataclasses.is_dataclass(a):
    return type(a) is type(b) and all(
      same(getattr(a, f.name), getattr(b, f.name))
      for f in dataclasses.fields(a)
    )
  if isinstance(a, tuple):
    return len(a) == len(b) and all(map(same, a, b))
  if isinstance(a, np.ndarray):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
  return a == b


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def same_but_halves(found, written):
  """Equality of trajectories whose log-probs went through float16."""

  def half(segments):
    return segments and tuple(
      dataclasses.replace(
        s, logps=s.logps.astype(np.float16).astype(np.float32)
      )
      if s.logps is not None
      else s
      for s in segments
    )

  return same(
    found,
    dataclasses.replace(
      written,
      segments=half(written.segments),
      train_context=half(written.train_context),
    ),
  )


def test_trajectories_come_back(tmp_path):
  """Ids, authors, kinds, versions and searches exactly, the rest as float16."""
  plain = dataclasses.replace(trajectory(2), train_context=None)
  group = (trajectory(0), trajectory(1, end='failed'), plain)
  rewards = Rewards(
    np.array([1.0, 0.0, 0.5], np.float32),
    np.array([True, False, True]),
    parts={'em': np.array([1.0, np.nan, 0.5], np.float32)},
  )
  by_token = [np.arange(3.0), np.arange(3.0), np.arange(6.0)]
  with open_writer(tmp_path) as w:
    w.trajectories(
      3,
      [group],
      rewards,
      kept=rewards.valid,
      advantages=np.array([0.5, 0, 2]),
      trainer_logps=[-x for x in by_token],
    )
    # Without an update, and where tokens have advantages of their own.
    w.trajectories(4, [group], name='eval')
    w.trajectories(5, [group], rewards, kept=[True] * 3, advantages=by_token)
  found = [*records.read(tmp_path / 'trajectories')]
  assert [r.step for r in found] == [3, 3, 3, 5, 5, 5]
  for r, written in zip(found, (*group, *group), strict=True):
    assert same_but_halves(r.trajectory, written)
  first, second, third, *_, last = found
  assert (first.reward, first.valid, first.kept) == (1.0, True, True)
  assert first.rewards == {'em': 1.0} and np.isnan(second.rewards['em'])
  assert not second.valid and not second.kept and second.advantages is None
  # What the trainer saw of the first (a prompt alone) is not in the loss.
  assert first.advantages is first.trainer_logps is None
  nan = np.nan
  np.testing.assert_array_equal(third.advantages, [nan, nan, nan, 2, 2, 2])
  np.testing.assert_array_equal(
    third.trainer_logps, [nan, nan, nan, -3, -4, -5]
  )
  np.testing.assert_array_equal(last.advantages, [nan, nan, nan, 3, 4, 5])
  assert last.trainer_logps is None  # the trainer did not score
  (*_, last) = records.read(tmp_path / 'eval')
  assert same_but_halves(last.trajectory, plain)
  assert last.reward is last.kept is last.advantages is None


def test_advantages_beyond_float16_stay_finite(tmp_path):
  rewards = Rewards(np.array([1e6], np.float32), np.array([True]))
  plain = dataclasses.replace(trajectory(2), train_context=None)
  with open_writer(tmp_path) as w:
    w.trajectories(
      0, [(plain,)], rewards, kept=[True], advantages=np.array([-1e6])
    )
  (found,) = records.read(tmp_path / 'trajectories')
  assert found.reward == 1e6 and np.nanmax(found.advantages) == -65504


def test_every_float32_survives_for_a_resume():
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, 5000, dtype=np.uint32)
  values = bits.view(np.float32)
  values = values[np.isfinite(values)]
  segment = Segment(
    np.zeros(len(values), np.int32), 'policy', 'other', logps=values
  )
  whole = dataclasses.replace(trajectory(), segments=(segment,))
  data = records.encode([Record(7, whole), Record(8, trajectory())], exact=True)
  first, second = records.read(data)
  assert same(first.trajectory, whole) and first.step == 7
  assert same(second.trajectory, trajectory()) and second.step == 8
  assert not [*records.read(records.encode([]))]


def test_a_lone_surrogate_ends_no_run():
  passage = Passage('p', 'half a \ud83d', 'x')
  t = dataclasses.replace(
    trajectory(), searches=(SearchResult(SearchRequest('q', 1), (passage,)),)
  )
  record = Record(0, t, rewards={'em': 1.0})
  (found,) = records.read(records.encode([record]))
  assert found.trajectory.searches[0].passages[0].title == 'half a ?'
  assert found.rewards == {'em': 1.0}


def test_rewards_by_token_are_written_by_token(tmp_path):
  values = tuple([np.array([0.0] * 5 + [0.5], np.float32)])
  rewards = Rewards(values, np.array([True]), 'token')
  with open_writer(tmp_path) as w:
    w.trajectories(0, [(trajectory(),)], rewards)
  (found,) = records.read(tmp_path / 'trajectories')
  assert found.reward == 0.5 and found.earned_at == 'token'
  np.testing.assert_array_equal(found.earned, values[0])


def test_what_holds_no_trajectories(tmp_path):
  with pytest.raises(RunError, match='trajectories_every'):
    next(records.read(tmp_path))
  (tmp_path / 'a.parquet').write_bytes(b'none')
  with pytest.raises(RunError, match='a.parquet'):
    next(records.read(tmp_path / 'a.parquet'))


@pytest.mark.parametrize('every, steps', [(1, 5), (2, 3), (3, 2), (0, 0)])
def test_trajectories_of_some_steps(tmp_path, every, steps):
  with open_writer(tmp_path) as w:
    for step in range(5):
      w.trajectories(step, [(trajectory(step),)], every=every)
  assert len([*tmp_path.glob('trajectories/*')]) == steps


def test_a_thread_writes_and_its_error_comes_with_the_next_step(
  tmp_path, monkeypatch
):
  """The loop does not wait for the disk; nothing is lost, errors neither."""
  real, may_write = records.encode, threading.Event()

  def slow(rows):
    assert may_write.wait(60)
    return real(rows)

  monkeypatch.setattr(records, 'encode', slow)
  with open_writer(tmp_path) as w:
    w.trajectories(0, [(trajectory(),)])  # returns, while nothing can write
    assert not [*tmp_path.glob('trajectories/*')]
    w.write(0, {})
    may_write.set()
    w.flush()
    assert len([*tmp_path.glob('trajectories/*')]) == 1
    w.trajectories(1, [(trajectory(),)])
  # The end of the run, be it by an error, waits for what is under way.
  with pytest.raises(KeyError):
    with open_writer(tmp_path, step=2) as w:
      w.trajectories(2, [(trajectory(),)])
      raise KeyError
  assert [r.step for r in records.read(tmp_path / 'trajectories')] == [0, 1, 2]

  def full(*_):
    raise RunError('no space left')

  monkeypatch.setattr(records, 'encode', full)
  with open_writer(tmp_path, step=3) as w:
    w.trajectories(3, [(trajectory(),)])
    with pytest.raises(RunError, match='no space'):
      w.trajectories(4, [(trajectory(),)])
  with pytest.raises(RunError, match='no space'):
    with open_writer(tmp_path, step=3) as w:
      w.trajectories(3, [(trajectory(),)])
  with pytest.raises(KeyError) as caught:  # what ended the run comes first
    with open_writer(tmp_path, step=3) as w:
      w.trajectories(3, [(trajectory(),)])
      raise KeyError
  assert caught.value.__notes__ == ['After that: no space left']
  monkeypatch.setattr(records, 'encode', lambda rows: rows['a mistake'])
  with pytest.raises(KeyError, match='first') as caught:
    with open_writer(tmp_path, step=3) as w:
      w.trajectories(3, [(trajectory(),)])
      raise KeyError('first')
  assert 'list indices' in caught.value.__notes__[0]


def test_a_resume_writes_nothing_twice(tmp_path):
  with open_writer(tmp_path) as w:
    w.write(-1, {'x': -9})  # an evaluation before the first step
    for step in range(5):
      w.write(step, {'x': step, 'bad': float('nan')})
      w.trajectories(step, [(trajectory(step),)])
      w.trajectories(step, [(trajectory(step),)], part='solver')
      w.trajectories(step, [(trajectory(step),)], name='eval')
  (tmp_path / 'trajectories' / '.step_5.parquet.part').write_text('half of')
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 5, "x"')  # the process died in the middle of a line
  with open_writer(tmp_path, step=3) as w:
    for step in (3, 4):
      w.write(step, {'x': -step})
      w.trajectories(step, [(trajectory(9),)])
  found = lines(tmp_path / 'metrics.jsonl')
  assert [(l['step'], l['x']) for l in found] == [
    (-1, -9), (0, 0), (1, 1), (2, 2), (3, -3), (4, -4)
  ]  # fmt: skip
  assert found[1]['bad'] is None  # NaN is not JSON
  found = [*records.read(tmp_path / 'trajectories')]
  assert [(r.step, r.trajectory.sample) for r in found] == [
    (0, 0), (0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (3, 9), (4, 9)
  ]  # fmt: skip
  assert [r.step for r in records.read(tmp_path / 'eval')] == [0, 1, 2]
  assert not [*(tmp_path / 'trajectories').glob('.*')]
  starts = json.loads((tmp_path / 'environment.json').read_text())['starts']
  assert [s['step'] for s in starts] == [0, 3]
  assert 'jax' in starts[0]['packages'] and starts[0]['machine']['cores']


def test_a_second_start_at_step_0_evaluates_anew(tmp_path):
  for value in (1, 2):  # the first process died before its first checkpoint
    with open_writer(tmp_path) as w:
      w.write(-1, {'x': value})
      w.trajectories(-1, [(trajectory(),)], name='eval')
  assert [l['x'] for l in lines(tmp_path / 'metrics.jsonl')] == [2]
  assert [r.step for r in records.read(tmp_path / 'eval')] == [-1]


@pytest.mark.parametrize('line', ['{"loss": 1}\n', '{"step": 0, "loss": 1}\n'])
def test_a_file_of_something_else_is_not_touched(tmp_path, line):
  path = tmp_path / 'metrics.jsonl'
  path.write_text(line)
  with pytest.raises(RunError, match='config.json'):
    open_writer(tmp_path)
  assert path.read_text() == line


@pytest.mark.parametrize('before', ['', '{"step": 0, "loss": 1.0}\n'])
def test_an_evaluation_whose_step_was_lost_gets_a_line(tmp_path, before):
  """A machine that went down had saved the step, and not its metrics."""
  with open_writer(tmp_path, step=2) as w:
    (tmp_path / 'metrics.jsonl').write_text(before)
    for score in 0.5, 0.75:
      w.amend(1, {'eval/em': score})
  *others, last = lines(tmp_path / 'metrics.jsonl')
  assert last == {'step': 1, 'eval/em': 0.75}
  assert others == [json.loads(x) for x in before.splitlines()]


def test_a_folder_of_another_config(tmp_path):
  with open_writer(tmp_path) as w:
    w.write(0, {'loss': 1.0})
  other = config()
  other.optim.lr = 1e-3
  message = 'config.optim.lr .*1e-06.*0.001'
  with pytest.raises(RunError, match=message):
    open_writer(tmp_path, other)
  other = config()
  other.reward.em = ConfigDict(dict(fn='answer.em', weight=1.0))
  with pytest.raises(RunError, match='config.reward.em .*absent'):
    open_writer(tmp_path, other)
  kept = json.loads((tmp_path / 'config.json').read_text())
  assert kept['optim']['lr'] == 1e-6


@pytest.mark.parametrize(
  'field, value',
  [
    ('engine.canary_tolerance', 0.1),
    ('source.timeout', 99.0),
    ('source.attempts', 9),
    ('rollout.search_attempts', 9),
    ('judge.url', 'http://elsewhere'),
    ('judge.model', 'theirs'),  # which had no name
    ('judge.max_tokens', 99),
    ('sft.seconds', 9.0),
    ('mesh.data', 1),
  ],
)
def test_what_a_message_says_to_change_may_be_changed(field, value, tmp_path):
  with open_writer(tmp_path) as w:
    w.write(0, {'loss': 1.0})
  other = config()
  other.update_from_flattened_dict({field: value})
  with open_writer(tmp_path, other, step=1) as w:
    w.write(1, {'loss': 1.0})


@pytest.mark.parametrize('field', ['judge.model', 'source.simulator.model'])
def test_a_model_that_has_a_name_keeps_it(field, tmp_path):
  one, other = config(), config()
  one.update_from_flattened_dict({field: 'a'})
  other.update_from_flattened_dict({field: 'b'})
  with open_writer(tmp_path, one) as w:
    w.write(0, {'loss': 1.0})
  for changed in other, config():
    with pytest.raises(RunError, match=f'config.{field}'):
      open_writer(tmp_path, changed, step=1)


def test_files_of_before_the_first_step_go_with_those_of_the_first(tmp_path):
  for step in (-1, 0, 1):
    path = records.step_file(tmp_path / 'eval', step, 'p002')
    path.parent.mkdir(exist_ok=True)
    path.touch()
  left = lambda: sorted(p.name for p in (tmp_path / 'eval').iterdir())
  records.drop_steps(tmp_path, 1)
  assert left() == ['step_-0000001_p002.parquet', 'step_00000000_p002.parquet']
  records.drop_steps(tmp_path, 0)
  assert left() == []


def test_a_run_of_an_earlier_version_goes_on(tmp_path):
  with open_writer(tmp_path) as w:
    w.write(0, {'loss': 1.0})
  before = json.loads((tmp_path / 'config.json').read_text())
  for part, field in (('judge', 'max_tokens'), ('model', 'lora')):
    del before[part][field]  # it was not there yet
  records.write_json(tmp_path / 'config.json', before)
  with open_writer(tmp_path, step=1) as w:
    w.write(1, {'loss': 1.0})
  other = config()
  del before['judge'], before['rollout']['refill']
  records.write_json(tmp_path / 'config.json', before)
  other.rollout.refill += 1
  with pytest.raises(RunError, match='config.rollout.refill .*0'):
    open_writer(tmp_path, other, step=2)


def test_a_config_that_is_not_json_is_named(tmp_path):
  with open_writer(tmp_path) as w:
    w.write(0, {'loss': 1.0})
  (tmp_path / 'config.json').write_text('{"seed": ')
  for start in (open_writer, build.load_config):
    with pytest.raises(ConfigError, match='config.json'):
      start(tmp_path)


def test_a_start_that_failed_claims_nothing(tmp_path):
  with open_writer(tmp_path):
    pass  # nothing written, nothing saved
  other = config()
  other.optim.lr = 1e-3
  with open_writer(tmp_path, other):
    pass
  kept = json.loads((tmp_path / 'config.json').read_text())
  assert kept['optim']['lr'] == 1e-3
  (tmp_path / 'checkpoints' / '00000001').mkdir(parents=True)
  with pytest.raises(RunError, match='config.optim.lr .*0.001'):
    open_writer(tmp_path)


def test_fields_that_may_differ_are_noted(tmp_path):
  first = config()
  with open_writer(tmp_path, first) as w:
    w.write(0, {'loss': 1.0})
  moved = config(project='another')
  moved.source.url = 'http://elsewhere:1'
  with open_writer(tmp_path, moved) as w:
    w.write(0, {'loss': 1.0})
  starts = json.loads((tmp_path / 'environment.json').read_text())['starts']
  assert starts[1]['config_changed'] == {
    'log.project': [first.log.project, 'another'],
    'source.url': [first.source.url, 'http://elsewhere:1'],
  }
  # `source` as a whole may not: only the URL says where, not what.
  moved.source.k = 9
  with pytest.raises(RunError, match='config.source.k'):
    open_writer(tmp_path, moved)


HOLDS = """
import fcntl, sys, time
from searchrl_jax.store import folders
def flock(*_):
  raise OSError(int(sys.argv[2]), 'No locks available')
if int(sys.argv[2]):
  fcntl.flock = flock
with folders.locked(sys.argv[1]):
  print('held', flush=True)
  time.sleep(600)
"""


@pytest.mark.parametrize('error', [0, errno.ENOLCK])
def test_two_processes_cannot_share_a_folder(tmp_path, monkeypatch, error):
  """Also where the file system has no locks; a process that died keeps none."""

  def flock(*_):
    raise OSError(error, 'No locks available')

  if error:
    monkeypatch.setattr(fcntl, 'flock', flock)
  command = [sys.executable, '-c', HOLDS, str(tmp_path), str(error)]
  make = lambda: folders.make(tmp_path / 'made', lambda x: (x / 'a').touch())
  other = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  with other, contextlib.ExitStack() as stack:
    stack.callback(other.kill)
    assert other.stdout.readline() == 'held\n'
    assert folders.in_use(tmp_path)
    for start in (lambda: open_writer(tmp_path), make):
      with pytest.raises(RunError, match='in use'):
        start()
  assert not folders.in_use(tmp_path) and not (tmp_path / 'made').exists()
  with open_writer(tmp_path):
    make()  # by the process that has the folder
    with futures.ThreadPoolExecutor() as threads:  # not by another of its runs
      with pytest.raises(RunError, match='in use'):
        threads.submit(open_writer, tmp_path).result()
  open_writer(tmp_path).close()


def test_a_stage_that_waits_for_another_says_so(tmp_path, caplog):
  with futures.ThreadPoolExecutor() as threads:

    def wait():
      with folders.locked(tmp_path, wait=True):
        return time.monotonic()

    with folders.locked(tmp_path):
      second = threads.submit(wait)
      while not caplog.messages:
        time.sleep(0.01)
      begin = time.monotonic()
    assert second.result() > begin
  assert 'in use' in caplog.text


def test_without_locks_another_machine_is_named(tmp_path, monkeypatch):
  def flock(*_):
    raise OSError(errno.ENOTSUP, 'Operation not supported')

  monkeypatch.setattr(fcntl, 'flock', flock)
  owner = tmp_path / '.owner'
  for text, who in (('["elsewhere", 7]', '7 on elsewhere'), ('', 'just begun')):
    owner.write_text(text)
    with pytest.raises(RunError, match=f'{who}; .* remove {owner}'):
      open_writer(tmp_path)
  owner.unlink()
  open_writer(tmp_path).close()
  assert not owner.exists()


@pytest.mark.parametrize('ended', [False, True])
def test_one_start_takes_over_from_a_dead_one(tmp_path, monkeypatch, ended):
  """Where the file system has no locks, and three starts come at once.

  ended: the first has removed its file when the second asks whether it lives.
  """

  def flock(*_):
    raise OSError(errno.ENOTSUP, 'Operation not supported')

  monkeypatch.setattr(fcntl, 'flock', flock)
  dead = subprocess.Popen(['true'])
  dead.wait()
  owner, real = tmp_path / '.owner', folders._owner
  owner.write_text(json.dumps([socket.gethostname(), dead.pid]))
  with contextlib.ExitStack() as stack, futures.ThreadPoolExecutor() as threads:
    others = []

    def meanwhile(folder, text):
      found = real(folder, text)
      if not others:
        if ended:
          owner.unlink()
        others.append(folders.locked(tmp_path))
        threads.submit(stack.enter_context, others[0]).result()
      return found

    monkeypatch.setattr(folders, '_owner', meanwhile)
    with pytest.raises(RunError, match='in use'):
      stack.enter_context(folders.locked(tmp_path))
    assert real(tmp_path, owner.read_text())
  with folders.locked(tmp_path):
    assert real(tmp_path, owner.read_text())


def test_a_folder_is_made_where_nothing_else_is(tmp_path):
  folder, write = tmp_path / 'tokenizer', lambda x: (x / 'a').write_text('a')
  folders.make(folder, write)
  before = os.stat(folder / 'a')
  folders.make(folder, write)  # the same: it is left alone
  assert os.stat(folder / 'a').st_ino == before.st_ino
  other = lambda x: (x / 'b').write_text('b')
  folders.make(folder, other)
  assert (folder / 'b').read_text() == 'b' and not (folder / 'a').exists()
  (folder / '.ipynb_checkpoints').mkdir()
  (folder / '.ipynb_checkpoints' / 'b').write_text('of an editor')
  folders.make(folder, write)
  (folder / 'a').unlink()  # a location keeps no empty folders, nor leftovers
  folders.make(folder, write)
  (folder / 'a').write_text('changed')
  with pytest.raises(RunError, match='tokenizer is in the way'):
    folders.make(folder, write)
  shutil.rmtree(folder)
  folders.make(folder, write)
  (folder / 'notes').write_text('mine')
  mine = tmp_path / 'world', tmp_path / 'link', tmp_path / 'folder_of_links'
  mine[0].write_text('mine')
  mine[1].symlink_to(mine[0])
  mine[2].mkdir()
  (mine[2] / 'link').symlink_to(mine[0])
  for path in (folder, folder, *mine):
    with pytest.raises(RunError, match=f'{path.name} is in the way'):
      folders.make(path, write)
    (folder / '.made').unlink(missing_ok=True)
  assert (folder / 'notes').read_text() == mine[0].read_text() == 'mine'
  assert mine[1].is_symlink() and (mine[2] / 'link').is_symlink()


def test_what_no_run_wrote_stays(tmp_path):
  mine = tmp_path / 'backup' / 'step_00000003.parquet'
  records.write_text(mine, 'mine')
  model, other = tmp_path / 'config.json', tmp_path / 'environment.json'
  for path in (model, other):
    for text in ('{"name": "mine"}', '{"starts": [1]}', '[]', '{'):
      path.write_text(text)
      for start in (open_writer, lambda x: folders.locked_once(x).__enter__()):
        with pytest.raises(RunError, match=f'{path.name} is in the way'):
          start(tmp_path)
      assert path.read_text() == text
    path.unlink()
  steps = tmp_path / 'trajectories' / 'step_00000003.parquet'
  records.write_text(steps, 'mine')
  with pytest.raises(RunError, match=f'{steps.name} is in the way'):
    open_writer(tmp_path)
  steps.unlink()
  open_writer(tmp_path).close()
  assert mine.read_text() == 'mine'


def test_other_contents_are_refused_by_name(tmp_path):
  with open_writer(tmp_path, contents={'config.env.template': 'a1'}) as w:
    w.write(0, {})
  about = {'config.env.template': 'a1', 'config.data.train': 'b1'}
  with open_writer(tmp_path, step=1, contents=about) as w:
    w.write(1, {})
  open_writer(tmp_path, step=2).close()  # what is not known is kept
  message = 'config.data.train: b1.*b2'
  with pytest.raises(RunError, match=message):
    open_writer(tmp_path, step=2, contents=about | {'config.data.train': 'b2'})
  assert len(lines(tmp_path / 'metrics.jsonl')) == 2
  # A start that failed claims nothing.
  (tmp_path / 'metrics.jsonl').write_text('')
  open_writer(tmp_path, contents={'config.env.template': 'a2'}).close()
  with open_writer(tmp_path) as w:
    w.write(0, {})
  open_writer(tmp_path, contents={'config.env.template': 'a3'}).close()


@pytest.mark.parametrize('schedule', ['constant', 'linear'])
def test_a_run_gets_more_steps_if_no_schedule_ends_with_them(
  tmp_path, schedule
):
  c = config()
  c.optim.schedule, c.critic.schedule = schedule, 'cosine'  # without a critic
  c.train.steps = 3
  with open_writer(tmp_path, c, steps=3) as w:
    w.write(2, {})
  c.train.steps = 5
  if schedule == 'linear':
    message = "3 .*5 .*config.optim.schedule='linear'"
    with pytest.raises(RunError, match=message):
      open_writer(tmp_path, c, step=3, steps=5)
    return
  with open_writer(tmp_path, c, step=3, steps=5) as w:
    w.write(3, {})
  starts = json.loads((tmp_path / 'environment.json').read_text())['starts']
  assert starts[1]['config_changed'] == {'train.steps': [3, 5]}
  c.train.steps = 2
  with pytest.raises(RunError, match='4 steps: .* 5 '):
    open_writer(tmp_path, c, step=4, steps=2)
  c.train.steps = 0
  with pytest.raises(RunError, match='4 steps: .* 0 '):
    open_writer(tmp_path, c, step=4, steps=0)
  open_writer(tmp_path, c, step=4).close()  # of an evaluation


@pytest.mark.parametrize('again', [False, True])
def test_a_removed_folder_stops_its_run(tmp_path, again):
  folder = tmp_path / 'run'
  with contextlib.ExitStack() as stack:
    first = stack.enter_context(open_writer(folder))
    shutil.rmtree(folder)
    if again:  # another start has the folder now, and the lock
      stack.enter_context(open_writer(folder))
    for write in (first.write, first.trajectories):
      with pytest.raises(RunError, match='removed while'):
        write(0, {} if write == first.write else [])
  assert (
    not (folder / 'metrics.jsonl').exists()
    or not (folder / 'metrics.jsonl').read_text()
  )


def test_a_small_file_is_whole_or_absent(tmp_path, monkeypatch):
  path = tmp_path / 'summary.json'
  records.write_json(path, {'a': np.float32(1.5), 'b': (np.nan, np.int32(2))})
  assert json.loads(path.read_text()) == {'a': 1.5, 'b': [None, 2]}

  def full(*_):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(RunError, match='summary.json.*No space left'):
    records.write_json(path, {'a': 2})
  assert json.loads(path.read_text())['a'] == 1.5
  assert [p.name for p in tmp_path.iterdir()] == ['summary.json']


def test_timers_and_metrics(tmp_path):
  with open_writer(tmp_path) as w:
    for _ in range(2):
      with w.timer('rollout'):
        pass
    first = w.write(0, {'a': np.float32(2), 'flag': np.True_})
    second = w.write(1, {})
  assert first['a'] == 2.0 and first['flag'] == 1.0
  assert 0 <= first['time/rollout'] <= first['time/step']
  assert set(second) == {'time/step'}  # a phase counts in one step


def test_progress(tmp_path):
  out = io.StringIO()
  with writer.Writer(tmp_path / 'a', config(), steps=4, out=out) as w:
    w.progress(
      w.write(0, {'reward': 0.51234, 'speed': 12345.6}),
      reward='reward',
      em='reward/em',
      tokens_s='speed',
    )
  line = 'step 1/4  reward 0.512  tokens s 12,346  ETA 0:'
  assert out.getvalue().startswith(line)
  assert re.search(r' ETA [\d:]+ \([\d.e-]+ s a step\)\n$', out.getvalue())
  out = io.StringIO()
  with writer.Writer(tmp_path / 'c', config(progress=False), out=out) as w:
    w.progress(w.write(0, {}))
  assert not out.getvalue()


def test_tensorboard(tmp_path):
  c = config(tensorboard=True)
  for step in (0, 1):
    with open_writer(tmp_path, c, step=step) as w:
      w.write(step, {'a/b': 1.5 + step, 'nan': float('nan')})
  from tensorboard.backend.event_processing import event_accumulator

  board = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  board.Reload()
  assert 'nan' not in board.Tags()['scalars']
  points = [(e.step, e.value) for e in board.Scalars('a/b')]
  assert points == [(0, 1.5), (1, 2.5)]


def test_tensorboard_shows_trajectories_as_text(tmp_path):
  with open_writer(tmp_path, config(tensorboard=True)) as w:
    w.decode = lambda ids: f'<search>\n*{len(list(ids))}*'
    w.trajectories(2, [[trajectory(i) for i in range(5)]], name='eval')
  from tensorboard.backend.event_processing import event_accumulator

  board = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  board.Reload()
  assert board.Tags()['tensors'] == ['eval/0', 'eval/1', 'eval/2']
  [event] = board.Tensors('eval/1')
  length = sum(len(s.ids) for s in trajectory(1).segments)
  text = event.tensor_proto.string_val[0].decode()
  # A code block: neither a tag nor an emphasis of Markdown.
  assert text == f'    reward None\n    <search>\n    *{length}*'
  assert event.step == 2


@pytest.mark.long
@pytest.mark.timeout(120)
def test_wandb_offline(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  with open_writer(tmp_path, config(wandb='offline')) as w:
    w.write(0, {'a': 1.0})
  assert list((tmp_path / 'wandb').glob('offline-run-*/*.wandb'))
  assert (tmp_path / 'wandb_id.txt').read_text().strip()


@pytest.mark.long
def test_the_machine_decides_about_wandb(tmp_path, monkeypatch):
  monkeypatch.setenv('WANDB_MODE', 'offline')
  with open_writer(tmp_path / 'a', config(wandb='disabled')):
    pass
  assert (tmp_path / 'a' / 'wandb').exists()
  monkeypatch.setenv('WANDB_MODE', 'disabled')
  with open_writer(tmp_path / 'b', config(wandb='online')):
    pass
  assert not (tmp_path / 'b' / 'wandb').exists()


def test_a_refusal_of_wandb_is_an_error_of_the_run(tmp_path, monkeypatch):
  import wandb

  def refuse(**_):
    raise wandb.errors.UsageError('api_key not configured')

  monkeypatch.setattr(wandb, 'init', refuse)
  monkeypatch.delenv('WANDB_MODE', raising=False)
  with pytest.raises(RunError, match="log.wandb='online'.*api_key"):
    open_writer(tmp_path, config(wandb='online'))


def test_environment_names_the_commit_where_there_is_one():
  found = writer.environment()
  commit = writer._git('rev-parse HEAD')
  assert found['commit'] == commit and found['python']
  json.dumps(found)
