"""Builds what a config names: model, tokenizer, environment, source, engine.

Shared by train, sft, evaluate and ask, so that each of them shows only its
own flow.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import pathlib
import re
import shutil
import tempfile

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from searchrl_jax.data import core as data
from searchrl_jax.engines import core as engines
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import decoder, lora, pretrained
from searchrl_jax.models import shapes as shapes_lib
from searchrl_jax.run import (
  checkpoint,
  cluster,
  lookup,
  records,
  schema,
  sharding,
  writer,
)
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
BASE = 'base'  # a checkpoint of the parameters beside the adapters
# Fields that define how a model is computed; the others define the model.
_COMPUTED = ('dtype', 'remat', 'scan_unroll', 'attention')


def load_config(workdir: str) -> ConfigDict:
  """The resolved config that a run wrote into its folder.

  Fields that were added to the schema since the run get their neutral value,
  with which the run behaves as it did.
  """
  path = pathlib.Path(workdir) / 'config.json'
  lookup.require(
    path.exists(),
    f'--workdir={workdir} is no run folder: it has no config.json (a Hugging '
    'Face folder is a field of --config)',
  )
  config = schema.base()
  with lookup.of(str(path)):
    try:
      config.update(json.loads(path.read_text(), object_hook=_tuples))
    except (TypeError, AttributeError) as e:  # a field of another type
      raise ValueError(e) from e
  if config.source.corpus == 'world':
    # The config defines the world. The server of the run has ended, or serves
    # its world although --config.data.world_seed may name another.
    config.source.url = ''
  return config


def _tuples(fields: dict) -> dict:
  """An object of JSON with tuples for its lists, as configs write them."""
  return {k: tuple(v) if type(v) is list else v for k, v in fields.items()}


def require_same(config: ConfigDict, questions=()) -> None:
  """Compares config, code and questions of all processes.

  Fields that state where a run runs may differ.

  Raises:
    ConfigError: names what differs, and on which process.
  """

  def facts():
    versions = {'jax': jax.__version__, 'searchrl_jax': cluster.code()}
    content = repr([(q.id, q.text, q.answers) for q in questions])
    digest = hashlib.sha256(content.encode('utf-8', 'replace')).hexdigest()
    data = {'questions': len(questions), 'digest': digest[:16]}
    fields = writer.computed(records.plain(config))
    # A run may go on with others, but processes have to agree when to save.
    fields['checkpoint.every'] = config.checkpoint.every
    fields['checkpoint.background'] = config.checkpoint.background
    fields['rollout.mismatch_alarm'] = config.rollout.mismatch_alarm
    return {'config': fields, 'code': versions, 'data': data}

  cluster.require_same(facts)


def mesh(config: ConfigDict, devices=None):
  """Makes the mesh; disables TF32 on GPUs if the model is float32.

  On accelerators, compiled programs are kept for the next start where the
  retrieval service keeps its own: those of a 3B model take minutes to compile.
  """
  if config.model.dtype == 'float32':
    jax.config.update('jax_default_matmul_precision', 'highest')
  if jax.default_backend() != 'cpu':
    from retrieval import devices as programs

    try:
      programs.keep_programs(None)
    except (OSError, RuntimeError) as e:
      logging.warning('compiled programs are not kept: %s', e)
  return sharding.make_mesh(**config.mesh.to_dict(), devices=devices)


def tokenizer(config: ConfigDict, workdir: str) -> tokenizers.Tokenizer:
  """The tokenizer, which is kept in the run folder.

  The first of: that of the run folder, if the run has begun; that of the run
  folder config.train.init; config.model.tokenizer, which is a Hugging Face
  folder, 'world' (the words of the generated worlds) or 'bpe' (trained on
  config.source.corpus, config.model.bpe_vocab entries); config.model.path.
  """
  kept = pathlib.Path(workdir) / TOKENIZER
  cluster.first('tokenizer', lambda: _keep_tokenizer(config, workdir, kept))
  return tokenizers.load(kept)


def _keep_tokenizer(config, workdir: str, kept: pathlib.Path) -> None:
  if kept.exists() and records.begun(workdir):
    return
  name = config.model.tokenizer or config.model.path
  start = pathlib.Path(config.train.init) / TOKENIZER
  if config.train.init and start.exists():
    name = str(start)
  lookup.require(
    name, "config.model.tokenizer is empty: give a folder, 'world' or 'bpe'"
  )
  with records.explained(kept):
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory('', 'tokenizer.', kept.parent) as folder:
      part = pathlib.Path(folder) / TOKENIZER
      part.mkdir()
      _write_tokenizer(name, config, workdir, part)
      shutil.rmtree(kept, ignore_errors=True)  # of a start that failed
      part.rename(kept)


def _write_tokenizer(name: str, config, workdir: str, out: pathlib.Path):
  if name == 'world':
    world(config).tokenizer(out)
  elif name == 'bpe':
    from retrieval.corpus import read_corpus

    texts = read_corpus(corpus(config, workdir)).contents
    tokenizers.train_bpe(texts, config.model.bpe_vocab, out)
  else:
    field = 'tokenizer' if config.model.tokenizer else 'path'
    folder = pathlib.Path(local(name, f'config.model.{field}'))
    tokenizers.load(folder).save(out)
    generation = folder / 'generation_config.json'
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
    path not in shapes_lib.NAMED,
    f'{field}={path!r} is a shape for reports, without weights or tokenizer; '
    'give a Hugging Face folder or name, such as Qwen/Qwen2.5-3B',
  )
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
      f'{field}={path!r} is no folder here and could not be fetched from the '
      f'hub ({e}); HF_ENDPOINT names a mirror, HF_HOME a cache'
    ) from e


def names_shape(config: ConfigDict) -> bool:
  """Whether config.model.path is a shape by name (`models/shapes.py`), which
  has neither weights nor a tokenizer."""
  path = config.model.path
  return path in shapes_lib.NAMED and not pathlib.Path(path).is_dir()


def model_config(config: ConfigDict, vocab_size: int):
  """DecoderConfig of config.model; `arch` lacks only the vocabulary."""
  flags = {name: config.model[name] for name in _COMPUTED}
  flags['lora'] = lora.parse(config.models.lora, config.model.dtype)
  path = config.model.path
  if names_shape(config):
    cfg = pretrained.decoder_config(shapes_lib.NAMED[path], **flags)
  elif path:
    cfg = pretrained.read_config(local(path), **flags)
  else:
    lookup.require(config.model.arch, 'config.model needs a path or an arch')
    arch = {'vocab_size': vocab_size} | config.model.arch.to_dict()
    cfg = pretrained.decoder_config(arch, **flags)
  lookup.require(
    cfg.vocab_size >= vocab_size,
    f'the tokenizer has {vocab_size} entries and the model '
    f'{cfg.vocab_size}: config.model.tokenizer does not belong to the model',
  )
  return cfg


def parameters(config: ConfigDict, cfg, mesh) -> dict:
  """The parameters to start from: train.init, model.path, or fresh ones.

  Adapters are those of config.models.lora.path, of a run train.init with equal
  ones, or fresh. Those of another run are merged into its parameters.
  """
  init, path = config.train.init, config.models.lora.path
  lookup.require(
    cfg.lora or not path,
    f'config.models.lora.path={path!r} with config.models.lora.rank=0: set the '
    "adapter's rank",
  )
  if init:
    folder = pathlib.Path(init)
    if (folder / records.CHECKPOINTS).exists():
      return restore_params(config, init, cfg, mesh)
    # Not looked up on the hub: it is a local folder, or a mistake.
    lookup.require(
      folder.is_dir() and not (folder / 'environment.json').exists(),
      f'config.train.init={init!r}: no such folder, or a run without a '
      'checkpoint; give a run that has finished, or a Hugging Face folder',
    )
  model, dtype = lora.base(cfg), cfg.lora.dtype if cfg.lora else 'float32'
  if init or config.model.path:
    folder = init or local(config.model.path)
    _, params = pretrained.load(folder, mesh, np.dtype(dtype), model)
  else:
    c = config.model
    scales = {'scale': c.init_scale, 'embed_scale': c.embed_scale}
    fresh = functools.partial(decoder.init_params, model, **scales)
    out = decoder.param_shardings(model, mesh)
    params = jax.jit(fresh, out_shardings=out)(jax.random.key(config.seed))
  return _with_adapters(config, cfg, params, mesh)


def _with_adapters(config: ConfigDict, cfg, params: dict, mesh) -> dict:
  """Parameters of `lora.base(cfg)` as those of `cfg`."""
  if cfg.lora is None:
    return params
  path = config.models.lora.path
  if path:
    with lookup.of(f'config.models.lora.path={path!r}'):
      adapters = lora.load(path, cfg, mesh)
  else:
    key, _ = jax.random.split(jax.random.key(config.seed))
    adapters = lora.init(cfg, key, mesh)
  return lora.join(adapters, lora.freeze(cfg, params))


def saver(config: ConfigDict, workdir: str) -> checkpoint.Checkpointer:
  c = config.checkpoint
  folder = pathlib.Path(workdir) / records.CHECKPOINTS
  return checkpoint.Checkpointer(folder, c.keep, c.best)


def restore_params(config, workdir: str, cfg, mesh, which='latest') -> dict:
  """The parameters of a run folder: 'latest', 'best', or a step.

  Raises:
    CheckpointError: there is none, or it is of another model.
  """
  files = saver(config, workdir)
  step = files.resolve(which)
  made = files.meta(step)['fingerprint'].get('lora')
  made = made and decoder.Lora(**_tuples(made))
  theirs = dataclasses.replace(cfg, lora=made)
  # Arrays of the same shapes can still be of another model (rope_theta).
  model = dataclasses.asdict(theirs)
  model = {k: v for k, v in model.items() if k not in _COMPUTED}
  trained, frozen = lora.split(theirs, shapes(theirs, mesh))
  like = {'state': {'params': trained}}
  restored = files.restore(like, step, fingerprint=model, partial=True)
  trained = restored.state['state']['params']
  frozen = read_fixed(workdir, {BASE: frozen})[BASE]
  # The frozen parameters may be computed with in another dtype.
  same = made and cfg.lora and dataclasses.replace(made, dtype=cfg.lora.dtype)
  if same and same == cfg.lora:
    return lora.join(trained, lora.freeze(cfg, frozen))
  params = lora.join(trained, frozen)
  if made == cfg.lora:  # no adapters in either
    return params
  return _with_adapters(config, cfg, lora.merge(theirs, params), mesh)


def keep_fixed(workdir, fixed: dict[str, dict]) -> None:
  """Writes the parameters that a run does not change to its folder, once.

  fixed: subfolder -> parameters; {} writes nothing.

  Raises:
    CheckpointError: the disk.
  """
  for name, params in fixed.items():
    if params:
      files = checkpoint.Checkpointer(pathlib.Path(workdir) / name, None, '')
      files.delete(files.steps())  # of a start that failed
      files.save(0, params, extras={}, metrics={}, fingerprint={})


def read_fixed(workdir, like: dict[str, dict]) -> dict[str, dict]:
  """What `keep_fixed` wrote.

  like: the shapes of the parameters; {} reads nothing.

  Raises:
    CheckpointError: it is absent, or of other shapes or another dtype.
  """
  out = dict(like)
  for name, shapes in like.items():
    if shapes:
      files = checkpoint.Checkpointer(pathlib.Path(workdir) / name, None, '')
      out[name] = files.restore(shapes, 0, fingerprint=None).state
  return out


def shapes(cfg, mesh, model=decoder) -> dict:
  """The parameters as shapes with shardings; nothing is allocated.

  model: the module that has their table, `decoder` or `critic`.
  """
  layout = decoder.flatten(model.param_shardings(cfg, mesh))
  table = {k: size for k, (size, _) in model.param_table(cfg).items()}
  dtypes = dict.fromkeys(table, 'float32') | lora.dtypes(cfg)
  return decoder.nest(
    {
      k: jax.ShapeDtypeStruct(size, jnp.dtype(dtypes[k]), sharding=layout[k])
      for k, size in table.items()
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
    lookup.require(name != SEARCH, f'{where}: that is config.source')
    _maker(fields, where)
  for path in templates or (config.env.template,):
    for kind in prompts.load(path).kinds.values():
      lookup.require(
        kind.tool in ('', SEARCH, *config.tools),
        f'the block {kind.name!r} of template {path!r} calls the tool '
        f'{kind.tool!r}, and config.tools has {[*config.tools]}: set '
        f'config.tools.{kind.tool} = dict(module=...), or another template',
      )


def _environment(config: ConfigDict):
  with lookup.of('config.env.module'):
    return lookup.function('searchrl_jax.text', config.env.module)


def _maker(fields: ConfigDict, where: str):
  """The function `make` of a source's module."""
  with lookup.of(f'{where}.module'):
    return lookup.function(_SOURCES, f'{fields.get("module")}.make')


