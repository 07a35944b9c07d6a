"""Sizes of a run by the name of a machine, for Qwen2.5-3B and 7B, Gemma 3,
Qwen3.5 and Qwen3-30B-A3B, and `small` ones for a pretrained model of some 100
million parameters.

  python -m searchrl_jax.train \\
    --config=configs/search_r1.py:model=Qwen/Qwen2.5-7B,machine=h200x8

CHIPxN is one node of N GPUs, CHIPxNxM M such nodes with a process on each.
v5p32 is a TPU slice of 16 chips (its name counts cores), v5e8 one of 8.
A device computes one row of the longest length at a time. docs/machines.md has
what the compilers say of each preset.
"""

import re
from typing import NamedTuple

# What `--topology` calls them.
TOPOLOGIES = {
  'h100x1': 'h100:1x1',
  'h200x1': 'h200:1x1',
  'h200x8': 'h200:1x8',
  'h100x8': 'h100:1x8',
  'h100x8x4': 'h100:4x8',
  'v5p32': 'v5p:2x2x4',
  'v5e64': 'v5e:8x8',
  'v5e8': 'v5e:2x4',
}
# Of the rows of an update, by the tokens of a trajectory at most.
LENGTHS = {4608: (256, 512, 1024, 2048, 4608), 16384: (256, 1024, 4096, 16384)}


class Preset(NamedTuple):
  """mesh: data, fsdp, tensor; nodes lie along data. slots, host_gib: of the
  engine of each process, which together limit its concurrency. rank: of
  adapters; 0: all parameters are trained. remat: what computes least again of
  all that fits, by the compiler's report."""

  mesh: tuple[int, int, int]
  slots: int
  host_gib: float = 64.0
  rank: int = 0
  remat: str = 'block'


# (machine, what the model's name has in it, tokens of a trajectory at most)
PRESETS = {
  ('h200x1', '3b', 4608): Preset((1, 1, 1), 192, remat='matmuls'),
  ('h200x1', '3b', 16384): Preset((1, 1, 1), 64, remat='attention'),
  ('h200x1', '7b', 4608): Preset((1, 1, 1), 256, rank=32, remat='matmuls'),
  ('h200x1', '7b', 16384): Preset((1, 1, 1), 64, rank=32, remat='mlp'),
  ('h200x8', '3b', 4608): Preset((1, 8, 1), 1024, 256.0, remat='matmuls'),
  ('h200x8', '3b', 16384): Preset((1, 8, 1), 512, 256.0, remat='matmuls'),
  ('h200x8', '7b', 4608): Preset((1, 8, 1), 1024, 256.0, remat='matmuls'),
  ('h200x8', '7b', 16384): Preset((1, 8, 1), 256, 256.0, remat='matmuls'),
  ('h100x8', '3b', 4608): Preset((1, 8, 1), 1024, 256.0, remat='matmuls'),
  ('h100x8', '3b', 16384): Preset((1, 8, 1), 256, 256.0, remat='matmuls'),
  ('h100x8', '7b', 4608): Preset((1, 8, 1), 512, 256.0, remat='matmuls'),
  ('h100x8', '7b', 16384): Preset((1, 8, 1), 128, 256.0, remat='attention'),
  ('h100x8x4', '3b', 4608): Preset((4, 8, 1), 512, 256.0, remat='matmuls'),
  ('h100x8x4', '3b', 16384): Preset((4, 8, 1), 256, 256.0, remat='matmuls'),
  ('h100x8x4', '7b', 4608): Preset((4, 8, 1), 512, 256.0, remat='matmuls'),
  ('h100x8x4', '7b', 16384): Preset((4, 8, 1), 128, 256.0, remat='attention'),
  ('v5p32', '3b', 4608): Preset((1, 16, 1), 256, remat='matmuls'),
  ('v5p32', '3b', 16384): Preset((1, 16, 1), 64, remat='matmuls'),
  ('v5p32', '7b', 4608): Preset((1, 16, 1), 128, remat='matmuls'),
  ('v5p32', '7b', 16384): Preset((1, 16, 1), 32, remat='matmuls'),
  ('v5e64', '3b', 4608): Preset((1, 32, 2), 64, remat='matmuls'),
  ('v5e64', '3b', 16384): Preset((1, 32, 2), 16),
  ('v5e64', '7b', 4608): Preset((1, 16, 4), 64, remat='attention'),
  ('v5e64', '7b', 16384): Preset((1, 16, 4), 4),
  ('h100x1', 'gemma-3-270m', 4608): Preset((1, 1, 1), 256, remat='matmuls'),
  ('h100x1', 'gemma-3-1b', 4608): Preset((1, 1, 1), 256, remat='matmuls'),
  ('h100x1', 'gemma-3-4b', 4608): Preset(
    (1, 1, 1), 48, rank=32, remat='matmuls'
  ),
  ('h100x8', 'gemma-3-270m', 4608): Preset(
    (1, 8, 1), 1024, 256.0, remat='matmuls'
  ),
  ('h100x8', 'gemma-3-1b', 4608): Preset(
    (1, 8, 1), 1024, 256.0, remat='matmuls'
  ),
  ('h100x8', 'gemma-3-4b', 4608): Preset(
    (1, 8, 1), 256, 256.0, remat='matmuls'
  ),
  ('v5e8', 'gemma-3-270m', 4608): Preset((1, 8, 1), 256, remat='matmuls'),
  ('h100x1', 'qwen3.5-0.8b', 4608): Preset((1, 1, 1), 128, remat='matmuls'),
  ('h100x8', 'qwen3.5-9b', 4608): Preset(
    (1, 8, 1), 256, 256.0, remat='matmuls'
  ),
  ('h200x8', 'qwen3-30b-a3b', 4608): Preset((1, 2, 4), 256, 256.0),
  ('v5p32', 'qwen3-30b-a3b', 4608): Preset((1, 4, 4), 64),
}


