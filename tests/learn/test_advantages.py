"""Golden values with their arithmetic, and what must hold for any batch."""

import functools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.learn import advantages

WHOLE = ('grpo', 'dr_grpo', 'rloo', 'reinforce')
BATCH = dict(eps=1e-6, ddof=1)
WHITENED = functools.partial(advantages.whitened, eps=1e-8, ddof=0)
# Functions that give one advantage for a trajectory, by name.
ROWS = {
  **{name: getattr(advantages, name) for name in WHOLE},
  'whitened': WHITENED,
  'reinforce_pp_baseline': functools.partial(
    advantages.reinforce_pp_baseline, **BATCH
  ),
  'lite_ppo': functools.partial(advantages.lite_ppo, **BATCH),
  'remax': lambda values, valid, group_ids: advantages.remax(
    values, valid, group_ids, np.linspace(-1, 1, 8)
  ),
}
ALL = tuple(ROWS.values())
GROUPED = tuple(
  fn
  for name, fn in ROWS.items()
  if getattr(getattr(advantages, name), 'needs_group', False)
)
# All equal values, no advantage: true of all but those with a baseline of
# their own.
CENTRED = tuple(fn for name, fn in ROWS.items() if name != 'remax')


def test_what_compares_trajectories_of_a_question_says_so():
  says = {
    attribute: {
      name
      for name in advantages.NAMES
      if getattr(getattr(advantages, name), attribute, False)
    }
    for attribute in ('needs_group', 'divides_by_spread')
  }
  divides = {'grpo', 'lite_ppo', 'reinforce_pp_baseline', 'turn_normalised'}
  spread = divides | {'distilled'}
  assert says == {
    'needs_group': divides | {'dr_grpo', 'rloo'},
    'divides_by_spread': spread,
  }


def ids(*sizes):
  return np.repeat(np.arange(len(sizes)), sizes)


def test_golden_grpo():
  # Rewards 1 0 0 1 0: mean 0.4; deviations .6 -.4 -.4 .6 -.4, squares sum to
  # .36 * 2 + .16 * 3 = 1.2; unbiased variance 1.2 / 4 = 0.3.
  r = np.array([1.0, 0, 0, 1, 0])
  std = math.sqrt(0.3)
  got = advantages.grpo(r, np.ones(5, bool), ids(5))
  want = np.array([0.6, -0.4, -0.4, 0.6, -0.4]) / (std + 1e-6)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  # Biased: variance 1.2 / 5 = 0.24.
  got = advantages.grpo(r, np.ones(5, bool), ids(5), ddof=0, eps=0.0)
  np.testing.assert_allclose(got[0], 0.6 / math.sqrt(0.24), rtol=1e-6)


def test_golden_dr_grpo_and_rloo():
  # Group 0: 1 0 0 -> mean 1/3. Group 1: 2 4 -> mean 3.
  r, ok, g = np.array([1.0, 0, 0, 2, 4]), np.ones(5, bool), ids(3, 2)
  np.testing.assert_allclose(
    advantages.dr_grpo(r, ok, g), [2 / 3, -1 / 3, -1 / 3, -1, 1], rtol=1e-6
  )
  # Leave one out: 1 - (0 + 0) / 2 = 1; 0 - (1 + 0) / 2 = -1/2; 2 - 4; 4 - 2.
  np.testing.assert_allclose(
    advantages.rloo(r, ok, g), [1, -0.5, -0.5, -2, 2], rtol=1e-6
  )


def test_golden_whitened():
  # 0 2 4: mean 2, biased variance (4 + 0 + 4) / 3.
  got = WHITENED(np.array([0.0, 2, 4]), np.ones(3, bool), ids(3))
  s = math.sqrt(8 / 3)
  np.testing.assert_allclose(got, [-2 / s, 0, 2 / s], rtol=1e-6)


def test_token_values_are_summed():
  tokens = np.array([[1.0, 0, 1], [0, 0, 1], [0, 0, 0]])
  ok, g = np.ones(3, bool), ids(3)
  want = advantages.grpo(np.array([2.0, 1, 0]), ok, g)
  np.testing.assert_array_equal(advantages.grpo(tokens, ok, g), want)
  ragged = (np.array([1.0, 1]), np.array([1.0]), np.array([]))
  np.testing.assert_array_equal(advantages.grpo(ragged, ok, g), want)


