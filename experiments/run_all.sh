#!/bin/sh
# Every recipe's table, one after another; each goes on where it stopped.
set -e
cd "$(dirname "$0")/.."
for run in experiments/*/run.sh; do
  echo "== $run"
  sh "$run" "$@"
done
