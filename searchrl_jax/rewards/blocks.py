"""Rewards for blocks of the policy that the template names."""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax import lookup
from searchrl_jax.rewards import ablations, scores
from searchrl_jax.rewards.core import RewardContext, per_trajectory
from searchrl_jax.text import prompts
from searchrl_jax.types import Group, Question, Rewards, Trajectory

_OUTCOMES = {'em': scores.exact_match, 'f1': scores.f1}


async def states_answer(
  groups: Sequence[Group], context: RewardContext, *, block: str
) -> Rewards:
  """1 if a complete block of this name states a golden answer, else 0.

  Whole words of one block count. AutoRefine (arXiv 2505.11277) rewards
  refinements for a golden answer too; its code takes a substring of all of
  them, joined, so that "no" is found in "know".

  Args:
    groups: trajectories.
    context: its env reads the blocks.
    block: name of a block of the template, such as 'refine'.
  """

  def reward(trajectory):
    golds = trajectory.question.answers
    found = _texts(trajectory, context, block)
    return float(any(scores.states(text, golds) for text in found))

  return per_trajectory(groups, reward)


async def outcome_or_evidence(
  groups: Sequence[Group],
  context: RewardContext,
  *,
  outcome: str,
  block: str,
  bonus: float,
  evidence: str,
  monotone: bool,
  credit: str,
) -> Rewards:
  """The outcome, else a small bonus if the policy's notes hold a golden answer.

      no answer           0
      monotone            max(s, bonus * e)
      else                s if s > 0, else bonus * e

  s is the outcome, e (0 or 1) whether the notes hold a golden answer. Without
  `monotone`, an answer that shares a word with a golden one (F1 .05) earns less
  than one that shares none (.1), as in the releases of AutoRefine
  (arXiv 2505.11277) and others.

  Args:
    groups: trajectories.
    context: its env reads answers and blocks.
    outcome: 'em' or 'f1'.
    block: name of the template's block for notes, such as 'refine'.
    bonus: of evidence.
    evidence: 'words': a golden answer in whole words of one complete block.
      'substring': in all of them, joined, also within a word.
    monotone: see above.
    credit: one of ablations.CREDITS. 'shuffled': e is that of a trajectory of
      the group with the same s. 'oracle': e is the share of the facts that the
      policy needs, and has not read in its warm start, that a block of their
      own states and nothing else ("teacher Kova Len"), in a generated world.
  """
  values = {}
  for group in groups:
    alive = [t for t in group if not t.failed]
    answers = [context.env.answer(t) for t in alive]
    golds = [t.question.answers for t in alive]
    earned = [*map(_OUTCOMES[outcome], answers, golds)]
    texts = [_texts(t, context, block) for t in alive]
    holds = [
      _evidence(x, t.question, evidence, credit) for x, t in zip(texts, alive)
    ]
    if credit == 'shuffled':
      same = [*zip(earned, (a is None for a in answers))]
      holds = [holds[i] for i in ablations.drawn(alive, same, context.step)]
    for t, answer, s, e in zip(alive, answers, earned, holds):
      value = max(s, bonus * e) if monotone or s <= 0 else s
      value = value if answer is not None else 0.0
      values[id(t)] = {'value': value, outcome: s, 'evidence': e}
  return per_trajectory(groups, lambda t: values[id(t)])


def _texts(trajectory: Trajectory, context: RewardContext, block: str):
  """The texts of the policy's complete blocks of this name."""
  return [
    b.text
    for b in context.env.blocks(trajectory)
    if b.author == 'policy' and b.kind == block and b.complete
  ]


def _evidence(
  texts: Sequence[str], question: Question, evidence: str, credit: str
) -> float:
  """What notes are worth; see `outcome_or_evidence`."""
  if credit == 'oracle':
    noted = {scores.key(text) for text in texts}
    facts, recalled = question.meta['facts'], question.meta['recalled']
    needed = [fact for fact, known in zip(facts, recalled) if not known]
    stated = [
      # The thought on a comparison names both people's value "both".
      not noted.isdisjoint(scores.key(f'{r} {value}') for r in (name, 'both'))
      for _, name, value in needed
    ]
    return sum(stated) / len(stated) if stated else 0.0
  if evidence == 'substring':
    return float(scores.contains(' '.join(texts), question.answers))
  return float(any(scores.states(text, question.answers) for text in texts))


def _check(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  template = config.env.template
  kinds, block = prompts.load(template).kinds, fields['block']
  what = f'none of the template config.env.template={template!r}'
  have = 'refine and micro_notes have "refine"'
  hint = f'{lookup.near(block, kinds)}; of the templates here, {have}'
  lookup.require(block in kinds, f'block={block!r} is {what}: {hint}')


def _check_evidence(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  _check(config, fields)
  allowed = dict(outcome=_OUTCOMES, evidence=('words', 'substring'))
  ablations.choose(fields, **allowed, credit=ablations.CREDITS)


def _needs_evidence(fields: Mapping[str, Any]) -> tuple[str, ...]:
  oracle = ('meta.facts', 'meta.recalled')
  return 'answers', *(oracle if fields['credit'] == 'oracle' else ())


states_answer.needs = ('answers',)
states_answer.check = _check
outcome_or_evidence.needs = _needs_evidence
outcome_or_evidence.check = _check_evidence
outcome_or_evidence.compares_group = ablations.shuffles
