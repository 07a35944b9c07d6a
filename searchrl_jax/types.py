"""Data passed between the stages: frozen records with documented shapes.

Axis letters: B trajectories (of a Batch: its rows, with N trajectories), G
group, T tokens, P passages, n tokens of a segment. This module does not import
JAX.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

AUTHORS = ('prompt', 'policy', 'environment', 'teacher')
ACTORS = ('policy', 'teacher')  # a teacher, in the policy's place
SEARCH = 'search'  # the tool that config.source is; others: config.tools
# How a trajectory can end. `failed` means that a service failed (design 5.4):
# the trajectory is left out of its group's statistics and of the loss.
ENDS = ('answer', 'eos', 'turns', 'tokens', 'failed')


@dataclasses.dataclass(frozen=True)
class Question:
  """One question. `answers` may be empty (unlabelled data)."""

  id: str
  text: str
  answers: tuple[str, ...] = ()
  source: str = ''  # the data set it comes from
  hops: int = 0  # 0 = unknown
  supporting: tuple[str, ...] = ()  # corpus ids of the passages that answer it
  # A ready-made prompt (chat messages), used when data.prompt = 'as_is'.
  messages: tuple[Mapping[str, str], ...] = ()
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Prompt:
  ids: tuple[int, ...]
  media: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Segment:
  """A run of token ids with one author and one kind, written once."""

  ids: np.ndarray  # int32 [n]
  author: str  # one of AUTHORS
  kind: str  # the name of a block of the template, or 'other': outside blocks
  agent: str = 'policy'  # the acting role: policy, proposer, solver, ...
  # Whether the tokens are in the loss if the trajectory is kept
  # (`batching.kept_of`); the first token of a sequence never is.
  train: bool = False
  logps: np.ndarray | None = None  # float32 [n], of the sampling distribution
  versions: np.ndarray | None = None  # int32 [n], policy updates behind it

  def __post_init__(self):
    if self.author not in AUTHORS:
      raise ValueError(f'Segment.author={self.author!r} is none of {AUTHORS}')
    if not self.kind.isidentifier():
      raise ValueError(f'Segment.kind={self.kind!r} is not the name of a block')
    for value in (self.logps, self.versions):
      if value is not None and len(value) != len(self.ids):
        raise ValueError(f'{len(value)} values for {len(self.ids)} ids')


def joined(segments: tuple[Segment, ...], new: Segment) -> tuple[Segment, ...]:
  """Appends a segment, or extends the last one if the attributes are equal."""
  if not len(new.ids):
    return segments
  same = ('author', 'kind', 'agent', 'train')
  last = segments[-1] if segments else None
  if last is None or any(getattr(last, f) != getattr(new, f) for f in same):
    return (*segments, new)
  whole = {
    f: np.concatenate([getattr(last, f), getattr(new, f)])
    for f in ('ids', 'logps', 'versions')
    if getattr(last, f) is not None
  }
  return (*segments[:-1], dataclasses.replace(last, **whole))


def length(segments: Sequence[Segment]) -> int:
  """The number of their tokens."""
  return sum(len(s.ids) for s in segments)


def cut(
  segments: Sequence[Segment], start: int, stop: int | None = None
) -> tuple[Segment, ...]:
  """The segments of tokens start <= t < stop."""
  out, at = [], 0
  for s in segments:
    part = slice(max(start - at, 0), None if stop is None else stop - at)
    at += len(s.ids)
    if at <= start or stop is not None and part.stop <= part.start:
      continue
    columns = {f: getattr(s, f) for f in ('ids', 'logps', 'versions')}
    cut_ = {f: x[part] for f, x in columns.items() if x is not None}
    out.append(dataclasses.replace(s, **cut_))
  return tuple(out)


@dataclasses.dataclass(frozen=True)
class Context:
  """Where a trajectory went on from other tokens than all that it had so far.

  Attributes:
    start: tokens of `Trajectory.segments` before it.
    prompt: int32 [n], the tokens that it began with, in place of those: what
      was kept of them and what the environment put beside it.
    reason: dropped (old observations), or the block that was asked for.
  """

  start: int
  prompt: np.ndarray
  reason: str


@dataclasses.dataclass(frozen=True)
class Passage:
  id: str
  title: str
  text: str
  score: float | None = None


@dataclasses.dataclass(frozen=True)
class SearchRequest:
  """One query to a tool, with its origin for simulators and logs.

  earlier: previous results of any tool in the trajectory, oldest first; it has
  no errors, because an error ends the trajectory.
  """

  query: str
  k: int
  question: Question | None = None
  trajectory: str = ''  # Trajectory.id
  turn: int = 0
  step: int = 0  # training step, for curricula
  tool: str = SEARCH
  # Not compared or printed, because each request contains all before it.
  earlier: tuple['SearchResult | SearchError', ...] = dataclasses.field(
    default=(), repr=False, compare=False
  )


@dataclasses.dataclass(frozen=True)
class SearchResult:
  """The answer of a tool: passages, or a text."""

  request: SearchRequest
  passages: tuple[Passage, ...]
  seconds: float = 0.0
  text: str = ''  # shown in place of passages, if it is not empty
  cost: float = 0.0  # of the call, in the tool's unit

  @property
  def shown(self) -> tuple[Passage | str, ...]:
    """What the observation shows."""
    return (self.text,) if self.text else self.passages


@dataclasses.dataclass(frozen=True)
class SearchError:
  request: SearchRequest
  kind: str  # unreachable, timeout, overloaded, bad_response, ...
  message: str


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One attempt at one question.

  `segments` has each token once, in the order in which it was written. The
  sequence that a token follows is in `rows`: usually all before it, after a
  change of context what that began with and what was written since.
  """

  question: Question
  segments: tuple[Segment, ...]
  searches: tuple[SearchResult | SearchError, ...]  # of all tools; see `calls`
  end: str  # one of ENDS
  sample: int = 0  # index within its group
  role: str = 'solver'
  invalid_actions: int = 0
  turns: int = 0
  seconds: float = 0.0
  # Segments to train on when they differ from those it was sampled with
  # (e.g. a hint that it was sampled with but is not trained with).
  train_context: tuple[Segment, ...] | None = None
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  contexts: tuple[Context, ...] = ()  # after the first, in order
  # Of each context, which experts its tokens used when it was sampled: int16
  # [n, L, k], see `JaxEngine.routes`. (): not known. In no file.
  routes: tuple = dataclasses.field(default=(), repr=False, compare=False)
  # What it took to sample it, by the counters of `rollout.core.RolloutStats`:
  # for a later start of its step. In no file but a checkpoint.
  spent: dict = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )
  # Environment -> the blocks that it reads in it (`SearchEnv.blocks`).
  parsed: dict = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )

  def __post_init__(self):
    if self.end not in ENDS:
      raise ValueError(f'Trajectory.end={self.end!r} is none of {ENDS}')
    if self.contexts and self.train_context is not None:
      raise ValueError('a trajectory with contexts has no train_context')

  def __getstate__(self):
    # An environment, and what it read, belong to their process.
    return vars(self) | {'parsed': {}}

  @property
  def id(self) -> str:
    return f'{self.question.id}/{self.role}/{self.sample}'

  @property
  def failed(self) -> bool:
    return self.end == 'failed'

  @property
  def foreign(self) -> bool:
    """Whether a teacher wrote some of it, which the policy did not sample."""
    return any(s.author == 'teacher' for s in self.trained)

  @property
  def history(self) -> Callable[[int], np.ndarray] | None:
    """`before`, if a program asked for its replies (`rollout.sessions`): the
    text before any turn may open a block, as a chat template does."""
    return self.before if 'edits' in self.meta else None

  @property
  def trained(self) -> tuple[Segment, ...]:
    """The segments that the trainer sees."""
    return self.segments if self.train_context is None else self.train_context

  @property
  def rows(self) -> tuple[tuple[Segment, ...], ...]:
    """The sequences that the trainer sees, one for each context: the prompt
    of a context, and the part of `trained` that was written in it."""
    if not self.contexts:
      return (self.trained,)
    out = [cut(self.trained, 0, self.contexts[0].start)]
    ends = [*(c.start for c in self.contexts[1:]), None]
    for context, end in zip(self.contexts, ends):
      prompt = Segment(context.prompt, 'prompt', 'other')
      out.append((prompt, *cut(self.trained, context.start, end)))
    return tuple(out)

  def before(self, n: int) -> np.ndarray:
    """int32 ids: what a policy has read when n tokens of `trained` exist."""
    start = sum(c.start < n for c in self.contexts)
    prompt, first = np.zeros(0, np.int32), 0
    if start:
      context = self.contexts[start - 1]
      prompt, first = context.prompt, context.start
    own = [s.ids for s in cut(self.trained, first, n)]
    return np.concatenate([prompt, *own]).astype(np.int32)

  def calls(self, tool: str) -> tuple[SearchResult | SearchError, ...]:
    """What a tool answered, in order; that of SEARCH is what was searched."""
    return tuple(s for s in self.searches if s.request.tool == tool)

  def __len__(self) -> int:
    return length(self.segments)


