"""Entropies against a plain softmax over full logits."""

import functools

import jax
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.learn import entropy
from searchrl_jax.models import decoder
from tests.learn.test_update import CFG, UNTIED, params

pytestmark = pytest.mark.slow

LENGTHS = (8, 16)


def rows(*sizes):
  rng = np.random.default_rng(0)
  return [rng.integers(0, CFG.vocab_size, n).tolist() for n in sizes]


def scorer(p, cfg=CFG, temperature=1.0, chunk=24, **kw):
  alone = sharding.make_mesh(devices=jax.devices()[:1])
  return entropy.Entropies(
    cfg,
    p,
    temperature=temperature,
    lengths=LENGTHS,
    head_chunk=chunk,
    **dict(mesh=alone) | kw,
  )


@functools.partial(jax.jit, static_argnums=1)
def logits(p, cfg, ids):
  return decoder.logits(p, cfg, decoder.hidden_states(p, cfg, ids))


def plain(p, cfg, row, temperature):
  """Full logits in float64: (logps, entropy) of tokens 1.."""
  ids = np.zeros((1, LENGTHS[-1]), np.int32)  # one program for all rows
  ids[0, : len(row)] = row
  z = np.asarray(logits(p, cfg, ids), np.float64)[0, : len(row) - 1]
  z = z / temperature
  logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
  return (
    logp[np.arange(len(row) - 1), row[1:]],
    -(np.exp(logp) * logp).sum(-1),
  )


@pytest.mark.long
@pytest.mark.exact
@pytest.mark.parametrize(  # every two values meet
  'cfg, temperature, chunk',
  [(CFG, 1.0, 1000), (CFG, 0.6, 10), (UNTIED, 0.6, 1000), (UNTIED, 1.0, 10)],
)
def test_stats_are_those_of_the_full_softmax(cfg, temperature, chunk):
  p = params(cfg.tied)
  given = rows(5, 16, 2, 9, 8, 3)  # both buckets, one of them twice
  found = scorer(p, cfg, temperature, chunk)(given)
  for row, stats in zip(given, found, strict=True):
    for got, want in zip(stats, plain(p, cfg, row, temperature), strict=True):
      assert got.dtype == np.float32 and got.shape == (len(row),)
      assert np.isnan(got[0])
      np.testing.assert_allclose(got[1:], want, rtol=2e-5, atol=2e-6)


@pytest.mark.long
@pytest.mark.exact
def test_bfloat16_stats_are_those_of_its_own_logits():
  cfg = decoder.DecoderConfig(**{**vars(CFG), 'dtype': 'bfloat16'})
  [row] = rows(8)
  p = jax.tree.map(lambda x: x * 1.5, params())
  [stats] = scorer(p, cfg)([row])
  wanted = plain(p, cfg, row, 1.0)
  # The probabilities that average the head for the entropy are bfloat16 too.
  for got, want, tol in zip(stats, wanted, (1e-4, 1e-2), strict=True):
    np.testing.assert_allclose(got[1:], want, rtol=tol, atol=2e-5)


def test_a_uniform_policy_has_the_largest_entropy():
  flat = jax.tree.map(lambda x: 0 * x, params())
  [stats] = scorer(flat)(rows(6))
  np.testing.assert_allclose(
    stats.entropy[1:], np.log(CFG.vocab_size), rtol=1e-6
  )


def test_rows_do_not_see_each_other_and_short_ones_have_no_stats():
  s, given = scorer(params()), rows(7, 0, 1, 12, 4)
  together = s(given)
  assert [len(x.logps) for x in together] == [7, 0, 1, 12, 4]
  for row, stats in zip(given, together, strict=True):
    [alone] = s([row])
    np.testing.assert_array_equal(np.stack(stats), np.stack(alone))


def test_a_length_compiles_once_and_new_parameters_nothing():
  s = scorer(params())
  before = s(rows(3, 12))
  s.params = jax.tree.map(lambda x: x * 0.5, params())
  after = s(rows(5, 12, 7, 15))
  assert s._program._cache_size() == len(LENGTHS)
  assert not np.allclose(before[1].logps[1:], after[1].logps[1:])


def test_a_mesh_changes_nothing():
  p, given = params(), rows(5, 16, 2, 9, 8, 3, 14)
  mesh = sharding.make_mesh(2, 2, 2)
  split = jax.device_put(p, decoder.param_shardings(CFG, mesh))
  for got, want in zip(
    scorer(split, mesh=mesh)(given), scorer(p)(given), strict=True
  ):
    np.testing.assert_allclose(
      np.stack(got), np.stack(want), rtol=2e-5, atol=2e-6
    )


def test_what_cannot_be_scored_is_refused():
  with pytest.raises(
    ValueError, match=r'17 tokens.*config.batch.lengths=\(8, 16\)'
  ):
    scorer(params())(rows(3, 17))
