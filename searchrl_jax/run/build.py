"""Builds what a config names: mesh, tokenizer, environment, corpus, world.

Shared by all commands, so that each of them shows only its own flow.
`run/services.py` opens what has to be closed.
"""

from collections.abc import Iterable, Mapping, Sequence
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
from searchrl_jax.models import parameters, pretrained
from searchrl_jax.sources import core, none, simulated
from searchrl_jax.store import folders, records, remote, writer
from searchrl_jax.text import prompts
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.text.calls import Function, text_of
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
  config = records.config(path)
  if config.source.corpus == 'world':
    # The config defines the world. The server of the run has ended, or serves
    # its world although --config.data.world_seed may name another.
    config.source.url = ''
  return config


def contents(
  config: ConfigDict,
  questions: Mapping[str, Iterable[Question]],
  templates: Sequence[str] = ('env.template', 'rollout.refiner'),
) -> dict[str, str]:
  """What fields name, by content: 'config.FIELD' -> digest, for `Writer`.

  Args:
    config: the whole config.
    questions: field -> the questions that it names.
    templates: fields that name templates, or ''.
  """
  found = {}
  for field in templates:
    name = operator.attrgetter(field)(config)
    found[field] = name and prompts.load(name).digest[:16]
  for field, asked in questions.items():
    # Without fields that say nothing: later versions may have more.
    filled = [{k: v for k, v in vars(q).items() if v} for q in asked]
    found[field] = folders.digest(filled)
  if config.source.module == simulated.SIMULATED:
    path = config.source.simulator.path
    found['source.simulator.path'] = path and parameters.digest(path)
  return {f'config.{field}': value for field, value in found.items() if value}


def require_same_run(config: ConfigDict, questions=()) -> None:
  """Compares config, code and questions of all processes.

  Fields that state where a process runs may differ.

  Raises:
    ConfigError: names what differs, and on which process.
  """

  def facts():
    versions = {'jax': jax.__version__, 'searchrl_jax': cluster.code()}
    content = repr([(q.id, q.text, q.answers) for q in questions])
    digest = hashlib.sha256(content.encode('utf-8', 'replace')).hexdigest()
    data = {'questions': len(questions), 'digest': digest[:16]}
    fields = writer.shared(config)
    fields['judge.url'] = bool(config.judge.url)
    return {'config': fields, 'code': versions, 'data': data}

  cluster.require_agreement(facts)


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


def any_mesh(config: ConfigDict):
  """The `mesh` of a run that is read where its own may not fit: if it does not,
  config.mesh becomes one of all devices."""
  try:
    return mesh(config)
  except lookup.ConfigError:
    config.mesh.update(data=1, fsdp=-1, tensor=1)
    return mesh(config)


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
    if name == config.model.path:  # else it says what the folder is instead
      with lookup.of(f'config.model.path={name!r}', caught=FileNotFoundError):
        pretrained.read_json(folder)
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
    check = getattr(source_maker(fields, where), 'check', None)
    with lookup.of(where):
      if check:  # of the whole config
        check(config, fields)
  for path in templates or (config.env.template,):
    lookup.require(
      '{id}' not in prompts.load(path).passage
      or not config.source.dials.get('contradict'),
      f'template {path!r} shows the ids of passages, which name the false ones '
      'of config.source.dials.contradict: take {id} out of its passage',
    )
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


def source_maker(fields: ConfigDict, where: str):
  """The function `make` of the module of a source or a tool.

  where: the field that has `fields`, for messages.
  """
  with lookup.of(f'{where}.module'):
    return lookup.function(_SOURCES, f'{fields.get("module")}.make')


def environment(config: ConfigDict, tok) -> SearchEnv:
  """The environment of config.env; its module names the class."""
  protocol = template(config)
  of_calls = [functions(config)] if protocol.calls else []
  given = protocol, config.env, config.data.prompt, config.source.k
  return _environment(config)(tok, *given, *of_calls)


def functions(config: ConfigDict) -> tuple[Function, ...]:
  """What a policy may call, where env.template has calls: search, then those of
  config.tools. A server of tools is asked for them.

  Raises:
    ConfigError: a tool has no function, or two have the same name.
    SourceError: a server does not answer.
  """
  searches = config.source.module != none.NONE
  offered = {SEARCH: [core.SEARCH_SCHEMA]} if searches else {}
  for name, fields in config.tools.items():
    with lookup.of(f'config.tools.{name}.module'):
      own = lookup.function(_SOURCES, f'{fields.get("module")}.functions')
    with core.named(name):
      offered[name] = own(fields)
  found = [(t, s, text_of(own)) for t, own in offered.items() for s in own]
  names = [schema['function']['name'] for _, schema, _ in found]
  lookup.require(
    names and len({*names}) == len(names),
    f'config.source and config.tools offer the functions {names} to call, and '
    f'env.template={config.env.template!r} needs some, under different names',
  )
  return tuple(found)


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
