"""The server: a real OpenAI client, bad input, and the page in Chromium."""

import asyncio
from concurrent import futures
import contextlib
import io
import json
import re
import socket
import time
import zipfile

import httpx
import openai
import pytest

from searchrl_jax import read, serve
from searchrl_jax.devices.signals import Loop
from searchrl_jax.endpoint import app
from tests import browsers, clock, fakes, viewed
from tests.endpoint import speaking

pytestmark = pytest.mark.slow

KEY = 'k' * 43
SCRIPT = '</script><script>window.owned=1</script><img src=x onerror=owned=1>'
HOSTILE = f'{SCRIPT}\u202eevil\u2066\u2028{{{{nonce}}}}'
ASKED = {'model': 'one', 'question': 'who was it?'}
CHAT = {'model': 'one', 'messages': [{'role': 'user', 'content': 'hi'}]}


def answers(before, seed):
  """Searches once, then answers; the answer depends on what was asked."""
  if '<information>' not in before:
    return '<think> a café, look it up </think><search> who </search>'
  return f'<think> there </think><answer> Ann {len(before)} </answer>'


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return viewed.tokenizer(tmp_path_factory.mktemp('tok'))


def policy(tok, folder, name='one', script=answers, **how):
  folder = folder / name
  folder.mkdir(exist_ok=True)
  return serve.Policy(name, speaking.player(tok, script, folder, **how))


@contextlib.contextmanager
def served(*policies, host='127.0.0.1'):
  """The URL of a server of these policies, without /v1."""
  ready = futures.Future()

  async def main():
    async with app.serving(serve.make(policies, KEY), host) as url:
      ready.set_result(url.removesuffix('/v1'))
      try:
        await asyncio.Event().wait()
      finally:
        for one in policies:
          one.close()

  with Loop() as loop:
    task = loop.start(main())
    try:
      yield ready.result(20)
    finally:
      loop.cancel(task)


def client(url, **how):
  headers = {'Authorization': f'Bearer {KEY}'}
  return httpx.Client(base_url=url, headers=headers, timeout=20, **how)


@pytest.fixture(scope='module')
def one(tok, tmp_path_factory):
  """A policy and its server."""
  made = policy(tok, tmp_path_factory.mktemp('one'))
  with served(made) as url:
    yield made, url


@pytest.fixture
def chat(one):
  own = dict(base_url=f'{one[1]}/v1', api_key=KEY, max_retries=0)
  with openai.OpenAI(**own) as made:
    yield made


def engine_of(made):
  return made.player.have.opener.engine


def until(condition, seconds=10):
  begin = time.monotonic()
  while not condition():
    assert time.monotonic() - begin < seconds
    time.sleep(0.005)


def told(lines):
  """The events of a stream."""
  events = [line.removeprefix('data: ') for line in lines if line]
  assert events.pop() == '[DONE]'
  return [json.loads(event) for event in events]


# OpenAI's client.


def test_models_are_named_and_an_unknown_one_is_not_found(chat):
  assert [model.id for model in chat.models.list()] == ['one']
  with pytest.raises(openai.NotFoundError, match='there is one') as e:
    chat.chat.completions.create(**CHAT | {'model': 'two'})
  assert (e.value.code, e.value.param) == ('model_not_found', 'model')


def test_an_address_of_version_6_is_served(tok, tmp_path):
  try:
    socket.create_server(('::1', 0), family=socket.AF_INET6).close()
  except OSError as e:
    pytest.skip(f'no ::1 here: {e}')
  with served(policy(tok, tmp_path), host='::1') as url, client(url) as http:
    assert url.startswith('http://[::1]:')
    assert http.get('/v1/models').status_code == 200


