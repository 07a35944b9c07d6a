"""SSRL's recipe: its config, its data, sim-to-real and the scaling curve."""

import asyncio
import math

import numpy as np
import pandas as pd
import pytest

from configs import ssrl
from experiments.ssrl import closedbook, curve, rows
from searchrl_jax import checks, sft
from searchrl_jax.data import core as data
from searchrl_jax.run import services
from searchrl_jax.sources import none
from searchrl_jax.sweep import core
from searchrl_jax.types import Question, SearchRequest

pytestmark = pytest.mark.slow


def tiny():
  """The recipe around an untrained model."""
  c = ssrl.get_config('seed=4')
  c.model.arch.update(
    dict(
      hidden_size=32,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=2,
      intermediate_size=64,
    )
  )
  c.mesh.data = 1
  c.env.max_turn_tokens, c.env.max_tokens = 24, 48
  c.env.max_observation_tokens = 30
  c.engine.slots, c.engine.max_len = 8, 48
  c.batch.lengths = (48,)
  for split in ('heldout', 'unseen'):
    c.data.eval[split].n = 4
  c.eval.bootstrap = 20
  c.log.tensorboard = c.log.progress = False
  return c


def test_the_recipe_is_one_generation_of_its_own_information():
  small, full = ssrl.get_config(), ssrl.get_config('model=m,reward=binary')
  checks.check(small)
  checks.check(full)
  for c in (small, full):
    assert (c.env.information, c.env.max_turns) == ('policy', 0)
    assert not c.env.train_information
    assert c.algorithm.clip_dual == 3.0 and c.algorithm.kl_coef == 0.001
  assert full.reward.ssrl.fn == 'experiments.ssrl.reward.binary'
  with pytest.raises(ValueError, match="reward='em'.*graded, binary"):
    ssrl.get_config('reward=em')
  with pytest.raises(ValueError, match='shuffled.*model'):
    ssrl.get_config('model=m,shuffled')


@pytest.mark.parametrize('real', [1, -1])
def test_real_passages_in_training_are_refused_with_the_fix(real):
  c = ssrl.get_config()
  c.env.real_searches = real
  with pytest.raises(
    checks.ConfigError, match=(rf'config\.env\.real_searches={real} .*evaluate')
  ):
    checks.check(c)
  checks.check_engine(c)  # to evaluate with them is the purpose


def test_no_search_engine_is_asked_at_full_size(tmp_path):
  c = ssrl.get_config('model=m')
  with services.retrieval(c, str(tmp_path)) as url:
    assert url == ''
  source = services.source(c, '')
  assert asyncio.run(source.check()) == {}
  (error,) = asyncio.run(source.search([SearchRequest('q', 1)]))
  assert error.message.startswith("config.source.module='none'")
  for field, value in (('real_searches', -1), ('information', 'source')):
    c = ssrl.get_config('model=m')
    c.env[field], c.env.max_turns = value, 1
    with pytest.raises(checks.ConfigError, match="source.module='none'"):
      checks.check_engine(c)
  c.env.max_turns = 0  # chain of thought: nothing is searched
  checks.check_engine(c)
  assert none.NONE == 'none'


@pytest.mark.parametrize('target', ['Ann', ['Ann', 'A. N.']])
def test_ssrls_parquet_is_read_unchanged(tmp_path, target):
  """The columns that its trainer reads; prompts hold the instructions."""
  prompt = [{'role': 'user', 'content': 'Use <search> your query </search>.'}]
  pd.DataFrame(
    [
      {
        'data_source': source,
        'prompt': prompt,
        'reward_model': {'ground_truth': {'target': target}},
        'extra_info': {'split': 'train', 'index': i},
      }
      for i, source in enumerate(('nq', 'hotpotqa'))
    ]
  ).to_parquet(tmp_path / 'train.parquet')
  c = ssrl.get_config('model=m')
  c.data.dir = str(tmp_path)
  c.data.train.ssrl.path = 'train.parquet'
  first, second = data.load_sets(c.data.train, c.data)['ssrl']
  assert (first.id, second.id) == ('nq/0', 'hotpotqa/1')
  assert dict(first.messages[0]) == prompt[0]
  assert first.answers == tuple([target] if target == 'Ann' else target)


