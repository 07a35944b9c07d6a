"""The encoder against committed values; tests/parity compares live."""

import contextlib
import json
import shutil

import jax
import ml_dtypes  # noqa: F401, gives numpy bfloat16
import numpy as np
import pytest
import safetensors.numpy

from retrieval.index import bert
from retrieval.index.encoder import Encoder, find_family
from tests.conftest import ROOT
from tests.golden import encoders

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


def golden():
  return np.load(ROOT / 'tests/golden/encoders.npz')


def load(folder, **options):
  return Encoder(
    folder,
    **{
      'query_length': encoders.QUERY_LENGTH,
      'passage_length': encoders.PASSAGE_LENGTH,
      **options,
    },
  )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return encoders.write(tmp_path_factory.mktemp('models'), 'all-MiniLM-tiny')


@pytest.fixture(scope='module')
def model(folder):
  return load(folder)


@pytest.fixture
def copy(folder, tmp_path):
  """A folder to spoil; its name tells nothing."""
  return shutil.copytree(folder, tmp_path / 'model')


@contextlib.contextmanager
def compiled():
  """A list that gets what compiles, or is loaded from the disk, meanwhile."""
  found = []

  def listen(name, *_, **about):
    if name == '/jax/core/compile/backend_compile_duration':
      found.append(about)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def random_texts(rng, count, longest=80):
  """Of 0 words and many: all lengths that a model tells."""
  return [
    ' '.join(rng.choice(['king', 'hamlet', 'xy', 'the'], n))
    for n in rng.integers(0, longest, count)
  ]


def edit(file, **fields):
  file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize('name', encoders.CHECKPOINTS)
def test_vectors_are_those_of_the_reference(tmp_path, name):
  found = load(encoders.write(tmp_path, name))
  family, _ = encoders.CHECKPOINTS[name]
  assert found.family == family and found.dim == 32
  want = golden()
  for kind, got in (
    ('queries', found.encode_queries(encoders.QUERIES)),
    ('passages', found.encode_passages(encoders.PASSAGES)),
  ):
    assert got.dtype == np.float32
    assert np.abs(got - want[f'{name}/{kind}']).max() <= TOLERANCE
    norms = np.linalg.norm(got, axis=1)
    unit = np.allclose(norms, 1, atol=1e-5)
    assert unit == (family != 'contriever')


def test_a_vocabulary_alone_will_do(model, copy):
  (copy / 'tokenizer.json').unlink()
  found = load(copy, family='minilm').encode_passages(encoders.PASSAGES)
  want = model.encode_passages(encoders.PASSAGES)
  np.testing.assert_allclose(found, want, atol=1e-6)


@pytest.mark.long
@pytest.mark.exact
def test_company_and_order_change_nothing(model):
  rng = np.random.default_rng(0)
  texts = [
    ' '.join(rng.choice(['king', 'hamlet', 'xy', 'the'], n))
    for n in rng.integers(0, 60, 70)
  ]
  together = model.encode_passages(texts)
  alone = np.concatenate([model.encode_passages([t]) for t in texts[:12]])
  np.testing.assert_allclose(together[:12], alone, atol=2e-6)
  back = model.encode_passages(texts[::-1])[::-1]
  np.testing.assert_allclose(together, back, atol=2e-6)
  assert len(np.unique(together.round(4), axis=0)) > 50


def test_compiles_once_for_each_bucket(folder, monkeypatch):
  found, traced = load(folder), []
  inner = bert.encode

  def counted(params, cfg, ids, *rest):
    traced.append(ids.shape)
    return inner(params, cfg, ids, *rest)

  monkeypatch.setattr(bert, 'encode', counted)
  texts = ['king ' * n for n in range(1, 40)]
  found.encode_queries(texts)
  shapes = list(traced)
  assert len(shapes) == len(set(shapes)) > 3
  found.encode_queries(texts)
  found.encode_queries([t.replace('king', 'play') for t in texts[::-1]])
  assert traced == shapes


class Encoded:
  """What a tokenizer makes of a text of n tokens."""

  def __init__(self, n):
    self.ids = self.type_ids = [1] * n

  def __len__(self):
    return len(self.ids)


@pytest.mark.parametrize('cpu', [True, False])
@pytest.mark.parametrize('query', [True, False])
def test_shapes_are_those_of_all_batches(model, monkeypatch, cpu, query):
  monkeypatch.setattr(model.tokens, '_cpu', cpu)
  rng = np.random.default_rng(0)
  for most in (1, 5, 40, 300):
    shapes, met = model.tokens.shapes(most, 96, query), set()
    for _ in range(200):
      lengths = rng.integers(2, 97, rng.integers(1, most + 1)).tolist()
      found = model.tokens.batches([*map(Encoded, lengths)], 96, query)
      met |= {ids.shape for _, ids, _, _ in found}
    assert met <= set(shapes)
    assert most > 5 or len(met) > len(shapes) / 2  # not a list of anything


