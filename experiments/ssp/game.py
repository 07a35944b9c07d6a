"""The rules of self-play: prompts, valid questions, and rewards of the roles.

SSP ("Search Self-play", github.com/Alibaba-Quark/SSP). One set of weights has
three roles, each with a template of its own over the same budgets: the
proposer gets an answer and searches until it asks a question; the verifier
gets the question with what the proposer read, and no search; the solver gets
the question alone. A proposal whose question is valid is said to stand.
Differences from SSP:

  * questions, queries and evidence are what the parser finds in the tokens of
    the policy and of the environment. SSP searches the decoded text, in which
    a policy can write its own evidence;
  * an answer is leaked if the question has its words in their order: "no" is
    not in "know". SSP also counts parts of words, and ignores aliases;
  * trajectories with a failed search are excluded from every statistic.

A brief may ask for a number of hops (config.selfplay.hops). It is in the
question's `meta` as ASKED. What rules, rewards and advantages see is that of
the trajectory's: the same, or in a control that of another proposal.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import re
import zlib

from ml_collections import ConfigDict
import numpy as np

from experiments.ssp.pool import Pool
from searchrl_jax import lookup
from searchrl_jax.checks import ConfigError
from searchrl_jax.data.checks import require
from searchrl_jax.evaluate import health
from searchrl_jax.learn import advantages, credit
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rewards import scores
from searchrl_jax.rollout.core import trajectory_seed
from searchrl_jax.text import prompts
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import SEARCH, Group, Question, Rewards, Trajectory

PROPOSER, VERIFIER, SOLVER = 'proposer', 'verifier', 'solver'
# Why a proposal does not stand, in the order in which it is looked for.
REASONS = (
  'tag',
  'length',
  'leak',
  'evidence',
  'searches',
  'repeat',
  'answer_searched',
  'too_long',
  'verification',
)
FAILED = 'failed'  # a service's fault
DUMMY = 'dummy'  # the source of a question that is none
DRAWN = 'drawn'  # of config.selfplay.hops.asked
ASKED, PATH = 'asked', 'path'  # keys of meta


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A proposer's trajectory and the verdict on it.

  question: for the solver; None if the trajectory has none. evidence: the
  search results that the proposer read, in order. reason: '' = it stands; one
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
    ConfigError: the proposer's template lacks the tags of a question.
  """
  s, env = config.selfplay, config.env
  paths = {SOLVER: env.template, PROPOSER: s.template, VERIFIER: s.reader}
  templates = {role: prompts.load(path) for role, path in paths.items()}
  wanted = f'<{s.tag}>', f'</{s.tag}>'
  if templates[PROPOSER].answer != wanted:
    raise ConfigError(
      f'config.selfplay.template={s.template!r} ends with '
      f'{"...".join(templates[PROPOSER].answer)}, and a proposer with '
      f'{"...".join(wanted)} (config.selfplay.tag={s.tag!r}): put these tags '
      "in the template's field 'answer' and among its 'stops'"
    )
  budgets = {role: env.copy_and_resolve_references() for role in templates}
  budgets[VERIFIER].max_turns = 0
  prompt, k = config.data.prompt, config.source.k
  return {
    role: RoleEnv(tok, template, budgets[role], prompt, k)
    for role, template in templates.items()
  }


def role_config(config: ConfigDict, role: str) -> ConfigDict:
  """The config of one of the two trained roles."""
  out = config.copy_and_resolve_references()
  if role == PROPOSER:
    out.algorithm = out.selfplay.algorithm
    out.rollout.group = out.selfplay.n
    out.rollout.sampler = 'chains'  # rewards of proposals need answers
  if 'critic' not in credit.needs(out.algorithm.advantage):
    out.critic.lr = 0.0
  if role == PROPOSER:  # it is asked for questions: there is nothing to hint
    out.teacher.context, out.teacher.columns.k = '', 0
  return out


def rng(config: ConfigDict, step: int, what: str) -> np.random.Generator:
  """The random stream of one draw of a step; the same after a resume."""
  return np.random.default_rng([config.seed, step, zlib.crc32(what.encode())])


# ---- Questions.


def briefs(
  answers: Sequence[Question], config: ConfigDict, step: int
) -> list[Question]:
  """The proposer's prompts: each answer in config.selfplay.brief.

  Raises:
    DataError: see `hops_asked`.
  """
  asks = config.selfplay.hops.asked

  def brief(q: Question) -> Question:
    told = {ASKED: hops_asked(q, config, step)} if asks else {}
    text = config.selfplay.brief.format(
      answer=q.answers[0],
      searches=told.get(ASKED, q.meta.get('search_turns', '')),
      examples=q.meta.get('examples', ''),
    )
    return dataclasses.replace(q, text=text, meta={**q.meta, **told})

  return [brief(q) for q in answers]


