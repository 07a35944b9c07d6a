import bz2
import gzip
import io
import json
import lzma
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrieval.corpus import (
  CorpusError,
  join_contents,
  read_corpus,
  split_contents,
)
from retrieval.serve import searcher as served
from tests.retrieval.conftest import PASSAGES

ROOT = pathlib.Path(__file__).parents[2]
GOOD = '{"id": "a", "contents": "x"}'


def write(tmp_path, *lines):
  path = tmp_path / 'c.jsonl'
  path.write_bytes(
    b'\n'.join(x if isinstance(x, bytes) else x.encode() for x in lines)
  )
  return path


def test_reads_in_order(corpus):
  assert corpus.ids == tuple(i for i, _, _ in PASSAGES)
  assert split_contents(corpus[1].contents) == PASSAGES[1][1:]
  assert len(corpus) == len(PASSAGES)


def zstandard(data):
  return pa.compress(data, 'zstd', asbytes=True)


PACKERS = (gzip.compress, bz2.compress, lzma.compress, zstandard)


@pytest.mark.parametrize('pack', PACKERS)
def test_compression_is_told_by_its_bytes_and_hashes_the_same(
  corpus, corpus_path, tmp_path, pack
):
  path = tmp_path / 'no_suffix'
  path.write_bytes(pack(corpus_path.read_bytes()))
  other = read_corpus(path)
  assert other.contents == corpus.contents
  assert other.sha256 == corpus.sha256


@pytest.mark.parametrize('pack', [bytes, gzip.compress])
@pytest.mark.parametrize(
  'encoding', ['utf-16', 'utf-16-le', 'utf-16-be', 'utf-32']
)
def test_utf_16_is_told_by_its_bytes(
  corpus, corpus_path, tmp_path, encoding, pack
):
  path, text = tmp_path / 'c.jsonl', corpus_path.read_text()
  path.write_bytes(pack(text.encode(encoding)))
  assert read_corpus(path).sha256 == corpus.sha256
  path.write_bytes(pack(text.encode(encoding)[:-1]))  # half a character
  with pytest.raises(CorpusError, match='text of the file'):
    read_corpus(path)


@pytest.mark.parametrize(
  'content, said',
  [
    (f'[{GOOD},\n{GOOD}]', 'jq -c ".\\[\\]" FILE'),
    (f'[{GOOD}]', 'list.*jq -c ".\\[\\]" FILE'),
    (json.dumps({'id': 'a', 'contents': 'x'}, indent=1), 'jq -c . FILE'),
    ('id\tcontents\na\tx', r"read_csv\(FILE, sep='\\t'"),
    ('id,contents\na,x', r"read_csv\(FILE, sep=','"),
    ('version https://git-lfs.github.com/spec/v1\noid', 'git lfs pull'),
    ('plain text', 'per line'),
    (b'{"id": "a", "contents": "caf\xe9"}', 'UTF-8'),
    (b'PK\x03\x04\x14\0\xff\xfe', 'unpack'),
  ],
)  # fmt: skip
def test_another_format_is_named_with_its_conversion(tmp_path, content, said):
  with pytest.raises(CorpusError, match=f'c.jsonl:1: .*{said}'):
    read_corpus(write(tmp_path, content))


def test_a_large_corpus_is_sent_to_build_index(tmp_path, monkeypatch):
  source = tmp_path / 'a corpus'
  source.write_text(
    ''.join(f'{{"id": "{i}", "contents": "x"}}\n' for i in range(4))
  )
  monkeypatch.setattr(served, 'MOST', 3)
  with pytest.raises(CorpusError) as error:
    served._corpus(types.SimpleNamespace(corpus=str(source)))
  said = str(error.value)
  assert '3 passages' in said and '(--corpus)' in said
  assert (
    f"python -m retrieval.build_index '--corpus={source}' --out=INDEX "
    '--index=bm25. Then give --index_folder=INDEX --index=bm25'
  ) in said
  assert len(read_corpus(source, 4)) == 4


def test_hash_sees_each_change(tmp_path):
  hashes = {
    read_corpus(write(tmp_path, json.dumps(record))).sha256
    for record in (
      {'id': 'a', 'contents': 'bc'},
      {'id': 'ab', 'contents': 'c'},
      {'id': 'a', 'contents': 'bd'},
    )
  }
  assert len(hashes) == 3


def test_blank_lines_marks_and_numbers_are_tolerated(tmp_path):
  path = write(
    tmp_path,
    b'\xef\xbb\xbf' + GOOD.encode(),
    '',
    '  ',
    '{"id": 7, "contents": "\\ud83d\\ude00", "source": "x"}\r',
    '',
  )
  corpus = read_corpus(path)
  assert corpus.ids == ('a', '7')
  assert corpus.contents[1] == '\U0001f600'