@pytest.mark.parametrize('fn', GROUPED)
def test_a_group_of_one_gets_zero(fn):
  ok = np.array([True, True, False, True])
  got = fn(np.array([1.0, 0, 5, 7]), ok, np.array([0, 0, 1, 1]))
  assert got[2] == got[3] == 0  # row 3 is all that is left of its group
  assert np.all(np.isfinite(got)) and got[0] > 0 > got[1]


@pytest.mark.parametrize('fn', CENTRED)
def test_sums_that_round_differently_are_equal(fn):
  third, fifth = np.float32(1 / 3), np.float32(0.2)
  parts = [[third] * 3, [1.0], [third, np.float32(2 / 3)], [fifth] * 5]
  parts += [[1.0, third, np.float32(-1 / 3)], [2 / 3 + third, 0.0]]
  values = np.array([np.float32(x) for x in parts], object)
  assert len({*advantages.returns(values)}) > 1
  found = fn(values, np.ones(6, bool), np.zeros(6, int))
  assert not np.asarray(found).any()
  # Rewards that differ do so by more, however large they are.
  for x in [0.0, 1e-5], [1.0, 1.00001], [1e6, 1e6 + 0.5]:
    assert advantages.differ(np.array(x)), x


@pytest.mark.parametrize('fn', CENTRED)
def test_zero_variance_gets_exactly_zero(fn):
  # The mean of five 0.1 is not 0.1 in binary.
  for value in (0.1, 1 / 3, 1e6 + 0.1):
    got = fn(np.full(5, value), np.ones(5, bool), ids(5))
    assert not got.any()


@pytest.mark.parametrize('fn', ALL)
def test_a_row_left_out_may_hold_anything(fn):
  got = fn(np.array([0.0, np.nan, 1]), np.array([True, False, True]), ids(3))
  assert got[1] == 0 and np.all(np.isfinite(got))


