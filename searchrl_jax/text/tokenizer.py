"""A Hugging Face fast tokenizer that never lets outside text act.

Control tokens are parsed in our own template text alone. Text from outside (a
passage, a question) goes through a second backend, made of the same vocabulary
with no added token at all: `split_special_tokens=True` of transformers 5
still parses added tokens that are not marked special, such as Qwen3's
`<think>` and `<tool_call>`.

`token_bytes` gives the exact bytes of each token, so that stop strings and
tags can be found without decoding whole sequences again.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
import json
import os
import pathlib
import re
from typing import Any

# transformers says on every import that torch is absent; nothing here needs
# it. The log level set through TRANSFORMERS_VERBOSITY still holds.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
import transformers

from searchrl_jax.run import lookup

# Names that end a turn in the chat formats of the supported families. They
# count only where the tokenizer marks them as special.
END_OF_TURN = (
  '<|endoftext|>',
  '<|im_end|>',
  '<|end_of_text|>',
  '<|eot_id|>',
  '<|eom_id|>',
)

# Decoders under which a token has bytes of its own.
DECODERS = (
  'ByteFallback', 'ByteLevel', 'Fuse', 'Metaspace', 'Replace', 'Strip',
)  # fmt: skip

PAD, EOS = '<|pad|>', '<|eos|>'

# Words, runs of digits by one, punctuation and spaces, as in Qwen2.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@functools.cache
def _byte_alphabet() -> dict[str, int]:
  """The GPT-2 alphabet: the printable character that stands for each byte."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [b for b in range(256) if b not in shown]
  table = {chr(b): b for b in shown}
  table.update({chr(256 + i): b for i, b in enumerate(hidden)})
  return table


def _whole(text: str) -> str:
  """Replaces lone surrogates, which no UTF-8 tokenizer takes."""
  try:
    text.encode('utf-8')
  except UnicodeEncodeError:
    return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  return text


def _plain(spec: Mapping[str, Any], *, start: bool) -> dict[str, Any]:
  """`spec` (a tokenizer.json) without added tokens and post-processing.

  Unless `start`, the space that sentencepiece puts before a text goes too:
  it belongs to the start of a sequence, not to text appended to one.
  """
  spec = dict(spec)
  spec.update(
    added_tokens=[], post_processor=None, truncation=None, padding=None
  )
  if not start:
    norm = spec.get('normalizer')
    if norm and norm['type'] == 'Sequence':
      kept = [n for n in norm['normalizers'] if n['type'] != 'Prepend']
      spec['normalizer'] = {**norm, 'normalizers': kept} if kept else None
    elif norm and norm['type'] == 'Prepend':
      spec['normalizer'] = None

    def without_prefix(pre):
      if pre is None:
        return None
      pre = dict(pre)
      if pre['type'] == 'Sequence':
        pre['pretokenizers'] = [without_prefix(p) for p in pre['pretokenizers']]
      elif pre['type'] == 'Metaspace':
        pre['prepend_scheme'] = 'never'
        pre.pop('add_prefix_space', None)
      elif pre['type'] == 'ByteLevel':
        pre['add_prefix_space'] = False
      return pre

    spec['pre_tokenizer'] = without_prefix(spec.get('pre_tokenizer'))
  return spec


