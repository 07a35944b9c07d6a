"""Sessions: what a client sees is recorded, and trained, token by token."""

import asyncio
import collections
import dataclasses
import types as namespaces

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.endpoint import app
from searchrl_jax.endpoint.sessions import Busy, Closed, Request, Session
from searchrl_jax.engines.core import Completion, Sampling
from searchrl_jax.learn import batching
from searchrl_jax.text.chat import ChatError
from searchrl_jax.types import Context, Question, Segment, Trajectory, length
from tests import fakes

EOS = fakes.EOS


class Tokens(fakes.ByteTokenizer):
  """A token is a byte; a chat without a template."""

  control = frozenset({EOS})

  def control_name(self, i):
    return '<eos>'

  def has_added(self, text):
    return False


class Chats(Tokens):
  """With a template, whose <x> and </x> enclose messages; </x> is eos."""

  has_chat = True

  def control_name(self, i):
    return '</x>'

  def chat(self, messages, tools=(), reply=True):
    said = [f'<x>{m["role"]}:{m["content"]}</x>\n' for m in messages]
    return ''.join([*map(str, tools), *said, '<x>assistant:' * reply])

  def encode_parts(self, parts, start=False):
    text = ''.join(t for t, _ in parts)
    out = []
    for n, piece in enumerate(text.split('</x>')):
      out += [EOS] * bool(n) + [*piece.encode()]
    return out


class Engine:
  """Samples letters by seed and position; keeps what it was asked after."""

  piece = 8

  def __init__(self):
    self.asked, self.opened = [], 0

  def open(self, prompt):
    self.opened += 1
    return list(prompt.ids)

  def truncate(self, handle, n):
    assert 1 <= n <= len(handle)
    del handle[n:]

  def append(self, handle, ids):
    handle.extend(ids)

  def close(self, handle):
    self.opened -= 1

  async def generate(self, handle, s: Sampling):
    before, at = list(handle), len(handle)
    ids = []
    while len(ids) < s.max_tokens:
      rng = np.random.default_rng([s.seed, at + len(ids)])
      i = int(rng.choice([*b'abc.<', EOS]))
      ids.append(i)
      if i == EOS or bytes(x for x in ids if x < EOS).endswith(b'.'):
        break
    await asyncio.sleep(0)
    handle.extend(ids)
    stop = 'eos' if ids[-1] == EOS else '.' if ids[-1] == 46 else 'length'
    self.asked.append((before, ids))
    logps = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Completion(
      np.array(ids, np.int32), logps, stop, np.zeros(len(ids), np.int32)
    )


def made(tokens=None, engine=None, most=400, contexts=99, **about):
  limits = namespaces.SimpleNamespace(max_tokens=most, max_contexts=contexts)
  return Session(
    Question('q', 'who?'),
    0,
    engine=engine or Engine(),
    tokenizer=tokens or Tokens(),
    sampling=Sampling(1),
    seeds=lambda k: k,
    limits=limits,
    **about,
  )


def user(text):
  return {'role': 'user', 'content': text}


def check(session, engine):
  """Each sampled token is trained once, after what it was sampled after."""
  parts = batching.tokens_of(0, session.trajectory())
  trained = []
  for p in parts:
    for n in np.flatnonzero(p.mask):
      trained.append((tuple(p.ids[:n].tolist()), int(p.ids[n])))
  sampled = [
    ((*before, *ids[:n]), i)
    for before, ids in engine.asked
    for n, i in enumerate(ids)
  ]
  assert trained == [(tuple(b), i) for b, i in sampled]
  logps = np.concatenate([p.logps[p.mask] for p in parts])
  own = [-np.arange(1, len(i) + 1) for _, i in engine.asked]
  assert (logps == np.concatenate(own)).all()


@pytest.mark.parametrize('tokens', [Tokens, Chats])
def test_a_chat_that_goes_on_is_one_context(tokens):
  engine, messages = Engine(), [user('hello ')]
  session = made(tokens(), engine)

  async def chat():
    for n in range(6):
      reply = await session.reply(Request([*messages], stops=('.',)))
      messages.append({'role': 'assistant', 'content': reply.content})
      messages.append(user(f'and {n}? '))

  asyncio.run(chat())
  check(session, engine)
  t = session.trajectory()
  assert (t.contexts, session.edits, t.turns) == ((), 0, 6)
  session.close()
  assert engine.opened == 0


@pytest.mark.parametrize('tokens', [Tokens, Chats])
@settings(max_examples=60)
@given(st.data())
def test_whatever_a_client_does_to_history(tokens, data):
  engine = Engine()
  session = made(tokens(), engine)

  async def chat():
    messages = [user('hi ')]
    for _ in range(data.draw(st.integers(1, 8))):
      n = data.draw(st.sampled_from([0, 3]))
      reply = await session.reply(
        Request([*messages], stops=('.',), max_tokens=n)
      )
      messages.append({'role': 'assistant', 'content': reply.content})
      what = data.draw(st.sampled_from('extend edit drop repeat swap'.split()))
      at = data.draw(st.integers(0, len(messages) - 1))
      if what == 'edit':
        messages[at] = messages[at] | {'content': 'x '}
      elif what == 'drop' and len(messages) > 1:
        del messages[at]
      elif what == 'repeat':
        messages.pop()  # the same request again
        continue
      elif what == 'swap':
        messages[at], messages[-1] = messages[-1], messages[at]
      messages.append(user('more '))

  asyncio.run(chat())
  check(session, engine)


