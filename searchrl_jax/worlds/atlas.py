"""Generated worlds for comparisons of methods: chains, look-ups, known facts.

A world has people of two splits, `train` and `heldout`, whose names never
occur in the other (`microworld.names`). Each person has six passages of one
section each:

    "Mira Dok, school"
    school of Mira Dok: mentor Kova Len; comrade Tusa Bal.

Sections state two relations each (SECTIONS); `travel` lists three towns;
`asked` repeats the words of questions and answers none. Questions name a
relation by a word (`teacher`) that only `asked` contains. Passages name it by
one of two others (`mentor`, `tutor`), before or after the value, in one of
three sentences. A query therefore needs the words of the section, and a
passage has to be read: the words of a question find `asked`.

Questions, by `Question.source`:

  1hop ... 4hop  "What is Mira Dok's teacher's rival's home?". Links lead from
                 person to person of the split. No relation or person repeats.
  known          one hop; the policy has read the fact in its warm start
  comparison     "What town did Mira Dok and Kova Len both visit?": two
                 look-ups, neither of which needs the other

Every relation has one value for each person, and both people of a comparison
share one town, so every answer is unique. Values are dealt evenly, so none is
frequent. `Question.supporting` has the passage of each needed fact, in order,
and `meta`:

  path      person and relations, or the two people of a comparison
  facts     of each needed fact (person, relation, value)
  queries   of each, wordings of a query that finds it
  false     of each, a false value of the same kind, for contradictory passages
  recalled  of each, whether the policy has read it in its warm start
  known     whether it has read all of them
  parallel  whether the look-ups are independent

The warm start's traces (`atlas_traces`) state facts of `known` people only,
whose names are reserved for this in all worlds.
"""

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import os

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.types import Question
from searchrl_jax.worlds import microworld
from searchrl_jax.worlds.microworld import SPLITS, STANDARD, World, pick, write

__all__ = ['generate', 'load', 'pick', 'progress', 'tokenizer', 'write']

# Section -> {relation, as questions name it: its words in passages}.
SECTIONS = {
  'school': {'teacher': ('mentor', 'tutor'), 'friend': ('comrade', 'ally')},
  'court': {'rival': ('foe', 'opponent'), 'patron': ('sponsor', 'backer')},
  'life': {'birthplace': ('cradle', 'origin'), 'home': ('house', 'dwelling')},
  'work': {'craft': ('trade', 'job'), 'emblem': ('badge', 'crest')},
}
TRAVEL, ASKED = 'travel', 'asked'
VISITED = 'visited'  # the relation of `travel`
TOWNS = 3  # that a person visited
SECTION = {r: s for s, words in SECTIONS.items() for r in words}
SECTION[VISITED] = TRAVEL
LINKS = ('teacher', 'friend', 'rival', 'patron')
ATTRIBUTES = microworld.ATTRIBUTES
KINDS = ('1hop', '2hop', '3hop', '4hop', 'known', 'comparison')
SEARCHED = tuple(kind for kind in KINDS if kind != 'known')
# Names of each split that are only used for people whose facts are known.
RESERVED = 60
# Words besides those of microworld, of questions, passages, thoughts and notes.
WORDS = (
  *LINKS,
  *SECTIONS,
  *(w for words in SECTIONS.values() for pair in words.values() for w in pair),
  *(TRAVEL, ASKED, VISITED, 's', 'has', 'as', 'town', 'did', 'and', 'both'),
  *('visit', 'saw', 'know', '<refine>', '</refine>'),
)
Fact = tuple[str, str, str]  # person, relation, value


def names(split: str, reserved: bool) -> tuple[str, ...]:
  """Returns the names of a split that are reserved for known people, or not."""
  every = microworld.names(STANDARD, split)
  return every[:RESERVED] if reserved else every[RESERVED:]


