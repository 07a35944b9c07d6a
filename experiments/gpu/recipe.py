"""Search-R1's GRPO at the shape of Qwen2.5, without files: random weights.

Lengths, optimizer, engine and batches are those of configs/search_r1.py;
questions, tokenizer and the texts of passages are those of the generated
world, of whose words the 3B vocabulary has some hundred. A policy of random
weights writes no blocks, so `Env` ends its turns; `Search` ranks vectors on the
device that trains; `parity` is a reward in which trajectories of a group
differ. Arguments:

  model   qwen2.5-3b for an H200, qwen2.5-1.5b for a GPU of 80 GB
  small   a model, lengths and an index that a CPU computes in seconds
"""

import asyncio
import dataclasses
import pathlib
import tempfile
import time
import zlib

from ml_collections import ConfigDict
import numpy as np

from configs import quickstart, search_r1
from experiments.benchmarks import retrieval_gpu
from retrieval.index.dense_jax import DenseJax
from searchrl_jax import schema
from searchrl_jax.models import families
from searchrl_jax.rewards import core as rewards
from searchrl_jax.sources.core import Source
from searchrl_jax.text import env
from searchrl_jax.text.parser import Block
from searchrl_jax.types import Passage, SearchResult
from searchrl_jax.worlds import microworld

_SMALL = dict(
  hidden_size=64,
  num_hidden_layers=2,
  num_attention_heads=2,
  num_key_value_heads=1,
  intermediate_size=128,
  vocab_size=2048,
)
# Slots and remat; more would take more than 90 % of the memory.
_MACHINES = {'qwen2.5-3b': (192, 'matmuls'), 'qwen2.5-1.5b': (128, 'matmuls')}
_LINES = 5  # of the world's corpus, 25 tokens each, in a passage


def get_config(arg=None):
  a = schema.parse_arg(arg, model='qwen2.5-3b', small=False)
  c = search_r1.get_config(f'model={a.model}')
  c.name = 'gpu'
  c.model.path, c.model.tokenizer = '', 'world'
  c.model.arch = ConfigDict(families.NAMED[a.model])
  c.data = quickstart.get_config().data
  c.data.eval = ConfigDict()
  c.env.module = 'experiments.gpu.recipe.Env'
  c.env.template = 'micro'
  c.source.module = 'experiments.gpu.recipe'
  c.source.url = 'http://127.0.0.1'  # so that no server is started
  c.source.vectors, c.source.dim = 500_000, 768
  c.source.small_encoder = False
  c.reward = ConfigDict(
    dict(parity=dict(fn='experiments.gpu.recipe.parity', weight=1.0))
  )
  c.engine.slots, c.model.remat = _MACHINES[a.model]
  # Packed rows leave 2 % of their tokens unused, and each length is two more
  # programs to compile.
  c.batch.lengths = (c.batch.tokens,)
  c.rollout.questions, c.rollout.group = 32, 8
  c.algorithm.minibatches = 1
  # The first update moves the weights, which are then synced.
  c.optim.warmup = 0
  c.train.steps = 2
  c.eval.every = 0
  c.log.tensorboard = False
  if a.small:
    c.model.arch.update(_SMALL)
    c.env.max_turn_tokens, c.env.max_observation_tokens = 16, 48
    c.env.max_tokens = c.engine.max_len = 192
    c.batch.lengths, c.batch.tokens = (96, 192), 768
    c.batch.head_chunk = 64
    c.engine.slots, c.engine.prefill_rows = 8, 16
    c.rollout.questions, c.rollout.group = 4, 4
    c.source.vectors, c.source.dim = 4096, 32
    c.source.small_encoder = True
  return c


def turn_tokens(rng: np.random.Generator, longest: int) -> int:
  """A length of a turn: 131 tokens on average where at most 500 are allowed."""
  return int(np.clip(longest * rng.lognormal(-1.5, 0.6), 1, longest))


class Env(env.SearchEnv):
  """Each turn but the last asks the question to the source; the last answers.

  Turns end at random lengths, which follow from the tokens before them.
  """

  def _generate(self, state, append=(), prompt=None):
    asked = super()._generate(state, append, prompt)
    seed = b''.join(s.ids.tobytes() for s in state.segments)
    rng = np.random.default_rng(zlib.crc32(seed))
    tokens = turn_tokens(rng, self.config.max_turn_tokens)
    return dataclasses.replace(asked, max_tokens=min(tokens, asked.max_tokens))

  def _action(self, state, blocks):
    kind = 'search' if self._may_search(state) else 'answer'
    return Block(kind, 'policy', state.question.text, turn=state.turn)


async def parity(groups, context):
  """The share of even ids among those that the policy wrote."""
  del context

  def reward(trajectory):
    ids = [s.ids for s in trajectory.trained if s.author == 'policy']
    return float(np.mean(np.concatenate(ids) % 2 == 0))

  return rewards.per_trajectory(groups, reward)


class Search(Source):
  """Exact search over random vectors, encoder included, on the device."""

  def __init__(self, config):
    self._k = config.k
    with tempfile.TemporaryDirectory() as folder:
      encoder = retrieval_gpu.make_encoder(
        pathlib.Path(folder), config.dim, config.small_encoder
      )
    vectors = retrieval_gpu.make_vectors(config.vectors, config.dim)
    # On the host, so that the device holds them once.
    self._index = DenseJax(np.asarray(vectors), encoder, precision='float16')
    corpus = microworld.generate(0).corpus
    self._lines = [x['contents'].partition('\n')[2] for x in corpus]

  def _passage(self, row: int) -> Passage:
    lines = [self._lines[(row + i) % len(self._lines)] for i in range(_LINES)]
    return Passage(str(row), '', ' '.join(lines))

  async def search(self, requests):
    begin = time.monotonic()
    queries = [r.query for r in requests]
    loop = asyncio.get_running_loop()
    ids, _ = await loop.run_in_executor(
      None, self._index.search, queries, self._k
    )
    seconds = time.monotonic() - begin
    return [
      SearchResult(r, tuple(map(self._passage, map(int, row))), seconds)
      for r, row in zip(requests, ids, strict=True)
    ]


def make(config, **_):
  """The source of `config.source`."""
  return Search(config)
