"""The loop end to end on a tiny model and a real retrieval server."""

import base64
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import quickstart, ssp
from experiments.ssp import train as selfplay
from retrieval import devices
from searchrl_jax import checks, sft, train
from searchrl_jax.data.checks import DataError
from searchrl_jax.devices import cluster, signals
from searchrl_jax.engines.core import SyncError
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.learn import objectives, update
from searchrl_jax.models import parameters
from searchrl_jax.rollout import collector
from searchrl_jax.rollout.core import RolloutError
from searchrl_jax.run import build, services
from searchrl_jax.run.session import Session
from searchrl_jax.sources.core import SourceError
from searchrl_jax.sources.service import ServiceSource
from searchrl_jax.store import checkpoint, folders, records
from searchrl_jax.store.progress import Progress
from searchrl_jax.store.records import RunError
from searchrl_jax.text import prompts
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]


def params_of(config, workdir, which='latest'):
  tok = build.tokenizer(config, str(workdir))
  cfg = parameters.model_config(config, tok.vocab_size)
  mesh = build.mesh(config)
  found = parameters.restore(config, str(workdir), cfg, mesh, which)
  return jax.tree.map(np.asarray, found)


def lines(path):
  return [json.loads(line) for line in pathlib.Path(path).open()]


@pytest.fixture(scope='module')
def whole(url, tmp_path_factory):
  """An uninterrupted run: (config, folder, parameters)."""
  folder = tmp_path_factory.mktemp('whole')
  config = tiny.config(url)
  train.train(config, str(folder))
  return config, folder, params_of(config, folder)


def test_a_run_leaves_everything_behind(whole):
  config, folder, params = whole
  steps = lines(folder / 'metrics.jsonl')
  assert [s['step'] for s in steps] == [-1, 0, 1, 2]
  assert 'eval/em' in steps[0] and 'eval/em' in steps[-1]
  for name in (
    'train/entropy',
    'train/grad_norm',
    'train/clip_high',
    'train/mfu',
    'train/mismatch_max',
    'train/mismatch_kl/decile=9',
    'train/mismatch_kl/turn=0',
    'time/rollout',
    'time/update',
    'health/repetition',
    'health/searches',
    'batch/groups_zero_variance',
    'reward',
  ):
    assert name in steps[-1], name
  kept = [*records.read(folder / 'trajectories')]
  assert len(kept) == 3 * 4 * 2
  assert {r.step for r in kept} == {0, 1, 2}
  for r in kept:
    learnt = np.concatenate(
      [np.full(len(s.ids), s.train) for s in r.trajectory.segments]
    )
    assert r.kept and r.reward is not None and learnt.any()
    assert (np.isfinite(r.advantages) == learnt).all()
    # One update a step: the trainer had no reason to score.
    assert r.trainer_logps is None
  started = params_of_fresh(config, folder)
  assert any(
    (a != b).any()
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(started))
  ), 'training changed nothing'


def test_a_log_tells_what_comes_and_every_long_phase(
  url, tmp_path, monkeypatch, capsys
):
  for name in ('every', 'tick'):  # so that a phase of 10 ms is a long one
    monkeypatch.setattr(Progress, name, 0.001)
  config = tiny.config(url)
  config.log.progress = True
  train.train(config, str(tmp_path))
  told = capsys.readouterr().err
  (begin,) = re.findall(r'^train of .*', told, re.M)
  assert f'in {tmp_path}: steps 1 to 3, ' in begin
  assert re.search(r'a step is \d+ questions x \d+ trajectories', begin)
  for name in ('compile', 'eval', r'step \d/3 rollout', r'step \d/3 update'):
    assert re.search(f'^{name}: ', told, re.M), name
  assert re.search(r'^step 1/3  .*\(\S+ s a step\)$', told, re.M)


def params_of_fresh(config, folder):
  tok = build.tokenizer(config, str(folder))
  cfg = parameters.model_config(config, tok.vocab_size)
  found = parameters.initial(config, cfg, build.mesh(config))
  return jax.tree.map(np.asarray, found)


