"""The engine on the real server: the contract, restarts, both engines equal.

The last tests kill the server, so they stand last.
"""

import asyncio
import functools
import os
import signal
import time

import jax
import numpy as np
import psutil
import pytest

from searchrl_jax.engines.core import (
  EngineError,
  Sampling,
  SyncError,
  WeightsUpdate,
)
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.engines.vllm.client import VllmEngine
from searchrl_jax.engines.vllm.transport import Client
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder
from searchrl_jax.rollout import chains as rollouts
from searchrl_jax.schema import base
from searchrl_jax.types import Prompt, Question
from tests import scripted
from tests.engines.common import config as sampler_config
from tests.engines.contract import EngineContract, once, prompt
from tests.engines.fake_vllm import config as engine_config
from tests.fakes import FakeSource
from tests.sidecar.conftest import CFG

pytestmark = pytest.mark.sidecar
MAX_LEN = 512


def weights(seed, scale=0.25):
  return decoder.init_params(CFG, jax.random.key(seed), scale=scale)


@pytest.fixture(scope='module')
def engine(served, tmp_path_factory):
  config = engine_config(
    url=served.sidecar.url,
    max_len=MAX_LEN,
    timeout=60.0,
    deadline=240.0,
    start_seconds=240.0,
    attempts=4,
    slots=32,
  )
  engine = VllmEngine(
    CFG, None, served.tokenizer, config, None, tmp_path_factory.mktemp('run')
  )
  load(engine, served.params, 0)
  yield engine
  load(engine, served.params, engine.version)  # what the others expect
  asyncio.run(engine.shutdown())


def load(engine, params, version):
  async def main():
    report = await engine.sync(WeightsUpdate(params, version))
    await engine.resume()
    return report

  return asyncio.run(main())


class TestContract(EngineContract):
  """Greedy and sampled ids do not depend on the batch, here to the last bit."""

  draws_by_token = False

  @pytest.fixture
  def token_bytes(self, served):
    return served.tokenizer.token_bytes


def test_a_published_version_is_verified_end_to_end(engine):
  """Checksums, the canary and the cache, for two versions in turn."""
  forward, canary = sync.forward_logps(CFG), list(range(40, 90))
  for version in (1, 2):
    params = weights(version)
    report = asyncio.run(
      sync.sync_and_verify(
        engine,
        params,
        version,
        canary,
        functools.partial(forward, params),
        1e-4,
      )
    )
    assert report.canary_max_diff < 1e-4
    assert report.checksums == sync.checksums(params)


@pytest.mark.parametrize('hides', [False, True])
def test_a_stale_prefix_cache_stops_the_run(engine, monkeypatch, hides):
  """Nothing drops the cache, and no salt keeps versions apart.

  hides: nor does the server say that it had the prefix cached; then what it
  generates from it shows.
  """
  forward, canary = sync.forward_logps(CFG), list(range(40, 140))

  async def verify(version):
    params = weights(version)
    return await sync.sync_and_verify(
      engine, params, version, canary, functools.partial(forward, params), 1e-4
    )

  complete, post = Client.complete, Client.post

  async def unsalted(self, *args):
    out = await complete(self, *args[:-1], 'one salt')
    return out._replace(cached=0) if hides else out

  async def kept(self, path, body=None, **params):
    if path == '/reset_prefix_cache':
      return {'success': True}
    if path == '/pause':
      params['clear_cache'] = 'false'
    return await post(self, path, body, **params)

  asyncio.run(verify(1))
  with monkeypatch.context() as m:
    m.setattr(Client, 'complete', unsalted)
    m.setattr(Client, 'post', kept)
    found = 'full forward' if hides else 'computed .* tokens'
    with pytest.raises(SyncError, match=found):
      asyncio.run(verify(2))
  asyncio.run(verify(2))


