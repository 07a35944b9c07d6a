"""Critique-GRPO: what is criticised, and what joins the group."""

import asyncio
import dataclasses

import numpy as np
import pytest

from configs.methods import critique_grpo, grpo
from searchrl_jax import checks, schema
from searchrl_jax.data.checks import DataError
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import blocks
from searchrl_jax.rollout import chains, core
from searchrl_jax.types import Question, Rewards
from tests.fakes import ByteTokenizer, FakeEngine, FakeSource, make_env
from tests.methods import group as hand
from tests.rollout.test_samplers import turns

FIND = '<search>Bob</search>'
ASKED = Question('q', 'who?', ('Ann',))


def play(
  script, grounded=True, question=ASKED, source=None, earned=None, **env
):
  made = make_env(**env)

  async def reward(groups, step):
    del step
    flat = [t for group in groups for t in group]
    value = [made.answer(t) == 'Ann' for t in flat]
    if earned is not None:
      value = [earned[made.answer(t)] for t in flat]
    return Rewards(np.array(value, np.float32), np.ones(len(flat), bool))

  c = schema.base().rollout
  c.sampler, c.group = 'configs.methods.critique_grpo.critiqued', 3
  c.critique, c.critique_words = critique_grpo.MICRO
  c.grounded, c.max_failed = grounded, 1.0
  engine = FakeEngine(script)
  source = source or FakeSource(text='not he but Ann')
  found = asyncio.run(
    chains.rollout(
      [question], env=made, engine=engine, source=source, config=c, seed=0,
      step=5, reward=reward,
    )
  )  # fmt: skip
  assert engine.handles == {}
  return found, made


def refines(history, seed):
  """Guesses; with a critique it looks the answer up, and gives it."""
  if 'no answer Ann' not in history:
    return '<answer>Bob</answer>'
  return '<answer>Ann</answer>' if '<information>' in history else FIND


def test_a_refinement_takes_the_last_place_behind_the_plain_prompt():
  found, env = play(refines)
  [[*tried, best]] = found.groups
  assert [env.answer(t) for t in tried] == ['Bob', 'Bob']
  assert env.answer(best) == 'Ann' and best.meta['refines'] == 0
  # What it was asked with: its own attempt, the verdict, the golden answer.
  prompt = ByteTokenizer().decode(best.segments[0].ids)
  assert prompt == 'Q: who? 1: answer: Bob no answer Ann\n'
  [row] = batching.tokens_of(0, best)
  plain = env.reset(ASKED)[0].segments[0].ids.tolist()
  assert row.ids[: len(plain)].tolist() == plain
  own = b''.join(ids for turn in turns(best) for ids, _, _ in turn)
  assert row.ids[row.mask].tobytes() == own
  # The policy did not sample it there.
  assert best.foreign and np.isnan(row.logps).all()
  assert not any(t.foreign for t in tried)
  assert best.meta.keys() == tried[0].meta.keys() | {'refines', 'hinted'}
  assert (found.stats.traces, found.stats.traces_left_out) == (1, 0)
  # Two attempts, and two refinements of two turns.
  assert found.stats.generations == 2 + 2 * 2


def test_the_first_of_the_best_is_taken():
  def script(history, seed):
    if ' answer Ann' in history:
      return f'<answer>{history.split("answer: ")[1][0]}!</answer>'
    return f'<answer>{"AB"[seed // 2 % 2]}</answer>'

  earned = {'A!': 0.25, 'B!': 0.75}
  for pays in (
    earned,
    dict(zip(earned, (0.75, 0.25))),
    dict.fromkeys(earned, 1),
  ):
    found, env = play(script, earned=pays)
    [[*tried, best]] = found.groups
    said = [f'{env.answer(t)}!' for t in tried]
    assert len({*said}) == 2
    wanted = max(said, key=pays.__getitem__)  # the first of equals
    assert env.answer(best) == wanted
    assert best.meta['refines'] == said.index(wanted)


def copies(history, seed):
  """Repeats what the critique says."""
  told = 'answer Ann' in history
  return f'<answer>{"Ann" if told else "Bob"}</answer>'


def test_a_refinement_that_copies_the_critique_is_left_out():
  """As released, the policy learns to answer what it has not found."""
  found, env = play(copies)
  [group] = found.groups
  assert [env.answer(t) for t in group] == ['Bob'] * 3
  assert not any(t.foreign for t in group)
  assert (found.stats.traces, found.stats.traces_left_out) == (0, 2)
  found, env = play(copies, grounded=False)
  [[*_, best]] = found.groups
  assert env.answer(best) == 'Ann' and best.foreign
  assert not env.retrieved(best)


GIVE = '<answer>Ann</answer>'


