"""A Google Cloud Storage server on this machine, for tests of gs:// paths."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest

from tests.cluster import launch

BUCKET = 'bucket'
MISSING = [
  name
  for name in ('gcsfs', 'gcp_storage_emulator')
  if importlib.util.find_spec(name) is None
]
needed = pytest.mark.skipif(
  bool(MISSING), reason=f'not installed: {MISSING} (pip install .[gcs,dev])'
)


@contextlib.contextmanager
def emulator():
  """Serves an empty bucket; yields the variables by which clients find it."""
  port = launch.free_port()
  command = [sys.executable, '-m', 'gcp_storage_emulator', 'start']
  command += ['--host=127.0.0.1', f'--port={port}', '--in-memory']
  quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  server = subprocess.Popen([*command, f'--default-bucket={BUCKET}'], **quiet)
  url = f'http://127.0.0.1:{port}'
  found = {'STORAGE_EMULATOR_HOST': url, 'TENSORSTORE_GCS_HTTP_URL': url}
  # Otherwise gcsfs asks another service, which is not here, about the bucket.
  found['GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT'] = 'false'
  try:
    end = time.monotonic() + 30
    while True:
      with contextlib.suppress(OSError):
        socket.create_connection(('127.0.0.1', port), 1).close()
        break
      assert server.poll() is None and time.monotonic() < end
      time.sleep(0.1)
    with mock.patch.dict(os.environ, found):
      yield found
  finally:
    server.kill()
    server.wait()
