"""The quickstart's worlds with passages that contradict some of the answers.

A planted passage has the name and the form of a true one and says something
else about what a question asks. It leaves out a fact that nobody asks for and
is shorter: a search for the name finds it first, and with k=1 it alone. So
most votes on such a question agree on what is false.
"""

import dataclasses

import numpy as np

from searchrl_jax.data.checks import DataError
from searchrl_jax.worlds import microworld


def generate(
  seed: int,
  *,
  asked: int,
  share: float,
  train: int = 400,
  heldout: int = 150,
  relations: int = 4,
) -> microworld.World:
  """`microworld.generate`, with planted passages; questions stay as they are.

  Args:
    seed: as there, and the rest.
    asked: the first so many train questions are the test-time set.
    share: of these, how many are contradicted at least; in 0..1.
    train: see `microworld.generate`.
    heldout: see there.
    relations: see there.

  Raises:
    DataError: a share out of range, or one that cannot be reached.
  """
  if not 0 <= share <= 1:
    raise DataError(f'share={share} must lie between 0 and 1')
  world = microworld.generate(
    seed, train=train, heldout=heldout, relations=relations
  )
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
    values = sorted(
      {
        facts[relation]
        for n, facts in world.facts.items()
        if relation in facts
        and n != name
        and facts[relation] not in (world.facts[name][relation], name)
      }
    )
    false.setdefault(name, {})[relation] = str(rng.choice(values))
  if len(contradicted(world, questions, false)) < share * asked:
    raise DataError(f'share={share} of asked={asked} questions: too many')
  return dataclasses.replace(
    world,
    corpus=(
      *world.corpus,
      *(
        {
          'id': str(len(world.corpus) + i),
          'contents': passage(
            world, name, said, {r for n, r in read if n == name}
          ),
        }
        for i, (name, said) in enumerate(false.items())
      ),
    ),
  )


def facts_of(world, question) -> list[tuple[str, str]]:
  """The (name, relation) pairs that answer it, in order."""
  name, *path = question.meta['path']
  out = []
  for relation in path:
    out.append((name, relation))
    name = world.facts[name][relation]
  return out


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
