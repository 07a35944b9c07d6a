#!/bin/sh
# Builds wheel and sdist into dist/, and tries the wheel in an empty environment
# outside the checkout: a recipe by path, the retrieval server, evaluate, view.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
python=$root/.venv/bin/python
"$python" -m pip install --quiet build
rm -rf "$root/dist"
"$python" -m build --outdir "$root/dist" "$root" > "$home/log" || {
  cat "$home/log"
  exit 1
}
wheel=$(ls "$root"/dist/*.whl)
# With the versions that the tests ran with.
printf '%s\n' "-c $root/requirements.txt" \
  "searchrl_jax[retrieval] @ file://$wheel" > "$home/requirements.txt"
sh "$root/tools/venv.sh" "$home/venv" "$home/requirements.txt"
cp -r "$root/configs" "$home/configs"
cd "$home"
run() {
  echo "python -m $*"
  JAX_PLATFORMS=cpu venv/bin/python -m "$@"
}
run searchrl_jax.train --config=configs/quickstart.py --workdir=run \
  --config.train.steps=1 --config.rollout.questions=4 \
  --config.rollout.group=4 --config.eval.questions=8
run searchrl_jax.evaluate --workdir=run --config.eval.questions=8
run searchrl_jax.view --workdir=run
where=$(venv/bin/python -c 'import searchrl_jax; print(searchrl_jax.__file__)')
case $where in
"$home"/*) ls -l "$root/dist" ;;
*) echo "the checkout was imported: $where" >&2; exit 1 ;;
esac
