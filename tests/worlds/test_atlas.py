"""The atlas: what a question promises, its traces keep."""

import asyncio
import collections
import dataclasses
import hashlib
import re
import subprocess
import sys

import pytest

from configs import atlas as recipe
from configs.methods import contexts, mr_search, reseek
from searchrl_jax import checks, sft
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import load_sets
from searchrl_jax.learn import batching
from searchrl_jax.rewards import core as rewards
from searchrl_jax.run import build
from searchrl_jax.text.tokenizer import load as load_tokenizer
from searchrl_jax.types import Passage
from searchrl_jax.worlds import atlas, atlas_traces, microworld
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

SMALL = dict(train=100, heldout=60, known=20)
RELATION = {
  word: relation
  for words in atlas.SECTIONS.values()
  for relation, pair in words.items()
  for word in pair
}


@pytest.fixture(scope='module')
def world():
  return atlas.generate(3, **SMALL)


@pytest.fixture(scope='module')
def traces():
  return atlas_traces.traces(
    world_seed=3, mix='even', worlds=2, n=1200, people=60, **SMALL
  )


def read(text: str, name: str) -> dict:
  """Relation -> value of a passage on `name`, by its grammar."""
  person = r'[A-Z]\w+ [A-Z]\w+'
  if re.search(r'\btravel\b', text):
    return {
      'visited': {w for w in re.findall(r'[A-Z]\w+', text) if w not in name}
    }
  found = {}
  for word, relation in RELATION.items():
    value = rf'({person}|\w+)'
    for pattern in (
      rf'[:,] {word} {value}[,.]',
      rf'[:,] {value} is {word}\b',
      rf'(?:has|,) {value} as {word}\b',
    ):
      if match := re.search(pattern, text):
        found[relation] = match[1]
  return found


# By hand.


def test_the_sentences_of_a_passage():
  mira = dict(teacher='Kova Len', friend='Tusa Bal')
  say = lambda form, *words: atlas.passage(
    'Mira Dok', 'school', mira, form, words
  )
  assert (
    say(0, 0, 0) == 'school of Mira Dok: mentor Kova Len, comrade Tusa Bal.'
  )
  assert say(1, 1, 0) == (
    'Mira Dok, school: Kova Len is tutor, Tusa Bal is comrade.'
  )
  assert say(2, 0, 1) == (
    'Mira Dok has Kova Len as mentor, Tusa Bal as ally; school.'
  )
  for form in range(3):
    assert read(say(form, 1, 1), 'Mira Dok') == mira
  # The words of questions are in this passage only, which states nothing.
  asked = atlas.passage('Mira Dok', 'asked', mira, 0, ())
  assert asked == (
    "asked: Mira Dok's teacher, friend, rival, patron, birthplace, home, "
    'craft, emblem, visited? Mira Dok asked.'
  )


def test_a_path_is_walked_from_fact_to_fact():
  facts = {
    'Mira Dok': dict(teacher='Kova Len', home='Tenwick'),
    'Kova Len': dict(teacher='Mira Dok', home='Sormar'),
  }
  assert atlas.walk(facts, 'Mira Dok', ('teacher', 'home')) == [
    ('Mira Dok', 'teacher', 'Kova Len'),
    ('Kova Len', 'home', 'Sormar'),
  ]
  chain = atlas.text('2hop', ('Mira Dok', 'teacher', 'home'))
  assert chain == "What is Mira Dok's teacher's home?"


def test_progress_by_hand():
  # Needs a, b and c. Search 1 finds a. Search 2 finds nothing that is needed.
  # Search 3 finds a again. Search 4 finds c and b.
  found = [('a', 'x'), ('x', 'y'), ('a',), ('c', 'b', 'a'), ()]
  worth = atlas.progress(('a', 'b', 'c'), found)
  assert worth == ['new', 'wasted', 'repeated', 'new', 'wasted']
  assert atlas.progress(('a',), []) == []


# Of every world.


