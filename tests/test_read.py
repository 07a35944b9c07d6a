"""Run folders as data frames, and folders that cannot be read."""

import dataclasses
import json

import numpy as np
import pytest

from searchrl_jax import read
from searchrl_jax.evaluate import files, grading
from searchrl_jax.store import records
from searchrl_jax.store.records import RunError
from tests import viewed


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('runs') / 'read'
  viewed.write_run(folder, steps=3, count=4, group=2)
  return read.run(folder)


def test_metrics_by_step(run):
  frame = run.metrics
  assert [*frame.index] == [-1, 0, 1, 2] and frame.index.name == 'step'
  assert frame['eval/em'].tolist() == [0.25, 0.3, 0.4, 0.5]
  assert np.isnan(frame['train/loss'][-1]) and frame.dtypes.eq(float).all()
  assert run.config.rollout.group == 2
  assert run.starts[0]['packages']['jax']


def test_a_row_for_each_trajectory(run):
  written = [*records.read(run.folder / 'trajectories')]
  frame = run.trajectories()
  assert len(frame) == 24 == len(written)
  assert run.parts == {'trajectories': [0, 1, 2]}
  assert frame.reward.tolist() == [r.reward for r in written]
  assert frame.em.tolist() == [r.reward for r in written]  # it is EM here
  assert frame['reward/em'].equals(frame.reward)
  right = frame[frame.em == 1].iloc[0]
  assert right.answer == right.answers[0] and right.searches == 1
  first = written[0].trajectory
  assert frame.tokens[0] == len(first)
  assert frame.sampled[0] == sum(
    len(s.ids) for s in first.segments if s.author == 'policy'
  )
  assert (
    frame.groupby(['step', 'question_id']).advantage.sum().abs() < 1e-3
  ).all()
  assert {*run.trajectories(steps=[1, 7]).step} == {1}


def test_a_row_for_each_segment_and_token(run):
  """The texts of tokens make up those of segments, also within a character."""
  written = [*run.records(steps=[2])]
  segments, tokens = run.segments(steps=[2]), run.tokens(steps=[2])
  assert len(segments) == sum(len(r.trajectory.segments) for r in written)
  assert len(tokens) == sum(len(r.trajectory) for r in written)
  joined = tokens.groupby(['id', 'segment']).text.sum()
  assert joined.equals(segments.set_index(['id', 'segment']).text.sort_index())
  own = tokens[tokens.author == 'policy']
  assert (
    own.in_loss.all() and not tokens[tokens.author != 'policy'].in_loss.any()
  )
  assert (own.version == 2).all()
  assert tokens[tokens.author == 'prompt'].logp.isna().all()
  logps = np.concatenate(
    [s.logps for r in written for s in r.trajectory.segments if s.train]
  )
  np.testing.assert_array_equal(own.logp, logps)
  assert (own.trainer_logp - own.logp).abs().between(0, 0.2).all()
  ids = np.array(run.tokenizer.encode('naïve 東京 🙂'), np.int32)
  assert len(ids) > 11  # bytes of characters are tokens of their own
  assert ''.join(run.pieces(ids)) == 'naïve 東京 🙂'
  assert ''.join(run.pieces(ids[:-1])).endswith('\ufffd')


def test_what_the_trainer_saw_in_place_of_the_sample(tmp_path):
  tok, made = viewed.write_run(tmp_path, steps=0, open_=True)
  q, p = viewed.questions(1)[0]
  rng = np.random.default_rng(0)
  t = viewed.attempt(tok, q, p, rng)
  t = dataclasses.replace(t, train_context=(t.segments[0], t.segments[-1]))
  made.trajectories(
    0, [(t,)], None, kept=[True], advantages=[np.ones(len(t))],
    trainer_logps=None,
  )  # fmt: skip
  made.close()
  run = read.run(tmp_path)
  assert len(run.segments()) == 6 and len(run.segments(trained=True)) == 2
  assert run.tokens().advantage.isna().all()
  assert run.tokens(trained=True).in_loss.sum() == len(t.segments[-1].ids)


def test_a_row_for_each_passage(run):
  frame = run.searches(steps=[0])
  assert (
    len(frame) == 8 and frame.supporting.all() and (frame['rank'] == 0).all()
  )
  q, p = viewed.questions(1)[0]
  first = frame.iloc[0]
  assert first.id == f'{q.id}/solver/0'
  assert (first.passage, first.title, first.text) == (p.id, p.title, p.text)


def test_rows_of_evaluations(tmp_path):
  viewed.write_run(tmp_path, steps=1)
  with pytest.raises(RunError, match='`evaluate`'):
    read.run(tmp_path).evaluations()
  rows = [
    grading.Row('dev', f'q{i}', 's', 1, 0, False, None, em=i / 2)
    for i in range(3)
  ]
  for where, names in (('a', ('eval',)), ('b', ('eval', 'shuffled'))):
    found = {n: grading.Evaluation([], rows, [], 0.0) for n in names}
    files.write_rows(tmp_path / where, found)
  frame = read.run(tmp_path).evaluations()
  assert (
    frame.groupby(['folder', 'evaluation'], sort=False).em.sum().tolist()
    == [1.5] * 3
  )
  assert [f.rsplit('/')[-1] for f in frame.folder.unique()] == ['a', 'b']


def test_what_is_no_run(tmp_path):
  with pytest.raises(RunError, match='nowhere: '):
    read.run(tmp_path / 'nowhere')
  with pytest.raises(RunError, match='no config.json.*--workdir'):
    read.run(tmp_path)


def test_a_run_that_is_being_written(tmp_path):
  tok, made = viewed.write_run(tmp_path, steps=2, open_=True)
  with pytest.raises(RunError, match='live=True'):
    read.run(tmp_path)
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "rew')
  assert [*read.run(tmp_path, live=True).metrics.index] == [-1, 0, 1]
  made.close()
  with pytest.raises(RunError, match='within a line'):
    _ = read.run(tmp_path).metrics


def test_what_was_cut_off_or_is_of_another_version(tmp_path):
  viewed.write_run(tmp_path, steps=1)
  path = tmp_path / 'trajectories' / 'step_00000000.parquet'
  data = path.read_bytes()
  run = read.run(tmp_path)
  with pytest.raises(RunError, match="'eval'.*: trajectories"):
    run.trajectories('eval')
  path.write_bytes(data[: len(data) // 2])
  with pytest.raises(RunError, match='0000.parquet.*environment.json'):
    run.trajectories()
  import pyarrow.parquet as pq

  path.write_bytes(data)
  pq.write_table(pq.read_table(path).drop_columns(['earned_at', 'kept']), path)
  assert run.trajectories().kept.isna().all()  # columns that came later
  pq.write_table(pq.read_table(path).drop_columns(['segments']), path)
  with pytest.raises(RunError, match='0000.parquet.*environment.json'):
    run.trajectories()
  text = (tmp_path / 'config.json').read_text()
  (tmp_path / 'config.json').write_text(text[:100])
  with pytest.raises(RunError, match='config.json.*environment.json'):
    read.run(tmp_path)
  old = json.loads(text)
  old['optim']['lr'] = 'fast'
  (tmp_path / 'config.json').write_text(json.dumps(old))
  with pytest.raises(RunError, match='config.json.*environment.json'):
    read.run(tmp_path)
  (tmp_path / 'config.json').write_text(text)
  (tmp_path / 'metrics.jsonl').write_text('{"loss": 1}\n')
  with pytest.raises(RunError, match='metrics.jsonl:1'):
    _ = read.run(tmp_path).metrics