def generate(seed: int, *, train=300, heldout=150, known=40, paths=2) -> World:
  """Makes a world.

  Args:
    seed: any int >= 0.
    train: people that train questions ask about, an even number >= 40.
    heldout: people that held-out questions ask about, likewise.
    known: people of each split whose ATTRIBUTES the warm start states.
    paths: questions of each number of hops that start at a person, at most: a
      path that meets a person twice is left out.

  Returns:
    The world. Its facts are {person: {relation: value}}; the value of
    `visited` is a tuple of towns. Questions are in random order.

  Raises:
    DataError: a size that the pools of names do not allow.
  """
  require(seed >= 0, f'seed={seed} must not be negative')
  require(0 <= known <= RESERVED, f'known={known}: 0 to {RESERVED} people')
  require(1 <= paths <= 4, f'paths={paths} must lie between 1 and 4')
  rng = np.random.default_rng([seed, 28])
  facts, people, pairs = {}, {}, {}  # facts: split -> name -> ...
  for split, count in (('train', train), ('heldout', heldout)):
    there, least = names(split, False), max(known, 40)
    limits = f'an even number from {least} to {len(there)}'
    good = least <= count <= len(there) and count % 2 == 0
    require(good, f'{split}={count} people: {limits}')
    others = rng.permutation(len(there))[: count - known]
    people[split] = names(split, True)[:known] + tuple(there[i] for i in others)
    facts[split], pairs[split] = _facts(rng, people[split])
  everything = facts['train'] | facts['heldout']
  ids, corpus = _passages(rng, everything)
  recalled = {
    (p, r) for own in people.values() for p in own[:known] for r in ATTRIBUTES
  }
  questions = {}
  for split in SPLITS:
    rows = [*_chains(rng, paths, facts[split], recalled)]
    rows += [('comparison', (a, b), both) for a, b, both in pairs[split]]
    prefix, order = f'atlas-{seed}-{split}', rng.permutation(len(rows))
    questions[split] = tuple(
      _question(rng, f'{prefix}-{n}', rows[i], facts[split], ids, recalled)
      for n, i in enumerate(order)
    )
  return World(seed, STANDARD, corpus, everything, questions)


def _facts(rng, people: Sequence[str]):
  """Facts of `people`, whose links stay among them, and comparisons.

  Returns:
    name -> {relation: value}, and [(person, person, the two facts)].
  """
  n, pools = len(people), microworld.pools(STANDARD)
  table = {link: microworld.linked(rng, people) for link in LINKS}
  for relation, pool in ATTRIBUTES.items():
    table[relation] = microworld.dealt(rng, pools[pool], n)
  towns, visited, pairs = pools['town'], {}, []
  for i, pair in enumerate(rng.permutation(n).reshape(-1, 2)):
    shared = towns[i % len(towns)]
    others = [t for t in towns if t != shared]
    more = [others[j] for j in rng.permutation(len(others))]
    for person in pair:
      saw = [shared, *(more.pop() for _ in range(TOWNS - 1))]
      visited[person] = tuple(saw[j] for j in rng.permutation(TOWNS))
    a, b = (people[person] for person in pair)
    pairs.append((a, b, [(a, VISITED, shared), (b, VISITED, shared)]))
  facts = {
    name: {relation: values[i] for relation, values in table.items()}
    | {VISITED: visited[i]}
    for i, name in enumerate(people)
  }
  return facts, pairs


def passage(name: str, section: str, stated, form: int, words) -> str:
  """The text of a passage.

  Args:
    name: of the person.
    section: one of SECTIONS, TRAVEL or ASKED.
    stated: the facts of the person.
    form: 0, 1 or 2: which sentence.
    words: of each relation of the section, which of its words.
  """
  if section == ASKED:
    return f"asked: {name}'s {', '.join(SECTION)}? {name} asked."
  if section == TRAVEL:
    towns = ', '.join(stated[VISITED])
    return (
      f'{section} of {name}: {towns}.',
      f'{name} saw {towns}; {section}.',
      f'{towns}: {section} of {name}.',
    )[form]
  pairs = [
    (choices[word], stated[relation])
    for (relation, choices), word in zip(SECTIONS[section].items(), words)
  ]
  each = ('{0} {1}', '{1} is {0}', '{1} as {0}')[form]
  text = ', '.join(each.format(*pair) for pair in pairs)
  whole = ('{0} of {1}: {2}.', '{1}, {0}: {2}.', '{1} has {2}; {0}.')[form]
  return whole.format(section, name, text)


def _passages(rng, facts):
  """Returns ({(name, section): id}, corpus in random order)."""
  places = [(n, s) for n in facts for s in (*SECTIONS, TRAVEL, ASKED)]
  order = [places[i] for i in rng.permutation(len(places))]
  ids, corpus = {place: str(i) for i, place in enumerate(order)}, []
  for name, section in order:
    form, *words = rng.integers((3, 2, 2))
    text = passage(name, section, facts[name], form, words)
    contents = f'"{name}, {section}"\n{text}'
    corpus.append({'id': ids[name, section], 'contents': contents})
  return ids, tuple(corpus)


def walk(facts, name: str, relations: Sequence[str]) -> list[Fact]:
  """The facts along a path."""
  out = []
  for relation in relations:
    out.append((name, relation, facts[name][relation]))
    name = out[-1][-1]
  return out


