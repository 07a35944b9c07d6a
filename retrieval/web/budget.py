"""Counts paid calls and their cost before they are made, across restarts."""

import os
import sqlite3

from retrieval.core import SearchFailed
from retrieval.files import convert

_TABLE = """CREATE TABLE IF NOT EXISTS spent (provider TEXT PRIMARY KEY,
  calls INTEGER NOT NULL, nano INTEGER NOT NULL)"""
_TAKE = """UPDATE spent SET calls = calls + 1, nano = nano + :price
  WHERE provider = :provider
  AND (:calls IS NULL OR calls + 1 <= :calls)
  AND (:most IS NULL OR nano + :price <= :most)"""


class Budget:
  """The spending at one provider, and its limits.

  One file holds the spending at each provider; processes of one machine may
  share it. Failed calls count too, so the count is an upper bound of the bill.
  """

  def __init__(
    self, provider: str, max_calls=None, max_cost=None, price=None, ledger=None
  ):
    """Opens the ledger.

    Args:
      provider: the name of the provider.
      max_calls: the limit of all calls together; None: no limit.
      max_cost: the limit of the total cost, in the unit of `price`.
      price: of one call; required by max_cost.
      ledger: a SQLite file; None counts in memory.

    Raises:
      ValueError: max_cost without a price.
      RuntimeError: the file is not a ledger.
    """
    if max_cost is not None and price is None:
      raise ValueError('max_cost needs the price of a call (price)')
    self.path = ':memory:' if ledger is None else os.fspath(ledger)
    self._limits = f'{max_calls=}, {max_cost=}, {price=}'
    # Integers in units of 1e-9, since sums of floats drift.
    most = None if max_cost is None else round(max_cost * 1e9)
    self._row = {'provider': provider, 'calls': max_calls, 'most': most}
    self._row['price'] = round((price or 0) * 1e9)
    options = {'isolation_level': None, 'check_same_thread': False}
    with self._converted():
      self._db = sqlite3.connect(self.path, timeout=30.0, **options)
      self._db.execute(_TABLE)
      new = 'INSERT OR IGNORE INTO spent VALUES (:provider, 0, 0)'
      self._db.execute(new, self._row)

  @property
  def spent(self) -> tuple[int, float]:
    """Calls and cost so far."""
    query = 'SELECT calls, nano FROM spent WHERE provider = :provider'
    with self._converted():
      calls, nano = self._db.execute(query, self._row).fetchone()
    return calls, nano / 1e9

  def take(self) -> None:
    """Counts one call.

    Raises:
      SearchFailed: the call would exceed a limit, or cannot be counted.
    """
    with convert(RuntimeError, SearchFailed, '{}'):
      with self._converted():
        taken = self._db.execute(_TAKE, self._row).rowcount
      calls, cost = self.spent
    if not taken:
      problem = f'the budget for {self._row["provider"]} is used up'
      limits = f'({self._limits}, {self.path}). Raise the limit.'
      raise SearchFailed(f'{problem}: {calls} calls, {cost:g} spent {limits}')

  def close(self) -> None:
    """Closes the ledger."""
    self._db.close()

  def _converted(self):
    problem = 'cannot be used as a ledger of calls: {}. Choose another path.'
    return convert(sqlite3.Error, RuntimeError, f'{self.path}: {problem}')
