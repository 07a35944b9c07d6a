"""Notebooks run from nothing, and what is committed is what they show."""

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PATHS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
each = pytest.mark.parametrize('path', PATHS, ids=lambda path: path.stem)


def cells(path: pathlib.Path, kind: str = 'code') -> list[dict]:
  content = json.loads(path.read_text())
  return [cell for cell in content['cells'] if cell['cell_type'] == kind]


def shape(path: pathlib.Path) -> list[list]:
  """What each cell shows: the streams and types of its outputs."""
  return [
    [out.get('name') or sorted(out['data']) for out in cell['outputs']]
    for cell in cells(path)
  ]


def test_there_are_six():
  assert [path.stem[0] for path in PATHS] == [*'123456']
  assert len({''.join(cells(path)[0]['source']) for path in PATHS}) == 1


@each
def test_outputs_are_committed_and_compact(path):
  code = cells(path)
  counts = [cell['execution_count'] for cell in code]
  assert counts == [*range(1, len(code) + 1)]
  outputs = [out for cell in code for out in cell['outputs']]
  assert not [o for o in outputs if o['output_type'] == 'error']
  assert not [o for o in outputs if o.get('name') == 'stderr']
  assert any('image/png' in o.get('data', ()) for o in outputs)
  text = json.dumps(
    [o.get('text') or o['data'].get('text/plain') for o in outputs]
  )
  assert not re.search(r'/home|/root|/tmp|/work|127\.0\.0\.1:\d', text)
  assert path.stat().st_size < 600_000


@each
def test_links_lead_to_files(path):
  text = ''.join(''.join(cell['source']) for cell in cells(path, 'markdown'))
  targets = re.findall(r'\]\((?![a-z]+:)([^)#\s]+)', text)
  assert [t for t in targets if not (path.parent / t).exists()] == []


def environment() -> dict[str, str]:
  """Without what tests/conftest.py sets for the programs of the tests."""
  return {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Where all of them run: the warm start that they share is made once."""
  return tmp_path_factory.mktemp('notebooks')


@pytest.mark.notebook
@pytest.mark.timeout(1200)
@each
def test_a_notebook_runs(path, folder, tmp_path):
  if path.stem.startswith('6'):
    pytest.importorskip('gguf', reason='notebook 6 needs gguf')
    if not os.environ.get('SEARCHRL_DATA'):
      pytest.skip('notebook 6 needs the data that SEARCHRL_DATA names')
  subprocess.run(
    [
      *(sys.executable, 'tools/notebooks.py', path.stem),
      *(f'--workdir={folder}', f'--out={tmp_path}'),
    ],
    cwd=ROOT,
    env=environment(),
    check=True,
  )
  assert shape(tmp_path / path.name) == shape(path)


def closure(name: str, found: set[str]) -> set[str]:
  """A distribution and those that it needs here."""
  if name not in found:
    found.add(name)
    for line in importlib.metadata.requires(name) or ():
      if 'extra ==' not in line:
        try:
          needed = re.match(r'[\w.-]+', line)[0]
          closure(importlib.metadata.distribution(needed).name, found)
        except importlib.metadata.PackageNotFoundError:
          pass  # for another system
  return found


@pytest.mark.notebook
@pytest.mark.parametrize('clone', [False, True])
def test_a_kernel_without_the_package_gets_one_sentence(clone, tmp_path):
  """clone: the notebook lies in a clone whose requirements are absent."""
  import nbclient
  import nbformat

  # An interpreter with a kernel and nothing else.
  venv = tmp_path / 'venv'
  subprocess.run(
    [sys.executable, '-m', 'venv', '--without-pip', venv], check=True
  )
  (packages,) = venv.glob('lib/python*/site-packages')
  for name in closure('ipykernel', set()):
    there = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in there.files}:
      source = pathlib.Path(there.locate_file(top))
      if source.exists() and top not in ('..', '__pycache__'):
        (packages / top).symlink_to(source)
  kernel = tmp_path / 'jupyter' / 'kernels' / 'bare'
  kernel.mkdir(parents=True)
  argv = [f'{venv}/bin/python', *'-m ipykernel_launcher -f'.split()]
  spec = {'argv': [*argv, '{connection_file}'], 'display_name': 'bare'}
  (kernel / 'kernel.json').write_text(json.dumps(spec))

  notebook = nbformat.read(PATHS[0], as_version=4)
  for cell in notebook.cells:
    cell.pop('outputs', None)  # of the notebook as it is stored
  start = ROOT / 'notebooks' if clone else tmp_path
  with pytest.MonkeyPatch.context() as m:
    m.setenv('JUPYTER_PATH', f'{tmp_path}/jupyter')
    m.delenv('PYTHONPATH', raising=False)
    client = nbclient.NotebookClient(
      notebook, kernel_name='bare', resources={'metadata': {'path': str(start)}}
    )
    with pytest.raises(nbclient.exceptions.CellExecutionError):
      client.execute(env=environment())
  (shown,) = [o for cell in notebook.cells for o in cell.get('outputs', ())]
  (sentence,) = shown.traceback
  assert sentence.startswith('This kernel cannot import searchrl_jax (No modul')
  assert '. ' not in sentence and '`make setup-notebooks`' in sentence
