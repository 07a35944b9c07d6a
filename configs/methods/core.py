"""Methods as changes of a base recipe.

  python -m searchrl_jax.train --config=configs/methods/NAME.py \\
    --workdir=runs/x --config.train.init=runs/even
  python -m searchrl_jax.train --workdir=runs/x \\
    --config=configs/methods/NAME.py:base=search_r1,model=Qwen/Qwen2.5-3B

A file of this folder is a method: its docstring has the source and where it
departs from it, `get_config` its fields, and functions that no other method
uses stand beside it (`configs.methods.NAME.fn` in the config). It is deleted
with its row in experiments/arena/.

Its arguments are `base`, the recipe that it changes (atlas, search_r1, ...:
`configs/BASE.py`), the method's own, and those of the base.
"""

from collections.abc import Callable
import importlib

from ml_collections import ConfigDict

from searchrl_jax.run import schema


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
