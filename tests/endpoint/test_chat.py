"""Chats as programs send them, and replies with calls."""

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


def test_arguments_that_cannot_be_read_stay_as_they_are_written():
  for deep in ('[' * 100_000, '{'):
    sent = {'function': {'name': 'f', 'arguments': deep}}
    assert chat.call(sent)['function']['arguments'] == deep
