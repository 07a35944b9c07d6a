"""The contract of sources and of other tools: one answer per request.

An answer is a SearchResult or a SearchError, in the order of the requests. A
source does not raise for a single query, and does not return an empty result if
its service failed. If the service works but cannot use the query, the result is
empty; otherwise a policy could remove trajectories from the loss by its choice
of queries. Errors of the set-up (no server at the start) raise SourceError.

A tool is a source with a name: a block of the template that acts sends its
text to the tool of that name (`request.tool`). `search` is config.source, the
others are in config.tools. A tool answers with passages, or with `text`, which
the observation contains unchanged; the rollout's statistics sum the `cost` of
results. For an error of the policy (no such page, a division by zero), the
answer is a text that the policy reads, not a SearchError.

A module of a tool that a policy may call by JSON has a function
`functions(config) -> schemas` (`text.calls.schema`). If that is one with one
parameter, a required text, the query of a request is this text; else it is the
JSON of a call. `text.calls.read` reads both.

A module's `make(config, **objects)` makes a source; for a tool, `source` has
the fields of config.source, with the URL of its server. A function
`make.check(config, fields)` raises ValueError where the whole config, or the
tool's fields in it, cannot be.

A tool stores no state of a trajectory: `request.earlier` has the previous
answers of the trajectory, each with its request. An interpreter session runs
the code of these requests again (or keys its interpreters by it); a page reader
finds earlier results in them. This is correct for a retry, a resumed run and a
branch of a tree, which the trajectory's name does not distinguish.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
import contextlib
import hashlib
from typing import Protocol

from searchrl_jax import lookup
from searchrl_jax.text import calls
from searchrl_jax.types import SearchError, SearchRequest, SearchResult

Answer = SearchResult | SearchError
_QUERY = {'type': 'string', 'description': 'What to look for.'}
SEARCH_SCHEMA = calls.schema(
  'search',
  'Searches a collection of texts and returns the passages that fit best.',
  {'type': 'object', 'properties': {'query': _QUERY}, 'required': ['query']},
)


class SourceError(RuntimeError):
  """The source cannot be used; the message names the URL and the fix."""


def require_same_source(before: Mapping, now: Mapping) -> None:
  """Raises if a run would resume with another source.

  Args:
    before: `identity` of the result of `check` when the run was saved.
    now: the same now. {} = unknown, which is not compared.

  Raises:
    SourceError: they differ; names what differs.
  """
  lines = '; '.join(
    f'{name}: {before.get(name)!r} before, {now.get(name)!r} now'
    for name in sorted(before.keys() | now.keys())
    if before.get(name) != now.get(name)
  )
  lookup.require(
    not (before and now and lines),
    'the source, or a tool, is not the one that this run was trained with '
    f'({lines}): serve the same corpus, index and tools, or train in another '
    '--workdir with --config.train.init=THIS_RUN',
    SourceError,
  )


@contextlib.contextmanager
def named(tool: str) -> Iterator[None]:
  """Names the tool in errors of its config and of its server."""
  where = f'config.tools.{tool}'
  with lookup.of(where), lookup.of(where, SourceError, SourceError):
    yield


def draw(*key: Hashable) -> float:
  """A number in [0, 1), a multiple of 2**-32, that depends on the key."""
  digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
  return int.from_bytes(digest) / 2**32


class Source(Protocol):
  """`check` and `close` do nothing unless a source has its own."""

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]: ...

  async def check(self) -> Mapping[str, object]:  # raises SourceError
    return {}

  async def close(self) -> None:
    return None
