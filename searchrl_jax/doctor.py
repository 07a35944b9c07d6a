"""Tells whether a config can run, on this machine or on other accelerators.

  python -m searchrl_jax.doctor --config=configs/quickstart.py
  python -m searchrl_jax.doctor --workdir=runs/x \\
    --config=configs/search_r1.py:model=/path/to/checkpoint

Loads what the run would load, searches once and samples a few tokens. Every
check prints what it found, or the problem and its fix; a check that needs the
result of a failed one is skipped. What the run takes follows: memory by device
and of the host, and the arithmetic of a step. Nothing is written to --workdir
(default: the current folder), whose disk is checked. The exit status is 2 if
there is a problem.

  make aot
  .venv-aot/bin/python -m searchrl_jax.doctor --topology=h200:1x8 \\
      --config=configs/search_r1.py:model=qwen2.5-3b --config.mesh.fsdp=8

With --topology it compiles every program of the run for those accelerators in
place of the checks (`aot/gate.py`). The compilers are the real ones, so memory,
collectives and kernels are those of a run; seconds are estimates from the
chip's data sheet. Nothing is executed. The exit status is 2 if a device needs
more than 90 % of its memory.
"""

import contextlib
from importlib import metadata
import itertools
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import time
import tomllib
import types

from absl import flags, logging
import jax
from packaging import requirements
import psutil
from rich import console
from rich import text as rich_text

from searchrl_jax import checks, lookup
from searchrl_jax.aot import costs, gate
from searchrl_jax.data import core as data
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines.core import Sampling
from searchrl_jax.engines.weights import sync
from searchrl_jax.learn.learner import Learner
from searchrl_jax.models import parameters
from searchrl_jax.rewards import judge as judges
from searchrl_jax.run import build, command, services
from searchrl_jax.sources import none, simulated
from searchrl_jax.sources.core import SourceError
from searchrl_jax.store import progress, records
from searchrl_jax.types import SearchError, SearchRequest

GIB = 2**30
TOKENS = 16  # of the sampled text
_PROJECT = pathlib.Path(__file__).parents[1] / 'pyproject.toml'


class Skipped(Exception):
  """A check that cannot be made; the message says why."""


def fields(have) -> str:
  checks.check(have.config)
  return f'{have.config.name}: every field is valid'


def versions(have) -> str:
  """The packages that pyproject.toml names."""
  if _PROJECT.exists():
    named = tomllib.loads(_PROJECT.read_text())['project']['dependencies']
  else:
    named = metadata.requires('searchrl_jax') or []
  wrong = []
  for need in map(requirements.Requirement, named):
    if need.marker and not need.marker.evaluate({'extra': ''}):
      continue
    try:
      version = metadata.version(need.name)
    except metadata.PackageNotFoundError:
      version = ''
    if not need.specifier.contains(version or '0', prereleases=True):
      wrong.append(f'{need} (here: {version or "not installed"})')
  lookup.require(not wrong, f'{", ".join(wrong)}: `pip install -U` these')
  return f'Python {sys.version.split()[0]}, JAX {jax.__version__}'


def devices(have) -> str:
  have.opener.mesh = have.mesh = build.mesh(have.config)
  first = have.mesh.devices.flat[0]
  return f'{have.mesh.size} x {first.device_kind}, mesh {dict(have.mesh.shape)}'


def ports(have) -> str:
  with socket.create_server(('127.0.0.1', 0)) as server:
    return f'a server can listen on 127.0.0.1 (tried {server.getsockname()[1]})'


def questions(have) -> str:
  """Training questions and evaluation sets."""
  config = have.config
  stream = data.open_stream(config.data, config.seed)
  sets = config.data.eval and data.load_sets(config.data.eval, config.data)
  checks.check_data(config, stream.questions)
  have.questions = [*stream.questions, *itertools.chain(*sets.values())]
  counts = [f'{name} {len(qs):,}' for name, qs in sets.items()]
  return ', '.join([f'train {len(stream.questions):,}', *counts])


def tokenizer(have) -> str:
  model = have.config.model
  if parameters.names_shape(have.config) and not model.tokenizer:
    raise Skipped(f'config.model.path={model.path!r} is a shape without one')
  have.tok = build.tokenizer(have.config, have.folder)
  return f'{have.tok.vocab_size:,} entries'


