#!/bin/sh
# SSRL's table: what is done already is left out. Arguments are passed on:
# sh experiments/ssrl/run.sh --only=grpo --seeds=0
set -e
cd "$(dirname "$0")/../.."
python="${PYTHON:-python}"
results=experiments/ssrl/results.json
"$python" -m experiments.rows --row=experiments.ssrl.rows \
  --workdir="${WORKDIR:-runs}/ssrl" --out="$results" "$@"
exec "$python" -m experiments.ssrl.curve "$results"
