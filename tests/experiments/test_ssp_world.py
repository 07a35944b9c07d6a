"""The world of self-play, its oracle, and what the warm start shows."""

import collections
import re

import numpy as np
import pytest

from configs import ssp
from experiments.ssp import oracle as oracles
from experiments.ssp import traces as scripts
from experiments.ssp import world as worlds
from experiments.ssp.oracle import Oracle
from retrieval.index.bm25 import BM25Index
from searchrl_jax import sft
from searchrl_jax.data.checks import DataError
from searchrl_jax.text import prompts
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.text.env import SearchEnv


@pytest.fixture(scope='module')
def world():
  return worlds.generate(3)


def fields(**changed):
  found = ssp.get_config().sft.data.to_dict()
  del found['module']
  return found | dict(n=1500, worlds=3, world_seed=3) | changed


@pytest.fixture(scope='module')
def traces():
  return scripts.traces(**fields())


def role(trace):
  if trace.question is None:
    return 'drill'
  return {
    '': 'solver',
    'micro_proposer': 'proposer',
    'micro_evidence': 'verifier',
  }[trace.template]


def said(trace):
  """What stands there before its policy says anything."""
  return trace.question.text if trace.question else trace.actions[0][1]


def of(traces, name):
  return [t for t in traces if role(t) == name]


def names_in(text):
  return set(re.findall(r'[A-Z][a-z]{3} [A-Z][a-z]{4}\b', text))


def graph(trace):
  """The oracle of the passages that a trace shows."""
  facts = collections.defaultdict(list)
  texts = [said(trace)] + [
    p.text
    for kind, payload in trace.actions
    if kind == 'information'
    for p in payload
  ]
  for text in texts:
    for a, r, b in re.findall(r'(\w+ \w+) (\w+) ([A-Z]\w+ [A-Z]\w+)', text):
      if (r, b) not in facts[a]:
        facts[a].append((r, b))
  return Oracle(facts)


@pytest.mark.parametrize('seed', [0, 1, 12345])
def test_splits_share_nobody_and_are_related_to_nobody_else(seed):
  world = worlds.generate(seed)
  assert world == worlds._generate(seed, {'play': 300, 'heldout': 150})
  for split, people in world.people.items():
    assert set(people) <= set(worlds.names(split))
    for name in people:
      assert {v for _, v in world.facts[name]} <= set(people)
  names = [n for s in worlds.SHARES for n in worlds.names(s)]
  assert len(names) == len(set(names))


def test_each_statement_has_its_inverse_and_some_are_shared(world):
  for name, facts in world.facts.items():
    assert len({r for r, _ in facts if r in worlds.FORWARD}) == 2
    for relation, other in facts:
      assert (worlds.INVERSE[relation], name) in world.facts[other]
    for one, one_inverse, many, many_inverse in worlds.TIERS:
      count = collections.Counter(r for r, _ in facts)
      assert max(count[one], count[one_inverse], count[many]) <= 1
      assert count[many_inverse] <= worlds.MOST_SHARING
  shared = [
    name
    for name, facts in world.facts.items()
    if len(facts) - len({r for r, _ in facts})
  ]
  assert len(shared) > 0.2 * len(world.facts)


def test_a_search_for_a_name_finds_its_passage(world):
  index = BM25Index([row['contents'] for row in world.corpus])
  names = list(world.facts)
  ids, _ = index.search(names, 1)
  found = [world.corpus[i]['id'] for i in np.ravel(ids)]
  assert found == [world.ids[name] for name in names]


def test_gold_questions_are_what_the_oracle_finds(world):
  oracle = Oracle(world.facts)
  questions = worlds.load(
    world_seed=3, split='heldout', n=200, hops=(1, 2, 3, 4)
  )
  assert [q.hops for q in questions[:5]] == [1, 2, 3, 4, 1]
  for q in questions:
    found = oracle.judge(q.text, q.answers)
    assert found.known and found.valid and found.unique
    assert found.hops <= q.hops == len(q.supporting)
    wrong = oracle.judge(q.text, ['Some Body'])
    assert wrong.known and not wrong.valid
  answers = worlds.load(world_seed=3, split='play')
  assert [q.text for q in answers] == [q.answers[0] for q in answers]
  assert sorted(q.text for q in answers) == sorted(world.people['play'])


def test_the_oracle_tells_what_a_question_means():
  oracle = Oracle(
    {
      'Al Ba': (('guide', 'Ce De'), ('pupil', 'Ef Go'), ('pupil', 'Ha In')),
      'Ce De': (('ward', 'Al Ba'), ('heir', 'Ef Go')),
      'Ef Go': (('teacher', 'Al Ba'), ('elder', 'Ce De')),
      'Ha In': (('teacher', 'Al Ba'),),
    }
  )
  judge = oracle.judge
  plain = judge('What is the guide of Al Ba?', ['ce de'])
  assert plain == oracles.Verdict(True, True, True, 1, 'Al Ba')
  # Of several answers one is right: answerable, not unique.
  many = judge('What is the pupil of Al Ba?', ['Ha In'])
  assert (many.valid, many.unique, many.hops) == (True, False, 1)
  # Two relations long, but it comes back.
  assert judge('What is the ward of the guide of Al Ba?', ['Al Ba']).hops == 0
  # Two relations long, but its start's passage names the answer.
  short = judge('What is the heir of the guide of Al Ba?', ['Ef Go'])
  assert short.valid and short.hops == 1
  two = judge('What is the guide of the teacher of Ha In?', ['Ce De'])
  assert two.valid and two.hops == 2
  for text in (
    'What is the rival of Al Ba?',
    'What is the guide of No Body?',
    'Who is the guide of Al Ba?',
    'What is guide of Al Ba?',
    'Al Ba?',
    '',
  ):
    found = judge(text, ['Ce De'])
    assert not found.known and not found.valid, text


