"""Checks the config of self-play, and what a run of it resumes."""

import dataclasses
import hashlib
import json
import math
import operator

from ml_collections import ConfigDict

from experiments.ssp.game import DRAWN, PROPOSER, SOLVER, role_config
from searchrl_jax import checks, lookup
from searchrl_jax.checks import ConfigError
from searchrl_jax.learn import credit
from searchrl_jax.run import build

# Fields of config.selfplay: the values that they may have, or the least one.
KNOWN = {
  'reward': (
    '1-acc',
    'intermediate_difficulty',
    'linear_difficulty',
    'format_only',
  ),
  'verifier': ('policy', 'judge', 'none'),
  'invalid': ('dummy', 'reuse', 'drop'),
  'empty_pool': ('dummy', 'drop'),
}
HOP_TERMS = ('', 'searches', 'oracle')
LEAST = dict(n=1, noise=0, resample=0, clear_every=0, min_searches=0)
# Fields of the config: the value that self-play needs, and why.
NEEDED = {
  'data.prompt': ('template', 'it writes its own questions'),
  'env.information': ('source', 'evidence is what a search found'),
  'env.answer': ('tags', 'a proposal ends in a tag of its own'),
  'rollout.max_staleness': (0, 'it is synchronous'),
  'rollout.refill': (0, 'it draws anew by selfplay.resample'),
  'rollout.mismatch_alarm': (
    0,
    "the solver's trajectories are one update old, and meant to be",
  ),
}


