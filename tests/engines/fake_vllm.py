"""A server that answers as vLLM 0.32 does, with a toy for a model.

What the toy says depends on the version of the weights that were loaded, so
that a token shows which version wrote it (`toy_logps`). A real server is in
tests/sidecar.
"""

import asyncio
import hashlib
import pathlib
import threading
import time

import fastapi
from fastapi.responses import JSONResponse
from ml_collections import ConfigDict
import numpy as np
import safetensors.numpy
import uvicorn

from searchrl_jax.engines.core import WeightsUpdate
from searchrl_jax.engines.vllm.client import VllmEngine
from searchrl_jax.engines.weights import checksum, delta, published
from searchrl_jax.models import families, hf_tensors, lora
from tests.engines.common import CFG, Letters, make_params

VOCAB = 90
BLOCK = 4  # tokens of a cached block
DUMMY = -1  # the version of a server that was just started


def toy_logps(version: int, ids) -> np.ndarray:
  """Log-probs [VOCAB] of the token after `ids`."""
  name = repr((version, list(ids)[-3:], len(ids))).encode()
  rng = np.random.default_rng(
    int.from_bytes(hashlib.blake2b(name, digest_size=8).digest())
  )
  x = rng.normal(size=VOCAB) * 2
  return x - np.log(np.exp(x).sum())


