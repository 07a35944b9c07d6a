"""A Hugging Face fast tokenizer in which outside text has no control tokens.

Control tokens are parsed in the project's own text only. Outside text (a
passage, a question) is encoded by a second backend with the same vocabulary but
without added tokens, because `split_special_tokens=True` of transformers 5
still parses added tokens that are not marked special, such as Qwen3's `<think>`
and `<tool_call>`.

`token_bytes` gives the exact bytes of each token, so that stop strings and tags
can be found without decoding sequences again.
"""

from collections.abc import Iterable, Mapping, Sequence
import datetime
import functools
import json
import os
import pathlib
import re
from typing import Any

# Without this, every import of transformers warns that torch is absent.
# TRANSFORMERS_VERBOSITY still sets the log level.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from searchrl_jax.lookup import of, require, require_content

# Tokens that end a turn in the chat formats of the supported families, if the
# tokenizer marks them as special.
END_OF_TURN = (
  '<|endoftext|>', '<|im_end|>', '<|end_of_text|>', '<|eot_id|>', '<|eom_id|>',
  '<end_of_turn>',
)  # fmt: skip

# Decoders that decode each token independently.
DECODERS = 'ByteFallback ByteLevel Fuse Metaspace Replace Strip'.split()
# The printable character that represents each byte.
_BYTES = {char: byte for byte, char in bytes_to_unicode().items()}

# Chat templates that show the day show this one (Llama 3.2's own default), so
# that prompts do not change at midnight.
_DAY = datetime.date(2024, 7, 26)
_ASKS_DAY = re.compile('strftime_now\\(([\'"])(.*?)\\1\\)')
PAD, EOS = '<|pad|>', '<|eos|>'

# Words, single digits, punctuation and spaces, as in Qwen2.
_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def _whole(text: str) -> str:
  """Replaces lone surrogates, which cannot be encoded in UTF-8."""
  if text.isascii():
    return text
  return text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
  """A part of tokenizer.json without the space that it puts before a text."""
  kind = part.get('type')
  if kind == 'Prepend':
    return {'type': 'Sequence', 'normalizers': []}
  if kind == 'Metaspace':
    part.pop('add_prefix_space', None)
    return part | {'prepend_scheme': 'never'}
  return part | ({'add_prefix_space': False} if kind == 'ByteLevel' else {})


