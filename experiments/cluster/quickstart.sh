#!/bin/sh
# The quickstart on several processes of this machine, one CPU device each:
#
#   sh experiments/cluster/quickstart.sh 4 runs/four
#
# sft, train and evaluate as `make quickstart` runs them; the same command
# resumes. The log of each process is FOLDER/STAGE.RANK.log. Run by hand:
# quickstart.txt is what the last lines were.
set -eu
count=$1 folder=$2
python=${PYTHON:-.venv/bin/python}
export JAX_PLATFORMS=cpu NNODES="$count" MASTER_ADDR=127.0.0.1
export JAX_COMPILATION_CACHE_DIR="$folder/compiled"
mkdir -p "$folder"
trap 'kill 0' INT TERM

stage() { # NAME MODULE FLAGS...: the module in every process
  name=$1 module=$2
  shift 2
  # A port that nothing uses, for the coordinator of this stage.
  MASTER_PORT=$("$python" -c 'import socket; s = socket.socket()
s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
  export MASTER_PORT
  rank=0 pids=
  while [ "$rank" -lt "$count" ]; do
    RANK=$rank "$python" -m "searchrl_jax.$module" "$@" \
      >"$folder/$name.$rank.log" 2>&1 &
    pids="$pids $!" rank=$((rank + 1))
  done
  for pid in $pids; do wait "$pid"; done
  tail -n 30 "$folder/$name.0.log"
}

recipe=--config=configs/quickstart.py
stage warm sft $recipe --workdir="$folder/warm"
# 64 slots: a process plays a part of the 256 trajectories of a step.
stage train train $recipe --workdir="$folder/run" \
  --config.train.init="$folder/warm" --config.engine.slots=64
stage evaluate evaluate --workdir="$folder/run" --controls
