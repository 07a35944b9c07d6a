"""A generated world for self-search: what the policy knows must be recalled.

The people of a world are split four ways. Passages of all but the unseen are
learnt in the warm start; questions come from one split at a time:

  warm     asked about in the warm start
  rl       asked about in reinforcement learning
  heldout  never asked about; passages, recall and traces that look up the
           wrong person show their facts
  unseen   nothing of them was ever seen, though a real search finds it

So an answer on held-out people is a fact recalled, on unseen ones a guess.
Every relation has 80 values or more, dealt evenly: a guess is worth nothing.
"""

import dataclasses
import os

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Trace
from searchrl_jax.types import Question
from searchrl_jax.worlds import microworld

SPLITS = ('warm', 'rl', 'heldout', 'unseen')
LEAST = 80  # values of a relation, and so people of a split
SETTINGS = microworld.Settings(first=100, second=100, towns=96)
# In the order of how well the traces search for them, the best first.
RELATIONS = ('birthplace', 'emblem', 'home', 'teacher')


def generate(
  seed: int, *, warm=240, rl=160, heldout=100, unseen=80
) -> microworld.World:
  """Makes a world; its corpus holds all passages, the unseen ones too.

  Args:
    seed: any int >= 0.
    warm, rl, heldout, unseen: people of these splits, each >= 80.

  Raises:
    DataError: fewer people than a relation has values, or more than names.
  """
  require(seed >= 0, f'seed={seed} must not be negative')
  counts = dict(warm=warm, rl=rl, heldout=heldout, unseen=unseen)
  rng = np.random.default_rng([seed, 21])
  names = microworld.every_name(SETTINGS)
  order, total = rng.permutation(len(names)), sum(counts.values())
  limit = f'{total} people asked for; there are {len(names)} names'
  require(total <= len(names), limit)
  people, facts, at = {}, {}, 0
  for split, count in counts.items():
    why = f'at least {LEAST}, so that no answer is frequent'
    require(count >= LEAST, f'{split}={count} people: {why}')
    people[split] = [names[i] for i in order[at : at + count]]
    at += count
    facts |= _facts(rng, people[split])
  ids, corpus = microworld.passages(rng, facts)
  questions = {
    split: microworld.ask(rng, f'closed-{seed}-{split}', own, facts, ids)
    for split, own in people.items()
  }
  return microworld.World(seed, SETTINGS, corpus, facts, questions)


def _facts(rng, people):
  """name -> {relation: value}; the teacher is one of `people`."""
  towns = microworld.invented(SETTINGS.towns, 'town')
  pools = {
    'birthplace': towns,
    'home': towns,
    'emblem': (*microworld.EMBLEMS, *microworld.CRAFTS),
  }
  table = {
    relation: microworld.dealt(rng, pool, len(people))
    for relation, pool in pools.items()
  }
  table['teacher'] = microworld.linked(rng, people)
  return {
    name: {relation: table[relation][i] for relation in RELATIONS}
    for i, name in enumerate(people)
  }


def load(
  *,
  world_seed: int,
  split: str,
  n: int = 0,
  hops: tuple[int, ...] = (1, 2),
  shuffled: bool = False,
  warm: int = 240,
  rl: int = 160,
  heldout: int = 100,
  unseen: int = 80,
) -> list[Question]:
  """Questions of a split, for a data config; hops alternate.

  Args:
    world_seed: see `generate`.
    split: one of SPLITS.
    n: how many in all; 0 = as many as keep the hops even.
    hops: which of 1 and 2.
    shuffled: each question has the golden answer of another one on the same
      relation, never its own: a control, in which the right answer earns
      nothing and a wrong one now and then.
    warm, rl, heldout, unseen: see `generate`.

  Raises:
    DataError: an unknown split or hop, or more questions than there are.
  """
  require(split in SPLITS, f'split={split!r} is none of {SPLITS}')
  good = hops and set(hops) <= {1, 2}
  require(good, f'hops={tuple(hops)}: there are 1 and 2')
  world = generate(world_seed, warm=warm, rl=rl, heldout=heldout, unseen=unseen)
  questions = microworld.pick(world, split, n, hops)
  return shuffle_golds(questions, world_seed) if shuffled else questions


def shuffle_golds(questions, seed: int) -> list[Question]:
  """Deals golden answers anew among questions on the same relation, until
  no question has an answer of its own."""
  rng = np.random.default_rng([seed, 22])
  out = list(questions)
  for relation in RELATIONS:
    at = [i for i, q in enumerate(out) if q.meta['path'][-1] == relation]
    dealt = rng.permutation(at)
    while same := [
      n
      for n, i in enumerate(at)
      if questions[i].answers == questions[dealt[n]].answers
    ]:
      for n in same:
        m = rng.integers(len(at))
        dealt[n], dealt[m] = dealt[m], dealt[n]
    for i, j in zip(at, dealt, strict=True):
      out[i] = dataclasses.replace(out[i], answers=questions[j].answers)
  return out


