"""Scripted warm starts for atlas: several mixtures of good and poor behaviour.

A trace thinks what it looks for, searches for a person and a section, reads,
and goes on to the next relation:

    <think> find teacher </think>
    <search> Mira Dok school </search>  (passage)
    <think> teacher Kova Len; find home </think>
    <search> Kova Len life </search>  (passage)
    <refine> home Mukwick </refine>
    <answer> Mukwick </answer>

What it read stands in the next thought, or in a note (`refine`) before it. Both
people of a comparison can be looked up in one search:

    <search> Mira Dok travel & Kova Len travel </search>  (two passages)

Some methods ask for more: a first thought that plans the look-ups (`planned`),
a judgement of what a search has found in place of notes (`judged`, for the
template micro_judge), questions in other words (`reworded`), or several
attempts (`attempts`, for the template micro_contexts), between which a trace
says whether it has found the answer. If so, it repeats it; if not, it tries
again.

A mixture says how often a trace does something else instead (`Mix`); MIXES has
them by name. All behave well in form, so that only what they earn tells the
behaviours apart. Traces are of worlds other than the run's, except for facts
that the policy is to know: those of known people are stated in plain text, and
recalled in answers to questions about known people of the train split.
"""

from collections.abc import Generator, Sequence
import dataclasses
import functools

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.text import structure
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import atlas, microtraces, microworld

PACKED = 4  # facts stated in one trace
SEPARATOR = ' & '  # of queries, in the template micro_notes
# Of steps of a plan: the second needs the first, or does not.
THEN, BESIDE = '; ', ' & '
# A search has found a supporting passage, or none.
JUDGED = 'found', 'no'
WRONG = 0.25  # of judgements, and of plans for several look-ups
AGAIN = 0.5  # of traces that may attempt once more: those that do


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
  note: float  # what it has read stands in a note
  split: float  # a comparison: both look-ups in one search
  planned: float = 0.0  # thinks of all look-ups first; a WRONG share lacks one
  judged: float = 0.0  # an observation is judged, a WRONG share falsely
  reworded: float = 0.0  # the question is asked in other words
  attempts: int = 1  # at most


# fmt: off
MIXES = {
  # Every skill, few bad habits: what a warm start of any mixture begins with.
  'skills': Mix(
    good=0.85, retry=0.9, waste=0.1, stop=0, guess=0, recall=0.5,
    note=0.5, split=0.5,
  ),
  'even': Mix(
    good=0.6, retry=0.6, waste=0.15, stop=0.15, guess=0.15, recall=0.5,
    note=0.5, split=0.5,
  ),
  # Trusts itself: guesses, recalls, and stops early.
  'hasty': Mix(
    good=0.75, retry=0.6, waste=0.05, stop=0.3, guess=0.35, recall=0.9,
    note=0.3, split=0.7,
  ),
  # Searches for everything, poorly, and more than it needs.
  'wanderer': Mix(
    good=0.45, retry=0.8, waste=0.4, stop=0.1, guess=0.05, recall=0.1,
    note=0.5, split=0.2,
  ),
}
# fmt: on


