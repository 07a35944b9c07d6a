"""Puts outside text into prompts and observations, safely.

A question goes into its prompt, passages into an observation. Every character
is marked as outside text or as the project's own ("ours"). Control tokens are
parsed in our text only (tokenizer.encode_parts), and tags of the protocol are
neutralised in outside text.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
import re

from searchrl_jax.lookup import require
from searchrl_jax.text import prompts
from searchrl_jax.types import Passage, Question

Part = tuple[str, bool]  # text, and whether it is ours (not outside text)
_ASSISTANT = 'assistant'  # the policy's role in a chat
# What stands for a text while a chat template is rendered, by a number.
mark = '\ue000{}\ue001'.format
MARKS = re.compile('\ue000(\\d+)\ue001')


# Prompts.


def prompt_parts(
  template, question: Question, mode, tokenizer, tools=(), reply=True
) -> list[Part]:
  """Returns the prompt as (text, ours) parts.

  mode 'template': the template's prompt with the question, in which tags are
  neutralised. mode 'as_is': the question's messages, which contain their own
  instructions, rendered by the tokenizer's chat template, or joined by newlines
  if there is none. They are outside text, so control tokens have no effect, but
  their tags are kept, because they explain the protocol. A last message of the
  assistant is the beginning of the reply (`begun`), which the policy continues.

  tools, reply: of a chat, see `tokenizer.chat`.

  Raises:
    ValueError: 'as_is' without messages; a chat template that is missing or
      omits the question.
  """
  if mode == 'as_is':
    asked = [(m['role'], [(m['content'], False)]) for m in question.messages]
    fix = "which data.prompt='as_is' renders; use 'template'"
    require(asked, f'question {question.id!r} has no messages, {fix}')
    if tokenizer.has_chat:
      return chat_parts(tokenizer, asked, tools, reply)
    return [('\n'.join(m['content'] for m in question.messages), False)]
  text = template.question(question.text)

  def fill(content: str) -> list[Part]:
    before, slot, after = content.partition(prompts.SLOT)
    return [(before, True), (text if slot else '', False), (after, True)]

  if isinstance(template.prompt, str):
    parts = fill(template.prompt)
  else:
    messages = [(role, fill(content)) for role, content in template.prompt]
    parts = chat_parts(tokenizer, messages, tools, reply)
  return neutralised(template, parts, tokenizer.normalised)


def begun(template, question: Question, mode: str) -> str:
  """The beginning of the policy's reply that a prompt ends with, or ''."""
  messages = template.prompt
  if mode == 'as_is':
    messages = [(m['role'], m['content']) for m in question.messages]
  if isinstance(messages, str) or not messages:
    return ''
  role, content = messages[-1]
  return content if role == _ASSISTANT else ''


def chat_parts(tokenizer, messages, tools=(), reply=True) -> list[Part]:
  """Renders messages, (role, parts) each, with marks, and fills these.

  Outside text does not pass through the chat template, so the rendered text
  that is ours (control tokens) stays separate from it. A last message of the
  assistant follows what begins its reply.
  """
  begins: list[Part] = []
  if messages[-1][0] == _ASSISTANT:
    *messages, (_, begins) = messages
  parts = [p for _, content in messages for p in content]
  marks = map(mark, itertools.count())
  marked = [
    {'role': role, 'content': ''.join(next(marks) for _ in content)}
    for role, content in messages
  ]
  # Text, number of a part, text, ...
  pieces = MARKS.split(tokenizer.chat(marked, tools, reply))
  lost = set(range(len(parts))) - {int(n) for n in pieces[1::2]}
  texts = [parts[n][0][:60] for n in lost]
  what = f'the chat template of {tokenizer.path} leaves out {texts}'
  require(not lost, f'{what}; use other roles')
  for n, piece in enumerate(pieces):
    pieces[n] = parts[int(piece)] if n % 2 else (piece, True)
  return [p for p in (*pieces, *begins) if p[0]]


# Observations.


