"""The real server: what it serves, where it listens, how it dies and returns.

The last tests kill it, so they stand last.
"""

import os
import signal
import time

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from searchrl_jax.engines.vllm.launcher import SidecarError, start_sidecar
from searchrl_jax.models import decoder
from tests.sidecar.conftest import CFG, FLAGS

pytestmark = pytest.mark.sidecar
WAIT_S = 200
PROMPT = [5, 200, 17, 90, 33, 260, 8]


def group(pid: int) -> list[psutil.Process]:
  """The processes of the server whose API is `pid`, the API first."""
  out = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
  assert len(out) >= 3  # API, engine core, worker
  return out


def alive(processes) -> list[psutil.Process]:
  return [
    p
    for p in processes
    if p.is_running() and p.status() != psutil.STATUS_ZOMBIE
  ]


def log_softmax(served, ids) -> np.ndarray:
  """[T, V] of the decoder, in one pass without a cache."""
  hidden = decoder.hidden_states(served.params, CFG, jnp.asarray([ids]))
  x = np.asarray(decoder.logits(served.params, CFG, hidden), np.float64)[0]
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize('temperature', [0.0, 1.0, 0.7])
def test_an_export_is_served_exactly(served, temperature):
  """Greedy ids and log-probs of the distribution sampled from."""
  got = served.complete(PROMPT, max_tokens=12, temperature=temperature, seed=4)
  ids = got['token_ids']
  assert len(ids) == 12 and got['finish_reason'] == 'length'
  want = log_softmax(served, PROMPT + ids)[len(PROMPT) - 1 : -1]
  if temperature:
    x = want / temperature
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
  else:
    assert want.argmax(-1).tolist() == ids
  np.testing.assert_allclose(
    got['logprobs']['token_logprobs'], want[np.arange(12), ids], atol=1e-4
  )


def test_a_seed_is_a_request_s_own(served):
  draw = lambda **k: served.complete(
    PROMPT, max_tokens=20, temperature=1.0, **k
  )['token_ids']
  assert draw(seed=1) == draw(seed=1) != draw(seed=2)


def test_the_plugin_is_in_the_worker(served):
  [found] = served.rpc('searchrl_describe')
  assert found['dtype'] == 'float32' and found['vocab_size'] == 300


def test_blocks_are_as_short_as_asked(served):
  prompt = np.random.default_rng(3).integers(2, 300, 70).tolist()
  served.complete(prompt, max_tokens=1)
  answer = served.post(
    '/v1/completions', dict(model='policy', prompt=prompt, max_tokens=1)
  ).json()
  details = answer['usage']['prompt_tokens_details']
  assert details['cached_tokens'] == 64


def test_it_listens_on_this_machine_alone(served):
  addresses = {
    c.laddr.ip
    for p in group(served.sidecar.server_pid)
    for c in p.net_connections('tcp')
    if c.status == psutil.CONN_LISTEN
  }
  assert addresses and addresses <= {'127.0.0.1', '::1'}


def test_no_process_of_it_loads_jax(served):
  for process in group(served.sidecar.server_pid):
    paths = [m.path for m in process.memory_maps()]
    assert not any('jaxlib' in path for path in paths)


def test_a_start_that_fails_in_the_worker_says_why(served, tmp_path):
  """The root cause, out of the tracebacks of three processes."""
  flags = FLAGS | dict(plugin='searchrl_jax.engines.nowhere:Worker')
  with pytest.raises(SidecarError) as e:
    start_sidecar(served.folder, log_file=tmp_path / 'log', **flags)
  first = str(e.value).splitlines()[1]
  assert 'ModuleNotFoundError' in first and 'engines.nowhere' in first


def test_a_killed_server_comes_back_whole(served):
  """Killed by force, vLLM's API leaves its engine behind; nobody else may."""
  sidecar = served.sidecar
  before, url = sidecar.restarts, sidecar.url
  want = served.complete(PROMPT)['token_ids']
  old = group(sidecar.server_pid)
  os.kill(old[0].pid, signal.SIGKILL)
  deadline = time.monotonic() + WAIT_S
  while (sidecar.restarts, sidecar.ready) != (before + 1, True):
    assert sidecar.running and time.monotonic() < deadline
    time.sleep(1)
  assert alive(old) == [] and sidecar.url == url
  assert served.complete(PROMPT)['token_ids'] == want
