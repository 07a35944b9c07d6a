"""The stages of `run.py`, each a process of its own.

  python -m experiments.gpu.stages --stage=update --out=runs/gpu [--small]

Writes OUT/STAGE.json: the record of `common.py` with `status`, which
is 'done', or 'skipped' with a `reason`.
"""

import ast
import asyncio
import contextlib
import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
from unittest import mock

from absl import app, flags
import jax
from ml_collections import ConfigDict
import numpy as np

from experiments import common
from experiments.benchmarks import retrieval_gpu
from experiments.benchmarks.sampler import Ids
from experiments.gpu import recipe
from searchrl_jax import train
from searchrl_jax.aot import costs, gate
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.jax import caches as kv
from searchrl_jax.engines.jax import decode, device
from searchrl_jax.engines.jax.engine import JaxEngine
from searchrl_jax.learn import batching, credit
from searchrl_jax.learn.learner import Learner
from searchrl_jax.models import parameters
from searchrl_jax.run import build
from searchrl_jax.run import session as sessions
from searchrl_jax.store import records
from searchrl_jax.types import Prompt, Question, Rewards, Segment, Trajectory

# Of `doctor --topology`, by model.
GATES = {'qwen2.5-3b': 'gate.txt', 'qwen2.5-1.5b': 'gate_h100.txt'}
NEW = 64  # tokens decoded while the sampler is timed


class Skipped(Exception):
  """Why a stage cannot run here."""


def copy_bandwidth(megabytes: int) -> float:
  """Bytes/s, read and written, of copying one large array."""
  copy, moved = retrieval_gpu.copier(megabytes)
  seconds = [retrieval_gpu.seconds_of(copy, 10) for _ in range(6)]
  return moved / statistics.median(seconds[1:])


def policy(config):
  """(DecoderConfig, mesh, parameters) of a run that starts from nothing."""
  mesh = build.mesh(config)
  cfg = parameters.model_config(config, Ids.vocab_size)
  return cfg, mesh, parameters.initial(config, cfg, mesh)


# The update.


def trajectories(config, rng: np.random.Generator) -> list:
  """Groups of random ids with the lengths of a rollout of the recipe.

  0 to `max_turns` searches, mostly the most; observations that nearly fill
  their limit. In a fifth of the trajectories the turns are up to four times as
  long, as those of a policy that thinks at length.
  """
  c, groups = config.env, []
  vocab = config.model.arch.vocab_size

  def segment(author, kind, n):
    ids = rng.integers(0, vocab, n).astype(np.int32)
    if author != 'policy':
      return Segment(ids, author, kind)
    logps = np.full(n, -np.log(vocab), np.float32)
    return Segment(
      ids, author, kind, train=True, logps=logps, versions=np.zeros_like(ids)
    )

  for i in range(config.rollout.questions):
    question, group = Question(f'q{i}', 'random'), []
    prompt = segment('prompt', 'other', int(rng.integers(8, 24)))
    for n in range(config.rollout.group):
      parts, room = [prompt], c.max_tokens - len(prompt.ids)
      stretch = rng.uniform(1, 4) if rng.random() < 0.2 else 1
      most = c.max_turns
      searches = rng.choice(most + 1, p=[0.1, 0.3, 0.6]) if most == 2 else most
      for turn in range(searches + 1):
        tokens = recipe.turn_tokens(rng, c.max_turn_tokens)
        kind = 'search' if turn < searches else 'answer'
        parts.append(segment('policy', kind, min(int(stretch * tokens), room)))
        room -= len(parts[-1].ids)
        if turn == searches:
          break
        share = rng.uniform(0.8, 1)
        tokens = int(share * c.max_observation_tokens)
        parts.append(segment('environment', 'information', min(tokens, room)))
        room -= len(parts[-1].ids)
      parts = tuple(s for s in parts if len(s.ids))
      group.append(Trajectory(question, parts, (), 'answer', sample=n))
    groups.append(tuple(group))
  return groups


