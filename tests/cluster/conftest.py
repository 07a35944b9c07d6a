import pytest

from tests.cluster import launch
from tests.cluster import test_processes as local


@pytest.fixture(scope='session')
def two(tmp_path_factory, url):
  """A run of two processes, which nothing stopped."""
  folder = tmp_path_factory.mktemp('two')
  with launch.train(2, folder, url, steps=local.STEPS) as processes:
    local.end(processes)
  return folder
