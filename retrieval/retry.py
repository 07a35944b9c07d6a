"""What an HTTP answer says of when to ask again."""

import datetime
import email.utils


def retry_after(value: str) -> float:
  """Seconds that a Retry-After header asks to wait (RFC 9110, 10.2.3).

  Args:
    value: seconds or a date; anything else, '' too, asks nothing: 0.
  """
  value = value.strip()
  if value.isascii() and value.isdigit() and len(value) < 10:
    return float(value)
  try:
    when = email.utils.parsedate_to_datetime(value)
  except (ValueError, OverflowError):
    return 0.0
  if when.tzinfo is None:
    when = when.replace(tzinfo=datetime.UTC)
  now = datetime.datetime.now(datetime.UTC)
  return max(0.0, (when - now).total_seconds())
