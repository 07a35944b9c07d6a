"""Templates: the text of the protocol, as data.

A template is a JSON file with all tags, the prompt, the observation, the
passage line, the feedback and the stop strings. Those of the package are in
templates/. A user's file must define every field but `blocks`.
"""

import dataclasses
import difflib
import functools
import itertools
import json
import pathlib
import re
import string
from typing import Any

from searchrl_jax.run.lookup import near
from searchrl_jax.types import SEARCH

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
BLOCKS = ('think', 'search', 'information', 'answer')
OUTSIDE = 'other'  # the kind of text outside blocks
SLOT = '{question}'
PASSAGE_FIELDS = ('i', 'title', 'text', 'id')
CUTS = ('passages', 'tokens')


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of block.

  Attributes:
    name: of its segments (`Segment.kind`) and blocks (`parser.Block.kind`).
    tags: (open, close).
    tool: the tool that is called with the text of the block; '' = none.
    ends: whether it ends the trajectory, as the answer does.
  """

  name: str
  tags: tuple[str, str]
  tool: str = ''
  ends: bool = False

  @property
  def acts(self) -> bool:
    return bool(self.tool)


@dataclasses.dataclass(frozen=True)
class Template:
  """One text protocol. All fields but `name` are in the JSON file.

  Attributes:
    name: the stem of the file.
    think, search, information, answer: (open, close) tags of each block.
    prompt: text, or ((role, content), ...) for the tokenizer's chat template,
      with one {question} in total.
    question_mark: whether to end the question with "?".
    observation: text with the information tags around one {passages}.
    passage: one line, with {text} and any of {i} {title} {id}; i starts at 1.
    passage_separator: between passages.
    no_results: replaces {passages} if a search found none.
    cut: where an observation that is too long is cut. 'passages': after a
      complete passage (a first one that is too long, after a word), with the
      closing tag. 'tokens': after as many tokens as fit, without the closing
      tag, as for Search-R1's released checkpoints; use it to evaluate these.
    query_separator: splits the text for the tool `search` into parallel
      queries; '' = no split.
    max_queries: limit of queries per search block; more are left out.
    invalid: feedback after a turn without a valid action.
    last_turn: text before the last turn, which cannot search.
    stops: strings that end a generation, with the closing tags of all blocks
      that act or end the trajectory.
    blocks: further kinds of blocks. In the file: name -> [open tag, close tag],
      or -> {"tags": [open tag, close tag], "tool": "", "ends": false}. Rewards
      find their text by name (`env.blocks`). A tool is one of config.tools.
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
  # Not in repr, so that hashes of templates in older manifests stay valid.
  blocks: tuple[Kind, ...] = dataclasses.field(default=(), repr=False)

  @functools.cached_property
  def kinds(self) -> dict[str, Kind]:
    """The table of blocks, by name: BLOCKS and `blocks`."""
    does = {'search': dict(tool=SEARCH), 'answer': dict(ends=True)}
    four = [Kind(n, getattr(self, n), **does.get(n, {})) for n in BLOCKS]
    return {kind.name: kind for kind in (*four, *self.blocks)}

  @property
  def tags(self) -> dict[str, tuple[str, str]]:
    return {name: kind.tags for name, kind in self.kinds.items()}

  def stops_for(self, may_search: bool) -> tuple[str, ...]:
    """The stop strings; without the closing tags of blocks that act if not
    `may_search`."""
    if may_search:
      return self.stops
    acting = [kind.tags[1] for kind in self.kinds.values() if kind.acts]
    return tuple(s for s in self.stops if s not in acting)

  def question(self, text: str) -> str:
    text = text.strip()
    if self.question_mark and not text.endswith('?'):
      text += '?'
    return text

  @functools.cached_property
  def passage_parts(self) -> tuple[tuple[str, str | None], ...]:
    """The passage line as ((literal, field after it or None), ...)."""
    return tuple(
      (literal, field)
      for literal, field, _, _ in string.Formatter().parse(self.passage)
    )

  @functools.cached_property
  def protected(self) -> tuple[str, ...]:
    """Tags that are neutralised in outside text: those of the protocol, and
    those in the passage line and the observation."""
    tags = [tag for pair in self.tags.values() for tag in pair]
    tags += re.findall(r'</?\w[\w-]*>', self.passage + self.observation)
    return tuple(dict.fromkeys(tags))


