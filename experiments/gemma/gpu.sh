#!/bin/sh
# Gemma 3 270M on one GPU of 80 GB, without network: a warm start and 40 GRPO
# steps of 32 x 8. The same command goes on. docs/gpu.md has its times.
#
#   sh experiments/gemma/gpu.sh --carried=FOLDER [--out=FOLDER] [--seconds=N]
#   SMALL=1 sh experiments/gemma/gpu.sh ...    at a size for a CPU, to try it
#
# FOLDER is what `python -m experiments.gemma.carry --pack` makes. PYTHON is the
# interpreter: .venv/bin/python if there is one, else python3.
set -e
cd "$(dirname "$0")/../.."
if [ -z "$PYTHON" ]; then
  PYTHON=.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" -m experiments.gemma.gpu "$@"