@settings(max_examples=40, deadline=None)
@given(
  st.lists(
    st.tuples(st.floats(-10, 10, width=32), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=24,
  ),
  st.randoms(use_true_random=False),
)
def test_properties(batch, random):
  values, ok, group = (np.array(x) for x in zip(*batch))
  order = list(range(len(values)))
  random.shuffle(order)
  for fn in ALL:
    got = fn(values, ok, group)
    assert got.dtype == np.float32 and np.all(np.isfinite(got))
    assert not got[~ok].any()
    # Order cannot show, bit for bit.
    np.testing.assert_array_equal(
      fn(values[order], ok[order], group[order]), got[order]
    )
    # What is left out cannot show.
    other = np.where(ok, values, 99.0)
    np.testing.assert_array_equal(fn(other, ok, group), got)
    np.testing.assert_array_equal(fn(values[ok], ok[ok], group[ok]), got[ok])
  for fn in CENTRED:
    # Names of groups cannot show.
    np.testing.assert_array_equal(
      fn(values, ok, 7 - group), fn(values, ok, group)
    )
  for fn in (advantages.grpo, advantages.dr_grpo, advantages.rloo):
    got = fn(values, ok, group).astype(np.float64)
    for g in np.unique(group):
      np.testing.assert_allclose(got[group == g].sum(), 0, atol=1e-3)


def test_grpo_does_not_see_scale():
  rng = np.random.default_rng(0)
  r, ok, g = rng.random(12), np.ones(12, bool), ids(4, 4, 4)
  fn = functools.partial(advantages.grpo, eps=0.0)
  np.testing.assert_allclose(
    fn(r, ok, g), fn(5 * r - 3, ok, g), rtol=1e-4, atol=1e-6
  )


@pytest.mark.parametrize('name', ROWS)
def test_shift_and_scale(name):
  """A constant on every reward cannot show; a factor does as the formula."""
  rng = np.random.default_rng(1)
  r, ok, g = rng.random(12), np.ones(12, bool), ids(4, 5, 3)
  if name == 'remax':
    greedy = rng.random(3)
    got = advantages.remax(r, ok, g, greedy)
    shifted = advantages.remax(r - 3, ok, g, greedy - 3)
    scaled = advantages.remax(5 * r, ok, g, 5 * greedy)
  else:
    fn = ROWS[name]
    got, shifted, scaled = fn(r, ok, g), fn(r - 3, ok, g), fn(5 * r, ok, g)
  divides = name in ('grpo', 'whitened', 'reinforce_pp_baseline', 'lite_ppo')
  assert np.abs(got).max() > 0.1
  np.testing.assert_allclose(shifted, got, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(
    scaled, got if divides else 5 * got, rtol=1e-4, atol=1e-5
  )


def test_golden_reinforce():
  # 1 0 0 2 4: less the mean of the other four, whatever their question.
  # 1 - 6/4; 0 - 7/4; 0 - 7/4; 2 - 5/4; 4 - 3/4.
  got = advantages.reinforce(
    np.array([1.0, 0, 0, 2, 4]), np.ones(5, bool), ids(1, 2, 2)
  )
  np.testing.assert_allclose(got, [-0.5, -1.75, -1.75, 0.75, 3.25], rtol=1e-6)


def test_golden_given():
  """What is an advantage already stays, equal values and lone rows too."""
  values, ok = np.array([-0.5, -0.5, np.nan, 2]), np.array([1, 1, 0, 1], bool)
  got = advantages.given(values, ok, np.array([0, 0, 0, 1]))
  assert got.tolist() == [-0.5, -0.5, 0, 2] and got.dtype == np.float32


def test_golden_batch_deviations():
  # Groups 1 0 | 4 0 0 2: means 1/2 and 3/2; centred 1/2 -1/2 | 5/2 -3/2 -3/2
  # 1/2. Returns: mean 7/6, squares 1 + 16 + 4 = 21, so that the sum of squared
  # deviations is 21 - 6 (7/6)^2 = 77/6 and the unbiased variance 77/30.
  r, ok, g = np.array([1.0, 0, 4, 0, 0, 2]), np.ones(6, bool), ids(2, 4)
  centred = np.array([0.5, -0.5, 2.5, -1.5, -1.5, 0.5])
  got = advantages.lite_ppo(r, ok, g, eps=0.0, ddof=1)
  np.testing.assert_allclose(got, centred / math.sqrt(77 / 30), rtol=1e-6)
  # Centred: squares 2/4 + 25/4 + 18/4 + 1/4 = 46/4, mean 0.
  got = advantages.reinforce_pp_baseline(r, ok, g, eps=0.0, ddof=0)
  np.testing.assert_allclose(
    got, centred / math.sqrt(46 / 4 / 6), rtol=1e-6, atol=1e-7
  )
  # A row whose question has no other one is in neither, but its return is in
  # the deviation of Lite PPO: 7 rows with 8 have mean 15/7, squares 85.
  r, ok, g = np.append(r, 8.0), np.ones(7, bool), np.append(g, 9)
  got = advantages.reinforce_pp_baseline(r, ok, g, eps=0.0, ddof=0)
  np.testing.assert_allclose(
    got, np.append(centred, 0) / math.sqrt(46 / 4 / 6), rtol=1e-6, atol=1e-7
  )
  got = advantages.lite_ppo(r, ok, g, eps=0.0, ddof=1)
  std = math.sqrt((85 - 15 * 15 / 7) / 6)
  np.testing.assert_allclose(got, np.append(centred, 0) / std, rtol=1e-6)


def test_golden_remax():
  # Group 0 against 1, group 1 against 0.5, group 2 failed its greedy answer.
  got = advantages.remax(
    np.array([1.0, 0, 2, 3]),
    np.array([True, True, True, True]),
    np.array([1, 0, 0, 2]),
    np.array([1.0, 0.5, np.nan]),
  )
  np.testing.assert_allclose(got, [0.5, -1, 1, 0], rtol=1e-6)


# ---- any partition


@settings(max_examples=60, deadline=None)
@given(
  st.lists(
    st.tuples(
      st.floats(-10, 10, width=32),
      st.booleans(),
      st.integers(0, 2),
      st.sampled_from([-1, 0, 5]),
    ),
    min_size=1,
    max_size=30,
  ),
  st.randoms(use_true_random=False),
)
def test_properties_of_a_partition(batch, random):
  values, ok, *labels = (np.array(x) for x in zip(*batch))
  labels = np.stack(labels)
  order = list(range(len(values)))
  random.shuffle(order)
  norm = functools.partial(advantages.normalised, eps=0.0, ddof=0)
  got = norm(values, ok, labels)
  assert got.dtype == np.float64 and not got[~ok].any()
  cells = {}
  for i in np.flatnonzero(ok):
    cells.setdefault(tuple(labels[:, i]), []).append(i)
  for rows in cells.values():
    if not advantages.differ(values[rows]):  # alone in it, too
      assert (got[rows] == 0).all()
    else:
      np.testing.assert_allclose(got[rows].mean(), 0, atol=1e-9)
      np.testing.assert_allclose(got[rows].std(), 1, rtol=1e-6)
    # A cell is what it would be alone: no other one shows.
    np.testing.assert_array_equal(
      norm(values[rows], ok[rows], np.zeros(len(rows), int)), got[rows]
    )
  # Nor does the order of rows, the names of cells, or what is not valid.
  np.testing.assert_array_equal(
    norm(values[order], ok[order], labels[:, order]), got[order]
  )
  np.testing.assert_array_equal(norm(values, ok, 9 - labels[::-1]), got)
  np.testing.assert_array_equal(norm(values, ok, labels.astype(str)), got)
  np.testing.assert_array_equal(
    norm(np.where(ok, values, np.nan), ok, labels), got
  )


def test_a_partition_of_one_kind_is_grpos():
  rng = np.random.default_rng(3)
  r, ok, g = rng.random(9), np.arange(9) != 4, ids(4, 3, 2)
  want = advantages.grpo(r, ok, g)
  for partition in (g, [g], [g, 0 * g]):
    got = advantages.normalised(r, ok, partition, eps=1e-6, ddof=1)
    np.testing.assert_array_equal(got.astype(np.float32), want)


# ---- per token

T, F = True, False


def discounted(r, v, gamma, lam):
  """The sums of GAE over the steps of one row, written out."""
  v = [*v, 0.0]
  delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
  return [
    sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:]))
    for t in range(len(r))
  ]


