"""One attempt at a question: where it stands, and what it waits for.

`env.SearchEnv` makes these; the driver answers a `Generate` with a Completion
and a `Search` with results, until `Done`.
"""

from collections.abc import Sequence
import dataclasses

from searchrl_jax.engines.core import Completion
from searchrl_jax.text.parser import Parser
from searchrl_jax.types import (
  Prompt,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
)


@dataclasses.dataclass(frozen=True)
class Generate:
  """Let `agent` write at most max_tokens.

  prompt: the sequence to open (reset alone). append: what comes before the
  generation otherwise. Both are also the last segments of the state, whose
  segments are always the whole sequence: to go back to an older state, cut
  the sequence to its `length`.
  """

  agent: str
  max_tokens: int
  stops: tuple[str, ...]
  stop_ids: tuple[int, ...]
  append: tuple[int, ...] = ()
  prompt: Prompt | None = None


@dataclasses.dataclass(frozen=True)
class Search:
  """Answer every request; step takes the answers in the same order.

  The requests say query, k, question and turn; whose trajectory they belong
  to, and in which training step, is the driver's to fill in.
  """

  requests: tuple[SearchRequest, ...]


@dataclasses.dataclass(frozen=True)
class Done:
  """It is over; `SearchEnv.trajectory(state)` is the record."""

  end: str  # one of types.ENDS


Action = Generate | Search | Done
Event = Completion | Sequence[SearchResult | SearchError]


@dataclasses.dataclass(frozen=True)
class State:
  """Everything about one attempt so far; never changed in place.

  length: tokens in the sequence. turn: index of the turn, max_turns = the last
  one. turn_tokens: sampled in this turn. pending: the action that waits for
  its event.
  """

  question: Question
  role: str
  agent: str
  segments: tuple[Segment, ...]
  length: int
  parser: Parser
  pending: Action
  turn: int = 0
  turn_tokens: int = 0
  generations: int = 0
  searches: tuple[SearchResult | SearchError, ...] = ()
  query_entropy: float | None = None  # of the last query, where it decides
  invalid_actions: int = 0
  truncated_turns: int = 0  # ended by a token limit, without an action
  cut_observations: int = 0  # passages left out or cut, to fit

  @property
  def name(self) -> str:
    return f'{self.question.id}/{self.role}'

  @property
  def end(self) -> str | None:
    return self.pending.end if isinstance(self.pending, Done) else None
