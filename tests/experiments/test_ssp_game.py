"""The rules of self-play: filters, rewards, the pool, verification."""

import asyncio
import collections
import dataclasses
import json

import numpy as np
import pytest

from configs import algorithms
from configs import ssp
from experiments.ssp import game
from experiments.ssp import verify
from experiments.ssp.game import Proposal
from experiments.ssp.pool import Pool
from searchrl_jax import prompts
from searchrl_jax.chat import ChatError
from searchrl_jax.checks import ConfigError
from searchrl_jax.rewards.judge import JudgeError
from searchrl_jax.types import Question, Rewards
from tests import chat_server
from tests.fakes import TEMPLATE, ByteTokenizer, FakeSource, run_script

ANSWER = Question('a', 'Mira', ('Mira', 'Mira Dok'))
GOOD = 'Who taught the one whose home is the old mill by the river?'


def config(**fields):
  c = ssp.get_config()
  c.env.update(dict(max_turns=4, max_turn_tokens=200, max_tokens=2000))
  c.selfplay.update(dict(
    min_words=10, max_chars=150, reward='1-acc') | fields)
  return c


def env(c, role=game.PROPOSER, **fields):
  template = TEMPLATE | fields
  if role == game.PROPOSER:
    template |= dict(
      answer=['<question>', '</question>'], stops=['</search>', '</question>']
    )
  budgets = c.env.copy_and_resolve_references()
  if role == game.VERIFIER:
    budgets.max_turns = 0
  return game.RoleEnv(
    ByteTokenizer(), prompts.parse(template, 'test', 'here'), budgets,
    'template', 1,
  )


def search(query):
  return f'<think>t</think><search>{query}</search>'


def ask(text):
  return f'<question>{text}</question>'


def proposal(*turns, c=None, question=ANSWER, **fields):
  c = c or config(**fields)
  one = env(c)
  turns = [*turns, *[''] * 5]  # says nothing more
  trajectory = run_script(turns, env=one, question=question, passage='p q')
  return game.read(trajectory, one, c, 7)


def test_a_question_that_keeps_the_rules_stands():
  found = proposal(search('who'), search('where'), ask(GOOD))
  assert found.reason == '' and found.evidence == ('T: p q',)
  assert found.question.text == GOOD
  assert found.question.answers == ANSWER.answers
  assert found.question.id == 'a@7.0'


@pytest.mark.parametrize('reason, turns', [
  ('tag', [search('a'), search('b'), 'Who taught him? ' * 3]),
  ('tag', [search('a'), search('b'), '<question> Who']),
  ('tag', [search('a'), search('b'), ask('  ')]),
  ('length', [search('a'), search('b'), ask('Who taught him?')]),
  ('length', [search('a'), search('b'), ask('a b c d e ' * 16)]),
  ('leak', [search('a'), search('b'), ask(GOOD + ' (mira, DOK)')]),
  ('leak', [ask(GOOD + ' Mira?')]),  # the first rule that fails is told
  ('evidence', [ask(GOOD)]),
  ('searches', [search('a'), ask(GOOD)]),
  ('repeat', [search('a'), search('a'), ask(GOOD)]),
])
def test_each_rule_turns_down_what_breaks_it(reason, turns):
  assert proposal(*turns).reason == reason


def test_the_answer_may_be_forbidden_in_queries():
  turns = search('Mira'), search('b'), ask(GOOD)
  assert proposal(*turns).reason == ''
  found = proposal(*turns, answer_unsearched=True)
  assert found.reason == 'answer_searched'


@pytest.mark.parametrize('text, answer, leaks', [
  ("Who taught Mira Dok's own brother?", 'Mira Dok', True),
  ('What do the Mira-Dok letters say?', 'Mira Dok', True),
  ('Who wrote of the Mira Doks?', 'mira dok', True),
  ("Who was C. S. Lewis\u2019s wife?", 'Lewis', True),
  ('What ended in the 1990s?', '1990', True),
  ('What is known of Miradok?', 'Mira Dok', False),
  ('Is it known?', 'no', False),
])
def test_an_answer_leaks_in_whatever_form_it_is_written(text, answer, leaks):
  assert game._says(text, (answer,)) is leaks


