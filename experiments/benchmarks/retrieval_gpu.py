"""Exact search over a large corpus, against the memory's speed.

    python -m experiments.benchmarks.retrieval_gpu --out=FILE.json
    python -m experiments.benchmarks.retrieval_gpu --passages=20000 --dim=64 \
      --batch=8 --copy_mb=64 --small_encoder     # on CPU, to see that it runs

Passages are random vectors in float16, made on the device: 10 million of 768
numbers are 15.4 GB, of which the index makes a second copy. A search reads
each of them once, so the bytes of the corpus over the seconds of a
search is the bandwidth reached: selection, and scoring the chosen again, are
in the seconds and not in the bytes. The measure beside it is what the device
itself reaches in copying one large array, bytes read and written.

`search` further encodes the queries (12 layers of 768, e5-base's size, random
weights) and brings the answers to the host, and its bandwidth counts the same
bytes. Queries have 3 to 20 words.
"""

from collections.abc import Callable
import functools
import pathlib
import statistics
import tempfile
import time

from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from experiments import common
from experiments.benchmarks import harness
from retrieval.index.dense_jax import DenseJax
from retrieval.index.encoder import Encoder
from tests.golden import encoders as golden

E5_BASE = {
  'vocab_size': 30522,
  'num_hidden_layers': 12,
  'num_attention_heads': 12,
  'intermediate_size': 3072,
  'max_position_embeddings': 512,
}


def write_encoder(
  folder: pathlib.Path, dim: int, small: bool = False
) -> pathlib.Path:
  """Random weights of e5-base's shape, or of two layers; no tokenizer."""
  config = golden.CONFIG | ({} if small else E5_BASE)
  config |= {'hidden_size': dim}
  model = folder / 'e5-generated'
  golden.write_json(model / 'config.json', config)
  safetensors.numpy.save_file(
    golden.tensors(config), model / 'model.safetensors'
  )
  return model


def make_encoder(folder: pathlib.Path, dim: int, small: bool) -> Encoder:
  """An encoder with random weights, and a tokenizer of few words."""
  model = write_encoder(folder, dim, small)
  golden.write_tokenizer(model)
  return Encoder(model)


def make_vectors(count: int, dim: int) -> jax.Array:
  """Random float16 [P, D] on the device, block by block."""
  block = 1 << 16
  keys = jax.random.split(jax.random.key(0), -(-count // block))

  @jax.jit
  def make(keys):
    blocks = jax.lax.map(
      lambda key: jax.random.normal(key, (block, dim), jnp.float16), keys
    )
    return blocks.reshape(-1, dim)[:count]

  return make(keys)


def make_queries(count: int) -> list[str]:
  rng = np.random.default_rng(0)
  words = [w for w in golden.VOCAB if w.isalpha() and len(w) > 1]
  return [' '.join(rng.choice(words, n)) for n in rng.integers(3, 21, count)]


def copier(megabytes: int) -> tuple[Callable[[], jax.Array], int]:
  """Copies an array of 2^20 bytes a megabyte; bytes read and written."""
  source = jnp.zeros(megabytes << 18, jnp.uint32)
  copied = jax.jit(lambda x: x ^ 1)  # a plain copy might not be made
  return lambda: copied(source), 2 * source.nbytes


def seconds_of(call, calls: int) -> float:
  """Of one of `calls` calls given to the device one behind another."""
  start = time.perf_counter()
  for _ in range(calls):
    done = call()  # the last alone: together copies would fill the device
  jax.block_until_ready(done)
  return (time.perf_counter() - start) / calls


def measure() -> list[dict]:
  device = jax.devices()[0]
  copy, moved = copier(_COPY.value)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    encoder = make_encoder(path, _DIM.value, _SMALL.value)
  index = DenseJax(
    make_vectors(_PASSAGES.value, _DIM.value), encoder, precision='float16'
  )
  queries = make_queries(_BATCH.value)
  # As a service would have them: batches of one shape, of this size.
  q = jnp.asarray(encoder.encode_queries(queries))
  c = index._candidates(_K.value)
  calls = {
    'copy': copy,
    'pass': lambda: index._search(q, index._corpus, c),
    'search': lambda: index.search(queries, _K.value)[0],
    'encode': lambda: encoder.encode_queries(queries),
  }
  seconds = harness.turns(
    {
      name: functools.partial(seconds_of, call, _CALLS.value)
      for name, call in calls.items()
    },
    warm=1,
  )
  took = {name: statistics.median(found) for name, found in seconds.items()}
  corpus = 2 * _PASSAGES.value * _DIM.value
  moved = {'copy': moved, 'pass': corpus, 'search': corpus, 'encode': 0}
  return [
    {
      'case': name,
      'ms': 1e3 * took[name],
      'gb_per_s': moved[name] / took[name] / 1e9,
      'queries_per_s': 0 if name == 'copy' else _BATCH.value / took[name],
      'device': device.device_kind,
      'devices': jax.device_count(),
      'passages': _PASSAGES.value,
      'dim': _DIM.value,
      'batch': _BATCH.value,
      'candidates': c,
      'encoder_dtype': encoder.dtype,
      'seconds': seconds[name],
    }
    for name in calls
  ]


def bars(rows) -> list[dict]:
  speed = {row['case']: row['gb_per_s'] for row in rows}
  return [
    common.bar(name, speed[side] / speed['copy'], 0.6) | {'goal': 0.8}
    for name, side in (
      ('search_bandwidth', 'pass'),
      ('search_bandwidth_with_encoder', 'search'),
    )
  ]


if __name__ == '__main__':
  _CALLS = flags.DEFINE_integer('calls', 10, 'Searches of one repetition.', 1)
  _PASSAGES = flags.DEFINE_integer('passages', 10_000_000, 'How many.', 1)
  _DIM = flags.DEFINE_integer('dim', 768, 'Numbers of a vector.', 32)
  _BATCH = flags.DEFINE_integer('batch', 128, 'Queries of a search.', 1)
  _K = flags.DEFINE_integer('k', 3, 'Passages for a query.', 1)
  _COPY = flags.DEFINE_integer('copy_mb', 4096, 'Of the array copied.', 1)
  _SMALL = flags.DEFINE_bool('small_encoder', False, 'Two layers, for a look.')
  harness.run('retrieval_gpu', measure, bars, reps=5)