class FakeVllm:
  """One server, in a thread. Fields may be changed while it runs.

  faults: what happens to the next completions, one each: an HTTP status, or
    'hang'. sums: {tensor: [low, high]} in place of what was published. reads:
    it computes its checksums of the files that it loads, and `served` has those
    of each completion.
  """

  def __init__(self):
    self.name, self.max_len, self.delay = 'searchrl-0', 65, 0.0
    self.queues_when_paused = True  # 0.33: answers 503
    self.late = False  # the next request gets its place after the next pause
    self.stalls_at = 10**9  # tokens after which a request waits to be ended
    self.keeps_cache = False  # whatever it says, and whatever the salt
    self.describes: dict = {}
    self.faults: list = []
    self.load_error = ''
    self.logp_of_all: list = []  # in place of what the toy gives
    self.sums: dict = {}
    self.reads, self.served = False, []
    self.reset_works = True
    self.starts = 0
    self.port = 0
    self.asked: list = []  # bodies of completions
    self.calls: list = []  # names of the others
    self._forget()
    self.start()

  @property
  def url(self):
    return f'http://127.0.0.1:{self.port}'

  def _forget(self):
    self.paused, self.asleep = False, False
    self.loaded, self.held = None, {}  # and its checksums
    self.adapters = {}  # name -> folder
    self.cache, self.running, self.stalled = set(), {}, set()
    self.most_running = 0
    self.weight_version = 'default'
    self.dies_at, self.dead = '', False  # at this call of /_dev

  # The process.

  def start(self):
    """Under a new model name, without our weights, at the same port."""
    self._forget()
    self.name = f'searchrl-{self.starts}'
    self.starts += 1
    config = uvicorn.Config(
      self._app(),
      host='127.0.0.1',
      port=self.port,
      log_level='critical',
      timeout_graceful_shutdown=0,
    )
    self._server = uvicorn.Server(config)
    self._thread = threading.Thread(target=self._server.run, daemon=True)
    self._thread.start()
    while not self._server.started:
      time.sleep(0.005)
    self.port = self._server.servers[0].sockets[0].getsockname()[1]

  def kill(self):
    self._server.force_exit = self._server.should_exit = True
    self._thread.join()

  # The routes.

  def _app(self):
    app = fastapi.FastAPI()

    @app.get('/v1/models')
    async def models():
      model = {'id': self.name, 'max_model_len': self.max_len}
      return {'data': [{k: v for k, v in model.items() if v is not None}]}

    @app.get('/health')
    async def health():
      return fastapi.Response(status_code=503 if self.dead else 200)

    @app.post('/v1/completions')
    async def completions(request: fastapi.Request):
      return await self._complete(await request.json())

    @app.post('/v1/{action}_lora_adapter')
    async def adapter(action: str, request: fastapi.Request):
      body = await request.json()
      self.calls.append(f'{action}_lora_adapter')
      if action == 'unload':
        del self.adapters[body['lora_name']]
      else:
        self.adapters[body['lora_name']] = pathlib.Path(body['lora_path'])
      return fastapi.Response('Success')  # text, as vLLM answers

    @app.api_route('/{route}', methods=['GET', 'POST'])
    async def other(route: str, request: fastapi.Request):
      body = await request.body()
      return self._dev(route, await request.json() if body else {})

    return app

  def _dev(self, route, body):
    name = body.get('method', route)
    self.calls.append(name)
    self.dead = self.dead or name == self.dies_at
    if self.dead:
      return JSONResponse({'error': {'message': 'engine dead'}}, 500)
    if route in ('pause', 'abort_requests'):
      self.paused = self.paused or route == 'pause'
      self.running = dict.fromkeys(self.running, True)
    elif route == 'resume':
      self.paused = False
    elif route == 'sleep':
      self.asleep = True
    elif route == 'wake_up':
      self.asleep = False
    elif route == 'is_sleeping':
      return {'is_sleeping': self.asleep}
    elif route == 'reset_prefix_cache':
      if not self.keeps_cache:
        self.cache.clear()
      return {'success': self.reset_works}
    elif route == 'collective_rpc':
      return self._rpc(body['method'], body['args'])
    elif route == 'update_weight_version':
      self.weight_version = body['new_version']
    elif route == 'weight_info':
      return {'weight_version': self.weight_version}
    else:
      return JSONResponse({'detail': 'Not Found'}, 404)
    return {}

  def _rpc(self, method, args):
    if method == 'searchrl_describe':
      return {'results': [self.describes]}
    if method == 'searchrl_load':
      if not all(self.running.values()):  # but those that were aborted
        raise AssertionError('loaded under running requests')
      if self.load_error:
        return JSONResponse({'error': {'message': self.load_error}}, 500)
      try:
        self._load(*map(pathlib.Path, args))
      except published.PublishedError as e:
        return JSONResponse({'error': {'message': str(e)}}, 500)
      return {'results': [{'version': self.loaded.version}]}
    found = {}
    if method == 'searchrl_adapter_checksums':
      names = self._adapter_sums(*args)
    else:
      names = {**self.held}
      names.setdefault('head', names['embed'])
    for name, text in names.items():
      dtype, _, rest = text.partition('[')
      dims, _, digits = rest.partition(']:')
      sums = [int(digits[:8], 16), int(digits[8:], 16)]
      shape = [int(d) for d in dims.split(',')]
      found[name] = [dtype, shape, *self.sums.get(name, sums)]
    # Two workers, each with a part of every sum.
    half = {k: [d, s, a - 5, b + 7] for k, (d, s, a, b) in found.items()}
    rest = {k: [d, s, 5, -7] for k, (d, s, _, _) in found.items()}
    return {'results': [half, rest]}

  def _load(self, path, *changes):
    """As the plugin does."""
    if changes:
      self.loaded, *_ = delta.bring(path, *changes)
    else:
      self.loaded = published.open_published(path)
    self.held = self.loaded.checksums
    if self.reads:
      parts = {}
      for name, tensor in self.loaded.table.items():
        ours = tensor.to_ours(self.loaded.read(name))
        if tensor.layer is None:
          parts[tensor.path] = ours
        else:
          parts.setdefault(tensor.path, []).append(ours)
      self.held = checksum.checksums(parts)

  def _adapter_sums(self, shapes):
    """Of the files of the one adapter that is loaded, in our layout."""
    [folder] = self.adapters.values()
    stored = safetensors.numpy.load_file(folder / lora.WEIGHTS)
    parts = {}
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    for name, tensor in hf_tensors.table(shapes, families.fields(CFG)).items():
      theirs = stored[f'base_model.model.{name}']
      parts.setdefault(tensor.path, []).append(tensor.to_ours(theirs))
    return checksum.checksums(parts)

  # The model.

  @property
  def version(self):
    if self.adapters:
      return int([*self.adapters.values()][-1].name)
    return DUMMY if self.loaded is None else self.loaded.version

  async def _complete(self, body):
    if body['model'] not in (self.name, *self.adapters):
      return JSONResponse(
        {'error': {'message': f'The model `{body["model"]}` does not exist.'}},
        404,
      )
    self.asked.append(body)
    late, self.late = self.late, False
    while late and not self.paused:
      await asyncio.sleep(0.002)
    fault = self.faults.pop(0) if self.faults else None
    if fault == 'hang':
      await asyncio.sleep(60)
    if fault is not None:
      return JSONResponse({'error': {'message': 'planted'}}, fault)
    if self.paused and not self.queues_when_paused:
      return JSONResponse({'error': {'message': 'paused'}}, 503)
    key = object()
    self.running[key] = False
    try:
      while self.paused and not self.running[key]:
        await asyncio.sleep(0.002)
      self.most_running = max(self.most_running, len(self.running))
      return await self._sample(body, key)
    finally:
      self.running.pop(key, None)
      self.stalled.discard(key)

  async def _sample(self, body, key):
    self.served.append(self.held)
    prompt, ids, logps = body['prompt'], [], []
    end, reason, text = 'length', None, ''
    cached = self._cached(body)
    rng = np.random.default_rng(body.get('seed', 0))
    while len(ids) < body['max_tokens']:
      await asyncio.sleep(self.delay)
      while len(ids) >= self.stalls_at and not self.running.get(key, True):
        self.stalled.add(key)
        await asyncio.sleep(0.002)
      if self.running.get(key, True):
        end = 'abort'
        break
      row = toy_logps(self.version, [*prompt, *ids])
      if body['temperature']:
        row = row / body['temperature']
        row -= np.log(np.exp(row).sum())
        token = int((row - np.log(rng.exponential(size=VOCAB))).argmax())
      else:
        token = int(row.argmax())
      ids.append(token)
      logps.append(float(row[token]))
      text += chr(33 + token)
      stops = [s for s in body.get('stop', ()) if s in text]
      if stops or token in body.get('stop_token_ids', ()):
        end, reason = 'stop', stops[0] if stops else token
        break
    choice = dict(
      token_ids=ids,
      finish_reason=end,
      stop_reason=reason,
      logprobs={'token_logprobs': self.logp_of_all * len(ids) or logps},
    )
    if body.get('prompt_logprobs') is not None and end != 'abort':
      choice['prompt_logprobs'] = [None] + [
        {str(i): {'logprob': float(toy_logps(self.version, prompt[:n])[i])}}
        for n, i in enumerate(prompt)
        if n
      ]
    details = {'prompt_tokens_details': {'cached_tokens': cached}}
    return {
      'choices': [choice],
      'usage': {'prompt_tokens': len(prompt), **details},
    }

  def _cached(self, body):
    """Tokens of the prompt whose blocks stand in the cache of this salt."""
    prompt = body['prompt']
    salt = None if self.keeps_cache else body.get('cache_salt')
    ends = range(BLOCK, len(prompt), BLOCK)
    keys = [(salt, tuple(prompt[:n])) for n in ends]
    found = next(
      (i for i, k in enumerate(keys) if k not in self.cache), len(keys)
    )
    self.cache.update(keys)
    return 0 if body.get('prompt_logprobs') is not None else found * BLOCK


