import asyncio

from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.data import checks
from searchrl_jax.rewards import core
from searchrl_jax.types import Question, Rewards, Segment, Trajectory


def segment(n, train=True, kind='think'):
  return Segment(
    np.arange(n, dtype=np.int32), 'policy' if train else 'environment', kind,
    train=train,
  )  # fmt: skip


def trajectory(*segments, end='answer', answers=('x',), id='q', sample=0):
  segments = segments or (segment(2),)
  question = Question(id, 'why?', answers)
  return Trajectory(question, segments, (), end, sample=sample)


def combine(config, groups, **kw):
  context = core.RewardContext(step=3)
  return asyncio.run(core.combine(ConfigDict(config), groups, context, **kw))


def fn(name, weight=1.0, **fields):
  return dict(fn=f'tests.rewards.test_core.{name}', weight=weight, **fields)


async def length(groups, context, *, per=1.0, free=0.0):
  assert context.step == 3
  return core.per_trajectory(
    groups, lambda t: {'value': len(t) * per + free, 'whole': 7.0}
  )


async def picky(groups, context):
  rewards = core.per_trajectory(groups, lambda t: float('nan'))
  return Rewards(rewards.value, np.zeros_like(rewards.valid))


async def labelled(groups, context):
  return core.per_trajectory(groups, lambda t: 1.0)


labelled.needs = ('answers',)


async def by_segment(groups, context):
  values = tuple(
    np.arange(1, len(t.trained) + 1, dtype=np.float32)
    for t in core.flat(groups)
  )
  return Rewards(values, np.ones(len(values), bool), 'segment')


async def by_token(groups, context):
  values = tuple(np.full(len(t), 0.5, np.float32) for t in core.flat(groups))
  return Rewards(values, np.ones(len(values), bool), 'token')


async def wrong_length(groups, context):
  return Rewards(np.zeros(1, np.float32), np.ones(1, bool))


async def not_finite(groups, context):
  return core.per_trajectory(groups, lambda t: float('inf'))


async def wrong_shape(groups, context):
  n = len(core.flat(groups))
  return Rewards(tuple([np.zeros(99)] * n), np.ones(n, bool), 'token')


GROUPS = [
  (trajectory(), trajectory(segment(3), sample=1)),
  (trajectory(end='failed', id='p'),),
]


def test_weighted_sum_parts_and_failed_trajectories():
  found = combine(
    {'len': fn('length', 0.5, per=2.0), 'more': fn('length', 1.0)}, GROUPS
  )
  # 0.5 * 2 * 2 + 2 = 4; 0.5 * 2 * 3 + 3 = 6; the failed one earns nothing.
  np.testing.assert_array_equal(found.value, [4, 6, 0])
  np.testing.assert_array_equal(found.valid, [True, True, False])
  np.testing.assert_array_equal(found.parts['len'], [4, 6, np.nan])
  np.testing.assert_array_equal(found.parts['more/whole'], [7, 7, np.nan])
  assert found.value.dtype == np.float32 and found.at == 'trajectory'


def test_a_trajectory_is_valid_if_every_part_is():
  found = combine({'a': fn('length'), 'b': fn('picky')}, GROUPS)
  assert not found.valid.any() and not found.value.any()
  assert np.isnan(found.parts['b']).all()


def test_places_add_up_at_the_finest():
  one = trajectory(segment(2), segment(3, train=False), segment(1), segment(0))
  found = combine({'s': fn('by_segment', 2.0), 't': fn('length')}, [(one,)])
  # Segments 2*(1, 2, 3, 4); the length 6 goes to the last trained, not empty.
  assert found.at == 'segment'
  np.testing.assert_array_equal(found.value[0], [2, 4, 6 + 6, 8])


def test_token_places():
  one = trajectory(segment(2), segment(3, train=False), segment(1))
  found = combine(
    {'s': fn('by_segment'), 't': fn('length'), 'k': fn('by_token', 0.2)},
    [(one,)],
  )
  # 0.1 everywhere; segments 1, 2, 3 at their last token; 6 at the last.
  expected = [0.1, 1.1, 0.1, 0.1, 2.1, 0.1 + 3 + 6]
  np.testing.assert_allclose(found.value[0], expected, rtol=1e-6)
  # Totals are the same at every place: 0.2 * 3 + 6 + 6.
  assert found.value[0].sum() == pytest.approx(12.6)
  np.testing.assert_allclose(found.parts['k'], [3.0])


def test_a_failed_one_has_zeros_of_its_shape():
  failed = trajectory(segment(2), end='failed')
  found = combine({'k': fn('by_token')}, [(failed,)])
  np.testing.assert_array_equal(found.value[0], [0, 0])
  assert not found.valid[0]


