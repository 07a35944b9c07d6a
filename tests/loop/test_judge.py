"""Training on the verdicts of a language model, and what an outage does."""

import json

import pytest

from searchrl_jax import train
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rewards.judge import JudgeError
from searchrl_jax.sources.chat import ChatError
from tests import chat_server, tiny
from tests.loop.test_train import lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]


def config(url, judge):
  c = tiny.config(url)
  c.judge.update(url=judge, attempts=1, timeout=5.0)
  c.reward = dict(
    judge=dict(fn='judge.correct', weight=1.0, after_em=True),
    em=dict(fn='answer.em', weight=0.0),
  )
  c.eval.every = 0
  return c


def odd(body):
  """Right where the answer has an odd number of characters."""
  answer = json.loads(body['messages'][-1]['content'])['answer']
  return json.dumps({'verdict': 'correct' if len(answer) % 2 else 'incorrect'})


# An untrained policy answers nothing: this one's turns are answers.
def answering(monkeypatch):
  from searchrl_jax.text.env import SearchEnv

  def answer(self, trajectory):
    own = [s for s in trajectory.segments if s.author == 'policy']
    return self.tokenizer.decode(own[0].ids).strip() or None

  monkeypatch.setattr(SearchEnv, 'answer', answer)


@pytest.mark.long
def test_verdicts_are_rewards_and_scores(url, tmp_path, monkeypatch):
  answering(monkeypatch)
  with chat_server.serve(odd) as chats:
    c = config(url, chats.url)
    train.train(c, str(tmp_path / 'run'))
    steps = lines(tmp_path / 'run/metrics.jsonl')
    asked = len(chats.asked)
    values = evaluate.evaluate(c, str(tmp_path / 'run'), str(tmp_path / 'e'))
  assert asked and len(steps) == c.train.steps
  assert all(0 <= s['reward/judge'] <= 1 for s in steps)
  # Exact match stands beside it, whatever the judge says.
  assert all(s['reward/em'] == 0 for s in steps)
  assert 0 < sum(s['reward'] for s in steps) < len(steps)
  rows = lines(tmp_path / 'e/rows.jsonl')
  assert {row['judged'] for row in rows} <= {0.0, 1.0}
  assert values['eval/judged'] == pytest.approx(
    sum(row['judged'] for row in rows) / len(rows)
  )


@pytest.mark.long
def test_an_outage_stops_the_run_saved_and_it_goes_on(
  url, tmp_path, monkeypatch
):
  answering(monkeypatch)
  up = {'up': True}
  with chat_server.serve(lambda body: odd(body) if up['up'] else 503) as chats:
    c = config(url, chats.url)
    c.train.steps = 2
    train.train(c, str(tmp_path / 'whole'))

    real = train.rewards.of_groups

    async def of_groups(config, groups, context, **kw):
      up['up'] = context.step != 1 or again  # away for the second step
      return await real(config, groups, context, **kw)

    again = False
    monkeypatch.setattr(train.rewards, 'of_groups', of_groups)
    with pytest.raises(JudgeError, match='max_failed=0.2.*overloaded'):
      train.train(c, str(tmp_path / 'run'))
    assert len(lines(tmp_path / 'run/metrics.jsonl')) == 1
    again = up['up'] = True
    train.train(c, str(tmp_path / 'run'))
  runs = [lines(tmp_path / f'{r}/metrics.jsonl') for r in ('whole', 'run')]
  assert [s['reward'] for s in runs[0]] == [s['reward'] for s in runs[1]]
  assert runs[0][-1]['train/grad_norm'] == runs[1][-1]['train/grad_norm']


def test_an_absent_judge_is_told_at_the_start(url, tmp_path):
  with chat_server.serve(odd) as chats:
    absent = chats.url
  with pytest.raises(ChatError, match=f'{absent}.*start the server'):
    train.train(config(url, absent), str(tmp_path / 'run'))
  assert not (tmp_path / 'run/metrics.jsonl').exists() or not lines(
    tmp_path / 'run/metrics.jsonl'
  )