@dataclasses.dataclass(frozen=True)
class Mix:
  """How the traces of the warm start behave; the rest searches well.

  Only what a policy does can be selected by reinforcement learning, and none
  of this shows in the format: a poor search is as well-formed as a good one.
  """

  direct: float  # answers at once
  poor: float  # searches for the relation alone, recalls a chance passage
  tilt: float  # how much likelier that is for later RELATIONS: 0 to 1
  again: float  # after a poor search: searches for the person
  short: float  # two-hop: answers from the first person's passage

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      require(0 <= value <= 1, f'{name}={value} must lie between 0 and 1')
    good = self.direct + self.poor * (1 + self.tilt) <= 1 + 1e-6
    require(good, 'direct + poor * (1 + tilt) must not exceed 1')

  def poorly(self, relation: str) -> float:
    """The chance that a question on it is searched for poorly."""
    place = RELATIONS.index(relation) / (len(RELATIONS) - 1)
    return self.poor * (1 + self.tilt * (2 * place - 1))


def traces(
  *,
  world_seed: int,
  n: int,
  queries: int,
  recalls: int,
  passages: int,
  pack: int,
  direct: float,
  poor: float,
  tilt: float,
  again: float,
  short: float,
  seed: int = 0,
  warm: int = 240,
  rl: int = 160,
  heldout: int = 100,
  unseen: int = 80,
) -> list[Trace]:
  """Pretraining and warm start: passages, recall, and questions.

  Passages and searches with what they find, `pack` of them to a text, of all
  people but the unseen; traces on questions about the warm people alone. To
  put any name into a query is learnt from names of nobody, of whom nothing is
  told: else only known names would be searched for.

  Args:
    world_seed: see `generate`.
    n: traces on questions; a question comes again only after all came.
    queries: texts of a question on a name of nobody and its query, no further.
    recalls: texts of searches, each followed by the passage it finds.
    passages: texts of passages alone.
    pack: passages in each text.
    direct, poor, tilt, again, short: see `Mix`.
    seed: of behaviours and packing.
    warm, rl, heldout, unseen: see `generate`.

  Raises:
    DataError: a fraction out of range, or a world that cannot be.
  """
  mix = Mix(direct, poor, tilt, again, short)
  world = generate(world_seed, warm=warm, rl=rl, heldout=heldout, unseen=unseen)
  hidden = {q.meta['path'][0] for q in world.questions['unseen']}
  known = {p.title: p for p in world.passages() if p.title not in hidden}
  rng = np.random.default_rng([world_seed, seed, 23])
  out = []
  for count, recall in ((passages, False), (recalls, True)):
    for names in _packs(rng, list(known), count, pack):
      actions = []
      for name in names:
        if recall:
          actions += [('search', name), ('information', (known[name],))]
        else:
          actions.append(('other', known[name].text))
      out.append(Trace(None, tuple(actions)))
  for _ in range(queries):
    out.append(_query(rng, world, mix))
  questions = microworld.pick(world, 'warm')
  for (i,) in _packs(rng, list(range(len(questions))), n, 1):
    out.append(_trace(questions[i], world, known, rng, mix))
  return out


def _packs(rng, items, count, size):
  """`count` lists of `size` items; each item again only after all came."""
  left = []
  for _ in range(count):
    if len(left) < size:
      left = [items[i] for i in rng.permutation(len(items))] + left
    yield [left.pop() for _ in range(size)]


def _query(rng, world, mix) -> Trace:
  first = microworld.invented(SETTINGS.first, 'first')
  second = microworld.invented(SETTINGS.second, 'second')
  while (name := f'{rng.choice(first)} {rng.choice(second)}') in world.facts:
    pass
  relation = str(rng.choice(RELATIONS))
  of = 'the teacher of ' if rng.random() < 0.5 else ''
  query = relation if rng.random() < mix.poorly(relation) else name
  asked = f'Question: What is the {relation} of {of}{name}?'
  actions = dict(other=asked, think=f'find {query}', search=query)
  return Trace(None, tuple(actions.items()))


def _trace(question, world, known, rng, mix: Mix) -> Trace:
  name, *path = question.meta['path']
  relation, actions = path[-1], []

  def look_up(thought, query, found):
    read = dict(think=thought, search=query, information=(known[found],))
    actions.extend(read.items())
    return world.facts[found]

  def chance(p):
    return rng.random() < p

  draw, read = rng.random(), {}
  if draw < mix.direct:
    value = question.answers[0]
    actions += [('think', f'maybe {value}'), ('answer', value)]
    return Trace(question, tuple(actions), False)
  poor = draw < mix.direct + mix.poorly(relation)
  if poor:
    everyone = list(known)
    found = everyone[rng.integers(len(everyone))]
    read = look_up(f'find {relation}', relation, found)
  if not poor or chance(mix.again):
    read = look_up(f'find {name}', name, name)
    if len(path) == 2 and not chance(mix.short):
      bridge = read[path[0]]
      read = look_up(f'find {bridge}', bridge, bridge)
  value = read[relation]
  actions += [('think', f'{relation} {value}'), ('answer', value)]
  good = not poor and value == question.answers[0]
  return Trace(question, tuple(actions), good)


write = microworld.write


def tokenizer(folder: str | os.PathLike) -> str:
  """Writes the whole-word tokenizer of these worlds; returns the folder."""
  return microworld.tokenizer(folder, SETTINGS)
