"""The search program of dense_jax, compiled for an H200 that is not there.

    make aot
    .venv-aot/bin/python -m experiments.benchmarks.retrieval_aot --out=FILE.json

No device is needed and nothing is executed. What the compiler says: bytes of
arguments and temporaries, the largest buffers that kernels write, and what the
kernel over the corpus uses. What is arithmetic, and marked `estimate`:

  memory_gb   the corpus once, maxima written and read, candidates scored again
  cache_gb    tiles of rows and of queries that the kernel reads, from the L2
  ms          the longest of memory, L2 and tensor cores, at the device's speed
"""
# ruff: noqa: E402

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from absl import flags

from searchrl_jax.aot import topology

_DUMP = tempfile.TemporaryDirectory(prefix='retrieval_aot')
os.environ['XLA_FLAGS'] = f'--xla_dump_to={_DUMP.name}'
topology.prepare()  # before JAX is imported

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from experiments import common
from experiments.benchmarks import harness
from retrieval.index import dense_programs
from retrieval.index.dense_programs import GROUP, Programs
from searchrl_jax.aot import hlo
from searchrl_jax.models import flops

_H200 = topology.parse('h200:1x1')
# Bytes/s of the L2 of an H200. NVIDIA names none: an assumption.
_CACHE = 5.5e12
# Precision, queries of a batch, passages for a query.
_CASES = (
  ('float16', 128, 3),
  ('float16', 512, 3),
  ('float16', 8, 3),
  ('float16', 128, 100),
  ('bfloat16', 128, 3),
  ('int8', 128, 3),
)
_CANDIDATES = {3: 16, 100: 256}  # as DenseJax keeps them; int8: 64


def kernel() -> dict:
  """What ptxas says of the kernel over the corpus that was dumped last."""
  ptxas = next(pathlib.Path(sys.prefix).glob('**/bin/ptxas'), None)
  dump = pathlib.Path(_DUMP.name)
  ptx = [p for p in dump.glob('*.ptx') if '.entry kernel(' in p.read_text()]
  if not ptxas or len(ptx) != 1:
    return {}
  code = ptx[0].read_text()
  said = subprocess.run(
    [ptxas, '-v', '-arch=sm_90a', ptx[0], '-o', os.devnull],
    capture_output=True,
    text=True,
    check=True,
  ).stderr
  (thunks,) = dump.glob('*thunk_sequence.txt')
  shared = re.search(r' kernel grid.*shared_memory: (\d+)', thunks.read_text())
  return {
    'wgmma': code.count('wgmma.mma_async'),
    'registers': int(re.search(r'Used (\d+) registers', said)[1]),
    'spilled_bytes': int(re.search(r'(\d+) bytes spill stores', said)[1]),
    'shared_bytes': int(shared[1]),
  }


def case(mesh: Mesh, precision: str, queries: int, k: int) -> dict:
  P, D = _PASSAGES.value, _DIM.value
  plan = Programs(P, D, mesh, precision)
  c = 64 if precision == 'int8' else _CANDIDATES[k]
  for path in pathlib.Path(_DUMP.name).iterdir():
    path.unlink()
  begun = time.perf_counter()
  compiled = (
    jax.jit(plan.search, static_argnums=2)
    .lower(jax.ShapeDtypeStruct((queries, D), jnp.float32), plan.arrays(), c)
    .compile()
  )
  seconds = time.perf_counter() - begun
  memory = compiled.memory_analysis()
  found = hlo.Program(compiled.as_text()).largest(5)
  scores = 4 * max(queries, 16) * P  # the kernel multiplies 16 at least
  rows = plan.blocks * plan.block
  width = jnp.dtype(precision).itemsize
  corpus, maxima = rows * plan.dim * width, 4 * queries * rows // GROUP
  again = queries * c * GROUP * plan.dim * width
  columns = min(max(queries, 16), dense_programs._TILE_QUERIES)
  tiles = rows // dense_programs._TILE * max(1, queries // columns)
  cache = tiles * plan.dim * (dense_programs._TILE * width + columns * 2)
  read = corpus + 2 * maxima + again
  products = rows * plan.dim * scores // (2 * P)
  ms = {
    'memory': 1e3 * read / _H200.chip.bandwidth,
    'cache': 1e3 * cache / _CACHE,
    'products': 1e3 * products / flops.peak_flops(_H200.chip),
  }
  return {
    'case': f'{precision} {queries} x {k}',
    'candidates': c,
    'passages': P,
    'dim': D,
    'argument_gb': memory.argument_size_in_bytes / 1e9,
    'temp_mb': memory.temp_size_in_bytes / 1e6,
    'largest_mb': found[0][0] / 1e6,
    'all_scores_mb': scores / 1e6,
    'written_of_scores': found[0][0] / scores,
    'memory_gb': read / 1e9,
    'cache_gb': cache / 1e9,
    'estimate_ms': max(ms.values()),
    'bound_by': max(ms, key=ms.get),
    **kernel(),
    'estimates_ms': ms,
    'compile_s': seconds,
    'largest': [f'{shape} {op}' for _, shape, op in found],
  }


def measure() -> list[dict]:
  mesh = Mesh(np.array(_H200.devices()), ('data',))
  return [case(mesh, *which) for which in _CASES]


def bars(rows) -> list[dict]:
  plain = [r for r in rows if not r['case'].startswith('int8')]
  written = max(r['written_of_scores'] for r in rows)
  temporary = max(r['temp_mb'] / 1e3 / r['argument_gb'] for r in plain)
  spilled = max(r.get('spilled_bytes', 0) for r in rows)
  return [
    # Maxima are 1/64 of the scores; for 100 passages a query what is scored
    # again is as much.
    common.bar('largest_buffer_of_scores', written, 1 / 60, at_most=True),
    common.bar('temporaries_of_corpus', temporary, 0.03, at_most=True),
    common.bar('spilled_bytes', spilled, 0, at_most=True),
  ]


if __name__ == '__main__':
  _PASSAGES = flags.DEFINE_integer('passages', 21_015_324, 'How many.', 1)
  _DIM = flags.DEFINE_integer('dim', 768, 'Numbers of a vector.', 32)
  harness.run('retrieval_aot', measure, bars, timed=lambda: False)