def model(have) -> str:
  """The policy's shape; with a shape by name, the checks of memory go on."""
  named = parameters.names_shape(have.config)
  if not (named or have.tok):
    raise Skipped('it needs tokenizer')
  sizes = [1]  # a shape by name has a vocabulary of its own
  if have.tok:
    sizes = [have.tok.vocab_size, have.tok.needed]
  have.cfg = parameters.model_config(have.config, *sizes)
  have.opener.cfg = have.cfg
  return f'{have.cfg.n_params:,} parameters'


def prompts(have) -> str:
  have.env = build.environment(have.config, have.tok)
  checks.check_prompts(have.env, have.questions)
  return f'every question fits in {have.config.env.max_tokens:,} tokens'


def memory(have) -> str:
  """Compiles the update to know its temporaries."""
  needs = costs.of_run(have.config, have.cfg, have.mesh)
  have.report = costs.render(have.config, have.cfg, have.mesh, needs)
  device, host = needs.device['in all'], sum(needs.host.values())
  stats = have.mesh.devices.flat[0].memory_stats() or {}
  limit = stats.get('bytes_limit')
  if limit is None:  # a CPU, whose devices share the host's memory
    host, device = host + device * have.mesh.size, 0
  free = psutil.virtual_memory().available
  rows = [('device', device, limit)] if limit else []
  rows += [('host', host, free)]
  for where, need, has in rows:
    lookup.require(
      need <= 0.9 * has,
      f'the {where} needs {need / GIB:.2f} of {has / GIB:.1f} GiB: lower '
      'config.batch.tokens, config.engine.slots or config.engine.max_len, set '
      "config.model.remat='block', or raise config.mesh.fsdp; the list below "
      'has what takes how much',
    )
  return ', '.join(
    f'{x} {n / GIB:.2f} of {h / GIB:.1f} GiB' for x, n, h in rows
  )


def disk(have) -> str:
  """Room for the checkpoints of a new run, and what it writes once."""
  learner = Learner(have.config, have.cfg, have.mesh)
  kept = have.config.checkpoint
  size, once = (
    sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    for tree in (learner.like(), learner.fixed)
  )
  # And one checkpoint that is written.
  need = size * (kept.keep + bool(kept.best) + 1) + once
  folder = pathlib.Path(have.workdir).absolute()
  folder = next(p for p in (folder, *folder.parents) if p.exists())
  lookup.require(
    os.access(folder, os.W_OK),
    f'{folder} is not writable: choose another --workdir',
  )
  free = shutil.disk_usage(folder).free
  text = f'{need / GIB:.2f} of {free / GIB:.1f} GiB free in {folder}'
  lookup.require(
    need <= free,
    f'checkpoints need {text}: choose another --workdir, or lower '
    'config.checkpoint.keep',
  )
  return f'checkpoints need {text}'


def checkpoint(have) -> str:
  begin = time.monotonic()
  have.params = parameters.initial(have.config, have.cfg, have.mesh)
  jax.block_until_ready(have.params)
  seconds = time.monotonic() - begin
  init = have.config.train.init or have.config.model.path or 'fresh'
  return f'{have.cfg.n_params:,} parameters ({init}) in {seconds:.1f} s'


def generation(have) -> str:
  """A few tokens by the engine, after its weights were verified."""
  begin = time.monotonic()
  services.check_ahead(have.config, have.mesh)
  canary = sync.canary_ids(have.env, have.questions)
  engine = have.opener.open_engine(have.tok, canary, have.params)
  have.opener.engine = engine
  _, action = have.env.reset(have.questions[0])
  handle = engine.open(action.prompt)
  seed = Sampling(max_tokens=TOKENS, seed=have.config.seed)
  done = have.opener.loop.run(engine.generate(handle, seed))
  text = have.tok.decode(done.ids)
  return f'{text!r} ({time.monotonic() - begin:.1f} s with the start)'


