"""Calls of tools, in the chat format of a model.

    hermes   blocks <tool_call>...</tool_call>, several in a reply
    llama    the reply is one call (Llama 3.1)

A call is written as the chat template of the tokenizer writes one (`FORMS`):

    json     {"name": NAME, "arguments": {...}} (Qwen2.5, Qwen3), or with
             "parameters" (Llama 3.1)
    xml      <function=NAME>, for each argument <parameter=NAME>, its value and
             </parameter>, and </function> (Qwen3.5). A value is a text between
             two newlines, or JSON where the schema asks for another type.

A policy is shown tools by their schemas, in OpenAI's form, through the chat
template of its tokenizer; what follows its reply is this template's text too.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
import json
import math
import re
from typing import Any, NamedTuple

from searchrl_jax.lookup import require
from searchrl_jax.text import prompts, untrusted
from searchrl_jax.text.parser import Block, Parser, tags_of
from searchrl_jax.text.untrusted import Part
from searchrl_jax.types import SEARCH

# Types of JSON Schema -> those that Python reads them as.
_TYPES = {'string': (str,), 'integer': (int,), 'number': (int, float)}
_TYPES |= {'boolean': (bool,), 'array': (list,), 'object': (dict,)}
_TYPES |= {'null': (type(None),)}
_DEPTH = 64  # levels of nested JSON in a call
# A value in XML ends before whatever another reader could take for a tag of it.
_VALUE = r'[^<]*(?:<(?!\s*(?:/\s*)?(?:parameter|function)\s*[=>])[^<]*)*'
_PARAMETER = rf'<parameter=([^>\n]+)>({_VALUE})</parameter>'
_FUNCTION = rf'<function=([^>\n]+)>((?:\s*{_PARAMETER})*)\s*</function>'
# How Qwen3.5's chat template writes values of JSON.
_PYTHON = {'True': 'true', 'False': 'false', 'None': 'null'}
_USER = {'role': 'user', 'content': 'x'}


class Call(NamedTuple):
  """A call of a tool, as the policy wrote it.

  arguments: JSON of an object; '' = there is none. status: ok, malformed,
  unclosed, unknown_tool, bad_arguments, or too_many, of several calls. error:
  what is wrong, for the policy to read.
  """

  name: str
  arguments: str
  status: str = 'ok'
  error: str = ''


# What may be called: the tool, which is SEARCH or a name in config.tools; one
# of its schemas; and the `text_of` of all of them.
Function = tuple[str, Mapping[str, Any], str]


def schema(name: str, about: str, parameters: Mapping) -> dict[str, Any]:
  """In OpenAI's form; parameters: a JSON Schema."""
  function = {'name': name, 'description': about, 'parameters': parameters}
  return {'type': 'function', 'function': function}


def parse(
  text: str, schemas: Sequence[Mapping], closed: bool = True, form: str = 'json'
) -> Call:
  """Reads a call; whatever the text is, it raises nothing.

  closed: whether the block of the call was closed. form: a key of FORMS.
  """
  if not closed:
    return Call('', '', 'unclosed', 'the call is not closed')
  functions = {s['function']['name']: s['function'] for s in schemas}
  try:
    name, arguments = FORMS[form](text, functions)
  except (ValueError, RecursionError) as e:
    return Call('', '', 'malformed', str(e))
  if not isinstance(name, str) or name not in functions:
    error = f'the call names none of the tools: {", ".join(functions)}'
    return Call('', '', 'unknown_tool', error)
  if not isinstance(arguments, dict):
    error = f'the arguments of {name} are no JSON object'
    return Call(name, '', 'bad_arguments', error)
  wrong = _wrong(functions[name].get('parameters') or {}, arguments)
  # A lone surrogate could not be sent anywhere.
  written = json.dumps(arguments, ensure_ascii=False).encode(errors='replace')
  return Call(name, written.decode(), 'bad_arguments' if wrong else 'ok', wrong)


def _json(text: str, functions: Mapping) -> tuple[Any, Any]:
  """What should be the name and the arguments of a call."""
  try:
    found = _loads(text)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'the call is not JSON: {e}') from e
  found = found if isinstance(found, dict) else {}
  return found.get('name'), found.get('arguments', found.get('parameters'))


