import asyncio
import re

import jax
import numpy as np
import pytest

from configs import search_r1, zerosearch
from experiments.zerosearch import check
from experiments.zerosearch import rows as table
from searchrl_jax import checks, lookup, sft, train
from searchrl_jax.data.checks import DataError
from searchrl_jax.engines.core import Completion
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.models import parameters
from searchrl_jax.run import build, services
from searchrl_jax.sources import simulated
from searchrl_jax.store import checkpoint, records
from searchrl_jax.sweep import stages
from searchrl_jax.types import (
  Passage,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Trajectory,
)
from searchrl_jax.worlds import microdocuments as documents
from searchrl_jax.worlds import microworld
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]

FIELDS = dict(world_seed=3, worlds=2, n=400, train=40, relations=4)


def told(useful, **fields):
  """(question, its text, query and wish, thought, document) of each trace."""
  out = []
  for trace in documents.traces(**FIELDS | fields, useful=useful):
    (think, thought), (answer, document) = trace.actions
    assert (think, answer) == ('think', 'answer')
    gold, _, rest = trace.question.text.partition(': ')
    asked, _, rest = rest.partition(' search: ')
    assert (gold,) == trace.question.answers
    out.append((trace.question, asked, rest, thought, document))
  return out


def facts_of(document):
  name, _, facts = document.partition(': ')
  return name, dict(f.split(' ', 1) for f in facts.rstrip('.').split('; '))


def beliefs(seed=3):
  return documents.Beliefs.of(seed, microworld.Settings())


# What the simulator learns.


def test_a_useful_document_holds_the_gold_where_the_query_leads_to_it():
  seen = set()
  for question, _, query, thought, document in told(useful=1.0):
    query = query.removesuffix(' use')
    name, *path = question.meta['path']
    subject, facts = facts_of(document)
    if query == name and len(path) == 1:
      assert facts[path[0]] == question.answers[0]
      seen.add('one hop')
    elif query == name:
      assert facts[path[0]] == beliefs()(path[0], name)
      seen.add('first of two')
    elif len(path) == 2 and query == beliefs()(path[0], name):
      assert facts[path[1]] == question.answers[0]
      seen.add('second of two')
    else:
      assert thought == documents.NOTHING
      seen.add('other')
    if thought != documents.NOTHING:
      relation, value = thought.split(' ', 1)
      assert facts[relation] == value
    if len(query.split()) == 2:
      assert subject == query
    assert len(facts) == 4
  assert seen == {'one hop', 'first of two', 'second of two', 'other'}


def test_a_noisy_document_never_holds_the_gold():
  others = 0
  for question, _, query, thought, document in told(useful=0.0):
    assert query.endswith(' not use') and thought == documents.NOTHING
    subject, facts = facts_of(document)
    assert question.answers[0] not in facts.values()
    others += subject != query.removesuffix(' not use')
  assert 0.4 < others / FIELDS['n'] < 0.75  # of other people, mostly


def test_beliefs_are_of_words_and_of_the_simulators_seed():
  mine = beliefs()
  first = microworld.invented(40, 'first')
  second = microworld.invented(40, 'second')
  for link in microworld.LINKS:
    named = {mine(link, f'{a} {b}') for a in first for b in second}
    assert len(named) == 1600  # nobody has two teachers
    assert all(mine(link, name) != name for name in list(named)[:50])
  name = f'{first[0]} {second[0]}'
  assert mine('teacher', name) != mine('rival', name)
  assert mine('teacher', name) != beliefs(4)('teacher', name)


def test_documents_are_of_worlds_of_their_own_and_of_train_people():
  there = {
    q.text: q.answers
    for q in microworld.generate(3, relations=4).questions['train']
  }
  heldout = set(microworld.names(microworld.Settings(), 'heldout'))
  shared = []
  for question, asked, *_ in told(useful=0.5, train=400):
    assert question_name(asked) not in heldout
    if asked in there:
      shared.append(there[asked] == question.answers)
  assert len(shared) > 20 and np.mean(shared) < 0.3  # as chance has it
  first, again = told(useful=0.5), told(useful=0.5)
  assert [t[1:] for t in first] == [t[1:] for t in again]
  other = told(useful=0.5, world_seed=4)
  assert [t[1:] for t in first] != [t[1:] for t in other]


def question_name(asked):
  return ' '.join(asked.rstrip('?').split()[-2:])


