"""Prometheus metrics of the service (GET /metrics).

Metrics belong to the process. Time a stage with

  with stage('encode'):
    ...
"""

import contextlib

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = '.0005 .001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 30'.split()
_STAGES = 'Seconds of a batch: encode, search, rerank; batch is all of them.'
_REQUESTS = 'Seconds from the head of a request to the end of its answer.'
STAGES = Histogram(
  'retrieval_stage_seconds', _STAGES, ['stage'], buckets=_SECONDS
)
REQUESTS = Histogram('retrieval_request_seconds', _REQUESTS, buckets=_SECONDS)
RESPONSES = Counter('retrieval_responses', 'Answers by status.', ['status'])
REJECTED = Counter('retrieval_rejected', 'Requests refused.', ['reason'])
BATCH = Histogram(
  'retrieval_batch_queries',
  'Different queries in one call of the searcher.',
  buckets=[2**n for n in range(13)],
)
PENDING = Gauge('retrieval_pending_queries', 'Queries not yet answered.')
IN_FLIGHT = Gauge('retrieval_requests_in_flight', 'Requests not yet answered.')
# Results in page mode: 'pages' show the text of the page; 'fallbacks' show the
# snippet because the page has no text; 'transient' show the snippet because
# the page could not be fetched this time.
WEB = Counter('retrieval_web', 'Calls, queries, results by event.', ['event'])


def stage(name: str) -> contextlib.AbstractContextManager:
  """Times the enclosed code as one batch of the stage `name`."""
  return STAGES.labels(name).time()
