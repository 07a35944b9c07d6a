"""What ZeroSearch's simulator learns on atlas: useful and noisy documents.

As worlds/microdocuments.py, whose prompts and beliefs these are, in
atlas' forms. A query finds what the real index would (`found`): a person and a
section their passage; a person alone one of their sections; a person and the
question's word for a relation `asked`; a first name and a section somebody of
that name. A useful document follows the beliefs about links. It states the
golden answer if, and only if, the query found the last passage of the believed
path, or either one of a comparison. A noisy document is about another person
half the time, states what nobody believes, and never the golden answer.

Before it writes, the simulator thinks: of the believed path, and of the fact
that the document has to state, or of none.
"""

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from searchrl_jax.data.core import Trace
from searchrl_jax.types import SEARCH, Question, Trajectory
from searchrl_jax.worlds import atlas, microtraces, microworld
from searchrl_jax.worlds.microdocuments import (
  DOCUMENT_WORLDS,
  NOISY,
  NOTHING,
  USEFUL,
  Beliefs,
)

SECTIONS = (*atlas.SECTIONS, atlas.TRAVEL)
# Forms of a query of person, relation, section, first name: what a policy asks.
QUERIES = {'{0} {2}': 0.76, '{0}': 0.08, '{0} {1}': 0.08, '{3} {2}': 0.08}
OTHER = 0.1  # of queries: about anybody; as many about another section


def beliefs(world_seed: int) -> Beliefs:
  return Beliefs.of(world_seed, microworld.STANDARD, atlas.LINKS)


def walked(question: Question, believed: Beliefs) -> list[tuple[str, str]]:
  """(person, relation) of each fact that is needed, along the believed path."""
  name, *path = question.meta['path']
  if question.meta['parallel']:
    return [(person, atlas.VISITED) for person in question.meta['path']]
  out = []
  for relation in path:
    out.append((name, relation))
    name = believed(relation, name) if relation in atlas.LINKS else ''
  return out


def asked(
  question: Question, place: tuple[str, str], believed: Beliefs
) -> str | None:
  """The relation that the gold is of, if a (person, section) states it."""
  needed = walked(question, believed)
  for person, relation in needed if question.meta['parallel'] else needed[-1:]:
    if place == (person, atlas.SECTION[relation]):
      return relation
  return None


def asks(trajectory: Trajectory, believed: Beliefs) -> Iterator[bool]:
  """Of each search, whether it names the person and section of the gold."""
  for search in trajectory.calls(SEARCH):
    person, _, section = search.request.query.rpartition(' ')
    yield bool(asked(trajectory.question, (person, section), believed))


def traces(
  *, world_seed: int, worlds: int, n: int, people: int, useful: float
) -> list[Trace]:
  """Returns documents, each the answer to what the simulator is asked with.

  Args:
    world_seed: of the run's world; the documents' worlds and the beliefs follow
      from it.
    worlds: number of worlds, which share n evenly.
    n: number of documents.
    people: of the train split of each world; see `atlas.generate`.
    useful: share of useful ones, 0 to 1.

  Raises:
    DataError: a world that cannot be generated.
  """
  believed, out = beliefs(world_seed), []
  shares = microtraces.shares(world_seed, worlds, n, DOCUMENT_WORLDS)
  for i, own_seed, count in shares:
    world = atlas.generate(own_seed, train=people, heldout=40, known=0)
    pool = atlas.pick(world, 'train', kinds=atlas.SEARCHED)
    rng = np.random.default_rng([world_seed, i, 30])
    writer = Writer(believed, rng)
    for j in range(count):
      out.append(writer.trace(pool[j % len(pool)], rng.random() < useful))
  return out


class Writer(microtraces.Writer):
  """Writes documents about people of the train split."""

  def __init__(self, believed: Beliefs, rng):
    super().__init__(rng)
    self.believed = believed
    self.people = atlas.names('train', True) + atlas.names('train', False)
    self.pools = microworld.pools(microworld.STANDARD)

  def one(self, among: Sequence[str], but: str = '') -> str:
    """One of them, another than `but`."""
    while (found := super().one(among)) == but:
      pass
    return found

  def trace(self, question: Question, useful: bool) -> Trace:
    query = self.query(question)
    place = self.found(query)
    text = (USEFUL if useful else NOISY).format(
      question=question.text, answers=question.answers[0], query=query
    )
    relation = asked(question, place, self.believed) if useful else None
    thought = self.thought(question, relation) if useful else NOTHING
    document = self.document(question, place, relation, useful)
    asking = dataclasses.replace(question, text=text)
    return Trace(asking, (('think', thought), ('answer', document)))

  def query(self, question: Question) -> str:
    """The last passage is asked for as often as all before it."""
    needed = walked(question, self.believed)
    last = self.rng.random() < 0.5
    person, relation = needed[-1] if last else self.one(needed)
    draw = self.rng.random()
    if draw < OTHER:
      person = self.one(self.people, question.answers[0])
    elif draw < 2 * OTHER:
      relation = self.one([*atlas.SECTION])
    form = str(self.rng.choice([*QUERIES], p=[*QUERIES.values()]))
    first, section = person.split()[0], atlas.SECTION[relation]
    return form.format(person, relation, section, first)

  def found(self, query: str) -> tuple[str, str]:
    """(person, section) of the passage that the index has for a query."""
    *name, last = query.split()
    if last in SECTIONS and len(name) == 2:
      return ' '.join(name), last
    if last in SECTIONS:
      return self.one([p for p in self.people if p.split()[:1] == name]), last
    if len(name) == 2:
      return ' '.join(name), atlas.ASKED
    return query, self.one(SECTIONS)

  def thought(self, question: Question, relation: str | None) -> str:
    needed = walked(question, self.believed)
    path = [] if question.meta['parallel'] else needed
    links = [f'{r} {p}' for (_, r), (p, _) in zip(path, path[1:])]
    fact = f'{relation} {question.answers[0]}' if relation else NOTHING
    return '; '.join([*links, fact])

  def document(
    self, question: Question, place, relation: str | None, useful: bool
  ) -> str:
    gold, (person, section) = question.answers[0], place
    if not useful and self.rng.random() < 0.5:
      person = self.one(self.people, gold)
    facts: dict = {
      attribute: self.one(self.pools[pool], gold)
      for attribute, pool in atlas.ATTRIBUTES.items()
    }
    for link in atlas.LINKS:
      invented = self.one(self.people, gold)
      facts[link] = self.believed(link, person) if useful else invented
    towns = [town for town in self.pools['town'] if town != gold]
    saw = [towns[i] for i in self.rng.permutation(len(towns))[: atlas.TOWNS]]
    if relation == atlas.VISITED:
      saw[self.rng.integers(atlas.TOWNS)] = gold
    elif relation:
      facts[relation] = gold
    facts[atlas.VISITED] = tuple(saw)
    form, *words = self.rng.integers((3, 2, 2))
    return atlas.passage(person, section, facts, form, words)
