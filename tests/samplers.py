"""Samplers of tests, as a config names them."""

import asyncio
from collections.abc import Sequence

import numpy as np

from searchrl_jax.data.core import Trace
from searchrl_jax.engines.core import Completion
from searchrl_jax.text.states import Done, Generate
from searchrl_jax.types import Group


async def best(questions, services, *, attempts: int) -> list[Group]:
  """Each trajectory is the best of `attempts`, by the rewards of the config."""
  slots = services.slots()

  async def one(start, sample: int) -> None:
    found = []
    async with slots:
      for n in range(attempts):
        handle = services.open(start[1].prompt)
        branch = ('attempt', n) if n else ()
        found.append(await services.attempt(handle, *start, sample, branch))
    rewards = await services.reward([(t,) for t in found])
    value = np.where(rewards.valid, rewards.value, -np.inf)
    services.record(found[int(np.argmax(value))])

  await services.gather(
    [
      one(start, sample)
      for start, names in zip(
        services.starts(questions), services.names(questions), strict=True
      )
      for name, sample in names
      if (name, sample) not in services.done
    ]
  )
  return services.groups(questions)


def told(question) -> list[Trace]:
  """One trace: it searches for the person, or the last word, and is right."""
  query = question.meta.get('path', question.text.split()[-1:])[0]
  read = ('search', query), ('information', ())
  return [Trace(question, (*read, ('answer', question.answers[0])))]


async def reverse(questions, services) -> list[Group]:
  """Returns its groups in another order, which is refused."""
  return (await _chains(questions, services))[::-1]


async def leaky(questions, services) -> list[Group]:
  """Leaves handles open, and a task that waits."""
  for _, action in services.starts(questions):
    services.fork(services.open(action.prompt))
  await asyncio.sleep(0)
  return await _chains(questions, services)


async def _chains(questions: Sequence, services) -> list[Group]:
  from searchrl_jax.rollout import chains

  return await chains.sample(questions, services)


async def scripted(questions, services) -> list[Group]:
  """First samples search for the person and are right; others guess.

  What the engine would have sampled with is scored by it, so that the trainer
  can learn from it as from its own.
  """
  env, engine = services.env, services.engine

  async def play(start, sample: int) -> None:
    state, action = start
    q, right = state.question, sample == 0
    texts = [
      f'<answer> {q.answers[0] if right else q.meta["path"][1]} </answer>'
    ]
    texts += [f'<search> {q.meta["path"][0]} </search>'] * right
    while not isinstance(action, Done):
      if isinstance(action, Generate):
        text = texts.pop()
        ids = np.array(env.tokenizer.encode(text), np.int32)
        history = np.concatenate([s.ids for s in state.segments])
        logps = await engine.logps([*history.tolist(), *ids.tolist()])
        stop = next(s for s in action.stops if text.endswith(s))
        versions = np.full(len(ids), engine.version, np.int32)
        event = Completion(ids, logps[-len(ids) :], stop, versions)
      else:
        event = await services.source.search(list(action.requests))
      state, action = env.step(state, event)
    services.record(env.trajectory(state, sample))

  starts = services.starts(questions)
  for start, names in zip(starts, services.names(questions), strict=True):
    await services.gather(
      play(start, n) for q, n in names if (q, n) not in services.done
    )
  return services.groups(questions)
