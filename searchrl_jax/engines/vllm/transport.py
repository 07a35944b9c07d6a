"""The HTTP calls of one vLLM server: one attempt each, typed failures.

client.py decides on retries. The routes are those of vLLM 0.32. Routes that
change the server (pause, collective_rpc, ...) exist only under
VLLM_SERVER_DEV_MODE=1 and have no authentication: servers must bind 127.0.0.1
or a private network.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import math
import time
from typing import Any

import httpx
import numpy as np

from searchrl_jax.engines.core import EngineError, Sampling

# Less than uvicorn's 5 s: otherwise the server may close a connection in use.
_KEEPALIVE = 2.0
_CONNECT = 10.0  # seconds to connect, at most, as part of `timeout`
_BUSY = (429, 502, 503, 504)
_SPARE = 32  # connections for calls that do not sample
_START = 'start it with: python -m searchrl_jax.engines.vllm.launcher'


class Down(EngineError):
  """No answer, or the server cannot serve now: a retry may succeed."""


class Restarted(EngineError):
  """The server no longer knows its model name: it is another process."""


class Refused(EngineError):
  """The server answered with an error that a retry would not change."""


@dataclasses.dataclass(frozen=True)
class Output:
  """The tokens of one request; `end` is vLLM's finish_reason."""

  ids: list[int]
  logps: list[float]
  end: str  # stop, length, abort
  cached: int  # prompt tokens found in the prefix cache


@dataclasses.dataclass(frozen=True)
class Model:
  name: str  # served_model_name, different at each start
  max_len: int


class Deadline:
  """The time left for a call in seconds, which can be paused."""

  def __init__(self, seconds: float):
    self._end = time.monotonic() + seconds

  def left(self) -> float:
    return max(0.0, self._end - time.monotonic())

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    begin = time.monotonic()
    try:
      yield
    finally:
      self._end += time.monotonic() - begin


