"""Hugging Face datasets from local folders; the hub only fails, clearly."""

import json

import datasets
import pytest

from searchrl_jax.data import hf
from searchrl_jax.data.checks import DataError

ROWS = [
  {
    'id': f'{i}',
    'question': f'q{i}',
    'golden_answers': ['a', f'b{i}'],
    'inner': {'answer': f'c{i}'},
  }
  for i in range(5)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
  """The library's cache of this test alone (its config is read once)."""
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')


def folder(tmp_path):
  """Data files by split, as on the hub."""
  at = tmp_path / 'data' / 'set'
  at.mkdir(parents=True)
  for split, rows in (('train', ROWS[:3]), ('test', ROWS[3:])):
    (at / f'{split}.jsonl').write_text(
      ''.join(json.dumps(r) + '\n' for r in rows)
    )
  return at


def load(**kw):
  return hf.load(**{'folder': '', 'split': 'train', **kw})


def test_a_folder_of_files(tmp_path):
  at = folder(tmp_path)
  found = load(dataset=str(at))
  assert [(q.id, q.text, q.answers) for q in found] == [
    (f'{i}', f'q{i}', ('a', f'b{i}')) for i in range(3)
  ]
  below = hf.load(dataset='set', folder=str(tmp_path / 'data'), split='test')
  assert [q.id for q in below] == ['3', '4']


def test_saved_to_disk_and_mapped(tmp_path):
  path = str(tmp_path / 'saved')
  datasets.DatasetDict(
    {'train': datasets.Dataset.from_list(ROWS)}
  ).save_to_disk(path)
  found = load(
    dataset=path, fields=dict(id='', answers='inner.answer'), n=2, seed=1
  )
  assert len(found) == 2
  assert all(q.answers == (f'c{q.id}',) for q in found)
  with pytest.raises(DataError, match="no split 'dev': train"):
    load(dataset=path, split='dev')


def test_errors(tmp_path):
  at = str(folder(tmp_path))
  with pytest.raises(DataError, match=r"\[train\] row 0.*'question'"):
    load(dataset=at, fields=dict(question='qestion'))
  with pytest.raises(DataError, match=r"'inner.reply' \(looked in 'inner'\)"):
    load(dataset=at, fields=dict(answers='inner.reply'))
  with pytest.raises(DataError, match='the folder, the subset or the split'):
    load(dataset=at, split='dev')


def test_offline_says_so(monkeypatch):
  monkeypatch.setenv('HF_HUB_OFFLINE', '1')
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  with pytest.raises(DataError, match='offline.*HF_HOME'):
    load(dataset='nobody/nothing-at-all')
