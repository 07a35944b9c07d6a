"""Records answers, so that a run can be repeated offline at no cost.

`Recorded` wraps any searcher and keeps each answer in one SQLite file. The key
is the SHA-256 of what the answer depends on: the identity of the searcher, the
query, k and the version of this format. A store may hold answers of several
identities, and processes of one machine may share it (WAL does not work on
network file systems; copy the file there once it is closed).

A store returns answers unchanged: scores as float64, Unicode including lone
surrogates. Text is therefore stored as UTF-8 with surrogates passed and not as
JSON escapes, in which two lone surrogates become one character.
"""

from collections.abc import Mapping, Sequence
import contextlib
import hashlib
import json
import os
import pathlib
import sqlite3
import threading

from retrieval.core import Answer, Found, Searcher, SearchFailed
from retrieval.files import PathLike, convert

FORMAT = 1  # part of every key; also the file's user_version
_APPLICATION = 0x53524C31  # the file's application_id, 'SRL1'
_TABLES = (
  'CREATE TABLE identities (sha256 TEXT PRIMARY KEY, json BLOB NOT NULL)',
  'CREATE TABLE answers (key BLOB PRIMARY KEY, sha256 BLOB NOT NULL,'
  ' answer BLOB NOT NULL) WITHOUT ROWID',
)


class StoreError(RuntimeError):
  """The store cannot be used; the message names the file and the fix."""


class Recorded:
  """A `Searcher` that answers from a store, and stores new answers.

  Attributes:
    identity: of the wrapped searcher, or the recorded one.
    threads: of the wrapped searcher.
    document: of the wrapped searcher; a replay has none.
    asked: queries of the last search that were not in the store.
  """

  def __init__(self, searcher: Searcher | None, path: PathLike, identity=''):
    """Opens a store.

    Args:
      searcher: answers queries that are not stored; the store is created if
        it does not exist. None: replay, which asks and writes nothing.
      path: the SQLite file; '' creates a temporary one.
      identity: in replay, the first letters of the SHA-256 of the identity
        to replay; required if the store holds several, else ''.

    Raises:
      StoreError: the file is absent (in replay), damaged or not a store, or
        the identity is ambiguous.
    """
    self.path = os.fspath(path)
    self.threads = getattr(searcher, 'threads', 1)
    self.document = getattr(searcher, 'document', None)  # not recorded
    self._searcher, self.asked = searcher, 0
    self._unwritten: dict[bytes, list[Found]] = {}
    self._lock = threading.Lock()  # of the store
    # Locks around asking, by the first byte of a key.
    self._asking = [threading.Lock() for _ in range(256)]
    with _named(self.path):
      self._db = _open(self.path, replay=searcher is None)
      _check(self._db, self.path, replay=searcher is None)
      if searcher is None:
        self._json = self._chosen(identity)
      else:
        self._json = _canonical(dict(searcher.identity))
        row = hashlib.sha256(self._json).hexdigest(), self._json
        self._db.execute('INSERT OR IGNORE INTO identities VALUES (?, ?)', row)
    self.identity: Mapping[str, object] = json.loads(_text(self._json))

  def search(self, queries: Sequence[str], k: int) -> list[Answer]:
    """See `Searcher.search`; (query, k) is matched exactly.

    A query that several threads ask at the same time is asked once. Failures
    and transient answers (`Found.transient`) are not stored. Answers that
    could not be stored (full disk, lock) are kept and stored before the next
    query is asked, since they may have cost money. In replay, a query that is
    not stored gives a `SearchFailed`.

    Raises:
      StoreError: the file is damaged, full or locked.
    """
    keys = {query: self._key(query, k) for query in queries}
    with contextlib.ExitStack() as asking:
      # Sorted, so that two threads cannot deadlock.
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
    """Closes the store and the wrapped searcher."""
    with self._lock:
      self._db.close()
      if self._searcher is not None:
        self._searcher.close()

  def _key(self, query: str, k: int) -> bytes:
    parts = [FORMAT, _text(self._json), query, k]
    return hashlib.sha256(_canonical(parts)).digest()

  def _read(self, key: bytes) -> list[Found] | None:
    query = 'SELECT sha256, answer FROM answers WHERE key = ?'
    with _named(self.path):
      row = self._db.execute(query, (key,)).fetchone()
      if row is None:
        return None
      # SQLite does not notice a changed bit within a value.
      if hashlib.sha256(key + row[1]).digest() != row[0]:
        raise sqlite3.DatabaseError('an answer does not match its SHA-256')
    return [Found(*fields) for fields in json.loads(_text(row[1]))]

  def _ask(self, keys: Mapping[str, bytes], k: int) -> dict[str, Answer]:
    """Asks the searcher, and stores the answers that are not transient."""
    if self._searcher is None:
      return {query: self._miss(query, k) for query in keys}
    found = self._searcher.search([*keys], k)
    answers = dict(zip(keys, found, strict=True))
    good = [
      query
      for query, answer in answers.items()
      if isinstance(answer, list) and not any(one.transient for one in answer)
    ]
    with self._lock:
      self._write({keys[query]: answers[query] for query in good})
      # Read back, so that two processes that asked at once give the same
      # answer, which is also that of a replay.
      return answers | {query: self._read(keys[query]) for query in good}

  def _write(self, answers: Mapping[bytes, list[Found]]) -> None:
    """Stores answers, including those that could not be stored before."""
    self._unwritten |= answers
    if not self._unwritten:
      return
    rows = []
    for key, answer in self._unwritten.items():
      value = _canonical([[f.id, f.contents, float(f.score)] for f in answer])
      rows.append((key, hashlib.sha256(key + value).digest(), value))
    new = 'INSERT OR IGNORE INTO answers VALUES (?, ?, ?)'
    with _named(self.path), self._db as db:
      db.execute('BEGIN IMMEDIATE')
      db.executemany(new, rows)
    self._unwritten.clear()

  def _miss(self, query: str, k: int) -> SearchFailed:
    problem = f'no recorded answer to {query[:200]!r} with k={k}'
    return SearchFailed(f'{self.path}: {problem}. Record it first.')

  def _chosen(self, prefix: str) -> bytes:
    held = sorted(self._db.execute('SELECT sha256, json FROM identities'))
    found = [value for sha256, value in held if sha256.startswith(prefix)]
    if len(found) == 1:
      return found[0]
    listed = '; '.join(f'{name[:12]} {_text(x)[:200]!a}' for name, x in held)
    count = f'{len(found)} of the recorded identities begin with {prefix!r}'
    fix = f'Name one by its first letters: {listed or "none"}.'
    raise StoreError(f'{self.path}: {count}. {fix}')


