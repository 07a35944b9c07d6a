"""Executes notebooks from nothing, and stores their outputs.

  .venv-notebooks/bin/python tools/notebooks.py             all of them
  .venv-notebooks/bin/python tools/notebooks.py '3_*'       those that match
  ... '3_*' --out=FOLDER                                    stores copies

Each has a kernel of its own. They run one after another in a temporary folder,
where those that follow find the warm start of the first. What differs from one
execution to the next (times, versions, widgets) is not stored.
"""

import argparse
import os
import pathlib
import sys
import tempfile
import time

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).resolve().parents[1]
METADATA = {
  'kernelspec': {
    'display_name': 'Python 3',
    'language': 'python',
    'name': 'python3',
  },
  'language_info': {'name': 'python'},
}


def execute(path: pathlib.Path, folder: str) -> nbformat.NotebookNode:
  """The notebook with the outputs of a fresh kernel of this environment.

  folder: where the kernel starts; it has to be outside of a clone.

  Raises:
    nbclient.exceptions.CellExecutionError: a cell failed.
  """
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(
    notebook,
    timeout=900,
    kernel_name='python3',
    record_timing=False,
    store_widget_state=False,
    resources={'metadata': {'path': folder}},
  )
  paths = filter(None, (str(ROOT), os.environ.get('PYTHONPATH')))
  client.execute(env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)))
  notebook.metadata = nbformat.from_dict(METADATA)
  return notebook


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('names', nargs='?', default='*', help='default: all')
  parser.add_argument('--workdir', help='instead of a temporary folder')
  parser.add_argument('--out', type=pathlib.Path, default=ROOT / 'notebooks')
  args = parser.parse_args()
  paths = sorted((ROOT / 'notebooks').glob(f'{args.names}.ipynb'))
  if not paths:
    sys.exit(f'error: no notebook matches {args.names!r}')
  with tempfile.TemporaryDirectory() as folder:
    for path in paths:
      begin = time.monotonic()
      notebook = execute(path, args.workdir or folder)
      nbformat.write(notebook, args.out / path.name)
      print(f'{path.name}: {time.monotonic() - begin:.0f} s', flush=True)


if __name__ == '__main__':
  main()
