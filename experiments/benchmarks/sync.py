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

With --rank, adapters of that rank (config.models.lora) are also synced alone,
to a server of their own that holds the base:

  python -m experiments.benchmarks.sync --cases=28m --rank=16 --out=...

Bars: at 500M parameters a sync takes at most 8 seconds, and the trainer needs
at most a fifth of a copy of the weights beside them; every checksum of every
sync agrees; adapters take at most a fifth of the bytes and of the time.
"""

import contextlib
import os
import pathlib
import statistics
import tempfile
import time

from absl import app, flags, logging
import httpx
import jax
import jax.numpy as jnp
import psutil

from experiments import common
from searchrl_jax.engines.vllm import client, launcher
from searchrl_jax.engines.weights import checksum, publication, published, sync
from searchrl_jax.models import decoder, families, lora
from searchrl_jax.worlds import microworld

_OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
_LOAD = flags.DEFINE_bool('allow_load', False, 'Run on a busy machine.')
_REPS = flags.DEFINE_integer('reps', 5, 'Repetitions.', lower_bound=1)
_CASES = flags.DEFINE_list('cases', ['1m', '28m', '500m'], 'Which models.')
_PACKED = flags.DEFINE_bool('packed', False, 'vLLM packs matrices.')
_RANK = flags.DEFINE_integer('rank', 0, 'Of adapters; 0 = none are synced.')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'float32', ['float32', 'bfloat16'], 'Of the engine.'
)

BAR, SECONDS = 0.2, 8.0  # copies of the weights; of a sync, at 500M
PLUGIN = 'experiments.benchmarks.unpacked:Worker'
ADAPTER_BAR = 0.2  # of the bytes, and of the seconds, of every parameter
CASES = {
  '1m': dict(
    vocab_size=2048,
    d_model=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    d_ff=416,
  ),
  '28m': dict(
    vocab_size=2048,
    d_model=512,
    n_layers=8,
    n_heads=8,
    n_kv_heads=2,
    head_dim=64,
    d_ff=1792,
  ),
  '500m': dict(  # Qwen2.5-0.5B
    vocab_size=151936,
    d_model=896,
    n_layers=24,
    n_heads=14,
    n_kv_heads=2,
    head_dim=64,
    d_ff=4864,
  ),
}


class Memory:
  """Peak and present resident memory of a process, in bytes (Linux)."""

  def __init__(self, pid: int):
    self._folder = pathlib.Path(f'/proc/{pid}')

  def start(self) -> None:
    (self._folder / 'clear_refs').write_text('5')  # the peak starts again
    self._before = self._read('VmRSS')

  def extra(self) -> int:
    return self.peak() - self._before

  def peak(self) -> int:
    return self._read('VmHWM')

  def _read(self, field: str) -> int:
    for line in (self._folder / 'status').read_text().splitlines():
      if line.startswith(f'{field}:'):
        return int(line.split()[1]) << 10
    raise SystemExit(f'{self._folder}/status has no {field}')


@jax.jit
def step(params):
  return jax.tree.map(lambda x: x * jnp.asarray(1.001, x.dtype), params)


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
    is_json = 'json' in done.headers.get('content-type', '')
    return done.json() if is_json else {}

  def rpc(self, method: str, *args):
    body = {'method': method, 'args': args}
    return self.post('/collective_rpc', body)['results']


def once(publisher, server: Server, params, version: int, rank: int) -> dict:
  """One sync; its figures. params: with a rank, of the adapters."""
  own = Memory('self')
  for memory in (own, server.memory):
    memory.start()
  seconds, last = {}, time.perf_counter()

  def lap(name):
    nonlocal last
    now = time.perf_counter()
    seconds[f'{name}_s'], last = now - last, now

  publish = publisher.publish_adapter if rank else publisher.publish
  done = publish(params, version)
  lap('publish')
  server.post('/pause', mode='abort')
  lap('pause')
  if rank:
    body = {'lora_name': f'v{version}', 'lora_path': str(done.path)}
    server.post('/v1/load_lora_adapter', body)
  else:
    server.rpc('searchrl_load', str(done.path))
  lap('load')
  if not server.post('/reset_prefix_cache')['success']:
    raise SystemExit('the server did not drop its prefix cache')
  server.post('/update_weight_version', {'new_version': str(version)})
  lap('reset')
  how = ('searchrl_checksums',)
  if rank:
    how = 'searchrl_adapter_checksums', done.shapes
  sync.compare(done.manifest, checksum.combine(server.rpc(*how)))
  lap('checksums')
  server.post('/resume')
  model = f'v{version}' if rank else 'policy'
  server.post(
    '/v1/completions', dict(model=model, prompt=[5, 6, 7], max_tokens=1)
  )
  lap('resume')
  publisher.prune(version)
  return {
    'total_s': sum(seconds.values()),
    **seconds,
    'bytes': done.bytes,
    'tensors': len(done.manifest),
    'trainer_extra_bytes': own.extra(),
    'trainer_peak_bytes': own.peak(),
    'server_extra_bytes': server.memory.extra(),
    'server_peak_bytes': server.memory.peak(),
  }


def run(case: str, folder: pathlib.Path, rank: int = 0) -> list[dict]:
  """Every repetition of a case; with a rank, of adapters alone."""
  targets = tuple(decoder.PROJECTIONS)
  adapters = decoder.Lora(rank, rank, targets, _DTYPE.value) if rank else None
  cfg = decoder.DecoderConfig(
    **CASES[case], family='qwen2', dtype=_DTYPE.value, lora=adapters
  )
  fields = {k: getattr(cfg, k) for k in families.FIELDS}
  published.write_serving_folder(
    folder / 'model',
    fields,
    microworld.tokenizer(folder / 'tokenizer'),
    _DTYPE.value,
  )
  publisher = publication.Publisher(
    folder / 'published', cfg, _DTYPE.value, '/dev/shm'
  )
  params = decoder.init_params(
    cfg, jax.random.key(0), dtype=jnp.dtype(_DTYPE.value)
  )
  rows = []
  stack = contextlib.ExitStack()
  stack.callback(publisher.clear)
  sidecar = launcher.start_sidecar(
    folder / 'model',
    log_file=folder / 'vllm.log',
    cpu=True,
    dtype=_DTYPE.value,
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
    for rep in range(-1, _REPS.value):  # the first compiles, and is left out
      params = jax.block_until_ready(step(params))
      row = once(publisher, server, params, rep + 1, rank)
      if rep >= 0:
        rows.append(
          {
            'case': case,
            'parameters': cfg.n_params,
            'rep': rep,
            'dtype': _DTYPE.value,
            'packed': _PACKED.value,
            'adapter_rank': rank,
            **row,
          }
        )
  return rows


def main(argv):
  del argv
  logging.set_verbosity(logging.WARNING)
  common.require_idle(allow=_LOAD.value)
  os.environ.setdefault('VLLM_CPU_OMP_THREADS_BIND', 'nobind')
  environment = common.environment()
  rows, bars = [], []
  for case in _CASES.value:
    found = {}
    for rank in dict.fromkeys((0, _RANK.value)):
      with tempfile.TemporaryDirectory() as folder:
        found[rank] = run(case, pathlib.Path(folder), rank)
      rows += found[rank]
      total = common.spread([r['total_s'] for r in found[rank]])
      what = f'{case}, adapters of rank {rank}' if rank else case
      print(f'{what}: {total} s from an update to a token', flush=True)
    own = found[0]
    for name in ('bytes', 'total_s') if _RANK.value else ():
      part, whole = (
        statistics.median(r[name] for r in found[rank])
        for rank in (_RANK.value, 0)
      )
      label = f'sync_{case}_adapter_{name}'
      share = part / whole
      bars.append(common.bar(label, share, ADAPTER_BAR, at_most=True))
    if case == '500m':
      seconds = statistics.median(r['total_s'] for r in own)
      bars.append(
        common.bar('sync_500m_total_s', seconds, SECONDS, at_most=True)
      )
      copies = statistics.median(
        r['trainer_extra_bytes'] / r['bytes'] for r in own
      )
      bars.append(
        common.bar('sync_500m_trainer_copies', copies, BAR, at_most=True)
      )
  count = len(_CASES.value) * (1 + (_RANK.value > 0))
  # `sync.compare` ends the run at the first that differs.
  bars.append(common.bar('sync_verified', len(rows), _REPS.value * count))
  common.report(_OUT.value, 'sync', rows, bars, environment)


if __name__ == '__main__':
  app.run(main)
