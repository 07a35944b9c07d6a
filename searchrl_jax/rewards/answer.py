"""Rewards of the answer and of the format.

Only the policy earns: answers are its own complete answer blocks, and what
counts as a block was parsed from its own tokens (parser.py), never found by
searching decoded text. So every chat template is the same here.

`search_r1_format` is Search-R1's shaped reward (Jin et al. 2025, v0.3). It
departs from the released code in three ways:
  * "no answer" exists. The released extraction finds the template's own
    example when the policy gives no answer, so that it never takes the last
    row of its table, and text without any answer earns `final`. `released`
    brings that back.
  * the answer is looked for in the policy's text, not in prompt and passages;
  * text counts as retrieved only where the environment wrote it.
"""

from collections.abc import Callable, Sequence

from searchrl_jax.rewards import scores
from searchrl_jax.rewards.core import RewardContext, RewardError, per_trajectory
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.parser import Block
from searchrl_jax.types import Group, Rewards, Trajectory


async def em(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """1 if the answer matches a golden one exactly, normalised."""
  return _scored(groups, context, scores.exact_match)


async def f1(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """F1 of words with the best golden answer."""
  return _scored(groups, context, scores.f1)


async def sub_em(groups: Sequence[Group], context: RewardContext) -> Rewards:
  """1 if a golden answer is part of the answer, normalised."""
  return _scored(groups, context, scores.sub_exact_match)


def _scored(groups, context: RewardContext, metric: Callable) -> Rewards:
  env = _env(context)
  return per_trajectory(
    groups, lambda t: metric(env.answer(t), t.question.answers)
  )


async def format_valid(
  groups: Sequence[Group], context: RewardContext, *, require_think: bool
) -> Rewards:
  """1 if the format is valid; see `valid_format`."""
  env = _env(context)
  return per_trajectory(
    groups, lambda t: float(valid_format(t, env, require_think))
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
  """Search-R1's table: exact match, shaped by the format.

      answer    format    reward
      right     valid     1
      right     invalid   1 - structure
      wrong     valid     structure, + retrieval if a passage had the answer
      wrong     invalid   final
      none      invalid   0 (`released`: final)

  Args:
    groups: trajectories.
    context: its env reads answers and blocks.
    structure: lambda_s, structure_format_score there (0.2 in its scripts).
    retrieval: lambda_r, retrieval_score there (0).
    final: lambda_f, final_format_score there (0.1).
    require_think: each action needs a thought before it (there: yes).
    released: pay `final` for text without any answer, as the released code.
  """

  env = _env(context)

  def score(trajectory: Trajectory) -> dict[str, float]:
    found, golds = env.answer(trajectory), trajectory.question.answers
    blocks = env.blocks(trajectory)
    right = scores.exact_match(found, golds)
    valid = _valid(trajectory, blocks, env, require_think)
    held = _retrieved(trajectory, blocks)
    if right:
      value = 1.0 if valid else 1.0 - structure
    elif valid:
      value = structure + retrieval * held
    else:
      value = final if found is not None or released else 0.0
    return {'value': value, 'em': right, 'valid': valid, 'retrieved': held}

  return per_trajectory(groups, score)


def _env(context: RewardContext) -> SearchEnv:
  if context.env is None:
    raise RewardError('a reward of answers or format needs RewardContext.env')
  return context.env


em.needs_answers = True
f1.needs_answers = True
sub_em.needs_answers = True
search_r1_format.needs_answers = True


def _retrieved(trajectory: Trajectory, blocks: Sequence[Block]) -> bool:
  """Whether an observation that the policy saw holds a golden answer."""
  return any(
    scores.contains(block.text, trajectory.question.answers)
    for block in blocks
    if block.author == 'environment' and block.kind == 'information'
  )


# What may follow what, state -> {kind: state}, by the rule on thoughts.
_LOOSE = {
  'start': {'think': 'thought', 'search': 'searched', 'answer': 'end'},
  'thought': {'search': 'searched', 'answer': 'end'},
  'searched': {'information': 'start'},
  'end': {},
}
_STRICT = {
  'start': {'think': 'thought'},
  'thought': {'search': 'searched', 'answer': 'end'},
  'searched': {'information': 'start'},
  'end': {},
}


def valid_format(
  trajectory: Trajectory, env: SearchEnv, require_think: bool
) -> bool:
  """(think? search information)* think? answer, white space between.

  Every block is complete and not empty, no action was invalid, and
  information was written by who should write it: the environment, or the
  policy where config.env.information = 'policy'.

  Args:
    trajectory: as the environment recorded it.
    env: reads its blocks.
    require_think: a thought before every search and answer (Search-R1's
      machine).
  """
  return _valid(trajectory, env.blocks(trajectory), env, require_think)


def _valid(
  trajectory: Trajectory,
  blocks: Sequence[Block],
  env: SearchEnv,
  require_think: bool,
) -> bool:
  machine = _STRICT if require_think else _LOOSE
  if trajectory.invalid_actions:
    return False
  own = env.config.information == 'policy'
  writers = ['policy'] * own + ['environment'] * bool(
    not own or env.config.real_searches
  )
  state = 'start'
  for block in blocks:
    if block.author == 'environment' and block.kind == 'other':
      continue  # its word before the last turn
    wanted = writers if block.kind == 'information' else ['policy']
    if not block.complete or not block.text or block.author not in wanted:
      return False
    if block.kind not in machine[state]:
      return False
    state = machine[state][block.kind]
  return state == 'end'
