"""Generated worlds: a corpus about invented people, and questions on it.

A world follows from a seed. Every passage states several relations of one
person; other passages state the same relations of other people; every value
is drawn anew for each world. So an answer can be known only by searching and
reading. People whose questions are held out never occur in a train question
or in a scripted trace, of whatever world: which pairs of names are held out
is fixed by the settings, not by the seed.

The vocabulary is fixed by the settings too, so that a model trained on one
world can be asked about any other.
"""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

import numpy as np

from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Search, Trace
from searchrl_jax.types import Passage, Question

SPLITS = ('train', 'heldout')
# Relation -> the pool of its values. Two relations share each of the pools
# `town` and `person`: the kind of a word does not tell which relation it is.
ATTRIBUTES = {
  'birthplace': 'town', 'home': 'town', 'craft': 'craft', 'emblem': 'emblem',
}
LINKS = ('teacher', 'rival')
CRAFTS = (
  'weaver', 'smith', 'baker', 'tanner', 'potter', 'miller', 'cooper',
  'carver', 'glazier', 'dyer', 'mason', 'fuller', 'brewer', 'hatter',
  'sawyer', 'thatcher', 'turner', 'joiner', 'piper', 'drummer', 'scribe',
  'printer', 'binder', 'cutler', 'farrier', 'saddler', 'cobbler', 'tailor',
  'painter', 'gilder', 'roper', 'sailor', 'fisher', 'hunter', 'gardener',
  'shepherd', 'healer', 'pilot', 'porter', 'ranger',
)
EMBLEMS = (
  'otter', 'heron', 'badger', 'raven', 'stag', 'wolf', 'bear', 'hare', 'fox',
  'owl', 'swan', 'crane', 'trout', 'salmon', 'viper', 'toad', 'newt', 'moth',
  'wasp', 'beetle', 'oak', 'elm', 'rowan', 'thistle', 'clover', 'fern',
  'lily', 'poppy', 'anchor', 'hammer', 'lantern', 'kettle', 'ladder',
  'mirror', 'spindle', 'trumpet', 'wagon', 'comet', 'moon', 'crown',
)
# Words of questions, thoughts and of the quickstart's template.
WORDS = (
  'What', 'is', 'the', 'of', 'find', 'maybe', 'Question', 'Doc', 'no',
  'passage', 'found', 'invalid', 'action', 'last', 'turn', 'answer', 'now',
  'search', 'or', 'to', 'and', 'not', 'use', 'again',
)
TAGS = ('think', 'search', 'information', 'answer')
MARKS = '?:;.,"()-\'!/&'
PAD, EOS, UNK = '<|pad|>', '<|eos|>', '<|unk|>'
# A line break, a tag, a word or a mark; all but the first with the space
# before it.
SPLIT = r'\n| ?<[|/]?\w+[|]?>| ?\w+| ?[^\w\s]'
FAVOURITES = 3  # values that a guess takes, of each pool
# The traces' worlds begin here, far from the seeds that a user would try.
TRACE_WORLDS = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Settings:
  """What fixes names and vocabulary; the same for all seeds."""

  first: int = 40  # first words of names
  second: int = 40  # second words of names
  towns: int = 40
  heldout: float = 0.25  # fraction of the pairs of names held out


@dataclasses.dataclass(frozen=True)
class World:
  """One world; `facts[name][relation]` is the value that its passage states."""

  seed: int
  settings: Settings
  corpus: tuple[Mapping[str, str], ...]  # {'id', 'contents'}, Search-R1's
  facts: Mapping[str, Mapping[str, str]]
  questions: Mapping[str, tuple[Question, ...]]  # split -> questions


def invented(n: int, kind: str) -> tuple[str, ...]:
  """n invented words of a kind, always the same; a longer list extends.

  Kinds end differently, so no word is of two kinds.

  Raises:
    DataError: more than the 1,575 words that a kind has.
  """
  ends = {'first': 'a o i u'.split(), 'second': 'en ok al ur'.split(),
          'town': 'wick holm mar ford'.split()}[kind]
  consonants = 'b d f g h k l m n p r s t v z'.split()
  words = [
    (a + b + c + e).capitalize()
    for a in consonants for b in 'aeiou' for c in consonants for e in ends
  ]
  # Stems of the search index must differ, as words do: one word of each
  # beginning and middle, the ending drawn.
  rng = np.random.default_rng(sum(map(ord, kind)))
  order = rng.permutation(len(words))
  seen, out = set(), []
  for i in order:
    if words[i][:3] not in seen:
      seen.add(words[i][:3])
      out.append(words[i])
  if n > len(out):
    raise DataError(f'{n} {kind} words asked for; there are {len(out)}')
  return tuple(out[:n])


