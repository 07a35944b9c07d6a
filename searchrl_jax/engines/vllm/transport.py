"""One vLLM server over HTTP: each call tried once, each failure with a type.

Who tries again, where and how often is the engine's matter (vllm.py). What
the routes take and answer was read in vLLM 0.32 and tried on it; those that
change the server (pause, collective_rpc, ...) exist only under
VLLM_SERVER_DEV_MODE=1, and are no boundary of authorisation: servers bind
127.0.0.1 or a network of one's own.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
from typing import Any

import httpx
import numpy as np

from searchrl_jax.engines.core import EngineError, Sampling

# Below uvicorn's 5 s, or a request would meet the server's closing.
_KEEPALIVE = 2.0
_CONNECT = 10.0  # seconds, of `timeout`, that making a connection may take
_BUSY = (429, 502, 503, 504)
_SPARE = 32  # connections for what is not sampled: scores, pauses, looks
_START = 'start it with: python -m searchrl_jax.engines.vllm.launcher'


class Down(EngineError):
  """No answer, or that of a server which cannot serve now: ask again."""


class Restarted(EngineError):
  """The server no longer knows its model name: it is another process."""


class Refused(EngineError):
  """The server answered, and will answer so again."""


@dataclasses.dataclass(frozen=True)
class Output:
  """What one request wrote; `end` is vLLM's finish_reason."""

  ids: list[int]
  logps: list[float]
  end: str  # stop, length, abort
  cached: int  # prompt tokens found in the prefix cache


@dataclasses.dataclass(frozen=True)
class Model:
  name: str  # served_model_name, another at each start
  max_len: int