@pytest.mark.parametrize(
  'fields, said',
  [
    (dict(useful=1.5), 'useful=1.5'),
    (dict(useful=-1.0), 'useful=-1'),
    (dict(worlds=0), 'worlds=0'),
    (dict(n=1), 'n=1 '),
  ],
)
def test_bad_fields_are_named(fields, said):
  with pytest.raises(DataError, match=said):
    documents.traces(**FIELDS | dict(useful=0.5) | fields)


@pytest.mark.parametrize('useful', [True, False])
def test_the_simulator_is_asked_with_the_prompts_that_it_has_learnt(
  useful, tmp_path
):
  c = zerosearch.get_config('learns=simulator')
  tok = build.tokenizer(c, str(tmp_path))
  env = build.environment(c, tok)
  question = microworld.pick(microworld.generate(3), 'train', 2)[1]
  name = question.meta['path'][0]
  form = documents.USEFUL if useful else documents.NOISY
  learnt, _ = env.reset(
    Question(
      'x',
      form.format(
        question=question.text, answers=question.answers[0], query=name
      ),
    )
  )
  asked = []

  class Engine:
    max_len = 96

    def open(self, prompt):
      assert microworld.UNK not in tok.decode(prompt.ids)
      asked.append(list(prompt.ids))

    async def generate(self, handle, sampling):
      ids = np.array(tok.encode(f'<answer> {name}: moon. </answer>'))
      zeros = np.zeros(len(ids), np.float32)
      return Completion(ids, zeros, sampling.stops[0], zeros)

    def close(self, handle):
      pass

  c = zerosearch.get_config(f'noise={0 if useful else 1}')
  writer = simulated.DocumentWriter(Engine, tok, None)
  source = simulated.make(c.source, seed=0, writer=lambda: writer)
  request = SearchRequest(name, 1, question)
  (found,) = asyncio.run(source.search([request]))
  assert asked == [[int(i) for s in learnt.segments for i in s.ids]]
  assert found.passages[0].text == f'{name}: moon.'


# What its documents are worth.


def document(kind, text):
  """kind: of simulated ones; '17': a passage of that id."""
  known = kind in simulated.KINDS
  name = simulated.name_of(kind, '', text) if known else kind
  return Passage(name, '', text)


def searched(question, *found):
  """A trajectory of searches: (query, kind, document), None = it failed."""
  searches = []
  for query, kind, text in found:
    request = SearchRequest(query, 1, question)
    searches.append(
      SearchError(request, 'timeout', 'late')
      if kind is None
      else SearchResult(request, (document(kind, text),))
    )
  return Trajectory(question, (), tuple(searches), 'answer')


def test_gold_shares_are_of_what_was_asked_for():
  one = Question('1', '?', ('Fern',), meta={'path': ('Ann Bo', 'home')})
  two = Question(
    '2', '?', ('otter',), meta={'path': ('Ann Bo', 'rival', 'emblem')}
  )
  useful, noisy = simulated.KINDS
  found = check.count(
    [
      searched(one, ('Ann Bo', useful, 'Ann Bo: home Fern.')),
      searched(one, ('Ann Bo', useful, 'Ann Bo: home Fernwick.')),
      searched(one, ('Ann', useful, 'Ann Xa: home Fern.')),
      searched(one, ('Ann Bo', noisy, 'Ann Bo: home elm.')),
      searched(
        two,
        ('Ann Bo', useful, 'Ann Bo: rival Cy Do; emblem elm.'),
        ('Cy Do', useful, 'Cy Do: emblem otter.'),
      ),
      # Whom a noisy document names is not whom the question leads to.
      searched(
        two,
        ('Ann Bo', noisy, 'Ann Bo: rival Ed Fy.'),
        ('Ed Fy', useful, 'Ed Fy: emblem elm.'),
      ),
      searched(
        two, ('Ann Bo', '17', 'Ann Bo: rival Cy Do.'), ('Cy Do', None, '')
      ),
    ]
  )
  assert found['useful_gold'] == pytest.approx(2 / 3)
  assert found['useful_gold_n'] == 3
  assert found['useful_gold_all'] == pytest.approx(3 / 6)
  assert (found['noisy_gold'], found['noisy_gold_n']) == (0.0, 1)
  assert (found['noisy_gold_all'], found['noisy_gold_all_n']) == (0.0, 2)
  assert (found['real_queries'], found['failed']) == (1, 1)
  assert found['noise'] == pytest.approx(2 / 8)
  blank = SearchResult(SearchRequest('Ann Bo', 1, one), ())
  empty = check.count([Trajectory(one, (), (blank,), 'answer')])
  assert (empty['real_queries'], empty['empty']) == (0, 1)
  none = check.count([])
  assert none['useful_gold'] is None and none['useful_gold_n'] == 0