def test_stops_end_inside_merged_tokens(engine, served):
  """The token that completes a stop is kept whole, and is the last."""
  token_bytes, seen = served.tokenizer.token_bytes, 0

  async def main():
    nonlocal seen
    start = prompt(engine)
    for seed in range(12):
      free = await once(engine, start.ids, Sampling(max_tokens=40, seed=seed))
      ids = free.ids.tolist()
      text = [token_bytes(i) for i in ids]
      for n, piece in enumerate(text):
        if len(piece) < 2 or not piece.isascii():
          continue
        stop = piece[:-1].decode()  # the token runs one character past it
        ends = next(
          k for k in range(1, 41) if stop.encode() in b''.join(text[:k])
        )
        done = await once(
          engine, start.ids, Sampling(max_tokens=40, seed=seed, stops=(stop,))
        )
        assert done.stop == stop and done.ids.tolist() == ids[:ends]
        seen += ends == n + 1
        break

  asyncio.run(main())
  assert seen > 3


def test_a_call_goes_on_after_an_abort_on_the_new_weights(engine):
  """The cut is at an arbitrary token: a server pauses with a delay.

  New weights come until they have cut some calls, for how many are being
  written when a server pauses depends on its speed. Where a cut falls decides
  the text; of one in twenty texts, float32 misses a log-prob by more than 1e-4
  at a scale of 0.25, and by 2e-5 at most at this one.
  """
  start, params = prompt(engine), [weights(3, 0.15), weights(4, 0.15)]
  load(engine, params[0], 4)
  done = []
  cut = lambda: sum(d.versions[0] < d.versions[-1] for d in done)

  async def caller():
    while cut() < 8:
      sampling = Sampling(max_tokens=450, temperature=0.0)
      done.append(await once(engine, start.ids, sampling))

  async def main():
    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
      for _ in range(8):
        group.create_task(caller())
      version = 4
      while cut() < 8:
        await asyncio.sleep(0.1)
        version += 1
        await engine.sync(WeightsUpdate(params[version % 2], version))
        await engine.resume()

  asyncio.run(main())
  forward = sync.forward_logps(CFG)

  @functools.cache
  def wanted(which, ids):
    return np.asarray(forward(params[which], np.array(ids, np.int32)))

  for d in done:
    assert len(d.ids) == 450 and (np.diff(d.versions) >= 0).all()
    ids = (*start.ids, *d.ids.tolist())
    for version in np.unique(d.versions).tolist():
      part = d.versions == version
      want = wanted(version % 2, ids)[len(start.ids) :]
      np.testing.assert_allclose(d.logps[part], want[part], atol=1e-4)


def test_turns_reuse_the_prefix(engine):
  """What a turn computes is what the turn before left, and its own block."""

  async def main():
    handle = engine.open(prompt(engine, 100))
    shares = []
    for turn in range(4):
      before = engine.stats()
      await engine.generate(handle, Sampling(max_tokens=30, seed=turn))
      after = engine.stats()
      hits = after['prefix_tokens'] - before['prefix_tokens']
      computed = after['prefilled_tokens'] - before['prefilled_tokens']
      assert hits + computed == len(handle) - 30
      shares.append(hits / (hits + computed))
      engine.append(handle, range(1, 21))
    engine.close(handle)
    return shares

  first, *later = asyncio.run(main())
  print('prefix hit rate by turn:', [first, *later])
  assert first == 0 and min(later) > 0.75


def test_ids_that_the_server_refuses_are_an_error_here_first(engine):
  with pytest.raises(EngineError, match=f'0..{CFG.vocab_size - 1}'):
    engine.open(Prompt((CFG.vocab_size,)))  # a padding row there


def sampler(served, params):
  return JaxEngine(
    CFG,
    params,
    served.tokenizer,
    sampler_config(slots=32, max_len=160, chunk=16, prefill_rows=8),
  )


def exact(params, ids):
  """Logits [T, V] after each id, in float64 from float32 hidden states."""
  hidden = decoder.hidden_states(params, CFG, np.asarray([ids], np.int32))
  return np.asarray(decoder.logits(params, CFG, hidden), np.float64)[0]


