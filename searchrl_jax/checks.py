"""Checks the fields of a config before any model is loaded."""

from collections.abc import Sequence
import functools

from ml_collections import ConfigDict

from retrieval import files
from retrieval.client import RetrievalClient
from searchrl_jax import lookup, schema
from searchrl_jax.data import checks as data
from searchrl_jax.devices import cluster
from searchrl_jax.engines import core as engines
from searchrl_jax.learn import (
  batching,
  credit,
  objectives,
  optim,
  potential,
  teacher,
)
from searchrl_jax.lookup import ConfigError
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rewards import equivalence
from searchrl_jax.rollout import core as samplers
from searchrl_jax.rollout import revise, sessions, tree
from searchrl_jax.run import build
from searchrl_jax.sources import none, simulated
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Question


def check(config: ConfigDict) -> None:
  """Checks the fields of a training config together.

  Raises:
    ConfigError: names the first invalid field and the fix.
  """
  check_engine(config)
  a, r, c, env = config.algorithm, config.rollout, config.critic, config.env
  fn, taken = credit.function(a.advantage), credit.needs(a.advantage)
  grouped = getattr(fn, 'needs_group', False)
  advantage = f'config.algorithm.advantage={a.advantage!r}'
  lookup.require(
    r.group >= 2 or not grouped,
    f'config.rollout.group={r.group}: {advantage} compares trajectories of one '
    'question; use 2 or more',
  )
  batching.check(config)
  sample = samplers.sampler(r).func
  lookup.require(
    env.max_contexts == 1 or sample not in (tree.sample, revise.sample),
    f'config.rollout.sampler={r.sampler!r} with env.max_contexts='
    f'{env.max_contexts}: '
    'attempts share what one sequence held; use 1 or chains',
  )
  # label -> how many trajectories of a group have an equal one, at least.
  cells = getattr(sample, 'cells', lambda r: {})(r)
  label = a.advantage_kw.get('label')
  lookup.require(
    cells.get(label, 2) >= 2,
    f'config.rollout.group={r.group} with sampler={r.sampler!r}: {advantage} '
    f'compares those of a group with an equal {label!r}, and one has no other; '
    'increase the group',
  )
  begins = env.keep_observations or env.on_full or env.on_answer
  lookup.require(
    env.max_contexts == 1 or begins or sample is sessions.sample,
    f'config.env.max_contexts={env.max_contexts}: nothing begins another '
    'context. Set keep_observations, on_full or on_answer, or use '
    "rollout.sampler='sessions', or 1",
  )
  lookup.require(
    'greedy' not in taken or sample is not sessions.sample,
    f'{advantage} compares with greedy attempts, which '
    f'rollout.sampler={r.sampler!r} does not play: use another',
  )
  _check_foreign(config, sample)
  lookup.require(
    r.top_p >= 1 and r.top_k <= 0,
    f'config.rollout.top_p={r.top_p}, top_k={r.top_k}: the trainer scores with '
    'the whole distribution; use 1 and 0 (config.eval.top_p may truncate)',
  )
  lookup.require(
    r.temperature > 0,
    f'config.rollout.temperature={r.temperature}: greedy rollouts of a group '
    'are all equal and teach nothing; use a temperature above 0',
  )
  objectives.policy(config)
  lookup.require_fields('config.algorithm.advantage_kw', fn, a.advantage_kw)
  for where, used, fields in _users(config):
    blind = rewards.unobserved(config, used, fields)
    lookup.require(not blind, f'{where}: {blind}')
    if hasattr(used, 'check'):  # of the whole config
      with lookup.of(where):
        used.check(config, fields)
  lookup.require(
    'critic' not in taken or {'gamma', 'lam'} <= lookup.fields(fn).keys(),
    f'{advantage} takes a critic, which needs the fields gamma and lam',
  )
  lookup.require(
    a.kl != 'reward' or not getattr(fn, 'divides_by_spread', False),
    f"config.algorithm.kl='reward' with advantage={a.advantage!r}, which "
    'divides by a spread of rewards and so blows up the noise of the KL where '
    "all earn the same; use kl='loss' with kl_estimator='k3', or advantage="
    "'dr_grpo' or 'rloo'",
  )
  lookup.require(
    (a.kl != 'none') == (a.kl_coef > 0),
    f'config.algorithm.kl={a.kl!r} with kl_coef={a.kl_coef}: a coefficient '
    "above 0 goes with 'loss' or 'reward', 0 with 'none'",
  )
  lookup.require(
    ('critic' in taken) == (c.lr > 0),
    f'{advantage} {"needs a" if "critic" in taken else "has no use for a"} '
    f'critic, and config.critic.lr={c.lr}: a rate above 0 (1e-5 is '
    "Search-R1's) goes with 'gae', 0 with an advantage such as 'rloo'",
  )
  lookup.require(
    0 <= c.pretrain_steps < (config.train.steps if 'critic' in taken else 1),
    f'config.critic.pretrain_steps={c.pretrain_steps}: fewer than config.train.'
    f'steps={config.train.steps}, and 0 where there is no critic',
  )
  lookup.require(
    not (config.model.lora.rank and c.path),
    f'config.critic.path={c.path!r} with config.model.lora: the critic has '
    "adapters of its own on the policy's parameters; leave it empty",
  )
  teacher.check(config)
  context = config.teacher.context
  lookup.require(
    not context or sample not in (sessions.sample, revise.sample),
    f'config.teacher.context={context!r} with rollout.sampler={r.sampler!r}: '
    'the prompts are those of the program, or of verdicts, where a hint has no '
    "place; use 'chains'",
  )
  taught = 'delta' in taken or config.teacher.columns.k > 0
  lookup.require(
    taught == bool(context),
    f'{advantage} with config.teacher.columns.k={config.teacher.columns.k} '
    f'{"needs a" if taught else "has no use for a"} teacher, and '
    f'config.teacher.context={context!r}: see learn/teacher.py',
  )
  optim.schedule(c, optim.critic_updates(config), 'config.critic')
  # Seen token by token or turn by turn, equal returns can differ.
  lookup.require(
    not a.drop_zero_variance
    or (
      grouped
      and not {'mask', 'structure', 'delta', 'gold'} & {*taken}
      and not config.teacher.columns.k
    ),
    'config.algorithm.drop_zero_variance leaves out groups of equal rewards, '
    f'which have a gradient with {advantage}: set it to False',
  )
  lookup.require(
    not r.refill or a.drop_zero_variance,
    f'config.rollout.refill={r.refill} fills up for groups of equal rewards, '
    'which config.algorithm.drop_zero_variance=False keeps; set it to True',
  )
  lookup.require(
    not (r.refill and r.max_staleness),
    f'config.rollout.refill={r.refill} with max_staleness={r.max_staleness}: '
    'the next step begins before this one is known to be short; use one',
  )
  check_evaluation(config)
  lookup.require(
    not (r.max_staleness and config.engine.sleep),
    f'config.rollout.max_staleness={r.max_staleness} with config.engine.sleep'
    ': an engine that sleeps during updates has no rollouts under way; use 0',
  )
  lookup.require(
    not (env.real_searches and env.information == 'policy'),
    f'config.env.real_searches={env.real_searches} in training: with '
    "env.information='policy' (SSRL) a policy learns from what it recalls; use "
    '0 here, and real ones in `evaluate --config.env.real_searches=K`',
  )
  best = selecting(config)
  lookup.require(
    not best or (best in config.data.eval and len(config.data.eval) > 1),
    f'config.checkpoint.best={config.checkpoint.best!r}: the set {best!r} '
    'has to be in config.data.eval, beside those that are reported',
  )


