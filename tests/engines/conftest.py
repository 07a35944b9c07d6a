"""Stand-ins for vLLM's servers; parametrize `fakes` with their number."""

import pytest

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
