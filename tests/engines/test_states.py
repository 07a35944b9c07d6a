"""The engine with delta nets: cuts, forks, evictions and order do not show."""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.devices import sharding
from searchrl_jax.endpoint.streaming import Streamed
from searchrl_jax.engines.core import EngineError, Sampling, WeightsUpdate
from searchrl_jax.engines.jax import caches, device, states
from searchrl_jax.engines.jax import engine as engine_lib
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder, deltanet
from tests.engines import common
from tests.engines import test_jax_engine as base
from tests.engines.common import Letters
from tests.engines.contract import EngineContract, bits, prompt

pytestmark = [pytest.mark.slow, pytest.mark.exact]

# A period and a layer after it, as Qwen3.5.
CFG = dataclasses.replace(
  common.CFG,
  norm_eps=1e-2,  # see `models.QWEN35` of tests/golden
  family='qwen3_5_text',
  n_layers=5,
  global_every=4,
  rotary_dim=4,
  delta=deltanet.Sizes(2, 4, 8, 12, 4),
)
ROUNDING = 1e-5  # of token by token against chunks, in log-probs of -5
make_engine = functools.partial(common.make_engine, cfg=CFG)


class TestContract(EngineContract):
  tolerance = ROUNDING


@pytest.mark.parametrize('n', range(1, 7))
@pytest.mark.parametrize('outside', [0, 3])
def test_what_is_cut_off_was_never_sampled(engine, n, outside):
  """The chunks are of 4 tokens: cuts in a log, and at its ends."""
  sampling = Sampling(max_tokens=7, seed=3)

  async def main(sampled):
    handle = engine.open(prompt(engine, 9))
    part = dataclasses.replace(sampling, max_tokens=sampled)
    first = await engine.generate(handle, part)
    engine.truncate(handle, 9 + n)
    engine.append(handle, range(outside))
    later = await engine.generate(handle, sampling)
    engine.close(handle)
    return bits(first)[0][:n], bits(later)

  # Seven tokens leave a log of three behind the fourth, which began a chunk.
  more = 7 if n >= 4 else 4
  assert asyncio.run(main(more)) == asyncio.run(main(n))


def test_a_stop_string_leaves_no_trace(engine):
  """A call that ends in the middle of a chunk, by text or by its length."""

  async def main(**how):
    handle = engine.open(prompt(engine, 9))
    ends = Sampling(seed=3, **how)
    first = await engine.generate(handle, ends)
    later = await engine.generate(handle, Sampling(max_tokens=5, seed=1))
    engine.close(handle)
    return bits(first), bits(later)

  (ids, _), _ = asyncio.run(main(max_tokens=6))
  stop = Letters().token_bytes(ids[5]).decode()
  n = 1 + ids.index(ids[5])
  found = asyncio.run(main(max_tokens=20, stops=(stop,)))
  assert found == asyncio.run(main(max_tokens=n)) and n < 20


def test_when_a_call_was_cancelled_does_not_show(engine, monkeypatch):
  """Before its only chunk is over, or after its caller could have known."""
  finish = engine._finish

  async def main(late):
    handle = engine.open(prompt(engine, 9))
    await engine.generate(handle, Sampling(max_tokens=3, seed=3))
    lost = asyncio.create_task(engine.generate(handle, Sampling(max_tokens=4)))

    def cancelled(*args):
      if late:
        finish(*args)
      lost.cancel()

    with monkeypatch.context() as m:
      m.setattr(engine, '_finish', cancelled)
      await asyncio.gather(lost, return_exceptions=True)
    assert lost.cancelled() and len(handle) == 12
    later = await engine.generate(handle, Sampling(max_tokens=5, seed=1))
    engine.close(handle)
    return bits(later)

  assert asyncio.run(main(True)) == asyncio.run(main(False))