def environment(config: ConfigDict, tok) -> SearchEnv:
  """The environment of config.env; its module names the class."""
  return _environment(config)(
    tok, template(config), config.env, config.data.prompt, config.source.k
  )


def engine(config: ConfigDict, cfg, params, tok, mesh, workdir: str):
  """The engine that config.engine.module names, with `lora.served` adapters.

  Raises:
    ConfigError: it would share the devices of a mesh with the update.
  """
  if config.rollout.max_staleness:
    require_alone(config, mesh, 'config.rollout.max_staleness above 0')
  cfg, params = lora.served(cfg, params)
  make = engines.module(config.engine.module).make
  return make(cfg, params, tok, config.engine, mesh, pathlib.Path(workdir))


def require_alone(config: ConfigDict, mesh, what: str) -> None:
  """Refuses programs beside those of an engine that shares their mesh."""
  lookup.require(
    config.engine.module != 'jax_sampler' or mesh.size == 1,
    f'{what} on a mesh of {mesh.size} devices: two programs at a time can wait '
    "for each other for ever; use engine.module='vllm' for this engine, one "
    'device (CUDA_VISIBLE_DEVICES=0, config.mesh), or do without',
  )


async def first_weights(config, engine, cfg, params, mesh, canary) -> None:
  """Gives a server its weights; an engine in process has them already.

  canary: int [n], ids to check them with, see `sync.sync_and_verify`.
  """
  if engine.version is None:
    logps = functools.partial(sync.forward_logps(cfg, mesh), params)
    limit = config.engine.canary_tolerance
    _, params = lora.served(cfg, params)
    await sync.sync_and_verify(engine, params, 0, canary, logps, limit)


