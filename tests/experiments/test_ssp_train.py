"""The self-play loop end to end, on a tiny model whose proposer is scripted."""

import contextlib
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

from configs import algorithms, ssp
from experiments.ssp import game, train
from experiments.ssp import world as worlds
from searchrl_jax.checks import ConfigError
from searchrl_jax.data.checks import DataError
from searchrl_jax.devices import signals
from searchrl_jax.learn import update
from searchrl_jax.models import parameters
from searchrl_jax.run import build
from searchrl_jax.store import checkpoint, records
from tests import chat_server
from tests.experiments import ssp_engine

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]

WORLD = dict(play=50, heldout=50)


@pytest.fixture(scope='module')
def url(tmp_path_factory):
  from retrieval import process

  folder = tmp_path_factory.mktemp('world')
  corpus = worlds.write(worlds.generate(3, **WORLD), folder)['corpus']
  with process.start_server(corpus, log_path=folder / 'log') as server:
    yield server.url


def tiny(url, **fields):
  """Three steps of four answers."""
  c = ssp.get_config()
  c.model.arch.update(
    dict(
      hidden_size=32,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=2,
      head_dim=16,
      intermediate_size=64,
    )
  )
  c.mesh.data = 1
  c.data.world_seed = 3
  c.data.world = ConfigDict(WORLD)
  c.data.train.answers.update(WORLD)
  c.data.eval = ConfigDict()
  c.source.url = url
  c.env.update(dict(max_turns=2, max_turn_tokens=16, max_tokens=192))
  c.engine.update(
    dict(
      module='tests.experiments.ssp_engine',
      slots=8,
      max_len=192,
      chunk=4,
      prefill_rows=4,
    )
  )
  c.selfplay.reward = '1-acc'
  c.rollout.questions = 4
  c.rollout.group = 2
  c.reward = ConfigDict(
    dict(chance=dict(fn='tests.experiments.ssp_engine.chance', weight=1.0))
  )
  c.batch.lengths = (192,)
  c.batch.tokens = 768
  c.train.steps = 3
  c.optim.lr = 1e-2
  c.eval.every = 0
  c.checkpoint.every = 1
  c.checkpoint.best = ''
  c.log.tensorboard = False
  c.log.progress = False
  c.update_from_flattened_dict(fields)
  return c


def params_of(config, workdir):
  tok = build.tokenizer(config, str(workdir))
  cfg = parameters.model_config(config, tok.vocab_size)
  found = parameters.restore(config, str(workdir), cfg, build.mesh(config))
  return jax.tree.map(np.asarray, found)


