"""The generated world: what it promises, on several seeds and sizes."""

import collections
import inspect
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import Stemmer
import transformers

from retrieval.index.bm25 import STOP_WORDS
from searchrl_jax.data import jsonl
from searchrl_jax.data.checks import DataError
from searchrl_jax.worlds import microtraces, microworld

pytestmark = pytest.mark.slow

SMALL = dict(train=60, heldout=30)
GOOD = microtraces.Mix(good=1, poor=0, guess=0, tilt=0, again=0, short=0)


@pytest.fixture(scope='module')
def world():
  return microworld.generate(7)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = microworld.tokenizer(tmp_path_factory.mktemp('tok') / 'tokenizer')
  return transformers.AutoTokenizer.from_pretrained(folder)


def people(questions):
  """Everybody who occurs on the way of a question, answers included."""
  found = set()
  for q in questions:
    found.add(q.meta['path'][0])
    found.update(a for a in q.answers if ' ' in a)
  return found


@settings(max_examples=15, deadline=None)
@given(
  seed=st.integers(0, 2**40),
  train=st.integers(20, 300),
  heldout=st.integers(20, 200),
  relations=st.integers(2, 6),
)
def test_world_of_any_seed_and_size(seed, train, heldout, relations):
  kw = dict(train=train, heldout=heldout, relations=relations)
  world = microworld.generate(seed, **kw)
  assert world == microworld.generate(seed, **kw)
  assert len(world.corpus) == train + heldout
  text = {row['id']: row['contents'] for row in world.corpus}
  assert len(text) == train + heldout
  stated = collections.Counter()
  for name, facts in world.facts.items():
    assert len(facts) == relations
    stated.update(facts.keys())
    assert name not in facts.values()
  assert max(stated.values()) >= 2  # the same relation, of other people
  for questions in world.questions.values():
    assert len({q.id for q in questions}) == len(questions)
    for q in questions:
      # Following the supporting passages by hand gives the answer.
      name, *path = q.meta['path']
      assert name in q.text and len(path) == q.hops == len(q.supporting)
      for relation, passage in zip(path, q.supporting):
        head, _, facts = text[passage].partition('\n')
        assert head == f'"{name}"'
        (name,) = [
          f.removeprefix(relation + ' ')
          for f in facts.removeprefix(name + ': ').rstrip('.').split('; ')
          if f.startswith(relation + ' ')
        ]
      assert q.answers == (name,)
      assert q.answers[0] not in q.text


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_nobody_held_out_occurs_in_training(seed):
  world = microworld.generate(seed)
  other = microworld.generate(seed + 100)
  heldout = people(world.questions['heldout'])
  assert heldout and not heldout & people(world.questions['train'])
  assert not heldout & people(other.questions['train'])
  text = str(microtraces.traces(world_seed=seed, worlds=2, n=400))
  assert any(n in text for n in microworld.names(world.settings, 'train'))
  assert not any(n in text for n in microworld.names(world.settings, 'heldout'))


@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('size', [{}, SMALL, dict(train=20, heldout=20)])
def test_no_answer_is_frequent(seed, size):
  world = microworld.generate(seed, **size)
  for split, questions in world.questions.items():
    for some in (questions, microworld.pick(world, split)):
      answers = collections.Counter(q.answers[0] for q in some)
      assert answers.most_common(1)[0][1] <= 0.05 * len(some)


def test_facts_are_drawn_anew_for_each_seed():
  a, b = microworld.generate(0), microworld.generate(1)
  same = [
    a.facts[n][r] == b.facts[n][r]
    for n in a.facts.keys() & b.facts.keys()
    for r in a.facts[n].keys() & b.facts[n].keys()
  ]
  assert len(same) > 100 and sum(same) / len(same) < 0.08  # 1/40 by chance


def test_words_are_distinct_to_the_search_index():
  """No two words share a stem, none is a stop word."""
  settings_ = microworld.Settings()
  words = [
    *microworld.invented(settings_.first, 'first'),
    *microworld.invented(settings_.second, 'second'),
    *[v for pool in microworld.pools(settings_).values() for v in pool],
    *microworld.ATTRIBUTES,
    *microworld.LINKS,
  ]
  assert len(set(words)) == len(words)
  stem = Stemmer.Stemmer('english').stemWord
  assert len({stem(w.lower()) for w in words}) == len(words)
  assert not {w.lower() for w in words} & STOP_WORDS['english']


def test_pools_grow_without_changing_what_was_there():
  assert microworld.invented(60, 'town')[:20] == microworld.invented(20, 'town')
  with pytest.raises(DataError, match='only 1125'):
    microworld.invented(10_000, 'town')


def test_a_name_leads_to_its_passage(world):
  names = list(world.facts)
  found = microtraces.searcher(world, microworld.SPLITS)(names, 1)
  hits = [f[0].title == n for n, f in zip(names, found)]
  assert sum(hits) > 0.97 * len(hits)


def test_traces_find_train_people_alone(world):
  heldout = list(microworld.names(world.settings, 'heldout'))
  found = microtraces.searcher(world)(heldout, 3)
  assert found and not {p.title for f in found for p in f} & set(heldout)