def update(config, out, small) -> dict:
  """Model FLOPs utilisation of the update, as `train/mfu` of a run's log."""
  del out
  cfg, mesh, params = policy(config)
  learner = Learner(config, cfg, mesh)
  learner.start(params)
  del params
  begin = time.monotonic()
  learner.warmup()
  compiled = time.monotonic() - begin
  rng, seconds = np.random.default_rng(0), {}

  @contextlib.contextmanager
  def timer(name):
    begin = time.monotonic()
    yield
    seconds[name] = seconds.get(name, 0) + time.monotonic() - begin

  def check_finite(metrics, batches):
    del batches
    if not metrics['finite']:
      raise RuntimeError(f'the update is not finite: {metrics}')

  run = types.SimpleNamespace(
    step=0, writer=types.SimpleNamespace(timer=timer), check_finite=check_finite
  )
  rows = []
  for i in range(3):  # the first is a warm-up
    groups, seconds = trajectories(config, rng), {}
    tokens = sum(len(t) for group in groups for t in group)
    n = config.rollout.questions * config.rollout.group
    reward = Rewards(rng.normal(size=n).astype(np.float32), np.ones(n, bool))
    with timer('batch'):
      batch = batching.of_step(
        groups, reward, config, shards=learner.shards, seed=(config.seed, i)
      )
    outputs = learner.outputs(batch, timer)
    given = credit.assign(config, batch, **outputs._asdict(), greedy=None)
    learned = learner.update(batch.minibatches, outputs, given, run)
    rows.append(
      {
        'case': f'update {i}',
        'mfu': learner.rates()['train/mfu'],
        'tokens_per_s': tokens / seconds['update'],
        'mean_tokens': tokens / n,
        'padding': learned['padding'],
        'microbatches': learned['microbatches'],
        **{f'seconds_{k}': v for k, v in seconds.items()},
      }
    )
    print(common.table(rows[-1:]), flush=True)
  mfu = statistics.median(r['mfu'] for r in rows[1:])
  bar = common.bar('update_mfu', mfu, 0.45) | {'goal': 0.5}
  return {'rows': rows, 'bars': [bar], 'compile_seconds': compiled}


# Exact search.


def search(config, out, small) -> dict:
  """`experiments.benchmarks.retrieval_gpu`, in a process of its own."""
  del config
  path = out / 'retrieval_gpu.json'
  module = 'experiments.benchmarks.retrieval_gpu'
  command = [sys.executable, '-m', module, f'--out={path}', '--allow_load']
  if small:
    command += ['--passages=20000', '--dim=64', '--batch=8', '--copy_mb=64']
    command += ['--small_encoder', '--reps=3']
  subprocess.run(command, cwd=common.ROOT, check=True)
  found = json.loads(path.read_text())
  return {'rows': found['rows'], 'bars': found['bars']}


# The in-process engine.


