"""Counts paid calls and their cost before they are made, across restarts."""

import math
import os
import sqlite3

from retrieval.core import SearchFailed
from retrieval.files import PathLike, convert

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
    self,
    provider: str,
    *,
    max_calls: int | None = None,
    max_cost: float | None = None,
    price: float | None = None,
    path: PathLike | None = None,
  ):
    """Opens the ledger.

    Args:
      provider: the name of the provider.
      max_calls: the limit of all calls together; None: no limit.
      max_cost: the limit of the total cost, in the unit of `price`.
      price: of one call; required by max_cost.
      path: a SQLite file; None counts in memory.

    Raises:
      ValueError: a negative limit or price, or max_cost without a price.
      RuntimeError: the file is not a ledger.
    """
    if max_cost is not None and price is None:
      raise ValueError('max_cost needs the price of a call (price)')
    limits = {'max_calls': max_calls, 'max_cost': max_cost, 'price': price}
    for name, value in limits.items():
      if value is not None and not 0 <= value < math.inf:
        raise ValueError(f'{name}={value} must be a number from 0 on')
    self.path = ':memory:' if path is None else os.fspath(path)
    # Integers in units of 1e-9, since sums of floats drift.
    most = None if max_cost is None else round(max_cost * 1e9)
    price = round((price or 0) * 1e9)
    self._row = {'provider': provider, 'calls': max_calls, 'most': most}
    self._row['price'] = price
    self._limits = ', '.join(f'{k}={v}' for k, v in limits.items())
    with self._converted():
      self._db = sqlite3.connect(
        self.path, timeout=30.0, isolation_level=None, check_same_thread=False
      )
      self._db.execute(_TABLE)
      self._db.execute(
        'INSERT OR IGNORE INTO spent VALUES (?, 0, 0)', (provider,)
      )

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
      raise SearchFailed(
        f'the budget for {self._row["provider"]} is used up: {calls} calls, '
        f'{cost:g} spent ({self._limits}, {self.path}). Raise the limit.'
      )

  def close(self) -> None:
    """Closes the ledger."""
    self._db.close()

  def _converted(self):
    problem = 'cannot be used as a ledger of calls: {}. Choose another path.'
    return convert(sqlite3.Error, RuntimeError, f'{self.path}: {problem}')
