"""Builds what a config names: model, tokenizer, environment, source, engine.

Shared by train, sft, evaluate and ask, so that each of them shows only its
own flow. `check` finds what would fail later, before any model loads.
"""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from searchrl_jax import advantages
from searchrl_jax import batching
from searchrl_jax import checkpoint
from searchrl_jax import lookup
from searchrl_jax import losses
from searchrl_jax import prompts
from searchrl_jax import sharding
from searchrl_jax import tokenizer as tokenizers
from searchrl_jax.data import core as data
from searchrl_jax.env import SearchEnv
from searchrl_jax.models import decoder
from searchrl_jax.models import hf
from searchrl_jax.rewards import core as rewards


CHECKPOINTS = 'checkpoints'  # in a run folder


class ConfigError(ValueError):
  """A field that cannot be as it is; the message names it and the mend."""


def check(config: ConfigDict) -> None:
  """Cross-checks fields of a training config, before anything loads.

  Raises:
    ConfigError: names the first field that cannot work, and the mend.
  """
  a, r = config.algorithm, config.rollout
  if not hasattr(advantages, a.advantage):
    raise ConfigError(
      f'config.algorithm.advantage={a.advantage!r}: '
      + lookup.near(a.advantage, ('grpo', 'dr_grpo', 'rloo', 'whitened'))
    )
  if a.advantage in advantages.NEEDS_GROUP and r.group < 2:
    raise ConfigError(
      f'config.rollout.group={r.group}: advantage {a.advantage!r} compares '
      'trajectories of one question; use 2 or more'
    )
  if not hasattr(losses, a.loss):
    raise ConfigError(
      f'config.algorithm.loss={a.loss!r}: {lookup.near(a.loss, ("clip",))}'
    )
  batching.check(config)
  if r.top_p < 1 or r.top_k > 0:
    raise ConfigError(
      f'config.rollout.top_p={r.top_p}, top_k={r.top_k}: training samples from '
      'the whole distribution, since the trainer scores with it; use top_p=1 '
      'and top_k=0 (evaluation may truncate: config.eval.top_p)'
    )
  if r.temperature <= 0:
    raise ConfigError(
      f'config.rollout.temperature={r.temperature}: greedy rollouts of a group '
      'are all equal and teach nothing; use a temperature above 0'
    )
  for name, known in (
    ('kl', losses.KL_PLACES), ('tis', losses.TIS), ('ratio', losses.RATIOS),
    ('aggregation', losses.AGGREGATIONS), ('kl_estimator', losses.ESTIMATORS),
  ):
    if a[name] not in known:
      raise ConfigError(
        f'config.algorithm.{name}={a[name]!r}: {lookup.near(a[name], known)}'
      )
  losses.denominator([], a.aggregation, a.horizon)
  if a.tis != 'none' and a.tis_cap <= 0:
    raise ConfigError(f'config.algorithm.tis_cap={a.tis_cap}: above 0')
  if a.clip_low < 0 or a.clip_high < 0:
    raise ConfigError(
      f'config.algorithm.clip_low={a.clip_low}, clip_high={a.clip_high}: '
      'distances from 1, not negative'
    )
  if a.kl == 'none' and a.kl_coef:
    raise ConfigError(
      f"config.algorithm.kl_coef={a.kl_coef} has no effect with kl='none'; "
      "use kl='loss' or 'reward'"
    )
  if a.kl != 'none' and a.kl_coef <= 0:
    raise ConfigError(
      f'config.algorithm.kl={a.kl!r} with kl_coef={a.kl_coef}: set a '
      "coefficient above 0, or kl='none'"
    )
  check_engine(config)
  if not config.reward:
    raise ConfigError(
      'config.reward is empty; for example '
      "config.reward.em = {'fn': 'answer.em', 'weight': 1.0}"
    )


def check_engine(config: ConfigDict) -> None:
  """What evaluation needs as well."""
  if config.env.max_tokens > config.engine.max_len:
    raise ConfigError(
      f'config.env.max_tokens={config.env.max_tokens} is above '
      f'config.engine.max_len={config.engine.max_len}; raise the latter'
    )
  if config.env.information not in ('source', 'policy'):
    raise ConfigError(
      f'config.env.information={config.env.information!r}: source or policy'
    )


def load_config(workdir: str) -> ConfigDict:
  """The resolved config that a run wrote into its folder."""
  path = pathlib.Path(workdir) / 'config.json'
  if not path.exists():
    raise ConfigError(
      f'{path} does not exist: --workdir={workdir} is no run folder (give the '
      'folder that train or sft wrote, or --config for a Hugging Face folder)'
    )
  return from_dict(json.loads(path.read_text()))


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
  return sharding.make_mesh(**config.mesh.to_dict())


def tokenizer(config: ConfigDict, workdir: str) -> tokenizers.Tokenizer:
  """The tokenizer; a copy of it is kept in the run's folder."""
  kept = pathlib.Path(workdir) / 'tokenizer'
  if not kept.exists():
    path = config.model.tokenizer or config.model.path
    if not path:
      raise ConfigError(
        'config.model.tokenizer is empty: give a Hugging Face folder with a '
        'tokenizer'
      )
    loaded = tokenizers.load(path)  # checks it before anything is copied
    part = kept.with_suffix('.part')
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for file in pathlib.Path(path).iterdir():
      if file.is_file() and file.suffix in ('.json', '.txt', '.model',
                                            '.jinja'):
        shutil.copy(file, part)
    part.rename(kept)
    return loaded
  return tokenizers.load(str(kept))