class Client:
  """Calls of one server, from one event loop.

  Args:
    url: http://host:port.
    timeout: seconds that a call may take, and
    slow: that a call of `rpc` may (loading a model takes as long as it takes).
    most: completions at the same time, as the caller sees to it.
  """

  def __init__(self, url: str, timeout: float, slow: float, most: int):
    self.url = url.rstrip('/')
    self._timeout, self._slow = timeout, slow
    self._http = httpx.AsyncClient(
      base_url=self.url,
      limits=httpx.Limits(
        max_connections=most + _SPARE,
        max_keepalive_connections=None,
        keepalive_expiry=_KEEPALIVE,
      ),
      trust_env=False,  # never through a proxy
    )

  async def close(self) -> None:
    await self._http.aclose()

  async def model(self) -> Model:
    """What is served.

    Raises:
      Down; Refused: no vLLM server.
    """
    found = await self._call('GET', '/v1/models')
    try:
      first = found['data'][0]
      return Model(str(first['id']), int(first['max_model_len']))
    except (KeyError, IndexError, TypeError, ValueError) as e:
      raise Refused(
        f'{self.url}/v1/models: not the answer of a vLLM server '
        f'({str(found)[:200]}); {_START}'
      ) from e

  async def health(self) -> None:
    """Raises Down if the engine behind the server is dead."""
    await self._call('GET', '/health')

  async def complete(
    self,
    model: str,
    ids: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    seed: int,
    salt: str,
  ) -> Output:
    """Samples after `ids`. Prefixes are shared among requests of one salt.

    Stop strings end it early at best: the caller looks for them itself.

    Raises:
      Down, Restarted, Refused.
    """
    body = {
      'model': model,
      'prompt': list(ids),
      'max_tokens': max_tokens,
      'temperature': sampling.temperature,
      'top_p': sampling.top_p,
      'top_k': sampling.top_k,
      'seed': seed,
      'stop': list(sampling.stops),
      'include_stop_str_in_output': True,
      'stop_token_ids': list(sampling.stop_ids),
      'ignore_eos': True,  # only stop_ids end a completion
      'logprobs': 0,  # of the sampled token alone
      'return_token_ids': True,
      'return_tokens_as_token_ids': True,
      'cache_salt': salt,
    }
    choice, usage = await self._completion(body)
    with self._reading('/v1/completions', choice):
      out = Output(
        [int(i) for i in choice['token_ids']],
        _finite(choice['logprobs']['token_logprobs'], self.url),
        str(choice['finish_reason']),
        _cached(usage, self.url),
      )
    if (
      len(out.ids) != len(out.logps)
      or (out.end not in ('stop', 'length', 'abort'))
      or (out.end == 'length' and len(out.ids) != max_tokens)
    ):
      raise self._odd('/v1/completions', choice)
    return out

  async def score(self, model: str, ids: Sequence[int]) -> np.ndarray | None:
    """Log-prob of each id given those before it, at temperature 1; [0] is 0.

    vLLM computes the prompt anew for it, past the prefix cache.

    Returns:
      float32 [n]; None if the request was aborted.

    Raises:
      Down, Restarted, Refused.
    """
    choice, _ = await self._completion(
      {
        'model': model,
        'prompt': list(ids),
        'max_tokens': 1,
        'temperature': 0.0,
        'prompt_logprobs': 0,
      }
    )
    if choice.get('finish_reason') == 'abort':
      return None
    with self._reading('/v1/completions', choice):
      first, *rest = choice['prompt_logprobs']
      if first is not None or len(rest) != len(ids) - 1:
        raise ValueError('of another length')
      values = _finite(
        [row[str(i)]['logprob'] for i, row in zip(ids[1:], rest, strict=True)],
        self.url,
      )
      return np.array([0.0, *values], np.float32)

  async def rpc(self, method: str, *args: Any) -> list[Any]:
    """What each worker's `method` gives; that of our extension of vLLM.

    Raises:
      Down, Refused: its message has the worker's error.
    """
    found = await self._call(
      'POST',
      '/collective_rpc',
      {'method': method, 'args': list(args)},
      timeout=self._slow,
    )
    with self._reading('/collective_rpc', found):
      return list(found['results'])

  async def pause(self) -> None:
    """Ends what is under way; what comes later waits in the server."""
    await self._call('POST', '/pause', params={'mode': 'abort'})

  async def resume(self) -> None:
    await self._call('POST', '/resume')

  async def abort(self) -> None:
    """Ends every request, those that wait in a paused server included."""
    await self._call('POST', '/abort_requests', {'request_ids': []})

  async def reset_prefix_cache(self) -> bool:
    """Whether the cache was dropped."""
    found = await self._call('POST', '/reset_prefix_cache')
    return found.get('success') is True

  async def set_version(self, name: str) -> None:
    """What `version` gives until somebody sets another, or a restart."""
    await self._call('POST', '/update_weight_version', {'new_version': name})

  async def version(self) -> str:
    """'default' of a server that was just started."""
    found = await self._call('GET', '/weight_info')
    with self._reading('/weight_info', found):
      return str(found['weight_version'])

  async def sleep(self) -> None:
    """Moves the weights to host memory and drops the KV cache."""
    await self._call('POST', '/sleep', params={'level': 1})

  async def wake(self) -> None:
    await self._call('POST', '/wake_up')

  async def is_sleeping(self) -> bool:
    return (await self._call('GET', '/is_sleeping'))['is_sleeping'] is True

  async def detokenize(self, model: str, ids: Sequence[int]) -> str:
    found = await self._call(
      'POST', '/detokenize', {'model': model, 'tokens': list(ids)}
    )
    return str(found['prompt'])

  async def _completion(self, body: Mapping[str, Any]) -> tuple[dict, dict]:
    """(the choice, usage) of /v1/completions."""
    found = await self._call('POST', '/v1/completions', body)
    with self._reading('/v1/completions', found):
      choice, usage = found['choices'][0], found['usage']
      read = usage['prompt_tokens']
    if read != len(body['prompt']):
      raise Refused(
        f'{self.url}/v1/completions read {read} prompt tokens of the '
        f'{len(body["prompt"])} sent; is something between it and us?'
      )
    return choice, usage

  async def _call(
    self,
    method: str,
    path: str,
    body: Any = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
  ) -> Any:
    where, timeout = f'{self.url}{path}', timeout or self._timeout
    try:
      answer = await self._http.request(
        method,
        path,
        json=body,
        params=params,
        timeout=httpx.Timeout(
          timeout, connect=min(timeout, _CONNECT), pool=None
        ),
      )
    except httpx.TimeoutException as e:
      raise Down(
        f'{where}: no answer in {timeout:g} s ({type(e).__name__}; '
        'config.engine.timeout, for weights config.engine.start_seconds)'
      ) from e
    except httpx.TransportError as e:
      raise Down(f'{where}: {type(e).__name__}: {e or "no text"}') from e
    status = answer.status_code
    if status == 404:
      self._not_found(where, path, answer)
    if answer.is_error:
      # A request that an engine takes with it as it dies ends with 500.
      down = status in _BUSY or status == 500 and path == '/v1/completions'
      kind = Down if down else Refused
      raise kind(f'{where}: status {status}: {_message(answer)}')
    if not answer.content:
      return {}
    with self._reading(path, answer.text):
      return answer.json()

  def _not_found(self, where: str, path: str, answer: httpx.Response) -> None:
    if path in ('/v1/completions', '/detokenize'):
      raise Restarted(f'{where}: {_message(answer)}')
    lacks = 'no routes that change its weights (VLLM_SERVER_DEV_MODE=1)'
    if path == '/v1/models':
      lacks = 'no list of models: it is no vLLM server'
    raise Refused(f'{where}: status 404: the server has {lacks}; {_START}')

  @contextlib.contextmanager
  def _reading(self, path: str, found: Any) -> Iterator[None]:
    """Raises Refused for an answer of another form than vLLM's."""
    try:
      yield
    except (LookupError, TypeError, ValueError) as e:
      raise self._odd(path, found) from e

  def _odd(self, path: str, found: Any) -> Refused:
    return Refused(
      f'{self.url}{path}: an answer that makes no sense: {str(found)[:300]}'
    )


def _finite(logps: Sequence[float | None], url: str) -> list[float]:
  """The same; JSON has no NaN, and null may stand for it."""
  out = [math.nan if x is None else float(x) for x in logps]
  if not all(map(math.isfinite, out)):
    raise Refused(
      f'{url}: gives a log-prob that is not finite; look for NaN in the '
      'weights, or for an overflow of its dtype (--dtype)'
    )
  return out


def _cached(usage: Mapping[str, Any], url: str) -> int:
  details = usage.get('prompt_tokens_details')
  if details is None:
    raise Refused(
      f'{url}: does not say how many prompt tokens it had cached '
      f'(--enable-prompt-tokens-details); {_START}'
    )
  return int(details['cached_tokens'] or 0)


def _message(answer: httpx.Response) -> str:
  """What an error answer says, in vLLM's or FastAPI's form."""
  try:
    found = answer.json()
    found = found.get('error', found)
    found = (
      found['message']
      if isinstance(found, dict) and ('message' in found)
      else found
    )
    return str(found)[:2000]
  except (ValueError, AttributeError):
    return answer.text[:2000]
