"""Builds what a config names: model, tokenizer, environment, source, engine.

Shared by train, sft, evaluate and ask, so that each of them shows only its
own flow. `check` finds what would fail later, before any model loads.
"""

import contextlib
import dataclasses
import inspect
import json
import pathlib
import re
import shutil
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import tqdm

from retrieval.client import RetrievalClient
from searchrl_jax import advantages
from searchrl_jax import batching
from searchrl_jax import checkpoint
from searchrl_jax import lookup
from searchrl_jax import losses
from searchrl_jax import prompts
from searchrl_jax import records
from searchrl_jax import sharding
from searchrl_jax import tokenizer as tokenizers
from searchrl_jax import update
from searchrl_jax.data import core as data
from searchrl_jax.env import SearchEnv
from searchrl_jax.models import decoder
from searchrl_jax.models import hf
from searchrl_jax.rewards import core as rewards
from searchrl_jax.types import Question


# In a run folder.
TOKENIZER = 'tokenizer'
# What a model is; the other fields say how it is computed.
_ARCHITECTURE = {f.name for f in dataclasses.fields(decoder.DecoderConfig)} - {
  'dtype', 'remat', 'scan_unroll', 'attention',
}


class ConfigError(ValueError):
  """A field that cannot be as it is; the message names it and the mend."""


def check(config: ConfigDict) -> None:
  """Cross-checks fields of a training config, before anything loads.

  Raises:
    ConfigError: names the first field that cannot work, and the mend.
  """
  a, r = config.algorithm, config.rollout
  if a.advantage not in advantages.FUNCTIONS:
    raise ConfigError(
      f'config.algorithm.advantage={a.advantage!r}: '
      + lookup.near(a.advantage, advantages.FUNCTIONS)
    )
  if a.advantage in advantages.NEEDS_GROUP and r.group < 2:
    raise ConfigError(
      f'config.rollout.group={r.group}: advantage {a.advantage!r} compares '
      'trajectories of one question; use 2 or more'
    )
  if a.loss not in losses.LOSSES and '.' not in a.loss:
    raise ConfigError(
      f'config.algorithm.loss={a.loss!r}: {lookup.near(a.loss, losses.LOSSES)} '
      '(or the dotted path of a function of your own)'
    )
  if config.optim.lr <= 0:
    raise ConfigError(f'config.optim.lr={config.optim.lr}: above 0')
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
  try:
    update.policy_objective(config)
  except ValueError as e:
    raise ConfigError(str(e)) from e
  _check_advantage(a)
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


def _check_advantage(a: ConfigDict) -> None:
  parameters = inspect.signature(
    getattr(advantages, a.advantage)
  ).parameters.values()
  known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  for name in a.advantage_kw:
    if name not in known:
      raise ConfigError(
        f'config.algorithm.advantage_kw.{name}: {a.advantage} has no such '
        'field; ' + (lookup.near(name, known) if known else 'it has none')
      )
  if a.kl == 'reward' and a.advantage == 'grpo':
    raise ConfigError(
      "config.algorithm.kl='reward' with advantage='grpo', which divides by "
      'the spread of a group: where all of a group earn the same, the noise '
      "of the KL estimate would become advantages of full size. Use kl='loss' "
      "(as GRPO does), or advantage='dr_grpo' or 'rloo'"
    )


def check_prompts(env: SearchEnv, questions: Sequence[Question]) -> None:
  """Every prompt leaves room for a reply: found now, not at some step.

  Raises:
    ConfigError: how many do not, and which.
  """
  long, first = [], ''
  for q in tqdm.tqdm(
    questions, 'prompts', unit='question', disable=None, delay=2.0
  ):
    try:
      env.reset(q)
    except ValueError as e:
      long.append(q.id)
      first = first or str(e)
  if long:
    shown = ', '.join(long[:5]) + (', ...' if len(long) > 5 else '')
    raise ConfigError(
      f'{len(long)} of {len(questions)} questions cannot be asked ({shown}): '
      f'{first}'
    )


def check_engine(config: ConfigDict) -> None:
  """What evaluation needs as well."""
  # A run folder keeps the config of its first start: wrong names must not
  # get so far.
  for package, name in (
    ('engines', config.engine.module), ('sources', config.source.module),
  ):
    try:
      found = lookup.module(f'searchrl_jax.{package}', name)
    except ValueError as e:
      raise ConfigError(f'config.{package[:-1]}.module: {e}') from e
    if not hasattr(found, 'make'):
      raise ConfigError(
        f'config.{package[:-1]}.module={name!r} has no function make: it is a '
        'part of another one'
      )
  try:
    if config.source.url:
      RetrievalClient(config.source.url)
  except ValueError as e:
    raise ConfigError(f'config.source.url: {e}') from e
  if config.engine.dtype != config.model.dtype and (
    config.engine.canary_tolerance < 0.02
  ):
    raise ConfigError(
      f'config.engine.dtype={config.engine.dtype} is not config.model.dtype='
      f'{config.model.dtype}: their log-probs differ by more than config.'
      f'engine.canary_tolerance={config.engine.canary_tolerance}; use one '
      'dtype, or allow 0.02 or more'
    )
  made = config.model.tokenizer in ('world', 'bpe')
  if config.model.path and made:
    raise ConfigError(
      f'config.model.path={config.model.path!r} with config.model.tokenizer='
      f"{config.model.tokenizer!r}: a checkpoint needs the tokenizer it was "
      "trained with; leave model.tokenizer empty (configs/wiki_nq.py:model="
      'PATH does)'
    )
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
  try:
    config = from_dict(json.loads(path.read_text()))
  except ValueError as e:
    raise ConfigError(f'{path} is not JSON ({e}); is it cut short?') from e
  if config.source.corpus == 'world':
    # The config says what the world is. The server of that time is gone, or
    # serves that world where --config.data.world_seed asks for another.
    config.source.url = ''
  return config


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
  """The mesh; and float32 means float32, where a GPU would take TF32."""
  if config.model.dtype == 'float32':
    jax.config.update('jax_default_matmul_precision', 'highest')
  return sharding.make_mesh(**config.mesh.to_dict())


