"""Compiled programs on the disk: kept, few, and nobody else's."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from retrieval import devices
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

_KEPT = """
import sys
import jax
from retrieval import devices
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
devices._KEPT_BYTES = int(sys.argv[2])
devices.keep_programs(sys.argv[1])
for n in range(1, 9):
  def double(x):
    return 2 * x
  jax.jit(double).lower(jax.ShapeDtypeStruct((n,), 'float32')).compile()
print(*[n.rpartition('/')[2] for n in events if 'cache_' in n])
"""


def command(folder, most=1 << 30):
  return [sys.executable, '-c', _KEPT, str(folder), str(most)]


def run(*given):
  done = subprocess.run(
    command(*given), cwd=ROOT, capture_output=True, text=True, check=True
  )
  return done.stdout.split(), done.stderr


def programs(folder):
  return {f.name for f in folder.rglob('*-cache')}


@pytest.fixture(scope='module')
def kept(tmp_path_factory):
  """A folder that two processes have filled at the same time."""
  cache = tmp_path_factory.mktemp('kept') / 'cache'
  two = [
    subprocess.Popen(command(cache), cwd=ROOT, stdout=subprocess.DEVNULL)
    for _ in range(2)
  ]
  assert [process.wait(120) for process in two] == [0, 0]
  return cache


@pytest.mark.long
def test_the_programs_used_last_are_kept_within_a_bound(kept, tmp_path):
  size = sum(f.stat().st_size for f in kept.rglob('*-cache'))
  run(tmp_path, size // 2)
  found = [f.stat().st_size for f in tmp_path.rglob('*-cache')]
  assert 2 <= len(found) < 8 and sum(found) <= size // 2


def test_a_program_that_a_kill_left_without_its_time_stops_no_other(kept):
  (kind,) = kept.iterdir()
  found = programs(kept)
  next(kind.glob('*-cache')).unlink()
  (kind / 'other-cache').write_bytes(b'x')
  assert 'other' not in run(kept)[1]
  assert programs(kept) == found


@pytest.mark.long
def test_programs_are_kept_for_the_next_process(kept):
  found = programs(kept)
  assert len(found) == 8
  events, _ = run(kept)
  assert 'cache_hits' in events and 'cache_misses' not in events
  assert programs(kept) == found
  (kind,) = kept.iterdir()  # of this CPU, for this user alone
  assert kind.stat().st_mode & 0o077 == 0
  for file in kind.glob('*-cache'):  # a process was killed as it wrote
    file.write_bytes(file.read_bytes()[:100])
  assert 'cache_hits' not in run(kept)[0]


@pytest.fixture
def settings():
  """JAX's, as they were before."""
  names = (
    'jax_compilation_cache_dir',
    'jax_compilation_cache_max_size',
    'jax_persistent_cache_min_compile_time_secs',
    'jax_persistent_cache_min_entry_size_bytes',
    'jax_enable_compilation_cache',
  )
  before = {name: getattr(jax.config, name) for name in names}
  yield jax.config
  for name, value in before.items():
    jax.config.update(name, value)


def test_a_folder_that_others_may_write_is_refused(tmp_path, settings):
  devices.keep_programs(tmp_path / 'a')
  path = pathlib.Path(settings.jax_compilation_cache_dir)
  assert path.parent == tmp_path / 'a' and settings.jax_enable_compilation_cache
  for folder, mode in (
    (path, 0o770),
    (path, 0o707),
    (path, 0o1777),
    (path.parent, 0o770),
    (path.parent, 0o777),
  ):
    before = folder.stat().st_mode
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f'{folder}: '):
      devices.keep_programs(tmp_path / 'a')
    assert not settings.jax_enable_compilation_cache  # nor read from there
    folder.chmod(before)
    jax.config.update('jax_enable_compilation_cache', True)
  path.parent.chmod(0o1777)  # as /tmp: nobody takes what is another's
  devices.keep_programs(tmp_path / 'a')


def test_a_folder_of_another_user_is_refused(tmp_path, settings, monkeypatch):
  devices.keep_programs(tmp_path)
  other = os.getuid() + 1
  monkeypatch.setattr(os, 'getuid', lambda: other)
  with pytest.raises(PermissionError, match=f'user .*{other}'):
    devices.keep_programs(tmp_path)
  assert not settings.jax_enable_compilation_cache
