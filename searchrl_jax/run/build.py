"""Builds what a config names: model, tokenizer, environment, source, engine.

Shared by train, sft, evaluate and ask, so that each of them shows only its
own flow.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from searchrl_jax.data import core as data
from searchrl_jax.engines import core as engines
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.run import checkpoint, lookup, records, schema, sharding
from searchrl_jax.run.lookup import ConfigError
from searchrl_jax.sources import none, simulated
from searchrl_jax.sources.tools import Tools
from searchrl_jax.text import prompts
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import SEARCH

_SOURCES = 'searchrl_jax.sources'
# In a run folder.
TOKENIZER = 'tokenizer'
# Fields that define a model; the others define how it is computed.
_ARCHITECTURE = {f.name for f in dataclasses.fields(decoder.DecoderConfig)} - {
  'dtype',
  'remat',
  'scan_unroll',
  'attention',
}


def load_config(workdir: str) -> ConfigDict:
  """The resolved config that a run wrote into its folder.

  Fields that were added to the schema since the run get their neutral value,
  with which the run behaves as it did.
  """
  path = pathlib.Path(workdir) / 'config.json'
  lookup.require(
    path.exists(),
    f'{path} does not exist: --workdir={workdir} is no run folder (give the '
    'folder that train or sft wrote, or --config for a Hugging Face folder)',
  )
  try:
    fields = json.loads(path.read_text())
  except ValueError as e:
    raise ConfigError(f'{path} is not JSON ({e}); is it incomplete?') from e
  config = from_dict(filled(fields, records.plain(schema.base())))
  if config.source.corpus == 'world':
    # The config defines the world. The server of the run has ended, or serves
    # its world although --config.data.world_seed may name another.
    config.source.url = ''
  return config


def filled(fields: Mapping, neutral: Mapping) -> dict:
  """`fields`, and those of `neutral` that they lack."""
  return {
    **neutral,
    **{
      name: filled(value, neutral[name])
      if isinstance(value, dict) and isinstance(neutral.get(name), dict)
      else value
      for name, value in fields.items()
    },
  }


def from_dict(fields) -> ConfigDict:
  """A ConfigDict from JSON: lists become tuples, as configs write them."""

  def convert(value):
    if isinstance(value, dict):
      return {k: convert(v) for k, v in value.items()}
    if isinstance(value, list):
      return tuple(convert(v) for v in value)
    return value

  return ConfigDict(convert(fields))


def mesh(config: ConfigDict):
  """Makes the mesh; disables TF32 on GPUs if the model is float32."""
  if config.model.dtype == 'float32':
    jax.config.update('jax_default_matmul_precision', 'highest')
  return sharding.make_mesh(**config.mesh.to_dict())


def tokenizer(config: ConfigDict, workdir: str) -> tokenizers.Tokenizer:
  """The tokenizer, which is kept in the run folder.

  The first of: that of the run folder, if the run has begun; that of the run
  folder config.train.init; config.model.tokenizer, which is a Hugging Face
  folder, 'world' (the words of the generated worlds) or 'bpe' (trained on
  config.source.corpus, config.model.bpe_vocab entries); config.model.path.
  """
  kept = pathlib.Path(workdir) / TOKENIZER
  if kept.exists() and records.begun(workdir):
    return tokenizers.load(kept)
  name = config.model.tokenizer or config.model.path
  if (
    config.train.init and (pathlib.Path(config.train.init) / TOKENIZER).exists()
  ):
    name = str(pathlib.Path(config.train.init) / TOKENIZER)
  lookup.require(
    name,
    'config.model.tokenizer is empty: give a Hugging Face folder with a '
    "tokenizer, 'world' or 'bpe'",
  )
  part = kept.with_suffix('.part')
  shutil.rmtree(part, ignore_errors=True)
  with records.explained(part):
    part.mkdir(parents=True)
  try:
    with records.explained(kept):
      _write_tokenizer(name, config, workdir, part)
      shutil.rmtree(kept, ignore_errors=True)  # of a start that failed
      part.rename(kept)
  finally:
    shutil.rmtree(part, ignore_errors=True)
  return tokenizers.load(kept)


def _write_tokenizer(
  name: str, config: ConfigDict, workdir: str, out: pathlib.Path
) -> None:
  if name == 'world':
    world(config).tokenizer(out)
  elif name == 'bpe':
    from retrieval.corpus import read_corpus

    texts = read_corpus(corpus(config, workdir)).contents
    tokenizers.train_bpe(texts, config.model.bpe_vocab, out)
  else:
    name = local(
      name,
      'config.model.' + ('tokenizer' if config.model.tokenizer else 'path'),
    )
    tokenizers.load(name).save(out)
    generation = pathlib.Path(name) / 'generation_config.json'
    if generation.exists():  # it names the tokens that end a turn
      shutil.copy(generation, out)


def local(path: str, field: str = 'config.model.path') -> str:
  """A local Hugging Face folder; a repository of the hub is downloaded.

  huggingface_hub downloads it and reads HF_ENDPOINT, HF_HOME and
  HF_HUB_OFFLINE.

  Raises:
    ConfigError: no such folder, and the hub (or its cache) has none either.
  """
  if pathlib.Path(path).is_dir():
    return path
  lookup.require(
    re.fullmatch(r'[\w.-]+/[\w.-]+', path), f'{field}={path!r}: no such folder'
  )
  import huggingface_hub
  import huggingface_hub.errors

  try:
    return huggingface_hub.snapshot_download(
      path, allow_patterns=('*.json', '*.safetensors', '*.txt', '*.jinja')
    )
  except (OSError, huggingface_hub.errors.HfHubHTTPError) as e:
    raise ConfigError(
      f'{field}={path!r} is no folder here and could not be '
      f'fetched from the hub ({type(e).__name__}: {e}); give a local folder, '
      'point HF_ENDPOINT at a mirror, or HF_HOME at a cache that has it'
    ) from e


def model_config(config: ConfigDict, vocab_size: int):
  """DecoderConfig of config.model; `arch` lacks only the vocabulary."""
  flags = {
    k: config.model[k] for k in ('dtype', 'remat', 'scan_unroll', 'attention')
  }
  if config.model.path:
    cfg = pretrained.read_config(local(config.model.path), **flags)
  else:
    arch = config.model.arch.to_dict()
    lookup.require(
      arch,
      'config.model needs a path (a Hugging Face folder) or an arch '
      '(fields of a Hugging Face config.json)',
    )
    arch.setdefault('vocab_size', vocab_size)
    cfg = pretrained.decoder_config(arch, **flags)
  lookup.require(
    cfg.vocab_size >= vocab_size,
    f'the tokenizer has {vocab_size} entries and the model '
    f'{cfg.vocab_size}: config.model.tokenizer does not belong to the model',
  )
  return cfg


def parameters(config: ConfigDict, cfg, mesh) -> dict:
  """The parameters to start from: train.init, model.path, or fresh ones."""
  init = pathlib.Path(config.train.init)
  if config.train.init:
    # Not looked up on the hub: it is a local folder, or a mistake.
    lookup.require(
      init.is_dir(),
      f'config.train.init={config.train.init!r}: no such folder; give the '
      'run folder of a warm start, or a Hugging Face folder',
    )
    if (init / records.CHECKPOINTS).exists():
      return restore_params(config, str(init), cfg, mesh)
    lookup.require(
      not (init / 'environment.json').exists(),
      f'config.train.init={config.train.init!r}: a run folder without a '
      'checkpoint; let that run finish first',
    )
  if config.train.init or config.model.path:
    folder = config.train.init or local(config.model.path)
    _, params = pretrained.load(folder, mesh, cfg=cfg)
    return params

  def fresh(key):
    return decoder.init_params(
      cfg,
      key,
      scale=config.model.init_scale,
      embed_scale=config.model.embed_scale,
    )

  out = decoder.param_shardings(cfg, mesh)
  return jax.jit(fresh, out_shardings=out)(jax.random.key(config.seed))


def saver(config: ConfigDict, workdir: str) -> checkpoint.Checkpointer:
  return checkpoint.Checkpointer(
    pathlib.Path(workdir) / records.CHECKPOINTS,
    config.checkpoint.keep,
    config.checkpoint.best,
  )


def restore_params(
  config: ConfigDict, workdir: str, cfg, mesh, which: str = 'latest'
) -> dict:
  """The parameters of a run folder: 'latest', 'best', or a step.

  Raises:
    CheckpointError: there is none, or it is of another model.
  """
  kept = saver(config, workdir)
  restored = kept.restore(
    {'state': {'params': shapes(cfg, mesh)}},
    which,
    fingerprint=None,
    partial=True,
  )
  # Arrays of the same shapes can still be of another model (rope_theta).
  saved = kept.meta(restored.step)['fingerprint']
  checkpoint.compare(
    kept.folder,
    {k: v for k, v in saved.items() if k in _ARCHITECTURE},
    {k: v for k, v in dataclasses.asdict(cfg).items() if k in _ARCHITECTURE},
  )
  return restored.state['state']['params']


def shapes(cfg, mesh, model=decoder) -> dict:
  """The parameters as shapes with shardings; nothing is allocated.

  model: the module that has their table, `decoder` or `critic`.
  """
  shardings = decoder.flatten(model.param_shardings(cfg, mesh))
  return decoder.nest(
    {
      path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[path])
      for path, (shape, _) in model.param_table(cfg).items()
    }
  )


def template(config: ConfigDict) -> prompts.Template:
  return prompts.load(config.env.template)


def check_environment(config: ConfigDict, *templates: str) -> None:
  """Finds the environment's class and every tool, before anything loads.

  Args:
    config: the whole config.
    templates: what blocks call tools; none: config.env.template.

  Raises:
    ConfigError: there is no such class or module, or a block calls a tool that
      is not in config.tools.
  """
  _environment(config)
  for name, fields in config.tools.items():
    where = f'config.tools.{name}'
    lookup.require(
      name != SEARCH, f'{where}: that is config.source; choose another name'
    )
    lookup.require('module' in fields, f'{where} has no field module')
    try:
      found = lookup.module(_SOURCES, fields.module)
    except ValueError as e:
      raise ConfigError(f'{where}.module: {e}') from e
    lookup.require(
      hasattr(found, 'make'),
      f'{where}.module={fields.module!r} has no function make',
    )
  for path in templates or (config.env.template,):
    for kind in prompts.load(path).kinds.values():
      lookup.require(
        kind.tool in ('', SEARCH, *config.tools),
        f'the block {kind.name!r} of template {path!r} calls the tool '
        f'{kind.tool!r}, and config.tools has '
        f'{", ".join(map(repr, config.tools)) or "none"}: set config.tools.'
        f'{kind.tool} = dict(module=...), or use another template',
      )


def _environment(config: ConfigDict):
  try:
    return lookup.function('searchrl_jax.text', config.env.module)
  except ValueError as e:
    raise ConfigError(f'config.env.module: {e}') from e


def environment(config: ConfigDict, tok) -> SearchEnv:
  """The environment of config.env; its module names the class."""
  return _environment(config)(
    tok, template(config), config.env, config.data.prompt, config.source.k
  )


def engine(config: ConfigDict, cfg, params, tok, mesh, workdir: str):
  """The engine that config.engine.module names.

  Raises:
    ConfigError: it would share the devices of a mesh with the update.
  """
  shares = config.engine.module == 'jax_sampler' and mesh.size > 1
  lookup.require(
    not (shares and config.rollout.max_staleness),
    f'config.rollout.max_staleness={config.rollout.max_staleness}: two '
    f'programs at a time on a mesh of {mesh.size} devices can wait for each '
    "other for ever; use engine.module='vllm' or max_staleness=0",
  )
  module = engines.module(config.engine.module)
  return module.make(
    cfg, params, tok, config.engine, mesh, pathlib.Path(workdir)
  )


async def first_weights(
  config: ConfigDict, engine, cfg, params, mesh, canary
) -> None:
  """Gives a server its weights; an engine in process has them already.

  canary: int [n], ids to check them with, see `sync.sync_and_verify`.
  """
  if engine.version is None:
    logps = sync.forward_logps(cfg, mesh)
    await sync.sync_and_verify(
      engine,
      params,
      0,
      canary,
      lambda ids: logps(params, ids),
      config.engine.canary_tolerance,
    )


def source(
  config: ConfigDict,
  url: str,
  engine=None,
  tok=None,
  mesh=None,
  workdir: str = '',
):
  """The source that config.source.module names, on this URL; with those of
  config.tools, if there are any, as `sources.tools.Tools`.

  The other arguments are for a simulator: a function that returns the policy's
  engine (which is opened later), its tokenizer and mesh.
  """
  module = lookup.module(_SOURCES, config.source.module)
  fields = config.source.copy_and_resolve_references()
  fields.url = url
  made = module.make(
    fields,
    seed=config.seed,
    writer=lambda: simulator(config, engine, tok, mesh, workdir),
  )
  if not config.tools:
    return made
  tools = {name: _tool(config, name) for name in config.tools}
  return Tools({SEARCH: made, **tools})


def _tool(config: ConfigDict, name: str):
  fields = config.tools[name]
  try:
    return lookup.module(_SOURCES, fields.module).make(fields, seed=config.seed)
  except AttributeError as e:  # a field that it reads and the config lacks
    raise ConfigError(f'config.tools.{name}: {e}') from e


def simulator(
  config: ConfigDict, policy, tok, mesh, workdir: str
) -> simulated.DocumentWriter:
  """The model that writes documents: config.source.simulator.path on an engine
  of its own, or, without a path, the policy's engine.

  Raises:
    ConfigError: two engines would share the devices of a mesh.
  """
  fields = config.source.simulator
  path, folder = fields.path, pathlib.Path(workdir) / 'simulator'
  if not path:
    return simulated.DocumentWriter(policy, tok, None)
  if (pathlib.Path(path) / records.CHECKPOINTS).exists():
    theirs = load_config(path)
    theirs.train.init = path
  else:
    theirs = config.copy_and_resolve_references()
    path = local(path, 'config.source.simulator.path')
    theirs.model.update(path=path, tokenizer='')
    theirs.train.init = ''
  theirs.engine = config.engine.copy_and_resolve_references()
  theirs.engine.update({'url': ''} | fields.engine.to_dict())
  if theirs.engine.module == 'jax_sampler' and mesh.size > 1:
    raise ConfigError(
      f'config.source.simulator.path={path!r} on a mesh of {mesh.size} '
      "devices: its programs and the policy's can wait for each other for "
      "ever; use config.source.simulator.engine.module='vllm', or serve it "
      'and give config.source.simulator.url'
    )
  tok = tokenizer(theirs, str(folder))
  cfg = model_config(theirs, tok.vocab_size)
  params = parameters(theirs, cfg, mesh)
  made = engine(theirs, cfg, params, tok, mesh, str(folder))

  async def start():
    canary = tok.encode(fields.useful)[:64]
    await first_weights(theirs, made, cfg, params, mesh, canary)
    made.warmup()

  return simulated.DocumentWriter(lambda: made, tok, start)


@contextlib.contextmanager
def retrieval(config: ConfigDict, workdir: str) -> Iterator[str]:
  """The URL to search; '' if config.source.module needs no server.

  If config.source.url is empty, a server process is started for
  config.source.corpus: a path, or 'world' for the generated world of
  config.data. It ends with the block, or with this process.
  """
  if config.source.module in (none.NONE, simulated.SIMULATED):
    yield ''
    return
  if config.source.url:
    yield config.source.url
    return
  from retrieval import process  # only needed to start a server

  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  with process.start_server(
    corpus(config, workdir), log_path=folder / 'retrieval.log'
  ) as server:
    yield server.url


def corpus(config: ConfigDict, workdir: str) -> str:
  """Path of the corpus to serve; a generated world is written first."""
  if config.source.corpus != 'world':
    lookup.require(
      config.source.corpus,
      'config.source.url and config.source.corpus are both empty: give the '
      'URL of a retrieval server, or a corpus to start one on',
    )
    return data.resolve(config.source.corpus, config.data)
  made = world(config)
  generated = made.generate(
    config.data.world_seed, **config.data.world.to_dict()
  )
  folder = pathlib.Path(workdir) / f'world_{config.data.world_seed}'
  with records.explained(folder):
    return made.write(generated, folder)['corpus']


def world(config: ConfigDict):
  """The module that generates the worlds of config.data.world_module."""
  return lookup.module('searchrl_jax.data', config.data.world_module)
