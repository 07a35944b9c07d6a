"""What every command shares: flags, clear errors, exit codes.

An error that a user can mend is one line on stderr and exit code 2, without a
traceback (--verbosity=1 shows it); anything else is a bug and keeps its own.
"""

import linecache
import os
import pathlib
import sys
import traceback

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from searchrl_jax.run import lookup
from searchrl_jax.run.signals import Stopped


def define_config(required: bool = True):
  """--config, and --data_dir, which `run` passes on."""
  define_data_dir()
  holder = config_flags.DEFINE_config_file(
    'config',
    None,
    'Config file and its argument: configs/NAME.py:arg=value,...; one field '
    "is --config.path.to.field=value. The file's docstring has the command, "
    'the runtime and the expected numbers.',
  )
  if required:
    flags.mark_flag_as_required('config')
  return holder


def define_data_dir():
  return flags.DEFINE_string(
    'data_dir',
    '',
    'Folder of the data that a config names by file; the same '
    'as SEARCHRL_DATA. config.data.dir counts first.',
  )


def define_workdir(required: bool = True):
  return flags.DEFINE_string(
    'workdir',
    None,
    'Run folder: config, metrics, trajectories, checkpoints. The same folder '
    'again goes on where the run stopped.',
    required=required,
  )


def _parse(argv):
  # ml_collections looks into sys.argv for the fields to change, and wants the
  # file before them.
  rest = sorted(argv[1:], key=lambda x: not x.startswith('--config='))
  argv = sys.argv = [*argv[:1], *rest]
  for arg in argv[1:2]:
    path = arg.removeprefix('--config=').split(':')[0]
    given = arg.startswith('--config=')
    if given and not pathlib.Path(path).is_file():
      there = map(str, pathlib.Path(path).parent.glob('[!_]*.py'))
      _fail(f'--config={path}: no such file; ' + lookup.near(path, there))
  try:
    return flags.FLAGS(argv)
  except flags.UnrecognizedFlagError as e:
    _fail(f'{e} (--help lists the flags, --helpfull all of them)')
  except flags.Error as e:
    # A config file that raises comes with a traceback that ends with why.
    lines = str(e).strip().splitlines()
    if lines[0].endswith('must have a value other than None.'):
      lines = [f'{lines[0].split("=")[0].removeprefix("flag ")} is missing']
    if len(lines) > 1:
      lines = [
        lines[0].removesuffix('Error whilst parsing config file:'),
        lines[-1],
      ]
    _fail(''.join(lines))
  except (KeyError, AttributeError) as e:
    # What ml_collections raises for a field that the config lacks.
    # Its text has been through repr() twice.
    said = str(e.args[0] if e.args else e).replace('\\n', ' ')
    said = said.replace('\n', ' ').replace("\\'", "'").strip('"')
    if said[:1] == said[-1:] == "'":
      said = said[1:-1]
    _fail(f'a --config.* flag names no field of the config: {said}')
  except (ValueError, TypeError, OSError) as e:
    _fail(f'{type(e).__name__}: {e}')


def _fail(*lines: str):
  for line in lines:
    print(f'error: {line}', file=sys.stderr)
  sys.exit(2)


def run(main, positional=None):
  """app.run with one-line errors for what the user can mend.

  positional: a flag that takes what stands without a flag: all of it, if its
    value is a list, else joined by spaces.
  """

  def guarded(argv):
    if len(argv) > 1:
      if positional is None:
        _fail(f'unexpected argument {argv[1]!r}; flags start with --')
      flag = flags.FLAGS[positional.name]
      many = isinstance(flag.value, list)
      flag.value = argv[1:] if many else ' '.join(argv[1:])
    if 'data_dir' in flags.FLAGS and flags.FLAGS.data_dir:
      os.environ['SEARCHRL_DATA'] = flags.FLAGS.data_dir
    try:
      return main()
    except Stopped as e:
      print(e, file=sys.stderr)
      sys.exit(143)  # 128 + SIGTERM, as a shell reports it
    except Exception as e:
      if not mendable(e):
        raise
      logging.debug('the error below came from here', exc_info=True)
      _fail(str(e))

  logging.set_verbosity(logging.WARNING)
  # Passing the guard as the parser keeps `--help` as absl prints it.
  app.run(guarded, flags_parser=_parse)


_PACKAGES = ('__main__', 'searchrl_jax', 'retrieval', 'configs', 'experiments')


def mendable(error: BaseException) -> bool:
  """Whether the message was written for the user.

  So it was for an OSError, which names its path, for error classes of our
  packages, and for a ValueError of a `raise` statement there: these name the
  field, the file or the line. One that a function of Python, numpy or JAX
  raised is a bug.
  """
  source = type(error).__module__
  if type(error) is ValueError:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    source = frame.f_globals['__name__']
    said = linecache.getline(frame.f_code.co_filename, line)
    source = source if said.lstrip().startswith('raise ') else ''
  return isinstance(error, OSError) or source.split('.')[0] in _PACKAGES


def to_dict(config: ConfigDict) -> dict:
  """Plain, JSON-able."""
  return config.to_dict(preserve_field_references=False)
