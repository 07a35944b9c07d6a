"""Makes a small-machine version of a model: fewer entries in its vocabulary.

  python -m searchrl_jax.prune --model=gemma-3-270m --out=gemma-3-270m-small \\
    --texts=corpus.jsonl.gz,qa_train.jsonl.gz --always=template.json

Kept are the entries that occur at least --min_count times in the texts, those
that occur in --always, those that their merges pass through, all bytes and
special tokens (but unused ones), and then the most frequent others, up to a
multiple of 128. A text whose tokens are all kept is tokenised as before, to the
new ids, and has equal logits but for a constant; other texts get more tokens.

  python -m searchrl_jax.prune --model=gemma-3-270m --out=whole \\
    --restore=trained

puts a trained small version (a Hugging Face folder, as `export` writes it, with
the file kept.json of the small version) into the whole model: all layers, and
the rows of embedding and head that were kept.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
import pathlib
import re
from typing import Any

from absl import flags
import jax
import numpy as np
import tokenizers

from retrieval import files
from searchrl_jax import lookup
from searchrl_jax.data import jsonl
from searchrl_jax.models import pretrained
from searchrl_jax.run import command
from searchrl_jax.store import progress
from searchrl_jax.text import tokenizer

KEPT = 'kept.json'  # in the small version's folder: the ids that were kept
MULTIPLE = 128
# Of a line of JSON: texts, and lists of them.
FIELDS = (
  'contents title text question golden_answers answers answer prompt'
).split()
_UNUSED = re.compile('unused|reserved', re.IGNORECASE)
_BATCH = 1000
# Files that a tokenizer has beside tokenizer.json.
_COPIED = (
  'tokenizer_config.json special_tokens_map.json chat_template.jinja '
  'generation_config.json'
).split()


def read_texts(path: str) -> Iterator[str]:
  """FIELDS of .jsonl and .jsonl.gz files; the strings of a .json file; the
  whole of another file."""
  kinds = pathlib.Path(path).suffixes
  if '.jsonl' not in kinds:
    lookup.require(pathlib.Path(path).is_file(), f'{path}: no such file')
    damaged = ValueError, *files.DAMAGED
    with lookup.of(f'{path} is no text in UTF-8, or no JSON', caught=damaged):
      with open(path, 'rb') as raw:
        text = files.unpacked(raw)[1].read().decode('utf-8')
      found = [*_strings(json.loads(text))] if '.json' in kinds else [text]
    yield from found
    return
  for _, record in jsonl.read(path):
    values = (record.get(field, ()) for field in FIELDS)
    for value in values:
      texts = [value] if isinstance(value, str) else value
      yield from (text for text in texts if isinstance(text, str))


def _strings(value: Any) -> Iterator[str]:
  """All strings of a value of JSON, keys too."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, list):
    for item in value:
      yield from _strings(item)
  elif isinstance(value, dict):
    yield from _strings([*value, *value.values()])


def count(backend, texts: Iterable[str], size: int) -> np.ndarray:
  """How often each id below `size` occurs, int64."""
  out, rest = np.zeros(size, np.int64), iter(texts)
  while batch := [*itertools.islice(rest, _BATCH)]:
    for found in backend.encode_batch_fast(batch, add_special_tokens=False):
      np.add.at(out, found.ids, 1)
  return out


