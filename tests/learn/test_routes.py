"""Routing replay: the trainer's experts are those of the sampler."""

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from searchrl_jax.engines.core import Sampling
from searchrl_jax.learn import batching, update
from searchrl_jax.models import decoder
from searchrl_jax.models.experts import Sizes
from searchrl_jax.types import Question, Segment, Trajectory
from tests.engines import common
from tests.engines.contract import prompt
from tests.learn import test_update as base

pytestmark = pytest.mark.slow

CFG = dataclasses.replace(
  common.CFG,
  family='qwen3_moe',
  n_layers=3,
  moe=Sizes(8, 3, 24, normalised=True, dense=(1,)),
)
KW = {
  'batch.lengths': (32,),
  'batch.tokens': 64,
  'env.max_tokens': 32,
  'batch.loss_fraction': 1.0,
}


@functools.cache
def params():
  """Every two experts are nearly as good, and rounding decides between them."""
  found = decoder.init_params(CFG, jax.random.key(0), scale=0.25)
  router = np.array(found['layers']['router'])
  noise = np.random.default_rng(0).normal(size=router[..., ::2].shape)
  router[..., 1::2] = router[..., ::2] + 1e-3 * noise
  return decoder.nest(decoder.flatten(found) | {'layers/router': router})


@pytest.fixture(scope='module')
def trajectories():
  return played('bfloat16')


def played(dtype):
  """Of three prompts, four each, with an observation after the first turn."""
  how = dict(dtype=dtype, record_routes=True, slots=8)
  engine = common.make_engine(cfg=CFG, params=params(), **how)

  async def play(question: int, sample: int) -> Trajectory:
    handle = engine.open(prompt(engine, 6, seed=question))
    segments = [Segment(np.array(handle.ids, np.int32), 'prompt', 'other')]
    for turn in range(2):
      if turn:
        engine.append(handle, range(5))
        seen = np.arange(5, dtype=np.int32)
        segments.append(Segment(seen, 'environment', 'information'))
      how = Sampling(max_tokens=8, seed=10 * sample + turn)
      done = await engine.generate(handle, how)
      own = dict(train=True, logps=done.logps, versions=done.versions)
      segments.append(Segment(done.ids, 'policy', 'think', **own))
    return Trajectory(
      Question(f'q{question}', ''),
      tuple(segments),
      (),
      'answer',
      sample=sample,
      routes=(await engine.routes(handle),),
    )

  async def main():
    names = [(q, s) for q in range(3) for s in range(4)]
    return await asyncio.gather(*(play(*name) for name in names))

  return asyncio.run(main())


def scored(trajectories, **kw):
  """What the trainer says of the loss tokens beside the engine, and metrics."""
  c = base.config(**KW, **kw)
  made = dataclasses.replace(base.updater(c, cfg=CFG), replays=True)
  ids = np.repeat(np.arange(3), 4)
  [mini] = batching.make(trajectories, np.ones(12, bool), ids, c.batch)
  far = [made.output(params(), b) - b.behaviour_logps for b in mini]
  _, metrics = made.step(made.init(update.copy(params())), mini)
  return np.concatenate([x[b.mask] for x, b in zip(far, mini)]), metrics


@pytest.mark.parametrize('tree', [0, 64])
def test_log_probs_are_those_of_the_engine(trajectories, tree):
  """As near as half precision is; without replay they are not."""
  kw = {'batch.prefix_tokens': tree}
  replayed, metrics = scored(trajectories, **kw)
  free = [dataclasses.replace(t, routes=()) for t in trajectories]
  others, alone = scored(free, **kw)
  assert len(replayed) == 12 * 16
  assert np.abs(replayed).max() < 0.1 < np.abs(others).max()
  assert 0.1 < metrics['routes_differ'] < 0.4 and metrics['routes_unknown'] == 0
  assert alone['routes_unknown'] == 1 and alone['routes_differ'] == 0


def test_in_float32_log_probs_are_as_near_as_those_of_dense_models():
  """The tolerance is that of tests/loop/test_mismatch.py."""
  replayed, metrics = scored(played('float32'))
  assert np.abs(replayed).max() <= 1e-5 and metrics['routes_unknown'] == 0


def test_what_was_sampled_otherwise_is_not_replayed(trajectories):
  """From other tokens, or before a sync, whose weights computed all anew."""
  first = trajectories[0]
  [known] = batching.tokens_of(0, first)
  np.testing.assert_array_equal(known.routes, first.routes[0])
  hinted = dataclasses.replace(first, train_context=first.segments[:2])
  *earlier, last = first.segments
  newer = dataclasses.replace(last, versions=last.versions + 1)
  synced = dataclasses.replace(first, segments=(*earlier, newer))
  for other in (hinted, synced):
    assert batching.tokens_of(0, other)[0].routes is None


def test_a_mean_is_over_what_is_known(trajectories):
  """Half of the tokens known: the share is that of these."""
  half = [dataclasses.replace(t, routes=()) for t in trajectories[6:]]
  _, whole = scored(trajectories[:6] * 2)
  _, mixed = scored([*trajectories[:6], *half])
  assert mixed['routes_unknown'] == 0.5
  np.testing.assert_allclose(mixed['routes_differ'], whole['routes_differ'])


def test_what_is_not_known_does_not_join_other_experts(trajectories):
  """A path's experts stay those of the attempt that had them first."""
  first = trajectories[0]
  ids = [s.ids for s in first.segments]
  last = lambda n: dataclasses.replace(
    first.segments[-1], ids=np.array([*ids[-1][:-1], n], np.int32)
  )
  other = (first.routes[0] + 1) % 8
  tried = [
    dataclasses.replace(
      first, sample=n, segments=(*first.segments[:-1], last(n)), routes=routes
    )
    for n, routes in enumerate((first.routes, (), (other,)))
  ]
  c = base.config(**KW, **{'batch.prefix_tokens': 128})
  made = dataclasses.replace(base.updater(c, cfg=CFG), replays=True)
  [[batch]] = batching.make(tried, [True] * 3, [0] * 3, c.batch)
  given = np.asarray(made.put(batch)['routes'])[0]
  own = batch.owner[batch.owner >= 0]
  for owner, (_, at) in zip(own, batch.spans(), strict=True):
    if owner != 1:
      known = tried[owner].routes[0][:-1]
      got = given[batch.tree.at[at]][: len(known)]
      np.testing.assert_array_equal(np.sort(got, -1), np.sort(known, -1))


def test_nodes_of_other_experts_are_apart(trajectories):
  """Two attempts with one beginning, of which one token has other experts."""
  first = trajectories[0]
  routes = first.routes[0].copy()
  routes[4, 1] = routes[4, 1, ::-1]  # the same ones
  routes[9, 0] = [i for i in range(8) if i not in routes[9, 0]][:3]
  again = dataclasses.replace(first, sample=1, routes=(routes,))
  c = base.config(**KW, **{'batch.prefix_tokens': 64})
  made = dataclasses.replace(base.updater(c, cfg=CFG), replays=True)
  [[batch]] = batching.make([first, again], [True] * 2, [0, 0], c.batch)
  n = len(first)
  nodes = [batch.tree.at[at] for _, at in batch.spans()]
  assert (nodes[0][:9] == nodes[1][:9]).all()
  assert len({*nodes[0], *nodes[1]}) == n + n - 9
  given = made.put(batch)['routes']
  for at, t in zip(nodes, (first, again)):
    known = t.routes[0][:-1]
    got = np.sort(np.asarray(given)[0, at][: n - 1], -1)
    np.testing.assert_array_equal(got, np.sort(known, -1))
