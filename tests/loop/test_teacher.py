"""The teacher's weights in a run, and after a kill."""

import json

from ml_collections import ConfigDict
import pytest

from configs.methods import ig_search, trace
from searchrl_jax import train
from searchrl_jax.learn import update
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.usefixtures('programs')]


class Killed(BaseException):
  """Stands for a kill."""


def config(url, weights):
  c = tiny.config(url)
  c.algorithm.advantage = 'distilled'
  c.algorithm.advantage_kw = ConfigDict(
    dict(scale=1.0, outcome=1.0, eps=1e-6, ddof=1)
  )
  c.teacher.context = 'own'
  c.teacher.weights, c.teacher.every, c.teacher.rate = weights, 2, 0.25
  c.train.steps = 4
  c.eval.every = 0
  return c


def deltas(folder):
  """Mean |delta| of each step, and the loss."""
  steps = [json.loads(x) for x in (folder / 'metrics.jsonl').open()]
  names = 'train/teacher_delta_abs', 'train/loss', 'train/grad_norm'
  return [[s[name] for name in names] for s in steps if names[0] in s]


def test_distributions_in_the_loss(url, tmp_path):
  """A frozen teacher with the policy's prompt is left behind, and pulls."""
  c = config(url, 'frozen')
  c.algorithm.advantage, c.algorithm.advantage_kw = 'dr_grpo', ConfigDict()
  c.teacher.columns.k, c.optim.lr = 8, 1e-2
  far = {}
  for coef in (1e-3, 1e3):
    c.teacher.columns.coef = coef
    train.train(c, str(tmp_path / str(coef)))
    steps = [
      json.loads(x) for x in (tmp_path / str(coef) / 'metrics.jsonl').open()
    ]
    name = 'train/teacher_distance'
    far[coef] = [s[name] / coef for s in steps if name in s]
    assert all(s['train/teacher_tokens'] > 0 for s in steps if name in s)
  free, held = far[1e-3], far[1e3]
  assert abs(free[0]) < 1e-6 < free[-1]
  assert held[-1] < free[-1] / 2, (free, held)


@pytest.mark.parametrize('method', [trace, ig_search])
def test_the_golden_answer_is_scored_in_every_step(url, tmp_path, method):
  like, c = method.get_config(), config(url, 'frozen')
  for name in 'advantage', 'advantage_kw':
    c.algorithm[name] = like.algorithm[name]
  c.teacher.context, c.teacher.gold = '', like.teacher.gold
  train.train(c, str(tmp_path))
  steps = [json.loads(x) for x in (tmp_path / 'metrics.jsonl').open()]
  trained = [s for s in steps if 'train/gold_rows' in s]
  assert len(trained) == c.train.steps
  for s in trained:
    assert s['train/gold_rows'] > 0 == s['train/gold_too_long']
    assert s['train/grad_norm'] > 0


@pytest.mark.parametrize(
  'weights, same',
  [
    ('live', [True] * 4),
    ('frozen', [True, False, False, False]),
    ('copy', [True, False, True, False]),  # after steps 2 and 4
    ('ema', [True, False, False, False]),
  ],
)
def test_weights_of_a_teacher_with_the_policys_prompt(
  url, tmp_path, monkeypatch, weights, same
):
  """Its deltas are 0 to the bit where its weights are the policy's."""
  c = config(url, weights)
  train.train(c, str(tmp_path / 'whole'))
  found = deltas(tmp_path / 'whole')
  assert [delta == 0 for delta, *_ in found] == same
  if weights == 'live':
    return  # nothing of it is saved
  real, calls = update.Updater.step, []

  def killed(*args, **kw):
    calls.append(1)
    if len(calls) == 4:
      raise Killed
    return real(*args, **kw)

  with monkeypatch.context() as m:
    m.setattr(update.Updater, 'step', killed)
    with pytest.raises(Killed):
      train.train(c, str(tmp_path / 'cut'))
  train.train(c, str(tmp_path / 'cut'))
  assert deltas(tmp_path / 'cut') == found
