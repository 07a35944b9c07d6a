"""Opens what a policy works with: a retrieval server, engines, a source.

`Opener` is what every command opens them with: a `Session` is one, `opened`
gives one to commands without a session (evaluate, ask, sft).
"""

import asyncio
from collections.abc import Iterator, Mapping
import contextlib
import functools
import pathlib
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax import lookup
from searchrl_jax.data import core as data
from searchrl_jax.devices import cluster, sharding
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines import core as engines
from searchrl_jax.engines.weights import publication, sync
from searchrl_jax.models import decoder, families, lora, parameters
from searchrl_jax.run import build
from searchrl_jax.sources import dials, none, simulated
from searchrl_jax.sources.core import require_same_source
from searchrl_jax.sources.tools import Tools
from searchrl_jax.store import records, remote
from searchrl_jax.types import SEARCH, Question


class Opener:
  """Opens services one by one; its loop closes them, the last one first.

  An error of one process is one of all (`cluster.agree`).

  Args:
    config: the whole config.
    workdir: the folder of the run or evaluation, for logs and weights.
    loop: of the services; entered before the first one is opened.
    cfg: the `DecoderConfig` of the policy; needed for an engine.
    mesh: of the policy; an engine and a simulator run on the part of it that
      is this process's own.
    url: of the retrieval server, '' if nothing is searched.

  Attributes:
    engine: the policy's, which whoever opens it sets; None before.
    source: None before it is opened.
    engines: all that were opened.
    identity: what `check` of the source said of it, or must say; {} = unknown.
    publisher: of weights that several processes publish together; or None.
  """

  def __init__(self, config, workdir, loop: Loop, cfg=None, mesh=None, url=''):
    self.config, self.workdir = config, pathlib.Path(workdir)
    self.loop, self.cfg, self.mesh, self.url = loop, cfg, mesh, url
    self.engine: Any = None
    self.source: Any = None
    self.engines: list[Any] = []
    self.identity: Mapping[str, Any] = {}
    self.publisher: publication.Publisher | None = None

  def open(self, service: Any) -> Any:
    """Checks a service (a judge, a reader) and closes it at the end.

    service: has awaitable `check` and `close`; None: there is none.
    """
    if service:
      cluster.agree('service', lambda: self.loop.open(service))
    return service

  def open_source(self, tok: Any = None) -> Any:
    """Opens the source of config.source, and checks its identity.

    tok: the policy's tokenizer, if the source may be simulated by the policy.

    Raises:
      SourceError: it cannot be used, or has not `identity`.
    """
    engine, folder = lambda: self.engine, str(cluster.folder(self.workdir))
    own = sharding.own_mesh(self.mesh)
    self.source = source(self.config, self.url, engine, tok, own, folder)
    check = lambda: self.loop.open(self.source).get('identity') or {}
    self.searched(cluster.agree('source', check))
    return self.source

  def searched(self, identity: Mapping[str, Any]) -> None:
    """Takes the identity of the source that is searched.

    Raises:
      SourceError: it is not the one that `identity` had.
    """
    require_same_source(self.identity, identity)
    self.identity = identity

  def open_engine(self, tok, canary, params, folder: str = '') -> Any:
    """Opens an engine; each process has its own, on its own devices.

    Args:
      tok: the tokenizer.
      canary: int [n], ids with which the weights are verified (`weights.sync`);
        None: a later `sync` loads and verifies them.
      params: the weights, on `mesh`.
      folder: below `workdir`, for the logs of a further engine.
    """
    if self.config.engine.module == 'jax':
      params = self.share(params)
    own = sharding.own_mesh(self.mesh)
    model, where = (self.cfg, params), cluster.folder(self.workdir) / folder
    make = functools.partial(engine, self.config, *model, tok, own, str(where))
    started = cluster.agree('engine', make)
    self.loop.at_exit(started.shutdown)
    self.engines.append(started)
    if canary is not None:
      load = _first_weights(self.config, started, *model, own, canary)
      self.loop.finish(load)
    return started

  def share(self, params, version: int = 0, checksums: Mapping | None = None):
    """What the engine of each process loads, if the mesh is of several.

    One in process gets a copy on its own devices, servers the folder of a
    version that all processes write together. All have to call it.

    checksums: see `Publisher.publish`.
    """
    config, own = self.config.engine, sharding.own_mesh(self.mesh)
    if own is self.mesh:
      return params
    if config.module == 'jax':
      layout = decoder.param_shardings(self.cfg, own)
      dtypes = {
        path: families.dtype_of(path, config.dtype)
        for path in decoder.flatten(params)
      }
      dtypes = decoder.nest(dtypes)
      return sharding.own_copy(params, self.mesh, layout, dtypes)
    if self.publisher is None:
      lookup.require(
        not remote.is_remote(remote.place(self.workdir)),
        f'config.engine.module={config.module!r} on several nodes reads weights'
        ' from a --workdir on a disk that these share, or a mounted bucket',
      )
      folder = self.workdir / 'published'
      made = publication.Publisher(folder, self.cfg, config.dtype)
      self.loop.at_exit(functools.partial(asyncio.to_thread, made.clear))
      self.publisher = made
    return self.publisher.publish(params, version, checksums).path


