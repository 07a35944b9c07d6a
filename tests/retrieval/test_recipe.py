"""The recipe for wiki-18 in retrieval/README.md, run on a small stand-in.

Its commands are read from the page and run in turn with their own flags, in
this process. A local server stands for the hub; it has a corpus of 90
passages, a tiny encoder, and a FAISS index in two parts.
"""

import contextlib
import gzip
import json
import shlex

from absl import flags
import faiss
import numpy as np
import pytest
from starlette.testclient import TestClient

from retrieval import build_index, download, search, server
from retrieval.corpus import iter_documents
from retrieval.index.encoder import Encoder
from retrieval.serve import app
from tests.conftest import ROOT
from tests.golden import encoders
from tests.retrieval.conftest import write_corpus
from tests.retrieval.test_download import hub
from tests.retrieval.test_download import server as hub_server

__all__ = ['hub_server']


def commands(heading):
  """The shell commands of a section, split into words."""
  page = (ROOT / 'retrieval/README.md').read_text()
  section = page.partition(f'## {heading}\n')[2].partition('\n# ')[0]
  code = '\n'.join(
    line[4:] for line in section.splitlines() if line.startswith('    ')
  )
  return [*map(shlex.split, code.replace('\\\n', '').splitlines())]


@contextlib.contextmanager
def parsed(module, argv):
  """The flags of a command; those of another may have the same names."""
  before = set(flags.FLAGS)
  module.define_flags()
  if module is search:
    flags.DEFINE_string('url', None, '')
  try:
    yield flags.FLAGS(['x', *argv]) and flags.FLAGS
  finally:
    for name in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, name)


@pytest.fixture
def hubbed(hub_server, tmp_path, monkeypatch):
  """The hub has what the recipe asks for."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setitem(encoders.CONFIG, 'max_position_embeddings', 512)
  rng = np.random.default_rng(0)
  path = write_corpus(
    tmp_path / 'c.jsonl',
    [  # of one length: one program
      (str(i), 'hamlet', ''.join(rng.choice([*'abcdefgh'], 8)))
      for i in range(90)
    ],
  )
  model = encoders.write(tmp_path / 'hub', 'e5-tiny-v2')
  vectors = Encoder(model).encode_passages(
    [document.contents for document in iter_documents(path)]
  )
  index = faiss.index_factory(vectors.shape[1], 'Flat', 0)
  index.add(vectors)
  whole = faiss.serialize_index(index).tobytes()
  hub(
    hub_server,
    'PeterJinGo/wiki-18-corpus',
    {'wiki-18.jsonl.gz': gzip.compress(path.read_bytes())},
  )
  hub(
    hub_server,
    'PeterJinGo/wiki-18-e5-index',
    {'part_aa': whole[:4000], 'part_ab': whole[4000:]},
  )
  hub(
    hub_server,
    'intfloat/e5-base-v2',
    {file.name: file.read_bytes() for file in model.iterdir()},
    repo_type='models',
  )
  return hub_server.url


@pytest.mark.long
def test_the_recipe_for_wiki_18_works_as_it_stands(hubbed, tmp_path):
  *made, serve, ask, curl = commands('Wiki-18')
  for command in made:
    assert command[:2] == ['python', '-m']
    if command[2] == 'retrieval.download':
      with parsed(download, [*command[3:], f'--mirror={hubbed}']) as values:
        download.run(values)
    else:
      assert command[2] == 'retrieval.build_index'
      with parsed(build_index, command[3:]) as values:
        build_index.run(values)
  assert serve[:3] == ['python', '-m', 'retrieval.server']
  with parsed(server, serve[3:]) as values:
    server.check(values)
    searcher, local, _ = server.open_searcher(values)
    assert values.port == 8000
  body = json.loads(curl[curl.index('-d') + 1])
  with TestClient(app.create_app(searcher, app.Limits(), local=local)) as http:
    answer = http.post('/retrieve', json=body)
  assert answer.status_code == 200
  (row,) = answer.json()['result']
  assert len(row) == 3 and set(row[0]) == {'document', 'score'}
  assert ask[:3] == ['python', '-m', 'retrieval.search']
  assert '--url=http://127.0.0.1:8000' in ask
  assert curl[:3] == ['curl', '-s', '127.0.0.1:8000/retrieve']
