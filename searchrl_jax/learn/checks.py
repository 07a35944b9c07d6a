"""Checks the fields of a config before any model is loaded."""

from collections.abc import Sequence
import functools

from ml_collections import ConfigDict
import tqdm

from retrieval.client import RetrievalClient
from searchrl_jax.engines import core as engines
from searchrl_jax.evaluators import passk
from searchrl_jax.learn import (
  advantages,
  batching,
  credit,
  losses,
  objectives,
  optim,
)
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout import core as samplers
from searchrl_jax.run import lookup, schema
from searchrl_jax.run.lookup import ConfigError
from searchrl_jax.sources import none, simulated
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Question


def check(config: ConfigDict) -> None:
  """Checks the fields of a training config together.

  Raises:
    ConfigError: names the first invalid field and the fix.
  """
  schema.check(config)
  a, r = config.algorithm, config.rollout
  lookup.require(
    a.advantage in advantages.FUNCTIONS or '.' in a.advantage,
    f'config.algorithm.advantage={a.advantage!r}: '
    f'{lookup.near(a.advantage, advantages.FUNCTIONS)} '
    '(or the dotted path of a function of your own)',
  )
  advantage = credit.function(a.advantage)
  lookup.require(
    not getattr(advantage, 'needs_group', False) or r.group >= 2,
    f'config.rollout.group={r.group}: advantage {a.advantage!r} compares '
    'trajectories of one question; use 2 or more',
  )
  lookup.require(
    a.loss in losses.LOSSES or '.' in a.loss,
    f'config.algorithm.loss={a.loss!r}: {lookup.near(a.loss, losses.LOSSES)} '
    '(or the dotted path of a function of your own)',
  )
  batching.check(config)
  samplers.sampler(r)
  lookup.require(
    r.top_p >= 1 and r.top_k <= 0,
    f'config.rollout.top_p={r.top_p}, top_k={r.top_k}: training samples from '
    'the whole distribution, since the trainer scores with it; use top_p=1 '
    'and top_k=0 (evaluation may truncate: config.eval.top_p)',
  )
  lookup.require(
    r.temperature > 0,
    f'config.rollout.temperature={r.temperature}: greedy rollouts of a group '
    'are all equal and teach nothing; use a temperature above 0',
  )
  objectives.policy(config)
  _check_advantage(a)
  _check_critic(config)
  _check_refill(config)
  lookup.require(
    a.kl != 'none' or not a.kl_coef,
    f"config.algorithm.kl_coef={a.kl_coef} has no effect with kl='none'; "
    "use kl='loss' or 'reward'",
  )
  lookup.require(
    a.kl == 'none' or a.kl_coef > 0,
    f'config.algorithm.kl={a.kl!r} with kl_coef={a.kl_coef}: set a '
    "coefficient above 0, or kl='none'",
  )
  check_engine(config)
  passk.check(config, training=True)
  lookup.require(
    not (r.max_staleness and config.engine.sleep),
    f'config.rollout.max_staleness={r.max_staleness} with config.engine.sleep'
    ': an engine that sleeps during updates has no rollouts under way; use 0',
  )
  lookup.require(
    not (config.env.real_searches and config.env.information == 'policy'),
    f'config.env.real_searches={config.env.real_searches} in training: with '
    "env.information='policy' (SSRL) a policy learns from what it recalls "
    'itself; use 0 here, and real searches with `evaluate --workdir=RUN '
    "--config.env.real_searches=K`, or train with env.information='source'",
  )
  best = selecting(config)
  lookup.require(
    not best or (best in config.data.eval and len(config.data.eval) > 1),
    f'config.checkpoint.best={config.checkpoint.best!r}: the set {best!r} '
    'has to be in config.data.eval, beside those that are reported',
  )
  lookup.require(
    config.reward,
    'config.reward is empty; for example '
    "config.reward.em = {'fn': 'answer.em', 'weight': 1.0}",
  )


def selecting(config: ConfigDict) -> str:
  """The set that config.checkpoint.best selects by; '' = none.

  Raises:
    ConfigError: it names a metric over the sets that are reported (design
      5.13).
  """
  best = config.checkpoint.best
  name, _, score = best.removeprefix('eval/set=').partition('/')
  lookup.require(
    not best or (best.startswith('eval/set=') and name and score),
    f'config.checkpoint.best={best!r} would select by the sets that are '
    "reported; use 'eval/set=NAME/em' of a set of config.data.eval that is "
    "not, or '' (the last checkpoint is reported)",
  )
  return name


def _check_critic(config: ConfigDict) -> None:
  a, c = config.algorithm, config.critic
  needed = 'critic' in credit.needs(a.advantage)
  lookup.require(
    not needed or c.lr > 0,
    f'config.algorithm.advantage={a.advantage!r} needs a critic, and '
    f'config.critic.lr={c.lr} says that there is none; set a rate (1e-5 is '
    "Search-R1's), or use an advantage without one, such as 'rloo'",
  )
  lookup.require(
    needed or not c.lr,
    f'config.critic.lr={c.lr}: advantage {a.advantage!r} has no use for a '
    "critic; set it to 0, or use advantage='gae'",
  )
  lookup.require(
    0 <= c.pretrain_steps < config.train.steps
    and (needed or not c.pretrain_steps),
    f'config.critic.pretrain_steps={c.pretrain_steps}: first steps, which '
    'train only the critic; fewer than config.train.steps='
    f'{config.train.steps}, and 0 where there is no critic',
  )
  try:
    objectives.value(config)
    optim.schedule(c, optim.critic_updates(config))
  except ValueError as e:
    raise ConfigError(str(e).replace('.optim.', '.critic.')) from e


