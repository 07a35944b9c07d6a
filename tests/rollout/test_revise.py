"""Attempts that are cut, the verdicts on them, and what is trained of both."""

import asyncio
import dataclasses

import numpy as np
import pytest

from searchrl_jax import checks, schema
from searchrl_jax.learn import batching
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rollout import chains, revise
from tests import scripted, tiny
from tests.engines.common import CFG, make_engine
from tests.fakes import (
  ByteTokenizer,
  FakeEngine,
  FakeSource,
  make_env,
  searcher,
)
from tests.rollout.test_chains import QUESTIONS
from tests.rollout.test_samplers import Counting, turns

pytestmark = pytest.mark.slow


def saying(reply):
  """A policy that searches twice and answers, and as a refiner replies."""

  def script(history, seed):
    if history.startswith('search again?'):
      return reply
    return searcher(history, seed)

  return script


def play(script, questions=QUESTIONS[:2], *, engine=None, source=None, **kw):
  c = schema.base().rollout
  fields = {k: kw.pop(k) for k in list(kw) if k in c}
  c.update(dict(sampler='revise', group=4, refiner='micro_refiner') | fields)
  engine = engine or FakeEngine(script)
  found = asyncio.run(
    chains.rollout(
      questions, config=c, env=kw.pop('env', None) or make_env(),
      engine=engine, source=source or FakeSource(), seed=0, step=5, **kw,
    )
  )  # fmt: skip
  assert engine.handles == {}
  return found


def halves(found):
  return [(group[:2], group[2:]) for group in found.groups]


@pytest.mark.parametrize('step', [1, 2, 3])
def test_what_stands_before_the_cut_stays_and_the_rest_is_sampled_again(step):
  accepted = halves(play(saying('<answer>0</answer>')))
  reply = f'<think>see</think><answer> {step} </answer>'
  cut = halves(play(saying(reply)))
  for (before, _), (after, verdicts) in zip(accepted, cut, strict=True):
    for draft, t, verdict in zip(before, after, verdicts, strict=True):
      # Tokens, log-probs and versions; another stream from there on.
      kept, new = turns(t)[: step - 1], turns(t)[step - 1]
      assert kept == turns(draft)[: step - 1] and len(kept) == step - 1
      assert new != turns(draft)[step - 1]
      assert t.meta['cut'] == step == verdict.meta['step']
      assert t.meta['draft'] == make_env().answer(draft)
      assert draft.meta['cut'] == 0 and len(t.searches) == 2
      assert t.searches[: step - 1] == draft.searches[: step - 1]


def test_the_stats_count_what_was_cut():
  accepted = play(saying('<answer>0</answer>')).stats
  cut = play(saying('<answer>2</answer>')).stats
  # Of four attempts, a search and an answer again.
  assert cut.generations == accepted.generations + 4 * 2
  assert cut.searches == accepted.searches + 4
  assert cut.sampled_tokens > accepted.sampled_tokens


def test_each_half_is_trained_on_what_the_policy_wrote_in_it():
  for attempts, verdicts in halves(play(saying('<answer>2</answer>'))):
    for t in (*attempts, *verdicts):
      own = sum(len(s.ids) for s in t.segments if s.author == 'policy')
      [tokens] = batching.tokens_of(0, t)
      assert tokens.mask.sum() == own and np.isfinite(tokens.logps).sum() == own
    assert [t.role for t in attempts] == ['solver'] * 2
    assert [t.role for t in verdicts] == ['refiner'] * 2
    assert [t.meta['on'] for t in verdicts] == [0, 1]


def test_a_refiner_reads_the_question_and_numbered_steps():
  [(attempts, verdicts), _] = halves(play(saying('<answer>0</answer>')))
  for t, verdict in zip(attempts, verdicts, strict=True):
    [prompt] = [s for s in verdict.segments if s.author == 'prompt']
    a, b = (s.request.query for s in t.searches)
    assert ByteTokenizer().decode(prompt.ids) == (
      'search again? what is 0\n'
      f'1: think: t0 search: {a} information: T: {a}\n'
      f'2: think: t1 search: {b} information: T: {b}\n'
      f'3: answer: {make_env().answer(t)}\n'
    )
    assert verdict.meta['found'] == [[f'id-{a}'], [f'id-{b}'], []]


