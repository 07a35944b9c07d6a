"""Which share of a question the found passages account for (`guarded.covered`).

Of questions of the generated worlds atlas and microworld. What may be used
without a label is what anybody can know who has the question, the passages and
the language:

  * the words of the question: whom it names, and its relations in their order;
  * the passages that a search found: whom the title names, what words the text
    has, and whom it names;
  * a dictionary: by which words passages state a relation (`mentor` or `tutor`
    is a teacher). It is that of the language, the same for all worlds, people
    and questions, as what a reader knows who never saw this corpus.

Not used: `Question.meta` (path, facts), `supporting`, golden answers, and the
world's facts, none of which `share` is given. Nor is it read off a passage
which name is the value of which relation: whoever does that for all hops has
answered the question, and rewards would be those of a solver. So a search that
goes on with the friend where the question asks for the teacher, both named by
one passage, is as complete as the right one. The vote has to tell them apart.

A person named by the question is accounted for if a passage about them was
found. A relation is, if a passage states it that is about a person whom the
relations before it lead to: one named by a passage that states the relation
before, of such a person; for the first relation, the one named by the question.
Without this chain, all sections of the first person would account for all
relations. The share is over persons and relations.
"""

from collections.abc import Sequence
import re

from searchrl_jax.types import Passage
from searchrl_jax.worlds import atlas, microworld

Chain = tuple[str, tuple[tuple[str, ...], ...]]  # person, words of relations

_PERSON = re.compile(r'[A-Z]\w+ [A-Z]\w+')
_POSSESSIVE = re.compile(r"What is ([A-Z]\w+ [A-Z]\w+)((?:'s \w+)+)\?")
_BOTH = re.compile(
  r'What town did ([A-Z]\w+ [A-Z]\w+) and ([A-Z]\w+ [A-Z]\w+) both visit\?'
)
_OF = re.compile(r'What is ((?:the \w+ of )+)([A-Z]\w+ [A-Z]\w+)\?')
_ATLAS = {
  r: words for own in atlas.SECTIONS.values() for r, words in own.items()
}
# A list of towns has no word for the relation, but that of its section.
_ATLAS[atlas.VISITED] = (atlas.TRAVEL,)
_MICRO = {r: (r,) for r in (*microworld.ATTRIBUTES, *microworld.LINKS)}


def chains(text: str) -> list[Chain] | None:
  """What a question asks for; None if its words are not of these worlds."""
  if found := _POSSESSIVE.fullmatch(text):
    person, relations = found[1], re.findall(r"'s (\w+)", found[2])
    parts, known = [(person, relations)], _ATLAS
  elif found := _BOTH.fullmatch(text):
    parts, known = [(p, [atlas.VISITED]) for p in found.groups()], _ATLAS
  elif found := _OF.fullmatch(text):
    relations = re.findall(r'the (\w+) of', found[1])[::-1]
    parts, known = [(found[2], relations)], _MICRO
  else:
    return None
  if any(r not in known for _, relations in parts for r in relations):
    return None
  return [(p, tuple(known[r] for r in relations)) for p, relations in parts]


def share(text: str, passages: Sequence[Passage]) -> float | None:
  """The share of a question that passages account for; see the module.

  Args:
    text: of the question.
    passages: what a trajectory found, in any order.

  Returns:
    0 to 1; None if `chains` cannot read the question.
  """
  asked = chains(text)
  if asked is None:
    return None
  done = sum(sum(_accounted(chain, passages)) for chain in asked)
  return done / sum(1 + len(relations) for _, relations in asked)


def _accounted(chain: Chain, passages: Sequence[Passage]) -> list[bool]:
  """Of the person and each relation of a chain."""
  person, relations = chain
  about = [(_about(p), p.text, {*re.findall(r'\w+', p.text)}) for p in passages]
  out, at = [any(who == person for who, _, _ in about)], {person}
  for words in relations:
    stating = [
      (who, text) for who, text, has in about if who in at and has & {*words}
    ]
    out.append(bool(stating))
    at = {
      name
      for who, text in stating
      for name in _PERSON.findall(text)
      if name != who
    }
  return out


def _about(passage: Passage) -> str:
  """Whom the title names: "Mira Dok, school" or "Mira Dok"."""
  found = _PERSON.match(passage.title.strip('"'))
  return found[0] if found else ''
