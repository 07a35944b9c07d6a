#!/bin/sh
# ZeroSearch's table: what is done already is left out. Arguments are passed on:
# sh experiments/zerosearch/run.sh --only=curriculum --seeds=0
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m experiments.rows --row=experiments.zerosearch.rows \
  --workdir="${WORKDIR:-runs}/zerosearch" \
  --out=experiments/zerosearch/results.json "$@"
