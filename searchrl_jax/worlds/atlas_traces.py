"""Scripted warm starts for atlas: several mixtures of good and poor behaviour.

A trace thinks what it looks for, searches for a person and a section, reads,
and goes on to the next relation:

    <think> find teacher </think>
    <search> Mira Dok school </search>  (passage)
    <think> teacher Kova Len; find home </think>
    <search> Kova Len life </search>  (passage)
    <think> home Mukwick </think>
    <answer> Mukwick </answer>

A mixture says how often a trace does something else instead (`Mix`); MIXES has
them by name. All behave well in form, so that only what they earn tells the
behaviours apart. Traces are of worlds other than the run's, except for facts
that the policy is to know: those of known people are stated in plain text, and
recalled in answers to questions about known people of the train split.
"""

from collections.abc import Generator, Sequence
import dataclasses

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.run import lookup
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import atlas, microtraces, microworld

PACKED = 4  # facts stated in one trace


@dataclasses.dataclass(frozen=True)
class Mix:
  """Probabilities of scripted behaviours, 0 to 1.

  A poor query is the person alone, the person with the question's word for the
  relation, or the first name with the section.
  """

  good: float  # a query names person and section; the others are poor
  retry: float  # after a poor query that failed: a good one; else a guess
  waste: float  # before a hop: a search that the question does not need
  stop: float  # after each hop but the last: answers with what was read
  guess: float  # answers at once, with one of a few favourites
  recall: float  # a known fact: answers from memory


MIXES = {
  # Every skill, few bad habits: what a warm start of any mixture begins with.
  'skills': Mix(good=0.85, retry=0.9, waste=0.1, stop=0, guess=0, recall=0.5),
  'even': Mix(
    good=0.6, retry=0.6, waste=0.15, stop=0.15, guess=0.15, recall=0.5
  ),
  # Trusts itself: guesses, recalls, and stops early.
  'hasty': Mix(
    good=0.75, retry=0.6, waste=0.05, stop=0.3, guess=0.35, recall=0.9
  ),
  # Searches for everything, poorly, and more than it needs.
  'wanderer': Mix(
    good=0.45, retry=0.8, waste=0.4, stop=0.1, guess=0.05, recall=0.1
  ),
}


def traces(
  *,
  world_seed: int,
  mix: str,
  worlds=40,
  n=20_000,
  stated=0.15,
  seed=0,
  k=1,
  turns=6,
  people=200,
  train=300,
  heldout=150,
  known=40,
) -> list[Trace]:
  """Returns traces on train questions of several worlds, and stated facts.

  Args:
    world_seed: of the run's world, from which the others' seeds follow.
    mix: a name in MIXES.
    worlds: number of worlds.
    n: number of traces.
    stated: fraction of n that states facts, if there are known people.
    seed: of the behaviours.
    k: passages per query, as in the run.
    turns: searches of a trace, at most (config.env.max_turns).
    people: of the train split of each world; see `atlas.generate`.
    train, heldout, known: of the run's world; see `atlas.generate`.

  Raises:
    DataError: a number is out of range, or a world cannot be generated.
  """
  require(mix in MIXES, f'mix={mix!r}: {lookup.near(mix, MIXES)}')
  require(turns >= 4, f'turns={turns} must be 4 or more, for four hops')
  behaviour, told = MIXES[mix], int(n * stated) if known else 0
  asked = (n - told) // len(atlas.KINDS) if known else 0
  rest, out = n - told - asked, []
  require(1 <= worlds <= rest, f'n={n} traces of worlds={worlds}: too few')
  for i in range(worlds):
    world = atlas.generate(
      microtraces.TRACE_WORLDS + world_seed * 1000 + i,
      train=people,
      heldout=40,
      known=0,
    )
    count = rest * (i + 1) // worlds - rest * i // worlds
    kinds = [kind for kind in atlas.KINDS if kind != 'known']
    pool = atlas.pick(world, 'train', kinds=kinds)
    search = searcher(world, atlas.names('train', False), tuple(atlas.SECTION))
    out += script(world, pool, count, [seed, i], search, k, turns, behaviour)
  if known:
    sizes = dict(train=train, heldout=heldout, known=known)
    world = atlas.generate(world_seed, **sizes)
    pool = atlas.pick(world, 'train', kinds=('known',))
    own = atlas.names('train', True)[:known]
    # Passages of other sections would show facts that are not to be known.
    search = searcher(world, own, tuple(atlas.ATTRIBUTES))
    key = [seed, worlds]
    out += script(world, pool, asked, key, search, k, turns, behaviour)
    if told:
      out += statements(world, known, told, [seed, worlds + 1])
  return out


