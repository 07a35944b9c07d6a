"""An engine whose proposer and verifier know the game; its solver is random.

A policy that has learnt nothing asks no question. What is scripted here is
scored by the policy, so that it is trained on like anything that it samples.
"""

import re
import zlib

import numpy as np

from experiments.ssp import world as worlds
from searchrl_jax.engines.core import Completion
from searchrl_jax.engines.jax import engine

_FACT = r'{} (\w+) (\w+ \w+)'


class Scripted(engine.JaxEngine):
  async def generate(self, handle, sampling):
    text = self._tokenizer.decode(handle.ids)
    said = None
    if text.startswith('answer: '):
      said = propose(text)
    elif not text.startswith('Question: '):
      said = read(text)
    if said is None or sampling.probe:
      return await super().generate(handle, sampling)
    ids = np.array(self._tokenizer.encode(said), np.int32)
    logps = await self.logps([*handle.ids, *ids])
    self.append(handle, ids)
    return Completion(
      ids, logps[-len(ids) :], 'eos', np.full(len(ids), self.version, np.int32)
    )


def propose(text: str) -> str:
  """Two searches and a one-hop question; every fourth answer gets none."""
  answer = re.match(r'answer: (\w+ \w+)', text)[1]
  seen = text.count('<information>')
  relation, other = (
    re.search(_FACT.format(answer), text).groups() if seen else ('', answer)
  )
  if seen < 2:
    return f'<think> {other} </think>\n<search> {other} </search>'
  if zlib.crc32(answer.encode()) % 4 == 0:
    return '<question> What? </question>'
  asked = worlds.text(other, [worlds.INVERSE[relation]])
  return f'<question> {asked} </question>'


def read(text: str) -> str | None:
  evidence, _, question = text.rpartition('Question: ')
  name = re.search(r' of (\w+ \w+)\?', question)
  if name is None:
    return None
  relation = re.search(r'the (\w+) of', question)[1]
  found = dict(re.findall(_FACT.format(name[1]), evidence))
  return f'<answer> {found.get(relation, "not found")} </answer>'


async def chance(groups, context):
  """A reward that an untrained policy earns half of the time."""
  from searchrl_jax.rewards import core

  del context
  return core.per_trajectory(
    groups, lambda t: float(sum(int(s.ids.sum()) for s in t.segments) % 2)
  )


make, capacity = Scripted, engine.capacity