def test_a_reply_and_its_chunks_are_the_same(one, chat):
  ask = lambda **how: chat.chat.completions.create(**CHAT, seed=3, **how)
  whole = ask(logprobs=True)
  (choice,) = whole.choices
  assert choice.finish_reason == 'stop'
  assert choice.message.content == answers('hi', 3)
  tokens = choice.logprobs.content
  assert len(tokens) == whole.usage.completion_tokens
  assert bytes(b for t in tokens for b in t.bytes).decode() == answers('hi', 3)
  chunks = [
    *ask(stream=True, stream_options={'include_usage': True}, logprobs=True)
  ]
  *chunks, last = chunks
  assert last.choices == [] and last.usage == whole.usage
  assert {c.id for c in chunks} == {last.id} and last.model == 'one'
  deltas = [c.choices[0].delta for c in chunks]
  assert (deltas[0].role, deltas[0].content) == ('assistant', '')
  texts = [d.content for d in deltas[1:] if d.content]
  assert ''.join(texts) == choice.message.content and len(texts) > 2
  assert chunks[-1].choices[0].finish_reason == 'stop'
  assert chunks[-1].choices[0].logprobs.content == tokens
  assert engine_of(one[0]).opened == 0


def test_a_stop_string_is_cut_off_wherever_it_lies(chat):
  text = answers('hi', 0)
  for stop in (text[5:8], text[9:21], 'fé,'):
    ask = lambda **how: chat.chat.completions.create(**CHAT, **how)
    wanted = text[: text.index(stop)]
    assert ask(stop=[stop]).choices[0].message.content == wanted
    chunks = [*ask(stop=stop, stream=True)]
    texts = [c.choices[0].delta.content or '' for c in chunks]
    assert ''.join(texts) == wanted
    kept = ask(stop=[stop], extra_body={'include_stop_str_in_output': True})
    assert kept.choices[0].message.content.startswith(wanted + stop)


def test_choices_have_seeds_of_their_own(tok, tmp_path):
  made = policy(tok, tmp_path, script=lambda before, seed: f'said {seed}')
  with served(made) as url, client(url) as http:
    ask = lambda **how: http.post('/v1/chat/completions', json=CHAT | how)
    found = ask(n=3, seed=(1 << 32) - 2).json()
    texts = [choice['message']['content'] for choice in found['choices']]
    assert texts == [f'said {s}' for s in ((1 << 32) - 2, (1 << 32) - 1, 0)]
    tokens = [len(tok.encode(text)) + 1 for text in texts]
    assert found['usage']['completion_tokens'] == sum(tokens)
    events = told(ask(n=3, seed=5, stream=True).iter_lines())
    streamed = ['', '', '']
    for event in events:
      (choice,) = event['choices']
      streamed[choice['index']] += choice['delta'].get('content') or ''
    assert streamed == ['said 5', 'said 6', 'said 7']
    # Without a seed, each request draws anew.
    found = {ask().json()['choices'][0]['message']['content'] for _ in range(4)}
    assert len(found) == 4


def test_the_run_decides_what_a_request_leaves_open(tok, tmp_path):
  made, seen = policy(tok, tmp_path), []
  made.player.config.eval.update(temperature=0.7, top_p=0.9)
  engine = engine_of(made)
  generate = engine.generate

  async def noted(handle, sampling):
    seen.append((sampling.temperature, sampling.top_p, sampling.top_k))
    return await generate(handle, sampling)

  engine.generate = noted
  with served(made) as url, client(url) as http:
    for more in ({}, {'temperature': 0.3, 'top_p': 0.5}, {'temperature': 1e-6}):
      http.post('/v1/chat/completions', json=CHAT | more)
  assert seen == [(0.7, 0.9, 0), (0.3, 0.5, 0), (0.0, 0.9, 0)]


# Bad input.


def bad(**fields):
  return json.dumps(CHAT | fields).encode()


