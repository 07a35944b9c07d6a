"""Trajectories that programs play through an OpenAI-compatible endpoint.

`config.rollout.program` names what plays one: the dotted path of a function
f(base_url, api_key, question) -> reward or None, which runs in a thread; or a
command, which finds OPENAI_BASE_URL, OPENAI_API_KEY and SEARCHRL_QUESTION
(JSON) in its environment. It sends chats with any OpenAI client, and what the
policy writes is recorded (`endpoint.sessions`). It may also send its reward to
/v1/reward. The reward `program.returned` is what it returned or sent; the other
functions of config.reward score the trajectory as any.

A program that raises, ends with another status than 0, takes more than
`program_seconds`, or never asks for a reply, has failed: its trajectory is left
out, as that of a failed service is (design 5.4), and `meta['error']` says why.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import contextlib
import functools
import inspect
import json
import math
import os
import shlex
import shutil
import tempfile
import threading
from typing import Any

from absl import logging
from ml_collections import ConfigDict

from searchrl_jax import lookup
from searchrl_jax.endpoint import app
from searchrl_jax.endpoint.sessions import Session, Sessions
from searchrl_jax.engines.core import Sampling
from searchrl_jax.rollout.core import Services
from searchrl_jax.store import records
from searchrl_jax.types import Group, Question, SearchError, SearchRequest


async def sample(
  questions: Sequence[Question],
  services: Services,
  *,
  program: str,
  program_seconds: float,
) -> list[Group]:
  """A trajectory of the program for each name; see the module."""
  c, env = services.config, services.env
  slots, sessions = services.slots(timed=True), Sessions()
  play = _program(program)
  own = Sampling(1, c.temperature, c.top_p, c.top_k, priority=services.step)

  async def one(url: str, question: Question, n: int) -> None:
    name = f'{question.id}/{services.role}/{n}'
    count = functools.partial(services.count, (question.id, n))

    def seed(context: int) -> int:
      branch = ('context', context) if context else ()
      return services.stream(question, n, branch)

    async def find(queries, k: int, turn: int):
      requests = [SearchRequest(q, k, question, turn=turn) for q in queries]
      return await services.search(name, requests, count)

    async with slots:
      session = Session(
        question,
        n,
        engine=services.engine,
        tokenizer=env.tokenizer,
        sampling=own,
        seeds=seed,
        limits=env.config,
        find=find,
        count=count,
        role=services.role,
      )
      sessions.open(session)
      failed = ''
      try:
        async with asyncio.timeout(program_seconds) as limit:
          reward = await play(url, session.key, question)
        if reward is not None and session.returned is None:
          session.returned = _number(reward)
      except Exception as error:  # a program may raise anything
        failed = _described(error)
        if limit.expired():
          failed = f'it took more than {program_seconds} s'
      finally:
        sessions.close(session)
      # A reply that the program has left is in the loss up to there.
      await session.settled()
      if not (failed or session.replies):
        failed = 'it ended without a reply of the policy'
      if session.broken:  # not a failure of the program, whatever it made of it
        raise session.broken
      if failed:
        if services.last_error is None:
          logging.warning('%s: %s: %s', name, program, failed)
        services.last_error = SearchError(
          SearchRequest('', 0, question), 'program', f'{program}: {failed}'
        )
    services.record(session.trajectory(failed))

  async with app.serving(app.make(sessions, env.tokenizer)) as url:
    work = [
      one(url, question, n)
      for question, names in zip(questions, services.names(questions))
      for name, n in names
      if (name, n) not in services.done
    ]
    await services.gather(work)
  return services.groups(questions)


sample.opaque = True  # type: ignore[attr-defined]


def check(config: ConfigDict) -> None:
  """Refuses a program that there is not.

  Raises:
    ConfigError: names the field.
  """
  with lookup.of('config.rollout.program'):
    _program(config.program)
  what = f'config.rollout.program_seconds={config.program_seconds}: above 0'
  lookup.require(config.program_seconds > 0, what)


sample.check = check  # type: ignore[attr-defined]


def _program(name: str):
  """async (url, key, question) -> reward or None."""
  lookup.require(name.strip(), 'it is empty; name a function or a command')
  if ' ' in name or '/' in name:
    words = shlex.split(name)
    what = f'{words[0]!r} is no command here'
    lookup.require(shutil.which(words[0]), what)
    return functools.partial(_command, words)
  function = lookup.function('searchrl_jax.rollout', name)
  on_loop = inspect.iscoroutinefunction(function)
  return functools.partial(_on_loop if on_loop else _in_thread, function)


def _number(reward: Any) -> float:
  """A program's reward; raises TypeError or ValueError if it is none."""
  good = not isinstance(reward, (str, bytes))
  what = f'its reward is {reward!r:.60}: return a finite number, or None'
  try:
    value = float(reward) if good else math.nan
  except (TypeError, ValueError) as error:
    raise TypeError(what) from error
  # Also the bound of /v1/reward.
  lookup.require(abs(value) < 1 << 64, what)
  return value


def _described(error: BaseException) -> str:
  with contextlib.suppress(Exception):  # its own __str__ may raise
    return f'{type(error).__name__}: {error}'
  return type(error).__name__


async def _on_loop(function: Callable, *args):
  """What a coroutine function returns, in a task of its own.

  One that cannot be cancelled is left alone, as a thread is.
  """

  async def play():
    try:
      return await function(*args)
    except asyncio.CancelledError:
      raise
    except BaseException as error:
      # Others would end the event loop, or the rollout.
      if isinstance(error, Exception):
        raise
      raise RuntimeError(repr(error)) from error

  task = asyncio.create_task(play())
  try:
    await asyncio.wait({task})
  finally:
    task.cancel()
  if task.cancelled():
    raise RuntimeError('CancelledError: it has cancelled itself')
  return task.result()


async def _in_thread(function: Callable, *args):
  """What a function returns, in a thread of its own.

  One that hangs keeps its thread, which does not keep the process: those of an
  executor would.
  """
  done: futures.Future = futures.Future()
  done.set_running_or_notify_cancel()  # nobody can cancel what the thread does

  def run() -> None:
    try:
      done.set_result(function(*args))
    except BaseException as e:  # sys.exit() too is of the program alone
      # A future takes no StopIteration, and gives the other as one's own.
      odd = isinstance(e, (StopIteration, futures.CancelledError))
      plain = isinstance(e, Exception) and not odd
      done.set_exception(e if plain else RuntimeError(repr(e)))

  threading.Thread(target=run, name='program', daemon=True).start()
  return await asyncio.wrap_future(done)


async def _command(command: Sequence[str], url, key, question: Question):
  found = {'OPENAI_BASE_URL': url, 'OPENAI_API_KEY': key}
  found['SEARCHRL_QUESTION'] = json.dumps(records.plain(vars(question)))
  # A file: what the program has started may keep a pipe open.
  with tempfile.TemporaryFile() as said:
    process = await asyncio.create_subprocess_exec(
      *command,
      env=os.environ | found,
      stdin=asyncio.subprocess.DEVNULL,
      stdout=asyncio.subprocess.DEVNULL,
      stderr=said,
      start_new_session=True,
    )
    try:
      status = await process.wait()
    finally:
      with contextlib.suppress(ProcessLookupError):  # and what it has started
        os.killpg(process.pid, 9)
    if status:
      said.seek(max(said.seek(0, 2) - 500, 0))
      last = said.read().decode('utf-8', 'replace').strip()
      raise RuntimeError(f'status {status}: {last}')