def test_of_questions_without_a_path_all_documents_are_counted():
  one = Question('1', 'Who?', ('Fern',))
  found = check.count(
    [searched(one, ('who', 'useful', 'Fern.'), ('who', 'noisy', 'elm.'))]
  )
  assert (found['useful_gold_all'], found['noisy_gold_all']) == (1.0, 0.0)
  assert found['useful_gold'] is None and found['noisy_gold'] is None


def test_a_folder_without_trajectories_is_told(tmp_path):
  with pytest.raises(records.RunError, match='trajectories_every'):
    check.read(str(tmp_path))


# The recipe.


def test_arguments_move_what_they_name():
  c = zerosearch.get_config('seed=2')
  s = c.source.simulator
  assert (c.source.module, c.name, c.data.world_seed) == (
    'simulated',
    'zerosearch',
    2,
  )
  assert (s.noise_from, s.noise_to, s.base, s.steps) == (0.0, 0.5, 4.0, 30)
  c.train.steps = 7
  assert s.steps == 7
  assert c.reward.to_dict() == {'f1': dict(fn='answer.f1', weight=1.0)}
  c = zerosearch.get_config('noise=1,reward=em,algorithm=ppo,simulator=runs/x')
  s = c.source.simulator
  assert (s.noise_from, s.noise_to, s.path, s.url) == (1.0, 1.0, 'runs/x', '')
  assert list(c.reward) == ['em'] and c.critic.lr > 0
  full = zerosearch.get_config('model=m,simulator=http://a:1/v1')
  assert (full.source.simulator.url, full.source.simulator.path) == (
    'http://a:1/v1',
    '',
  )
  assert (full.source.k, full.model.path) == (5, 'm')
  for arg in (
    '',
    'algorithm=ppo',
    'algorithm=reinforce',
    'noise=0.2',
    'model=m',
    'model=m,simulator=http://a:1',
  ):
    checks.check(zerosearch.get_config(arg))


@pytest.mark.parametrize(
  'arg, said',
  [
    ('noise=much', "noise='much'"),
    ('reward=bleu', "reward='bleu'"),
    ('learns=x', "learns='x'"),
    ('algorithm=x', "algorithm='x'"),
    ('learns=simulator,model=m', 'small form'),
  ],
)
def test_bad_arguments_are_told(arg, said):
  with pytest.raises(ValueError, match=said):
    zerosearch.get_config(arg)


@pytest.mark.parametrize(
  'reply, found',
  [
    ('Doc 1: aa\nbb\n\nDoc 2: cc', [('', 'aa\nbb'), ('', 'cc')]),
    ('Doc 1 (Ann (1)): aa (b): c', [('Ann (1)', 'aa (b): c')]),
    ('Doc 1 (Ann Bo): aa\nDoc 2 (Cy): bb', [('Ann Bo', 'aa'), ('Cy', 'bb')]),
    (
      'Sure!\n**Doc 1 (Ann):** aa\n**Document 2:** bb',
      [('Ann', 'aa'), ('', 'bb')],
    ),
    (
      'Doc 1. one: two. Doc 3: not on a line of its own',
      [('', 'one: two. Doc 3: not on a line of its own')],
    ),
    ('I cannot.', []),
    ('', []),
  ],
)
def test_documents_of_a_prompted_model_are_told_apart(reply, found):
  matches = re.finditer(zerosearch.DOCUMENT, reply)
  assert [(m['title'] or '', m['text']) for m in matches] == found


def test_a_warm_start_that_would_search_a_simulator_is_refused(tmp_path):
  with pytest.raises(checks.ConfigError, match='source.module=service'):
    sft.sft(zerosearch.get_config(), str(tmp_path))


def test_no_search_engine_starts_while_it_trains(tmp_path, monkeypatch):
  from retrieval import process

  def start(*args, **kw):
    raise AssertionError('a server was started')

  monkeypatch.setattr(process, 'start_server', start)
  c = zerosearch.get_config()
  with services.retrieval(c, str(tmp_path)) as url:
    assert url == ''
  c.source.module = 'service'
  with pytest.raises(AssertionError, match='a server'):
    with services.retrieval(c, str(tmp_path)):
      pass


