r"""The multi-turn text state machine between a policy and its searches.

    reset -> Generate
    Generate's Completion -> Search    a search block was closed, and may act
                          -> Done      an answer block was closed ('answer')
                          -> Generate  neither: an invalid action, with feedback
    Search's results      -> Generate  the observation is appended
                          -> Done      a search failed for good ('failed')

Of max_turns + 1 turns the last cannot search: its generation does not stop at
the closing search tag. A turn that ends by eos or by its token limit without
an action is an invalid action; the sampled eos stays recorded and trained on.
On the last turn it ends the trajectory ('eos', else 'turns'). Whatever does
not fit into max_tokens ends it too ('tokens'), never exceeding it.

information='policy' (SSRL): no search is sent; the policy writes its own
information, and a generation stops at the closing answer tag alone. A stop
inside its information is a quotation: the same turn goes on. max_turns=0 makes
one generation of it, as the paper has.

answer='boxed' (mathematics): the answer is what stands in the last \boxed{...}
that the policy wrote outside blocks, or in an answer block; a turn that ends by
eos and has one ends the trajectory ('answer').

real_searches=K (sim-to-real) sends the first K searches of such a trajectory
all the same, -1 all of them; generations stop at the closing search tag until
then. search_when='entropy' sends, after the first, only queries that the
policy was less sure of than of the one before: whose mean predictive entropy
is higher. `entropy` tells it; the driver sets it.

States are immutable: an older one can be stepped again (a tree). Policy ids
are recorded as sampled and never encoded again. No JAX here.
"""

from collections.abc import Callable, Sequence
import dataclasses
import itertools

import numpy as np

from searchrl_jax.engines.core import Completion
from searchrl_jax.run import lookup
from searchrl_jax.text import parser as parsing
from searchrl_jax.text import untrusted
from searchrl_jax.text.parser import Block, Parser
from searchrl_jax.text.states import (
  Action,
  Done,
  Event,
  Generate,
  Search,
  State,
)
from searchrl_jax.types import (
  Passage,
  Prompt,
  Question,
  SearchError,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
  joined,
)

INFORMATION = ('source', 'policy')
SEARCH_WHEN = ('always', 'entropy')
ANSWERS = ('tags', 'boxed')
# The ids of a sequence -> the entropy of the distribution that each was drawn
# from, in nats.
Entropy = Callable[[np.ndarray], np.ndarray]


