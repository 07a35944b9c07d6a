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

Calls (a template with `calls`). A turn goes on until eos, and then its calls
are made, unless it has an answer. One that cannot be read or made is an
invalid action; its result is an error that the policy reads. What follows a
turn is what the tokenizer's chat template writes between two replies, with the
end of a turn that did not end itself.

Contexts. With max_contexts = n, the engine's sequence may be replaced n - 1
times by a shorter one; `State.segments` keeps all that was written.

  keep_observations=k   An observation replaces all older ones but the k - 1
                        before it by `dropped`.
  on_full='summary'     When the sequence has no room for another turn, the
                        policy is asked for this block of the template
                        (`prompts.Kind.ask`). The next context is the prompt,
                        the block and `Kind.then`.
  attempts=n,           After each answer but the last, the policy is asked for
  on_answer='reflection'  this block. The next context is the prompt and all
                        such blocks; max_turns begins anew. The last answer
                        counts. With max_contexts=1 all stays in one context, as
                        in MR-Search, arXiv 2603.11327.

The policy is asked in a turn of its own, which does not count towards
max_turns. A block that it does not close is an invalid action; it is carried
over with the closing tag.

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
from searchrl_jax.text import prompts, untrusted
from searchrl_jax.text.calls import Call, Calls
from searchrl_jax.text.parser import Block, Parser
from searchrl_jax.text.states import (
  Action,
  Done,
  Generate,
  Search,
  State,
  add,
  begin,
)

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
    functions: of calls.Function, for a template with `calls`.

  Raises:
    ValueError: fields that cannot be combined, a limit without room, or a
      tokenizer whose chat template does not fit the template.
  """

  def __init__(
    self, tokenizer, template, config, prompt_mode: str, k: int, functions=()
  ):
    self.tokenizer, self.template, self.config = tokenizer, template, config
    self.prompt_mode, self.k, self.functions = prompt_mode, k, functions
    self.entropy: Entropy | None = None
    self._searching = config.information == 'source'
    self._guided = config.search_when == 'entropy'
    self._tags = parsing.tags_of(template)
    self._check_tags()
    own = Calls(tokenizer, template, functions) if template.calls else None
    self._calls, encode = own, tokenizer.encode_template
    self._observe = own or untrusted.Observer(tokenizer, template)
    self._invalid = own.invalid if own else encode(template.invalid)
    note = template.last_turn if self._searching else ''
    self._note = own.note if own else encode(note)
    self._head = own.head if own else []  # before every turn but the first
    # A chat template may begin every reply with a thought.
    head = tokenizer.decode(self._head)
    self.later = parsing.start(self._tags, head)  # the parser of these turns
    # The shortest answer must fit after any text that is appended, and so must
    # the end of the turn before.
    self._reserve = len(encode(''.join(template.answer))) + 1 + bool(own)
    real, limit = config.real_searches, config.max_observation_tokens
    further = [kind.name for kind in template.blocks if kind.acts]
    further += [prompts.CALL] * bool(template.calls)
    self._check_contexts()
    self._dropped: list[int] = []
    if config.keep_observations:
      one = [[config.dropped]] if own else [config.dropped]
      self._dropped = self._observe(one, limit)[0] + self._head
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
    parts, ids = self.prompt(question)
    note = [] if self.config.max_turns else self._note
    added = (ids, 'prompt', 'other'), (note, 'environment', 'other')
    segments = _append((), agent, added)
    ids = (*ids, *note)
    most = self.config.max_tokens
    what = f'question {question.id!r}: its prompt has {len(ids)} tokens of'
    fix = f'env.max_tokens={most}; increase it or leave the question out'
    spare = f' ({self._spare} stay free for a note)' if self._spare else ''
    good = len(ids) < most - self._spare
    lookup.require(good, f'{what} {fix}{spare}')
    begun = untrusted.begun(self.template, question, self.prompt_mode)
    text = ''.join(text for text, _ in parts)
    text += self.tokenizer.decode(note) if self._calls else ''
    parser = parsing.start(self._tags, text, begun)
    what = f'a prompt that begins a block ({parser.block!r}) cannot be followed'
    what = f"{what} by config.env.on_full or on_answer's: set them to ''"
    lookup.require(parser.block == prompts.OUTSIDE or not self._notes, what)
    state = State(
      question=question,
      role=role,
      agent=agent,
      segments=segments,
      length=len(ids),
      parser=parser,
      pending=Done('tokens'),
    )
    return _next(state, self._generate(state, prompt=types.Prompt(ids)))

  def prompt(self, question: types.Question):
    """The prompt: its parts (`untrusted.prompt_parts`) and its ids."""
    turns = self.config.max_turns
    asked = self.template, question, self.prompt_mode, self.tokenizer
    tools = self._calls.schemas if self._calls and turns else ()
    # The note for a first turn that is the last stands before a reply begins.
    reply = not self._calls or turns > 0
    parts = untrusted.prompt_parts(*asked, tools, reply)
    return parts, self.tokenizer.encode_parts(parts, start=True)

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
    blocks = parsing.blocks(
      state.segments, self.template, self.tokenizer, state.blocks
    )
    told = {name: getattr(state, name) for name in counters}
    if state.shares:
      told['shares'] = state.shares
    if state.noted:
      told['noted'] = list(state.noted)
    if self.config.attempts > 1:
      told['attempt'] = self._attempts(blocks, state)
    out = types.Trajectory(
      question=state.question,
      segments=state.segments,
      searches=state.searches,
      end=state.end,
      sample=sample,
      role=state.role,
      invalid_actions=state.invalid_actions,
      turns=min(state.turn + 1, state.generations),
      seconds=seconds,
      contexts=state.contexts,
      meta=told | dict(meta or {}),
    )
    out.parsed[self] = blocks  # while other trajectories are sampled
    return out

  def _attempts(self, blocks: Sequence[Block], state: State) -> list[int]:
    """The attempt that each turn belongs to; a reflection is of the next."""
    answered = [b.turn for b in self._ending(blocks, state.noted)]
    return [sum(turn < n for turn in answered) for n in range(state.turn + 1)]

  def answers(self, trajectory: types.Trajectory) -> list[Block]:
    """The answers that ended attempts, one for each."""
    noted = trajectory.meta.get('noted', ())
    return self._ending(self.blocks(trajectory), noted)

  def _ending(self, blocks: Sequence[Block], noted) -> list[Block]:
    """The first answer of each turn that has one, but for `noted` turns.

    An answer in what the policy was asked for, a reflection or a summary, ends
    nothing.
    """
    found: list[Block] = []
    for b in blocks:
      kind = self.template.kinds.get(b.kind)
      ends = b.author == 'policy' and b.complete and kind and kind.ends
      if ends and b.turn not in (*noted, *(f.turn for f in found)):
        found.append(b)
    return found

  def blocks(self, trajectory: types.Trajectory) -> tuple[Block, ...]:
    """The blocks after the prompt; see parser.blocks. Parsed only once."""
    parsed = trajectory.parsed
    if self not in parsed:
      asked = trajectory.question, self.prompt_mode
      begun = untrusted.begun(self.template, *asked)
      made_of = trajectory.segments, self.template, self.tokenizer
      history = trajectory.history
      parsed[self] = parsing.blocks(*made_of, None, begun, history)
    return parsed[self]

  def answer(self, trajectory: types.Trajectory) -> str | None:
    """The policy's last complete answer, or None. Rewards use only this."""
    noted = trajectory.meta.get('noted', ())
    return parsing.answer(self.blocks(trajectory), self.config.answer, noted)

  def retrieved(self, trajectory: types.Trajectory) -> list[str]:
    """The texts of observations that show what a search found."""
    searches = trajectory.calls(types.SEARCH)
    if self._calls:  # which share an observation, with those of other tools
      found = [s for s in searches if isinstance(s, types.SearchResult)]
      shares = trajectory.meta.get('shares', {})  # a program's have none
      most = self.config.max_observation_tokens
      cut = [(s.shown, shares.get(str(s.request.turn), most)) for s in found]
      bodies = [self._calls.fitted(*one)[0] for one in cut if one[1]]
      return [''.join(text for text, _ in body) for body in bodies]
    turns = {s.request.turn for s in searches}
    kind = 'environment', 'information'
    return [
      block.text
      for block in self.blocks(trajectory)
      if (block.author, block.kind) == kind and block.turn in turns
    ]

  def observation(self, passages: Sequence[types.Passage | str]) -> str:
    """The text of an observation with these passages, or a tool's text."""
    limit = self.config.max_observation_tokens
    shown = [passages] if self._calls else passages
    return self.tokenizer.decode(self._observe(shown, limit)[0])

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

  def _check_contexts(self) -> None:
    """Raises ValueError if fields of contexts cannot work."""
    c, kinds = self.config, self.template.kinds
    fields = 'keep_observations', 'on_full', 'on_answer'
    used = [name for name in fields if c[name]]
    what = f'config.env.max_contexts=1 with {used}: of {fields}, it goes with '
    what += 'the last alone'
    lookup.require(c.max_contexts > 1 or {*used} <= {'on_answer'}, what)
    what = f'config.env.attempts={c.attempts} with on_answer={c.on_answer!r}: '
    what += "above 1 goes with a block that is asked for, 1 with ''"
    lookup.require(bool(c.on_answer) == (c.attempts > 1), what)
    what = f"config.env.{used} with information={c.information!r}; use 'source'"
    lookup.require(not used or self._searching, what)
    what = f'config.env.{used}: env.template={self.template.name!r} has calls; '
    what += "use '' for on_full and on_answer"
    asked = c.on_full or c.on_answer
    lookup.require(not (self._calls and asked), what)
    # Block that is asked for -> the text that asks, and what follows.
    self._notes = {}
    for field in ('on_full', 'on_answer'):
      if not c[field]:
        continue
      asking = [name for name, kind in kinds.items() if kind.ask]
      what = f'config.env.{field}={c[field]!r} is no block of the template '
      what += f'{self.template.name!r} with a text "ask": it has {asking}'
      lookup.require(c[field] in asking, what)
      kind, encode = kinds[c[field]], self.tokenizer.encode_template
      self._notes[kind.name] = encode(kind.ask), encode(kind.then)
    # Room that stays free for asking, and for the block.
    asks = [len(ask) for ask, _ in self._notes.values()]
    self._spare = max(asks, default=0) + c.max_note_tokens * bool(asks)
    what = f'config.env.max_note_tokens={c.max_note_tokens}: above 0 goes with '
    what += 'on_full or on_answer, 0 with none'
    lookup.require(bool(asks) == (c.max_note_tokens > 0), what)

  def _completed(self, state: State, completion: Completion):
    n, limit = len(completion.ids), state.pending.max_tokens
    logps, versions = len(completion.logps), len(completion.versions)
    what = f'{n} ids (at most {limit}) with {logps} logps, {versions} versions'
    _require(logps == versions == n <= limit, state, what)
    if state.asked:
      return self._noted(state, completion)
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
      written = add(state, self._sampled(state, completion, kinds))
      entropy = self._entropy(written.segments)
      if state.query_entropy is not None and entropy <= state.query_entropy:
        action = None  # the policy writes the information itself
      state = dataclasses.replace(state, query_entropy=entropy)
    goes_on = action is None and self._continues(state, parser, completion)
    if not goes_on:
      # Tokens whose kind was not certain are outside all blocks.
      parser, more, ended = parser.finish()
      kinds = kinds + more
      blocks += [parsing.make_block(b, 'policy', state.turn) for b in ended]
    state = add(state, self._sampled(state, completion, kinds))
    state = dataclasses.replace(
      state, parser=parser, blocks=(*state.blocks, *blocks)
    )
    if goes_on:
      return _next(state, self._generate(state))
    calls: tuple[Call, ...] = ()
    boxed = self.config.answer == 'boxed' and completion.stop != 'length'
    boxed = boxed and parsing.answer(blocks, 'boxed') is not None
    if not (action or boxed) and self._calls and self._may_search(state):
      calls = self._calls.read(blocks)
    if action is None and not calls:
      return self._without_action(state, completion.stop)
    if action and self.template.kinds[action.kind].ends:
      return self._answered(state)
    good = [call for call in calls if call.status == 'ok']
    wrong = state.invalid_actions + len(calls) - len(good)
    state = dataclasses.replace(state, calls=calls, invalid_actions=wrong)
    begun = self._drop(state) if action or good else state
    if self._room(begun) < self._observe.least:
      return self._full(state)
    if action:
      tool = self.template.kinds[action.kind].tool
      asked = [(tool, query) for query in self._queries(action)]
    else:
      asked = [*map(self._calls.request, good)]
    if not asked:
      return self._observed(state, ())
    about = dict(turn=state.turn, earlier=state.searches, k=self.k)
    about |= dict(question=state.question)
    requests = [types.SearchRequest(q, tool=t, **about) for t, q in asked]
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
    room = state.turn_tokens < c.max_turn_tokens
    room = room and state.length < self._limit(state)
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
      own = [b for b in state.blocks if b.turn == state.turn]
      if parsing.answer(own, 'boxed') is not None:
        return self._answered(state)
    full = state.length >= self._limit(state)
    state = dataclasses.replace(
      state,
      invalid_actions=state.invalid_actions + (not full),
      truncated_turns=state.truncated_turns + (stop == 'length'),
    )
    last = state.used >= self.config.max_turns
    if last and (stop == 'eos' or not full):
      return _next(state, Done('eos' if stop == 'eos' else 'turns'))
    if full or self._room(state) < len(self._invalid):
      return self._full(state)
    return self._respond(state, self._invalid, 'other')

  def _sampled(self, state: State, completion, kinds) -> list[types.Segment]:
    """The sampled tokens as segments by kind."""
    out, agent, start = [], state.agent, 0
    # If a source answers, information written by the policy is trained on, like
    # its other text.
    information = self._searching or bool(self.config.train_information)
    trained = [information or kind != 'information' for kind in kinds]
    if completion.stop == 'eos':  # it ends the turn, whatever it stands in
      trained[-1:] = [True]
    for (kind, train), run in itertools.groupby(zip(kinds, trained)):
      part = slice(start, start := start + len([*run]))
      ids = np.asarray(completion.ids[part], np.int32)
      logps = np.asarray(completion.logps[part], np.float32)
      versions = np.asarray(completion.versions[part], np.int32)
      fields = ids, 'policy', kind, agent, train, logps, versions
      out.append(types.Segment(*fields))
    return out

  def _searched(self, state: State, results: tuple):
    n = len(state.pending.requests)
    answers = [type(r).__name__ for r in results]
    good = len(answers) == n and {*answers} <= {'SearchResult', 'SearchError'}
    what = f'{n} searches were answered with {answers}'
    _require(good, state, f'{what}, not a SearchResult or SearchError each')
    state = dataclasses.replace(state, searches=state.searches + results)
    if any(isinstance(r, types.SearchError) for r in results):
      return _next(state, Done('failed'))
    return self._observed(state, results)

  def _observed(self, state: State, results: tuple):
    """Goes on with what the requests of a turn, or its calls, are answered."""
    # Where no call could be made, there is nothing new in place of older ones.
    begun = self._drop(state) if results else state
    limit = min(self.config.max_observation_tokens, self._room(begun))
    shown, shares = self._shown(state, results), state.shares
    if self._calls:
      ids, cut, share = self._calls.shared(shown, limit)
      shares = {**shares, str(state.turn): share}
    else:
      ids, cut = self._observe(shown, limit)
    told = dict(cut_observations=cut + state.cut_observations, shares=shares)
    if not ids:
      return self._full(dataclasses.replace(state, **told))
    begun = dataclasses.replace(begun, **told)
    return self._respond(begun, ids, 'information' if results else 'other')

  def _shown(self, state: State, results: tuple) -> Sequence:
    if not self._calls:
      return [p for r in results for p in r.shown]
    made = iter(results)
    return [
      next(made).shown if call.status == 'ok' else [f'error: {call.error}']
      for call in state.calls
    ]

  # Contexts.

  def _more(self, state: State) -> bool:
    """Whether another context may begin."""
    return len(state.contexts) + 1 < self.config.max_contexts

  def _limit(self, state: State) -> int:
    """Tokens of the sequence, without those that stay free for a note."""
    c = self.config
    more = c.on_full and self._more(state) or state.attempt + 1 < c.attempts
    return c.max_tokens - (self._spare if more and not state.asked else 0)

  def _full(self, state: State):
    """Asks for a note if the trajectory may go on in a new context."""
    if self.config.on_full and self._more(state):
      return self._respond(state, (), 'other', ask=self.config.on_full)
    return _next(state, Done('tokens'))

  def _answered(self, state: State):
    if state.attempt + 1 < self.config.attempts:
      return self._respond(state, (), 'other', ask=self.config.on_answer)
    return _next(state, Done('answer'))

  def _noted(self, state: State, completion: Completion):
    """Goes on with the block that the policy was asked for."""
    asked, c = state.asked, self.config
    pieces = [*map(self.tokenizer.token_bytes, completion.ids)]
    parser, kinds, ended = state.parser.feed(pieces)
    _, more, rest = parser.finish()
    new = self._sampled(state, completion, kinds + more)
    blocks = [
      parsing.make_block(b, 'policy', state.turn) for b in [*ended, *rest]
    ]
    found = [b for b in blocks if b.kind == asked]
    ids = [i for s in new if s.kind == asked for i in s.ids.tolist()]
    ids = [i for i in ids if i not in self.tokenizer.control]
    closed = bool(found) and found[-1].complete
    opening, closing = self.template.kinds[asked].tags
    # The tag may begin within a token that is of what stands before it.
    text, places = self.tokenizer.decode(ids), range(len(opening))
    lost = next((n for n in places if text.startswith(opening[n:])), 0)
    ids = self.tokenizer.encode_template(opening[:lost]) + ids
    if ids and not closed:
      ids += self.tokenizer.encode_template(closing)
    state = dataclasses.replace(
      add(state, new),
      length=state.length + len(completion.ids),
      generations=state.generations + 1,
      blocks=(*state.blocks, *blocks),
      invalid_actions=state.invalid_actions + (not closed),
    )
    again = asked == c.on_answer
    earlier = [note for note in state.notes if note[0] == c.on_answer]
    state = dataclasses.replace(
      state,
      notes=(*earlier, (asked, np.asarray(ids, np.int32))),
      attempt=state.attempt + again,
      asked='',
      noted=(*state.noted, state.turn),
      used=0 if again else state.used,
    )
    begun, then = state, self._notes[asked][1]
    if self._more(state):
      prompt = itertools.takewhile(_prompts, state.segments)
      carried = ((ids, 'policy', kind) for kind, ids in state.notes)
      held = _append((*prompt,), state.agent, carried)
      begun = begin(state, held, asked)
    if self._room(begun) < len(then):
      return _next(state, Done('tokens'))
    return self._respond(begun, then, 'other', counts=False)

  def _drop(self, state: State) -> State:
    """Leaves out observations before the next one."""
    keep = self.config.keep_observations
    shown = [*filter(_observes, state.sequence)]
    older = shown[: max(len(shown) - keep + 1, 0)]
    old = [s for s in older if len(s.ids) > len(self._dropped)]
    if not (keep and old and self._more(state)):
      return state
    dropped = np.asarray(self._dropped, np.int32)
    held: tuple[types.Segment, ...] = ()
    for s in state.sequence:
      if any(s is o for o in old):
        s = dataclasses.replace(s, ids=dropped)
      held = types.joined(held, s)
    return begin(state, held, 'dropped')

  def _may_search(self, state: State) -> bool:
    if self._searching:
      return state.used < self.config.max_turns
    real = self.config.real_searches
    return real < 0 or len(state.searches) < real

  def _note_before(self, turn: int) -> list[int]:
    return self._note if turn >= self.config.max_turns else self._head

  def _room(self, state: State) -> int:
    """Tokens left for a response, without those reserved for the note before a
    last turn and for an answer."""
    note = len(self._note_before(state.used + 1))
    return self._limit(state) - state.length - note - self._reserve

  def _generate(self, state: State, append=(), prompt=None) -> Generate:
    c = self.config
    room = self._limit(state) - state.length
    limit = min(c.max_turn_tokens - state.turn_tokens, room)
    stops = self.template.stops_for(self._may_search(state))
    if state.asked:
      limit = min(c.max_note_tokens, room)
      stops = (self.template.kinds[state.asked].tags[1],)
    given = tuple(append), prompt, len(state.contexts)
    return Generate(state.agent, limit, stops, self.tokenizer.eos_ids, *given)

  def _respond(
    self, state: State, ids: Sequence[int], kind: str, ask='', counts=True
  ):
    """Appends the environment's text and starts the next turn.

    ask: the block that the policy is asked for in this turn; without, the one
      of config.env.on_full where no room for another turn is left. counts:
      whether the turn that has ended counts towards max_turns.
    """
    c = self.config
    end: list[int] = []
    if self._calls and state.sequence[-1].ids[-1] != self._calls.end:
      end = [self._calls.end]  # the turn did not end itself
    used = min(state.used + counts, c.max_turns)
    note = self._note_before(used)
    left = self._limit(state) - state.length - len([*end, *ids, *note])
    if counts and left < c.max_turn_tokens and self._more(state):
      ask = ask or c.on_full
    if ask:  # then the note stands before the turn that follows
      note = self._notes[ask][0]
    of_note = kind if note is self._head else 'other'
    train = bool(c.train_observations)
    pairs = (end, 'other'), (ids, kind), (note, of_note)
    parts = [(new, 'environment', kind) for new, kind in pairs]
    appended = [*end, *ids, *note]
    before, keep = state.sequence, state.keep
    state = add(state, _append((), state.agent, parts, train))
    state = dataclasses.replace(
      state,
      length=state.length + len(appended),
      parser=self.later,
      turn=state.turn + 1,
      used=used,
      asked=ask,
      keep=None,
      turn_tokens=0,
    )
    action = self._generate(state, appended)
    if keep is not None:  # a new context
      held = [i for s in before for i in s.ids.tolist()][keep:]
      action = dataclasses.replace(
        action, append=(*held, *action.append), keep=keep, carried=len(held)
      )
    return _next(state, action)


def _prompts(segment: types.Segment) -> bool:
  return segment.author == 'prompt'


def _observes(segment: types.Segment) -> bool:
  return (segment.author, segment.kind) == ('environment', 'information')


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
