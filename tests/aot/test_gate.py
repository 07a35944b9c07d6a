"""The report on programs that are compiled for a topology."""

import dataclasses
import functools
import importlib.util
import math
import re
import subprocess
import sys

import jax
import pytest

from configs import search_r1
from searchrl_jax.aot import gate, hlo, topology
from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import live
from searchrl_jax.models import parameters
from searchrl_jax.run import build
from tests import tiny
from tests.conftest import ROOT
from tests.engines import common

H200 = topology.parse('h200:1x8')


def program(name, *shapes, collectives=(), targets=(), temporary=0, mesh=None):
  """A `gate.Program` with these buffers, collectives and library kernels."""
  out = object.__new__(gate.Program)
  out.name, out.collectives, out.temporary = name, list(collectives), temporary
  out.arguments, out.flops = 100, 0
  out.sizes = {'data': 1, 'fsdp': 8, 'tensor': 1} | (mesh or {})
  devices = math.prod(out.sizes.values())
  lines = [f'  %b{i} = {s} add(%x, %x)' for i, s in enumerate(shapes)]
  lines += [
    f'  %t{i} = f32[1]{{0}} custom-call(%x), custom_call_target="{t}"'
    for i, t in enumerate(targets)
  ]
  out.hlo = hlo.Program(
    '\n'.join(
      [
        f'HloModule m, num_partitions={devices}',
        'ENTRY %main () -> f32[] {',
        *lines,
        '}',
      ]
    )
  )
  return out


def collective(kind, shape, times=1, loop=True, group=()):
  size = shape.nbytes
  return hlo.Collective(
    kind, (shape,), size, times, loop, '', sent=7 * size, group=tuple(group)
  )


