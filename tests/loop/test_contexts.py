"""Runs whose trajectories have several contexts, end to end."""

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs.methods import contexts
from searchrl_jax import train, view
from searchrl_jax.learn import batching
from searchrl_jax.rewards import answer
from searchrl_jax.store import records
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.parser import Block
from tests import tiny
from tests.loop.test_algorithms import run_twice
from tests.loop.test_train import EXPERTS, lines

pytestmark = [
  pytest.mark.slow,
  pytest.mark.long,
  pytest.mark.usefixtures('programs'),
]


class Acts(SearchEnv):
  """Each turn searches as long as it may, then answers, whatever it says."""

  def _action(self, state, blocks):
    kind = 'search' if self._may_search(state) else 'answer'
    return Block(kind, 'policy', state.question.text, turn=state.turn)


class Corrects(Acts):
  def _attempts(self, blocks, state):
    """A search and what stands for an answer; then the second attempt."""
    return [int(turn > 1) for turn in range(state.turn + 1)]


def config(url, kind):
  c = tiny.config(url)
  c.source.k = 1
  c.env.module = f'{__name__}.Acts'
  c.env.max_turns, c.env.max_observation_tokens = 3, 24
  argument = f'kind={kind},contexts=3,attempts=3,note=8'
  changes = contexts.get_config(argument)
  names = 'template max_contexts keep_observations on_full on_answer attempts'
  for name in (*names.split(), 'max_note_tokens'):
    c.env[name] = changes.env[name]
  if kind == 'attempts':
    c.env.max_turns = 1
  if kind == 'summary':
    c.env.max_tokens, c.engine.max_len = 64, 64
    c.batch.lengths = (64,)
  c.batch.tokens = 480  # has room for all contexts of a trajectory
  c.reward = dict(odd=dict(fn='tests.tiny.odd', weight=1.0))
  c.algorithm.update(aggregation='sequence', epochs=2)
  return c


def test_experts_are_those_of_each_context(url, tmp_path):
  c = config(url, 'summary')
  c.model.arch.update(EXPERTS)
  c.engine.record_routes = True
  train.train(c, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  assert sum(s['rollout/contexts'] for s in steps if 'reward' in s) > 0
  updates = [s for s in steps if 'train/loss' in s]
  assert updates
  for step in updates:
    assert step['train/routes_unknown'] == 0
    assert step['train/routes_differ'] < 0.05


@pytest.mark.parametrize('kind', contexts.KINDS)
def test_a_run_trains_each_sampled_token_once(kind, url, tmp_path):
  c = config(url, kind)
  train.train(c, str(tmp_path / 'run'))
  found = [*records.read(tmp_path / 'run/trajectories')]
  assert max(len(r.trajectory.contexts) for r in found) == 2
  for r in found:
    t = r.trajectory
    parts = batching.tokens_of(0, t)
    trained = [i for p in parts for i in p.ids[p.mask].tolist()]
    own = [s for s in t.segments if s.author == 'policy']
    assert trained == [i for s in own for i in s.ids.tolist()]
    # The engine's log-probs are of the same contexts.
    mask = batching.masks([t])[0]
    assert np.isfinite(r.trainer_logps[mask]).all()
    engine = np.concatenate([s.logps for s in own])
    np.testing.assert_allclose(r.trainer_logps[mask], engine, atol=2e-2)
    assert (np.isfinite(r.advantages) == mask).all()
  reasons = {x.reason for r in found for x in r.trajectory.contexts}
  assert reasons == {'drop': {'dropped'}}.get(kind, {'refine'})
  page = tmp_path / 'page.html'
  view.write(str(tmp_path / 'run'), page)
  scripts = ''.join(p.read_text() for p in tmp_path.rglob('*.js'))
  assert page.exists() and f'context_{[*reasons][0]}' in scripts


def test_corrections_are_trained_in_two_stages(url, tmp_path, monkeypatch):
  """SCoRe: two attempts in one context, and a pull to the first policy."""
  c = config(url, 'attempts')
  c.env.module = f'{__name__}.Corrects'
  c.env.max_contexts, c.env.attempts, c.optim.lr = 1, 2, 1e-2
  c.env.max_tokens = c.engine.max_len = 160
  c.batch.lengths = (160,)
  kw = dict(first=1, alpha=10.0, strong=0.1, weak=0.1)
  c.algorithm.update(advantage='configs.methods.score.corrected')
  c.algorithm.update(advantage_kw=ConfigDict(kw), aggregation='token')
  c.teacher.context, c.teacher.weights = 'own', 'frozen'
  # A policy of noise is never right: it earns something else.
  monkeypatch.setattr(answer, 'each_attempt', tiny.shortness)
  c.reward.odd.fn, c.eval.every = 'answer.each_attempt', 0
  c.log.trajectories_every = 1
  train.train(c, str(tmp_path))
  steps = lines(tmp_path / 'metrics.jsonl')
  pulls = [s['train/teacher_delta_abs'] for s in steps]
  assert abs(pulls[0]) < 1e-6 and all(x > 1e-4 for x in pulls[1:])
  assert all(s['train/gradient_groups'] > 0 for s in steps)
  found = {True: [], False: []}
  for r in records.read(tmp_path / 'trajectories'):
    a = r.advantages[np.isfinite(r.advantages)]
    found[r.step == 0].append(np.ptp(a))
  # What is earned is of the second attempt: the same for both at first, then
  # 11 times as much for the second.
  assert max(found[True]) < 1e-6 and max(found[False]) > 1


def test_a_killed_run_goes_on_bit_for_bit(url, tmp_path, monkeypatch):
  run_twice(config(url, 'summary'), tmp_path, monkeypatch, 3)

  def played(name):
    return [
      (
        r.trajectory.id,
        [s.ids.tolist() for s in r.trajectory.segments],
        [(x.start, x.prompt.tolist()) for x in r.trajectory.contexts],
      )
      for r in records.read(tmp_path / name / 'trajectories')
    ]

  assert played('whole') == played('killed')