@pytest.mark.long
def test_a_deep_cut_is_computed_again(engine):
  """Before the last chunk; every time alike."""

  async def main(others):
    handle = engine.open(prompt(engine, 9))
    await engine.generate(handle, Sampling(max_tokens=11, seed=3))
    forks = [engine.fork(handle) for _ in range(others)]
    engine.truncate(handle, 12)
    ids = list(handle.ids)
    later = await engine.generate(handle, Sampling(max_tokens=6, seed=1))
    for h in (handle, *forks):
      engine.close(h)
    return ids, later

  ids, one = asyncio.run(main(0))
  _, other = asyncio.run(main(2))
  assert bits(one) == bits(other)
  want = base.full_logps([*ids, *one.ids.tolist()], 1.0, cfg=CFG)
  at = np.arange(12, 18)
  np.testing.assert_allclose(one.logps, want[at - 1, one.ids], atol=ROUNDING)


@pytest.mark.long
@pytest.mark.parametrize('slots', [1, 2, 4])
def test_forks_go_on_as_if_alone(slots):
  """The parent goes on first, or the child does, or the parent is gone."""
  engine = make_engine(slots=slots)
  turn = Sampling(max_tokens=6, seed=2)

  async def main(order):
    parent = engine.open(prompt(engine, 9))
    await engine.generate(parent, turn)
    child, cut = engine.fork(parent), engine.fork(parent)
    engine.truncate(cut, len(cut) - 1)
    grandchild = engine.fork(child)
    engine.append(child, [1, 2])
    handles = dict(parent=parent, child=child, cut=cut, grandchild=grandchild)
    found = {}
    for name in order:
      handle = handles[name]
      parts = [await engine.generate(handle, turn) for _ in range(2)]
      found[name] = [*map(bits, parts)]
      if name == 'parent':
        engine.close(parent)
    for name in order:
      engine.close(handles[name])
    return found

  names = 'parent child cut grandchild'.split()
  want = asyncio.run(main(names))
  assert want['child'] != want['grandchild']
  assert want['parent'] == want['grandchild']  # the same words
  for order in (names[::-1], [names[2], names[0], names[3], names[1]]):
    assert asyncio.run(main(order)) == want


def test_chunks_that_begin_alike_are_told_apart(engine):
  """Two forks whose logs begin at one position, with other tokens."""
  turn = lambda seed, n=3: Sampling(max_tokens=n, seed=seed)

  async def begun(seeds):
    handle = engine.open(prompt(engine, 9))
    await engine.generate(handle, turn(1, 4))
    engine.truncate(handle, 9)
    for seed in seeds:
      await engine.generate(handle, turn(seed))
    return handle

  async def main():
    parent = await begun([])
    early = engine.fork(parent)
    await engine.generate(parent, turn(2))
    late = engine.fork(parent)
    await engine.generate(parent, turn(3))
    found = [await engine.generate(h, turn(4)) for h in (late, early, parent)]
    want = []
    for seeds in ([2], [], [2, 3]):
      alone = await begun(seeds)
      want.append(await engine.generate(alone, turn(4)))
      engine.close(alone)
    for handle in (parent, early, late):
      engine.close(handle)
    return [*map(bits, found)], [*map(bits, want)]

  found, want = asyncio.run(main())
  assert found == want


@pytest.mark.parametrize('search', [base.quick, base.nested])
def test_evictions_do_not_show(search, by_rows, monkeypatch):
  monkeypatch.setattr(device, 'PIECE', 16)

  async def main(engine, order):
    running = [base.searching(engine, i, search) for i in order]
    out = await asyncio.wait_for(asyncio.gather(*running), 300)
    return dict(zip(order, out))

  engine = make_engine(slots=4, **by_rows)
  want = {}
  for i in range(11):
    want |= asyncio.run(main(engine, [i]))
  assert engine.stats()['evictions'] == 0
  for order in (range(11), range(10, -1, -1)):
    assert asyncio.run(main(engine, order)) == want
  stats = engine.stats()
  assert stats['evictions'] > 0 and stats['restored_tokens'] > 0
  assert stats['recomputed_tokens'] == 0
  assert engine._table._sizes == {} and engine._table._paused == 0


def give(cfg, monkeypatch):
  """Has the tests of `base` use another model."""
  monkeypatch.setattr(base, 'CFG', cfg)
  for name in ('make_engine', 'make_params'):
    make = functools.partial(getattr(common, name), cfg=cfg)
    monkeypatch.setattr(base, name, make)


