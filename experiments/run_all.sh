#!/bin/sh
# Every recipe's table, one after another; each goes on where it stopped.
set -e
cd "$(dirname "$0")/.."
for run in experiments/*/run.sh; do
  case $run in */gpu/*) continue ;; esac  # measures a GPU; no recipe
  echo "== $run"
  sh "$run" "$@"
done
