#!/bin/sh
# Search-R1's table: what is done already is left out. Arguments are passed on:
# sh experiments/search_r1/run.sh --only=grpo --seeds=0
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m experiments.rows --row=experiments.search_r1.rows \
  --workdir="${WORKDIR:-runs}/search_r1" \
  --out=experiments/search_r1/results.json "$@"
