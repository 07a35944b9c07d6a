"""Text from outside: made harmless, then put where it belongs.

A question goes into its prompt, passages into an observation. Outside text is
told apart from ours to the last character: control tokens are parsed in ours
alone (tokenizer.encode_parts), the protocol's tags are taken apart in the rest.
"""

from collections.abc import Iterable, Sequence
import functools
import itertools
import re

from searchrl_jax.text import prompts
from searchrl_jax.types import Passage, Question

Part = tuple[str, bool]  # text, and whether it is ours (not from outside)
_KNOWN = 4096  # observations remembered,
_SMALL = 10_000  # of at most so many characters


# Prompts.


def prompt_parts(
  template, question: Question, mode: str, tokenizer
) -> list[Part]:
  """The prompt as (text, ours) parts.

  mode 'template': our prompt around the question. The question is outside
  text: its tags are neutralised. mode 'as_is': the data's own messages (which
  hold their own instructions) rendered by the tokenizer's chat template, or
  joined by newlines where it has none; nothing is added. Their text is
  outside text too (no control token in it acts), yet its tags stay, since such
  a prompt explains the protocol.

  Raises:
    ValueError: an unknown mode; as_is without messages; a chat template that
      is absent or leaves the question out.
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
  """Renders stand-ins, then puts each text in its place.

  So outside text never passes through the chat template, and what is ours
  in the rendered text (control tokens) stays told apart from what is not.
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
  """Puts passages into observations of one template."""

  def __init__(self, tokenizer, template):
    self.tokenizer = tokenizer
    self.template = template
    self._clean = neutraliser(template)
    before, _, after = template.observation.partition('{passages}')
    self._before, self._after = (before, True), (after, True)
    # Tokens of the shortest observations: no room for less.
    shortest = [(template.no_results, True)], self._line(1, Passage(*'xxx'))
    self.least = max(len(self._encode(body)) for body in shortest)
    # The samples of a question search for much the same.
    self._known = functools.lru_cache(_KNOWN)(self._observation)

  def __call__(
    self, passages: Sequence[Passage], limit: int
  ) -> tuple[list[int], bool]:
    """At most `limit` ids, and whether passages were left out or cut.

    Whole passages from the first on, as many as fit; if not even the first
    does, its beginning, up to a word (or, if that is endless, a character).
    What is ours, the closing tags above all, is always there. No ids: not
    even that fits; with a limit of `least` it does. (Where the template's
    cut='tokens': the first `limit` ids of all of it.)
    """
    small = sum(len(p.title) + len(p.text) for p in passages) <= _SMALL
    lay = self._known if small else self._observation
    ids, short = lay(tuple(passages), limit)
    return list(ids), short

  def _observation(self, passages: tuple[Passage, ...], limit: int):
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
    # All, as a rule. Else one, two, ...: mostly not even the first fits.
    if (ids := whole(len(lines))) is not None:
      return ids, short
    most = None
    for n in range(1, len(lines)):
      if (ids := whole(n)) is None:
        break
      most = ids
    if most is not None:
      return most, True
    # Cleaned first, so that every cut is a cut of what can be shown.
    first = self._cleaned(lines[0])
    kept = self._fit(_split(first, whole_words=True), limit)
    if not _outside(kept).strip():
      kept = self._fit(_split(first, whole_words=False), limit)
    ids = self._encode(self._cleaned(kept))
    return (ids if len(ids) <= limit else []), True

  def _fit(self, pieces: Sequence[Part], limit: int) -> list[Part]:
    """The most outside pieces that fit; ours all stay."""
    low, high = 0, sum(not ours for _, ours in pieces)
    while low < high:
      middle = (low + high + 1) // 2
      ids = self._encode(self._cleaned(_take(pieces, middle)))
      low, high = (middle, high) if len(ids) <= limit else (low, middle - 1)
    return _take(pieces, low)

  def _clipped(self, passages: Sequence[Passage], limit: int):
    """Passages without what is beyond `limit` tokens of a field, and whether
    there was any: of megabytes, only the beginning is worked on."""
    limit = max(limit, 1)
    short = False

    def clip(text: str) -> str:
      nonlocal short
      if len(text) <= 8 * limit:  # short enough to work on all of it
        return text
      most = text[: limit * self.tokenizer.max_token_bytes]
      ids = self.tokenizer.encode(most)
      if len(ids) <= limit and most == text:
        return text
      short = True
      return most[: len(self.tokenizer.decode(ids[:limit]))]

    out = [
      Passage(p.id, clip(p.title), clip(p.text), p.score) for p in passages
    ]
    return out, short

  def _line(self, i: int, passage: Passage) -> list[Part]:
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
    """The body, neutralised as it stands between its tags."""
    return self._clean.parts([self._before, *body, self._after])[1:-1]

  def _encode(self, body: Sequence[Part]) -> list[int]:
    return self.tokenizer.encode_parts([self._before, *body, self._after])


def _outside(parts: Sequence[Part]) -> str:
  return ''.join(text for text, ours in parts if not ours)


def _split(parts: Sequence[Part], whole_words: bool) -> list[Part]:
  """Outside parts, cut before each run of white space or each character.

  What has more than 24 characters is no word: some scripts have no spaces.
  """
  pattern = r'\s*\S{1,24}(?!\S)|\s*\S|\s+' if whole_words else r'(?s:.)'
  out = []
  for text, ours in parts:
    if ours:
      out.append((text, True))
    else:
      out += [(piece, False) for piece in re.findall(pattern, text)]
  return out


def _take(pieces: Sequence[Part], n: int) -> list[Part]:
  """The first n outside pieces and all of ours."""
  out = []
  for text, ours in pieces:
    n -= not ours
    if ours or n >= 0:
      out.append((text, ours))
  return out


# Outside text.

# Characters that show nothing and could hide an instruction or a terminal
# command: controls but \n \t, bidi overrides, the tags block.
_HIDDEN = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069'
  '\U000e0000-\U000e007f\ue000\ue001]'
)
_SURROGATE = re.compile('[\ud800-\udfff]')


class Neutraliser:
  """Puts spaces for the delimiters of the protocol's tags in outside text.

  Tags as the parser matches them, to the character: what only looks like one
  acts nowhere, since every token has its author, and no control token comes of
  outside text (tokenizer.encode_parts). They are looked for in the whole text,
  so that a tag split over a title and a text, or over the border to our own
  text, is found too. Ours stays as it is, and no word is lost.
  """

  def __init__(self, tags: Iterable[str]):
    self._re = re.compile('|'.join(map(re.escape, tags)))

  def text(self, text: str) -> str:
    return self.parts([(text, False)])[0][0]

  def parts(self, parts: Iterable[Part]) -> list[Part]:
    parts = [(t if mine else _clean(t), mine) for t, mine in parts]
    whole, before = ''.join(t for t, _ in parts), None
    if not self._re.search(whole):
      return parts
    ours = [mine for t, mine in parts for _ in t]
    while whole != before:  # a tag of several words may form anew
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
