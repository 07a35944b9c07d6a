#!/bin/sh
# The table of changing contexts; what is done already is left out. Arguments
# are passed on: sh experiments/contexts/run.sh --only=summary --seeds=0
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m experiments.rows --row=experiments.contexts.rows \
  --workdir="${WORKDIR:-runs}/contexts" \
  --out=experiments/contexts/results.json "$@"
