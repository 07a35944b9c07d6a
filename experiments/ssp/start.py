"""Checks the config of self-play, and what a run of it resumes."""

import dataclasses
import hashlib
import json
import math

from ml_collections import ConfigDict

from experiments.ssp.game import PROPOSER, SOLVER, role_config
from searchrl_jax import checks, lookup
from searchrl_jax.checks import ConfigError
from searchrl_jax.learn import credit
from searchrl_jax.run import build

REWARDS = ('1-acc', 'intermediate_difficulty', 'format_only')
VERIFIERS = ('policy', 'judge', 'none')
INVALID = ('dummy', 'reuse', 'drop')


def check(config: ConfigDict) -> None:
  """Checks the fields of self-play, before anything is loaded.

  Raises:
    ConfigError: names the field and the fix.
  """
  s = config.selfplay
  for name, known in (
    ('reward', REWARDS),
    ('verifier', VERIFIERS),
    ('invalid', INVALID),
    ('empty_pool', ('dummy', 'drop')),
  ):
    if s[name] not in known:
      raise ConfigError(
        f'config.selfplay.{name}={s[name]!r}: {lookup.near(s[name], known)}'
      )
  for name, least in (
    ('n', 1),
    ('noise', 0),
    ('resample', 0),
    ('clear_every', 0),
    ('min_searches', 0),
  ):
    if s[name] < least:
      raise ConfigError(f'config.selfplay.{name}={s[name]}: at least {least}')
  build.check_environment(config, config.env.template, s.template, s.reader)
  if s.min_searches > config.env.max_turns:
    raise ConfigError(
      f'config.selfplay.min_searches={s.min_searches} of env.max_turns='
      f'{config.env.max_turns}: no proposal could stand; lower the former'
    )
  # The shortest question: words of one letter, with spaces.
  if max(s.min_chars, 2 * s.min_words - 1) > s.max_chars:
    raise ConfigError(
      f'config.selfplay.min_chars={s.min_chars}, min_words={s.min_words}, '
      f'max_chars={s.max_chars}: no question is that long and that short'
    )
  if s.solver_from >= config.train.steps:
    raise ConfigError(
      f'config.selfplay.solver_from={s.solver_from} of train.steps='
      f'{config.train.steps}: the solver would never learn'
    )
  if not -math.inf < s.penalty <= 0:
    raise ConfigError(
      f'config.selfplay.penalty={s.penalty}: what does not stand is to earn '
      'nothing, 0, or less'
    )
  if [term.weight for term in config.reward.values()] != [1.0]:
    raise ConfigError(
      f'config.reward has {", ".join(config.reward) or "no terms"}: a '
      "question's share is the mean of its solvers' rewards, so there is to be "
      'one term, of weight 1, from 0 (wrong) to 1 (right), as answer.em'
    )
  if s.frozen and config.engine.url:
    raise ConfigError(
      f'config.engine.url={config.engine.url!r} with selfplay.frozen: two sets '
      "of weights cannot share servers; use engine.module='jax', or "
      'let the engine start servers of its own'
    )
  for name in ('reuse_threshold', 'keep_ratio', 'min_valid'):
    if not 0 <= s[name] <= 1:
      raise ConfigError(f'config.selfplay.{name}={s[name]}: a share in 0..1')
  if not 0 <= s.left < math.inf or not 1 <= s.right < math.inf:
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
    ('{answer}', 'brief', s.brief),
    ('{question}', 'reading', s.reading),
    ('{evidence}', 'reading', s.reading),
  ):
    if needed not in text:
      raise ConfigError(f'config.selfplay.{field}={text!r} lacks {needed}')
  for field, value, needed, why in (
    (
      'data.prompt',
      config.data.prompt,
      'template',
      'it writes its own questions',
    ),
    (
      'env.information',
      config.env.information,
      'source',
      'evidence is what a search found',
    ),
    (
      'env.answer',
      config.env.answer,
      'tags',
      'a proposal ends in a tag of its own',
    ),
    (
      'rollout.max_staleness',
      config.rollout.max_staleness,
      0,
      'it is synchronous',
    ),
    (
      'rollout.refill',
      config.rollout.refill,
      0,
      'it draws anew by selfplay.resample',
    ),
    (
      'rollout.mismatch_alarm',
      config.rollout.mismatch_alarm,
      0,
      "the solver's trajectories are one update old, and meant to be",
    ),
  ):
    if value != needed:
      raise ConfigError(
        f'config.{field}={value!r}: self-play needs {needed!r} ({why})'
      )
  for advantage in (config.algorithm.advantage, s.algorithm.advantage):
    if 'greedy' in credit.needs(advantage):
      raise ConfigError(
        f'advantage={advantage!r} compares with a greedy answer, which '
        "self-play does not sample; use 'grpo', 'rloo', 'reinforce' or 'gae'"
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
  if config.critic.lr and not any(c.critic.lr for c in learners):
    raise ConfigError(
      f'config.critic.lr={config.critic.lr}: neither role has a use for a '
      "critic; set it to 0, or use advantage='gae'"
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
    if state and self._weights and state != self._weights:
      raise ConfigError(
        f'config.train.init={self._config.train.init!r}, model.path='
        f'{self._config.model.path!r}: its weights are not those that the '
        'frozen proposer of this run began with; was it trained on since? '
        'Restore it, or start a new run folder'
      )