def without_added(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """As outside text is tokenised."""
  return tokenizers.Tokenizer.from_str(json.dumps({**spec, 'added_tokens': []}))


def ways(model: Mapping[str, Any]) -> dict[int, list[int]]:
  """The entries that merges make -> those that they pass through.

  Merges within a token are the same in every text: one across its border would
  have made another token.
  """
  vocab, ranks = model['vocab'], {}
  for merge in model['merges']:
    pair = tuple(merge.split(' ') if isinstance(merge, str) else merge)
    ranks[pair] = len(ranks)

  def way(token: str) -> list[int]:
    parts, seen = list(token), set(token)
    while len(parts) > 1:
      pairs = [ranks.get(p, len(ranks)) for p in zip(parts, parts[1:])]
      best = min(range(len(pairs)), key=pairs.__getitem__)
      if pairs[best] == len(ranks):
        break  # not reached from its characters
      parts[best : best + 2] = [parts[best] + parts[best + 1]]
      seen.add(parts[best])
    return [vocab[s] for s in seen if s in vocab]

  made = {a + b for a, b in ranks} & vocab.keys()
  return {vocab[token]: way(token) for token in made}


def choose(
  spec: Mapping[str, Any],
  counts: np.ndarray,
  needed: np.ndarray,
  least: int,
  entries: int,
) -> list[int]:
  """The ids to keep, ascending; a multiple of MULTIPLE of them.

  Args:
    spec: a tokenizer.json.
    counts: of every id, in the texts.
    needed: the same, in texts of which every entry is kept.
    least: the lowest count that is kept.
    entries: of the model; added tokens beyond them have no embedding. Added
      ones are kept, but for those of the vocabulary that are not special.

  Raises:
    ConfigError: it is no BPE.
  """
  model, added = spec['model'], spec['added_tokens']
  kind = model['type']
  lookup.require(kind == 'BPE', f'a tokenizer of type {kind}: expected a BPE')
  vocab, through = model['vocab'], ways(model)
  apart = [t for t in added if t['special'] or t['content'] not in vocab]
  special = {t['id'] for t in apart if t['id'] < entries}
  unused = {t['id'] for t in apart if _UNUSED.search(t['content'])}
  single = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  kept = special - unused
  for text, i in vocab.items():
    if text in single or re.fullmatch('<0x[0-9A-F]{2}>', text):
      kept.add(i)
  for i in np.flatnonzero((counts >= least) | (needed > 0)).tolist():
    kept |= {i, *through.get(i, ())}
  for i in np.argsort(-counts, kind='stable').tolist():
    room, more = -len(kept) % MULTIPLE, {i, *through.get(i, ())} - kept
    if room and len(more) <= room and not more & unused:
      kept |= more
  return sorted(kept)


def smaller(spec: Mapping[str, Any], ids: Sequence[int]) -> dict[str, Any]:
  """The tokenizer.json of the entries `ids`, whose places are their new ids."""
  place, model = {old: new for new, old in enumerate(ids)}, dict(spec['model'])
  vocab = {s: place[i] for s, i in model['vocab'].items() if i in place}

  def remains(merge) -> bool:
    a, b = merge.split(' ') if isinstance(merge, str) else merge
    return {a, b, a + b} <= vocab.keys()

  merges = [m for m in model['merges'] if remains(m)]
  added = [t for t in spec['added_tokens'] if t['id'] in place]
  return {
    **spec,
    'model': model | {'vocab': vocab, 'merges': merges},
    'added_tokens': [{**t, 'id': place[t['id']]} for t in added],
    'post_processor': _renumbered(spec['post_processor'], place, ('ids',)),
  }


def _renumbered(value: Any, place: Mapping[int, int], fields=None) -> Any:
  """The same with new ids in `fields`; None: in all that end in '_token_id'."""

  def new(x):
    return [place[i] for i in x] if isinstance(x, list) else place.get(x)

  if isinstance(value, list):
    return [_renumbered(x, place, fields) for x in value]
  if not isinstance(value, dict):
    return value
  return {
    k: new(x)
    if (k in fields if fields else k.endswith('_token_id'))
    else _renumbered(x, place, fields)
    for k, x in value.items()
  }


def prune(
  model: str, out: str, texts: Sequence[str], always: Sequence[str], least: int
) -> str:
  """Writes the small version of a folder; returns what it is, in a line.

  Raises:
    FileExistsError: `out` exists.
    ConfigError, DataError, ValueError: a file that cannot be used.
  """
  folder = pathlib.Path(model)
  tok, cfg = tokenizer.load(folder), pretrained.read_config(folder)
  spec = json.loads((folder / 'tokenizer.json').read_text('utf-8'))
  of = lambda files: (text for file in files for text in read_texts(file))
  whole, size = without_added(spec), max(tok.vocab_size, cfg.vocab_size)
  counts = count(whole, of(texts), size)
  needed = count(whole, of(always), size)
  ids = choose(spec, counts, needed, least, cfg.vocab_size)
  place, new = {old: i for i, old in enumerate(ids)}, smaller(spec, ids)
  after = int(count(without_added(new), of(texts), len(ids)).sum())
  _, params = pretrained.load(folder)
  for name, axis in (('embed', 0), ('head', 1)):
    if name in params:
      params[name] = params[name].take(np.array(ids), axis)
  files = {
    'tokenizer.json': json.dumps(new, ensure_ascii=False),
    KEPT: json.dumps({'entries': cfg.vocab_size, 'ids': ids}) + '\n',
  }
  for name in _COPIED:
    if (folder / name).exists():
      files[name] = (folder / name).read_text('utf-8')
      if name.endswith('.json'):
        fields = _renumbered(json.loads(files[name]), place)
        fields.pop('added_tokens_decoder', None)  # tokenizer.json has them
        files[name] = json.dumps(fields, indent=2) + '\n'
  pretrained.save(
    out,
    dataclasses.replace(cfg, vocab_size=len(ids)),
    params,
    like=_renumbered(pretrained.read_json(folder), place),
    files=files,
  )
  before = max(int(counts.sum()), 1)
  return (
    f'{out}: {len(ids):,} of {cfg.vocab_size:,} entries, with '
    f'{counts[ids].sum() / before:.2%} of the tokens of the texts; they '
    f'have {after:,} now, {after / before - 1:.1%} more'
  )


def _vocabulary(folder: str) -> dict[str, int]:
  spec = (pathlib.Path(folder) / 'tokenizer.json').read_text('utf-8')
  return json.loads(spec)['model']['vocab']


def restore(model: str, trained: str, out: str) -> str:
  """Writes the whole model with the weights of a trained small version.

  Raises:
    FileExistsError: `out` exists.
    ConfigError: the two do not belong together, or KEPT is missing.
  """
  file = pathlib.Path(trained) / KEPT
  lookup.require(
    file.is_file(), f'{file}: no such file; copy it from the small version'
  )
  about = json.loads(file.read_text())
  cfg, params = pretrained.load(model)
  ids = np.array(about['ids'])
  small = dataclasses.replace(cfg, vocab_size=len(ids))
  lookup.require(
    about['entries'] == cfg.vocab_size,
    f'{file} is of a model with {about["entries"]} entries, and '
    f'--model={model} has {cfg.vocab_size}',
  )
  whole, part = (_vocabulary(folder) for folder in (model, trained))
  lookup.require(
    all(whole.get(token) == ids[i] for token, i in part.items()),
    f'{file} is of another small version than {trained}',
  )
  _, new = pretrained.load(trained, cfg=small)
  new['embed'] = params['embed'].at[ids].set(new['embed'])
  if 'head' in new:
    new['head'] = params['head'].at[:, ids].set(new['head'])
  like = pretrained.read_json(model)
  pretrained.save(out, cfg, new, model, like=like)
  return f'{out}: {model} with the weights of {trained}'


def main():
  jax.config.update('jax_platforms', 'cpu')
  with progress.phase('prune', shown=True):
    if _RESTORE.value:
      done = restore(_MODEL.value, _RESTORE.value, _OUT.value)
    else:
      lookup.require(_TEXTS.value, '--texts is missing: files, with commas')
      files = _TEXTS.value, _ALWAYS.value
      done = prune(_MODEL.value, _OUT.value, *files, _LEAST.value)
  print(done)


if __name__ == '__main__':
  _MODEL = flags.DEFINE_string(
    'model', None, 'Hugging Face folder of the whole model.', required=True
  )
  _OUT = command.define_out(None, 'The folder to write.', required=True)
  _TEXTS = flags.DEFINE_list('texts', [], 'Files: .jsonl[.gz], or plain text.')
  _ALWAYS = flags.DEFINE_list('always', [], 'Of these, every entry is kept.')
  _LEAST = flags.DEFINE_integer('min_count', 4, 'Lower counts are cut.', 1)
  _RESTORE = flags.DEFINE_string('restore', '', 'A trained small version.')
  command.run(main)