def search(have) -> str:
  """One question as a query, as the first trajectory would send it."""
  config, opener, begin = have.config, have.opener, time.monotonic()
  if config.source.module == none.NONE:
    return 'the policy answers its own searches'
  if config.source.module == simulated.SIMULATED and not opener.engine:
    raise SourceError('the simulator needs the check `generation`')
  retrieval = services.retrieval(config, have.folder)
  opener.url = have.stack.enter_context(retrieval)
  source = opener.open_source(have.tok)
  question = have.questions[0]
  request = SearchRequest(question.text, config.source.k, question)
  (result,) = opener.loop.run(source.search([request]))
  if isinstance(result, SearchError):
    raise SourceError(result.message)
  titles = [p.title for p in result.passages]
  return f'{question.text!r} -> {titles} ({time.monotonic() - begin:.1f} s)'


def judge(have) -> str:
  if have.opener.open(judges.make(have.config)) is None:
    return 'config.judge.url is not set'
  return f'{have.config.judge.url} answers'


# Name, function, and the checks whose results it uses.
CHECKS = (
  ('config', fields, ()),
  ('versions', versions, ()),
  ('ports', ports, ()),
  ('devices', devices, ('config',)),
  ('questions', questions, ('config',)),
  ('tokenizer', tokenizer, ('config',)),
  ('prompts', prompts, ('questions', 'tokenizer')),
  ('model', model, ('config',)),
  ('disk', disk, ('devices', 'model')),
  ('memory', memory, ('devices', 'model')),
  ('checkpoint', checkpoint, ('memory',)),  # without room nothing is loaded
  ('generation', generation, ('prompts', 'checkpoint')),
  ('search', search, ('questions', 'tokenizer', 'devices')),
  ('judge', judge, ('config',)),
)


def examine(
  config, workdir: str, out: console.Console
) -> tuple[list[str], str]:
  """Prints every check.

  Returns:
    The names of those that found a problem, and what the run takes, as a text
    table; '' if that is not known.
  """
  good, bad = set(), []

  def show(mark: str, style: str, name: str, text: str) -> None:
    line = rich_text.Text(f'{mark:8}', style).append(f'{name:12}', 'bold')
    out.print(line.append(text, 'default'))

  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    loop = stack.enter_context(Loop())
    have = types.SimpleNamespace(
      config=config, workdir=workdir, folder=folder, stack=stack
    )
    have.opener = services.Opener(config, folder, loop)
    have.tok, have.report = None, ''
    for name, function, needs in CHECKS:
      if missing := [n for n in needs if n not in good]:
        show('skipped', 'yellow', name, f'it needs {", ".join(missing)}')
        continue
      try:
        with progress.phase(name, shown=True):
          text = function(have)
      except Skipped as e:
        show('skipped', 'yellow', name, str(e))
      except Exception as e:  # reported, and the next check follows
        logging.debug('traceback of the problem below', exc_info=True)
        kind = '' if command.is_user_error(e) else f'{type(e).__name__}: '
        # What was copied is gone when the user reads this.
        copy = str(pathlib.Path(folder) / records.TOKENIZER)
        model, init = config.model, config.train.init
        own = init or model.tokenizer or model.path
        show('PROBLEM', 'bold red', name, f'{kind}{e}'.replace(copy, own))
        bad.append(name)
      else:
        show('ok', 'green', name, text)
        good.add(name)
  return bad, have.report


def vocabulary(config) -> int:
  """Entries of the tokenizer; 1 if the model has a vocabulary of its own."""
  if config.model.path or 'vocab_size' in config.model.arch:
    return 1
  with tempfile.TemporaryDirectory() as folder:
    return build.tokenizer(config, folder).vocab_size


def main():
  out = console.Console(soft_wrap=True)
  config = _CONFIG.value.copy_and_resolve_references()
  if _TOPOLOGY.value:
    sys.exit(gate.show(config, _TOPOLOGY.value, vocabulary(config)))
  bad, report = examine(config, _WORKDIR.value or '.', out)
  if report:
    print(f'\n{report}')
  if bad:
    out.print(f'\n{len(bad)} of {len(CHECKS)} checks found a problem.')
    sys.exit(2)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir(required=False)
  _TOPOLOGY = flags.DEFINE_string(
    'topology',
    None,
    'Accelerators to compile for, without having them: CHIP:SIZES, such as '
    'h200:1x8, h100:4x8 (nodes x GPUs), v5e:8x8 or v5p:2x2x4.',
  )
  command.run(main)
