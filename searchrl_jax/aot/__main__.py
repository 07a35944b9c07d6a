"""Compiles every program of a run for accelerators that are not there.

  make aot
  .venv-aot/bin/python -m searchrl_jax.aot --topology=h200:1x8 \\
      --config=configs/search_r1.py:model=qwen2.5-3b --config.mesh.fsdp=8

The compilers are the real ones, so memory, collectives and kernels are those of
a run; seconds are estimates from the chip's data sheet. Nothing is executed.
`python -m searchrl_jax.train --dry_run --topology=...` prints the same.

Exits 2 if a device needs more than 90 % of its memory.
"""

import sys

from searchrl_jax.aot import gate
from searchrl_jax.run import command


def main():
  # The vocabulary is the model's.
  sys.exit(gate.show(_CONFIG.value, _TOPOLOGY.value, vocab_size=1))


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _TOPOLOGY = command.define_topology(required=True)
  command.run(main)