@pytest.mark.parametrize(
  'counts, message',
  [
    (dict(play=299), 'play=299'),
    (dict(heldout=40), 'heldout=40'),
    (dict(play=10_000), 'play=10000'),
  ],
)
def test_sizes_that_cannot_be_are_refused(counts, message):
  with pytest.raises(DataError, match=message):
    worlds.generate(0, **counts)


def test_unknown_splits_and_hops_are_refused():
  with pytest.raises(DataError, match='split='):
    worlds.load(world_seed=0, split='warm')
  with pytest.raises(DataError, match='hops='):
    worlds.load(world_seed=0, split='play', hops=(5,))


def test_the_warm_start_knows_nobody_of_the_run(world, traces):
  told = set()
  for t in traces:
    told |= names_in(said(t))
    for kind, payload in t.actions:
      text = payload if kind != 'information' else payload[0].text
      told |= names_in(text)
  assert len(told) > 250
  assert told <= set(worlds.names('warm'))
  assert not told & set(world.facts)


def test_traces_have_the_shares_that_the_config_names(traces):
  mix = scripts.Mix(**fields()['mix'])
  assert len(of(traces, 'solver')) / len(traces) == pytest.approx(
    mix.solver, abs=0.05
  )
  proposed = [t.actions[-1][1].count(' of ') for t in of(traces, 'proposer')]
  for hops, share in enumerate(mix.proposed, 1):
    assert np.mean([p == hops for p in proposed]) == pytest.approx(
      share, abs=0.05
    )
  solved = of(traces, 'solver')
  assert np.mean([t.question.hops == 1 for t in solved]) == pytest.approx(
    mix.asked[0], abs=0.06
  )
  # Longer ones are mostly left too early.
  longer = [t for t in solved if t.question.hops > 1]
  assert 0.1 < np.mean([t.good for t in longer]) < 0.6
  assert 0.8 < np.mean([t.good for t in solved if t.question.hops == 1]) < 1


def test_a_good_proposal_stands_on_what_it_read(traces):
  right = wrong = 0
  for t in of(traces, 'proposer'):
    text = t.actions[-1][1]
    searches = [p for kind, p in t.actions if kind == 'search']
    assert searches[0] == t.question.text
    assert len(searches) == text.count(' of ') + 1
    assert not t.good or t.question.text not in text
    found = graph(t).judge(text, t.question.answers)
    right += t.good and found.valid
    wrong += not t.good and not found.valid
    assert found.valid or not t.good
  assert wrong > 0.03 * (right + wrong)


def test_a_verifier_reads_what_stands_there_and_says_what_does_not(traces):
  nothing = 0
  for t in of(traces, 'verifier'):
    (_, thought), (_, answer) = t.actions
    question = t.question.text.rpartition('Question: ')[2]
    found = graph(t).judge(question, [answer])
    if answer == scripts.NOTHING:
      nothing += 1
    else:
      assert found.valid, (question, answer)
      for statement in thought.split('; '):
        assert statement in t.question.text
  assert 0.1 < nothing / len(of(traces, 'verifier')) < 0.35


def test_a_drill_states_again_what_stands_there(traces):
  drills = of(traces, 'drill')
  assert drills
  for t in drills:
    (_, read), (_, stated) = t.actions
    statements = read.replace('\n', '; ').split('; ')
    assert sorted(statements) == sorted(stated.split('; '))
  assert any(
    t.actions[0][1].replace('\n', '; ') != t.actions[1][1] for t in drills
  )


def test_every_trace_fits_and_keeps_its_role_s_template(traces, tmp_path):
  c = ssp.get_config()
  folder = worlds.tokenizer(tmp_path / 'tokenizer')
  tok = tokenizers.load(folder)
  env = SearchEnv(tok, prompts.load(c.env.template), c.env, 'template', 1)
  c.sft.data.update(dict(n=300, worlds=2))
  c.data.world_seed = 3
  found = sft.examples(c, env, None)
  assert len(found) >= 0.98 * 300
  texts = [
    tok.decode(np.concatenate([s.ids for s in t.segments])) for t in found
  ]
  assert not any('unk' in text for text in texts)
  assert all(
    ('<question>' in text) == text.startswith('answer: ') for text in texts
  )
  # A prompt is not learnt, a question is.
  proposed = next(t for t, x in zip(found, texts) if '<question>' in x)
  assert not proposed.segments[0].train
  assert proposed.segments[-1].train and proposed.segments[-1].kind == 'answer'


@pytest.mark.parametrize(
  'changed, message',
  [
    (dict(asked=(0.5, 0.4)), 'asked=.*sum'),
    (dict(wrong=1.2), 'wrong=1.2'),
    (dict(solver=0.9), 'solver \\+ proposer'),
    (dict(short=(0.1,)), 'short='),
  ],
)
def test_shares_that_cannot_be_are_refused(changed, message):
  given = fields()
  with pytest.raises(DataError, match=message):
    scripts.traces(**given | dict(mix=given['mix'] | changed))
  with pytest.raises(DataError, match='n=2 .*worlds='):
    scripts.traces(**fields(n=2))
