"""A batch for every algorithm, made by numpy and a seed alone."""

import numpy as np

CASES = (
  'ppo',
  'ppo_dual',
  'grpo',
  'dr_grpo',
  'rloo',
  'dapo',
  'gspo',
  'cispo',
  'reinforce',
  'reinforce_pp',
  'reinforce_pp_baseline',
  'lite_ppo',
  'remax',
)
HORIZON = 16  # of Dr. GRPO, in tokens
GAMMA, LAM = 0.97, 0.9  # of PPO
DUAL = 1.5  # of ppo_dual
GROUPS, G, T = 3, 4, 12


def inputs(name: str) -> dict[str, np.ndarray]:
  """The batch of a case: B = 12 rows of T = 12 tokens.

  Log-probs of the policy, before the step and of the reference, the critic's
  values, all float32 [B, T]; mask [B, T] with observations in between; rewards
  [B], group_ids [B] and greedy [GROUPS]. Ratios lie on both sides of every
  bound; every other row of GSPO is off policy by as little as its bounds.
  """
  rng = np.random.default_rng([5, CASES.index(name)])
  B = GROUPS * G
  f = lambda spread: rng.normal(0.0, spread, (B, T)).astype(np.float32)
  mask = rng.random((B, T)) < 0.65
  mask[:, 0] = False
  mask[:, 1] = True
  logps = -1.5 + f(0.5)
  small = np.where(np.arange(B) % 2, 1e-3, 0.4)[:, None]
  step = {'gspo': small, 'rloo': 0.1}.get(name, 0.4)
  return {
    'logps': logps,
    'old_logps': logps - f(step),
    'ref_logps': logps + f(0.3),
    'critic': f(1.0),
    'mask': mask,
    'rewards': rng.normal(size=B).round(2),
    'greedy': rng.normal(size=GROUPS),
    'group_ids': np.repeat(np.arange(GROUPS), G),
  }