def statements(world, known: int, n: int, seed) -> list[Trace]:
  """Returns n traces of plain text that state facts of known people in turn."""
  facts = [
    (name, relation, world.facts[name][relation])
    for split in atlas.SPLITS
    for name in atlas.names(split, True)[:known]
    for relation in atlas.ATTRIBUTES
  ]
  rng = np.random.default_rng(seed)
  rounds = -(-n * PACKED // len(facts))
  order = np.concatenate([rng.permutation(len(facts)) for _ in range(rounds)])
  texts = [f' {_known(*facts[i])}' for i in order]
  return [
    Trace(None, (('other', ';'.join(texts[i : i + PACKED])),))
    for i in range(0, n * PACKED, PACKED)
  ]


def _known(person: str, relation: str, value: str) -> str:
  return f'know {person} {relation} {value}'


def searcher(world, people: Sequence[str], relations: Sequence[str]) -> Search:
  """Returns a search over passages of `people` on `relations`, and `asked`."""
  sections = {atlas.ASKED, *(atlas.SECTION[r] for r in relations)}
  people, passages = {*people}, []
  for row in world.corpus:
    title, text = row['contents'].split('\n')
    title = title.strip('"')
    person, section = title.split(', ')
    if person in people and section in sections:
      passages.append(Passage(row['id'], title, text))
  return microtraces.indexed(passages)


def script(
  world, pool: Sequence[Question], n: int, seed, search, k, turns, mix: Mix
) -> list[Trace]:
  """Returns n traces on the questions of `pool` in turn."""
  rng = np.random.default_rng(seed)
  streams = [np.random.default_rng(rng.integers(2**63)) for _ in range(n)]
  scripts = [
    _Script(world, stream, mix, turns).trace(pool[i % len(pool)])
    for i, stream in enumerate(streams)
  ]
  return microtraces.together(scripts, search, k)


class _Script:
  """Writes one trace."""

  def __init__(self, world, rng, mix: Mix, turns: int):
    self.world, self.rng, self.mix = world, rng, mix
    self.turns = turns
    self.actions: list = []
    self.good = True

  def chance(self, p: float) -> bool:
    return self.rng.random() < p

  def trace(self, question: Question) -> microtraces.Script:
    mix, facts = self.mix, question.meta['facts']
    self.spare = self.turns - len(facts)  # searches that it may waste
    lead = ''
    if question.meta['known'] and self.chance(mix.recall):
      self.answer(_known(*facts[0]), facts[0][-1])
      return Trace(question, tuple(self.actions), True)
    if not question.meta['known'] and self.chance(mix.guess):
      return self.guess(question)
    for i, (person, relation, value) in enumerate(facts):
      if not (yield from self.hop(lead, person, relation)):
        return self.guess(question)
      if i + 1 == len(facts):
        break
      if question.meta['parallel']:
        saw = self.world.facts[person][relation]
        value = saw[self.rng.integers(len(saw))]
      else:
        lead = f'{relation} {value}; '
      if self.chance(mix.stop):
        self.answer(f'{relation} {value}', value)
        return Trace(question, tuple(self.actions), False)
    named = 'both' if question.meta['parallel'] else relation
    self.answer(f'{named} {value}', value)
    return Trace(question, tuple(self.actions), self.good)

  def hop(
    self, lead: str, person: str, relation: str
  ) -> Generator[str, tuple[Passage, ...], bool]:
    """Looks a fact up; returns whether it found the passage."""
    section = atlas.SECTION[relation]
    find = f'{lead}find {relation}'
    if self.spare and self.chance(self.mix.waste):
      others = [r for r, s in atlas.SECTION.items() if s != section]
      other = others[self.rng.integers(len(others))]
      query = f'{person} {atlas.SECTION[other]}'
      yield from self.look_up(f'{lead}find {other}', query)
      self.spend()
    if self.spare and not self.chance(self.mix.good):
      first = person.split()[0]
      poor = (person, f'{person} {relation}', f'{first} {section}')
      found = yield from self.look_up(find, poor[self.rng.integers(3)])
      self.spend()
      if any(p.title == f'{person}, {section}' for p in found):
        return True
      if not self.chance(self.mix.retry):
        return False
    found = yield from self.look_up(find, f'{person} {section}')
    return any(p.title == f'{person}, {section}' for p in found)

  def spend(self) -> None:
    self.spare -= 1
    self.good = False

  def look_up(self, thought: str, query: str):
    found = yield query
    actions = dict(think=thought, search=query, information=found)
    self.actions += actions.items()
    return found

  def answer(self, thought: str, value: str) -> None:
    self.actions += [('think', thought), ('answer', value)]

  def guess(self, question: Question) -> Trace:
    """Answers with one of a few values; more would be memorised as facts."""
    relation = question.meta['facts'][-1][1]
    pools = microworld.pools(microworld.STANDARD)
    pool = 'town' if question.meta['parallel'] else None
    pool = atlas.ATTRIBUTES.get(relation, pool)
    values = pools[pool] if pool else atlas.names('train', False)
    value = values[self.rng.integers(microtraces.FAVOURITES)]
    self.answer(f'maybe {value}', value)
    return Trace(question, tuple(self.actions), False)
