"""What the engine recorded is what the trainer scores, but for rounding.

Both compute in float32 and sum in another order: the engine one token a time
through its caches, the trainer whole rows.
"""

import asyncio
import dataclasses
import functools

import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.engines.jax import caches, device
from searchrl_jax.learn import batching, objectives, optim, update
from searchrl_jax.rollout import chains
from searchrl_jax.text import prompts
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Question
from tests.engines import test_states as states
from tests.engines.common import CFG, make_engine, make_params
from tests.fakes import EOS, TEMPLATE, ByteTokenizer, FakeSource

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.exact]

# Nats: the largest difference of a log-prob, of magnitude 1 to 10, where
# float32 has 5e-7 to 1e-6 between two neighbours. A delta net sums what it has
# read in chunks of 64 in the trainer; the largest here is 1.7e-5.
ROUNDING = {'qwen2': 1e-5, 'gemma3': 1e-5, 'qwen3_5': 3e-5}
TEMPERATURE = 0.8


class Tagged(ByteTokenizer):
  """Bytes, and 32 ids for each of these tags: a random policy writes blocks."""

  # A block that is open takes about ten tokens until it is closed.
  tags = (*['<search>'] * 4, *['</search>'] * 2, '<answer>', '</answer>')
  vocab_size, max_token_bytes = EOS + 1 + 32 * len(tags), 9

  def token_bytes(self, i):
    tag = self.tags[i % len(self.tags)].encode()
    return tag if i > EOS else super().token_bytes(i)

  def decode(self, ids):
    return b''.join(map(self.token_bytes, ids)).decode('utf-8', 'replace')


MODELS = {
  'qwen2': CFG,
  # A local layer and a global one.
  'gemma3': dataclasses.replace(
    CFG, family='gemma3_text', window=24, global_every=2
  ),
  'qwen3_5': dataclasses.replace(states.CFG, n_layers=2, global_every=2),
}


@functools.cache
def model(name: str):
  cfg = dataclasses.replace(MODELS[name], vocab_size=Tagged.vocab_size)
  return cfg, make_params(cfg=cfg)


@functools.cache
def played(name: str):
  """200 leaves of 40 trees, and the engine's counters."""
  cfg, params = model(name)
  tok, c = Tagged(), schema.base()
  c.env.update(dict(max_turns=3, max_turn_tokens=40, max_tokens=300))
  c.rollout.update(dict(sampler='tree', group=10, trees=2, rounds=2))
  c.rollout.temperature = TEMPERATURE
  engine = make_engine(
    params=params, cfg=cfg, tokenizer=tok, slots=8, max_len=320, chunk=8
  )
  found = asyncio.run(
    chains.rollout(
      [Question(f'q{i}', f'what is {i}' + ' and why' * 6) for i in range(20)],
      env=SearchEnv(
        tok, prompts.parse(TEMPLATE, 'test', __file__), c.env, 'template', 3
      ),
      engine=engine,
      source=FakeSource(delay=lambda query: 1e-3 * (len(query) % 5)),
      config=c.rollout,
      seed=0,
      step=0,
    )
  )
  return [t for group in found.groups for t in group], engine.stats()


def scored(name, trajectories, **batch):
  """The trainer's log-probs of each trajectory's tokens."""
  c = schema.base()
  c.batch.update(dict(lengths=(320,), tokens=2560, loss_fraction=0.7) | batch)
  kept, ids = np.ones(len(trajectories), bool), np.arange(len(trajectories))
  minis = batching.make(trajectories, kept, ids, c.batch)
  cfg, params = model(name)
  u = update.Updater(
    cfg,
    c.batch,
    temperature=TEMPERATURE,
    objective=objectives.policy(c),
    tx=optim.make(c.optim, 1),
  )
  found = u.outputs(params, minis)
  return batching.unpacked(minis, found, batching.masks(trajectories))


@pytest.mark.parametrize(
  'name, batch',
  [
    *((name, {}) for name in MODELS),
    *((name, dict(lengths=(160, 320))) for name in MODELS),
    *((name, dict(prefix_tokens=1280)) for name in ('qwen2', 'gemma3')),
  ],
)
def test_engine_and_trainer_differ_by_rounding_alone(name, batch, monkeypatch):
  monkeypatch.setattr(device, 'PIECE', 16)
  trajectories, stats = played(name)
  assert len(trajectories) == 200
  # Leaves that parted within an attempt: from a fork that was cut.
  assert sum(t.meta['node'] != '' for t in trajectories) > 50
  assert sum(len(t.searches) for t in trajectories) > 100
  assert stats['evictions'] > 20 and stats['restored_tokens'] > 0
  # The cache is read in blocks.
  assert sum(len(t) > caches.block_size() for t in trajectories) > 50
  tokens = 0
  for t, own in zip(trajectories, scored(name, trajectories, **batch)):
    engine = [
      np.zeros(len(s.ids)) if s.logps is None else s.logps for s in t.segments
    ]
    [mask] = batching.masks([t])
    differ = np.abs(own - np.concatenate(engine))[mask]
    assert differ.max() <= ROUNDING[name], t.id
    tokens += mask.sum()
  assert tokens > 5_000
