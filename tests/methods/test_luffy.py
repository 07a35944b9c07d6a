"""LUFFY and AMPO: the objective by hand, a fork of it, and their groups."""

import asyncio
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.methods import luffy
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.engines.core import Completion
from searchrl_jax.learn import advantages, losses, objectives
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout import chains
from searchrl_jax.run import build
from searchrl_jax.text.tokenizer import load as load_tokenizer
from searchrl_jax.types import Question, SearchResult
from searchrl_jax.worlds import atlas, microtraces
from tests.fakes import FakeEngine

pytestmark = pytest.mark.slow

# A group: two wrong attempts, a right one, a right trace; two tokens each.
REWARDS = [0.0, 0.0, 1.0, 1.0]
FOREIGN = np.array([[False] * 2] * 3 + [[True] * 2])
P = [0.1, 0.9]  # of the trace's tokens
NEW = np.log([[0.5, 0.5], [0.9, 0.2], [0.6, 0.5], P]).astype(np.float32)
OLD = np.log([[0.5, 0.5], [0.3, 0.2], [0.2, 0.5], P]).astype(np.float32)


def loss(arg='', new=NEW, old=OLD):
  """The loss [4, 2] of the config and its gradient, after a first update."""
  c = luffy.get_config(arg)
  assert c.algorithm.advantage == 'dr_grpo'
  a = advantages.dr_grpo(REWARDS, [True] * 4, [0] * 4)
  c.algorithm.minibatches, c.algorithm.entropy_coef = 2, 0.0
  objective = objectives.policy(c)
  arrays = dict(
    mask=np.ones((4, 2), bool),
    behaviour_logps=np.where(FOREIGN, np.nan, old).astype(np.float32),
    advantages=np.repeat(a[:, None], 2, 1),
    old=old,
    ref=old,
  )
  arrays = jax.tree.map(jnp.asarray, arrays)
  run = lambda x: objective.fn(x, jnp.zeros_like(x), arrays)[0]
  whole = jax.grad(lambda x: run(x).sum())(jnp.asarray(new))
  return np.asarray(run(jnp.asarray(new))), np.asarray(whole)


def test_golden_loss_and_gradient():
  # A = R - 1/2: -.5, -.5, .5, and of the trace .5.
  found, gradient = loss()
  # -rA without a bound: r = 1, 1; 3, 1; 3, 1.
  wanted = [[0.5, 0.5], [1.5, 0.5], [-1.5, -0.5]]
  # -p / (p + .1) A: .1 / .2 = .5, .9 / 1 = .9.
  np.testing.assert_allclose(found, [*wanted, [-0.25, -0.45]], rtol=1e-5)
  # -p .1 / (p + .1)^2 A: .01 / .04 = .25, .09 / 1.
  np.testing.assert_allclose(gradient, [*wanted, [-0.125, -0.045]], rtol=1e-5)


def test_golden_loss_of_ampo():
  # The same trace; r within .8 and 1.2: min(rA, clip(r) A) of A < 0 is 3 x -.5,
  # as c = 10 is further; of A > 0 it is 1.2 x .5.
  found, gradient = loss('arm=ampo')
  wanted = [[0.5, 0.5], [1.5, 0.5], [-0.6, -0.5], [-0.25, -0.45]]
  np.testing.assert_allclose(found, wanted, rtol=1e-5)
  assert gradient[2].tolist() == [0.0, -0.5]
  far = OLD.copy()
  far[1, 0] = math.log(0.9 / 20)  # r = 20: at most 10
  found, _ = loss('arm=ampo', old=far)
  np.testing.assert_allclose(found[1, 0], 5.0, rtol=1e-5)


def test_the_sum_is_divided_by_what_can_be_sampled():
  a = luffy.get_config().algorithm
  # Seven turns of 32 tokens; atlas's trajectories have at most 320.
  assert (a.aggregation, a.horizon) == ('sequence_sum', 7 * 32)
  found, _ = loss()
  masks = [np.ones((4, 2), bool)]
  per = losses.denominator(masks, a.aggregation, a.horizon)
  assert per == 4 * 224
  whole = losses.aggregate(jnp.asarray(found), masks[0], a.aggregation)
  np.testing.assert_allclose(whole / per, found.sum() / 896, rtol=1e-5)
  # AMPO: each trajectory weighs the same, the first with one token of two.
  a = luffy.get_config('arm=ampo').algorithm
  some = np.array([[True, False]] + [[True, True]] * 3)
  per = losses.denominator([some], a.aggregation, a.horizon)
  whole = losses.aggregate(jnp.asarray(found), some, a.aggregation)
  mean = np.mean([found[0, 0], *found[1:].mean(1)])
  np.testing.assert_allclose(whole / per, mean, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0))
def test_the_weight_is_of_the_probability_not_of_a_ratio(p, old):
  """The fork has pi / pi_old there: .1 / 1.21 of every token at first."""
  weight = lambda p: p * 0.1 / (p + 0.1) ** 2
  new, before = NEW.copy(), OLD.copy()
  new[3], before[3] = np.log([p, 0.3]), np.log([old, 0.3])
  gradient = loss(new=new, old=before)[1][3]
  np.testing.assert_allclose(
    gradient, [-0.5 * weight(p), -0.5 * weight(0.3)], rtol=1e-4
  )
  on_policy = loss(new=new, old=new)[1][3]
  np.testing.assert_array_equal(on_policy, gradient)
  fork = weight(1.0)  # p / p = 1
  assert fork == pytest.approx(0.1 / 1.21)
  assert abs(gradient[1] + 0.5 * fork) > 0.03, 'it tells tokens apart'


