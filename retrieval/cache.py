"""Recorded answers: a run asked once can be run again offline, for nothing.

`Recorded` stands before any searcher and keeps each answer in one SQLite file
under the SHA-256 of what it depends on: the searcher's identity, the query, k
and the version of this format. A store holds answers of several identities
and may be shared by processes of one machine (WAL is no format for network
file systems; copy the file there once it is closed).

Answers leave a store as they came, to the byte: scores as float64, Unicode
with its lone surrogates. Text is therefore kept as UTF-8 with surrogates
passed, not as JSON escapes, in which two lone surrogates become one character.
"""

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from retrieval.core import Found, SearchFailed, Searcher

FORMAT = 1  # part of every key; also the file's user_version
MODES = ('record', 'replay')
_APPLICATION = 0x53524C31  # the file's application_id, 'SRL1'
_PART = 64  # queries asked, then stored, at once
_TABLES = (
  'CREATE TABLE identities (sha256 TEXT PRIMARY KEY, json BLOB NOT NULL)',
  'CREATE TABLE answers (key BLOB PRIMARY KEY, sha256 BLOB NOT NULL,'
  ' answer BLOB NOT NULL) WITHOUT ROWID',
)


class StoreError(RuntimeError):
  """The store cannot be used; the message names the file and the mend."""


class Recorded:
  """A `Searcher` that answers from a store, and stores what it asks.

  Attributes:
    hits: queries answered by what was stored before.
    misses: queries that were not in the store.
    stored: answers written, duplicates once, failures never.
  """

  def __init__(
    self,
    searcher: Searcher | None,
    path: str | os.PathLike,
    mode: str,
    *,
    identity: str | None = None,
  ):
    """Opens a store; `record` makes it where there is none.

    Args:
      searcher: whom to ask; None in replay, where nobody is asked.
      path: the SQLite file.
      mode: 'record' answers from the store and asks for the rest; 'replay'
        answers from the store alone, a miss is a `SearchFailed`.
      identity: in replay, the first letters of the SHA-256 of the identity
        to answer for; needed only where the store holds several.

    Raises:
      ValueError: an unknown mode, or a searcher missing or in excess.
      StoreError: the file is absent in replay, damaged, no store, or leaves
        open for whom to answer.
    """
    if mode not in MODES:
      raise ValueError(f'mode {mode!r} is none of {", ".join(MODES)}')
    if (searcher is None) != (mode == 'replay'):
      raise ValueError(
        'record needs a searcher' if searcher is None
        else 'replay asks no searcher; pass None'
      )
    self.path, self.mode = os.fspath(path), mode
    self.hits = self.misses = self.stored = 0
    self._searcher = searcher
    self._unwritten: dict[bytes, list[Found]] = {}
    self._lock = threading.Lock()  # over the searcher too: one thread at once
    self._db = _open(self.path, mode)
    try:
      with _named(self.path):
        if searcher is not None:
          self._json = _canonical(dict(searcher.identity))
          self._db.execute(
            'INSERT OR IGNORE INTO identities VALUES (?, ?)',
            (hashlib.sha256(self._json).hexdigest(), self._json),
          )
        else:
          self._json = self._chosen(identity or '')
    except BaseException:
      self._db.close()
      raise
    self._identity = json.loads(_text(self._json))

  @property
  def identity(self) -> Mapping[str, object]:
    """That of the searcher, today's or the recorded one."""
    return self._identity

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[list[Found] | SearchFailed]:
    """As `Searcher.search`; (query, k) is matched exactly.

    Queries are asked and stored in parts of 64: a kill in between loses one
    part. Answers that could not be stored (a full disk, a lock) are kept, and
    stored before anything else is asked: they may have cost money.

    Raises:
      ValueError: k < 1.
      StoreError: the file is damaged, full or locked.
    """
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    with self._lock:
      self._write({})
      keys = {query: self._key(query, k) for query in queries}
      answers = {query: self._read(key) for query, key in keys.items()}
      missing = [query for query, found in answers.items() if found is None]
      missed = sum(answers[query] is None for query in queries)
      self.misses += missed
      self.hits += len(queries) - missed
      if missing and self._searcher is None:
        answers |= {query: self._miss(query, k) for query in missing}
      for start in range(0, len(missing) if self._searcher else 0, _PART):
        part = missing[start : start + _PART]
        answers |= dict(
          zip(part, self._searcher.search(part, k), strict=True)
        )
        good = [
          query for query in part
          if not isinstance(answers[query], SearchFailed)
        ]
        self._write({keys[query]: answers[query] for query in good})
        # Read back: two processes that asked at once give one answer, the
        # one that a replay will give.
        answers |= {query: self._read(keys[query]) for query in good}
    return [answers[query] for query in queries]

  def close(self) -> None:
    """Closes the store, and the searcher behind it."""
    with self._lock:
      self._db.close()
      if self._searcher is not None:
        self._searcher.close()

  def _key(self, query: str, k: int) -> bytes:
    parts = [FORMAT, _text(self._json), query, k]
    return hashlib.sha256(_canonical(parts)).digest()

  def _read(self, key: bytes) -> list[Found] | None:
    with _named(self.path):
      row = self._db.execute(
        'SELECT sha256, answer FROM answers WHERE key = ?', (key,)
      ).fetchone()
      if row is None:
        return None
      # SQLite does not notice a changed bit within a value.
      if hashlib.sha256(key + row[1]).digest() != row[0]:
        raise sqlite3.DatabaseError('an answer does not match its SHA-256')
    return [Found(*fields) for fields in json.loads(_text(row[1]))]

  def _write(self, answers: Mapping[bytes, list[Found]]) -> None:
    """Stores answers, and those that could not be stored before."""
    self._unwritten |= answers
    if not self._unwritten:
      return
    rows = []
    for key, answer in self._unwritten.items():
      value = _canonical([[f.id, f.contents, float(f.score)] for f in answer])
      rows.append((key, hashlib.sha256(key + value).digest(), value))
    with _named(self.path), _transaction(self._db):
      self.stored += self._db.executemany(
        'INSERT OR IGNORE INTO answers VALUES (?, ?, ?)', rows
      ).rowcount
    self._unwritten.clear()

  def _miss(self, query: str, k: int) -> SearchFailed:
    shown = query if len(query) <= 200 else query[:197] + '...'
    return SearchFailed(
      f'{self.path}: no recorded answer to {shown!r} with k={k}. Record it '
      '(mode record), or replay what was recorded.'
    )

  def _chosen(self, prefix: str) -> bytes:
    held = dict(self._db.execute('SELECT sha256, json FROM identities'))
    found = [sha256 for sha256 in held if sha256.startswith(prefix)]
    if len(found) == 1:
      return held[found[0]]
    if not held:
      raise StoreError(f'{self.path}: nothing is recorded. Record first.')
    listed = '; '.join(
      f'{sha256[:12]} {_text(value)[:200]!a}'
      for sha256, value in sorted(held.items())
    )
    raise StoreError(
      f'{self.path}: {len(found)} of the recorded identities begin with '
      f'{prefix!r}. Name one by its first letters: {listed}.'
    )


