"""Checkpoints in and out: exact, whole or not at all, in bounded memory."""

import dataclasses
import json
import pathlib
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from searchrl_jax.devices import sharding
from searchrl_jax.models import decoder, pretrained
from tests.golden import models

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]
TIED = 'qwen2.5'


def stacked(tensors, name):
  """Our parameters from a case's tensors, by plain indexing."""
  config = models.CONFIGS[name]
  D, L = config['hidden_size'], config['num_hidden_layers']
  N = config['num_attention_heads']
  H = config.get('head_dim', D // N)

  def each(key):
    names = [f'model.layers.{i}.{key}' for i in range(L)]
    return [tensors[name] for name in names if name in tensors]

  layers = {
    'attn_norm': each('input_layernorm.weight'),
    'mlp_norm': each('post_attention_layernorm.weight'),
  }
  if name.startswith(('qwen3', 'gemma3')):
    layers |= {f'{x}_norm': each(f'self_attn.{x}_norm.weight') for x in 'qk'}
  if name.startswith('gemma3'):
    layers['attn_post_norm'] = layers['mlp_norm']
    layers['mlp_norm'] = each('pre_feedforward_layernorm.weight')
    layers['mlp_post_norm'] = each('post_feedforward_layernorm.weight')
  for x in ('gate', 'up', 'down'):
    layers[x] = [w.T for w in each(f'mlp.{x}_proj.weight')]
  if name.startswith('qwen3.moe'):
    layers['router'] = [w.T for w in each('mlp.gate.weight')]
    for x in ('gate', 'up', 'down'):
      experts = [each(f'mlp.experts.{j}.{x}_proj.weight') for j in range(8)]
      layers[f'experts_{x}'] = [
        np.stack([w.T for w in own]) for own in zip(*experts)
      ]
  if name.startswith('qwen3.5'):
    E = config['linear_value_head_dim']
    of_net = lambda key: each(f'linear_attn.{key}')
    for x in ('qkv', 'b', 'a'):
      layers[f'delta_{x}'] = [w.T for w in of_net(f'in_proj_{x}.weight')]
    z = [w.T.reshape(D, -1, E) for w in of_net('in_proj_z.weight')]
    layers['delta_z'] = z
    o = [w.T.reshape(-1, E, D) for w in of_net('out_proj.weight')]
    layers['delta_o'] = o
    layers['delta_conv'] = of_net('conv1d.weight')
    layers['delta_a_log'] = of_net('A_log')
    layers['delta_dt_bias'] = of_net('dt_bias')
    layers['delta_norm'] = of_net('norm.weight')
  for x in ('q', 'k', 'v'):
    wide = H * (1 + (x == 'q' and name.startswith('qwen3.5')))  # and a gate
    layers[x] = [
      w.T.reshape(D, -1, wide) for w in each(f'self_attn.{x}_proj.weight')
    ]
    if 'qwen2' in name:
      layers[f'{x}_bias'] = [
        w.reshape(-1, H) for w in each(f'self_attn.{x}_proj.bias')
      ]
  layers['o'] = [w.T.reshape(N, H, D) for w in each('self_attn.o_proj.weight')]
  out = {
    'embed': tensors['model.embed_tokens.weight'],
    'layers': {k: np.stack(v) for k, v in layers.items() if v},
    'final_norm': tensors['model.norm.weight'],
  }
  if 'lm_head.weight' in tensors:
    out['head'] = tensors['lm_head.weight'].T
  return out


def assert_equal(a, b):
  a, b = decoder.flatten(a), decoder.flatten(b)
  assert a.keys() == b.keys()
  for path in a:
    x, y = np.asarray(a[path]), np.asarray(b[path])
    assert x.dtype == y.dtype and x.tobytes() == y.tobytes(), path


@pytest.mark.parametrize('name', models.CONFIGS)
def test_load_is_exact(tmp_path, name):
  cfg, params = pretrained.load(models.write(tmp_path, name))
  assert_equal(params, stacked(models.weights(name), name))
  like = decoder.init_params(cfg, jax.random.key(0))
  assert jax.tree.structure(params) == jax.tree.structure(like)


@pytest.mark.parametrize(
  'prefix', ['language_model.model.', 'model.language_model.']
)
def test_the_text_of_a_model_with_images(tmp_path, prefix):
  """As published, and as transformers 5 saves it."""
  own = models.weights('gemma3')
  tensors = {f'{prefix}{k.removeprefix("model.")}': v for k, v in own.items()}
  tensors |= {f'{p}vision_tower.x': np.zeros(3) for p in ('', 'model.')}
  config = {'model_type': 'gemma3', 'text_config': models.CONFIGS['gemma3']}
  folder = models.write(tmp_path, 'gemma3', tensors=tensors, config=config)
  cfg, params = pretrained.load(folder)
  assert_equal(params, stacked(own, 'gemma3'))
  out = tmp_path / 'out'
  pretrained.save(out, cfg, params, like=pretrained.read_json(folder))
  assert_equal(pretrained.load(out)[1], params)


@pytest.mark.parametrize('dtype', [np.float32, ml_dtypes.bfloat16])
def test_all_experts_of_a_layer_in_one_tensor(tmp_path, dtype):
  """As transformers has them: [E, 2 F, D], gate first, and [E, D, F]."""
  name = 'qwen3.moe'
  tensors = {k: v.astype(dtype) for k, v in models.weights(name).items()}
  other = {k: v for k, v in tensors.items() if '.experts.' not in k}
  for i in (0, 2):
    own = f'model.layers.{i}.mlp.experts'
    each = lambda x, own=own: np.stack(
      [tensors[f'{own}.{j}.{x}_proj.weight'] for j in range(8)]
    )
    other[f'{own}.gate_up_proj'] = np.concatenate([each('gate'), each('up')], 1)
    other[f'{own}.down_proj'] = each('down')
  models.write(tmp_path, name, tensors=other)
  cfg, params = pretrained.load(tmp_path, dtype=dtype)
  assert_equal(params, stacked(tensors, name))
  pretrained.save(
    tmp_path / 'out', cfg, params, None, 40_000, dtype, stacked=True
  )
  index = json.loads((tmp_path / 'out' / pretrained.INDEX).read_text())
  assert index['weight_map'].keys() == other.keys()
  for file in {*index['weight_map'].values()}:
    for key, x in safetensors.numpy.load_file(tmp_path / 'out' / file).items():
      assert np.array_equal(x, other[key])
  again = 'model.layers.2.mlp.experts.7.down_proj.weight'
  models.write(tmp_path, name, tensors=other | {again: tensors[again]})
  with pytest.raises(ValueError, match='experts.*twice'):
    pretrained.load(tmp_path)


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_are_cast(tmp_path, dtype):
  tensors = {k: v.astype(dtype) for k, v in models.weights('qwen2').items()}
  models.write(tmp_path, 'qwen2', tensors=tensors)
  _, params = pretrained.load(tmp_path)
  assert_equal(
    params,
    stacked({k: v.astype(np.float32) for k, v in tensors.items()}, 'qwen2'),
  )
  _, params = pretrained.load(tmp_path, dtype=dtype)
  assert_equal(params, stacked(tensors, 'qwen2'))


@pytest.mark.parametrize('shape', [(1, 2, 4), (1, 4, 2), (2, 2, 2)])
def test_sharded_load_and_export(tmp_path, shape):
  """Each device holds its part; KV heads that 4 does not divide are whole."""
  folder = models.write(tmp_path / 'm', 'llama3.1')
  mesh = sharding.make_mesh(*shape)
  cfg, params = pretrained.load(folder, mesh)
  _, plain = pretrained.load(folder)
  assert_equal(params, plain)
  want = decoder.flatten(decoder.param_shardings(cfg, mesh))
  for path, x in decoder.flatten(params).items():
    assert x.sharding == want[path]
    for shard in x.addressable_shards:
      assert np.array_equal(
        shard.data, np.asarray(decoder.flatten(plain)[path])[shard.index]
      )
  pretrained.save(tmp_path / 'out', cfg, params, max_shard_bytes=30_000)
  assert len(list((tmp_path / 'out').glob('*.safetensors'))) > 2
  assert_equal(pretrained.load(tmp_path / 'out')[1], plain)


@pytest.mark.parametrize('name', models.CONFIGS)
def test_round_trip_is_bitwise(tmp_path, name):
  source = models.write(tmp_path / 'm', name)
  cfg, params = pretrained.load(source)
  out = tmp_path / 'deep' / 'out'
  pretrained.save(out, cfg, params, like=pretrained.read_json(source))
  again, params2 = pretrained.load(out)
  assert again == cfg
  assert_equal(params, params2)
  # The library reads the same tensors, in the checkpoint's own layout.
  theirs = safetensors.numpy.load_file(out / 'model.safetensors')
  want = models.weights(name)
  assert theirs.keys() == want.keys()
  assert all(np.array_equal(theirs[k], want[k]) for k in want)
  with safetensors.safe_open(out / 'model.safetensors', 'np') as f:
    assert f.metadata() == {'format': 'pt'}


def test_export_of_numpy_and_bfloat16(tmp_path):
  cfg, params = pretrained.load(models.write(tmp_path / 'm', 'qwen3'))
  pretrained.save(tmp_path / 'a', cfg, jax.tree.map(np.asarray, params))
  assert_equal(pretrained.load(tmp_path / 'a')[1], params)
  pretrained.save(tmp_path / 'b', cfg, params, dtype='bfloat16')
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  assert_equal(pretrained.load(tmp_path / 'b', dtype=jnp.bfloat16)[1], half)


def test_decays_of_delta_nets_stay_float32(tmp_path):
  """In a file of bfloat16, and where the rest is loaded as bfloat16."""
  cfg, params = pretrained.load(models.write(tmp_path / 'm', 'qwen3.5'))
  pretrained.save(tmp_path / 'b', cfg, params, dtype='bfloat16')
  theirs = safetensors.numpy.load_file(tmp_path / 'b' / 'model.safetensors')
  whole = {k for k, x in theirs.items() if x.dtype == np.float32}
  assert whole == {
    f'model.layers.{i}.linear_attn.{name}'
    for i in (0, 1, 2, 4)
    for name in ('A_log', 'norm.weight')
  }
  _, half = pretrained.load(tmp_path / 'b', dtype=jnp.bfloat16)
  for name, x in half['layers'].items():
    exact = name in ('delta_a_log', 'delta_norm')
    want = params['layers'][name]
    assert_equal({'x': x}, {'x': want if exact else want.astype(jnp.bfloat16)})


@pytest.mark.parametrize('dtype', [np.float16, ml_dtypes.bfloat16])
def test_decays_of_delta_nets_in_another_dtype_are_told(
  tmp_path, dtype, caplog
):
  """Some checkpoints have them in bfloat16."""
  own = models.weights('qwen3.5')
  pretrained.load(models.write(tmp_path, 'qwen3.5', tensors=own))
  assert not caplog.records
  half = {k: v.astype(dtype) for k, v in own.items()}
  models.write(tmp_path, 'qwen3.5', tensors=half)
  _, params = pretrained.load(tmp_path)
  assert '8 tensors such as' in caplog.text and 'A_log' in caplog.text
  back = {k: v.astype(np.float32) for k, v in half.items()}
  assert_equal(params, stacked(back, 'qwen3.5'))


def test_flags_and_tokenizer_files(tmp_path):
  source = models.write(tmp_path / 'm', 'qwen3')
  (source / 'tokenizer.json').write_text('{"a": 1}')
  (source / 'secret.txt').write_text('not for export')
  cfg = pretrained.read_config(source, dtype='bfloat16', remat='block')
  got, params = pretrained.load(source, cfg=cfg)
  assert got is cfg and params['embed'].dtype == jnp.float32
  pretrained.save(tmp_path / 'out', cfg, params, tokenizer_dir=source)
  assert (tmp_path / 'out/tokenizer.json').read_text() == '{"a": 1}'
  assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == [
    'config.json',
    'model.safetensors',
    'tokenizer.json',
  ]


def test_another_architecture_is_named(tmp_path):
  folder = models.write(tmp_path, 'qwen3')
  cfg = pretrained.read_config(folder)
  other = dataclasses.replace(cfg, rope_theta=5.0, dtype='bfloat16')
  with pytest.raises(ValueError, match='rope_theta=1000000.0.* 5.0'):
    pretrained.load(folder, cfg=other)


def changed(name, change):
  tensors = models.weights(name)
  for key, value in change.items():
    if value is None:
      del tensors[key]
    else:
      tensors[key] = value
  return tensors


Q = 'model.layers.2.self_attn.q_proj.weight'


@pytest.mark.parametrize(
  'change, named',
  [
    ({Q: None}, f"{Q}'.*'model.embed_tokens.weight'"),
    (
      {Q: None, f'actor.{Q}': np.zeros((32, 32), np.float32)},
      f"{Q}'.*'actor.{Q}'.*'actor.'",
    ),
    (
      {f'module.{Q}': np.zeros((32, 32), np.float32)},
      f"'(module.)?{Q}'.*twice",
    ),
    ({Q: np.zeros((32, 31), np.float32)}, rf"{Q}'.*\(32, 31\).*\(32, 32\)"),
    ({Q: np.zeros((32, 32), np.int32)}, f"{Q}'.*I32"),
    (
      {'model.layers.3.mlp.up_proj.weight': np.zeros(2, np.float32)},
      "model.layers.3.mlp.up_proj.weight'",
    ),
    ({'score.weight': np.zeros(2, np.float32)}, "score.weight'"),
    (
      {'lm_head.weight': np.zeros((48, 32), np.float32)},
      "lm_head.weight'.*tie_word_embeddings",
    ),
  ],
)
def test_a_wrong_tensor_is_named(tmp_path, monkeypatch, change, named):
  models.write(tmp_path, TIED, tensors=changed(TIED, change))
  monkeypatch.setattr(
    sharding, 'put', lambda *a, **kw: pytest.fail('half-loaded')
  )
  with pytest.raises(ValueError, match=named):
    pretrained.load(tmp_path)


def test_harmless_extras_are_accepted(tmp_path):
  tensors = models.weights(TIED)
  models.write(
    tmp_path,
    TIED,
    tensors=tensors
    | {
      'lm_head.weight': tensors['model.embed_tokens.weight'],
      'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32),
    },
  )
  cfg, params = pretrained.load(tmp_path)
  assert cfg.tied and 'head' not in params


@pytest.mark.parametrize(
  'renamed',
  [
    lambda name: f'_orig_mod.{name}',
    lambda name: f'module.{name}',
    lambda name: name.removeprefix('model.'),  # AutoModel's
  ],
)
def test_names_of_wrappers_load(tmp_path, renamed):
  own = models.weights(TIED)
  models.write(tmp_path, TIED, tensors={renamed(k): v for k, v in own.items()})
  assert_equal(pretrained.load(tmp_path)[1], stacked(own, TIED))


def test_shards_without_an_index_load_if_all_are_there(tmp_path):
  cfg, params = pretrained.load(models.write(tmp_path / 'm', 'qwen2'))
  pretrained.save(tmp_path / 'out', cfg, params, max_shard_bytes=40_000)
  (tmp_path / 'out' / pretrained.INDEX).unlink()
  assert_equal(pretrained.load(tmp_path / 'out')[1], params)
  first, *_ = (tmp_path / 'out').glob('model-00001-of-*.safetensors')
  first.unlink()
  with pytest.raises(FileNotFoundError, match=f'without {pretrained.INDEX}'):
    pretrained.load(tmp_path / 'out')


def test_an_untied_model_without_a_head_is_named(tmp_path):
  config = models.CONFIGS[TIED] | {'tie_word_embeddings': False}
  models.write(tmp_path, TIED, config=config)
  with pytest.raises(ValueError, match='tie_word_embeddings'):
    pretrained.load(tmp_path)


POINTER = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n'


@pytest.mark.parametrize(
  'files, named',
  [
    (
      ['adapter_config.json', 'adapter_model.safetensors'],
      'config.model.lora.path',
    ),
    (['../model_world_size_2_rank_0.pt'], 'verl.model_merger'),
    (['actor/model_world_size_2_rank_0.pt'], 'local_dir .*actor --target'),
    (
      ['global_step_5/actor/model_world_size_2_rank_0.pt'],
      'local_dir .*global_step_5/actor --target',
    ),
    (['checkpoint-5/model.safetensors'], 'checkpoint-5'),
    (['tiny.gguf'], 'tiny.gguf'),
    (['pytorch_model.bin'], 'save_pretrained'),
    (['notes.txt'], 'folder of a Hugging Face'),
    ([pretrained.SINGLE], f'{pretrained.SINGLE}.*LFS.*lfs pull'),
    ([pretrained.INDEX], f'{pretrained.INDEX}.*LFS'),
    (['config.json'], 'config.json.*LFS'),
  ],
)
@pytest.mark.parametrize('config', [False, True])
def test_a_folder_without_a_checkpoint_is_explained(
  tmp_path, config, files, named
):
  folder = models.write(tmp_path / 'run' / 'm', TIED)
  (folder / pretrained.SINGLE).unlink()
  for name in files:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(POINTER)
  if not config:
    (folder / 'config.json').unlink()
    named = 'config.json' if 'LFS' in named else named
  with pytest.raises((ValueError, FileNotFoundError), match=named):
    pretrained.load(folder)


def test_broken_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='config.json'):
    pretrained.load(tmp_path)
  folder = models.write(tmp_path / 'm', 'qwen2')
  file = folder / 'model.safetensors'
  whole = file.read_bytes()
  for size, named in (
    (-100, 'truncated'),
    (300, 'truncated'),
    (4, 'truncated'),
  ):
    file.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=named) as e:
      pretrained.load(folder)
    assert str(file) in str(e.value)
  file.write_bytes(whole[:8] + b'x' * (len(whole) - 8))
  with pytest.raises(ValueError, match='malformed'):
    pretrained.load(folder)
  file.unlink()
  with pytest.raises(FileNotFoundError, match='index'):
    pretrained.load(folder)
  (folder / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='config.json.*JSON'):
    pretrained.load(folder)
  (folder / 'config.json').write_text('{"model_type": "gpt2"}')
  with pytest.raises(ValueError, match=f'{folder}.*gpt2'):
    pretrained.load(folder)