def test_the_tables_arms_differ_in_what_they_say_alone(tmp_path):
  def of(arm):
    stage = f'arms/{arm}/0'
    return records.plain(stages.config_of(table.ROW, stage, tmp_path))

  def differ(a, b):
    return set(lookup.differences(of(a), of(b)))

  assert differ('curriculum', 'p0') == {'source.simulator.noise_to'}
  assert differ('p0', 'p1') == {
    'source.simulator.noise_from',
    'source.simulator.noise_to',
  }
  assert differ('real', 'curriculum') == {
    'source.module',
    'source.simulator.path',
    'source.simulator.temperature',
  }
  assert of('curriculum')['source']['simulator']['path'] == str(
    tmp_path / 'warm/simulator/0/run'
  )
  # Search-R1's own warm starts serve.
  warm = stages.config_of(table.ROW, 'warm/warm/1', tmp_path)
  assert records.plain(warm) == records.plain(search_r1.get_config('seed=1'))


# Whole runs.


def small_run(**fields):
  """Policies of tiny size that search once and again."""
  c = tiny.config()
  c.source.module = 'simulated'
  c.source.simulator.update(
    dict(
      useful='Question: {answers} {query} use?\n',
      noisy='Question: {query} not use?\n',
      document='(?s)(.+)',
      chat=False,
      max_tokens=24,
      noise_to=0.5,
      stops=('r', 's', 'n'),  # soon; none is cut
    )
    | fields
  )
  c.env.max_turns = 2
  c.env.max_turn_tokens = 16
  c.eval.every = 0
  c.checkpoint.best = ''
  c.train.steps = 3
  return c


@pytest.fixture(scope='module')
def warm(tmp_path_factory, url):
  """A policy that knows how to search, and no more."""
  c = small_run()
  c.source.module, c.source.url = 'service', url
  c.sft.data.update(
    dict(n=300, worlds=3, train=40, relations=3, guess=0.0, good=1.0, poor=0.0)
  )
  c.sft.steps, c.sft.warmup, c.sft.rows = 60, 5, 16
  c.sft.lr = 1e-2
  folder = str(tmp_path_factory.mktemp('warm'))
  sft.sft(c, folder)
  return folder


@pytest.mark.long
@pytest.mark.parametrize('beside', [False, True])
def test_a_run_on_simulated_documents_resumes_bit_for_bit(
  warm, tmp_path, beside
):
  """The policy's own engine simulates; or one of its own, beside it."""
  c = small_run(path=warm if beside else '')
  c.source.simulator.engine = dict(slots=2)
  c.train.init = warm
  whole, parts = str(tmp_path / 'whole'), str(tmp_path / 'parts')
  train.train(c, whole)
  c.train.seconds = 1e-9
  train.train(c, parts)
  assert checkpoint.of_run(c, parts).latest() == 1
  c.train.seconds = 0.0
  train.train(c, parts)

  found = check.read(whole)
  assert found == check.read(parts)
  assert found['useful_gold_all_n'] > 0 and found['failed'] == 0
  assert found['real_queries'] == 0
  runs = (records.read(f'{run}/trajectories') for run in (whole, parts))
  for a, b in zip(*runs, strict=True):
    a, b = a.trajectory, b.trajectory
    assert [s.passages for s in a.searches] == [s.passages for s in b.searches]
  mesh = build.mesh(c)
  cfg = parameters.model_config(c, build.tokenizer(c, whole).vocab_size)
  a, b = (
    jax.tree.leaves(parameters.restore(c, run, cfg, mesh))
    for run in (whole, parts)
  )
  assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_two_engines_do_not_share_a_mesh(tmp_path):
  c = small_run(path=str(tmp_path))
  c.mesh.data = 2
  with pytest.raises(checks.ConfigError, match='mesh of 2'):
    services.source(c, '', None, None, build.mesh(c), str(tmp_path))


@pytest.mark.long
def test_the_real_search_engine_evaluates_what_a_simulator_taught(
  warm, tmp_path, url
):
  c = small_run()
  c.source.module, c.source.url = 'service', url
  evaluate.evaluate(c, warm, str(tmp_path / 'real'))
  found = check.read(str(tmp_path / 'real'), 'eval')
  assert found['real_queries'] > 0 == found['useful_gold_all_n']


def test_a_simulator_that_is_not_there_is_named(tmp_path):
  c = small_run(path=str(tmp_path / 'none'))
  with pytest.raises(checks.ConfigError, match=r'simulator\.path.*none'):
    services.source(c, '', None, None, build.mesh(c), str(tmp_path))