def _chains(rng, paths: int, facts, recalled) -> Iterator[tuple]:
  """(kind, path, needed facts) of all kinds but comparisons."""
  for name in facts:
    chains = {(r,): 'known' for r in ATTRIBUTES if (name, r) in recalled}
    for hops in range(1, 5):
      for _ in range(paths):
        links = [LINKS[i] for i in rng.permutation(len(LINKS))]
        last = [*links[hops - 1 :], *ATTRIBUTES]
        chain = (*links[: hops - 1], last[rng.integers(len(last))])
        chains.setdefault(chain, f'{hops}hop')
    for chain, kind in chains.items():
      steps = walk(facts, name, chain)
      met = [name, *(value for *_, value in steps)]
      if len({*met}) == len(met):
        yield kind, (name, *chain), steps


def text(kind: str, path: Sequence[str]) -> str:
  """The question of a path."""
  if kind == 'comparison':
    return f'What town did {path[0]} and {path[1]} both visit?'
  return 'What is ' + "'s ".join(path) + '?'


def _question(rng, id, row, facts, ids, recalled) -> Question:
  kind, path, steps = row  # of `_chains`
  read = tuple((person, relation) in recalled for person, relation, _ in steps)
  meta = dict(path=path, facts=tuple(steps), recalled=read, known=all(read))
  meta['parallel'] = kind == 'comparison'
  meta['queries'] = tuple((f'{p} {SECTION[r]}',) for p, r, _ in steps)
  meta['false'] = tuple(_false(rng, facts, *step) for step in steps)
  supporting = tuple(ids[p, SECTION[r]] for p, r, _ in steps)
  answers = (steps[-1][-1],)
  return Question(
    id, text(kind, path), answers, kind, len(steps), supporting, meta=meta
  )


def _false(rng, facts, person: str, relation: str, value: str) -> str:
  """A value of the relation that is neither `value` nor `person`."""
  everyone = list(facts)
  while True:
    other = facts[everyone[rng.integers(len(everyone))]][relation]
    other = other[0] if relation == VISITED else other
    if other not in (person, value, *facts[person][VISITED]):
      return other


def progress(
  supporting: Sequence[str], found: Sequence[Collection[str]]
) -> list[str]:
  """What each search of a trajectory was worth.

  Args:
    supporting: Question.supporting.
    found: for each search, ids of the passages that it found.

  Returns:
    for each 'new': it found a needed fact first; 'repeated': it found needed
    facts, all of them before; or 'wasted': it found none.
  """
  seen, out = set(), []
  for ids in found:
    here = {i for i, id in enumerate(supporting) if id in ids}
    out.append('new' if here - seen else 'repeated' if here else 'wasted')
    seen |= here
  return out


def reworded(question: Question) -> Question:
  """The question in other words, with the id 'ID-b'."""
  first, *rest = question.meta['path']
  other = text('comparison', (*rest, first))
  if not question.meta['parallel']:
    links = (f'the {relation} of ' for relation in reversed(rest))
    other = f'What is {"".join(links)}{first}?'
  return dataclasses.replace(question, id=f'{question.id}-b', text=other)


def fault(supporting: Sequence[str], found: Sequence[Collection[str]]) -> int:
  """The first step of a wrong attempt that found nothing new, from 1.

  Args:
    supporting: Question.supporting.
    found: for each step, ids of the passages that it found; of the last one,
      which answers, there are none.
  """
  worth = progress(supporting, found)
  return next((n for n, x in enumerate(worth, 1) if x != 'new'), len(worth))


def load(
  *,
  world_seed,
  split,
  n=0,
  kinds=KINDS,
  train=300,
  heldout=150,
  known=40,
  paths=2,
  pairs=False,
) -> list[Question]:
  """Returns questions of a world, kinds alternating (a data module's `load`).

  Args:
    world_seed: see `generate`.
    split: 'train' or 'heldout'.
    n: total number; 0 = the largest with equally many of each kind.
    kinds: any of KINDS.
    train, heldout, known, paths: see `generate`.
    pairs: each question is followed by itself in other words (`reworded`), and
      meta['pair'] of both is the id of the first. n counts the pairs.

  Raises:
    DataError: an unknown split or kind, or more questions than there are.
  """
  good = kinds and {*kinds} <= {*KINDS}
  require(good, f'kinds={tuple(kinds)} must be chosen from {KINDS}')
  require(split in SPLITS, f'split={split!r} must be one of {SPLITS}')
  sizes = dict(train=train, heldout=heldout, known=known, paths=paths)
  out = pick(generate(world_seed, **sizes), split, n, kinds)
  if not pairs:
    return out
  own = [dataclasses.replace(q, meta={**q.meta, 'pair': q.id}) for q in out]
  return [each for q in own for each in (q, reworded(q))]


def tokenizer(folder: str | os.PathLike) -> str:
  """Writes the tokenizer of these worlds' words; returns the folder."""
  return microworld.tokenizer(folder, STANDARD, WORDS)
