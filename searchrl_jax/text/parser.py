"""The incremental parser: which block each sampled token belongs to.

The machine works on the bytes of one turn of one author:

    outside   an opening tag of kind k        -> inside k
              anything else                   -> outside ('other')
    inside k  the closing tag of k            -> outside; block k is complete
              anything else, other tags too   -> inside k (plain text)
    end of turn inside k                      -> block k stays incomplete

So only a block opened outside any other counts: `<search>` within a thought,
`<answer>` within policy-written information are words there. Tags are matched
exactly, case and spaces included, and never across turns.

The bytes of a tag belong to its block. A token belongs to the block of its
first byte (a token that straddles two kinds belongs to the earlier); a control
token, which has no bytes, to the block that is open where it stands. Outside
blocks a token waits while its first byte may still turn out to open a tag.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import itertools
import re

import numpy as np

from searchrl_jax.types import Segment

OUTSIDE = 'other'


@dataclasses.dataclass(frozen=True)
class Block:
  """One block of a trajectory; text outside any block has kind 'other'.

  text: between the tags, decoded from its author's own bytes (UTF-8, errors
  replaced), stripped. complete: False if the turn ended inside it.
  """

  kind: str
  author: str
  text: str
  complete: bool = True
  turn: int = 0


class Tags:
  """Opening and closing tags as bytes: kind -> (open, close)."""

  def __init__(self, tags: Mapping[str, tuple[str, str]]):
    self.open = {a.encode(): kind for kind, (a, _) in tags.items()}
    self.close = {kind: b.encode() for kind, (_, b) in tags.items()}
    self.opening = re.compile(b'|'.join(map(re.escape, self.open)))


@functools.lru_cache(maxsize=64)
def tags_of(template) -> Tags:
  """The tags of a prompts.Template."""
  return Tags(template.tags)


def _held(data: bytes, tags: Iterable[bytes]) -> int:
  """Bytes at the end of `data` that may be the start of one of `tags`."""
  return max(
    (
      n
      for tag in tags
      for n in range(min(len(tag) - 1, len(data)), 0, -1)
      if data.endswith(tag[:n])
    ),
    default=0,
  )


@dataclasses.dataclass(frozen=True)
class Parser:
  """The state of one turn; immutable.

  `feed` and `finish` return the next state, the kinds of the tokens that have
  become certain (oldest first, those fed earlier included) and the blocks
  that ended, as (kind, bytes between the tags, complete).
  """

  tags: Tags
  block: str = OUTSIDE
  inner: bytes = b''  # of the open block, or of the text outside blocks
  tail: bytes = b''  # bytes whose block is not certain
  waiting: tuple[int, ...] = ()  # where in `tail` each waiting token starts

  def feed(self, pieces: Sequence[bytes]):
    """`pieces`: the bytes of each new token."""
    return self._advance(pieces, final=False)

  def finish(self):
    """The turn is over: what was held is text; an open block is incomplete."""
    return self._advance((), final=True)

  def _advance(self, pieces, final):
    data = self.tail + b''.join(pieces)
    ends = itertools.accumulate(map(len, pieces), initial=len(self.tail))
    starts = np.array([*self.waiting, *ends])  # the last: the end of all
    lengths, starts = np.diff(starts), starts[:-1]
    tags, block, inner = self.tags, self.block, self.inner
    # (end, kind of its bytes, block open after it)
    spans = [(0, self.block, self.block)]
    blocks = []
    at = 0
    while True:
      if block == OUTSIDE:
        match = tags.opening.search(data, at)
        if match:
          a, b = match.span()
          end, wanted = a, ()
        else:
          end, wanted = len(data), tags.open
      else:
        closing = tags.close[block]
        end = data.find(closing, at)
        match = end >= 0
        if not match:
          end, wanted = len(data), (closing,)
      if not match and not final:
        end -= _held(data[at:], wanted)
      inner += data[at:end]
      if end > at:
        spans.append((end, block, block))
      at = end
      if not match:
        break
      if block == OUTSIDE:
        if inner.strip():
          blocks.append((OUTSIDE, inner, True))
        block = tags.open[data[a:b]]
        spans.append((b, block, block))
        at = b
      else:
        blocks.append((block, inner, True))
        at = end + len(closing)
        spans.append((at, block, OUTSIDE))
        block = OUTSIDE
      inner = b''

    sure = at
    if block != OUTSIDE:  # a closing tag belongs to the block as its text does
      sure = len(data)
      spans.append((sure, block, block))
    # A token with bytes is where its first byte is; one without stands after
    # the bytes before it.
    first = starts + (lengths > 0)
    known = int(np.searchsorted(first, sure, 'right'))
    ends, inside, after = (np.array(x) for x in zip(*spans))
    n = np.searchsorted(ends, first[:known])
    between = (lengths[:known] == 0) & (ends[n] == starts[:known])
    kinds = np.where(between, after[n], inside[n]).tolist()
    if final:
      if block != OUTSIDE:
        blocks.append((block, inner, False))
      elif inner.strip():
        blocks.append((OUTSIDE, inner, True))
      block, inner = OUTSIDE, b''
    left = tuple((starts[known:] - at).tolist())
    return Parser(tags, block, inner, data[at:], left), kinds, blocks


def start(tags: Tags, prompt: str) -> Parser:
  """The parser of a first turn. Some chat templates open a thought for the
  policy; then its turn starts inside it."""
  text = prompt.rstrip().encode('utf-8', 'replace')
  for opening, kind in tags.open.items():
    if kind == 'think' and text.endswith(opening):
      return Parser(tags, kind)
  return Parser(tags)


def within(pieces: Sequence[bytes], opening: str, closing: str) -> list[int]:
  """Which tokens hold text of the last block between these tags."""
  data = b''.join(pieces)
  start = data.rindex(opening.encode()) + len(opening.encode())
  end = data.index(closing.encode(), start)
  ends = np.cumsum([len(piece) for piece in pieces])
  return [
    n
    for n, (piece, at) in enumerate(zip(pieces, ends))
    if at > start and at - len(piece) < end
  ]


def make_block(found, author: str, turn: int) -> Block:
  kind, inner, complete = found
  text = inner.decode('utf-8', 'replace').strip()
  return Block(kind, author, text, complete, turn)


def blocks(
  segments: Sequence[Segment], template, tokenizer
) -> tuple[Block, ...]:
  """What follows the prompt, block by block.

  Each turn of the policy is parsed from its own ids by the machine that acted
  on them. Text between its blocks is a Block of kind 'other' (white space
  alone is left out). The environment's observations have kind 'information'
  (what stands between the tags), its feedback kind 'other'.
  """
  tags = tags_of(template)
  out: list[Block] = []
  turn = -1
  prompt = b''
  for own, run in itertools.groupby(segments, lambda s: s.author == 'policy'):
    if own:
      turn += 1
      parser = Parser(tags)
      if turn == 0:
        parser = start(tags, prompt.decode('utf-8', 'replace'))
      ids = itertools.chain.from_iterable(s.ids.tolist() for s in run)
      # All of it as one piece: whose kind is which is recorded already.
      found = parser._advance([_bytes(ids, tokenizer)], final=True)[2]
      out.extend(make_block(f, 'policy', turn) for f in found)
      continue
    for segment in run:
      text = _bytes(segment.ids.tolist(), tokenizer)
      if segment.author == 'prompt':
        prompt += text
        continue
      if segment.kind != OUTSIDE:
        opening = template.tags[segment.kind][0].encode()
        closing = template.tags[segment.kind][1].encode()
        text = text.partition(opening)[2]
        before, closed, _ = text.rpartition(closing)
        text = before if closed else text  # cut='tokens' leaves some open
      if text.strip():
        found = (segment.kind, text, True)
        out.append(make_block(found, segment.author, max(turn, 0)))
  return tuple(out)


def _bytes(ids: Iterable[int], tokenizer) -> bytes:
  return b''.join(map(tokenizer.token_bytes, ids))


def answer(found: Iterable[Block], form: str) -> str | None:
  """The policy's last complete answer in `blocks`, or None.

  Only this can earn. form: config.env.answer. 'tags': an answer block.
  'boxed': what stands in \\boxed{...}, in an answer block or outside all.
  """
  answers = [
    b.text if form == 'tags' else boxed(b.text)
    for b in found
    if b.author == 'policy'
    and (
      b.kind == 'answer'
      and (b.complete or form == 'boxed')
      or b.kind == OUTSIDE
      and form == 'boxed'
    )
  ]
  return next((text for text in reversed(answers) if text is not None), None)


_BRACES = re.compile(r'\\boxed\s*\{|\\.|[{}]', re.DOTALL)


def boxed(text: str) -> str | None:
  """What stands in the last \\boxed{...} whose braces balance, or None."""
  starts, last, found = [], -1, None
  for match in _BRACES.finditer(text):
    if match[0] == '{' or len(match[0]) > 2:
      starts.append(match.end() if len(match[0]) > 1 else -1)
    elif match[0] == '}' and starts:
      start = starts.pop()
      if start > last:
        last, found = start, text[start : match.start()].strip()
  return found
