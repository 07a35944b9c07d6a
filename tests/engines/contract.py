"""What every engine must do (design 4). Subclass and give the fixtures.

`engine`: an Engine with max_len >= 64. `token_bytes`: id -> bytes. Set
`tolerance` to what the engine's log-probs may differ by between a cached and
a full computation.
"""

import asyncio

import numpy as np
import pytest

from searchrl_jax.engines.core import EngineError, Sampling
from searchrl_jax.types import Prompt

GREEDY = Sampling(max_tokens=6, temperature=0.0)


def prompt(engine, n=7, seed=0):
  ids = np.random.default_rng(seed).integers(1, engine.vocab_size, n)
  return Prompt(tuple(ids.tolist()))


def bits(done):
  """A completion that can be compared bit by bit."""
  return done.ids.tolist(), done.logps.tobytes()


async def once(engine, ids, sampling):
  """A completion from a fresh handle."""
  handle = engine.open(Prompt(tuple(int(i) for i in ids)))
  try:
    return await engine.generate(handle, sampling)
  finally:
    engine.close(handle)


class EngineContract:
  tolerance = 1e-4
  draws_by_token = True  # False: by the position at which a request begins

  def same(self, a, b):
    """The same completion, up to the engine's numerics."""
    assert a.ids.tolist() == b.ids.tolist()
    assert a.stop == b.stop
    np.testing.assert_allclose(a.logps, b.logps, atol=self.tolerance)

  def test_completion_has_the_contracts_types(self, engine):
    async def main():
      handle = engine.open(prompt(engine))
      done = await engine.generate(handle, Sampling(max_tokens=5, seed=3))
      assert done.ids.dtype == np.int32 and done.logps.dtype == np.float32
      assert len(done.ids) == len(done.logps) == len(done.versions) == 5
      assert done.stop == 'length'
      assert (done.logps <= 0).all()
      assert (done.versions == engine.version).all()
      assert len(handle) == 7 + 5
      engine.close(handle)

    asyncio.run(main())

  @pytest.mark.parametrize(
    'sampling',
    [Sampling(max_tokens=12, seed=5), GREEDY],
    ids=['sampled', 'greedy'],
  )
  def test_logps_are_the_scorers(self, engine, sampling):
    async def main():
      start = prompt(engine)
      done = await once(engine, start.ids, sampling)
      scored = await engine.logps([*start.ids, *done.ids.tolist()])
      assert scored.dtype == np.float32 and scored[0] == 0
      np.testing.assert_allclose(
        done.logps, scored[len(start.ids) :], atol=self.tolerance
      )

    asyncio.run(main())

  def test_append_equals_a_fresh_open(self, engine):
    async def main():
      start, outside = prompt(engine), prompt(engine, 9, seed=1).ids
      handle = engine.open(start)
      first = await engine.generate(handle, GREEDY)
      engine.append(handle, outside)
      engine.append(handle, outside[:2])
      second = await engine.generate(handle, GREEDY)
      whole = [*start.ids, *first.ids.tolist(), *outside, *outside[:2]]
      self.same(second, await once(engine, whole, GREEDY))
      assert len(handle) == len(whole) + len(second.ids)
      engine.close(handle)

    asyncio.run(main())

  def test_truncate_equals_a_fresh_open(self, engine):
    async def main():
      start = prompt(engine)
      handle = engine.open(start)
      first = await engine.generate(handle, GREEDY)
      whole = [*start.ids, *first.ids.tolist()]
      for n in (len(whole) - 1, 9, 4):
        engine.truncate(handle, n)
        assert len(handle) == n
        self.same(
          await engine.generate(handle, GREEDY),
          await once(engine, whole[:n], GREEDY),
        )
        engine.truncate(handle, n)
      engine.close(handle)

    asyncio.run(main())

  def test_fork_shares_the_past_and_nothing_else(self, engine):
    async def main():
      start, outside = prompt(engine), prompt(engine, 5, seed=2).ids
      parent = engine.open(start)
      first = await engine.generate(parent, GREEDY)
      child, late = engine.fork(parent), engine.fork(parent)
      engine.append(child, outside)
      whole = [*start.ids, *first.ids.tolist()]
      # The parent goes on, is cut below the fork and goes another way.
      await engine.generate(parent, GREEDY)
      engine.truncate(parent, 8)
      engine.append(parent, outside[::-1])
      self.same(
        await engine.generate(parent, GREEDY),
        await once(engine, [*whole[:8], *outside[::-1]], GREEDY),
      )
      self.same(
        await engine.generate(child, GREEDY),
        await once(engine, [*whole, *outside], GREEDY),
      )
      engine.close(parent)
      engine.close(child)
      self.same(
        await engine.generate(late, GREEDY), await once(engine, whole, GREEDY)
      )
      engine.close(late)

    asyncio.run(main())

  def test_the_draw_depends_on_seed_and_position(self, engine):
    async def main():
      start = prompt(engine)
      a, b, c = await asyncio.gather(
        *[
          once(engine, start.ids, Sampling(max_tokens=12, seed=s))
          for s in (1, 1, 2)
        ]
      )
      assert a.ids.tolist() == b.ids.tolist() != c.ids.tolist()
      both = []
      for _ in range(2):
        handle = engine.open(start)
        parts = [
          (await engine.generate(handle, Sampling(max_tokens=n, seed=1))).ids
          for n in (5, 7)
        ]
        both.append(np.concatenate(parts).tolist())
        engine.close(handle)
      assert both[0] == both[1]
      # In two calls: the position goes on, so the ids are the same.
      same = 12 if self.draws_by_token else 5
      assert both[0][:same] == a.ids[:same].tolist()

    asyncio.run(main())

  def test_stop_strings_keep_the_token_whole(self, engine, token_bytes):
    async def main():
      start, seen = prompt(engine), 0
      free = await once(engine, start.ids, Sampling(max_tokens=40, seed=4))
      ids = free.ids.tolist()
      text = [token_bytes(i) for i in ids]
      for at in range(40):  # inside and at the edge of a chunk
        stop = b''.join(text[max(0, at - 1) : at + 1])
        if not stop or not stop.isascii():  # no string names it
          continue
        ends = next(n for n in range(1, 41) if stop in b''.join(text[:n]))
        done = await once(
          engine,
          start.ids,
          Sampling(max_tokens=40, seed=4, stops=('never!', stop.decode())),
        )
        assert done.stop == stop.decode()
        assert done.ids.tolist() == ids[:ends]
        np.testing.assert_array_equal(done.logps, free.logps[:ends])
        seen += 1
      assert seen > 3

    asyncio.run(main())

  def test_stops_are_sought_in_the_completion_alone(self, engine, token_bytes):
    async def main():
      start = prompt(engine)
      free = await once(engine, start.ids, Sampling(max_tokens=1, seed=4))
      straddling = (
        token_bytes(start.ids[-1]) + token_bytes(int(free.ids[0]))
      ).decode('latin-1')
      done = await once(
        engine, start.ids, Sampling(max_tokens=1, seed=4, stops=(straddling,))
      )
      assert done.stop == 'length'

    asyncio.run(main())

  def test_stop_ids_end_and_are_kept(self, engine):
    async def main():
      start = prompt(engine)
      free = await once(engine, start.ids, Sampling(max_tokens=20, seed=4))
      ids = free.ids.tolist()
      stop = ids[9]
      done = await once(
        engine, start.ids, Sampling(max_tokens=20, seed=4, stop_ids=(stop,))
      )
      assert done.stop == 'eos'
      assert done.ids.tolist() == ids[: ids.index(stop) + 1]

    asyncio.run(main())

  def test_generating_is_concurrent_and_order_does_not_show(self, engine):
    async def trajectory(i, pause):
      handle = engine.open(prompt(engine, 6 + i % 3, seed=i // 3))
      out = []
      for turn in range(2):
        done = await engine.generate(
          handle,
          Sampling(
            max_tokens=5 + i % 4, seed=i, temperature=(0.0, 0.7, 1.0)[i % 3]
          ),
        )
        out.append(bits(done))
        await asyncio.sleep(pause)
        engine.append(handle, [1 + i, 2, 3 + turn])
      engine.close(handle)
      return out

    async def main(order, rng):
      tasks = {}
      for i in order:
        pause = rng.choice([0.0, 0.002, 0.01])
        tasks[i] = asyncio.create_task(trajectory(i, pause))
        if rng.random() < 0.3:
          await asyncio.sleep(0.004)
      return [await tasks[i] for i in sorted(tasks)]

    rng = np.random.default_rng(0)
    want = asyncio.run(main(range(12), rng))
    for _ in range(2):
      got = asyncio.run(main(rng.permutation(12).tolist(), rng))
      assert got == want

  def test_errors_name_the_fix(self, engine):
    limit = engine.max_len

    async def main():
      with pytest.raises(EngineError, match='empty'):
        engine.open(Prompt(()))
      with pytest.raises(EngineError, match=str(engine.vocab_size)):
        engine.open(Prompt((engine.vocab_size,)))
      with pytest.raises(EngineError, match=f'max_len={limit}'):
        engine.open(Prompt((1,) * (limit + 1)))
      handle = engine.open(prompt(engine))
      with pytest.raises(EngineError, match=f'7 tokens.*max_len={limit}'):
        await engine.generate(handle, Sampling(max_tokens=limit - 6))
      with pytest.raises(EngineError, match=f'7 .*max_len={limit}'):
        engine.append(handle, [1] * (limit - 6))
      for bad in (
        Sampling(max_tokens=0),
        Sampling(max_tokens=1, temperature=-1.0),
        Sampling(max_tokens=1, top_p=0.0),
        Sampling(max_tokens=1, top_p=1e-40),
        Sampling(max_tokens=1, top_k=-1),
        Sampling(max_tokens=1, stops=('',)),
      ):
        with pytest.raises(EngineError):
          await engine.generate(handle, bad)
      with pytest.raises(EngineError, match='7 tokens'):
        engine.truncate(handle, 8)
      done = await engine.generate(handle, GREEDY)  # nothing above harmed it
      assert len(done.ids) == 6
      engine.close(handle)
      engine.close(handle)
      for call in (
        lambda: engine.append(handle, [1]),
        lambda: engine.fork(handle),
        lambda: engine.truncate(handle, 1),
      ):
        with pytest.raises(EngineError, match='closed'):
          call()
      with pytest.raises(EngineError, match='closed'):
        await engine.generate(handle, GREEDY)

    asyncio.run(main())
