#!/bin/sh
# Makes a virtual environment and installs a requirements file into it:
#   sh tools/venv.sh FOLDER REQUIREMENTS [FLAGS OF UV]
# uv does the work where pip can get it (seconds instead of minutes); it does
# not read pip's configuration, so pip's index settings are passed on. With
# flags of its own it must: pip has no --override.
set -eu
venv=$1
requirements=$2
shift 2
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "searchrl_jax needs Python >= 3.11; '$python' is $("$python" --version)." >&2
  echo "Point make at another one: make PYTHON=/path/to/python3.11 ..." >&2
  exit 1
}
# One without pip is what a first try left where python3-venv is missing.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "Making the virtual environment $venv ..."
  "$python" -m venv --clear "$venv"
fi
echo "Installing $requirements into $venv ..."
if "$venv/bin/python" -m pip install --quiet uv >/dev/null 2>&1; then
  # Lines such as global.find-links='/a /b' or :env:.index-url='https://...'
  flags=$("$venv/bin/python" - <<'END'
import re, subprocess, sys
out = subprocess.run(
  [sys.executable, '-m', 'pip', 'config', 'list'],
  capture_output=True, text=True, check=True,
).stdout
names = {
  'index-url': '--index-url', 'extra-index-url': '--extra-index-url',
  'find-links': '--find-links', 'trusted-host': '--allow-insecure-host',
}
flags = []
for line in out.splitlines():
  key, _, value = line.partition('=')
  name = key.rsplit('.', 1)[-1]
  if name in names:
    for item in value.strip().strip('\'"').replace('\\n', ' ').split():
      flag = f'{names[name]}={item}'
      if flag not in flags:
        flags.append(flag)
print(' '.join(flags))
END
)
  # The best match over all indexes, as pip does it; an index that only mirrors
  # a few packages must not hide the others. Bytecode as pip makes it: where
  # Python may not write any, each process would take 3 s more to start.
  export UV_COMPILE_BYTECODE="${UV_COMPILE_BYTECODE:-true}"
  # shellcheck disable=SC2086
  if "$venv/bin/python" -m uv pip install --quiet --python "$venv/bin/python" \
      --index-strategy unsafe-best-match $flags "$@" -r "$requirements"; then
    exit 0
  fi
  [ $# -eq 0 ] || exit 1
  echo "uv could not install $requirements; trying pip." >&2
fi
if [ $# -gt 0 ]; then
  echo "$requirements needs uv, which pip could not install." >&2
  exit 1
fi
"$venv/bin/python" -m pip install --quiet -r "$requirements"
