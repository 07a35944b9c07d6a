#!/bin/sh
# From an empty node to the table of the seven sets; docs/cluster.md explains:
#
#   sh experiments/cluster/seven.sh fetch index serve doctor train evaluate stop
#   sbatch --nodes=4 --gpus-per-node=8 experiments/cluster/seven.sh \
#     serve doctor train evaluate
#
# takes these steps in this order. A step that was stopped goes on if it is
# taken again, and one that is done ends at once. Variables:
#
#   DIR             everything is below it; a disk that all nodes share
#   MODEL, ENCODER  names on the hub; HF_ENDPOINT is a mirror of it
#   MACHINE         such as h200x8: mesh, slots and adapters of a preset
#   CONFIG          of the training; layout=flashrag reads what `fetch` brings
#   TRAIN_FLAGS     for doctor and train, such as an engine
#   EVALUATE_FLAGS  for evaluate
#   SEARCH_FLAGS    for the retrieval server; --index=bm25 needs no accelerator
#   SEARCH_GPUS     that the retrieval server sees; TRAIN_GPUS: the trainer
#   PORT            of the retrieval server, one on each node
#   PYTHON          the interpreter
#SBATCH --job-name=searchrl-seven
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/slurm/%x_%A.log
set -eu
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
  . experiments/cluster/job.sh  # the batch script: one of these on each node
  job sh experiments/cluster/seven.sh "$@"
  exit
fi
dir=${DIR:-runs/seven} port=${PORT:-8000} python=${PYTHON:-.venv/bin/python}
model=${MODEL:-Qwen/Qwen2.5-3B} encoder=${ENCODER:-intfloat/e5-base-v2}
# Their names say how they are used.
model_folder=$dir/$(basename "$model") encoder_folder=$dir/$(basename "$encoder")
config=configs/search_r1.py:layout=flashrag,model=$model_folder
config=${CONFIG:-$config${MACHINE:+,machine=$MACHINE}}
search=${SEARCH_FLAGS:---index=dense_jax --encoder=$encoder_folder}
node=$dir/nodes/$(uname -n)
on_data="--data_dir=$dir/questions --config.source.url=http://127.0.0.1:$port"
# SLURM signals this shell too. The trainer saves and ends with status 143.
trap : USR1 TERM INT

fetch() {
  get="$python -m retrieval.download"
  $get --repo="$model" --repo_type=model --file='*.json' \
    --file='*.safetensors' --out="$model_folder"
  $get --repo=RUC-NLPIR/FlashRAG_datasets --out="$dir/questions" \
    --file=nq/train.jsonl --file=nq/test.jsonl --file=triviaqa/test.jsonl \
    --file=popqa/test.jsonl --file=hotpotqa/train.jsonl \
    --file=hotpotqa/dev.jsonl --file=2wikimultihopqa/dev.jsonl \
    --file=musique/dev.jsonl --file=bamboogle/test.jsonl
  $get --repo="$encoder" --repo_type=model --file='*.json' --file='*.txt' \
    --file=model.safetensors --out="$encoder_folder"
  $get --bundle=wiki-18-corpus --out="$dir/wiki-18"
  $get --bundle=wiki-18-e5-flat --nokeep_parts --out="$dir/wiki-18"
}

index() {
  "$python" -m retrieval.build_index --corpus="$dir/wiki-18/wiki-18.jsonl.gz" \
    --out="$dir/index" --index=bm25 --encoder="$encoder_folder" \
    --adopt="$dir/wiki-18/e5_Flat.index" --vectors=float16
}

ready() {
  "$python" -c "import urllib.request as http
http.urlopen('http://127.0.0.1:$port/ready', timeout=5)" 2> /dev/null
}

serve() {
  if ready; then return; fi
  mkdir -p "$node"
  ( # The signal before a time limit is for the trainer.
    trap '' USR1
    exec env ${SEARCH_GPUS:+CUDA_VISIBLE_DEVICES="$SEARCH_GPUS"} \
      "$python" -m retrieval.server --index_folder="$dir/index" $search \
      --port="$port" > "$node/retrieval.log" 2>&1 < /dev/null
  ) &
  echo $! > "$node/retrieval.pid"
  until ready; do
    if ! kill -0 $! 2> /dev/null; then
      tail -n 20 "$node/retrieval.log" >&2
      return 1
    fi
    sleep 1
  done
}

trainer() {
  env ${TRAIN_GPUS:+JAX_CUDA_VISIBLE_DEVICES="$TRAIN_GPUS"} \
    "$python" -m "searchrl_jax.$@"
}

doctor() {
  trainer doctor --config="$config" --workdir="$dir/run" $on_data \
    ${TRAIN_FLAGS:-}
}

train() {
  trainer train --config="$config" --workdir="$dir/run" $on_data \
    ${TRAIN_FLAGS:-}
}

evaluate() {
  export COLUMNS="${COLUMNS:-320}"  # of the table, which is no terminal's
  trainer evaluate --workdir="$dir/run" --out="$dir/table" $on_data \
    --config.eval.questions=0 ${EVALUATE_FLAGS:-}
}

stop() {
  kill "$(cat "$node/retrieval.pid")"
  while kill -0 "$(cat "$node/retrieval.pid")" 2> /dev/null; do sleep 0.2; done
  rm "$node/retrieval.pid"
}

for step in "$@"; do
  case $step in
    fetch | index | serve | doctor | train | evaluate | stop)
      echo "== $step"
      "$step"
      ;;
    *)
      echo "error: no step $step; see the top of this file" >&2
      exit 2
      ;;
  esac
done
