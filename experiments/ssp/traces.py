"""Warm-start traces of the three roles, on worlds and people of their own.

  solver    mostly one-hop questions; of longer ones it stops short more often
            than not, and the more often the deeper it is; now and then it goes
            a step too far
  proposer  90 % one-hop questions, 8 % two, 2 % three; some name a wrong
            person (which a reader of the evidence can find out), some ask the
            other way round (which may have several answers)
  verifier  reads what stands in its prompt, a statement a hop, up to four; a
            share of questions has no answer there, and it says so
  drill     no role: passages, then their statements in another order, which
            teaches to look them up sooner than a statement a trace does
  told      a solver that the text of the proposal stands before, and that goes
            all the way (config.teacher; none by default)

Where a brief asks for a number of hops (`brief`), the shares of proposals are
those of the numbers, and not every proposal has as many.

So all that self-play can select exists, and what it must find is rare.
"""

from collections.abc import Sequence
import dataclasses

import numpy as np

from experiments.ssp import oracle
from experiments.ssp import world as worlds
from searchrl_jax.data.checks import require
from searchrl_jax.data.core import Trace
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import microtraces

NOTHING = 'not found'
FACT_TOKENS = 6  # of a statement in a passage


@dataclasses.dataclass(frozen=True)
class Mix:
  """How the traces behave; all are chances.

  solver, proposer, drill, told: shares of the traces, the rest is the
  verifier's.
  asked, proposed: of 1, 2, ... hops.
  short: that the solver stops after 1, 2, ... hops though there are more.
  long: that it goes on after the last hop.
  wrong: that a proposal names another person; around: that it asks for who
  points at somebody.
  absent: that the verifier's question has no answer in its evidence.
  heeds: that a proposal has as many hops as it is asked for, and not fewer.
  """

  solver: float
  proposer: float
  drill: float
  asked: Sequence[float]
  proposed: Sequence[float]
  short: Sequence[float]
  long: float
  wrong: float
  around: float
  absent: float
  heeds: float = 1.0
  told: float = 0.0

  def __post_init__(self):
    for name, value in vars(self).items():
      for p in value if isinstance(value, Sequence) else (value,):
        require(0 <= p <= 1, f'{name}={value}: shares from 0 to 1')
    for name in ('asked', 'proposed'):
      shares = getattr(self, name)
      require(abs(sum(shares) - 1) <= 1e-6, f'{name}={shares} must sum to 1')
    roles = self.solver + self.proposer + self.drill + self.told
    require(roles <= 1, 'solver + proposer + drill + told must not exceed 1')
    enough = len(self.short) >= len(self.asked) - 1
    need = 'needs a chance for each hop of asked but the last'
    require(enough, f'short={self.short} {need}')


def traces(
  *,
  world_seed: int,
  worlds: int,
  n: int,
  people: int,
  bundles: int,
  prompt_tokens: int,
  proposer: str,
  verifier: str,
  mix: dict,
  seed: int = 0,
  brief: str = '{answer}',
) -> list[Trace]:
  """Traces of all roles, shuffled.

  Args:
    world_seed: of the run's world; those of the traces follow from it.
    worlds: how many.
    n: how many traces, shared evenly.
    people: of each world, see `world.generate`.
    bundles: most foreign bundles of passages before a verifier's question.
    prompt_tokens: that these may fill.
    proposer: template of its traces; the solver's is config.env.template.
    verifier: template of its traces.
    mix: the fields of `Mix`.
    seed: of the behaviours.
    brief: config.selfplay.brief.

  Raises:
    DataError: a share out of range, or a world that cannot be.
  """
  mix = Mix(**mix)
  out = []
  for i, own_seed, count in microtraces.shares(world_seed, worlds, n):
    rng = np.random.default_rng([seed, i, 26])
    writer = _Writer(own_seed, people, rng, mix, bundles, prompt_tokens, brief)
    for _ in range(count):
      draw = writer.rng.random()
      if draw < mix.solver:
        out.append(writer.solver())
      elif draw < mix.solver + mix.proposer:
        out.append(dataclasses.replace(writer.proposer(), template=proposer))
      elif draw < mix.solver + mix.proposer + mix.drill:
        out.append(writer.drill())
      elif draw < mix.solver + mix.proposer + mix.drill + mix.told:
        out.append(writer.told())
      else:
        out.append(dataclasses.replace(writer.verifier(), template=verifier))
  return out


