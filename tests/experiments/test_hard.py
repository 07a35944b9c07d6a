"""Hard questions: the bank's documents, and BrowseComp-Plus on a stand-in."""

import asyncio
import gzip
import json
import types

import numpy as np
import pytest

from configs import hard
from experiments.hard import bm25, browsecomp, search
from retrieval.index.bm25 import BM25Index
from searchrl_jax import checks, schema
from searchrl_jax.data import core as data
from searchrl_jax.data import jsonl
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.text import prompts
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Passage, Question, SearchRequest, SearchResult
from tests import fakes

REPLY = (
  'Explanation: Ann wrote it [11], as [12, 99] and 【11】 say. '
  'Exact answer: Ann\n**Confidence:** 80%'
)


@pytest.fixture
def clone(tmp_path):
  """The layout of a clone of BrowseComp-Plus, with a corpus."""
  rows = [
    dict(query_id=str(n), query=f'Who wrote {n}?', answer='Ann', gold_docs=[])
    for n in range(3)
  ]
  lines = ['0 Q0 11 1', '0 Q0 13 1', '1 Q0 12 1']
  for name, text in (
    (browsecomp.QUESTIONS, '\n'.join(map(json.dumps, rows))),
    (browsecomp.EVIDENCE, '\n'.join(lines) + '\n'),
    (
      'corpus.jsonl',
      '\n'.join(
        json.dumps({'id': f'{n}', 'contents': f'"T"\ntext {n}'})
        for n in (11, 12, 13)
      ),
    ),
  ):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  return tmp_path


# --- Documents of a bank.


def test_tasks_are_questions_whose_support_is_required(tmp_path):
  row = {'id': 't1', 'scenario': 'A customer.', 'supporting_ids': ['a', 'b']}
  path = tmp_path / 'tasks.jsonl.gz'
  path.write_bytes(gzip.compress(json.dumps(row).encode()))
  (q,) = jsonl.load(str(path), layout='tau2')
  assert (q.id, q.text, q.answers) == ('t1', 'A customer.', ())
  assert (q.source, q.supporting) == ('tau2_banking', ('a', 'b'))


def test_the_real_tasks_name_documents_of_the_corpus(data_dir):
  from retrieval.corpus import read_corpus

  c = hard.get_config('questions=tau2,model=x')
  found = jsonl.load(str(data_dir / c.data.eval.tau2.path), layout='tau2')
  known = {*read_corpus(str(data_dir / c.source.corpus)).ids}
  assert (len(found), len(known)) == (97, 698)
  assert all(q.supporting and {*q.supporting} <= known for q in found)


def test_the_baseline_searches_with_the_text():
  texts = ['red fox', 'blue whale', 'green frog', 'white owl']
  q = Question('q', 'A red fox. A green frog!', supporting=('0', '2'))
  rows = bm25.rows([q], BM25Index(texts), ['0', '1', '2', '3'], 1)
  recall = {(r['query'], r['searches']): r['mean'] for r in rows}
  assert recall['whole', 1] == recall['sentences', 1] == 0.5
  assert recall['whole', 2] == recall['sentences', 2] == 1.0
  assert bm25.sentences(q.text, 1) == ['A green frog!']
  # As a server, it reads 256 words.
  q = Question('q', 'a ' * 256 + 'red fox', supporting=('0',))
  rows = bm25.rows([q], BM25Index(texts), ['0', '1', '2', '3'], 1)
  assert {r['mean'] for r in rows if r['query'] == 'whole'} == {0.0}


@pytest.mark.parametrize('questions', ['hops', 'tau2', 'browsecomp,folder=x'])
def test_the_configs_can_be_evaluated(questions):
  c = hard.get_config(f'model=x,questions={questions}')
  checks.check_engine(c)
  checks.check_evaluation(c)


def test_a_folder_is_found_from_here(clone, monkeypatch):
  monkeypatch.chdir(clone.parent)
  c = hard.get_config(f'questions=browsecomp,model=x,folder={clone.name}')
  assert c.data.eval.browsecomp.path == str(clone.resolve())
  assert c.source.corpus == f'{clone.resolve()}/corpus.jsonl'


def test_turns_are_a_budget_of_searches():
  with pytest.raises(ValueError, match='qwen_tools.*4 searches'):
    hard.get_config('questions=tau2,model=x,template=qwen_tools')


def test_an_evaluation_of_several_samples_has_no_run_files(monkeypatch):
  c = hard.get_config('questions=browsecomp,model=x,folder=x')
  c.eval.n = 2
  monkeypatch.setattr(browsecomp.build, 'load_config', lambda path: c)
  flag = types.SimpleNamespace(value='runs/x')
  monkeypatch.setattr(browsecomp, '_EVALUATION', flag, raising=False)
  with pytest.raises(ValueError, match='eval.n=2'):
    browsecomp.main()


def test_hops_are_of_several_sources(data_dir):
  c = hard.get_config('model=x')
  c.data.dir = str(data_dir)
  sets = data.load_sets(c.data.eval, c.data)
  hops = {name: {q.hops for q in found} for name, found in sets.items()}
  assert hops == {'hotpot': {2}, 'musique': {2, 3, 4}, '2wiki': {2, 4}}
  assert data.load_sets(c.data.train, c.data).keys() == {'hotpot', 'musique'}


# --- BrowseComp-Plus.


def test_questions_have_their_evidence(clone):
  c = hard.get_config(f'questions=browsecomp,model=x,folder={clone}')
  (found,) = data.load_sets(c.data.eval, c.data).values()
  assert [q.supporting for q in found] == [('11', '13'), ('12',), ()]
  assert found[0].answers == ('Ann',) and found[0].text == 'Who wrote 0?'


