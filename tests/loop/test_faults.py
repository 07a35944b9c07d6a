"""Training while the service fails: no hang, and no false zero reward.

A warm-started model trains through a proxy that answers one request in ten
with an error, a cut connection or rubbish and one in twenty too late, and
fails on some queries whenever they are asked; the server behind it is killed
twice. Then a healthy server says what every search should have found.

`FAULTS=quickstart pytest -s tests/loop/test_faults.py -o timeout=0` does it to
the quickstart as it is: its world, model, warm start and 60 steps of 256.
"""

import collections
import hashlib
import http.client
import http.server
import itertools
import json
import os
import random
import threading
import time

from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import quickstart
from retrieval import process
from retrieval.client import retrieve_sync
from searchrl_jax import sft, train
from searchrl_jax.store import records
from searchrl_jax.types import SearchError
from searchrl_jax.worlds import microworld
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]

WHOLE = os.environ.get('FAULTS') == 'quickstart'
TIMEOUT_S = 1.5
# What happens to forty requests, in turn: 10 % fail and 5 % are late.
TURNS = ['none'] * 40
for at, kind in {
  3: 'status',
  9: 'late',
  14: 'cut',
  20: 'rubbish',
  27: 'status',
  33: 'late',
}.items():
  TURNS[at] = kind
KILLS = (60, 400) if WHOLE else (15, 40)  # after so many requests


class Chaos:
  """A proxy before a retrieval server, which it kills and starts again."""

  def __init__(self, corpus, folder):
    self.corpus, self.log = corpus, folder / 'log'
    self.server = process.start_server(corpus, log_path=self.log)
    self.upstream = self.server.url.removeprefix('http://')
    self.counts = collections.Counter()
    self.calm, self._turns = False, itertools.cycle(TURNS)
    self._lock, self._restarts = threading.Lock(), []
    outer = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def log_message(self, *_):
        pass

      def send(self, status, body, length=None):
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

      def do_GET(self):
        self.forward(None)

      def do_POST(self):
        body = self.rfile.read(int(self.headers['Content-Length']))
        fault = outer.fault(json.loads(body)['queries'])
        if fault == 'late':
          time.sleep(2 * TIMEOUT_S)
        if fault == 'status':
          self.send(random.choice((500, 502, 503)), b'{"detail": "no"}')
        elif fault in ('rubbish', 'poisoned'):
          self.send(200, random.choice((b'<html>', b'{"result": []}')))
        elif fault == 'cut':
          self.send(200, b'{"result": [[', length=1000)
          self.close_connection = True
        else:
          self.forward(body)

      def forward(self, body):
        try:
          upstream = http.client.HTTPConnection(outer.upstream, timeout=20)
          upstream.request(self.command, self.path, body)
          answer = upstream.getresponse()
          self.send(answer.status, answer.read())
          upstream.close()
        except (OSError, http.client.HTTPException):
          with outer._lock:
            outer.counts['down'] += 1
          self.close_connection = True

    self._proxy = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self._proxy.handle_error = lambda *_: None  # clients that gave up
    self.url = f'http://127.0.0.1:{self._proxy.server_port}'
    threading.Thread(target=self._proxy.serve_forever, daemon=True).start()

  def fault(self, queries):
    """What happens to this request."""
    with self._lock:
      if self.calm:
        return 'none'
      self.counts['requests'] += 1
      if self.counts['requests'] in KILLS:
        self._restarts.append(threading.Thread(target=self._restart))
        self._restarts[-1].start()
      if any(map(poisoned, queries)):
        kind = 'poisoned'
      else:
        kind = next(self._turns)
      self.counts[kind] += 1
      return kind

  def _restart(self):
    self.server._process.kill()
    self.server.stop()
    port = int(self.upstream.rpartition(':')[2])
    self.server = process.start_server(
      self.corpus, port=port, log_path=self.log
    )
    self.counts['restarts'] += 1

  def stop(self):
    for thread in self._restarts:
      thread.join(60)
    self._proxy.shutdown()
    self._proxy.server_close()
    self.server.stop()


