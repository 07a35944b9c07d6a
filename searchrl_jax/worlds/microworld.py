"""Generated worlds: a corpus about invented people, and questions about it.

A seed determines a world. Every passage states several relations of one person.
Values are drawn anew for each world, so an answer requires searching and
reading. People of held-out questions never occur in a train question or a
scripted trace of any world, because the settings, not the seed, determine which
names are held out.

The settings also determine the vocabulary, so a model trained on one world can
be evaluated on another.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import operator
import os
import pathlib

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.store import records
from searchrl_jax.types import Passage, Question

SPLITS = ('train', 'heldout')
# Relation -> the pool of its values. Two relations share each of the pools
# `town` and `person`, so a word does not determine its relation.
ATTRIBUTES = dict(
  birthplace='town', home='town', craft='craft', emblem='emblem'
)
LINKS = ('teacher', 'rival')
CRAFTS = """
  weaver smith baker tanner potter miller cooper carver glazier dyer mason
  fuller brewer hatter sawyer thatcher turner joiner piper drummer scribe
  printer binder cutler farrier saddler cobbler tailor painter gilder roper
  sailor fisher hunter gardener shepherd healer pilot porter ranger
""".split()
EMBLEMS = """
  otter heron badger raven stag wolf bear hare fox owl swan crane trout
  salmon viper toad newt moth wasp beetle oak elm rowan thistle clover fern
  lily poppy anchor hammer lantern kettle ladder mirror spindle trumpet
  wagon comet moon crown
""".split()
# Words of questions, of thoughts and of the quickstart's template.
WORDS = """
  What is the of find maybe Question Doc no passage found invalid action
  last turn answer now search or to and not use again
