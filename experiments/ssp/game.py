"""The rules of the game: who is asked what, which questions stand, who earns.

SSP ("Search Self-play", github.com/Alibaba-Quark/SSP). One set of weights has
three roles, each with a template of its own over the same budgets: the
proposer gets an answer and searches until it asks a question; the verifier
gets the question with what the proposer read, and no search; the solver gets
the question alone. Otherwise than there:

  * a question, queries and evidence are what the parser found in the policy's
    and the environment's own tokens. There they are looked for in decoded
    text, so that a policy can write its own evidence;
  * an answer is leaked where its words stand in the question, in their order:
    "no" is not in "know". There any part of a word counts, and aliases do not;
  * a failed search is nobody's fault: such a trajectory is in no statistic.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from experiments.ssp.pool import Pool
from searchrl_jax import advantages
from searchrl_jax import checks
from searchrl_jax import credit
from searchrl_jax import dryrun
from searchrl_jax import lookup
from searchrl_jax import metrics
from searchrl_jax import prompts
from searchrl_jax import records
from searchrl_jax.checks import ConfigError
from searchrl_jax.env import SearchEnv
from searchrl_jax.evaluators import health
from searchrl_jax.types import Group, Question, Rewards, Trajectory

PROPOSER, VERIFIER, SOLVER = 'proposer', 'verifier', 'solver'
# Why a proposal does not stand, in the order in which it is looked for.
REASONS = (
  'tag', 'length', 'leak', 'evidence', 'searches', 'repeat', 'answer_searched',
  'too_long', 'verification',
)
FAILED = 'failed'  # a service's fault
DUMMY = 'dummy'  # the source of a question that is none
REWARDS = ('1-acc', 'intermediate_difficulty', 'format_only')
VERIFIERS = ('policy', 'judge', 'none')
INVALID = ('dummy', 'reuse', 'drop')


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A proposer's trajectory, and what became of it.

  question: for the solver; None where there is none to be read. evidence:
  what its searches found and it saw, in order. reason: '' = it stands; one
  of REASONS; or FAILED.
  """

  trajectory: Trajectory
  question: Question | None
  evidence: tuple[str, ...]
  reason: str


class RoleEnv(SearchEnv):
  """Names the agent of every segment by its role."""

  def reset(self, question, role=SOLVER, agent=''):
    return super().reset(question, role, agent or role)


def environments(config: ConfigDict, tok) -> dict[str, SearchEnv]:
  """Role -> its environment.

  Raises:
    ConfigError: the proposer's template has not the tags of a question.
  """
  s = config.selfplay
  templates = {
    SOLVER: config.env.template, PROPOSER: s.template, VERIFIER: s.reader
  }
  templates = {role: prompts.load(t) for role, t in templates.items()}
  wanted = f'<{s.tag}>', f'</{s.tag}>'
  if templates[PROPOSER].answer != wanted:
    raise ConfigError(
      f'config.selfplay.template={s.template!r} ends with '
      f'{"...".join(templates[PROPOSER].answer)}, and a proposer with '
      f'{"...".join(wanted)} (config.selfplay.tag={s.tag!r}): put these tags '
      "in the template's field 'answer' and among its 'stops'"
    )
  budgets = {role: config.env.copy_and_resolve_references()
             for role in templates}
  budgets[VERIFIER].max_turns = 0
  return {
    role: RoleEnv(
      tok, template, budgets[role], config.data.prompt, config.source.k
    )
    for role, template in templates.items()
  }


def role_config(config: ConfigDict, role: str) -> ConfigDict:
  """The config as one of the two roles that learn has it."""
  out = config.copy_and_resolve_references()
  if role == PROPOSER:
    out.algorithm = out.selfplay.algorithm
    out.rollout.group = out.selfplay.n
  if 'critic' not in credit.needs(out.algorithm.advantage):
    out.critic.lr = 0.0
  return out


