"""Templates and protocol tags as data.

A template is a JSON file (those of the package are in templates/): every tag,
the prompt, the observation, the passage line, the feedback and the stops. A
user's own file defines every field; nothing is filled in behind it.
"""

import dataclasses
import difflib
import functools
import json
import pathlib
import re
import string
from typing import Any

from searchrl_jax.run.lookup import near

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
BLOCKS = ('think', 'search', 'information', 'answer')
SLOT = '{question}'
PASSAGE_FIELDS = ('i', 'title', 'text', 'id')
CUTS = ('passages', 'tokens')


@dataclasses.dataclass(frozen=True)
class Template:
  """One protocol in text. Every field is in the JSON file, but `name`.

  Attributes:
    name: the file's stem.
    think, search, information, answer: (open, close) of each block.
    prompt: text with one {question}, or ((role, content), ...) rendered by
      the tokenizer's chat template, with one {question} in all.
    question_mark: end the question with "?".
    observation: text with the information tags around one {passages}.
    passage: one line, with {text} and any of {i} {title} {id}; i from 1.
    passage_separator: between passages.
    no_results: stands for {passages} when a search found none.
    cut: how an observation that is too long for its budget ends. 'passages':
      after a whole passage (a first one that is too long, after a word), and
      closed. 'tokens': after as many tokens as fit, unclosed, as Search-R1's
      released checkpoints saw it; to evaluate these.
    query_separator: splits a search block into parallel queries; '' = one.
    max_queries: of one search block; more are left out.
    invalid: what the policy is told after a turn without a valid action.
    last_turn: what it is told before its last turn, which cannot search.
    stops: strings that end a generation; both closing tags are among them.
  """

  name: str
  think: tuple[str, str]
  search: tuple[str, str]
  information: tuple[str, str]
  answer: tuple[str, str]
  prompt: str | tuple[tuple[str, str], ...]
  question_mark: bool
  observation: str
  passage: str
  passage_separator: str
  no_results: str
  cut: str
  query_separator: str
  max_queries: int
  invalid: str
  last_turn: str
  stops: tuple[str, ...]

  @property
  def tags(self) -> dict[str, tuple[str, str]]:
    return {kind: getattr(self, kind) for kind in BLOCKS}

  def stops_for(self, may_search: bool) -> tuple[str, ...]:
    """A generation that may not search runs on past </search>."""
    if may_search:
      return self.stops
    return tuple(s for s in self.stops if s != self.search[1])

  def question(self, text: str) -> str:
    text = text.strip()
    if self.question_mark and not text.endswith('?'):
      text += '?'
    return text

  @functools.cached_property
  def passage_parts(self) -> tuple[tuple[str, str | None], ...]:
    """(literal, field after it or None), ..."""
    return tuple(
      (literal, field)
      for literal, field, _, _ in string.Formatter().parse(self.passage)
    )

  @functools.cached_property
  def protected(self) -> tuple[str, ...]:
    """Tags that outside text may not hold: the protocol's, and any other
    that the passage line or the observation uses."""
    tags = [tag for pair in self.tags.values() for tag in pair]
    tags += re.findall(r'</?\w[\w-]*>', self.passage + self.observation)
    return tuple(dict.fromkeys(tags))


def load(name_or_path: str) -> Template:
  """A template of the package by name, or your own JSON file by path.

  Raises:
    ValueError: no such template, or a field missing, unknown or wrong; the
      message names file and field.
  """
  path = pathlib.Path(name_or_path)
  if not name_or_path.endswith('.json'):
    names = sorted(p.stem for p in TEMPLATES.glob('*.json'))
    if name_or_path not in names:
      raise ValueError(
        f'env.template={name_or_path!r} is no template of the package, and no '
        f'.json file of your own: {near(name_or_path, names)}'
      )
    path = TEMPLATES / f'{name_or_path}.json'
  try:
    data = json.loads(path.read_text('utf-8'))
  except OSError as e:
    raise ValueError(f'template {path} cannot be read: {e.strerror}') from e
  except (json.JSONDecodeError, UnicodeDecodeError) as e:
    raise ValueError(f'template {path} is not JSON: {e}') from e
  return parse(data, path.stem, str(path))


