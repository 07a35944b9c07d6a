"""Templates: the text of the protocol, as data.

A template is a JSON file with all tags, the prompt, the observation, the
passage line, the feedback and the stop strings. Those of the package are in
templates/. A user's file must define every field but `blocks` and `calls`.

With `calls`, tools are called in the chat format of a model (`text.calls`), and
results come as this format has them. The file then leaves out what the
format defines (FORMATS), and its prompt is a list of messages; the tools are
shown by the tokenizer's chat template.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
import string
from typing import Any

from searchrl_jax.lookup import near, of, require
from searchrl_jax.types import SEARCH

TEMPLATES = pathlib.Path(__file__).parent / 'templates'
BLOCKS = ('think', 'search', 'information', 'answer')
OUTSIDE = 'other'  # the kind of text outside blocks
CALL = 'tool_call'  # the kind of calls in the chat format of a model
# Fields of a template that its `calls` define. `search` has the tags of a call.
# A call without a closing tag ends with the turn, and its opening tag is a part
# of its JSON. Results without tags are whole messages.
_REST = {'observation': '', 'cut': 'passages', 'query_separator': ''}
_TAGS = ('<tool_call>', '</tool_call>'), ('<tool_response>', '</tool_response>')
# Those inside a call, where the chat template writes one in XML.
_INNER = '<function=', '</function>', '<parameter=', '</parameter>'
FORMATS = {
  'hermes': _REST | {'search': _TAGS[0], 'information': _TAGS[1]},
  'llama': _REST | {'search': ('{"', ''), 'information': ('', '')},
}
SLOT = '{question}'
FIELDS = ('i', 'title', 'text', 'id')
CUTS = ('passages', 'tokens')


def slots(text: str) -> tuple[tuple[str, str | None], ...]:
  """A text with {fields} as ((literal, field after it or None), ...)."""
  return tuple(part[:2] for part in string.Formatter().parse(text))


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of block.

  Attributes:
    name: of its segments (`Segment.kind`) and blocks (`parser.Block.kind`).
    tags: (open, close).
    tool: the tool that is called with the text of the block; '' = none.
    ends: whether it ends the trajectory, as the answer does.
    ask: the text with which the environment asks for it, to carry it over into
      a new context (config.env.on_full, on_answer); '' = never.
    then: the text that follows it there.
  """

  name: str
  tags: tuple[str, str]
  tool: str = ''
  ends: bool = False
  # Not in repr, so that hashes of templates in older manifests stay valid.
  ask: str = dataclasses.field(default='', repr=False)
  then: str = dataclasses.field(default='', repr=False)

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
    max_queries: limit of queries per search block, or of calls per turn; more
      are left out.
    invalid: feedback after a turn without a valid action.
    last_turn: text before the last turn, which cannot search.
    stops: strings that end a generation, with the closing tags of all blocks
      that act or end the trajectory.
    blocks: further kinds of blocks. In the file: name -> [open tag, close tag],
      or -> {"tags": [open tag, close tag], "tool": "", "ends": false,
      "ask": "", "then": ""}. Rewards find their text by name (`env.blocks`). A
      tool is one of config.tools.
    calls: '', or one of FORMATS. The tags of `search` are then those of a call
      of any tool, a block of the kind CALL.
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
  calls: str = dataclasses.field(default='', repr=False)

  @functools.cached_property
  def kinds(self) -> dict[str, Kind]:
    """The table of blocks, by name: BLOCKS and `blocks`."""
    search = {'name': CALL} if self.calls else {'tool': SEARCH}
    does = {'search': search, 'answer': {'ends': True}}
    four = [
      Kind(**{'name': n, 'tags': getattr(self, n)} | does.get(n, {}))
      for n in BLOCKS
    ]
    return {kind.name: kind for kind in (*four, *self.blocks)}

  @functools.cached_property
  def digest(self) -> str:
    """The SHA-256 of its fields, which names its content."""
    text = f'{self!r}{self.blocks or ""}'
    text += ''.join(kind.ask + kind.then for kind in self.blocks) + self.calls
    return hashlib.sha256(text.encode()).hexdigest()

  @property
  def tags(self) -> dict[str, tuple[str, str]]:
    return {name: k.tags for name, k in self.kinds.items() if k.tags[0]}

  def stops_for(self, may_search: bool) -> tuple[str, ...]:
    """The stop strings; without the closing tags of blocks that act if not
    `may_search`."""
    acting = [kind.tags[1] for kind in self.kinds.values() if kind.acts]
    return tuple(s for s in self.stops if may_search or s not in acting)

  def question(self, text: str) -> str:
    text = text.strip()
    return text + '?' * (self.question_mark and not text.endswith('?'))

  @functools.cached_property
  def passage_parts(self) -> tuple[tuple[str, str | None], ...]:
    """The passage line as ((literal, field after it or None), ...)."""
    return slots(self.passage)

  @functools.cached_property
  def protected(self) -> tuple[str, ...]:
    """Tags that are neutralised in outside text: pairs of the protocol, those
    inside a call, and those in the passage line and the observation. The
    beginning of a call that has no closing tag is that of any JSON, which
    outside text may show."""
    pairs = [pair for pair in self.tags.values() if all(pair)]
    tags = [tag for pair in pairs for tag in pair if tag.strip()]
    tags += _INNER if _TAGS[0] in pairs else ()
    tags += re.findall(r'</?\w[\w-]*>', self.passage + self.observation)
    return tuple(dict.fromkeys(tags))


