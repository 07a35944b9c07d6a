"""Seconds and memory from an update to a vLLM server that serves it, verified.

  python -m experiments.benchmarks.sync --out=sync.json

A real vLLM server on this machine's CPU (`make sidecar`), started on random
weights. Each repetition changes every parameter, then: publish, pause, load,
drop the prefix cache, set the version, compare the checksum of every tensor
that computes with the published one, resume, and one token generated. Engine
and trainer hold --dtype. The server computes with the matrices as they were
loaded, as it does on a GPU; --packed packs them, which is vLLM's default on a
CPU and makes their checksums slow. It uses all cores, of which vLLM would leave
one to others. Memory is what the process (trainer; vLLM's
worker) held at most during the sync beyond what it held before it, without the
published files, which lie in /dev/shm if it has room.

With --rank, adapters of that rank (config.model.lora) are also synced alone,
to a server of their own that holds the base:

  python -m experiments.benchmarks.sync --cases=28m --rank=16 --out=...

With --delta, a server of bfloat16 follows a trainer of float32 by what one step
of AdamW changed (engine.sync='delta'), in turns with whole syncs. The step has
lr 1e-6, random gradients and a new state: as the first of a run, it moves every
parameter by lr, which is the most.

  python -m experiments.benchmarks.sync --cases=500m --delta --out=...

Bars: at 500M parameters a sync takes at most 8 seconds, and the trainer needs
at most a fifth of a copy of the weights beside them; every checksum of every
sync agrees; adapters take at most a fifth of the bytes and of the time. What
changed takes at most a tenth of the bytes, and at 500M half of the 5.7 seconds
that a whole sync of float32 took on 2026-11-23.
"""

import contextlib
import functools
import operator
import os
import pathlib
import statistics
import tempfile
import time

from absl import flags
import httpx
import jax
import jax.numpy as jnp
import optax
import psutil

from experiments import common
from experiments.benchmarks import harness, memory, models
from searchrl_jax.engines.vllm import client, launcher
from searchrl_jax.engines.weights import checksum, publication, published, sync
from searchrl_jax.models import decoder, families, lora
from searchrl_jax.worlds import microworld

BAR, SECONDS = 0.2, 8.0  # copies of the weights; of a sync, at 500M
PLUGIN = 'experiments.benchmarks.unpacked:Worker'
ADAPTER_BAR = 0.2  # of the bytes, and of the seconds, of every parameter
DELTA_BAR, DELTA_SECONDS = 0.1, 0.5  # of the bytes, and of the seconds, of all
FULL, ADAPTER, DELTA = 'publish', 'publish_adapter', 'publish_delta'


class Memory:
  """Resident memory of a process during a sync, in bytes."""

  def __init__(self, pid: int | str):
    self._pid = pid

  def start(self) -> None:
    memory.restart_peak(self._pid)
    self._before = memory.of('VmRSS', self._pid)

  def row(self, name: str) -> dict[str, int]:
    peak = memory.of('VmHWM', self._pid)
    return {
      f'{name}_extra_bytes': peak - self._before,
      f'{name}_peak_bytes': peak,
    }


@jax.jit
def step(params, seed):
  del seed
  return jax.tree.map(lambda x: x * jnp.asarray(1.001, x.dtype), params)


@functools.partial(jax.jit, donate_argnums=0)
def adamw_step(params, seed):
  """The first step of AdamW, with random gradients."""
  optimizer = optax.adamw(1e-6)
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(seed, impl='unsafe_rbg'), len(leaves))
  grads = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves)]
  grads = jax.tree.unflatten(tree, grads)
  updates, _ = optimizer.update(grads, optimizer.init(params), params)
  return optax.apply_updates(params, updates)


class Server:
  def __init__(self, process):
    # No connection is used twice: the server closes those idle for 5 s.
    self._http = httpx.Client(
      base_url=process.url,
      timeout=600,
      trust_env=False,
      limits=httpx.Limits(max_keepalive_connections=0),
    )
    tree = psutil.Process(process.server_pid).children(recursive=True)
    worker = max(tree, key=lambda p: p.memory_info().rss)
    self.memory = Memory(worker.pid)

  def post(self, path: str, body=None, **query):
    done = self._http.post(path, json=body, params=query)
    if done.status_code != 200:
      raise SystemExit(f'{path}: {done.status_code} {done.text}')
    return done

  def rpc(self, method: str, *args):
    body = {'method': method, 'args': args}
    return self.post('/collective_rpc', body).json()['results']


def once(publisher, server: Server, params, version: int, how: str) -> dict:
  """One sync; its figures. how: a method of the publisher, for the params."""
  own = Memory('self')
  for process in (own, server.memory):
    process.start()
  seconds, last = {}, time.perf_counter()

  def lap(name):
    nonlocal last
    now = time.perf_counter()
    seconds[f'{name}_s'], last = now - last, now

  done = getattr(publisher, how)(params, version)
  delta = getattr(done, 'delta', None)
  if how == DELTA and not delta:
    raise SystemExit('everything was published in place of what changed')
  lap('publish')
  server.post('/pause', mode='abort')
  lap('pause')
  if how == ADAPTER:
    body = {'lora_name': f'v{version}', 'lora_path': str(done.path)}
    server.post('/v1/load_lora_adapter', body)
  else:
    paths = [done.path, *([delta.path] if delta else [])]
    server.rpc('searchrl_load', *map(str, paths))
  lap('load')
  if not server.post('/reset_prefix_cache').json()['success']:
    raise SystemExit('the server did not drop its prefix cache')
  server.post('/update_weight_version', {'new_version': str(version)})
  lap('reset')
  ask = ('searchrl_checksums',)
  if how == ADAPTER:
    ask = 'searchrl_adapter_checksums', done.shapes
  sync.compare(done.checksums, checksum.combine(server.rpc(*ask)))
  lap('checksums')
  server.post('/resume')
  model = f'v{version}' if how == ADAPTER else 'policy'
  server.post(
    '/v1/completions', dict(model=model, prompt=[5, 6, 7], max_tokens=1)
  )
  lap('resume')
  publisher.prune(version)
  return {
    'total_s': sum(seconds.values()),
    **seconds,
    'bytes': delta.bytes if delta else done.bytes,
    'tensors': len(done.checksums),
    **own.row('trainer'),
    **server.memory.row('server'),
  }


