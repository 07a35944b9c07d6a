"""A table small enough to run in a test: a start, and two arms of it."""

from experiments import rows
from tests import tiny


def config(seed: int):
  c = tiny.config()
  c.seed = seed
  c.env.max_turns = 3  # a trace may search twice
  c.sft.data.update(dict(n=48, worlds=2, train=40, relations=3))
  c.sft.steps = 2
  c.sft.rows = 8
  c.sft.warmup = 0
  c.train.steps = 12
  return c


ROW = rows.Row(
  warm={'warm': rows.Start(config)},
  arms=(
    rows.Arm('untrained', config, 'warm', train=False, seeds=(0,)),
    rows.Arm(
      'trained',
      config,
      'warm',
      seeds=(0,),
      evaluations={
        'after': rows.evaluation({}),
        'short': rows.evaluation({'env.max_turn_tokens': 4}),
      },
    ),
  ),
  bars=(
    rows.Bar('answers', lambda at: at('trained', 'after', 'eval/em').mean, 0.0),
    rows.Bar(
      'cut',
      lambda at: (
        at('trained', 'short', 'eval/tokens').mean
        - at('trained', 'after', 'eval/tokens').mean
      ),
      0.0,
      at_most=True,
    ),
  ),
  scores=('em', 'tokens'),
  curves={'eval/em': 'exact match', 'reward': 'reward'},
)