ATLAS = atlas.generate(3, train=60, heldout=40, known=10)


@pytest.fixture(scope='module')
def env(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokens')
  tok = load_tokenizer(atlas.tokenizer(folder))
  return build.environment(luffy.get_config(), tok)


class Source:
  """The world's passages, without those of `missing`."""

  def __init__(self, missing=()):
    titles = {row['contents'].split('\n')[0].strip('"') for row in ATLAS.corpus}
    self.find = microtraces.indexed(ATLAS, titles - {*missing})

  async def search(self, requests):
    found = self.find([r.query for r in requests], 1)
    return [SearchResult(*pair) for pair in zip(requests, found)]


def play(arg, env, source, questions, script):
  c = luffy.get_config(arg)
  c.rollout.group = 3
  context = rewards.RewardContext(env=env)
  reward = lambda groups, step: rewards.combine(c.reward, groups, context)
  found = asyncio.run(
    chains.rollout(
      questions, env=env, engine=Fake(env.tokenizer, script), source=source,
      config=c.rollout, seed=0, step=5, reward=reward,
    )
  )  # fmt: skip
  earned = asyncio.run(rewards.combine(c.reward, found.groups, context)).value
  return found, earned.reshape(-1, 3)


class Fake(FakeEngine):
  """Writes in the world's words."""

  def __init__(self, tok, script):
    super().__init__(script)
    self.tok = tok

  async def generate(self, handle, sampling):
    text = self.script(self.tok.decode(self.handles[handle]), sampling.seed)
    ids = np.array(self.tok.encode(text), np.int32)
    self.handles[handle] += ids.tolist()
    logps = np.zeros(len(ids), np.float32)
    return Completion(ids, logps, sampling.stops[-1], ids * 0)


def test_the_expert_of_a_world_is_right_on_every_kind(env):
  questions = [
    q
    for kind in atlas.KINDS
    for q in [x for x in ATLAS.questions['train'] if x.source == kind][:4]
  ]
  never = lambda history, seed: '<answer> nobody </answer>'
  found, earned = play('', env, Source(), questions, never)
  assert (found.stats.traces, found.stats.traces_left_out) == (24, 0)
  np.testing.assert_array_equal(earned, [[0, 0, 1]] * 24)
  for q, (*_, trace) in zip(questions, found.groups, strict=True):
    assert trace.foreign and len(trace.searches) == q.hops
    # Both look-ups of a comparison are in one turn.
    assert trace.turns == (2 if q.meta['parallel'] else q.hops + 1)


def test_what_the_source_lacks_is_not_stated(env):
  q = next(x for x in ATLAS.questions['train'] if x.source == '2hop')
  person, relation, _ = q.meta['facts'][1]
  missing = {f'{person}, {atlas.SECTION[relation]}'}
  never = lambda history, seed: '<answer> nobody </answer>'
  found, earned = play('', env, Source(missing), [q], never)
  assert (found.stats.traces, found.stats.traces_left_out) == (0, 1)
  assert not earned.any()


def test_ampo_shows_a_trace_where_all_attempts_fail(env):
  questions = [x for x in ATLAS.questions['train'] if x.source == '1hop'][:6]
  right = {q.text: q.answers[0] for q in questions[::2]}

  def half(history, seed):
    text = history.split('Question: ')[1].split('\n')[0].strip()
    return f'<answer> {right.get(text, "nobody")} </answer>'

  found, earned = play('arm=ampo', env, Source(), questions, half)
  told = [sum(t.foreign for t in group) for group in found.groups]
  # One trace each: there is none to choose among.
  assert told == [0, 1] * 3
  np.testing.assert_array_equal(earned, [[1, 1, 1], [0, 0, 1]] * 3)


def test_its_config_and_what_it_needs():
  c = luffy.get_config()
  assert (c.rollout.trace_when, c.rollout.trace_most) == ('always', 1)
  assert c.algorithm.entropy_coef == 0.001 and c.algorithm.kl == 'none'
  c = luffy.get_config('arm=ampo')
  assert (c.name, c.rollout.trace_when, c.rollout.trace_most) == (
    'ampo',
    'failed',
    2,
  )
  checks.check(c)
  assert luffy.get_config('arm=ampo,most=1').rollout.trace_most == 1
  with pytest.raises(DataError, match='facts'):
    checks.check_data(c, [Question('q', 'who?', ('Ann',))])
  full = luffy.get_config('base=search_r1,model=x')
  with pytest.raises(DataError, match='traces'):
    checks.check_data(full, [Question('q', 'who?', ('Ann',))])
  known = luffy.get_config('base=search_r1,model=x,traces=solutions')
  assert known.rollout.traces == 'solutions'
  with pytest.raises(ConfigError, match='trace_most=8'):
    checks.check(luffy.get_config('most=8'))
  with pytest.raises(ValueError, match="arm='exgrpo'"):
    luffy.get_config('arm=exgrpo')
