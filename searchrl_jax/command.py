"""What every command shares: flags, clear errors, exit codes.

An error that a user can mend is one line on stderr and exit code 2, without a
traceback; anything else is a bug and keeps its traceback.
"""

import os
import sys

from absl import app
from absl import flags
from absl import logging
from ml_collections import ConfigDict, config_flags


class UserError(ValueError):
  """Something the user can mend; the message says what and how."""


def define_config(default: str | None = None):
  return config_flags.DEFINE_config_file(
    'config', default,
    'Config file and its argument: configs/NAME.py:arg=value,...; one field '
    'is --config.path.to.field=value. The file\'s docstring has the command, '
    'the runtime and the expected numbers.',
  )


def define_workdir(required: bool = True):
  return flags.DEFINE_string(
    'workdir', None,
    'Run folder: config, metrics, trajectories, checkpoints. The same folder '
    'again goes on where the run stopped.', required=required,
  )


def _parse(argv):
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    _fail(str(e), 'pass --help for the flags, --helpfull for all of them')
  except (KeyError, AttributeError) as e:
    # What ml_collections raises for a field that the config lacks.
    lines = str(e.args[0] if e.args else e).replace('\\n', '\n')
    _fail(
      'a --config.* flag names no field of the config: '
      + lines.strip('"\'').replace('\n', ' ')
    )
  except (ValueError, TypeError, OSError) as e:
    _fail(f'{type(e).__name__}: {e}')


def _fail(*lines: str):
  for line in lines:
    print(f'error: {line}', file=sys.stderr)
  sys.exit(2)


def run(main):
  """app.run with one-line errors for what the user can mend."""

  def guarded(argv):
    if len(argv) > 1:
      _fail(f'unexpected argument {argv[1]!r}; flags start with --')
    try:
      return main()
    except _mendable() as e:
      logging.debug('the error below came from here', exc_info=True)
      _fail(f'{type(e).__name__}: {e}')

  logging.set_verbosity(logging.WARNING)
  # Passing the guard as the parser keeps `--help` as absl prints it.
  app.run(guarded, flags_parser=_parse)


def _mendable():
  # Imported late: a command that only parses flags needs none of them.
  from searchrl_jax.engines.core import EngineError, SyncError
  from searchrl_jax.sources.core import SourceError
  return (
    UserError, EngineError, SyncError, SourceError, FileNotFoundError,
  )


def use_cpu_threads_quietly():
  """Settings that must stand before JAX starts."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')


def to_dict(config: ConfigDict) -> dict:
  """Plain, JSON-able."""
  return config.to_dict(preserve_field_references=False)