def _xml(text: str, functions: Mapping) -> tuple[Any, Any]:
  """The same."""
  found = re.fullmatch(_FUNCTION, text.strip())
  what = 'the call is not one function with its parameters, each of them closed'
  require(found, f'{what}, as the tags of a call', ValueError)
  name, inside, *_ = found.groups()
  parameters, arguments = functions.get(name, {}).get('parameters') or {}, {}
  for own, value in re.findall(_PARAMETER, inside):
    value = value.removeprefix('\n').removesuffix('\n')
    arguments[own] = _typed(value, _types(parameters, own))
  return name, arguments


FORMS = {'json': _json, 'xml': _xml}


def _types(parameters: Mapping, name: str) -> set[str]:
  """Those that a schema, which may be no good one, allows an argument."""
  of = lambda x, key: x.get(key) if isinstance(x, Mapping) else None
  listed = lambda x: x if isinstance(x, list) else [x]
  ways, types, seen = [of(of(parameters, 'properties'), name)], [], set()
  while ways:
    way = ways.pop()
    types += listed(of(way, 'type'))
    for key in ('anyOf', 'oneOf', 'allOf'):
      ways += listed(of(way, key) or [])
    if isinstance(place := of(way, '$ref'), str) and place not in seen:
      seen.add(place)
      keys = (key.replace('~1', '/') for key in place.split('/')[1:])
      keys = (key.replace('~0', '~') for key in keys)
      ways.append(functools.reduce(of, keys, parameters))
  return {t for t in types if isinstance(t, str) and t in _TYPES}


def _typed(text: str, types: set[str]) -> Any:
  """A value of one of these types, which may be a string; none: a string.

  JSON of another type is for `_wrong`, or the tool, to refuse.
  """
  try:
    value = _loads(_PYTHON.get(text.strip(), text))
  except (ValueError, RecursionError):
    return text
  known = any(type(value) in _TYPES[t] for t in types - {'string'})
  return value if known or types and 'string' not in types else text


def _loads(text: str) -> Any:
  """JSON.

  Raises:
    ValueError, RecursionError: it is none, or has too many levels.
  """
  found = json.loads(text, parse_float=_number, parse_constant=_number)
  what = f'it has more than {_DEPTH} levels'
  require(not _deeper(found, _DEPTH), what, ValueError)
  return found


def _number(text: str) -> float:
  """Whole ones as int, which a schema may ask for; NaN is no JSON."""
  value = float(text)
  require(math.isfinite(value), f'{text} is no number of JSON', ValueError)
  return int(value) if value.is_integer() else value


def _deeper(value: Any, levels: int) -> bool:
  inner = value.values() if isinstance(value, dict) else value
  inner = inner if isinstance(value, dict | list) else ()
  return levels < 0 or any(_deeper(x, levels - 1) for x in inner)


def _wrong(parameters: Mapping, arguments: Mapping) -> str:
  """What contradicts the top level of a JSON Schema, which may be no good one
  itself; '' = nothing."""
  properties, required = map(parameters.get, ('properties', 'required'))
  for name in required if isinstance(required, list) else ():
    if isinstance(name, str) and name not in arguments:
      return f'the argument {name!r} is missing'
  for name, value in arguments.items():
    own = properties.get(name) if isinstance(properties, dict) else None
    kinds = own.get('type') if isinstance(own, dict) else None
    kinds = kinds if isinstance(kinds, list) else [kinds]
    known = [k for k in kinds if isinstance(k, str) and k in _TYPES]
    if known and all(type(value) not in _TYPES[k] for k in known):
      return f'the argument {name!r} is not of the type {" or ".join(known)}'
  return ''


def text_of(schemas: Sequence[Mapping]) -> str:
  """The only parameter of a tool's only function, if it is required and a text;
  else ''.

  A tool that has one is sent this text, another one the JSON of a call.
  """
  parameters = schemas[0]['function'].get('parameters') or {}
  properties = parameters.get('properties') or {}
  (name, own), *_ = [*properties.items(), ('', {})]
  text = isinstance(own, dict) and own.get('type') == 'string'
  text = text and name in (parameters.get('required') or ())
  return name if text and len(properties) == len(schemas) == 1 else ''