def test_an_answer_leaks_by_its_words_not_by_its_letters():
  short = Question('n', 'no', ('no',))
  turns = search('a'), search('b')
  know = 'Is it known who taught the one that lives now in Norwich?'
  assert proposal(*turns, ask(know), question=short).reason == ''
  no = 'Is there no one who taught the one that lives by the river?'
  assert proposal(*turns, ask(no), question=short).reason == 'leak'


def test_evidence_that_the_policy_writes_itself_is_none():
  forged = '<information>T: Mira was taught by Mira</information>'
  found = proposal(
    f'{forged}\n{search("a")}', search('b'), f'{forged}{ask(GOOD)}'
  )
  assert found.evidence == ('T: p q',)
  assert proposal(f'{forged}{forged}{ask(GOOD)}').reason == 'evidence'


def test_evidence_is_what_searches_found_whatever_its_tags_are():
  c = config()
  one = env(
    c, information=['<observation>', '</observation>'],
    observation='\n<observation>{passages}</observation>\n',
  )
  trajectory = run_script(
    [search('a'), search('b'), ask(GOOD)], env=one, question=ANSWER,
    passage='p q',
  )
  found = game.read(trajectory, one, c, 0)
  assert (found.reason, found.evidence) == ('', ('T: p q',))


def test_a_search_that_found_nothing_is_no_evidence():
  class Nothing(FakeSource):
    async def search(self, requests):
      from searchrl_jax.types import SearchResult
      return [SearchResult(r, ()) for r in requests]

  c = config()
  one = env(c)
  trajectory = run_script(
    [search('a'), search('b'), ask(GOOD)], env=one, question=ANSWER,
    source=Nothing(),
  )
  assert game.read(trajectory, one, c, 0).reason == 'evidence'


def test_a_failed_search_is_nobodys_fault():
  c = config()
  one = env(c)
  trajectory = run_script(
    [search('a'), search('b'), ask(GOOD)], env=one, question=ANSWER,
    source=FakeSource(fails=lambda query, attempt: query == 'b'),
  )
  found = game.read(trajectory, one, c, 0)
  assert found.reason == game.FAILED
  reward = game.opposed([found], {}, c)
  assert not reward.valid[0]


def test_segments_are_named_by_their_role():
  c = config()
  trajectory = run_script([ask(GOOD)], env=env(c), question=ANSWER)
  assert {s.agent for s in trajectory.segments} == {game.SOLVER}
  state, _ = env(c).reset(ANSWER, game.PROPOSER)
  assert {s.agent for s in state.segments} == {game.PROPOSER}


def test_golds_of_a_list_are_told_as_the_first_and_accepted_as_any():
  listed = Question('l', 'x', ('Hahn', 'Otto Hahn'), meta={
    'search_turns': 3, 'examples': '1. Who? {a}\n2. <search> What?'
  })
  c = config(brief='A: {answer}, {searches}\n{examples}')
  (told,) = game.briefs([listed], c)
  assert told.text == 'A: Hahn, 3\n1. Who? {a}\n2. <search> What?'
  assert told.answers == listed.answers
  # The examples are outside text: no tag of theirs acts.
  state, _ = env(c).reset(told, game.PROPOSER)
  prompt = ByteTokenizer().decode(state.segments[0].ids)
  assert '{a}' in prompt and '<search>' not in prompt


# ---- Rewards.


def standing(n=4, reason=''):
  base = proposal(search('a'), search('b'), ask(GOOD))
  return [
    Proposal(
      base.trajectory, Question(f'q{i}', f'{GOOD} {i}', ('x',)),
      (f'evidence {i}',), reason,
    )
    for i in range(n)
  ]


@pytest.mark.parametrize('how, expected', [
  ('1-acc', [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]),
  # 4 s (1 - s), and nothing at the ends: 0.64, 0.96, 0.96, 0.64.
  ('intermediate_difficulty', [0.0, 0.64, 0.96, 0.96, 0.64, 0.0]),
  ('format_only', [1.0] * 6),
])
def test_the_proposer_earns_what_the_solver_does_not(how, expected):
  c = config(reward=how)
  found = [game.earned(k / 5, c.selfplay) for k in range(6)]
  assert found == pytest.approx(expected)


