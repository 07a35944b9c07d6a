import fcntl
import hashlib
import http.server
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import types

from huggingface_hub import constants
import pytest

from retrieval import download
from retrieval.download import DownloadError, run
from tests.conftest import ROOT

DATA = b''.join(b'%07d\n' % i for i in range(40_000))  # 320 kB
OTHER = bytes(reversed(DATA))
COMMIT = 'c0ffee' * 6 + 'c0ff'
PATH = f'/datasets/o/f/resolve/{COMMIT}/f.bin'


def sha256(data):
  return hashlib.sha256(data).hexdigest()


class Server(http.server.ThreadingHTTPServer):
  """Serves `files`; `plan` says how each request for one goes, then well."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.files, self.plan, self.asked, self.sent = {}, [], [], 0
    self.api = {}
    self.url = f'http://127.0.0.1:{self.server_port}'


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'

  def log_message(self, *args):
    pass

  def do_GET(self):
    server, path = self.server, self.path.partition('?')[0]
    if path in server.api:
      return self.reply(200, json.dumps(server.api[path]).encode())
    server.asked.append(dict(self.headers))
    how = server.plan.pop(0) if server.plan else 'well'
    if callable(how):
      how = how() or 'well'
    if how == 'hang up':
      self.close_connection = True
      return None
    data = server.files.get(path)
    if isinstance(how, int):
      return self.reply(how, b'no', {'Retry-After': '0'})
    if data is None:
      return self.reply(404, b'absent')
    headers = {}
    start, asked = 0, self.headers.get('Range')
    if asked and how != 'no ranges':
      start = int(asked.removeprefix('bytes=').removesuffix('-'))
      headers['Content-Range'] = f'bytes {start}-{len(data) - 1}/{len(data)}'
      if how == 'other range':
        headers['Content-Range'] = f'bytes 0-{len(data) - 1}/{len(data)}'
    body = data[start:]
    cut = len(body) // 2 if how == 'cut' else len(body)
    self.send_response(206 if asked and 'Content-Range' in headers else 200)
    for name, value in headers.items():
      self.send_header(name, value)
    if how in ('chunked', 'chunked cut'):
      self.send_header('Transfer-Encoding', 'chunked')
      self.end_headers()
      self.put(b'%x\r\n%s\r\n' % (len(body), body))
      if how == 'chunked':
        self.put(b'0\r\n\r\n')
    elif how == 'endless':
      self.end_headers()
      self.put(body[:1000])
    else:
      self.send_header('Content-Length', str(len(body)))
      self.end_headers()
      self.put(body[:cut], slow=how == 'slow')
    self.close_connection = True

  def reply(self, code, body, headers=()):
    self.send_response(code)
    for name, value in dict(headers).items():
      self.send_header(name, value)
    self.send_header('Content-Length', str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def put(self, data, slow=False):
    for i in range(0, len(data), 1 << 16):
      self.wfile.write(data[i : i + (1 << 16)])
      self.server.sent += len(data[i : i + (1 << 16)])
      if slow:
        threading.Event().wait(0.5)  # time.sleep does nothing here


@pytest.fixture
def server(monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  monkeypatch.setattr(download.time, 'sleep', lambda s: None)
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    hub(server, 'o/f', {'f.bin': DATA})
    yield server
    server.shutdown()
    thread.join()


def ask(server, out, **given):
  """Runs the command; without a source: for the one file of o/f."""
  f = dict(
    bundle=None,
    repo=None,
    repo_type='dataset',
    file=['*'],
    revision='main',
    mirror=server.url,
    join=None,
    keep_parts=True,
    out=str(out),
  )
  if 'bundle' not in given:
    f['repo'] = 'o/f'
  return run(types.SimpleNamespace(**{**f, **given}))


def hub(server, repo, files, small=(), repo_type='datasets'):
  """Makes the server a hub that has this repository."""
  siblings = []
  for name, data in files.items():
    blob = hashlib.sha1(b'blob %d\0' % len(data) + data).hexdigest()
    entry = {'rfilename': name, 'size': len(data), 'blobId': blob}
    if name not in small:
      entry['lfs'] = {
        'sha256': sha256(data),
        'size': len(data),
        'pointerSize': 130,
      }
    siblings.append(entry)
    prefix = '' if repo_type == 'models' else f'/{repo_type}'
    server.files[f'{prefix}/{repo}/resolve/{COMMIT}/{name}'] = data
  server.api[f'/api/{repo_type}/{repo}/revision/main'] = {
    'id': repo,
    'sha': COMMIT,
    'siblings': siblings,
  }


def test_one_file_and_again_without_a_network(server, tmp_path):
  assert ask(server, tmp_path) == [tmp_path / 'f.bin']
  assert (tmp_path / 'f.bin').read_bytes() == DATA
  asked = len(server.asked)
  server.files.clear(), server.api.clear()
  ask(server, tmp_path)
  assert len(server.asked) == asked == 1
  assert not list(tmp_path.glob('*.part'))


def test_cut_connections_go_on_where_they_were(server, tmp_path):
  server.plan = ['cut', 'cut', 500, 'cut']
  ask(server, tmp_path)
  assert (tmp_path / 'f.bin').read_bytes() == DATA
  assert server.sent == len(DATA)  # no byte twice
  assert [a.get('Range') for a in server.asked] == [None] + [
    f'bytes={n}-' for n in (160_000, 240_000, 240_000, 280_000)
  ]


def test_gives_up_and_keeps_what_came(server, tmp_path):
  server.plan = ['cut'] + [503] * 100
  with pytest.raises(DownloadError, match='503.*160000 bytes'):
    ask(server, tmp_path)
  assert not (tmp_path / 'f.bin').exists()
  assert (tmp_path / 'f.bin.part').read_bytes() == DATA[:160_000]
  server.plan = []
  ask(server, tmp_path)
  assert server.sent == len(DATA)


def test_file_that_changes_between_requests_is_not_mixed(server, tmp_path):
  server.plan = ['cut', lambda: server.files.update({PATH: OTHER})]
  with pytest.raises(DownloadError, match='was due'):
    ask(server, tmp_path)
  assert not list(tmp_path.glob('f*'))
  server.files[PATH] = DATA
  ask(server, tmp_path)
  assert (tmp_path / 'f.bin').read_bytes() == DATA


@pytest.mark.parametrize('how', ['no ranges', 'other range'])
def test_servers_that_do_not_do_ranges(server, tmp_path, how):
  server.plan = ['cut', how]
  ask(server, tmp_path)
  assert (tmp_path / 'f.bin').read_bytes() == DATA


def test_wrong_hash_is_refused_and_not_resumed(server, tmp_path):
  server.files[PATH] = OTHER
  with pytest.raises(DownloadError) as error:
    ask(server, tmp_path)
  assert sha256(OTHER) in str(error.value) and sha256(DATA) in str(error.value)
  assert not list(tmp_path.glob('f*'))
  server.files[PATH] = DATA
  ask(server, tmp_path)


def test_part_longer_than_the_file(server, tmp_path):
  (tmp_path / 'f.bin.part').write_bytes(b'x' * (len(DATA) + 5))
  ask(server, tmp_path)
  assert (tmp_path / 'f.bin').read_bytes() == DATA


def test_whole_part_is_not_fetched_again(server, tmp_path):
  (tmp_path / 'f.bin.part').write_bytes(DATA)  # killed before the rename
  ask(server, tmp_path)
  assert server.sent == 0


@pytest.mark.parametrize(
  'plan, said', [([404], 'status 404'), ([403], 'HF_TOKEN')]
)
def test_refusals(server, tmp_path, plan, said):
  server.plan = plan
  with pytest.raises(DownloadError, match=said):
    ask(server, tmp_path)
  assert not (tmp_path / 'f.bin').exists()
  assert len(server.asked) == 1


def test_answers_that_do_not_state_their_length(server, tmp_path):
  server.plan = ['endless', 'chunked cut', 'chunked']
  ask(server, tmp_path)
  assert (tmp_path / 'f.bin').read_bytes() == DATA


def test_no_server(server, tmp_path):
  server.plan = ['hang up'] * 6
  with pytest.raises(DownloadError, match='6 times'):
    ask(server, tmp_path)


def test_file_that_is_there_already(server, tmp_path):
  path = tmp_path / 'f.bin'
  path.write_bytes(DATA[:1000])
  with pytest.raises(DownloadError, match='already'):
    ask(server, tmp_path)
  path.write_bytes(DATA)
  ask(server, tmp_path)
  assert server.asked == []


def test_two_processes(server, tmp_path):
  with open(tmp_path / 'f.bin.part', 'wb') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(DownloadError, match='f.bin.part'):
      ask(server, tmp_path)


def test_bad_requests(server, tmp_path):
  for given in (dict(repo=None), dict(repo='a/b', bundle='wiki-18-bm25')):
    with pytest.raises(DownloadError, match='give one of'):
      ask(server, tmp_path, **given)


def test_hub_repository_by_its_own_hashes(server, tmp_path):
  hub(
    server,
    'o/n',
    {'a/b.bin': DATA, 'README.md': b'read', 'c.txt': b'no'},
    small=['README.md', 'c.txt'],
  )
  server.plan = ['well', 'cut']
  found = ask(server, tmp_path, repo='o/n', file=['*.bin', 'README*'])
  assert found == [tmp_path / 'README.md', tmp_path / 'a/b.bin']
  assert (tmp_path / 'a/b.bin').read_bytes() == DATA
  assert not (tmp_path / 'c.txt').exists()
  assert not any('Authorization' in a for a in server.asked)  # http
  server.files.clear(), server.api.clear()
  assert found == ask(server, tmp_path, repo='o/n', file=['*.bin', 'README*'])


@pytest.mark.parametrize('name', ['a.bin', 'small.txt'])
def test_hub_file_of_another_hash(server, tmp_path, name):
  hub(server, 'o/n', {name: DATA}, small=['small.txt'], repo_type='models')
  server.files[f'/o/n/resolve/{COMMIT}/{name}'] = OTHER
  with pytest.raises(DownloadError, match='was due'):
    ask(server, tmp_path, repo='o/n', repo_type='model')
  server.files[f'/o/n/resolve/{COMMIT}/{name}'] = DATA + b'more'
  with pytest.raises(DownloadError, match='320000'):
    ask(server, tmp_path, repo='o/n', repo_type='model')
  assert not (tmp_path / name).exists()


@pytest.mark.parametrize('name', ['../x', '/x', 'a/../../x', 'a\\x', 'a//x'])
def test_names_cannot_leave_the_folder(server, tmp_path, name):
  hub(server, 'o/n', {name: DATA})
  with pytest.raises(DownloadError, match='refused'):
    ask(server, tmp_path / 'out', repo='o/n')
  assert server.asked == []


def test_hub_errors_name_what_is_wrong(server, tmp_path):
  with pytest.raises(DownloadError, match='o/absent'):
    ask(server, tmp_path, repo='o/absent')
  with pytest.raises(DownloadError, match='no/such/name'):
    ask(server, tmp_path, repo='no/such/name')
  hub(server, 'o/n', {'a\x1b[2J': DATA, 'b': DATA})
  with pytest.raises(DownloadError, match="'z'") as error:
    ask(server, tmp_path, repo='o/n', file=['z'])
  assert '\x1b' not in str(error.value)


def test_offline_says_so(server, tmp_path, monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(DownloadError, match='offline mode'):
    ask(server, tmp_path)


def test_bundle_joins_its_parts(server, tmp_path):
  repo, _, name = download.BUNDLES['wiki-18-e5-flat']
  hub(server, repo, {'part_ab': DATA[150:], 'part_aa': DATA[:150], 'x': b'x'})
  given = dict(bundle='wiki-18-e5-flat', keep_parts=False)
  found = ask(server, tmp_path, **given)
  assert [p.name for p in found] == [name] == ['e5_Flat.index']
  assert found[0].read_bytes() == DATA
  assert not list(tmp_path.glob('part_*'))
  server.files.clear(), server.api.clear()
  assert ask(server, tmp_path, **given) == found


def test_killed_process_goes_on(server, tmp_path):
  server.plan = ['slow']
  out = tmp_path / 'out'
  command = [
    sys.executable,
    '-m',
    'retrieval.download',
    '--repo=o/f',
    f'--mirror={server.url}',
    f'--out={out}',
  ]
  env = {**os.environ, 'HF_HUB_OFFLINE': '0'}
  process = subprocess.Popen(command, cwd=ROOT, env=env)
  part = out / 'f.bin.part'
  for _ in itertools.count():
    if part.exists() and part.stat().st_size >= 1 << 16:
      break
    assert process.poll() is None
    threading.Event().wait(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  had = part.stat().st_size
  assert 0 < had < len(DATA) and not (out / 'f.bin').exists()
  done = subprocess.run(
    command, cwd=ROOT, env=env, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip() == str(out / 'f.bin')
  assert (out / 'f.bin').read_bytes() == DATA
  assert server.asked[1]['Range'] == f'bytes={had}-'
