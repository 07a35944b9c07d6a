"""Prometheus metrics of the service (GET /metrics).

Metrics belong to the process. Time a stage with

  with stage('encode'):
    ...
"""

import contextlib

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = '.0005 .001 .002 .005 .01 .02 .05 .1 .2 .5 1 2 5 10 30'.split()
STAGES = Histogram(
  'retrieval_stage_seconds',
  'Seconds of one batch in a stage: encode, search, rerank; batch is all.',
  ['stage'],
  buckets=_SECONDS,
)
REQUESTS = Histogram(
  'retrieval_request_seconds',
  'Seconds from the first byte of a search request to the last of its answer.',
  buckets=_SECONDS,
)
RESPONSES = Counter('retrieval_responses', 'Answers by status.', ['status'])
REJECTED = Counter('retrieval_rejected', 'Requests refused.', ['reason'])
BATCH = Histogram(
  'retrieval_batch_queries',
  'Different queries in one call of the searcher.',
  buckets=[2**n for n in range(13)],
)
PENDING = Gauge('retrieval_pending_queries', 'Queries not yet answered.')
IN_FLIGHT = Gauge(
  'retrieval_requests_in_flight', 'Search requests not yet answered.'
)
# Results in page mode: 'pages' show the text of the page; 'fallbacks' show the
# snippet because the page has no text; 'transient' show the snippet because
# the page could not be fetched this time.
WEB = Counter(
  'retrieval_web',
  'Web search: calls; failed and refused queries; results by what they '
  'show: pages (text), fallbacks and transient (snippet).',
  ['event'],
)


def stage(name: str) -> contextlib.AbstractContextManager:
  """Times the enclosed code as one batch of the stage `name`."""
  return STAGES.labels(name).time()