def source(config, url: str, engine=None, tok=None, mesh=None, workdir=''):
  """The source that config.source.module names, on this URL; with those of
  config.tools, if there are any, as `sources.tools.Tools`.

  The other arguments are for a simulator: a function that returns the policy's
  engine (which is opened later), its tokenizer, its mesh and the run folder.
  """
  fields = config.source.copy_and_resolve_references()
  fields.url = url
  writer = functools.partial(simulator, config, engine, tok, mesh, workdir)
  make = _maker(fields, 'config.source')
  made = {SEARCH: make(fields, seed=config.seed, writer=writer)}
  for name, fields in config.tools.items():
    where = f'config.tools.{name}'
    try:
      made[name] = _maker(fields, where)(fields, seed=config.seed)
    except AttributeError as e:  # a field that it reads and the config lacks
      raise ConfigError(f'{where}: {e}') from e
  return Tools(made) if config.tools else made[SEARCH]


def simulator(config, policy, tok, mesh, workdir: str):
  """The model that writes documents: config.source.simulator.path on an engine
  of its own, or, without a path, the policy's engine.

  Raises:
    ConfigError: two engines would share the devices of a mesh.
  """
  fields, folder = config.source.simulator, f'{workdir}/simulator'
  path = fields.path
  if not path:
    return simulated.DocumentWriter(policy, tok, None)
  lookup.require(
    cluster.size() == 1,
    f'config.source.simulator.path={path!r}: a simulator with a model of its '
    'own runs in one process; leave it empty, or start one process',
  )
  if (pathlib.Path(path) / records.CHECKPOINTS).exists():
    theirs = load_config(path)
    theirs.train.init = path
  else:
    theirs = config.copy_and_resolve_references()
    path = local(path, 'config.source.simulator.path')
    theirs.model.update(path=path, tokenizer='')
    theirs.models.lora.update(rank=0, path='')
    theirs.train.init = ''
  theirs.engine = config.engine.copy_and_resolve_references()
  theirs.engine.update({'url': ''} | fields.engine.to_dict())
  require_alone(theirs, mesh, f'config.source.simulator.path={path!r}')
  tok = tokenizer(theirs, folder)
  cfg = model_config(theirs, tok.vocab_size)
  params = parameters(theirs, cfg, mesh)
  made = engine(theirs, cfg, params, tok, mesh, folder)

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
  config.data. It ends with the block, or with this process. Of several
  processes each starts one for itself, or, with config.source.servers='one',
  process 0 for all.
  """
  if config.source.module in (none.NONE, simulated.SIMULATED):
    yield ''
  elif config.source.url:
    yield config.source.url
  else:
    from retrieval import process  # only needed to start a server

    folder = cluster.folder(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:

      def start(**how) -> str:
        served, log = corpus(config, str(folder)), folder / 'retrieval.log'
        server = process.start_server(served, log_path=log, **how)
        return stack.enter_context(server).url

      if config.source.servers == 'one' and cluster.size() > 1:
        host = cluster.host()
        served = host if host in ('127.0.0.1', 'localhost') else '0.0.0.0'
        url = cluster.first('retrieval', lambda: start(host=served))
        yield url.replace('0.0.0.0', host)
      else:
        yield cluster.agree('retrieval', start)


def corpus(config: ConfigDict, workdir: str) -> str:
  """Path of the corpus to serve; a generated world is written first."""
  if config.source.corpus != 'world':
    lookup.require(
      config.source.corpus,
      'config.source.url and config.source.corpus are both empty: give the URL '
      'of a retrieval server, or a corpus to start one on',
    )
    return data.resolve(config.source.corpus, config.data)
  made, seed = world(config), config.data.world_seed
  folder = pathlib.Path(workdir) / f'world_{seed}'
  with records.explained(folder):
    generated = made.generate(seed, **config.data.world.to_dict())
    return made.write(generated, folder)['corpus']


def world(config: ConfigDict):
  """The module that generates the worlds of config.data.world_module."""
  return lookup.module('searchrl_jax.data', config.data.world_module)