def check(config: ConfigDict) -> None:
  """Checks the fields of self-play, before anything is loaded.

  Raises:
    ConfigError: names the field and the fix.
  """
  s = config.selfplay
  for name, known in KNOWN.items():
    hint = lookup.near(s[name], known)
    message = f'config.selfplay.{name}={s[name]!r}: {hint}'
    lookup.require(s[name] in known, message)
  for name, least in LEAST.items():
    message = f'config.selfplay.{name}={s[name]}: at least {least}'
    lookup.require(s[name] >= least, message)
  build.check_environment(config, config.env.template, s.template, s.reader)
  lookup.require(
    s.min_searches <= config.env.max_turns,
    f'config.selfplay.min_searches={s.min_searches} of env.max_turns='
    f'{config.env.max_turns}: no proposal could stand; lower the former',
  )
  lookup.require(
    # The shortest question: words of one letter, with spaces.
    max(s.min_chars, 2 * s.min_words - 1) <= s.max_chars,
    f'config.selfplay.min_chars={s.min_chars}, min_words={s.min_words}, '
    f'max_chars={s.max_chars}: no question is that long and that short',
  )
  lookup.require(
    s.solver_from < config.train.steps,
    f'config.selfplay.solver_from={s.solver_from} of train.steps='
    f'{config.train.steps}: the solver would never learn',
  )
  lookup.require(
    -math.inf < s.penalty <= 0,
    f'config.selfplay.penalty={s.penalty}: what does not stand is to earn '
    'nothing, 0, or less',
  )
  lookup.require(
    [term.weight for term in config.reward.values()] == [1.0],
    f'config.reward has {", ".join(config.reward) or "no terms"}: a '
    "question's share is the mean of its solvers' rewards, so there is to be "
    'one term, of weight 1, from 0 (wrong) to 1 (right), as answer.em',
  )
  lookup.require(
    not (s.frozen and config.engine.url),
    f'config.engine.url={config.engine.url!r} with selfplay.frozen: two sets '
    "of weights cannot share servers; use engine.module='jax', or "
    'let the engine start servers of its own',
  )
  for name in ('reuse_threshold', 'keep_ratio', 'min_valid'):
    message = f'config.selfplay.{name}={s[name]}: a share in 0..1'
    lookup.require(0 <= s[name] <= 1, message)
  lookup.require(
    0 <= s.left < math.inf and 1 <= s.right < math.inf,
    f'config.selfplay.left={s.left}, right={s.right}: 4 (left + s) '
    '(right - s) is to be no loss for any share s of solvers: left at least '
    '0, right at least 1',
  )
  lookup.require(
    s.frozen or config.algorithm.tis != 'none',
    "config.algorithm.tis='none': the solver's trajectories are older than "
    "the proposer's update, and nothing would correct for it; use 'token' "
    "or 'sequence'",
  )
  lookup.require(
    s.verifier != 'judge' or config.judge.url,
    "config.selfplay.verifier='judge' asks the server of config.judge.url, "
    "which is empty; give its URL, or use 'policy'",
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
  for field, needed in (
    ('brief', '{answer}'),
    ('reading', '{question}'),
    ('reading', '{evidence}'),
  ):
    message = f'config.selfplay.{field}={s[field]!r} lacks {needed}'
    lookup.require(needed in s[field], message)
  _check_hops(config)
  lookup.require(
    not s.reward.endswith('_difficulty') or config.rollout.group > 1,
    f'config.rollout.group={config.rollout.group} with selfplay.reward='
    f'{s.reward!r}: one solver is right or wrong, and nothing between; use 2 '
    "or more, or '1-acc'",
  )
  for field, (needed, why) in NEEDED.items():
    value = operator.attrgetter(field)(config)
    message = f'config.{field}={value!r}: self-play needs {needed!r} ({why})'
    lookup.require(value == needed, message)
  for advantage in (config.algorithm.advantage, s.algorithm.advantage):
    lookup.require(
      'greedy' not in credit.needs(advantage),
      f'advantage={advantage!r} compares with a greedy answer, which '
      "self-play does not sample; use 'grpo', 'rloo', 'reinforce' or 'gae'",
    )
  learners = [role_config(config, SOLVER)]
  checks.check(learners[0])
  if not s.frozen:
    learners.append(role_config(config, PROPOSER))
    try:
      checks.check(learners[1])
    except ConfigError as e:
      raise ConfigError(
        str(e)
        .replace('.algorithm', '.selfplay.algorithm')
        .replace('.rollout.group', '.selfplay.n')
      ) from e
  lookup.require(
    not config.critic.lr or any(c.critic.lr for c in learners),
    f'config.critic.lr={config.critic.lr}: neither role has a use for a '
    "critic; set it to 0, or use advantage='gae'",
  )


def _check_hops(config: ConfigDict) -> None:
  s, most = config.selfplay, config.env.max_turns
  h, where = s.hops, 'config.selfplay.hops'
  hint = lookup.near(h.term, HOP_TERMS)
  lookup.require(h.term in HOP_TERMS, f'{where}.term={h.term!r}: {hint}')
  used = [name for name in ('searched', 'term', 'shuffled') if h[name]]
  lookup.require(
    h.asked or not used,
    f"{where}.asked='' with {', '.join(used)}: no number of hops is asked for; "
    'set it to drawn, or to the key of Question.meta that has one',
  )
  lookup.require(
    not h.asked or '{searches}' in s.brief,
    f'{where}.asked={h.asked!r} with selfplay.brief={s.brief!r}: the proposer '
    'would not be told how many; put {searches} into the brief',
  )
  good = h.shares and all(0 <= x < math.inf for x in h.shares)
  lookup.require(
    good and sum(h.shares) > 0,
    f'{where}.shares={tuple(h.shares)}: shares of 1, 2, ... hops, none below 0 '
    'and not all 0',
  )
  lookup.require(
    h.asked != DRAWN or not h.searched or len(h.shares) <= most,
    f'{where}.shares has {len(h.shares)} numbers of hops, searched=True needs '
    f'as many searches, and config.env.max_turns={most}: raise it',
  )
  lookup.require(
    not h.term or 0 < h.weight < math.inf,
    f'{where}.weight={h.weight} of term={h.term!r}: above 0',
  )
  lookup.require(
    h.term != 'oracle' or s.oracle,
    f"{where}.term='oracle' with config.selfplay.oracle='': nothing tells the "
    "true hops of a question; use 'searches', or a generated world",
  )


def fingerprint(config: ConfigDict, stream, envs) -> str:
  """Of what questions are about and how they are asked for; see `Pool`."""
  template = dataclasses.asdict(envs[PROPOSER].template)
  if not template['blocks']:
    del template['blocks']  # checkpoints from before this field have none
  about = [
    stream.fingerprint,
    config.selfplay.brief,
    template,
    config.source.corpus,
    config.data.world_seed,
    config.data.world.to_dict(),
  ]
  return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


class Frozen:
  """Refuses to continue with another frozen proposer (a state of `Session`).

  Args:
    weights: `sync.checksums` of the proposer's weights now; None: it learns.
    config: the whole.
  """

  def __init__(self, weights, config: ConfigDict):
    self._weights, self._config = weights, config

  def state(self):
    return self._weights

  def restore(self, state) -> None:
    """Compares with those of the checkpoint.

    Raises:
      ConfigError: they differ.
    """
    lookup.require(
      not (state and self._weights) or state == self._weights,
      f'config.train.init={self._config.train.init!r}, model.path='
      f'{self._config.model.path!r}: its weights are not those that the '
      'frozen proposer of this run began with; was it trained on since? '
      'Restore it, or start a new run folder',
    )