class SearchEnv:
  """The protocol of one template, with the budgets of config.env.

  Args:
    tokenizer: tokenizer.Tokenizer.
    template: prompts.Template.
    config: config.env; see run/schema.py for its fields.
    prompt_mode: config.data.prompt, 'template' or 'as_is'.
    k: passages asked for with each query.

  Raises:
    ValueError: a budget that leaves no room, or an unknown mode.
  """

  def __init__(self, tokenizer, template, config, prompt_mode: str, k: int):
    self.tokenizer = tokenizer
    self.template = template
    self.config = config
    self.prompt_mode = prompt_mode
    self.k = k
    lookup.require(
      prompt_mode in ('template', 'as_is'),
      f"data.prompt={prompt_mode!r} is neither 'template' nor 'as_is'",
    )
    lookup.require(
      config.information in INFORMATION,
      f'env.information={config.information!r} is none of {INFORMATION}',
    )
    lookup.require(
      config.search_when in SEARCH_WHEN,
      f'env.search_when={config.search_when!r} is none of {SEARCH_WHEN}',
    )
    lookup.require(
      config.answer in ANSWERS,
      f'env.answer={config.answer!r} is none of {ANSWERS}',
    )
    lookup.require(k >= 1, f'source.k={k}: at least 1 passage for a query')
    lookup.require(
      config.max_turns >= 0, f'env.max_turns={config.max_turns} is negative'
    )
    for field in ('max_turn_tokens', 'max_tokens'):
      value = getattr(config, field)
      lookup.require(value >= 1, f'env.{field}={value} must be at least 1')
    self._searching = config.information == 'source'
    self._guided = config.search_when == 'entropy'
    lookup.require(
      not (self._searching and (config.real_searches or self._guided)),
      f'env.real_searches={config.real_searches}, search_when='
      f"{config.search_when!r} choose among a policy's own searches; with "
      "information='source' all are real: use 0 and 'always'",
    )
    lookup.require(
      config.real_searches >= -1 and (config.real_searches or not self._guided),
      f'env.real_searches={config.real_searches}: how many of a trajectory, '
      "or -1 for all; search_when='entropy' needs some",
    )
    self.entropy: Entropy | None = None
    self._tags = parsing.tags_of(template)
    self._observe = untrusted.Observer(tokenizer, template)
    self._invalid = tokenizer.encode_template(template.invalid)
    note = template.last_turn if self._searching else ''
    self._note = tokenizer.encode_template(note)
    # The shortest answer must still fit after anything that is appended.
    answer = tokenizer.encode_template(''.join(template.answer))
    self._reserve = len(answer) + 1
    reads = self._searching or config.real_searches
    lookup.require(
      not reads or config.max_observation_tokens >= self._observe.least,
      f'env.max_observation_tokens={config.max_observation_tokens} is below '
      f'the {self._observe.least} tokens of an observation without passages '
      f'in template {template.name!r}',
    )

  # The contract.

  def reset(
    self, question: Question, role: str = 'solver', agent: str = 'policy'
  ) -> tuple[State, Generate]:
    """Starts an attempt; all samples of a question may share the state.

    Raises:
      ValueError: the prompt leaves no room under env.max_tokens; or
        data.prompt='as_is' and the question has no messages.
    """
    parts = untrusted.prompt_parts(
      self.template, question, self.prompt_mode, self.tokenizer
    )
    ids = self.tokenizer.encode_parts(parts, start=True)
    segments = joined((), _segment(ids, 'prompt', 'other', agent))
    note = self._note_before(0)
    ids = (*ids, *note)
    segments = joined(segments, _segment(note, 'environment', 'other', agent))
    if len(ids) >= self.config.max_tokens:
      raise ValueError(
        f'question {question.id!r}: its prompt has {len(ids)} tokens, and '
        f'env.max_tokens={self.config.max_tokens} counts prompt, replies and '
        'observations; raise it or leave the question out'
      )
    state = State(
      question=question,
      role=role,
      agent=agent,
      segments=segments,
      length=len(ids),
      parser=parsing.start(self._tags, ''.join(text for text, _ in parts)),
      pending=Done('tokens'),
    )
    return _next(state, self._generate(state, prompt=Prompt(ids)))

  def step(self, state: State, event: Event) -> tuple[State, Action]:
    """Takes the event that the last action asked for.

    Raises:
      ValueError: an event that does not answer the pending action.
    """
    if isinstance(state.pending, Generate) and isinstance(event, Completion):
      return self._completed(state, event)
    if isinstance(state.pending, Search) and isinstance(event, (list, tuple)):
      return self._searched(state, tuple(event))
    raise ValueError(
      f'trajectory {state.name} waits for the event of '
      f'{type(state.pending).__name__}, got {type(event).__name__}'
    )

  def trajectory(
    self, state: State, sample: int = 0, seconds: float = 0.0
  ) -> Trajectory:
    """The record of a finished attempt. Counters are in its `meta`.

    Raises:
      ValueError: the state is not at its end.
    """
    if state.end is None:
      raise ValueError(
        f'trajectory {state.name} is not over: it waits for the event of '
        f'{type(state.pending).__name__}'
      )
    out = Trajectory(
      question=state.question,
      segments=state.segments,
      searches=state.searches,
      end=state.end,
      sample=sample,
      role=state.role,
      invalid_actions=state.invalid_actions,
      turns=state.generations,
      seconds=seconds,
      meta={
        'truncated_turns': state.truncated_turns,
        'cut_observations': state.cut_observations,
      },
    )
    self.blocks(out)  # while others are sampled, not when all have ended
    return out

  # What rewards read.

  def blocks(self, trajectory: Trajectory) -> tuple[Block, ...]:
    """What follows the prompt, block by block; see parser.blocks.

    A trajectory is parsed once and keeps the result.
    """
    known = trajectory.parsed
    if self not in known:
      known[self] = self._blocks(trajectory.segments)
    return known[self]

  def answer(self, trajectory: Trajectory) -> str | None:
    """The policy's last complete answer, or None. Only this can earn."""
    return parsing.answer(self.blocks(trajectory), self.config.answer)

  def _blocks(self, segments: tuple[Segment, ...]) -> tuple[Block, ...]:
    return parsing.blocks(segments, self.template, self.tokenizer)

  def observation(self, passages: Sequence[Passage]) -> str:
    """What these passages are told as, by the source or by the policy."""
    limit = self.config.max_observation_tokens
    return self.tokenizer.decode(self._observe(passages, limit)[0])

  # After a generation.

  def _completed(self, state: State, completion: Completion):
    n = len(completion.ids)
    if n > state.pending.max_tokens:
      raise ValueError(
        f'trajectory {state.name}: the engine sampled {n} tokens, asked for '
        f'at most {state.pending.max_tokens}'
      )
    if len(completion.logps) != n or len(completion.versions) != n:
      raise ValueError(
        f'trajectory {state.name}: {n} ids with {len(completion.logps)} logps '
        f'and {len(completion.versions)} versions'
      )
    ids = np.asarray(completion.ids, np.int32)
    pieces = [*map(self.tokenizer.token_bytes, ids.tolist())]
    parser, kinds, blocks = state.parser.feed(pieces)
    action = self._action(state, blocks)
    state = dataclasses.replace(
      state,
      length=state.length + n,
      turn_tokens=state.turn_tokens + n,
      generations=state.generations + 1,
    )
    if action is not None and action.kind == 'search' and self._guided:
      entropy = self._entropy(self._written(state, completion, kinds))
      if state.query_entropy is not None and entropy <= state.query_entropy:
        action = None  # the policy answers it itself
      state = dataclasses.replace(state, query_entropy=entropy)
    goes_on = action is None and self._goes_on(state, parser, completion)
    if not goes_on:
      # A token that waited stands outside all blocks; its kind is certain now.
      parser, more, _ = parser.finish()
      kinds = kinds + more
    state = dataclasses.replace(
      state, parser=parser, segments=self._written(state, completion, kinds)
    )
    if goes_on:
      return _next(state, self._generate(state))
    if action is None:
      return self._without_action(state, completion.stop)
    if action.kind == 'answer':
      return _next(state, Done('answer'))
    if self._room(state) < self._observe.least:
      return _next(state, Done('tokens'))
    requests = tuple(
      SearchRequest(
        query=query, k=self.k, question=state.question, turn=state.turn
      )
      for query in self._queries(action.text)
    )
    return _next(state, Search(requests))

  def _action(self, state: State, found) -> Block | None:
    """The first block that acts among those that ended."""
    may_search = self._may_search(state)
    for one in found:
      block = parsing.make_block(one, 'policy', state.turn)
      if block.kind == 'answer' or (
        block.kind == 'search' and may_search and self._queries(block.text)
      ):
        return block
    return None

  def _queries(self, text: str) -> list[str]:
    separator = self.template.query_separator
    queries = text.split(separator) if separator else [text]
    found = list(dict.fromkeys(q.strip() for q in queries if q.strip()))
    return found[: self.template.max_queries]

  def _goes_on(self, state: State, parser: Parser, completion) -> bool:
    """A stop string quoted in policy-written information ends no turn, nor
    does a closing search tag where no search is sent."""
    return (
      not self._searching
      and (
        parser.block == 'information'
        or completion.stop == self.template.search[1]
      )
      and completion.stop not in ('eos', 'length')
      and len(completion.ids) > 0
      and state.turn_tokens < self.config.max_turn_tokens
      and state.length < self.config.max_tokens
    )

  def _entropy(self, segments: tuple[Segment, ...]) -> float:
    """Mean entropy of the tokens of the query that was just written."""
    if self.entropy is None:
      raise ValueError(
        "env.search_when='entropy' needs the entropies of the policy, which "
        'the self-search evaluation gives: python -m searchrl_jax.evaluate'
      )
    ids = np.concatenate([s.ids for s in segments])
    # A token that straddles two kinds is the earlier segment's: the tag may
    # begin there.
    turn = [s for s in segments if s.author == 'policy'][-2:]
    pieces = [self.tokenizer.token_bytes(i) for s in turn for i in s.ids]
    first = len(ids) - len(pieces)
    found = parsing.within(pieces, *self.template.search)
    return float(np.mean(self.entropy(ids)[[first + n for n in found]]))

  def _without_action(self, state: State, stop: str):
    if (
      self.config.answer == 'boxed'
      and stop != 'length'
      and (parsing.answer(self._blocks(state.segments), 'boxed') is not None)
    ):
      return _next(state, Done('answer'))
    full = state.length >= self.config.max_tokens
    state = dataclasses.replace(
      state,
      invalid_actions=state.invalid_actions + (not full),
      truncated_turns=state.truncated_turns + (stop == 'length'),
    )
    if self._last(state.turn) and stop == 'eos':
      return _next(state, Done('eos'))
    if full:
      return _next(state, Done('tokens'))
    if self._last(state.turn):
      return _next(state, Done('turns'))
    if self._room(state) < len(self._invalid):
      return _next(state, Done('tokens'))
    return self._respond(state, self._invalid, 'other')

  def _written(self, state: State, completion, kinds) -> tuple[Segment, ...]:
    """The sampled tokens, exactly, as segments by kind."""
    segments = state.segments
    columns = (
      np.asarray(completion.ids, np.int32),
      np.asarray(completion.logps, np.float32),
      np.asarray(completion.versions, np.int32),
    )
    start = 0
    for kind, run in itertools.groupby(kinds):
      part = slice(start, start := start + len([*run]))
      ids, logps, versions = (column[part] for column in columns)
      segments = joined(
        segments,
        Segment(
          ids,
          'policy',
          kind,
          state.agent,
          train=self._trained(kind),
          logps=logps,
          versions=versions,
        ),
      )
    return segments

  def _trained(self, kind: str) -> bool:
    """Where a source answers, information that the policy writes is a forgery
    of its own, and learnt from like any other act."""
    return (
      kind != 'information'
      or self._searching
      or bool(self.config.train_information)
    )

  # After a search.

  def _searched(self, state: State, results: tuple):
    requests = state.pending.requests
    if len(results) != len(requests):
      raise ValueError(
        f'trajectory {state.name}: {len(results)} answers to {len(requests)} '
        'search requests'
      )
    for result in results:
      if not isinstance(result, (SearchResult, SearchError)):
        raise ValueError(
          f'trajectory {state.name}: a search was answered with '
          f'{type(result).__name__}, neither SearchResult nor SearchError'
        )
    state = dataclasses.replace(state, searches=state.searches + results)
    if any(isinstance(r, SearchError) for r in results):
      return _next(state, Done('failed'))
    passages = [p for r in results for p in r.passages]
    limit = min(self.config.max_observation_tokens, self._room(state))
    ids, cut = self._observe(passages, limit)
    state = dataclasses.replace(
      state, cut_observations=state.cut_observations + cut
    )
    if not ids:
      return _next(state, Done('tokens'))
    return self._respond(state, ids, 'information')

  # What every step shares.

  def _may_search(self, state: State) -> bool:
    if self._searching:
      return not self._last(state.turn)
    real = self.config.real_searches
    return real < 0 or len(state.searches) < real

  def _last(self, turn: int) -> bool:
    return turn >= self.config.max_turns

  def _note_before(self, turn: int) -> list[int]:
    return self._note if self._last(turn) else []

  def _room(self, state: State) -> int:
    """Tokens that a response may have: the note of a last turn, and an
    answer, must fit behind it."""
    note = len(self._note_before(state.turn + 1))
    return self.config.max_tokens - state.length - note - self._reserve

  def _generate(self, state: State, append=(), prompt=None) -> Generate:
    return Generate(
      agent=state.agent,
      max_tokens=min(
        self.config.max_turn_tokens - state.turn_tokens,
        self.config.max_tokens - state.length,
      ),
      stops=self.template.stops_for(self._may_search(state)),
      stop_ids=self.tokenizer.eos_ids,
      append=tuple(append),
      prompt=prompt,
    )

  def _respond(self, state: State, ids: Sequence[int], kind: str):
    """The environment's part, then the next turn."""
    note = self._note_before(state.turn + 1)
    agent, train = state.agent, bool(self.config.train_observations)
    segments = joined(
      state.segments, _segment(ids, 'environment', kind, agent, train)
    )
    segments = joined(
      segments, _segment(note, 'environment', 'other', agent, train)
    )
    state = dataclasses.replace(
      state,
      segments=segments,
      length=state.length + len(ids) + len(note),
      parser=Parser(self._tags),
      turn=state.turn + 1,
      turn_tokens=0,
    )
    return _next(state, self._generate(state, append=[*ids, *note]))


def _next(state: State, action: Action) -> tuple[State, Action]:
  return dataclasses.replace(state, pending=action), action


def _segment(
  ids, author: str, kind: str, agent: str, train: bool = False
) -> Segment:
  return Segment(np.asarray(ids, np.int32), author, kind, agent, train)