def same(a, b):
  return all(
    (x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
  )


def lines(path):
  return [json.loads(line) for line in pathlib.Path(path).open()]


def pool_of(config, folder):
  saver = checkpoint.of_run(config, str(folder))
  return saver.meta(saver.latest())['extras']['pool']


class Killed(BaseException):
  """Stands for a kill: nothing in the loop catches it."""


@contextlib.contextmanager
def killed_at(nth, owner=update.Updater, name='step'):
  """Kills at the nth call of a method."""
  real, calls = getattr(owner, name), []

  def call(*args, **kw):
    calls.append(1)
    if len(calls) == nth:
      raise Killed
    return real(*args, **kw)

  with pytest.MonkeyPatch.context() as m:
    m.setattr(owner, name, call)
    with pytest.raises(Killed):
      yield


@pytest.fixture(scope='module')
def whole(url, tmp_path_factory):
  """An uninterrupted run: (config, folder, parameters)."""
  folder = tmp_path_factory.mktemp('whole')
  config = tiny(url)
  train.train(config, str(folder))
  return config, folder, params_of(config, folder)


def test_a_run_plays_both_roles_and_leaves_everything_behind(whole):
  config, folder, _ = whole
  steps = lines(folder / 'metrics.jsonl')
  assert [s['step'] for s in steps] == [0, 1, 2]
  for name in (
    'proposer/loss',
    'solver/loss',
    'selfplay/valid_share',
    'selfplay/distinct',
    'selfplay/no_length',
    'selfplay/solver_success',
    'selfplay/pool',
    'reward/chance',
    'health/searches',
    'time/update',
  ):
    assert name in steps[-1], name
  kept = [r.trajectory for r in records.read(folder / 'trajectories')]
  proposed = [t for t in kept if t.role == 'proposer']
  solved = [t for t in kept if t.role == 'solver']
  assert len(proposed) == 3 * 4
  stands = sum(s['selfplay/stand'] for s in steps)
  filled = sum(s['selfplay/reused'] + s['selfplay/dummies'] for s in steps)
  assert stands + filled == 12 and len(solved) == 24 and filled > 0
  assert stands > 4  # else this file tests little
  for t in kept:
    assert {s.agent for s in t.segments} == {t.role}
  # What stands is one hop by the oracle, and what it was made for.
  judged = [s for s in steps if s['selfplay/stand']]
  assert {s['selfplay/oracle_valid'] for s in judged} == {1.0}
  assert {s['selfplay/hops'] for s in judged} == {1.0}


def test_rewards_are_opposed(whole):
  config, folder, _ = whole
  kept = [(r, r.trajectory) for r in records.read(folder / 'trajectories')]
  earned = {}
  for r, t in kept:
    if t.role == 'solver' and '@' in t.question.id:
      earned.setdefault((r.step, t.question.id), []).append(r.reward)
  seen = 0
  for r, t in kept:
    if t.role == 'proposer':
      name = r.step, f'{t.question.id}@{r.step}.{t.sample}'
      if name in earned:
        assert r.reward == pytest.approx(1 - np.mean(earned[name]))
        seen += 1
      else:
        assert r.reward == pytest.approx(config.selfplay.penalty)
        assert r.reward < 0
  assert seen > 4


@pytest.mark.long
def test_the_second_update_is_corrected_for_the_first(
  whole, tmp_path, monkeypatch
):
  """Both roles were sampled before either update; the solver's weights,
  against the log-probs it was sampled with, are no longer 1."""
  config, folder, params = whole
  for s in lines(folder / 'metrics.jsonl'):
    assert s['proposer/mismatch_abs'] < 1e-4
    assert s['proposer/tis_weight'] == pytest.approx(1, abs=1e-4)
    assert s['solver/mismatch_abs'] > 1e-3
    assert abs(s['solver/tis_weight'] - 1) > 1e-4
  # They reach the parameters. (Without them nothing would start.)
  config = config.copy_and_resolve_references()
  config.algorithm.tis = 'none'
  monkeypatch.setattr(train.start, 'check', lambda config: None)
  train.train(config, str(tmp_path))
  assert not same(params, params_of(config, tmp_path))


@pytest.mark.long
def test_a_resume_takes_up_what_the_judge_had_read(url, tmp_path):
  said = ['']

  def script(body):
    text = json.loads(body['messages'][1]['content'])
    if isinstance(text, dict):
      return '{"verdict": "incorrect"}'
    found = re.search('> (.*) <', ssp_engine.read(text) or '')
    answer = found[1] if found else 'blue'  # a check of the reader itself
    return json.dumps({'answer': said[0] or answer})

  with chat_server.serve(script) as server:
    config = tiny(
      url,
      **{
        'selfplay.verifier': 'judge',
        'judge.url': server.url,
        'train.steps': 2,
      },
    )
    train.train(config, str(tmp_path / 'whole'))
    stood = [
      s['selfplay/stand'] for s in lines(tmp_path / 'whole' / 'metrics.jsonl')
    ]
    assert sum(stood) > 2
    with killed_at(3):  # the second step's first update
      train.train(config, str(tmp_path / 'killed'))
    said[0] = 'Somebody Else'  # says the server from now on
    asked = len(server.asked)
    train.train(config, str(tmp_path / 'killed'))
    # Whether it can judge, and read.
    assert len(server.asked) == asked + 2
  found = [params_of(config, tmp_path / name) for name in ('whole', 'killed')]
  assert same(*found)


@pytest.mark.long
@pytest.mark.parametrize('where', ['between updates', 'save'])
def test_resume_after_a_kill_is_bitwise(whole, tmp_path, where):
  config, folder, params = whole
  with killed_at(
    *{'between updates': (4,), 'save': (2, checkpoint.Checkpointer, 'save')}[
      where
    ]
  ):
    train.train(config, str(tmp_path))
  train.train(config, str(tmp_path))
  assert same(params, params_of(config, tmp_path))
  assert pool_of(config, folder) == pool_of(config, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize('role', [game.VERIFIER, game.SOLVER])
def test_resume_after_a_signal_takes_what_had_ended(
  whole, tmp_path, monkeypatch, role
):
  config, folder, params = whole
  config = config.copy_and_resolve_references()
  config.checkpoint.every = 0
  real, sampled = train.rollout, []

  async def interrupted(questions, **kw):
    if kw['role'] == role and kw['step'] == 1:
      os.kill(os.getpid(), signal.SIGTERM)
    return await real(questions, **kw)

  async def counted(questions, **kw):
    sampled.append((kw['role'], kw['step'], len(kw['ended'])))
    return await real(questions, **kw)

  with monkeypatch.context() as m:
    m.setattr(train, 'rollout', interrupted)
    with pytest.raises(signals.Stopped):
      train.train(config, str(tmp_path))
    m.setattr(train, 'rollout', counted)
    train.train(config, str(tmp_path))
  assert sampled[0] == (game.PROPOSER, 1, 4)  # all four had ended
  assert same(params, params_of(config, tmp_path))
  assert pool_of(config, folder) == pool_of(config, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
  'proposer, solver, n, group',
  [
    (algorithms.PPO, algorithms.PPO, 1, 1),
    (algorithms.GRPO, algorithms.GRPO, 2, 2),
  ],
)
def test_the_other_pairings_learn_too(
  url, tmp_path, proposer, solver, n, group
):
  config = tiny(
    url,
    **{
      'selfplay.n': n,
      'rollout.group': group,
      'train.steps': 2,
      'checkpoint.every': 0,
      'optim.schedule': 'linear',
    },
  )
  for own, algorithm in (
    (config.algorithm, solver),
    (config.selfplay.algorithm, proposer),
  ):
    own.advantage_kw = ConfigDict()
    own.update(algorithm)
  if algorithms.PPO in (proposer, solver):
    config.critic.lr = 1e-3
  train.train(config, str(tmp_path))
  last = lines(tmp_path / 'metrics.jsonl')[-1]
  # Two roles, two steps: the schedule counts four updates, each once.
  assert last['train/lr'] == pytest.approx(config.optim.lr * (1 - 3 / 4))
  for role, how in (('proposer', proposer), ('solver', solver)):
    assert last[f'{role}/grad_norm'] > 0
    assert (f'{role}/critic_loss' in last) == (how is algorithms.PPO)


@pytest.mark.long
def test_a_frozen_proposer_does_not_learn(whole, url, tmp_path):
  config = tiny(url, **{'selfplay.frozen': True, 'checkpoint.every': 0})
  train.train(config, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  assert 'solver/loss' in steps[-1] and 'proposer/loss' not in steps[-1]

  def weights_behind(folder, role):
    return [
      {
        v
        for s in r.trajectory.segments
        if s.author == 'policy'
        for v in s.versions.tolist()
      }
      for r in records.read(folder / 'trajectories')
      if r.trajectory.role == role and r.step == 2
    ]

  assert all(v == {0} for v in weights_behind(tmp_path, 'proposer'))
  assert all(v == {2} for v in weights_behind(tmp_path, 'solver'))
  assert all(v == {2} for v in weights_behind(whole[1], 'proposer'))


@pytest.mark.long
def test_a_frozen_proposer_that_trained_on_is_refused(url, tmp_path):
  start, run = str(tmp_path / 'start'), str(tmp_path / 'run')
  config = tiny(url, **{'train.steps': 2})
  with killed_at(3):
    train.train(config, start)
  frozen = tiny(
    url, **{'selfplay.frozen': True, 'train.init': start, 'train.steps': 2}
  )
  with killed_at(2):
    train.train(frozen, run)
  train.train(config, start)
  with pytest.raises(ConfigError, match='train.init=.*model.path='):
    train.train(frozen, run)


@pytest.mark.long
def test_the_solver_may_wait(url, tmp_path, monkeypatch):
  config = tiny(
    url, **{'selfplay.solver_from': 1, 'train.steps': 2, 'checkpoint.every': 0}
  )
  moved, move = [], train.Learner.move_teacher
  monkeypatch.setattr(
    train.Learner, 'move_teacher', lambda *a: moved.append(a[1]) or move(*a)
  )
  train.train(config, str(tmp_path))
  first, second = lines(tmp_path / 'metrics.jsonl')
  assert 'solver/loss' not in first and 'solver/loss' in second
  assert moved == [0, 1], 'a teacher follows the policy in every step'


@pytest.mark.long
def test_further_answers_fill_a_step_up(url, tmp_path):
  config = tiny(
    url,
    **{
      'selfplay.resample': 3,
      'selfplay.invalid': 'drop',
      'train.steps': 2,
      'selfplay.verifier': 'none',
      'checkpoint.every': 0,
    },
  )
  train.train(config, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  assert max(s['selfplay/proposals'] for s in steps) > 4
  for s in steps:
    assert s['selfplay/stand'] >= 4
    solved = [
      r
      for r in records.read(tmp_path / 'trajectories')
      if r.trajectory.role == 'solver' and r.step == s['step']
    ]
    assert len(solved) == 4 * 2  # and none is one too many


def test_a_pool_of_another_config_is_refused(whole, tmp_path, monkeypatch):
  config, folder, _ = whole
  shutil.copytree(folder, tmp_path / 'run')
  monkeypatch.setattr(train.start, 'fingerprint', lambda *_: 'another')
  with pytest.raises(ConfigError, match='saved pool'):
    train.train(config, str(tmp_path / 'run'))


@pytest.mark.long
def test_a_step_of_which_no_reward_can_be_used_is_a_step(url, tmp_path):
  config = tiny(url, **{'train.steps': 2, 'algorithm.minibatches': 2})
  config.reward = ConfigDict(
    dict(none=dict(fn='tests.tiny.unusable', weight=1.0))
  )
  train.train(config, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  assert len(steps) == 2 and sum(s['selfplay/stand'] for s in steps) > 0
  for s in steps:
    assert s['selfplay/solver_success'] is s['reward/none/half'] is None
    assert s['solver/gradient_groups'] == 0 and 'solver/loss' not in s
  kept = [*records.read(tmp_path / 'trajectories')]
  solved = [r for r in kept if r.trajectory.role == 'solver']
  assert solved and not any(r.kept or r.valid for r in solved)


def test_answers_are_needed(url, tmp_path):
  path = tmp_path / 'questions.jsonl'
  path.write_text('{"id": "1", "question": "Who?", "golden_answers": []}\n')
  config = tiny(url)
  config.data.train = ConfigDict(
    dict(bare=dict(module='jsonl', path=str(path)))
  )
  with pytest.raises(DataError, match='golden answers'):
    train.train(config, str(tmp_path / 'run'))


def test_a_judge_that_is_absent_is_found_at_the_start(url, tmp_path):
  config = tiny(
    url,
    **{
      'selfplay.verifier': 'judge',
      'judge.url': 'http://127.0.0.1:9',
      'judge.attempts': 1,
      'judge.timeout': 1.0,
    },
  )
  with pytest.raises(Exception, match='127.0.0.1:9'):
    train.train(config, str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
  'fields',
  [
    dict(sampler='tree', group=3, trees=1),
    dict(sampler='tests.samplers.best', group=2, attempts=2),
  ],
)
def test_the_sampler_is_the_solvers(url, tmp_path, monkeypatch, fields):
  """Proposals are chains; the solver's sampler may ask for rewards."""
  c, checked = tiny(url), []
  # A reward may refuse the step, and not what a sampler asks of it.
  check = lambda groups, *_: checked.append(len(groups))
  monkeypatch.setattr(ssp_engine.chance, 'check_step', check, raising=False)
  c.rollout.update(fields)
  c.train.steps = 1
  train.train(c, str(tmp_path))
  kept = {
    role: [
      *records.read(tmp_path / 'trajectories' / f'step_00000000_{role}.parquet')
    ]
    for role in ('proposer', 'solver')
  }
  assert len(kept['proposer']) >= 4
  assert not any('path' in r.trajectory.meta for r in kept['proposer'])
  assert len(kept['solver']) == 4 * fields['group'] and checked == [4]
  trees = fields['sampler'] == 'tree'
  assert all(('path' in r.trajectory.meta) == trees for r in kept['solver'])


# One hop whatever is asked for; two searches, so three hops are too many.
HOPS = {
  'selfplay.brief': '{answer} {searches}',
  'selfplay.hops.asked': 'drawn',
  'selfplay.hops.shares': (1.0, 1.0, 1.0),
  'selfplay.hops.searched': True,
  'selfplay.hops.term': 'oracle',
  'selfplay.reward': 'linear_difficulty',
  'selfplay.algorithm.advantage': 'experiments.ssp.game.by_hops',
  'env.max_turns': 3,
  'rollout.questions': 8,
  'train.steps': 2,
}
TOLD = {
  'teacher.context': 'experiments.ssp.game.told_path',
  'teacher.columns.k': 8,
  'algorithm.aggregation': 'token',
  'batch.lengths': (384,),
}


@pytest.mark.long
def test_hops_are_asked_for_and_counted(url, tmp_path):
  config = tiny(url, **HOPS)
  train.train(config, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  assert sum(s['selfplay/no_searches'] for s in steps) > 1
  assert all(1 < s['selfplay/asked'] < 3 for s in steps)
  kept = [*records.read(tmp_path / 'trajectories')]
  earned, stood = {}, set()
  for r in kept:
    if '@' in r.trajectory.question.id:
      name = r.step, r.trajectory.question.id
      earned.setdefault(name, []).append(r.reward)
  for r in kept:
    t = r.trajectory
    if t.role != 'proposer':
      continue
    n = t.meta['asked']
    assert t.question.text.endswith(f' {n}') and t.question.meta['asked'] == n
    values = earned.get((r.step, f'{t.question.id}@{r.step}.{t.sample}'))
    if values is None:
      assert r.reward == pytest.approx(-0.25)
      continue
    # Of two solvers: 2 (1 - 1/2) / (2 - 1) if one is right, and one hop of n.
    assert len(values) == 2
    difficulty = 1.0 if sum(values) == 1 else 0.0
    assert r.reward == pytest.approx(difficulty + 0.5 / n)
    stood.add(n)
  assert stood == {1, 2}


@pytest.mark.long
def test_a_number_that_does_not_count_is_asked_for_all_the_same(url, tmp_path):
  fields = {'selfplay.hops.shuffled': True, 'train.steps': 1}
  train.train(tiny(url, **HOPS | fields), str(tmp_path))
  kept = [r.trajectory for r in records.read(tmp_path / 'trajectories')]
  own = [t for t in kept if t.role == 'proposer']
  told = [t.question.meta['asked'] for t in own]
  counted = [t.meta['asked'] for t in own]
  assert told != counted and sorted(told) == sorted(counted)
  assert [t.question.text[-1] for t in own] == [str(n) for n in told]


@pytest.mark.long
def test_resume_with_numbers_and_paths_is_bitwise(url, tmp_path):
  fields = {'selfplay.hops.shuffled': True, 'selfplay.reuse_threshold': 1.0}
  config = tiny(url, **HOPS | TOLD | fields)
  train.train(config, str(tmp_path / 'whole'))
  steps = lines(tmp_path / 'whole' / 'metrics.jsonl')
  assert all(s['solver/teacher_rows'] > 0 for s in steps)
  assert not any('proposer/teacher_rows' in s for s in steps)
  want, pool = (of(config, tmp_path / 'whole') for of in (params_of, pool_of))
  assert all(q['meta']['path'] for q in pool['questions'])
  for nth in (3, 4):  # before and between the updates
    folder = tmp_path / f'{nth}'
    with killed_at(nth):
      train.train(config, str(folder))
    train.train(config, str(folder))
    assert same(params_of(config, folder), want)
    assert pool_of(config, folder) == pool
