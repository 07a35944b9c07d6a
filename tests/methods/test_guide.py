"""Guide: who is asked again, and what of it is trained."""

import asyncio
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from configs.methods import guide
from searchrl_jax import checks, schema
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import batching, objectives
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rollout import chains
from searchrl_jax.types import Question, Rewards
from tests.fakes import ByteTokenizer, FakeEngine, FakeSource, make_env
from tests.rollout.test_chains import QUESTIONS

HINTED = [
  dataclasses.replace(q, meta={'hint': ('psst', ('look', 'there'))})
  for q in QUESTIONS
]


def play(script, questions=HINTED, **env):
  made = make_env(**env)

  async def reward(groups, step):
    del step
    flat = [t for group in groups for t in group]
    value = [made.answer(t) == 'right' for t in flat]
    return Rewards(np.array(value, np.float32), np.ones(len(flat), bool))

  c = schema.base().rollout
  c.sampler, c.group = 'configs.methods.guide.guided', 2
  c.hint_key, c.hint_frame = 'hint', '{text} {hint}'
  engine = FakeEngine(script)
  found = asyncio.run(
    chains.rollout(
      questions, env=made, engine=engine, source=FakeSource(), config=c,
      seed=0, step=5, reward=reward,
    )
  )  # fmt: skip
  assert engine.handles == {}
  return found, made


def knows_with_a_hint(history, seed):
  """Even questions are known; the others are with the hint, by half."""
  even = int(history.split('\n')[0].split()[3]) % 2 == 0
  hint = 'psst look there' in history and seed % 2 == 0
  return f'<answer>{"right" if even or hint else "no"}</answer>'


def test_a_question_without_a_success_is_asked_again_and_trained_plainly():
  found, env = play(knows_with_a_hint)
  assert found.stats.generations == 3 * 2 + 3 * 4
  assert (found.stats.hinted, found.stats.hints_left_out) == (3 * 2, 0)
  for i, group in enumerate(found.groups):
    prompt = env.reset(HINTED[i])[0].segments[0].ids.tolist()
    for t in group:
      assert t.question == HINTED[i]
      assert bool(t.meta.get('hinted')) == (i % 2 == 1)
      sampled = ByteTokenizer().decode(t.segments[0].ids)
      assert ('psst' in sampled) == (i % 2 == 1)
      [row] = batching.tokens_of(0, t)
      assert row.ids[: len(prompt)].tolist() == prompt
      # The log-probs are those that it was sampled with.
      own = [s for s in t.segments if s.author == 'policy']
      logps = np.concatenate([s.logps for s in own])
      assert row.logps[np.isfinite(row.logps)].tobytes() == logps.tobytes()


def test_a_hint_without_room_is_left_out():
  long = [dataclasses.replace(q, meta={'hint': 'x' * 4000}) for q in QUESTIONS]
  found, _ = play(lambda history, seed: '<answer>no</answer>', long)
  assert not any(t.meta.get('hinted') for g in found.groups for t in g)
  assert (found.stats.hinted, found.stats.hints_left_out) == (0, 6)


def test_golden_losses():
  """-min(pi / pi with the hint, 2) A: e^-1 1, e^.5 1, and 2 for e^2, x -1."""
  c = guide.get_config()
  plain, hinted = np.array([[-2, -1, -0.5]]), np.array([[-1, -1.5, -2.5]])
  arrays = dict(
    mask=np.ones((1, 3), bool), behaviour_logps=hinted, old=plain, ref=plain,
    advantages=np.array([[1.0, 1, -1]]),
  )  # fmt: skip
  loss, _ = objectives.policy(c).fn(jnp.asarray(plain), plain, arrays)
  np.testing.assert_allclose(loss, [[-np.exp(-1), -np.exp(0.5), 2]], rtol=1e-5)


def test_its_config_and_what_it_needs():
  c = guide.get_config('cap=3.0')
  assert c.algorithm.tis_cap == 3.0 and c.rollout.hint_key == 'queries'
  checks.check(c)
  with pytest.raises(DataError, match='queries'):
    checks.check_data(c, [Question('q', 'who?', ('Ann',))])
  c.rollout.mismatch_alarm = 0.1
  with pytest.raises(ConfigError, match='mismatch_alarm=0.1'):
    checks.check(c)