def small(c) -> None:
  """Sets the fields of config `c` for a small pretrained model (some 100
  million parameters) on a CPU, or on one GPU of any size.

  Half precision gains nothing in XLA's products on a CPU. Trajectories are
  short: one passage a search, two searches, and an answer. What those of a
  group have in common (the prompt, often a query and its passage) is computed
  once, and each program is compiled for one length.
  """
  c.model.dtype = c.engine.dtype = 'float32'
  c.model.remat = 'none'
  c.model.scan_unroll = 18  # updates take a fifth less time than in a loop
  c.env.template = 'plain'  # a base model does not follow instructions
  c.env.max_turns = 2
  c.env.max_turn_tokens = 48
  c.env.max_observation_tokens = 128
  c.env.max_tokens = c.engine.max_len = 384
  c.source.k = 1
  c.engine.slots = 64
  c.engine.prefill_rows = 8
  c.engine.canary_tolerance = 1e-2
  # Soon only some of the groups have answers of different rewards.
  c.rollout.questions, c.rollout.group = 16, 8
  c.algorithm.minibatches = 1
  # Groups whose gradient is 0: half of them at first, most of them later. The
  # loss is a mean over the tokens that are left, so the others count for more.
  c.algorithm.drop_zero_variance = True
  c.algorithm.kl, c.algorithm.kl_coef = 'none', 0.0
  c.batch.lengths = (384,)
  c.batch.prefix_tokens = 768
  c.batch.loss_fraction = 0.12
  c.optim.lr, c.optim.warmup, c.optim.weight_decay = 5e-6, 5, 0.0
  c.train.steps = 60
  c.eval.every = 0
  c.checkpoint.every = 10


def small_on_gpu(c) -> None:
  """The same on one GPU of 80 GB: twice as many questions a step.

  In float32 there too, without TF32: an update of a microbatch takes 0.47 s on
  an H200 (docs/gpu.md). Without a prefix tree fewer, larger programs run.
  """
  c.model.scan_unroll = 1
  c.engine.slots = 256
  c.engine.prefill_rows = 128
  c.rollout.questions = 32
  c.batch.prefix_tokens = 0
  c.batch.tokens = 48 * c.batch.lengths[-1]
  c.batch.loss_fraction = 0.3
  c.optim.lr = 1e-5  # of twice as many questions
  c.train.steps = 40
  c.checkpoint.every = 20


def apply(c, machine: str, model: str, tokens: int) -> None:
  """Sets the fields of config `c` for a machine.

  Args:
    machine, tokens: of a preset.
    model: a name or folder that has that of a preset in it, such as '3b'.

  Raises:
    ValueError: there is no preset.
  """
  known = dict.fromkeys(size for _, size, _ in PRESETS)
  # Of '27b', '7b' is no name, nor is '3b' of 'a3b'.
  name = model.lower().split('/')[-1]
  sizes = [s for s in known if re.search(rf'(?<![a-z\d.]){s}(?![a-z\d])', name)]
  if len(sizes) != 1 or (machine, sizes[0], tokens) not in PRESETS:
    raise ValueError(
      f'config argument machine={machine!r}: no preset for model={model!r} '
      f'with tokens={tokens}; there are '
      + ', '.join(' '.join(map(str, key)) for key in PRESETS)
    )
  preset = PRESETS[machine, sizes[0], tokens]
  c.mesh.data, c.mesh.fsdp, c.mesh.tensor = preset.mesh
  c.engine.slots, c.engine.host_gib = preset.slots, preset.host_gib
  c.model.lora.rank = preset.rank
  if preset.rank:
    c.optim.lr = 1e-5
  c.model.remat = preset.remat