@contextlib.contextmanager
def opened(
  config, workdir: str, cfg=None, mesh=None, loop: Loop | None = None
) -> Iterator[Opener]:
  """An `Opener` with a retrieval server and a loop, which end with the block.

  The arguments are those of `Opener`. loop: the caller's, which closes the
  services when it ends, before the block does; None: one of its own.
  """
  own = contextlib.nullcontext(loop) if loop else Loop()
  with retrieval(config, workdir) as url, own as entered:
    yield Opener(config, workdir, entered, cfg, mesh, url)


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
        served = build.corpus(config, str(folder))
        log = folder / 'retrieval.log'
        server = process.start_server(served, log_path=log, **how)
        return stack.enter_context(server).url

      if config.source.servers == 'one' and cluster.size() > 1:
        host = cluster.host()
        served = host if host in ('127.0.0.1', 'localhost') else '0.0.0.0'
        url = cluster.first('retrieval', lambda: start(host=served))
        yield url.replace('0.0.0.0', host)
      else:
        yield cluster.agree('retrieval', start)


def engine(config: ConfigDict, cfg, params, tok, mesh, workdir: str):
  """The engine that config.engine.module names, with `lora.served` adapters."""
  cfg, params = lora.served(cfg, params)
  make = engines.module(config.engine.module).make
  return make(cfg, params, tok, config.engine, mesh, pathlib.Path(workdir))


def check_engine(config: ConfigDict, cfg) -> None:
  """Refuses a model that the engine cannot serve, before it is loaded."""
  engine, limit = config.engine, config.env.max_tokens
  engines.module(engine.module).capacity(cfg, engine, limit)


def check_ahead(config: ConfigDict, mesh) -> None:
  """Refuses rollouts beside an update that would share its mesh with them."""
  if config.rollout.max_staleness:
    require_alone(config, mesh, 'config.rollout.max_staleness above 0')


def require_alone(config: ConfigDict, mesh, what: str) -> None:
  """Refuses programs beside those of an engine that shares their mesh."""
  lookup.require(
    config.engine.module != 'jax' or mesh.size == 1,
    f'{what} on a mesh of {mesh.size} devices: two programs at a time can wait '
    "for each other for ever; use engine.module='vllm' for this engine, one "
    'device (CUDA_VISIBLE_DEVICES=0, config.mesh), or do without',
  )


async def _first_weights(config, engine, cfg, params, mesh, canary) -> None:
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
  `sources.tools.Tools`. A tool is also given the fields of config.source.

  The other arguments are for a simulator: a function that returns the policy's
  engine (which is opened later), its tokenizer, its mesh and the run folder.
  """
  fields = config.source.copy_and_resolve_references()
  fields.url = url
  writer = functools.partial(_simulator, config, engine, tok, mesh, workdir)
  make = build.source_maker(fields, 'config.source')
  search = make(fields, seed=config.seed, writer=writer)
  asked = functools.partial(_questions, config)
  made = {SEARCH: dials.wrap(search, fields.dials, config.seed, asked)}
  for name, own in config.tools.items():
    make = build.source_maker(own, f'config.tools.{name}')
    made[name] = make(own, seed=config.seed, source=fields)
  return Tools(made) if config.tools else made[SEARCH]


def _questions(config: ConfigDict) -> list[Question]:
  """Those of all sets."""
  parts = [config.data.train, config.data.eval]
  loaded = [data.load_sets(sets, config.data) for sets in parts if sets]
  return [q for sets in loaded for own in sets.values() for q in own]


def _simulator(config, policy, tok, mesh, workdir: str):
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
    theirs = build.load_config(path)
    theirs.train.init = path
  else:
    theirs = config.copy_and_resolve_references()
    path = parameters.local(path, 'config.source.simulator.path')
    theirs.model.update(path=path, tokenizer='')
    theirs.model.lora.update(rank=0, path='')
    theirs.train.init = ''
  theirs.engine = config.engine.copy_and_resolve_references()
  own = {'url': '', 'record_routes': False}
  theirs.engine.update(own | fields.engine.to_dict())
  require_alone(theirs, mesh, f'config.source.simulator.path={path!r}')
  tok = build.tokenizer(theirs, folder)
  cfg = parameters.model_config(theirs, tok.vocab_size, tok.needed)
  check_engine(theirs, cfg)
  weights = [parameters.initial(theirs, cfg, mesh)]
  made = engine(theirs, cfg, weights[0], tok, mesh, folder)

  async def start():
    canary = tok.encode(fields.useful)[:64]
    if weights:  # from here on the engine has its own
      await _first_weights(theirs, made, cfg, weights[0], mesh, canary)
      weights.clear()
    made.warmup()

  return simulated.DocumentWriter(lambda: made, tok, start)