def test_a_run_keeps_its_programs(monkeypatch, caplog):
  def keep(folder):
    calls.append(folder)
    raise PermissionError('others may write')

  calls = []
  monkeypatch.setattr(devices, 'keep_programs', keep)
  build.mesh(tiny.config())  # a folder that cannot be used stops no run
  assert len(calls) == 1
  assert caplog.text.count('are not kept: others may write') == 1


class Killed(BaseException):
  """Stands for a kill: nothing in the loop catches it."""


@pytest.mark.parametrize('where', ['update', 'rollout', 'save'])
def test_resume_is_bitwise(whole, tmp_path, monkeypatch, programs, where):
  config, folder, params = whole
  with monkeypatch.context() as m:
    owner, name, nth = {
      'update': (update.Updater, 'step', 2),
      'rollout': (collector, 'rollout', 3),
      'save': (checkpoint.Checkpointer, 'save', 2),
    }[where]
    real, calls = getattr(owner, name), []

    def killed(*args, **kw):
      calls.append(1)
      if len(calls) == nth:
        raise Killed
      return real(*args, **kw)

    m.setattr(owner, name, killed)
    with pytest.raises(Killed):
      train.train(config, str(tmp_path))
  if where == 'update':  # its own programs, as in a process of its own
    programs.clear()
  train.train(config, str(tmp_path))
  resumed = params_of(config, tmp_path)
  for path, a in jax.tree_util.tree_leaves_with_path(params):
    b = resumed
    for k in path:
      b = b[k.key]
    np.testing.assert_array_equal(a, b, err_msg=str(path))

  def sampled(where):
    return [
      (r.step, r.trajectory.id, [s.ids.tolist() for s in r.trajectory.segments])
      for r in records.read(where / 'trajectories')
    ]

  assert sampled(folder) == sampled(tmp_path)


def test_resume_after_a_signal_in_a_rollout_is_bitwise(
  whole, tmp_path, monkeypatch
):
  """With no checkpoint but the one that the signal makes."""
  config, folder, params = whole
  config = config.copy_and_resolve_references()
  config.checkpoint.every = 0
  real, calls = collector.rollout, []

  async def interrupted(*args, **kw):
    calls.append(1)
    if len(calls) == 2:
      os.kill(os.getpid(), signal.SIGTERM)
    return await real(*args, **kw)

  with monkeypatch.context() as m:
    m.setattr(collector, 'rollout', interrupted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(signals.Stopped):
      train.train(config, str(tmp_path))
    assert signal.getsignal(signal.SIGTERM) == before
  assert checkpoint.of_run(config, str(tmp_path)).latest() == 1
  train.train(config, str(tmp_path))
  resumed = params_of(config, tmp_path)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(resumed)):
    np.testing.assert_array_equal(a, b)


def test_an_evaluation_that_a_signal_prevents_is_made_at_the_resume(
  whole, tmp_path, monkeypatch
):
  config, folder, _ = whole
  real, calls = update.Updater.step, []

  def interrupted(*args, **kw):
    calls.append(1)
    if len(calls) == config.train.steps:  # after it, an evaluation is due
      os.kill(os.getpid(), signal.SIGTERM)
    return real(*args, **kw)

  with monkeypatch.context() as m:
    m.setattr(update.Updater, 'step', interrupted)
    with pytest.raises(signals.Stopped, match='after step 3'):
      train.train(config, str(tmp_path))
  metrics = tmp_path / 'metrics.jsonl'
  before, want = lines(metrics), lines(folder / 'metrics.jsonl')[-1]
  assert 'eval/em' not in before[-1]
  saver = checkpoint.Checkpointer(tmp_path / 'checkpoints', 9, 'eval/em')
  assert saver.best() is None
  found = train.train(config, str(tmp_path))
  after = lines(metrics)
  assert after[:-1] == before[:-1] and before[-1].items() <= after[-1].items()
  scores = {k: v for k, v in want.items() if k.startswith('eval/')}
  assert 'eval/em' in scores and scores.items() <= after[-1].items()
  assert {*found} >= {*scores, 'reward'}
  assert saver.best() == 3
  # It is made once.
  with monkeypatch.context() as m:
    m.setattr(train.grading, 'Evaluator', lambda *a, **kw: Fails(no_run))
    train.train(config, str(tmp_path))
  assert lines(metrics) == after


