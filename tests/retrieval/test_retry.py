"""Retry-After, which comes from outside: any bytes, and it never raises."""

import datetime
import email.utils

import pytest

from retrieval.retry import retry_after


@pytest.mark.parametrize(
  'value, seconds',
  [
    ('0', 0),
    ('7', 7),
    (' 12 ', 12),
    ('', 0),
    ('soon', 0),
    ('-1', 0),
    ('9' * 99, 0),
    ('1.5', 0),
    ('٣', 0),
    ('²', 0),
    ('Wed, 21 Oct 2015 07:28:00 GMT', 0),  # in the past
    ('Wed, 21 Oct 2099 07:28:00 +99999999999999999', 0),
  ],
)
def test_seconds(value, seconds):
  assert retry_after(value) == seconds


def test_a_date_to_come():
  when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
  assert 3500 < retry_after(email.utils.format_datetime(when)) <= 3600
