"""Rewards for answers and format.

Rewards use only text of the policy: answers are complete answer blocks, and
blocks were parsed from the policy's tokens (parser.py), not by searching
decoded text. Rewards therefore do not depend on the chat template.

`search_r1_format` is Search-R1's shaped reward (Jin et al. 2025, v0.3). It
differs from the released code in three ways:
  * "No answer" is a case. If the policy gives no answer, the released code
    extracts the example of the template, so it never uses the last row of its
    table, and text without an answer earns `final`. `released` restores that.
  * The answer is searched in the policy's text, not in prompt and passages.
  * Text counts as retrieved only if a search found it: not what the policy
    wrote, nor what another tool answered.
"""

from collections.abc import Callable, Sequence

import numpy as np

from searchrl_jax.rewards import progress, scores
from searchrl_jax.rewards.core import RewardContext, flat, per_trajectory
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.prompts import CALL
from searchrl_jax.types import Group, Rewards, Trajectory


async def em(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """1 if the normalised answer equals a normalised golden answer."""
  return _compared(groups, context, scores.exact_match)


async def f1(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """F1 of words, with the best golden answer."""
  return _compared(groups, context, scores.f1)


def _compared(groups, context: RewardContext, score: Callable) -> Rewards:
  answer = context.env.answer
  return per_trajectory(groups, lambda t: score(answer(t), t.question.answers))


async def each_attempt(
  groups: Sequence[Group], context: RewardContext
) -> Rewards:
  """Exact match of the answer of every attempt, at the answer.

  For config.env.attempts above 1; see `text.env`.

  Returns:
    Parts: first and last, of the first and of the last answer.
  """
  env, found = context.env, flat(groups)
  valid = np.array([not t.failed for t in found], bool)
  value = [np.zeros(len(t.trained), np.float32) for t in found]
  parts = {n: np.zeros(len(found), np.float32) for n in ('first', 'last')}
  for i in np.flatnonzero(valid):
    t, right = found[i], []
    at = progress.last_segments(t)
    for block in env.answers(t):
      right.append(scores.exact_match(block.text, t.question.answers))
      value[i][at[block.turn]] = right[-1]
    if right:
      parts['first'][i], parts['last'][i] = right[0], right[-1]
  return Rewards(tuple(value), valid, 'segment', parts)


async def format_valid(
  groups: Sequence[Group], context: RewardContext, *, require_think: bool
) -> Rewards:
  """1 if the format is valid; see `valid_format`."""
  return per_trajectory(
    groups, lambda t: float(valid_format(t, context.env, require_think))
  )


async def search_r1_format(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  structure: float,
  retrieval: float,
  final: float,
  require_think: bool,
  released: bool,
) -> Rewards:
  """Search-R1's reward: exact match, shaped by the format.

      answer    format    reward
      right     valid     1
      right     invalid   1 - structure
      wrong     valid     structure (+ retrieval if a passage has the answer)
      wrong     invalid   final
      none      invalid   0 (`released`: final)

  Args:
    groups: trajectories.
    context: its env reads answers and blocks.
    structure: lambda_s; structure_format_score in the code (0.2 in scripts).
    retrieval: lambda_r; retrieval_score in the code (0).
    final: lambda_f; final_format_score in the code (0.1).
    require_think: each action needs a thought before it (True in the code).
    released: give `final` for text without an answer, as the released code.
  """
  env = context.env

  def reward(trajectory: Trajectory) -> dict[str, float]:
    answer, golds = env.answer(trajectory), trajectory.question.answers
    right = scores.exact_match(answer, golds)
    valid = valid_format(trajectory, env, require_think)
    found = env.retrieved(trajectory)
    retrieved = any(scores.contains(text, golds) for text in found)
    if right:
      value = 1.0 if valid else 1.0 - structure
    elif valid:
      value = structure + retrieval * retrieved
    else:
      value = final if answer is not None or released else 0.0
    return dict(value=value, em=right, valid=valid, retrieved=retrieved)

  return per_trajectory(groups, reward)


for _function in (em, f1, each_attempt, search_r1_format):
  _function.needs = ('answers',)
for _function in (format_valid, search_r1_format):
  _function.observes = 'any'

# Blocks that may follow, state -> {kind: next state}.
_STRICT = {
  'start': {'think': 'thought'},
  'thought': {'search': 'searched', 'answer': 'end'},
  'searched': {'information': 'start'},
  'end': {},
}
# The same if actions need no thought.
_LOOSE = _STRICT | {'start': _STRICT['start'] | _STRICT['thought']}


def valid_format(
  trajectory: Trajectory, env: SearchEnv, require_think: bool
) -> bool:
  """(think? search information)* think? answer, white space between.

  Every block is complete and not empty, no action was invalid, and information
  was written by the environment, or by the policy if
  config.env.information='policy'. Further blocks of a template are allowed in
  the position of a search if they act, in the position of an answer if they end
  the trajectory, and in any position otherwise. Calls as JSON, one or several,
  stand in the position of a search. With several attempts, each is of this
  form; blocks that the policy was asked for are of none.

  Args:
    trajectory: as the environment recorded it.
    env: reads its blocks.
    require_think: require a thought before every search and answer, as
      Search-R1 does.
  """
  machine = _STRICT if require_think else _LOOSE
  if trajectory.invalid_actions:
    return False
  own = env.config.information == 'policy'
  writers = ['policy'] if own else []
  if not own or env.config.real_searches:
    writers.append('environment')
  state = 'start'
  noted = trajectory.meta.get('noted', ())
  for block in env.blocks(trajectory):
    if block.author == 'environment' and block.kind == 'other':
      continue  # the note before the last turn
    if block.turn in noted:
      continue
    wanted = writers if block.kind == 'information' else ['policy']
    if not block.complete or block.author not in wanted:
      return False
    if not block.text and block.author == 'policy':
      return False
    name, kind = block.kind, env.template.kinds.get(block.kind)
    if env.template.calls and name == CALL:
      if state == 'searched':
        continue
      name = 'search'
    if kind in env.template.blocks:
      if not (kind.acts or kind.ends):
        continue
      name = 'search' if kind.acts else 'answer'
    if state == 'end' and env.config.attempts > 1:
      state = 'start'  # of another attempt
    if name not in machine[state]:
      return False
    state = machine[state][name]
  return state == 'end'
