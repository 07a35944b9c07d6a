"""SSP on atlas: who names whom can be searched for, and traces of its roles.

Links of atlas lead forward only: a search for a person finds what they are
named in by nothing, so that a proposer who begins with an answer would never
find a question. The corpus of this world therefore has one more passage of each
person, which says who leads to them:

    "Kova Len, know"
    Mira Dok mentor Kova Len, Tusa Bal ally Kova Len, ...

A person with a section or a relation finds what it finds in atlas; a person
alone, a poor query of the solver, finds this passage instead of one of the
sections. All else is atlas, the questions and the vocabulary too (so the
section is named by a word that there is). A proposer walks backwards from an
answer:

    <think> Kova Len </think>
    <search> Kova Len know </search>  (passage)
    <think> Mira Dok's teacher </think>
    <search> Mira Dok know </search>  (passage)
    <think> Tusa Bal's friend's teacher </think>
    <refine> What is Tusa Bal's friend's teacher? </refine>

The vocabulary has no tag for a question: proposer.json takes that of notes. A
verifier reads the same passages in its prompt, and walks forward. So does a
solver whose prompt has the text of the proposal, but for the tags, behind the
question (config.teacher): it looks everything up, too.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re
import zlib

import numpy as np

from experiments.ssp import oracle
from experiments.ssp.traces import NOTHING, Writer, shown
from searchrl_jax.data.core import Trace
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import atlas, atlas_traces, microtraces, microworld
from searchrl_jax.worlds.microworld import World

KNOW = 'know'
# Link -> its word in these passages.
WORD = {
  link: words[0]
  for relations in atlas.SECTIONS.values()
  for link, words in relations.items()
  if link in atlas.LINKS
}
MOST = len(atlas.LINKS)  # hops: no relation repeats
TEMPLATE = 'experiments/arena/proposer.json'
write, tokenizer = microworld.write, atlas.tokenizer


def generate(seed: int, **sizes) -> World:
  """The world of `atlas.generate`, with passages of who leads to whom."""
  world = atlas.generate(seed, **sizes)
  more = (
    {'id': p.id, 'contents': f'"{p.title}"\n{p.text}'}
    for p in backlinks(world).values()
  )
  return dataclasses.replace(world, corpus=(*world.corpus, *more))


def leading(facts) -> dict[str, list[tuple[str, str]]]:
  """Person -> (person, link) of each link that leads to them, shuffled."""
  out: dict[str, list] = {name: [] for name in facts}
  for name, own in facts.items():
    for link in atlas.LINKS:
      out[own[link]].append((name, link))
  for name, leads in out.items():
    leads.sort(key=lambda lead: zlib.crc32(f'{name} {lead}'.encode()))
  return out


def backlinks(world: World) -> dict[str, Passage]:
  """Person -> the passage of who leads to them."""
  first = len(world.corpus)
  return {
    name: Passage(
      str(first + i),
      f'{name}, {KNOW}',
      ', '.join(f'{who} {WORD[link]} {name}' for who, link in leads) + '.',
    )
    for i, (name, leads) in enumerate(leading(world.facts).items())
  }


def load(
  *, world_seed: int, split: str, train=300, heldout=150, known=40
) -> list[Question]:
  """Returns what self-play begins with: each person of a split is an answer.

  Args:
    world_seed: see `atlas.generate`.
    split: 'train' or 'heldout'.
    train, heldout, known: see `atlas.generate`.
  """
  sizes = dict(train=train, heldout=heldout, known=known)
  facts = atlas.generate(world_seed, **sizes).facts
  own = {n for r in (False, True) for n in atlas.names(split, r)}
  return [
    Question(f'answer-{world_seed}-{split}-{i}', name, (name,), 'answer')
    for i, name in enumerate(n for n in facts if n in own)
  ]


@dataclasses.dataclass(frozen=True)
class Mix:
  """How the traces behave.

  solver, proposer, drill, told: shares of the traces; the rest is the
  verifier's. told: of solvers that read the proposal.
  proposed: shares of proposals of 1, 2, ... hops; where a brief asks for a
  number, of the numbers. wrong: of those that name somebody else. absent: of a
  verifier's questions without an answer in what it reads. heeds: of proposals
  of as many hops as they are asked for; the others have fewer.
  """

  solver: float
  proposer: float
  drill: float
  proposed: Sequence[float]
  wrong: float
  absent: float
  heeds: float = 1.0
  told: float = 0.0


def traces(
  *,
  world_seed: int,
  mix: str,
  roles: Mapping,
  n: int,
  worlds: int,
  turns: int,
  people: int,
  seed=0,
  train=300,
  heldout=150,
  known=40,
  brief='{answer}',
) -> list[Trace]:
  """Returns traces of all roles.

  Args:
    world_seed: of the run's world; those of the traces follow from it.
    mix: of the solver's habits, a name in atlas_traces.MIXES.
    roles: the fields of `Mix`.
    n: number of traces.
    worlds: number of worlds, which share n evenly.
    turns: searches of a solver's trace, at most.
    people: of the train split of each world; see `atlas.generate`.
    seed: of the behaviours.
    train, heldout, known: of the run's world; see `atlas.generate`.
    brief: config.selfplay.brief.

  Raises:
    DataError: a world that cannot be generated.
  """
  how = Mix(**roles)
  solver = dict(mix=mix, n=int(n * how.solver), seed=seed, turns=turns)
  own = dict(world_seed=world_seed, train=train, heldout=heldout, known=known)
  out = atlas_traces.traces(worlds=worlds, people=people, **solver, **own)
  rest = n - len(out)
  for i, own_seed, count in microtraces.shares(world_seed, worlds, rest):
    world = atlas.generate(own_seed, train=people, heldout=40, known=0)
    writer = _Writer(world, how, np.random.default_rng([seed, i, 31]), brief)
    out += [writer.trace() for _ in range(count)]
  return out


class _Writer(Writer):
  """Writes traces of one world's train people."""

  def __init__(self, world: World, mix: Mix, rng, brief: str):
    self.facts, self.brief = world.facts, brief
    self.sections = {p.title: p for p in world.passages()}
    own = set(atlas.names('train', False))
    self.leads = leading({n: f for n, f in world.facts.items() if n in own})
    self.passages = backlinks(world)
    super().__init__(rng, [*self.leads], mix)

  def text(self, name: str) -> str:
    return self.passages[name].text

  def stated(self, name: str) -> list[str]:
    return [f'{person} {link} {name}' for person, link in self.leads[name]]

  def trace(self) -> Trace:
    draw = self.rng.random() * (1 - self.mix.solver)
    if draw < self.mix.proposer:
      return self.proposer()
    if draw < self.mix.proposer + self.mix.drill:
      return self.drill()
    if draw < self.mix.proposer + self.mix.drill + self.mix.told:
      return self.told()
    return self.verifier()

  def back(self, answer: str, hops: int) -> list[tuple[str, str]]:
    """[(person, link)] backwards: the first one's link is the answer."""
    out: list[tuple[str, str]] = []
    at = answer
    for _ in range(hops):
      met = {answer, *(person for person, _ in out)}
      used = {link for _, link in out}
      free = [
        (person, link)
        for person, link in self.leads[at]
        if link not in used and person not in met
      ]
      if not free:
        break
      out.append(free[0])  # which one is random, and easily copied
      at = out[-1][0]
    return out

  def proposer(self) -> Trace:
    asked, hops = self.proposed()
    answer = self.one(self.people)
    steps, at, actions, said = self.back(answer, hops), answer, [], answer
    for n in range(len(steps)):
      actions += [('think', said), ('search', f'{at} {KNOW}')]
      actions.append(('information', (self.passages[at],)))
      at, path = steps[n][0], [link for _, link in steps[n::-1]]
      said = "'s ".join([at, *path])
    actions.append(('think', said))
    wrong = self.chance(self.mix.wrong)
    others = [name for name in self.people if name != at]
    start = self.one(others) if wrong else at
    actions.append(('answer', atlas.text('', [start, *path])))
    text = self.brief.format(answer=answer, searches=asked, examples='')
    question = Question('trace', text, (answer,))
    return Trace(question, tuple(actions), not wrong, template=TEMPLATE)

  def told(self) -> Trace:
    """A solver's, that reads how the question came about."""
    made = self.proposer()
    while not made.good:
      made = self.proposer()
    text = made.actions[-1][1]
    at, path = parse(text)
    actions, said = [], ''
    for link in path:
      section = atlas.SECTION[link]
      actions += [('think', f'{said}find {link}')]
      actions += [('search', f'{at} {section}')]
      actions += [('information', (self.sections[f'{at}, {section}'],))]
      at = self.facts[at][link]
      said = f'{link} {at}; '
    actions += [('think', f'{link} {at}'), ('answer', at)]
    question = Question('trace', f'{text} {shown(made)}', (at,))
    return Trace(question, tuple(actions))

  def verifier(self) -> Trace:
    answer, steps = self.drawn()
    start, path = steps[-1][0], [link for _, link in reversed(steps)]
    own = [answer, *(person for person, _ in steps[:-1])]
    bundles = [own]
    if self.chance(0.5):  # another proposal's
      other, more = self.drawn()
      bundles.append([other, *(person for person, _ in more[:-1])])
    order = [bundles[i] for i in self.rng.permutation(len(bundles))]
    evidence = [*dict.fromkeys(name for bundle in order for name in bundle)]
    if self.chance(self.mix.absent):
      start = self.one(self.people)
    states = {
      (person, link): name
      for name in evidence
      for person, link in self.leads[name]
    }
    text = '\n'.join(
      [self.text(name) for name in evidence]
      + [f'Question: {atlas.text("", [start, *path])}']
    )
    read, at = [], start
    for link in path:
      at = states.get((at, link), NOTHING)
      read.append(f'{link} {at}')
      if at == NOTHING:
        break
    actions = (('think', '; '.join(read)), ('answer', at))
    question = Question('trace', text, (at,))
    return Trace(question, actions, template='micro_evidence')

  def drawn(self) -> tuple[str, list[tuple[str, str]]]:
    answer = self.one(self.people)
    return answer, self.back(answer, int(self.rng.integers(1, MOST + 1)))


# What a question means, for metrics alone.

_QUESTION = re.compile(r"What is (\w+ \w+)((?:'s \w+)+) ?\?")


def parse(text: str) -> tuple[str, list[str]] | None:
  """(the person it starts from, its relations from there), or None."""
  match = _QUESTION.fullmatch(' '.join(text.split()))
  return match and (match[1], re.findall(r"'s (\w+)", match[2]))


def make(config) -> oracle.Oracle:
  """Of the links of the world that a config's runs search."""
  sizes = config.data.world.to_dict()
  facts = atlas.generate(config.data.world_seed, **sizes).facts
  links = {
    name: tuple((link, own[link]) for link in atlas.LINKS)
    for name, own in facts.items()
  }
  return oracle.Oracle(links, parse)