def test_a_broken_index_is_named(tmp_path):
  cfg, params = pretrained.load(models.write(tmp_path / 'm', 'qwen2'))
  out = tmp_path / 'out'

  def fresh():
    shutil.rmtree(out, ignore_errors=True)
    pretrained.save(out, cfg, params, max_shard_bytes=40_000)
    return out / 'model.safetensors.index.json'

  index = fresh()
  value = json.loads(index.read_text())
  files = sorted(set(value['weight_map'].values()))
  assert value['metadata']['total_size'] == 4 * cfg.n_params
  (out / files[1]).unlink()
  with pytest.raises(FileNotFoundError, match=files[1]):
    pretrained.load(out)
  index = fresh()
  value['weight_map']['model.norm.weight'] = files[0]  # not its file
  index.write_text(json.dumps(value))
  with pytest.raises(ValueError, match='model.norm.weight'):
    pretrained.load(out)
  value['weight_map'] = dict.fromkeys(value['weight_map'], files[0])
  index.write_text(json.dumps(value))
  with pytest.raises(ValueError, match='tensor .* is missing'):
    pretrained.load(out)
  index.write_text('{}')
  with pytest.raises(ValueError, match='malformed'):
    pretrained.load(out)


def test_export_refuses_other_parameters(tmp_path):
  cfg, params = pretrained.load(models.write(tmp_path / 'm', 'qwen2'))
  with pytest.raises(FileExistsError, match='out'):
    (tmp_path / 'out').mkdir()
    pretrained.save(tmp_path / 'out', cfg, params)
  less = {k: v for k, v in params.items() if k != 'final_norm'}
  with pytest.raises(ValueError, match="'final_norm'"):
    pretrained.save(tmp_path / 'x', cfg, less)
  with pytest.raises(ValueError, match="'extra'"):
    pretrained.save(tmp_path / 'x', cfg, params | {'extra': jnp.ones(2)})
  assert not (tmp_path / 'x').exists()