def no_run(evaluator, step):
  raise AssertionError(f'an evaluation of step {step}')


def test_a_failed_sync_loses_nothing_of_its_step(url, tmp_path, monkeypatch):
  config = tiny.config(url)
  config.checkpoint.every = 0
  real = train.sync.sync_and_verify

  async def fails(engine, params, version, *args):
    if version == 2:
      raise SyncError('tensor x differs')
    return await real(engine, params, version, *args)

  monkeypatch.setattr(train.sync, 'sync_and_verify', fails)
  with pytest.raises(SyncError, match='tensor x'):
    train.train(config, str(tmp_path))
  assert checkpoint.of_run(config, str(tmp_path)).latest() == 2
  steps = [s['step'] for s in lines(tmp_path / 'metrics.jsonl')]
  assert steps[-2:] == [0, 1]


@pytest.mark.long
def test_more_steps_continue_as_if_they_had_been_asked_for(whole, tmp_path):
  config, folder, params = whole
  fewer = config.copy_and_resolve_references()
  fewer.train.steps = 1
  train.train(fewer, str(tmp_path))
  train.train(config, str(tmp_path))
  resumed = params_of(config, tmp_path)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(resumed)):
    np.testing.assert_array_equal(a, b)


EXPERTS = dict(
  model_type='qwen3_moe',
  architectures=('Qwen3MoeForCausalLM',),
  moe_intermediate_size=64,
  norm_topk_prob=True,
  num_experts=4,
  num_experts_per_tok=2,
)


@pytest.mark.long
@pytest.mark.parametrize(
  'arch', [quickstart.HYBRID, EXPERTS], ids=['delta', 'experts']
)
def test_other_layers_train_and_resume(arch, url, tmp_path):
  config = tiny.config(url)
  config.model.arch.update(arch)
  if arch is EXPERTS:  # a reference and later updates of a step take them too
    config.engine.record_routes = True
    config.algorithm.update(kl='loss', kl_coef=0.1, minibatches=2, epochs=2)
  found = []
  for name, steps in (('whole', (2,)), ('resumed', (1, 2))):
    for config.train.steps in steps:
      train.train(config, str(tmp_path / name))
    found.append(params_of(config, tmp_path / name))
  for a, b in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_array_equal(a, b)
  for step in lines(tmp_path / 'whole' / 'metrics.jsonl'):
    assert step.get('train/mismatch_max', 0.0) < 1e-3
    assert step.get('train/finite', 1.0) == 1.0
    assert step.get('train/routes_unknown', 0.0) == 0.0
    if arch is EXPERTS and 'train/finite' in step:
      assert step['train/routes_differ'] < 0.2


def test_experts_that_are_not_there_are_not_recorded(url, tmp_path):
  config = tiny.config(url)
  config.engine.record_routes = True
  with pytest.raises(checks.ConfigError, match='record_routes.* no experts'):
    train.train(config, str(tmp_path))