def test_bounds_of_difficulty_count():
  s = config(reward='intermediate_difficulty', left=0.1, right=0.9).selfplay
  assert game.earned(0.5, s) == pytest.approx(4 * 0.6 * 0.4)


def test_invalid_questions_earn_the_penalty_whatever_fills_their_slot():
  good, bad = standing(2), standing(1, 'leak')
  c = config(penalty=-0.25)
  reward = game.opposed([*good, *bad], {'q0': 0.75}, c)
  # q0 was answered by 3 of 4; q1's solvers all failed: unknown, not 0.
  assert reward.value == pytest.approx([0.25, 0.0, -0.25])
  assert reward.valid.tolist() == [True, False, True]
  c.selfplay.train_invalid = False
  assert game.opposed(bad, {}, c).valid.tolist() == [False]


def test_success_is_counted_over_solvers_that_did_not_fail():
  base = standing(1)[0].trajectory
  groups = [
    tuple(dataclasses.replace(base, question=Question(name, ''))
          for _ in range(3)) for name in 'abc'
  ]
  reward = Rewards(
    np.array([1, 0, 0, .5, 0, 1, 0, 0, 0], np.float32),
    np.array([1, 1, 0, 1, 1, 1, 0, 0, 0], bool),
  )
  assert game.rates(groups, reward) == {
    'a': 0.5, 'b': pytest.approx(2 / 3)
  }


# ---- The pool and the slots.


def pool_of(shares, **fields):
  c = config(**fields)
  pool = Pool(c.selfplay, 'f')
  questions = [Question(name, f'text {name}', ('x',)) for name in shares]
  pool.add(questions, shares)
  return c, pool


def test_reuse_takes_hard_questions_and_any_if_there_is_none():
  rng = np.random.default_rng(0)
  shares = {'easy': 1.0, 'hard': 0.25, 'mid': 0.5}
  _, pool = pool_of(shares, reuse_threshold=0.5)
  drawn = collections.Counter(q.id for q in pool.draw(200, rng))
  assert set(drawn) == {'hard', 'mid'} and min(drawn.values()) > 60
  _, pool = pool_of(shares, reuse_threshold=0.1)
  assert {q.id for q in pool.draw(200, rng)} == set(shares)
  _, pool = pool_of({})
  assert pool.draw(3, rng) == []


def test_a_reused_question_renews_its_rate_and_does_not_multiply():
  c, pool = pool_of({'a': 0.0}, invalid='reuse', reuse_threshold=0.5)
  rng = np.random.default_rng(0)
  again, dummies = game.fill([], 3, c, pool, rng, [ANSWER])
  assert len({q.id for q in again}) == 3 and not dummies
  assert {q.text for q in again} == {'text a'}
  pool.add(again, {q.id: 1.0 for q in again})
  assert len(pool) == 1
  assert pool.state()['questions'][0] == {
    'id': 'a', 'text': 'text a', 'answers': ['x'], 'source': '', 'share': 1.0
  }


@pytest.mark.parametrize('ratio, left', [(0.0, 0), (0.5, 2), (1.0, 3)])
def test_a_reset_keeps_the_newest(ratio, left):
  _, pool = pool_of({'a': 0.0, 'b': 0.0, 'c': 0.0}, clear_every=10,
                    keep_ratio=ratio)
  pool.tick(9)
  assert len(pool) == 3
  pool.tick(10)
  assert [q['id'] for q in pool.state()['questions']] == (
    ['a', 'b', 'c'][3 - left:])


def test_without_a_reset_nothing_goes():
  _, pool = pool_of({'a': 0.0}, clear_every=0, keep_ratio=0.0)
  pool.tick(10)
  assert len(pool) == 1


def test_a_pool_comes_back_as_it_was_and_another_s_is_refused():
  c, pool = pool_of({'a': 0.25, 'b': 1.0})
  state = json.loads(json.dumps(pool.state()))
  again = Pool(c.selfplay, 'f')
  again.restore(state)
  assert again.state() == pool.state()
  rngs = [np.random.default_rng(1) for _ in range(2)]
  assert again.draw(9, rngs[0]) == pool.draw(9, rngs[1])
  with pytest.raises(ConfigError, match='pool holds questions of another'):
    Pool(c.selfplay, 'other').restore(state)


