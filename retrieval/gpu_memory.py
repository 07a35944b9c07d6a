"""The share of each GPU that JAX takes, settled before JAX starts.

JAX would take three quarters of every GPU at its start, and a trainer beside
it would find the rest. Imports no JAX: XLA reads the variables once.
"""

import math
import os
import subprocess

_WORK = 3 << 30  # bytes for programs, and for what a batch needs meanwhile
_USERS = (  # of these one that is set is a decision of the user's
  'XLA_PYTHON_CLIENT_PREALLOCATE',
  'XLA_PYTHON_CLIENT_MEM_FRACTION',
  'XLA_CLIENT_MEM_FRACTION',
  'XLA_PYTHON_CLIENT_ALLOCATOR',
)


def limit(spread: int, each: int) -> str:
  """Has JAX take what is needed and no more, unless the user decided.

  Args:
    spread: bytes that all GPUs share, as vectors.
    each: bytes that every GPU holds, as models.

  Returns:
    What was set, for a log; '' for nothing.
  """
  if os.environ.get('JAX_PLATFORMS') == 'cpu' or any(
    name in os.environ for name in _USERS
  ):
    return ''
  sizes = _sizes()
  if not sizes:  # unknown: it grows, by doubling
    os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'] = 'false'
    return 'XLA_PYTHON_CLIENT_PREALLOCATE=false'
  needed = -(-spread // len(sizes)) + each + _WORK
  share = min(0.95, math.ceil(1e4 * needed / min(sizes)) / 1e4)
  os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'] = f'{share}'
  return (
    f'XLA_PYTHON_CLIENT_MEM_FRACTION={share}: {needed / 1e9:.1f} GB of each '
    f'of {len(sizes)} GPUs'
  )


def _sizes() -> list[int]:
  """Bytes of each GPU that this process sees; [] where nobody says."""
  command = [
    'nvidia-smi',
    '--query-gpu=memory.total',
    '--format=csv,noheader,nounits',
  ]
  if (seen := os.environ.get('CUDA_VISIBLE_DEVICES')) is not None:
    command.append(f'--id={seen}')
  try:
    done = subprocess.run(
      command, capture_output=True, text=True, check=True, timeout=30
    )
    return [int(line) << 20 for line in done.stdout.split('\n') if line]
  except (OSError, subprocess.SubprocessError, ValueError):
    return []
