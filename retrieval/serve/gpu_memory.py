"""Limits the share of each GPU that JAX takes, before JAX starts.

By default JAX takes three quarters of every GPU at its start and leaves too
little for a trainer on the same machine. This module does not import JAX,
since XLA reads the variables once.
"""

import math
import os
import subprocess

_WORK = 3 << 30  # bytes for programs and intermediate results
# The user decides by setting one of these variables.
_USERS = """XLA_PYTHON_CLIENT_PREALLOCATE XLA_PYTHON_CLIENT_MEM_FRACTION
  XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_ALLOCATOR""".split()


def limit(spread: int, each: int) -> str:
  """Limits the memory of JAX to what is needed, unless the user decided.

  Args:
    spread: bytes that all GPUs share, such as vectors.
    each: bytes that every GPU holds, such as models.

  Returns:
    What was set, for a log; '' if nothing.
  """
  if os.environ.get('JAX_PLATFORMS') == 'cpu' or {*_USERS} & {*os.environ}:
    return ''
  sizes = _sizes()
  if not sizes:  # unknown: memory grows by doubling
    os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    return 'XLA_PYTHON_CLIENT_PREALLOCATE=false'
  needed = -(-spread // len(sizes)) + each + _WORK
  share = min(0.95, math.ceil(1e4 * needed / min(sizes)) / 1e4)
  os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = f'{share}'
  per_gpu = f'{needed / 1e9:.1f} GB of each of {len(sizes)} GPUs'
  return f'XLA_PYTHON_CLIENT_MEM_FRACTION={share}: {per_gpu}'


def _sizes() -> list[int]:
  """Bytes of each GPU that this process sees; [] if unknown."""
  query = '--query-gpu=memory.total --format=csv,noheader,nounits'
  command = ['nvidia-smi', *query.split()]
  if (seen := os.environ.get('CUDA_VISIBLE_DEVICES')) is not None:
    command.append(f'--id={seen}')
  options = {'capture_output': True, 'text': True, 'check': True}
  try:
    done = subprocess.run(command, timeout=30, **options)
    return [int(line) << 20 for line in done.stdout.split('\n') if line]
  except (OSError, subprocess.SubprocessError, ValueError):
    return []
