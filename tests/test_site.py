"""The documentation site: its messages, its pages and what it is built of."""

import ast
import functools
import json
import re
import subprocess

import pytest

from configs import algorithms
from tests import browsers
from tests.conftest import ROOT
from tests.test_docs import PAGES

MESSAGES = re.findall(
  r'^### `(.*)`$', (ROOT / 'docs/troubleshooting.md').read_text(), re.M
)


def template(node: ast.AST) -> str | None:
  """A string of the source with `…` for what is filled in, else None."""
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    return node.value
  if isinstance(node, ast.JoinedStr):
    parts = (getattr(v, 'value', '') for v in node.values)
    return ''.join(v if isinstance(v, str) else '…' for v in parts)
  return None


@functools.cache
def strings() -> list[str]:
  """Every string of the packages and of the shell scripts."""
  found = [(ROOT / 'tools/venv.sh').read_text()]
  for package in ('searchrl_jax', 'retrieval'):
    for path in (ROOT / package).rglob('*.py'):
      nodes = ast.walk(ast.parse(path.read_text()))
      found += [text for node in nodes if (text := template(node))]
  return found


def test_there_are_messages():
  assert len(MESSAGES) > 30 and len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize('message', MESSAGES)
def test_quoted_messages_are_in_the_source(message):
  """A message is one string of the source: its fixed parts, in their order."""
  pieces = [re.escape(p) for p in re.split(r'\s*…\s*', message) if p]
  pattern = re.compile('.*'.join(pieces), re.S)
  plain = [s.replace('`', '') for s in strings()]
  assert any(pattern.search(s) for s in plain)


def test_the_site_has_every_page():
  nav = (ROOT / 'mkdocs.yml').read_text().split('\nnav:\n')[1]
  listed = re.findall(r'(\S+\.md)$', nav, re.M)
  assert sorted(listed) == PAGES


def test_claims_of_the_overview_name_their_page():
  """Each point of the first list, and each state of a recipe, has a link."""
  readme = (ROOT / 'README.md').read_text()
  points = re.findall(r'^\* \*\*(.*?)(?=^\* |^\n)', readme, re.M | re.S)
  recipes = readme.split('| recipe |')[1].split('\n\n')[0].splitlines()[2:]
  assert len(points) >= 5 and len(recipes) >= 7
  assert [x for x in [*points, *recipes] if '](' not in x] == []


def test_the_sweep_of_the_first_page_is_accepted():
  page = (ROOT / 'docs/start.md').read_text()
  (code,) = re.findall(
    r'^```python\n# file: mine.py\n(.*?)^```', page, re.M | re.S
  )
  space = {}
  exec(compile(code, 'docs/start.md', 'exec'), space)
  arms = {a.name: a for a in space['get_sweep']().arms}
  assert [*arms] == ['grpo', 'rloo']
  config = arms['rloo'].config(0)
  assert config.algorithm.advantage == algorithms.RLOO['advantage']
  assert config.train.steps == 20


@pytest.mark.slow
@pytest.mark.skipif(
  not (ROOT / '.venv-docs/.ready').exists(), reason='no `make docs` here'
)
def test_the_site_is_searched_from_disk_without_a_network(tmp_path):
  site = tmp_path / 'site'
  subprocess.run(
    [ROOT / '.venv-docs/bin/mkdocs', 'build', '--strict', f'--site-dir={site}'],
    cwd=ROOT,
    check=True,
  )
  elsewhere = re.compile(r'<(?:script|link|img)[^>]*(?:src|href)="?https?:')
  loads = [p for p in site.rglob('*.html') if elsewhere.search(p.read_text())]
  assert loads == []
  if problem := browsers.missing():
    pytest.skip(problem)
  with browsers.chromium(tmp_path / 'profile') as page:
    page.get((site / 'docs/troubleshooting.html').as_uri())
    page.implicitly_wait(20)
    page.execute_script("document.querySelector('#__search').click()")
    page.find_element('css selector', '.md-search__input').send_keys('canary')
    found = page.find_elements('css selector', '.md-search-result h1')
    assert 'Troubleshooting' in [x.text for x in found]
    messages = [json.loads(x['message']) for x in page.get_log('performance')]
    asked = [
      m['message']['params']['request']['url']
      for m in messages
      if m['message']['method'] == 'Network.requestWillBeSent'
    ]
    assert asked and not [x for x in asked if x.startswith('http')]