@pytest.mark.parametrize(
  'line, said',
  [
    ('{"id": "b", "contents": ', 'not JSON'),
    ('["b"]', 'JSON list'),
    ('null', 'NoneType'),
    ('[' * 100_000, 'not JSON'),
    ('{"id": "b"}', "no field 'contents'"),
    ('{"id": "b", "title": "t", "text": "x"}', 'Join title'),
    ('{"contents": "x"}', "no field 'id'"),
    ('{"id": "b", "contents": 3}', "'contents' is 3"),
    ('{"id": "b", "contents": null}', "'contents' is None"),
    ('{"id": "b", "contents": "x", "title": ["y"]}', "'title' is ['y']"),
    ('{"id": "b", "contents": "x", "title": NaN}', "'title' is nan"),
    ('{"id": true, "contents": "x"}', "'id' is True"),
    ('{"id": "", "contents": "x"}', "'id' is ''"),
    ('{"id": "a", "contents": "y"}', 'line 1'),
    ('{"id": "b", "contents": "\\ud800"}', 'surrogate'),
    (b'{"id": "b", "contents": "\xff"}', "'utf-8' codec can't decode"),
  ],
)
def test_bad_line_is_named(tmp_path, line, said):
  path = write(tmp_path, GOOD, '', line, '{"id": "z", "contents": "x"}')
  with pytest.raises(CorpusError) as error:
    read_corpus(path)
  assert f'{path}:3: ' in str(error.value)
  assert said in str(error.value)


def test_unusable_files(tmp_path):
  with pytest.raises(CorpusError, match='absent.jsonl'):
    read_corpus(tmp_path / 'absent.jsonl')
  with pytest.raises(CorpusError, match='cat FOLDER'):
    read_corpus(tmp_path)
  with pytest.raises(CorpusError, match='empty'):
    read_corpus(write(tmp_path, '', ''))


@pytest.mark.parametrize('pack', PACKERS)
def test_a_compressed_file_cut_short(tmp_path, pack):
  whole = pack(
    '\n'.join(
      json.dumps({'id': str(i), 'contents': str(hash(str(i)))})
      for i in range(5000)
    ).encode()
  )
  path = tmp_path / 'c.jsonl.gz'
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(CorpusError, match=r'c.jsonl.gz:\d+: .*cut short'):
    read_corpus(path)
  path.write_bytes(whole[:9] + whole[8:])
  with pytest.raises(CorpusError, match=r'c.jsonl.gz:\d+: .*damaged'):
    read_corpus(path)