def names(settings: Settings, split: str) -> tuple[str, ...]:
  """Every name of a split; the splits are disjoint whatever the seed."""
  if split not in SPLITS:
    raise DataError(f'split={split!r} is none of {SPLITS}')
  first = invented(settings.first, 'first')
  second = invented(settings.second, 'second')
  order = np.random.default_rng(1).permutation(len(first) * len(second))
  cut = int(len(order) * settings.heldout)
  chosen = order[:cut] if split == 'heldout' else order[cut:]
  return tuple(
    f'{first[i // len(second)]} {second[i % len(second)]}' for i in chosen
  )


def pools(settings: Settings) -> dict[str, tuple[str, ...]]:
  return {'town': invented(settings.towns, 'town'), 'craft': CRAFTS,
          'emblem': EMBLEMS}


def generate(
  seed: int,
  *,
  train: int = 400,
  heldout: int = 150,
  relations: int = 4,
  settings: Settings = Settings(),
) -> World:
  """Makes a world.

  Args:
    seed: any int >= 0.
    train: people that train questions ask about, >= 20.
    heldout: people that held-out questions ask about, >= 20.
    relations: relations that each passage states, one of them a link.
    settings: pools of words, the same for every world of a run.

  Returns:
    The world: train + heldout passages in random order, and all its one-hop
    and two-hop questions, in random order in each split. Values of a relation
    are dealt evenly, so no answer is frequent.

  Raises:
    DataError: a size outside what the pools of names allow.
  """
  if seed < 0:
    raise DataError(f'seed={seed} must not be negative')
  if not 2 <= relations <= len(ATTRIBUTES) + len(LINKS):
    raise DataError(
      f'relations={relations} must lie between 2 and '
      f'{len(ATTRIBUTES) + len(LINKS)}'
    )
  rng = np.random.default_rng([seed, 20])
  people, facts = {}, {}
  for split, count in (('train', train), ('heldout', heldout)):
    there = names(settings, split)
    if not 20 <= count <= len(there):
      raise DataError(
        f'{split}={count} people: the settings allow 20 to {len(there)} '
        '(more with larger `first` and `second`; fewer than 20 would make '
        'some answer frequent)'
      )
    people[split] = [there[i] for i in rng.permutation(len(there))[:count]]
    facts |= _facts(rng, people[split], relations, settings)
  ids, corpus = _passages(rng, facts)
  questions = {
    split: _questions(rng, f'micro-{seed}-{split}', people[split], facts, ids)
    for split in SPLITS
  }
  return World(seed, settings, corpus, facts, questions)


def _facts(rng, people, relations, settings):
  """name -> {relation: value}; links stay among `people`."""
  n = len(people)
  table = {}
  for relation, pool in ATTRIBUTES.items():
    values = pools(settings)[pool]
    values = [values[i] for i in rng.permutation(len(values))]
    deal = rng.permutation(n)
    table[relation] = [values[i % len(values)] for i in deal]
  for link in LINKS:
    # One cycle through all: nobody is linked to himself.
    cycle = rng.permutation(n)
    to = np.empty(n, int)
    to[cycle] = np.roll(cycle, 1)
    table[link] = [people[i] for i in to]
  out = {}
  for i, name in enumerate(people):
    link = LINKS[rng.integers(len(LINKS))]
    others = [r for r in table if r != link]
    kept = [others[j] for j in rng.permutation(len(others))[: relations - 1]]
    stated = [link, *kept]
    out[name] = {stated[j]: table[stated[j]][i]
                 for j in rng.permutation(relations)}
  return out


