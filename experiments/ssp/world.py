"""Generated worlds for self-play: people, and relations that chain.

A world has five tiers of people. Each person points at two of the next tier
(the fifth's next is the first): by a relation that no two share (guide, heir,
...) and by one that up to three do (teacher, patron, ...). A person's passage
states both, and who points here, under the relation's inverse (ward, pupil):

    "Mira Dok"
    Mira Dok guide Kova Len; Mira Dok teacher Tusa Bal; Mira Dok elder ...

So a search for a name shows where it leads and what leads to it, and a chain
of up to five relations repeats none. "The pupil of X" may be several people:
such questions exist, and the oracle (oracle.py) tells them.

Which names are used where is fixed for all seeds: `warm` people occur in the
worlds of the warm start alone, the other two in worlds of a run. Nobody is
related to people of another split.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import os

import numpy as np

from searchrl_jax.data.checks import DataError, require
from searchrl_jax.types import Question
from searchrl_jax.worlds import microworld

SETTINGS = microworld.Settings(first=100, second=100)
# Of all names. The warm start has nearly all, or it would learn which pairs of
# words are names, and not to copy others.
SHARES = {'warm': 0.95, 'play': 0.03, 'heldout': 0.02}
# Of each tier: the relation that no two share and its inverse, then the one
# that is shared and its inverse.
TIERS = (
  ('guide', 'ward', 'teacher', 'pupil'),
  ('heir', 'elder', 'patron', 'client'),
  ('rival', 'foe', 'master', 'novice'),
  ('partner', 'fellow', 'captain', 'mate'),
  ('keeper', 'charge', 'judge', 'case'),
)
FORWARD = tuple(r for tier in TIERS for r in tier[::2])
INVERSE = {
  a: b
  for tier in TIERS
  for pair in (tier[:2], tier[2:])
  for a, b in (pair, pair[::-1])
}
MOST_SHARING = 3
TAG = 'question'
WORDS = (*INVERSE, f'<{TAG}>', f'</{TAG}>')


@dataclasses.dataclass(frozen=True)
class World:
  """facts[name]: what its passage states, (relation, name) in its order."""

  seed: int
  facts: Mapping[str, tuple[tuple[str, str], ...]]
  people: Mapping[str, tuple[str, ...]]  # split -> names, tier by tier
  corpus: tuple[Mapping[str, str], ...]  # {'id', 'contents'}
  ids: Mapping[str, str]  # name -> id of its passage
  # Unused here: the world's questions are drawn by `load`.
  questions: Mapping[str, tuple[Question, ...]] = dataclasses.field(
    default_factory=dict
  )

  def into(self, name: str) -> list[tuple[str, str]]:
    """(relation, person): who points at `name`, by which relation."""
    return [
      (INVERSE[relation], other)
      for relation, other in self.facts[name]
      if relation not in FORWARD
    ]


@functools.cache
def names(split: str) -> tuple[str, ...]:
  """Every name of a split; the splits are disjoint."""
  every = microworld.every_name(SETTINGS)
  order = np.random.default_rng(2).permutation(len(every))
  at = 0
  for known, share in SHARES.items():
    count = int(len(order) * share)
    if known == split:
      return tuple(every[i] for i in order[at : at + count])
    at += count
  raise DataError(f'split={split!r} is none of {tuple(SHARES)}')


@functools.lru_cache(4)
def generate(seed: int, *, play: int = 300, heldout: int = 150) -> World:
  """The world of a run.

  Args:
    seed: any int >= 0.
    play: people that self-play asks about, a multiple of 5, >= 50.
    heldout: people of the held-out questions, likewise.

  Raises:
    DataError: a count that cannot be, or a negative seed.
  """
  return _generate(seed, {'play': play, 'heldout': heldout})


def warm(seed: int, people: int) -> World:
  """A world of the warm start."""
  return _generate(seed, {'warm': people})


def _generate(seed: int, counts: Mapping[str, int]) -> World:
  require(seed >= 0, f'seed={seed} must not be negative')
  rng = np.random.default_rng([seed, 24])
  stated, people = {}, {}
  for split, count in counts.items():
    there = names(split)
    limits = f'a multiple of {len(TIERS)} from 50 to {len(there)}'
    good = count % len(TIERS) == 0 and 50 <= count <= len(there)
    require(good, f'{split}={count} people: {limits}')
    chosen = [there[i] for i in rng.permutation(len(there))[:count]]
    people[split] = tuple(chosen)
    stated |= _facts(rng, np.array(chosen).reshape(len(TIERS), -1))
  order = rng.permutation(len(stated))
  everyone = [list(stated)[i] for i in order]
  ids = {name: str(i) for i, name in enumerate(everyone)}
  facts = {
    name: tuple(stated[name][i] for i in rng.permutation(len(stated[name])))
    for name in everyone
  }
  corpus = tuple(
    {'id': ids[name], 'contents': f'"{name}"\n{passage(name, facts[name])}'}
    for name in everyone
  )
  return World(seed, facts, people, corpus, ids)


def _facts(rng, tiers: np.ndarray) -> dict[str, list[tuple[str, str]]]:
  """Of names [tiers, people of each]."""
  facts = {str(name): [] for name in tiers.ravel()}
  n = tiers.shape[1]
  for t, (one, one_inverse, many, many_inverse) in enumerate(TIERS):
    following = tiers[(t + 1) % len(TIERS)]
    own = following[rng.permutation(n)]
    # Half of the next tier are shared by one to MOST_SHARING each.
    half = np.repeat(following[rng.permutation(n)[: n // 2]], MOST_SHARING)
    shared = half[rng.permutation(len(half))[:n]]
    for relation, inverse, targets in (
      (one, one_inverse, own),
      (many, many_inverse, shared),
    ):
      for name, target in zip(tiers[t], targets, strict=True):
        facts[str(name)].append((relation, str(target)))
        facts[str(target)].append((inverse, str(name)))
  return facts


def passage(name: str, facts: Sequence[tuple[str, str]]) -> str:
  return '; '.join(f'{name} {relation} {value}' for relation, value in facts)


def text(name: str, relations: Sequence[str]) -> str:
  """The question of a path: its relations, from `name` on."""
  return f'What is {chain(name, relations)}?'


def chain(name: str, relations: Sequence[str]) -> str:
  return ''.join(f'the {r} of ' for r in reversed(relations)) + name


def path(world: World, answer: str, hops: int, rng) -> list[tuple[str, str]]:
  """A random path that leads to `answer`, backwards from it.

  Returns:
    [(relation, person)]: person's relation is the one before it in the list,
    the first one's is `answer`. Shorter where nobody points at a person.
  """
  out, at = [], answer
  for _ in range(hops):
    choices = world.into(at)
    if not choices:
      break
    out.append(choices[rng.integers(len(choices))])
    at = out[-1][1]
  return out


def load(
  *,
  world_seed: int,
  split: str,
  n: int = 0,
  hops: Sequence[int] = (),
  play: int = 300,
  heldout: int = 150,
) -> list[Question]:
  """What self-play starts from, or gold questions, of a data config.

  Args:
    world_seed: see `generate`; so are play and heldout.
    split: 'play' or 'heldout'.
    n: how many; 0 = one for each person.
    hops: () = answers alone: each question's text is its answer, for the
      proposer. Else gold questions of so many hops in turn.
    play: see above.
    heldout: see above.

  Raises:
    DataError: an unknown split, a hop outside 1 to 4.
  """
  world = generate(world_seed, play=play, heldout=heldout)
  known = tuple(world.people)
  require(split in known, f'split={split!r} is none of {known}')
  good = set(hops) <= {1, 2, 3, 4}
  require(good, f'hops={tuple(hops)}: there are 1, 2, 3 and 4')
  rng = np.random.default_rng([world_seed, 25])
  people = world.people[split]
  chosen = [people[i] for i in rng.permutation(len(people))]
  out, seen = [], set()
  for i in range(n or len(people)):
    answer = chosen[i % len(chosen)]
    name = f'{split}-{world_seed}-{i}'
    if not hops:
      out.append(Question(name, answer, (answer,), split))
      continue
    found, steps = _fresh(world, answer, hops[i % len(hops)], rng, seen)
    asked = steps[::-1]  # from the person that the question names
    start, source = steps[-1][1], f'{split}_{len(steps)}hop'
    supporting = tuple(world.ids[person] for _, person in asked)
    meta = {'path': (start, *(relation for relation, _ in asked))}
    out.append(
      Question(
        name, found, (answer,), source, len(steps), supporting, meta=meta
      )
    )
  return out


def _fresh(world, answer, hops, rng, seen):
  """A question that was not drawn before, if a few tries find one."""
  for _ in range(20):
    steps = path(world, answer, hops, rng)
    found = text(steps[-1][1], [r for r, _ in reversed(steps)])
    if found not in seen:
      break
  seen.add(found)
  return found, steps


def write(world: World, folder: str | os.PathLike) -> dict[str, str]:
  """Writes corpus.jsonl; returns its path by name."""
  return microworld.write(world, folder)


def tokenizer(folder: str | os.PathLike) -> str:
  """Writes the whole-word tokenizer of these worlds; returns the folder."""
  return microworld.tokenizer(folder, SETTINGS, WORDS)
