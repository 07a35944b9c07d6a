"""Calls and money: counted before a call goes out, kept over restarts."""

from collections.abc import Iterator
import contextlib
import math
import os
import sqlite3

from retrieval.core import SearchFailed


class Budget:
  """The spending of one provider, and its ceilings.

  One file holds the spending of each provider and may be shared by processes
  of one machine. A call that fails is counted too: an upper bound of what is
  billed.
  """

  def __init__(
    self,
    provider: str,
    *,
    max_calls: int | None = None,
    max_cost: float | None = None,
    price: float | None = None,
    path: str | os.PathLike | None = None,
  ):
    """Opens the ledger.

    Args:
      provider: whose spending this is.
      max_calls: in all; None: no bound.
      max_cost: in all, in the unit of `price`; needs a price.
      price: of one call.
      path: a SQLite file; None counts for this object alone.

    Raises:
      ValueError: a bound or price below 0, or max_cost without a price.
      RuntimeError: the file is no ledger.
    """
    if max_cost is not None and price is None:
      raise ValueError('max_cost needs the price of a call (price)')
    for name, value in dict(
      max_calls=max_calls, max_cost=max_cost, price=price
    ).items():
      if value is not None and not 0 <= value < math.inf:
        raise ValueError(f'{name}={value} must be a number from 0 on')
    self.max_calls, self.max_cost, self.price = max_calls, max_cost, price
    self.path = ':memory:' if path is None else os.fspath(path)
    self._provider = provider
    # In units of 1e-9: sums of floats would drift.
    self._price, self._most = (
      None if x is None else round(x * 1e9) for x in (price or 0, max_cost)
    )
    with self._named():
      self._db = sqlite3.connect(
        self.path, timeout=30.0, isolation_level=None, check_same_thread=False
      )
      self._db.execute(
        'CREATE TABLE IF NOT EXISTS spent (provider TEXT PRIMARY KEY,'
        ' calls INTEGER NOT NULL, nano INTEGER NOT NULL)'
      )
      self._db.execute(
        'INSERT OR IGNORE INTO spent VALUES (?, 0, 0)', (provider,)
      )

  @property
  def spent(self) -> tuple[int, float]:
    """Calls and money so far."""
    with self._named():
      calls, nano = self._db.execute(
        'SELECT calls, nano FROM spent WHERE provider = ?', (self._provider,)
      ).fetchone()
    return calls, nano / 1e9

  def take(self) -> None:
    """Counts one call.

    Raises:
      SearchFailed: it would pass a ceiling, or cannot be counted.
    """
    try:
      with self._named():
        taken = self._db.execute(
          'UPDATE spent SET calls = calls + 1, nano = nano + :price'
          ' WHERE provider = :provider'
          ' AND (:calls IS NULL OR calls + 1 <= :calls)'
          ' AND (:most IS NULL OR nano + :price <= :most)',
          dict(
            price=self._price,
            provider=self._provider,
            calls=self.max_calls,
            most=self._most,
          ),
        ).rowcount
      if not taken:
        calls, cost = self.spent
        raise SearchFailed(
          f'the budget for {self._provider} is used up: {calls} calls, '
          f'{cost:g} spent (max_calls={self.max_calls}, '
          f'max_cost={self.max_cost}, price={self.price}, {self.path}). '
          'Raise the ceiling to go on.'
        )
    except RuntimeError as error:
      raise SearchFailed(str(error)) from None

  def close(self) -> None:
    """Closes the ledger."""
    self._db.close()

  @contextlib.contextmanager
  def _named(self) -> Iterator[None]:
    try:
      yield
    except sqlite3.Error as error:
      raise RuntimeError(
        f'{self.path}: cannot be used as a ledger of calls: {error}. Mend it '
        'or choose another path.'
      ) from error
