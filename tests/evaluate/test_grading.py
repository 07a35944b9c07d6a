import asyncio
import hashlib
import io
import json
import math

import numpy as np
import pytest

from searchrl_jax import checks, schema
from searchrl_jax.evaluate import grading
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.store import records, writer
from searchrl_jax.types import Question
from tests.fakes import FakeEngine, FakeSource, make_env, run_script

ENV = make_env()
THINK = '<think>a</think>'
MATH = 'experiments.ttrl.mathematics.equal'


def question(id='q', **kw):
  return Question(id, 'Who is it?', ('Ann',), **kw)


def row(*turns, question=None, env=ENV, **kw):
  question = question or Question('q', 'Who is it?', ('Ann',))
  trajectory = run_script(turns, env=env, question=question, **kw)
  (found,) = grading.score([trajectory], env, 'dev')
  return found


def test_a_row():
  found = row(
    THINK + '<search>who is it</search>',
    '<search>ann</search>',
    '<answer>the Ann!</answer>',
    question=question(
      source='nq', hops=2, supporting=('id-ann', 'id-elsewhere')
    ),
  )
  assert (found.set, found.question, found.source, found.hops) == (
    'dev', 'q', 'nq', 2
  )  # fmt: skip
  assert (found.em, found.f1, found.sub_em) == (1, 1, 1)
  assert found.vote == 'ann'
  assert (found.answered, found.parsed, found.valid_format) == (1, 1, 1)
  assert (found.searches, found.guessed) == (2, 0)
  assert found.copied == 0.5  # 'Who is it?' normalised is the first query
  recalls = found.recall, found.recall_any, found.recall_all
  assert recalls == (0.5, 1, 0)
  assert (found.truncated, found.failed) == (0, False)
  assert found.tokens == sum(
    len(text)
    for text in (
      THINK + '<search>who is it</search>',
      '<search>ann</search>',
      '<answer>the Ann!</answer>',
    )
  )  # one token a byte


def test_recall_is_over_the_whole_trajectory():
  turns = ('<search>a</search>', '<search>b</search>', '<answer>x</answer>')
  both = row(*turns, question=question(supporting=('id-a', 'id-b')))
  none = row(*turns, question=question(supporting=('id-c',)))
  assert (both.recall_any, both.recall_all) == (1, 1)
  assert (none.recall_any, none.recall_all) == (0, 0)


def test_the_ceiling_given_what_was_retrieved():
  turns = ('<search>a</search>', '<search>b</search>', '<answer>Ann</answer>')

  def found(supporting=(), turns=turns, **kw):
    got = row(*turns, question=question(supporting=supporting), **kw)
    return got.found, got.em_found

  wrong = (*turns[:2], '<answer>Bo</answer>')
  assert found(('id-a', 'id-b')) == (1, 1)
  assert found(('id-a', 'id-b'), wrong) == (1, 0)
  missed = found(('id-a', 'id-c'))
  assert missed[0] == 0 and math.isnan(missed[1])
  # Without supporting passages, one that states the answer in whole words.
  assert found(passage='it is Ann.') == (1, 1)
  assert found(passage='annual')[0] == 0
  # Nothing was retrieved, or the policy informs itself.
  assert found(turns=('<answer>Ann</answer>',))[0] == 0
  own = make_env(information='policy')
  assert math.isnan(found(turns=('<answer>Ann</answer>',), env=own)[0])


def test_likelihood_of_right_answers():
  turns, asked = ('<search>a</search>', '<answer>Ann</answer>'), question()
  right = run_script(turns, env=ENV, question=asked)
  own = [s.logps for s in right.segments if s.author == 'policy']
  wrong = run_script((turns[0], '<answer>x</answer>'), env=ENV, question=asked)
  found = [r.logp_right for r in grading.score([right, wrong], ENV)]
  assert found[0] == pytest.approx(np.concatenate(own).mean()) != 0
  assert math.isnan(found[1])


