"""An engine that says what a script says, whatever the size of the pieces."""

import asyncio
import types

from searchrl_jax.engines.handles import Request
from searchrl_jax.evaluate import play
from searchrl_jax.evaluate.policy import Loaded
from tests import fakes, tiny


class Handle(list):
  """Ids; `begun`: where what the policy says began."""

  begun = 0


class Speaker:
  """What it says depends on what stood before, as a model's tokens do.

  Args:
    tok: the tokenizer.
    script: (text before, seed) -> what it says after that, and then eos.
    delay: seconds of each call.
    slots: calls at a time.
  """

  version, piece = 3, 8

  def __init__(self, tok, script, delay=0.0, slots=10**6):
    self.tok, self.script, self.delay = tok, script, delay
    self.opened = self.running = self.most = self.calls = 0
    self.hold = False  # calls wait until it is over
    self._free = asyncio.Semaphore(slots)

  def capacity(self, tokens):
    return 10**6

  def open(self, prompt):
    self.opened += 1
    return self._begin(Handle(prompt.ids))

  def fork(self, handle):
    self.opened += 1
    return self._begin(Handle(handle))

  def append(self, handle, ids):
    handle.extend(ids)
    self._begin(handle)

  def truncate(self, handle, n):
    assert 1 <= n <= len(handle)
    del handle[n:]
    handle.begun = min(handle.begun, n)

  def close(self, handle):
    self.opened -= 1

  def _begin(self, handle):
    handle.begun = len(handle)
    return handle

  async def generate(self, handle, sampling):
    assert len(handle) + sampling.max_tokens <= sampling.limit
    async with self._free:
      self.running, self.calls = self.running + 1, self.calls + 1
      self.most = max(self.most, self.running)
      try:
        await asyncio.sleep(self.delay)
        while self.hold:
          await asyncio.sleep(0.005)
      finally:
        self.running -= 1
    request, draw = Request(handle, sampling), self.draws(handle, sampling.seed)
    while not request.stop:
      at = len(handle) + len(request.ids)
      request.add([draw(at)], [-(at % 7) / 8], at // 5, self.tok)
    handle.extend(request.ids)
    return request.completion()

  def draws(self, handle, seed):
    """A function of a position: the token there."""
    before = self.tok.decode(handle[: handle.begun])
    said = [*self.tok.encode(self.script(before, seed)), self.tok.eos_ids[0]]
    return lambda at: said[min(at - handle.begun, len(said) - 1)]


def config():
  """One that lets a policy say a few sentences."""
  c = tiny.config()
  c.env.update(max_turns=2, max_turn_tokens=200, max_observation_tokens=300)
  c.env.max_tokens = c.engine.max_len = 1200
  c.engine.slots, c.eval.n = 4, 1
  return c


def player(tok, script, folder, source=None, **how):
  """A `play.Player` of a Speaker, whose searches find what they ask for."""
  source = source or fakes.FakeSource()
  engine = Speaker(tok, script, **how)
  opener = types.SimpleNamespace(engine=engine, source=source)
  return play.Player(config(), Loaded(tok, opener, None, None), str(folder))