def pack(files, format=tarfile.USTAR_FORMAT, zipped=True):
  """A tar of {name: bytes}; None makes a folder."""
  out = io.BytesIO()
  with tarfile.open(fileobj=out, mode='w', format=format) as tar:
    for name, data in files.items():
      info = tarfile.TarInfo(name)
      info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
      info.size = len(data or b'')
      tar.addfile(info, io.BytesIO(data or b''))
  whole = out.getvalue()
  return gzip.compress(whole) if zipped else whole


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize(
  'format', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_a_tar_is_told_by_its_bytes_and_hashes_as_its_file(
  corpus, corpus_path, tmp_path, format, zipped
):
  path = tmp_path / 'wiki-18.jsonl.gz'
  path.write_bytes(
    pack(
      {
        'data': None,
        'data/._wiki-18.jsonl': b'\0\5\x16\7',
        'data/wiki-18.jsonl': corpus_path.read_bytes(),
        '._data': b'\0\5\x16\7',
      },
      format,
      zipped,
    )
  )
  other = read_corpus(path)
  assert other.ids == corpus.ids and other.contents == corpus.contents
  assert other.sha256 == corpus.sha256


def test_lines_of_a_tar_are_those_of_its_file(tmp_path):
  path = tmp_path / 'c.tar'
  path.write_bytes(pack({'c.jsonl': f'{GOOD}\n\n[]\n'.encode()}))
  with pytest.raises(CorpusError, match=r'c.tar:3: .*list'):
    read_corpus(path)


@pytest.mark.parametrize(
  'names, said',
  [([], r'\(none\)'), (['a.jsonl', 'b.txt'], r"\('a.jsonl', 'b.txt'\)")],
)
def test_a_tar_that_holds_not_one_file_is_refused(tmp_path, names, said):
  path = tmp_path / 'c.tar.gz'
  path.write_bytes(
    pack(
      {'folder': None}
      | {
        name: f'{{"id": "{name}", "contents": "x"}}\n'.encode()
        for name in names
      }
    )
  )
  with pytest.raises(CorpusError, match=f'c.tar.gz: .*{said}'):
    read_corpus(path)


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('keep', [600, 0.5, 0.7])
def test_a_tar_cut_short(tmp_path, zipped, keep):
  lines = '\n'.join(
    json.dumps({'id': str(i), 'contents': str(hash(str(i)))})
    for i in range(5000)
  )
  whole = pack({'c.jsonl': lines.encode()}, zipped=False)
  path = tmp_path / 'c.tar'
  cut = whole[: int(keep * len(whole)) if keep < 1 else keep]
  path.write_bytes(gzip.compress(cut) if zipped else cut)
  with pytest.raises(CorpusError) as error:
    read_corpus(path)
  assert 'c.tar:' in str(error.value)
  assert 'tar file' in str(error.value)


def test_the_checksum_behind_a_tar_is_read(tmp_path):
  path = tmp_path / 'c.tar.gz'
  # What follows the end of a tar nobody asks for, but the gzip file is cut.
  whole = pack({'c.jsonl': GOOD.encode() + b'\n'}, zipped=False)
  path.write_bytes(gzip.compress(whole + bytes(4 << 20))[:-6])
  with pytest.raises(CorpusError, match=r'c.tar.gz:2: .*gzip'):
    read_corpus(path)


def test_a_passage_that_says_ustar_is_no_tar(tmp_path):
  line = json.dumps({'id': 'a', 'contents': 'x' * 400}).encode()
  path = write(tmp_path, line[:257] + b'ustar' + line[262:])
  assert 'ustar' in read_corpus(path).contents[0]


@pytest.mark.parametrize(
  'contents, parts',
  [
    ('"A "b" c"\ntext\nmore', ('A "b" c', 'text\nmore')),
    ('Bare title\ntext', ('Bare title', 'text')),
    ('"\ntext', ('"', 'text')),
    ('no line break', ('', 'no line break')),
    ('', ('', '')),
  ],
)
def test_split_contents(contents, parts):
  assert split_contents(contents) == parts


@pytest.mark.parametrize(
  'title, contents, want',
  [
    ('Hamlet', 'A play.', '"Hamlet"\nA play.'),
    ('Hamlet', 'A play.\nOld.', '"Hamlet"\nA play.\nOld.'),
    ('Hamlet', '"Hamlet"\nA play.', '"Hamlet"\nA play.'),
    ('"Hamlet"', ' Hamlet \nA play.', ' Hamlet \nA play.'),
    ('Cafe\u0301', '"Caf\u00e9"\nx', '"Caf\u00e9"\nx'),
    ('a\nb', 'x', '"a b"\nx'),
    (1984, 'A novel.', '"1984"\nA novel.'),
    (' ', 'x', 'x'),
    (None, 'x', 'x'),
  ],
)
def test_a_title_in_a_field_of_its_own(tmp_path, title, contents, want):
  record = {'id': '0', 'title': title, 'contents': contents}
  assert read_corpus(write(tmp_path, json.dumps(record))).contents == (want,)


def test_join_is_the_inverse_of_split():
  assert split_contents(join_contents('T', 'a\nb')) == ('T', 'a\nb')


def as_table(rows):
  return pa.table(
    {
      'id': [i for i, _ in rows],
      'contents': [c for _, c in rows],
      'other': range(len(rows)),
    }
  )


@pytest.fixture(params=['parquet', 'arrow', 'dataset', 'dataset_dict', 'hf'])
def save(request, tmp_path):
  """Writes a table in one form; returns what names it."""

  def run(table):
    path = str(tmp_path / request.param)
    if request.param == 'parquet':
      pq.write_table(table, path, row_group_size=3)
    elif request.param == 'arrow':
      with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    elif request.param == 'hf':  # the hub's names and local folders are alike
      os.mkdir(path)
      pq.write_table(table, f'{path}/train.parquet')
      return f'hf:{path}:train'
    else:
      import datasets

      found = datasets.Dataset(table)
      if request.param == 'dataset_dict':
        found = datasets.DatasetDict(train=found)
      found.save_to_disk(path)
    return path

  return run


def test_every_form_holds_the_same_corpus(corpus, save):
  rows = list(zip(corpus.ids, corpus.contents))
  other = read_corpus(save(as_table(rows)))
  assert other.ids == corpus.ids and other.contents == corpus.contents
  assert other.sha256 == corpus.sha256


def test_every_form_may_have_a_column_of_titles(save):
  table = as_table([('a', 'x'), ('b', '"T"\ny'), ('c', 'z')])
  path = save(table.append_column('title', pa.array(['S', 'T', None])))
  assert read_corpus(path).contents == ('"S"\nx', '"T"\ny', 'z')


@pytest.mark.parametrize(
  'row, said',
  [
    (('b', None), "row 5: .*'contents' is None"),
    (('', 'x'), "row 5: .*'id' is ''"),
    ((None, 'x'), "row 5: .*'id' is None"),
    (('a1', 'x'), "row 5: .*'a1' .*row 2"),
  ],
)
def test_bad_row_is_named(save, row, said):
  rows = [(f'a{i}', 'x') for i in range(8)]
  rows[4] = row
  path = save(as_table(rows))
  with pytest.raises(CorpusError, match=f'{re.escape(str(path))}: {said}'):
    read_corpus(path)


def test_columns_are_named(save):
  table = as_table([('a', 'x')])
  path = save(table.rename_columns(['id', 'text', 'other']))
  with pytest.raises(CorpusError, match="'contents'.*Join title"):
    read_corpus(path)


def test_number_columns_and_bad_text_of_parquet(tmp_path):
  path = tmp_path / 'c.parquet'
  pq.write_table(pa.table({'id': [7, 8], 'contents': ['x', 'y']}), path)
  assert read_corpus(path).ids == ('7', '8')
  bad = pa.array([b'fine', b'\xff'], pa.binary()).cast(pa.string(), safe=False)
  pq.write_table(pa.table({'id': ['7', '8'], 'contents': bad}), path)
  with pytest.raises(CorpusError, match='c.parquet: row 2'):
    read_corpus(path)


@pytest.mark.parametrize('keep', [9, 0.5, 0.9])
def test_columns_cut_short(tmp_path, keep):
  path = tmp_path / 'c'
  table = as_table([(str(i), f'{i:0200}') for i in range(3000)])
  pq.write_table(table, path)
  whole = path.read_bytes()
  path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else keep])
  with pytest.raises(CorpusError, match='damaged'):
    read_corpus(path)
  # The footer is there, what it points to is not.
  path.write_bytes(
    whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :]
  )
  with pytest.raises(CorpusError, match='damaged'):
    read_corpus(path)