@pytest.mark.long
def test_nothing_compiles_after_the_programs(folder):
  model = load(folder, query_length=40)
  rng = np.random.default_rng(0)
  with compiled() as found:
    for program in model.programs(70):
      program()
  assert len(found) == len(model.programs(70)) == len(model.shapes(70))
  with compiled() as found:
    for count in (0, 1, 70, *rng.integers(1, 71, 20)):
      model.encode_queries(random_texts(rng, count))
    assert found == []
    model.encode_passages(['king'] * 100)
    assert found  # the listener works


def test_batches_hold_every_text_once_with_little_padding(model):
  rng = np.random.default_rng(0)
  for count in (1, 2, 7, 33, 500):
    lengths = rng.integers(3, 25, count).tolist()
    seen, size = [], 0
    for at, ids, _, n in model.tokens.batches([*map(Encoded, lengths)], 96):
      R, T = ids.shape
      assert n[: len(at)].tolist() == ids[: len(at)].sum(1).tolist()
      assert len(at) <= R and all(lengths[i] <= T for i in at)
      assert R * T <= 1024
      seen += at.tolist()
      size += R * T
    assert sorted(seen) == list(range(count))
    assert count < 500 or size < 1.3 * sum(lengths)


def test_texts_are_data(model):
  texts = ['\ud800', '\x00\x07', '[SEP] [PAD]', 'a\u0300 ' * 5000, '']
  found = model.encode_queries(texts)
  assert np.isfinite(found).all()
  # A separator of the user's own would end the text for the model.
  ids = model._kinds['query'].encode('[SEP]').ids
  assert ids.count(encoders.VOCAB.index('[SEP]')) == 1 and len(ids) > 3
  assert model.encode_queries([]).shape == (0, 32)


def test_the_device_says_which_dtype(folder, monkeypatch):
  assert load(folder).dtype == 'float32'
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  found = load(folder)
  assert found.dtype == 'bfloat16'
  assert found.params['word'].dtype == 'bfloat16'
  assert load(folder, dtype='float32').params['word'].dtype == 'float32'


def test_a_model_of_few_positions_reads_as_many(copy):
  tensors = safetensors.numpy.load_file(copy / 'model.safetensors')
  name = 'embeddings.position_embeddings.weight'
  tensors[name] = tensors[name][:64]
  safetensors.numpy.save_file(tensors, copy / 'model.safetensors')
  edit(copy / 'config.json', max_position_embeddings=64)
  found = Encoder(copy, family='minilm')
  assert (found.query_length, found.passage_length) == (64, 64)
  assert np.isfinite(found.encode_queries(['king ' * 500])).all()
  with pytest.raises(ValueError, match='query_length=65.*3 to 64'):
    Encoder(copy, family='minilm', query_length=65)


def test_bfloat16_is_near(folder, model):
  found = load(folder, dtype='bfloat16').encode_queries(encoders.QUERIES)
  assert found.dtype == np.float32
  assert (found * model.encode_queries(encoders.QUERIES)).sum(1).min() > 0.99


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_weights_of_16_bits_and_in_parts(model, copy, dtype):
  file = copy / 'model.safetensors'
  tensors = {
    name: tensor.astype(np.dtype(dtype))
    for name, tensor in safetensors.numpy.load_file(file).items()
  }
  file.unlink()
  names = sorted(tensors)
  for part, chosen in enumerate((names[:9], names[9:]), 1):
    safetensors.numpy.save_file(
      {n: tensors[n] for n in chosen},
      copy / f'model-0000{part}-of-00002.safetensors',
    )
  found = load(copy, family='minilm').encode_queries(['king'])
  assert (found * model.encode_queries(['king'])).sum() > 0.99


def test_arguments_override_the_folder(copy):
  found = load(
    copy, family='bge', pooling='cls', normalise=False, query_prefix='king '
  )
  assert found.parameters['query_prefix'] == 'king '
  assert found.parameters['pooling'] == 'cls'
  plain = load(copy, family='minilm', pooling='cls', normalise=False)
  np.testing.assert_allclose(
    found.encode_queries(['hamlet']),
    plain.encode_queries(['king hamlet']),
    atol=1e-6,
  )
  json.dumps(found.parameters)