class Tokenizer:
  """Text to ids and ids to bytes.

  Attributes:
    path: the folder or hub name of its files.
    vocab_size: number of ids, with added tokens. A model's embedding may have
      more rows (padding); such ids have no bytes.
    needed: the same without control tokens at the end that end no turn, for
      which a model may have no rows (Gemma 3 1B, and <image_soft_token>).
    eos_ids: ids that end a turn: the tokenizer's first, then those of
      generation_config.json and its special end-of-turn tokens.
    bos_id: None = the tokenizer has none.
    control: ids of control tokens, which have no bytes.
    token_bytes: id -> bytes of the token. The bytes of a sequence are those of
      its tokens. Control tokens, and ids beyond the vocabulary, have none, so
      they cannot complete a tag or a stop string.
  """

  def __init__(self, hf, path: str = '', eos: Sequence[int | None] = ()):
    """`hf` is a transformers.PreTrainedTokenizerFast, `eos` are ids of
    generation_config.json, which `load` reads.

    Raises:
      ValueError: there is no eos, or tokens do not concatenate to the text.
    """
    self.path, self._hf, self._unk = path, hf, hf.unk_token_id
    self._chat = hf.chat_template
    if isinstance(self._chat, dict):  # several, by name
      self._chat = self._chat.get('default')
    if isinstance(self._chat, str):
      day = lambda match: repr(_DAY.strftime(match[2]))
      self._chat = _ASKS_DAY.sub(day, self._chat)
    spec = json.loads(hf.backend_tokenizer.to_str())
    decoder = spec['decoder'] or {'type': 'no decoder'}
    # Steps, each of which decodes single tokens.
    self._decoders: list[dict] = decoder.get('decoders', [decoder])
    kinds = {step['type'] for step in self._decoders}
    what = f'of {sorted(kinds)} has no bytes; known are {", ".join(DECODERS)}'
    known = kinds <= {*DECODERS}
    require(known, f'tokenizer {path}: a single token {what}')
    # Neither added tokens nor post-processing, and this class decodes.
    none = ('post_processor', 'truncation', 'padding', 'decoder')
    spec |= {'added_tokens': [], **dict.fromkeys(none)}
    self._vocab = hf.backend_tokenizer.get_vocab(with_added_tokens=True)
    self.vocab_size = max(len(hf), max(self._vocab.values()) + 1)
    added = hf.backend_tokenizer.get_added_tokens_decoder()
    self._added = {i: t.content for i, t in added.items()}
    special_ids = {i for i, t in added.items() if t.special}
    self.control = frozenset(special_ids - {self._unk})
    self._flags = {t.content: (i, t) for i, t in added.items()}
    names = sorted(self._flags, key=len, reverse=True)
    # '(?!)' never matches.
    self._added_re = re.compile('|'.join(map(re.escape, names)) or '(?!)')
    first = json.dumps(spec)
    # Appended text has no space before it, unlike the start of a sequence.
    inner = json.dumps(json.loads(first, object_hook=_without_prefix))
    self._backend = tokenizers.Tokenizer.from_str(inner)
    self._start = self._backend
    if first != inner:
      self._start = tokenizers.Tokenizer.from_str(first)
    # The default cache of 10,000 words is too small for passages.
    if hasattr(self._backend.model, '_resize_cache'):  # BPE and Unigram
      self._backend.model._resize_cache(1 << 17)
    self.token_bytes = functools.cache(self._find_bytes)

    special = {self._added[i]: i for i in self.control}
    ends = [hf.eos_token_id, *eos, *map(special.get, END_OF_TURN)]
    self.eos_ids = tuple(dict.fromkeys(int(i) for i in ends if i is not None))
    fix = 'name one in tokenizer_config.json'
    require(self.eos_ids, f'tokenizer {path}: no eos_token; {fix}')
    self.bos_id = hf.bos_token_id
    shown = str(hf.chat_template or '')
    used = {i for i in self.control if self._added[i] in shown}
    unused = self.control - used.union(self.eos_ids, [self.bos_id])
    self.needed = self.vocab_size
    while self.needed - 1 in unused:
      self.needed -= 1
    opening = hf.encode('', add_special_tokens=True)
    self._opening = [i for i in opening if i == self.bos_id][:1]

  # Text to ids.

  def encode(self, text: str) -> list[int]:
    """Encodes outside text, without control and added tokens."""
    return self.encode_parts([(text, False)])

  def encode_template(self, text: str, start: bool = False) -> list[int]:
    """Encodes our own text, in which control tokens are parsed."""
    return self.encode_parts([(text, True)], start=start)

  def encode_parts(
    self, parts: Iterable[tuple[str, bool]], start: bool = False
  ) -> list[int]:
    """Encodes (text, ours) parts as one text.

    Added tokens are parsed in our parts only. Ordinary text is encoded across
    parts, so a question in a slot has the same tokens as in running text.
    `start`: the parts start a sequence; adds bos and the tokenizer's leading
    space, if it has them.
    """
    runs: list[str | int] = ['']  # text, and ids of added tokens between
    for text, ours in parts:
      at = 0
      for match in self._added_re.finditer(text) if ours else ():
        i, token = self._flags[match.group()]
        before = text[at : match.start()]
        runs[-1] += before.rstrip() if token.lstrip else before
        runs += [i, '']
        at = match.end()
        if token.rstrip:
          at += len(text[at:]) - len(text[at:].lstrip())
      runs[-1] += text[at:]
    first, *runs = runs
    ids = self._encode_text(first, self._start if start else self._backend)
    if start and (first or runs[:1] != [self.bos_id]):
      ids = self._opening + ids
    for run in runs:
      ids += [run] if isinstance(run, int) else self._encode_text(run)
    return ids

  def normalised(self, text: str) -> str:
    """What the tokenizer's normaliser makes of text before it is encoded."""
    normaliser = self._backend.normalizer
    return normaliser.normalize_str(_whole(text)) if normaliser else text

  def _encode_text(self, text: str, backend=None) -> list[int]:
    if not text:
      return []
    text, backend = _whole(text), backend or self._backend
    # Faster than `encode`, which also computes offsets.
    (fast,) = backend.encode_batch_fast([text], add_special_tokens=False)
    if self.control.isdisjoint(fast.ids):
      return fast.ids
    encoding = backend.encode(text, add_special_tokens=False)
    # In some vocabularies (WordLevel, Unigram) control tokens are also words;
    # encode these by character.
    ids: list[int] = []
    for i, (a, b) in zip(encoding.ids, encoding.offsets, strict=True):
      chars = text[a:b] if i in self.control else ()
      spelt = [i for c in chars for i in self._backend.encode(c).ids] or [i]
      ids += [self._unk if j in self.control else j for j in spelt]
    return [i for i in ids if i is not None]

  # Ids to text.

  def _find_bytes(self, token_id: int) -> bytes:
    require(token_id >= 0, f'token id {token_id} is negative', ValueError)
    token = self._hf.backend_tokenizer.id_to_token(int(token_id))
    if token_id in self.control or token is None:
      return b''
    bytewise = 'ByteLevel', 'ByteFallback'
    for step in self._decoders:
      if token_id in self._added and step['type'] in bytewise:
        continue  # its text is written as it is
      if step['type'] == 'ByteLevel':
        if all(c in _BYTES for c in token):
          return bytes(_BYTES[c] for c in token)
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

  def decode(self, ids: Iterable[int]) -> str:
    """Decodes ids, without control tokens."""
    pieces = (self.token_bytes(int(i)) for i in ids)
    return b''.join(pieces).decode('utf-8', 'replace')

  def control_name(self, token_id: int) -> str:
    """How a control token is written, such as '<|im_end|>'."""
    return self._added[token_id]

  @functools.cached_property
  def max_token_bytes(self) -> int:
    """An upper bound of the bytes of a token."""
    return max(map(len, map(str.encode, self._vocab)))

  # Chat.

  @property
  def has_chat(self) -> bool:
    return bool(self._hf.chat_template)

  def has_added(self, text: str) -> bool:
    """Whether our own text would have an added token here."""
    return bool(self._added_re.search(text))

  def chat(
    self, messages: Sequence[Mapping[str, Any]], tools=(), reply: bool = True
  ) -> str:
    """Renders messages by the chat template.

    Args:
      messages: role, content and what else the template reads.
      tools: their schemas, for templates that show them.
      reply: up to the start of a reply.

    Raises:
      ValueError: there is no chat template, or it rejects the messages.
    """
    fix = "use one whose prompt is plain text, such as env.template='base'"
    require(self.has_chat, f'{self.path} has no chat template; {fix}')
    roles = [m.get('role') for m in messages]
    message = f'the chat template of {self.path} rejects the roles {roles}'
    with of(message, ValueError, Exception):  # templates can raise any error
      return self._hf.apply_chat_template(
        [dict(m) for m in messages],
        tools=[*tools] or None,
        tokenize=False,
        add_generation_prompt=reply,
        chat_template=self._chat,
      )

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the Hugging Face files, which `load(folder)` reads."""
    self._hf.save_pretrained(folder)


def load(path: str | os.PathLike) -> Tokenizer:
  """Reads a Hugging Face tokenizer folder, or a model's name on the hub.

  Raises:
    ValueError: no such folder, no tokenizer in it, or one that is not fast.
  """
  path = os.fspath(path)
  require(path, 'no tokenizer: set config.model.tokenizer or .path to a folder')
  folder = pathlib.Path(path)
  known = folder.is_dir() or re.fullmatch(r'[\w.-]+/[\w.-]+', path)
  require(known, f'tokenizer folder {path} does not exist')
  for file in folder.iterdir() if folder.is_dir() else ():
    if file.suffix in ('.json', '.jinja', '.txt', '.model'):  # no weights
      require_content(file)
  # The generic class uses tokenizer.json unchanged; the class of a model would
  # build another backend.
  kind = transformers.AutoTokenizer
  if (folder / 'tokenizer.json').is_file():
    kind = transformers.PreTrainedTokenizerFast
  # transformers raises many kinds of errors.
  with of(f'no tokenizer could be read from {path}', ValueError, Exception):
    hf = kind.from_pretrained(path, local_files_only=folder.is_dir())
  fast = getattr(hf, 'is_fast', False)
  fast = fast and hf('a', add_special_tokens=False)['input_ids']
  files = 'tokenizer.json, or vocab.json and merges.txt'
  fix = 'set config.model.tokenizer to another folder'
  require(fast, f'{path} holds no fast tokenizer ({files}); {fix}')
  generation, eos = folder / 'generation_config.json', None
  if generation.is_file():
    with of(f'{generation}: not JSON'):
      eos = json.loads(generation.read_text('utf-8')).get('eos_token_id')
  return Tokenizer(hf, path, eos if isinstance(eos, list) else [eos])


def train_bpe(
  texts: Iterable[str], vocab_size: int, folder: str | os.PathLike
) -> Tokenizer:
  """Trains a byte-level BPE and saves it as a Hugging Face folder.

  Special tokens are `<|pad|>` and `<|eos|>`; protocol tags are ordinary text.
  Any text can be encoded: all 256 bytes are in the vocabulary.

  Raises:
    ValueError: vocab_size below the 256 bytes and 2 special tokens.
  """
  what = 'at least 258 (all bytes, 2 special)'
  require(vocab_size >= 258, f'config.model.bpe_vocab={vocab_size}: {what}')
  backend = tokenizers.Tokenizer(models.BPE())
  words = pre_tokenizers.Split(tokenizers.Regex(_SPLIT), 'isolated')
  chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.pre_tokenizer = pre_tokenizers.Sequence([words, chars])
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
