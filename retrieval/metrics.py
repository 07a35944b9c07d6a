"""What the service counts and times, for Prometheus (GET /metrics).

Metrics belong to the process, as Prometheus has it. Time a stage with

  with stage('encode'):
    ...
"""

import contextlib

import prometheus_client

_SECONDS = (
  0.0005,
  0.001,
  0.002,
  0.005,
  0.01,
  0.02,
  0.05,
  0.1,
  0.2,
  0.5,
  1,
  2,
  5,
  10,
  30,
)
STAGES = prometheus_client.Histogram(
  'retrieval_stage_seconds',
  'Seconds of one batch in a stage: encode, search, rerank; batch is all.',
  ['stage'],
  buckets=_SECONDS,
)
REQUESTS = prometheus_client.Histogram(
  'retrieval_request_seconds',
  'Seconds from the first byte of a search request to the last of its answer.',
  buckets=_SECONDS,
)
RESPONSES = prometheus_client.Counter(
  'retrieval_responses', 'Answers to requests of any path.', ['status']
)
REJECTED = prometheus_client.Counter(
  'retrieval_rejected', 'Requests refused, by the bound they met.', ['reason']
)
BATCH = prometheus_client.Histogram(
  'retrieval_batch_queries',
  'Different queries in one call of the searcher.',
  buckets=[2**n for n in range(13)],
)
PENDING = prometheus_client.Gauge(
  'retrieval_pending_queries', 'Queries taken and not yet answered.'
)
IN_FLIGHT = prometheus_client.Gauge(
  'retrieval_requests_in_flight', 'Search requests taken and not yet answered.'
)
# Of results in page mode: pages show their text; fallbacks the snippet, for
# lack of text; transient the snippet, since the page was not to be had now.
WEB = prometheus_client.Counter(
  'retrieval_web',
  'Web search: calls, failed and refused queries; results, by '
  'what they show: pages (their text), fallbacks and transient (a snippet).',
  ['event'],
)


def stage(name: str) -> contextlib.AbstractContextManager:
  """Times what runs inside as one batch of stage `name`."""
  return STAGES.labels(name).time()