@pytest.mark.long
def test_nothing_compiles_after_warmup(monkeypatch):
  small = dataclasses.replace(CFG, n_layers=2, global_every=2)
  give(small, monkeypatch)
  base.test_nothing_compiles_after_warmup(True, monkeypatch)


@pytest.mark.long
def test_neither_lane_nor_order_shows(monkeypatch, by_rows):
  give(CFG, monkeypatch)
  monkeypatch.setattr(device, 'bytes_per_token', lambda cfg: 10**4)
  base.test_neither_lane_nor_order_shows(monkeypatch, by_rows)


def test_a_token_writes_no_state():
  """The states of all slots may be as large as the weights."""
  held = caches.abstract(CFG, 2, 64, chunk=4)[0]
  x = jnp.zeros((2, 1, CFG.delta.channels))
  g = beta = jnp.zeros((2, 1, CFG.delta.value_heads))
  w = jnp.zeros((CFG.delta.channels, 1, CFG.delta.taps))

  def token(held, t):
    rows = jnp.full(2, True), jnp.zeros((2, 1), int)
    return states.step(CFG, held, t, *rows, w, x, g, beta, None)[1]

  running = jax.eval_shape(states.begin, held, jnp.zeros(2, int))
  traced = jax.make_jaxpr(token)(running, 1).jaxpr
  after = [v for v in traced.outvars if v.aval.shape == held.state.shape]
  assert after == traced.invars[:1]


def test_what_is_told_while_it_is_sampled_is_one_call():
  """Pieces of another size than a chunk would show in last bits."""
  engine = make_engine(chunk=3)
  streamed = Streamed(engine, engine._tokenizer, lambda ids: None)

  async def sampled(engine):
    handle = engine.open(prompt(engine, 9))
    out = await engine.generate(handle, Sampling(max_tokens=11, seed=1))
    engine.close(handle)
    return bits(out)

  assert asyncio.run(sampled(streamed)) == asyncio.run(sampled(engine))


def test_a_group_prefills_its_prompt_once(engine):
  before = dict(engine.stats())

  async def main():
    handles = [engine.open(prompt(engine, 9, seed=5)) for _ in range(4)]
    turns = (Sampling(max_tokens=3, seed=i) for i in range(4))
    calls = map(engine.generate, handles, turns)
    await asyncio.gather(*calls)
    for handle in handles:
      engine.close(handle)

  asyncio.run(main())
  after = engine.stats()
  assert after['prefilled_tokens'] - before['prefilled_tokens'] == 8
  assert after['prefix_tokens'] - before['prefix_tokens'] == 3 * 8


def test_a_prompt_of_one_token_has_no_past(engine):
  """Not that of whoever had the slot before."""

  async def main():
    out = []
    for _ in range(2):
      handle = engine.open(prompt(engine, 1))
      out.append(await engine.generate(handle, Sampling(max_tokens=6, seed=1)))
      engine.close(handle)
    return out

  one, other = asyncio.run(main())
  assert bits(one) == bits(other)
  ids = [*prompt(engine, 1).ids, *one.ids.tolist()]
  want = base.full_logps(ids, 1.0, cfg=CFG)[np.arange(6), one.ids]
  np.testing.assert_allclose(one.logps, want, atol=ROUNDING)


def test_host_memory_counts_states():
  config = common.config(slots=2, host_gib=1e-3)
  room = device.room(CFG, config)
  # In float32: of each of four nets a state 4 x 8 x 12, three rows of 80
  # channels, and a log of four tokens of 2 x 8 + 4 x 12 + 4 + 80 numbers; of
  # the attention layer, keys and values 2 x 2 x 8 for a token.
  numbers = 4 * (384 + 3 * 80 + 4 * 148)
  assert device.state_bytes(CFG, 4) == 4 * numbers
  assert room.state == numbers / 32 and room.piece == 64
  assert room.size(10) == 64 + room.state


