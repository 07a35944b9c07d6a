"""OPSD: what is sampled is pulled towards the teacher, whatever it earned."""

import numpy as np
import pytest

from configs.methods import opsd
from searchrl_jax import checks
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import advantages, teacher
from searchrl_jax.types import Question
from tests.methods import group as hand

DELTA = [np.float32([0, 0.5, -1]), np.float32([0, 0.25]), np.float32([0, 2])]


def distilled(valid=(True, True, True), **kw):
  fields = dict(scale=1.0, outcome=0.0, eps=0.0, ddof=1) | kw
  values = np.array([1.0, 0, 0])
  return advantages.distilled(values, valid, [0, 0, 0], DELTA, **fields)


def test_golden():
  got = distilled(scale=2.0)
  np.testing.assert_allclose(got[0], [0, 1, -2])
  np.testing.assert_allclose(got[1], [0, 0.5])
  # With the outcome: GRPO's 2/3 and -1/3 over sqrt(1/3), halved.
  got = distilled(outcome=0.5)
  np.testing.assert_allclose(got[0], 0.577350 + DELTA[0], rtol=1e-5)
  np.testing.assert_allclose(got[1], -0.288675 + DELTA[1], rtol=1e-5)
  assert not distilled(valid=(True, True, False))[2].any()


def test_its_expected_gradient_is_that_of_the_reverse_kl():
  """sum over actions of S delta grad log S = -grad KL(S || T), by hand.

  For softmax logits z, d KL / dz_i = S_i (log S_i - log T_i - KL).
  """
  rng = np.random.default_rng(0)
  softmax = lambda z: np.exp(z) / np.exp(z).sum()
  s, t = softmax(rng.normal(size=5)), softmax(rng.normal(size=5))
  delta = np.log(t) - np.log(s)
  fields = dict(scale=1.0, outcome=0.0, eps=0.0, ddof=1)
  [advantage] = advantages.distilled([0.0], [True], [0], [delta], **fields)
  grad_log = np.eye(5) - s  # d log S_a / dz_i
  got = (s * advantage) @ grad_log
  kl = (s * -delta).sum()
  np.testing.assert_allclose(got, -s * (-delta - kl), atol=1e-6)


def test_its_config_and_what_it_needs():
  c = opsd.get_config('scale=0.5,outcome=1.0,weights=frozen')
  assert c.teacher.weights == 'frozen'
  checks.check(c)
  assert c.batch.lengths[-1] > c.env.max_tokens  # beside the demonstration
  bare = Question('q', 'who?', ('Ann',))
  with pytest.raises(DataError, match='facts'):
    checks.check_data(c, [bare])
  own = opsd.get_config('key=path')
  told = Question('q', 'who?', ('Ann',), meta={'path': ('Ann', ('of', 'Bo'))})
  checks.check_data(own, [told])
  group = [hand.play(question=told)]
  kw = own.teacher.context_kw
  assert teacher.from_data(group, None, hand.ENV, **kw) == ['Ann of Bo']
