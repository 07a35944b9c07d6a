"""Three search APIs: their requests and answers.

| provider | key (environment) | results a call | documentation |
|---|---|---|---|
| serpapi | SERPAPI_API_KEY | 100 | serpapi.com/search-api |
| serper | SERPER_API_KEY | 100 | serper.dev |
| brave | BRAVE_API_KEY | 20 | api-dashboard.search.brave.com |

The first two use Google, whose own API accepts no new customers and ends on 1
January 2027.
"""

from collections.abc import Mapping
import dataclasses
import html
import json
import re

# Limits of Brave.
_CHARACTERS, _WORDS = 400, 50


@dataclasses.dataclass(frozen=True)
class Row:
  """One result."""

  title: str
  url: str
  text: str  # the snippet


@dataclasses.dataclass(frozen=True)
class Provider:
  """One API."""

  base_url: str
  path: str
  variable: str  # environment variable of the key
  secret: str  # header or parameter of the key
  rows: tuple[str, ...]  # path of the results in an answer
  sign: tuple[str, str | None]  # field of every answer, and its value
  fields: tuple[str, str, str] = ('title', 'link', 'snippet')  # of a result
  count: str = 'num'  # parameter of the number of results
  most: int = 100  # results of one call
  fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  answer_box: str = ''  # field of the answer above the results
  method: str = 'GET'
  in_header: bool = True  # whether `secret` is a header
  escaped: bool = False  # whether text is HTML

  def read_key(self, environ: Mapping[str, str]) -> str:
    """The key; a ValueError names the variable but not its value."""
    key = environ.get(self.variable, '').strip()
    if not re.fullmatch('[!-~]+', key):
      fix = 'Set it to your key, in visible ASCII without spaces.'
      raise ValueError(f'the environment has no {self.variable}. {fix}')
    return key

  def parse(self, answer: object) -> list[Row]:
    """The results, best first, each URL once.

    Google's own answer above the results comes first; it may have no page, so
    its URL may be ''.

    Raises:
      ValueError: the answer does not have the documented form, which includes
        answers without results.
    """
    value = answer
    for name in self.rows:
      value = value.get(name) if isinstance(value, dict) else None
    name, sign = self.sign
    signed = isinstance(answer, dict) and name in answer
    if value is None and signed and sign in (None, answer[name]):
      value = []
    if not isinstance(value, list):
      raise ValueError(f'no list {".".join(self.rows)} in {json.dumps(answer)}')
    rows = [self._row(row) for row in value]
    if rows and not any(rows):
      raise ValueError(f'no result has a URL in {json.dumps(value)}')
    unique: dict[str, Row] = {}
    for row in filter(None, [self._box(answer.get(self.answer_box)), *rows]):
      unique.setdefault(row.url, row)
    return list(unique.values())

  def _row(self, row: object) -> Row | None:
    row = row if isinstance(row, dict) else {}
    title, url, text = map(row.get, self.fields)
    if not isinstance(url, str) or not url.startswith(('http://', 'https://')):
      return None
    return Row(self._clean(title), url, self._clean(text))

  def _box(self, box: object) -> Row | None:
    box = box[0] if isinstance(box, list) and box else box
    if not isinstance(box, dict):
      return None
    parts = (self._clean(box.get(x)) for x in ('answer', 'result', 'snippet'))
    text = '\n'.join(dict.fromkeys(filter(None, parts)))
    row = self._row(box) or Row(self._clean(box.get('title')), '', '')
    return dataclasses.replace(row, text=text) if text else None

  def _clean(self, text: object) -> str:
    text = text if isinstance(text, str) else ''
    text = html.unescape(text) if self.escaped else text
    return ' '.join(text.split())  # the title is a separate line


PROVIDERS = {
  'serpapi': Provider(
    'https://serpapi.com',
    '/search.json',
    'SERPAPI_API_KEY',
    'api_key',
    ('organic_results',),
    ('search_metadata', None),
    fixed={'engine': 'google'},
    answer_box='answer_box',
    in_header=False,
  ),
  'serper': Provider(
    'https://google.serper.dev',
    '/search',
    'SERPER_API_KEY',
    'X-API-KEY',
    ('organic',),
    ('searchParameters', None),
    answer_box='answerBox',
    method='POST',
  ),
  'brave': Provider(
    'https://api.search.brave.com',
    '/res/v1/web/search',
    'BRAVE_API_KEY',
    'X-Subscription-Token',
    ('web', 'results'),
    ('type', 'search'),
    ('title', 'url', 'description'),
    'count',
    20,
    {'text_decorations': 'false'},
    escaped=True,
  ),
}

# Messages of SerpAPI, Serper and Brave that the quota is used up.
SPENT = re.compile('run out of searches|not enough credits|quota_limited', re.I)
KEY_REFUSED = 'SUBSCRIPTION_TOKEN_INVALID'  # Brave, with 422
# SerpAPI's message in the field `error` for no results.
NOTHING = "Google hasn't returned any results"


def sendable(query: str) -> str:
  """Cuts a query to 400 characters and 50 words, and replaces surrogates."""
  query = re.sub('[\ud800-\udfff\x00]', '\ufffd', query)
  return ' '.join(query.split()[:_WORDS])[:_CHARACTERS].strip()
