"""The recipes on atlas: what is asked, read and written, and what is not."""

import collections
import json
import re
import types

import pandas as pd
import pytest

from configs import ssp, ssrl, ttrl, zerosearch
from experiments.arena import (
  arms,
  documents,
  measure,
  recipes,
  recitals,
  results,
  selfplay,
)
from experiments.ssp import game, start
from experiments.zerosearch import check
from searchrl_jax import sft
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Trace
from searchrl_jax.lookup import ConfigError
from searchrl_jax.run import build
from searchrl_jax.sources import simulated
from searchrl_jax.sweep import core
from searchrl_jax.text.tokenizer import load as load_tokenizer
from searchrl_jax.types import (
  Passage,
  Question,
  SearchRequest,
  SearchResult,
  Trajectory,
)
from searchrl_jax.worlds import atlas, atlas_traces, microtraces
from searchrl_jax.worlds.microdocuments import NOTHING

pytestmark = pytest.mark.slow

SMALL = dict(train=60, heldout=40, known=20)


@pytest.fixture(scope='module')
def tokens(tmp_path_factory):
  return load_tokenizer(atlas.tokenizer(tmp_path_factory.mktemp('tokens')))


# The phase.


def test_the_phase_is_a_sweep_of_configs_that_can_run():
  found = arms.get_sweep(recipes.PHASE)
  core.check(found)
  for arm in found.arms:
    c = arm.config(2)
    assert c.seed == c.data.world_seed == 2
    # A proposal for each question of self-play is a trajectory too.
    group = c.rollout.group + (arm.name == 'ssp')
    assert 120 <= c.rollout.questions * group <= 128
    assert c.data.world.to_dict() == dict(train=300, heldout=150, known=40)
  with pytest.raises(ConfigError, match="'recipes'.*--base"):
    arms.get_sweep('recipes,base=search_r1')


def test_what_the_rows_start_from():
  found = arms.get_sweep(recipes.PHASE)
  assert found.needs('arms/ttrl/1') == {'train.init': 'warm/skills/1'}
  assert found.needs('arms/zerosearch/1') == {
    'train.init': 'warm/even/1',
    'source.simulator.path': 'warm/simulator/0',
  }


def test_what_the_rows_are_evaluated_with(monkeypatch):
  seen = []

  def values(found, trained, out, which=max):
    del found, trained, out
    return {'hard/em': float(which([0, 20]))}

  def evaluate(config, run, out):
    seen.append((run, config.source.module, config.env.real_searches))
    assert config.eval.questions == 0 and config.eval.temperature == 1.0

  monkeypatch.setattr(measure, '_values', values)
  monkeypatch.setattr(measure.evaluate, 'evaluate', evaluate)
  monkeypatch.setattr(measure, 'of_training', lambda *_: {})
  run = types.SimpleNamespace(metrics={}, starts=[{}])
  monkeypatch.setattr(measure.read, 'run', lambda folder: run)
  monkeypatch.setattr(recipes.check, 'read', lambda run, asks: {'noise': 0.5})
  sweep = arms.get_sweep(recipes.PHASE)

  ssrl_config = sweep.arm('ssrl').config(0)
  found = recipes.recited(ssrl_config, 'R', 'out')
  assert seen == [('R', 'service', -1)]
  assert (found['before/hard/em'], found['hard/em']) == (0.0, 20.0)
  assert ssrl_config.env.real_searches == 0  # of what it is with itself

  seen.clear()
  config = sweep.arm('zerosearch').config(0)
  config.train.init = 'W'
  assert config.source.module == 'simulated'
  recipes.simulated(config, 'R', 'out')
  assert [each[:2] for each in seen] == [('W', 'service'), ('R', 'service')]


def test_rows_are_in_the_table_and_in_no_claim(tmp_path):
  values = {'hard/em': 0.4, 'before/hard/em': 0.1}
  runs = {'recipes': {'ttrl': {'0': {'values': values}}}}
  results.write(arms.FIRST, runs, tmp_path, {}, '--phase=recipes')
  written = json.loads((tmp_path / 'results.json').read_text())
  table = pd.read_csv(tmp_path / 'means.csv')
  table = table[table.statistic == 'mean'].set_index('metric')
  assert {*table.arm} == {'ttrl'} and {*table.phase} == {'recipes'}
  assert table.value['hard/em'] == 0.4 and table.value['before/hard/em'] == 0.1
  assert all(record['n_seeds'] == 0 for record in written['claims'])