def test_host_memory_counts_states_of_forks():
  """Those of a fork lie there while its parent goes on in their slot."""
  token = device.bytes_per_token(CFG)
  room = device.room(CFG, common.config())
  # Of four sequences, two are in slots; not for the states of a fork.
  tokens = 2 * room.size(64) + room.state - 1
  engine = make_engine(slots=2, host_gib=tokens * token / 2**30)
  table, turn = engine._table, Sampling(max_tokens=2, limit=64)

  async def main():
    parent, other = engine.open(prompt(engine, 9)), engine.open(prompt(engine))
    await engine.generate(parent, turn)
    child = engine.fork(parent)
    assert not table.start(other, 64, last=False)
    await engine.generate(parent, turn)
    assert table._paused == room.state
    assert engine.stats()['host_bytes'] == room.state * token
    engine.close(parent)
    await engine.generate(child, turn)  # takes them back
    assert table._paused == 0 and table.start(other, 64, last=False)
    unused = engine.fork(child)
    await engine.generate(child, turn)
    assert table._paused == room.state
    engine.close(unused)
    assert table._paused == 0
    engine.close(child)
    engine.close(other)

  asyncio.run(main())
  assert table._paused == 0


def test_a_call_that_forks_wait_for_is_served():
  """As many sequences as the engine has capacity for, one of them a fork."""
  token = device.bytes_per_token(CFG)
  room = device.room(CFG, common.config())
  engine = make_engine(slots=2, host_gib=room.size(64) * token / 2**30)
  assert engine.capacity(64) == 2
  turn = Sampling(max_tokens=2, limit=64)

  async def main():
    parent = engine.open(prompt(engine, 9))
    await engine.generate(parent, turn)
    child, call = engine.fork(parent), engine.open(prompt(engine))
    await asyncio.wait_for(engine.generate(call, Sampling(max_tokens=2)), 60)
    for handle in (parent, child):
      await engine.generate(handle, turn)
    for handle in (parent, child, call):
      engine.close(handle)

  asyncio.run(main())
  assert engine._table._paused == 0


def test_what_is_not_exact_is_refused():
  """Before weights are loaded, which doctor and a run ask for too."""
  config = common.config(exact=False)
  for refused in (
    lambda: engine_lib.capacity(CFG, config, 9),
    lambda: make_engine(exact=False),
  ):
    with pytest.raises(EngineError, match='engine.exact=False.*delta nets'):
      refused()


def test_half_precision_keeps_decays_and_states_whole():
  """And the checksums of what is loaded are those of the trainer."""
  engine = make_engine(dtype='bfloat16')
  params = common.make_params(1, CFG)
  asyncio.run(engine.sync(WeightsUpdate(params, 1)))
  assert engine.checksums() == sync.checksums(params, 'bfloat16')
  layer = engine._device._weights['layers'][0]
  whole = {k for k, x in layer.items() if x.dtype.name == 'float32'}
  assert whole == {'delta_a_log', 'delta_norm'}
  held = engine._device._caches[0][0]
  assert held.state.dtype.name == held.u.dtype.name == 'float32'
  assert held.x.dtype.name == 'bfloat16'


@pytest.mark.long
@pytest.mark.parametrize('shape', [(2, 2, 2), (8, 1, 1), (1, 1, 2)])
def test_a_mesh_samples_what_one_device_does(shape):
  params = common.make_params(cfg=CFG)
  mesh = sharding.make_mesh(*shape)
  placed = jax.device_put(params, decoder.param_shardings(CFG, mesh))

  async def main(engine):
    out = []
    for i in range(3):
      handle = engine.open(prompt(engine, 9, seed=i))
      out.append(await engine.generate(handle, Sampling(max_tokens=6, seed=i)))
      engine.append(handle, [1, 2, 3])
      fork = engine.fork(handle)
      for h in (handle, fork):
        out.append(await engine.generate(h, Sampling(max_tokens=6, seed=i)))
    return out

  want = asyncio.run(main(make_engine(params=params, slots=8)))
  got = asyncio.run(main(make_engine(params=placed, mesh=mesh, slots=8)))
  for a, b in zip(got, want, strict=True):
    assert a.ids.tolist() == b.ids.tolist()
    np.testing.assert_allclose(a.logps, b.logps, atol=ROUNDING)