@pytest.mark.parametrize(
  'body, status, message',
  [
    (b'{', 400, 'not JSON'),
    (b'\xff\xfe{', 400, 'not JSON'),
    (b'[' * 100_000, 400, 'not JSON'),
    (b'[1]', 400, 'no JSON object'),
    (b' ' * (app.BODY + 1), 413, 'above'),
    (bad(model=None), 404, 'model=None'),
    (bad(model=['one']), 404, "model=['one']"),
    (bad(messages=None), 400, 'messages'),
    (bad(messages=[{'role': 'me', 'content': 'x'}]), 400, "role='me'"),
    (bad(messages=[{'role': 'user', 'content': 1}]), 400, 'content is 1'),
    (bad(frequency=1), 400, "'frequency' is not supported"),
    (bad(**{'\ud800': 1}), 400, 'is not supported'),
    (bad(tools=[{'type': 'function'}]), 400, 'tools[0]'),
    (
      bad(tools=[{'function': {'name': 'f', 'parameters': 'x'}}]),
      400,
      'tools[0]',
    ),
    (bad(tools=[{'function': {'name': 'f'}}]), 400, 'no chat template'),
    (bad(n=17), 400, 'at most 16'),
    (bad(n=0), 400, 'n=0'),
    (bad(temperature=3), 400, 'temperature=3'),
    (bad(max_tokens=True), 400, 'max_tokens=True'),
    (bad(stop=['']), 400, 'stop='),
    (bad(seed=-1), 400, 'seed=-1'),
    (bad(messages=[{'role': 'user', 'content': 'x ' * 1200}]), 400, 'tokens'),
    (
      bad(messages=[{'role': 'user', 'content': 'x' * (9 << 20)}]),
      400,
      'maximum context length',
    ),
  ],
  ids=[*range(23)],
)
def test_bad_requests_have_one_clear_error(one, body, status, message):
  made, url = one
  before = engine_of(made).calls
  # What is no object is no question either.
  paths = ('/v1/chat/completions',) + ('/ask',) * (body[:2] != b'{"')
  with client(url) as http:
    for path in paths:
      found = http.post(path, content=body)
      assert found.status_code == status
      error = found.json()['error']
      assert message in error['message'], error
      assert error['type'] == 'invalid_request_error'
    # Nothing was sampled, and others are served.
    assert engine_of(made).calls == before
    assert http.post('/v1/chat/completions', json=CHAT).status_code == 200


def test_stop_strings_may_be_named_like_ends(chat):
  ask = lambda **how: chat.chat.completions.create(**CHAT, **how)
  found = ask(stop=['length'], max_tokens=4).choices[0]
  assert found.finish_reason == 'length' and found.message.content
  assert ask(stop=['eos']).choices[0].finish_reason == 'stop'


@pytest.mark.parametrize('question', [None, '', '  ', 3, ['x']])
def test_a_question_is_a_text(one, question):
  with client(one[1]) as http:
    found = http.post('/ask', json=ASKED | {'question': question})
    assert (found.status_code, found.json()['error']['param']) == (
      400,
      'question',
    )


def test_a_question_that_is_too_long_and_a_search_that_fails(tok, tmp_path):
  source = fakes.FakeSource(fails=lambda query, attempt: True)
  made = policy(tok, tmp_path, source=source)
  with served(made) as url, client(url) as http:
    for n in (2000, 200_000):
      found = http.post('/ask', json=ASKED | {'question': 'x y ' * n})
      assert found.status_code == 422
      assert 'env.max_tokens' in found.json()['error']['message']
    *_, last = told(http.post('/ask', json=ASKED).iter_lines())
    assert 'late: who' in last['error']['message']
  assert engine_of(made).opened == 0


def test_addresses_that_there_are_not(one):
  with client(one[1]) as http:
    assert http.get('/v1/embeddings').json()['error']['message'] == 'Not Found'
    found = http.get('/v1/chat/completions')
    assert found.status_code == 405 and 'error' in found.json()


# Who may ask.


def test_nothing_but_the_page_is_served_without_the_key(one):
  before = engine_of(one[0]).calls
  paths = '/v1/models', '/v1/chat/completions', '/ask', '/save'
  key = KEY.encode()
  wrong = b'', b'Bearer', b'Bearer x', b'Bearer k\xe9', b'Bearer ' + key + b'k'
  with httpx.Client(base_url=one[1]) as http:
    for path in paths:
      for given in (*wrong, b'Basic ' + key):
        method, how = 'GET' if 'models' in path else 'POST', {'json': CHAT}
        how['headers'] = {'Authorization': given}
        found = http.request(method, path, **how)
        assert found.status_code == 401 and 'key' in found.text
    page = http.get('/')
    assert page.status_code == 200 and KEY not in page.text
    (nonce,) = set(re.findall('nonce="(.*?)"', page.text))
    rules = page.headers['Content-Security-Policy']
    assert f"script-src 'nonce-{nonce}'" in rules and '{{' not in page.text
    assert http.get('/').text != page.text  # another nonce
  assert engine_of(one[0]).calls == before