def test_a_question_that_stands_twice_is_named(clone):
  path = clone / browsecomp.QUESTIONS
  first, *_ = lines = path.read_text().splitlines()
  path.write_text('\n'.join([*lines, first]))
  with pytest.raises(ValueError, match=r'jsonl:4: id .0. was .*jsonl:1'):
    browsecomp.load(str(clone))


def played(clone, turns):
  """A trajectory of the template, with the tools that the config names."""

  class Source:
    async def search(self, requests):
      if requests[0].tool == 'get_document':
        return [SearchResult(r, (), text='"T"\ntext 13') for r in requests]
      passages = tuple(Passage(i, 'T', f'text {i}', 1.5) for i in ('11', '12'))
      return [SearchResult(r, passages) for r in requests]

  c = hard.get_config(f'questions=browsecomp,model=x,folder={clone}')
  assert prompts.load(c.env.template).kinds['document'].tool == 'get_document'
  raw = json.loads(hard.TEMPLATE.read_text())
  raw['prompt'] = raw['prompt'][0]['content']  # there is no chat template
  template = prompts.parse(raw, 'browsecomp', str(hard.TEMPLATE))
  env = SearchEnv(fakes.ByteTokenizer(), template, c.env, 'template', 5)
  turns, config = list(turns), schema.base().rollout
  config.group = 1
  asked = rollout(
    [Question('0', 'Who wrote 0?', ('Ann',))],
    env=env,
    engine=fakes.FakeEngine(lambda history, seed: turns.pop(0)),
    source=Source(),
    config=config,
    seed=0,
    step=0,
  )
  return asyncio.run(asked).groups[0][0], env


def test_a_run_file_is_theirs(clone):
  t, env = played(
    clone,
    [
      '<think>who?</think><search>book</search>',
      '<document>[13]</document>',
      '<document>{"name": "open", "arguments": {"id": "13", "piece": 2}}'
      '</document>',
      f'<think>so</think><answer>{REPLY}</answer>',
    ],
  )
  run = browsecomp.run_of(t, env, 'mine')
  assert (run['query_id'], run['status']) == ('0', 'completed')
  assert run['tool_call_counts'] == {'search': 1, 'get_document': 2}
  assert run['retrieved_docids'] == ['11', '12']  # not what was opened
  kinds = [item['type'] for item in run['result']]
  assert kinds == [
    'reasoning', *['tool_call'] * 3, 'reasoning', 'output_text'
  ]  # fmt: skip
  first, second, third = run['result'][1:4]
  assert json.loads(first['arguments']) == {'query': 'book'}
  (hit, _) = json.loads(first['output'])
  assert hit == {'docid': '11', 'score': 1.5, 'snippet': 'text 11'}
  assert second['tool_name'] == 'get_document'
  assert json.loads(second['arguments']) == {'docid': '13'}
  assert json.loads(third['arguments']) == {'docid': '13'}
  assert second['output'] == '"T"\ntext 13'
  assert run['result'][-1]['output'] == REPLY
  wanted = browsecomp.evidence(str(clone))
  found = browsecomp.scores([run], wanted, {'0': True})
  assert (found['accuracy'], found['recall']) == (100, 50)
  # It cites 11, 12 and 99; the evidence is 11 and 13.
  assert found['cited'] == 50
  assert found['cited_right'] == pytest.approx(100 / 3)
  assert found['calibration'] == 0  # of 100 replies or more


def test_what_is_not_complete_is_wrong(clone):
  t, env = played(clone, ['<search>book</search>', *['hm'] * 30])
  run = browsecomp.run_of(t, env)
  assert run['status'] == 'incomplete'
  wanted = browsecomp.evidence(str(clone))
  found = browsecomp.scores([run], wanted, {'0': True})
  assert (found['accuracy'], found['recall']) == (0, 50)


def test_calibration_leaves_out_the_last_bin():
  rng = np.random.default_rng(0)
  confidence = rng.permutation(np.repeat([20.0, 60.0, 90.0], [100, 100, 30]))
  right = confidence == 60
  # Bins of 100 and 130: 20 % less 0 %; 60 and 90 % less 100 of 130.
  first = 100 / 230 * 0.2**2
  last = 130 / 230 * ((100 * 0.6 + 30 * 0.9 - 100) / 130) ** 2
  given = [*confidence], [*right]
  assert browsecomp.calibration(*given) == pytest.approx(100 * first**0.5)
  whole = browsecomp.calibration(*given, whole=True)
  assert whole == pytest.approx(100 * (first + last) ** 0.5)
  # Of 100 to 199 replies there is one bin, the last.
  assert browsecomp.calibration([50.0] * 150, [True] * 150) == 0
  assert browsecomp.calibration([50.0] * 99, [True] * 99, whole=True) == 0


@pytest.mark.parametrize(
  'said, confidence',
  [('Confidence: 80%', 80), ('**confidence** 7.5', 7.5), ('none', 100)],
)
def test_a_confidence_is_read(said, confidence):
  found = browsecomp._CONFIDENCE.search(said)
  assert (float(found[1]) if found else 100) == confidence


def test_a_search_shows_beginnings(monkeypatch):
  long = Passage('1', 'T', 'x' * 9_000, 1.0)

  async def asked(self, requests):
    return [SearchResult(requests[0], (long,))]

  monkeypatch.setattr(search.ServiceSource, 'search', asked)
  c = schema.base().source
  c.url = 'http://127.0.0.1:9'
  (found,) = asyncio.run(search.make(c).search([SearchRequest('q', 5)]))
  assert len(found.passages[0].text) == search.CHARACTERS