def sampler(config, out, small) -> dict:
  """Seconds of a decoded token against reading weights and live cache once.

  Live are the positions that hold a token; the program reads the others of a
  slot too. Contexts of `typical` have 1,024 tokens on average, as those of
  Search-R1; those of `full` nearly fill their slots.
  """
  del out
  cfg, mesh, params = policy(config)
  engine = JaxEngine(cfg, params, Ids(), config.engine, mesh)
  del params
  bandwidth = copy_bandwidth(64 if small else 4096)
  e = config.engine
  cfg = dataclasses.replace(cfg, dtype=e.dtype)
  arrays = jax.tree.leaves(decode.abstract(cfg, mesh))
  weights = sum(x.size * x.dtype.itemsize for x in arrays)
  token_bytes, slots = device.bytes_per_token(cfg), e.slots
  rng, rows = np.random.default_rng(0), []
  # Multiples of the widest prefill call, so that three programs are compiled.
  width = decode.Shape(slots, e.max_len, e.chunk, e.prefill_rows).widths[-1]
  if small:
    width //= 4
  last = (e.max_len - NEW - 2 * e.chunk) // width * width
  cases = {'typical': [min(n * width, last) for n in (1, 2, 3, 2)]}
  cases['full'] = [last]

  async def turn(handles, **fields):
    await asyncio.gather(
      *(
        engine.generate(h, Sampling(seed=i, **fields))
        for i, h in enumerate(handles)
      )
    )

  async def play(lengths):
    prompts = [
      rng.integers(cfg.vocab_size, size=lengths[i % len(lengths)]).tolist()
      for i in range(slots)
    ]
    handles = [engine.open(Prompt(tuple(ids))) for ids in prompts]
    begin = time.perf_counter()
    # Prefill, whose time would otherwise be counted as that of decoding.
    await turn(handles, max_tokens=e.chunk, limit=max(lengths) + e.chunk + NEW)
    middle, before = time.perf_counter(), dict(engine.stats())
    await turn(handles, max_tokens=NEW)
    wall, after = time.perf_counter() - middle, engine.stats()
    for handle in handles:
      engine.close(handle)
    found = {k: after[k] - before[k] for k in before}
    if found['prefilled_tokens'] or found['decode_steps'] != NEW:
      raise RuntimeError(f'{NEW} steps without a prefill expected: {found}')
    return wall, found['seconds_decode'], middle - begin

  for name, lengths in cases.items():
    runs = [asyncio.run(play(lengths)) for _ in range(4)][1:]
    wall, seconds, first = (statistics.median(x) for x in zip(*runs))
    context = np.mean([lengths[i % len(lengths)] for i in range(slots)])
    context += e.chunk + NEW / 2
    live = slots * context * token_bytes
    ideal = (weights + live) / bandwidth
    rows.append(
      {
        'case': name,
        'of_roofline': ideal / (seconds / NEW),
        'ms_per_token': 1e3 * seconds / NEW,
        'tokens_per_s': slots * NEW / wall,
        'host_share': 1 - seconds / wall,
        'prefill_tokens_per_s': slots * np.mean(lengths) / first,
        'context': context,
        'weights_gb': weights / 1e9,
        'live_cache_gb': live / 1e9,
        'cache_gb': slots * kv.length(e.max_len) * token_bytes / 1e9,
        'copy_gb_per_s': bandwidth / 1e9,
        'runs': runs,
      }
    )
    print(common.table(rows[-1:]), flush=True)
  bars = [
    common.bar(f'decode_of_roofline_{r["case"]}', r['of_roofline'], 0.4)
    for r in rows
  ]
  return {'rows': rows, 'bars': bars}


# A step of GRPO.


def grpo(config, out, small) -> dict:
  """Two steps of `train.train` with search; the first also warms up."""
  del small
  begin = time.monotonic()
  # No checkpoint is written: it would take 46 GiB, and nothing is learned.
  unsaved = mock.patch.object(sessions.Session, 'save')
  with tempfile.TemporaryDirectory(dir=out) as folder, unsaved:
    train.train(config, folder)
    log = pathlib.Path(folder) / 'metrics.jsonl'
    steps = [json.loads(x) for x in log.read_text().splitlines()]
  seconds = time.monotonic() - begin
  rows = []
  for n, step in enumerate(steps):
    took = {k: v for k, v in step.items() if k.startswith('time/')}
    rows.append(
      {
        'case': f'step {n}',
        **{k.partition('/')[2]: v for k, v in took.items()},
        **{k: v for k, v in step.items() if k in _SHOWN},
        'metrics': step,
      }
    )
  figure = {'figure': 'seconds of a step', 'value': rows[-1]['step']}
  return {'rows': rows, 'bars': [], 'figure': figure, 'seconds_in_all': seconds}


_SHOWN = (
  'train/mfu train/padding rollout/tokens_per_second health/searches '
  'sync/canary_max_diff train/mismatch_abs'
).split()


def vllm(config, out, small) -> dict:
  """The same with a vLLM server on the same device, and its sync."""
  places = [common.ROOT / config.engine.venv, pathlib.Path(sys.prefix)]
  found = [p for p in places if [*p.glob('lib/python3*/site-packages/vllm')]]
  if not found:
    raise Skipped(f'vllm is in none of {", ".join(map(str, places))}')
  config.engine.venv = str(found[0])
  return grpo(config, out, small)


# Memory.