def check(config: ConfigDict) -> None:
  """What cannot be, before anything loads.

  Raises:
    ConfigError: names the field, and the mend.
  """
  s = config.selfplay
  for name, known in (
    ('reward', REWARDS), ('verifier', VERIFIERS), ('invalid', INVALID),
    ('empty_pool', ('dummy', 'drop')),
  ):
    if s[name] not in known:
      raise ConfigError(
        f'config.selfplay.{name}={s[name]!r}: {lookup.near(s[name], known)}'
      )
  for name, least in (('n', 1), ('noise', 0), ('resample', 0),
                      ('clear_every', 0), ('min_searches', 0)):
    if s[name] < least:
      raise ConfigError(f'config.selfplay.{name}={s[name]}: at least {least}')
  for name in ('reuse_threshold', 'keep_ratio', 'min_valid'):
    if not 0 <= s[name] <= 1:
      raise ConfigError(f'config.selfplay.{name}={s[name]}: a share in 0..1')
  if s.left < 0 or s.right < 1:
    raise ConfigError(
      f'config.selfplay.left={s.left}, right={s.right}: 4 (left + s) '
      '(right - s) is to be no loss for any share s of solvers: left at least '
      '0, right at least 1'
    )
  if not s.frozen and config.algorithm.tis == 'none':
    raise ConfigError(
      "config.algorithm.tis='none': the solver's trajectories are older than "
      "the proposer's update, and nothing would correct for it; use 'token' "
      "or 'sequence'"
    )
  if s.verifier == 'judge' and not config.judge.url:
    raise ConfigError(
      "config.selfplay.verifier='judge' asks the server of config.judge.url, "
      "which is empty; give its URL, or use 'policy'"
    )
  try:
    s.brief.format(answer='', searches=0, examples='')
    s.reading.format(evidence='', question='')
  except (KeyError, IndexError, ValueError) as e:
    raise ConfigError(
      f'config.selfplay.brief={s.brief!r}, reading={s.reading!r}: the former '
      'has the fields {answer}, {searches}, {examples}, the latter {evidence} '
      f'and {{question}} ({e})'
    ) from e
  for needed, field, text in (
    ('{answer}', 'brief', s.brief), ('{question}', 'reading', s.reading),
    ('{evidence}', 'reading', s.reading),
  ):
    if needed not in text:
      raise ConfigError(f'config.selfplay.{field}={text!r} lacks {needed}')
  if config.data.prompt != 'template' or config.env.information != 'source':
    raise ConfigError(
      f'config.data.prompt={config.data.prompt!r}, env.information='
      f"{config.env.information!r}: self-play needs 'template' (it writes its "
      "own questions) and 'source' (evidence is what a search found)"
    )
  if config.rollout.max_staleness or config.rollout.refill:
    raise ConfigError(
      f'config.rollout.max_staleness={config.rollout.max_staleness}, refill='
      f'{config.rollout.refill}: self-play is synchronous, and draws anew by '
      'selfplay.resample; use 0'
    )
  for advantage in (config.algorithm.advantage, s.algorithm.advantage):
    if advantage == 'remax':
      raise ConfigError(
        "advantage='remax' compares with a greedy answer, which self-play does "
        "not sample; use 'grpo', 'rloo', 'reinforce' or 'gae'"
      )
  learners = [role_config(config, SOLVER)]
  checks.check(learners[0])
  if not s.frozen:
    learners.append(role_config(config, PROPOSER))
    try:
      checks.check(learners[1])
    except ConfigError as e:
      raise ConfigError(
        str(e).replace('.algorithm', '.selfplay.algorithm')
        .replace('.rollout.group', '.selfplay.n')
      ) from e
  if config.critic.lr and not any(c.critic.lr for c in learners):
    raise ConfigError(
      f'config.critic.lr={config.critic.lr}: neither role has a use for a '
      "critic; set it to 0, or use advantage='gae'"
    )


def report(config, vocab_size: int) -> str:
  """What both roles cost, before anything is allocated: see `dryrun`."""
  check(config)
  return '\n\n'.join(
    f'As the {role}\n{dryrun.report(own, vocab_size)}'
    for role in ((SOLVER,) if config.selfplay.frozen else (PROPOSER, SOLVER))
    for own in [role_config(config, role)]
  )


def fingerprint(config: ConfigDict, stream, envs) -> str:
  """Of what questions are about and how they are asked for; see `Pool`."""
  template = dataclasses.asdict(envs[PROPOSER].template)
  about = [
    stream.fingerprint, config.selfplay.brief, template, config.source.corpus,
    config.data.world_seed, config.data.world.to_dict(),
  ]
  return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def require_start(before, now, config: ConfigDict) -> None:
  """Refuses to go on with another frozen proposer.

  Args:
    before: `sync.manifest` of its weights when the run was saved.
    now: the same of what config.train.init or model.path holds today.

  Raises:
    ConfigError: they differ.
  """
  if before != now:
    raise ConfigError(
      f'config.train.init={config.train.init!r}, model.path='
      f'{config.model.path!r}: its weights are not those that the frozen '
      'proposer of this run began with; was it trained on since? Restore it, '
      'or start a new run folder'
    )


