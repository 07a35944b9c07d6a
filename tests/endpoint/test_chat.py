"""Chats as programs send them, and replies with calls."""

import json
import types

import pytest

from searchrl_jax.text import chat

TOOLS = [{'type': 'function', 'function': {'name': 'f'}}]


@pytest.mark.parametrize('name', ['[]', '{}', 'null', '7'])
def test_a_call_whose_name_is_no_text_stays_text(name):
  text = f'<tool_call>{{"name": {name}, "arguments": {{}}}}</tool_call>'
  assert chat.read_calls(text, TOOLS) == (text, [])
  call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
  assert chat.read_calls(call, TOOLS)[1] == [chat.Call('f', '{}')]


def test_a_call_that_is_not_closed_stays_text():
  tools = [{'type': 'function', 'function': {'name': 'f'}}]
  call = '<tool_call> {"name": "f", "arguments": {}} </tool_call>'
  blank = '<tool_call>' + ' ' * 100_000
  assert chat.read_calls(blank, tools) == (blank, [])
  text, calls = chat.read_calls(f'a {blank}{call} b <tool_call>', tools)
  assert text == f'a {blank} b <tool_call>'
  assert [c.name for c in calls] == ['f']


def test_a_value_may_hold_the_tag_that_opens_a_call():
  call = {'name': 'f', 'arguments': {'x': 'a <tool_call> b'}}
  text = f'say <tool_call>{json.dumps(call)}</tool_call> end'
  rest, (found,) = chat.read_calls(text, TOOLS)
  assert rest == 'say  end'
  assert json.loads(found.arguments) == call['arguments']


def test_arguments_that_cannot_be_read_stay_as_they_are_written():
  for deep in ('[' * 100_000, '{'):
    sent = {'function': {'name': 'f', 'arguments': deep}}
    assert chat.call(sent)['function']['arguments'] == deep


class Picky:
  """A tokenizer whose chat template needs tools."""

  has_chat, path = True, 'x'

  def has_added(self, text):
    return False

  def chat(self, messages, tools=(), reply=True):
    if not tools:
      raise ValueError('it needs tools')
    return 'text'


def test_an_error_about_tools_names_them():
  bare = types.SimpleNamespace(has_chat=False, path='x')
  for wrong in (
    lambda: chat.read_tools(7),
    lambda: chat.read_tools([7]),
    lambda: chat.render(bare, [], TOOLS),
  ):
    with pytest.raises(chat.ChatError, match='tools') as error:
      wrong()
    assert error.value.param == 'tools'


def test_a_template_that_rejects_a_chat_without_tools_is_an_error_of_it():
  with pytest.raises(chat.ChatError, match='it needs tools'):
    chat.render(Picky(), [{'role': 'user', 'content': 'a'}], TOOLS)


@pytest.mark.parametrize(
  'message, said',
  [
    (dict(content=7), 'content is 7, not a text'),
    (dict(content=['a']), 'a part of its content is no text'),
    (dict(content=[{'text': 7}]), 'a part of its content is no text'),
    (dict(content='a', name=7), 'name is 7, not a text'),
    (dict(content='a', tool_call_id=[]), r'tool_call_id is \[\], not a text'),
  ],
)
def test_a_message_that_is_no_text_is_named(message, said):
  with pytest.raises(chat.ChatError, match=rf'messages\[0\]: {said}'):
    chat.read_messages([{'role': 'user'} | message])
