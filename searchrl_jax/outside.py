"""Text from outside: made harmless, then put where it belongs.

A question goes into its prompt, passages into an observation. Outside text is
told apart from ours to the last character: control tokens are parsed in ours
alone (tokenizer.encode_parts), protocol tags are taken off the rest.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence

from searchrl_jax import prompts
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
  return neutraliser(template, tokenizer).parts(parts)


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
    self._clean = neutraliser(template, tokenizer)
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
      if len(text) <= limit:
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

_LEFT = '‹〈⟨❬❮❰˂ᐸ⧼«《⟪'
_RIGHT = '›〉⟩❭❯❱˃ᐳ⧽»》⟫'
_ALIKE = {
  **dict.fromkeys(map(ord, _LEFT), '<'),
  **dict.fromkeys(map(ord, _RIGHT), '>'),
  **dict.fromkeys(map(ord, '∕⁄⧸╱'), '/'),
  **dict.fromkeys(map(ord, '∣│ǀ'), '|'),
  # Letters and symbols that show nothing.
  **dict.fromkeys((0x115F, 0x1160, 0x3164, 0xFFA0, 0x2800), None),
  # Cyrillic and Greek letters that look Latin (lower case: text is folded).
  **{
    ord(a): b
    for a, b in zip('аеорсхуікһѕјαοινρε', 'aeopcxyikhsjaoivpe', strict=True)
  },
}
_ENTITY = {'<': '&lt;?|&#0*60;?|&#x0*3c;?', '>': '&gt;?|&#0*62;?|&#x0*3e;?',
           '/': '&#0*47;?|&#x0*2f;?|&sol;'}  # fmt: skip
# Characters that show nothing and could hide a tag, an instruction or a
# terminal command: controls but \n \t, bidi overrides, the tags block.
_HIDDEN = re.compile(
  '[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069'
  '\U000e0000-\U000e007f\ue000\ue001]'
)

_SURROGATE = re.compile('[\ud800-\udfff]')


def _folded(text: str) -> str:
  """Lower case, look-alikes mapped, marks and invisible characters gone."""
  text = unicodedata.normalize('NFKD', text).casefold()
  text = unicodedata.normalize('NFKD', text).translate(_ALIKE)
  if text.isascii():
    return text
  return ''.join(c for c in text if unicodedata.category(c) not in _UNSEEN)


_UNSEEN = frozenset({'Mn', 'Me', 'Cf'})


def _one(char: str) -> str:
  return f'(?:{re.escape(char)}|{_ENTITY[char]})' if char in _ENTITY else (
    re.escape(char)
  )


def _tag_pattern(tag: str, loose: bool) -> str:
  """A regex on folded text for variants of a tag, spaces inside included.

  `loose`: the opening half is enough (the other half may come from what
  stands next to it), and slashes and repetitions are taken along; 8 of them,
  so that a passage of nothing but `<` takes linear time.
  """
  tag = _folded(tag)
  match = re.fullmatch(r'(\W+)(\w(?:.*\w)?)(\W*)', tag, re.DOTALL)
  if not match:
    return r'\s*'.join(map(_one, tag))
  lead, core, trail = match.groups()
  core = r'\s*'.join(map(_one, core))
  if not loose:
    return r'\s*'.join([*map(_one, lead), core, *map(_one, trail)])
  lead = '|'.join(map(_one, dict.fromkeys(lead.replace('/', '') or lead)))
  slash = _one('/')
  trail = '|'.join(map(_one, dict.fromkeys(trail))) or '(?!)'
  return (
    rf'(?:{lead})(?:{lead}|{slash}|\s){{0,8}}{core}(?!\w)'
    rf'(?:(?:\s|{slash}){{0,8}}(?:{trail})(?:{trail}|{slash}|\s){{0,8}})?'
  )


class Neutraliser:
  """Takes the delimiters off tags in outside text; ours stays as it is.

  `</information>`, `< /Search\\n>`, `＜answer＞`, `<se\\u200barch>` and
  `&lt;answer&gt;` all become bare words. Matches are looked for in the whole
  text, so that a tag split over a title and a text, or over the border to
  our own text, is found too. Only delimiters go: no word of a passage is
  lost.
  """

  def __init__(self, tags: Iterable[str], control: Iterable[str] = ()):
    """`tags` of the protocol; `control`: names of the tokenizer's tokens."""
    tags, control = list(tags), list(control)
    patterns = {_tag_pattern(t, True) for t in tags}
    patterns |= {_tag_pattern(t, False) for t in control}
    # What a match can start with, looked at before the many patterns are.
    first = {c for t in tags for c in re.match(r'\W*', _folded(t)).group()}
    first |= {_folded(t)[:1] for t in [*tags, *control]} | {'&'}
    first = ''.join(map(re.escape, sorted(first)))
    # Longest first: of two tags that start alike the longer is taken.
    patterns = '|'.join(sorted(patterns, key=len, reverse=True))
    self._re = re.compile(f'(?=[{first}])(?:{patterns})')

  def text(self, text: str) -> str:
    return ''.join(t for t, _ in self.parts([(text, False)]))

  def parts(self, parts: Iterable[Part]) -> list[Part]:
    parts = [(t if ours else _clean(t), ours) for t, ours in parts]
    # Taking delimiters off can bring others together, a few levels deep at
    # most in honest text; whoever nests deeper loses all delimiters.
    for _ in range(4):
      spans = self._find(parts)
      if not spans:
        return parts
      parts = _without(parts, spans)
    bare = re.compile(f'[<>|/&{_LEFT}{_RIGHT}＜＞﹤﹥]')
    while self._find(parts):
      parts = [(t if ours else bare.sub(' ', t), ours) for t, ours in parts]
      bare = re.compile(r'[^\w\s]|_')
    return parts

  def _find(self, parts: Sequence[Part]) -> list[tuple[int, int]]:
    """Ranges of characters of outside text, in the joined text, to drop."""
    whole = ''.join(t for t, _ in parts)
    if not self._re.search(_folded(whole)):
      return []
    chars: list[str] = []
    where: list[int] = []
    for n, char in enumerate(whole):
      for c in _folded(char):
        chars.append(c)
        where.append(n)
    ours: list[bool] = []
    for text, mine in parts:
      ours += [mine] * len(text)
    drop = []
    for match in self._re.finditer(''.join(chars)):
      at = where[match.start() : match.end()]
      if all(ours[n] for n in at):
        continue
      shown = match.group()
      entities = {
        k
        for e in re.finditer('|'.join(_ENTITY.values()), shown)
        for k in range(*e.span())
      }
      drop += [
        n
        for k, n in enumerate(at)
        if not ours[n]
        and (k in entities or not (shown[k].isalnum() or shown[k].isspace()))
      ]
    return _ranges(sorted(set(drop)))


def _clean(text: str) -> str:
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return _SURROGATE.sub('\ufffd', _HIDDEN.sub('', text))


def _ranges(places: Sequence[int]) -> list[tuple[int, int]]:
  out: list[tuple[int, int]] = []
  for n in places:
    if out and out[-1][1] == n:
      out[-1] = (out[-1][0], n + 1)
    else:
      out.append((n, n + 1))
  return out


def _without(
  parts: Sequence[Part], spans: Sequence[tuple[int, int]]
) -> list[Part]:
  """Puts one space for each span, which lies in outside text."""
  out = []
  at = 0
  for text, ours in parts:
    end = at + len(text)
    pieces, last = [], at
    for a, b in spans:
      a, b = max(a, at), min(b, end)
      if a < b:
        pieces += [text[last - at : a - at], ' ']
        last = b
    out.append((''.join([*pieces, text[last - at :]]), ours))
    at = end
  return out


@functools.lru_cache(maxsize=64)
def neutraliser(template, tokenizer) -> Neutraliser:
  return Neutraliser(template.protected, tokenizer.control_texts)