# An engine over it.


def config(**changes) -> ConfigDict:
  fields = dict(
    url='',
    venv='',
    device='cpu',
    max_len=64,
    slots=4,
    dtype='float32',
    timeout=5.0,
    deadline=20.0,
    attempts=3,
    gpu_memory=0.5,
    kv_cache_gib=1.0,
    block_size=32,
    sleep=False,
    sync='full',
    memory='',
    record_routes=False,
    start_seconds=10.0,
  )
  return ConfigDict(fields | changes)


def server() -> FakeVllm:
  fake = FakeVllm()
  model = {k: getattr(CFG, k) for k in families.FIELDS}
  fake.describes = {**model, 'tied': False, 'dtype': 'float32'}
  return fake


def make(fakes, folder, cfg=CFG, **changes):
  urls = ','.join(f.url for f in fakes)
  return VllmEngine(
    cfg, None, Letters(), config(url=urls, **changes), None, folder
  )


async def load(engine, version, seed=0):
  """One more sync; the weights are others for each seed."""
  report = await engine.sync(WeightsUpdate(make_params(seed), version))
  await engine.resume()
  return report


def told(start, done):
  """The log-probs that the toys of the versions named would have given."""
  ids, out = list(start), []
  for token, version in zip(done.ids.tolist(), done.versions.tolist()):
    out.append(toy_logps(version, ids)[token])
    ids.append(token)
  return out


def check(start, done):
  """Every token was written by the version that it carries."""
  np.testing.assert_allclose(done.logps, told(start, done), atol=1e-5)
