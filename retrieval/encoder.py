"""Texts to vectors, as the model's authors meant it: the dual encoder.

How a family of models is used is stated once, in `FAMILIES`. A model's family
is told by its name: the folder's (in the hub's cache the repository's), and
where that says nothing, `_name_or_path` of config.json. The folder's name
comes first because `_name_or_path` may name the model that was fine-tuned.
Where sentence-transformers' modules.json is present, pooling and
normalisation are what it says; arguments override both.
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
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import tokenizers

from retrieval import bert
from retrieval.devices import data_mesh, put
from retrieval.metrics import stage


@dataclasses.dataclass(frozen=True)
class Family:
  """How models of one family are used."""

  words: tuple[str, ...]  # all of them in the model's name tell the family
  pooling: str  # mean of the tokens, or the first one: cls
  normalise: bool  # to unit length
  query_prefix: str = ''
  passage_prefix: str = ''


# The first that fits. Search-R1 differs: its server takes the mean for bge
# too, and it normalises contriever, which was trained on raw products.
FAMILIES = {
  'e5': Family(('e5',), 'mean', True, 'query: ', 'passage: '),
  'bge_zh': Family(
    ('bge', 'zh'), 'cls', True, '为这个句子生成表示以用于检索相关文章：'
  ),
  'bge': Family(
    ('bge',),
    'cls',
    True,
    'Represent this sentence for searching relevant passages: ',
  ),
  'contriever': Family(('contriever',), 'mean', False),
  'gte': Family(('gte',), 'mean', True),
  'minilm': Family(('minilm',), 'mean', True),
}
POOLINGS = ('mean', 'cls')
DTYPES = ('float32', 'bfloat16')
_QUERY_LENGTH, _PASSAGE_LENGTH = 256, 180  # where the model has as many

# Padded lengths. On CPU padding costs as much as text; an accelerator would
# rather have few programs. So would a server for its queries, all of whose
# programs compile before it is ready: few are longer than 32 tokens.
_CPU_LENGTHS = (
  *range(8, 33, 4),
  *range(40, 65, 8),
  *range(80, 257, 16),
  *range(288, 513, 32),
)
_CPU_QUERY_LENGTHS = (12, 16, 24, 32, 48, 64, 128, 256, 512)
_LENGTHS = (16, 32, 64, 128, 192, 256, 384, 512)
_CPU_TOKENS, _TOKENS = 1024, 32768  # of one batch
_TOKENIZER_FILES = ('tokenizer.json', 'vocab.txt', 'tokenizer_config.json')


def tell_family(path: pathlib.Path, family: str = 'auto') -> str:
  """The key of `FAMILIES` for a model folder; see the module.

  Raises:
    ValueError: an unknown family, or a name that tells none.
  """
  known = ', '.join(FAMILIES)
  if family != 'auto':
    if family not in FAMILIES:
      raise ValueError(f'family={family!r}; expected auto, {known}')
    return family
  path = pathlib.Path(os.path.abspath(path))
  folder = path.parent.parent if path.parent.name == 'snapshots' else path
  original = bert.read_json(path / 'config.json').get('_name_or_path', '')
  for name in (folder.name, str(original)):
    words = set(re.split('[^a-z0-9]+', name.lower()))
    for key, value in FAMILIES.items():
      if words >= set(value.words):
        return key
  raise ValueError(
    f'{path}: neither the folder nor _name_or_path={original!r} tells the '
    f'family of this model; set family to the one it is used like: {known}'
  )


def _modules(path: pathlib.Path) -> dict[str, Any]:
  """Pooling and normalisation by modules.json; nothing without one."""
  file = path / 'modules.json'
  if not file.exists():
    return {}
  found: dict[str, Any] = {'normalise': False}
  for module in bert.read_json(file, list):
    kind = str(module.get('type')).rpartition('.')[2]
    if kind == 'Normalize':
      found['normalise'] = True
    elif kind == 'Pooling':
      config = path / str(module.get('path')) / 'config.json'
      found['pooling'] = _pooling(config)
    elif kind != 'Transformer':
      raise ValueError(f'{file}: module {module.get("type")!r} is not known')
  return found


def _pooling(file: pathlib.Path) -> str:
  config = bert.read_json(file)
  mode = config.get('pooling_mode')  # as sentence-transformers 5 writes it
  if mode is None:
    names = {'cls_token': 'cls', 'mean_tokens': 'mean'}
    on = [k for k, v in config.items() if k.startswith('pooling_mode_') and v]
    on = [k.removeprefix('pooling_mode_') for k in on]
    mode = names.get(*on, on[0]) if len(on) == 1 else on
  if mode not in POOLINGS:
    raise ValueError(f'{file}: pooling {mode!r}; known: {", ".join(POOLINGS)}')
  return mode


class Tokens:
  """A checkpoint's tokenizer, and batches of few shapes from what it makes.

  Texts are data: '[SEP]' in one is five characters, no separator.
  """

  def __init__(
    self, path: pathlib.Path, cfg: bert.BertConfig, tokens: int | None
  ):
    """Reads tokenizer.json, or with transformers what else there is.

    Raises:
      ValueError: no tokenizer, or one of another vocabulary.
    """
    file = path / 'tokenizer.json'
    try:
      # Without either, transformers makes an empty tokenizer and says nothing.
      if file.exists() or not (path / 'vocab.txt').exists():
        self._json = tokenizers.Tokenizer.from_file(str(file)).to_str()
      else:
        import transformers  # slow to import, and hardly ever needed

        found = transformers.AutoTokenizer.from_pretrained(
          path, local_files_only=True
        )
        self._json = found.backend_tokenizer.to_str()
    except Exception as error:  # the libraries raise all kinds
      raise ValueError(
        f'{path}: no tokenizer can be read from tokenizer.json or vocab.txt '
        f'({error})'
      ) from None
    size = tokenizers.Tokenizer.from_str(self._json).get_vocab_size()
    if size > cfg.vocab_size:
      raise ValueError(
        f'{path}: the tokenizer has {size} tokens, the model '
        f'{cfg.vocab_size}; they belong to different models'
      )
    self._positions = cfg.max_position_embeddings
    self._cpu = jax.default_backend() == 'cpu'
    self._tokens = tokens or (_CPU_TOKENS if self._cpu else _TOKENS)

  def to_length(self, name: str, length: int) -> tokenizers.Tokenizer:
    """The tokenizer that cuts at `length` tokens; `name` is for the error.

    Raises:
      ValueError: a length out of range.
    """
    if not 3 <= length <= self._positions:
      raise ValueError(
        f'{name}={length}; expected 3 to {self._positions}, the positions '
        'of this model'
      )
    tokenizer = tokenizers.Tokenizer.from_str(self._json)
    tokenizer.no_padding()  # a file may ask for a fixed length
    tokenizer.enable_truncation(length)
    tokenizer.encode_special_tokens = True
    return tokenizer

  def batches(
    self, lengths: Sequence[int], limit: int, query: bool = False
  ) -> Iterator[tuple[np.ndarray, int, int]]:
    """Splits texts into batches of few shapes, little of them padding.

    Args:
      lengths: [N] tokens of each text, <= limit.
      limit: the longest a text can be.
      query: the texts are queries: fewer shapes.

    Yields:
      (positions [n] in `lengths`, R, T): texts for the first n <= R rows of a
      batch of R x T tokens.
    """
    ladder = self._ladder(limit, query)
    order = np.argsort(-np.asarray(lengths), kind='stable')
    start = 0
    while start < len(order):
      T = min(t for t in ladder if t >= lengths[order[start]])
      R = self._rows(T, len(order) - start)
      yield order[start : start + R], R, T
      start += R

  def shapes(
    self, count: int, limit: int, query: bool = False
  ) -> list[tuple[int, int]]:
    """Every (R, T) that `batches` makes of at most `count` texts."""
    return sorted(
      {
        (self._rows(T, left), T)
        for T in self._ladder(limit, query)
        for left in range(1, min(count, self._most(T)) + 1)
      }
    )

  def _ladder(self, limit: int, query: bool) -> list[int]:
    lengths = _LENGTHS
    if self._cpu:
      lengths = _CPU_QUERY_LENGTHS if query else _CPU_LENGTHS
    return [t for t in lengths if t < limit] + [limit]

  def _most(self, T: int) -> int:
    """Rows of the largest batch."""
    return 1 << max(0, (self._tokens // T).bit_length() - 1)

  def _rows(self, T: int, left: int) -> int:
    """Rows of the next batch where `left` texts of T tokens are left."""
    most = self._most(T)
    sizes = [r for r in (1, 8, 32, 128, 512) if r < most] + [most]
    # Rows of padding are free on an accelerator and cost like text on CPU.
    if not self._cpu and len(sizes) > 1:
      sizes.remove(1)
    R = min([r for r in sizes if r >= left], default=most)
    if self._cpu and left < 0.75 * R:
      R = max([r for r in sizes if r <= left])
    return R


def tell_dtype(dtype: str) -> str:
  """The dtype meant: auto is float32 on CPU, bfloat16 on accelerators.

  Raises:
    ValueError: it is none of these.
  """
  if dtype == 'auto':
    return DTYPES[jax.default_backend() != 'cpu']
  if dtype not in DTYPES:
    raise ValueError(f'dtype={dtype!r}; expected auto, {", ".join(DTYPES)}')
  return dtype


def clean(text: str) -> str:
  """The text without lone surrogates, which no tokenizer takes."""
  return text.encode('utf-8', 'replace').decode('utf-8')


def sha256(path: pathlib.Path) -> str:
  """Of config, weights and tokenizer of a checkpoint folder."""
  digest = hashlib.sha256(repr(bert.read_config(path)).encode())
  files = [path / name for name in _TOKENIZER_FILES]
  for file in bert.weight_files(path) + [f for f in files if f.exists()]:
    with open(file, 'rb') as stream:
      digest.update(hashlib.file_digest(stream, 'sha256').digest())
  return digest.hexdigest()


class Encoder:
  """A dual encoder: queries and passages to vectors of D numbers."""

  def __init__(
    self,
    path: str | os.PathLike,
    *,
    family: str = 'auto',
    dtype: str = 'auto',
    pooling: str | None = None,
    normalise: bool | None = None,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    query_length: int | None = None,
    passage_length: int | None = None,
    batch: int | None = None,
  ):
    """Loads a checkpoint folder onto all devices of this process.

    Args:
      path: config.json, *.safetensors, and tokenizer.json or vocab.txt.
      family: a key of `FAMILIES`, or 'auto': see the module.
      dtype: of parameters and activations: float32, bfloat16, or auto, see
        `tell_dtype`. Vectors come out in float32.
      pooling, normalise, query_prefix, passage_prefix: instead of what the
        folder and its family say.
      query_length, passage_length: tokens kept, [CLS] and [SEP] included;
        None: 256 and 180, or all positions of a model that has fewer.
      batch: the most tokens of a batch; None: what suits the device.

    Raises:
      FileNotFoundError, ValueError: see `bert.load`, `tell_family`, `Tokens`.
    """
    path = pathlib.Path(path)
    dtype = tell_dtype(dtype)
    if pooling not in (None, *POOLINGS):
      raise ValueError(f'pooling={pooling!r}; expected {", ".join(POOLINGS)}')
    self.cfg = bert.read_config(path)
    self.family = tell_family(path, family)
    given = {
      'pooling': pooling,
      'normalise': normalise,
      'query_prefix': query_prefix,
      'passage_prefix': passage_prefix,
    }
    self.usage = dataclasses.replace(
      FAMILIES[self.family],
      **_modules(path) | {k: v for k, v in given.items() if v is not None},
    )
    self.tokens = Tokens(path, self.cfg, batch)
    positions = self.cfg.max_position_embeddings
    if query_length is None:
      query_length = min(_QUERY_LENGTH, positions)
    if passage_length is None:
      passage_length = min(_PASSAGE_LENGTH, positions)
    self._kinds = {
      'query': self.tokens.to_length('query_length', query_length),
      'passage': self.tokens.to_length('passage_length', passage_length),
    }
    self.dim = self.cfg.hidden_size
    self.dtype = dtype
    self.query_length, self.passage_length = query_length, passage_length
    self._sha256 = sha256(path)
    self.mesh = data_mesh()
    _, params = bert.load(path, jnp.dtype(dtype))
    self.params = jax.device_put(
      params, NamedSharding(self.mesh, PartitionSpec())
    )
    self._embed = jax.jit(self.embed)

  @property
  def parameters(self) -> dict[str, Any]:
    """What passage vectors depend on, for JSON."""
    return {
      'family': self.family,
      'pooling': self.usage.pooling,
      'normalise': self.usage.normalise,
      'query_prefix': self.usage.query_prefix,
      'passage_prefix': self.usage.passage_prefix,
      'passage_length': self.passage_length,
      'dim': self.dim,
      'sha256': self._sha256,
    }

  def embed(self, params, ids, lengths):
    """Vectors of a batch, float32 [R, D]; traceable.

    Args:
      params: `self.params`.
      ids: int32 [R, T], padded on the right.
      lengths: int32 [R], >= 1.
    """
    x = bert.encode(params, self.cfg, ids, lengths).astype(jnp.float32)
    if self.usage.pooling == 'cls':
      x = x[:, 0]
    else:
      inside = jnp.arange(ids.shape[1]) < lengths[:, None]
      x = jnp.where(inside[:, :, None], x, 0).sum(1) / lengths[:, None]
    if self.usage.normalise:
      norm = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
      x /= jnp.maximum(norm, 1e-12)
    return x

  def batches(
    self, texts: Sequence[str], kind: str
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Tokenises, and yields what `embed` takes (see `put`).

    Args:
      texts: [N], any Unicode.
      kind: 'query' or 'passage'.

    Yields:
      (positions [n] in texts, ids [R, T], lengths [R]), n <= R.
    """
    prefix = getattr(self.usage, f'{kind}_prefix')
    tokenizer = self._kinds[kind]
    found = tokenizer.encode_batch_fast([prefix + clean(t) for t in texts])
    rows = [encoding.ids for encoding in found]
    limit = tokenizer.truncation['max_length']
    for at, R, T in self.tokens.batches(
      [len(row) for row in rows], limit, kind == 'query'
    ):
      ids, lengths = np.zeros((R, T), np.int32), np.ones(R, np.int32)
      for r, i in enumerate(at):
        ids[r, : len(rows[i])] = rows[i]
        lengths[r] = len(rows[i])
      yield at, ids, lengths

  def shapes(self, count: int) -> list[tuple[int, int]]:
    """Every [R, T] that `batches` makes of at most `count` queries."""
    return self.tokens.shapes(count, self.query_length, query=True)

  def programs(self, count: int) -> list[Callable[[], None]]:
    """Calls, each of which compiles one program or loads it from the disk.

    They may run in any threads. After all of them, `encode_queries` compiles
    nothing for at most `count` queries of any length.
    """
    return [
      functools.partial(self._compile, *shape) for shape in self.shapes(count)
    ]

  def _compile(self, R: int, T: int) -> None:
    self._embed.lower(self.params, *self.blank(R, T)).compile()

  def blank(self, R: int, T: int) -> tuple[jax.Array, jax.Array]:
    """What `embed` takes, of that shape: a batch to compile for."""
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
    done = [
      (at, self._embed(self.params, *put(self.mesh, *batch)))
      for at, *batch in self.batches(texts, kind)
    ]
    for at, vectors in done:
      out[at] = np.asarray(vectors)[: len(at)]
    return out