class Observer:
  """Formats passages, or the text of a tool, as observations of a template."""

  def __init__(self, tokenizer, template):
    self.tokenizer, self.template = tokenizer, template
    before, _, after = template.observation.partition('{passages}')
    self._before, self._after = (before, True), (after, True)
    # Number of tokens that every observation needs.
    shortest = [(template.no_results, True)], self._line(1, Passage(*'xxx'))
    self.least = max(len(self._encode(body)) for body in shortest)

  def __call__(self, passages: Sequence[Passage | str], limit: int):
    """Returns at most `limit` ids, and whether passages were left out or cut.

    The observation has as many complete passages as fit, from the first; if the
    first does not fit, it is cut after a word (a very long word after a
    character). Text of the template, such as the closing tag, is always
    included. The list is empty if that does not fit, which requires limit <
    `least`. With cut='tokens' in the template, the result is the first `limit`
    ids of the observation. The text of a tool is a passage without the
    template's passage line.
    """
    _, ids, cut = self.fitted(passages, limit)
    if self.template.cut == 'tokens':
      return ids[: max(limit, 0)], cut
    return (ids if len(ids) <= limit else []), cut

  def fitted(self, passages: Sequence[Passage | str], limit: int):
    """Returns the parts between the tags, the ids of the observation, and
    whether passages were left out or cut. It may still be too long."""
    sep = (self.template.passage_separator, True)
    passages, short = self._clipped(passages, limit)
    lines = [self._line(i, p) for i, p in enumerate(passages, 1)]
    lines = lines or [[(self.template.no_results, True)]]

    def of(n):
      body = [part for line in lines[:n] for part in (sep, *line)][1:]
      body = self._cleaned(body)
      return body, self._encode(body)

    # Usually all passages fit, or not even the first.
    body, ids = of(len(lines))
    if len(ids) <= limit or self.template.cut == 'tokens':
      return body, ids, short or len(ids) > limit
    fewer = map(of, range(1, len(lines)))
    if fitting := [*itertools.takewhile(lambda x: len(x[1]) <= limit, fewer)]:
      return *fitting[-1], True
    # Cleaned before it is cut, so that cuts are in the text that is shown.
    first = self._cleaned(lines[0])
    for pattern in (_WORDS, '(?s:.)'):
      kept = self._fit(_split(first, pattern), limit)
      if any(text.strip() for text, ours in kept if not ours):
        break
    body = self._cleaned(kept)
    return body, self._encode(body), True

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

    def clip(text: str) -> str:
      if len(text) <= 8 * limit:  # short enough
        return text
      start = text[: limit * self.tokenizer.max_token_bytes]
      ids = self.tokenizer.encode(start)
      if len(ids) <= limit and start == text:
        return text
      return start[: len(self.tokenizer.decode(ids[:limit]))]

    clipped = lambda p: Passage(p.id, clip(p.title), clip(p.text), p.score)
    out = [clip(p) if isinstance(p, str) else clipped(p) for p in passages]
    return out, out != [*passages]

  def _line(self, i: int, passage: Passage | str) -> list[Part]:
    if isinstance(passage, str):
      return [(passage, False)]
    values = {**vars(passage), 'i': str(i), None: ''}
    fields = self.template.passage_parts
    pairs = [[(t, True), (values[f], f == 'i')] for t, f in fields]
    return [part for pair in pairs for part in pair if part[0]]

  def _cleaned(self, body: Sequence[Part]) -> list[Part]:
    """Neutralises the body, as part of the text with the tags around it."""
    body = [self._before, *body, self._after]
    return neutralised(self.template, body, self.tokenizer.normalised)[1:-1]

  def _encode(self, body: Sequence[Part]) -> list[int]:
    return self.tokenizer.encode_parts([self._before, *body, self._after])


# Words with the white space before them. Those of more than 24 characters are
# split, because some scripts have no spaces.
_WORDS = r'\s*\S{1,24}(?!\S)|\s*\S|\s+'


def _split(parts: Sequence[Part], pattern: str) -> list[Part]:
  """Splits outside parts into what matches `pattern`."""
  return [
    (piece, ours)
    for text, ours in parts
    for piece in ([text] if ours else re.findall(pattern, text))
  ]


def _first(pieces: Sequence[Part], n: int) -> list[Part]:
  """The first n outside pieces and all of ours."""
  outside = itertools.count(1)
  return [p for p in pieces if p[1] or next(outside) <= n]


# Outside text.

# Invisible characters, which could hide an instruction or a terminal command:
# controls but \n \t, bidi overrides, the tags block.
_HIDDEN = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069'
  '\U000e0000-\U000e007f\ue000\ue001]'
)
_SURROGATE = re.compile('[\ud800-\udfff]')


@functools.cache
def _tags(template) -> re.Pattern:
  return re.compile('|'.join(map(re.escape, template.protected)))


def neutralised(
  template,
  parts: Iterable[Part],
  normalise: Callable[[str], str] = lambda text: text,
) -> list[Part]:
  """Replaces the delimiters of the protocol's tags in outside text by spaces.

  Tags are matched exactly, like in the parser. Similar text has no effect,
  because every token has an author and outside text cannot become a control
  token (tokenizer.encode_parts). Tags are searched in the whole text, to find
  those that span a title and a text, or outside text and ours. Our text and all
  words are kept.

  normalise: what the tokenizer does to text before it encodes it, such as NFKC
    or lower case. Where that would make a tag, outside text becomes normalised.
  """
  cleaned = [(t if ours else _clean(t), ours) for t, ours in parts]
  parts = _taken_apart(template, cleaned)
  read = [(t if ours else normalise(t), ours) for t, ours in parts]
  safe = _taken_apart(template, read)
  return parts if safe == read else safe


def _taken_apart(template, parts: list[Part]) -> list[Part]:
  tags, whole = _tags(template), ''.join(t for t, _ in parts)
  if not tags.search(whole):
    return parts
  starts = [*itertools.accumulate((len(t) for t, _ in parts), initial=0)]
  ours = lambda n: parts[bisect.bisect_right(starts, n) - 1][1]
  between = lambda n: whole[n] != ' ' and not whole[n].isalnum()
  found, changed = lambda: (m.span() for m in tags.finditer(whole)), False
  # A replacement may create a tag of several words.
  while at := [
    n for span in found() for n in range(*span) if between(n) and not ours(n)
  ]:
    chars, changed = list(whole), True
    for n in at:
      chars[n] = ' '
    whole = ''.join(chars)
  if not changed:
    return parts
  spans = itertools.pairwise(starts)
  return [(whole[a:b], is_ours) for (a, b), (_, is_ours) in zip(spans, parts)]


def _clean(text: str) -> str:
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return _SURROGATE.sub('\ufffd', _HIDDEN.sub('', text))