def test_golden_gae():
  # Loss tokens 1 and 3 of 5; V = 0.5 and 1; reward 2 at the end, on the last
  # one. gamma = lam = 1/2: delta_3 = 2 - 1 = 1, delta_1 = 0 + 1/2 - 1/2 = 0;
  # A_3 = 1, A_1 = 0 + 1/4. Were the observation at 2 a step, A_1 would differ.
  mask = [np.array([F, T, F, T, F])]
  critic = [np.array([np.nan, 0.5, np.inf, 1.0, -7.0])]
  kw = dict(gamma=0.5, lam=0.5)
  [got] = advantages.gae(
    np.array([2.0]), [True], [0], mask, critic, whiten=False, eps=0.0, **kw
  )
  np.testing.assert_allclose(got, [0, 0.25, 0, 1, 0], rtol=1e-6)
  # What the critic learns: A + V.
  [target] = advantages.lambda_returns([2.0], [True], mask, critic, **kw)
  np.testing.assert_allclose(target, [0, 0.75, 0, 2, 0], rtol=1e-6)


def test_golden_whitened_tokens():
  # Row 0 earns 2 and then 2: G = 2 + 2/2 = 3, then 2. Row 1 nothing.
  # Mean (3 + 2 + 0) / 3 = 5/3 over 3 loss tokens; squares 13; variance
  # 13/3 - 25/9 = 14/9.
  values = (np.array([0.0, 2, 2]), np.array([0.0, 0]))
  mask = [np.array([F, T, T]), np.array([F, T])]
  got = advantages.whitened_tokens(
    values, np.ones(2, bool), ids(2), mask, gamma=0.5, eps=0.0
  )
  s = math.sqrt(14 / 9)
  np.testing.assert_allclose(got[0], [0, 4 / 3 / s, 1 / 3 / s], rtol=1e-6)
  np.testing.assert_allclose(got[1], [0, -5 / 3 / s], rtol=1e-6)