def load(name_or_path: str) -> Template:
  """Loads a template of the package by name, or a JSON file by path.

  Raises:
    ValueError: no such template, or a field is missing, unknown or wrong; names
      file and field.
    OSError: the file cannot be read.
  """
  path = pathlib.Path(name_or_path)
  if not name_or_path.endswith('.json'):
    names = [p.stem for p in TEMPLATES.glob('*.json')]
    what = 'neither a template of the package nor a .json file'
    hint = f'{what}: {near(name_or_path, names)}'
    require(name_or_path in names, f'env.template={name_or_path!r} is {hint}')
    path = TEMPLATES / f'{name_or_path}.json'
  with of(f'template {path} is not JSON'):
    data = json.loads(path.read_text('utf-8'))
  return parse(data, path.stem, str(path))


def parse(data: Any, name: str, where: str) -> Template:
  """Checks the fields of a template; `where` names it in errors."""

  def check(good, field, message):
    require(good, f'template {where}, field {field!r}: {message}')

  def pair(value, field):
    good = isinstance(value, list) and len(value) == 2
    good = good and all(isinstance(t, str) and t for t in value)
    check(good, field, f'expected ["open tag", "close tag"], got {value!r}')
    return tuple(value)

  require(isinstance(data, dict), f'template {where}: expected a JSON object')
  types = {f.name: f.type for f in dataclasses.fields(Template)[1:]}
  texts = {str: 'text', bool: 'true or false', int: 'a count > 0'}
  data = {'blocks': {}, 'calls': ''} | data
  calls = data['calls']
  what = f"{calls!r} is neither '' nor one of {[*FORMATS]}"
  check(calls in ('', *FORMATS), 'calls', what)
  defined = FORMATS.get(calls, {})
  check(not defined.keys() & data, 'calls', f'{calls!r} defines {[*defined]}')
  data |= defined
  for field in data:
    check(field in types, field, f'unknown; {near(field, types)}')
  for field, kind in types.items():
    what = 'missing; a template defines every field but blocks and calls'
    check(field in data, field, what)
    value = data[field]
    if field in BLOCKS and field not in defined:
      data[field] = pair(value, field)
    elif kind in texts:
      check(type(value) is kind, field, f'expected {texts[kind]}: {value!r}')

  blocks, taken = data['blocks'], (*BLOCKS, OUTSIDE, *[CALL] * bool(calls))
  good = isinstance(blocks, dict)
  check(good, 'blocks', f'expected name -> tags, got {blocks!r}')
  for kind, entry in blocks.items():
    entry = dict(entry) if isinstance(entry, dict) else {'tags': entry}
    entry['tags'] = pair(entry.get('tags'), f'blocks.{kind}')
    good = kind.isidentifier() and kind not in taken
    check(good, f'blocks.{kind}', f'needs a name of letters, none of {taken}')
    tool, ends = entry.get('tool', ''), entry.get('ends', False)
    ask, then = entry.get('ask', ''), entry.get('then', '')
    good = entry.keys() <= {'tags', 'tool', 'ends', 'ask', 'then'}
    good = good and all(isinstance(x, str) for x in (tool, ask, then))
    good = good and isinstance(ends, bool) and bool(tool) + ends + bool(ask) < 2
    what = (
      'beside tags, expected "tool": NAME in config.tools, "ends": true, or '
    )
    what += 'the texts "ask" and "then"'
    check(good and bool(ask) == bool(then), f'blocks.{kind}', what)
    what = f'a call of calls={calls!r} names its tool; none is by a block'
    check(not (calls and tool), f'blocks.{kind}', what)
    blocks = blocks | {kind: Kind(kind, **entry)}

  prompt = data['prompt']
  if isinstance(prompt, list):
    for message in prompt:
      good = isinstance(message, dict) and message.keys() == {'role', 'content'}
      check(good, 'prompt', f'expected {{"role", "content"}}, got {message!r}')
    data['prompt'] = tuple((m['role'], m['content']) for m in prompt)
    prompt = ''.join(content for _, content in data['prompt'])
  text = isinstance(prompt, str)
  check(text, 'prompt', 'expected text, or a list of messages')
  n = prompt.count(SLOT)
  check(n == 1, 'prompt', f'needs {SLOT} once, has it {n} times')
  good = not calls or data['prompt'][-1][0] == 'user'
  check(good, 'prompt', f'calls={calls!r} need messages, the last of the user')

  stops = data['stops']
  good = isinstance(stops, list) and all(s and type(s) is str for s in stops)
  check(good, 'stops', f'expected a list of strings, got {stops!r}')
  data |= {'stops': tuple(stops), 'blocks': tuple(blocks.values())}
  out = Template(name=name, **data)
  tags = [(kind, t) for kind, pair in out.tags.items() for t in pair if t]
  for (kind, tag), (_, other) in itertools.permutations(tags, 2):
    good = tag not in other
    check(good, kind, f'tag {tag!r} is part of tag {other!r}; they must differ')
  try:
    used = {field for _, field in out.passage_parts} - {None}
  except ValueError as e:
    check(False, 'passage', f'{e}; write a literal brace twice')
  ends = {k.tags[1] for k in out.kinds.values() if k.acts or k.ends} - {*stops}
  shape = [out.information[0], '{passages}', out.information[1]]
  parts = re.findall('|'.join(map(re.escape, shape)), out.observation)
  parts = shape if calls else parts
  most, many = out.max_queries, out.query_separator or calls
  for field, good, message in (
    ('stops', not ends, f'lacks {ends}, the closing tags of actions'),
    ('passage', 'text' in used, 'needs {text}'),
    ('passage', used <= {*FIELDS}, f'{{...}} must be one of {FIELDS}'),
    ('observation', parts == shape, f'needs {"...".join(shape)}, each once'),
    ('invalid', out.invalid, 'empty; it must separate two turns'),
    ('cut', out.cut in CUTS, f'{out.cut!r} is none of {CUTS}'),
    ('max_queries', most > 0, 'expected a count > 0'),
    ('query_separator', many or most == 1, 'empty, with max_queries > 1'),
  ):
    check(good, field, message)
  return out
