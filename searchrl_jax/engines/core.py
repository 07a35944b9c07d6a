"""The engine contract: ids in, sampled ids and their log-probs out.

An engine does not depend on questions or protocols. Token ids are never
decoded and encoded again; text is used only to find stop strings.

The module of config.engine.module has `make(model_cfg, params, tokenizer,
config, mesh, folder)`, which returns an `Engine`: config is config.engine,
folder that of the run. Its `capacity(model_cfg, config, tokens)`, that of the
engine for such a model, raises EngineError for one that it cannot serve, and is
asked before weights are loaded.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import time
from typing import Any, Protocol

import numpy as np

from searchrl_jax import lookup
from searchrl_jax.models import families
from searchrl_jax.types import Prompt

MODULES = {'jax': 'jax.engine', 'vllm': 'vllm.client'}


def module(name: str) -> Any:
  """Imports the engine of config.engine.module: of MODULES, or a dotted name.

  Raises:
    ValueError: no such engine; the message lists the names.
  """
  path = f'searchrl_jax.engines.{MODULES[name]}' if name in MODULES else name
  message = f'no module {name!r} in searchrl_jax.engines: '
  message += lookup.near(name, MODULES)
  lookup.require('.' in path, message, ValueError)
  return lookup.module('searchrl_jax.engines', path)


LEAST_TOP_P = 1e-30  # float32 takes much less for 0, which keeps no token


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
  checksums: Mapping[str, str] | None = None  # of `params`, if it is known


@dataclasses.dataclass(frozen=True)
class SyncReport:
  version: int
  seconds: float
  tensors: int
  bytes: int
  canary_max_diff: float  # largest |log-prob difference| on the canary
  checksums: Mapping[str, str]  # tensor name -> checksum of the loaded tensor


class SyncError(RuntimeError):
  """The engine does not hold the published weights; the run must stop."""


class DeltaError(SyncError):
  """What changed cannot be published or loaded; everything may be."""


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
  pause, and continue within the same call after `resume`; probes and `logps`
  are served meanwhile, so that the weights can be verified before other tokens
  are sampled with them.

  Methods that only check arguments, change ids or count are defined here. An
  engine need not be a subclass: any class with the public methods will do.

  Args:
    config: config.engine.
    counters, seconds: names of entries of `stats`, separated by spaces.
  """

  version: int | None  # of the loaded weights; None: none yet
  vocab_size: int
  max_len: int  # tokens that one handle can hold
  dtype: str | None  # of its copy of the weights; None = the trainer's
  exact: tuple[str, ...] = families.EXACT  # of which these stay float32
  piece: int = 8  # tokens that it samples at a time, to be told
  replicas: Sequence['Engine']  # verified one by one; itself, if there is one
  handle_type: type  # of `handles.Handle`
  # The lowest temperature above 0 that the engine distinguishes from 0.
  min_temperature: float
  _tokenizer: Any
  _config: Any  # config.engine
  _counters: dict[str, float]
  _seconds: dict[str, float]

  def __init__(self, vocab_size: int, tokenizer, config, counters, seconds):
    self._tokenizer, self._config = tokenizer, config
    self.vocab_size, self.max_len = vocab_size, config.max_len
    self.dtype = config.dtype  # of its copy of the weights
    self._counters = dict.fromkeys(counters.split(), 0)
    self._seconds = dict.fromkeys(seconds.split(), 0.0)

  def open(self, prompt: Prompt) -> Handle:
    """Raises EngineError: no ids, ids out of range, or too many."""
    require(not prompt.media, 'Prompt.media must be (): it is not supported')
    require(prompt.ids, 'the prompt is empty; it needs at least one token')
    return self.handle_type(self._check_ids(prompt.ids, 0, 'the prompt'))

  def truncate(self, handle: Any, n: int) -> None:
    """Keeps the first n tokens (1 <= n <= len(handle))."""
    self._check_open(handle)
    has = f'the handle has {len(handle)} tokens, at least 1 must stay'
    require(1 <= n <= len(handle), f'truncate to {n}: {has}')
    del handle.ids[n:]

  def append(self, handle: Handle, ids) -> None:
    self._check_open(handle)
    handle.ids.extend(self._check_ids(ids, len(handle), 'append'))

  def close(self, handle: Handle) -> None:
    """Frees what the handle holds. Closing it again has no effect."""
    if not handle.closed:
      self._check_open(handle)
      handle.closed = True
      self._release(handle)

  def _release(self, handle: Handle) -> None: ...  # frees what it holds

  def stats(self) -> dict[str, float]:
    """Counters since the start."""
    seconds = {f'seconds_{k}': v for k, v in self._seconds.items()}
    return {**self._counters, **seconds}

  def _sync_report(self, version: int, start: float, size: int, checksums):
    """start: time.perf_counter() at the start of the sync. size: in bytes."""
    seconds = time.perf_counter() - start
    self._counters['syncs'] += 1
    self._seconds['sync'] += seconds
    return SyncReport(
      version, seconds, len(checksums), size, math.nan, checksums
    )

  def _check_open(self, handle: Handle) -> None:
    """Raises EngineError unless the handle is open and not generating."""
    require(not handle.closed, 'the handle is closed; open or fork another')
    require(not handle.busy, 'the handle is generating; await that call first')

  def _check_ids(self, ids, n_before: int, what: str) -> list[int]:
    """The ids as a list; EngineError if they do not fit after n_before."""
    ids, last = [int(i) for i in ids], self.vocab_size - 1
    fits = n_before + len(ids) <= self.max_len
    more = f'{n_before} + {len(ids)} tokens are more than'
    require(fits, f'{what}: {more} config.engine.max_len={self.max_len}')
    wrong = [i for i in ids if not 0 <= i <= last]
    require(not wrong, f'{what}: ids {wrong[:9]} are not in 0..{last}')
    return ids

  def _check_sampling(self, handle: Handle, s: Sampling) -> None:
    """Raises EngineError unless `s` can be sampled after the handle's ids."""
    low, most = self.min_temperature, self.max_len
    total = len(handle) + s.max_tokens
    fits = s.max_tokens >= 1 and total <= (s.limit or most) <= most
    warm = s.temperature == 0 or low <= s.temperature < math.inf
    truncated = LEAST_TOP_P <= s.top_p <= 1 and s.top_k >= 0
    good = fits and warm and truncated and all(s.stops)
    if not good:  # so that the message is not written at every call
      raise EngineError(
        f'{s} after {len(handle)} tokens: expected at least 1 of max_tokens, '
        f'all within limit and config.engine.max_len={most}; temperature 0 '
        f'(greedy) or from {low}; top_p from {LEAST_TOP_P} to 1; top_k from '
        '0; no empty stop'
      )

  # What each engine does in its own way.

  def fork(self, handle: Handle) -> Handle: ...
  async def generate(self, handle, sampling: Sampling) -> Completion: ...
  # The number of handles of up to `tokens` tokens that it serves without
  # recomputing caches.
  def capacity(self, tokens: int) -> int: ...
  async def logps(self, ids) -> np.ndarray: ...  # float32 [n], [0] is 0
  # One that records which experts each token used (config.engine.record_routes)
  # also has `routes(handle)`, see `JaxEngine`.
  async def sync(self, update: WeightsUpdate) -> SyncReport: ...
  async def resume(self) -> None: ...
  # Called after a step's rollouts: confirms that the synced weights sampled
  # them (SyncError); the engine may then free its memory for the update.
  async def rest(self) -> None: ...
  async def wake(self) -> None: ...
  async def shutdown(self) -> None: ...  # ends what it started
  def warmup(self) -> None: ...  # compiles all programs of a run