def memory(config, out, small) -> dict:
  """Peak memory of the stage `grpo` against what was predicted for its run.

  `device`: the sizes of arrays and the temporaries of the programs as this
  device's compiler reports them. `gate`: the same by the ahead-of-time gate,
  from gate.txt.
  """
  path = out / 'grpo.json'
  record = json.loads(path.read_text()) if path.exists() else {}
  if (record.get('status'), record.get('model')) != ('done', _MODEL.value):
    raise Skipped(f'stage grpo has not run with {_MODEL.value}')
  mesh = build.mesh(config)
  cfg = parameters.model_config(config, Ids.vocab_size)
  programs = [
    {'case': p.name, 'arguments': p.arguments, 'temporary': p.temporary}
    for p in gate.programs(config, cfg, mesh)
    if not p.name.endswith('zeros')  # its result is the accumulator
  ]
  print(common.table(programs), flush=True)
  working = max(p['temporary'] for p in programs)
  needs = costs.of_run(config, cfg, mesh, working=working)
  # float16 vectors of the search on this device, which a run's own plan lacks.
  index = 2 * config.source.vectors * config.source.dim
  peak, rows = record['peak_bytes'], []
  predicted = {'device': needs.device['in all']}
  if not small:
    file = pathlib.Path(__file__).with_name(GATES[_MODEL.value])
    said = re.search(r'in all +([\d,.]+)', file.read_text())
    predicted['gate'] = int(float(said[1].replace(',', '')) * 2**20)
  for name, nbytes in predicted.items():
    ratio = peak / (nbytes + index)
    rows.append(
      {
        'case': name,
        'predicted_gib': (nbytes + index) / 2**30,
        'peak_gib': peak / 2**30,
        'peak_of_predicted': ratio,
      }
    )
  bars = [
    common.bar(
      f'memory_off_{r["case"]}',
      abs(r['peak_of_predicted'] - 1),
      0.1,
      at_most=True,
    )
    for r in rows
    if peak
  ]
  # Where the device does not tell its peak, there is no bar.
  figure = {'figure': 'GiB predicted', 'value': rows[0]['predicted_gib']}
  return {
    'rows': rows,
    'bars': bars,
    'figure': figure,
    'programs': programs,
    'device_bytes': needs.device,
  }


STAGES = {f.__name__: f for f in (update, search, sampler, grpo, memory, vllm)}


def configured(model: str, small: bool, overrides) -> ConfigDict:
  """The recipe with fields set: each override is `dotted.name=value`."""
  # Locked, so that a field which does not exist is refused.
  config = recipe.get_config(f'model={model},small={small}').lock()
  for override in overrides:
    name, _, value = override.partition('=')
    with contextlib.suppress(ValueError, SyntaxError):
      value = ast.literal_eval(value)
    config.update_from_flattened_dict({name: value})
  return config


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments: {argv[1:]}')
  name, small = _NAME.value or _STAGE.value, _SMALL.value
  out = pathlib.Path(_OUT.value)
  record = {'stage': name, 'model': _MODEL.value, 'small': small}
  record['overrides'] = _SET.value
  record['environment'] = common.environment()
  begin = time.monotonic()
  try:
    config = configured(_MODEL.value, small, _SET.value)
    # Not before `search`, whose own process needs the device's memory.
    if not small and name != 'search' and jax.default_backend() == 'cpu':
      raise RuntimeError('JAX sees no accelerator: its CUDA plugin is missing')
    record['config'] = json.loads(config.to_json_best_effort())
    record |= STAGES[_STAGE.value](config, out, small) | {'status': 'done'}
    local = jax.local_devices()[0]
    stats = local.memory_stats() or {}
    record |= {
      'device': local.device_kind,
      'peak_bytes': stats.get('peak_bytes_in_use', 0),  # 0: it does not tell
      'memory_stats': stats,
      'gpus_after': common.gpus(),  # clocks while it is still warm
    }
  except Skipped as e:
    record |= {'status': 'skipped', 'reason': str(e), 'bars': []}
  record['seconds'] = time.monotonic() - begin
  records.write_json(out / f'{name}.json', record)


if __name__ == '__main__':
  _STAGE = flags.DEFINE_enum('stage', None, list(STAGES), 'Which.')
  _NAME = flags.DEFINE_string('name', '', 'Of the file; empty: as the stage.')
  _OUT = flags.DEFINE_string('out', None, 'Folder of the records.')
  _SMALL = flags.DEFINE_bool('small', False, 'Sizes for a CPU.')
  _MODEL = flags.DEFINE_enum('model', 'qwen2.5-3b', list(GATES), 'Its shape.')
  _SET = flags.DEFINE_multi_string('set', [], 'A field: dotted.name=value.')
  flags.mark_flags_as_required(['stage', 'out'])
  app.run(main)
