"""The dual encoder: converts texts to vectors as its authors intended.

`FAMILIES` defines how the models of a family are used. The family of a model
is recognised by the name of its folder (in the hub's cache: of the
repository), else by `_name_or_path` in config.json. The folder comes first
because `_name_or_path` may name the model that was fine-tuned. If the folder
has sentence-transformers' modules.json, pooling and normalisation are read
from it; arguments override both.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from retrieval.devices import data_mesh, put, replicate
from retrieval.files import PathLike, convert, require_one_of
from retrieval.index import bert
from retrieval.metrics import stage


@dataclasses.dataclass(frozen=True)
class Family:
  """How models of one family are used."""

  words: tuple[str, ...]  # a name with all of them belongs to the family
  pooling: str  # 'mean' of the tokens, or 'cls': the first one
  normalise: bool  # to unit length
  query_prefix: str = ''
  passage_prefix: str = ''


_BGE_ZH = '为这个句子生成表示以用于检索相关文章：'
_BGE = 'Represent this sentence for searching relevant passages: '
# The first match is used. Search-R1 differs: its server uses mean pooling for
# bge too, and normalises contriever, which was trained on raw products.
FAMILIES = {
  'e5': Family(('e5',), 'mean', True, 'query: ', 'passage: '),
  'bge_zh': Family(('bge', 'zh'), 'cls', True, _BGE_ZH),
  'bge': Family(('bge',), 'cls', True, _BGE),
  'contriever': Family(('contriever',), 'mean', False),
  'gte': Family(('gte',), 'mean', True),
  'minilm': Family(('minilm',), 'mean', True),
}
POOLINGS = ('mean', 'cls')
DTYPES = ('float32', 'bfloat16')
_LENGTH = {'query': 256, 'passage': 180}  # if the model has as many positions

# Padded lengths. On CPU, padding costs as much as text; accelerators work
# better with few programs. So do the queries of a server, whose programs all
# compile before it is ready: few queries are longer than 32 tokens.
_RANGES = ((8, 33, 4), (40, 65, 8), (80, 257, 16), (288, 513, 32))
_CPU_LENGTHS = [n for limits in _RANGES for n in range(*limits)]
_CPU_QUERY_LENGTHS = (12, 16, 24, 32, 48, 64, 128, 256, 512)
_LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512)
_CPU_TOKENS, _TOKENS = 1024, 32768  # of one batch
_TOKENIZER_FILES = ('tokenizer.json', 'vocab.txt', 'tokenizer_config.json')


def find_family(path: pathlib.Path, family: str = 'auto') -> str:
  """The key of `FAMILIES` for a model folder; see the module.

  Raises:
    ValueError: an unknown family, or a name without one.
  """
  require_one_of('family', family, ('auto', *FAMILIES))
  if family != 'auto':
    return family
  path = pathlib.Path(os.path.abspath(path))
  folder = path.parent.parent if path.parent.name == 'snapshots' else path
  original = bert.read_json(path / 'config.json').get('_name_or_path', '')
  for name in (folder.name, str(original)):
    words = set(re.split('[^a-z0-9]+', name.lower()))
    for key, value in FAMILIES.items():
      if words >= set(value.words):
        return key
  fix = f'set family to one of {", ".join(FAMILIES)}'
  raise ValueError(f'{path}: names no known family; {fix}')


def _modules(path: pathlib.Path) -> dict[str, Any]:
  """Pooling and normalisation of modules.json; {} if there is none."""
  file = path / 'modules.json'
  if not file.exists():
    return {}
  found: dict[str, Any] = {'normalise': False}
  for module in bert.read_json(file):
    kind = str(module.get('type')).rpartition('.')[2]
    if kind == 'Normalize':
      found['normalise'] = True
    elif kind == 'Pooling':
      found['pooling'] = _pooling(path / str(module['path']) / 'config.json')
    elif kind != 'Transformer':
      raise ValueError(f'{file}: unknown module {module.get("type")!r}')
  return found


def _pooling(file: pathlib.Path) -> str:
  config = bert.read_json(file)
  mode = config.get('pooling_mode')  # as sentence-transformers 5 writes it
  if mode is None:
    on = [k for k, v in config.items() if k.startswith('pooling_mode_') and v]
    mode = ', '.join(k.removeprefix('pooling_mode_') for k in on)
    mode = {'cls_token': 'cls', 'mean_tokens': 'mean'}.get(mode, mode)
  require_one_of(f'{file}: pooling', mode, POOLINGS)
  return mode


class Tokens:
  """The tokenizer of a checkpoint, and batches of few shapes.

  Texts are data: '[SEP]' in a text is five characters and not a separator.
  """

  def __init__(self, path: pathlib.Path, cfg: bert.BertConfig, tokens=None):
    """Reads tokenizer.json, or other formats with transformers.

    Raises:
      ValueError: no tokenizer, or one of another vocabulary.
    """
    file = path / 'tokenizer.json'
    problem = f'{path}: no tokenizer in tokenizer.json or vocab.txt ({{}})'
    # The libraries raise all kinds.
    with convert(Exception, ValueError, problem):
      # Without either, transformers silently makes an empty tokenizer.
      if file.exists() or not (path / 'vocab.txt').exists():
        self._json = Tokenizer.from_file(str(file)).to_str()
      else:
        from transformers import AutoTokenizer  # slow, and rarely needed

        found = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._json = found.backend_tokenizer.to_str()
    size = Tokenizer.from_str(self._json).get_vocab_size()
    if size > cfg.vocab_size:
      counts = f'the tokenizer has {size} tokens, the model {cfg.vocab_size}'
      raise ValueError(f'{path}: {counts}; they belong to different models')
    self._positions = cfg.max_position_embeddings
    self._cpu = jax.default_backend() == 'cpu'
    self._tokens = tokens or (_CPU_TOKENS if self._cpu else _TOKENS)

  def to_length(self, name: str, length: int | None, usual: int) -> Tokenizer:
    """The tokenizer that cuts at `length` tokens.

    Args:
      name: of the length in an error.
      length: None: `usual`, or all positions of a model that has fewer.
      usual: see `length`.

    Raises:
      ValueError: a length out of range.
    """
    length = min(usual, self._positions) if length is None else length
    if not 3 <= length <= self._positions:
      expected = f'expected 3 to {self._positions}, the positions of this model'
      raise ValueError(f'{name}={length}; {expected}')
    tokenizer = Tokenizer.from_str(self._json)
    tokenizer.no_padding()  # the file may define a fixed length
    tokenizer.enable_truncation(length)
    tokenizer.encode_special_tokens = True
    return tokenizer

  def batches(
    self, texts: Sequence[Any], limit: int, query: bool = False
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Splits texts into batches of few shapes with little padding.

    Args:
      texts: [N] encodings of a tokenizer, of at most `limit` tokens.
      limit: the maximal length of a text.
      query: whether the texts are queries, which get fewer shapes.

    Yields:
      (positions [n] in `texts`, ids [R, T], types [R, T], lengths [R]), of
      which the first n <= R rows are texts.
    """
    ladder, start = self._ladder(limit, query), 0
    order = np.argsort([-len(text) for text in texts], kind='stable')
    while start < len(order):
      T = min(t for t in ladder if t >= len(texts[order[start]]))
      R = self._rows(T, len(order) - start)
      at, batch = order[start : start + R], np.zeros((2, R, T), np.int32)
      lengths = np.ones(R, np.int32)
      for r, i in enumerate(at):
        lengths[r] = n = len(texts[i])
        batch[:, r, :n] = texts[i].ids, texts[i].type_ids
      yield at, *batch, lengths
      start += R

  def shapes(self, count: int, limit: int, query=False) -> list[tuple]:
    """Every (R, T) that `batches` yields for at most `count` texts."""
    found = set()
    for T in self._ladder(limit, query):
      lefts = range(1, min(count, self._most(T)) + 1)
      found.update((self._rows(T, left), T) for left in lefts)
    return sorted(found)

  def _ladder(self, limit: int, query: bool) -> list[int]:
    lengths = _LENGTHS
    if self._cpu:
      lengths = _CPU_QUERY_LENGTHS if query else _CPU_LENGTHS
    return [t for t in lengths if t < limit] + [limit]

  def _most(self, T: int) -> int:
    """Rows of the largest batch."""
    return 1 << max(0, (self._tokens // T).bit_length() - 1)

  def _rows(self, T: int, left: int) -> int:
    """Rows of the next batch if `left` texts of T tokens are left."""
    most = self._most(T)
    sizes = [r for r in (1, 8, 32, 128, 512) if r < most] + [most]
    # Rows of padding are free on accelerators and cost as much as text on CPU.
    if not self._cpu and len(sizes) > 1:
      sizes.remove(1)
    R = min([r for r in sizes if r >= left], default=most)
    if self._cpu and left < 0.75 * R:
      R = max([r for r in sizes if r <= left])
    return R


def resolve_dtype(dtype: str) -> str:
  """Resolves 'auto' to float32 on CPU and bfloat16 on accelerators.

  Raises:
    ValueError: an unknown dtype.
  """
  require_one_of('dtype', dtype, ('auto', *DTYPES))
  if dtype == 'auto':
    return DTYPES[jax.default_backend() != 'cpu']
  return dtype


def clean(text: str) -> str:
  """Replaces lone surrogates, which tokenizers refuse."""
  return text.encode('utf-8', 'replace').decode('utf-8')


def sha256(path: pathlib.Path) -> str:
  """The sha256 of config, weights and tokenizer of a checkpoint folder."""
  digest = hashlib.sha256(repr(bert.read_config(path)).encode())
  files = [path / name for name in _TOKENIZER_FILES]
  for file in bert.weight_files(path) + [f for f in files if f.exists()]:
    with open(file, 'rb') as stream:
      digest.update(hashlib.file_digest(stream, 'sha256').digest())
  return digest.hexdigest()


def embed(params, cfg: bert.BertConfig, usage: Family, ids, lengths):
  """See `Encoder.embed`."""
  x = bert.encode(params, cfg, ids, lengths).astype(jnp.float32)
  if usage.pooling == 'cls':
    x = x[:, 0]
  else:
    inside = jnp.arange(ids.shape[1]) < lengths[:, None]
    x = jnp.where(inside[:, :, None], x, 0).sum(1) / lengths[:, None]
  if usage.normalise:
    norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
    x /= jnp.maximum(norm, 1e-12)
  return x


class Encoder:
  """A dual encoder: converts queries and passages to vectors [D]."""

  def __init__(
    self,
    path: PathLike,
    *,
    family: str = 'auto',
    dtype: str = 'auto',
    query_length: int | None = None,
    passage_length: int | None = None,
    batch: int | None = None,
    **overrides: Any,
  ):
    """Loads a checkpoint folder onto all devices of this process.

    Args:
      path: config.json, *.safetensors, and tokenizer.json or vocab.txt.
      family: a key of `FAMILIES`, or 'auto': see the module.
      dtype: of parameters and activations: float32, bfloat16, or auto, see
        `resolve_dtype`. Vectors are float32.
      query_length, passage_length: tokens kept, including [CLS] and [SEP];
        None: 256 and 180, or all positions of a model that has fewer.
      batch: the most tokens of a batch; None: by the device.
      overrides: pooling, normalise, query_prefix or passage_prefix, instead of
        those of the folder and its family.

    Raises:
      FileNotFoundError, ValueError: see `bert.load`, `find_family`, `Tokens`.
    """
    path, self.dtype = pathlib.Path(path), resolve_dtype(dtype)
    self.cfg = bert.read_config(path)
    self.family = find_family(path, family)
    usage = _modules(path) | overrides
    self.usage = dataclasses.replace(FAMILIES[self.family], **usage)
    require_one_of('pooling', self.usage.pooling, POOLINGS)
    self.tokens, self._kinds = Tokens(path, self.cfg, batch), {}
    lengths = {'query': query_length, 'passage': passage_length}
    for kind, length in lengths.items():
      cut = self.tokens.to_length(f'{kind}_length', length, _LENGTH[kind])
      self._kinds[kind], lengths[kind] = cut, cut.truncation['max_length']
    self.query_length, self.passage_length = lengths.values()
    self.dim = self.cfg.hidden_size
    self._sha256 = sha256(path)
    self.mesh = data_mesh()
    _, params = bert.load(path, jnp.dtype(self.dtype))
    self.params = replicate(self.mesh, params)
    self._embed = jax.jit(self.embed)

  @property
  def parameters(self) -> dict[str, Any]:
    """JSON of what passage vectors depend on."""
    found = {'family': self.family, **dataclasses.asdict(self.usage)}
    del found['words']
    found |= {'passage_length': self.passage_length, 'dim': self.dim}
    return found | {'sha256': self._sha256}

  def embed(self, params, ids, lengths):
    """Vectors of a batch, float32 [R, D]; traceable.

    Args:
      params: `self.params`.
      ids: int32 [R, T], padded on the right.
      lengths: int32 [R], >= 1.
    """
    return embed(params, self.cfg, self.usage, ids, lengths)

  def batches(
    self, texts: Sequence[str], kind: str
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokenises, and yields arguments of `embed` (see `put`).

    Args:
      texts: [N], any Unicode.
      kind: 'query' or 'passage'.

    Yields:
      (positions [n] in texts, ids [R, T], lengths [R]), n <= R.
    """
    prefix = getattr(self.usage, f'{kind}_prefix')
    tokenizer = self._kinds[kind]
    found = tokenizer.encode_batch_fast([prefix + clean(t) for t in texts])
    limit = tokenizer.truncation['max_length']
    for at, ids, _, n in self.tokens.batches(found, limit, kind == 'query'):
      yield at, ids, n

  def shapes(self, count: int) -> list[tuple[int, int]]:
    """Every [R, T] that `batches` yields for at most `count` queries."""
    return self.tokens.shapes(count, self.query_length, query=True)

  def programs(self, count: int) -> list[Callable[[], None]]:
    """Functions that each compile a program or load it from the disk.

    They may run in any threads. After all of them, `encode_queries` compiles
    nothing for at most `count` queries of any length.
    """

    def build(R: int, T: int) -> None:
      self._embed.lower(self.params, *self.blank(R, T)).compile()

    return [functools.partial(build, *shape) for shape in self.shapes(count)]

  def blank(self, R: int, T: int) -> tuple[jax.Array, jax.Array]:
    """A batch of that shape for `embed`, to compile for."""
    return put(self.mesh, np.zeros((R, T), np.int32), np.ones(R, np.int32))

  def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
    """float32 [Q, D] of Q queries."""
    with stage('encode'):
      return self._encode(texts, 'query')

  def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
    """float32 [P, D] of P passages."""
    return self._encode(texts, 'passage')

  def _encode(self, texts: Sequence[str], kind: str) -> np.ndarray:
    out = np.empty((len(texts), self.dim), np.float32)
    run = lambda batch: self._embed(self.params, *put(self.mesh, *batch))
    done = [(at, run(batch)) for at, *batch in self.batches(texts, kind)]
    for at, vectors in done:
      out[at] = np.asarray(vectors)[: len(at)]
    return out