class Client:
  """The calls of one server, from one event loop.

  Args:
    url: http://host:port.
    timeout: maximum seconds of a call, except `rpc`.
    slow: maximum seconds of `rpc`, which loads models.
    most: completions at the same time; the caller limits them.
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
    """The served model.

    Raises:
      Down; Refused: not a vLLM server.
    """
    answer = await self._call('GET', '/v1/models')
    with self._reading('/v1/models', answer):
      first = answer['data'][0]
      return Model(str(first['id']), int(first['max_model_len']))

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
    """Samples after `ids`. Requests of one salt share prefixes.

    The caller must also search for stop strings: a server sees only the text of
    this request.

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
        self._finite(choice['logprobs']['token_logprobs']),
        str(choice['finish_reason']),
        self._cached(usage),
      )
    if (
      len(out.ids) != len(out.logps)
      or (out.end not in ('stop', 'length', 'abort'))
      or (out.end == 'length' and len(out.ids) != max_tokens)
    ):
      raise self._invalid('/v1/completions', choice)
    return out

  async def score(self, model: str, ids: Sequence[int]) -> np.ndarray | None:
    """Log-prob of each id given those before it, at temperature 1; [0] is 0.

    vLLM computes the whole prompt for it, without the prefix cache.

    Returns:
      float32 [n]; None if the request was aborted.

    Raises:
      Down, Restarted, Refused.
    """
    body = {'model': model, 'prompt': list(ids), 'prompt_logprobs': 0}
    body |= {'max_tokens': 1, 'temperature': 0.0}
    choice, _ = await self._completion(body)
    if choice.get('finish_reason') == 'abort':
      return None
    with self._reading('/v1/completions', choice):
      first, *rest = choice['prompt_logprobs']
      if first is not None or len(rest) != len(ids) - 1:
        raise ValueError('wrong length')
      pairs = zip(ids[1:], rest, strict=True)
      values = self._finite([row[str(i)]['logprob'] for i, row in pairs])
      return np.array([0.0, *values], np.float32)

  async def rpc(self, method: str, *args: Any) -> list[Any]:
    """The results of each worker's `method`, see plugin.py.

    Raises:
      Down, Refused: the message contains the worker's error.
    """
    body = {'method': method, 'args': list(args)}
    answer = await self._call(
      'POST', '/collective_rpc', body, timeout=self._slow
    )
    with self._reading('/collective_rpc', answer):
      return list(answer['results'])

  async def pause(self) -> None:
    """Ends running requests; later ones wait in the server."""
    await self._call('POST', '/pause', params={'mode': 'abort'})

  async def resume(self) -> None:
    await self._call('POST', '/resume')

  async def abort(self) -> None:
    """Ends every request, including those that wait in a paused server."""
    await self._call('POST', '/abort_requests', {'request_ids': []})

  async def reset_prefix_cache(self) -> bool:
    """Whether the cache was dropped."""
    answer = await self._call('POST', '/reset_prefix_cache')
    return answer.get('success') is True

  async def set_version(self, name: str) -> None:
    """Sets the result of `version`, until the next call or a restart."""
    await self._call('POST', '/update_weight_version', {'new_version': name})

  async def version(self) -> str:
    """The name of `set_version`; 'default' after a start."""
    answer = await self._call('GET', '/weight_info')
    with self._reading('/weight_info', answer):
      return str(answer['weight_version'])

  async def sleep(self) -> None:
    """Moves the weights to host memory and drops the KV cache."""
    await self._call('POST', '/sleep', params={'level': 1})

  async def wake(self) -> None:
    await self._call('POST', '/wake_up')

  async def is_sleeping(self) -> bool:
    return (await self._call('GET', '/is_sleeping'))['is_sleeping'] is True

  async def detokenize(self, model: str, ids: Sequence[int]) -> str:
    body = {'model': model, 'tokens': list(ids)}
    return str((await self._call('POST', '/detokenize', body))['prompt'])

  async def _completion(self, body: Mapping[str, Any]) -> tuple[dict, dict]:
    """(the choice, usage) of /v1/completions."""
    answer = await self._call('POST', '/v1/completions', body)
    with self._reading('/v1/completions', answer):
      choice, usage = answer['choices'][0], answer['usage']
      if usage['prompt_tokens'] != len(body['prompt']):
        raise ValueError('another number of prompt tokens than sent')
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
    status, kind, fix = answer.status_code, Refused, ''
    # A request that was running when its engine died gets 500.
    if status in _BUSY or status == 500 and path == '/v1/completions':
      kind = Down
    elif status == 404 and path in ('/v1/completions', '/detokenize'):
      kind = Restarted
    elif status == 404:
      fix = f'; not a vLLM server with VLLM_SERVER_DEV_MODE=1? {_START}'
    if answer.is_error:
      raise kind(f'{where}: status {status}: {_message(answer)}{fix}')
    if not answer.content:
      return {}
    with self._reading(path, answer.text):
      return answer.json()

  @contextlib.contextmanager
  def _reading(self, path: str, answer: Any) -> Iterator[None]:
    """Raises Refused for an answer of another form than vLLM's."""
    try:
      yield
    except (LookupError, TypeError, ValueError) as e:
      raise self._invalid(path, answer, e) from e

  def _invalid(self, path: str, answer: Any, why: Any = '') -> Refused:
    return Refused(
      f'{self.url}{path}: invalid answer of a vLLM server ({why}): '
      f'{str(answer)[:300]}; {_START}'
    )

  def _finite(self, logps: Sequence[float | None]) -> list[float]:
    """Raises Refused unless all are finite; JSON encodes NaN as null."""
    out = [math.nan if x is None else float(x) for x in logps]
    if not all(map(math.isfinite, out)):
      raise Refused(
        f'{self.url}: returned a log-prob that is not finite; check weights '
        'for NaN and the dtype for overflow (--dtype)'
      )
    return out

  def _cached(self, usage: Mapping[str, Any]) -> int:
    if (details := usage.get('prompt_tokens_details')) is None:
      raise Refused(
        f'{self.url}: does not report how many prompt tokens it had cached '
        f'(--enable-prompt-tokens-details); {_START}'
      )
    return int(details['cached_tokens'] or 0)


def _message(answer: httpx.Response) -> str:
  """The message of an error answer, in vLLM's or FastAPI's form."""
  try:
    return str(answer.json()['error']['message'])[:2000]
  except (ValueError, LookupError, TypeError):
    return answer.text[:2000]