def _needs(hops) -> tuple[str, ...]:
  key = hops['asked']
  return ('answers', *[f'meta.{key}'] * (key not in ('', DRAWN)))


briefs.needs = _needs  # by config.selfplay.hops


def hops_asked(q: Question, config: ConfigDict, step: int) -> int:
  """How many hops a proposal about an answer is asked for.

  A draw depends on the run, the step and the answer's id alone.

  Raises:
    DataError: what Question.meta has is no number above 0, or there are not as
      many searches.
  """
  h, most = config.selfplay.hops, config.env.max_turns
  if h.asked == DRAWN:
    seed = trajectory_seed(config.seed, step, q.id, PROPOSER, 0, ASKED)
    shares = np.array(h.shares, float) / sum(h.shares)
    return 1 + int(np.random.default_rng(seed).choice(len(shares), p=shares))
  value = str(q.meta[h.asked]).strip()
  n = int(value) if value.isdecimal() else 0
  where = f'question {q.id!r}: meta[{h.asked!r}]={value!r}, which '
  where += 'config.selfplay.hops.asked names,'
  require(n > 0, f'{where} is no number of hops above 0')
  require(
    n <= most or not h.searched,
    f'{where} is above config.env.max_turns={most}: no proposal could stand; '
    'raise the latter, or set selfplay.hops.searched to False',
  )
  return n


def numbered(
  groups: Sequence[Group], config: ConfigDict, rng
) -> Sequence[Group]:
  """The proposals, each with the number of hops that counts for it.

  rng: deals the numbers to other groups, with selfplay.hops.shuffled.
  """
  if not config.selfplay.hops.asked:
    return groups
  numbers = [group[0].question.meta[ASKED] for group in groups]
  if config.selfplay.hops.shuffled:
    numbers = rng.permutation(numbers).tolist()
  return [
    tuple(dataclasses.replace(t, meta={**t.meta, ASKED: n}) for t in group)
    for group, n in zip(groups, numbers)
  ]


def read(
  trajectory: Trajectory, env: SearchEnv, config: ConfigDict, step: int
) -> Proposal:
  """A proposal, judged by the rules; `verify` comes later."""
  text = None if trajectory.failed else env.answer(trajectory)
  source = trajectory.question
  name = f'{source.id}@{step}.{trajectory.sample}'
  told = text and config.teacher.context
  meta = {PATH: construction(trajectory, env)} if told else {}
  question = text and Question(
    name, text, source.answers, 'selfplay', meta=meta
  )
  nothing = env.template.no_results.strip()
  evidence = [text for text in env.retrieved(trajectory) if text != nothing]
  reason = _reason(trajectory, text, evidence, config.selfplay)
  different = tuple(dict.fromkeys(evidence))
  return Proposal(trajectory, question or None, different, reason)


def _reason(trajectory, text, evidence, s) -> str:
  if trajectory.failed:
    return FAILED
  if not text:
    return 'tag'
  within = s.min_chars <= len(text) <= s.max_chars
  if not within or len(text.split()) < s.min_words:
    return 'length'
  answers = trajectory.question.answers
  if _says(text, answers):
    return 'leak'
  if not any(evidence):
    return 'evidence'
  queries = [found.request.query for found in trajectory.calls(SEARCH)]
  least = trajectory.meta[ASKED] if s.hops.searched else 0
  if len(queries) < max(s.min_searches, least):
    return 'searches'
  if len(set(queries)) < len(queries):
    return 'repeat'
  if s.answer_unsearched and any(_says(query, answers) for query in queries):
    return 'answer_searched'
  return ''


def construction(trajectory: Trajectory, env: SearchEnv) -> str:
  """How a question came about: thoughts, queries and what they found."""
  own = {'think': 'policy', 'search': 'policy', 'information': 'environment'}
  blocks = env.blocks(trajectory)
  return ' '.join(b.text for b in blocks if own.get(b.kind) == b.author)


def told_path(group, returns, env):
  """Hints of config.teacher: how the question came about; none of a dummy."""
  del returns, env
  return [t.question.meta.get(PATH) for t in group]


