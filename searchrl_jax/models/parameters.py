"""The parameters of a run: of which model, from where, and kept where."""

import dataclasses
import fcntl
import functools
import hashlib
import logging
import operator
import pathlib

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from retrieval import files
from searchrl_jax import lookup
from searchrl_jax.devices import cluster, sharding
from searchrl_jax.lookup import ConfigError
from searchrl_jax.models import (
  decoder,
  experts,
  families,
  gguf,
  hf_config,
  lora,
  pretrained,
)
from searchrl_jax.store import checkpoint, folders, progress, records, remote

BASE = 'base'  # in a run folder: a checkpoint of the parameters beside adapters
# Fields that define how a model is computed; the others define the model.
_COMPUTED = ('dtype', 'remat', 'scan_unroll', 'attention')
# Fields that name weights which a run starts from.
_STARTS = 'train.init', 'model.path', 'model.lora.path', 'critic.path'


def local(path: str, field: str = 'config.model.path') -> str:
  """A local Hugging Face folder; one at gs:// or of the hub is downloaded.

  huggingface_hub downloads it and reads HF_ENDPOINT, HF_HOME and
  HF_HUB_OFFLINE. A GGUF file is converted once, into the user's cache folder
  (XDG_CACHE_HOME, else ~/.cache).

  Raises:
    ConfigError: no such folder, and the hub (or its cache) has none either; or
      a GGUF file that cannot be used.
  """
  if pathlib.Path(path).is_dir():
    return path
  if path.endswith('.gguf'):
    with lookup.of(f'{field}={path!r}', caught=(ValueError, OSError)):
      return str(_converted(pathlib.Path(path)))
  if remote.is_remote(path):
    return remote.fetch(path)
  lookup.require(
    path not in families.NAMED,
    f'{field}={path!r} is a shape for reports, without weights or tokenizer; '
    'give a Hugging Face folder or name, such as Qwen/Qwen2.5-3B',
  )
  import huggingface_hub

  try:
    return huggingface_hub.snapshot_download(
      path, allow_patterns=('*.json', '*.safetensors', '*.txt', '*.jinja')
    )
  # HfHubHTTPError is an OSError. ValueError: no name of the hub could be like
  # that. ImportError: a SOCKS proxy, for which httpx needs a package.
  except (OSError, ValueError, ImportError) as e:
    raise ConfigError(
      f'{field}={path!r}: no such folder, and it could not be fetched from the '
      f'hub ({e}); HF_ENDPOINT names a mirror, HF_HOME a cache'
    ) from e


