"""Incremental parser that assigns each sampled token to a block.

The state machine reads the bytes of one turn of one author:

    outside   an opening tag of kind k        -> inside k
              anything else                   -> outside ('other')
    inside k  the closing tag of k            -> outside; block k is complete
              anything else, also other tags  -> inside k (plain text)
    end of turn inside k                      -> block k is incomplete

A tag inside a block is plain text: `<search>` in a thought, `<answer>` in
policy-written information. Tags are matched exactly, including case and spaces,
and never across turns. A block without a closing tag is complete at the end of
the turn; its text begins with its opening tag (a call that is one JSON object).

The bytes of a tag belong to its block. A token belongs to the block of its
first byte; a control token, which has no bytes, to the block that is open at
its position. The kind of a token outside blocks is not certain while its first
byte may be the start of a tag.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import re
from typing import AnyStr

import numpy as np

from searchrl_jax.text.prompts import OUTSIDE
from searchrl_jax.types import ACTORS, Segment

_TAIL = 64  # tokens that an opening tag at the end of a prompt lies in


@dataclasses.dataclass(frozen=True)
class Block:
  """One block of a trajectory; text outside blocks has kind 'other'.

  text: between the tags, decoded from the author's bytes (UTF-8, errors
  replaced) and stripped. complete: False if the turn ended inside the block.
  author: of its tokens; 'policy' also of a teacher in its place.
  """

  kind: str
  author: str
  text: str
  complete: bool = True
  turn: int = 0


class Tags:
  """Tags as bytes. open: opening tag -> kind. wanted: block that is open, or
  OUTSIDE -> the tags that end it; search: the same -> finds the first."""

  def __init__(self, tags: Mapping[str, tuple[str, str]]):
    self.open = {a.encode(): kind for kind, (a, _) in tags.items()}
    self.wanted = {k: (b.encode(),) if b else () for k, (_, b) in tags.items()}
    self.wanted[OUTSIDE] = tuple(self.open)
    # '(?!)' never matches.
    any_of = lambda tags: b'|'.join(map(re.escape, tags)) or b'(?!)'
    patterns = {kind: any_of(tags) for kind, tags in self.wanted.items()}
    self.search = {k: re.compile(p).search for k, p in patterns.items()}


@functools.lru_cache(maxsize=64)
def tags_of(template) -> Tags:
  """The tags of a prompts.Template."""
  return Tags(template.tags)


def held(data: AnyStr, tags: Iterable[AnyStr]) -> int:
  """The length of the end of `data` that may start one of `tags`."""
  most = len(data) + 1
  starts = (tag[:n] for tag in tags for n in range(1, min(len(tag), most)))
  return max(map(len, filter(data.endswith, starts)), default=0)


@dataclasses.dataclass(frozen=True)
class Parser:
  """The state of one turn; immutable.

  `feed` and `finish` return the next state, the kinds of the tokens that became
  certain (oldest first, including tokens fed earlier) and the blocks that
  ended, as (kind, bytes between the tags, complete).
  """

  tags: Tags
  block: str = OUTSIDE
  inner: bytes = b''  # of the open block, or of the text outside blocks
  tail: bytes = b''  # bytes whose block is not certain
  waiting: tuple[int, ...] = ()  # where in `tail` each waiting token starts

  def feed(self, pieces: Sequence[bytes]):
    """Reads tokens; `pieces` are their bytes."""
    return self._advance(pieces, final=False)

  def finish(self):
    """Ends the turn: held bytes become text, an open block is incomplete."""
    return self._advance((), final=True)

  def read(self, turn: bytes):
    """The blocks of a whole turn."""
    return self._advance((turn,), final=True)[2]

  def _advance(self, pieces, final):
    data = self.tail + b''.join(pieces)
    ends = itertools.accumulate(map(len, pieces), initial=len(self.tail))
    starts = np.array([*self.waiting, *ends])  # the last: the end of all
    lengths, starts = np.diff(starts), starts[:-1]
    tags, block, inner = self.tags, self.block, self.inner
    # (end, kind of its bytes, block open after it)
    spans = [(0, block, block)]
    blocks, at = [], 0
    while True:
      match = tags.search[block](data, at)
      end = match.start() if match else len(data)
      if not match and not final:
        end -= held(data[at:], tags.wanted[block])
      inner += data[at:end]
      if end > at:
        spans.append((end, block, block))
      at = end
      if not match:
        break
      if block != OUTSIDE or inner.strip():
        blocks.append((block, inner, True))
      # A tag belongs to its block.
      after = tags.open[match[0]] if block == OUTSIDE else OUTSIDE
      at = match.end()
      spans.append((at, after if block == OUTSIDE else block, after))
      block, inner = after, b'' if tags.wanted[after] else match[0]

    sure = at
    if block != OUTSIDE:  # a closing tag belongs to the block like its text
      sure = len(data)
      spans.append((sure, block, block))
    # The position of a token is that of its first byte; of one without bytes,
    # after the bytes before it.
    first = starts + (lengths > 0)
    known = int(np.searchsorted(first, sure, 'right'))
    ends, inside, after = (np.array(x) for x in zip(*spans))
    n = np.searchsorted(ends, first[:known])
    between = (lengths[:known] == 0) & (ends[n] == starts[:known])
    kinds = np.where(between, after[n], inside[n]).tolist()
    if final:
      if block != OUTSIDE or inner.strip():
        whole = block == OUTSIDE or not tags.wanted[block]
        blocks.append((block, inner, whole))
      block, inner = OUTSIDE, b''
    left = tuple((starts[known:] - at).tolist())
    return Parser(tags, block, inner, data[at:], left), kinds, blocks


def start(tags: Tags, prompt: str, begun: str = '') -> Parser:
  """Returns the parser of a turn after this text, such as a first one.

  It starts inside a thought if the chat template opened one for the policy, and
  inside the block that `begun`, the beginning of the reply at the prompt's end
  (`untrusted.begun`), then leaves open. Only the policy's part is its text.
  """
  before = prompt.removesuffix(begun).rstrip().encode('utf-8', 'replace')
  kinds = (k for tag, k in tags.open.items() if before.endswith(tag))
  block = 'think' if 'think' in kinds else OUTSIDE
  after, *_ = Parser(tags, block).feed([begun.encode('utf-8', 'replace')])
  return Parser(tags, after.block)


def within(pieces: Sequence[bytes], opening: str, closing: str) -> list[int]:
  """Indices of the tokens with text of the last block between these tags."""
  data = b''.join(pieces)
  start = data.rindex(opening.encode()) + len(opening.encode())
  end = data.index(closing.encode(), start)
  ends = np.cumsum([len(piece) for piece in pieces])
  starts = np.array([0, *ends[:-1]])
  return np.flatnonzero((ends > start) & (starts < end)).tolist()


def make_block(parsed, author: str, turn: int) -> Block:
  kind, inner, complete = parsed
  text = inner.decode('utf-8', 'replace').strip()
  return Block(kind, author, text, complete, turn)


def blocks(
  segments: Sequence[Segment],
  template,
  tokenizer,
  known: Sequence[Block] | None = None,
  begun: str = '',
  history: Callable[[int], np.ndarray] | None = None,
) -> tuple[Block, ...]:
  """Returns the blocks after the prompt.

  Each turn of the policy is parsed from its own ids, by the same state machine
  as during the rollout. Text between its blocks is a Block of kind 'other',
  unless it is white space. Observations of the environment have kind
  'information' (the text between the tags), its feedback has kind 'other'.
  known: the policy's blocks, if the rollout has kept them. begun: see `start`.
  history: `Trajectory.history`.
  """
  tags, before = tags_of(template), b''
  out: list[Block] = []
  turn, n = -1, 0
  for own, group in itertools.groupby(segments, lambda s: s.author in ACTORS):
    run = [*group]
    at, n = n, n + sum(len(s.ids) for s in run)
    if own:
      turn += 1
      if known is not None:
        out += [block for block in known if block.turn == turn]
        continue
      if turn and history:
        before = _bytes(history(at)[-_TAIL:].tolist(), tokenizer)
      own_begun = '' if turn else begun
      parser = start(tags, before.decode('utf-8', 'replace'), own_begun)
      ids = itertools.chain.from_iterable(s.ids.tolist() for s in run)
      ended = parser.read(_bytes(ids, tokenizer))
      out += [make_block(block, 'policy', turn) for block in ended]
      continue
    before = b''
    for segment in run:
      text = _bytes(segment.ids.tolist(), tokenizer)
      if segment.author == 'prompt' or template.calls:
        before += text
      if segment.author == 'prompt':
        continue
      if segment.kind != OUTSIDE:
        text = _between(text, *template.kinds[segment.kind].tags)
        if text is None:  # cut='tokens' left no room for it
          continue
      if text.strip() or segment.kind != OUTSIDE:
        block = (segment.kind, text, True)
        out.append(make_block(block, segment.author, max(turn, 0)))
  return tuple(out)


def _between(text: bytes, opening: str, closing: str) -> bytes | None:
  """What is between the first and the last of these tags, or after the first;
  all, if there are no tags."""
  if not opening:
    return text
  _, opened, text = text.partition(opening.encode())
  before, closed, _ = text.rpartition(closing.encode())
  text = before if closed else text  # unclosed with cut='tokens'
  return text if opened else None


def _bytes(ids: Iterable[int], tokenizer) -> bytes:
  return b''.join(map(tokenizer.token_bytes, ids))


def answer(
  found: Sequence[Block], form: str, noted: Collection[int] = ()
) -> str | None:
  """Returns the policy's last complete answer in `found`, or None.

  form: config.env.answer. 'tags': the text of an answer block. 'boxed': the
  content of \\boxed{...}, in an answer block or outside blocks. noted: turns in
  which it was asked for something else.
  """
  for block in reversed(found):
    if block.author != 'policy' or block.turn in noted:
      continue
    if form == 'tags' and block.kind == 'answer' and block.complete:
      return block.text
    if form == 'boxed' and block.kind in ('answer', OUTSIDE):
      if (text := boxed(block.text)) is not None:
        return text
  return None


_BRACES = re.compile(r'\\boxed\s*\{|\\.|[{}]', re.DOTALL)


def boxed(text: str) -> str | None:
  """The content of the last \\boxed{...} with balanced braces, or None."""
  starts, last, content = [], -1, None
  for match in _BRACES.finditer(text):
    if match[0] == '{' or len(match[0]) > 2:
      starts.append(match.end() if len(match[0]) > 1 else -1)
    elif match[0] == '}' and starts:
      start = starts.pop()
      if start > last:
        last, content = start, text[start : match.start()].strip()
  return content