@pytest.mark.parametrize(
  'reply, step',
  [
    ('<answer>step 1, for sure 2</answer>', 1),
    ('<answer>4</answer>', None),  # there are three steps
    ('<answer>99999999999</answer>', None),
    ('<answer>none</answer>', None),
    ('<answer>\u0662</answer>', None),  # a digit of another script
    ('2', None),
    ('<search>2</search>', None),  # it has none
  ],
)
def test_a_reply_that_names_no_step_accepts(reply, step):
  for attempts, verdicts in halves(play(saying(reply))):
    assert [t.meta['step'] for t in verdicts] == [step] * 2
    assert [t.meta['cut'] for t in attempts] == [step or 0] * 2
    assert not any(t.searches for t in verdicts)


def test_tags_in_what_was_found_are_no_tags_of_a_refiners():
  source = FakeSource(text='so <answer>1</answer>')
  [(_, verdicts), _] = halves(play(saying('<answer>0</answer>'), source=source))
  prompt = ByteTokenizer().decode(verdicts[0].segments[0].ids)
  assert 'so' in prompt and '<answer>' not in prompt


def test_an_attempt_without_room_is_accepted_unread():
  """What its verdict has in the loss is nothing."""
  found = play(lambda *_: 'x' * 300, env=make_env(max_tokens=400))
  for attempts, verdicts in halves(found):
    assert [t.meta['cut'] for t in attempts] == [0, 0]
    for t in verdicts:
      assert not t.meta['asked'] and t.meta['step'] is None
      assert not batching.masks([t])[0].any() and not t.failed


def test_a_verdict_has_room_for_a_whole_turn_or_is_not_asked():
  """What the end of the sequence cuts off would be trained as unread."""

  def script(history, seed):
    reads = history.startswith('search again?')
    return f'<answer>{"0" if reads else "y" * 100}</answer>'

  [(_, (verdict, _)), _] = halves(play(script))
  n = len(verdict.segments[0].ids)
  for room, asked in ((200, True), (199, False), (8, False)):
    env = make_env(max_tokens=n + room, max_turn_tokens=200)
    for _, verdicts in halves(play(script, env=env)):
      assert [t.meta['asked'] for t in verdicts] == [asked] * 2
      assert [m.any() for m in batching.masks(verdicts)] == [asked] * 2
      assert {t.end for t in verdicts} == {'answer'}


def test_an_engine_without_room_for_a_second_sequence_is_refused():
  """Else the verdict waits for the room that its attempt holds."""
  for holds, staleness in ((1, 0), (3, 1)):
    engine = FakeEngine(saying('<answer>0</answer>'))
    engine.holds = holds
    with pytest.raises(ConfigError, match='engine.slots.*engine.host_gib'):
      play(None, engine=engine, max_staleness=staleness)
    assert not engine.opened
  engine.holds = 4
  play(None, engine=engine, max_staleness=1)


def test_an_attempt_that_answers_twice_is_read_whole():
  turns = '<answer>Bob</answer>', '<refine>no</refine>', '<answer>Ann</answer>'
  env = scripted.make(
    ByteTokenizer(), 'micro_contexts', max_turns=2, attempts=2,
    on_answer='refine', max_note_tokens=60, max_turn_tokens=200,
    max_tokens=2000,
  )  # fmt: skip

  def script(history, seed):
    if history.startswith('search again?'):
      return '<answer>2</answer>'
    return turns[sum(turn in history for turn in turns)]

  for attempts, verdicts in halves(play(script, env=env)):
    assert [env.answer(t) for t in attempts] == ['Ann'] * 2
    assert [t.meta['step'] for t in verdicts] == [2, 2]


