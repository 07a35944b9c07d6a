"""Methods as changes of a base recipe.

  python -m searchrl_jax.train --config=configs/methods/NAME.py \\
    --workdir=runs/x --config.train.init=runs/even
  python -m searchrl_jax.train --workdir=runs/x \\
    --config=configs/methods/NAME.py:base=search_r1,model=Qwen/Qwen2.5-3B

A file of this folder is a method: its docstring has the source and where it
departs from it, `get_config` its fields, and functions that no other method
uses stand beside it (`configs.methods.NAME.fn` in the config). To delete a
method, delete the file, its test and its row in experiments/arena/arms.py.

Its arguments are `base`, the recipe that it changes (atlas, search_r1, ...:
`configs/BASE.py`), the method's own, and those of the base. An argument that
both have (`version` of search_r1) is the method's.
"""

from collections.abc import Callable, Mapping
import importlib
from typing import Any

from ml_collections import ConfigDict

from configs import algorithms
from searchrl_jax import lookup, schema

# GRPO as most releases of search agents have it (configs/methods/grpo.py).
GRPO = algorithms.GRPO | dict(aggregation='token')

# PPO's ratio without bounds, as fields of config.algorithm.
UNCLIPPED = dict(clip_low=1.0, clip_high=1e6)

# Credit for searches (searchrl_jax/rewards/progress.py).
PROGRESS = dict(
  fn='progress.progress',
  weight=1.0,
  phi='supporting',
  phi_kw={},
  kind='difference',
  scale=1.0,
  redundancy=0.0,
  forfeit=False,
  closed=False,
  shuffle=False,
  at_end=False,
)


def on_base(
  arg: str | None, change: Callable[[ConfigDict, ConfigDict], None], **known
) -> ConfigDict:
  """The config of the base recipe, changed.

  Args:
    arg: what follows the file's name, such as 'base=search_r1,seed=1'.
    change: (config, arguments) -> None; changes the config in place.
    **known: the method's own arguments with their defaults.
  """
  parts = [part for part in (arg or '').split(',') if part]
  own = [p for p in parts if p.partition('=')[0] in ('base', *known)]
  a = schema.parse_arg(','.join(own), base='atlas', **known)
  base = importlib.import_module(f'configs.{a.base}')
  c = base.get_config(','.join(p for p in parts if p not in own))
  change(c, a)
  return c


def set_algorithm(c: ConfigDict, fields: Mapping[str, Any]) -> None:
  """Sets config.algorithm; fields of the base's advantage do not stay.

  There is no KL, as in `grpo`; algorithm.kl sets one.
  """
  c.algorithm.advantage_kw = {}
  c.algorithm.update({**fields, 'kl': 'none', 'kl_coef': 0.0})


def make_room(c: ConfigDict, longest: int = 0) -> None:
  """Lets the longest rows have so many tokens.

  0: twice as many as before, for a hint in a teacher's prompt.
  """
  longest = longest or 2 * c.batch.lengths[-1]
  if c.batch.prefix_tokens:
    c.batch.lengths = (longest,)
    c.batch.prefix_tokens = max(c.batch.prefix_tokens, longest)
  else:
    shorter = [n for n in c.batch.lengths if n < longest]
    c.batch.lengths = (*shorter, longest)
  c.batch.tokens = max(c.batch.tokens, longest)


def script(c: ConfigDict, **shares: float) -> None:
  """Sets behaviours of atlas's scripted traces (`worlds.atlas_traces.Mix`).

  For a warm start by the method's own config; other bases stay as they are.
  """
  if c.sft.data.get('module') == 'searchrl_jax.worlds.atlas_traces':
    c.sft.data.update(shares)


def set_traces(c: ConfigDict, traces: str, objective: str) -> None:
  """Puts traces into groups, with `objective` for their tokens.

  The rest is what LUFFY, RL-PLUS and AMPO share (AMPO has a mean in place of
  the sum): returns less the mean of the group, a sum over tokens that is
  divided by the most that can be sampled, entropy with 0.001, no KL.

  Args:
    traces: config.rollout.traces; '' = a field of that name of Question.meta,
      or the expert of a generated world.
    objective: the dotted path of `losses.mixed`'s.
  """
  most = (c.env.max_turns + 1) * c.env.max_turn_tokens
  fields = dict(loss='mixed', foreign_objective=objective, entropy_coef=0.001)
  fields['horizon'] = min(most, c.env.max_tokens)
  set_algorithm(c, algorithms.DR_GRPO | fields)
  c.rollout.sampler = 'traces'
  c.rollout.traces = traces_of(c, traces)


def traces_of(c: ConfigDict, traces: str) -> str:
  """config.rollout.traces; traces: see `set_traces`."""
  expert = 'searchrl_jax.worlds.atlas_traces.expert'
  return traces or ('traces' if c.model.path else expert)


def set_critic(c: ConfigDict) -> None:
  """Sets the critic's learning rate where the base recipe has none."""
  c.critic.lr = c.critic.lr or (1e-5 if c.model.path else 1e-3)


def chosen(name: str, value: str, of: Mapping[str, Any]) -> Any:
  """of[value], of a config argument.

  Raises:
    ConfigError: the argument has another value.
  """
  known = ', '.join(of)
  lookup.require(
    value in of, f'config argument {name}={value!r}: one of {known}'
  )
  return of[value]