def rng(config: ConfigDict, step: int, what: str) -> np.random.Generator:
  """The random stream of one draw of a step; the same after a resume."""
  return np.random.default_rng([config.seed, step, zlib.crc32(what.encode())])


def ended(lines: bytes) -> dict[tuple[str, str, int], Trajectory]:
  """`collector.lines` of a step, by (role, question id, sample)."""
  found = [records.read_trajectory(line) for line in lines.splitlines()]
  return {(t.role, t.question.id, t.sample): t for t in found}


# ---- Questions.


def briefs(answers: Sequence[Question], config: ConfigDict) -> list[Question]:
  """What the proposer is told: each answer in config.selfplay.brief."""
  return [
    dataclasses.replace(q, text=config.selfplay.brief.format(
      answer=q.answers[0], searches=q.meta.get('search_turns', ''),
      examples=q.meta.get('examples', ''),
    ))
    for q in answers
  ]


def read(trajectory: Trajectory, env: SearchEnv, config: ConfigDict,
         step: int) -> Proposal:
  """A proposal as the rules find it; verification comes after."""
  text = None if trajectory.failed else env.answer(trajectory)
  source = trajectory.question
  question = text and Question(
    f'{source.id}@{step}.{trajectory.sample}', text, source.answers,
    'selfplay',
  )
  evidence = [
    b.text for b in env.blocks(trajectory)
    if b.author == 'environment' and b.kind == 'information'
    and b.text != env.template.no_results.strip()
  ]
  return Proposal(
    trajectory, question or None, tuple(dict.fromkeys(evidence)),
    _reason(trajectory, text, evidence, config.selfplay),
  )


def _reason(trajectory, text, evidence, s) -> str:
  if trajectory.failed:
    return FAILED
  if not text:
    return 'tag'
  if not s.min_chars <= len(text) <= s.max_chars or (
    len(text.split()) < s.min_words
  ):
    return 'length'
  answers = trajectory.question.answers
  if _says(text, answers):
    return 'leak'
  if not any(evidence):
    return 'evidence'
  queries = [found.request.query for found in trajectory.searches]
  if len(queries) < s.min_searches:
    return 'searches'
  if len(set(queries)) < len(queries):
    return 'repeat'
  if s.answer_unsearched and any(
    _says(query, answers) for query in queries
  ):
    return 'answer_searched'
  return ''


def _says(text: str, answers: Sequence[str]) -> bool:
  """Whether an answer's words stand in the text, in their order."""
  text = _words(text)
  return any(
    re.search(rf'(?<!\w){re.escape(answer)}s?(?!\w)', text)
    for answer in map(_words, answers) if answer
  )


def _words(text: str) -> str:
  # "Mira-Dok", "Mira Dok's" and "the Mira Doks" all say "Mira Dok".
  return metrics.normalise(re.sub(r"['\u2019]s\b|[^\w\s]", ' ', text))


def fill(asked: Sequence[Question], slots: int, config: ConfigDict,
         pool: Pool, rng, lost: Sequence[Question]):
  """Questions for the slots whose proposals do not stand.

  Args:
    asked: questions that stand, at most `slots` of them.
    slots: questions that a step is to have.
    config: reads config.selfplay.
    pool: for 'reuse'.
    rng: of the draws.
    lost: the answers of the proposals that do not stand.

  Returns:
    (questions of reuse, dummies); neither for 'drop'. A pool without any
    question gives what config.selfplay.empty_pool says.
  """
  s, n = config.selfplay, slots - len(asked)
  reused = pool.draw(n, rng) if s.invalid == 'reuse' else []
  reused = [
    dataclasses.replace(q, id=f'{q.id}/{i}', meta={'reuse_of': q.id})
    for i, q in enumerate(reused)
  ]
  left = n - len(reused)
  how = s.empty_pool if s.invalid == 'reuse' else s.invalid
  if how == 'drop' or not lost:
    return reused, []
  return reused, [
    Question(f'{DUMMY}-{i}-{about.id}', s.dummy, about.answers, DUMMY)
    for i, about in zip(range(left), itertools.cycle(lost))
  ]


# ---- Rewards.


def rates(groups: Sequence[Group], reward: Rewards) -> dict[str, float]:
  """Question id -> share of its solvers that earned anything.

  Solvers that failed are not counted; a question whose all failed is absent.
  """
  values = np.array([np.sum(v) for v in reward.value])
  out, at = {}, 0
  for group in groups:
    rows = slice(at, at + len(group))
    at += len(group)
    known = values[rows][reward.valid[rows]]
    if known.size:
      out[group[0].question.id] = float((known > 0).mean())
  return out


