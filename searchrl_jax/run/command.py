"""Flags, error messages and exit codes that all commands share.

An error that the user can fix is one line on stderr and exit code 2, without a
traceback (--verbosity=1 shows it). Any other error is a bug and keeps its
traceback.
"""

import ast
import contextlib
import os
import pathlib
import re
import sys
import traceback
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from searchrl_jax import lookup, schema
from searchrl_jax.devices import cluster, signals
from searchrl_jax.devices.signals import Stopped
from searchrl_jax.store import records, remote

_PACKAGES = ('__main__', 'searchrl_jax', 'retrieval', 'configs', 'experiments')

# What is defined here is the calling command's: `--help` shows it.
flags.disclaim_key_flags()


def define_config():
  """Defines --config, and --data_dir, which `run` passes on."""
  define_data_dir()
  holder = config_flags.DEFINE_config_file(
    'config',
    None,
    'Config file and its argument: configs/NAME.py:arg=value,...; set a field '
    'with --config.path.to.field=value. The docstring has the command.',
  )
  flags.mark_flag_as_required('config')
  flag = flags.FLAGS['config']
  flag.parser = _Rewards(flag.parser)
  return holder


def define_data_dir():
  return flags.DEFINE_string(
    'data_dir', '', 'Folder of data files, as SEARCHRL_DATA names it.'
  )


class _Rewards(flags.ArgumentParser):
  """Reads a config file; --config.reward.NAME.FIELD=... may add to it.

  ml_collections refuses flags of fields that a config does not have, and the
  names of rewards are free.
  """

  def __init__(self, file: flags.ArgumentParser):
    self._file = file
    self.syntactic_help = file.syntactic_help

  def parse(self, argument: str):
    config = self._file.parse(argument)
    for text in sys.argv:
      found = re.fullmatch(r'--config\.reward\.(\w+)\.(\w+)=(.*)', text, re.S)
      if not found or 'reward' not in config:
        continue
      name, field, value = found.groups()
      with config.unlocked():
        reward = config.reward.get(name)
        if reward is None:
          reward = config.reward[name] = ConfigDict(dict(fn='', weight=1.0))
        if field not in reward:  # its type is that of the value
          with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
          reward[field] = value
    return config

  def flag_type(self) -> str:
    return self._file.flag_type()


class _Workdir(flags.ArgumentParser):
  """A local folder: of a gs:// location, one that `remote` fills."""

  def __init__(self, opens: dict[str, bool] | None):
    self._opens = opens

  def parse(self, argument: str) -> str:
    if not remote.is_remote(argument):
      return argument
    if self._opens is None:
      raise ValueError('a local path is needed here; mount the bucket')
    return remote.open_run(argument, **self._opens)


def define_workdir(required: bool = True, opens: dict | None = None):
  """Defines --workdir, whose value is a local folder.

  opens: keywords of `remote.open_run`, for a command that takes gs://.
  """
  somewhere = ', or gs://BUCKET/FOLDER' * (opens is not None)
  resumed = '; its run is resumed' * bool(opens and opens.get('writes'))
  holder = flags.DEFINE(
    _Workdir(opens),
    'workdir',
    None,
    f'Run folder{somewhere}{resumed}.',
    required=required,
  )
  flags.register_validator(
    holder, lambda folder: folder != '', 'it is empty; name a folder'
  )
  return holder


def define_out(default: str | None, text: str, required: bool = False):
  """Defines --out, a local file or folder."""
  return flags.DEFINE(_Workdir(None), 'out', default, text, required=required)


def define_checkpoint():
  return flags.DEFINE_string(
    'checkpoint', 'latest', 'Of --workdir: latest, best, or a step.'
  )


def define_cluster() -> None:
  """Defines the flags by which `run` finds the other processes."""
  flags.DEFINE_string(
    'coordinator', '', 'HOST:PORT of process 0, if several processes run this.'
  )
  flags.DEFINE_integer('processes', 0, 'Their number.')
  flags.DEFINE_integer('process_id', -1, 'The number of this one, from 0 on.')


