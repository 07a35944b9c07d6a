"""The teacher's weights in a run, and after a kill."""

import json

from ml_collections import ConfigDict
import pytest

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