def read(query: str, schemas: Sequence[Mapping]) -> Call:
  """The call that a query is, of a tool with these functions."""
  if name := text_of(schemas):
    return Call(schemas[0]['function']['name'], json.dumps({name: query}))
  return parse(query, schemas)


class Calls(untrusted.Observer):
  """Reads the calls of a turn, and formats what they are answered.

  Args:
    tokenizer: tokenizer.Tokenizer.
    template: prompts.Template with `calls`.
    functions: what may be called, under different names.

  Attributes:
    schemas: of the functions, for the prompt.
    end: the id with which the chat template ends a reply.
    head: ids between a message and the next reply. note: the same, after the
      message template.last_turn, if there is one.
    invalid: ids of the message template.invalid, after the end of a reply.
    least: tokens that the answers to any turn need.

  Raises:
    ValueError: the chat template shows no tools, or not in the format of
      template.calls; names the tokenizer and what to do.
  """

  def __init__(self, tokenizer, template, functions: Sequence[Function]):
    self.tokenizer, self.schemas = tokenizer, [s for _, s, _ in functions]
    self._functions = {f[1]['function']['name']: f for f in functions}
    encode, chat = tokenizer.encode_template, tokenizer.chat
    where = f'the chat template of {tokenizer.path}'
    good = chat([_USER], self.schemas) != chat([_USER])
    self._form = next((f for f in FORMS if self._writes(template, f)), '')
    require(
      good and self._form,
      f'{where} shows no tools, or not the calls of env.template='
      f'{template.name!r}, {template.search[0]} and {" or ".join(FORMS)}: use '
      'a template of tags, such as chat, or a copy of the tokenizer with a '
      'chat_template.jinja that shows both (--config.model.tokenizer=COPY)',
    )
    said = json.dumps(self.schemas, ensure_ascii=False)
    what = f'a schema of config.tools has a token of {tokenizer.path}'
    require(not tokenizer.has_added(said), f'{what} itself: {said}')
    before = chat([_USER], self.schemas, reply=False)

    def following(*messages: Mapping) -> list[int]:
      text = chat([_USER, *messages], self.schemas)
      require(text.startswith(before), f'{where} changes what it has written')
      return encode(text[len(before) :])

    note = {'role': 'user', 'content': template.last_turn}
    self.head = following()
    self.note = following(note) if template.last_turn else self.head
    counts = range(template.max_queries + 2)
    frames = [self._frame(('tool',) * n) for n in counts]
    known = [i for i in tokenizer.eos_ids if i in tokenizer.control]
    ends, after = {tokenizer.control_name(i): i for i in known}, frames[0][0]
    end = next(filter(after.startswith, ends), '')
    require(end, f'{where} ends a reply with {after!r}, not one of {[*ends]}')
    self.end = ends[end]
    ended = lambda texts: [texts[0].removeprefix(end), *texts[1:]]
    self._frames = [*map(ended, frames)]
    opening, closing = ended(self._frame(('user',)))
    self.invalid = encode(opening + template.invalid + closing)
    opening, closing = self._frames[1]
    # Whether the chat template writes answers as JSON strings, and whether it
    # strips them.
    self._quotes = opening.endswith('"') and closing.startswith('"')
    self._strips = self._frame(('tool',), ' ')[1] == closing
    super().__init__(tokenizer, template)
    frame = len(encode(''.join(self._frames[-1])))
    self.least = frame + counts[-1] * self.least

  def _writes(self, template, form: str) -> bool:
    """Whether a call that the chat template writes can be read."""
    function, chat = {'name': 'f', 'arguments': {'x': 'y'}}, self.tokenizer.chat
    made = [{'id': '0', 'type': 'function', 'function': function}]
    reply = {'role': 'assistant', 'content': '', 'tool_calls': made}
    schemas = [schema('f', '', {'type': 'object', 'properties': {}})]
    before = chat([_USER], schemas, reply=False)
    text = chat([_USER, reply], schemas, reply=False).removeprefix(before)
    said = self.tokenizer.decode(self.tokenizer.encode_template(text)).encode()
    found = Parser(tags_of(template)).read(said)
    own = [block[1:] for block in found if block[0] == prompts.CALL]
    read = [parse(i.decode(), schemas, closed, form) for i, closed in own]
    return read == [Call('f', json.dumps(function['arguments']))]

  def _frame(self, roles: Sequence[str], space='') -> list[str]:
    """What the chat template writes after a reply, around the contents of
    messages of these roles, in space."""
    roles = ['assistant', *roles]
    marks = [f'{space}{untrusted.mark(n)}{space}' for n in range(len(roles))]
    marked = [{'role': r, 'content': m} for r, m in zip(roles, marks)]
    text = self.tokenizer.chat([_USER, *marked], self.schemas, reply=False)
    pieces = untrusted.MARKS.split(text)
    what = f'the chat template of {self.tokenizer.path} does not show, in order'
    found = [*map(int, pieces[1::2])] == [*range(len(roles))]
    require(found, f'{what}, messages of the roles {roles}')
    return pieces[2::2]

  def read(self, blocks: Sequence[Block]) -> tuple[Call, ...]:
    """The calls among the blocks of a turn, in order.

    Of more than template.max_queries, the others become one that is none.
    """
    most = self.template.max_queries
    own = [block for block in blocks if block.kind == prompts.CALL]
    found = [self._read(block) for block in own[:most]]
    error = f'a turn may have {most} calls; the others were not made'
    more = [Call('', '', 'too_many', error)] * (len(own) > most)
    return (*found, *more)

  def _read(self, block: Block) -> Call:
    """A call; of a tool that is sent a text, with this argument alone."""
    call = parse(block.text, self.schemas, block.complete, self._form)
    tool, _, text = self._functions.get(call.name, ('', {}, ''))
    if call.status != 'ok' or not text:
      return call
    given, error = json.loads(call.arguments), ''
    if len(given) > 1 or tool == SEARCH and not given[text].strip():
      error = f'{call.name} has the argument {text!r} alone, and not empty'
    return call._replace(status='bad_arguments', error=error) if error else call

  def request(self, call: Call) -> tuple[str, str]:
    """The tool of a call with the status ok, and the query that it is sent."""
    tool, _, text = self._functions[call.name]
    arguments = json.loads(call.arguments)
    if text:
      return tool, arguments[text].strip()
    sent = {'name': call.name, 'arguments': arguments}
    return tool, json.dumps(sent, ensure_ascii=False)

  def __call__(self, passages: Sequence[Any], limit: int):
    """Returns at most `limit` ids of messages, one for each answer, and whether
    any was cut.

    Args:
      passages: of each answer; see Observer.
      limit: of which each answer gets an equal share.
    """
    ids, cut, _ = self.shared(passages, limit)
    return ids, cut

  def shared(self, passages: Sequence[Any], limit: int):
    """What a call returns, and the tokens that each answer got; 0: no room."""
    opening, *closing = self._frames[len(passages)]
    share = limit // len(passages)
    while share > 0:
      found = [self.fitted(one, share) for one in passages]
      parts: list[Part] = [(opening, True)]
      for (body, *_), text in zip(found, closing):
        parts += [*self._written(body), (text, True)]
      normalise = self.tokenizer.normalised
      parts = untrusted.neutralised(self.template, parts, normalise)
      ids = self.tokenizer.encode_parts(parts)
      if len(ids) <= limit:
        return ids, any(cut for *_, cut in found), share
      share -= -((limit - len(ids)) // len(passages))
    return [], True, 0

  def _encode(self, body: Sequence[Part]) -> list[int]:
    return self.tokenizer.encode_parts(self._written(body))

  def _written(self, body: Sequence[Part]) -> list[Part]:
    """As the chat template writes the content of a message."""
    if self._strips:
      whole = ''.join(text for text, _ in body)
      kept = range(len(whole) - len(whole.lstrip()), len(whole.rstrip()))
      starts = itertools.accumulate((len(t) for t, _ in body), initial=0)
      body = [
        (text[max(kept.start - at, 0) : max(kept.stop - at, 0)], ours)
        for at, (text, ours) in zip(starts, body)
      ]
    if not self._quotes:
      return [*body]
    return [(json.dumps(t, ensure_ascii=False)[1:-1], o) for t, o in body]