def test_more_prompts_than_a_batch_of_the_server_takes(engine):
  """Prefilled in parts, a prompt with a seed kills vLLM 0.32 on CPU."""

  async def main():
    return await asyncio.gather(
      *(
        once(
          engine,
          prompt(engine, 300, seed=i).ids,
          Sampling(max_tokens=4, seed=i),
        )
        for i in range(24)
      )
    )

  before = engine.stats()['restarts']
  assert all(len(done.ids) == 4 for done in asyncio.run(main()))
  assert engine.stats()['restarts'] == before


def test_both_engines_give_the_same_greedy_ids(engine, served):
  """100 prompts, 64 tokens, float32; ids may part at a tie, which counts."""
  params = weights(5)
  load(engine, params, 5)
  rng = np.random.default_rng(0)
  prompts = [
    rng.integers(3, CFG.vocab_size, rng.integers(4, 60)).tolist()
    for _ in range(100)
  ]
  greedy = Sampling(max_tokens=64, temperature=0.0)

  async def main(which):
    return await asyncio.gather(*[once(which, p, greedy) for p in prompts])

  ours = asyncio.run(main(sampler(served, params)))
  theirs = asyncio.run(main(engine))
  ties, worst = 0, 0.0
  for start, a, b in zip(prompts, ours, theirs):
    n = len(a.ids)
    apart = np.flatnonzero(a.ids != b.ids)
    if apart.size:
      n = int(apart[0])
      row = exact(params, [*start, *a.ids[:n].tolist()])[-1]
      gap = abs(row[a.ids[n]] - row[b.ids[n]])
      assert gap < 1e-4, f'not a tie: {gap}'
      ties += 1
    worst = max(worst, float(np.abs(a.logps[:n] - b.logps[:n]).max()))
  print(f'ties: {ties} of 100; largest log-prob difference {worst:.2e}')
  assert ties <= 1 and worst < 1e-3


def test_both_engines_give_the_same_log_probs(engine, served):
  """Of ids sampled at temperature 1 by vLLM, as both engines score them."""
  params = weights(6)
  load(engine, params, 6)
  start = prompt(engine, 20)

  async def sampled():
    return await asyncio.gather(
      *[
        once(engine, start.ids, Sampling(max_tokens=64, seed=s))
        for s in range(16)
      ]
    )

  async def scored(which, done):
    return await asyncio.gather(
      *[which.logps([*start.ids, *d.ids.tolist()]) for d in done]
    )

  done = asyncio.run(sampled())
  ours = asyncio.run(scored(sampler(served, params), done))
  theirs = asyncio.run(scored(engine, done))
  told = np.stack([d.logps for d in done])
  ours, theirs = (np.stack(x)[:, 20:] for x in (ours, theirs))
  print(
    'mean |difference|: sampled',
    np.abs(told - ours).mean(),
    'scored',
    np.abs(theirs - ours).mean(),
  )
  assert np.abs(told - ours).mean() < 1e-4
  assert np.abs(theirs - ours).mean() < 1e-4


def searching(tok, text):
  """Weights that say `text` from wherever they are, token after token.

  Every id has, or shares, a unit of the residual; the first MLP turns a unit
  into that of the id that follows. Ids outside of the text are zero, but
  attention's value bias adds a little of unit 0 everywhere, which only they
  are small enough to be led by; it leads to the first id.
  """
  ids = tok.encode(text)
  unit = {i: n + 1 for n, i in enumerate(dict.fromkeys(ids))}
  follows = {unit[a]: unit[b] for a, b in zip(ids, ids[1:])}
  # Or the text is not a function of its last id.
  assert all(follows[unit[a]] == unit[b] for a, b in zip(ids, ids[1:]))
  follows[0] = unit[ids[0]]
  params = jax.tree.map(
    lambda x: np.zeros(x.shape, np.float32),
    decoder.init_params(CFG, jax.random.key(0), scale=0.0),
  )
  layers = params['layers']
  for norm in (params['final_norm'], layers['attn_norm'], layers['mlp_norm']):
    norm[:] = 1.0
  params['final_norm'][:] = 4.0  # as good as greedy
  for i, n in unit.items():
    params['embed'][i, n] = 1.0
  layers['v_bias'][0, 0, 0] = 0.05
  layers['o'][0, 0, 0, 0] = 1.0
  for n, m in follows.items():
    layers['gate'][0, n, n] = layers['up'][0, n, n] = 1.0
    layers['down'][0, n, m] = 1.0
  return jax.tree.map(jax.numpy.asarray, params)


