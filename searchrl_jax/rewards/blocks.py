"""Rewards for blocks of the policy that the template names."""

from collections.abc import Callable, Mapping, Sequence
import re
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax import lookup
from searchrl_jax.rewards import ablations, judge, scores
from searchrl_jax.rewards.core import RewardContext, flat, per_trajectory
from searchrl_jax.text import prompts
from searchrl_jax.types import Group, Question, Rewards, Trajectory

OUTCOMES = {'em': scores.exact_match, 'f1': scores.f1}


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
    found = texts(trajectory, context, block)
    return float(any(scores.states(text, golds) for text in found))

  return per_trajectory(groups, reward)


def recited(t: Trajectory, env, question: Question) -> bool:
  """Whether a trajectory states a golden answer that it has not read.

  For one that was told the answer: a query for it finds it, too. What the
  question states may be written before, and is read before it is the answer.

  Args:
    t: the trajectory, of a prompt that may say more.
    env: reads its blocks.
    question: with its own text.
  """
  golds, searched = question.answers, t.searches
  written = [
    (b.turn, b.author != 'policy', b.text)
    for b in env.blocks(t)
    if b.author == 'policy' or b.kind != prompts.OUTSIDE
  ]
  # In a call as JSON no space may stand before a query.
  written += [(s.request.turn, False, s.request.query) for s in searched]
  told = [read for _, read, x in sorted(written) if scores.states(x, golds)]
  if told and not told[0] and not scores.states(question.text, golds):
    return True
  found = any(scores.states(text, golds) for text in env.retrieved(t))
  return scores.exact_match(env.answer(t), golds) > 0 and not found


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
  """The outcome, else a small bonus for the policy's notes.

      no answer           0
      monotone            max(s, bonus * e)
      else                s if s > 0, else bonus * e

  s is the outcome, e (0 or 1) whether the notes meet a condition. Without
  `monotone`, an answer that shares a word with a golden one (F1 .05) earns less
  than one that shares none (.1), as in the releases of AutoRefine
  (arXiv 2505.11277), EviNote-RAG (2509.00877) and others.

  Args:
    groups: trajectories.
    context: its env reads answers and blocks.
    outcome: 'em' or 'f1'.
    block: name of the template's block for notes, such as 'refine'.
    bonus: of evidence.
    evidence: the condition. 'words': a golden answer in whole words of one
      complete block. 'substring': in all of them, joined, also within a word.
      'marked': the last one has key words between asterisks (`*Paris*`). 'any':
      there is one.
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
    earned = [*map(OUTCOMES[outcome], answers, golds)]
    notes = [texts(t, context, block) for t in alive]
    holds = [
      _evidence(x, t.question, evidence, credit) for x, t in zip(notes, alive)
    ]
    if credit == 'shuffled':
      same = [*zip(earned, (a is None for a in answers))]
      holds = [holds[i] for i in ablations.drawn(alive, same, context.step)]
    for t, answer, s, e in zip(alive, answers, earned, holds):
      value = max(s, bonus * e) if monotone or s <= 0 else s
      value = value if answer is not None else 0.0
      values[id(t)] = {'value': value, outcome: s, 'evidence': e}
  return per_trajectory(groups, lambda t: values[id(t)])


async def informs(
  groups: Sequence[Group], context: RewardContext, *, block: str, reader: str
) -> Rewards:
  """What a reader makes of the question with the policy's last note alone.

  R-Search (arXiv 2506.04185) takes the F1 of what another model answers,
  EviNote-RAG (2509.00877) the probability that the note entails the golden
  answer. A note from before the first observation is no evidence.

  Args:
    groups: trajectories.
    context: its env reads the blocks; its judge reads notes.
    block: name of the template's block for notes, such as 'refine'.
    reader: 'facts': `fact_f1` of the relation that the question asks for, an
      exact reader in a generated world. 'words': 1 if the note states a golden
      answer. 'judge': the verdict of config.judge on the note as an answer; if
      the judge fails, the reward is not valid.
  """

  def note(trajectory):
    return next(reversed(texts(trajectory, context, block, read=True)), None)

  if reader == 'judge':
    return await judge.rewarded(groups, note, context.judge, after_em=False)
  score = _READERS[reader]
  return per_trajectory(groups, lambda t: score(note(t) or '', t.question))


def texts(
  trajectory: Trajectory, context: RewardContext, block: str, read=False
) -> list[str]:
  """The texts of the policy's complete blocks of this name.

  read: of those after its first observation.
  """
  out, seen = [], not read
  for b in context.env.blocks(trajectory):
    seen |= (b.author, b.kind) == ('environment', 'information')
    if seen and b.author == 'policy' and b.kind == block and b.complete:
      out.append(b.text)
  return out


def fact_f1(notes: Sequence[str], relation: str, value: str) -> float | None:
  """F1 of what notes say that a relation is; None if none names it.

  It is what stands after the relation, up to a mark or the end, in the last
  place that names it. Notes of generated worlds say "home Mukwick", and "both
  Mukwick" of what two people have in common.
  """
  named = rf'\b(?:{re.escape(relation)}|both)\b([^;,.]*)'
  found = re.findall(named, '; '.join(notes))
  return scores.f1(found[-1], [value]) if found else None


def _fact_read(text: str, question: Question) -> float:
  _, relation, value = question.meta['facts'][-1]
  return fact_f1([text], relation, value) or 0.0


def _words_read(text: str, question: Question) -> float:
  return float(scores.states(text, question.answers))


_Reader = Callable[[str, Question], float]
_READERS: dict[str, _Reader] = {'facts': _fact_read, 'words': _words_read}


def _evidence(
  notes: Sequence[str], question: Question, evidence: str, credit: str
) -> float:
  """What notes are worth; see `outcome_or_evidence`."""
  if credit == 'oracle':
    noted = {scores.key(text) for text in notes}
    facts, recalled = question.meta['facts'], question.meta['recalled']
    needed = [fact for fact, known in zip(facts, recalled) if not known]
    stated = [
      # The thought on a comparison names both people's value "both".
      not noted.isdisjoint(scores.key(f'{r} {value}') for r in (name, 'both'))
      for _, name, value in needed
    ]
    return sum(stated) / len(stated) if stated else 0.0
  if evidence == 'any':
    return float(bool(notes))
  if evidence == 'marked':
    marks = notes[-1].count('*') if notes else 0
    return float(marks > 0 and marks % 2 == 0)
  if evidence == 'substring':
    return float(scores.contains(' '.join(notes), question.answers))
  return float(any(scores.states(text, question.answers) for text in notes))


def check_block(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  """Refuses a `block` that the template lacks.

  Raises:
    ConfigError: names the block, and templates that have it.
  """
  template = config.env.template
  kinds, block = prompts.load(template).kinds, fields['block']
  names = sorted(path.stem for path in prompts.TEMPLATES.glob('*.json'))
  have = [name for name in names if block in prompts.load(name).kinds]
  what = f'none of the template config.env.template={template!r}'
  hint = f'{lookup.near(block, kinds)}; of the templates here, {have} have it'
  lookup.require(block in kinds, f'block={block!r} is {what}: {hint}')


def _check_evidence(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  check_block(config, fields)
  evidence = 'words', 'substring', 'marked', 'any'
  allowed = dict(outcome=OUTCOMES, evidence=evidence)
  ablations.choose(fields, **allowed, credit=ablations.CREDITS)


def _check_reader(config: ConfigDict, fields: Mapping[str, Any]) -> None:
  check_block(config, fields)
  ablations.choose(fields, reader=(*_READERS, 'judge'))


def _check_readings(groups, reward: Rewards, context, fields) -> None:
  if _asks_judge(fields):
    context.judge.require(flat(groups), reward.valid)


def _asks_judge(fields: Mapping[str, Any]) -> bool:
  return fields['reader'] == 'judge'


def _needs_evidence(fields: Mapping[str, Any]) -> tuple[str, ...]:
  oracle = ('meta.facts', 'meta.recalled')
  return 'answers', *(oracle if fields['credit'] == 'oracle' else ())


def _needs_reader(fields: Mapping[str, Any]) -> tuple[str, ...]:
  return 'answers', *(['meta.facts'] if fields['reader'] == 'facts' else ())


states_answer.needs = ('answers',)
states_answer.check = check_block
informs.needs, informs.check = _needs_reader, _check_reader
informs.observes = 'source'
informs.needs_judge, informs.check_step = _asks_judge, _check_readings
outcome_or_evidence.needs = _needs_evidence
outcome_or_evidence.check = _check_evidence
outcome_or_evidence.compares_group = ablations.shuffles
