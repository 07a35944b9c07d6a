"""What advantages can tell apart within trajectories: spans and turns.

A turn is what the policy (or a teacher in its place) writes between two
responses of the environment. A trajectory's turns are numbered 0, 1, ...; those
that have a loss token are listed for the whole batch, N in all, by trajectory
and number. Values of turns are float [N]:

    x = structure.totals(values)  # what each turn earned
    cells = [group_ids[structure.owner], structure.labels('anchor')]
    valid = valid[structure.owner]
    x = advantages.normalised(x, valid, cells, eps=..., ddof=...)
    return structure.over_tokens(structure.discounted(x, gamma))
"""

from collections.abc import Hashable, Sequence
import dataclasses
import itertools
import zlib

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.types import ACTORS, SEARCH, SearchResult, Segment, Trajectory


@dataclasses.dataclass(frozen=True)
class Span:
  """A segment that the trainer sees: tokens start <= t < end."""

  start: int
  end: int
  turn: int  # that it is part of, or follows; -1 before the first turn
  segment: Segment
  # Of an observation: the answers of the turn's tool, in order. A cut one does
  # not show all of them.
  results: tuple[SearchResult, ...] = ()

  @property
  def acts(self) -> bool:
    """Whether it is part of a turn."""
    return self.segment.author in ACTORS

  @property
  def observes(self) -> bool:
    """Whether it shows what a tool found."""
    return _observes(self.segment)

  @property
  def searched(self) -> bool:
    """Whether it shows what a search found, not another tool."""
    return any(r.request.tool == SEARCH for r in self.results)

  @property
  def passages(self) -> tuple[str, ...]:
    """Ids of the passages that a search found, in order.

    They name passages of config.source: another tool's ids, and its texts, are
    names of something else.
    """
    own = (r for r in self.results if r.request.tool == SEARCH)
    return tuple(p.id for r in own for p in r.passages)


@dataclasses.dataclass(frozen=True)
class Structure:
  """The spans of B trajectories and their N turns; see `of`."""

  trajectories: Sequence[Trajectory]  # B: question, role, meta, searches
  spans: Sequence[tuple[Span, ...]]  # of each trajectory
  owner: np.ndarray  # int [N]: the trajectory of a turn, increasing
  number: np.ndarray  # int [N]: of the turn within its trajectory
  start: np.ndarray  # int [N]: its first loss token
  turns: Sequence[np.ndarray]  # B int [n]: index (< N) at loss tokens, else -1

  def totals(self, values: Sequence[np.ndarray]) -> np.ndarray:
    """float64 [N]: what each turn earned, from values of tokens, B arrays [n].

    What is given between two turns is earned by the earlier one; what is given
    before the first one counts for nothing.
    """
    out = [np.zeros(0)]
    for i, value in enumerate(values):
      at = self.start[self.owner == i]
      if len(at):
        out.append(np.add.reduceat(np.asarray(value, np.float64), at))
    return np.concatenate(out)

  def discounted(self, values: np.ndarray, gamma: float) -> np.ndarray:
    """float64 [N]: x_k + gamma x_(k+1) + ... over a trajectory's turns."""
    out = np.array(values, np.float64)
    for i in reversed(range(len(out) - 1)):
      if self.owner[i] == self.owner[i + 1]:
        out[i] += gamma * out[i + 1]
    return out

  def shuffled(self, values: np.ndarray) -> np.ndarray:
    """float64 [N]: a trajectory's values, dealt to its turns by `order`.

    A control: which turn earned what is lost, the sum is not.
    """
    out = np.array(values, np.float64)
    for i, trajectory in enumerate(self.trajectories):
      at = np.flatnonzero(self.owner == i)
      out[at] = out[at[order(trajectory, len(at))]]
    return out

  def over_tokens(self, values: np.ndarray) -> list[np.ndarray]:
    """B float32 arrays [n]: at a loss token its turn's value, else 0."""
    padded = np.append(values, 0.0).astype(np.float32)
    return [padded[turn] for turn in self.turns]

  def labels(self, name: str) -> np.ndarray:
    """int [N]: equal for turns that are alike, to be crossed with the group.

    Args:
      name: 'role' of the trajectory; 'anchor', what the turn follows (GiGPO,
        arXiv 2505.10978, groups by it): the kinds of the environment's
        segments, and the set of what each tool found there: the ids of
        passages, and texts, compared exactly, where the paper's search
        variant compares texts of passages too; or a name in
        `Trajectory.meta`, where a sampler has put a label, or a list with one
        for each turn (a tree, its nodes). Failed trajectories need none.

    Raises:
      ValueError: a trajectory lacks the label, or has not one for each turn.
    """
    turns = zip(self.owner.tolist(), self.number.tolist())
    labels = [self._label(name, *turn) for turn in turns]
    first = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return np.array([first[label] for label in labels], int)

  def _label(self, name: str, owner: int, number: int) -> Hashable:
    trajectory, spans = self.trajectories[owner], self.spans[owner]
    if name == 'role':
      return trajectory.role
    if name == 'anchor':
      before = [s for s in spans if s.turn == number - 1]
      read = [s for s in before if s.segment.author == 'environment']
      found = frozenset(x for s in read for r in s.results for x in _names(r))
      return number > 0, tuple(s.segment.kind for s in read), found
    label = trajectory.meta.get(name)
    if trajectory.failed:  # in no statistic
      return None
    n = spans[-1].turn + 1
    if isinstance(label, (list, tuple)) and len(label) == n:
      return label[number]
    lookup.require(
      label is not None and not isinstance(label, (list, tuple)),
      f'trajectory {trajectory.id}: meta[{name!r}]={label} is no label, nor a '
      f'list of one for each of {n} turns; the sampler has to set it',
    )
    return label


