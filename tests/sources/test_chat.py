import asyncio
import sys
import threading

from ml_collections import ConfigDict
import pytest

from searchrl_jax import schema as config_lib
from searchrl_jax.sources.chat import Chat, ChatError
from tests import chat_server

pytestmark = pytest.mark.slow


def config(url, **fields):
  c = config_lib.base().judge
  c.update(url=url, timeout=5.0, attempts=1, **fields)
  return c


async def reply(chat, **how):
  try:
    return await chat.reply(
      [{'role': 'user', 'content': 'hello'}],
      max_tokens=9,
      temperature=0.5,
      **how,
    )
  finally:
    await chat.close()


def kind(config):
  with pytest.raises(ChatError) as error:
    asyncio.run(reply(Chat(config)))
  assert config.url in str(error.value)
  return error.value.kind


def test_a_reply_and_what_was_asked(monkeypatch):
  monkeypatch.setenv('OPENAI_API_KEY', 'secret')
  schema = {'type': 'object'}
  with chat_server.serve(lambda body: 'well') as chats:
    chat = Chat(config(chats.url))
    # Several event loops in turn, with and without /v1 in the URL.
    assert asyncio.run(reply(chat, seed=7, schema=schema)) == 'well'
    assert asyncio.run(reply(Chat(config(f'{chats.url}/v1/')))) == 'well'
    assert asyncio.run(reply(chat)) == 'well'
  first, second, _ = chats.asked
  assert first['model'] == 'judge'
  assert first['messages'] == [{'role': 'user', 'content': 'hello'}]
  assert (first['max_tokens'], first['temperature']) == (9, 0.5)
  assert first['seed'] == 7 and 'seed' not in second
  assert first['response_format']['json_schema']['schema'] == schema
  assert set(chats.tokens) == {'Bearer secret'}


def test_no_reply_is_an_error_of_its_kind():
  replies = {'said': 'x'}
  with chat_server.serve(lambda body: replies['said']) as chats:
    for said, expected in (
      (503, 'overloaded'),
      (429, 'overloaded'),
      (401, 'rejected'),
      (404, 'rejected'),
      (b'<html>', 'bad_response'),
      (b'{"choices": null}', 'bad_response'),
      (b'[]', 'bad_response'),
      (None, 'unreachable'),
      # It answered: what it was asked is to blame.
      (400, 'unusable'),
      (413, 'unusable'),
      (422, 'unusable'),
      (b'{"choices": []}', 'unusable'),
      ('', 'unusable'),
      (' \n', 'unusable'),
      (
        b'{"choices": [{"message": {"content": null, "refusal": "No."}}]}',
        'unusable',
      ),
    ):
      replies['said'] = said
      assert kind(config(chats.url, model='m')) == expected, said
    for chats.finish in ('length', 'content_filter'):
      replies['said'] = 'cut short'
      assert kind(config(chats.url)) == 'unusable'
    closed = chats.url
  assert kind(config(closed)) == 'unreachable'


@pytest.mark.parametrize(
  'given, asked',
  [
    ('http://h:1', 'http://h:1/v1'),
    ('http://h:1//v1/', 'http://h:1/v1'),
    ('http://h:1/p/v1/chat/completions', 'http://h:1/p/v1'),
    ('http://h:1/v1/completions/', 'http://h:1/v1'),
    ('http://0.0.0.0:1/v1', 'http://127.0.0.1:1/v1'),
    ('http://[::]', 'http://[::1]/v1'),
    ('http://h/xv1', 'http://h/xv1/v1'),
    ('http://v1', 'http://v1/v1'),
    # Another version, or what several hosts have in its place.
    ('http://h/api/v4/', 'http://h/api/v4'),
    ('http://h/v4/chat/completions', 'http://h/v4'),
    ('http://h/v1beta/openai', 'http://h/v1beta/openai'),
    ('http://h/v1beta/openai/chat/completions', 'http://h/v1beta/openai'),
    ('http://h/openai/v1', 'http://h/openai/v1'),
  ],
)
def test_addresses_that_mean_the_server(given, asked):
  assert Chat(config(given)).url == asked


