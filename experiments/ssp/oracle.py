"""What a question means on the graph: for scoring alone, never for a reward.

It reads "What is the guide of the teacher of X?" word by word, follows the
relations from X over everything that passages state, and tells

  known    the question can be read, and leads somewhere
  valid    its answers hold the one that it was made for
  unique   it has exactly one answer
  hops     how many statements its answer is truly away: the fewest that lead
           from X to it, among the people that the question passes. "The ward
           of the guide of X" is X again: 0.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import re

from experiments.ssp import world as worlds
from searchrl_jax.rewards import scores

_QUESTION = re.compile(r'What is ((?:the \w+ of )+)(\w+ \w+) ?\?')
_RELATION = re.compile(r'the (\w+) of ')


@dataclasses.dataclass(frozen=True)
class Verdict:
  """See the module. start: X; '' = the question could not be read."""

  known: bool
  valid: bool
  unique: bool
  hops: int
  start: str


def parse(text: str) -> tuple[str, list[str]] | None:
  """(the person it starts from, its relations from there), or None."""
  match = _QUESTION.fullmatch(' '.join(text.split()))
  if match is None:
    return None
  return match[2], _RELATION.findall(match[1])[::-1]


class Oracle:
  """Of a graph: facts[name] = ((relation, name), ...).

  parse: reads questions, as `parse` does.
  """

  def __init__(
    self,
    facts: Mapping[str, Sequence[tuple[str, str]]],
    parse: Callable[[str], tuple[str, list[str]] | None] = parse,
  ):
    self.facts, self._parse = facts, parse

  def judge(self, text: str, answers: Sequence[str]) -> Verdict:
    read = self._parse(text)
    if read is None or read[0] not in self.facts:
      return Verdict(False, False, False, 0, '')
    start, relations = read
    found, passed = {start}, {start}
    for relation in relations:
      found = {
        value
        for name in found
        for r, value in self.facts[name]
        if r == relation
      }
      passed |= found
    right = {x for x in found if scores.exact_match(x, answers)}
    hops = self._away(start, right, passed) if right else 0
    return Verdict(bool(found), bool(right), len(found) == 1, hops, start)

  def _away(self, start: str, right: set[str], passed: set[str]) -> int:
    edge, seen, steps = {start}, {start}, 0
    while not edge & right:
      edge = {
        value
        for name in edge
        for _, value in self.facts[name]
        if value in passed and value not in seen
      }
      seen |= edge
      steps += 1
    return steps


def make(config) -> Oracle:
  """Of the world that a config's runs search."""
  return Oracle(
    worlds.generate(config.data.world_seed, **config.data.world.to_dict()).facts
  )
