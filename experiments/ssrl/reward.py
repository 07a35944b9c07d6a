"""SSRL's reward: exact match of the answer, and how well the format is kept.

SSRL (Fan et al. 2025, arXiv 2508.10874), by its release: 0.9 of exact match
and 0.1 of a graded format score; `binary` is the paper's form. Blocks are the
parser's, so an answer within information (or a thought) is text there, earns
nothing, and is a stray tag to the format. Of the release's rules two are kept
to what they are for:
  * an unknown tag is a word in angle brackets; there anything between '<' and
    '>' is one, "2 < 3, and 5 > 4" too;
  * no text is read twice, so nothing depends on how it decodes.
"""

from collections.abc import Sequence
import re

from searchrl_jax.rewards import scores
from searchrl_jax.rewards.core import RewardContext, per_trajectory, require
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.text.parser import OUTSIDE
from searchrl_jax.types import Group, Rewards, Trajectory

MOST_THOUGHTS = 8
# What the prompt's example says; a policy that repeats it has not filled it in.
PLACEHOLDERS = (
  'your query',
  'your thoughts',
  'your answer',
  'your information',
)
_TAG = re.compile(r'</?\w[\w-]*>')


async def graded(
  groups: Sequence[Group], context: RewardContext, *, format_weight: float
) -> Rewards:
  """(1 - w) exact match + w format_score: the release (w = 0.1).

  Args:
    groups: trajectories.
    context: its env reads answers and blocks.
    format_weight: w, in 0..1.
  """
  return _scored(groups, context, format_weight, lambda score: score)


async def binary(
  groups: Sequence[Group], context: RewardContext, *, format_weight: float
) -> Rewards:
  """The paper's form, lambda = format_weight: right and well-formed 1, right
  alone 1 - lambda, well-formed alone lambda, else 0. Well-formed is a
  `format_score` of 1."""
  return _scored(groups, context, format_weight, lambda score: score == 1.0)


graded.needs, graded.observes = ('answers',), 'any'
binary.observes = 'any'
binary.needs = ('answers',)


def _scored(groups, context: RewardContext, weight: float, of) -> Rewards:
  what = 'a reward of answers or format needs RewardContext.env'
  require(context.env is not None, what)
  require(0 <= weight <= 1, f'format_weight={weight}: a share in 0..1')

  def reward(t: Trajectory) -> dict[str, float]:
    em = scores.exact_match(context.env.answer(t), t.question.answers)
    form = float(of(format_score(t, context.env)))
    value = (1 - weight) * em + weight * form
    return {'value': value, 'em': em, 'format': form}

  return per_trajectory(groups, reward)


def format_score(trajectory: Trajectory, env: SearchEnv) -> float:
  """How well the format is kept, in 0..1.

  With T thoughts and S searches, min(T / 2, 1) x min(T, S+1) / max(T, S+1),
  if a thought comes first and an answer last, every search is followed by
  information and no information comes without one, no block is empty, left
  open or a placeholder, queries are one line, there is no other tag, and
  T <= 8; else 0. Text between blocks is allowed.
  """
  found = env.blocks(trajectory)
  blocks = [b for b in found if b.kind != OUTSIDE]
  kinds = [b.kind for b in blocks]
  if not blocks or found[0].kind != 'think' or found[-1].kind != 'answer':
    return 0.0
  if not all(b.complete and b.text for b in blocks):
    return 0.0
  tags = [tag for pair in env.template.tags.values() for tag in pair]
  for block in found:
    if block.author != 'policy':
      continue
    text = block.text.lower()
    if _TAG.search(text) or any(tag in block.text for tag in tags):
      return 0.0
    if block.kind != OUTSIDE and any(p in text for p in PLACEHOLDERS):
      return 0.0
    if block.kind == 'search' and '\n' in block.text:
      return 0.0
  for n, kind in enumerate(kinds):
    follows = n > 0 and kinds[n - 1] == 'search'
    if follows != (kind == 'information'):
      return 0.0
  thoughts, wanted = kinds.count('think'), kinds.count('search') + 1
  if thoughts > MOST_THOUGHTS:
    return 0.0
  share = min(thoughts, wanted) / max(thoughts, wanted)
  return min(thoughts / 2, 1.0) * share
