"""What the service counts and times, for Prometheus (GET /metrics).

Metrics belong to the process, as Prometheus has it. Time a stage with

  with stage('encode'):
    ...
"""

import contextlib

import prometheus_client

_SECONDS = (
  0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30
)
STAGES = prometheus_client.Histogram(
  'retrieval_stage_seconds',
  'Seconds of one batch in a stage: encode, search, rerank.',
  ['stage'], buckets=_SECONDS,
)


def stage(name: str) -> contextlib.AbstractContextManager:
  """Times what runs inside as one batch of stage `name`."""
  return STAGES.labels(name).time()
