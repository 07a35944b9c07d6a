"""Stop strings, found in decoded text as it grows."""


class StopFinder:
  """Finds stop strings in the text of one completion, token by token."""

  def __init__(self, stops: tuple[str, ...]):
    self._stops = [(s, s.encode()) for s in stops]
    self._longest = max((len(b) for _, b in self._stops), default=0)
    self._tail = b''

  def __call__(self, text: bytes) -> str | None:
    """Adds one token's bytes; the stop that it completes (first to end)."""
    text = self._tail + text
    found = [
      (at + len(b), -len(b), s)
      for s, b in self._stops
      if (at := text.find(b)) >= 0
    ]
    keep = self._longest - 1
    self._tail = text[-keep:] if keep > 0 else b''
    return min(found)[2] if found else None
