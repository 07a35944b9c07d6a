#!/bin/sh
# What only a GPU can show, in 25 minutes on one H200; docs/gpu.md says what the
# stages are. The same command again goes on with those that are missing.
#
#   sh experiments/gpu/run.sh [--out=FOLDER] [--stages=update,search] [--seconds=N]
#   SMALL=1 sh experiments/gpu/run.sh      at sizes for a CPU, to see that it runs
#
# PYTHON is the interpreter: .venv/bin/python if there is one, else python3.
set -e
cd "$(dirname "$0")/../.."
if [ -z "$PYTHON" ]; then
  PYTHON=.venv/bin/python
  [ -x "$PYTHON" ] || PYTHON=python3
fi
exec "$PYTHON" -m experiments.gpu.run "$@"
