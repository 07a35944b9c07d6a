import gzip
import json

import pytest

from retrieval.corpus import (
  CorpusError,
  join_contents,
  read_corpus,
  split_contents,
)
from tests.retrieval.conftest import PASSAGES

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


def test_gzip_is_told_by_its_bytes_and_hashes_the_same(
  corpus, corpus_path, tmp_path
):
  path = tmp_path / 'no_suffix'
  path.write_bytes(gzip.compress(corpus_path.read_bytes()))
  other = read_corpus(path)
  assert other.contents == corpus.contents
  assert other.sha256 == corpus.sha256


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
    tmp_path, b'\xef\xbb\xbf' + GOOD.encode(), '', '  ',
    '{"id": 7, "contents": "\\ud83d\\ude00", "source": "x"}\r', '',
  )
  corpus = read_corpus(path)
  assert corpus.ids == ('a', '7')
  assert corpus.contents[1] == '\U0001f600'


@pytest.mark.parametrize(
  'line, said',
  [
    ('{"id": "b", "contents": ', 'not JSON'),
    ('["b"]', 'a JSON list, not an object'),
    ('null', 'not an object'),
    ('[' * 100_000, 'not JSON'),
    ('{"id": "b"}', "no field 'contents'"),
    ('{"id": "b", "title": "t", "text": "x"}', 'Join title and text'),
    ('{"contents": "x"}', "no field 'id'"),
    ('{"id": "b", "contents": 3}', "'contents' is 3, not a string"),
    ('{"id": "b", "contents": null}', "'contents' is None"),
    ('{"id": true, "contents": "x"}', "'id' is True"),
    ('{"id": "", "contents": "x"}', "'id' is ''"),
    ('{"id": "a", "contents": "y"}', "'a' was already used on line 1"),
    ('{"id": "b", "contents": "\\ud800"}', 'surrogate'),
    (b'{"id": "b", "contents": "\xff"}', 'not UTF-8'),
  ],
)
def test_bad_line_is_named(tmp_path, line, said):
  path = write(tmp_path, GOOD, '', line, '{"id": "z", "contents": "x"}')
  with pytest.raises(CorpusError) as error:
    read_corpus(path)
  assert f'{path}:3: ' in str(error.value)
  assert said in str(error.value)


def test_unusable_files(tmp_path):
  with pytest.raises(CorpusError, match='no such file'):
    read_corpus(tmp_path / 'absent.jsonl')
  with pytest.raises(CorpusError, match='directory'):
    read_corpus(tmp_path)
  with pytest.raises(CorpusError, match='is empty'):
    read_corpus(write(tmp_path, '', ''))


def test_gzip_cut_short(tmp_path):
  whole = gzip.compress(
    '\n'.join(
      json.dumps({'id': str(i), 'contents': str(hash(str(i)))})
      for i in range(5000)
    ).encode()
  )
  path = tmp_path / 'c.jsonl.gz'
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(CorpusError, match=r'c.jsonl.gz:\d+: .*cut short'):
    read_corpus(path)


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


def test_join_is_the_inverse_of_split():
  assert split_contents(join_contents('T', 'a\nb')) == ('T', 'a\nb')