def _canonical(value: object) -> bytes:
  options = {'ensure_ascii': False, 'allow_nan': False, 'sort_keys': True}
  text = json.dumps(value, separators=(',', ':'), **options)
  return text.encode('utf-8', 'surrogatepass')


def _text(value: bytes) -> str:
  return value.decode('utf-8', 'surrogatepass')


def _open(path: str, replay: bool) -> sqlite3.Connection:
  options = {'timeout': 30.0, 'isolation_level': None}
  whole = pathlib.Path(path).absolute()
  uri = whole.as_uri() if path else 'file:'
  uri += '?mode=ro' if replay else '?mode=rwc'
  # WAL writes a file in the folder even to read. If no process can write there,
  # the store does not change.
  if replay and not (
    os.access(whole.parent, os.W_OK) or os.path.exists(path + '-wal')
  ):
    uri += '&immutable=1'
  return sqlite3.connect(uri, uri=True, check_same_thread=False, **options)


def _check(db: sqlite3.Connection, path: str, replay: bool) -> None:
  """Initialises a new file as a store; refuses other files."""

  def pragma(name: str) -> int:
    return db.execute(f'PRAGMA {name}').fetchone()[0]

  if not replay and not pragma('schema_version'):
    db.execute('PRAGMA journal_mode = WAL')
    with db:
      db.execute('BEGIN IMMEDIATE')
      if not pragma('schema_version'):  # another process may have been first
        for statement in _TABLES:
          db.execute(statement)
        db.execute(f'PRAGMA application_id = {_APPLICATION}')
        db.execute(f'PRAGMA user_version = {FORMAT}')
  if pragma('application_id') != _APPLICATION:
    problem = 'a SQLite file, but no store of answers'
    raise StoreError(f'{path}: {problem}. Choose another path.')
  if (found := pragma('user_version')) != FORMAT:
    problem = f'format {found}, but this version writes {FORMAT}'
    raise StoreError(f'{path}: {problem}. Record again at another path.')
  db.execute('PRAGMA synchronous = NORMAL')  # a kill loses nothing


def _named(path: str) -> contextlib.AbstractContextManager[None]:
  """Converts errors of SQLite to errors that name the file."""
  problem = f'{path}: cannot be used as a store of answers: {{}}. '
  fix = 'If it is damaged or another file, restore it or choose another path.'
  return convert(sqlite3.Error, StoreError, problem + fix)
