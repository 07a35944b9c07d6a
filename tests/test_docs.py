"""Documentation: links lead to files, and the examples run as written."""

import ast
import importlib
import json
import re
import subprocess
import sys
import types

import pytest

import configs
from tests.conftest import ROOT

FOLDERS = ('docs', 'experiments', 'retrieval', 'searchrl_jax', 'tools')
PAGES = sorted(
  p.relative_to(ROOT).as_posix()
  for p in [
    *ROOT.glob('*.md'),
    *(p for folder in FOLDERS for p in (ROOT / folder).rglob('*.md')),
  ]
)
# Pages that tell what was, under the names of that time.
HISTORY = ('CHANGELOG.md', 'experiments/LOG.md')
FILE = re.compile(
  r'`((?:searchrl_jax|retrieval|configs|experiments|tests|tools|docs)/'
  r'[\w./-]+\.(?:py|md|json|sh|png))'
)
OURS = 'searchrl_jax', 'retrieval', 'configs', 'experiments'
EXTENDING = (ROOT / 'docs/extending.md').read_text()
SECTIONS = re.findall(r'^## (Add an? .*)$', EXTENDING, re.M)


def prose(text: str) -> str:
  """A page without its fenced code."""
  return re.sub(r'^```.*?^```', '', text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
  """What GitHub names the headings of a page."""
  headings = re.findall(r'^#+ (.*)$', prose(text), re.M)
  return {
    re.sub(r'[^\w\- ]', '', h.lower()).strip().replace(' ', '-')
    for h in headings
  }


@pytest.mark.parametrize('page', PAGES)
def test_links_lead_to_files(page):
  path = ROOT / page
  broken = []
  for target in re.findall(r'\]\(([^)\s]+)\)', prose(path.read_text())):
    if re.match(r'[a-z]+:', target):
      continue
    name, _, anchor = target.partition('#')
    file = path.parent / name if name else path
    if not file.exists():
      broken.append(target)
    elif anchor and anchor not in anchors(file.read_text()):
      broken.append(f'{target}: no such heading')
  assert broken == []


@pytest.mark.parametrize('page', [p for p in PAGES if p not in HISTORY])
def test_files_that_pages_name_exist(page):
  named = set(FILE.findall(prose((ROOT / page).read_text())))
  assert [
    n for n in sorted(named) if not (ROOT / n).exists() and '/mine' not in n
  ] == []


def test_what_code_cites_of_the_design_exists():
  page = (ROOT / 'docs/architecture.md').read_text()
  known = set(re.findall(r'^## (\d+)\.', page, re.M))
  invariants = page.split('## 5. ')[1].split('\n## ')[0]
  known |= {f'5.{n}' for n in re.findall(r'^(\d+)\. \*\*', invariants, re.M)}
  assert '5.15' in known and '9' in known
  cited = {
    (path.relative_to(ROOT).as_posix(), number)
    for folder in ('searchrl_jax', 'retrieval', 'configs', 'tests')
    for path in (ROOT / folder).rglob('*.py')
    for number in re.findall(r'[Dd]esign,? (\d[\d.]*\d|\d)', path.read_text())
  }
  assert cited and [c for c in cited if c[1] not in known] == []


def test_the_walk_to_a_sampled_token_is_in_the_code():
  """Each function calls the next, or hands it to the one between them."""
  page = (ROOT / 'docs/reading.md').read_text()
  walk = page.split('Ten calls:\n\n')[1].split('\n\n')[0].split('->')
  *names, last = (step.split('.')[-1].strip() for step in walk)
  assert len(names) == 10 and last == 'generate'
  called = {}
  for file in ('core', 'chains', 'collector', '../devices/signals'):
    path = ROOT / 'searchrl_jax/rollout' / f'{file}.py'
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
        called[node.name] = {getattr(f, 'attr', '') for f in calls}
        called[node.name] |= {getattr(f, 'id', '') for f in calls}
  # The default of config.rollout.sampler, which `sampler` looks up.
  called['sampler'] |= {'sample'}
  steps = zip(['take', *names], names, [*names[1:], last])
  for before, name, after in steps:
    assert after in called[name] | called[before], (name, after)


@pytest.fixture
def contributor(tmp_path, monkeypatch):
  """Writes the files of docs/extending.md where imports find them."""
  for name in ('mine', 'configs'):
    (tmp_path / name).mkdir()
  for path, code in re.findall(
    r'^```python\n# file: (\S+)\n(.*?)^```', EXTENDING, re.M | re.S
  ):
    (tmp_path / path).write_text(code)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setattr(
    configs, '__path__', [*configs.__path__, str(tmp_path / 'configs')]
  )
  importlib.invalidate_caches()
  yield
  for name in [m for m in sys.modules if m.split('.')[0] == 'mine']:
    del sys.modules[name]
  sys.modules.pop('configs.mine', None)
  vars(configs).pop('mine', None)


@pytest.mark.parametrize('section', SECTIONS)
def test_examples_of_contributing_run(section, contributor):
  text = EXTENDING.split(f'## {section}\n')[1].split('\n## ')[0]
  tried = 0
  for code in re.findall(r'^```python\n(.*?)^```', text, re.M | re.S):
    kind, _, target = code.partition('\n')[0].partition(': ')
    if kind == '# file':
      compile(code, target, 'exec')
    else:
      exec(compile(code, f'extending.md, {section}', 'exec'), {})
      tried += 1
  assert tried == 1


def test_sizes_are_printed():
  done = subprocess.run(
    [sys.executable, 'tools/sizes.py', 'configs', '--limit=1'],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
  )
  assert re.search(r'^configs +[\d,]+ +\d+$', done.stdout, re.M)
  assert 'above 1: configs/quickstart.py' in done.stdout


@pytest.mark.parametrize('path', sorted((ROOT / 'notebooks').glob('*.ipynb')))
def test_a_notebook_uses_names_that_exist(path):
  cells = json.loads(path.read_text())['cells']
  lines = [
    line.rstrip()
    for cell in cells
    if cell['cell_type'] == 'code'
    for line in ''.join(cell['source']).splitlines()
    if not line.lstrip().startswith(('!', '%'))
  ]
  tree, modules = ast.parse('\n'.join(lines)), {}
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.module.startswith(OURS):
      for alias in node.names:
        found = importlib.import_module(node.module)
        if not hasattr(found, alias.name):
          importlib.import_module(f'{node.module}.{alias.name}')
        value = getattr(found, alias.name)
        if isinstance(value, types.ModuleType):
          modules[alias.asname or alias.name] = value
  assert modules
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
      module = modules.get(node.value.id)
      assert module is None or hasattr(module, node.attr), ast.unparse(node)