def test_health_of_thoughts():
  def thoughts(*turns):
    got = row(*turns)
    return got.thoughts_complete, got.thoughts_repeated

  search, answer = '<search>a</search>', '<answer>x</answer>'
  assert thoughts(THINK + search, '<think>b</think>' + answer) == (1, 0)
  repeated = thoughts(THINK + search, '<think> a </think>' + search, answer)
  assert repeated == (1, 0.5)
  empty = thoughts(
    THINK + search, '<think> </think>' + search, '<think>open', answer
  )
  assert empty == (pytest.approx(1 / 3), 0)
  assert all(map(math.isnan, thoughts(answer)))


@pytest.mark.parametrize('answers', [(), ('',)])
def test_what_does_not_apply_is_nan(answers):
  found = row('<answer>x</answer>', question=Question('q', 'x?', answers))
  for name in ('em', 'f1', 'sub_em', 'copied', 'recall_any', 'recall_all'):
    assert math.isnan(getattr(found, name))
  assert found.guessed == 1


def test_parsed_is_stricter_than_answered():
  found = row('hm', '<answer>x</answer>')
  assert (found.answered, found.parsed) == (1, 0)
  silent = row(*['hm'] * 4)
  assert (silent.answered, silent.guessed, silent.vote) == (0, 0, None)


def test_a_failed_trajectory_scores_nothing():
  source = FakeSource(fails=lambda q, attempt: True)
  found = row('<search>a</search>', source=source)
  assert found.failed and math.isnan(found.em) and math.isnan(found.searches)
  values = dict(grading.summary([found], 'eval', schema.base().eval))
  assert values == {'eval/failed': 1.0}


def test_searches_of_a_policy_that_is_its_own_source():
  env = make_env(information='policy')
  text = '<search>a</search><information>i</information><answer>x</answer>'
  found = row(text, env=env)
  assert (found.searches, found.guessed) == (1, 0)


def guesser(history, seed):
  """Right on every second sample of questions with an even number."""
  number = int(history.split('\n')[0].split()[-1])
  if number == 9 and '<information>' not in history:
    return '<search>fails</search>'
  return f'<answer>{"yes" if number % 2 == 0 and seed % 2 else seed}</answer>'


def sets():
  def one(i):
    return Question(
      f'q{i}', f'number {i}', ('yes',), source='nq' if i < 3 else 'hot',
      hops=1 + i % 2,
    )  # fmt: skip

  return {'b': [one(i) for i in (2, 0, 1, 3)], 'a': [one(4), one(9)]}


def config(**fields):
  c = schema.base()
  c.rollout.max_failed = 1.0
  c.eval.update(dict(n=3, bootstrap=200, temperature=1.0) | fields)
  c.log.tensorboard = False
  return c


def evaluator(c, given=None, **kw):
  return grading.Evaluator(
    given or sets(), env=ENV, engine=FakeEngine(guesser),
    source=FakeSource(fails=lambda q, attempt: q == 'fails'), config=c, **kw,
  )  # fmt: skip


def test_values_are_means_over_questions_with_intervals():
  found = evaluator(config()).collect(0)
  values = dict(found.values)
  rows = [r for r in found.rows if not r.failed]
  assert len(found.rows) == 18 and len(rows) == 15
  by_question = {}
  for r in rows:
    by_question.setdefault(r.question, []).append(r.em)
  means = [sum(v) / 3 for _, v in sorted(by_question.items())]
  assert values['eval/em'] == pytest.approx(sum(means) / 5)
  assert values['eval/em/n'] == 5 and values['eval/failed'] == 3
  # The order is that of sets and ids: a has q4, then b has q0 to q3.
  interval = metrics.bootstrap([means[4], *means[:4]], resamples=200, seed=0)
  assert values['eval/em/low'] == interval.low
  assert values['eval/em/high'] == interval.high
  assert {k for k in values if k.endswith('/em')} == {
    'eval/em', 'eval/set=a/em', 'eval/set=b/em', 'eval/source=nq/em',
    'eval/source=hot/em', 'eval/hops=1/em', 'eval/hops=2/em',
  }  # fmt: skip
  assert values['eval/source=nq/em/n'] == 3  # q0, q1, q2
  # No question has known supports, so nothing is said of their recall.
  assert not any('recall' in k for k in values)


