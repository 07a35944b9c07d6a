"""What a source finds, made worse by chance: dials of a search engine.

`config.source.dials` has probabilities, 0 to 1, of what happens to a result, in
this order:

  random      it has the passages of another question
  empty       it has no passages
  missing     a passage is missing from the corpus, for every query
  contradict  beside a passage that states a needed fact stands a copy with a
              false value, before or after it: `Question.meta` has `facts`,
              (subject, relation, value) for each of Question.supporting, and
              `false`, a value for each
  rank        the candidates are in random order

and `depth`, the number of candidates that the source is asked for if passages
are missing or in random order; the first k that are left are shown.

Every draw depends on the seed, the dial, and the question and query (`missing`:
the passage), not on the trajectory, its turn or the order of arrival. So equal
queries of a group find the same, arms with one seed are paired, a larger
probability changes what a smaller one does and more, and a resumed run repeats
its draws.
"""

from collections.abc import Hashable, Mapping, Sequence
import dataclasses
import re

from searchrl_jax import lookup, types
from searchrl_jax.sources.core import Answer, Source, SourceError, draw
from searchrl_jax.types import Passage, Question, SearchRequest


@dataclasses.dataclass(frozen=True)
class Setting:
  """The fields of config.source.dials."""

  random: float = 0.0
  empty: float = 0.0
  missing: float = 0.0
  contradict: float = 0.0
  rank: float = 0.0
  depth: int = 1  # candidates; at least k are asked for


class Dials:
  """Wraps a source. Tools other than search are not changed."""

  def __init__(
    self,
    source: Source,
    setting: Setting,
    seed: int,
    questions: Sequence[Question] = (),
  ):
    """Wraps `source`.

    Args:
      source: answers the queries.
      setting: what happens to its answers.
      seed: of the draws.
      questions: for `random` and `contradict`, those that will be asked. A
        random result is of the next one in the order of ids whose answers
        differ; it is the same for every query of a question.

    Raises:
      SourceError: no two questions have different answers, or one lacks the
        entries of `meta` that contradictions need.
    """
    self._source, self.close = source, source.close
    self._setting, self._seed = setting, seed
    self._other = _others(questions) if setting.random else {}
    for question in questions if setting.contradict else ():
      if not {'facts', 'false'} <= question.meta.keys():
        raise SourceError(
          f'config.source.dials.contradict={setting.contradict}: question '
          f'{question.id!r} has no meta.facts and meta.false, which the '
          'generated world atlas has; use its questions, or set it to 0'
        )

  async def search(self, requests: Sequence[SearchRequest]) -> list[Answer]:
    """Returns one answer per request, in order."""
    asked = [
      self._asked(request) if request.tool == types.SEARCH else request
      for request in requests
    ]
    answers = await self._source.search(asked)
    return [
      self._changed(answer, request)
      if request.tool == types.SEARCH and isinstance(answer, types.SearchResult)
      else dataclasses.replace(answer, request=request)
      for answer, request in zip(answers, requests, strict=True)
    ]

  async def check(self) -> Mapping[str, object]:
    """The source's; its identity includes the dials, as runs cannot go on
    with others."""
    found = dict(await self._source.check())
    dials = dataclasses.asdict(self._setting)
    return found | {'identity': {**found.get('identity', {}), 'dials': dials}}

  def _turned(self, dial: str, *key: Hashable) -> bool:
    chance = getattr(self._setting, dial)
    return chance > 0 and draw(self._seed, dial, *key) < chance

  def _asked(self, request: SearchRequest) -> SearchRequest:
    s, name = self._setting, _name(request.question)
    query, k = request.query, request.k
    if request.question and self._turned('random', name, query):
      # Ids of the data may end like the suffixes of `_name`.
      known = [id for id in _ids(request.question.id) if id in self._other]
      lookup.require(
        known,
        f'config.source.dials.random={s.random}: question {name!r} is in no '
        'set of config.data; questions that a policy asks have no other one',
        SourceError,
      )
      query = self._other[known[0]]
    if s.missing or s.rank:
      k = max(k, s.depth)
    return dataclasses.replace(request, query=query, k=k)

  def _changed(self, answer: types.SearchResult, request: SearchRequest):
    key, passages = (_name(request.question), request.query), []
    if not self._turned('empty', *key):
      for passage in answer.passages:
        if not self._turned('missing', passage.id):
          passages += self._versions(passage, request.question)
    if self._turned('rank', *key):
      passages.sort(key=lambda p: draw(self._seed, 'order', *key, p.id))
    shown = tuple(passages[: request.k])
    return dataclasses.replace(answer, request=request, passages=shown)

  def _versions(
    self, passage: Passage, question: Question | None
  ) -> list[Passage]:
    """The passage, and, if it is contradicted, its copy with false values."""
    key = (_name(question), passage.id)
    if question is None or not self._turned('contradict', *key):
      return [passage]
    text, meta = passage.text, question.meta
    rows = zip(question.supporting, meta['facts'], meta['false'], strict=True)
    for id, (_, _, value), false in rows:
      if id == passage.id:
        text = text.replace(value, false)
    if text == passage.text:
      return [passage]
    copy = dataclasses.replace(passage, id=f'{passage.id}~false', text=text)
    first = draw(self._seed, 'first', *key) < 0.5
    return [copy, passage] if first else [passage, copy]


def _ids(id: str) -> list[str]:
  """An id, and what it may be without the '#2' of a question that a step asks
  again; there are several of them if the step asked for questions again."""
  out = [id]
  while re.search(r'#\d+$', out[-1]):
    out.append(out[-1].rpartition('#')[0])
  return out


def _name(question: Question | None) -> str:
  """A question's id, the same for each time that a step asks it."""
  return _ids(question.id)[-1] if question else ''


def _others(questions: Sequence[Question]) -> dict[str, str]:
  """Id of each question -> text of another one with other answers."""
  ordered, out = sorted(questions, key=lambda q: q.id), {}
  for i, question in enumerate(ordered):
    for step in range(1, len(ordered)):
      other = ordered[(i + step) % len(ordered)]
      if not set(other.answers) & set(question.answers):
        out[question.id] = other.text
        break
    else:
      raise SourceError('random passages need two different answers')
  return out


def wrap(source: Source, fields, seed: int, questions) -> Source:
  """`source` with config.source.dials; itself if all are 0.

  Args:
    fields: config.source.dials.
    questions: called for all questions, if a dial needs them.
  """
  with lookup.of('config.source.dials', SourceError):
    setting = Setting(**fields)
    if setting == Setting(depth=setting.depth):
      return source
    needed = questions() if setting.random or setting.contradict else ()
    return Dials(source, setting, seed, needed)