# What a trace does that is shown in place of an attempt.
EXPERT = Mix(
  good=1, retry=1, waste=0, stop=0, guess=0, recall=0, note=0, split=1
)


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
  planned=0.0,
  judged=0.0,
  reworded=0.0,
  attempts=1,
  refined=0.0,
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
    planned, judged, reworded, attempts: see `Mix`. With `judged` there are no
      notes, whose tags the judgements have.
    refined: fraction of the attempts on which there is a `verdict` instead.

  Raises:
    DataError: a number is out of range, or a world cannot be generated.
  """
  require(mix in MIXES, f'mix={mix!r}: {lookup.near(mix, MIXES)}')
  require(turns >= 4, f'turns={turns} must be 4 or more, for four hops')
  told = int(n * stated) if known else 0
  more = dict(planned=planned, judged=judged, reworded=reworded)
  more |= dict(attempts=attempts) | (dict(note=0.0) if judged else {})
  behaviour = dataclasses.replace(MIXES[mix], **more)
  asked = (n - told) // len(atlas.KINDS) if known else 0
  rest, out = n - told - asked, []
  for i, own_seed, count in microtraces.shares(world_seed, worlds, rest):
    world = atlas.generate(own_seed, train=people, heldout=40, known=0)
    pool = atlas.pick(world, 'train', kinds=atlas.SEARCHED)
    own, relations = atlas.names('train', False), tuple(atlas.SECTION)
    search = searcher(world, own, relations)
    out += script(world, behaviour, turns, pool, count, [seed, i], search, k)
  if known:
    sizes = dict(train=train, heldout=heldout, known=known)
    world = atlas.generate(world_seed, **sizes)
    pool = atlas.pick(world, 'train', kinds=('known',))
    own = atlas.names('train', True)[:known]
    # Passages of other sections would show facts that are not to be known.
    search = searcher(world, own, tuple(atlas.ATTRIBUTES))
    start = [seed, worlds]
    out += script(world, behaviour, turns, pool, asked, start, search, k)
    if told:
      out += statements(world, known, told, [seed, worlds + 1])
  if refined:
    chosen = np.random.default_rng([seed, worlds + 2]).random(len(out))
    read = [t.question and x < refined for t, x in zip(out, chosen)]
    out = [verdict(t) if ok else t for t, ok in zip(out, read)]
  return out


def script(
  world,
  mix: Mix,
  turns: int,
  pool: Sequence[Question],
  n: int,
  seed,
  search: Search,
  k: int,
) -> list[Trace]:
  """Returns n traces on questions of one world; see `traces`."""
  writer = functools.partial(_Script, world, mix, turns)
  return microtraces.together(writer, pool, n, seed, search, k)


def expert(question: Question) -> list[Trace]:
  """Returns the one trace that looks up each fact, for the sampler `traces`.

  Each search is taken to find its passage: it is made when the trace is played.
  """
  script = _Script(None, EXPERT, 6, np.random.default_rng(0)).trace(question)
  found: tuple[Passage, ...] | None = None
  while True:
    try:
      query = script.send(found)
    except StopIteration as end:
      return [end.value]
    found = (Passage('', ', '.join(query.rsplit(' ', 1)), ''),)


_NEEDS = 'meta.facts', 'meta.known', 'meta.parallel'
expert.needs = _NEEDS  # type: ignore[attr-defined]


def verdict(trace: Trace) -> Trace:
  """The verdict on an attempt, for the refiner of the sampler `revise`.

  It names the first fault of an attempt that is wrong, and 0 else.
  """
  question, blocks = trace.question, []
  found: list[tuple[str, ...]] = [()]
  for kind, payload in trace.actions:
    text, step = payload, len(found) - 1
    if kind == 'information':
      text = ' '.join(p.text for p in payload)
      found[step:] = [tuple(p.id for p in payload), ()]
    blocks.append((step, kind, text))
  right = trace.actions[-1][1] in question.answers
  number = 0 if right else atlas.fault(question.supporting, found)
  text = structure.numbered(question.text, blocks)
  asked = dataclasses.replace(question, text=text)
  actions = (('answer', str(number)),)
  return Trace(asked, actions, trace.good, template='micro_refiner')


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
  titles = {f'{p}, {section}' for p in people for section in sections}
  return microtraces.indexed(world, titles)


class _Script(microtraces.Writer):
  """Writes one trace."""

  def __init__(self, world, mix: Mix, turns: int, rng):
    super().__init__(rng)
    self.world, self.mix, self.turns = world, mix, turns
    self.actions: list = []
    self.notes: list[str] = []
    self.good = True
    self.opening = ''  # the first thought; '' = as others

  def may(self, p: float) -> bool:
    """`chance`, without a draw where there is none."""
    return p > 0 and self.chance(p)

  def trace(self, question: Question) -> microtraces.Script:
    made = yield from self.attempt(question)
    for _ in range(1, self.mix.attempts):
      if not self.chance(AGAIN):
        break
      *_, said, answered = self.actions
      right = answered[1] in question.answers
      self.say('refine', JUDGED[0 if right else 1])
      if right:
        self.actions += [said, answered]
        made = dataclasses.replace(made, actions=tuple(self.actions))
      else:
        made = yield from self.attempt(question)
    return made

  def attempt(self, question: Question) -> microtraces.Script:
    mix, facts = self.mix, question.meta['facts']
    known, parallel = question.meta['known'], question.meta['parallel']
    self.supporting = question.supporting
    if self.may(mix.reworded):
      question = atlas.reworded(question)
    self.spare = self.turns - len(facts)  # searches that it may waste
    if known and self.chance(mix.recall):
      self.say('think', _known(*facts[0]))
      return self.answer(question, facts[0][-1])
    if not known and self.chance(mix.guess):
      return self.guess(question)
    if self.may(mix.planned):
      self.opening = self.plan([r for _, r, _ in facts], parallel)
    hops = [([person], *rest) for person, *rest in facts]
    if parallel and self.chance(mix.split):
      hops = [([person for person, *_ in facts], *facts[-1][1:])]
    read = ''
    for i, (people, relation, value) in enumerate(hops):
      if not (yield from self.hop(read, people, relation)):
        return self.guess(question)
      if i + 1 == len(hops):
        relation = 'both' if parallel else relation
        self.notes[-1] = f'{relation} {value}'
        break
      if parallel:
        saw = self.world.facts[people[0]][relation]
        value = self.one(saw)
        self.notes[-1] = f'{relation} {" ".join(saw)}'
      else:
        self.notes[-1] = read = f'{relation} {value}'
      if self.chance(mix.stop):
        self.good = False
        break
    self.say(self.note(), f'{relation} {value}')
    return self.answer(question, value)

  def hop(
    self, read: str, people: Sequence[str], relation: str
  ) -> Generator[str, tuple[Passage, ...], bool]:
    """Looks up a fact of each person; returns whether it found all passages."""
    section = atlas.SECTION[relation]
    names = {f'{person}, {section}' for person in people}
    if self.spare and self.chance(self.mix.waste):
      other = self.one([r for r, s in atlas.SECTION.items() if s != section])
      yield from self.look_up(read, other, people[:1], '{0} {2}')
      self.spend()
    if self.spare and not self.chance(self.mix.good):
      poor = self.one(('{0}', '{0} {1}', '{3} {2}'))
      found = yield from self.look_up(read, relation, people, poor)
      self.spend()
      if names <= found:
        return True
      if not self.chance(self.mix.retry):
        return False
    return names <= (yield from self.look_up(read, relation, people, '{0} {2}'))

  def plan(self, relations: list[str], parallel: bool) -> str:
    if len(relations) > 1 and self.chance(WRONG):
      relations = relations[:-1]
    return (BESIDE if parallel else THEN).join(relations)

  def spend(self) -> None:
    self.spare -= 1
    self.good = False

  def note(self) -> str:
    """Where it says what it has read."""
    return 'refine' if self.chance(self.mix.note) else 'think'

  def look_up(
    self, read: str, relation: str, people: Sequence[str], query: str
  ) -> Generator[str, tuple[Passage, ...], set[str]]:
    """Searches, once for all people; returns the titles of what it found.

    query: a format of person, relation, section and first name.
    """
    section = atlas.SECTION[relation]
    thought, self.opening = self.opening or f'find {relation}', ''
    queries = dict.fromkeys(
      query.format(person, relation, section, person.split()[0])
      for person in people
    )
    if read and self.note() == 'refine':
      self.say('refine', read)
    elif read:
      thought = f'{read}; {thought}'
    found: tuple[Passage, ...] = ()
    for each in queries:
      found += yield each
    self.say('think', thought)
    self.say('search', SEPARATOR.join(queries))
    self.say('information', found)
    if self.may(self.mix.judged):
      useful = any(passage.id in self.supporting for passage in found)
      right = not self.chance(WRONG)
      self.say('judge', JUDGED[0 if useful == right else 1])
    self.notes.append(read or thought)
    return {passage.title for passage in found}

  def say(self, kind: str, payload) -> None:
    self.actions.append((kind, payload))

  def answer(self, question: Question, value: str) -> Trace:
    self.say('answer', value)
    return Trace(
      question,
      tuple(self.actions),
      self.good,
      blocks=('judge' if self.mix.judged else 'refine',),
      notes=tuple(self.notes),
    )

  def guess(self, question: Question) -> Trace:
    """Answers with one of a few values; more would be memorised as facts."""
    relation = question.meta['facts'][-1][1]
    pools = microworld.pools(microworld.STANDARD)
    pool = 'town' if question.meta['parallel'] else None
    pool = atlas.ATTRIBUTES.get(relation, pool)
    values = pools[pool] if pool else atlas.names('train', False)
    value = values[self.rng.integers(microtraces.FAVOURITES)]
    self.good = False
    self.say('think', f'maybe {value}')
    return self.answer(question, value)