@pytest.mark.parametrize(
  'first',
  [
    '<search>Ann</search>',
    'maybe Ann <search>Bob</search>',
    '<think>Ann?</think><search>Bob</search>',
    '<search>Bob;is it Ann</search>',
  ],
)
def test_a_refinement_that_looks_up_the_critiques_answer_is_left_out(first):
  """What is searched for is found, so that the answer would have been read."""

  def script(history, seed):
    if 'answer Ann' not in history:
      return '<answer>Bob</answer>'
    return GIVE if '<information>' in history else first

  found, env = play(script)
  assert not any(t.foreign for t in found.groups[0])
  assert (found.stats.traces, found.stats.traces_left_out) == (0, 2)
  # Where the question states it, the policy was not told it.
  asked = dataclasses.replace(ASKED, text='Ann or Bob?')
  found, env = play(script, question=asked)
  best = found.groups[0][-1]
  assert best.foreign and env.retrieved(best) and env.answer(best) == 'Ann'
  # It still has to read it.
  found, env = play(script, question=asked, source=FakeSource(text='nothing'))
  assert not any(t.foreign for t in found.groups[0])


def test_a_query_for_what_was_read_before_is_no_copy():
  def script(history, seed):
    if 'answer Ann' not in history:
      return '<answer>Bob</answer>'
    return [FIND, '<search>Ann</search>', GIVE][history.count('<information>')]

  found, env = play(script)
  assert (
    env.answer(found.groups[0][-1]) == 'Ann' and found.groups[0][-1].foreign
  )


def test_a_query_in_a_call_is_one_of_the_policys():
  """The text of the call may have no space before it."""
  question = dataclasses.replace(ASKED, answers=('x',))
  t = hand.play(('who', 'x'), answer='x', question=question)  # reads "of x"
  assert not blocks.recited(t, hand.ENV, question)
  [found] = t.searches
  request = dataclasses.replace(found.request, query='is it x')
  found = dataclasses.replace(found, request=request)
  called = dataclasses.replace(t, searches=(found,))
  assert blocks.recited(called, hand.ENV, question)


def test_what_a_service_failed_is_not_criticised():
  def script(history, seed):
    return '<search>down</search>' if 'answer Ann' in history else copies('', 0)

  source = FakeSource(fails=lambda q, attempt: True)
  found, env = play(script, source=source)
  assert not any(t.failed for t in found.groups[0])
  assert (found.stats.traces, found.stats.traces_left_out) == (0, 2)
  found, env = play(lambda *_: '<search>down</search>', source=source)
  assert all(t.failed for t in found.groups[0])
  assert found.stats.generations == 3 and not found.stats.traces_left_out


def test_a_refinement_is_of_its_own_attempt_where_another_failed():
  """The release takes what was tried in groups of a fixed size, in order."""
  first = core.trajectory_seed(0, 5, 'q', 'solver', 0)

  def script(history, seed):
    failing = seed == first and 'answer Ann' not in history
    return '<search>down</search>' if failing else refines(history, seed)

  down = FakeSource(lambda query, attempt: query == 'down', text='by Ann')
  found, env = play(script, source=down)
  failed, tried, best = found.groups[0]
  assert failed.failed and env.answer(tried) == 'Bob'
  assert best.meta['refines'] == 1 and env.answer(best) == 'Ann'
  assert (found.stats.traces, found.stats.traces_left_out) == (1, 0)


def test_a_critique_without_room_is_left_out():
  long = dataclasses.replace(ASKED, answers=('Ann', 'A' * 400))
  found, _ = play(refines, question=long, max_tokens=300)
  assert found.groups[0][-1].foreign
  long = dataclasses.replace(ASKED, answers=('A' * 400,))
  found, _ = play(refines, question=long, max_tokens=300)
  assert not found.groups[0][-1].foreign
  assert found.stats.traces_left_out == 2


def test_its_config_and_what_it_needs():
  c = critique_grpo.get_config('grounded=False')
  assert not c.rollout.grounded and c.algorithm.entropy_coef == 0.001
  checks.check(c)
  # An attempt and a refinement.
  room = 2 * grpo.get_config().env.max_tokens
  assert c.env.max_tokens == c.engine.max_len == c.batch.lengths[-1] == room
  with pytest.raises(DataError, match='golden answers'):
    checks.check_data(c, [Question('q', 'who?')])
  for field, value, message in (
    ('critique', '{atempt}', "critique='{atempt}'.*{attempt}, {verdict}"),
    ('critique_words', ('right',), r"critique_words=\('right',\): give two"),
  ):
    wrong = critique_grpo.get_config()
    wrong.rollout[field] = value
    with pytest.raises(ConfigError, match=f'rollout.{message}'):
      checks.check(wrong)
  c.algorithm.loss = 'clip'
  with pytest.raises(ConfigError, match="loss='clip'.*foreign"):
    checks.check(c)
