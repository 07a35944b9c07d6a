"""Waiting times between attempts."""

import datetime
import email.utils


def retry_after(value: str) -> float:
  """Seconds to wait according to a Retry-After header (RFC 9110, 10.2.3).

  Args:
    value: seconds or a date; 0 is returned for anything else, '' included.
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
  return max(0.0, (when - datetime.datetime.now(datetime.UTC)).total_seconds())
