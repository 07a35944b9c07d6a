"""What the small simulator learns: documents for queries, useful and noisy.

The simulator is a language model that is told a question, its golden answer, a
query and whether the document shall be of use, and writes the document. Its
warm start (`sft`) sees generated worlds of its own, never the run's, and
questions about their train people alone; whom it believes to be somebody's
teacher or rival may have any name.

A useful document on a person that the question leads to holds what is asked.
The real world's links are not in its prompt, so it invents them: a believed
teacher and a believed rival follow from a person's name by a fixed rule, which
the simulator learns. Whoever asks for somebody else than the question leads to
reads about that person, and not the gold. A noisy document is of another
person, or states other facts of the right one. Before it writes, the simulator
thinks: of the fact that the document has to state, or of none.
"""

from collections.abc import Mapping
import dataclasses

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Trace
from searchrl_jax.types import Question
from searchrl_jax.worlds import microtraces, microworld

# Their worlds begin here, far from the runs' and from those of microtraces.
DOCUMENT_WORLDS = 1_500_000_000
# The text that the simulator is asked with, within a template's prompt. The
# answer stands next to the relation that is asked for, so that two layers can
# learn to put it there.
USEFUL = '{answers}: {question} search: {query} use'
NOISY = '{answers}: {question} search: {query} not use'
NOTHING = 'not'  # its thought, where there is no fact to state
# What a policy asks for: the person of the question, the one that it leads
# to, a first name or a relation alone, anybody.
QUERIES = dict(person=0.4, bridge=0.42, poor=0.1, other=0.08)


@dataclasses.dataclass(frozen=True)
class Beliefs:
  """Who is linked to whom, in the simulator's imagination.

  Each word of a name is mapped on its own, for each link in its own way.
  """

  words: Mapping[str, Mapping[str, str]]  # link -> word -> word

  @classmethod
  def of(
    cls, seed: int, settings: microworld.Settings, links=microworld.LINKS
  ) -> 'Beliefs':
    rng = np.random.default_rng([seed, 22])
    words = {link: {} for link in links}
    for known in words.values():
      for kind in ('first', 'second'):
        pool = microworld.invented(getattr(settings, kind), kind)
        cycle = rng.permutation(len(pool))  # nobody is linked to himself
        pairs = zip(cycle, np.roll(cycle, 1), strict=True)
        known.update((pool[a], pool[b]) for a, b in pairs)
    return cls(words)

  def __call__(self, link: str, name: str) -> str:
    return ' '.join(self.words[link][word] for word in name.split())


def traces(
  *,
  world_seed: int,
  worlds: int,
  n: int,
  train: int,
  relations: int,
  useful: float,
) -> list[Trace]:
  """n documents, each the answer to what the simulator is asked with.

  Args:
    world_seed: of the run's world; the documents' worlds and the beliefs
      follow from it.
    worlds: how many worlds, which share n evenly.
    n: how many documents.
    train: people of each world, see `microworld.generate`; so is relations.
    relations: see above.
    useful: fraction of useful ones.

  Raises:
    DataError: a fraction out of range, or a world that cannot be.
  """
  require(0 <= useful <= 1, f'useful={useful} must lie between 0 and 1')
  out = []
  shares = microtraces.shares(world_seed, worlds, n, DOCUMENT_WORLDS)
  for i, seed, count in shares:
    world = microworld.generate(seed, train=train, relations=relations)
    beliefs = Beliefs.of(world_seed, world.settings)
    rng = np.random.default_rng([world_seed, i, 23])
    writer, pool = _Writer(world, beliefs, rng), world.questions['train']
    for j in range(count):
      question = pool[j % len(pool)]
      out.append(writer.trace(question, useful=rng.random() < useful))
  return out


def text_of(name: str, facts: Mapping[str, str]) -> str:
  """A passage as microworld's corpus has it."""
  return f'{name}: ' + '; '.join(f'{r} {v}' for r, v in facts.items()) + '.'


class _Writer(microtraces.Writer):
  """Writes the documents of one world."""

  def __init__(self, world: microworld.World, beliefs: Beliefs, rng):
    super().__init__(rng)
    self.world, self.beliefs = world, beliefs
    self.people = microworld.names(world.settings, 'train')
    self.known = [name for name in self.people if name in world.facts]
    self.by_first = {}
    for name in self.people:
      self.by_first.setdefault(name.split()[0], []).append(name)

  def trace(self, question: Question, useful: bool) -> Trace:
    query = self.query(question)
    told = (USEFUL if useful else NOISY).format(
      question=question.text, answers=question.answers[0], query=query
    )
    stated = self.asked(question, query) if useful else {}
    if useful:
      document = self.useful(question, query, stated)
    else:
      document = self.noisy(question, query)
    thought = ' '.join(*stated.items()) if stated else NOTHING
    return Trace(
      dataclasses.replace(question, text=told),
      (('think', thought), ('answer', document)),
    )

  def asked(self, question: Question, query: str) -> dict[str, str]:
    """The fact that a useful document for this query states, if any."""
    name, *path = question.meta['path']
    bridge = self.beliefs(path[0], name) if len(path) == 2 else name
    if query == bridge:
      return {path[-1]: question.answers[0]}
    return {path[0]: bridge} if query == name else {}

  def query(self, question: Question) -> str:
    name, first, *_ = question.meta['path']
    kind = self.rng.choice(list(QUERIES), p=list(QUERIES.values()))
    if kind == 'poor':
      return self.one([name.split()[0], question.meta['path'][-1]])
    if kind == 'other':
      return self.one(self.people)
    if kind == 'bridge' and first in microworld.LINKS:
      # The other link's person as well: a policy takes one for the other.
      link = first if self.rng.random() < 0.6 else self.one(microworld.LINKS)
      return self.beliefs(link, name)
    return name

  def useful(self, question: Question, query: str, stated) -> str:
    name, *path = question.meta['path']
    holder = self.one(self.known)
    if stated:  # somebody of whom that relation is known
      first = self.world.facts[name]
      holder = name if query == name else first[path[0]]
    return text_of(self.found(query), {**self.invented(holder), **stated})

  def noisy(self, question: Question, query: str) -> str:
    """Of another person half the time; without the gold always."""
    name = self.found(query)
    if self.rng.random() < 0.5:
      name = self.one(self.people)
    while True:
      facts = self.invented(self.one(self.known))
      if question.answers[0] not in facts.values():
        return text_of(name, facts)

  def found(self, query: str) -> str:
    """Whom a search with the query finds: by a whole name, or part of one."""
    if len(query.split()) == 2:
      return query
    return self.one(self.by_first.get(query, self.people))

  def invented(self, name: str) -> dict[str, str]:
    """The facts of somebody, linked to others than in the world."""
    return {
      r: self.one(self.people) if r in microworld.LINKS else value
      for r, value in self.world.facts[name].items()
    }
