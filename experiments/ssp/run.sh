#!/bin/sh
# SSP's table: what is done already is left out. Arguments are passed on:
# sh experiments/ssp/run.sh --only=ssp,frozen --seeds=0
set -e
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python}" -m experiments.rows --row=experiments.ssp.rows \
  --workdir="${WORKDIR:-runs}/ssp" --out=experiments/ssp/results.json "$@"
