"""Puts outside text into prompts and observations, safely.

A question goes into its prompt, passages into an observation. Every character
is marked as outside text or as the project's own ("ours"). Control tokens are
parsed in our text only (tokenizer.encode_parts), and tags of the protocol are
neutralised in outside text.
"""

from collections.abc import Iterable, Sequence
import functools
import itertools
import re

from searchrl_jax.text import prompts
from searchrl_jax.types import Passage, Question

Part = tuple[str, bool]  # text, and whether it is ours (not outside text)
_CACHED = 4096  # observations in the cache
_SMALL = 10_000  # limit in characters for those


# Prompts.


def prompt_parts(
  template, question: Question, mode: str, tokenizer
) -> list[Part]:
  """Returns the prompt as (text, ours) parts.

  mode 'template': the template's prompt with the question, in which tags are
  neutralised. mode 'as_is': the question's messages, which contain their own
  instructions, rendered by the tokenizer's chat template, or joined by newlines
  if there is none. They are outside text, so control tokens have no effect, but
  their tags are kept, because they explain the protocol.

  Raises:
    ValueError: an unknown mode; 'as_is' without messages; a chat template that
      is missing or omits the question.
  """
  if mode == 'as_is':
    if not question.messages:
      raise ValueError(
        f"question {question.id!r} has no messages, which data.prompt='as_is' "
        "renders; use data.prompt='template'"
      )
    if tokenizer.has_chat:
      return chat_parts(
        tokenizer,
        [(m['role'], [(m['content'], False)]) for m in question.messages],
      )
    return [('\n'.join(m['content'] for m in question.messages), False)]
  if mode != 'template':
    raise ValueError(f"data.prompt={mode!r} is neither 'template' nor 'as_is'")
  text = template.question(question.text)

  def fill(content: str) -> list[Part]:
    before, slot, after = content.partition(prompts.SLOT)
    if not slot:
      return [(content, True)]
    return [(before, True), (text, False), (after, True)]

  if isinstance(template.prompt, str):
    parts = fill(template.prompt)
  else:
    parts = chat_parts(
      tokenizer, [(role, fill(content)) for role, content in template.prompt]
    )
  return neutraliser(template).parts(parts)


def chat_parts(
  tokenizer, messages: Sequence[tuple[str, Sequence[Part]]]
) -> list[Part]:
  """Renders messages with placeholders, then fills in the texts.

  Outside text does not pass through the chat template, so the rendered text
  that is ours (control tokens) stays separate from it.
  """
  parts = [p for _, content in messages for p in content]
  marks = iter(range(len(parts)))
  rendered = tokenizer.chat(
    [
      {'role': r, 'content': ''.join(f'\ue000{next(marks)}\ue001' for _ in c)}
      for r, c in messages
    ]
  )
  out: list[Part] = []
  at = 0
  seen = set()
  for match in re.finditer('\ue000(\\d+)\ue001', rendered):
    out += [(rendered[at : match.start()], True), parts[int(match.group(1))]]
    seen.add(int(match.group(1)))
    at = match.end()
  out.append((rendered[at:], True))
  for n, (text, ours) in enumerate(parts):
    if n not in seen:
      raise ValueError(
        f'the chat template of {tokenizer.path} leaves out '
        f'{"a message of the template" if ours else repr(text[:60])}; '
        'use other roles'
      )
  return [p for p in out if p[0]]


# Observations.