@pytest.mark.parametrize(
  'module, arg, says',
  [
    (ttrl, 'base=atlas,model=m', "model='m'.*base=atlas"),
    (ssrl, 'base=maps', "base='maps'.*'atlas'"),
    (ssrl, 'base=atlas,model=m', "base='atlas'"),
    (ssrl, 'base=atlas,shuffled', "base='atlas'.*shuffled"),
    (zerosearch, 'base=maps', "base='maps'.*'atlas'"),
    (zerosearch, 'base=atlas,model=m', "base='atlas'"),
    (ssp, 'base=maps', "base='maps'.*'atlas'"),
    (ssp, 'base=atlas,arm=golds', "base='atlas'.*golds"),
    (zerosearch, 'base=atlas,algorithm=ppo', "base='atlas'.*GRPO"),
  ],
)
def test_arguments_that_cannot_be_are_named(module, arg, says):
  with pytest.raises(ValueError, match=says):
    module.get_config(arg)


def test_ttrl_trains_on_what_the_arms_are_evaluated_on():
  c = ttrl.get_config('base=atlas,seed=1')
  (trained,) = data.load_sets(c.data.train, c.data).values()
  (asked,) = data.load_sets(c.data.eval, c.data).values()
  assert [q.text for q in trained] == [q.text for q in asked]
  assert len(trained) == 300
  assert (c.reward.vote.votes, c.reward.vote.train) == (16, 8)


# SSRL.


@pytest.fixture(scope='module')
def world():
  return atlas.generate(3, **SMALL)


@pytest.fixture(scope='module')
def recited():
  return recitals.traces(
    world_seed=3, mix='even', n=300, queries=50, recitals=2, **SMALL
  )


def test_each_passage_is_recited_as_often(world, recited):
  pairs = [
    (query, passage)
    for t in recited
    if t.actions[0][0] == 'search'
    for (_, query), (_, (passage,)) in zip(t.actions[::2], t.actions[1::2])
  ]
  for query, passage in pairs:
    assert passage.title.replace(',', '') == query
  told = sorted(passage.text for _, passage in pairs)
  texts = [row['contents'].split('\n') for row in world.corpus]
  stated = [text for title, text in texts if not title.endswith('asked"')]
  assert told == sorted(2 * stated) and len(stated) == 5 * len(world.facts)


def test_questions_of_all_kinds_are_asked(recited):
  kinds = collections.Counter(t.question.source for t in recited if t.question)
  assert {*kinds} == {*atlas.KINDS} and min(kinds.values()) > 20


def test_a_trace_without_a_query_begins_nothing():
  guess = Trace(None, (('think', 'x'), ('answer', 'y')))
  asks = Trace(None, (('think', 'x'), ('search', 'y'), ('answer', 'z')))
  assert recitals.begun(guess) == ()
  assert recitals.begun(asks) == asks.actions[:2]


def test_nothing_held_out_is_asked(recited):
  people = {n for r in (False, True) for n in atlas.names('heldout', r)}
  asked = [t for t in recited if t.actions[0][0] != 'search']
  for t in asked:
    said = ' '.join(x for _, x in t.actions if isinstance(x, str))
    assert not {*re.findall(r'[A-Z]\w+ [A-Z]\w+', said)} & people
    if not t.question:  # no more than a query is written
      assert said.startswith('Question: What ')
      assert all(kind != 'information' for kind, _ in t.actions)
  of = [t.question for t in asked if t.question]
  assert all(q.id.startswith('atlas-3-train-') for q in of)
  assert len(of) == 300 and 330 < len(asked) <= 350  # a few only guess


def test_information_is_in_the_loss_of_the_start(recited, tokens):
  c = ssrl.get_config('base=atlas')
  c.env.train_information = True  # as sft sets it
  env = build.environment(c, tokens)
  for i, trace in enumerate(recited[::20]):
    written = sft.render(trace, env, i)
    assert all(s.train or s.author == 'prompt' for s in written.segments)
    if trace.question:
      assert env.answer(written) == dict(trace.actions)['answer']


# ZeroSearch.


@pytest.fixture(scope='module')
def believed():
  return documents.beliefs(0)


@pytest.fixture(scope='module')
def written():
  return documents.traces(world_seed=0, worlds=2, n=1500, people=60, useful=0.6)


def holds(text: str, gold: str) -> bool:
  return re.search(rf'\b{gold}\b', text) is not None