def _check_refill(config: ConfigDict) -> None:
  r, advantage = config.rollout, config.algorithm.advantage
  # Seen token by token or turn by turn, equal returns can differ.
  finer = {'mask', 'structure'}.intersection(credit.needs(advantage))
  grouped = getattr(credit.function(advantage), 'needs_group', False)
  lookup.require(
    grouped and not finer or not config.algorithm.drop_zero_variance,
    'config.algorithm.drop_zero_variance leaves out groups of equal rewards; '
    f'with advantage={advantage!r}, which has another baseline, they have a '
    'gradient: set it to False',
  )
  lookup.require(
    not r.refill or config.algorithm.drop_zero_variance,
    f'config.rollout.refill={r.refill} fills up for groups of equal rewards, '
    'which config.algorithm.drop_zero_variance=False keeps; set it to True',
  )
  lookup.require(
    not (r.refill and r.max_staleness),
    f'config.rollout.refill={r.refill} with max_staleness={r.max_staleness}: '
    "the next step's questions are under way before this one's are known to "
    'be too few; use one of them',
  )


def _check_advantage(a: ConfigDict) -> None:
  fn = credit.function(a.advantage)
  try:
    lookup.require_fields(
      'config.algorithm.advantage_kw', fn, a.advantage_kw, ConfigError
    )
  except ConfigError as e:
    raise ConfigError(
      f'{e} (ConfigDict.update keeps the fields of the advantage that was set '
      'before; assign advantage_kw instead)'
    ) from e
  lookup.require(
    'critic' not in credit.needs(a.advantage)
    or {'gamma', 'lam'} <= lookup.fields(fn).keys(),
    f'config.algorithm.advantage={a.advantage!r} takes a critic: give it the '
    'fields gamma and lam, of the returns that the critic learns',
  )
  lookup.require(
    a.kl != 'reward' or not getattr(fn, 'divides_by_spread', False),
    f"config.algorithm.kl='reward' with advantage={a.advantage!r}, which "
    'divides by a spread of rewards: where all earn the same, the noise '
    "of the KL estimate would become advantages of full size. Use kl='loss' "
    "(as GRPO does), or advantage='dr_grpo' or 'rloo'",
  )


def check_rewards(config: ConfigDict, questions: Sequence[Question]) -> None:
  """Checks config.reward, and that questions have the answers it needs.

  Raises:
    RewardError: names the field, or the first question without answers.
  """
  rewards.check(config.reward, questions, config.judge.url, config)


def check_prompts(env: SearchEnv, questions: Sequence[Question]) -> None:
  """Checks that every prompt leaves room for a reply.

  Raises:
    ConfigError: the number of questions whose prompts do not, and their ids.
  """
  long, first = [], ''
  for q in tqdm.tqdm(
    questions, 'prompts', unit='question', disable=None, delay=2.0
  ):
    try:
      env.reset(q)
    except ValueError as e:
      long.append(q.id)
      first = first or str(e)
  if long:
    shown = ', '.join(long[:5]) + (', ...' if len(long) > 5 else '')
    raise ConfigError(
      f'{len(long)} of {len(questions)} questions cannot be asked ({shown}): '
      f'{first}'
    )


def check_engine(config: ConfigDict) -> None:
  """Checks the fields that evaluation also reads.

  Raises:
    ConfigError: names the first invalid field and the fix.
  """
  # Before the config is written to the run folder, which then keeps it.
  sources = functools.partial(lookup.module, 'searchrl_jax.sources')
  for field, find in (('engine', engines.module), ('source', sources)):
    name = config[field].module
    try:
      found = find(name)
    except ValueError as e:
      raise ConfigError(f'config.{field}.module: {e}') from e
    lookup.require(
      hasattr(found, 'make'),
      f'config.{field}.module={name!r} has no function make: it is a '
      'part of another one',
    )
  if config.source.module == simulated.SIMULATED:
    simulated.check(config.source.simulator)
  env = config.env
  lookup.require(
    config.source.module != none.NONE
    or not (env.real_searches or env.information == 'source' and env.max_turns),
    f"config.source.module='none' answers no search, and config.env "
    f'(information={env.information!r}, max_turns={env.max_turns}, '
    f"real_searches={env.real_searches}) sends some; use 'service'",
  )
  try:
    if config.source.url:
      RetrievalClient(config.source.url)
  except ValueError as e:
    raise ConfigError(f'config.source.url: {e}') from e
  lookup.require(
    config.engine.dtype == config.model.dtype
    or config.engine.canary_tolerance >= 0.02,
    f'config.engine.dtype={config.engine.dtype} is not config.model.dtype='
    f'{config.model.dtype}: their log-probs differ by more than config.'
    f'engine.canary_tolerance={config.engine.canary_tolerance}; use one '
    'dtype, or allow 0.02 or more',
  )
  made = config.model.tokenizer in ('world', 'bpe')
  lookup.require(
    not (config.model.path and made),
    f'config.model.path={config.model.path!r} with config.model.tokenizer='
    f'{config.model.tokenizer!r}: a checkpoint needs the tokenizer it was '
    'trained with; leave model.tokenizer empty (configs/wiki_nq.py:model='
    'PATH does)',
  )
  lookup.require(
    config.env.max_tokens <= config.engine.max_len,
    f'config.env.max_tokens={config.env.max_tokens} is above '
    f'config.engine.max_len={config.engine.max_len}; raise the latter',
  )