def _passages(rng, facts):
  everyone = list(facts)
  order = [everyone[i] for i in rng.permutation(len(everyone))]
  ids = {name: str(i) for i, name in enumerate(order)}
  corpus = []
  for name in order:
    text = '; '.join(f'{r} {v}' for r, v in facts[name].items())
    corpus.append(
      {'id': ids[name], 'contents': f'"{name}"\n{name}: {text}.'}
    )
  return ids, tuple(corpus)


def _questions(rng, prefix, people, facts, ids):
  found = []
  for name in people:
    for relation, value in facts[name].items():
      meta = {'path': (name, relation)}
      found.append(
        (f'What is the {relation} of {name}?', value, 1, (ids[name],), meta)
      )
      if relation not in LINKS:
        continue
      for last, answer in facts[value].items():
        if answer == name:  # "the rival of the rival": in the question
          continue
        found.append((
          f'What is the {last} of the {relation} of {name}?', answer, 2,
          (ids[name], ids[value]), {'path': (name, relation, last)},
        ))
  return tuple(
    Question(
      id=f'{prefix}-{n}', text=text, answers=(answer,),
      source=f'micro_{hops}hop', hops=hops, supporting=supporting, meta=meta,
    )
    for n, (text, answer, hops, supporting, meta) in enumerate(
      found[i] for i in rng.permutation(len(found))
    )
  )


def write(world: World, folder: str | os.PathLike) -> dict[str, str]:
  """Writes corpus.jsonl and {train,heldout}.jsonl; returns name -> path."""
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  rows = {'corpus': world.corpus}
  for split, questions in world.questions.items():
    rows[split] = [
      {'id': q.id, 'question': q.text, 'golden_answers': list(q.answers),
       'source': q.source, 'hops': q.hops, 'supporting': list(q.supporting)}
      for q in questions
    ]
  paths = {}
  for name, records in rows.items():
    path = folder / f'{name}.jsonl'
    # Renamed when whole, so that no half-written file passes for a world.
    part = path.with_suffix('.part')
    part.write_text(''.join(json.dumps(r) + '\n' for r in records))
    part.replace(path)
    paths[name] = str(path)
  return paths


def load(
  *, world_seed: int, split: str, n: int = 0, hops: Sequence[int] = (1, 2),
  train: int = 400, heldout: int = 150, relations: int = 4,
) -> list[Question]:
  """Questions of a world, for a data config; hops alternate.

  Args:
    world_seed: see `generate`.
    split: 'train' or 'heldout'.
    n: how many in all; 0 = as many as keep the hops even.
    hops: which of 1 and 2.
    train: see `generate`.
    heldout: see `generate`.
    relations: see `generate`.

  Raises:
    DataError: an unknown split or hop, or more questions than there are.
  """
  if split not in SPLITS:
    raise DataError(f'split={split!r} is none of {SPLITS}')
  if not hops or set(hops) - {1, 2}:
    raise DataError(f'hops={tuple(hops)}: there are 1 and 2')
  world = generate(world_seed, train=train, heldout=heldout,
                   relations=relations)
  return pick(world, split, n, hops)


def pick(
  world: World, split: str, n: int = 0, hops: Sequence[int] = (1, 2)
) -> list[Question]:
  """The first n questions of a split, hops alternating; see `load`."""
  by_hop = [[q for q in world.questions[split] if q.hops == h] for h in hops]
  most = min(map(len, by_hop)) * len(by_hop)
  if n > most:
    raise DataError(
      f'n={n} questions of hops {tuple(hops)} in {split!r}; world '
      f'{world.seed} has {most} (more with more people)'
    )
  out = [q for row in zip(*by_hop) for q in row]
  return out[: n or most]


def vocabulary(settings: Settings = Settings()) -> list[str]:
  """Every token string, in id order; fixed by the settings."""
  words = [
    *WORDS, *ATTRIBUTES, *LINKS, *invented(settings.first, 'first'),
    *invented(settings.second, 'second'), *pools(settings)['town'],
    *CRAFTS, *EMBLEMS, *map(str, range(10)), *MARKS,
    *(f'<{slash}{tag}>' for tag in TAGS for slash in ('', '/')),
  ]
  words = list(dict.fromkeys(words))
  return [PAD, EOS, UNK, '\n', ' ', *(' ' + w for w in words), *words]