@pytest.mark.parametrize('answers', [(), ('', ' ')])
def test_a_question_without_answers_is_named(answers):
  bare = trajectory(answers=answers, id='nq-7')
  config = schema.base()
  config.reward.em = fn('labelled')
  with pytest.raises(checks.DataError, match="'nq-7'.*config.reward.em"):
    combine(config.reward, [(bare,)])
  with pytest.raises(checks.DataError, match="'nq-7'"):
    core.check(config, [bare.question])
  config.reward = ConfigDict({'len': fn('length')})
  core.check(config, [bare.question])


@pytest.mark.parametrize(
  'config, message',
  [
    ({}, 'config.reward '),
    ({'a': dict(weight=1.0)}, "config.reward.a .*'fn'"),
    ({'a': dict(fn='answer.em')}, "'weight'"),
    ({'a': fn('length', 'x')}, "weight='x'"),
    ({'a': fn('length', float('nan'))}, 'weight=nan'),
    ({'a': dict(fn='answer.emm', weight=1.0)}, "'em'"),
    ({'a': fn('length', pr=1.0)}, "config.reward.a.pr .*'per'"),
    ({'a': fn('labelled', x=1.0)}, 'config.reward.a.x'),
    ({'a': dict(fn='answer.search_r1_format', weight=1.0)}, "'structure'"),
    ({'a': fn('wrong_length')}, '1 entries'),
    ({'a': fn('not_finite')}, "'q/solver/0'.*inf"),
    ({'a': fn('wrong_shape')}, r'shape \(99,\)'),
  ],
)
def test_errors_name_the_field(config, message):
  with pytest.raises(core.RewardError, match=message):
    combine(config, GROUPS)


SEEN = []  # the number of groups of each call


async def of_step(groups, context):
  SEEN.append(len(groups))
  return core.per_trajectory(groups, lambda t: float(len(groups)))


async def checked(groups, context):
  return core.per_trajectory(groups, lambda t: 1.0)


def _few(groups, rewards, context, fields):
  assert context.step == 3 and len(rewards.value) == len(core.flat(groups))
  if len(groups) > 2:
    raise ZeroDivisionError


of_step.needs_step, checked.check_step = True, _few


def of_parts(config, groups):
  """The rewards of groups that are rewarded one after another."""

  async def main():
    config_, context = ConfigDict(config), core.RewardContext(step=3)
    parts = [await core.of_groups(config_, [g], context) for g in groups]
    reward = await core.of_step(config_, groups, parts, context)
    core.check_step(config_, groups, reward, context)
    return reward

  return asyncio.run(main())


@pytest.mark.parametrize(
  'terms',
  [
    {'a': fn('length', 0.3, per=0.7), 'b': fn('labelled', 0.1)},
    {'a': fn('by_segment', 0.3), 'b': fn('length', 0.1)},
    {'a': fn('by_token', 0.3), 'b': fn('picky'), 'c': fn('of_step')},
  ],
)
def test_groups_earn_alone_what_they_earn_together(terms):
  failed = [(trajectory(end='failed', id='r'),)]
  groups = [*failed, *GROUPS, (trajectory(segment(5), id='s'),)]
  one, two = combine(terms, groups), of_parts(terms, groups)
  assert one.at == two.at and [*one.parts] == [*two.parts]
  columns = [(one.valid, two.valid), *zip(one.value, two.value, strict=True)]
  columns += [(one.parts[name], two.parts[name]) for name in one.parts]
  for a, b in columns:
    assert a.tobytes() == b.tobytes() and a.dtype == b.dtype


def test_a_reward_that_needs_the_step_is_called_once():
  SEEN.clear()
  found = of_parts({'a': fn('of_step'), 'b': fn('length')}, GROUPS)
  assert SEEN == [2]
  np.testing.assert_array_equal(found.value, [2 + 2, 2 + 3, 0])


def test_a_reward_may_refuse_a_step():
  of_parts({'a': fn('checked')}, GROUPS)
  more = [*GROUPS, (trajectory(id='t'),)]
  for rewarded in (combine, of_parts):
    with pytest.raises(ZeroDivisionError):
      rewarded({'a': fn('checked')}, more)
  # Between the rounds of a sampler there is no whole step.
  assert combine({'a': fn('checked')}, more, whole=False).valid.sum() == 3


def test_rewards_of_two_rounds_join():
  one = core.Rewards(
    np.float32([1, 0]), np.array([True, True]), parts={'em': np.float32([1, 0])}
  )
  # All of the second round failed: nothing was scored, no part is there.
  two = core.Rewards(np.float32([0]), np.array([False]))
  both = core.join(one, two)
  np.testing.assert_array_equal(both.value, [1, 0, 0])
  np.testing.assert_array_equal(both.valid, [True, True, False])
  np.testing.assert_array_equal(both.parts['em'], [1, 0, np.nan])
  np.testing.assert_array_equal(core.join(two, one).parts['em'], [np.nan, 1, 0])
  np.testing.assert_array_equal(core.join(one, two, one).value, [1, 0, 0, 1, 0])
  tokens = core.Rewards((np.float32([0, 1]),), np.array([True]), 'token')
  assert len(core.join(tokens, tokens).value) == 2