def _check_foreign(config: ConfigDict, sample) -> None:
  """Checks what plays what the policy did not sample (`rollout.traces`)."""
  if not getattr(sample, 'foreign', False):
    return
  a, env = config.algorithm, config.env
  what = f'config.rollout.sampler={config.rollout.sampler!r}'
  lookup.require(
    objectives.takes_foreign(a),
    f'{what} puts tokens into groups that the policy did not sample, and '
    f'config.algorithm.loss={a.loss!r} has ratios to what did: use a loss that '
    "takes `foreign`, such as 'mixed'",
  )
  lookup.require(
    env.information == 'source' and env.max_contexts == 1,
    f'{what} with config.env.information={env.information!r}, max_contexts='
    f"{env.max_contexts}: traces are played with information='source', in one "
    'context',
  )
  lookup.require(
    env.attempts == 1 or 'traces' not in lookup.fields(sample),
    f'{what} with config.env.attempts={env.attempts}: a trace has one; use 1',
  )
  lookup.require(
    env.answer == 'tags' or config.rollout.trace_when == 'always',
    f"{what} with trace_when='failed' and config.env.answer={env.answer!r}: "
    "which trace makes the answer likely is known of answer='tags' alone",
  )


def _users(config: ConfigDict) -> list[tuple]:
  """(field, function, its fields) of advantage, loss and teacher."""
  a, where = config.algorithm, 'config.algorithm'
  advantage = credit.function(a.advantage), a.advantage_kw
  loss = objectives.policy_loss(a)
  used = [(f'{where}.advantage', *advantage), (f'{where}.loss', *loss)]
  if 'gold' in credit.needs(a.advantage):
    used.append((f'{where}.advantage', potential.ask, {}))
  if config.teacher.context:
    hints = teacher.context(config.teacher), config.teacher.context_kw
    used.append(('config.teacher.context', *hints))
  return used