def tokenizer(
  folder: str | os.PathLike, settings: Settings = Settings()
) -> str:
  """Writes a whole-word Hugging Face tokenizer; returns the folder.

  A token is a word, mark or tag with the space before it, so tokens joined
  are the text. Tags are ordinary words. Words it does not know become one
  `<|unk|>` each.
  """
  import tokenizers  # heavy
  from tokenizers import decoders, models, pre_tokenizers
  import transformers

  ids = {token: i for i, token in enumerate(vocabulary(settings))}
  tok = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=UNK))
  tok.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(SPLIT), behavior='isolated'
  )
  tok.decoder = decoders.Fuse()
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tok, pad_token=PAD, eos_token=EOS, unk_token=UNK,
    clean_up_tokenization_spaces=False,
  )
  fast.save_pretrained(folder)
  return str(folder)


@dataclasses.dataclass(frozen=True)
class Mix:
  """How the scripted traces behave; good + poor + guess = 1.

  Real base models guess more where they feel at home. So the fraction of
  guesses differs with the relation asked: from guess * (1 - tilt) to guess *
  (1 + tilt), the rest shared by good and poor searches as their fractions.
  """

  good: float  # searches for the person
  poor: float  # searches for the first name or the relation alone
  guess: float  # answers at once, with one of a few favourites
  tilt: float  # 0 to 1
  again: float  # after a poor search: searches for the person
  short: float  # two-hop: answers from the first person's passage

  def __post_init__(self):
    fields = dataclasses.asdict(self)
    for name, value in fields.items():
      if not 0 <= value <= 1:
        raise DataError(f'{name}={value} must lie between 0 and 1')
    total = self.good + self.poor + self.guess
    if abs(total - 1) > 1e-6:
      raise DataError(f'good + poor + guess = {total:g}, and must be 1')
    if self.guess * (1 + self.tilt) > 1 + 1e-6:
      raise DataError('guess * (1 + tilt) must not exceed 1')


def traces(
  *,
  world_seed: int,
  worlds: int = 60,
  n: int = 24_000,
  seed: int = 0,
  k: int = 1,
  train: int = 400,
  heldout: int = 150,
  relations: int = 4,
  good: float = 0.4,
  poor: float = 0.2,
  guess: float = 0.4,
  tilt: float = 0.8,
  again: float = 0.3,
  short: float = 0.4,
) -> list[Trace]:
  """Scripted traces on train questions of several worlds.

  They mix good searches, poor ones and guesses, so that RL has something to
  select. What they read is what BM25 finds in the world's corpus. Worlds of
  their own, none the run's: what can be learned from them is how to search
  and to read, no facts.

  Args:
    world_seed: of the run's world; those of the traces follow from it.
    worlds: how many worlds.
    n: how many traces, shared evenly.
    seed: of the behaviours.
    k: passages for a query, as in the run.
    train: see `generate`, as are heldout and relations.
    heldout: see above.
    relations: see above.
    good: see `Mix`, as are the rest.
    poor: see above.
    guess: see above.
    tilt: see above.
    again: see above.
    short: see above.

  Raises:
    DataError: a fraction out of range, or a world that cannot be.
  """
  mix = Mix(good, poor, guess, tilt, again, short)
  if worlds < 1 or n < worlds:
    raise DataError(f'n={n} traces of worlds={worlds}: at least one of each')
  out = []
  for i in range(worlds):
    world = generate(
      TRACE_WORLDS + world_seed * 1000 + i, train=train, heldout=heldout,
      relations=relations,
    )
    count = n * (i + 1) // worlds - n * i // worlds
    out += script(world, count, [seed, i], BM25(world).search, k, mix)
  return out


def script(
  world: World, n: int, seed, search: Search, k: int, mix: Mix
) -> list[Trace]:
  """n traces on one world's train questions, hops alternating.

  A question comes again only after all came. search(queries, k) gives the
  passages of each query, best first.
  """
  pool = pick(world, 'train')
  writer = _Script(world, np.random.default_rng(seed), search, k, mix)
  return [writer.trace(pool[i % len(pool)]) for i in range(n)]