Group = tuple[Trajectory, ...]  # the G trajectories of one question


@dataclasses.dataclass(frozen=True)
class Rewards:
  """Rewards of B trajectories, flat in the order of the groups.

  at='trajectory': value float32 [B]. at='segment' or 'token': a tuple of B
  arrays, one entry for each segment or token of the trajectory.
  """

  value: Any
  valid: np.ndarray  # bool [B]: False = left out of statistics and loss
  at: str = 'trajectory'
  # name -> float [B], what the reward is made of, for the log
  parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Lines(NamedTuple):
  """How the contexts of trajectories are joined: by entry of a `Batch`.

  The line of a trajectory has its contexts one after another, with their
  prompts. Its number is that of the trajectory's first entry in the shard.
  """

  line: np.ndarray  # int32 [N], of the entry's trajectory
  column: np.ndarray  # int32 [N], where it begins in the line
  prompt: np.ndarray  # int32 [N], tokens of the context's prompt
  start: np.ndarray  # int32 [N], tokens of `Trajectory.trained` before it


class PrefixTree(NamedTuple):
  """The trajectories of a microbatch without what they repeat: S rows, one for
  each device along data and fsdp, of M tokens.

  A row holds the nodes of a prefix tree, a token each, in depth-first order.
  Node j is on the way to node i if j <= i < ends[j]; padding is on the way to
  itself alone.
  """

  ids: np.ndarray  # int32 [S, M]
  depths: np.ndarray  # int32 [S, M], a token's position in its trajectories
  ends: np.ndarray  # int32 [S, M]
  at: np.ndarray  # int32 [B, T], the node of each token of the packed rows


