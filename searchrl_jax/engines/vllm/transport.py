"""The HTTP calls of one vLLM server: one attempt each, typed failures.

client.py decides on retries. The routes are those of vLLM 0.32. Routes that
change the server (pause, collective_rpc, ...) exist only under
VLLM_SERVER_DEV_MODE=1 and have no authentication: servers must bind 127.0.0.1
or a private network.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
import numpy as np

from searchrl_jax.engines.core import EngineError, Sampling, require

# Less than uvicorn's 5 s: otherwise the server may close a connection in use.
_KEEPALIVE = 2.0
_BUSY = (429, 502, 503, 504)
_COMPLETIONS = '/v1/completions'


class Down(EngineError):
  """No answer, or the server cannot serve now: a retry may succeed."""


class Output(NamedTuple):
  """The tokens of one request; `end` is vLLM's finish_reason."""

  ids: list[int]
  logps: np.ndarray  # float32
  end: str  # stop, length, abort
  cached: int  # prompt tokens found in the prefix cache


class Client:
  """The calls of one server, from one event loop.

  Args:
    url: http://host:port.
    config: config.engine: `timeout` of a call, `start_seconds` of `rpc`.

  Methods raise:
    Down: see there.
    EngineError: the server answered with an error that a retry would not
      change.
  """

  def __init__(self, url: str, config):
    self.url, self._config = url, config
    limits = httpx.Limits(keepalive_expiry=_KEEPALIVE)  # their number: none
    self._http = httpx.AsyncClient(  # never through a proxy
      base_url=url, timeout=config.timeout, limits=limits, trust_env=False
    )
    self.close = self._http.aclose

  async def get(self, path: str) -> Any:
    """The JSON of an answer; {} if it is empty, or text."""
    return await self._call('GET', path)

  async def post(self, path: str, body: Any = None, **params: str) -> Any:
    """As `get`; `params` are those of the URL."""
    return await self._call('POST', path, json=body, params=params)

  async def rpc(self, method: str, *args: Any) -> list[Any]:
    """The results of each worker's `method`, see plugin.py."""
    body, seconds = {'method': method, 'args': args}, self._config.start_seconds
    how = dict(json=body, timeout=seconds)
    return (await self._call('POST', '/collective_rpc', **how))['results']

  async def complete(
    self,
    model: str,
    ids: Sequence[int],
    sampling: Sampling,
    limit: int,
    seed: int,
    salt: str,
  ) -> Output:
    """Samples at most `limit` after `ids`. Requests of one salt share prefixes.

    The caller must also search for stop strings: a server sees only the text of
    this request.
    """
    body = {
      'model': model,
      'prompt': ids,
      'max_tokens': limit,
      'temperature': sampling.temperature,
      'top_p': sampling.top_p,
      'top_k': sampling.top_k,
      'seed': seed,
      'stop': sampling.stops,
      'include_stop_str_in_output': True,
      'stop_token_ids': sampling.stop_ids,
      'ignore_eos': True,  # only stop_ids end a completion
      'logprobs': 0,  # of the sampled token alone
      'return_token_ids': True,
      'return_tokens_as_token_ids': True,
      'cache_salt': salt,
    }
    answer = await self.post(_COMPLETIONS, body)
    [choice] = answer['choices']
    logps = self._finite(choice['logprobs']['token_logprobs'])
    cached = answer['usage']['prompt_tokens_details']['cached_tokens'] or 0
    return Output(choice['token_ids'], logps, choice['finish_reason'], cached)

  async def score(self, model: str, ids: Sequence[int]) -> np.ndarray | None:
    """Log-prob of each id given those before it, at temperature 1; [0] is 0.

    vLLM computes the whole prompt for it, without the prefix cache.

    Returns:
      float32 [n]; None if the request was aborted.
    """
    body = {'model': model, 'prompt': ids, 'prompt_logprobs': 0}
    body |= {'max_tokens': 1, 'temperature': 0.0}
    [choice] = (await self.post(_COMPLETIONS, body))['choices']
    if choice['finish_reason'] == 'abort':
      return None
    rows = zip(ids[1:], choice['prompt_logprobs'][1:], strict=True)
    return self._finite([0.0, *(row[str(i)]['logprob'] for i, row in rows)])

  async def _call(self, method: str, path: str, **request: Any) -> Any:
    where = f'{self.url}{path}'
    try:
      answer = await self._http.request(method, path, **request)
    except httpx.TransportError as e:
      limits = 'config.engine.timeout, for weights config.engine.start_seconds'
      raise Down(f'{where}: {e!r} ({limits})') from e
    status = answer.status_code
    if answer.is_error:
      # 500: the engine died under a request. 404: the server does not know the
      # name of the model, because it is another process.
      again = (*_BUSY, 404, 500) if path == _COMPLETIONS else _BUSY
      kind = Down if status in again else EngineError
      raise kind(f'{where}: status {status}: {answer.text[:2000]}')
    kind = answer.headers.get('content-type', '')
    return answer.json() if answer.content and 'json' in kind else {}

  def _finite(self, logps: Sequence[float | None]) -> np.ndarray:
    """float32 [n]; EngineError unless all are finite: JSON has null for NaN."""
    out = np.array(logps, np.float32)
    fix = 'check weights for NaN and the dtype for overflow (--dtype)'
    message = f'{self.url}: returned a log-prob that is not finite; {fix}'
    require(np.isfinite(out).all(), message)
    return out
