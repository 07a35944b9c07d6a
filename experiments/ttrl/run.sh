#!/bin/sh
# TTRL's table: what is done already is left out. Arguments are passed on:
# sh experiments/ttrl/run.sh --only=ttrl --seeds=0
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m experiments.rows --row=experiments.ttrl.rows \
  --workdir="${WORKDIR:-runs}/ttrl" \
  --out=experiments/ttrl/results.json "$@"