def _converted(file: pathlib.Path) -> pathlib.Path:
  """The Hugging Face folder of a GGUF file, converted if it is not there."""
  found = file.stat()
  about = gguf.VERSION, file.resolve(), found.st_size, found.st_mtime_ns
  name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
  out = files.cache_folder('searchrl_jax') / 'gguf' / name
  out.parent.mkdir(parents=True, exist_ok=True)
  with out.with_suffix('.lock').open('w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one converts it
    if not out.exists():
      with progress.phase(f'converting {file.name}', shown=True):
        gguf.to_folder(file, out)
  return out


def names_shape(config: ConfigDict) -> bool:
  """Whether config.model.path is a shape by name (`families.NAMED`), which
  has neither weights nor a tokenizer."""
  path = config.model.path
  return path in families.NAMED and not pathlib.Path(path).is_dir()


def model_config(config: ConfigDict, vocab_size: int, needed: int = 0):
  """DecoderConfig of config.model; `arch` lacks only the vocabulary.

  needed: rows that a checkpoint has to have for the tokenizer; 0: all.
  """
  flags = {name: config.model[name] for name in _COMPUTED}
  path, where = config.model.path, 'config.model.arch'
  if names_shape(config):
    hf = families.NAMED[path]
  elif path:
    where = local(path)
    hf = pretrained.read_json(where)
  else:
    lookup.require(config.model.arch, 'config.model needs a path or an arch')
    hf = {'vocab_size': vocab_size} | config.model.arch.to_dict()
  with lookup.of(where):
    cfg = pretrained.decoder_config(hf, **flags)
  adapters = lora.parse(config.model.lora, config.model.dtype, cfg)
  cfg = dataclasses.replace(cfg, lora=adapters)
  most, trained = config.env.max_tokens, hf_config.context(hf)
  if trained and most > trained:
    logging.warning(
      f'config.env.max_tokens={most} is above max_position_embeddings={trained}'
      ': the model was not trained on positions that far; lower the first'
    )
  lookup.require(
    cfg.vocab_size >= (needed or vocab_size),
    f'the tokenizer has {needed or vocab_size} entries and the model '
    f'{cfg.vocab_size}: config.model.tokenizer does not belong to the model',
  )
  own = (max(1, config.mesh[axis]) for axis in ('tensor', 'fsdp'))
  experts.require_divisible(cfg.moe, *own)
  lookup.require(
    cfg.moe or not config.engine.record_routes,
    'config.engine.record_routes=True: the model has no experts; use False',
  )
  return cfg


def initial(config: ConfigDict, cfg, mesh) -> dict:
  """The parameters to start from: train.init, model.path, or fresh ones.

  Adapters are those of config.model.lora.path, of a run train.init with equal
  ones, or fresh. Those of another run are merged into its parameters.
  """
  init, path = config.train.init, config.model.lora.path
  lookup.require(
    cfg.lora or not path,
    f'config.model.lora.path={path!r} with config.model.lora.rank=0: set the '
    "adapter's rank",
  )
  if init:
    init = remote.local_run(init)
    folder = pathlib.Path(init)
    if (remote.place(folder) / records.CHECKPOINTS).exists():
      return restore(config, init, cfg, mesh)
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
  path = config.model.lora.path
  if path:
    with lookup.of(f'config.model.lora.path={path!r}'):
      adapters = lora.load(path, cfg, mesh)
  else:
    key, _ = jax.random.split(jax.random.key(config.seed))
    adapters = lora.init(cfg, key, mesh)
  return lora.join(adapters, lora.freeze(cfg, params))


def tokenizer(workdir) -> dict[str, str]:
  """The part of a checkpoint's fingerprint that its run folder decides."""
  folder = pathlib.Path(workdir) / records.TOKENIZER
  return {'tokenizer': folders.digest(folder)} if folder.is_dir() else {}


def contents(config: ConfigDict) -> dict[str, str]:
  """What a run starts from, by content: 'config.FIELD' -> digest."""
  named = ((field, operator.attrgetter(field)(config)) for field in _STARTS)
  found = {f'config.{field}': digest(path) for field, path in named if path}
  return {field: value for field, value in found.items() if value}


def digest(path: str, step: int | None = None) -> str:
  """Names the weights of a run (of a step; None: the last one), a Hugging Face
  folder or a file by samples of their bytes; '' if they are not on this
  machine."""
  folder = pathlib.Path(path)
  if (folder / records.CHECKPOINTS).is_dir():
    saved = checkpoint.Checkpointer(folder / records.CHECKPOINTS, None, '')
    step = saved.latest() if step is None else step
    name = f'{step or 0:08d}/arrays/state.state.params*/**/*'
    weights = saved.folder.glob(name)
  else:
    weights = folder.glob('*.safetensors') if folder.is_dir() else [folder]
  about = ((path, path.stat()) for path in sorted(weights) if path.is_file())
  stamps = tuple((path, s.st_size, s.st_mtime_ns) for path, s in about)
  return _sampled(stamps) if stamps else ''


@functools.lru_cache
def _sampled(stamps: tuple[tuple[pathlib.Path, int, int], ...]) -> str:
  return files.sample_sha256(*(path for path, *_ in stamps))[:16]


def restore(config, workdir: str, cfg, mesh, which='latest') -> dict:
  """The parameters of a run folder: 'latest', 'best', or a step.

  Raises:
    CheckpointError: there is none, or it is of another model.
  """
  newest = lambda: checkpoint.of_run(config, workdir).resolve(which)
  step = cluster.first('weights', newest)
  files = checkpoint.of_run(config, workdir)
  made = files.meta(step)['fingerprint'].get('lora')
  made = made and decoder.Lora(**records.tuples(made))
  theirs = dataclasses.replace(cfg, lora=made)
  # Arrays of the same shapes can still be of another model (rope_theta).
  model = dataclasses.asdict(theirs)
  model = {k: v for k, v in model.items() if k not in _COMPUTED}
  model |= tokenizer(workdir)
  trained, frozen = lora.split(theirs, shapes(theirs, mesh))
  like = {'state': {'params': trained}}
  restored = files.restore(like, step, fingerprint=model, partial=True)
  trained = restored.state['state']['params']
  frozen = read_fixed(workdir, {BASE: frozen})[BASE]
  # The frozen parameters may be computed with in another dtype.
  same = made and cfg.lora and dataclasses.replace(made, dtype=cfg.lora.dtype)
  if same and same == cfg.lora:
    return lora.join(trained, lora.freeze(cfg, frozen))
  params = lora.merge(theirs, lora.join(trained, frozen))
  return _with_adapters(config, cfg, params, mesh)


def keep_fixed(workdir, fixed: dict[str, dict]) -> None:
  """Writes the parameters that a run does not change to its folder, once.

  fixed: subfolder -> parameters; {} writes nothing.

  Raises:
    CheckpointError: the disk, or something else is there.
  """
  for name, params in fixed.items():
    if params:
      files = checkpoint.Checkpointer(remote.place(workdir) / name, None, '')
      # Of a start that failed.
      files.delete([step for step in files.steps() if files.meta(step)])
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
      files = checkpoint.Checkpointer(remote.place(workdir) / name, None, '')
      out[name] = files.restore(shapes, 0, fingerprint=None).state
  return out


def shapes(cfg, mesh, model=decoder) -> dict:
  """The parameters as shapes with shardings; nothing is allocated.

  model: the module that has their table, `decoder` or `critic`.
  """
  dtypes, flat = lora.dtypes(cfg), {}
  for name, (shape, axes) in model.param_table(cfg).items():
    dtype = jnp.dtype(dtypes.get(name, 'float32'))
    layout = sharding.named(mesh, axes, shape)
    flat[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=layout)
  return decoder.nest(flat)