@pytest.mark.long
@pytest.mark.parametrize('seed', [0, 5])
@pytest.mark.parametrize('size', [{}, SMALL, dict(known=0)])
def test_every_answer_is_unique_and_follows_from_the_passages(seed, size):
  world = atlas.generate(seed, **size)
  corpus = {row['id']: row['contents'].split('\n') for row in world.corpus}
  assert len(corpus) == len(world.corpus) == 6 * len(world.facts)
  for questions in world.questions.values():
    kinds = collections.Counter(q.source for q in questions)
    known = size.get('known', 40)
    assert {*kinds} == {*atlas.KINDS} - ({'known'} if not known else set())
    assert len({q.text for q in questions}) == len(questions)
    for q in questions:
      assert q.hops == len(q.supporting) == len(q.meta['facts'])
      stated = []
      for (name, relation, _), id in zip(q.meta['facts'], q.supporting):
        title, text = corpus[id]
        assert title == f'"{name}, {atlas.SECTION[relation]}"'
        stated.append(read(text, name)[relation])
      path = q.meta['path']
      assert q.meta['parallel'] == (q.source == 'comparison')
      if q.meta['parallel']:
        assert stated[0] & stated[1] == {*q.answers} and len(stated[0]) == 3
        assert path[0] in q.text and path[1] in q.text
        continue
      # Each passage names the person of the next; the last one, the answer.
      people = [path[0], *stated[:-1]]
      assert people == [name for name, _, _ in q.meta['facts']]
      assert [r for _, r, _ in q.meta['facts']] == [*path[1:]]
      assert q.answers == (stated[-1],) and q.answers[0] not in q.text
      assert q.source == ('known' if q.meta['known'] else f'{q.hops}hop')


def test_nobody_held_out_occurs_in_training_except_known_facts(world, traces):
  people = {
    split: {name for q in questions for name, _, _ in q.meta['facts']}
    for split, questions in world.questions.items()
  }
  assert people['train'] and not people['train'] & people['heldout']
  for split, questions in world.questions.items():
    own = {n for r in (False, True) for n in atlas.names(split, r)}
    mentioned = re.findall(
      r'[A-Z]\w+ [A-Z]\w+', str([q.meta for q in questions])
    )
    assert {*mentioned} <= own
  asked = str([t for t in traces if t.question])
  for reserved in (False, True):
    assert not any(n in asked for n in atlas.names('heldout', reserved))


def test_known_facts_are_in_the_traces_and_unknown_ones_in_none(world, traces):
  told = ' '.join(p for t in traces for _, p in t.actions if isinstance(p, str))
  shown = ' '.join(
    passage.text
    for t in traces
    for kind, payload in t.actions
    if kind == 'information'
    for passage in payload
  )
  known = unknown = 0
  for questions in world.questions.values():
    for q in questions:
      for fact, recalled in zip(q.meta['facts'], q.meta['recalled']):
        assert (f'know {" ".join(fact)}' in told) == recalled
        known, unknown = known + recalled, unknown + (not recalled)
  assert known > 100 and unknown > 1000
  # A passage of the run's world in a trace is about known people only.
  own = {n for n in atlas.names('train', True)}
  for row in world.corpus:
    title, text = row['contents'].split('\n')
    person, section = title.strip('"').split(', ')
    if person not in own or section in ('school', 'court', 'travel'):
      assert text not in shown or section == 'asked'


@pytest.mark.parametrize('seed', range(3))
def test_no_answer_is_frequent(seed):
  world = atlas.generate(seed)
  for questions in world.questions.values():
    for kind in atlas.KINDS:
      own = [q.answers[0] for q in questions if q.source == kind]
      most = collections.Counter(own).most_common(1)[0][1]
      assert most <= 0.06 * len(own)


def test_false_values_are_of_the_kind_and_false(world):
  for questions in world.questions.values():
    for q in questions:
      for (name, relation, value), false in zip(
        q.meta['facts'], q.meta['false']
      ):
        true = world.facts[name][relation]
        assert false != value and false not in true and false != name
        pools = microworld.pools(world.settings)
        pool = atlas.ATTRIBUTES.get(relation, 'town')
        assert false in (
          world.facts if relation in atlas.LINKS else pools[pool]
        )