def test_a_warm_start_learns_information_that_rl_leaves_out(
  tmp_path, monkeypatch
):
  class Seen(Exception):
    pass

  def examples(config, env, search):
    raise Seen(
      *(
        (c.train_information, c.train_observations)
        for c in (config.env, env.config)
      )
    )

  monkeypatch.setattr(sft, 'examples', examples)
  c = tiny()
  c.source.module = 'none'
  c.env.train_observations = True
  with pytest.raises(Seen) as found:
    sft.sft(c, str(tmp_path))
  assert found.value.args == ((False, True), (True, False))


@pytest.fixture(scope='module')
def url(tmp_path_factory):
  folder = tmp_path_factory.mktemp('world')
  with services.retrieval(tiny(), str(folder)) as found:
    yield found


def test_a_real_search_finds_the_unseen(url, tmp_path):
  """All that sim-to-real is about: what the policy cannot have read."""
  c = tiny()
  world = closedbook.generate(4, **c.data.world.to_dict())
  questions = [q for q in world.questions['unseen'] if q.hops == 1][:40]
  source = services.source(c, url)

  async def search():
    found = await source.search(
      [SearchRequest(q.meta['path'][0], 1) for q in questions]
    )
    await source.close()
    return found

  for q, result in zip(questions, asyncio.run(search()), strict=True):
    name, relation = q.meta['path']
    (passage,) = result.passages
    assert passage.title == name
    assert f'{relation} {q.answers[0]}' in passage.text


def test_fit_finds_the_law():
  ks = (1, 2, 4, 8, 16)
  for a, b in ((-1.2, -0.5), (-3.0, -0.2)):
    found = curve.fit(ks, [math.exp(a * k**b) for k in ks])
    assert found['a'] == pytest.approx(a, rel=1e-3)
    assert found['b'] == pytest.approx(b, rel=1e-3)
    assert found['mae'] < 1e-6
  noisy = curve.fit(ks, [0.2, 0.35, 0.4, 0.6, 1.0])  # a share of 1 is a point
  assert 0 < noisy['mae'] < 0.1
  with pytest.raises(ValueError, match='pass@k'):
    curve.fit(ks, [0, 0, 0, 0.1, 1])


def test_guessing_knows_the_answers_and_not_whose_they_are():
  questions = [
    Question(str(i), 'q', (answer,), meta={'path': ('x', relation)})
    for i, (relation, answer) in enumerate(
      [
        ('home', 'a'),
        ('home', 'a'),
        ('home', 'b'),
        ('home', 'c'),
        ('emblem', 'd'),
      ]
    )
  ]
  # Own shares 1/2, 1/2, 1/4, 1/4 of 'home', and 1 of 'emblem'.
  assert curve.guessing(questions, 1) == pytest.approx((1.5 + 1) / 5)
  # 1 - (1 - p)^2: 3/4, 3/4, 7/16, 7/16, 1.
  assert curve.guessing(questions, 2) == pytest.approx((1.5 + 0.875 + 1) / 5)


def test_the_table_evaluates_what_the_issue_asks_for():
  grpo = rows.ROW.arm('grpo')
  assert set(grpo.evaluations) == {
    'after',
    'k1',
    'k3',
    'all',
    'guided',
    'curve',
  }
  assert rows.ROW.arm('shuffled').config(0).data.train.rl.shuffled
  assert grpo.config(1).data.world_seed == grpo.config(1).seed == 1
  short = rows.ROW.arm('no_information').config(0)
  assert short.env.max_turn_tokens < grpo.config(0).env.max_turn_tokens
  stages = core.plan(rows.ROW, rows.ROW.arms, (0,))
  assert stages[0] == 'warm/warm/0' and len(stages) == 5


def test_the_figure_is_small(tmp_path):
  law = {f'pass@{k}': 1 - 0.5 ** np.log2(2 * k) for k in curve.KS}
  found = curve.fit(curve.KS, list(law.values()))
  values = (
    law
    | {f'maj@{k}': 0.5 for k in curve.KS}
    | {f'guess@{k}': 0.01 * k for k in curve.KS}
    | found
  )
  arm = {'mean': {'curve': {k: {'mean': v} for k, v in values.items()}}}
  curve.plot({'warm': arm, 'grpo': arm}, tmp_path / 'scaling.png')
  assert 2_000 < (tmp_path / 'scaling.png').stat().st_size < 60_000
