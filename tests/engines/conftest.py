"""Engines, and stand-ins for vLLM's servers; `fakes` takes their number."""

import pytest

from searchrl_jax.engines.jax import caches
from tests.engines import common
from tests.engines.fake_vllm import server


@pytest.fixture
def fakes(request):
  made = [server() for _ in range(getattr(request, 'param', 1))]
  yield made
  for fake in made:
    fake.kill()


@pytest.fixture
def fake(fakes):
  return fakes[0]


@pytest.fixture
def by_rows(monkeypatch):
  """The sizes of an engine whose decode reads blocks of each row on a CPU.

  No other test has these sizes: engines of the same sizes share programs.
  """
  monkeypatch.setattr(caches, 'BLOCKS', {'cpu': 16})
  monkeypatch.setattr(caches, 'PART_BYTES', 0)
  return {'max_len': 80}


@pytest.fixture(scope='module')
def engine(request):
  """Of the module's CFG."""
  return common.make_engine(cfg=request.module.CFG)


@pytest.fixture
def token_bytes():
  return common.Letters().token_bytes
