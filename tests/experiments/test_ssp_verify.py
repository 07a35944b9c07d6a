"""Verification in self-play: what a reader sees, and who the reader is."""

import asyncio
import collections
import dataclasses
import json

import numpy as np
import pytest

from experiments.ssp import game, verify
from experiments.ssp.game import Proposal
from searchrl_jax.rewards.judge import JudgeError
from searchrl_jax.sources.chat import ChatError
from searchrl_jax.types import Question
from tests import chat_server
from tests.experiments.ssp_fakes import GOOD, config, env, standing


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
  reasons, asked = checked([*standing(3), *fallen], ['x', 'y', None], noise=0)
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


def test_a_reading_is_known_by_what_it_says():
  """Or one that was answered before a kill would stand for another."""
  c = config(noise=1)

  def ids(proposals):
    found = verify.readings(
      proposals, env(c, game.VERIFIER), c, np.random.default_rng(5)
    )
    return {q.text: q.id for q in found}

  many = standing(3)
  first = ids(many)
  assert first == ids(many) and len(set(first.values())) == 3
  # A search that failed finds something the next time: other noise.
  many[0] = dataclasses.replace(many[0], evidence=('it came late',))
  again = ids(many)
  assert len(first | again) > 3
  assert len({*first.values(), *again.values()}) == len(first | again)


def test_noise_that_does_not_fit_is_left_out_and_own_evidence_never():
  many = standing(3)
  long = [
    Proposal(p.trajectory, p.question, (f'{i} ' + 'word ' * 230,), '')
    for i, p in enumerate(many)
  ]
  reasons, asked = checked(long, ['x'] * 3, noise=2)  # of 1800 tokens
  assert reasons == [''] * 3
  assert all(
    f'\n{text}'.count('word word') == asked[0].count('word word')
    for text in asked
  )
  assert all(f'{i} word' in text for i, text in enumerate(asked))
  huge = Proposal(many[0].trajectory, many[0].question, ('word ' * 400,), '')
  reasons, asked = checked([huge, many[1]], ['x'], noise=2)
  assert reasons == ['too_long', '']


def test_a_reader_that_fails_is_no_verdict():
  error = ChatError('timeout', 'late')
  reasons, _ = checked(standing(2), [error, 'x'])
  assert reasons == [game.FAILED, '']
  assert game.opposed(
    [
      Proposal(p.trajectory, p.question, p.evidence, r)
      for p, r in zip(standing(2), reasons)
    ],
    {'q1': 0.0},
    config(),
  ).valid.tolist() == [False, True]


def judge_config(url, **fields):
  c = config().judge
  c.update(dict(url=url, attempts=1, timeout=5.0, max_failed=0.5) | fields)
  return c


def passage(body):
  """Its number, in a request about one of ours."""
  return json.loads(body['messages'][1]['content'])[8]


def read_by(script, path, n=4, model='judge', **fields):
  def well(body):
    asked = json.loads(body['messages'][1]['content'])
    return script(body) if asked.startswith('passage') else '{"answer": "x"}'

  with chat_server.serve(well) as server:
    server.models = [model]

    async def go():
      reader = verify.Reader(judge_config(server.url, **fields), path)
      try:
        await reader.check()
        return await reader.answers(
          [Question(f'q{i}', f'passage {i}\nQuestion: {i}') for i in range(n)]
        )
      finally:
        await reader.close()

    return asyncio.run(go())


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'readings.jsonl'


def test_a_judge_reads_by_a_schema_and_nonsense_is_no_answer(path):
  """Of the proposal's making, which fails: it could excuse itself else."""

  def script(body):
    assert body['response_format']['json_schema']['schema'] == verify.SCHEMA
    return {'0': '{"answer": "x"}', '1': 'The answer is x', '2': 400}.get(
      passage(body), '{"answer": ""}'
    )

  found = read_by(script, path, max_failed=0.0)
  assert found == ['x', None, None, '']
  assert read_by(lambda body: 500, path) == found  # as it was, on a resume
  reasons, _ = checked(standing(2), [None, 'x'])
  assert reasons == ['verification', '']


def test_a_reader_that_cannot_be_asked_is_found_at_the_start(path):
  with chat_server.serve(lambda body: 'The sky is blue.') as server:
    reader = verify.Reader(judge_config(server.url), path)
    with pytest.raises(ChatError, match='config.judge'):
      asyncio.run(reader.check())


@pytest.mark.long
def test_what_a_judge_read_is_kept_and_what_failed_is_asked_again(path):
  def script(body):
    return '{"answer": "early"}' if int(passage(body)) < 2 else 500

  first = read_by(script, path)
  assert first[:2] == ['early'] * 2 and isinstance(first[2], ChatError)
  with path.open('a') as file:  # a kill cut this line
    file.write('["abc')
  asked = []

  def later(body):
    asked.append(body['messages'][1]['content'])
    return '{"answer": "late"}'

  assert read_by(later, path) == ['early', 'early', 'late', 'late']
  assert len(asked) == 2
  assert read_by(lambda body: 500, path) == ['early', 'early', 'late', 'late']
  # Another judge is another reader.
  assert read_by(later, path, model='another')[0] == 'late'


def test_too_many_failures_of_the_judge_stop(path):
  with pytest.raises(JudgeError, match='4 of 4 .*max_failed=0.5'):
    read_by(lambda body: 500, path)


def test_an_absent_judge_is_found_at_the_start(path):
  async def go():
    reader = verify.Reader(judge_config('http://127.0.0.1:9'), path)
    try:
      await reader.check()
    finally:
      await reader.close()

  with pytest.raises(ChatError, match='127.0.0.1:9'):
    asyncio.run(go())
