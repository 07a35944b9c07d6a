"""Commands, as `python -m` runs them, in the process of the tests."""

import contextlib
import io
import os
import runpy
import subprocess
import sys
from unittest import mock

from absl import app, flags
import pytest

from tests.conftest import ROOT

app.define_help_flags()  # which absl does once a process


def run(module: str, *args, stdin: str = '') -> subprocess.CompletedProcess:
  """What a process would answer, without the seconds of its imports.

  Flags that the command defined are forgotten after it.
  """
  before = set(flags.FLAGS)
  out, err = io.StringIO(), io.StringIO()
  argv = [f'{module.replace(".", "/")}.py', *map(str, args)]
  with (
    contextlib.chdir(ROOT),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    mock.patch('sys.argv', argv),
    mock.patch('sys.stdin', io.StringIO(stdin)),
    mock.patch.dict(os.environ, COLUMNS='100'),
    pytest.raises(SystemExit) as end,
  ):
    # A module that is imported already is not to be warned of here.
    own = module, f'{module}.__main__'
    known = {name: sys.modules.pop(name, None) for name in own}
    try:
      runpy.run_module(module, run_name='__main__', alter_sys=True)
    finally:
      sys.modules.update({k: v for k, v in known.items() if v})
      for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
  status = end.value.code or 0
  return subprocess.CompletedProcess(
    argv, status, out.getvalue(), err.getvalue()
  )
