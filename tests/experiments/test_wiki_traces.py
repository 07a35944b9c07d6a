"""Scripted traces: real searches, honest labels, deterministic."""

import json

from ml_collections import ConfigDict
import pytest

from experiments.search_r1 import wiki_traces as wiki
from searchrl_jax import schema
from searchrl_jax.data import core
from searchrl_jax.data.checks import DataError
from searchrl_jax.rewards import scores
from searchrl_jax.types import Passage

PASSAGES = {
  str(i): Passage(
    str(i),
    f'Town {i} (place)',
    f'Town {i} is a small market town of the north . Mayor John Gray{i} '
    f'opened it on May {i + 1} , 19{i + 10} with 4{i} people .',
  )
  for i in range(20)
}


def search(queries, k):
  """Finds 'Town i' by its number, then its neighbours."""
  out = []
  for query in queries:
    numbers = [w for w in query.split() if w in PASSAGES]
    first = int(numbers[0]) if numbers else 0
    out.append([PASSAGES[str((first + j) % 20)] for j in range(k)])
  return out


def questions(tmp_path, split='train'):
  rows = []
  for i in range(20):
    rows += [
      {
        'id': f'w{i}',
        'question': f'when was the Town {i} opened',
        'golden_answers': [f'May {i + 1} , 19{i + 10}', 'long ' * 20],
      },
      {
        'id': f'm{i}',
        'question': f'who is the mayor of Town {i}',
        'golden_answers': [f'John Gray{i}'],
      },
    ]
  path = tmp_path / f'{split}.jsonl'
  path.write_text(
    ''.join(
      json.dumps(
        {**r, 'supporting_ids': [r['id'][1:]], 'split': split, 'source': 'nq'}
      )
      + '\n'
      for r in rows
    )
  )
  return str(path)


def make(path, n=200, **kw):
  fields = {
    'seed': 0,
    'k': 2,
    'good': 0.3,
    'poor': 0.1,
    'guess': 0.1,
    'max_answer_words': 6,
    'read': 100,
    'drills': 0,
  }
  return wiki.traces(path, search, n, **{**fields, **kw})


def test_good_is_right_and_read(tmp_path):
  found = make(questions(tmp_path))
  good = [t for t in found if t.good]
  assert 30 < len(good) < 90
  for trace in good:
    kinds = [kind for kind, _ in trace.actions]
    assert kinds[:3] == ['think', 'search', 'information']
    assert kinds[-2:] == ['think', 'answer']
    answer = trace.actions[-1][1]
    assert scores.exact_match(answer, trace.question.answers) == 1
    shown = [
      p for kind, ps in trace.actions if kind == 'information' for p in ps
    ]
    assert any(
      answer in p.text and p.id in trace.question.supporting for p in shown
    )


def test_information_is_what_the_search_gave(tmp_path):
  for trace in make(questions(tmp_path), n=60):
    for (kind, query), (after, got) in zip(trace.actions, trace.actions[1:]):
      if kind == 'search':
        assert after == 'information'
        assert list(got) == search([query], 2)[0]


def test_shares(tmp_path):
  path = questions(tmp_path)
  searches = lambda t: sum(kind == 'search' for kind, _ in t.actions)
  assert all(t.good for t in make(path, good=1.0, poor=0.0, guess=0.0))
  guessed = make(path, good=0.0, poor=0.0, guess=1.0)
  assert not any(searches(t) or t.good for t in guessed)
  blind = make(path, good=0.0, poor=0.0, guess=0.0)
  assert all(searches(t) >= 1 and not t.good for t in blind)
  named = {t.actions[-2][1].split(' in ')[0] for t in blind}
  assert named == set(wiki.KINDS)  # without a look at the question
  for bad in ({'good': 0.9, 'poor': 0.2}, {'guess': -0.1}):
    with pytest.raises(DataError, match='good=.*guess='):
      make(path, **bad)


