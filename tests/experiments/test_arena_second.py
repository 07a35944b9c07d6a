"""The second batch of the arena, and its warm start with hints."""

import collections

import pytest

from experiments.arena import arms, hinted, run, second
from searchrl_jax import sft
from searchrl_jax.sweep import core


@pytest.fixture
def report(monkeypatch):
  monkeypatch.setattr(arms.Batch, 'tuned', lambda _, row: row.default)
  return second.get_sweep('report')


def test_every_claim_has_its_arms_and_seeds(report):
  core.check(report)
  seeds = {arm.name: arm.seeds for arm in report.arms}
  stress = second.get_sweep('stress')
  seeds |= {arm.name: arm.seeds for arm in stress.arms}
  at = {'report': '', 'stress': 'stress-'}
  for claim in second.SECOND.claims:
    for name in (claim.method, claim.against):
      assert seeds[at[claim.phase] + name] == arms.REPORTING, claim
  assert seeds['sspo-others'] == arms.REPORTING
  assert seeds['sd_search-labels'] == arms.CONTROLS
  assert seeds['opsd'] == seeds['opsd-others'] == arms.FEW


def test_configs_have_digests_of_their_own(report):
  made = {
    a.name: (a.warm, run.digest(report, a.name, '0')) for a in report.arms
  }
  assert len({*made.values()}) == len(made)


def test_a_digest_says_which_warm_start_an_arm_has(report, monkeypatch):
  before = run.digest(report, 'grpo', '0')
  monkeypatch.setattr(second, 'SHARE', 0.5)
  assert run.digest(report, 'grpo', '0') != before


def test_rows_with_a_warm_start_of_their_own_have_its_traces(report):
  own = report.start('reseek').config(0)
  assert own.sft.data.judged == 1 and 'hinted' not in own.sft.data
  arm = report.arm('reseek').config(0)
  assert 'hinted' not in arm.sft.data and arm.sft.data.judged == 1
  positions = lambda c: c.model.arch.max_position_embeddings
  skills = report.start('skills').config(0)
  assert positions(own) == positions(arm) == positions(skills) == 1024


def test_warm_starts_have_hints(report):
  start = report.start('even').config(3)
  assert start.sft.data.module == 'experiments.arena.hinted'
  assert start.data.world_seed == 3 and start.sft.data.mix == 'even'
  arm = report.arm('grpo').config(3)
  assert start.env.max_tokens == 2 * arm.env.max_tokens
  assert report.needs('warm/even/3') == {'train.init': 'warm/skills/3'}


@pytest.fixture(scope='module')
def traces():
  found = dict(world_seed=1, mix='even', worlds=2, n=120, people=60, known=0)
  return hinted.traces(hinted=0.5, **found)


def test_half_of_the_traces_have_hints_and_fit(traces):
  env = hinted._environment()
  told = [t for t in traces if not t.question.text.endswith('?')]
  assert len(traces) - len(told) == 60 and 50 <= len(told) <= 60
  config = second.start('even', 0)
  limit = config.env.max_tokens
  roomy = type(env)(
    env.tokenizer, env.template, config.env, env.prompt_mode, env.k
  )
  for trace in told:
    played = sft.render(trace, roomy, 0)
    assert played is not None and len(played) <= limit
    # The attempt behind a hint does all well.
    assert env.answer(played) in trace.question.answers


def kind_of(hint):
  if hint.endswith(hinted.LABELS):
    return 'queries'
  if '<think>' in hint:
    return 'sibling'
  return 'anchors' if '.' in hint else 'facts or wordings'


def test_hints_of_all_kinds_are_about_questions_of_all_kinds(traces):
  told = [
    (t.question.source, t.question.text.partition('? ')[2]) for t in traces
  ]
  pairs = collections.Counter((kind_of(h), kind) for kind, h in told if h)
  for kind in ('1hop', '2hop', '3hop', '4hop', 'comparison'):
    assert sum(pairs[hint, kind] > 0 for hint in {h for h, _ in pairs}) >= 3
  hints = collections.Counter(kind_of(h) for _, h in told if h)
  assert len(hints) == 4 and min(hints.values()) > 3


def test_hints_have_words_that_the_policy_reads(traces):
  """But for tags, which outside text has none of."""
  tok = hinted._environment().tokenizer
  found, no = (tok.encode(f' {word}') for word in hinted.LABELS)
  assert found != no and len(found) == len(no) == 1
  unknown = tok.encode(' correct')
  assert unknown == tok.encode(' incorrect')
  for trace in traces:
    text = trace.question.text
    if kind_of(text) != 'sibling':
      assert not {*unknown} & {*tok.encode(text)}, text
