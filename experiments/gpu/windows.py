"""cuDNN's attention of head size 256 with a window, against XLA's, on a GPU.

  python -m experiments.gpu.windows [--out=FILE.json]

The sizes of Gemma 3 270M: rows of 1,024 tokens, a window of 512, in bfloat16;
each row alone and packed, values and gradients. The error of a tensor is the
norm of its difference to float32 by XLA over that tensor's norm.
"""

import functools

from absl import app, flags
import jax
import jax.numpy as jnp

from experiments import common
from searchrl_jax.models import attention

B, T, N, K, H, WINDOW = 2, 1024, 4, 1, 256, 512


def main(argv):
  del argv
  keys = jax.random.split(jax.random.key(0), 4)
  q, k, v, weight = (
    jax.random.normal(key, (B, T, n, H), jnp.float32)
    for key, n in zip(keys, (N, K, K, N))
  )
  starts = jnp.array([[0, 300, 700, T], [0, 640, T, T]], jnp.int32)
  rows = []
  for name, packing in (
    ('rows', None),
    ('packed', attention.packed(starts, T)),
  ):
    for window in (0, WINDOW):

      def total(q, k, v, kernel, window=window, packing=packing):
        lengths = jnp.full(B, T, jnp.int32)
        o = attention.causal(
          q, k, v, lengths, kernel, packing, window=window
        ).astype(jnp.float32)
        return jnp.sum(o * weight), o

      of = jax.value_and_grad(total, (0, 1, 2), has_aux=True)
      want = jax.jit(functools.partial(of, kernel='xla'))(q, k, v)
      half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
      row = {'case': name, 'window': window}
      for kernel in ('cudnn', 'xla'):
        try:
          got = jax.jit(functools.partial(of, kernel=kernel))(*half)
          pairs = zip((got[0][1], *got[1]), (want[0][1], *want[1]))
          for part, (a, b) in zip(('o', 'dq', 'dk', 'dv'), pairs):
            error = jnp.linalg.norm(a.astype(jnp.float32) - b)
            row[f'{kernel} {part}'] = float(error / jnp.linalg.norm(b))
        except Exception as e:  # what cuDNN refuses is a result
          row[f'{kernel} o'] = str(e).partition('\n')[0][:120]
      rows.append(row)
      print(row, flush=True)
  common.report(_OUT.value, 'windows', rows, [], common.environment())


if __name__ == '__main__':
  _OUT = flags.DEFINE_string('out', '', 'JSON file to write.')
  app.run(main)
