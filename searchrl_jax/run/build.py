"""Builds what a config names: model, tokenizer, environment, source, engine.

Shared by train, sft, evaluate and ask, so that each of them shows only its
own flow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import hashlib
import logging
import operator
import pathlib
import shutil

import jax
from ml_collections import ConfigDict

from searchrl_jax import lookup
from searchrl_jax.data import core as data
from searchrl_jax.devices import cluster, sharding
from searchrl_jax.engines import core as engines
from searchrl_jax.engines.weights import sync
from searchrl_jax.models import lora, parameters, pretrained
from searchrl_jax.sources import dials, none, simulated
from searchrl_jax.sources.tools import Tools
from searchrl_jax.store import folders, records, remote, writer
from searchrl_jax.text import prompts
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import SEARCH, Question

_SOURCES = 'searchrl_jax.sources'


def load_config(workdir: str) -> ConfigDict:
  """The config that a run wrote into its folder; see `records.config`."""
  path = pathlib.Path(workdir) / 'config.json'
  lookup.require(
    path.exists(),
    f'--workdir={remote.place(workdir)} is no run folder: it has no '
    'config.json (a Hugging Face folder is a field of --config)',
  )
  with lookup.of(str(path), caught=(ValueError, TypeError, AttributeError)):
    config = records.config(path.read_text())
  if config.source.corpus == 'world':
    # The config defines the world. The server of the run has ended, or serves
    # its world although --config.data.world_seed may name another.
    config.source.url = ''
  return config


def contents(
  config: ConfigDict,
  questions: Mapping[str, Iterable[Question]],
  templates: Sequence[str] = ('env.template',),
) -> dict[str, str]:
  """What fields name, by content: 'config.FIELD' -> digest, for `Writer`.

  Args:
    config: the whole config.
    questions: field -> the questions that it names.
    templates: fields that name templates.
  """
  found = {}
  for field in templates:
    template = prompts.load(operator.attrgetter(field)(config))
    found[field] = template.digest[:16]
  for field, asked in questions.items():
    # Without fields that say nothing: later versions may have more.
    filled = [{k: v for k, v in vars(q).items() if v} for q in asked]
    found[field] = folders.digest(filled)
  if config.source.module == simulated.SIMULATED:
    path = config.source.simulator.path
    found['source.simulator.path'] = path and parameters.digest(path)
  return {f'config.{field}': value for field, value in found.items() if value}


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
    fields = writer.computed(config)
    # A run may go on with others, but processes have to agree when to save.
    fields['checkpoint.every'] = config.checkpoint.every
    fields['checkpoint.background'] = config.checkpoint.background
    fields['rollout.mismatch_alarm'] = config.rollout.mismatch_alarm
    return {'config': fields, 'code': versions, 'data': data}

  cluster.require_same(facts)


def mesh(config: ConfigDict, devices=None):
  """Makes the mesh; disables TF32 on GPUs if the model is float32.

  Compiled programs are kept for the next start where the retrieval service
  keeps its own: those of a pretrained model take minutes to compile.
  JAX_ENABLE_COMPILATION_CACHE=false keeps none.
  """
  if config.model.dtype == 'float32':
    jax.config.update('jax_default_matmul_precision', 'highest')
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
  kept = pathlib.Path(workdir) / records.TOKENIZER
  cluster.first('tokenizer', lambda: _keep_tokenizer(config, workdir, kept))
  remote.share(workdir, records.TOKENIZER)
  return tokenizers.load(kept)


def _keep_tokenizer(config, workdir: str, kept: pathlib.Path) -> None:
  if kept.exists() and remote.begun(workdir):
    return
  name = config.model.tokenizer or config.model.path
  init = pathlib.Path(remote.local_run(config.train.init))
  start = init / records.TOKENIZER
  if config.train.init and start.exists():
    name = str(start)
  lookup.require(
    name, "config.model.tokenizer is empty: give a folder, 'world' or 'bpe'"
  )
  folders.make(kept, lambda out: _write_tokenizer(name, config, workdir, out))


def _write_tokenizer(name: str, config, workdir: str, out: pathlib.Path):
  if name == 'world':
    world(config).tokenizer(out)
  elif name == 'bpe':
    from retrieval.corpus import read_corpus

    texts = read_corpus(corpus(config, workdir)).contents
    tokenizers.train_bpe(texts, config.model.bpe_vocab, out)
  else:
    field = 'tokenizer' if config.model.tokenizer else 'path'
    folder = pathlib.Path(parameters.local(name, f'config.model.{field}'))
    if name == config.model.path:
      pretrained.read_json(folder)  # else it says what the folder is instead
    tokenizers.load(folder).save(out)
    generation = folder / 'generation_config.json'
    if generation.exists():  # it names the tokens that end a turn
      shutil.copy(generation, out)


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
  """The source that config.source.module names, on this URL, with
  config.source.dials; with those of config.tools, if there are any, as
  `sources.tools.Tools`.

  The other arguments are for a simulator: a function that returns the policy's
  engine (which is opened later), its tokenizer, its mesh and the run folder.
  """
  fields = config.source.copy_and_resolve_references()
  fields.url = url
  writer = functools.partial(simulator, config, engine, tok, mesh, workdir)
  make = _maker(fields, 'config.source')
  search = make(fields, seed=config.seed, writer=writer)
  asked = functools.partial(_questions, config)
  made = {SEARCH: dials.wrap(search, fields.dials, config.seed, asked)}
  for name, fields in config.tools.items():
    make = _maker(fields, f'config.tools.{name}')
    made[name] = make(fields, seed=config.seed)
  return Tools(made) if config.tools else made[SEARCH]


def _questions(config: ConfigDict) -> list[Question]:
  """Those of all sets."""
  parts = [config.data.train, config.data.eval]
  loaded = [data.load_sets(sets, config.data) for sets in parts if sets]
  return [q for sets in loaded for own in sets.values() for q in own]


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
    path = parameters.local(path, 'config.source.simulator.path')
    theirs.model.update(path=path, tokenizer='')
    theirs.models.lora.update(rank=0, path='')
    theirs.train.init = ''
  theirs.engine = config.engine.copy_and_resolve_references()
  theirs.engine.update({'url': ''} | fields.engine.to_dict())
  require_alone(theirs, mesh, f'config.source.simulator.path={path!r}')
  tok = tokenizer(theirs, folder)
  cfg = parameters.model_config(theirs, tok.vocab_size)
  params = parameters.initial(theirs, cfg, mesh)
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
  folder, names = pathlib.Path(workdir) / f'world_{seed}', []

  def write(out: pathlib.Path) -> None:
    generated = made.generate(seed, **config.data.world.to_dict())
    path = pathlib.Path(made.write(generated, out)['corpus'])
    names.append(path.relative_to(out))

  folders.make(folder, write)
  return str(folder / names[0])


def world(config: ConfigDict):
  """The module that generates the worlds of config.data.world_module."""
  return lookup.module('searchrl_jax.data', config.data.world_module)