@pytest.mark.parametrize(
  'headers',
  [
    {'Host': 'evil.example'},
    {'Host': 'localhost.evil.example:80'},
    {'Host': '['},
    {'Host': ''},
    {'Origin': 'http://evil.example'},
    {'Origin': 'null'},
    {'Origin': 'http://localhost:1'},
  ],
)
def test_other_sites_are_refused(one, headers):
  with client(one[1]) as http:
    for path in ('/', '/v1/models'):
      assert http.get(path, headers=headers).status_code == 403


def test_its_own_names_are_not_refused(one):
  port = one[1].rsplit(':', 1)[1]
  with client(one[1]) as http:
    for host in (f'localhost:{port}', f'127.0.0.1:{port}', f'[::1]:{port}'):
      headers = {'Host': host, 'Origin': f'http://{host}'}
      assert http.get('/v1/models', headers=headers).status_code == 200


# Many, and those that go.


@pytest.mark.long
def test_200_clients_on_4_slots(tok, tmp_path):
  made = policy(tok, tmp_path, slots=4)
  engine = engine_of(made)
  engine.hold = True

  async def main(url):
    limits = httpx.Limits(max_connections=None)
    headers = {'Authorization': f'Bearer {KEY}'}
    how = dict(base_url=url, headers=headers, limits=limits, timeout=60)
    async with httpx.AsyncClient(**how) as http:
      path, bodies = '/v1/chat/completions', [CHAT, CHAT | {'stream': True}]
      work = [
        asyncio.ensure_future(http.post(path, json=bodies[n % 2]))
        for n in range(200)
      ]
      # Those beyond the slots and 64 that wait are refused, the others served.
      await clock.until(lambda: sum(x.done() for x in work) == 200 - 68)
      engine.hold = False
      return await asyncio.gather(*work)

  with served(made) as url:
    found = asyncio.run(main(url))
    assert [x.status_code for x in found].count(200) == 68
    for refused in (x for x in found if x.status_code != 200):
      assert refused.status_code == 429
      assert refused.headers['Retry-After'] == '1'
      assert refused.json()['error']['code'] == 'rate_limit_exceeded'
    assert (engine.most, engine.opened) == (4, 0)
    with client(url) as http:
      assert http.post('/v1/chat/completions', json=CHAT).status_code == 200


@pytest.mark.parametrize(
  'path, body',
  [('/v1/chat/completions', CHAT | {'stream': True}), ('/ask', ASKED)],
)
def test_a_client_that_goes_frees_its_slot_at_once(tok, tmp_path, path, body):
  said = lambda before, seed: '<think> more and ' * 60
  made = policy(tok, tmp_path, script=said, delay=0.05)
  engine = engine_of(made)
  with served(made) as url, client(url) as http:
    with http.stream('POST', path, json=body) as found:
      for n, _ in enumerate(found.iter_lines()):
        if n == 4:
          assert engine.opened == 1
          break  # httpx closes the connection
    until(lambda: not (engine.opened or engine.running or made._tasks))


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_goes_before_its_reply(tok, tmp_path, stream):
  made = policy(tok, tmp_path, delay=30)
  engine = engine_of(made)
  with served(made) as url, client(url) as http:
    with pytest.raises(httpx.ReadTimeout):
      http.post(
        '/v1/chat/completions',
        json=CHAT | {'stream': stream},
        timeout=httpx.Timeout(30, read=2),
      )
    assert engine.calls
    until(lambda: engine.opened == engine.running == 0)


def test_the_server_ends_while_it_answers(tok, tmp_path):
  made = policy(tok, tmp_path, delay=0.05, script=lambda *_: 'more and ' * 90)
  lines = []
  with client('http://127.0.0.1') as http:
    with served(made) as url:
      own = f'{url}/v1/chat/completions'
      stream = http.stream('POST', own, json=CHAT | {'stream': True})
      found = stream.__enter__()
      each = found.iter_lines()
      lines.append(next(each))
    lines += [line for line in each if line]
    stream.__exit__(None, None, None)
  assert 'is stopping' in lines[-2] and lines[-1] == 'data: [DONE]'
  assert engine_of(made).opened == 0


# What is played.