def shown(proposal: Trace) -> str:
  """What `game.construction` has of a proposal."""
  texts = []
  for kind, payload in proposal.actions[:-1]:
    read = kind == 'information'
    texts += [p.text for p in payload] if read else [payload]
  return ' '.join(texts)


class Writer(microtraces.Writer):
  """What the roles of any world share.

  people: those that are asked about. mix: has `proposed` and `heeds`, see
  `Mix`.
  """

  def __init__(self, rng, people: Sequence[str], mix):
    super().__init__(rng)
    self.people, self.mix = people, mix

  def text(self, name: str) -> str:
    """The passage of a person."""
    raise NotImplementedError

  def stated(self, name: str) -> list[str]:
    """What it states, in the words of questions."""
    raise NotImplementedError

  def drill(self) -> Trace:
    """Passages, then what they state in another order."""
    names = [self.one(self.people) for _ in range(self.rng.integers(1, 6))]
    names = list(dict.fromkeys(names))
    facts = [fact for name in names for fact in self.stated(name)]
    said = '; '.join(facts[i] for i in self.rng.permutation(len(facts)))
    read = '\n'.join(map(self.text, names))
    return Trace(None, (('other', read), ('think', said)))

  def hops(self, shares: Sequence[float]) -> int:
    return 1 + int(self.rng.choice(len(shares), p=shares))

  def proposed(self) -> tuple[int, int]:
    """How many hops a proposal is asked for, and how many it has."""
    asked, heeds = self.hops(self.mix.proposed), self.mix.heeds
    if heeds < 1 and asked > 1 and not self.chance(heeds):
      return asked, int(self.rng.integers(1, asked))
    return asked, asked


