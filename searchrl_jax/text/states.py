"""States and actions of the environment.

`env.SearchEnv` makes them. The driver answers a `Generate` with a Completion
and a `Search` with results, until `Done`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import TypeVar

import numpy as np

from searchrl_jax import types
from searchrl_jax.engines.core import Completion
from searchrl_jax.text.calls import Call
from searchrl_jax.text.parser import Block, Parser


@dataclasses.dataclass(frozen=True)
class Generate:
  """Asks for at most max_tokens of `agent`.

  prompt: the sequence to open (from reset only). keep: how many tokens of the
  sequence stay, where a new `context` begins; None = all. append: ids to append
  then, before the generation, of which the first `carried` stood in an earlier
  context. The segments of a state without contexts are the whole sequence; to
  return to an older state, truncate the sequence to its `length`.
  """

  agent: str
  max_tokens: int
  stops: tuple[str, ...]
  stop_ids: tuple[int, ...]
  append: tuple[int, ...] = ()
  prompt: types.Prompt | None = None
  context: int = 0
  keep: int | None = None
  carried: int = 0


@dataclasses.dataclass(frozen=True)
class Search:
  """Asks for an answer to every request, in the same order.

  Requests have query, k, question, turn, tool and earlier answers; the driver
  fills in the trajectory and the training step.
  """

  requests: tuple[types.SearchRequest, ...]


@dataclasses.dataclass(frozen=True)
class Done:
  """The attempt has ended; `SearchEnv.trajectory(state)` is its record."""

  end: str  # one of types.ENDS


Action = Generate | Search | Done
Event = Completion | Sequence[types.SearchResult | types.SearchError]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
  """What was written, and what the engine's sequence holds; immutable.

  Attributes:
    segments, contexts: see `types.Trajectory`.
    held: the sequence, where a change of context made it another than
      `segments`.
    keep: tokens of the sequence that stay, if a context begins with the next
      call of the engine.
    length: tokens of the sequence, with those that are to be appended, and in
      the middle of a step of the environment those that are to be added.
  """

  segments: tuple[types.Segment, ...] = ()
  contexts: tuple[types.Context, ...] = ()
  held: tuple[types.Segment, ...] | None = None
  keep: int | None = None
  length: int = 0

  @property
  def sequence(self) -> tuple[types.Segment, ...]:
    return self.segments if self.held is None else self.held

  @property
  def ids(self) -> np.ndarray:
    """int32 [length]."""
    return np.concatenate(
      [np.zeros(0, np.int32), *(s.ids for s in self.sequence)]
    )


_Record = TypeVar('_Record', bound=Record)


def add(record: _Record, new: Iterable[types.Segment]) -> _Record:
  """The record with more segments at the end of the sequence."""
  segments, held = record.segments, record.held
  for segment in new:
    segments = types.joined(segments, segment)
    held = held and types.joined(held, segment)
  return dataclasses.replace(record, segments=segments, held=held)


def begin(
  record: _Record, held: Sequence[types.Segment], reason: str
) -> _Record:
  """The record with another sequence, a new context."""
  before, ids = record.ids, np.concatenate([s.ids for s in held])
  n = min(len(before), len(ids))
  differ = np.flatnonzero(before[:n] != ids[:n])
  start = types.length(record.segments)
  context = types.Context(start, ids.astype(np.int32), reason)
  return dataclasses.replace(
    record,
    held=tuple(held),
    contexts=(*record.contexts, context),
    keep=int(differ[0]) if differ.size else n,
    length=len(ids),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class State(Record):
  """The state of one attempt; immutable.

  length: number of tokens of the sequence. turn: index of the turn.
  turn_tokens: number sampled in this turn. pending: the action that waits for
  its event. blocks: those of the policy that have ended. held: the sequence,
  where a change of context made it another than `segments`. notes: what the
  policy wrote to carry over (kind, ids). calls: of the last turn with calls.
  """

  question: types.Question
  role: str
  agent: str
  parser: Parser
  pending: Action
  turn: int = 0
  used: int = 0  # turns of this attempt; env.max_turns is the last one
  attempt: int = 0
  asked: str = ''  # the block that the policy was asked for
  notes: tuple[tuple[str, np.ndarray], ...] = ()
  noted: tuple[int, ...] = ()  # turns in which it was asked for one
  turn_tokens: int = 0
  generations: int = 0
  blocks: tuple[Block, ...] = ()
  calls: tuple[Call, ...] = ()
  searches: tuple[types.SearchResult | types.SearchError, ...] = ()
  query_entropy: float | None = None  # of the last query, for search_when
  invalid_actions: int = 0
  truncated_turns: int = 0  # ended by a token limit, without an action
  cut_observations: int = 0  # passages left out or cut, to fit
  # Turn of calls -> tokens that each answer was cut to. JSON has no other keys.
  shares: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    return f'{self.question.id}/{self.role}'

  @property
  def end(self) -> str | None:
    return self.pending.end if isinstance(self.pending, Done) else None
