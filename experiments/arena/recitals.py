"""The warm start of SSRL on atlas: the policy reads what it is to recite.

It continues `skills` (configs/atlas.py), which never wrote a passage, with
information in the loss:

  recitals  searches, each followed by the passage that it is for, of everybody
            of the run's world
  traces    on questions about people of the train split, with the habits of a
            mixture, and with what the run's own search finds
  queries   the beginnings of traces of other worlds, up to the first query: or
            only names that were asked about before would be searched for

So the policy has read what held-out questions ask for, and was asked none.
"""

import numpy as np

from searchrl_jax.data.core import Trace
from searchrl_jax.types import Passage
from searchrl_jax.worlds import atlas, atlas_traces


def traces(
  *,
  world_seed: int,
  mix: str,
  n: int,
  queries: int,
  recitals: int,
  pack=4,
  seed=0,
  k=1,
  turns=6,
  train=300,
  heldout=150,
  known=40,
) -> list[Trace]:
  """Returns traces on questions, recitals and queries.

  Args:
    world_seed: of the run's world, whose passages these are.
    mix: of the habits, a name in atlas_traces.MIXES.
    n: traces on questions; a question repeats only after all have occurred.
    queries: beginnings of traces; fewer where a trace has no query.
    recitals: how often each passage is recited.
    pack: recitals in one trace.
    seed: of the behaviours and of the order.
    k: passages per query, as in the run.
    turns: searches of a trace, at most.
    train, heldout, known: of the run's world; see `atlas.generate`.

  Raises:
    DataError: a world that cannot be generated.
  """
  sizes = dict(train=train, heldout=heldout, known=known)
  world = atlas.generate(world_seed, **sizes)
  everybody = [n for split in atlas.SPLITS for n in _names(split)]
  search = atlas_traces.searcher(world, everybody, tuple(atlas.SECTION))
  pool = atlas.pick(world, 'train', kinds=atlas.KINDS)
  habits = atlas_traces.MIXES[mix]
  out = atlas_traces.script(world, habits, turns, pool, n, [seed], search, k)
  others = atlas_traces.traces(
    world_seed=world_seed, mix=mix, worlds=2, n=queries, seed=seed, known=0
  )
  out += [
    Trace(None, (('other', f'Question: {t.question.text}'), *actions))
    for t in others
    if (actions := begun(t))
  ]
  rng, read = np.random.default_rng([world_seed, seed, 29]), passages(world)
  order = [i for _ in range(recitals) for i in rng.permutation(len(read))]
  for at in range(0, len(order), pack):
    recited = [read[i] for i in order[at : at + pack]]
    pairs = [
      (('search', p.title.replace(',', '')), ('information', (p,)))
      for p in recited
    ]
    out.append(Trace(None, tuple(action for pair in pairs for action in pair)))
  return out


def begun(trace: Trace) -> tuple:
  """The actions up to the first query; () if there is none."""
  kinds = [kind for kind, _ in trace.actions]
  return trace.actions[: kinds.index('search') + 1 if 'search' in kinds else 0]


def _names(split: str) -> tuple[str, ...]:
  return (*atlas.names(split, True), *atlas.names(split, False))


def passages(world) -> list[Passage]:
  """All that state a fact."""
  asked = f', {atlas.ASKED}'
  return [p for p in world.passages() if not p.title.endswith(asked)]
