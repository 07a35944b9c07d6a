"""The decoder against transformers, by committed golden values.

tests/golden/make_models.py made them; tests/parity compares live.
"""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from searchrl_jax.models import decoder, pretrained, rotary
from tests.golden import models

pytestmark = pytest.mark.slow

GOLDEN = pathlib.Path(models.__file__).parent
TOLERANCE = 1e-4


def tolerance(name: str) -> float:
  """Of a logit; of delta nets 2e-5 of the largest. transformers' own logits
  move by 1e-5 of it if the last bits of the embedding change."""
  largest = np.abs(golden()[name]).max()
  return 2e-5 * largest if name.startswith('qwen3.5') else TOLERANCE


@functools.cache
def golden() -> dict[str, np.ndarray]:
  with np.load(GOLDEN / 'models.npz') as f:
    return dict(f)


def right_padded(rows, rubbish: int):
  ids = np.full((len(rows), max(map(len, rows))), rubbish, np.int32)
  for b, row in enumerate(rows):
    ids[b, : len(row)] = row
  return ids, np.array([len(r) for r in rows], np.int32)


@functools.partial(jax.jit, static_argnums=1)
def forward(params, cfg, ids):
  hidden = decoder.hidden_states(params, cfg, ids)
  return decoder.logits(params, cfg, hidden)


@pytest.mark.parametrize('name', models.CONFIGS)
def test_logits(tmp_path, name):
  cfg, params = pretrained.load(models.write(tmp_path, name))
  rows = models.inputs(name)
  ids, lengths = right_padded(rows, rubbish=7)
  padded = np.asarray(forward(params, cfg, ids))
  want = np.split(golden()[name], [len(rows[0])])
  for b, row in enumerate(rows):
    assert np.abs(padded[b, : len(row)] - want[b]).max() <= tolerance(name)
  if name == 'qwen2':  # row 0 has no padding; nor has row 1 here
    row = ids[1:, : lengths[1]]
    alone = np.asarray(forward(params, cfg, row))
    assert np.abs(alone[0] - want[1]).max() <= TOLERANCE


@pytest.mark.parametrize(
  'name, flags',
  [
    ('llama3.1', {'rope_scaling': None}),
    ('llama3.2', {'rope_theta': 10_000.0}),
    ('qwen2', {'rope_theta': 10_000.0}),
    ('llama2', {'norm_eps': 1e-2}),
    ('gemma3', {'window': 13}),
    ('gemma3', {'global_every': 4}),
    ('gemma3', {'query_scale': 1.0}),
    ('gemma3', {'local_theta': 1e6}),
    ('gemma3.linear', {'rope_scaling': None}),
    ('qwen3.5', {'rotary_dim': None}),
    ('qwen3.5', {'rope_theta': 1e4}),
    ('qwen3.moe', {'moe': {'normalised': False}}),
    ('qwen3.moe', {'moe': {'chosen': 3}}),
    ('qwen3.moe.plain', {'moe': {'normalised': True}}),
  ],
)
def test_the_golden_values_see_every_flag(tmp_path, name, flags):
  cfg, params = pretrained.load(models.write(tmp_path, name))
  if 'moe' in flags:
    flags = {'moe': dataclasses.replace(cfg.moe, **flags['moe'])}
  cfg = dataclasses.replace(cfg, **flags)
  ids, lengths = right_padded(models.inputs(name), rubbish=0)
  got = np.asarray(forward(params, cfg, ids))[0]
  assert np.abs(got - golden()[name][: len(got)]).max() > 100 * TOLERANCE


@pytest.mark.parametrize('theta', [10_000.0, 500_000.0])
def test_llama3_scaling_against_its_formula(theta):
  """Frequencies in float64, one by one, from the Llama 3.1 reference."""
  H, factor, low, high, original = 64, 8.0, 1.0, 4.0, 8192
  cfg = decoder.DecoderConfig(
    vocab_size=8,
    d_model=64,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=H,
    d_ff=8,
    rope_theta=theta,
    rope_scaling=rotary.RopeScaling('llama3', factor, low, high, original),
  )
  got = np.asarray(rotary.frequencies(cfg), np.float64)
  kinds = set()
  for i in range(H // 2):
    freq = theta ** (-2 * i / H)
    wave = 2 * np.pi / freq
    if wave < original / high:
      want = freq
    elif wave > original / low:
      want = freq / factor
    else:
      smooth = (original / wave - low) / (high - low)
      want = (1 - smooth) * freq / factor + smooth * freq
    kinds.add(np.sign(want - freq / factor) + np.sign(freq - want))
    assert got[i] == pytest.approx(want, rel=1e-5)
  assert len(kinds) == 2  # scaled or not, and in between


@pytest.mark.long
def test_greedy_continuation_of_a_trained_checkpoint(data_dir):
  want = json.loads((GOLDEN / 'stories260K.json').read_text())
  cfg, params = pretrained.load(data_dir / 'stories260K')

  @jax.jit
  def following(ids, n):
    hidden = decoder.hidden_states(params, cfg, ids)
    last = jax.lax.dynamic_index_in_dim(hidden, n - 1, 1)
    return jnp.argmax(decoder.logits(params, cfg, last)[0, 0])

  ids = list(want['prompt'])
  for _ in want['continuation']:
    row = np.zeros((1, 256), np.int32)
    row[0, : len(ids)] = ids
    ids.append(int(following(row, len(ids))))
  assert len(want['continuation']) == 200
  assert ids[len(want['prompt']) :] == want['continuation']


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_gradient_of_rotary_positions_is_autodiffs(dtype):
  """Its own gradient (rotate back) against that of the plain formula."""
  rng = np.random.default_rng(0)
  x, g = (jnp.asarray(rng.normal(size=(2, 5, 3, 8)), dtype) for _ in range(2))
  cfg = decoder.DecoderConfig(
    vocab_size=8,
    d_model=24,
    n_layers=1,
    n_heads=3,
    n_kv_heads=3,
    head_dim=8,
    d_ff=8,
  )
  tables = rotary.tables(cfg, jnp.tile(jnp.arange(5), (2, 1)))
  got, wanted = (
    jax.vjp(lambda y, f=f: f(y, *tables), x)[1](g)[0]
    for f in (rotary.apply, rotary._rotate)
  )
  assert got.dtype == x.dtype
  tolerance = 1e-6 if dtype == 'float32' else 2e-2
  np.testing.assert_allclose(
    np.asarray(got, np.float32), np.asarray(wanted, np.float32), atol=tolerance
  )