@pytest.mark.long
def test_the_same_in_another_process(world, traces):
  digest = lambda x: hashlib.sha256(repr(x).encode()).hexdigest()
  code = f"""
import hashlib
from searchrl_jax.worlds import atlas, atlas_traces

world = atlas.generate(3, **{SMALL})
traces = atlas_traces.traces(
  world_seed=3, mix='even', worlds=2, n=1200, people=60, **{SMALL})
for x in ((world.corpus, world.questions), traces):
  print(hashlib.sha256(repr(x).encode()).hexdigest())
"""
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT,
    check=True, env={'PYTHONHASHSEED': '7', 'PYTHONPATH': str(ROOT)},
  )  # fmt: skip
  mine = [digest((world.corpus, world.questions)), digest(traces)]
  assert done.stdout.split() == mine
  assert atlas.generate(4, **SMALL).corpus != world.corpus


# Traces and the recipe.


@pytest.mark.parametrize('mix', atlas_traces.MIXES)
def test_mixtures_behave_as_they_say(mix):
  found = atlas_traces.traces(
    world_seed=1, mix=mix, worlds=1, n=1500, people=60, **SMALL
  )
  how = atlas_traces.MIXES[mix]
  known = [t for t in found if t.question and t.question.meta['known']]
  rest = [t for t in found if t.question and not t.question.meta['known']]
  actions = lambda t, kind: [p for k, p in t.actions if k == kind]
  unsearched = lambda ts: [t for t in ts if not actions(t, 'search')]
  rate = lambda some, all_: len(some) / len(all_)
  assert rate(unsearched(known), known) == pytest.approx(how.recall, abs=0.1)
  assert rate(unsearched(rest), rest) == pytest.approx(how.guess, abs=0.05)
  first = [actions(t, 'think')[0] for t in rest if actions(t, 'search')]
  needed = [
    t.question.meta['facts'][0][1] for t in rest if actions(t, 'search')
  ]
  wasted = [a for a, b in zip(first, needed) if a != f'find {b}']
  assert rate(wasted, first) == pytest.approx(how.waste, abs=0.06)
  for t in found:
    assert len(actions(t, 'search')) <= 6
    if t.question and t.good:  # it answers correctly, with searches it needs
      assert actions(t, 'answer') == [*t.question.answers]
      queries = ' & '.join(actions(t, 'search')).split(' & ')
      assert len(queries) == t.question.hops or queries == ['']
  # What was read is said in notes; the thought before a search goes on to it.
  read = [
    now
    for t in rest
    for (before, _), now in zip(t.actions, t.actions[1:])
    if before == 'information'
    if now[0] == 'refine' or not now[1].startswith(('find', 'maybe'))
  ]
  notes = [text for kind, text in read if kind == 'refine']
  assert rate(notes, read) == pytest.approx(how.note, abs=0.05)
  assert not any('find' in text for text in notes)
  both = [t for t in rest if t.question.meta['parallel']]
  both = [t for t in both if actions(t, 'search')]
  split = [t for t in both if ' & ' in ''.join(actions(t, 'search'))]
  assert rate(split, both) == pytest.approx(how.split, abs=0.1)


def behaving(**shares):
  sizes = dict(worlds=1, n=300, people=60, known=0)
  return atlas_traces.traces(world_seed=1, mix='even', **sizes, **shares)


def test_traces_judge_what_a_search_has_found(tmp_path):
  c = reseek.get_config()
  del c.reward.em
  env = build.environment(c, load_tokenizer(atlas.tokenizer(tmp_path)))
  found, right = behaving(judged=1.0), []
  for trace in found:
    judged = []
    for (kind, read), (then, said) in zip(trace.actions, trace.actions[1:]):
      if kind == 'information':
        useful = any(p.id in trace.question.supporting for p in read)
        judged.append(said == ('found' if useful else 'no'))
        assert then == 'judge'
    assert sum(kind == 'judge' for kind, _ in trace.actions) == len(judged)
    right.append(judged)
  every = [ok for judged in right for ok in judged]
  assert sum(every) / len(every) == pytest.approx(0.75, abs=0.06)
  # The reward reads them as they were meant.
  rendered = [sft.render(t, env, i) for i, t in enumerate(found)]
  pairs = [(t, judged) for t, judged in zip(rendered, right) if t is not None]
  assert len(pairs) > 0.97 * len(found)
  played, right = zip(*pairs)
  context = rewards.RewardContext(env=env)
  earned = asyncio.run(rewards.combine(c.reward, [played], context))
  accuracy = earned.parts['judge/accuracy']
  for judged, share in zip(right, accuracy, strict=True):
    assert judged == [] or share == pytest.approx(sum(judged) / len(judged))
  told = env.tokenizer.decode(
    [i for t in played for s in t.segments for i in s.ids]
  )
  assert '<|unk|>' not in told