def tokens(seed, B=5):
  """Rows of their own lengths, rewards on any token, values of a critic."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(2, 9, B)
  mask = [rng.random(n) < 0.6 for n in lengths]
  for m in mask:
    m[0] = False
  values = [
    np.where(rng.random(n) < 0.4, rng.normal(size=n), 0.0) for n in lengths
  ]
  return values, mask, [rng.normal(size=n) for n in lengths]


GAE = dict(gamma=0.9, lam=0.7, eps=1e-8)


def token_functions():
  """fn(values, valid, mask, critic) of those with a mask."""

  def gae(values, valid, mask, critic, whiten):
    return advantages.gae(
      values,
      valid,
      np.zeros(len(mask), int),
      mask,
      critic,
      whiten=whiten,
      **GAE,
    )

  def whitened(values, valid, mask, critic):
    return advantages.whitened_tokens(
      values, valid, np.zeros(len(mask), int), mask, gamma=0.9, eps=1e-8
    )

  return [
    functools.partial(gae, whiten=False),
    functools.partial(gae, whiten=True),
    whitened,
  ]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_gae_equals_its_sums(seed):
  values, mask, critic = tokens(seed)
  got = token_functions()[0](values, np.ones(5, bool), mask, critic)
  for value, m, v, row in zip(values, mask, critic, got):
    at = np.flatnonzero(m)
    ends = [*at[1:], len(m)]
    # A reward off the loss tokens is the one's before it.
    r = [value[a:b].sum() for a, b in zip(at, ends)]
    want = np.zeros(len(m))
    want[at] = discounted(r, v[at], 0.9, 0.7)
    np.testing.assert_allclose(row, want, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_properties_per_token(seed):
  values, mask, critic = tokens(seed)
  rng = np.random.default_rng(seed)
  valid = rng.random(5) < 0.7
  order = rng.permutation(5)
  pick = lambda rows: [rows[i] for i in order]
  T = max(map(len, mask))
  pad = lambda rows: np.stack([np.pad(x, (0, T - len(x))) for x in rows])
  for fn in token_functions():
    got = fn(values, valid, mask, critic)
    for row, m, ok in zip(got, mask, valid):
      assert row.dtype == np.float32 and np.isfinite(row).all()
      assert not row[~(m & ok)].any()
    # The order of rows cannot show, bit for bit.
    again = fn(pick(values), valid[order], pick(mask), pick(critic))
    for a, b in zip(again, pick(got)):
      np.testing.assert_array_equal(a, b)
    # Nor what the critic says off the loss tokens, nor rows not valid.
    junk = [
      np.where(m & ok, v, np.nan) for m, ok, v in zip(mask, valid, critic)
    ]
    other = [v if ok else v + 99 for ok, v in zip(valid, values)]
    for a, b in zip(fn(other, valid, mask, junk), got):
      np.testing.assert_array_equal(a, b)
    # Padding cannot show: arrays [B, T] give the same.
    padded = fn(pad(values), valid, pad(mask), pad(critic))
    for a, b in zip(padded, got):
      np.testing.assert_allclose(a[: len(b)], b, rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_observations_are_skipped_not_decayed_through(seed, extra):
  values, mask, critic = tokens(seed)

  def longer(rows, fill):
    """`extra` more environment tokens before each loss token."""
    out = []
    for x, m in zip(rows, mask):
      at = np.repeat(np.flatnonzero(m), extra)
      out.append(np.insert(x, at, fill))
    return out

  valid = np.ones(5, bool)
  for fn in token_functions():
    short = fn(values, valid, mask, critic)
    long = fn(
      longer(values, 0.0), valid, longer(mask, False), longer(critic, np.nan)
    )
    for a, b, m, n in zip(short, long, mask, longer(mask, False)):
      np.testing.assert_allclose(b[n], a[m], rtol=1e-5, atol=1e-6)


def test_gae_limits():
  """lam = gamma = 1: return less value; lam = 0: one step."""
  values, mask, critic = tokens(4)
  valid, g = np.ones(5, bool), np.zeros(5, int)
  one = advantages.gae(
    values, valid, g, mask, critic, gamma=1.0, lam=1.0, whiten=False, eps=0.0
  )
  for row, value, m, v in zip(one, values, mask, critic):
    at = np.flatnonzero(m)
    want = [value[t:].sum() - v[t] for t in at]
    np.testing.assert_allclose(row[m], want, rtol=1e-5, atol=1e-6)
  step = advantages.gae(
    values, valid, g, mask, critic, gamma=0.5, lam=0.0, whiten=False, eps=0.0
  )
  for row, value, m, v in zip(step, values, mask, critic):
    at = np.flatnonzero(m)
    follows = [*v[at][1:], 0.0]
    want = [
      value[a:b].sum() + 0.5 * u - v[a]
      for a, b, u in zip(at, [*at[1:], len(m)], follows)
    ]
    np.testing.assert_allclose(row[m], want, rtol=1e-5, atol=1e-6)
  # With a critic that knows nothing: REINFORCE's returns to go.
  flat = advantages.lambda_returns(
    np.arange(5.0), valid, mask, [0 * v for v in critic], gamma=1.0, lam=1.0
  )
  for i, (row, m) in enumerate(zip(flat, mask)):
    np.testing.assert_array_equal(row, np.where(m, i, 0))


def test_whitening_has_mean_0_and_deviation_1_over_loss_tokens():
  values, mask, critic = tokens(7)
  valid = np.array([T, F, T, T, T])
  got = token_functions()[1](values, valid, mask, critic)
  flat = np.concatenate([a[m] for a, m, ok in zip(got, mask, valid) if ok])
  np.testing.assert_allclose([flat.mean(), flat.std()], [0, 1], atol=1e-5)
