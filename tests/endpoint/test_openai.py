"""The endpoint as OpenAI's own client sees it."""

import asyncio
import json

import httpx
import openai
import pytest

from tests.endpoint.scripted import Calls, Says, call, play, served
from tests.endpoint.test_sessions import EOS, Tokens, user

FIND = {
  'type': 'function',
  'function': {'name': 'find', 'parameters': {'type': 'object'}},
}


def ask(*messages, **fields):
  return dict(model='policy', messages=[*messages], **fields)


def test_a_reply_with_usage_and_logprobs():
  async def chat(client, session):
    reply = await client.chat.completions.create(
      **ask(user('hi'), logprobs=True)
    )
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == ('hello', 'stop')
    found = choice.logprobs.content
    assert ''.join(x.token for x in found) == 'hello'
    assert [x.logprob for x in found] == [-1, -2, -3, -4, -5, -6]  # with eos
    assert bytes(i for x in found for i in x.bytes) == b'hello'
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, 6)
    assert usage.total_tokens == 8

  play(chat, 'hello', tokens=Tokens())


def test_a_stream_has_the_same():
  async def chat(client, session):
    more = dict(stream=True, stream_options={'include_usage': True})
    stream = await client.chat.completions.create(**ask(user('hi'), **more))
    chunks = [chunk async for chunk in stream]
    *first, last = chunks
    assert last.usage.completion_tokens == 6 and last.choices == []
    choices = [chunk.choices[0] for chunk in first]
    assert ''.join(c.delta.content or '' for c in choices) == 'hello'
    assert choices[0].delta.role == 'assistant'
    assert [c.finish_reason for c in choices if c.finish_reason] == ['stop']
    assert len({chunk.id for chunk in chunks}) == 1

  play(chat, 'hello')


@pytest.mark.parametrize('stream', [False, True])
def test_calls_of_tools_go_on_in_one_context(stream):
  async def chat(client, session):
    messages = [user('who?')]
    for n in range(2):
      request = ask(*messages, tools=[FIND], stream=stream)
      reply = await client.chat.completions.create(**request)
      if stream:
        chunks = [chunk.choices[0] async for chunk in reply]
        (made,) = [c for x in chunks for c in x.delta.tool_calls or ()]
        assert made.index == 0 and chunks[-1].finish_reason == 'tool_calls'
        message = {'role': 'assistant', 'content': None}
        message['tool_calls'] = [made.model_dump(exclude={'index'})]
      else:
        assert reply.choices[0].finish_reason == 'tool_calls'
        message = reply.choices[0].message.model_dump(exclude_none=True)
        (made,) = reply.choices[0].message.tool_calls
      assert (made.type, made.function.name) == ('function', 'find')
      assert json.loads(made.function.arguments) == {'query': f'{n}'}
      result = dict(role='tool', tool_call_id=made.id, content='Ann')
      messages += [message, result]
    reply = await client.chat.completions.create(**ask(*messages, tools=[FIND]))
    assert reply.choices[0].message.content == 'Ann'
    assert session.edits == 0 and session.trajectory().turns == 3

  play(chat, call('find', query='0'), call('find', query='1'), 'Ann')


def test_stop_strings_and_lengths():
  async def chat(client, session):
    create = client.chat.completions.create
    reply = await create(**ask(user('a'), stop=['!']))
    assert reply.choices[0].message.content == 'no'
    more = dict(extra_body={'include_stop_str_in_output': True})
    reply = await create(**ask(user('b'), stop='!', **more))
    assert reply.choices[0].message.content == 'yes!'
    reply = await create(**ask(user('c'), max_tokens=3))
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ('lon', 'length')
    assert session.edits == 2  # none went on with the one before

  play(chat, 'no! more', 'yes! more', 'long', tokens=Tokens())


def test_errors_are_those_of_the_client():
  async def chat(client, session):
    create = client.chat.completions.create
    for fields, param in (
      (dict(n=2), 'n'),
      (dict(extra_body={'foo': 1}), 'foo'),
      (dict(temperature=9), 'temperature'),
      (dict(tools=[{'type': 'function'}]), 'tools'),
      (dict(extra_body={'logprobs': 3}), 'logprobs'),
      (dict(extra_body={'stream_options': 1}), 'stream_options'),
      (dict(response_format={'type': 'json_object'}), 'response_format'),
    ):
      with pytest.raises(openai.BadRequestError) as caught:
        await create(**ask(user('hi'), **fields))
      assert caught.value.param == param
    with pytest.raises(openai.BadRequestError, match='maximum context length'):
      await create(**ask(user('hi' * 200)))
    with pytest.raises(openai.BadRequestError, match="role='judge'"):
      await create(**ask({'role': 'judge', 'content': 'hi'}))
    with pytest.raises(openai.AuthenticationError):
      await client.with_options(api_key='guess').models.list()
    assert [m.id async for m in client.models.list()] == ['policy']
    assert session.trajectory().turns == 0  # none was sampled from
    await create(**ask(user('hi')))

  play(chat, 'fine')


def test_the_end_of_a_turn_is_a_token_of_the_policy():
  async def chat(client, session):
    messages = [user('hi')]
    for _ in range(2):
      reply = await client.chat.completions.create(**ask(*messages))
      messages += [reply.choices[0].message.model_dump(), user('and?')]
    own = [s for s in session.trajectory().segments if s.author == 'policy']
    assert [s.ids[-1] for s in own] == [EOS, EOS]

  play(chat, 'one', 'two')


def test_a_search_that_a_program_gave_up_is_none():
  """Its client may ask again; the first one is neither kept nor a failure."""
  ended = []

  async def find(queries, k, turn):
    try:
      await asyncio.sleep(60)
    finally:
      ended.append(queries)

  async def main():
    async with served(Says(), Calls(), find=find) as (url, session):
      about = {'Authorization': f'Bearer {session.key}'}
      async with httpx.AsyncClient(headers=about, timeout=0.3) as client:
        with pytest.raises(httpx.ReadTimeout):
          where = url.replace('/v1', '/retrieve')
          await client.post(where, json={'queries': ['who']})
      while not ended:
        await asyncio.sleep(0.01)
      assert session.trajectory().searches == () and not session.broken

  asyncio.run(main())