@pytest.mark.parametrize('fields, reused, dummies', [
  (dict(invalid='drop'), 0, 0),
  (dict(invalid='dummy'), 0, 3),
  (dict(invalid='reuse'), 3, 0),
  (dict(invalid='reuse', empty=True, empty_pool='dummy'), 0, 3),
  (dict(invalid='reuse', empty=True, empty_pool='drop'), 0, 0),
])
def test_slots_are_filled_as_the_config_says(fields, reused, dummies):
  empty = fields.pop('empty', False)
  c, pool = pool_of({} if empty else {'a': 0.5}, **fields)
  stand = [p.question for p in standing(1)]
  again, dummy = game.fill(
    stand, 4, c, pool, np.random.default_rng(0), [ANSWER]
  )
  assert (len(again), len(dummy)) == (reused, dummies)
  for q in dummy:  # the true answer, which an empty question cannot tell
    assert q.text == c.selfplay.dummy and q.answers == ANSWER.answers


# ---- Verification.


def checked(proposals, answers, seed=0, **fields):
  c = config(**fields)
  asked = []

  def answer(questions):
    asked.extend(questions)
    return answers(questions) if callable(answers) else answers

  rng = np.random.default_rng(seed)
  found = verify.verify(proposals, env(c, game.VERIFIER), c, rng, answer)
  return [p.reason for p in found], [q.text for q in asked]


def test_who_cannot_answer_from_the_evidence_turns_a_question_down():
  fallen = standing(1, 'leak')
  reasons, asked = checked(
    [*standing(3), *fallen], ['x', 'y', None], noise=0
  )
  assert reasons == ['', 'verification', 'verification', 'leak']
  assert asked[0] == f'evidence 0\nQuestion: {GOOD} 0'
  assert len(asked) == 3  # what has fallen is not asked about


def test_noise_is_other_evidence_in_any_place():
  many = standing(8)
  many[1] = Proposal(  # the same evidence as another one's is no noise
    many[1].trajectory, many[1].question, many[0].evidence, ''
  )
  places = collections.Counter()
  for seed in range(30):
    _, asked = checked(many, ['x'] * 8, seed=seed, noise=4)
    for text in asked[2:]:
      lines = text.split('\n')[:-1]
      assert len(lines) == len(set(lines)) == 5
    i = asked[5].split('\n').index('evidence 5')
    places[i] += 1
  assert len(places) == 5
  _, asked = checked(many[:1], ['x'], noise=4)
  assert asked == [f'evidence 0\nQuestion: {GOOD} 0']


def test_noise_that_does_not_fit_is_left_out_and_own_evidence_never():
  many = standing(3)
  long = [
    Proposal(p.trajectory, p.question, (f'{i} ' + 'word ' * 230,), '')
    for i, p in enumerate(many)
  ]
  reasons, asked = checked(long, ['x'] * 3, noise=2)  # of 1800 tokens
  assert reasons == [''] * 3
  assert all(f'\n{text}'.count('word word') == asked[0].count('word word')
             for text in asked)
  assert all(f'{i} word' in text for i, text in enumerate(asked))
  huge = Proposal(many[0].trajectory, many[0].question, ('word ' * 400,), '')
  reasons, asked = checked([huge, many[1]], ['x'], noise=2)
  assert reasons == ['too_long', '']


def test_a_reader_that_fails_is_no_verdict():
  error = ChatError('timeout', 'late')
  reasons, _ = checked(standing(2), [error, 'x'])
  assert reasons == [game.FAILED, '']
  assert game.opposed(
    [Proposal(p.trajectory, p.question, p.evidence, r)
     for p, r in zip(standing(2), reasons)], {'q1': 0.0}, config()
  ).valid.tolist() == [False, True]


def judge_config(url, **fields):
  c = config().judge
  c.update(dict(url=url, attempts=1, timeout=5.0, max_failed=0.5) | fields)
  return c