def _canonical(value: object) -> bytes:
  text = json.dumps(
    value, ensure_ascii=False, allow_nan=False, sort_keys=True,
    separators=(',', ':'),
  )
  return text.encode('utf-8', 'surrogatepass')


def _text(value: bytes) -> str:
  return value.decode('utf-8', 'surrogatepass')


def _open(path: str, mode: str) -> sqlite3.Connection:
  if mode == 'replay' and not os.path.isfile(path):
    raise StoreError(f'{path}: no such file. Record first, or mend the path.')
  flags = '?mode=rwc' if mode == 'record' else '?mode=ro'
  # WAL wants to write beside the file even to read it; where nobody can,
  # nobody changes it either.
  folder = os.path.dirname(os.path.abspath(path))
  if mode == 'replay' and not (
    os.access(folder, os.W_OK) or os.path.exists(path + '-wal')
  ):
    flags += '&immutable=1'
  with _named(path):
    db = sqlite3.connect(
      'file:' + urllib.parse.quote(os.path.abspath(path)) + flags, uri=True,
      timeout=30.0, isolation_level=None, check_same_thread=False,
    )
    try:
      _check(db, path, mode)
    except BaseException:
      db.close()
      raise
  return db


def _check(db: sqlite3.Connection, path: str, mode: str) -> None:
  """Makes a new file a store; refuses what is none."""

  def pragma(name: str) -> int:
    return db.execute(f'PRAGMA {name}').fetchone()[0]

  def foreign() -> bool:
    return pragma('application_id') != _APPLICATION

  if mode == 'record' and foreign() and not pragma('schema_version'):
    db.execute('PRAGMA journal_mode = WAL')
    with _transaction(db):
      if foreign():  # another process may have been first
        for statement in _TABLES:
          db.execute(statement)
        db.execute(f'PRAGMA application_id = {_APPLICATION}')
        db.execute(f'PRAGMA user_version = {FORMAT}')
  if foreign():
    raise StoreError(
      f'{path}: a SQLite file, but no store of answers. Choose another path.'
    )
  if pragma('user_version') != FORMAT:
    raise StoreError(
      f'{path}: format {pragma("user_version")} where this program writes '
      f'{FORMAT}. Record anew at another path.'
    )
  db.execute('PRAGMA synchronous = NORMAL')  # a kill loses nothing


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
  db.execute('BEGIN IMMEDIATE')
  try:
    yield
  except BaseException:
    db.execute('ROLLBACK')
    raise
  db.execute('COMMIT')


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
  """Names the file in SQLite's errors."""
  try:
    yield
  except sqlite3.Error as error:
    raise StoreError(
      f'{path}: cannot be used as a store of answers: {error}. If it is '
      'damaged or another file, restore it or choose another path.'
    ) from error
