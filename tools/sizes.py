"""Prints how many lines of code the folders of this repository have.

  python tools/sizes.py
  python tools/sizes.py searchrl_jax/engines --limit=300

A line of code is a physical line after `ruff format` that is not blank, not a
comment and not part of a docstring. Files above the limit are listed below
their folder. The script reports and enforces nothing: its exit status is 0.
"""

import argparse
import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ('searchrl_jax', 'retrieval', 'experiments', 'configs', 'tests')
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: pathlib.Path) -> int:
  """Lines of a Python file without blanks, comments and docstrings."""
  text = path.read_text()
  docstrings = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
      first = node.body[0]
      docstrings.update(range(first.lineno, first.end_lineno + 1))
  return sum(
    bool(line.strip())
    and not line.lstrip().startswith('#')
    and number not in docstrings
    for number, line in enumerate(text.split('\n'), 1)
  )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    'folders', nargs='*', default=FOLDERS, help='default: %(default)s'
  )
  parser.add_argument(
    '--limit',
    type=int,
    default=450,
    help='list files with more lines of code than this; default: %(default)s',
  )
  args = parser.parse_args()
  print(f'{"folder":14} {"lines":>7} {"files":>6}')
  for folder in args.folders:
    counts = {p: code_lines(p) for p in sorted((ROOT / folder).rglob('*.py'))}
    print(f'{folder:14} {sum(counts.values()):7,} {len(counts):6,}')
    for path, lines in counts.items():
      if lines > args.limit:
        print(f'  above {args.limit}: {path.relative_to(ROOT)} {lines:,}')


if __name__ == '__main__':
  main()
