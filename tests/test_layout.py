"""The layout holds: imports point up, and light files import no JAX."""

import ast
import graphlib
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import ROOT

# Modules and folders in the order of their imports: each imports only what
# stands before it, and within a folder no file imports in a circle (design 3).
# Nothing before the wings imports one.
WINGS = ('aot', 'doctor', 'read', 'view', 'sweep', 'serve')
ORDER = """
  types lookup devices schema store models engines text data sources rewards
  worlds endpoint rollout run learn checks evaluate export fetch prune sft ask
  train
""".split()
ORDER += WINGS
RETRIEVAL_ORDER = """
  files metrics process proxies retry corpus devices core index download
  replicas client web serve build_index server search
""".split()
# What a sidecar or a client runs must not pull in JAX.
LIGHT = (
  'types',
  'lookup',
  'rewards.scores',
  'text.prompts',
  'text.tokenizer',
  'models.families',
  'models.hf_config',
  'models.hf_tensors',
  'engines.core',
  'sources.core',
  'sources.calculator',
  'sources.service',
  'text.env',
  'data.core',
  'rewards.answer',
  'rollout.collector',
  'devices.signals',
  'engines.weights.delta',
  'engines.weights.published',
  'engines.vllm.plugin',
  'engines.vllm.launcher',
  'engines.vllm.transport',
)


def modules():
  package = ROOT / 'searchrl_jax'
  for path in sorted(package.rglob('*.py')):
    name = '.'.join(path.relative_to(package).with_suffix('').parts)
    if path.name == '__init__.py':
      name = name.removesuffix('__init__').rstrip('.')
    yield name, path


def imported(path: pathlib.Path):
  """Every module that a file imports, imports inside functions too."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      yield from ((a.name, node.lineno) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}:{node.lineno}: relative import'
      for alias in node.names:
        yield f'{node.module}.{alias.name}', node.lineno


@pytest.mark.parametrize(
  'package, order', [('searchrl_jax', ORDER), ('retrieval', RETRIEVAL_ORDER)]
)
def test_imports_point_up(package, order):
  folder = ROOT / package
  files = {
    '.'.join(path.relative_to(folder).with_suffix('').parts): path
    for path in folder.rglob('*.py')
    if path.name != '__init__.py'
  }
  assert {name.partition('.')[0] for name in files} == {*order}
  down, graph = [], {}
  for name, path in files.items():
    graph[name] = set()
    own = name.partition('.')[0]
    for target, line in imported(path):
      if not target.startswith(f'{package}.'):
        continue
      target = target.removeprefix(f'{package}.')
      while target and target not in files:  # a name in a file
        target = target.rpartition('.')[0]
      graph[name] |= {target} - {'', name}
      of = target.partition('.')[0]
      if of and of != own and order.index(of) > order.index(own):
        down.append(f'{path.relative_to(ROOT)}:{line} imports {target}')
  assert down == []
  graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_nothing_before_the_wings_imports_one():
  wings = tuple(f'searchrl_jax.{name}' for name in WINGS)
  bad = [
    f'{path.relative_to(ROOT)}:{line} imports {target}'
    for name, path in modules()
    if name.partition('.')[0] not in WINGS
    for target, line in imported(path)
    if target.startswith(wings)
  ]
  assert bad == []


def test_retrieval_stands_alone():
  bad = []
  for path in (ROOT / 'retrieval').rglob('*.py'):
    for target, line in imported(path):
      if target.split('.')[0] in ('searchrl_jax', 'configs', 'experiments'):
        bad.append(f'{path.relative_to(ROOT)}:{line} imports {target}')
  assert bad == []


def test_packages_import_nothing_of_weight():
  heavy = [
    f'{path}:{line} imports {target}'
    for _, path in modules()
    if path.name == '__init__.py'
    for target, line in imported(path)
    if target.split('.')[0] not in sys.stdlib_module_names
  ]
  assert heavy == []


@pytest.mark.parametrize('given', [None, 'glibc.malloc.check=0'])
@pytest.mark.skipif(sys.platform != 'linux', reason='a setting of glibc')
def test_make_asks_for_huge_pages_unless_told(given, tmp_path):
  (tmp_path / 'show.mk').write_text('show:\n\t@echo $$GLIBC_TUNABLES\n')
  env = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  env |= {'GLIBC_TUNABLES': given} if given else {}
  done = subprocess.run(
    [
      'make',
      '--no-print-directory',
      '-f',
      'Makefile',
      '-f',
      tmp_path / 'show.mk',
      'show',
    ],
    cwd=ROOT,
    env=env,
    check=True,
    capture_output=True,
    text=True,
  )
  assert done.stdout.strip() == (given or 'glibc.malloc.hugetlb=1')


def test_light_files_import_no_jax():
  code = """
import importlib, sys
for name in sys.argv[1:]:
  importlib.import_module(f'searchrl_jax.{name}')
  if {'jax', 'flax'} & {*sys.modules}:
    sys.exit(f'searchrl_jax.{name} imports JAX')