class Tokenizer:
  """Text to ids and ids to bytes.

  Attributes:
    path: the folder (or hub name) it came from.
    vocab_size: ids are below it, added tokens included. A model's embedding
      may have more rows (padding); such ids have no bytes.
    eos_ids: ids that end a turn: the tokenizer's own first, then those of
      generation_config.json and the end-of-turn tokens it marks special.
    pad_id: the padding id; the first eos where the tokenizer has none. No
      mask may depend on it: lengths are kept apart.
    bos_id: None where the tokenizer has none.
    control: ids of control tokens, which have no bytes.
    token_bytes: id -> the bytes of the token; a sequence's bytes are its
      tokens' in a row. Control tokens, and ids beyond the vocabulary, have
      none: they cannot complete a tag or a stop string.
  """

  def __init__(
    self,
    hf: transformers.PreTrainedTokenizerFast,
    path: str = '',
    eos: Sequence[int] = (),
  ):
    """`eos` are ids from generation_config.json. `load` finds them.

    Raises:
      ValueError: no eos, or tokens that do not concatenate to the text.
    """
    self.path = path
    self._hf = hf
    spec = json.loads(hf.backend_tokenizer.to_str())
    self._decoders = self._read_decoder(spec.get('decoder'))
    self._vocab = hf.backend_tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = max(len(hf), max(self._vocab.values()) + 1)
    added = hf.backend_tokenizer.get_added_tokens_decoder()
    self._added = {i: t.content for i, t in added.items()}
    unk = hf.unk_token_id
    self.control = frozenset(
      i for i, t in added.items() if t.special and i != unk
    )
    self._unk = unk
    self._flags = {t.content: (i, t) for i, t in added.items()}
    names = sorted(self._flags, key=len, reverse=True)
    self._added_re = (
      re.compile('|'.join(map(re.escape, names))) if names else None
    )
    inner, first = _plain(spec, start=False), _plain(spec, start=True)
    self._backend = tokenizers.Tokenizer.from_str(json.dumps(inner))
    self._start = self._backend
    if first != inner:
      self._start = tokenizers.Tokenizer.from_str(json.dumps(first))
    # Its 10,000 words are few for passages: a third of their time was merging.
    if hasattr(self._backend.model, '_resize_cache'):  # BPE and Unigram
      self._backend.model._resize_cache(1 << 17)
    self.token_bytes = functools.cache(self._find_bytes)

    special = {self._added[i]: i for i in self.control}
    ends = [] if hf.eos_token_id is None else [hf.eos_token_id]
    ends += [*eos, *(special[n] for n in END_OF_TURN if n in special)]
    if not ends:
      raise ValueError(
        f'tokenizer {path}: no eos_token; name one in tokenizer_config.json'
      )
    self.eos_ids = tuple(dict.fromkeys(int(i) for i in ends))
    pad = hf.pad_token_id
    self.pad_id = self.eos_ids[0] if pad is None else pad
    self.bos_id = hf.bos_token_id
    opening = hf.encode('', add_special_tokens=True)
    self._opening = [i for i in opening if i == self.bos_id][:1]

  def _read_decoder(self, spec) -> list[Mapping[str, Any]]:
    """The decoder as a list of steps, each of which works token by token."""
    if spec is None:
      raise ValueError(
        f'tokenizer {self.path}: tokenizer.json has no decoder, so its tokens '
        'are joined by spaces; give it "decoder": {"type": "Fuse"} if they '
        'concatenate to the text'
      )
    steps = spec['decoders'] if spec['type'] == 'Sequence' else [spec]
    for step in steps:
      if step['type'] not in DECODERS:
        raise ValueError(
          f'tokenizer {self.path}: the bytes of single tokens are unknown '
          f'under decoder {step["type"]!r}; known are {", ".join(DECODERS)}'
        )
    return steps

  # Text to ids.

  def encode(self, text: str) -> list[int]:
    """Ids of text from outside: no control or added token can come out."""
    return self.encode_parts([(text, False)])

  def encode_template(self, text: str, start: bool = False) -> list[int]:
    """Ids of our own text: control tokens written in it are control tokens."""
    return self.encode_parts([(text, True)], start=start)

  def encode_parts(
    self, parts: Iterable[tuple[str, bool]], start: bool = False
  ) -> list[int]:
    """Ids of (text, ours) parts, tokenised as one text.

    Added tokens are parsed in our parts only. Ordinary text is encoded across
    the borders of parts, so that a question in a slot gets the tokens that it
    would have in running text. `start`: the first text of a sequence; bos
    and the tokenizer's leading space are added where it has them.
    """
    runs: list[str | int] = []

    def put(text):
      if runs and isinstance(runs[-1], str):
        runs[-1] += text
      elif text:
        runs.append(text)

    for text, ours in parts:
      if not ours or self._added_re is None:
        put(text)
        continue
      at = 0
      for match in self._added_re.finditer(text):
        i, token = self._flags[match.group()]
        before = text[at : match.start()]
        put(before.rstrip() if token.lstrip else before)
        runs.append(i)
        at = match.end()
        if token.rstrip:
          at += len(text[at:]) - len(text[at:].lstrip())
      put(text[at:])
    ids: list[int] = []
    if start and not (runs and runs[0] == self.bos_id):
      ids += self._opening
    for n, run in enumerate(runs):
      if isinstance(run, int):
        ids.append(run)
      else:
        ids += self._encode_text(run, self._start if start and n == 0 else None)
    return ids

  def _encode_text(self, text: str, backend=None) -> list[int]:
    text = _whole(text)
    backend = backend or self._backend
    # Faster than `encode`, without the offsets that are needed below.
    (fast,) = backend.encode_batch_fast([text], add_special_tokens=False)
    if self.control.isdisjoint(fast.ids):
      return fast.ids
    encoding = backend.encode(text, add_special_tokens=False)
    # A vocabulary that holds its control tokens as ordinary words (WordLevel,
    # Unigram): spell such a word out.
    ids: list[int] = []
    for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True):
      if i not in self.control:
        ids.append(i)
        continue
      for char in text[a:b]:
        spelt = self._backend.encode(char, add_special_tokens=False).ids
        ids += [
          self._unk if j in self.control else j
          for j in spelt
          if j not in self.control or self._unk is not None
        ]
    return ids

  # Ids to text.

  def _find_bytes(self, token_id: int) -> bytes:
    token_id = int(token_id)
    if token_id < 0:
      raise ValueError(f'token id {token_id} is negative')
    if token_id in self.control or token_id >= self.vocab_size:
      return b''
    if token_id in self._added:
      return self._added[token_id].encode('utf-8')
    token = self._hf.backend_tokenizer.id_to_token(token_id)
    if token is None:
      return b''
    for step in self._decoders:
      if step['type'] == 'ByteLevel':
        table = _byte_alphabet()
        if all(c in table for c in token):
          return bytes(table[c] for c in token)
      elif step['type'] == 'ByteFallback':
        if re.fullmatch(r'<0x[0-9A-Fa-f]{2}>', token):
          return bytes([int(token[3:5], 16)])
      elif step['type'] == 'Metaspace':
        token = token.replace(step['replacement'], ' ')
      elif step['type'] == 'Replace':
        pattern = step['pattern']
        if 'String' in pattern:
          token = token.replace(pattern['String'], step['content'])
        else:
          token = re.sub(pattern['Regex'], step['content'], token)
    return token.encode('utf-8')

  def text_bytes(self, ids: Iterable[int]) -> bytes:
    return b''.join(self.token_bytes(int(i)) for i in ids)

  def decode(self, ids: Iterable[int], control: bool = False) -> str:
    """The text of ids; `control` also shows control tokens, by name."""
    if control:
      pieces = (
        self._added[int(i)].encode('utf-8')
        if int(i) in self.control
        else self.token_bytes(int(i))
        for i in ids
      )
      return b''.join(pieces).decode('utf-8', 'replace')
    return self.text_bytes(ids).decode('utf-8', 'replace')

  @functools.cached_property
  def max_token_bytes(self) -> int:
    """No token has more bytes."""
    if any(step['type'] == 'ByteLevel' for step in self._decoders):
      longest = max(map(len, self._vocab))  # a character for each byte
      return max(longest, *(len(t.encode()) for t in self._added.values()))
    return max(len(t.encode('utf-8')) for t in self._vocab)

  # Chat.

  @property
  def has_chat(self) -> bool:
    return bool(self._hf.chat_template)

  def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as text, by the tokenizer's chat template, ready for a reply.

    Raises:
      ValueError: it has no chat template, or the template refuses these.
    """
    if not self.has_chat:
      raise ValueError(
        f'tokenizer {self.path} has no chat template; use a template whose '
        "prompt is plain text, such as env.template='base'"
      )
    try:
      return self._hf.apply_chat_template(
        [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
      )
    except ImportError:  # jinja2 is absent: the message says so
      raise
    except Exception as e:  # jinja raises whatever the template says
      roles = [m.get('role') for m in messages]
      raise ValueError(
        f'the chat template of {self.path} refuses messages of roles '
        f'{roles}: {e}'
      ) from e

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the Hugging Face files, so that `load(folder)` gives it again."""
    self._hf.save_pretrained(folder)


