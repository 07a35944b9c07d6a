"""Runs inside vLLM: the plugin with faults, in one that packs no matrices."""

from experiments.benchmarks import unpacked as unpacked
from tests.sidecar.faults import Worker as Worker