class _Writer(Writer):
  """Writes the traces of one world."""

  def __init__(self, seed, people, rng, mix: Mix, bundles, tokens, brief: str):
    self.world = worlds.warm(seed, people)
    self.oracle = oracle.Oracle(self.world.facts)
    super().__init__(rng, list(self.world.facts), mix)
    self.bundles, self.tokens, self.brief = bundles, tokens, brief

  def path(self, hops: int) -> tuple[str, list[tuple[str, str]]]:
    """(an answer, a path to it that long): see `world.path`."""
    while True:
      answer = self.one(self.people)
      steps = worlds.path(self.world, answer, hops, self.rng)
      if len(steps) == hops:
        return answer, steps

  def text(self, name: str) -> str:
    return worlds.passage(name, self.world.facts[name])

  def stated(self, name: str) -> list[str]:
    return [f'{name} {r} {v}' for r, v in self.world.facts[name]]

  def look_up(self, thought: str, name: str) -> list:
    read = (Passage(self.world.ids[name], name, self.text(name)),)
    return [('think', thought), ('search', name), ('information', read)]

  def step(self, name: str, relation: str) -> str:
    """Somebody that `relation` of `name` leads to."""
    return self.one([v for r, v in self.world.facts[name] if r == relation])

  # The solver.

  def solver(self) -> Trace:
    hops = self.hops(self.mix.asked)
    if hops == 1 and self.chance(self.mix.around):
      name = self.one(self.people)
      relations = [self.one(self.world.facts[name])[0]]
    else:
      _, steps = self.path(hops)
      name, relations = steps[-1][1], [r for r, _ in reversed(steps)]
    question = self.asked(name, relations)
    actions, at = self.look_up(f'find {name}', name), name
    last = len(relations)
    for n, relation in enumerate(relations, 1):
      value = self.step(at, relation)
      stops = n == last or self.chance(self.mix.short[n - 1])
      thought, at = f'{at} {relation} {value}', value
      if not stops or n == last and self.chance(self.mix.long):
        actions += self.look_up(thought, value)
        if n < last:
          continue
        relation, value = self.one(self.world.facts[at])
        thought, at = f'{at} {relation} {value}', value
      break
    actions += [('think', thought), ('answer', at)]
    return Trace(question, tuple(actions), at in question.answers)

  def asked(self, name, relations) -> Question:
    found = {name}
    for relation in relations:
      found = {
        v for x in found for r, v in self.world.facts[x] if r == relation
      }
    text = worlds.text(name, relations)
    return Question('trace', text, tuple(sorted(found)), hops=len(relations))

  # The proposer.

  def proposer(self) -> Trace:
    (asked, hops), mix = self.proposed(), self.mix
    answer, steps = self.path(hops)
    if hops == 1 and self.chance(mix.around):
      relation, other = self.one(self.world.facts[answer])
      steps = [(worlds.INVERSE[relation], other)]
    actions, relations = self.look_up(answer, answer), []
    for relation, name in steps:
      relations.insert(0, relation)
      actions += self.look_up(worlds.chain(name, relations), name)
    name, good = steps[-1][1], True
    if self.chance(mix.wrong):
      name, good = self.one([v for _, v in self.world.facts[name]]), False
    text = worlds.text(name, relations)
    good = good or self.oracle.judge(text, [answer]).valid
    actions.append(('answer', text))
    told = self.brief.format(answer=answer, searches=asked, examples='')
    return Trace(Question('trace', told, (answer,)), tuple(actions), good)

  def told(self) -> Trace:
    """A solver's, that reads how the question came about."""
    met, at = [''], ''
    while at != met[-1] or not at:  # until it names the one that it found
      made = self.proposer()
      text = made.actions[-1][1]
      at, relations = oracle.parse(text)
      # Everyone on the way, from the answer on.
      met = [name for kind, name in made.actions if kind == 'search']
    actions, said = [], f'find {at}'
    for relation, value in zip(relations, met[-2::-1], strict=True):
      actions += self.look_up(said, at)
      said, at = f'{at} {relation} {value}', value
    actions += [('think', said), ('answer', at)]
    question = Question('trace', f'{text} {shown(made)}', (at,))
    return Trace(question, tuple(actions))

  # The verifier.

  def verifier(self) -> Trace:
    hops = self.hops([0.25] * 4)
    answer, steps = self.path(hops)
    own = [answer, *(name for _, name in steps)]
    start, relations = steps[-1][1], [r for r, _ in reversed(steps)]
    if hops == 1 and self.chance(self.mix.around):
      relation, other = self.one(self.world.facts[answer])
      own, start = [answer, other], other
      relations = [worlds.INVERSE[relation]]
    if self.chance(self.mix.absent):
      start = self.one([v for _, v in self.world.facts[start]])
    bundles = [own]
    for _ in range(self.rng.integers(self.bundles + 1)):
      other, more = self.path(self.hops([0.25] * 4))
      bundles.append([other, *(name for _, name in more)])
    kept, room = [], self.tokens
    for bundle in bundles:
      need = sum(FACT_TOKENS * len(self.world.facts[x]) for x in bundle)
      if need <= room:
        kept.append(bundle)
        room -= need
    order = [kept[i] for i in self.rng.permutation(len(kept))]
    evidence = list(dict.fromkeys(x for bundle in order for x in bundle))
    text = '\n'.join(
      [self.text(x) for x in evidence]
      + [f'Question: {worlds.text(start, relations)}']
    )
    read, at = [], start
    for relation in relations:
      values = [v for r, v in self.world.facts[at] if r == relation]
      if at not in evidence or not values:
        read, at = [*read, f'{at} {relation} {NOTHING}'], NOTHING
        break
      # Of several, the one that it was asked for.
      value = answer if answer in values else self.one(values)
      read, at = [*read, f'{at} {relation} {value}'], value
    actions = (('think', '; '.join(read)), ('answer', at))
    return Trace(Question('trace', text, (at,)), actions)
