r"""The environment: a state machine between a policy's text and its tools.

    reset -> Generate
    Generate's Completion -> Search    a block that calls a tool (`search` does)
                                       was closed, and may act
                          -> Done      an answer block, or another that ends
                                       the trajectory, was closed ('answer')
                          -> Generate  otherwise: an invalid action; feedback
    Search's results      -> Generate  the observation is appended
                          -> Done      a search failed after all retries

There are max_turns + 1 turns; the last calls no tool: its generation does not
stop at the closing search tag. A turn that ends by eos or by its token limit
without an action is an invalid action; the sampled eos is recorded and trained
on. On the last turn it ends the trajectory ('eos' or 'turns'). Text that does
not fit into max_tokens ends the trajectory ('tokens'); the limit always holds.

information='policy' (SSRL): no search is sent, the policy writes its own
information, and a generation stops at the closing answer tag only. A stop
string inside its information is a quotation, and the turn continues. With
max_turns=0 there is one generation, as in the paper.

answer='boxed' (mathematics): the answer is the content of the last \boxed{...}
that the policy wrote outside blocks or in an answer block. A turn that ends by
eos and has one ends the trajectory ('answer').

real_searches=K (sim-to-real) sends the first K searches of such a trajectory to
the source; -1 sends all. Until then generations stop at the closing search tag.
search_when='entropy' sends, after the first, only queries whose mean predictive
entropy is higher than that of the query before. The driver sets `entropy`.

States are immutable, so an older state can be stepped again (a tree). Ids of
the policy are recorded as sampled and never encoded again. Imports no JAX.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import itertools

import numpy as np

from searchrl_jax import lookup, types
from searchrl_jax.engines.core import Completion
from searchrl_jax.text import parser as parsing
from searchrl_jax.text import untrusted
from searchrl_jax.text.parser import Block, Parser
from searchrl_jax.text.states import Action, Done, Generate, Search, State

# Ids of a sequence [n] -> entropy in nats of the distribution that each was
# sampled from [n].
Entropy = Callable[[np.ndarray], np.ndarray]


class SearchEnv:
  """The search protocol of one template, with the limits of config.env.

  Args:
    tokenizer: tokenizer.Tokenizer.
    template: prompts.Template.
    config: config.env; see schema.py for its fields.
    prompt_mode: config.data.prompt, 'template' or 'as_is'.
    k: number of passages per query.

  Raises:
    ValueError: fields that cannot be combined, or a limit without room.
  """

  def __init__(self, tokenizer, template, config, prompt_mode: str, k: int):
    self.tokenizer, self.template, self.config = tokenizer, template, config
    self.prompt_mode, self.k = prompt_mode, k
    self.entropy: Entropy | None = None
    self._searching = config.information == 'source'
    self._guided = config.search_when == 'entropy'
    self._tags = parsing.tags_of(template)
    self._check_tags()
    self._observe = untrusted.Observer(tokenizer, template)
    self._invalid = tokenizer.encode_template(template.invalid)
    note = template.last_turn if self._searching else ''
    self._note = tokenizer.encode_template(note)
    # The shortest answer must fit after any text that is appended.
    self._reserve = len(tokenizer.encode_template(''.join(template.answer))) + 1
    real, limit = config.real_searches, config.max_observation_tokens
    further = [kind.name for kind in template.blocks if kind.acts]
    if self._searching:
      given = f'env.real_searches={real}, search_when={config.search_when!r}'
      what = "with information='source' every search is real: use 0, 'always'"
      lookup.require(not (real or self._guided), f'{given}: {what}')
    else:
      what = "env.search_when='entropy' needs env.real_searches, -1 for all"
      lookup.require(real or not self._guided, what)
      what = f"env.information='policy': nothing answers the tools of {further}"
      lookup.require(not further, f"{what}; use 'source'")
    if self._searching or real:
      least = self._observe.least
      given = f'env.max_observation_tokens={limit} is below {least} tokens of'
      lookup.require(limit >= least, f'{given} one without passages')

  def reset(
    self, question: types.Question, role: str = 'solver', agent: str = 'policy'
  ) -> tuple[State, Generate]:
    """Starts an attempt. All samples of a question may share the state.

    Raises:
      ValueError: the prompt is too long for env.max_tokens, or
        data.prompt='as_is' and the question has no messages.
    """
    parts = untrusted.prompt_parts(
      self.template, question, self.prompt_mode, self.tokenizer
    )
    ids = self.tokenizer.encode_parts(parts, start=True)
    note = self._note_before(0)
    added = (ids, 'prompt', 'other'), (note, 'environment', 'other')
    segments = _append((), agent, added)
    ids = (*ids, *note)
    most = self.config.max_tokens
    what = f'question {question.id!r}: its prompt has {len(ids)} tokens of'
    fix = f'env.max_tokens={most}; increase it or leave the question out'
    lookup.require(len(ids) < most, f'{what} {fix}')
    begun = untrusted.begun(self.template, question, self.prompt_mode)
    text = ''.join(text for text, _ in parts)
    parser = parsing.start(self._tags, text, begun)
    state = State(
      question, role, agent, segments, len(ids), parser, Done('tokens')
    )
    return _next(state, self._generate(state, prompt=types.Prompt(ids)))

  def step(self, state: State, event) -> tuple[State, Action]:
    """Processes the event (`states.Event`) that the pending action waits for.

    Raises:
      ValueError: the event does not fit the pending action.
    """
    if isinstance(state.pending, Generate) and isinstance(event, Completion):
      return self._completed(state, event)
    if isinstance(state.pending, Search) and isinstance(event, (list, tuple)):
      return self._searched(state, tuple(event))
    wanted, given = type(state.pending).__name__, type(event).__name__
    what = f'waits for the event of {wanted}, got {given}'
    raise ValueError(f'trajectory {state.name}: {what}')

  def trajectory(
    self,
    state: State,
    sample: int = 0,
    seconds: float = 0.0,
    meta: Mapping | None = None,
  ) -> types.Trajectory:
    """Returns the record of a finished attempt.

    Its `meta` contains counters and the entries of `meta`, from a sampler,
    which a round trip through JSON must not change.

    Raises:
      ValueError: the attempt is not finished.
    """
    pending, ended = type(state.pending).__name__, state.end is not None
    _require(ended, state, f'has not ended: it waits for that of {pending}')
    counters = ('truncated_turns', 'cut_observations')
    out = types.Trajectory(
      question=state.question,
      segments=state.segments,
      searches=state.searches,
      end=state.end,
      sample=sample,
      role=state.role,
      invalid_actions=state.invalid_actions,
      turns=state.generations,
      seconds=seconds,
      meta={name: getattr(state, name) for name in counters} | dict(meta or {}),
    )
    # Done now, while other trajectories are sampled.
    out.parsed[self] = parsing.blocks(
      state.segments, self.template, self.tokenizer, state.blocks
    )
    return out

  def blocks(self, trajectory: types.Trajectory) -> tuple[Block, ...]:
    """The blocks after the prompt; see parser.blocks. Parsed only once."""
    parsed = trajectory.parsed
    if self not in parsed:
      asked = trajectory.question, self.prompt_mode
      begun = untrusted.begun(self.template, *asked)
      made_of = trajectory.segments, self.template, self.tokenizer
      parsed[self] = parsing.blocks(*made_of, None, begun)
    return parsed[self]

  def answer(self, trajectory: types.Trajectory) -> str | None:
    """The policy's last complete answer, or None. Rewards use only this."""
    return parsing.answer(self.blocks(trajectory), self.config.answer)

  def retrieved(self, trajectory: types.Trajectory) -> list[str]:
    """The texts of observations that show what a search found."""
    turns = {s.request.turn for s in trajectory.calls(types.SEARCH)}
    kind = 'environment', 'information'
    return [
      block.text
      for block in self.blocks(trajectory)
      if (block.author, block.kind) == kind and block.turn in turns
    ]

  def observation(self, passages: Sequence[types.Passage | str]) -> str:
    """The text of an observation with these passages, or a tool's text."""
    limit = self.config.max_observation_tokens
    return self.tokenizer.decode(self._observe(passages, limit)[0])

  def _check_tags(self) -> None:
    """Raises ValueError if the parser or an engine could not see a tag.

    A control token has no bytes. A stop string may hold one that ends a turn.
    """
    tok, stops = self.tokenizer, self.template.stops
    control = lambda text: tok.control.intersection(tok.encode_template(text))
    tags = itertools.chain(*self.template.tags.values())
    unseen = [tag for tag in tags if control(tag)]
    unseen += [s for s in stops if control(s).difference(tok.eos_ids)]
    what = f'{[*dict.fromkeys(unseen)]} of the template {self.template.name!r}'
    lookup.require(
      not unseen,
      f'tokenizer {tok.path}: {what} are special tokens, whose text is never '
      'seen. In a copy of the tokenizer, write "special": false for them in '
      'tokenizer.json and tokenizer_config.json, take them out of the lists of '
      'special tokens there, and give --config.model.tokenizer=COPY',
    )

  def _completed(self, state: State, completion: Completion):
    n, limit = len(completion.ids), state.pending.max_tokens
    logps, versions = len(completion.logps), len(completion.versions)
    what = f'{n} ids (at most {limit}) with {logps} logps, {versions} versions'
    _require(logps == versions == n <= limit, state, what)
    ids = np.asarray(completion.ids, np.int32)
    pieces = [*map(self.tokenizer.token_bytes, ids.tolist())]
    parser, kinds, ended = state.parser.feed(pieces)
    blocks = [parsing.make_block(b, 'policy', state.turn) for b in ended]
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
        action = None  # the policy writes the information itself
      state = dataclasses.replace(state, query_entropy=entropy)
    goes_on = action is None and self._continues(state, parser, completion)
    if not goes_on:
      # Tokens whose kind was not certain are outside all blocks.
      parser, more, ended = parser.finish()
      kinds = kinds + more
      blocks += [parsing.make_block(b, 'policy', state.turn) for b in ended]
    state = dataclasses.replace(
      state,
      parser=parser,
      segments=self._written(state, completion, kinds),
      blocks=(*state.blocks, *blocks),
    )
    if goes_on:
      return _next(state, self._generate(state))
    if action is None:
      return self._without_action(state, completion.stop)
    kind = self.template.kinds[action.kind]
    if kind.ends:
      return _next(state, Done('answer'))
    if self._room(state) < self._observe.least:
      return _next(state, Done('tokens'))
    about = dict(turn=state.turn, tool=kind.tool, earlier=state.searches)
    about |= dict(k=self.k, question=state.question)
    requests = [types.SearchRequest(q, **about) for q in self._queries(action)]
    return _next(state, Search(tuple(requests)))

  def _action(self, state: State, blocks: Sequence[Block]) -> Block | None:
    """The first of the blocks that is an action."""
    may_search = self._may_search(state)
    for block in blocks:
      kind = self.template.kinds.get(block.kind)
      acts = kind and kind.acts and may_search and self._queries(block)
      if acts or (kind and kind.ends):
        return block
    return None

  def _queries(self, block: Block) -> list[str]:
    search = self.template.kinds[block.kind].tool == types.SEARCH
    separator = search and self.template.query_separator
    queries = block.text.split(separator) if separator else [block.text]
    queries = list(dict.fromkeys(q.strip() for q in queries if q.strip()))
    return queries[: self.template.max_queries]

  def _continues(self, state: State, parser: Parser, completion) -> bool:
    """Whether the turn continues after the stop string, because it is quoted in
    policy-written information or closes a search that is not sent."""
    stop, c = completion.stop, self.config
    quoted = parser.block == 'information' or stop == self.template.search[1]
    ended = stop in ('eos', 'length') or not len(completion.ids)
    room = state.turn_tokens < c.max_turn_tokens and state.length < c.max_tokens
    return quoted and room and not (ended or self._searching)

  def _entropy(self, segments: tuple[types.Segment, ...]) -> float:
    """Mean entropy in nats of the tokens of the last query."""
    if self.entropy is None:
      what = 'entropies of the policy: python -m searchrl_jax.evaluate has them'
      raise ValueError(f"env.search_when='entropy' needs {what}")
    ids = np.concatenate([s.ids for s in segments])
    # The tag may begin in the segment before the query's.
    turn = [s for s in segments if s.author == 'policy'][-2:]
    pieces = [self.tokenizer.token_bytes(i) for s in turn for i in s.ids]
    first = len(ids) - len(pieces)
    query = parsing.within(pieces, *self.template.search)
    return float(np.mean(self.entropy(ids)[[first + n for n in query]]))

  def _without_action(self, state: State, stop: str):
    if self.config.answer == 'boxed' and stop != 'length':
      if parsing.answer(state.blocks, 'boxed') is not None:
        return _next(state, Done('answer'))
    full = state.length >= self.config.max_tokens
    state = dataclasses.replace(
      state,
      invalid_actions=state.invalid_actions + (not full),
      truncated_turns=state.truncated_turns + (stop == 'length'),
    )
    last = state.turn >= self.config.max_turns
    if last and (stop == 'eos' or not full):
      return _next(state, Done('eos' if stop == 'eos' else 'turns'))
    if full or self._room(state) < len(self._invalid):
      return _next(state, Done('tokens'))
    return self._respond(state, self._invalid, 'other')

  def _written(self, state: State, completion, kinds):
    """The state's segments and the sampled tokens as segments by kind."""
    segments, agent, start = state.segments, state.agent, 0
    # If a source answers, information written by the policy is trained on, like
    # its other text.
    information = self._searching or bool(self.config.train_information)
    for kind, run in itertools.groupby(kinds):
      part = slice(start, start := start + len([*run]))
      train = information or kind != 'information'
      ids = np.asarray(completion.ids[part], np.int32)
      logps = np.asarray(completion.logps[part], np.float32)
      versions = np.asarray(completion.versions[part], np.int32)
      new = types.Segment(ids, 'policy', kind, agent, train, logps, versions)
      segments = types.joined(segments, new)
    return segments

  def _searched(self, state: State, results: tuple):
    n = len(state.pending.requests)
    answers = [type(r).__name__ for r in results]
    good = len(answers) == n and {*answers} <= {'SearchResult', 'SearchError'}
    what = f'{n} searches were answered with {answers}'
    _require(good, state, f'{what}, not a SearchResult or SearchError each')
    state = dataclasses.replace(state, searches=state.searches + results)
    if any(isinstance(r, types.SearchError) for r in results):
      return _next(state, Done('failed'))
    passages = [p for r in results for p in r.shown]
    limit = min(self.config.max_observation_tokens, self._room(state))
    ids, cut = self._observe(passages, limit)
    cut += state.cut_observations
    state = dataclasses.replace(state, cut_observations=cut)
    if not ids:
      return _next(state, Done('tokens'))
    return self._respond(state, ids, 'information')

  def _may_search(self, state: State) -> bool:
    if self._searching:
      return state.turn < self.config.max_turns
    real = self.config.real_searches
    return real < 0 or len(state.searches) < real

  def _note_before(self, turn: int) -> list[int]:
    return self._note if turn >= self.config.max_turns else []

  def _room(self, state: State) -> int:
    """Tokens left for a response, without those reserved for the note before a
    last turn and for an answer."""
    note = len(self._note_before(state.turn + 1))
    return self.config.max_tokens - state.length - note - self._reserve

  def _generate(self, state: State, append=(), prompt=None) -> Generate:
    c = self.config
    limit = c.max_turn_tokens - state.turn_tokens, c.max_tokens - state.length
    stops = self.template.stops_for(self._may_search(state))
    ends = self.tokenizer.eos_ids
    return Generate(state.agent, min(limit), stops, ends, tuple(append), prompt)

  def _respond(self, state: State, ids: Sequence[int], kind: str):
    """Appends the environment's text and starts the next turn."""
    note = self._note_before(state.turn + 1)
    train = bool(self.config.train_observations)
    parts = (ids, 'environment', kind), (note, 'environment', 'other')
    state = dataclasses.replace(
      state,
      segments=_append(state.segments, state.agent, parts, train),
      length=state.length + len(ids) + len(note),
      parser=Parser(self._tags),
      turn=state.turn + 1,
      turn_tokens=0,
    )
    return _next(state, self._generate(state, [*ids, *note]))


def _require(good, state: State, message: str) -> None:
  lookup.require(good, f'trajectory {state.name}: {message}', ValueError)


def _next(state: State, action: Action) -> tuple[State, Action]:
  return dataclasses.replace(state, pending=action), action


def _append(segments, agent: str, parts, train: bool = False):
  """The segments with `parts`, each (ids, author, kind), added."""
  for ids, author, kind in parts:
    ids = np.asarray(ids, np.int32)
    new = types.Segment(ids, author, kind, agent, train)
    segments = types.joined(segments, new)
  return segments