def test_a_rollout_survives_the_death_of_the_server(engine, served):
  """kill -9 in the middle: each trajectory ends once, on the right weights.

  A server that came back without them would not search.
  """
  tok = served.tokenizer
  load(engine, searching(tok, '<search> river </search>'), 9)
  env = scripted.make(
    tok, 'plain', max_turns=4, max_turn_tokens=24, max_tokens=500
  )
  restarts = engine.stats()['restarts']
  ended, killed = [], []

  def delay(query):
    """In the second turn of some, while others generate."""
    if len(source.asked) > 20 and not killed:
      killed.append(served.sidecar.server_pid)
      os.kill(killed[0], signal.SIGKILL)
    return 0.02

  source = FakeSource(delay=delay)
  settings = base().rollout
  settings.update(dict(group=4, max_failed=0.0))
  questions = [
    Question(f'q{i}', f'which river {i} ?', ('x',)) for i in range(4)
  ]
  found = asyncio.run(
    rollouts.rollout(
      questions,
      env=env,
      engine=engine,
      source=source,
      config=settings,
      seed=0,
      step=0,
      on_trajectory=lambda t: ended.append(t.id),
    )
  )
  assert killed
  assert sorted(ended) == [
    f'q{i}/solver/{s}' for i in range(4) for s in range(4)
  ]
  for group in found.groups:
    for t in group:
      assert not t.failed and len(t.searches) == 4
      for segment in t.segments:
        if segment.author == 'policy':
          assert set(segment.versions) == {9}
  assert engine.stats()['restarts'] == restarts + 1
  # It holds the weights by its own checksums, and nothing hangs on it.
  (described,) = served.rpc('searchrl_describe')
  assert described['loaded'] == 9


@pytest.mark.parametrize(
  'victim, call',
  [('EngineCore', 'searchrl_load'), ('Worker', 'searchrl_checksums')],
)
def test_a_death_in_a_sync_ends_it_and_the_next_one_loads(
  engine, served, monkeypatch, victim, call
):
  """The API lives on for a moment and answers with errors."""
  rpc, killed = Client.rpc, []

  async def deadly(self, method, *args):
    if method == call and not killed:
      api = psutil.Process(served.sidecar.server_pid)
      killed.extend(
        p for p in api.children(recursive=True) if victim in p.name()
      )
      for process in killed:
        process.kill()
    return await rpc(self, method, *args)

  monkeypatch.setattr(Client, 'rpc', deadly)
  before = served.sidecar.restarts
  with pytest.raises((EngineError, SyncError), match=served.sidecar.url):
    load(engine, weights(11), 11)
  deadline = time.monotonic() + 240
  while (served.sidecar.restarts, served.sidecar.ready) != (before + 1, True):
    assert served.sidecar.running and time.monotonic() < deadline
    time.sleep(0.5)
  load(engine, weights(12), 12)
  (described,) = served.rpc('searchrl_describe')
  assert killed and described['loaded'] == 12
  done = asyncio.run(once(engine, prompt(engine).ids, Sampling(max_tokens=4)))
  want = sync.forward_logps(CFG)(
    weights(12), np.array([*prompt(engine).ids, *done.ids], np.int32)
  )
  np.testing.assert_allclose(done.logps, np.asarray(want)[-4:], atol=1e-4)