"""
  command = [sys.executable, '-c', code, *LIGHT]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


# Names under which packages of other names are imported.
DISTRIBUTIONS = {
  'absl': 'absl-py',
  'faiss': 'faiss-cpu',
  'grpc': 'grpcio',
  'huggingface_hub': 'huggingface-hub',
  'ml_collections': 'ml-collections',
  'ml_dtypes': 'ml-dtypes',
  'orbax': 'orbax-checkpoint',
  'prometheus_client': 'prometheus-client',
  'Stemmer': 'pystemmer',
  'tensorflow_datasets': 'tensorflow-datasets',
}
# Extras of what only some modules import; the rest needs no extra.
EXTRAS = {
  'retrieval': ('retrieval',),
  'searchrl_jax/data/tfds.py': ('tfds',),
  'searchrl_jax/data/verifiers.py': ('verifiers',),
  'searchrl_jax/engines/vllm/hashes.py': ('vllm',),
  'searchrl_jax/engines/vllm/plugin.py': ('vllm',),
  'searchrl_jax/models/gguf.py': ('gguf',),
  'searchrl_jax/sources/mcp.py': ('mcp',),
  'searchrl_jax/store/trackers.py': ('wandb',),
  'searchrl_jax/evaluate/compare.py': ('sweep',),
  'searchrl_jax/sweep/figures.py': ('sweep',),
}


def names(requirements) -> set[str]:
  """Package names of requirement strings, lower case."""
  return {re.split(r'[^\w.-]', r)[0].lower() for r in requirements}


LOOPS = {
  'searchrl_jax/train.py': '_train',
  'searchrl_jax/sft.py': '_sft',
  'experiments/ssp/train.py': '_train',
}


def loop_lines(path: str) -> list[str]:
  """Lines of code of a file, without blanks, comments and docstrings."""
  text = (ROOT / path).read_text()
  tree, skip = ast.parse(text), set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
      if ast.get_docstring(node) is not None:
        skip |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
  return [
    line.strip()
    for n, line in enumerate(text.splitlines(), 1)
    if n not in skip and line.strip() and not line.strip().startswith('#')
  ]


@pytest.mark.parametrize('path, name', LOOPS.items())
def test_a_loop_fits_on_two_pages_and_nests_no_function(path, name):
  text = (ROOT / path).read_text()
  (loop,) = (
    node
    for node in ast.parse(text).body
    if isinstance(node, ast.FunctionDef) and node.name == name
  )
  nested = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
  assert not any(isinstance(n, nested) for n in ast.walk(loop) if n is not loop)
  first = loop.body[1].lineno  # after the docstring
  lines = text.splitlines()[first - 1 : loop.end_lineno]
  code = [x for x in lines if x.strip() and not x.strip().startswith('#')]
  assert len(code) <= 120


@pytest.mark.parametrize('path', [*LOOPS][1:])
def test_loops_share_no_six_lines_with_train(path):
  def runs(path):
    lines = loop_lines(path)
    return {
      tuple(lines[i : i + 6])
      for i in range(len(lines) - 5)
      # Closing brackets and imports are no logic.
      if not any(x.startswith(('from ', 'import ')) for x in lines[i : i + 6])
    }

  assert runs('searchrl_jax/train.py') & runs(path) == set()


def test_the_session_knows_no_algorithm():
  for path in (ROOT / 'searchrl_jax' / 'run').glob('*.py'):
    for target, line in imported(path):
      assert not target.startswith(
        ('searchrl_jax.learn', 'searchrl_jax.rewards', 'searchrl_jax.rollout')
      ), f'{path.name}:{line} imports {target}'
    assert 'config.algorithm' not in path.read_text(), path.name


def test_every_import_is_declared():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  extras = project['optional-dependencies']
  undeclared = []
  for path in [
    *ROOT.glob('searchrl_jax/**/*.py'),
    *ROOT.glob('retrieval/**/*.py'),
  ]:
    where = path.relative_to(ROOT).as_posix()
    declared = names(project['dependencies'])
    for prefix, used in EXTRAS.items():
      if where.startswith(prefix):
        declared |= names(r for extra in used for r in extras[extra])
    for target, line in imported(path):
      top = target.split('.')[0]
      if top in sys.stdlib_module_names or top in ('searchrl_jax', 'retrieval'):
        continue
      if DISTRIBUTIONS.get(top, top) not in declared:
        undeclared.append(f'{where}:{line} imports {top}')
  assert undeclared == []


def test_declared_packages_are_pinned():
  """requirements.txt has all but what has an environment of its own."""
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  declared = set(project['dependencies']).union(
    *(
      packages
      for extra, packages in project['optional-dependencies'].items()
      if extra
      not in ('gguf', 'gpu', 'mcp', 'notebooks', 'tpu', 'verifiers', 'vllm')
    )
  )
  lines = (ROOT / 'requirements.txt').read_text().splitlines()
  pinned = names(x for x in lines if '==' in x)
  assert names(declared) - pinned == set()
