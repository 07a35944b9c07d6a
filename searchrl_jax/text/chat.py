"""Chats as programs send them: messages and tools to ids, replies to calls.

A program sends the whole chat with every request, as OpenAI's clients do. Text
of it is outside text: it cannot become a control token (`tokenizer`).
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from searchrl_jax.lookup import require
from searchrl_jax.text.calls import Call, parse
from searchrl_jax.text.untrusted import MARKS, Part, mark

ROLES = 'system', 'developer', 'user', 'assistant', 'tool'
_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_PLACE = mark('')  # of a reply; other text has no such characters


class ChatError(ValueError):
  """A request that cannot be used; the message names the field.

  param: the field, as OpenAI's errors have it.
  """

  def __init__(self, message: str, param: str = 'messages'):
    super().__init__(message)
    self.param = param


def read_messages(value: Any) -> list[dict[str, Any]]:
  """The messages of a request, with what decides their text alone.

  Each has role and content (a text), and may have name, tool_call_id and
  tool_calls; their arguments are parsed where they are JSON.

  Raises:
    ChatError: names the message and what is wrong with it.
  """

  def check(good, where, what):
    require(good, f'messages{where}: {what}', ChatError)

  check(isinstance(value, list) and value, '', 'expected a list of messages')
  out = []
  for n, message in enumerate(value):
    where = f'[{n}]'
    check(isinstance(message, dict), where, 'expected an object')
    role, content = message.get('role'), message.get('content')
    check(role in ROLES, where, f'role={role!r:.60} is none of {ROLES}')
    if isinstance(content, list):
      texts = [isinstance(x, dict) and x.get('text') for x in content]
      good = all(isinstance(x, str) for x in texts)
      check(good, where, 'a part of its content is no text')
      content = ''.join(texts)
    named = {n: message.get(n) for n in ('name', 'tool_call_id')}
    made = {n: text for n, text in named.items() if text is not None}
    made |= {'role': role, 'content': content or ''}
    for name, text in made.items():
      good = isinstance(text, str)
      check(good, where, f'{name} is {text!r:.60}, not a text')
    calls = message.get('tool_calls') or ()
    check(isinstance(calls, list | tuple), where, 'tool_calls is no list')
    if calls:
      made['tool_calls'] = [call(c, f'messages{where}') for c in calls]
    out.append(made)
  return out


def call(given: Any, where: str = '') -> dict[str, Any]:
  """A call of a message, with its arguments parsed; see `read_messages`."""
  function = given.get('function') if isinstance(given, dict) else None
  good = isinstance(function, dict) and isinstance(function.get('name'), str)
  require(good, f'{where}: a call without a function and its name', ChatError)
  arguments = function.get('arguments') or '{}'
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except (ValueError, RecursionError):
      pass  # as it was written
  function = {'name': function['name'], 'arguments': arguments}
  return {'id': given.get('id', ''), 'type': 'function', 'function': function}


def read_tools(value: Any) -> list[dict[str, Any]]:
  """The tools of a request.

  Raises:
    ChatError: names the tool.
  """
  if not isinstance(value or [], list):
    raise ChatError('tools: expected a list', 'tools')
  for n, tool in enumerate(value or []):
    function = tool.get('function') if isinstance(tool, dict) else None
    good = isinstance(function, dict) and isinstance(function.get('name'), str)
    good = good and isinstance(function.get('parameters', {}), dict)
    if not good:
      what = 'expected {"type": "function", "function": {"name": ...}}'
      raise ChatError(f'tools[{n}]: {what}', 'tools')
  return value or []


def key(message: Mapping[str, Any]) -> str:
  """Equal for messages of equal text, however a client writes them."""
  # Ids of calls are the server's, and some clients make their own.
  calls = [call['function'] for call in message.get('tool_calls', ())]
  said = [message['role'], message['content'], calls]
  said += [message['name']] if message.get('name') else []
  return json.dumps(said, sort_keys=True)


def render(
  tokenizer,
  messages: Sequence[Mapping],
  tools: Sequence = (),
  reply=True,
  after: int | None = None,
) -> list[Part]:
  """The chat as (text, ours) parts, as the tokenizer's template writes it.

  Without a template, the contents one after another.

  reply: up to the start of the next reply. after: only what follows the text of
  this message, which is a reply.

  Raises:
    ChatError: the template rejects the chat, has no place for tools, or does
      not show that message once.
  """
  if not tokenizer.has_chat:
    if tools:
      why = f'{tokenizer.path} has no chat template, and so no tools'
      raise ChatError(why, 'tools')
    rest = messages if after is None else messages[after + 1 :]
    return [(m['content'], False) for m in rest if m['content']]
  outside: list[str] = []

  def marked(value: Any) -> Any:
    """With a mark for each text that holds a token of the tokenizer's own."""
    if isinstance(value, str):
      value = value.replace('\ue000', '').replace('\ue001', '')
      if not tokenizer.has_added(value):
        return value
      outside.append(value)
      return mark(len(outside) - 1)
    if isinstance(value, Mapping):
      return {marked(k): marked(v) for k, v in value.items()}
    return [*map(marked, value)] if isinstance(value, list) else value

  shown = [marked(m) | {'role': m['role']} for m in messages]
  if after is not None:
    shown[after] = {'role': 'assistant', 'content': _PLACE}
  try:
    text = tokenizer.chat(shown, [*map(marked, tools)], reply)
    hidden = tools and text == tokenizer.chat(shown, reply=reply)
  except ValueError as error:
    raise ChatError(str(error)) from error
  if hidden:
    why = f'the chat template of {tokenizer.path} shows no tools'
    raise ChatError(f'{why}; describe them in a message', 'tools')
  if after is not None:
    what = f'the chat template of {tokenizer.path} does not show a reply once'
    require(text.count(_PLACE) == 1, what, ChatError)
    text = text.partition(_PLACE)[2]
  pieces = MARKS.split(text)
  for n in range(1, len(pieces), 2):
    said = outside[int(pieces[n])]
    if pieces[n - 1].endswith('"') and pieces[n + 1].startswith('"'):
      said = json.dumps(said, ensure_ascii=False)[1:-1]  # within JSON
    pieces[n] = said
  return [(piece, n % 2 == 0) for n, piece in enumerate(pieces) if piece]


def read_calls(text: str, tools: Sequence[Mapping]) -> tuple[str, list[Call]]:
  """Calls of tools in a reply, and the text without them.

  Blocks <tool_call>...</tool_call> of calls in any of calls.FORMS (Qwen), or
  the reply is one in JSON (Llama 3.1).
  What is no call of a tool that there is stays text. Arguments that the tool's
  schema does not allow are for the client to judge.
  """
  found: list[Call] = []
  first, opening, rest = text.partition(_OPEN)
  kept = [first]
  while opening:
    # A value may have an opening tag in it; the first closing one ends a call.
    inner, closing, after = rest.partition(_CLOSE)
    if not closing:
      kept += [_OPEN, rest]
      break
    form = 'xml' if inner.lstrip().startswith('<') else 'json'
    call = parse(inner, tools, form=form)
    if call.arguments:
      found.append(call)
      rest = after
    else:
      kept.append(_OPEN)
    between, opening, rest = rest.partition(_OPEN)
    kept.append(between)
  if not found:
    whole = parse(text.strip(), tools)
    return ('', [whole]) if whole.arguments else (text, found)
  return ''.join(kept).strip(), found