@dataclasses.dataclass(frozen=True)
class Batch:
  """Fixed-shape arrays for one update: B packed rows of T tokens.

  A row holds up to N / B trajectories one after another, without gaps, and
  padding after the last. Those of row b are entries b N / B to (b + 1) N / B
  of the arrays [N], in their order in the row. A trajectory of several contexts
  has an entry for each, all in one shard (`lines`).

  Loss positions are target positions: mask[b, t] says that token t is in the
  loss, predicted from the tokens of its trajectory before t, so the first
  token of a trajectory never is.
  """

  ids: np.ndarray  # int32 [B, T]
  starts: np.ndarray  # int32 [N], of a trajectory in its row; T = none
  lengths: np.ndarray  # int32 [N], tokens of a trajectory; 0 = none
  mask: np.ndarray  # bool [B, T]
  behaviour_logps: np.ndarray  # float32 [B, T], 0 outside mask
  advantages: np.ndarray  # float32 [B, T], 0 outside mask
  owner: np.ndarray  # int32 [N], index of the trajectory; -1 = none
  # Where equal beginnings are computed once; None: each row is computed.
  tree: PrefixTree | None = None
  lines: Lines | None = None  # None: each trajectory has one context
  # int16 [B, T, L, k], the experts to use; -1: not known. None: of no token.
  routes: np.ndarray | None = None

  def parts(self) -> Iterator[tuple[int, tuple[int, slice], slice]]:
    """Like `spans`, without the prompts of further contexts, and where the
    tokens are in arrays of the trajectory's own length."""
    entries = np.flatnonzero(self.owner >= 0).tolist()
    for n, (owner, (row, span)) in zip(entries, self.spans()):
      prompt = 0 if self.lines is None else int(self.lines.prompt[n])
      start = 0 if self.lines is None else int(self.lines.start[n])
      span = slice(span.start + prompt, span.stop)
      yield owner, (row, span), slice(start, start + span.stop - span.start)

  def spans(self) -> Iterator[tuple[int, tuple[int, slice]]]:
    """Each entry: its trajectory, and where its tokens are in arrays [B, T]."""
    places = len(self.owner) // len(self.ids)
    for n in np.flatnonzero(self.owner >= 0).tolist():
      start = int(self.starts[n])
      span = slice(start, start + int(self.lengths[n]))
      yield int(self.owner[n]), (n // places, span)

  def nodes(self) -> np.ndarray:
    """bool [S, M]: which tokens of the prefix tree are no padding."""
    if self.tree is None:
      raise ValueError('the batch has no prefix tree')
    at = self.tree.at.reshape(len(self.tree.ids), -1)
    out, filled = np.zeros(self.tree.ids.shape, bool), np.zeros(at.shape, bool)
    for _, span in self.spans():
      filled.reshape(self.ids.shape)[span] = True
    for own, places, real in zip(out, at, filled):
      own[places[real]] = True
    return out