""".split()
TAGS = ('think', 'search', 'information', 'answer')
MARKS = '?:;.,"()-\'!/&'
PAD, EOS, UNK = '<|pad|>', '<|eos|>', '<|unk|>'
# A line break, or a tag, word or mark with the space before it.
SPLIT = r'\n| ?<[|/]?\w+[|]?>| ?\w+| ?[^\w\s]'


@dataclasses.dataclass(frozen=True)
class Settings:
  """Settings of names and vocabulary, which do not depend on the seed."""

  first: int = 40  # first words of names
  second: int = 40  # second words of names
  towns: int = 40
  heldout: float = 0.25  # fraction of the pairs of names held out


STANDARD = Settings()


@dataclasses.dataclass(frozen=True)
class World:
  """One world; `facts[name][relation]` is the value in the passage."""

  seed: int
  settings: Settings
  corpus: tuple[Mapping[str, str], ...]  # {'id', 'contents'}, Search-R1's
  facts: Mapping[str, Mapping[str, str]]
  questions: Mapping[str, tuple[Question, ...]]  # split -> questions

  def passages(self) -> list[Passage]:
    """The passages of the corpus, in its order."""
    rows = [(row['id'], *row['contents'].split('\n')) for row in self.corpus]
    return [Passage(id, title.strip('"'), text) for id, title, text in rows]


@functools.cache
def invented(n: int, kind: str) -> tuple[str, ...]:
  """Returns the first n invented words of a kind.

  Kinds have different endings, so no word is of two kinds.

  Raises:
    DataError: n is larger than the number of words of a kind.
  """
  ends = dict(first='a o i u', second='en ok al ur', town='wick holm mar ford')
  hard = 'bdfghklmnprstvz'
  letters = itertools.product(hard, 'aeiou', hard, ends[kind].split())
  words = [''.join(word).capitalize() for word in letters]
  # The stems in the search index must differ too, so only one word has the same
  # first three letters.
  rng = np.random.default_rng(sum(map(ord, kind)))
  found: dict[str, str] = {}
  for i in rng.permutation(len(words)):
    found.setdefault(words[i][:3], words[i])
  good = n <= len(found)
  require(good, f'{n} {kind} words requested; only {len(found)} exist')
  return tuple(found.values())[:n]


def every_name(settings: Settings) -> list[str]:
  """Returns the names of all splits: each first word with each second one."""
  second = invented(settings.second, 'second')
  return [f'{a} {b}' for a in invented(settings.first, 'first') for b in second]


@functools.cache
def names(settings: Settings, split: str) -> tuple[str, ...]:
  """Returns all names of a split. Splits are disjoint for all seeds."""
  require(split in SPLITS, f'split={split!r} must be one of {SPLITS}')
  every = every_name(settings)
  order = np.random.default_rng(1).permutation(len(every))
  cut = int(len(order) * settings.heldout)
  chosen = order[:cut] if split == 'heldout' else order[cut:]
  return tuple(every[i] for i in chosen)


def pools(settings: Settings) -> dict[str, Sequence[str]]:
  towns = invented(settings.towns, 'town')
  return {'town': towns, 'craft': CRAFTS, 'emblem': EMBLEMS}


def generate(
  seed: int, *, train=400, heldout=150, relations=4, settings=STANDARD
) -> World:
  """Makes a world.

  Args:
    seed: any int >= 0.
    train: people that train questions ask about, >= 20.
    heldout: people that held-out questions ask about, >= 20.
    relations: relations that each passage states, one of them a link.
    settings: pools of words, the same for every world of a run.

  Returns:
    The world, with train + heldout passages and all one-hop and two-hop
    questions of each split, in random order. Values of a relation are
    distributed evenly, so no answer is frequent.

  Raises:
    DataError: a size that the pools of names do not allow.
  """
  require(seed >= 0, f'seed={seed} must not be negative')
  most = len(ATTRIBUTES) + len(LINKS)
  good = 2 <= relations <= most
  require(good, f'relations={relations} must lie between 2 and {most}')
  rng = np.random.default_rng([seed, 20])
  people, facts = {}, {}
  for split, count in (('train', train), ('heldout', heldout)):
    there = names(settings, split)
    good, limits = 20 <= count <= len(there), f'20 to {len(there)}'
    require(good, f'{split}={count} people: the settings allow {limits}')
    people[split] = [there[i] for i in rng.permutation(len(there))[:count]]
    facts |= _facts(rng, people[split], relations, settings)
  ids, corpus = passages(rng, facts)
  questions = {
    split: ask(rng, f'micro-{seed}-{split}', people[split], facts, ids)
    for split in SPLITS
  }
  return World(seed, settings, corpus, facts, questions)


def _facts(rng, people, relations, settings):
  """Returns name -> {relation: value}; links stay among `people`."""
  table = {}
  for relation, pool in ATTRIBUTES.items():
    table[relation] = dealt(rng, pools(settings)[pool], len(people))
  for link in LINKS:
    table[link] = linked(rng, people)
  out = {}
  for i, name in enumerate(people):
    link = LINKS[rng.integers(len(LINKS))]
    others = [r for r in table if r != link]
    kept = [others[j] for j in rng.permutation(len(others))[: relations - 1]]
    stated = [[link, *kept][j] for j in rng.permutation(relations)]
    out[name] = {relation: table[relation][i] for relation in stated}
  return out


def dealt(rng, values: Sequence[str], n: int) -> list[str]:
  """Returns n of the values in random order, each as often as the others."""
  shuffled, deal = rng.permutation(values), rng.permutation(n)
  return [str(shuffled[i % len(values)]) for i in deal]


def linked(rng, people: Sequence[str]) -> list[str]:
  """Returns for each person another one, by one cycle through all of them."""
  cycle = rng.permutation(len(people))
  to = dict(zip(cycle, np.roll(cycle, 1)))
  return [people[to[i]] for i in range(len(people))]


def passages(rng, facts):
  """Returns (name -> id, corpus in random order)."""
  everyone = list(facts)
  order = [everyone[i] for i in rng.permutation(len(everyone))]
  ids = {name: str(i) for i, name in enumerate(order)}
  corpus = []
  for name in order:
    text = '; '.join(f'{r} {v}' for r, v in facts[name].items())
    corpus.append({'id': ids[name], 'contents': f'"{name}"\n{name}: {text}.'})
  return ids, tuple(corpus)


def ask(rng, prefix, people, facts, ids) -> tuple[Question, ...]:
  """Returns all one-hop and two-hop questions on `people`, in random order."""
  rows = []  # (path: a name and 1 or 2 relations, answer, supporting ids)
  for name in people:
    for relation, value in facts[name].items():
      rows.append(((name, relation), value, (ids[name],)))
      if relation in LINKS:
        rows += [
          ((name, relation, last), answer, (ids[name], ids[value]))
          for last, answer in facts[value].items()
          if answer != name  # "the rival of the rival" is in the question
        ]

  def question(n: int, path, answer, supporting) -> Question:
    text = ' of '.join([f'the {r}' for r in path[:0:-1]] + [path[0]])
    hops = len(supporting)
    return Question(
      f'{prefix}-{n}', f'What is {text}?', (answer,), f'micro_{hops}hop',
      hops, supporting, meta={'path': path},
    )  # fmt: skip

  order = rng.permutation(len(rows))
  return tuple(question(n, *rows[i]) for n, i in enumerate(order))


def write(world: World, folder: str | os.PathLike) -> dict[str, str]:
  """Writes corpus.jsonl and {train,heldout}.jsonl; returns name -> path."""
  fields = 'id question golden_answers source hops supporting_ids'.split()
  ours = 'id text answers source hops supporting'.split()
  values = operator.attrgetter(*ours)
  rows, paths = {'corpus': world.corpus}, {}
  for split, questions in world.questions.items():
    rows[split] = [dict(zip(fields, values(q))) for q in questions]
  for name, lines in rows.items():
    path = pathlib.Path(folder) / f'{name}.jsonl'
    records.write_text(path, ''.join(json.dumps(x) + '\n' for x in lines))
    paths[name] = str(path)
  return paths


def load(
  *, world_seed, split, n=0, hops=(1, 2), train=400, heldout=150, relations=4
) -> list[Question]:
  """Returns questions of a world, hops alternating (a data module's `load`).

  Args:
    world_seed: see `generate`.
    split: 'train' or 'heldout'.
    n: total number; 0 = the largest with equally many of each hops.
    hops: any of 1 and 2.
    train: see `generate`.
    heldout: see `generate`.
    relations: see `generate`.

  Raises:
    DataError: an unknown split or hop, or more questions than there are.
  """
  good = hops and set(hops) <= {1, 2}
  require(good, f'hops={tuple(hops)} must be chosen from 1 and 2')
  names(STANDARD, split)  # raises if there is no such split
  sizes = dict(train=train, heldout=heldout, relations=relations)
  return pick(generate(world_seed, **sizes), split, n, hops)


def pick(world: World, split: str, n=0, kinds=(1, 2)) -> list[Question]:
  """Returns the first n questions of a split, kinds alternating; see `load`.

  kinds: numbers of hops, or sources.
  """
  own = world.questions[split]
  each = [[q for q in own if kind in (q.hops, q.source)] for kind in kinds]
  most = min(map(len, each)) * len(each)
  where = f'world {world.seed} has {most}, more with more people'
  require(0 < most >= n, f'n={n} of kinds {tuple(kinds)} in {split!r}: {where}')
  return [q for row in zip(*each) for q in row][: n or most]


def vocabulary(settings=STANDARD, more: Sequence[str] = ()) -> list[str]:
  """Returns all tokens, in the order of ids; determined by the settings.

  more: words of another world.
  """
  first = invented(settings.first, 'first')
  second = invented(settings.second, 'second')
  tags = [f'<{slash}{tag}>' for tag in TAGS for slash in ('', '/')]
  words = [*WORDS, *ATTRIBUTES, *LINKS, *first, *second]
  words += [word for pool in pools(settings).values() for word in pool]
  words = list(dict.fromkeys([*words, *'0123456789', *MARKS, *tags, *more]))
  return [PAD, EOS, UNK, '\n', ' ', *(' ' + w for w in words), *words]


def tokenizer(folder: str | os.PathLike, settings=STANDARD, more=()) -> str:
  """Writes a Hugging Face tokenizer of whole words; returns the folder.

  A token is a word, mark or tag with the space before it, so the joined tokens
  are the text. Tags are ordinary words. An unknown word becomes one `<|unk|>`.
  """
  return save_tokenizer(folder, vocabulary(settings, more), SPLIT)


def save_tokenizer(
  folder: str | os.PathLike, tokens: Sequence[str], split: str
) -> str:
  """Writes a Hugging Face tokenizer of whole tokens; returns the folder.

  Args:
    folder: to write to.
    tokens: in the order of ids, PAD, EOS and UNK among them.
    split: regular expression of a token in a text.
  """
  import tokenizers  # heavy
  from tokenizers import decoders, models, pre_tokenizers
  import transformers

  ids = {token: i for i, token in enumerate(tokens)}
  tok = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=UNK))
  words = tokenizers.Regex(split)
  tok.pre_tokenizer = pre_tokenizers.Split(words, behavior='isolated')
  tok.decoder = decoders.Fuse()
  special = dict(pad_token=PAD, eos_token=EOS, unk_token=UNK)
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tok, clean_up_tokenization_spaces=False, **special
  )
  fast.save_pretrained(folder)
  return str(folder)
