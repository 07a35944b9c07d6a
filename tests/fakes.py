"""A byte tokenizer, a scripted engine and a scripted source: no model."""

import asyncio
import hashlib
import random

import numpy as np

from searchrl_jax import schema
from searchrl_jax.engines.core import Completion
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.text import prompts
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Passage, SearchError, SearchResult

EOS = 256


class ByteTokenizer:
  """One token for each byte, and eos."""

  path, vocab_size, eos_ids, max_token_bytes = 'bytes', 257, (EOS,), 1
  has_chat, control = False, frozenset()

  def normalised(self, text):
    return text

  def encode_parts(self, parts, start=False):
    return list(''.join(text for text, _ in parts).encode())

  def encode(self, text):
    return list(text.encode())

  encode_template = encode

  def token_bytes(self, i):
    return bytes([i]) if i < EOS else b''

  def decode(self, ids):
    return bytes(int(i) for i in ids if i < EOS).decode('utf-8', 'replace')


TEMPLATE = {
  'think': ['<think>', '</think>'],
  'search': ['<search>', '</search>'],
  'information': ['<information>', '</information>'],
  'answer': ['<answer>', '</answer>'],
  'prompt': 'Q: {question}\n',
  'question_mark': False,
  'observation': '\n<information>{passages}</information>\n',
  'passage': '{title}: {text}',
  'passage_separator': '\n',
  'no_results': 'nothing found',
  'cut': 'passages',
  'query_separator': ';',
  'max_queries': 3,
  'invalid': '\nnot valid\n',
  'last_turn': '\nanswer now\n',
  'stops': ['</search>', '</answer>'],
}


def make_env(**fields):
  config = schema.base().env
  config.update(
    dict(max_turns=3, max_turn_tokens=200, max_tokens=4000) | fields
  )
  template = prompts.parse(TEMPLATE, 'test', 'tests/fakes.py')
  return SearchEnv(ByteTokenizer(), template, config, 'template', 3)


class Handle(int):
  """The number of a sequence, which has a length."""

  def __new__(cls, number, engine):
    made = super().__new__(cls, number)
    made.engine = engine
    return made

  def __len__(self):
    return len(self.engine.handles[self])


class FakeEngine:
  """Says what `script(history text, seed)` says, up to a stop.

  `delay(text)`: seconds of a generation. `slots`: generations at a time.
  """

  vocab_size, max_len, holds, piece = 257, 10**6, 10**6, 8

  def __init__(self, script, delay=lambda text: 0.0, slots=10**6):
    self.script, self.delay, self.slots = script, delay, slots
    self.version = 3
    self.handles, self.opened, self.forked, self.appended = {}, 0, 0, 0
    self.running, self.most_running = 0, 0
    self._free = None
    self.names = 0

  def _new(self, ids):
    self.names += 1
    self.handles[self.names] = list(ids)
    return Handle(self.names, self)

  def capacity(self, tokens):
    return self.holds

  def open(self, prompt):
    self.opened += 1
    return self._new(prompt.ids)

  def fork(self, handle):
    self.forked += 1
    return self._new(self.handles[handle])

  def append(self, handle, ids):
    self.appended += len(ids)
    self.handles[handle] += list(ids)

  def truncate(self, handle, n):
    del self.handles[handle][n:]

  def close(self, handle):
    del self.handles[handle]  # a second close is a KeyError

  async def generate(self, handle, sampling):
    if self._free is None:
      self._free = asyncio.Semaphore(self.slots)
    async with self._free:
      self.running += 1
      self.most_running = max(self.most_running, self.running)
      try:
        history = ByteTokenizer().decode(self.handles[handle])
        await asyncio.sleep(self.delay(history))
        return self._completion(handle, history, sampling)
      finally:
        self.running -= 1

  def _completion(self, handle, history, sampling):
    text = self.script(history, sampling.seed)
    if isinstance(text, Exception):
      raise text
    found = [(text.find(s) + len(s), s) for s in sampling.stops if s in text]
    if found:
      end, stop = min(found)
      ids = list(text[:end].encode())
    else:
      ids, stop = [*text.encode(), EOS], 'eos'
    if len(ids) > sampling.max_tokens:
      ids, stop = ids[: sampling.max_tokens], 'length'
    self.handles[handle] += ids
    n = len(ids)
    digest = hashlib.sha256(repr((sampling.seed, ids)).encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:4]))
    return Completion(
      np.array(ids, np.int32),
      -rng.random(n).astype(np.float32),
      stop,
      np.full(n, self.version, np.int32),
    )


class FakeSource:
  """Answers a query with one passage that names it.

  `fails(query, attempt)`: whether this attempt fails. `delay(query)`: seconds.
  `text`: of every passage; the query itself if None.
  """

  def __init__(
    self, fails=lambda query, attempt: False, delay=lambda q: 0.0, text=None
  ):
    self.fails, self.delay, self.text = fails, delay, text
    self.asked, self.attempts = [], {}

  async def search(self, requests):
    self.asked.append([r.query for r in requests])
    await asyncio.sleep(max(self.delay(r.query) for r in requests))
    out = []
    for request in requests:
      name = (request.trajectory, request.query)
      attempt = self.attempts[name] = self.attempts.get(name, 0) + 1
      if self.fails(request.query, attempt):
        out.append(SearchError(request, 'timeout', f'late: {request.query}'))
      else:
        text = request.query if self.text is None else self.text
        passage = Passage(f'id-{request.query}', 'T', text, 1.0)
        out.append(SearchResult(request, (passage,), 0.0))
    return out

  async def check(self):
    return {}

  async def close(self):
    pass


def searcher(history, seed):
  """Searches twice (what, depends on the seed), then answers the seed.

  As a refiner it accepts an attempt, or names a step: 1, 2, or 3, the answer.
  """
  if history.startswith('search again?'):
    return f'<answer>{seed % 4} of {seed}</answer>'
  seen = history.count('<information>')
  if seen < 2:
    return f'<think>t{seen}</think><search>{seed % 97}-{seen}</search>'
  return f'<answer>{random.Random(seed).random()}</answer>'


def run_script(turns, *, env, question, passage='', source=None):
  """The trajectory of a policy that says these turns, one after another."""
  turns = list(turns)
  engine = FakeEngine(lambda history, seed: turns.pop(0))
  source = source or FakeSource(text=passage)
  config = schema.base().rollout
  config.update(dict(group=1, max_failed=1.0))
  found = asyncio.run(
    rollout(
      [question], env=env, engine=engine, source=source, config=config,
      seed=0, step=0,
    )
  )  # fmt: skip
  return found.groups[0][0]
