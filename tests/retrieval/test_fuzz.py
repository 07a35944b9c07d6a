"""Cases that schemathesis makes from the application's own OpenAPI.

`make test` tries a few of each endpoint; many more by hand:

  FUZZ_EXAMPLES=5000 python -m pytest tests/retrieval/test_fuzz.py
"""

import collections
import os

import hypothesis
import pytest
import schemathesis

from retrieval.core import LocalSearcher
from retrieval.index.bm25 import BM25Index
from retrieval.serve.app import create_app
from retrieval.serve.protocol import Limits

EXAMPLES = int(os.environ.get('FUZZ_EXAMPLES', '20'))
LIMITS = Limits(max_topk=5, max_queries=8, max_query_bytes=4096, batch_ms=0)
SEEN = collections.Counter()  # (path, status) of all cases


@pytest.fixture
def schema(corpus):
  searcher = LocalSearcher(corpus, BM25Index(corpus.contents))
  return schemathesis.openapi.from_asgi(
    '/openapi.json', create_app(searcher, LIMITS)
  )


# All checks of schemathesis: no 5xx, statuses, content types and bodies as
# the schema says, what breaks it refused and what keeps it answered.
@pytest.mark.parametrize('mode', [*schemathesis.GenerationMode])
@pytest.mark.parametrize(
  'method, path',
  [
    ('POST', '/retrieve'),
    ('POST', '/document'),
    ('GET', '/health'),
    ('GET', '/ready'),
    ('GET', '/metrics'),
  ],
)
def test_no_case_breaks_the_service(schema, method, path, mode):
  operation = schema[path][method]
  if mode == schemathesis.GenerationMode.NEGATIVE and not operation.body:
    pytest.skip('nothing in this request can be wrong')

  @hypothesis.settings(
    max_examples=EXAMPLES if operation.body else min(EXAMPLES, 3),
    deadline=None,
    database=None,
    derandomize=EXAMPLES <= 20,
    suppress_health_check=[*hypothesis.HealthCheck],
  )
  @hypothesis.given(operation.as_strategy(generation_mode=mode))
  def check(case):
    response = case.call()
    SEEN[path, response.status_code] += 1
    if path == '/ready' and response.status_code == 503:
      return  # warming up
    if response.status_code == 413:  # schemathesis does not expect it
      sent = response.request.headers['Content-Length']
      assert int(sent) > LIMITS.max_body_bytes
      return
    assert response.status_code < 500
    case.validate_response(response)

  check()


def test_both_good_and_bad_requests_were_among_them():
  print(f'{SEEN.total()} cases: {dict(SEEN)}')
  if SEEN:  # this test may be run alone
    assert SEEN['/retrieve', 200] and SEEN['/retrieve', 422]