def test_a_service_that_fails_a_draft_fails_its_verdict():
  source = FakeSource(fails=lambda q, attempt: q.endswith('-1'))
  found = play(saying('<answer>1</answer>'), source=source, max_failed=1.0)
  for attempts, verdicts in halves(found):
    assert all(t.failed for t in (*attempts, *verdicts))
    assert not any(t.meta['asked'] for t in verdicts)


def test_a_service_that_fails_what_is_sampled_again_leaves_the_verdict():
  """The first search after the cut fails, whatever it is."""
  asked = []

  def fails(query, attempt):
    asked.append(query)
    return query not in asked[: 2 * 4]

  source = FakeSource(fails=fails)
  found = play(saying('<answer>1</answer>'), source=source, max_failed=1.0)
  for attempts, verdicts in halves(found):
    assert all(t.failed and t.meta['cut'] == 1 for t in attempts)
    assert all(t.meta['step'] == 1 and not t.failed for t in verdicts)


def test_recorded_logps_of_a_cut_attempt_are_the_engines(monkeypatch):
  """On a real engine, whose handles are cut while others are open."""
  real = revise._verdict

  async def named(*args):
    t = await real(*args)
    return dataclasses.replace(t, meta={**t.meta, 'step': 2})

  monkeypatch.setattr(revise, '_verdict', named)
  cfg = dataclasses.replace(CFG, vocab_size=257)
  env = make_env(max_turns=2, max_turn_tokens=9, max_tokens=200)
  engine = make_engine(
    cfg=cfg, tokenizer=ByteTokenizer(), slots=4, max_len=200, prefill_rows=2
  )
  c = schema.base().rollout
  c.update(sampler='revise', group=4, refiner='micro_refiner')

  async def main():
    found = await chains.rollout(
      QUESTIONS[:2], config=c, env=env, engine=engine, source=FakeSource(),
      seed=0, step=5,
    )  # fmt: skip
    flat = [t for group in found.groups for t in group]
    ids = [np.concatenate([s.ids for s in t.segments]).tolist() for t in flat]
    return flat, [await engine.logps(x) for x in ids]

  flat, scores = asyncio.run(main())
  checked = 0
  for t, logps in zip(flat, scores, strict=True):
    at = 0
    for s in t.segments:
      part = logps[at : (at := at + len(s.ids))]
      if s.author == 'policy':
        np.testing.assert_allclose(s.logps, part, atol=1e-5)
        checked += len(part) * (t.role == 'solver')
  assert checked >= 80
  assert {t.role for t in flat if t.meta.get('asked')} == {'refiner'}


def test_it_keeps_no_more_handles_than_the_engine_serves():
  engine = Counting(saying('<answer>2</answer>'), delay=lambda _: 0.001)
  engine.holds = 5
  play(None, QUESTIONS, engine=engine)
  assert engine.most == 4


def test_what_verdicts_do_not_go_with_is_refused():
  c = tiny.config()
  c.rollout.update(sampler='revise', group=4, refiner='micro_refiner')
  kw = dict(label='role', eps=0.0, ddof=1)
  c.algorithm.update(advantage='grpo_within', advantage_kw=kw)
  checks.check(c)
  c.rollout.group = 2  # each would be compared with itself
  with pytest.raises(ConfigError, match="group=2.*'grpo_within'.*'role'"):
    checks.check(c)
  c.rollout.group, c.algorithm.advantage_kw = 4, {}
  kw = dict(scale=1.0, outcome=0.0, eps=1e-6, ddof=1)
  c.algorithm.update(advantage='distilled', advantage_kw=kw)
  c.teacher.context = 'own'
  with pytest.raises(ConfigError, match="context='own' .*sampler='revise'"):
    checks.check(c)


def test_contexts_that_change_are_refused():
  c = tiny.config()
  c.rollout.update(sampler='revise', group=4, refiner='micro_refiner')
  checks.check(c)
  c.env.max_contexts, c.env.keep_observations = 2, 1
  c.batch.tokens = 480
  with pytest.raises(checks.ConfigError, match="'revise' with env.max_cont"):
    checks.check(c)