def of(
  trajectories: Sequence[Trajectory], masks: Sequence[np.ndarray]
) -> Structure:
  """The structure of B trajectories.

  Args:
    trajectories: in the order of the batch.
    masks: B bool arrays [n], their loss tokens (`batching.masks`).

  Raises:
    ValueError: observations and searches of a trajectory do not match.
  """
  spans = [spans_of(t) for t in trajectories]
  listed, turns, n = [np.zeros((3, 0), int)], [], 0
  for i, (found, mask) in enumerate(zip(spans, masks, strict=True)):
    turns_of = [s.turn if s.acts else -1 for s in found]
    number = np.repeat(turns_of, [s.end - s.start for s in found])
    at = np.flatnonzero(mask & (number >= 0))
    present, first, index = np.unique(
      number[at], return_index=True, return_inverse=True
    )
    listed.append(np.stack([np.full(len(first), i), present, at[first]]))
    turn = np.full(len(mask), -1)
    turn[at] = n + index
    turns.append(turn)
    n += len(first)
  owner, numbers, start = np.concatenate(listed, axis=1)
  return Structure(trajectories, spans, owner, numbers, start, turns)


def order(trajectory: Trajectory, n: int, step: int = 0) -> np.ndarray:
  """A random order of n turns that depends on question, sample and step."""
  name = zlib.crc32(trajectory.question.id.encode())
  return np.random.default_rng([name, trajectory.sample, step]).permutation(n)


def spans_of(trajectory: Trajectory) -> tuple[Span, ...]:
  """The spans of the segments that the trainer sees.

  Raises:
    ValueError: it has observations that no search of it explains.
  """
  found = []
  searches = itertools.groupby(trajectory.searches, lambda r: r.request.turn)
  for _, answers in searches:
    found.append(tuple(r for r in answers if isinstance(r, SearchResult)))
  # The last search may have none: it failed, or there was no room.
  here = sum(map(_observes, trajectory.trained))
  all_ = sum(map(_observes, trajectory.segments))
  lookup.require(
    here == all_ <= len(found),
    f'trajectory {trajectory.id} trains on {here} of {all_} observations, with '
    f'searches in {len(found)} turns: which passages they show is unknown',
  )
  shown, out = iter(found), []
  at, turn, answered = 0, -1, True
  for s in trajectory.trained:
    if s.author in ACTORS:
      turn += answered
      answered = False
    elif s.author == 'environment':
      answered = True
    results = next(shown) if _observes(s) else ()
    out.append(Span(at, at + len(s.ids), turn, s, results))
    at += len(s.ids)
  return tuple(out)


def _names(result: SearchResult) -> list[tuple[str, str, str]]:
  """Whose an answer is, its text, and its passages by source and id."""
  tool = result.request.tool
  found = [(tool, 'passage', p.id) for p in result.passages]
  return [(tool, 'text', result.text), *found]


def _observes(segment: Segment) -> bool:
  return (segment.author, segment.kind) == ('environment', 'information')
