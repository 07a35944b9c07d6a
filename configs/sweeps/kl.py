"""Does a KL to the warm start matter on the quickstart?

  python -m searchrl_jax.sweep --sweep=configs/sweeps/kl.py --workdir=runs/kl

Arguments:
  scale  share of the quickstart's updates, in the warm start and in GRPO
"""

from configs import quickstart
from searchrl_jax import schema
from searchrl_jax.sweep import core


def get_sweep(arg=None):
  a = schema.parse_arg(arg, scale=1.0)

  def config(seed):
    c = quickstart.get_config(f'seed={seed}')
    for part in (c.sft, c.train):
      part.steps = round(a.scale * part.steps)
    c.sft.warmup = round(a.scale * c.sft.warmup)
    c.eval.every = max(1, round(a.scale * c.eval.every))
    return c

  loss = {'algorithm.kl': 'loss'}
  return core.sweep(
    config,
    [
      ('none', {}),
      ('kl=0.001', {**loss, 'algorithm.kl_coef': 0.001}),
      ('kl=0.1', {**loss, 'algorithm.kl_coef': 0.1}),
    ],
    seeds=(0, 1, 2),
    tuning_seeds=(100,),
  )