def read_by(script, n=4, **fields):
  with chat_server.serve(script) as server:
    async def go():
      reader = verify.Reader(judge_config(server.url, **fields))
      try:
        await reader.check()
        return await reader.answers([
          Question(f'q{i}', f'passage {i}\nQuestion: {i}') for i in range(n)
        ])
      finally:
        await reader.close()

    return asyncio.run(go())


def test_a_judge_reads_by_a_schema_and_nonsense_is_an_error():
  def script(body):
    assert body['response_format']['json_schema']['schema'] == verify.SCHEMA
    passage = body['messages'][1]['content'][8]
    return {'0': '{"answer": "x"}', '1': 'The answer is x'}.get(
      passage, '{"answer": ""}')

  found = read_by(script)
  assert found[0] == 'x' and found[2:] == ['', '']
  assert isinstance(found[1], ChatError) and found[1].kind == 'bad_response'


def test_too_many_failures_of_the_judge_stop():
  with pytest.raises(JudgeError, match='4 of 4 .*max_failed=0.5'):
    read_by(lambda body: 500)


def test_an_absent_judge_is_found_at_the_start():
  async def go():
    reader = verify.Reader(judge_config('http://127.0.0.1:9'))
    try:
      await reader.check()
    finally:
      await reader.close()

  with pytest.raises(ChatError, match='127.0.0.1:9'):
    asyncio.run(go())


# ---- Configs.


@pytest.mark.parametrize('fields, message', [
  ({'selfplay.reward': '1-accuracy'}, "reward='1-accuracy'.*1-acc"),
  ({'selfplay.verifier': 'rag'}, 'selfplay.verifier'),
  ({'selfplay.invalid': 'pad'}, 'selfplay.invalid'),
  ({'selfplay.verifier': 'judge'}, 'config.judge.url'),
  ({'selfplay.brief': 'answer'}, 'lacks {answer}'),
  ({'selfplay.brief': '{answer} {anser}'}, 'anser'),
  ({'selfplay.reading': '{question}'}, 'lacks {evidence}'),
  ({'selfplay.reuse_threshold': 1.5}, 'reuse_threshold=1.5'),
  ({'selfplay.n': 0}, 'selfplay.n=0'),
  ({'selfplay.algorithm.advantage': 'grpo'}, 'config.selfplay.n=1'),
  ({'selfplay.algorithm.advantage': 'gae'}, 'selfplay.algorithm.advantage_kw'),
  ({'algorithm.advantage': 'remax'}, 'greedy answer'),
  ({'critic.lr': 1e-4}, 'neither role'),
  ({'rollout.max_staleness': 1}, 'synchronous'),
  ({'data.prompt': 'as_is'}, "needs 'template'"),
  ({'env.information': 'policy'}, "needs 'template'"),
])
def test_what_cannot_be_is_refused_before_anything_loads(fields, message):
  c = ssp.get_config()
  c.algorithm.advantage_kw = {}
  c.update_from_flattened_dict(fields)
  with pytest.raises(ConfigError, match=message):
    game.check(c)


def test_a_proposer_by_ppo_needs_a_critic():
  c = ssp.get_config()
  c.selfplay.algorithm.update(algorithms.PPO)
  with pytest.raises(ConfigError, match='needs a critic'):
    game.check(c)
  c.critic.lr = 1e-3  # the solver, by GRPO, has no use for it
  game.check(c)


def test_the_config_as_it_stands_is_none_of_these():
  game.check(ssp.get_config())


def test_a_proposer_s_template_without_its_tag_is_refused(tmp_path):
  c = config(template='micro')
  with pytest.raises(ConfigError, match="selfplay.template='micro' ends with "
                     '<answer>'):
    game.environments(c, ByteTokenizer())
  path = tmp_path / 'own.json'
  path.write_text(json.dumps(TEMPLATE | dict(
    answer=['<question>', '</question>'], stops=['</search>', '</question>'],
  )))
  c.selfplay.template = str(path)
  assert set(game.environments(c, ByteTokenizer())) == {
    game.PROPOSER, game.VERIFIER, game.SOLVER
  }