def test_a_full_disk_leaves_nothing(tmp_path):
  cfg, params = pretrained.load(models.write(tmp_path / 'm', 'qwen2'))
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
  try:
    with pytest.raises(OSError, match='out failed'):
      pretrained.save(tmp_path / 'out', cfg, params)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
  assert [p.name for p in tmp_path.iterdir()] == ['m']
  pretrained.save(tmp_path / 'out', cfg, params)
  assert_equal(pretrained.load(tmp_path / 'out')[1], params)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['m', 'out']


MEMORY = """
import json, sys, jax, jax.numpy as jnp, numpy as np
from searchrl_jax.devices import sharding
from searchrl_jax.models import decoder, pretrained
from tests import memory
cfg = decoder.DecoderConfig(
  vocab_size=4000, d_model=1024, n_layers=12, n_heads=16, n_kv_heads=4,
  head_dim=64, d_ff=3200, tied=False)
shapes = {p: s for p, (s, _) in decoder.param_table(cfg).items()}
largest = 4 * max(int(np.prod(s)) for s in shapes.values())
at = sys.argv[1]
jax.block_until_ready(jnp.ones(2) + 1)
base = memory.anonymous()
# Broadcast numbers take no memory, so that making the file needs none.
pretrained.save(f'{at}/a', cfg, decoder.nest(
  {p: np.broadcast_to(np.float32(0.5), s) for p, s in shapes.items()}),
  max_shard_bytes=2.5e7)
out = dict(bytes=4 * cfg.n_params)
for name, mesh in ('one', None), ('mesh', sharding.make_mesh(1, 2, 4)):
  with memory.Peak() as m:
    _, params = pretrained.load(f'{at}/a', mesh)
  held = sum(s.data.nbytes for x in jax.tree.leaves(params)
             for s in x.addressable_shards)
  out[f'{name}_load'] = (m.peak - base - held) / largest
  with memory.Peak() as m:
    pretrained.save(f'{at}/{name}', cfg, params, max_shard_bytes=2.5e7)
  out[f'{name}_save'] = (m.peak - base - held) / largest
  del params
print(json.dumps(out))
"""


@pytest.mark.long
@pytest.mark.skipif(
  not pathlib.Path('/proc/self/smaps_rollup').exists(), reason='Linux only'
)
def test_host_memory_of_loading_and_saving(tmp_path):
  """In units of the largest stacked parameter, beyond the parameters.

  A save holds a file of 25 MB, and a tensor that it converts.
  """
  try:
    out = subprocess.run(
      [sys.executable, '-c', MEMORY, str(tmp_path)],
      cwd=ROOT,
      check=True,
      stdout=subprocess.PIPE,
      text=True,
      env={
        'PATH': '/usr/bin:/bin',
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
      },
    )
  finally:
    shutil.rmtree(tmp_path)
  got = json.loads(out.stdout.splitlines()[-1])
  print(got)
  assert got.pop('bytes') >= 6e8
  assert len(got) == 4 and max(got.values()) < 1.5