def model_config(config: ConfigDict, vocab_size: int):
  """DecoderConfig of config.model; `arch` lacks only the vocabulary."""
  flags = {
    k: config.model[k] for k in ('dtype', 'remat', 'scan_unroll', 'attention')
  }
  if config.model.path:
    cfg = hf.read_config(config.model.path, **flags)
  else:
    arch = config.model.arch.to_dict()
    if not arch:
      raise ConfigError(
        'config.model needs a path (a Hugging Face folder) or an arch '
        '(fields of a Hugging Face config.json)'
      )
    arch.setdefault('vocab_size', vocab_size)
    cfg = hf.decoder_config(arch, **flags)
  if cfg.vocab_size < vocab_size:
    raise ConfigError(
      f'the tokenizer has {vocab_size} entries and the model '
      f'{cfg.vocab_size}: config.model.tokenizer does not belong to the model'
    )
  return cfg


def parameters(config: ConfigDict, cfg, mesh) -> dict:
  """The parameters to start from: train.init, model.path, or fresh ones."""
  init = config.train.init
  if init and (pathlib.Path(init) / CHECKPOINTS).exists():
    return restore_params(init, cfg, mesh)
  if init or config.model.path:
    path = init or config.model.path
    stored, params = hf.load(path, mesh)
    if stored.n_params != cfg.n_params:
      raise ConfigError(
        f'config.train.init={init!r} holds a model of {stored.n_params:,} '
        f'parameters; config.model describes one of {cfg.n_params:,}'
      )
    return params

  def fresh(key):
    return decoder.init_params(
      cfg, key, scale=config.model.init_scale,
      embed_scale=config.model.embed_scale,
    )

  out = decoder.param_shardings(cfg, mesh)
  return jax.jit(fresh, out_shardings=out)(jax.random.key(config.seed))


def saver(config: ConfigDict, workdir: str) -> checkpoint.Checkpointer:
  return checkpoint.Checkpointer(
    pathlib.Path(workdir) / CHECKPOINTS, config.checkpoint.keep,
    config.checkpoint.best,
  )


def restore_params(workdir: str, cfg, mesh, which: str = 'latest') -> dict:
  """The parameters of a run folder: 'latest', 'best', or a step."""
  found = checkpoint.Checkpointer(pathlib.Path(workdir) / CHECKPOINTS, 1, '')
  shardings = decoder.flatten(decoder.param_shardings(cfg, mesh))
  params = decoder.nest({
    path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[path])
    for path, (shape, _) in decoder.param_table(cfg).items()
  })
  step = int(which) if which.isdigit() else which
  restored = found.restore(
    {'state': {'params': params}}, step, fingerprint=None, partial=True
  )
  return restored.state['state']['params']


def template(config: ConfigDict) -> prompts.Template:
  return prompts.load(config.env.template)


def environment(config: ConfigDict, tok) -> SearchEnv:
  return SearchEnv(
    tok, template(config), config.env, config.data.prompt, config.source.k
  )


def engine(config: ConfigDict, cfg, params, tok, mesh):
  """The engine that config.engine.module names."""
  module = lookup.module('searchrl_jax.engines', config.engine.module)
  return module.make(cfg, params, tok, config.engine, mesh)


def source(config: ConfigDict, url: str):
  """The source that config.source.module names, on this URL."""
  module = lookup.module('searchrl_jax.sources', config.source.module)
  fields = config.source.copy_and_resolve_references()
  fields.url = url
  return module.make(fields)


@contextlib.contextmanager
def retrieval(config: ConfigDict, workdir: str) -> Iterator[str]:
  """The URL to search: config.source.url, or a server of our own.

  Without a URL a server process is started over config.source.corpus: a
  path, or 'world' for the generated world of config.data; it ends with the
  block, or with this process.
  """
  if config.source.url:
    yield config.source.url
    return
  from retrieval import process  # only who starts a server needs it

  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)
  with process.start_server(
    corpus(config, workdir), log_path=folder / 'retrieval.log'
  ) as server:
    yield server.url


def corpus(config: ConfigDict, workdir: str) -> str:
  """Path of the corpus to serve; a generated world is written first."""
  if config.source.corpus != 'world':
    if not config.source.corpus:
      raise ConfigError(
        'config.source.url and config.source.corpus are both empty: give the '
        'URL of a retrieval server, or a corpus to start one on'
      )
    return data.resolve(config.source.corpus, config.data)
  from searchrl_jax.data import microworld

  world = microworld.generate(
    config.data.world_seed, **config.data.world.to_dict()
  )
  folder = pathlib.Path(workdir) / f'world_{config.data.world_seed}'
  return microworld.write(world, folder)['corpus']


def check_rewards(config: ConfigDict, questions) -> None:
  """Names and fields of config.reward, and answers where they need them."""
  rewards.check(config.reward, questions)


def sft_optim(config: ConfigDict) -> ConfigDict:
  """config.optim with the warm start's own rate, schedule and decay."""
  out = config.optim.copy_and_resolve_references()
  for name in ('lr', 'schedule', 'warmup', 'weight_decay'):
    out[name] = config.sft[name]
  return out


def world_tokenizer(config: ConfigDict, workdir: str) -> str:
  """Writes the generated worlds' tokenizer; returns its folder."""
  from searchrl_jax.data import microworld

  del config
  return microworld.tokenizer(pathlib.Path(workdir) / 'world_tokenizer')
