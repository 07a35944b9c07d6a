"""Finds modules, functions and fields by name; checks config fields."""

from collections.abc import Callable, Collection, Iterator, Mapping
import contextlib
import difflib
import importlib
import inspect
import pathlib
import pkgutil
from typing import Any


class ConfigError(ValueError):
  """An invalid config field; the message names it and says how to fix it."""


def require(good: Any, message: str, error: type[Exception] = ConfigError):
  """Raises `error` unless `good`; `message` names field and fix."""
  if not good:
    raise error(message)


@contextlib.contextmanager
def of(
  field: str, error: type[Exception] = ConfigError, caught: Any = ValueError
) -> Iterator[None]:
  """Names the field, or the file, in an error of what it names or holds.

  caught: the type of such errors, or several.
  """
  try:
    yield
  except caught as e:
    raise error(f'{field}: {e}') from e


def require_content(file: pathlib.Path) -> None:
  """Raises ConfigError if a file is what Git LFS left in its place."""
  pointer = b'version https://git-lfs.github.com/spec/'
  if file.is_file():
    with file.open('rb') as opened:
      require(
        opened.read(len(pointer)) != pointer,
        f'{file}: a Git LFS pointer in place of the file; run `git lfs pull` '
        'in that clone, or download it from the hub',
      )


def require_contents(
  folder,
  before: Mapping[str, Any],
  now: Mapping[str, Any],
  error: type[Exception] = ConfigError,
) -> None:
  """Compares what a folder was made with, by content, to what there is now.

  Names that one of the two lacks are not known.
  """
  for name in before.keys() & now.keys():
    require(
      before[name] == now[name],
      f'{folder} was made with another content of {name}: {before[name]} there '
      f'and {now[name]} now. Restore what it was, or choose another folder',
      error,
    )


def near(name: str, names) -> str:
  """'did you mean x?', or the list of names, for error messages."""
  names = sorted(names)
  close = difflib.get_close_matches(name, names, n=3)
  if close:
    return f'did you mean {" or ".join(map(repr, close))}?'
  return f'there are: {", ".join(names)}'


def module(package: str, name: str) -> Any:
  """Imports `package.name`, or `name` itself if it has a dot.

  Raises:
    ValueError: no such module; the message lists the ones that exist.
  """
  path = name if '.' in name else f'{package}.{name}'
  if path != name:
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = {m.name for m in found} - {'core'}
    if name not in names:
      raise ValueError(f'no module {name!r} in {package}: {near(name, names)}')
  try:
    return importlib.import_module(path)
  except ModuleNotFoundError as e:
    if not path.startswith(e.name or ' '):
      raise  # of a module that it imports
    raise ValueError(f'no module {path!r} (asked for as {name!r})') from e


def function(package: str, name: str, home: str = '') -> Any:
  """Finds 'module.function' below `package` (or a full dotted path).

  home: the module of a name without a dot, if such names are allowed. A module
  with a list NAMES offers these alone by such names.
  """
  mod_name, _, attr = name.rpartition('.')
  mod_name = mod_name or home
  require(
    mod_name,
    f'{name!r} must be "module.function" of {package}, or a full dotted path',
    ValueError,
  )
  mod = module(package, mod_name)
  # A dotted path may name any function.
  known = getattr(mod, 'NAMES', None) if '.' not in name else None
  if attr not in known if known else not hasattr(mod, attr):
    public = [n for n, v in vars(mod).items() if callable(v) and n[0] != '_']
    names = known or public
    raise ValueError(f'no {attr!r} in {mod.__name__}: {near(attr, names)}')
  return getattr(mod, attr)


def sampler(name: str) -> Callable:
  """The function that config.rollout.sampler names.

  name: the module of a function `sample` in searchrl_jax.rollout, or the dotted
    path of a function.

  Raises:
    ConfigError: there is none.
  """
  with of('config.rollout.sampler'):
    path = name if '.' in name else f'{name}.sample'
    return function('searchrl_jax.rollout', path)


def fields(fn: Callable) -> dict[str, inspect.Parameter]:
  """The keyword-only parameters of a function: fields of its config."""
  parameters = inspect.signature(fn).parameters.values()
  return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}


def arguments(fn: Callable, part: Mapping[str, Any], where: str) -> dict:
  """The values of a function's fields in the part of a config that names it.

  Args:
    part: such as config.rollout.
    where: the field that names the function: 'config.rollout.sampler'.

  Raises:
    ConfigError: `part` lacks a field of the function.
  """
  prefix, _, field = where.rpartition('.')
  for name in fields(fn):
    require(
      name in part,
      f'{where}={part[field]!r} takes the field {name!r}: add {prefix}.{name}',
    )
  return {name: part[name] for name in fields(fn)}


def inputs(fn: Callable) -> tuple[str, ...]:
  """The positional parameters of a function: what it is handed at a call."""
  parameters = inspect.signature(fn).parameters.values()
  return tuple(p.name for p in parameters if p.kind <= p.POSITIONAL_OR_KEYWORD)


def require_fields(
  where: str,
  fn: Callable,
  given: Collection[str],
  error: type[Exception] = ConfigError,
) -> None:
  """Checks the keyword-only arguments `given` to `fn`: known, none missing.

  Raises:
    error: names the unknown or missing field.
  """
  known = fields(fn)
  for name in given:
    hint = near(name, known) if known else 'it has none'
    message = f'{where}.{name} is no field of {fn.__name__}: {hint}'
    require(name in known, message, error)
  for name, p in known.items():
    require(
      name in given or p.default is not p.empty,
      f'{where} has no field {name!r}, which {fn.__name__} needs',
      error,
    )


def require_format(where: str, text: str, *names: str) -> None:
  """Checks that str.format fills in a text with these names alone.

  Raises:
    ConfigError: names the field, and what the text may have.
  """
  try:
    text.format(**dict.fromkeys(names, ''))
  except (LookupError, ValueError, AttributeError) as e:
    known = ', '.join(f'{{{name}}}' for name in names)
    raise ConfigError(f'{where}={text!r} may have {known} ({e!r})') from e


def differences(before: Any, now: Any, at: str = '') -> dict[str, list]:
  """Fields in which two JSON values differ: {path: [before, now]}.

  None stands for a field that is absent.
  """
  if not (isinstance(before, dict) and isinstance(now, dict)):
    return {} if before == now else {at: [before, now]}
  out = {}
  for name in sorted({*before, *now}):
    path = f'{at}.{name}' if at else name
    out |= differences(before.get(name), now.get(name), path)
  return out