def parse_defined() -> list[str]:
  """Parses the flags defined so far and returns the other arguments."""
  try:
    return flags.FLAGS(sys.argv, known_only=True)[1:]
  except (flags.Error, records.RunError) as e:
    fail(str(e))


def _parse(argv):
  # ml_collections reads fields from sys.argv, and needs the file before them.
  rest = sorted(argv[1:], key=lambda x: not x.startswith('--config='))
  argv = sys.argv = [*argv[:1], *rest]
  if rest and rest[0].startswith('--config='):
    path = pathlib.Path(rest[0].removeprefix('--config=').split(':')[0])
    names = map(str, path.parent.glob('[!_]*.py'))
    if not path.is_file():
      fail(f'--config={path}: no such file; {lookup.near(str(path), names)}')
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    first, *more = str(e).strip().splitlines()
    # The message of a config file that raises ends with a traceback.
    first = first.removesuffix('Error whilst parsing config file:')
    if re.search("flag '(dry_run|topology)'", first):
      first += '; use `python -m searchrl_jax.doctor`'
    fail(first + (more[-1] if more else ''))
  except (KeyError, AttributeError) as e:
    # ml_collections raises these for unknown fields, with a repr of a repr.
    text = str(e.args[0] if e.args else e).replace('\\n', ' ')
    text = ' '.join(text.split()).replace("\\'", "'").strip('"\'')
    for name, new in schema.RENAMED.items():
      if f'--config.{name}' in ' '.join(argv):
        fail(f'config.{name} has been renamed: use config.{new}')
    fail(f'a --config.* flag names no field of the config: {text}')
  except (ValueError, TypeError, OSError, records.RunError) as e:
    fail(f'{type(e).__name__}: {e}')


def fail(message: str) -> NoReturn:
  """Prints an error and exits with code 2."""
  print(f'error: {message}', file=sys.stderr)
  sys.exit(2)


def run(main, positional=None):
  """Calls app.run, with one-line messages for errors that the user can fix.

  positional: flag that receives the arguments without a flag: as a list if its
    value is one, else joined by spaces.
  """

  def guarded(argv):
    if len(argv) > 1:
      if positional is None:
        fail(f'unexpected argument {argv[1]!r}; flags start with --')
      flag = flags.FLAGS[positional.name]
      many = isinstance(flag.value, list)
      flag.value = argv[1:] if many else ' '.join(argv[1:])
    given = flags.FLAGS
    if 'data_dir' in given and given.data_dir:
      os.environ['SEARCHRL_DATA'] = given.data_dir
    try:
      if 'coordinator' in given:
        names = given.coordinator, given.processes, given.process_id
        cluster.initialize(*names)
      out = main()
      remote.push_all()
      cluster.leave(None)
      return out
    except Stopped as e:
      with signals.after(e):  # what is left of a run
        remote.push_all()
      if cluster.leave(e):
        print(_message(e), file=sys.stderr)
      sys.exit(143)  # 128 + SIGTERM, as shells report it
    except Exception as e:
      tell = cluster.leave(e)
      with signals.after(e):  # what is left of a run
        remote.push_all()
      if not is_user_error(e):
        raise
      logging.debug('traceback of the error below', exc_info=True)
      if not tell:
        sys.exit(2)
      fail(_message(e))

  logging.set_verbosity(logging.WARNING)
  # Replacing the parser keeps absl's --help.
  app.run(guarded, flags_parser=_parse)


def _message(error: BaseException) -> str:
  """The message and the notes: errors of closing, see `Writer`."""
  return '\n'.join([str(error), *getattr(error, '__notes__', ())])


def is_user_error(error: BaseException) -> bool:
  """Whether the error's message is written for the user.

  True for OSError, which names its path, for error classes of this project, and
  for ValueError raised in this project's code.
  """
  source = type(error).__module__
  if type(error) is ValueError:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    source = frame.f_globals['__name__']
  return isinstance(error, OSError) or source.split('.')[0] in _PACKAGES