def test_traces_plan_their_look_ups():
  cut = several = 0
  for trace in behaving(planned=1.0):
    kinds = [kind for kind, _ in trace.actions]
    if 'search' not in kinds:
      continue
    relations = [r for _, r, _ in trace.question.meta['facts']]
    mark = ' & ' if trace.question.meta['parallel'] else '; '
    whole, short = mark.join(relations), mark.join(relations[:-1])
    first, said = trace.actions[0]
    assert first == 'think' and said in (whole, short) and said
    several += len(relations) > 1
    cut += said != whole
  assert cut / several == pytest.approx(atlas_traces.WRONG, abs=0.1)


def test_traces_try_again_until_they_have_found_it(tmp_path):
  found = behaving(attempts=3)
  assert {t.attempts for t in found} == {1, 2, 3}
  several = sum(t.attempts > 1 for t in found)
  assert several / len(found) == pytest.approx(0.5, abs=0.1)
  for trace in found:
    acts, golds = trace.actions, trace.question.answers
    ends = [n for n, (kind, _) in enumerate(acts) if kind == 'answer']
    for end, last in zip(ends, ends[1:]):
      right = acts[end][1] in golds
      assert acts[end + 1] == ('refine', 'found' if right else 'no')
      repeats = acts[end + 2 : last + 1] == acts[end - 1 : end + 1]
      assert repeats or not right
  # The environment asks, and a trace of one attempt ends with its answer.
  c = mr_search.get_config('base=atlas')
  assert c.sft.data.attempts == 3
  c.sft.data.update(n=300, worlds=1, people=60, known=0)
  env = build.environment(c, load_tokenizer(atlas.tokenizer(tmp_path)))
  played = sft.examples(c, env, None)
  tried = [len(env.answers(t)) for t in played]
  assert len(played) > 290 and {*tried} == {1, 2, 3}
  for t, n in zip(played, tried):
    assert len(t.meta.get('noted', ())) == n - 1
    asked = [s for s in t.segments if s.author == 'environment']
    texts = [env.tokenizer.decode(s.ids) for s in asked]
    assert sum('What is found' in text for text in texts) == n - 1
    assert all(s.train for s in t.segments if s.author == 'policy')


def test_traces_ask_in_other_words(env):
  found = behaving(reworded=0.5)
  other = [t for t in found if t.question.id.endswith('-b')]
  assert len(other) / len(found) == pytest.approx(0.5, abs=0.1)
  for trace in other:
    text = f' {trace.question.text}'
    assert env.tokenizer.decode(env.tokenizer.encode(text)) == text
  assert {t.question.source for t in other} == {*atlas.KINDS} - {'known'}


@pytest.fixture(scope='module')
def env(tmp_path_factory):
  config = recipe.get_config()
  folder = tmp_path_factory.mktemp('tokens')
  return build.environment(config, load_tokenizer(atlas.tokenizer(folder)))


def test_two_queries_in_one_search_are_two_requests(traces, env):
  split = [
    (t, sft.render(t, env, i))
    for i, t in enumerate(traces)
    if any(k == 'search' and '&' in text for k, text in t.actions)
  ]
  assert split
  for trace, rendered in split:
    texts = [
      env.tokenizer.decode(s.ids)
      for s in rendered.segments
      if (s.author, s.kind) == ('environment', 'information')
    ]
    shown = [x for kind, x in trace.actions if kind == 'information']
    assert len(texts) == len(shown) < len(rendered.searches)
    for text, passages in zip(texts, shown):  # each passage once
      expected = ''.join(f' {p.text}' for p in passages)
      assert text == f'\n<information>{expected} </information>\n'