CFG = parameters.model_config(search_r1.get_config('model=qwen2.5-3b'), 1)
ATTENTION = '__cudnn$fmhaSoftmax', '__cudnn$fmhaSoftmaxBackward'
# A bfloat16 copy of the weights in 100 calls, and a gradient of 4 MiB.
GATHER = collective(
  'all-gather', hlo.Shape('bf16', (CFG.n_params // 100,)), times=200
)
SCATTER = collective('reduce-scatter', hlo.Shape('f32', (2**20,)), times=36)


def missed(found):
  return [c.what for c in gate.verify(found, CFG, H200) if not c.good]


def test_the_shapes_of_known_models():
  assert CFG.n_params == 3_085_938_688  # as its model card: 3.09 billion
  config = search_r1.get_config('model=qwen2.5-7b')
  assert parameters.model_config(config, 1).n_params == 7_615_616_512


def test_a_good_update_misses_nothing():
  assert not missed(
    program(
      'accumulate/4608',
      'f32[1,4608,11008]{2,1,0}',
      collectives=(GATHER, SCATTER),
      targets=ATTENTION,
    )
  )


@pytest.mark.parametrize(
  'change, what',
  [
    (dict(shapes=['f32[1,16,4608,4608]{3,2,1,0}']), 'no float32 scores of all'),
    (dict(targets=ATTENTION[:1]), 'attention by fmhaSoftmax and'),
    (
      dict(
        collectives=[
          collective('all-gather', hlo.Shape('f32', (2**20,))),
          SCATTER,
        ]
      ),
      'no float32 gathers',
    ),
    (dict(collectives=[GATHER, GATHER, SCATTER]), 'weights gathered at most'),
    # Reduced nowhere, or once after the loop over layers.
    (dict(collectives=[GATHER]), 'reduce-scattered, not all-reduced'),
    (
      dict(collectives=[collective('all-reduce', SCATTER.shapes[0])]),
      'reduce-scattered, not all-reduced',
    ),
    (
      dict(
        collectives=[collective('reduce-scatter', hlo.Shape('bf16', (2**20,)))]
      ),
      'gradients are reduced in float32',
    ),
  ],
)
def test_what_a_full_size_update_must_not_do(change, what):
  shapes = change.pop('shapes', ())
  good = {'targets': ATTENTION, 'collectives': [SCATTER]}
  found = program('accumulate/4608', *shapes, **good | change)
  (only,) = missed(found)
  assert what in only


def test_hidden_states_are_no_scores():
  """Of 2,048 tokens, where the model's width is 2,048 too."""
  update = dict(collectives=(GATHER, SCATTER), targets=ATTENTION)
  assert not missed(program('accumulate/2048', 'f32[1,2048,2048]', **update))
  scores = program('accumulate/2048', 'f32[16,2048,2048]', **update)
  assert missed(scores) == ['no float32 scores of all pairs']


def test_gradients_are_told_from_other_sums_by_their_devices():
  """2 x 4 x 2 devices: along fsdp, devices 0, 2, 4 and 6 have the same data."""
  mesh = {'data': 2, 'fsdp': 4, 'tensor': 2}
  f32, bf16 = hlo.Shape('f32', (2**20,)), hlo.Shape('bf16', (2**20,))
  scattered = collective('reduce-scatter', f32, group=(0, 2, 4, 6))
  shards = collective('all-reduce', f32, group=(0, 8))
  activations = collective('all-reduce', bf16, group=(0, 1))

  def wrong(*collectives):
    update = dict(collectives=collectives, targets=ATTENTION, mesh=mesh)
    return missed(program('accumulate/4608', **update))

  assert not wrong(scattered, shards, activations)
  for group in ((0, 2, 4, 6), (0, 2, 4, 6, 8, 10, 12, 14), ()):
    whole = collective('all-reduce', f32, group=group)
    assert wrong(scattered, whole) == [
      'gradients are reduce-scattered, not all-reduced'
    ]
  half = collective('all-reduce', bf16, group=(0, 8))
  assert wrong(scattered, half) == ['gradients are reduced in float32']


def test_a_ring_gathers_weights_or_scatters_gradients():
  part = hlo.Shape('bf16', (CFG.n_params // 800,))
  gather = collective('collective-permute', part, times=1600)
  scatter = collective('collective-permute', *SCATTER.shapes, times=400)
  update = dict(targets=ATTENTION)
  ring = program('accumulate/4608', collectives=[gather, scatter], **update)
  assert not missed(ring)
  twice = program('accumulate/4608', collectives=[gather] * 2, **update)
  assert missed(twice) == [
    'weights gathered at most 2.2 times',
    'gradients are reduce-scattered, not all-reduced',
  ]


def test_a_gradient_of_the_embedding_is_no_weight():
  rows = collective(
    'all-gather', hlo.Shape('f32', (32, 4608, 2048)), loop=False
  )
  update = dict(targets=ATTENTION)
  scattered = rows._replace(op='jit(f)/transpose(jvp())/scatter-add')
  for gathered, wrong in ((scattered, 0), (rows, 1)):
    moved = gathered, GATHER, SCATTER
    found = missed(program('accumulate/4608', collectives=moved, **update))
    assert len(found) == wrong


def test_log_probs_of_all_rows_are_no_weights():
  tiles = 32 * 128, 128  # as XLA for TPUs leaves them
  for dims, wrong in (((32, 16384), 0), (tiles, 0), ((2048, 16384), 1)):
    gathered = collective('all-gather', hlo.Shape('f32', dims), loop=False)
    update = dict(mesh={'data': 4}, targets=ATTENTION[:1])
    score = program('score/16384', collectives=[gathered], **update)
    assert len(missed(score)) == wrong
  # The size of these scores, in every layer: a weight.
  weight = collective('all-gather', hlo.Shape('f32', (2048, 256)), times=72)
  update['targets'] = ATTENTION[:1]
  score = program('score/16384', collectives=[weight], **update)
  assert missed(score) == ['no float32 gathers of weights']


def test_each_part_of_the_weights_along_tensor_is_gathered_twice():
  mesh = {'fsdp': 4, 'tensor': 2}
  half = GATHER._replace(times=100)
  for gathers, wrong in (([half], 0), ([half, half], 1)):
    update = dict(collectives=[*gathers, SCATTER], targets=ATTENTION, mesh=mesh)
    assert len(missed(program('accumulate/4608', **update))) == wrong


def test_decoding_gathers_nothing_large():
  small = collective('all-gather', hlo.Shape('s32', (8,)))
  assert not missed(program('decode', collectives=[small]))
  # In parts of the vocabulary, as XLA for TPUs leaves them.
  for dims in ((64, CFG.vocab_size), (2, CFG.vocab_size // 2, 64)):
    logits = collective('all-gather', hlo.Shape('f32', dims))
    assert not missed(program('decode', collectives=[logits]))
  head, part = (CFG.vocab_size, CFG.d_model), (64, CFG.vocab_size)
  shapes = ('bf16', head), ('f32', head), ('bf16', part)
  wrong = [collective('all-gather', hlo.Shape(*shape)) for shape in shapes]
  for gathered in (GATHER, *wrong):
    assert missed(program('decode', collectives=[gathered])) == [
      'no gathers of weights or caches'
    ]


@pytest.mark.parametrize(
  'name, group, speed',
  [
    ('h200:4x8', range(8), 450e9),  # in a node
    ('h200:4x8', range(32), 8 * 50e9),  # all 8 devices of a node send
    ('h200:4x8', (0, 8, 16, 24), 50e9),  # one device of each node
    ('h200:4x8', (), 8 * 50e9),  # all of the 32 of the program
    ('v5e:8x8', range(64), 200e9),
  ],
)
def test_collectives_go_over_links_or_the_network(name, group, speed):
  c = hlo.Collective('x', (), 1, 3, True, '', sent=10**9, group=tuple(group))
  found = program('accumulate/8', collectives=[c], mesh={'data': 4})
  seconds = found.seconds(topology.parse(name))
  assert seconds['links'] == pytest.approx(3e9 / speed)


@pytest.mark.parametrize('donate', [(), (0,)])
def test_results_beside_their_arguments_take_memory(donate):
  f, x = jax.jit(lambda x: x + 1, donate_argnums=donate), jax.numpy.ones(999)
  traced = f.trace(x)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  found = gate.Program('add', traced, traced.lower().compile(), mesh)
  assert found.arguments == x.nbytes
  assert (found.temporary >= x.nbytes) == (not donate)


@pytest.mark.parametrize('name, times', [('decode', 1), ('score/99', 5)])
def test_decoding_counts_one_token_of_its_chunk(name, times):
  w = jax.numpy.ones((64, 64))
  f = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: x @ w, x))
  traced = f.trace(w)
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  found = gate.Program(name, traced, traced.lower().compile(), mesh)
  assert max(n for n, *_ in found.hlo.times.values()) == times


def test_a_token_that_reads_more_than_its_weights_is_missed():
  """Of 4 MiB of weights, beside one row and beside as much."""
  w = jax.numpy.ones((1024, 1024))
  mesh = sharding.make_mesh(devices=jax.devices()[:1])
  for rows, good in ((1, True), (1024, False)):
    x = jax.numpy.ones((rows, 1024))
    f = jax.jit(lambda w, x: jax.lax.fori_loop(0, 5, lambda _, x: x @ w, x))
    traced = f.trace(w, x)
    found = gate.Program('decode', traced, traced.lower().compile(), mesh)
    (check,) = [c for c in gate.verify(found, CFG, H200) if 'token' in c.what]
    assert check.good == good and 'a chunk of 1 reads' in check.found


@pytest.mark.long
@pytest.mark.skipif(jax.device_count() < 4, reason='needs four devices')
@pytest.mark.parametrize('tensor', [1, 2])
def test_what_a_token_need_not_read_of_its_cache(tensor, monkeypatch):
  """Whether or not the kernel is in the program. One layer has a window."""
  inside = functools.partial(live.attend, interpret=True)
  monkeypatch.setattr(live, 'attend', inside)
  engine = common.config(slots=2, max_len=900, chunk=1)
  changes = dict(head_dim=64, window=128, global_every=2)
  cfg = dataclasses.replace(common.CFG, **changes)
  with sharding.compiling_for('gpu'):
    mesh = sharding.make_mesh(2, 1, tensor)
    found = next(gate._sampler(engine, cfg, mesh))
  # Of 1,024 positions, 1 to 400 and the last 128 of them.
  cache = 2 * 2 * 64 * 4 / tensor  # bytes a position, of the slot of a device
  seen = 200.5 + (sum(range(129)) + 272 * 128) / 400
  assert found.idle == pytest.approx((2 * 1024 - seen) * cache)
  contexts = ' with contexts of 200 tokens on average'
  assert gate.describe(found, H200)[0].endswith(f'(memory){contexts}')


@pytest.mark.long
def test_every_program_of_a_run_is_described(monkeypatch):
  monkeypatch.setattr(gate, 'ENCODER', (99, 32, 1, 2, 64, 64, 2, 1e-12, 0))
  monkeypatch.setattr(gate, 'PASSAGES', 5000)
  config = tiny.config()
  config.source.corpus = ''  # a service with an index of its own
  cfg = parameters.model_config(config, 64)
  found = [*gate.programs(config, cfg, build.mesh(config, jax.devices()[:1]))]
  names = {p.name.partition('/')[0] for p in found}
  assert names >= {
    'zeros',
    'accumulate',
    'apply',
    'decode',
    'prefill',
    'search',
  }
  (decode,) = (p for p in found if p.name == 'decode')
  cache = cfg.n_layers * 2 * cfg.n_kv_heads * cfg.head_dim * 4
  cache *= config.engine.slots * config.engine.max_len
  assert decode.arguments >= 4 * cfg.n_params + cache
  update = next(p for p in found if p.name.startswith('accumulate'))
  assert update.flops > 0 and update.hlo.traffic() > 4 * cfg.n_params
  text = '\n'.join(gate.describe(update, H200))
  assert 'arguments' in text and 'estimate' in text


@pytest.mark.long
@pytest.mark.parametrize(
  'name, said',
  [
    ('h200:1x8', '--topology=h200:1x8.*make aot'),
    ('h300:1x8', 'the chips are'),
  ],
)
def test_what_cannot_be_compiled_for_is_refused(name, said):
  if name == 'h200:1x8' and importlib.util.find_spec('jax_plugins'):
    pytest.skip('XLA for GPUs is installed here')
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'searchrl_jax.doctor',
      '--config=configs/search_r1.py:model=qwen2.5-3b',
      f'--topology={name}',
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2, done.stderr
  assert re.search(said, done.stderr.splitlines()[-1])
