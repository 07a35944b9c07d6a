"""Pieces equal one call; text is sent as soon as it cannot change."""

import asyncio
import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.endpoint.sessions import Request
from searchrl_jax.endpoint.streaming import Deltas, Streamed
from searchrl_jax.engines.core import EngineError, Sampling
from searchrl_jax.types import Prompt
from tests import fakes
from tests.endpoint.speaking import Speaker
from tests.endpoint.test_sessions import Chats, Engine, Tokens, made, user

TOOL = {'type': 'function', 'function': {'name': 'f'}}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
BARE = '{"name": "f", "parameters": {}}'
ALPHABET = [*'abcé'.encode(), fakes.EOS]


class Drawing(Speaker):
  """Draws bytes by seed and position."""

  def draws(self, handle, seed):
    rng = lambda at: np.random.default_rng([seed, at])
    odds = [0.3, 0.25, 0.2, 0.1, 0.1, 0.05]
    return lambda at: int(rng(at).choice(ALPHABET, p=odds))


async def called(engine, start, samplings, outside=(7,)):
  """Completions of one handle, with outside text between them."""
  handle = engine.open(Prompt(start))
  out = []
  for sampling in samplings:
    out.append(await engine.generate(handle, sampling))
    engine.append(handle, outside)
  ids = [*handle] if isinstance(handle, list) else [*handle.ids]
  engine.close(handle)
  return out, ids


def same(one, other):
  for a, b in zip(one, other, strict=True):
    for name in ('ids', 'logps', 'versions'):
      x, y = getattr(a, name), getattr(b, name)
      assert x.dtype == y.dtype and x.tolist() == y.tolist(), name
    assert a.stop == b.stop


@settings(max_examples=200)
@given(
  st.integers(0, 9999),
  st.integers(1, 12),
  st.integers(1, 40),
  st.lists(st.text('abcé', min_size=1, max_size=4), max_size=3),
)
def test_pieces_of_any_size_are_one_call(seed, piece, most, stops):
  sampling = Sampling(
    most, seed=seed, stops=tuple(stops), stop_ids=(fakes.EOS,), limit=200
  )
  both = [sampling, dataclasses.replace(sampling, seed=seed + 1)]
  engine, told = Drawing(Tokens(), None), []
  whole, ids = asyncio.run(called(engine, (1, 2), both))
  streamed = Streamed(engine, Tokens(), told.append, piece)
  parts, same_ids = asyncio.run(called(streamed, (1, 2), both))
  same(whole, parts)
  assert ids == same_ids
  assert sum(told, []) == [i for done in whole for i in done.ids.tolist()]
  assert all(0 < len(ids) <= piece for ids in told)
  assert engine.opened == 0


def test_a_handle_is_as_it_was_after_an_error():
  class Breaks(Drawing):
    async def generate(self, handle, sampling):
      if len(handle) > 10:
        raise EngineError('broken')
      return await super().generate(handle, sampling)

  async def main(engine, sampling):
    streamed = Streamed(engine, Tokens(), lambda ids: None, 4)
    handle = streamed.open(Prompt((1, 2)))
    work = asyncio.ensure_future(streamed.generate(handle, sampling))
    if not isinstance(engine, Breaks):
      while len(handle) == 2:
        await asyncio.sleep(0.001)
      work.cancel()
    with pytest.raises((EngineError, asyncio.CancelledError)):
      await work
    assert handle == [1, 2]

  sampling = Sampling(60, limit=100)
  asyncio.run(main(Breaks(Tokens(), None), sampling))
  asyncio.run(main(Drawing(Tokens(), None, delay=0.01), sampling))


@pytest.mark.long
def test_pieces_of_the_in_process_engine():
  """Bit for bit, with others in the batch, and stops on a border."""
  from tests.engines.common import Letters, make_engine

  engine = make_engine()
  letters = lambda ids: ''.join(chr(33 + i) for i in ids)

  async def main():
    first = Sampling(24, seed=3, temperature=1.3, limit=60)
    (free, _), _ = await called(engine, (4, 5, 6), [first, first])
    said = letters(free.ids.tolist())
    for piece in (1, 3, 4, 7, 64):
      for stop in ((), (said[6:9],), (said[10:13], said[11:14])):
        sampling = dataclasses.replace(first, stops=stop)
        both = [sampling, dataclasses.replace(sampling, temperature=0.0)]
        whole, ids = await called(engine, (4, 5, 6), both)
        told = []
        streamed = Streamed(engine, Letters(), told.append, piece)
        (parts, same_ids), *_ = await asyncio.gather(
          called(streamed, (4, 5, 6), both),
          called(engine, (9, 9), [Sampling(30, seed=8, limit=60)]),
          called(streamed, (8, 9), [Sampling(20, seed=9, limit=60)]),
        )
        same(whole, parts)
        assert ids == same_ids

  asyncio.run(main())
  assert engine.stats()['recomputed_tokens'] == 0


