"""The engine contract: ids in, sampled ids and their log-probs out.

An engine does not depend on questions or protocols. Token ids are never
decoded and encoded again; text is used only to find stop strings.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from searchrl_jax.run import lookup
from searchrl_jax.types import Prompt

MODULES = {
  'jax_sampler': 'searchrl_jax.engines.jax.sampler',
  'vllm': 'searchrl_jax.engines.vllm.client',
}


def module(name: str) -> Any:
  """Imports the engine of config.engine.module: of MODULES, or a dotted name.

  Raises:
    ValueError: no such engine; the message lists the names.
  """
  message = f'no module {name!r} in searchrl_jax.engines: '
  good = '.' in name or name in MODULES
  lookup.require(good, message + lookup.near(name, MODULES), ValueError)
  return lookup.module('searchrl_jax.engines', MODULES.get(name, name))


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How to sample one completion.

  temperature 0 is greedy. `stops` are strings, searched in the decoded text
  of this completion alone; the token that completes one is kept whole (its
  text may extend beyond the stop). `stop_ids` end a completion and are part of
  it.
  `seed` names the random stream: the draw of a token depends only on (seed,
  position in the handle), so arrival order has no effect. (A server draws a
  request's tokens in order: there the position is that at which the request
  began.)
  `probe` marks a check of the engine itself, which a sync does not hold.
  `limit`: the maximum number of tokens of the handle after all its later calls;
  an engine with caches starts the handle when it has room for that many.
  0: this is its last call, on which another handle may be waiting.
  `priority`: the training step. Among waiting calls, probes come first, then
  handles that have started, then lower priorities. (A server serves requests in
  the order of arrival.)
  """

  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stops: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  seed: int = 0
  probe: bool = False
  limit: int = 0
  priority: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
  ids: np.ndarray  # int32 [n], exactly what was sampled
  logps: np.ndarray  # float32 [n], of the distribution sampled from
  stop: str  # the stop string, or 'eos', or 'length'
  versions: np.ndarray  # int32 [n], the weights version that sampled each id


@dataclasses.dataclass(frozen=True)
class WeightsUpdate:
  """kind='full': every parameter. kind='adapter': those of adapters alone, in
  place of the engine's (`models.lora.served`: engines do not scale them)."""

  params: Any  # a pytree of arrays, or a path to a published checkpoint
  version: int
  kind: str = 'full'


@dataclasses.dataclass(frozen=True)
class SyncReport:
  version: int
  seconds: float
  tensors: int
  bytes: int
  canary_max_diff: float  # largest |log-prob difference| on the canary
  manifest: Mapping[str, str]  # tensor name -> checksum of the loaded tensor


class SyncError(RuntimeError):
  """The engine does not hold the published weights; the run must stop."""


class EngineError(RuntimeError):
  """A call that the engine cannot serve; the message says how to fix it."""


def require(good: Any, message: str) -> None:
  """Raises EngineError unless `good`."""
  lookup.require(good, message, EngineError)


Handle = Any  # opaque; len(handle) is the number of tokens in the sequence


class Engine(Protocol):
  """Handles are growing sequences; the engine may keep their KV cache.

  open, fork, truncate, append and close return at once; `generate` does the
  work. `generate` is awaitable and may be called for many handles at the same
  time.

  `sync` loads other weights and leaves the engine held: running generate calls
  pause, and continue within the same call after `resume`; probes and `score`
  are served meanwhile, so that the weights can be verified before other tokens
  are sampled with them.
  """

  version: int | None  # of the loaded weights; None: none yet
  vocab_size: int
  max_len: int  # tokens that one handle can hold
  dtype: str | None  # of its copy of the weights; None = the trainer's
  replicas: Sequence['Engine']  # verified one by one; itself, if there is one

  def open(self, prompt: Prompt) -> Handle: ...
  def fork(self, handle: Handle) -> Handle: ...
  def truncate(self, handle: Handle, n: int) -> None: ...
  async def generate(
    self, handle: Handle, sampling: Sampling
  ) -> Completion: ...
  def append(self, handle: Handle, ids) -> None: ...
  # The number of handles of up to `tokens` tokens that it serves without
  # recomputing caches. The module also has a function of this name, of
  # (model_cfg, config.engine, tokens), for a dry run.
  def capacity(self, tokens: int) -> int: ...
  async def score(self, ids) -> np.ndarray: ...  # float32 [n], [0] is 0
  def close(self, handle: Handle) -> None: ...
  async def sync(self, update: WeightsUpdate) -> SyncReport: ...
  async def resume(self) -> None: ...
  # Called after a step's rollouts: confirms that the synced weights sampled
  # them (SyncError); the engine may then free its memory for the update.
  async def rest(self) -> None: ...
  async def wake(self) -> None: ...
  async def shutdown(self) -> None: ...  # ends what it started
  def stats(self) -> Mapping[str, float]: ...  # counters since the start
  def warmup(self) -> None: ...  # compiles all programs of a run