def earned(share: float, s: ConfigDict) -> float:
  """The proposer's reward for a question that `share` of solvers answered.

  1-acc: 1 - s. intermediate_difficulty: 4 (left + s) (right - s) for
  0 < s < 1, else 0. format_only: 1.
  """
  if s.reward == '1-acc':
    return 1.0 - share
  if s.reward == 'format_only':
    return 1.0
  inside = 0 < share < 1
  return 4.0 * (s.left + share) * (s.right - share) if inside else 0.0


def opposed(proposals: Sequence[Proposal], shares: Mapping[str, float],
            config: ConfigDict) -> Rewards:
  """Rewards of the proposers, one for each proposal.

  One that does not stand earns selfplay.penalty, whatever fills its slot (or
  is left out, by selfplay.train_invalid). One whose trajectory or all of
  whose solvers failed, or that was one too many to be asked, is not valid.
  """
  s, value, valid = config.selfplay, [], []
  for p in proposals:
    if not p.reason:
      share = shares.get(p.question.id)
      value.append(0.0 if share is None else earned(share, s))
      valid.append(share is not None)
    else:
      value.append(s.penalty)
      valid.append(p.reason != FAILED and bool(s.train_invalid))
  return Rewards(np.array(value, np.float32), np.array(valid, bool))


# ---- What a step was like.


def mean_of(reward: Rewards) -> float:
  """Over valid ones; nan if there are none."""
  values = advantages.returns(reward.value)[reward.valid]
  return float(values.mean()) if values.size else math.nan


def solved(groups: Sequence[Group], reward: Rewards | None,
           env: SearchEnv) -> dict[str, float]:
  """Rewards and signs of collapse of the solver, on questions that are some."""
  real = [g for g in groups if g[0].question.source != DUMMY]
  out = health.signs(real, env)
  if not real:
    return out
  rows = np.array([
    t.question.source != DUMMY for g in groups for t in g
  ]) & reward.valid
  out['reward'] = mean_of(dataclasses.replace(reward, valid=rows))
  for name, value in reward.parts.items():
    out[f'reward/{name}'] = float(np.nanmean(value[rows])) if rows.any() else (
      math.nan)
  return out


def told(proposals: Sequence[Proposal], oracle) -> dict[str, float]:
  """Counts of why proposals fall, and what the questions that stand are.

  Proposals that a service failed are counted as 'no_failed' and in nothing
  else. What a mean is over stands beside it: 'proposals', 'stand', or 'X_n'.

  oracle: judges them, for these metrics alone; None = unknown.
  """
  reasons = [p.reason for p in proposals]
  proposals = [p for p in proposals if p.reason != FAILED]
  n = max(len(proposals), 1)
  stand = [p for p in proposals if not p.reason]
  out = {
    'proposals': len(proposals), 'stand': len(stand),
    'valid_share': len(stand) / n,
    'searches': np.mean([len(p.trajectory.searches) for p in proposals] or [0]),
    'distinct': len({p.question.text for p in stand}) / max(len(stand), 1),
  }
  out |= {f'no_{r}': reasons.count(r) for r in (*REASONS, FAILED)}
  if oracle is None:
    return {f'selfplay/{k}': float(v) for k, v in out.items()}
  judged = [
    (p, oracle.judge(p.question.text, p.question.answers)) for p in proposals
    if p.question is not None and p.reason in ('', 'verification')
  ]
  kept = [v for p, v in judged if not p.reason]
  if kept:
    valid = [v for v in kept if v.valid]
    out |= {
      'oracle_valid': len(valid) / len(kept),
      'unique': np.mean([v.unique for v in kept]),
      'hops': np.mean([v.hops for v in valid] or [0]),
      'hops_n': len(valid),
      'starts': len({v.start for v in kept}) / len(kept),
    }
    for hops in range(1, 5):
      out[f'share_{hops}hop'] = np.mean([
        v.valid and v.hops == hops for v in kept
      ])
  # How well the verifier tells them apart.
  for name, wanted in (('passes_valid', True), ('passes_wrong', False)):
    seen = [not p.reason for p, v in judged if v.valid == wanted]
    if seen:
      out |= {name: np.mean(seen), f'{name}_n': len(seen)}
  return {f'selfplay/{k}': float(v) for k, v in out.items()}