def test_one_slice_is_not_repeated():
  values = dict(evaluator(config(), {'b': sets()['b'][:1]}).run(0))
  assert not any('=' in k for k in values)


def test_the_order_of_the_questions_and_the_step_do_not_show():
  turned = {k: v[::-1] for k, v in reversed(sets().items())}
  a, b = evaluator(config()), evaluator(config(), turned)
  assert list(a.run(0)) == list(b.run(7))


def test_a_subset_is_chosen_by_id():
  c = config(questions=2)
  turned = {k: v[::-1] for k, v in sets().items()}
  chosen = evaluator(c).sets
  assert chosen == evaluator(c, turned).sets
  assert [len(v) for v in chosen.values()] == [2, 2]
  assert any(
    evaluator(config(questions=2, seed=seed)).sets['b'] != chosen['b']
    for seed in (3, 4)
  )


def test_sampling_is_that_of_the_evaluation():
  taken = []

  class Engine(FakeEngine):
    async def generate(self, handle, sampling):
      taken.append(sampling)
      return await super().generate(handle, sampling)

  c = config(temperature=0.0, n=1)
  c.rollout.temperature, c.rollout.top_k = 0.7, 3
  list(grading.Evaluator(
    {'a': [question()]}, source=FakeSource(), config=c, env=ENV,
    engine=Engine(lambda h, s: '<answer>Ann</answer>'),
  ).run(0))  # fmt: skip
  assert [(s.temperature, s.top_p, s.top_k) for s in taken] == [(0.0, 1.0, 0)]


def test_samples_that_earn_nothing_or_far_less_are_warned_of(caplog):
  class Known(grading.Evaluator):
    """Samples have this F1."""

    def run(self, step):
      return iter((('sampled/f1', f1), ('sampled/f1/high', f1)))

  c = schema.base()
  known = Known(
    {'a': [question()]}, env=ENV, engine=None, source=None, config=c
  )
  greedy = {'eval/f1': 0.5, 'eval/f1/low': 0.4}
  for f1, said in ((0.0, 'F1 0 in all'), (0.1, 'F1 0.100'), (0.3, '')):
    caplog.clear()
    assert known.sampled(-1, greedy)['sampled/f1'] == f1
    assert said in caplog.text and bool(said) == bool(caplog.records)


def test_trajectories_and_ids_are_kept(tmp_path):
  c = config()
  with writer.Writer(tmp_path, c, out=io.StringIO()) as w:
    list(evaluator(c, writer=w).run(4))
    list(evaluator(c, writer=w, name='held').run(4))
  found = [*records.read(tmp_path / 'eval')]
  assert len(found) == 18 and found[0].step == 4
  first = found[0].trajectory
  assert first.question.id == 'q4' and ENV.answer(first) is not None
  kept = json.loads((tmp_path / 'held_ids.json').read_text())
  assert kept['sets']['a']['ids'] == ['q4', 'q9']
  assert kept['sets']['a']['n'] == 2 and kept['sampling']['n'] == 3
  assert kept['sets']['a']['sha256'] == hashlib.sha256(b'q4\nq9').hexdigest()
  assert len([*records.read(tmp_path / 'held')]) == 18


def test_no_questions():
  with pytest.raises(ValueError, match='config.data.eval'):
    evaluator(config(), {'a': []})


def test_another_runner_can_be_given():
  with asyncio.Runner() as runner:
    values = dict(evaluator(config(), runner=runner.run).run(0))
  assert values == dict(evaluator(config()).run(0))