class _Script:
  """Writes the traces of one world."""

  def __init__(self, world, rng, search, k, mix):
    self.world, self.rng, self.search = world, rng, search
    self.k, self.mix = k, mix
    self.people = names(world.settings, 'train')
    self.actions = []

  def chance(self, p: float) -> bool:
    return self.rng.random() < p

  def trace(self, question: Question) -> Trace:
    name, *path = question.meta['path']
    relation = path[-1]
    self.actions = []
    relations = [*ATTRIBUTES, *LINKS]
    where = 2 * relations.index(relation) / (len(relations) - 1) - 1
    if self.chance(self.mix.guess * (1 + self.mix.tilt * where)):
      self.guess(relation)
      return Trace(question, tuple(self.actions), False)
    mix = self.mix
    good = self.chance(mix.good / max(mix.good + mix.poor, 1e-9))
    if good or self.chance(mix.again):
      if not good:
        self.poor_search(name, relation)
      read = self.look_up(f'find {name}', name)
    else:
      read = self.poor_search(name, relation)
    if len(path) == 2 and path[0] in read:
      short = self.chance(mix.short)
      good = good and not short
      if not short:
        bridge = read[path[0]]
        read = self.look_up(f'{path[0]} {bridge}', bridge)
    if relation in read:
      self.answer(f'{relation} {read[relation]}', read[relation])
    else:
      self.guess(relation)
    right = self.actions[-1] == ('answer', question.answers[0])
    return Trace(question, tuple(self.actions), good and right)

  def poor_search(self, name: str, relation: str) -> Mapping[str, str]:
    query = name.split()[0] if self.chance(0.5) else relation
    return self.look_up(f'find {query}', query)

  def look_up(self, thought: str, query: str) -> Mapping[str, str]:
    """Searches; returns the facts of the first passage found."""
    (found,) = self.search([query], self.k)
    self.actions += [
      ('think', thought), ('search', query), ('information', tuple(found)),
    ]
    return self.world.facts[found[0].title] if found else {}

  def answer(self, thought: str, value: str) -> None:
    self.actions += [('think', thought), ('answer', value)]

  def guess(self, relation: str) -> None:
    """One of a few favourites: a random value would be learned by heart."""
    if relation in LINKS:
      values = self.people
    else:
      values = pools(self.world.settings)[ATTRIBUTES[relation]]
    value = values[self.rng.integers(FAVOURITES)]
    self.answer(f'maybe {value}', value)


class BM25:
  """The retrieval server's scores over one small world, in this process.

  The server's index (retrieval.bm25) with its default parameters finds the
  same; a test compares them. Words of a world are distinct as stems and no
  stop words, so they need no analysis but lower case.
  """

  def __init__(self, world: World, k1: float = 1.2, b: float = 0.75):
    self.passages, words = [], []
    for row in world.corpus:
      title, _, text = row['contents'].partition('\n')
      self.passages.append(Passage(row['id'], title.strip('"'), text))
      words.append(re.findall(r'\w+', row['contents'].lower()))
    self.rows, tf = {}, {}
    for p, text in enumerate(words):
      for word, count in collections.Counter(text).items():
        self.rows.setdefault(word, []).append(p)
        tf.setdefault(word, []).append(count)
    length = np.array([len(w) for w in words])
    norm = k1 * (1 - b + b * length / length.mean())
    self.scores = {}
    for word, rows in self.rows.items():
      count, df = np.array(tf[word]), len(rows)
      idf = np.log(1 + (len(words) - df + 0.5) / (df + 0.5))
      self.scores[word] = idf * count / (count + norm[rows])
    self._search = functools.cache(self._one)

  def search(self, queries: Sequence[str], k: int) -> list[tuple[Passage, ...]]:
    """The best k passages of each query; fewer if fewer have its words."""
    return [self._search(query, k) for query in queries]

  def _one(self, query: str, k: int) -> tuple[Passage, ...]:
    total = np.zeros(len(self.passages))
    for word in re.findall(r'\w+', query.lower()):
      if word in self.rows:
        total[self.rows[word]] += self.scores[word]
    best = np.argsort(-total.astype(np.float32), kind='stable')[:k]
    return tuple(
      dataclasses.replace(self.passages[p], score=float(total[p]))
      for p in best if total[p] > 0
    )
