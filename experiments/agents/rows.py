"""A program beside the native environment, from one warm start.

  python -m experiments.rows --row=experiments.agents.rows \\
    --workdir=runs/agents --out=experiments/agents/results.json

Both arms ask the same questions with the same fields, and are evaluated by the
native environment. The program plays through OpenAI's client and is rewarded by
what it returns.
"""

from ml_collections import ConfigDict

from configs import quickstart
from experiments import rows

SCORE = 'eval/hops=1/em'


def native(seed: int):
  return quickstart.get_config(f'seed={seed}')


def program(seed: int):
  c = native(seed)
  c.rollout.sampler = 'sessions'
  c.rollout.program = 'experiments.agents.program.play'
  c.reward = ConfigDict(dict(own=dict(fn='program.returned', weight=1.0)))
  return c


def apart(at) -> float:
  """Distance of the arms in one-hop exact match, means over seeds."""
  return abs(
    at('program', 'after', SCORE).mean - at('native', 'after', SCORE).mean
  )


ROW = rows.Row(
  warm={'warm': rows.Start(native, shared=True)},
  arms=(
    rows.Arm('native', native, 'warm'),
    rows.Arm('program', program, 'warm'),
  ),
  bars=(rows.Bar('agents_one_hop_apart', apart, 0.05, at_most=True),),
  scores=('em', 'searches', 'guessed', 'parsed', 'tokens'),
  curves={
    SCORE: 'exact match, one hop',
    'eval/hops=2/em': 'exact match, two hops',
    'reward': 'reward',
    'rollout/seconds': "seconds of a step's rollouts",
  },
)