PARTS = ['a', 'bc', ' ', '\n', 'é', '<', '<tool', '</tool_call>', 'é€', '{']


@pytest.mark.parametrize('tools', [[], [TOOL]])
@settings(max_examples=150)
@given(
  st.lists(st.sampled_from([*PARTS, CALL, BARE]), max_size=8).map(''.join),
  st.integers(1, 9),
  st.lists(st.sampled_from(['bc', 'c<', '€', 'a\n', 'zz']), max_size=2),
  st.booleans(),
)
def test_deltas_are_the_beginning_of_a_reply(tools, text, piece, stops, shows):
  tok, told = Chats(), []
  request = Request(
    [user('hi')], tools=tools, stops=tuple(stops), shows_stop=shows
  )
  speaks = lambda: Speaker(tok, lambda before, seed: text)
  once = asyncio.run(made(tok, speaks(), most=4000).reply(request))
  session = made(tok, speaks(), most=4000)
  reply = asyncio.run(session.reply(request, told.extend))
  assert (reply.content, reply.calls) == (once.content, once.calls)
  assert reply.completion.ids.tolist() == once.completion.ids.tolist() == told
  deltas = Deltas(tok, () if shows else stops, bool(tools))
  assert not deltas.begun
  sent = [deltas(told[n : n + piece]) for n in range(0, len(told), piece)]
  assert deltas.begun and deltas.sent == ''.join(sent)
  assert reply.content.startswith(deltas.sent)
  if not (tools or stops):  # nothing is held back
    assert deltas.sent == reply.content


def test_a_character_comes_whole():
  deltas = Deltas(Tokens())
  assert [deltas([b]) for b in 'a€'.encode()] == ['a', '', '', '€']


def test_what_may_be_a_stop_waits():
  deltas = Deltas(Tokens(), ['</x>'])
  texts = ['say <', '/', 'y> and <', '/x> more']
  told = [deltas(text.encode()) for text in texts]
  assert told == ['say ', '', '</y> and ', '']


def test_a_stop_of_megabytes_holds_nobody_up():
  deltas = Deltas(Tokens(), ['ab' * (5 << 20)])
  assert [deltas(text.encode()) for text in ('say a', 'b', 'c')] == [
    'say ',
    '',
    'abc',
  ]


def test_text_before_a_call_comes_at_once():
  deltas = Deltas(Tokens(), tools=True)
  texts = ['I look ', 'it up. ', '<tool', '_call>{}', '</tool_call>']
  told = [deltas(text.encode()) for text in texts]
  assert told == ['I look', ' it up.', '', '', '']
  assert Deltas(Tokens(), tools=True)(b'{"a": 1} b') == ''


def test_a_session_that_streams_trains_on_the_same_tokens():
  engine, found = Engine(), []
  session = made(Chats(), engine)

  async def chat():
    messages = [user('hello ')]
    for n in range(4):
      request = Request([*messages], stops=('.',))
      reply = await session.reply(request, found.extend)
      messages.append({'role': 'assistant', 'content': reply.content})
      messages.append(user(f'and {n}? '))

  asyncio.run(chat())
  # Of the pieces, in order; those of a reply follow each other.
  own = [s for s in session.trajectory().segments if s.author == 'policy']
  assert [i for s in own for i in s.ids.tolist()] == found
  assert session.trajectory().contexts == ()
  session.close()
  assert engine.opened == 0


def test_what_a_stream_had_told_at_the_end_of_the_session_is_recorded():
  """The program has gone before the server sees that it left the stream."""
  engine = Speaker(Chats(), lambda before, seed: 'x' * 90, delay=0.01)
  session, told = made(Chats(), engine), []

  async def main():
    slow = asyncio.ensure_future(
      session.reply(Request([user('a')]), told.extend)
    )
    while not told:
      await asyncio.sleep(0.001)
    session.close()
    await session.settled()
    t = session.trajectory()
    assert (engine.opened, t.turns, session.replies) == (0, 1, 1)
    assert t.segments[1].ids.tolist() == told
    with pytest.raises(asyncio.CancelledError):
      await slow

  asyncio.run(main())


def test_what_a_cancelled_stream_has_told_is_recorded():
  engine = Speaker(Chats(), lambda before, seed: 'x' * 90, delay=0.01)
  session, told = made(Chats(), engine), []

  async def main():
    slow = asyncio.ensure_future(
      session.reply(Request([user('a')]), told.extend)
    )
    while not told:
      await asyncio.sleep(0.001)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
      await slow
    t = session.trajectory()
    assert (engine.opened, t.turns) == (0, 1)
    assert [s.author for s in t.segments] == ['prompt', 'policy']
    assert t.segments[1].ids.tolist() == told
    reply = await session.reply(Request([user('a')]))
    assert reply.content == 'x' * 90

  asyncio.run(main())
  session.close()