def syncs(case: str, folder: pathlib.Path, rank: int) -> list[dict]:
  """Every repetition of a case; with a rank, of adapters alone."""
  targets, dtype = tuple(decoder.PROJECTIONS), _DTYPE.value
  held, change, ways = dtype, step, [ADAPTER if rank else FULL]
  if _DELTA.value:
    held, change, ways = 'float32', adamw_step, [FULL, DELTA]
    dtype = 'bfloat16'
  adapters = decoder.Lora(rank, rank, targets, dtype) if rank else None
  cfg = models.config(case, dtype=dtype, lora=adapters)
  fields = {k: getattr(cfg, k) for k in families.FIELDS}
  tok = microworld.tokenizer(folder / 'tokenizer')
  published.write_serving_folder(folder / 'model', fields, tok, dtype)
  publisher = publication.Publisher(
    folder / 'published', cfg, dtype, '/dev/shm'
  )
  params = decoder.init_params(cfg, jax.random.key(0), dtype=jnp.dtype(held))
  rows, version = [], 0
  stack = contextlib.ExitStack()
  stack.callback(publisher.clear)
  sidecar = launcher.start_sidecar(
    folder / 'model',
    log_file=folder / 'vllm.log',
    cpu=True,
    dtype=dtype,
    max_model_len=512,
    max_num_seqs=8,
    kv_cache_gib=0.5,
    plugin=launcher.PLUGIN if _PACKED.value else PLUGIN,
    load_format='dummy',
    **client.lora_flags(adapters),
  )
  with stack, sidecar as process:
    server = Server(process)
    if rank:
      base = publisher.publish(params, 0)
      server.rpc('searchrl_load', str(base.path))
      params = jax.tree.map(
        lambda x: x + jnp.float32(0.01), lora.init(cfg, jax.random.key(1))
      )
    # The first compiles, and is left out.
    for rep in range(-1, flags.FLAGS.reps):
      for how in ways:
        version += 1
        params = jax.block_until_ready(change(params, version))
        row = once(publisher, server, params, version, how)
        about = {
          'case': case,
          'parameters': cfg.n_params,
          'rep': rep,
          'dtype': dtype,
          'packed': _PACKED.value,
          'adapter_rank': rank,
          'way': how,
        }
        rows += [about | row] * (rep >= 0)
  return rows


def measure(case: str) -> list[dict]:
  os.environ.setdefault('VLLM_CPU_OMP_THREADS_BIND', 'nobind')
  rows = []
  for rank in dict.fromkeys((0, _RANK.value)):
    with tempfile.TemporaryDirectory() as folder:
      rows += syncs(case, pathlib.Path(folder), rank)
  return rows


def bars(rows) -> list[dict]:
  def median(case: str, way: str, value) -> float:
    of = (r for r in rows if (r['case'], r['way']) == (case, way))
    return statistics.median(map(value, of))

  size, total = map(operator.itemgetter, ('bytes', 'total_s'))
  shares = []
  if _DELTA.value:
    shares = [
      (DELTA, 'delta_bytes', size, DELTA_BAR),
      (DELTA, 'delta_total_s', total, DELTA_SECONDS),
    ]
  elif _RANK.value:
    shares = [
      (ADAPTER, 'adapter_bytes', size, ADAPTER_BAR),
      (ADAPTER, 'adapter_total_s', total, ADAPTER_BAR),
    ]
  cases, out = flags.FLAGS.cases, []
  for case in cases:
    for way, name, value, most in shares:
      share = median(case, way, value) / median(case, FULL, value)
      out.append(common.bar(f'sync_{case}_{name}', share, most, at_most=True))
  if '500m' in cases and not _DELTA.value:
    copies = median('500m', FULL, lambda r: r['trainer_extra_bytes'] / size(r))
    seconds = median('500m', FULL, total)
    out += [
      common.bar('sync_500m_total_s', seconds, SECONDS, at_most=True),
      common.bar('sync_500m_trainer_copies', copies, BAR, at_most=True),
    ]
  # `sync.compare` ends the run at the first that differs.
  two = _DELTA.value or _RANK.value > 0
  planned = flags.FLAGS.reps * len(cases) * (1 + two)
  return [*out, common.bar('sync_verified', len(rows), planned)]


if __name__ == '__main__':
  _PACKED = flags.DEFINE_bool('packed', False, 'vLLM packs matrices.')
  _RANK = flags.DEFINE_integer('rank', 0, 'Of adapters; 0 = none are synced.')
  _DELTA = flags.DEFINE_bool('delta', False, 'What changed, in bfloat16.')
  _DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of the engine.'
  )
  flags.register_multi_flags_validator(
    ['rank', 'delta'],
    lambda x: not (x['rank'] and x['delta']),
    'adapters are published alone: --rank or --delta',
  )
  harness.run('sync', measure, bars, cases=models.SIZES, reps=5)
