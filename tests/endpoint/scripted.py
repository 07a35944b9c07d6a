"""A served session whose policy says what a test wants."""

import asyncio
import contextlib
import json

import numpy as np
import openai

from searchrl_jax.endpoint import app
from searchrl_jax.endpoint.sessions import Sessions
from searchrl_jax.engines.core import Completion
from tests.endpoint.test_sessions import EOS, Chats, Engine, check, made


class Says(Engine):
  """Says these turns, one after another, in one call or several."""

  def __init__(self, *turns: str):
    super().__init__()
    self.turns, self.left = list(turns), ([], '')

  async def generate(self, handle, s):
    before, (there, text) = list(handle), self.left
    if before != there:  # not the next piece of a turn
      text = self.turns.pop(0)
    ends = [(text.find(x) + len(x), x) for x in s.stops if x in text]
    end, stop = min(ends, default=(len(text), 'eos'))
    ids = [*text[:end].encode(), *[EOS] * (stop == 'eos')]
    if len(ids) > s.max_tokens:
      ids, stop = ids[: s.max_tokens], 'length'
    await asyncio.sleep(0)
    handle.extend(ids)
    self.left = list(handle), text[len(ids) :]
    self.asked.append((before, ids))
    logps = -np.arange(1, len(ids) + 1, dtype=np.float32)
    versions = np.zeros(len(ids), np.int32)
    return Completion(np.array(ids, np.int32), logps, stop, versions)


class Calls(Chats):
  """A template that shows tools and calls, as those of Qwen do."""

  def chat(self, messages, tools=(), reply=True):
    def shown(message):
      calls = [
        f'<tool_call>{json.dumps(c["function"])}</tool_call>'
        for c in message.get('tool_calls', ())
      ]
      return message | {'content': message['content'] + ''.join(calls)}

    return super().chat([*map(shown, messages)], tools, reply)


def call(name: str, **arguments) -> str:
  """What the policy writes to call a tool."""
  said = json.dumps({'name': name, 'arguments': arguments})
  return f'<tool_call>{said}</tool_call>'


@contextlib.asynccontextmanager
async def served(engine, tokens, **how):
  """(base URL, session) of an endpoint."""
  sessions = Sessions()
  session = sessions.open(made(tokens, engine, **how))
  async with app.serving(app.make(sessions, tokens)) as url:
    yield url, session


def play(chat, *turns: str, tokens=None, **how):
  """Runs chat(client, session); each sampled token is then trained once."""

  async def main():
    engine, tok = Says(*turns), tokens or Calls()
    async with served(engine, tok, **how) as (url, session):
      key = session.key
      own = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
      async with own as client:
        await chat(client, session)
    check(session, engine)

  asyncio.run(main())
