"""Full-size programs through compilers for GPUs and TPUs (make test-aot)."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.aot


def report(topology, config, *fields):
  """What the gate prints, and the lines of its checks."""
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'searchrl_jax.doctor',
      f'--topology={topology}',
      f'--config={config}',
      '--config.batch.lengths=(4608,)',
      *fields,
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  return done.stdout, done.stdout.partition('\nChecks\n')[2].splitlines()


@pytest.mark.parametrize(
  'topology, machine, slots',
  [('h200:1x8', 'h200x8', 128), ('h100:4x8', 'h100x8x4', 64)],
)
def test_the_programs_of_3b_hold(topology, machine, slots):
  config = f'configs/search_r1.py:model=qwen2.5-3b,machine={machine}'
  text, verdicts = report(topology, config)
  assert sum(' holds ' in line for line in verdicts) >= 12
  assert not [line for line in verdicts if ' MISSED ' in line]
  assert any('memory' in line and 'GiB' in line for line in verdicts)
  # A device holds the slots of its own process, of eight devices.
  assert f'buffer bf16[{slots},2,5120,128]' in text
  assert '\nsearch: arguments 3.9' in text  # of 30 GiB on eight devices


# Kernels for GPUs of two families: the shared memory differs.
HEAD = """
import itertools, sys
from searchrl_jax.aot import topology
topology.prepare()
import jax
from jax import numpy as jnp
from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import live
from searchrl_jax.models import grouped

if sys.argv[1] == 'ampere':
  for old, new in (
    ('optin: 232448', 'optin: 101376'),
    ('major: 9 feature_extension: ACCELERATED_FEATURES', 'major: 8 minor: 6'),
  ):
    assert old in topology._HOPPER
    topology._HOPPER = topology._HOPPER.replace(old, new)
live.compiling_for_hopper()
(device,) = topology.parse('h200:1x1').devices()
where = jax.sharding.SingleDeviceSharding(device)
shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=where)
dtypes = jnp.float32, jnp.bfloat16, jnp.float16
"""
LIVE = """
for dtype, H, G in itertools.product(dtypes, (64, 128, 256), (3, 16)):
  v = shape(dtype, 2, 2, 640, H)
  k = v if G == 3 else shape(dtype, 2, 2, H, 640)
  with sharding.compiling_for('gpu'):
    assert live.fits(shape(dtype, 2, 2, G, 1, H), v)
  f = lambda *x: live.attend(*x, window=9 * G, time=2 if G == 3 else 3)
  for precision in ('default', 'highest'):
    with jax.default_matmul_precision(precision):
      jax.jit(f).lower(
        shape(dtype, 2, 2, G, H), k, v, shape(jnp.int32, 2)
      ).compile()
print('compiled')
"""
# Products of rows and their gradients.
GROUPED = """
for dtype, tile, (I, O) in itertools.product(
  dtypes, (16, 32, 64, 128), ((2048, 768), (16, 96))
):
  how = grouped.How(tile)
  f = lambda x, w, n: jnp.sum(grouped.product(how, x, w, n).astype(jnp.float32))
  w = shape(dtype, 4, I, O)
  with sharding.compiling_for('gpu'):
    assert grouped.fits(dtype, w)
    jax.jit(jax.grad(f, (0, 1))).lower(
      shape(dtype, 1024, I), w, shape(jnp.int32, 4)
    ).compile()
print('compiled')
"""


# Caches of TPUs, for models of the table of machines and others.
TPU = """
import sys
from searchrl_jax.aot import topology
topology.prepare()
import jax
from jax import numpy as jnp
from searchrl_jax.aot import costs
from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import caches, decode, ragged
from searchrl_jax.models import decoder

found = topology.parse(sys.argv[1])
ragged.compiling_for(found.chip.device_kind)
devices = found.devices()
where = jax.sharding.SingleDeviceSharding(devices[0])
shape = lambda *sizes, dtype='bfloat16': jax.ShapeDtypeStruct(
  sizes, dtype, sharding=where)