def test_a_useful_document_holds_the_gold_and_a_noisy_one_does_not(written):
  kinds = {True: 0, False: 0}
  for t in written:
    (_, thought), (_, document) = t.actions
    (gold,) = t.question.answers
    last = thought.split('; ')[-1]
    states = last != NOTHING
    useful = not t.question.text.endswith('not use')
    assert useful or thought == NOTHING
    assert not states or last.endswith(gold)
    # A query may name whom the gold names.
    query = t.question.text.partition('search: ')[2]
    assert holds(document, gold) == states or holds(query, gold)
    kinds[states] += 1
  assert kinds[True] > 300 and kinds[False] > 600


def test_half_of_the_noise_is_about_somebody_else(written):
  noise = [t for t in written if t.question.text.endswith('not use')]
  about = []
  for t in noise:
    first, second, *_ = t.question.text.partition('search: ')[2].split()
    if second not in documents.SECTIONS:  # a query that names a person
      about.append(f'{first} {second}' in t.actions[-1][1])
  assert len(about) > 300 and 0.4 < sum(about) / len(about) < 0.6


def test_documents_are_about_train_people_of_other_worlds(written):
  train = {n for r in (False, True) for n in atlas.names('train', r)}
  for t in written:
    path = t.question.meta['path']
    assert path[0] in train and not t.question.id.startswith('atlas-0-')


def test_a_path_is_walked_by_beliefs(believed):
  start = atlas.names('train', False)[0]
  meta = dict(path=(start, 'teacher', 'rival', 'home'), parallel=False)
  q = Question('q', 'x', ('Tenwick',), meta=meta)
  one, two, three = documents.walked(q, believed)
  assert one == (start, 'teacher')
  assert two == (believed('teacher', start), 'rival')
  assert three == (believed('rival', two[0]), 'home')
  assert documents.asked(q, (three[0], 'life'), believed) == 'home'
  for place in (
    *((two[0], 'life'), (three[0], 'work'), (start, 'life')),
    # Where earlier facts of the path stand.
    *((person, atlas.SECTION[relation]) for person, relation in (one, two)),
  ):
    assert documents.asked(q, place, believed) is None
  both = Question(
    'c', 'x', ('T',), meta=dict(path=('A B', 'C D'), parallel=True)
  )
  for person in ('A B', 'C D'):
    assert documents.asked(both, (person, 'travel'), believed) == 'visited'


def test_documents_are_counted_by_what_was_asked_for(believed):
  meta = dict(path=('Mira Dok', 'home'), parallel=False)
  question = Question('q', 'x', ('Tenwick',), meta=meta)

  def found(query, kind, text):
    passage = Passage(simulated.name_of(kind, '', text), '', text)
    return SearchResult(SearchRequest(query, 1), (passage,))

  searches = (
    found('Mira Dok', 'useful', 'Mira Dok asked.'),
    found('Mira Dok life', 'useful', 'life of Mira Dok: house Tenwick.'),
    found('Mira Dok life', 'noisy', 'life of Mira Dok: house Sormar.'),
  )
  played = Trajectory(question, (), searches, 'answer')
  counted = check.count([played], lambda t: documents.asks(t, believed))
  assert (counted['useful_gold'], counted['useful_gold_n']) == (1.0, 1)
  assert (counted['noisy_gold'], counted['noisy_gold_n']) == (0.0, 1)
  assert (counted['real_queries'], counted['noise']) == (0, 1 / 3)


def test_simulator_and_policy_fit_their_budgets(written, tokens):
  c = zerosearch.get_config('base=atlas,learns=simulator')
  env = build.environment(c, tokens)
  limit = c.source.simulator
  for i, trace in enumerate(written):
    trajectory = sft.render(trace, env, i)
    said = sum(len(s.ids) for s in trajectory.segments if s.author == 'policy')
    assert said <= limit.max_tokens
    assert len(trajectory) - said + limit.max_tokens <= limit.engine.max_len
    text = ''.join(
      tokens.decode(s.ids) for s in trajectory.segments if s.author == 'policy'
    )
    assert re.search(limit.document, text)[1] == trace.actions[-1][1]


def test_a_world_of_documents_that_cannot_be_names_the_field():
  with pytest.raises(DataError, match='train=41'):
    documents.traces(world_seed=0, worlds=1, n=9, people=41, useful=0.5)


# SSP.