def test_answers_lie_in_what_can_be_read(tmp_path):
  path = questions(tmp_path)
  # 'Town 3 (place)' and 'Town 3 is a small market town' are ten words: no
  # mayor, no date; the number of the town and its title remain.
  for trace in make(path, good=0.5, poor=0.0, guess=0.0, read=10):
    p = trace.actions[2][1][0]
    answer = trace.actions[-1][1]
    assert not trace.good
    assert answer in p.title or answer in ' '.join(p.text.split()[:7])
  # Titles of 3 words, a text of 25: the 32nd word is the second text's first.
  seen = wiki._visible([PASSAGES['1'], PASSAGES['2']], 32)
  assert [p.id for p in seen] == ['1', '2']
  assert (seen[0].text, seen[1].text) == (PASSAGES['1'].text, 'Town')
  assert len(wiki._visible([PASSAGES['1'], PASSAGES['2']], 31)) == 1


def test_drills_copy(tmp_path):
  found = make(questions(tmp_path), n=40, drills=30)
  assert [t for t in found if t.question.source != 'drill'] == make(
    questions(tmp_path), n=40
  )
  drills = [t for t in found if t.question.source == 'drill']
  assert len({t.question.id for t in drills}) == 30
  text = ' '.join(p.text for p in PASSAGES.values()).lower()
  for t in drills:
    assert t.question.text in text and not t.good
    said = dict(t.actions)
    assert said['search'] == t.question.text
    (p,) = said['information']
    assert PASSAGES[p.id].text.startswith(p.text)
    assert said['answer'] in f'{p.title} {p.text}'


def test_traces_repeat(tmp_path):
  path = questions(tmp_path)
  assert make(path, seed=3) == make(path, seed=3) != make(path, seed=4)


def test_every_question_before_any_twice(tmp_path):
  found = make(questions(tmp_path), n=80)
  first, second = found[:40], found[40:]
  assert len({t.question.id for t in first}) == 40
  assert {t.question.id for t in first} == {t.question.id for t in second}


def test_held_out_questions_stay_out(tmp_path):
  with pytest.raises(DataError, match="split='train'"):
    make(questions(tmp_path, split='dev'))


def test_candidates():
  p = Passage(
    '1',
    'Tone River (Japan)',
    (
      'The Tone River is a large river in the Kanto region . In March 1943 , '
      'John van Dyke crossed 3.5 million stones on 4 May 1944 .'
    ),
  )
  get = lambda kind: wiki.candidates(p, 'who crossed the Tone in Kanto', kind)
  assert get('title') == ['Tone River']
  assert get('date') == ['March 1943', '4 May 1944']
  assert get('number')[1] == '3.5 million'
  # Not the title, and not what the question says already.
  assert get('name') == ['March', 'John van Dyke', 'May']
  assert get('lead') == ['The Tone River is a large river in the Kanto']
  assert get('phrase') == ['large river in the Kanto region']
  assert wiki.kind_of('Tone river', p) == 'title'
  assert [wiki.kind_of(a, p) for a in ('May 1944', 'three', 'Bo', 'a dog')] == [
    'date',
    'number',
    'name',
    'phrase',
  ]


def test_through_the_config(tmp_path):
  path = questions(tmp_path)
  data = schema.base().data
  data.dir = str(tmp_path)
  fields = ConfigDict(
    {
      'module': 'experiments.search_r1.wiki_traces',
      'path': 'train.jsonl',
      'n': 10,
      'seed': 0,
      'k': 2,
      'good': 0.3,
      'poor': 0.1,
      'guess': 0.1,
      'max_answer_words': 6,
      'read': 50,
      'drills': 0,
    }
  )
  assert core.load_traces(fields, data, search) == make(path, n=10)
  with pytest.raises(DataError, match='sft.data.*search'):
    core.load_traces(fields, data)
  fields.goood = 0.3
  with pytest.raises(DataError, match="'goood'.*'good'"):
    core.load_traces(fields, data, search)