def model(N, K, H):
  return decoder.DecoderConfig(
    vocab_size=512, d_model=512, n_layers=2, n_heads=N, n_kv_heads=K,
    head_dim=H, d_ff=512, family='qwen2', dtype='bfloat16')
"""
HEADS = """
for N, K, H in (
  (16, 2, 128), (28, 4, 128), (7, 1, 128), (12, 12, 128), (32, 32, 128),
  (4, 1, 256), (8, 4, 256), (64, 8, 128), (12, 1, 64), (15, 3, 128),
):
  cfg = model(N, K, H)
  with sharding.compiling_for('tpu'):
    good = ragged.fits(cfg)
    assert good == ((K, H) not in ((12, 128), (4, 256), (1, 64), (3, 128)))
    cases = (1, 0), (1, 500), (512, 0), (200, 60)
    for tokens, window in cases if good else ():
      def f(q, new, cache, slots, at):
        at = at[:, None] + jnp.arange(tokens)
        cache = caches.write(cfg, cache, slots, at, new, None)
        slots = None if tokens == 1 else slots
        return caches.attend(cfg, q, cache, at, window, None, slots), cache
      R = 16 if tokens == 1 else 4
      rows = shape(R, dtype='int32')
      new, q = [shape(R, tokens, K, H)] * 2, shape(R, tokens, N, H)
      cache = (shape(16, 4608, 2 * K, H),)
      done = jax.jit(f, donate_argnums=2).lower(q, new, cache, rows, rows)
      # The cache is not copied: tokens are written in their places.
      size = done.compile().memory_analysis().temp_size_in_bytes
      assert size < costs.nbytes(cache) / 4, (N, K, H, tokens, size)
print('compiled')
"""
# `tensor` divides the first model's kv heads, not the second's.
PROGRAMS = """
for N, K in ((16, 4), (8, 1)):
  cfg = model(N, K, 128)
  with sharding.compiling_for('tpu', devices):
    mesh = sharding.make_mesh(2, 1, 2, devices[:4])
    programs = decode.programs(cfg, decode.Shape(32, 4608, 8, 16, 2), mesh)
    cache = caches.abstract(cfg, 32, 4608, mesh)
    rows = jnp.zeros((4, 512), jnp.int32), *[jnp.zeros(4, jnp.int32)] * 4
    for program, *given in (
      (programs.decode, decode.idle_state(32)), (programs.extend, *rows)
    ):
      done = program.trace(decode.abstract(cfg, mesh), cache, *given).lower()
      size = done.compile().memory_analysis().temp_size_in_bytes
      held = costs.nbytes(cache[0])
      assert size < held, (K, size, held)
print('compiled')
"""


@pytest.mark.parametrize(
  'programs, topology',
  [(HEADS, 'v5p:2x2x1'), (PROGRAMS, 'v5e:2x2')],
  ids=['heads', 'programs'],
)
def test_a_tpu_reads_and_writes_its_caches_in_place(topology, programs):
  command = [sys.executable, '-c', TPU + programs, topology]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.stdout == 'compiled\n', done.stderr[-2000:]


@pytest.mark.parametrize('family', ['hopper', 'ampere'])
@pytest.mark.parametrize('kernels', [LIVE, GROUPED], ids=['live', 'grouped'])
def test_kernels_compile_for_all_that_they_take(kernels, family):
  command = [sys.executable, '-c', HEAD + kernels, family]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.stdout == 'compiled\n', done.stderr[-2000:]


def test_a_token_reads_weights_and_cache_once():
  """Of ten layers of the 7B, beside adapters, which XLA would join with copies
  of the weights. With fewer, logits are too much of what is moved."""
  sizes = dict(
    hidden_size=3584,
    num_hidden_layers=10,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    tie_word_embeddings=False,
  )
  _, verdicts = report(
    'h200:1x1',
    'experiments/gpu/recipe.py',
    *(f'--config.model.arch.{name}={size}' for name, size in sizes.items()),
    '--config.engine.slots=256',
    '--config.model.lora.rank=32',
  )
  (line,) = [line for line in verdicts if 'untruncated token reads' in line]
  assert ' holds ' in line
  assert float(line.rpartition(': ')[2].split()[0]) >= 1