@pytest.mark.parametrize(
  'option, said, instead',
  [
    ('response_format', "'response_format' is not supported", set()),
    ('response_format', 'type json_schema is unknown', set()),
    (
      'max_tokens',
      "'max_tokens' is not supported. Use 'max_completion_tokens' instead.",
      {'max_completion_tokens'},
    ),
    ('temperature', "'temperature' does not support 0.5", set()),
  ],
)
def test_an_option_that_a_server_does_not_take_is_left_out(
  option, said, instead
):
  def script(body):
    return (400, said) if option in body else 'well'

  with chat_server.serve(script) as chats:
    chat = Chat(config(chats.url))
    for _ in range(2):
      assert asyncio.run(reply(chat, schema={'type': 'object'})) == 'well'
  refused, again, later = chats.asked
  assert again.keys() == later.keys() == refused.keys() - {option} | instead
  assert all(again[name] == refused[option] for name in instead)


def test_a_server_that_refuses_without_an_option_too_is_asked_twice():
  with chat_server.serve(lambda body: (400, 'no json_schema')) as chats:
    chat = Chat(config(chats.url))
    with pytest.raises(ChatError, match='json_schema') as error:
      asyncio.run(reply(chat, schema={'type': 'object'}))
  assert error.value.kind == 'unusable'
  first, second = chats.asked
  assert first.keys() - second.keys() == {'response_format'}


