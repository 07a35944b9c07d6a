"""Makes algorithms.npz with torch: losses and gradients of every algorithm.

    .venv-parity/bin/python -m tests.golden.make_algorithms

Written from the papers' formulas, in float64, with autograd: independent of
searchrl_jax and of configs/algorithms.py (numbers are stated again).
tests/parity compares both with TRL's own code.
"""

import pathlib

import numpy as np
import torch

from tests.golden import algorithms

HERE = pathlib.Path(__file__).resolve().parent


def grouped(rewards, fn):
  """fn of the rewards [G] of each question, joined."""
  return torch.cat([fn(r) for r in rewards.split(algorithms.G)])


def leave_one_out(r):
  others = [torch.cat([r[:i], r[i + 1 :]]).mean() for i in range(len(r))]
  return r - torch.stack(others)


def whitened(x):
  return (x - x.mean()) / (x.std(correction=0) + 1e-8)


def gae(x):
  """Backwards through all T places; what is not a loss token is passed by."""
  A = torch.zeros_like(x['critic'])
  rewards = torch.zeros_like(A)
  for b, row in enumerate(x['mask']):
    rewards[b, row.nonzero()[-1]] = x['rewards'][b]
  after_a = after_v = torch.zeros(len(A), dtype=A.dtype)
  for t in reversed(range(A.shape[1])):
    at, v = x['mask'][:, t], x['critic'][:, t]
    delta = rewards[:, t] + algorithms.GAMMA * after_v - v
    a = delta + algorithms.GAMMA * algorithms.LAM * after_a
    after_a, after_v = torch.where(at, a, after_a), torch.where(at, v, after_v)
    A[:, t] = a
  A[x['mask']] = whitened(A[x['mask']])
  return A


def advantages(name: str, x) -> torch.Tensor:
  """[B, 1], or [B, T] of PPO."""
  R = x['rewards']
  centred = grouped(R, lambda r: r - r.mean())
  if name.startswith('ppo'):
    return gae(x)
  if name in ('grpo', 'dapo', 'gspo', 'cispo'):
    A = grouped(R, lambda r: (r - r.mean()) / (r.std() + 1e-6))
  else:
    A = {
      'dr_grpo': lambda: centred,
      'rloo': lambda: grouped(R, leave_one_out),
      'reinforce': lambda: leave_one_out(R),
      'reinforce_pp': lambda: whitened(R),
      'reinforce_pp_baseline': lambda: whitened(centred),
      'lite_ppo': lambda: centred / (R.std() + 1e-6),
      'remax': lambda: R - x['greedy'][x['group_ids']],
    }[name]()
  return A[:, None]


def token_loss(name: str, x, A) -> torch.Tensor:
  """The loss of each token [B, T], or of a row on each of its tokens."""
  d = torch.where(x['mask'], x['logps'] - x['old_logps'], 0.0)
  n = x['mask'].sum(1, keepdim=True)
  if name == 'gspo':
    d = d.sum(1, keepdim=True) / n
  if name == 'rloo':
    d = d.sum(1, keepdim=True)
  r = d.exp()
  if name in ('reinforce', 'remax'):
    # The engine's log-probs are the old ones here.
    return -r.detach().clamp(max=2.0) * A * x['logps']
  if name == 'cispo':
    return -r.detach().clamp(max=5.0) * A * x['logps']
  low, high = {'dapo': (0.2, 0.28), 'gspo': (3e-4, 4e-4)}.get(name, (0.2, 0.2))
  loss = torch.maximum(-r * A, -r.clamp(1 - low, 1 + high) * A)
  if name == 'ppo_dual':
    loss = torch.where(A < 0, torch.minimum(loss, -algorithms.DUAL * A), loss)
  if name == 'grpo':
    e = x['ref_logps'] - x['logps']
    loss = loss + 0.04 * (e.exp() - e - 1)
  return loss.expand(x['mask'].shape)


def total(name: str, loss, mask) -> torch.Tensor:
  sums = torch.where(mask, loss, 0.0).sum(1)
  if name in ('grpo', 'gspo', 'rloo'):
    return (sums / mask.sum(1)).mean()
  if name == 'dr_grpo':
    return sums.mean() / algorithms.HORIZON
  return sums.sum() / mask.sum()


def tensors(name: str) -> dict[str, torch.Tensor]:
  x = {k: torch.tensor(v) for k, v in algorithms.inputs(name).items()}
  x = {k: v.double() if v.is_floating_point() else v for k, v in x.items()}
  x['logps'].requires_grad_()
  return x


def reference(name: str) -> dict[str, np.ndarray]:
  """loss, its gradient [B, T] to the log-probs, and advantages [B, 1 or T]."""
  x = tensors(name)
  A = advantages(name, x)
  loss = total(name, token_loss(name, x, A), x['mask'])
  [grad] = torch.autograd.grad(loss, x['logps'])
  return {
    'loss': loss.detach().numpy(),
    'grad': grad.numpy(),
    'advantages': A.numpy(),
  }


def main():
  arrays = {}
  for name in algorithms.CASES:
    found = reference(name)
    print(
      f'{name}: loss {found["loss"]:.6f}, '
      f'gradient {np.linalg.norm(found["grad"]):.6f}'
    )
    arrays |= {f'{name}/{k}': v for k, v in found.items()}
  np.savez_compressed(HERE / 'algorithms.npz', **arrays)


if __name__ == '__main__':
  main()