def test_observations_fit_and_notes_cost_few_tokens(world, env):
  texts = [row['contents'].split('\n')[1] for row in world.corpus]
  longest = max(texts, key=lambda text: len(env.tokenizer.encode(text)))
  two = [Passage(i, '', longest) for i in '01']
  assert env.observation(two).count(longest) == 2
  noted = 0
  for plain in (False, True):
    mix = dataclasses.replace(atlas_traces.MIXES['even'], note=1 - plain)
    with pytest.MonkeyPatch.context() as patch:
      patch.setitem(atlas_traces.MIXES, 'even', mix)
      found = atlas_traces.traces(
        world_seed=1, mix='even', worlds=1, n=200, people=60, known=0
      )
    tokens = [len(sft.render(t, env, 0)) for t in found]
    noted, before = sum(tokens), noted
  assert 0.95 < noted / before < 1.05


@pytest.mark.long
def test_traces_note_what_they_found_where_the_environment_asks(
  traces, tmp_path
):
  c = contexts.get_config('kind=summary,note=12,limit=150')
  env = build.environment(c, load_tokenizer(atlas.tokenizer(tmp_path)))
  rendered = [(t, sft.render(t, env, i)) for i, t in enumerate(traces)]
  several = [(t, r) for t, r in rendered if r and r.contexts]
  assert len(several) > 9
  for trace, found in several:
    assert len(trace.notes) == sum(k == 'information' for k, _ in trace.actions)
    for context in found.contexts:
      text = env.tokenizer.decode(context.prompt)
      question, note = text.split('<refine>')
      assert question.strip() == f'Question: {trace.question.text}'
      assert note.split('</refine>')[0].strip() in trace.notes
    assert max(len(p.ids) for p in batching.tokens_of(0, found)) <= 150
  hops = [t for t, _ in several if not t.question.meta['parallel'] and t.good]
  facts = {f'{r} {v}' for t in hops for _, r, v in t.question.meta['facts']}
  assert {note for t in hops for note in t.notes} & facts


def test_every_word_is_in_the_vocabulary(world, traces, tmp_path):
  tok = load_tokenizer(atlas.tokenizer(tmp_path))
  said = [p for t in traces for k, p in t.actions if isinstance(p, str)]
  said += [note for t in traces for note in t.notes]
  texts = [row['contents'] for row in world.corpus]
  texts += [q.text for qs in world.questions.values() for q in qs] + said
  for text in texts:
    assert tok.decode(tok.encode(f' {text}')) == f' {text}'


def test_the_recipe_fits_its_bars():
  for mix in atlas_traces.MIXES:
    config = recipe.get_config(f'mix={mix},seed=2')
    checks.check(config)
    assert config.sft.data.mix == mix and config.data.world_seed == 2
  assert len(atlas_traces.MIXES) >= 4
  config.data.world.train = 80
  sets = load_sets(config.data.train, config.data)
  assert {q.source for q in sets['atlas']} == {*atlas.KINDS}
  assert config.sft.data.train == 80
  with pytest.raises(ValueError, match="mix='x'.*skills"):
    recipe.get_config('mix=x')


@pytest.mark.parametrize(
  'fields, message',
  [
    (dict(train=41), 'train=41 .*40'),
    (dict(heldout=10_000), 'heldout=10000 '),
    (dict(known=99), 'known=99: 0 to 60'),
    (dict(seed=-1), 'seed=-1'),
    (dict(paths=0), 'paths=0'),
  ],
)
def test_a_world_that_cannot_be_names_the_field(fields, message):
  with pytest.raises(DataError, match=message):
    atlas.generate(**{'seed': 0, **fields})


def test_questions_that_are_not_there():
  ask = lambda **fields: atlas.load(
    world_seed=0, **{'split': 'train', **fields}
  )
  with pytest.raises(DataError, match=r"kinds=\('5hop',\)"):
    ask(kinds=('5hop',))
  with pytest.raises(DataError, match="split='test'"):
    ask(split='test')
  with pytest.raises(DataError, match='n=9999 '):
    ask(n=9999)
  assert [q.source for q in ask(n=4, kinds=('3hop', 'known'))] == [
    '3hop', 'known', '3hop', 'known',
  ]  # fmt: skip
