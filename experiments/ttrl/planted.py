"""The quickstart's worlds with passages that contradict some of the answers.

A planted passage has the name and the form of a true one and says something
else about what a question asks. It leaves out a fact that nobody asks for and
is shorter: a search for the name finds it first, and with k=1 it alone. So
most votes on such a question agree on what is false.
"""

import dataclasses

import numpy as np

from searchrl_jax.data.checks import require
from searchrl_jax.worlds import atlas, microworld


def generate(
  seed: int, *, asked: int, share: float, train=400, heldout=150, relations=4
) -> microworld.World:
  """`microworld.generate`, with planted passages; questions stay as they are.

  Args:
    seed: see `microworld.generate`.
    asked: the first so many train questions are the test-time set.
    share: of these, how many are contradicted at least; in 0..1.
    train, heldout, relations: see `microworld.generate`.

  Raises:
    DataError: a share out of range, or one that cannot be reached.
  """
  require(0 <= share <= 1, f'share={share} must lie between 0 and 1')
  sizes = dict(train=train, heldout=heldout, relations=relations)
  world = microworld.generate(seed, **sizes)
  questions = microworld.pick(world, 'train', asked)
  read = {fact for q in questions for fact in facts_of(world, q)}
  rng = np.random.default_rng([seed, 24])
  false: dict[str, dict[str, str]] = {}
  for i in rng.permutation(asked):
    if len(contradicted(world, questions, false)) >= share * asked:
      break
    name, relation = facts_of(world, questions[i])[-1]
    mine = {r for n, r in read if n == name}
    if len(mine) == relations:  # nothing of this person can be left out
      continue
    values = {own[relation] for own in world.facts.values() if relation in own}
    values -= {world.facts[name][relation], name}
    false.setdefault(name, {})[relation] = str(rng.choice(sorted(values)))
  enough = len(contradicted(world, questions, false)) >= share * asked
  require(enough, f'share={share} of asked={asked} questions: too many')
  corpus = [*world.corpus]
  for name, said in false.items():
    mine = {r for n, r in read if n == name}
    contents = passage(world, name, said, mine)
    corpus.append({'id': str(len(corpus)), 'contents': contents})
  return dataclasses.replace(world, corpus=tuple(corpus))


def facts_of(world, question) -> list[tuple[str, str]]:
  """The (name, relation) pairs that answer it, in order."""
  name, *path = question.meta['path']
  steps = atlas.walk(world.facts, name, path)
  return [(person, relation) for person, relation, _ in steps]


def contradicted(world, questions, false) -> list:
  """Those of the questions that read a fact which `false` contradicts."""
  return [
    q
    for q in questions
    if any(r in false.get(n, ()) for n, r in facts_of(world, q))
  ]


def passage(world, name, said, read) -> str:
  """As in the corpus, with what is `said`, and without one fact unread."""
  facts = world.facts[name] | said
  drop = next(r for r in facts if r not in read)
  text = '; '.join(f'{r} {v}' for r, v in facts.items() if r != drop)
  return f'"{name}"\n{name}: {text}.'


write, tokenizer = microworld.write, microworld.tokenizer