def test_tokens_joined_are_the_text(world, tokenizer):
  texts = [row['contents'] for row in world.corpus]
  texts += [q.text for qs in world.questions.values() for q in qs]
  texts += [a for qs in world.questions.values() for q in qs for a in q.answers]
  texts += [
    'Question: What is the home of Labo Delok?\n<think> find Labo Delok '
    '</think>\n<search> Labo Delok </search>\n<information> no passage found '
    '</information>\n<answer> 7 </answer>\n invalid action\n'
  ]
  for text in texts:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.unk_token_id not in ids, text
    assert tokenizer.decode(ids) == text
    assert ''.join(tokenizer.convert_ids_to_tokens(ids)) == text
  for tag in microworld.TAGS:
    for form in (f'<{tag}>', f' </{tag}>'):
      (token,) = tokenizer(form).input_ids
      assert token not in tokenizer.all_special_ids


def test_tokenizer_is_the_same_for_all_worlds(tokenizer):
  assert len(tokenizer) == len(microworld.vocabulary())
  assert (
    tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    == microworld.vocabulary()
  )
  assert tokenizer('zyx').input_ids == [tokenizer.unk_token_id]


def test_good_traces_follow_the_facts(world):
  found = microtraces.script(
    world, 40, 0, microtraces.searcher(world, microworld.SPLITS), 1, GOOD
  )
  assert [t.question.hops for t in found] == [1, 2] * 20
  for t in found:
    assert t.actions[-1] == ('answer', t.question.answers[0]) or not t.good
    read = [p.id for kind, ps in t.actions if kind == 'information' for p in ps]
    assert not t.good or tuple(read) == t.question.supporting
  assert sum(t.good for t in found) >= 37  # a search may miss


def test_traces_mix_behaviours():
  kw = dict(world_seed=3, worlds=3, n=3001)
  found = microtraces.traces(**kw)
  assert found == microtraces.traces(**kw)
  assert len(found) == 3001
  guesses = collections.defaultdict(list)
  for t in found:
    guesses[t.question.meta['path'][-1]].append(t.actions[1][0] == 'answer')
  rate = {r: sum(g) / len(g) for r, g in guesses.items()}
  # guess = 0.4, tilt = 0.8: from 0.08 for the first relation to 0.72.
  assert rate['birthplace'] < 0.2 and rate['rival'] > 0.6
  assert 0.33 < sum(map(sum, guesses.values())) / len(found) < 0.5
  good = sum(t.good for t in found) / len(found)
  # 0.4 good searches; of those, the two-hop half loses 0.4 to `short`.
  assert 0.22 < good < 0.42
  # The two kinds of poor search are there.
  queries = {p for t in found for kind, p in t.actions if kind == 'search'}
  assert queries & set(microworld.ATTRIBUTES)
  assert any(' ' not in q and q[0].isupper() for q in queries)


def test_load_picks_the_same_questions_for_a_seed():
  one = microworld.load(world_seed=5, split='heldout', n=400)
  assert one == microworld.load(world_seed=5, split='heldout', n=400)
  assert len({q.id for q in one}) == 400
  assert collections.Counter(q.hops for q in one) == {1: 200, 2: 200}
  two = microworld.load(world_seed=5, split='heldout', n=100, hops=(2,))
  assert {q.hops for q in two} == {2}
  # A data config states the sizes that the corpus was made with.
  load = inspect.signature(microworld.load).parameters
  make = inspect.signature(microworld.generate).parameters
  for name in ('train', 'heldout', 'relations'):
    assert load[name].default == make[name].default


def test_written_files_hold_the_world(world, tmp_path):
  paths = microworld.write(world, tmp_path / 'world')
  rows = [json.loads(line) for line in open(paths['corpus'])]
  assert rows == [dict(r) for r in world.corpus]
  rows = [json.loads(line) for line in open(paths['heldout'])]
  assert [r['id'] for r in rows] == [q.id for q in world.questions['heldout']]
  assert rows[0]['golden_answers'] == list(
    world.questions['heldout'][0].answers
  )
  # The module that reads such files finds every field again.
  first, want = jsonl.load(paths['heldout'])[0], world.questions['heldout'][0]
  for name in ('id', 'text', 'answers', 'source', 'hops', 'supporting'):
    assert getattr(first, name) == getattr(want, name)
  assert sorted(p.name for p in (tmp_path / 'world').iterdir()) == [
    'corpus.jsonl',
    'heldout.jsonl',
    'train.jsonl',
  ]


@pytest.mark.parametrize(
  'call, message',
  [
    (lambda: microworld.generate(-1), 'seed=-1'),
    (lambda: microworld.generate(0, train=19), 'train=19 .* 20 to 1200'),
    (lambda: microworld.generate(0, heldout=401), 'heldout=401 .* 20 to 400'),
    (lambda: microworld.generate(0, relations=7), 'relations=7'),
    (lambda: microworld.load(world_seed=0, split='test'), "split='test'"),
    (lambda: microworld.load(world_seed=0, split='train', hops=(3,)), 'hops'),
    (
      lambda: microworld.load(world_seed=0, split='train', n=10**6),
      'n=1000000',
    ),
    (lambda: microtraces.traces(world_seed=0, worlds=9, n=4), 'n=4'),
    (lambda: microtraces.traces(world_seed=0, good=0.9), 'guess = '),
    (lambda: microworld.names(microworld.Settings(), 'dev'), "split='dev'"),
  ],
)
def test_errors_name_the_field(call, message):
  with pytest.raises(DataError, match=message):
    call()