def test_events_of_a_question(one):
  made, url = one
  with client(url) as http:
    events = told(http.post('/ask', json=ASKED).iter_lines())
  texts = {}
  for event in events:
    if 'text' in event:
      key = event['author'], event['kind']
      texts[key] = texts.get(key, '') + event['text']
  assert texts['policy', 'search'] == '<search> who </search>'
  assert 'a café, look it up' in texts['policy', 'think']
  (asks,) = [event['asks'] for event in events if 'asks' in event]
  assert asks == {'tool': 'search', 'query': 'who'}
  (found,) = [event['found'] for event in events if 'found' in event]
  assert found['passages'][0]['id'] == 'id-who'
  last = events[-1]
  assert last['answer'].startswith('Ann') and last['end'] == 'answer'
  assert last['searches'] == 1 and re.fullmatch('[0-9a-f]{16}', last['id'])
  assert engine_of(made).opened == 0


def test_two_policies_are_saved_side_by_side(tok, tmp_path):
  both = policy(tok, tmp_path), policy(tok, tmp_path, 'two')
  with served(*both) as url, client(url) as http:

    def ask(**changes):
      found = http.post('/ask', json=ASKED | changes)
      return told(found.iter_lines())[-1]['id']

    ids = [ask(model=name) for name in ('one', 'two')]
    saved = http.post('/save', json={'ids': ids})
    assert saved.headers['Content-Type'] == 'application/zip'
    with zipfile.ZipFile(io.BytesIO(saved.content)) as packed:
      names = packed.namelist()
      index = packed.read('session_files/index.js').decode()
    assert 'session.html' in names and 'session_files/0_eval_0_0.js' in names
    assert 'session_files/1_eval_0_0.js' in names
    assert index.count('who was it?') == 1  # the same question
    (run,) = (tmp_path / 'one').glob('one-*')
    assert saved.headers['X-Page'].endswith(f'{run.name}/page/session.html')
    frame = read.run(run).trajectories('eval')
    assert frame.question.tolist() == ['who was it?']
    other = ask(question='another?')
    for wrong in (None, [], ['x'], 3, [[]], [ids[0], other]):
      found = http.post('/save', json={'ids': wrong})
      assert found.status_code == 400, wrong


# In Chromium.


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
  if browsers.missing():
    pytest.skip(browsers.missing())
  with browsers.chromium(tmp_path_factory.mktemp('profile')) as browser:
    browser.set_script_timeout(20)
    yield browser


class Page(browsers.Page):
  shown = '.column, #status.error'

  def press(self, key, **how):
    self.js(
      "document.getElementById('question').dispatchEvent(new KeyboardEvent("
      "'keydown', {key: arguments[0], bubbles: true, cancelable: true, "
      '...arguments[1]}))', key, how,
    )  # fmt: skip

  def ask(self, question):
    box = "document.getElementById('question')"
    self.js(f'({box}.value = arguments[0])', question)
    self.press('Enter')

  def log(self):
    return [x['message'] for x in self._browser.get_log('browser')]