def test_pass_and_majority():
  c = config(k=(1, 2), n=3)
  evaluation = evaluator(c).collect(0)
  scores = grading.at_k(evaluation.rows, (1, 2))
  for key, values in scores['pass@1'].items():
    rows = [r for r in evaluation.rows if (r.set, r.question) == key]
    right = sum(r.em == 1 for r in rows)
    assert values == pytest.approx(right / 3)
    assert scores['pass@2'][key] == pytest.approx(
      1 - math.comb(3 - right, 2) / 3
    )
  assert ('a', 'q9') not in scores['pass@1']  # it failed: no sample
  found = dict(evaluator(c).run(0))
  assert found['eval/pass@1'] == pytest.approx(found['eval/em'])
  assert found['eval/pass@2'] >= found['eval/pass@1']
  assert found['eval/set=b/maj@2/n'] == 4


def test_a_question_without_answers_has_no_pass_at_k():
  bare = Question('q2', 'number 2')
  given = {'a': [Question('q1', 'number 1', ('yes',)), bare]}
  found = evaluator(config(k=(1,)), given).collect(0)
  assert [q for _, q in grading.at_k(found.rows, (1,))['pass@1']] == ['q1']
  only = config(k=(1,))
  values = dict(evaluator(only, {'a': [bare]}).run(0))
  assert 'eval/pass@1' not in values and 'eval/answered' in values


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(k=(1, 4)), r'config.eval.k=\(1, 4\) .*eval.n=\d'),
    (dict(k=(0,)), 'config.eval.k=.*from 1 up'),
    (dict(k=(2,), temperature=0.0), 'k=.*temperature=0'),
  ],
)
def test_bad_fields_are_named_before_anything_runs(fields, message):
  with pytest.raises(ValueError, match=message):
    checks.check_evaluation(config(**fields))


def test_one_question_in_two_sets_stays_two():
  both = {'a': [sets()['b'][0]], 'b': [sets()['b'][0]]}
  found = evaluator(config(k=(1,)), both).collect(0)
  assert len({(r.set, r.question, r.sample) for r in found.rows}) == 6
  assert len(grading.at_k(found.rows, (1,))['pass@1']) == 2


def boxed(*answers, golds=('0.5',)):
  env = make_env(answer='boxed', max_turns=0)
  question = Question('q', 'How much?', golds)
  return env, [
    run_script([f'\\boxed{{{a}}}'], env=env, question=question) for a in answers
  ]


def test_mathematics_is_equal_in_value():
  env, trajectories = boxed(r'\frac12', '0.5', 'half of 1', r'\frac{2}{4}')
  rows = grading.score(trajectories, env, 'dev', MATH)
  assert [r.em for r in rows] == [1, 1, 0, 1]
  assert [r.vote for r in rows] == [r'\frac12', r'\frac12', None, r'\frac12']
  assert [r.parsed for r in rows] == [1] * 4
  # 3 of 4 agree: any 2 of them hold one of these, and it wins.
  assert grading.at_k(rows, [2])['maj@2'] == {('dev', 'q'): 1.0}
  as_text = grading.score(trajectories, env, 'dev', 'text')
  assert [r.em for r in as_text] == [0, 1, 0, 0]


def test_an_answer_is_scored_by_itself_and_votes_by_their_classes():
  """50% is both 50 and 0.5 to the checker."""
  env, trajectories = boxed('50', r'50\%', '0.5')
  rows = grading.score(trajectories, env, 'dev', MATH)
  assert [(r.vote, r.em) for r in rows] == [('50', 0), ('50', 1), ('0.5', 1)]
  found = grading.at_k(rows, [3])
  assert found['pass@3'] == {('dev', 'q'): 1.0}
  assert found['maj@3'] == {('dev', 'q'): 1.0}
  alone = grading.score(trajectories[:1], env, 'dev', MATH)
  assert [r.em for r in alone] == [0]


def test_an_unknown_match_is_refused():
  c = schema.base()
  c.eval.match = 'math'
  with pytest.raises(ValueError, match="match='math'"):
    checks.check_evaluation(c)