def test_what_a_config_names_by_path_is_compared_at_a_resume(url, tmp_path):
  config, folder = tiny.config(url), str(tmp_path / 'run')
  template = tmp_path / 'mine.json'
  base = (prompts.TEMPLATES / f'{config.env.template}.json').read_text()
  template.write_text(base)
  asked = tmp_path / 'asked.jsonl'
  rows = [
    {'id': i, 'question': f'who {i} ?', 'golden_answers': ['drummer']}
    for i in range(4)
  ]

  def write(rows):
    asked.write_text('\n'.join(map(json.dumps, rows)))

  write(rows)
  config.env.template, config.train.steps = str(template), 1
  config.data.train = ConfigDict(
    dict(mine=dict(module='jsonl', path=str(asked)))
  )
  config.data.eval = ConfigDict()
  train.train(config, folder)
  config.train.steps = 2
  before = (tmp_path / 'run/metrics.jsonl').read_text()
  template.write_text(json.dumps(json.loads(base) | {'invalid': 'No.'}))
  other = 'was made with another content of config.{}: \\w+ there and \\w+ now'
  with pytest.raises(RunError, match=other.format('env.template')):
    train.train(config, folder)
  template.write_text(base)
  write([*rows[1:], rows[0] | {'golden_answers': ['singer']}])
  with pytest.raises(DataError, match='other questions'):  # in another order
    train.train(config, folder)
  write([rows[0] | {'golden_answers': ['singer']}, *rows[1:]])
  with pytest.raises(RunError, match=other.format('data.train')):
    train.train(config, folder)
  assert (tmp_path / 'run/metrics.jsonl').read_text() == before
  write(rows)
  train.train(config, folder)


@pytest.mark.long
def test_a_second_start_at_any_moment_touches_nothing(
  url, tmp_path, monkeypatch
):
  """Before each step of a start another process starts in the same folder."""
  config, other = tiny.config(url), tiny.config(url)
  config.train.steps = 1
  config.source.update(url='', corpus='world')
  other.model.update(tokenizer='bpe', bpe_vocab=300)
  other.source.update(url='', corpus='world')

  def files():
    # What the first start writes by the way is left out.
    apart = {*records.PARTS, 'retrieval.log'}
    paths = [p for p in tmp_path.rglob('*') if p.is_file()]
    paths = [p for p in paths if not apart & {*p.relative_to(tmp_path).parts}]
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in paths}

  refused = []

  def watch(owner, name):
    real = getattr(owner, name)

    def call(*args, **kw):
      with monkeypatch.context() as m:
        m.setattr(folders, '_held', {})  # as another process has it
        for again in (config, other):
          before = files()
          with pytest.raises(RunError, match='in use by another process'):
            train.train(again, str(tmp_path))
          assert files() == before
      refused.append(name)
      return real(*args, **kw)

    monkeypatch.setattr(owner, name, call)

  for owner, name in (
    (train.data, 'open_stream'),
    (build, 'tokenizer'),
    (parameters, 'model_config'),
    (checkpoint.Checkpointer, 'latest'),
    (parameters, 'initial'),
    (build, 'corpus'),
    (services, 'source'),
    (services, 'engine'),
    (Session, 'begin'),
    (update.Updater, 'step'),
    (checkpoint.Checkpointer, 'save'),
  ):
    watch(owner, name)
  train.train(config, str(tmp_path))
  assert len({*refused}) == 11
  assert [s['step'] for s in lines(tmp_path / 'metrics.jsonl')] == [-1, 0]