def load(path: str | os.PathLike) -> Tokenizer:
  """Reads a Hugging Face tokenizer folder, or a model's name on the hub.

  Raises:
    ValueError: no such folder, no tokenizer in it, or one that is not fast.
  """
  path = os.fspath(path)
  folder = pathlib.Path(path)
  lookup.require(
    path,
    'no tokenizer: set config.model.tokenizer (or config.model.path) to a '
    'folder with tokenizer.json',
  )
  local = folder.is_dir()
  on_hub = not folder.exists() and re.fullmatch(r'[\w.-]+/[\w.-]+', path)
  lookup.require(local or on_hub, f'tokenizer folder {path} does not exist')
  try:
    if (folder / 'tokenizer.json').is_file():
      # The generic class takes tokenizer.json as it stands; the model's own
      # class would build the backend again from its own idea of it.
      hf = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    else:
      hf = transformers.AutoTokenizer.from_pretrained(
        path, local_files_only=local
      )
  except Exception as e:  # transformers raises many kinds, some bare
    raise ValueError(
      f'no tokenizer could be read from {path}: {e}; a folder needs '
      'tokenizer.json, or vocab.json, merges.txt and tokenizer_config.json'
    ) from e
  if len(hf) < 2 or not hf('a', add_special_tokens=False)['input_ids']:
    raise ValueError(
      f'{path} holds no tokenizer (a folder needs tokenizer.json, or '
      'vocab.json, merges.txt and tokenizer_config.json); set '
      'config.model.tokenizer to one that does'
    )
  lookup.require(
    getattr(hf, 'is_fast', False),
    f'tokenizer {path} is not a fast one: no tokenizer.json',
  )
  eos: list[int] = []
  generation = folder / 'generation_config.json'
  if generation.is_file():
    try:
      found = json.loads(generation.read_text('utf-8')).get('eos_token_id')
    except json.JSONDecodeError as e:
      raise ValueError(f'{generation}: not JSON: {e}') from e
    eos = found if isinstance(found, list) else [] if found is None else [found]
  return Tokenizer(hf, path, eos)


def train_bpe(
  texts: Iterable[str], vocab_size: int, folder: str | os.PathLike
) -> Tokenizer:
  """Trains a byte-level BPE and saves it as a Hugging Face folder.

  Special tokens are `<|pad|>` and `<|eos|>`; protocol tags are ordinary text.
  Any text can be encoded: all 256 bytes are in the vocabulary.

  Raises:
    ValueError: vocab_size below the 256 bytes and 2 special tokens.
  """
  lookup.require(
    vocab_size >= 258,
    f'train_bpe: vocab_size={vocab_size}; 256 bytes and 2 special tokens '
    'need at least 258',
  )
  backend = tokenizers.Tokenizer(models.BPE())
  backend.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_SPLIT), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[PAD, EOS],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  backend.train_from_iterator(map(_whole, texts), trainer)
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token=EOS, pad_token=PAD
  )
  hf.save_pretrained(os.fspath(folder))
  return load(folder)
