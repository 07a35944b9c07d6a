"""Presets, what the compilers said of them, and the table of both."""

import math
import re
import shlex

import pytest

from configs import machines, search_r1
from experiments.benchmarks import machines as reports
from searchrl_jax import checks
from searchrl_jax.aot import topology
from searchrl_jax.learn import batching
from tests.conftest import ROOT


def config(key):
  machine, size, tokens = key
  name = reports.model(size)
  arg = f'model={name},machine={machine},tokens={tokens}'
  return search_r1.get_config(arg)


@pytest.mark.parametrize('key', machines.PRESETS)
def test_a_preset_is_a_config_of_its_machine(key):
  c, preset = config(key), machines.PRESETS[key]
  checks.check(c)
  devices = topology.parse(machines.TOPOLOGIES[key[0]])
  assert math.prod(preset.mesh) == len(devices)
  assert (c.mesh.data, c.mesh.fsdp, c.mesh.tensor) == preset.mesh
  assert c.engine.slots == preset.slots
  assert c.model.lora.rank == preset.rank
  assert c.env.max_tokens == c.batch.lengths[-1] == key[2]


@pytest.mark.parametrize('key', machines.PRESETS)
def test_a_report_is_of_its_preset_as_it_is(key):
  """Else: python -m experiments.benchmarks.machines --run=..."""
  text, c = reports.path(key).read_text(), config(key)
  *arguments, remat = shlex.split(text.splitlines()[0])[3:]
  assert arguments == reports.arguments(key)
  assert remat == f'--config.model.remat={c.model.remat}'
  assert f'engine: cache, {c.engine.slots} slots x {key[2]} tokens' in text
  mesh = str({k: c.mesh[k] for k in ('data', 'fsdp', 'tensor')})
  assert f'mesh {mesh}\n' in text
  rows = batching.rows_of(c.batch, c.mesh.data * c.mesh.fsdp)
  assert re.search(rf'microbatch shapes .* {rows}x{key[2]}\n', text)
  assert '  memory ' in text and 'exit status 0' in text.splitlines()[-1]
  adapters = 'frozen parameters' in text
  assert adapters == bool(c.model.lora.rank)


def test_every_machine_has_a_preset():
  assert {key[0] for key in machines.PRESETS} == {*machines.TOPOLOGIES}


def test_the_table_is_that_of_the_reports():
  page = (ROOT / 'docs/machines.md').read_text()
  assert '\n'.join(reports.table()) in page


def test_machines_without_a_preset_are_refused():
  with pytest.raises(ValueError, match="machine='h300x8'"):
    search_r1.get_config('model=qwen2.5-3b,machine=h300x8')
  with pytest.raises(ValueError, match='machine=.*h200x1 3b 4608'):
    search_r1.get_config('model=llama-3-8b,machine=h200x8')
  with pytest.raises(ValueError, match='machine=.*27b'):
    search_r1.get_config('model=qwen3.5-27b,machine=h200x8')
  with pytest.raises(ValueError, match='machine=.*model=PATH'):
    search_r1.get_config('machine=h200x8')
  with pytest.raises(ValueError, match='tokens=5000'):
    search_r1.get_config('model=qwen2.5-3b,tokens=5000')