@pytest.mark.parametrize('loop', ['train', 'sft', 'selfplay', 'evaluate'])
def test_every_loop_locks_its_folder_first(tmp_path, loop):
  config, folder = tiny.config('http://127.0.0.1:9'), str(tmp_path)
  start = {
    'train': lambda: train.train(config, folder),
    'sft': lambda: sft.sft(config, folder),
    'selfplay': lambda: selfplay.train(ssp.get_config(), folder),
    'evaluate': lambda: evaluate.evaluate(config, '', folder),
  }[loop]
  with open(tmp_path / '.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(RunError, match='in use by another process'):
      start()
  assert [path.name for path in tmp_path.iterdir()] == ['.lock']


def test_another_corpus_is_not_trained_on(whole, tmp_path, monkeypatch):
  config, folder, _ = whole
  shutil.copytree(folder, tmp_path / 'run')
  real = ServiceSource.check

  async def moved(self):
    said = dict(await real(self))
    corpus = dict(said['identity']['corpus'], sha256='0' * 64)
    return said | {'identity': said['identity'] | {'corpus': corpus}}

  monkeypatch.setattr(ServiceSource, 'check', moved)
  with pytest.raises(SourceError, match='corpus: .*sha256.* before, .*0000'):
    train.train(config, str(tmp_path / 'run'))


@pytest.mark.long
def test_a_dead_service_stops_the_run_and_saves(tmp_path):
  config = tiny.config()
  config.source.attempts = 1
  config.source.deadline = 2.0
  # Every trajectory searches: the prompt's last words are forced by a policy
  # that stops at once and an environment that takes anything for a search.
  with services.retrieval(_with_corpus(config), str(tmp_path)) as url:
    config.source.url = url
    real = collector.rollout

    async def dead(*args, **kw):
      kw['source'] = Dead()
      kw['env'] = AlwaysSearching(kw['env'])
      return await real(*args, **kw)

    with pytest.MonkeyPatch.context() as m:
      m.setattr(collector, 'rollout', dead)
      with pytest.raises(RolloutError, match='no route'):
        train.train(config, str(tmp_path))
  assert checkpoint.of_run(config, str(tmp_path)).latest() == 0
  assert [s['step'] for s in lines(tmp_path / 'metrics.jsonl')] == [-1]
  # What had ended is there to be looked at.
  ended = [*records.read(tmp_path / 'trajectories')]
  assert ended and {r.step for r in ended} == {0}
  assert any(r.trajectory.failed for r in ended)


def _with_corpus(config):
  config.source.corpus = 'world'
  return config


class Dead:
  """A source that answers nothing."""

  async def search(self, requests):
    from searchrl_jax.types import SearchError

    return [SearchError(r, 'unreachable', 'no route') for r in requests]


class AlwaysSearching:
  """An environment whose every turn asks for a search."""

  def __init__(self, env):
    self._env = env

  def __getattr__(self, name):
    return getattr(self._env, name)

  def step(self, state, event):
    from searchrl_jax.engines.core import Completion
    from searchrl_jax.text import env as envs
    from searchrl_jax.types import SearchRequest

    if not isinstance(event, Completion):
      return self._env.step(state, event)
    import dataclasses

    request = SearchRequest('x', 1, state.question)
    action = envs.Search((request,))
    return dataclasses.replace(state, pending=action), action


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_with_the_batch(
  url, tmp_path, monkeypatch
):
  config = tiny.config(url)
  real = objectives.policy

  def poisoned(config):
    import dataclasses

    found = real(config)

    def fn(logps, entropy, arrays):
      loss, sums = found.fn(logps, entropy, arrays)
      return loss * np.nan, sums

    return dataclasses.replace(found, fn=fn)

  monkeypatch.setattr(objectives, 'policy', poisoned)
  with pytest.raises(signals.NonFinite, match='nonfinite_step0'):
    train.train(config, str(tmp_path))
  with np.load(tmp_path / 'nonfinite_step0.npz') as kept:
    assert kept['0/ids'].shape == (4, 96)
    # What the update was given, advantages and all.
    assert any(kept[k].any() for k in kept if k.endswith('/advantages'))


def test_another_runs_folder_is_refused(whole, url):
  config, folder, _ = whole
  other = tiny.config(url)
  other.optim.lr = 0.5
  with pytest.raises(RunError, match='optim.lr'):
    train.train(other, str(folder))


def test_evaluation_repeats_itself(whole, tmp_path):
  config, folder, _ = whole
  first = evaluate.evaluate(config, str(folder), str(tmp_path / 'a'))
  again = config.copy_and_resolve_references()
  again.engine.slots = 2  # another schedule, the same trajectories
  second = evaluate.evaluate(again, str(folder), str(tmp_path / 'b'))
  assert first == second

  def ids(name):
    return [
      [s.ids.tolist() for s in r.trajectory.segments]
      for r in records.read(tmp_path / name / 'eval')
    ]

  assert ids('a') == ids('b')
  last = lines(folder / 'metrics.jsonl')[-1]
  assert first['eval/tokens'] == last['eval/tokens']


def test_processes_take_the_checkpoint_that_the_first_finds(whole, monkeypatch):
  """Of a run that goes on, each might find another one to be the latest."""
  config, folder, params = whole
  saver = checkpoint.of_run(config, str(folder))
  *_, before, latest = saver.steps()
  older = params_of(config, folder, before)
  digests = [parameters.digest(str(folder), n) for n in (before, latest)]

  def first(what, work):
    found = work()
    pairs = (latest, before), ((latest, digests[1]), (before, digests[0]))
    return next((old for new, old in pairs if found == new), found)

  monkeypatch.setattr(cluster, 'first', first)
  about = evaluate.asked(config, str(folder)).about
  assert about['--checkpoint'] == before
  assert about['weights'] == digests[0] != digests[1]
  found = jax.tree.leaves(params_of(config, folder))
  for a, b in zip(jax.tree.leaves(older), found, strict=True):
    np.testing.assert_array_equal(a, b)
  pairs = zip(jax.tree.leaves(params), found, strict=True)
  assert any((a != b).any() for a, b in pairs)


@pytest.mark.parametrize(
  'change, message',
  [
    (('rollout.group', 1), 'rollout.group'),
    (('rollout.top_p', 0.9), 'top_p'),
    (('rollout.temperature', 0.0), 'temperature'),
    (('algorithm.advantage', 'grppo'), "did you mean 'grpo'"),
    (('algorithm.kl', 'los'), "did you mean 'loss'"),
    (('algorithm.kl_coef', 0.1), "kl='none' with kl_coef=0.1"),
    (('batch.lengths', (8, 16)), 'batch.lengths'),
    (('engine.max_len', 16), 'engine.max_len'),
    (('algorithm.minibatches', 99), 'minibatches'),
    (('algorithm.advantage_kw', {'epss': 1e-3}), "epss.*did you mean 'eps'"),
    (('algorithm.kl', 'reward'), 'noise'),
  ],
)
def test_what_cannot_work_is_refused_at_the_start(change, message):
  config = tiny.config('http://127.0.0.1:9')
  config.update_from_flattened_dict({change[0]: change[1]})
  with pytest.raises(ValueError, match=message):
    checks.check(config)


def test_a_prompt_that_is_too_long_is_found_at_the_start(url, tmp_path):
  config = tiny.config(url)
  config.env.max_tokens = 8
  with pytest.raises(checks.ConfigError, match=r'\d+ of \d+ questions cannot'):
    train.train(config, str(tmp_path))
  assert not (tmp_path / 'metrics.jsonl').exists()


def test_without_questions_to_evaluate(url, tmp_path):
  config = tiny.config(url)
  config.data.eval = ConfigDict()
  config.train.steps = 1
  metrics = train.train(config, str(tmp_path))
  assert 'reward' in metrics and not any('eval' in k for k in metrics)


@pytest.mark.parametrize('where', ['rollout', 'evaluation'])
def test_the_first_error_is_reported_if_saving_fails_too(
  url, tmp_path, monkeypatch, where
):
  config = tiny.config(url)
  config.eval.every = 1 if where == 'evaluation' else 0
  if where == 'rollout':

    async def fails(*args, **kw):
      raise RolloutError('the service is gone')

    monkeypatch.setattr(collector, 'rollout', fails)
  else:

    def fails(evaluator, step):
      if step >= 0:
        raise RolloutError('the service is gone')
      return {}

    monkeypatch.setattr(
      train.grading, 'Evaluator', lambda *a, **kw: Fails(fails)
    )

  def full(*args, **kw):
    raise checkpoint.CheckpointError('the disk is full')

  monkeypatch.setattr(checkpoint.Checkpointer, 'save', full)
  with pytest.raises(RolloutError, match='is gone') as caught:
    train.train(config, str(tmp_path))
  assert 'the disk is full' in caught.value.__notes__[0]


def test_a_failed_evaluation_loses_nothing_of_its_step(
  url, tmp_path, monkeypatch
):
  config = tiny.config(url)
  config.eval.every = 2

  def fails(evaluator, step):
    if step < 0:
      return iter(())
    raise RolloutError('the service is gone')

  monkeypatch.setattr(train.grading, 'Evaluator', lambda *a, **kw: Fails(fails))
  with pytest.raises(RolloutError, match='is gone'):
    train.train(config, str(tmp_path))
  assert checkpoint.of_run(config, str(tmp_path)).latest() == 2
  steps = [s['step'] for s in lines(tmp_path / 'metrics.jsonl')]
  assert steps[-2:] == [0, 1]
  kept = {r.step for r in records.read(tmp_path / 'trajectories')}
  assert kept == {0, 1}


class Fails:
  def __init__(self, run):
    self._run = run

  def sampled(self, step, values):
    return {}

  def run(self, step):
    return self._run(self, step)


def test_an_absent_server_is_named(tmp_path):
  config = tiny.config('http://127.0.0.1:9')
  config.source.attempts = 1
  with pytest.raises(SourceError, match='127.0.0.1:9'):
    train.train(config, str(tmp_path))


# --- Steps ahead.


@pytest.fixture(scope='module')
def stale(url, tmp_path_factory):
  folder = tmp_path_factory.mktemp('stale')
  config = tiny.config(url)
  config.rollout.max_staleness = 2
  config.train.steps = 5
  train.train(config, str(folder))
  return config, folder


def test_rollouts_run_ahead_and_say_which_weights_wrote_what(stale):
  config, folder = stale
  steps = lines(folder / 'metrics.jsonl')[1:]
  assert [s['step'] for s in steps] == [0, 1, 2, 3, 4]
  kept = [*records.read(folder / 'trajectories')]
  names = {(r.step, r.trajectory.id) for r in kept}
  assert len(names) == len(kept) == 5 * 4 * 2
  for r in kept:
    for s in r.trajectory.segments:
      if s.author == 'policy':
        assert (np.diff(s.versions) >= 0).all()
        assert r.step - 2 <= s.versions.min()
        assert s.versions.max() <= r.step
  assert sum(s['staleness/max'] for s in steps) > 0
  for s in steps:
    assert s['staleness/max'] <= 2
    shares = [s[f'staleness/share_{n}'] for n in range(3)]
    assert sum(shares) == pytest.approx(1)
    assert {
      'time/engine_idle',
      'time/rollout',
      'train/mismatch_ess',
      'train/mismatch_abs',
      'train/mismatch_max',
      'train/mismatch_outside',
    } <= s.keys()


@pytest.mark.long
def test_a_killed_run_uses_what_had_ended_once(url, tmp_path, monkeypatch):
  """Trajectories of the checkpoint are those trained on, not others."""
  config = tiny.config(url)
  config.rollout.max_staleness = 2
  config.train.steps = 4
  real, calls = update.Updater.step, []

  def killed(*args, **kw):
    calls.append(1)
    if len(calls) == 2:
      # All that may have begun by now, and was not used yet.
      raise Killed
    return real(*args, **kw)

  with monkeypatch.context() as m:
    m.setattr(update.Updater, 'step', killed)
    with pytest.raises(Killed):
      train.train(config, str(tmp_path))
  saver = checkpoint.of_run(config, str(tmp_path))
  ended = base64.b64decode(saver.meta(1)['extras']['ended'])
  saved = [*records.read(ended)]
  assert saved and {r.step for r in saved} <= {1, 2}
  train.train(config, str(tmp_path))
  kept = {
    (r.step, r.trajectory.id): r.trajectory.segments
    for r in records.read(tmp_path / 'trajectories')
  }
  assert len(kept) == 4 * 4 * 2
  for r in saved:
    for a, b in zip(
      kept[r.step, r.trajectory.id], r.trajectory.segments, strict=True
    ):
      assert (a.ids == b.ids).all()


def test_the_alarm_pauses_with_a_checkpoint(url, tmp_path):
  config = tiny.config(url)
  config.rollout.mismatch_alarm = 1e-12
  with pytest.raises(signals.Mismatch, match='mismatch_alarm=1e-12'):
    train.train(config, str(tmp_path))
  assert checkpoint.of_run(config, str(tmp_path)).latest() == 1
  config.rollout.mismatch_alarm = 0.0
  # The same folder goes on once the alarm is raised.
  train.train(config, str(tmp_path))