def test_a_new_context_stands_between_the_replies():
  session = made()

  async def chat():
    await session.reply(Request([user('abc')], max_tokens=3))
    await session.reply(Request([user('abd')], max_tokens=3))

  asyncio.run(chat())
  t = session.trajectory()
  authors = [s.author for s in t.segments]
  assert authors == ['prompt', 'policy', 'environment', 'policy']
  [context] = t.contexts
  assert bytes(context.prompt.tolist()) == b'ab'
  assert bytes(t.segments[2].ids.tolist()) == b'd'


def test_a_client_may_put_the_stop_string_back():
  session, messages = made(), [user('hello ')]

  async def chat():
    for _ in range(4):
      reply = await session.reply(Request([*messages], stops=('.',)))
      said = reply.content + '.' * (reply.completion.stop == '.')
      messages.extend([{'role': 'assistant', 'content': said}, user('on ')])

  asyncio.run(chat())
  assert session.edits == 0


def test_an_error_of_the_engine_is_kept():
  engine = Engine()

  async def lost(handle, sampling):
    raise RuntimeError('the device is gone')

  engine.generate = lost
  session = made(engine=engine)
  with pytest.raises(RuntimeError):
    asyncio.run(session.reply(Request([user('a')])))
  assert 'device' in str(session.broken) and engine.opened == 0


def test_an_error_of_the_source_is_kept():
  async def lost(queries, k, turn):
    raise TypeError('a source with a bug')

  session = made(find=lost)
  with pytest.raises(TypeError):
    asyncio.run(session.search(['who'], 3))
  assert 'with a bug' in str(session.broken)


@pytest.mark.parametrize('asked_again', [False, True])
@pytest.mark.parametrize(
  'said, answer',
  [
    # In the thought that the chat template has opened, nothing is an answer.
    ('maybe <answer>Paris</answer>?</think>\nI do not know.', None),
    ('no need to <search> again.</think>\n<answer>Paris</answer>', 'Paris'),
  ],
)
def test_a_chat_template_opens_a_thought_in_every_turn(
  said, answer, asked_again
):
  env = fakes.make_env()
  parts = [
    ('prompt', 'who?\n<think>\n'),
    ('policy', 'hm</think>\nwell'),
    ('environment', '\nsure?\n<think>\n'),
    ('policy', said),
  ]
  ids = [np.array([*text.encode()], np.int32) for _, text in parts]
  contexts = ()
  if asked_again:  # all but the last token is the prompt of a context
    start = len(ids[0]) + len(ids[1])
    contexts = (Context(start, np.concatenate(ids[:3])[:-1], 'edit'),)
    ids[2] = ids[2][-1:]
  segments = tuple(
    Segment(own, author, 'other', train=author == 'policy')
    for own, (author, _) in zip(ids, parts)
  )
  about = dict(contexts=contexts, turns=2, meta={'edits': []})
  t = Trajectory(Question('q', 'who?'), segments, (), 'answer', **about)
  assert env.answer(t) == answer
  # A turn of the native environment begins outside.
  plain = dataclasses.replace(t, meta={}, contexts=())
  assert env.answer(plain) == (None if answer else 'Paris')


def test_contexts_are_counted():
  counted = collections.Counter()
  session = made(count=lambda **counts: counted.update(counts))

  async def chat():
    first = await session.reply(Request([user('a ')], max_tokens=3))
    said = {'role': 'assistant', 'content': first.content}
    chat = [user('a '), said, user('go on ')]
    await session.reply(Request(chat, max_tokens=3))
    await session.reply(Request([user('b ')], max_tokens=3))

  asyncio.run(chat())
  assert (counted['generations'], counted['contexts']) == (3, 1)
  segments = session.trajectory().segments
  outside = [s for s in segments if s.author == 'environment']
  assert counted['outside_tokens'] == length(outside) > 0


def test_a_cancelled_request_leaves_the_session_as_it_was():
  engine = Engine()
  session = made(engine=engine)

  async def chat():
    await session.reply(Request([user('a ')]))
    before = session.trajectory().segments
    slow = asyncio.ensure_future(session.reply(Request([user('b ')])))
    await asyncio.sleep(0)
    with pytest.raises(Busy):
      await session.reply(Request([user('c ')]))
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
      await slow
    assert session.trajectory().segments == before and engine.opened == 0
    await session.reply(Request([user('d ')]))

  asyncio.run(chat())
  session.close()
  with pytest.raises(Closed):
    asyncio.run(session.reply(Request([user('e ')])))
  assert engine.opened == 0


def test_a_request_that_cannot_be_used_breaks_nothing():
  session = made()
  with pytest.raises(ChatError, match='is empty'):
    asyncio.run(session.reply(Request([user('')])))
  assert session.broken is None
  half = {'messages': [user('hi')], 'stop': '\ud800'}  # legal JSON
  with pytest.raises(ChatError, match='^stop='):
    app.read(half)


def test_limits_are_errors_of_the_request():
  session = made(most=20, contexts=1)
  with pytest.raises(ChatError, match='max_tokens'):
    asyncio.run(session.reply(Request([user('x' * 30)])))
  asyncio.run(session.reply(Request([user('x')], max_tokens=2)))
  with pytest.raises(ChatError, match='max_contexts'):
    asyncio.run(session.reply(Request([user('y')])))