def _says(text: str, answers: Sequence[str]) -> bool:
  """Whether the text has the words of an answer, in their order."""
  return any(
    re.search(
      rf'(?<!{_LETTER}){re.escape(form(answer))}s?(?!{_LETTER})', form(text)
    )
    for form in (scores.normalise, _words)
    for answer in answers
    if form(answer)
  )


# Of scripts that part words; Thai, Japanese and Chinese do not.
_LETTER = r'[^\W_\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]'


def _words(text: str) -> str:
  # "Mira-Dok", "Mira Dok's" and "the Mira Doks" all say "Mira Dok", as "US"
  # says "U.S." by the normal form.
  text = re.sub(r"['\u2019]s\b|[^\w\s]|_", ' ', scores.folded(text))
  return scores.normalise(text)


def fill(
  asked: Sequence[Question],
  slots: int,
  config: ConfigDict,
  pool: Pool,
  rng,
  lost: Sequence[Question],
):
  """Questions for the slots whose proposals do not stand.

  Args:
    asked: questions that stand, at most `slots` of them.
    slots: number of questions in a step.
    config: reads config.selfplay.
    pool: for 'reuse'.
    rng: of the draws.
    lost: the answers of the proposals that do not stand.

  Returns:
    (reused questions, dummies); both are empty for 'drop'. If the pool is
    empty, config.selfplay.empty_pool decides.
  """
  s, n = config.selfplay, slots - len(asked)
  reused = pool.draw(n, rng) if s.invalid == 'reuse' else []
  reused = [
    dataclasses.replace(q, id=f'{q.id}/{i}', meta={**q.meta, 'reuse_of': q.id})
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
  """Question id -> mean reward of its solvers, the share that were right.

  Solvers that failed are not counted; if all failed, the question is absent.
  """
  values = np.array([np.sum(v) for v in reward.value])
  out, at = {}, 0
  for group in groups:
    rows = slice(at, at + len(group))
    at += len(group)
    known = values[rows][reward.valid[rows]]
    if known.size:
      out[group[0].question.id] = float(known.clip(0, 1).mean())
  return out


def earned(share: float, config: ConfigDict) -> float:
  """The proposer's reward for a question that `share` of solvers answered.

  1-acc: 1 - s. format_only: 1. The others are 0 unless 0 < s < 1:
  intermediate_difficulty: 4 (left + s) (right - s). linear_difficulty:
  (N - k) / (N - 1) = N (1 - s) / (N - 1), k = s N of the N =
  config.rollout.group solvers are right: 1 for one of them, 0 for all.
  """
  s, n = config.selfplay, config.rollout.group
  if s.reward == '1-acc':
    return 1.0 - share
  if s.reward == 'format_only':
    return 1.0
  if not 0 < share < 1:
    return 0.0
  if s.reward == 'linear_difficulty':
    return n * (1.0 - share) / (n - 1)
  return 4.0 * (s.left + share) * (s.right - share)


def hop_term(p: Proposal, h: ConfigDict, oracle) -> float:
  """What a proposal that stands earns for its hops, see selfplay.hops.term.

  h: config.selfplay.hops. oracle: of term='oracle'; a question that is not
  valid by it has no hops.
  """
  if not h.term:
    return 0.0
  made = len(p.trajectory.calls(SEARCH))
  if h.term == 'oracle':
    found = oracle.judge(p.question.text, p.question.answers)
    made = found.hops if found.valid else 0
  return h.weight * min(made / p.trajectory.meta[ASKED], 1.0)


def opposed(
  proposals: Sequence[Proposal],
  shares: Mapping[str, float],
  config: ConfigDict,
  oracle=None,
) -> Rewards:
  """Rewards of the proposers, one for each proposal.

  A proposal that does not stand gets selfplay.penalty, however its slot is
  filled (or is left out, by selfplay.train_invalid). It is not valid if its
  trajectory or all of its solvers failed, or if it exceeded the slots.

  oracle: of selfplay.hops.term='oracle'.
  """
  s, value, valid = config.selfplay, [], []
  for p in proposals:
    if not p.reason:
      share = shares.get(p.question.id)
      known = share is not None
      term = hop_term(p, s.hops, oracle)
      value.append(earned(share, config) + term if known else 0.0)
      valid.append(known)
    else:
      value.append(s.penalty)
      valid.append(p.reason != FAILED and bool(s.train_invalid))
  return Rewards(np.array(value, np.float32), np.array(valid, bool))


def by_hops(values, valid, group_ids, structure):
  """`advantages.reinforce` among proposals that were asked for as many hops.

  HRPO of Dr. Zero (arXiv 2601.07055), which also divides by the spread: A is R
  less the mean of the others, 0 for the only proposal of so many hops.
  """
  del group_ids
  asked = [t.meta[ASKED] for t in structure.trajectories]
  return advantages.rloo(values, valid, asked)


def _check_hops(config: ConfigDict, fields) -> None:
  del fields
  lookup.require(
    config.selfplay.hops.asked,
    'it compares proposals that were asked for as many hops, and config.'
    "selfplay.hops.asked='' asks for none; use 'drawn', or 'reinforce'",
  )


by_hops.check = _check_hops


# ---- Metrics of a step.


def mean_of(reward: Rewards) -> float:
  """The mean of the valid rewards; NaN if there are none."""
  values = advantages.returns(reward.value)[reward.valid]
  return float(values.mean()) if values.size else math.nan


def solved(
  groups: Sequence[Group], reward: Rewards | None, env: SearchEnv, match: str
) -> dict[str, float]:
  """Rewards and signs of collapse of the solver, without dummy questions.

  match: config.eval.match.
  """
  real = [g for g in groups if g[0].question.source != DUMMY]
  out = health.signs(real, env, match=match)
  if not real:
    return out
  asked = [t.question.source != DUMMY for g in groups for t in g]
  rows = np.array(asked) & reward.valid
  out['reward'] = mean_of(dataclasses.replace(reward, valid=rows))
  for name, value in reward.parts.items():
    out[f'reward/{name}'] = rewards.mean(value[rows])
  return out


def proposal_metrics(proposals: Sequence[Proposal], oracle) -> dict[str, float]:
  """Counts the reasons of proposals, and describes those that stand.

  Proposals that a service failed are counted only as 'no_failed'. The number
  of values in a mean is 'proposals', 'stand', or 'X_n' for the mean 'X'. Where
  briefs ask for hops: 'asked', how many; 'heeded', the share of valid questions
  that have as many ('hops_n' values); 'stand_asked_2' and 'hops_asked_2', of
  proposals that were asked for two: the share that stands, and the mean of the
  true hops.

  oracle: judges the questions, only for these metrics; None or '' = unknown.
  """
  reasons = [p.reason for p in proposals]
  proposals = [p for p in proposals if p.reason != FAILED]
  stand = [p for p in proposals if not p.reason]
  texts = {p.question.text for p in stand}

  def mean(values):
    return np.mean(values) if values else math.nan

  out = {
    'proposals': len(proposals),
    'stand': len(stand),
    'valid_share': mean([not p.reason for p in proposals]),
    'searches': mean([len(p.trajectory.calls(SEARCH)) for p in proposals]),
    'distinct': len(texts) / len(stand) if stand else math.nan,
  }
  out |= {f'no_{r}': reasons.count(r) for r in (*REASONS, FAILED)}
  asked = lambda p: p.trajectory.question.meta.get(ASKED, 0)
  numbers = sorted({asked(p) for p in proposals} - {0})
  if numbers:
    out['asked'] = mean([asked(p) for p in proposals])
  for n in numbers:
    own = [not p.reason for p in proposals if asked(p) == n]
    out |= {f'stand_asked_{n}': mean(own), f'stand_asked_{n}_n': len(own)}
  judged = [
    (p, oracle.judge(p.question.text, p.question.answers))
    for p in (proposals if oracle else ())
    if p.question is not None and p.reason in ('', 'verification')
  ]
  kept = [v for p, v in judged if not p.reason]
  if kept:
    valid = [v for v in kept if v.valid]
    out |= {
      'oracle_valid': len(valid) / len(kept),
      'unique': np.mean([v.unique for v in kept]),
      'hops': mean([v.hops for v in valid]),
      'hops_n': len(valid),
      'starts': len({v.start for v in kept}) / len(kept),
    }
    for hops in range(1, 5):
      out[f'share_{hops}hop'] = sum(v.hops == hops for v in valid) / len(kept)
    pairs = [(asked(p), v.hops) for p, v in judged if not p.reason and v.valid]
    if numbers:
      out['heeded'] = mean([n == hops for n, hops in pairs])
    for n in numbers:
      own = [hops for m, hops in pairs if m == n]
      out |= {f'hops_asked_{n}': mean(own), f'hops_asked_{n}_n': len(own)}
  # How well the verifier tells them apart.
  for name, wanted in (('passes_valid', True), ('passes_wrong', False)):
    seen = [not p.reason for p, v in judged if v.valid == wanted]
    if seen:
      out |= {name: np.mean(seen), f'{name}_n': len(seen)}
  return {f'selfplay/{k}': float(v) for k, v in out.items()}