def test_a_proxy_is_named(monkeypatch):
  for name in ('http_proxy', 'HTTP_PROXY', 'no_proxy', 'NO_PROXY'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('http_proxy', 'http://127.0.0.1:1')
  with pytest.raises(ChatError, match='unreachable.*http_proxy=http://1'):
    asyncio.run(Chat(config('http://10.0.0.1:1')).check())
  monkeypatch.setitem(sys.modules, 'socksio', None)  # not installed
  monkeypatch.setenv('ALL_PROXY', 'socks5://127.0.0.1:1')
  with pytest.raises(ChatError, match=r'ALL_PROXY=socks5.*httpx\[socks\]'):
    asyncio.run(Chat(config('http://10.0.0.1:1')).check())
  with chat_server.serve(lambda body: 'well') as chats:
    assert asyncio.run(reply(Chat(config(chats.url)))) == 'well'


def test_a_reply_in_parts_and_an_error_that_is_sent_as_success():
  parts = [{'type': 'thinking', 'thinking': []}, {'type': 'text', 'text': 'x'}]
  with chat_server.serve(lambda body: parts) as chats:
    assert asyncio.run(reply(Chat(config(chats.url)))) == 'x'
    chats.script = lambda body: b'{"error": {"message": "no room"}}'
    with pytest.raises(ChatError, match='bad_response.*no room'):
      asyncio.run(reply(Chat(config(chats.url))))


def test_a_slow_server_is_a_timeout():
  release = threading.Event()

  def slow(body):
    release.wait(30)
    return 'late'

  with chat_server.serve(slow) as chats:
    c = config(chats.url, model='m')
    c.timeout = 0.2
    assert kind(c) == 'timeout'
    release.set()


def test_what_may_pass_is_tried_again():
  left = [503, None]
  with chat_server.serve(lambda body: left.pop() if left else 'x') as chats:
    c = config(chats.url, model='m')
    c.attempts = 3
    assert asyncio.run(reply(Chat(c))) == 'x'
  assert len(chats.asked) == 3


def test_no_more_requests_than_allowed_are_in_flight():
  gate = threading.Barrier(2, timeout=20)  # breaks if two never meet

  def said(body):
    gate.wait()
    return 'x'

  async def many(chat):
    return await asyncio.gather(
      *(chat.reply([], max_tokens=1, temperature=0.0) for _ in range(6))
    )

  with chat_server.serve(said) as chats:
    c = config(chats.url, model='m', concurrency=2)
    assert asyncio.run(many(Chat(c))) == ['x'] * 6
  assert chats.most == 2


@pytest.mark.parametrize(
  'body',
  [
    b'<html>',
    b'[]',
    b'"x"',
    b'null',
    b'{"data": null}',
    b'{"data": 5}',
    b'{"data": [{"name": "x"}]}',
  ],
)
def test_check_takes_nonsense_for_no_server(body):
  with chat_server.serve(lambda body: 'x') as chats:
    chats.models = body
    with pytest.raises(ChatError, match=f'{chats.url}.*bad_response') as error:
      asyncio.run(Chat(config(chats.url)).check())
  assert error.value.kind == 'bad_response'


def test_a_server_that_drips_is_a_timeout(monkeypatch):
  from searchrl_jax.sources import chat as module

  monkeypatch.setattr(module, '_PAUSE', 0.0)
  release = threading.Event()
  with chat_server.serve(lambda body: release) as chats:
    c = config(chats.url, model='m')
    c.timeout = 0.5
    assert kind(c) == 'timeout'
    release.set()


def test_as_many_connections_as_requests_may_be_in_flight():
  async def limit():
    chat = Chat(config('http://127.0.0.1:9', concurrency=512))
    import openai

    client, _ = chat._client(openai)
    pool = client._client._transport._pool
    await chat.close()
    return pool._max_connections

  assert asyncio.run(limit()) == 512


def test_check_names_what_is_wrong():
  with chat_server.serve(lambda body: 'x') as chats:
    found = asyncio.run(Chat(config(chats.url)).check())
    assert found == {'url': f'{chats.url}/v1', 'model': 'judge'}
    with pytest.raises(ChatError, match="judge.model='jugde'.*: judge"):
      asyncio.run(Chat(config(chats.url, model='jugde')).check())
    chats.models = []
    with pytest.raises(ChatError, match='no models'):
      asyncio.run(Chat(config(chats.url)).check())
    url = chats.url
  with pytest.raises(ChatError, match=f'{url}.*unreachable'):
    asyncio.run(Chat(config(url)).check())


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'url': 'localhost:8000'}, "judge.url='localhost:8000'"),
    ({'url': 'http://127.0.0.1:99999'}, 'judge.url='),
    ({'url': 'http://127.0.0.1:80OO'}, 'judge.url='),
    ({'url': 'http://[::1'}, 'judge.url='),
    ({'url': 'http://127.0.0.1:80/v1?x=1'}, 'judge.url='),
  ],
)
def test_fields_that_cannot_be_are_named(fields, message):
  c = ConfigDict(config('http://127.0.0.1:1').to_dict() | fields)
  with pytest.raises(ValueError, match=message):
    Chat(c)


def test_a_model_is_asked_by_the_name_that_outlives_a_restart():
  """A sidecar's first name is of its start alone (engines/vllm/host.py)."""
  with chat_server.serve(lambda body: 'well') as chats:
    chats.models = ['searchrl-0a', 'policy']
    chat = Chat(config(chats.url))
    assert asyncio.run(chat.check())['model'] == 'policy'
    asyncio.run(reply(chat))
    chats.models = ['searchrl-0b', 'policy']
    asyncio.run(reply(chat))
  assert [body['model'] for body in chats.asked] == ['policy'] * 2


def test_of_several_models_one_has_to_be_named():
  with chat_server.serve(lambda body: 'well') as chats:
    chats.models = ['small', 'large']
    with pytest.raises(ChatError, match='small, large.*judge.model'):
      asyncio.run(Chat(config(chats.url)).check())
    with pytest.raises(ChatError, match='small, large'):
      asyncio.run(reply(Chat(config(chats.url))))
    asyncio.run(reply(Chat(config(chats.url, model='large'))))
  assert [body['model'] for body in chats.asked] == ['large']