def tokenizer(config: ConfigDict, workdir: str) -> tokenizers.Tokenizer:
  """The tokenizer, which is kept in the run's folder.

  In this order: the folder's own, once the run has begun; that of the run
  folder config.train.init; config.model.tokenizer: a Hugging Face folder,
  'world' (the generated worlds' words) or 'bpe' (trained on
  config.source.corpus, config.model.bpe_vocab
  entries); config.model.path.
  """
  kept = pathlib.Path(workdir) / TOKENIZER
  if kept.exists() and records.begun(workdir):
    return tokenizers.load(kept)
  name = config.model.tokenizer or config.model.path
  if config.train.init and (pathlib.Path(config.train.init) / TOKENIZER
                            ).exists():
    name = str(pathlib.Path(config.train.init) / TOKENIZER)
  if not name:
    raise ConfigError(
      'config.model.tokenizer is empty: give a Hugging Face folder with a '
      "tokenizer, 'world' or 'bpe'"
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


def _write_tokenizer(name: str, config: ConfigDict, workdir: str,
                     out: pathlib.Path) -> None:
  if name == 'world':
    from searchrl_jax.data import microworld

    microworld.tokenizer(out)
  elif name == 'bpe':
    from retrieval.corpus import read_corpus

    texts = read_corpus(corpus(config, workdir)).contents
    tokenizers.train_bpe(texts, config.model.bpe_vocab, out)
  else:
    name = local(name, 'tokenizer' if config.model.tokenizer else 'path')
    tokenizers.load(name).save(out)
    generation = pathlib.Path(name) / 'generation_config.json'
    if generation.exists():  # it names the tokens that end a turn
      shutil.copy(generation, out)


def local(path: str, field: str = 'path') -> str:
  """A Hugging Face folder on this machine; a name on the hub is fetched.

  Through huggingface_hub, so HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE count.

  Raises:
    ConfigError: no such folder, and the hub (or its cache) has none either.
  """
  if pathlib.Path(path).is_dir():
    return path
  if not re.fullmatch(r'[\w.-]+/[\w.-]+', path):
    raise ConfigError(f'config.model.{field}={path!r}: no such folder')
  import huggingface_hub
  import huggingface_hub.errors

  try:
    return huggingface_hub.snapshot_download(
      path, allow_patterns=('*.json', '*.safetensors', '*.txt', '*.jinja')
    )
  except (OSError, huggingface_hub.errors.HfHubHTTPError) as e:
    raise ConfigError(
      f'config.model.{field}={path!r} is no folder here and could not be '
      f'fetched from the hub ({type(e).__name__}: {e}); give a local folder, '
      'point HF_ENDPOINT at a mirror, or HF_HOME at a cache that has it'
    ) from e


def model_config(config: ConfigDict, vocab_size: int):
  """DecoderConfig of config.model; `arch` lacks only the vocabulary."""
  flags = {
    k: config.model[k] for k in ('dtype', 'remat', 'scan_unroll', 'attention')
  }
  if config.model.path:
    cfg = hf.read_config(local(config.model.path), **flags)
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
  init = pathlib.Path(config.train.init)
  if config.train.init:
    # Not looked up on the hub: it is a folder of one's own, or a slip.
    if not init.is_dir():
      raise ConfigError(
        f'config.train.init={config.train.init!r}: no such folder; give the '
        'run folder of a warm start, or a Hugging Face folder'
      )
    if (init / records.CHECKPOINTS).exists():
      return restore_params(config, str(init), cfg, mesh)
    if (init / 'environment.json').exists():
      raise ConfigError(
        f'config.train.init={config.train.init!r}: a run folder without a '
        'checkpoint; let that run come to its end first'
      )
  if config.train.init or config.model.path:
    folder = config.train.init or local(config.model.path)
    _, params = hf.load(folder, mesh, cfg=cfg)
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
    pathlib.Path(workdir) / records.CHECKPOINTS, config.checkpoint.keep,
    config.checkpoint.best,
  )


def restore_params(config: ConfigDict, workdir: str, cfg, mesh,
                   which: str = 'latest') -> dict:
  """The parameters of a run folder: 'latest', 'best', or a step.

  Raises:
    CheckpointError: there is none, or it is of another model.
  """
  kept = saver(config, workdir)
  restored = kept.restore(
    {'state': {'params': shapes(cfg, mesh)}}, which, fingerprint=None,
    partial=True,
  )
  # Arrays of the same shapes can still be of another model (rope_theta).
  saved = kept.meta(restored.step)['fingerprint']
  checkpoint.compare(
    kept.folder, {k: v for k, v in saved.items() if k in _ARCHITECTURE},
    {k: v for k, v in dataclasses.asdict(cfg).items() if k in _ARCHITECTURE},
  )
  return restored.state['state']['params']


def shapes(cfg, mesh) -> dict:
  """The parameters as shapes with shardings; nothing is allocated."""
  shardings = decoder.flatten(decoder.param_shardings(cfg, mesh))
  return decoder.nest({
    path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=shardings[path])
    for path, (shape, _) in decoder.param_table(cfg).items()
  })


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
  with records.explained(folder):
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
