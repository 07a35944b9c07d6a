"""ArrayRecord through TFDS, read without TensorFlow."""

import json
import subprocess
import sys

import pytest

from searchrl_jax.data import jsonl, tfds
from searchrl_jax.data.checks import DataError
from tests.conftest import ROOT
from tests.data import array_records

ROWS = [
  {
    'id': f'q{i}',
    'question': f'qué {i}',
    'golden_answers': ['a', 'b'][: i % 3],
    'supporting_ids': ['7'],
    'source': 'nq',
    'hops': 1,
  }
  for i in range(20)
]


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
  at = tmp_path_factory.mktemp('tfds')
  file = at / 'x.jsonl'
  file.write_text(''.join(json.dumps(r) + '\n' for r in ROWS))
  path = array_records.build(file, at / 'out', name='some', split='dev')
  return str(file), path


def load(path, **kw):
  return tfds.load(path, **{'split': 'dev', **kw})


def test_round_trip(prepared):
  file, path = prepared
  assert load(path) == jsonl.load(file)
  assert [q.id for q in load(path, split='dev[5:8]')] == ['q5', 'q6', 'q7']


def test_it_needs_no_tensorflow(prepared):
  code = (
    'import sys; from searchrl_jax.data import tfds; '
    f'print(len(tfds.load({prepared[1]!r}, "dev")), '
    '"tensorflow" in sys.modules)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert done.stdout.strip() == '20 False', done.stderr


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'split': 'train'}, "'train': dev"),
    ({'split': 'dev[:x]'}, "split 'dev\\[:x\\]'"),
    ({'layout': 'ssp'}, r"\[dev\] row 0.*'ground_truth'"),
    ({'layout': 'flashrg'}, "'flashrg'.*'flashrag'"),
  ],
)
def test_errors(prepared, fields, says):
  with pytest.raises(DataError, match=says):
    load(prepared[1], **fields)


def test_it_needs_a_prepared_folder(tmp_path):
  with pytest.raises(DataError, match='dataset_info.json'):
    load(str(tmp_path))
