"""A policy to play with, for `ask` and `serve`: told of as it is sampled."""

import codecs
from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import tempfile

import numpy as np

from searchrl_jax.endpoint.streaming import Streamed
from searchrl_jax.evaluate import policy
from searchrl_jax.rollout import chains
from searchrl_jax.rollout.core import Event
from searchrl_jax.run import build
from searchrl_jax.types import Question, Segment, Trajectory

OnEvent = Callable[[str, Event], None]  # a trajectory's id, what happened


class Player:
  """A policy that plays questions.

  Attributes:
    config: the whole config, with one sample of a question.
    have: `policy.Loaded`: engine, source, tokenizer.
    env: the environment.
    folder: for what is written.
  """

  def __init__(self, config, have: policy.Loaded, folder: str):
    self.config, self.have, self.folder = config, have, folder
    self.env = build.environment(config, have.tok)

  async def play(self, text: str, on_event: OnEvent, name: str) -> Trajectory:
    """One attempt at a question, sampled as config.eval says.

    Args:
      text: the question.
      on_event: called as that of `chains.rollout`, but with the policy's text
        while it is sampled: a Segment for each token, or each character.
      name: the question's id, on which draws depend.

    Raises:
      ValueError: the question is too long.
      RolloutError: a search failed.
    """
    messages = ({'role': 'user', 'content': text},)
    question = Question(name, text, messages=messages)
    told = _Told(question, self.env, on_event)
    opener = self.have.opener
    (group,), _ = await chains.rollout(
      [question],
      env=self.env,
      engine=Streamed(opener.engine, self.have.tok, told.sampled),
      source=opener.source,
      config=chains.evaluation(self.config),
      seed=self.config.eval.seed,
      step=0,
      on_event=told,
    )
    told.end()
    return group[0]


@contextlib.contextmanager
def opened(
  config, workdir: str, which: str, home: str = 'ask', slots: int = 1, loop=None
) -> Iterator[Player]:
  """Opens the policy of a run or a checkpoint, see `policy.loaded`.

  home: a folder in that of the run, apart from what a run writes, which may be
  under way. slots: sequences at a time.
  """
  config = config.copy_and_resolve_references()
  config.eval.n, config.engine.slots = 1, slots
  config.engine.prefill_rows = min(config.engine.prefill_rows, slots)
  with tempfile.TemporaryDirectory() as spare:
    folder = os.path.join(workdir or spare, home)
    os.makedirs(folder, exist_ok=True)
    with policy.loaded(config, workdir, folder, which, loop) as have:
      yield Player(config, have, folder)


class _Told:
  """Tells of the policy's text by block, once that is certain."""

  def __init__(self, question: Question, env, on_event: OnEvent):
    self._name, self._tell = f'{question.id}/solver/0', on_event
    self._bytes = env.tokenizer.token_bytes
    self._parser, self._later = env.reset(question)[0].parser, env.later
    self._decoder = codecs.getincrementaldecoder('utf-8')('replace')
    self._part: list[int] = []  # of a character
    self._waiting: list[list[int]] = []  # characters whose block is not certain

  def sampled(self, ids: Sequence[int]) -> None:
    for token in ids:
      self._part.append(token)
      self._decoder.decode(self._bytes(token))
      if not self._decoder.getstate()[0]:
        self._feed()

  def __call__(self, name: str, event: Event) -> None:
    if isinstance(event, Segment) and event.author == 'policy':
      return  # it was told
    self.end()
    self._tell(name, event)

  def end(self) -> None:
    """Ends a turn of the policy, if it is one."""
    if self._part:
      self._decoder.reset()
      self._feed()
    self._show(self._parser.finish())
    self._parser = self._later

  def _feed(self) -> None:
    piece = b''.join(map(self._bytes, self._part))
    self._waiting.append(self._part)
    self._part = []
    self._show(self._parser.feed([piece]))

  def _show(self, read) -> None:
    """Tells of what has become certain; read: what the parser returns."""
    self._parser, kinds, _ = read
    for kind in kinds:
      ids = np.array(self._waiting.pop(0), np.int32)
      self._tell(self._name, Segment(ids, 'policy', kind))
