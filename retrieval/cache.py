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

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import urllib.parse

from retrieval.core import Found, Searcher, SearchFailed

FORMAT = 1  # part of every key; also the file's user_version
_APPLICATION = 0x53524C31  # the file's application_id, 'SRL1'
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
    identity: that of the searcher, today's or the recorded one.
    threads: as many may search at once as may ask the searcher.
    asked: queries of the last search that the store lacked.
  """

  def __init__(
    self,
    searcher: Searcher | None,
    path: str | os.PathLike,
    *,
    identity: str | None = None,
  ):
    """Opens a store.

    Args:
      searcher: whom to ask for what the store lacks; the store is made where
        there is none. None: replay, which asks nobody and writes nothing.
      path: the SQLite file; '' makes a temporary one.
      identity: in replay, the first letters of the SHA-256 of the identity
        to answer for; needed only where the store holds several.

    Raises:
      StoreError: the file is absent in replay, damaged, no store, or leaves
        open for whom to answer.
    """
    self.path = os.fspath(path)
    self.threads = getattr(searcher, 'threads', 1)
    self._searcher, self.asked = searcher, 0
    self._unwritten: dict[bytes, list[Found]] = {}
    self._lock = threading.Lock()  # over the store
    # Over asking, by the first byte of a key.
    self._asking = [threading.Lock() for _ in range(256)]
    self._db = _open(self.path, replay=searcher is None)
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
    self.identity: Mapping[str, object] = json.loads(_text(self._json))

  def search(
    self, queries: Sequence[str], k: int
  ) -> list[list[Found] | SearchFailed]:
    """As `Searcher.search`; (query, k) is matched exactly.

    What threads ask at the same time is asked once. Failures are not stored,
    nor are answers of which a part was had only this time
    (`Found.transient`). Answers that could not be stored (a full disk, a
    lock) are kept, and stored before anything else is asked: they may have
    cost money. In replay a miss is a `SearchFailed`.

    Raises:
      ValueError: k < 1.
      StoreError: the file is damaged, full or locked.
    """
    if k < 1:
      raise ValueError(f'k={k} must be at least 1')
    keys = {query: self._key(query, k) for query in queries}
    with contextlib.ExitStack() as asking:
      # In order: two threads never wait for each other.
      for i in sorted({key[0] for key in keys.values()}):
        asking.enter_context(self._asking[i])
      with self._lock:
        self._write({})
        answers = {query: self._read(key) for query, key in keys.items()}
      missing = {q: keys[q] for q, found in answers.items() if found is None}
      self.asked = len(missing)
      if missing:
        answers |= self._ask(missing, k)
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

  def _ask(
    self, keys: Mapping[str, bytes], k: int
  ) -> dict[str, list[Found] | SearchFailed]:
    """Asks the searcher, and stores what it answers for good."""
    if self._searcher is None:
      return {query: self._miss(query, k) for query in keys}
    found = self._searcher.search([*keys], k)
    answers = dict(zip(keys, found, strict=True))
    good = {
      key: answers[query]
      for query, key in keys.items()
      if not isinstance(answers[query], SearchFailed)
      and not any(one.transient for one in answers[query])
    }
    with self._lock:
      self._write(good)
      # Read back: two processes that asked at once give one answer, the one
      # that a replay will give.
      return answers | {
        query: self._read(key) for query, key in keys.items() if key in good
      }

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
      self._db.executemany(
        'INSERT OR IGNORE INTO answers VALUES (?, ?, ?)', rows
      )
    self._unwritten.clear()

  def _miss(self, query: str, k: int) -> SearchFailed:
    shown = query if len(query) <= 200 else query[:197] + '...'
    return SearchFailed(
      f'{self.path}: no recorded answer to {shown!r} with k={k}. Record it, '
      'or replay what was recorded.'
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
    value,
    ensure_ascii=False,
    allow_nan=False,
    sort_keys=True,
    separators=(',', ':'),
  )
  return text.encode('utf-8', 'surrogatepass')


def _text(value: bytes) -> str:
  return value.decode('utf-8', 'surrogatepass')


def _open(path: str, replay: bool) -> sqlite3.Connection:
  if replay and not os.path.isfile(path):
    raise StoreError(f'{path}: no such file. Record first, or mend the path.')
  flags = '?mode=ro' if replay else '?mode=rwc'
  # WAL wants to write beside the file even to read it; where nobody can,
  # nobody changes it either.
  folder = os.path.dirname(os.path.abspath(path))
  if replay and not (
    os.access(folder, os.W_OK) or os.path.exists(path + '-wal')
  ):
    flags += '&immutable=1'
  with _named(path):
    db = sqlite3.connect(
      f'file:{path and urllib.parse.quote(os.path.abspath(path))}{flags}',
      uri=True,
      timeout=30.0,
      isolation_level=None,
      check_same_thread=False,
    )
    try:
      _check(db, path, replay)
    except BaseException:
      db.close()
      raise
  return db


def _check(db: sqlite3.Connection, path: str, replay: bool) -> None:
  """Makes a new file a store; refuses what is none."""

  def pragma(name: str) -> int:
    return db.execute(f'PRAGMA {name}').fetchone()[0]

  def foreign() -> bool:
    return pragma('application_id') != _APPLICATION

  if not replay and foreign() and not pragma('schema_version'):
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