class Observer:
  """Formats passages, or the text of a tool, as observations of a template."""

  def __init__(self, tokenizer, template):
    self.tokenizer = tokenizer
    self.template = template
    self._clean = neutraliser(template)
    before, _, after = template.observation.partition('{passages}')
    self._before, self._after = (before, True), (after, True)
    # Number of tokens that every observation needs.
    shortest = [(template.no_results, True)], self._line(1, Passage(*'xxx'))
    self.least = max(len(self._encode(body)) for body in shortest)
    # The samples of a question often search for the same.
    self._cached = functools.lru_cache(_CACHED)(self._observation)

  def __call__(
    self, passages: Sequence[Passage | str], limit: int
  ) -> tuple[list[int], bool]:
    """Returns at most `limit` ids, and whether passages were left out or cut.

    The observation has as many complete passages as fit, from the first; if the
    first does not fit, it is cut after a word (a very long word after a
    character). Text of the template, such as the closing tag, is always
    included. The list is empty if that does not fit, which requires limit <
    `least`. With cut='tokens' in the template, the result is the first `limit`
    ids of the observation. The text of a tool is a passage without the
    template's passage line.
    """
    small = (
      sum(
        len(p) if isinstance(p, str) else len(p.title) + len(p.text)
        for p in passages
      )
      <= _SMALL
    )
    observe = self._cached if small else self._observation
    ids, short = observe(tuple(passages), limit)
    return list(ids), short

  def _observation(self, passages: tuple[Passage | str, ...], limit: int):
    sep = (self.template.passage_separator, True)
    passages, short = self._clipped(passages, limit)
    lines = [self._line(i, p) for i, p in enumerate(passages, 1)]
    lines = lines or [[(self.template.no_results, True)]]

    def ids_of(n):
      body = list(lines[0])
      for line in lines[1:n]:
        body += [sep, *line]
      return self._encode(self._cleaned(body))

    def whole(n):
      ids = ids_of(n)
      return ids if len(ids) <= limit else None

    if self.template.cut == 'tokens':
      ids = ids_of(len(lines))
      return ids[: max(limit, 0)], short or len(ids) > limit
    # Usually all passages fit, or not even the first.
    if (ids := whole(len(lines))) is not None:
      return ids, short
    fitting = itertools.takewhile(
      lambda ids: ids is not None, map(whole, range(1, len(lines)))
    )
    if most := [*fitting]:
      return most[-1], True
    # Cleaned before it is cut, so that cuts are in the text that is shown.
    first = self._cleaned(lines[0])
    kept = self._fit(_split(first, whole_words=True), limit)
    if not _outside(kept).strip():
      kept = self._fit(_split(first, whole_words=False), limit)
    ids = self._encode(self._cleaned(kept))
    return (ids if len(ids) <= limit else []), True

  def _fit(self, pieces: Sequence[Part], limit: int) -> list[Part]:
    """As many outside pieces as fit, and all of ours."""
    low, high = 0, sum(not ours for _, ours in pieces)
    while low < high:
      middle = (low + high + 1) // 2
      ids = self._encode(self._cleaned(_first(pieces, middle)))
      low, high = (middle, high) if len(ids) <= limit else (low, middle - 1)
    return _first(pieces, low)

  def _clipped(self, passages: Sequence[Passage | str], limit: int):
    """Cuts title and text after `limit` tokens, to bound the work; returns the
    passages and whether anything was cut."""
    limit = max(limit, 1)
    short = False

    def clip(text: str) -> str:
      nonlocal short
      if len(text) <= 8 * limit:  # short enough
        return text
      start = text[: limit * self.tokenizer.max_token_bytes]
      ids = self.tokenizer.encode(start)
      if len(ids) <= limit and start == text:
        return text
      short = True
      return start[: len(self.tokenizer.decode(ids[:limit]))]

    out = [
      clip(p)
      if isinstance(p, str)
      else Passage(p.id, clip(p.title), clip(p.text), p.score)
      for p in passages
    ]
    return out, short

  def _line(self, i: int, passage: Passage | str) -> list[Part]:
    if isinstance(passage, str):
      return [(passage, False)]
    values = {
      'i': (str(i), True),
      'title': (passage.title, False),
      'text': (passage.text, False),
      'id': (passage.id, False),
    }
    parts = []
    for literal, field in self.template.passage_parts:
      parts.append((literal, True))
      if field is not None:
        parts.append(values[field])
    return parts

  def _cleaned(self, body: Sequence[Part]) -> list[Part]:
    """Neutralises the body, as part of the text with the tags around it."""
    return self._clean.parts([self._before, *body, self._after])[1:-1]

  def _encode(self, body: Sequence[Part]) -> list[int]:
    return self.tokenizer.encode_parts([self._before, *body, self._after])


def _outside(parts: Sequence[Part]) -> str:
  return ''.join(text for text, ours in parts if not ours)


def _split(parts: Sequence[Part], whole_words: bool) -> list[Part]:
  """Splits outside parts before white space, or into characters.

  Words of more than 24 characters are split, because some scripts have no
  spaces.
  """
  pattern = r'\s*\S{1,24}(?!\S)|\s*\S|\s+' if whole_words else r'(?s:.)'
  out = []
  for text, ours in parts:
    if ours:
      out.append((text, True))
    else:
      out += [(piece, False) for piece in re.findall(pattern, text)]
  return out


def _first(pieces: Sequence[Part], n: int) -> list[Part]:
  """The first n outside pieces and all of ours."""
  out = []
  for text, ours in pieces:
    n -= not ours
    if ours or n >= 0:
      out.append((text, ours))
  return out


# Outside text.

# Invisible characters, which could hide an instruction or a terminal command:
# controls but \n \t, bidi overrides, the tags block.
_HIDDEN = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069'
  '\U000e0000-\U000e007f\ue000\ue001]'
)
_SURROGATE = re.compile('[\ud800-\udfff]')


class Neutraliser:
  """Replaces the delimiters of the protocol's tags in outside text by spaces.

  Tags are matched exactly, like in the parser. Similar text has no effect,
  because every token has an author and outside text cannot become a control
  token (tokenizer.encode_parts). Tags are searched in the whole text, to find
  those that span a title and a text, or outside text and ours. Our text and all
  words are kept.
  """

  def __init__(self, tags: Iterable[str]):
    self._re = re.compile('|'.join(map(re.escape, tags)))

  def text(self, text: str) -> str:
    return self.parts([(text, False)])[0][0]

  def parts(self, parts: Iterable[Part]) -> list[Part]:
    parts = [(t if ours else _clean(t), ours) for t, ours in parts]
    whole, before = ''.join(t for t, _ in parts), None
    if not self._re.search(whole):
      return parts
    ours = [is_ours for t, is_ours in parts for _ in t]
    while whole != before:  # a replacement may create a tag of several words
      before, chars = whole, list(whole)
      for match in self._re.finditer(whole):
        for n in range(*match.span()):
          if not (ours[n] or chars[n].isalnum()):
            chars[n] = ' '
      whole = ''.join(chars)
    rest = iter(whole)
    return [(''.join(itertools.islice(rest, len(t))), m) for t, m in parts]


def _clean(text: str) -> str:
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return _SURROGATE.sub('\ufffd', _HIDDEN.sub('', text))


@functools.lru_cache(maxsize=64)
def neutraliser(template) -> Neutraliser:
  return Neutraliser(template.protected)