@pytest.mark.long
def test_the_page_shows_what_is_played(tok, tmp_path, browser):
  source = fakes.FakeSource(text=HOSTILE + ' and more' * 40)
  said = lambda before, seed: answers(before, seed).replace('look', HOSTILE)
  made = policy(tok, tmp_path, script=said, source=source)
  with served(made) as url:
    browser.get_log('performance')
    page = Page(browser, f'{url}/#{KEY}')
    assert page.texts('.column h2') == ['one']
    page.ask(f'who? {HOSTILE}')
    page.wait("document.querySelector('.answer')")
    assert page.texts('.who') == ['think', 'search', 'think', 'answer']
    thought = page.texts('.text')[0]
    assert HOSTILE in thought and 'café' in thought
    assert page.texts('.answer')[0].startswith('Ann')
    # A passage opens, and is text whatever it says.
    whole = "document.querySelector('.passage .whole')"
    assert page.js(f'{whole}.textContent') == source.text
    assert page.js(f'{whole}.checkVisibility()') is False
    page.js("document.querySelector('.passage summary').click()")
    assert page.js(f'{whole}.checkVisibility()')
    owned = "window.owned || document.querySelectorAll('main img, main script')"
    assert page.js(f'({owned}).length') == 0
    marks = "document.querySelectorAll('.passage .whole .hidden-character')"
    marks = page.js(f'[...{marks}].map(x => x.dataset.name)')
    assert marks == ['U+202E', 'U+2066', 'U+2028']
    with pytest.raises(Exception, match='TrustedHTML'):
      page.js("(document.querySelector('.text').innerHTML = '<b>x</b>')")
    page.log()  # of that attempt
    # It is saved as the page of `view`.
    how = {'behavior': 'allow', 'downloadPath': str(tmp_path)}
    browser.execute_cdp_cmd('Page.setDownloadBehavior', how)
    page.js("document.getElementById('save').click()")
    page.wait("document.getElementById('status').textContent.includes('saved')")
    (saved,) = (tmp_path / 'one').glob('*/page/session.html')
    assert str(saved) in page.texts('#status')[0]
    until((tmp_path / 'session.zip').exists)
    assert page.log() == []
    # Nothing came from elsewhere, and the key was in no address.
    log = [json.loads(x['message']) for x in browser.get_log('performance')]
    events = [x['message']['params'] for x in log]
    asked = [
      x['request']['url']
      for x in events
      if x.get('documentURL', '').startswith(url) and 'request' in x
    ]
    own = [x for x in asked if not x.startswith(('data:', 'blob:'))]
    assert own and all(x.startswith(f'{url}/') for x in own)
    assert not any(KEY in x for x in own)
  page = Page(browser, saved.as_uri())
  assert page.texts('main h2') == [f'who? {HOSTILE}']
  assert page.log() == []


@pytest.mark.long
def test_two_answers_side_by_side_token_by_token_and_stopped(
  tok, tmp_path, browser
):
  slow = lambda before, seed: '<think>' + ' more and' * 100
  both = (
    policy(tok, tmp_path),
    policy(tok, tmp_path, 'two', script=slow, delay=0.05),
  )
  with served(*both) as url:
    page = Page(browser, f'{url}/#{KEY}')
    assert page.texts('.column h2') == ['one', 'two']
    page.press('Enter')  # asks nothing
    page.ask('who was it?')
    lengths = []
    for _ in range(3):
      long = lengths[-1] if lengths else 0
      box = "document.querySelector('[aria-label=two] .text')"
      page.wait(f'{box} && {box}.textContent.length > {long}')
      lengths.append(len(page.texts('[aria-label=two] .text')[0]))
    assert lengths[0] < lengths[1] < lengths[2] < len(slow('', 0))
    page.wait("document.querySelector('[aria-label=one] .answer')")
    assert engine_of(both[1]).opened == 1
    assert page.js("document.getElementById('stop').disabled") is False
    page.press('Escape')
    page.wait("document.getElementById('stop').disabled")
    until(lambda: engine_of(both[1]).opened == 0)
    assert page.texts('[aria-label=two] h2 small') == ['stopped']
    assert page.js("document.getElementById('save').disabled") is False
    # Another question replaces one that is under way.
    page.press('Enter')
    page.wait("document.querySelector('[aria-label=two] .text')")
    page.press('Enter', shiftKey=True)  # a line of the question
    page.ask('another?')
    page.wait("document.querySelector('[aria-label=one] .answer')")
    until(lambda: engine_of(both[1]).opened == 1)
    page.press('Escape')
    assert page.log() == []


@pytest.mark.long
def test_a_page_without_the_key_says_so(one, browser):
  page = Page(browser, f'{one[1]}/')
  assert 'lacks its key' in page.texts('#status')[0]
  page = Page(browser, f'{one[1]}/#wrong')
  assert 'not the key' in page.texts('#status')[0]
  page.log()  # the status 401


@pytest.mark.long
def test_light_dark_and_who_has_the_focus(one, browser):
  page = Page(browser, f'{one[1]}/#{KEY}')
  assert page.js('document.activeElement.id') == 'question'
  color = lambda: page.js('getComputedStyle(document.body).backgroundColor')
  before = color()
  page.js("document.getElementById('theme').click()")
  assert color() != before
  page.js("localStorage.removeItem('theme')")
  assert page.js("document.querySelector('#status').getAttribute('role')")
  assert page.js("document.querySelector('[aria-live=polite]') !== null")