ROLES = dict(
  solver=0.2, proposer=0.4, drill=0.1, proposed=(0.4, 0.4, 0.2), wrong=0.1,
  absent=0.2,
)  # fmt: skip


@pytest.fixture(scope='module')
def roles():
  return selfplay.traces(
    world_seed=3, mix='even', roles=ROLES, n=900, worlds=2, turns=6, people=60,
    **SMALL,
  )  # fmt: skip


def test_who_leads_to_somebody_can_be_searched_for(world):
  wider = selfplay.generate(3, **SMALL)
  assert wider.corpus[: len(world.corpus)] == world.corpus
  assert wider.questions == world.questions
  search = microtraces.indexed(
    wider, {row['contents'].split('"')[1] for row in wider.corpus}
  )
  people, known = [*world.facts], selfplay.backlinks(world)
  leads = selfplay.leading(world.facts)
  for name, (found,) in zip(people, search([f'{n} know' for n in people], 1)):
    assert (found.id, found.text) == (known[name].id, known[name].text)
    for who, link in leads[name]:
      assert world.facts[who][link] == name
      assert f'{who} {selfplay.WORD[link]} {name}' in found.text
  # A person with a section finds what it finds in atlas; a person alone does
  # not, as that is what the passage repeats.
  before = atlas_traces.searcher(world, people, tuple(atlas.SECTION))
  queries = [f'{n} {s}' for n in people for s in (*atlas.SECTIONS, 'travel')]
  for old, new in zip(before(queries, 1), search(queries, 1), strict=True):
    assert old[0].title == new[0].title
  for (found,) in search(people, 1):
    assert found.title.endswith(f', {selfplay.KNOW}')


def test_proposals_lead_to_their_answers_and_verifiers_read_them(roles):
  hops = collections.Counter()
  for t in roles:
    if t.template == selfplay.TEMPLATE:
      start, path = selfplay.parse(dict(t.actions)['answer'])
      assert len(path) == sum(kind == 'search' for kind, _ in t.actions)
      hops[len(path)] += 1
      own = stated(
        ' '.join(p[0].text for kind, p in t.actions if kind == 'information')
      )
      assert (walk(own, start, path) == t.question.answers[0]) == t.good
  assert hops[1] > hops[3] > 20 and hops.total() > 300
  readings = [t for t in roles if t.template == 'micro_evidence']
  absent = 0
  for t in readings:
    evidence, _, question = t.question.text.rpartition('\nQuestion: ')
    found = walk(stated(evidence), *selfplay.parse(question))
    assert dict(t.actions)['answer'] == (found or 'not found')
    absent += not found
  assert 0.1 < absent / len(readings) < 0.3


def stated(text):
  """(person, link) -> person, of passages of who leads to whom."""
  link = {word: link for link, word in selfplay.WORD.items()}
  found = re.findall(r'([A-Z]\w+ [A-Z]\w+) ([a-z]+) ([A-Z]\w+ [A-Z]\w+)', text)
  return {(who, link[word]): name for who, word, name in found}


def walk(links, at, path):
  for link in path:
    at = links.get((at, link))
  return at


def test_the_oracle_reads_questions_of_atlas():
  config = ssp.get_config('base=atlas,seed=1')
  config.data.world.update(SMALL)
  judge = selfplay.make(config).judge
  facts = atlas.generate(1, **SMALL).facts
  name = [*facts][0]
  teacher = facts[name]['teacher']
  good = judge(f"What is {name}'s teacher?", [teacher])
  assert (good.valid, good.unique, good.hops) == (True, True, 1)
  rival = judge(f"What is {name}'s teacher's rival?", [facts[teacher]['rival']])
  assert rival.valid and rival.start == name
  assert not judge(f"What is {name}'s rival?", [teacher]).valid
  assert not judge('What is not', [teacher]).known


def test_roles_fit_their_budgets(roles, tokens):
  c = ssp.get_config('base=atlas')
  start.check(c)
  envs = game.environments(c, tokens)
  role = {'': 'solver', selfplay.TEMPLATE: 'proposer'}
  for i, trace in enumerate(roles):
    env = envs[role.get(trace.template, 'verifier')]
    written = sft.render(trace, env, i)
    if trace.question:
      assert env.answer(written) == dict(trace.actions)['answer']
    if trace.template == selfplay.TEMPLATE and trace.good:
      assert game.read(written, env, c, 0).reason in ('', 'leak')