def poisoned(query):
  """Some queries, always the same: their trajectories cannot but fail."""
  return hashlib.sha256(query.encode()).digest()[0] < 256 // 12


@pytest.fixture(scope='module')
def chaos(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chaos')
  made = config_of('')
  world = microworld.generate(made.data.world_seed, **made.data.world)
  chaos = Chaos(microworld.write(world, folder)['corpus'], folder)
  yield chaos
  chaos.stop()


def config_of(url):
  c = small(url)
  if WHOLE:
    c = quickstart.get_config()
    c.source.url = url
    c.log.progress = c.log.tensorboard = False
  c.source.timeout, c.source.deadline, c.source.attempts = TIMEOUT_S, 60.0, 4
  c.rollout.max_failed = 0.9
  c.eval.every = 0
  c.checkpoint.every = 0
  c.checkpoint.best = ''
  c.data.eval = ConfigDict()
  return c


def small(url):
  c = tiny.config(url)
  c.model.arch.update(
    dict(
      hidden_size=64,
      intermediate_size=128,
      num_attention_heads=4,
      num_key_value_heads=4,
    )
  )
  c.env.max_turns, c.env.max_turn_tokens = 3, 24
  c.env.max_tokens = c.engine.max_len = 192
  c.batch.lengths = (192,)
  c.batch.tokens = 1536
  c.sft.data.update(
    dict(n=600, worlds=6, train=40, relations=3, guess=0.0, good=0.8, poor=0.2)
  )
  c.sft.steps, c.sft.warmup, c.sft.rows = 80, 10, 16
  c.rollout.questions, c.rollout.group = 8, 4
  c.train.steps = 4
  return c


@pytest.mark.long
def test_faults_cost_trajectories_and_never_a_false_reward(
  chaos, tmp_path, monkeypatch
):
  config = config_of(chaos.url)
  chaos.calm = True
  sft.sft(config, str(tmp_path / 'warm'))
  chaos.calm = False
  config.train.init = str(tmp_path / 'warm')

  trained, failed = [], []
  real = train.batching.make

  def make(trajectories, kept, *args, **kw):
    batches = real(trajectories, kept, *args, **kw)
    rows = {r for mini in batches for b in mini for r in b.owner if r >= 0}
    assert rows == set(np.flatnonzero(kept))
    trained.extend(trajectories[r] for r in rows)
    failed.extend(t for t in trajectories if t.failed)
    return batches

  monkeypatch.setattr(train.batching, 'make', make)
  begun = time.monotonic()
  train.train(config, str(tmp_path / 'run'))
  seconds = time.monotonic() - begun

  # All of it happened.
  counts = chaos.counts
  print(
    f'{seconds:.0f} s, {dict(counts)}, {len(trained)} trained on, '
    f'{len(failed)} failed'
  )
  assert counts['restarts'] == 2 and counts['down'] > 0
  for kind in (*TURNS, 'poisoned'):
    assert counts[kind] > 0, kind
  kept = [*records.read(tmp_path / 'run' / 'trajectories')]
  each = config.rollout.questions * config.rollout.group
  assert len(kept) == config.train.steps * each == len(trained) + len(failed)

  # Who has a search without an answer is marked, and outside the loss.
  assert failed and not any(t.failed for t in trained)
  for record in kept:
    t = record.trajectory
    errors = [isinstance(search, SearchError) for search in t.searches]
    assert any(errors) == t.failed
    if any(errors):
      assert not record.kept and record.advantages is None

  # What was trained on is what a healthy server finds; an outage that looked
  # like "no passages" would be here.
  chaos.calm = True
  searches = [s for t in trained for s in t.searches]
  queries = sorted({s.request.query for s in searches})
  healthy = dict(
    zip(
      queries, retrieve_sync(chaos.url, queries, config.source.k), strict=True
    )
  )
  false = [
    s
    for s in searches
    if [(p.id, p.title, p.text, p.score) for p in s.passages]
    != [(h.id, h.title, h.text, h.score) for h in healthy[s.request.query]]
  ]
  assert len(searches) > 50 and any(healthy.values())
  assert false == []