def test_splits_must_be_named(tmp_path):
  import datasets

  data = datasets.Dataset(as_table([('a', 'x')]))
  path = tmp_path / 'two'
  datasets.DatasetDict(one=data, two=data).save_to_disk(path)
  with pytest.raises(CorpusError, match='one, two.*two/one'):
    read_corpus(path)
  assert read_corpus(path / 'two').ids == ('a',)


def test_a_name_that_is_not_on_the_hub_or_offline():
  with pytest.raises(CorpusError, match='hf:nobody/nothing'):
    read_corpus('hf:nobody/nothing')


def test_equal_hashes_are_no_equal_ids(tmp_path, monkeypatch):
  monkeypatch.setattr('retrieval.corpus.hash', len, raising=False)
  lines = [json.dumps({'id': i, 'contents': 'x'}) for i in ('a', 'b', 'cc')]
  assert read_corpus(write(tmp_path, *lines)).ids == ('a', 'b', 'cc')
  with pytest.raises(CorpusError, match=r":5: .*'b' .*line 2\."):
    read_corpus(write(tmp_path, *lines, '', lines[1]))


# In a process of its own: other tests leave heaps that shrink and grow again.
STREAMS = """
import sys
from retrieval.corpus import iter_documents
from tests.memory import Peak
next(iter_documents(sys.argv[1]))
with Peak() as memory:
  for n, doc in enumerate(iter_documents(sys.argv[1])):
    assert len(doc.contents) == 1000 and doc.id == str(n)
assert n == 119_999
print(memory.peak - memory.start)
"""


@pytest.mark.long
def test_streams(tmp_path):
  """120 MB pass through a few; Parquet in one row group, too."""
  path = tmp_path / 'c.jsonl'
  with open(path, 'w') as f:
    for i in range(120_000):
      f.write(json.dumps({'id': str(i), 'contents': f'{i:01000}'}) + '\n')
  pq.write_table(
    as_table([(str(i), f'{i:01000}') for i in range(120_000)]),
    tmp_path / 'c.parquet',
    compression='none',
    use_dictionary=False,
  )
  with tarfile.open(tmp_path / 'c.tar', 'w') as tar:
    tar.add(path, 'c.jsonl')
  for name in ('c.jsonl', 'c.parquet', 'c.tar'):
    command = [sys.executable, '-c', STREAMS, str(tmp_path / name)]
    assert int(subprocess.check_output(command, cwd=ROOT)) < 60e6, name
