"""Questions from anywhere: the contract of a data module, sets, the stream.

A data module is a file of this folder (or any importable module) with

    load(**fields) -> list[Question]

and, if it can script a warm start,

    traces(**fields) -> list[Trace]

A set is a config `{module, weight, ...fields}`. Its fields are the keyword
arguments of `load` (of `traces` for `config.sft.data`). Three arguments are
filled from `config.data` where the set does not state them: `world_seed`,
`prompt` and `folder` (the data folder, '' if there is none). `path` is
resolved against the data folder; `search` is handed to `traces`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import inspect
import json
import os
import pathlib
from typing import Any
import zlib

from searchrl_jax.data.checks import DataError, unique
from searchrl_jax.run import lookup
from searchrl_jax.types import Passage, Question

PACKAGE = 'searchrl_jax.data'
ENV_DIR = 'SEARCHRL_DATA'
# What one thing in a scripted attempt can be. `other` is text in no tags.
ACTIONS = ('think', 'search', 'information', 'answer', 'other')
PROMPTS = ('template', 'as_is')
Search = Callable[[Sequence[str], int], Sequence[Sequence[Passage]]]


@dataclasses.dataclass(frozen=True)
class Trace:
  """A scripted attempt at a question, for a supervised warm start.

  It holds contents only: `sft.py` renders them with the environment's own
  functions, so that warm start and rollouts have one layout.

  question: None = plain text to be learnt (pretraining), of which the
    environment sees nothing: no prompt, and an end where the actions end.
  actions: (kind, payload) in order. 'information' carries a tuple of
    Passage, everything else a str without tags. 'information' is the
    environment's, unless config.env.information says that it is the policy's;
    the rest is what the policy is to write.
  good: it searches, reads and answers right. Controls (`sft_only`) keep
    these; a warm start mixes in others, so that RL has something to select.
  template: in place of config.env.template, for another role.
  """

  question: Question | None
  actions: tuple[tuple[str, str | tuple[Passage, ...]], ...]
  good: bool = True
  template: str = ''

  def __post_init__(self):
    for kind, payload in self.actions:
      if kind not in ACTIONS:
        raise ValueError(f'Trace action {kind!r} is none of {ACTIONS}')
      wanted = tuple if kind == 'information' else str
      if not isinstance(payload, wanted):
        raise ValueError(
          f'Trace action {kind!r} carries {type(payload).__name__}, not '
          f'{wanted.__name__}'
        )


# ---------------------------------------------------------------------------
# Where files are
# ---------------------------------------------------------------------------


def data_dir(data) -> str:
  """The data folder of `config.data`; '' if there is none.

  In this order: `data.dir`, the variable SEARCHRL_DATA, a folder shared/data
  beside the checkout.

  Raises:
    DataError: data.dir or SEARCHRL_DATA names no folder.
  """
  for name, value in (
    ('config.data.dir', data.dir),
    (ENV_DIR, os.environ.get(ENV_DIR, '')),
  ):
    if value:
      folder = pathlib.Path(value).expanduser()
      lookup.require(
        folder.is_dir(),
        f'{name}={value!r} is not a folder; correct the path',
        DataError,
      )
      return str(folder.resolve())
  beside = _beside()
  return str(beside) if beside.is_dir() else ''


def _beside() -> pathlib.Path:
  checkout = pathlib.Path(__file__).resolve().parents[2]
  return checkout.parent / 'shared' / 'data'


def resolve(path: str, data) -> str:
  """The file or folder that `path` means.

  An absolute path, `hf://datasets/OWNER/NAME/FILE` (fetched from the hub or
  its cache; HF_ENDPOINT and HF_HOME are honoured), or a path below the data
  folder.

  Raises:
    DataError: it does not exist; the message says where it was looked for.
  """
  if path.startswith('hf://'):
    return _from_hub(path)
  full = pathlib.Path(path).expanduser()
  if not full.is_absolute():
    folder = data_dir(data)
    if not folder:
      raise DataError(
        f'{path!r} is relative to the data folder, and there is none: give '
        f'--config.data.dir=FOLDER, set {ENV_DIR}, or make {_beside()} '
        '(hf://datasets/OWNER/NAME/FILE reads from the Hugging Face hub)'
      )
    full = pathlib.Path(folder) / full
  if not full.exists():
    raise DataError(f'{full}: no such file or folder; correct the path')
  return str(full)


def _from_hub(path: str) -> str:
  parts = path.removeprefix('hf://').split('/')
  lookup.require(
    len(parts) >= 4 and parts[0] == 'datasets' and all(parts),
    f'{path!r} must be hf://datasets/OWNER/NAME/FILE',
    DataError,
  )
  import huggingface_hub  # only who reads from the hub needs it
  import huggingface_hub.errors

  repo, file = '/'.join(parts[1:3]), '/'.join(parts[3:])
  try:
    return huggingface_hub.hf_hub_download(repo, file, repo_type='dataset')
  except (OSError, huggingface_hub.errors.HfHubHTTPError) as e:
    raise DataError(
      f'{path}: not to be had from the hub or its cache '
      f'({type(e).__name__}: {e}); check the name and the connection, point '
      'HF_ENDPOINT at a mirror, or give a local path'
    ) from e


# ---------------------------------------------------------------------------
# Sets
# ---------------------------------------------------------------------------


def complete(sets, data, function: str = 'load') -> dict[str, dict[str, Any]]:
  """Every field of every set, the module's defaults written out.

  What a run did is what its written config says: `train.py` writes this.

  Args:
    sets: name -> {module, weight, ...fields} (a ConfigDict or a dict).
    data: `config.data`.
    function: 'load' or 'traces'.

  Raises:
    ValueError: an unknown module or field (with near names), or a field
      that the module needs and the set lacks.
  """
  return {
    name: _fields(name, dict(fields), data, function)
    for name, fields in sets.items()
  }


def _fields(name, fields, data, function):
  lookup.require(
    'module' in fields,
    f'set {name!r} has no field module (jsonl, parquet, ...)',
    DataError,
  )
  call = _function(fields['module'], function)
  known, extra = inspect.signature(call).parameters, ('module', 'weight')
  for key in fields:
    lookup.require(
      key in known or key in extra,
      f'set {name!r}: module {fields["module"]!r} has no field {key!r}; '
      f'{lookup.near(key, {*known, *extra} - {"search"})}',
      DataError,
    )
  # What the set states, else config.data, else the module's default.
  given = {p.name: p.default for p in known.values() if p.default != p.empty}
  given |= {
    'world_seed': data.world_seed,
    'prompt': data.prompt,
    'folder': data_dir(data),
    **fields,
  }
  names = [*extra, *(key for key in known if key != 'search')]
  for key in names:  # a search is a callable, handed over at the call
    lookup.require(
      key in given or key in extra,
      f'set {name!r}: module {fields["module"]!r} needs the field {key!r}',
      DataError,
    )
  return {key: given[key] for key in names if key in given}


def _function(module: str, function: str) -> Callable[..., Any]:
  found = lookup.module(PACKAGE, module)
  lookup.require(
    hasattr(found, function),
    f'data module {module!r} has no function {function}()',
    DataError,
  )
  return getattr(found, function)


def _call(name, fields, data, function, **handed):
  whole = _fields(name, dict(fields), data, function)
  call = _function(whole['module'], function)
  if 'search' in inspect.signature(call).parameters:
    lookup.require(
      handed.get('search') is not None,
      f'set {name!r}: its traces need a search',
      DataError,
    )
    whole['search'] = handed['search']
  kw = {k: v for k, v in whole.items() if k not in ('module', 'weight')}
  try:
    if isinstance(kw.get('path'), str):
      kw['path'] = resolve(kw['path'], data)
    return call(**kw)
  except DataError as e:
    raise DataError(f'set {name!r}: {e}') from e


def load_sets(sets, data) -> dict[str, list[Question]]:
  """Loads `config.data.train` or `config.data.eval`.

  An id that two sets share becomes 'SET/id' in both, so that no two
  questions of a run have one id (groups, random streams and logs go by it).
  A question without a source gets the name of its set.

  Args:
    sets: name -> {module, weight, ...fields}.
    data: `config.data`.

  Raises:
    DataError: no set, an unknown field, absent file, bad record; the message
      starts with the set's name.
  """
  lookup.require(
    data.prompt in PROMPTS,
    f'config.data.prompt={data.prompt!r} is none of {PROMPTS}',
    DataError,
  )
  lookup.require(
    sets,
    'there is no set; add one: config.data.train.NAME = {module: jsonl, '
    'path: FILE}',
    DataError,
  )
  loaded = {}
  for name, fields in sets.items():
    # The environment renders all sets one way: another here would wrap
    # instructions in instructions.
    if fields.get('prompt', data.prompt) != data.prompt:
      raise DataError(
        f'set {name!r}: prompt={fields["prompt"]!r} is not config.data.prompt='
        f'{data.prompt!r}; change the latter, for all sets'
      )
    loaded[name] = [
      q if q.source else dataclasses.replace(q, source=name)
      for q in _call(name, fields, data, 'load')
    ]
    lookup.require(
      loaded[name], f'set {name!r} is empty; correct its fields', DataError
    )
    bare = next((q for q in loaded[name] if not q.messages), None)
    if data.prompt == 'as_is' and bare:
      raise DataError(
        f"set {name!r}: data.prompt='as_is', and question {bare.id!r} has no "
        "messages of its own; use data.prompt='template', or a set whose "
        'records hold prompts (parquet)'
      )
  times: dict[str, int] = {}
  for questions in loaded.values():
    for q in questions:
      times[q.id] = times.get(q.id, 0) + 1
  out = {
    name: [
      dataclasses.replace(q, id=f'{name}/{q.id}') if times[q.id] > 1 else q
      for q in questions
    ]
    for name, questions in loaded.items()
  }
  unique(
    ((f'set {name!r}', q) for name, qs in out.items() for q in qs), 'the sets'
  )
  return out


def load_traces(fields, data, search: Search | None = None) -> list[Trace]:
  """Makes the scripted traces of `config.sft.data`.

  Args:
    fields: {module, ...the keyword arguments of its `traces`}.
    data: `config.data`.
    search: (queries, k) -> passages of each query; for modules whose
      `traces` takes `search`.
  """
  found = _call('sft.data', fields, data, 'traces', search=search)
  lookup.require(found, 'sft.data gave no trace; correct its fields', DataError)
  return list(found)


# ---------------------------------------------------------------------------
# The stream
# ---------------------------------------------------------------------------


class Stream:
  """An endless, resumable stream of questions over a mixture of sets.

  The question at a position is a function of (sets, weights, seed, position)
  alone (grain's MapDataset), so its state is the position. Every set runs
  through all its questions once in each of its epochs, reshuffled each time.
  Without weights the sets are one: shuffled together, once an epoch each.
  """

  def __init__(
    self,
    sets: Mapping[str, Sequence[Question]],
    *,
    seed: int,
    shuffle: bool,
    weights: Mapping[str, float] | None = None,
  ):
    """Makes the stream, at position 0.

    Args:
      sets: name -> questions, ids all different.
      seed: of the shuffles.
      shuffle: False = the order given.
      weights: name -> share of the stream (need not sum to 1); None = by
        size.

    Raises:
      DataError: an empty set, a repeated id, a weight that is absent or not
        above 0.
    """
    import grain  # slow to import, and only a training run needs it

    unique(
      ((f'set {n!r}', q) for n, qs in sets.items() for q in qs), 'the sets'
    )
    for name, questions in sets.items():
      lookup.require(questions, f'set {name!r} is empty', DataError)
    if weights is not None:
      for name in sets:
        lookup.require(
          weights.get(name, 0) > 0,
          f'set {name!r} has weight {weights.get(name)!r}; give every set '
          'a weight above 0, or none of them (then: by size)',
          DataError,
        )

    def endless(name, questions):
      # A seed of its own for each set: adding one leaves the others alone.
      ds = grain.MapDataset.source(list(questions))
      ds = ds.seed(zlib.crc32(f'{seed}/{name}'.encode()))
      return (ds.shuffle() if shuffle else ds).repeat()

    self.questions = [q for questions in sets.values() for q in questions]
    if weights is None:
      every = self.questions
      self._ds = endless('', every)
    else:
      self._ds = grain.MapDataset.mix(
        [endless(name, questions) for name, questions in sets.items()],
        [float(weights[name]) for name in sets],
      )
    self.sizes = {name: len(questions) for name, questions in sets.items()}
    digest = hashlib.sha256(
      json.dumps([seed, bool(shuffle), dict(weights or {})]).encode()
    )
    for name, questions in sets.items():
      digest.update(json.dumps([name, [q.id for q in questions]]).encode())
    self.fingerprint = digest.hexdigest()[:16]
    self.position = 0  # questions handed out so far

  def next(self, n: int) -> list[Question]:
    """The next n questions, their ids all different.

    A question that comes twice in one call (a small set, or the end of one
    epoch and the start of the next) gets '#2' after its id the second time:
    its two groups must not be taken for one.
    """
    lookup.require(n >= 1, f'n={n} must be at least 1')
    out, times = [], {}
    for i in range(self.position, self.position + n):
      q = self._ds[i]
      times[q.id] = times.get(q.id, 0) + 1
      if times[q.id] > 1:
        q = dataclasses.replace(q, id=f'{q.id}#{times[q.id]}')
      out.append(q)
    self.position += n
    return out

  def state(self) -> dict[str, Any]:
    """What `restore` needs: plain JSON."""
    return {'position': self.position, 'fingerprint': self.fingerprint}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes to the position of a saved state.

    Raises:
      DataError: the state is of other questions, weights, seed or shuffle.
    """
    lookup.require(
      state['fingerprint'] == self.fingerprint,
      'the saved data cursor belongs to other questions, weights, seed or '
      f'shuffle (fingerprint {state["fingerprint"]}, now '
      f'{self.fingerprint}); resume with the data of the saved run, or '
      'start a new run folder',
      DataError,
    )
    self.position = int(state['position'])


def open_stream(data, seed: int) -> Stream:
  """The stream of `config.data.train`."""
  sets = load_sets(data.train, data)
  given = {
    name: fields['weight']
    for name, fields in data.train.items()
    if 'weight' in fields
  }
  return Stream(
    sets, seed=seed, shuffle=data.shuffle, weights=given if given else None
  )