def parse(data: Any, name: str, where: str) -> Template:
  """Checks the fields of a template; `where` names it in errors."""

  def fail(field, why):
    raise ValueError(f'template {where}, field {field!r}: {why}')

  if not isinstance(data, dict):
    raise ValueError(f'template {where}: expected a JSON object')
  fields = {f.name: f for f in dataclasses.fields(Template) if f.name != 'name'}
  for field in data:
    if field not in fields:
      fail(field, f'unknown; {near(field, fields)}')
  for field in fields:
    if field not in data:
      fail(field, 'missing; a template defines every field')
  data = dict(data)

  for kind in BLOCKS:
    pair = data[kind]
    if (
      not isinstance(pair, list)
      or len(pair) != 2
      or not all(isinstance(t, str) and t.strip() for t in pair)
    ):
      fail(kind, f'expected ["open tag", "close tag"], got {pair!r}')
    data[kind] = tuple(pair)
  tags = [(kind, tag) for kind in BLOCKS for tag in data[kind]]
  for n, (kind, tag) in enumerate(tags):
    for m, (_, other) in enumerate(tags):
      if n != m and tag in other:
        fail(kind, f'tag {tag!r} is part of tag {other!r}; they must differ')

  strings = (
    'observation', 'passage', 'passage_separator', 'no_results',
    'query_separator', 'invalid', 'last_turn',
  )  # fmt: skip
  for field in strings:
    if not isinstance(data[field], str):
      fail(field, f'expected text, got {data[field]!r}')
  if not data['invalid']:
    fail('invalid', 'empty; without it two turns would run into each other')
  if not isinstance(data['question_mark'], bool):
    fail('question_mark', 'expected true or false')
  if data['cut'] not in CUTS:
    fail('cut', f'{data["cut"]!r} is none of {CUTS}')
  most = data['max_queries']
  if type(most) is not int or most < 1:
    fail('max_queries', f'expected a count of at least 1, got {most!r}')
  if most > 1 and not data['query_separator']:
    fail('query_separator', 'empty, but max_queries is more than 1')

  prompt = data['prompt']
  if isinstance(prompt, list):
    for message in prompt:
      wrong = not isinstance(message, dict) or not all(
        isinstance(message.get(k), str) for k in ('role', 'content')
      )
      if wrong or len(message) != 2:
        fail('prompt', f'expected {{"role", "content"}}, got {message!r}')
    data['prompt'] = tuple((m['role'], m['content']) for m in prompt)
    text = ''.join(content for _, content in data['prompt'])
  elif isinstance(prompt, str):
    text = prompt
  else:
    fail('prompt', 'expected text, or a list of messages')
  if text.count(SLOT) != 1:
    fail('prompt', f'needs {SLOT} once, has it {text.count(SLOT)} times')

  opening, closing = data['information']
  shape = [opening, '{passages}', closing]
  found = [data['observation'].count(s) for s in shape]
  at = [data['observation'].find(s) for s in shape]
  if found != [1, 1, 1] or at != sorted(at):
    fail('observation', f'needs {"...".join(shape)}, each once')

  try:
    used = [f for _, f, _, _ in string.Formatter().parse(data['passage'])]
  except ValueError as e:
    fail('passage', f'{e}; a brace of your own is written twice')
  for field in used:
    if field is not None and field not in PASSAGE_FIELDS:
      close = difflib.get_close_matches(field, PASSAGE_FIELDS, 1)
      hint = f'; did you mean {{{close[0]}}}?' if close else ''
      fail('passage', f'{{{field}}} is none of {PASSAGE_FIELDS}{hint}')
  if 'text' not in used:
    fail('passage', 'needs {text}')

  stops = data['stops']
  if not isinstance(stops, list) or not all(
    isinstance(s, str) and s for s in stops
  ):
    fail('stops', f'expected a list of strings, got {stops!r}')
  for kind in ('search', 'answer'):
    closing = data[kind][1]
    if closing not in stops:
      fail('stops', f'{closing!r}, which ends a {kind}, is not among them')
  data['stops'] = tuple(stops)
  return Template(name=name, **data)