def check_data(config: ConfigDict, questions: Sequence[Question]) -> None:
  """Checks the rewards, and what all functions need of the questions.

  Raises:
    RewardError: an invalid field of config.reward.
    DataError: a question lacks what a reward, the advantage, the loss, the
      teacher or the sampler needs (`data.checks.require_needs`).
  """
  rewards.check(config, questions)
  sample = samplers.sampler(config.rollout)
  sampled = 'config.rollout.sampler', sample.func, sample.keywords
  data.require_needs([*_users(config), sampled], questions)


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


def check_prompts(env: SearchEnv, questions: Sequence[Question]) -> None:
  """Checks that every prompt leaves room for a reply.

  Raises:
    ConfigError: the number of questions whose prompts do not, and their ids.
  """
  long = {}
  with files.progress(len(questions), 'prompts', unit='question') as bar:
    for q in questions:
      try:
        env.reset(q)
      except ValueError as e:
        long[q.id] = str(e)
      bar.update()
  which, why = ', '.join([*long][:5]), next(iter(long.values()), '')
  what = f'{len(long)} of {len(questions)} questions cannot be asked'
  lookup.require(not long, f'{what} ({which}, ...): {why}', ConfigError)


def check_engine(config: ConfigDict) -> None:
  """Checks the fields that evaluation also reads.

  Raises:
    ConfigError: names the first invalid field and the fix.
  """
  # Before the config is written to the run folder, which then keeps it.
  schema.check(config)
  build.check_environment(config)
  sources = functools.partial(lookup.module, 'searchrl_jax.sources')
  for field, find, functions in (
    ('engine', engines.module, ('make', 'capacity')),
    ('source', sources, ('make',)),
  ):
    name = config[field].module
    with lookup.of(f'config.{field}.module'):
      found = find(name)
    for function in functions:
      lookup.require(
        hasattr(found, function),
        f'config.{field}.module={name!r} has no function {function}: it is a '
        f'part of another one, or lacks what searchrl_jax/{field}s/core.py '
        'asks for',
      )
  if config.source.module == simulated.SIMULATED:
    simulated.check(config.source.simulator)
  rank = config.model.lora.rank
  lookup.require(
    not rank or cluster.size() == 1,
    f'config.model.lora.rank={rank}: adapters are trained by one process, '
    'with all devices of a node; use rank 0 on several',
  )
  env, engine, model = config.env, config.engine, config.model
  searches = env.real_searches or env.information == 'source' and env.max_turns
  called = build.template(config).calls and config.tools  # what is not search
  lookup.require(
    config.source.module != none.NONE or not searches or called,
    f"config.source.module='none' answers no search, and config.env "
    f'(information={env.information!r}, max_turns={env.max_turns}, '
    f"real_searches={env.real_searches}) sends some; use 'service'",
  )
  if config.source.url:
    with lookup.of('config.source.url'):
      RetrievalClient(config.source.url)
  lookup.require(
    engine.dtype == model.dtype or engine.canary_tolerance >= 0.02,
    f'config.engine.dtype={engine.dtype} with model.dtype={model.dtype}: their '
    'log-probs differ by more than config.engine.canary_tolerance='
    f'{engine.canary_tolerance}; use one dtype, or allow 0.02 or more',
  )
  lookup.require(
    engine.sync == 'full'
    or engine.module == 'vllm'
    and engine.dtype != 'float32'
    and not rank
    and cluster.size() == 1,
    f'config.engine.sync={engine.sync!r} with engine.module={engine.module!r}, '
    f'engine.dtype={engine.dtype!r}, model.lora.rank={rank} and '
    f"{cluster.size()} processes: it needs servers ('vllm'), a dtype of 16 "
    'bits (of float32 everything changes), no adapters (which are published '
    "alone anyway) and one process; use 'full'",
  )
  lookup.require(
    not model.path or model.tokenizer not in ('world', 'bpe'),
    f'config.model.path={model.path!r} with model.tokenizer='
    f'{model.tokenizer!r}: a checkpoint needs the tokenizer it was trained '
    'with; leave it empty (configs/wiki_nq.py:model=PATH does)',
  )
  lookup.require(
    env.max_tokens <= engine.max_len,
    f'config.env.max_tokens={env.max_tokens} is above config.engine.max_len='
    f'{engine.max_len}; raise the latter',
  )


def check_evaluation(config: ConfigDict) -> None:
  """Checks config.eval, before any model is loaded.

  Args:
    config: the whole config.

  Raises:
    ValueError: names the field, its value and the fix.
  """
  e = config.eval
  equivalence.function(e.match)
  lookup.require(
    all(1 <= k <= e.n for k in e.k),
    f'config.eval.k={tuple(e.k)} needs numbers from 1 up to eval.n={e.n}',
  )
  lookup.require(
    e.temperature > 0 or max(e.k, default=1) == 1,
    f'config.eval.k={tuple(e.k)} with temperature=0, '
    'which makes all samples of a question equal; use one above 0',
  )