def load(name_or_path: str) -> Template:
  """Loads a template of the package by name, or a JSON file by path.

  Raises:
    ValueError: no such template, or a field is missing, unknown or wrong; names
      file and field.
  """
  path = pathlib.Path(name_or_path)
  if not name_or_path.endswith('.json'):
    names = sorted(p.stem for p in TEMPLATES.glob('*.json'))
    if name_or_path not in names:
      raise ValueError(
        f'env.template={name_or_path!r} is neither a template of the package '
        f'nor a .json file: {near(name_or_path, names)}'
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

  def check(good, field, message):
    if not good:
      raise ValueError(f'template {where}, field {field!r}: {message}')

  if not isinstance(data, dict):
    raise ValueError(f'template {where}: expected a JSON object')
  fields = [f.name for f in dataclasses.fields(Template) if f.name != 'name']
  for field in data:
    check(field in fields, field, f'unknown; {near(field, fields)}')
  for field in fields:
    good = field in data or field == 'blocks'
    check(good, field, 'missing; a template defines every field but blocks')
  data = {'blocks': {}} | data

  def pair(value, field):
    good = isinstance(value, list) and len(value) == 2
    good = good and all(isinstance(t, str) and t.strip() for t in value)
    check(good, field, f'expected ["open tag", "close tag"], got {value!r}')
    return tuple(value)

  for kind in BLOCKS:
    data[kind] = pair(data[kind], kind)
  good = isinstance(data['blocks'], dict)
  check(good, 'blocks', f'expected name -> tags, got {data["blocks"]!r}')
  kinds = []
  for kind, entry in data['blocks'].items():
    field = f'blocks.{kind}'
    taken = (*BLOCKS, OUTSIDE)
    good = kind.isidentifier() and kind not in taken
    check(good, field, f'needs a name of letters and _, and none of {taken}')
    entry = dict(entry) if isinstance(entry, dict) else {'tags': entry}
    entry['tags'] = pair(entry.get('tags'), field)
    good = entry.keys() <= {'tags', 'tool', 'ends'}
    check(good, field, f'has {sorted(entry)}; known are tags, tool, ends')
    good = isinstance(entry.get('tool', ''), str)
    check(good, field, 'tool: expected its name in config.tools')
    good = type(entry.get('ends', False)) is bool
    check(good, field, 'ends: expected true or false')
    good = not (entry.get('tool') and entry.get('ends'))
    check(good, field, 'calls a tool and ends the trajectory; it can do one')
    kinds.append(Kind(kind, **entry))
  data['blocks'] = tuple(kinds)
  tags = [(kind, tag) for kind in BLOCKS for tag in data[kind]]
  tags += [(f'blocks.{kind.name}', tag) for kind in kinds for tag in kind.tags]
  for (kind, tag), (_, other) in itertools.permutations(tags, 2):
    message = f'tag {tag!r} is part of tag {other!r}; they must differ'
    check(tag not in other, kind, message)

  for field in (
    'observation', 'passage', 'passage_separator', 'no_results',
    'query_separator', 'invalid', 'last_turn',
  ):  # fmt: skip
    value = data[field]
    check(isinstance(value, str), field, f'expected text, got {value!r}')
  most, stops, mark = (
    data[k] for k in ('max_queries', 'stops', 'question_mark')
  )
  separator = 'empty, but max_queries is more than 1'
  missing = 'the closing tag of an action, is missing'
  texts = isinstance(stops, list) and all(isinstance(s, str) for s in stops)
  texts = texts and all(stops)
  closing = [data['search'][1], data['answer'][1]]
  closing += [kind.tags[1] for kind in kinds if kind.acts or kind.ends]
  for field, good, message in (
    ('invalid', data['invalid'], 'empty; it must separate two turns'),
    ('question_mark', type(mark) is bool, 'expected true or false'),
    ('cut', data['cut'] in CUTS, f'{data["cut"]!r} is none of {CUTS}'),
    ('max_queries', type(most) is int and most > 0, 'expected a count > 0'),
    ('query_separator', data['query_separator'] or most == 1, separator),
    ('stops', texts, f'expected a list of strings, got {stops!r}'),
    *(('stops', texts and t in stops, f'{t!r}, {missing}') for t in closing),
  ):
    check(good, field, message)
  data['stops'] = tuple(stops)

  prompt = data['prompt']
  good = isinstance(prompt, (str, list))
  check(good, 'prompt', 'expected text, or a list of messages')
  if isinstance(prompt, list):
    for message in prompt:
      good = isinstance(message, dict) and message.keys() == {'role', 'content'}
      good = good and all(isinstance(v, str) for v in message.values())
      check(good, 'prompt', f'expected {{"role", "content"}}, got {message!r}')
    data['prompt'] = tuple((m['role'], m['content']) for m in prompt)
    prompt = ''.join(content for _, content in data['prompt'])
  n = prompt.count(SLOT)
  check(n == 1, 'prompt', f'needs {SLOT} once, has it {n} times')

  opening, closing = data['information']
  shape, text = [opening, '{passages}', closing], data['observation']
  at = [text.find(part) for part in shape]
  good = [text.count(part) for part in shape] == [1, 1, 1] and at == sorted(at)
  check(good, 'observation', f'needs {"...".join(shape)}, each once')

  try:
    used = [f for _, f, _, _ in string.Formatter().parse(data['passage'])]
  except ValueError as e:
    check(False, 'passage', f'{e}; write a literal brace twice')
  for field in used:
    good = field is None or field in PASSAGE_FIELDS
    close = difflib.get_close_matches(field or '', PASSAGE_FIELDS, 1)
    hint = f'; did you mean {{{close[0]}}}?' if close else ''
    message = f'{{{field}}} is none of {PASSAGE_FIELDS}{hint}'
    check(good, 'passage', message)
  check('text' in used, 'passage', 'needs {text}')
  return Template(name=name, **data)