def test_modules_say_more_than_the_family(copy):
  # Its modules.json says mean and normalised, bge's row cls.
  assert load(copy, family='bge').usage.pooling == 'mean'
  (copy / 'modules.json').unlink()
  assert load(copy, family='bge').usage.pooling == 'cls'


def test_parameters_follow_weights_and_tokenizer(copy):
  before = load(copy, family='gte').parameters
  assert before == load(copy, family='gte').parameters
  file = copy / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  tensors['embeddings.LayerNorm.bias'][0] += 1e-3
  safetensors.numpy.save_file(tensors, file)
  after = load(copy, family='gte').parameters
  assert {k for k in before if before[k] != after[k]} == {'sha256'}


@pytest.mark.parametrize(
  'parts, base, family',
  [
    ('e5-base-v2', '', 'e5'),
    ('multilingual-e5-small', 'microsoft/MiniLM', 'e5'),
    ('models--BAAI--bge-base-en-v1.5/snapshots/0a1b2c', '', 'bge'),
    ('bge-small-zh', '', 'bge_zh'),
    ('weights', 'nreimers/MiniLM-L6-H384-uncased', 'minilm'),
    ('facebook_contriever-msmarco', '', 'contriever'),
    ('gte-large', '', 'gte'),
  ],
)
def test_families_by_name(tmp_path, parts, base, family):
  folder = tmp_path / parts
  encoders.write_json(folder / 'config.json', {'_name_or_path': base})
  assert find_family(folder) == family


def test_an_unknown_family_names_the_option(copy):
  with pytest.raises(ValueError, match='family.*e5.*minilm'):
    load(copy)
  with pytest.raises(ValueError, match="family='t5'.*contriever"):
    load(copy, family='t5')


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'model_type': 'xlm-roberta'}, "model_type='xlm-roberta'.*'bert'"),
    ({'hidden_act': 'relu'}, "hidden_act='relu'"),
    ({'position_embedding_type': 'relative_key'}, 'position_embedding_type'),
    ({'hidden_size': None}, 'hidden_size=None'),
    ({'num_attention_heads': 5}, 'num_attention_heads=5'),
    ({'layer_norm_eps': 0}, 'layer_norm_eps=0'),
    ({'intermediate_size': 65}, r'intermediate.*\(65,'),
    ({'num_hidden_layers': 3}, r"'encoder.layer.2"),
    ({'num_hidden_layers': 1}, r"'encoder.layer.1.*surplus"),
    ({'max_position_embeddings': 64}, 'query_length=96'),
    ({'vocab_size': 20}, 'different models'),
  ],
)
def test_another_model_is_refused(copy, fields, message):
  edit(copy / 'config.json', **fields)
  with pytest.raises(ValueError, match=message):
    load(copy, family='minilm')


def test_damaged_folders_are_refused(copy):
  weights = (copy / 'model.safetensors').read_bytes()
  (copy / 'model.safetensors').write_bytes(weights[:-100])
  with pytest.raises(ValueError, match='model.safetensors'):
    load(copy, family='minilm')
  (copy / 'model.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match='save_pretrained'):
    load(copy, family='minilm')
  (copy / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='config.json.*JSON'):
    load(copy, family='minilm')


def test_a_folder_without_tokenizer_is_refused(copy):
  for name in ('tokenizer.json', 'vocab.txt', 'tokenizer_config.json'):
    (copy / name).unlink()
  with pytest.raises(ValueError, match='no tokenizer'):
    load(copy, family='minilm')


@pytest.mark.parametrize(
  'options, message',
  [
    ({'dtype': 'float16'}, 'dtype'),
    ({'pooling': 'max'}, 'pooling'),
    ({'passage_length': 129}, 'passage_length=129.*3 to 128'),
    ({'query_length': 2}, 'query_length=2'),
  ],
)
def test_options_out_of_range(folder, options, message):
  with pytest.raises(ValueError, match=message):
    load(folder, **options)


def test_other_modules_are_refused(copy):
  modules = json.loads((copy / 'modules.json').read_text())
  modules.append({'type': 'sentence_transformers.models.Dense', 'path': ''})
  (copy / 'modules.json').write_text(json.dumps(modules))
  with pytest.raises(ValueError, match='models.Dense'):
    load(copy, family='minilm')
  modules.pop()
  (copy / 'modules.json').write_text(json.dumps(modules))
  edit(copy / '1_Pooling/config.json', pooling_mode_max_tokens=True)
  with pytest.raises(ValueError, match='1_Pooling.*max_tokens'):
    load(copy, family='minilm')
