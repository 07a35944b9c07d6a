"""Publishes weights to an engine and verifies that it uses them (design 5.6).

Each of three failures has its own check. Wrong weights: the checksum of every
tensor that the engine holds is compared with the published checksums, because
one small step changes log-probs less than rounding does. Wrong numerics: a
canary compares the engine's log-probs with the trainer's. A stale cache: a
handle that was cached under the old weights must be prefilled again, and must
generate with the log-probs of a full forward pass.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from searchrl_jax import lookup
from searchrl_jax.devices import sharding
from searchrl_jax.engines import core
from searchrl_jax.engines.core import Engine, Sampling, SyncReport
from searchrl_jax.engines.weights import checksum
from searchrl_jax.engines.weights.checksum import compare as compare
from searchrl_jax.models import decoder, families
from searchrl_jax.types import Prompt, Question

_CANARY = (
  "canary: the engine's log-probs differ from the trainer's although it holds "
  'the same weights; compare dtype and attention of the two'
)
_STALE = 'the engine kept a cache of the old weights'
_DIFFERS = f'{_STALE}: a generation from it differs from a full forward pass'
CANARY_TOKENS = 2  # generated from the cached prefix after the sync


def canary_ids(env, questions: Sequence[Question], tokens: int = 64):
  """The ids that check every sync: prompts of the first questions."""
  ids = []
  for question in questions[:8]:
    state, _ = env.reset(question)
    ids += [int(i) for s in state.segments for i in s.ids]
  return ids[: min(tokens, env.config.max_tokens - 8)]


def checksums(
  params: dict, dtype: str | None = None, exact=families.EXACT
) -> dict[str, str]:
  """Tensor name -> checksum of the parameters that are published.

  dtype: of the engine's copy ('bfloat16' of float32 parameters); None if it
  does not cast them. exact: see `core.Engine`.
  """
  return checksum.checksums(decoder.flatten(params), dtype, exact)


async def sync_and_verify(
  engine: Engine,
  params: dict,
  version: int,
  canary_ids: Sequence[int],
  trainer_logps_fn: Callable,
  tolerance: float,
  kind: str = 'full',
  published: Mapping[str, str] | None = None,
) -> SyncReport:
  """Publishes `params` to the engine; returns only when all checks pass.

  The engine generates only the checks until then, and nothing after a failure.

  canary_ids: a fixed sequence of ids. trainer_logps_fn(ids int32 [n]) ->
  float32 [n], log-probs by the trainer's own forward pass ([0] is not read).
  tolerance: config.engine.canary_tolerance, see `_compare_logps`.
  kind: 'adapter' if `params` are adapters alone; the engine keeps the rest.
  published: the `checksums` of params, if it is known; params may then be the
  folder of a publication.

  Raises:
    SyncError: names the tensor, or the check that failed, and the figures.
  """
  canary = [int(i) for i in canary_ids]
  published = published or checksums(params, engine.dtype, engine.exact)
  probes = [(e, e.open(Prompt(tuple(canary)))) for e in engine.replicas]
  try:
    # Fill the cache under the old weights.
    for replica, handle in probes:
      await replica.generate(handle, _probe(1))
      replica.truncate(handle, len(canary))
    update = core.WeightsUpdate(params, version, kind, published)
    report = await engine.sync(update)
    got = {engine.version, report.version}
    what = f'version {version} was published; the engine reports {got}'
    _require(got == {version}, what)
    compare(published, report.checksums)
    want = np.asarray(trainer_logps_fn(np.asarray(canary, np.int32)))
    worst = 0.0
    for replica, handle in probes:
      done = await _from_cache(replica, handle, canary, version)
      # One call for both checks.
      got = await replica.logps([*canary, *done.ids.tolist()])
      got, after = np.split(got, [len(canary)])
      worst = max(worst, _compare_logps(got[1:], want[1:], tolerance, _CANARY))
      _compare_logps(done.logps, after, tolerance, _DIFFERS)
  finally:
    for replica, handle in probes:
      replica.close(handle)
  await engine.resume()
  return dataclasses.replace(report, canary_max_diff=worst)


def _compare_logps(got, want, tolerance: float, message: str) -> float:
  """The largest difference; SyncError if it is too large, or NaN.

  It is relative to log-probs below -1: rounding grows with logits, and after a
  warm start some tokens of the canary have a log-prob of -40.
  """
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  diff = np.abs(got - want) / np.maximum(1.0, np.abs(want))
  worst = float(np.max(np.where(np.isnan(diff), np.inf, diff)))
  limit = f'config.engine.canary_tolerance={tolerance}'
  limit += ', relative where they are below -1'
  _require(worst <= tolerance, f'{message}: by {worst} ({limit})')
  return worst


def _require(good, message: str) -> None:
  lookup.require(good, message, core.SyncError)


def _probe(tokens: int) -> Sampling:
  return Sampling(max_tokens=tokens, temperature=0.0, probe=True)


async def _from_cache(engine, handle, canary, version) -> core.Completion:
  """Generates from the prefix that was cached under the old weights."""
  computed = -engine.stats().get('prefilled_tokens', math.nan)
  done = await engine.generate(handle, _probe(CANARY_TOKENS))
  computed += engine.stats().get('prefilled_tokens', math.nan)
  stale = computed < len(canary) - 1
  what = f'it computed {computed} tokens of a prefix of {len(canary)}'
  _require(not stale, f'{_STALE}: {what} after the sync')
  carried = set(np.asarray(done.versions).tolist())
  what = f'tokens generated after the sync carry the versions {carried}'
  _require(carried == {version}, f'{what}, not {version}')
  return done


def forward_logps(cfg, mesh=None) -> Callable:
  """fn(params, ids int32 [n]) -> float32 [n]: the trainer's own log-probs.

  A full forward pass at temperature 1, in the trainer's dtype; [0] is 0.
  """

  def forward(params, ids):
    hidden = decoder.hidden_states(params, cfg, ids[None], mesh=mesh)
    scores = jax.nn.log_softmax(decoder.logits(params, cfg, hidden[0, :-1]))
    logps = jnp.take_along_axis(scores, ids[1:, None], -1)[:, 0]
    return jnp.concatenate([jnp.zeros((1,), logps.dtype), logps])

  if mesh is not None and mesh.is_multi_process:
    return jax.jit(forward, out_shardings=sharding.replicated(mesh))
  return jax.jit(forward)
