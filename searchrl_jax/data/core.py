"""Data modules, question sets and the resumable stream of questions.

A data module is a file of this folder (or any importable module) with

    load(**fields) -> list[Question]

and, if it can script a warm start,

    traces(**fields) -> list[Trace]

A set is a config `{module, ...fields}`. Its fields are the keyword arguments of
`load` (of `traces` for `config.sft.data`). If the set omits `world_seed`,
`prompt` or `folder` (the data folder, '' = none), they are taken from
`config.data`, as are `world_module` and `world`; a set of the module
`config.data.world_module` has the settings of `config.data.world` too. `path`
is resolved against the data folder; `search` is passed to `traces`.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import inspect
import json
import os
import pathlib
from typing import Any
import zlib

from searchrl_jax import lookup
from searchrl_jax.data.checks import DataError, require, unique
from searchrl_jax.store import remote
from searchrl_jax.types import Passage, Question

PACKAGE = 'searchrl_jax.data'
ENV_DIR = 'SEARCHRL_DATA'
SHARED = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'data'
# The kinds of actions in any trace. `other` is text without tags.
ACTIONS = ('think', 'search', 'information', 'answer', 'other')
Search = Callable[[Sequence[str], int], Sequence[Sequence[Passage]]]


@dataclasses.dataclass(frozen=True)
class Trace:
  """A scripted attempt at a question, for a supervised warm start.

  It has contents only. `sft.py` renders them with the functions of the
  environment, so that warm start and rollouts have the same layout.

  question: None = plain text (pretraining), without a prompt and without the
    environment's end of a trajectory.
  actions: (kind, payload) in order. The payload of 'information' is a tuple of
    Passage, or of one text that a tool answered, written by the environment, or
    by the policy if config.env.information says so. The other payloads are str
    without tags, written by the policy. Behind an answer that is not the last
    stands the block that the policy is asked for (config.env.on_answer).
  good: it searches, reads and answers correctly. Controls (`sft_only`) train
    on these only; a warm start adds others, so that RL has choices.
  template: used instead of config.env.template, for another role.
  blocks: names of further blocks of the template that `actions` uses.
  notes: what it would write, after each of its 'information', where the
    environment asks for a note (config.env.on_full).
  """

  question: Question | None
  actions: tuple[tuple[str, str | tuple[Passage | str, ...]], ...]
  good: bool = True
  template: str = ''
  blocks: tuple[str, ...] = ()
  notes: tuple[str, ...] = ()

  def __post_init__(self):
    for kind, payload in self.actions:
      known = (*ACTIONS, *self.blocks)
      require(kind in known, f'Trace action {kind!r} is none of {known}')
      wanted = 'tuple' if kind == 'information' else 'str'
      given = type(payload).__name__
      require(given == wanted, f'Trace {kind!r} carries {given}, not {wanted}')

  @property
  def attempts(self) -> int:
    """The number of answers; 1 for plain text."""
    answers = sum(kind == 'answer' for kind, _ in self.actions)
    return max(answers, 1) if self.question else 1


def data_dir(data) -> str:
  """Returns the data folder of `config.data`; '' if there is none.

  The first of: `data.dir`, the variable SEARCHRL_DATA, a folder shared/data
  beside the checkout.

  Raises:
    DataError: data.dir or SEARCHRL_DATA is not a folder.
  """
  given = data.dir or os.environ.get(ENV_DIR, '')
  if not given:
    return str(SHARED) if SHARED.is_dir() else ''
  name = 'config.data.dir' if data.dir else ENV_DIR
  folder = pathlib.Path(given).expanduser()
  require(folder.is_dir(), f'{name}={given!r} is not a folder')
  return str(folder.resolve())


def resolve(path: str, data) -> str:
  """Returns the file or folder of `path`.

  Args:
    path: an absolute path, `hf://datasets/OWNER/NAME/FILE` (from the hub or
      its cache; uses HF_ENDPOINT and HF_HOME), another location that fsspec
      opens (`gs://BUCKET/FILE`), or a path below the data folder.
    data: `config.data`.

  Raises:
    DataError: it does not exist; the message says where it was searched.
    RunError: a location cannot be read.
  """
  if path.startswith('hf://'):
    return _from_hub(path)
  if remote.is_remote(path):
    return remote.fetch(path)
  full = pathlib.Path(path).expanduser()
  if not full.is_absolute():
    folder = data_dir(data)
    fix = f'give --config.data.dir=FOLDER, set {ENV_DIR}, or create {SHARED}'
    require(folder, f'{path!r} is below the data folder, but none is: {fix}')
    full = pathlib.Path(folder) / full
  require(full.exists(), f'{full}: no such file or folder; correct the path')
  lookup.require_content(full)
  return str(full)


def _from_hub(path: str) -> str:
  parts = path.removeprefix('hf://').split('/')
  good = len(parts) >= 4 and parts[0] == 'datasets' and all(parts)
  require(good, f'{path!r} must be hf://datasets/OWNER/NAME/FILE')
  import huggingface_hub  # slow to import, and rarely used

  repo, file = '/'.join(parts[1:3]), '/'.join(parts[3:])
  try:
    return huggingface_hub.hf_hub_download(repo, file, repo_type='dataset')
  # HfHubHTTPError is one. ImportError: a SOCKS proxy without its package.
  except (OSError, ImportError) as e:
    fix = 'check the name and HF_ENDPOINT (a mirror), or give a local path'
    raise DataError(f'{path}: not on the hub, nor kept ({e}); {fix}') from e


def _call(name, fields, data, function: str, search: Search | None = None):
  """Calls `function` of a set's module, with the set's fields.

  Raises:
    ValueError: the module or a field is unknown (suggests similar names), or a
      field that the module requires is missing.
  """
  fields = {'module': '', **fields}
  require(fields['module'], f'set {name!r} has no field module (jsonl, ...)')
  where = f'set {name!r}: module {fields["module"]!r}'
  call = lookup.function(PACKAGE, f'{fields["module"]}.{function}')
  known = {**inspect.signature(call).parameters}
  takes_search = known.pop('search', None)  # a callable, not a field
  names = [*known, 'module']
  for key in fields:
    hint = lookup.near(key, names)
    require(key in names, f'{where} has no field {key!r}; {hint}')
  # The set takes precedence over config.data, and that over the defaults. One
  # of the world that is served has its size.
  shared = 'world_seed', 'prompt', 'world_module', 'world'
  given = {name: data[name] for name in shared if name in data}
  if fields['module'] == data.get('world_module'):
    given |= dict(data.world)
  given |= {'folder': data_dir(data), **fields}
  given = {key: given[key] for key in known if key in given}
  for key, parameter in known.items():
    good = key in given or parameter.default is not parameter.empty
    require(good, f'{where} needs the field {key!r}')
  if takes_search:
    require(search, f'set {name!r}: its traces need a search')
    given['search'] = search
  with lookup.of(f'set {name!r}', DataError, DataError):
    if isinstance(given.get('path'), str):
      given['path'] = resolve(given['path'], data)
    return call(**given)


def load_sets(sets, data) -> dict[str, list[Question]]:
  """Loads `config.data.train` or `config.data.eval`.

  An id that occurs in two sets becomes 'SET/id' in both, because groups,
  random streams and logs identify questions by id. A question without a source
  gets the name of its set.

  Args:
    sets: name -> {module, ...fields}.
    data: `config.data`.

  Raises:
    DataError: no set, an unknown field, a missing file or a bad record; the
      message starts with the name of the set.
  """
  require(sets, 'there is no set; add config.data.train.NAME = {module, ...}')
  loaded = {}
  for name, fields in sets.items():
    # The environment renders all sets in the same way.
    good = fields.get('prompt', data.prompt) == data.prompt
    mode = f'config.data.prompt={data.prompt!r}'
    require(good, f'set {name!r}: its prompt is not {mode}, that of all sets')
    loaded[name] = [
      q if q.source else dataclasses.replace(q, source=name)
      for q in _call(name, fields, data, 'load')
    ]
    require(loaded[name], f'set {name!r} is empty; correct its fields')
    bare = [q.id for q in loaded[name] if not q.messages]
    fix = "use 'template', or records that hold prompts (parquet)"
    what = f'set {name!r}: {mode}, and {bare[:1]} has no messages; {fix}'
    require(data.prompt != 'as_is' or not bare, what)
  count = collections.Counter(q.id for qs in loaded.values() for q in qs)
  for name, questions in loaded.items():
    loaded[name] = [
      dataclasses.replace(q, id=f'{name}/{q.id}') if count[q.id] > 1 else q
      for q in questions
    ]
  pairs = ((f'set {name!r}', q) for name, qs in loaded.items() for q in qs)
  unique(pairs, 'the sets')
  return loaded


def load_traces(fields, data, search: Search | None = None) -> list[Trace]:
  """Returns the scripted traces of `config.sft.data`.

  Args:
    fields: {module, ...the keyword arguments of its `traces`}.
    data: `config.data`.
    search: (queries, k) -> passages of each query; for modules whose
      `traces` takes `search`.
  """
  traces = list(_call('sft.data', fields, data, 'traces', search))
  require(traces, 'sft.data has no trace; correct its fields')
  return traces


class Stream:
  """An endless, resumable stream of the questions of all sets.

  The question at a position depends only on (sets, seed, position) (grain's
  MapDataset), so the state is the position. An epoch has each question once,
  in a new order.
  """

  def __init__(
    self, sets: dict[str, list[Question]], *, seed: int, shuffle: bool
  ):
    """Makes the stream, at position 0.

    Args:
      sets: name -> questions, as `load_sets` returns them.
      seed: of the shuffles.
      shuffle: False = in the given order.
    """
    import grain  # slow to import, and only training needs it

    self.questions = [q for questions in sets.values() for q in questions]
    ds = grain.MapDataset.source(self.questions)
    ds = ds.seed(zlib.crc32(f'{seed}/'.encode()))
    self._ds = (ds.shuffle() if shuffle else ds).repeat()
    # {}: earlier versions had weights of the sets there.
    digest = hashlib.sha256(json.dumps([seed, bool(shuffle), {}]).encode())
    for name, questions in sets.items():
      digest.update(json.dumps([name, [q.id for q in questions]]).encode())
    self.fingerprint = digest.hexdigest()[:16]
    self.position = 0  # number of questions taken so far

  def next(self, n: int) -> list[Question]:
    """Returns the next n questions, with different ids.

    If a question occurs twice (a small set, or two epochs in one call), '#2' is
    added to the second id, so that its two groups are not confused.
    """
    out, count = [], collections.Counter()
    for i in range(self.position, self.position + n):
      q = self._ds[i]
      count[q.id] += 1
      if count[q.id] > 1:
        q = dataclasses.replace(q, id=f'{q.id}#{count[q.id]}')
      out.append(q)
    self.position += n
    return out

  def state(self) -> dict[str, Any]:
    """The state for `restore`, as JSON."""
    return {'position': self.position, 'fingerprint': self.fingerprint}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Moves to the position of a saved state.

    Raises:
      DataError: the questions, seed or shuffle differ.
    """
    what = 'belongs to other questions, seed or shuffle; resume'
    message = f'the saved data position {what} with its data, or start anew'
    require(state['fingerprint'] == self.fingerprint, message)
    self.position = int(state['position'])


def open_stream(data, seed: int) -> Stream:
  """Returns the stream of `config.data.train`."""
  sets = load_sets(data.train, data)
  return Stream(sets, seed=seed, shuffle=data.shuffle)
