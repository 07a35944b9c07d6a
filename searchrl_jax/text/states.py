"""States and actions of the environment.

`env.SearchEnv` makes them. The driver answers a `Generate` with a Completion
and a `Search` with results, until `Done`.
"""

from collections.abc import Sequence
import dataclasses

from searchrl_jax import types
from searchrl_jax.engines.core import Completion
from searchrl_jax.text.parser import Block, Parser


@dataclasses.dataclass(frozen=True)
class Generate:
  """Asks for at most max_tokens of `agent`.

  prompt: the sequence to open (from reset only). append: ids to append before
  the generation. Both are also the last segments of the state. The segments of
  a state are the whole sequence; to return to an older state, truncate the
  sequence to its `length`.
  """

  agent: str
  max_tokens: int
  stops: tuple[str, ...]
  stop_ids: tuple[int, ...]
  append: tuple[int, ...] = ()
  prompt: types.Prompt | None = None


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


@dataclasses.dataclass(frozen=True)
class State:
  """The state of one attempt; immutable.

  length: number of tokens of the sequence. turn: index of the turn; max_turns
  is the last one. turn_tokens: number sampled in this turn. pending: the action
  that waits for its event. blocks: those of the policy that have ended.
  """

  question: types.Question
  role: str
  agent: str
  segments: tuple[types.Segment, ...]
  length: int
  parser: Parser
  pending: Action
  turn: int = 0
  turn_tokens: int = 0
  generations: int = 0
  blocks: tuple[Block, ...] = ()
  searches: tuple[types.SearchResult | types.SearchError, ...] = ()
  query_entropy: float | None = None  # of the last query, for search_when
  invalid_actions: int = 0
  truncated_turns: int = 0  # ended by a token limit, without an action
  cut_observations: int = 0  # passages left out or cut, to fit

  @property
  def name(self) -> str:
    return f'{self.question.id}/{self.role}'

  @property
  def end(self) -> str | None:
    return self.pending.end if isinstance(self.pending, Done) else None
