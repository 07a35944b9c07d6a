"""Searches from the command line and marks the matched words.

  python -m retrieval.search --url=http://127.0.0.1:8000 "who wrote hamlet"
  python -m retrieval.search --corpus=corpus.jsonl.gz "who wrote hamlet"
  python -m retrieval.search --index_folder=wiki --index=dense_faiss:HNSW64 \\
    --encoder=e5-base-v2 "who wrote hamlet"

Without --url no server is needed: the flags are those of `retrieval.server`,
and their index is searched in this process.
"""

from collections.abc import Sequence
import re

from absl import app as absl_app
from absl import flags
import rich.console
import rich.padding
import rich.text

from retrieval import files, server
from retrieval.client import Hit, RetrievalError, health_sync, retrieve_sync
from retrieval.core import SearchFailed
from retrieval.corpus import split_contents
from retrieval.index.bm25 import Analyzer
from retrieval.serve.searcher import open_searcher

# Passages are not trusted: no escape sequence may reach a terminal.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')

Results = tuple[list[list[Hit]], Analyzer]


def search_here(args: flags.FlagValues, queries: Sequence[str]) -> Results:
  """Searches what the flags of a server name.

  Raises:
    ValueError, RuntimeError, OSError: it cannot be used; names the reason.
  """
  searcher, local, _ = open_searcher(args)
  found = searcher.search(queries, args.topk)
  if failed := [row for row in found if isinstance(row, SearchFailed)]:
    raise RuntimeError(str(failed[0]))
  analyzer = getattr(local and local.index, 'analyzer', None) or Analyzer()
  hit = lambda f: Hit(f.id, f.contents, *split_contents(f.contents), f.score)
  return [[*map(hit, row)] for row in found], analyzer


def search_server(url: str, queries: Sequence[str], k: int) -> Results:
  """Asks a server; returns the hits and the analyzer of the server.

  Raises:
    RetrievalError: there is no usable answer.
  """
  hits = retrieve_sync(url, queries, k, retries=1)
  try:
    index = health_sync(url, retries=0).get('index')
    parts = (index[name] for name in ('stemmer', 'stop_words', 'analyzer'))
    return hits, Analyzer(*parts)
  except (RetrievalError, KeyError, TypeError, ValueError):
    # Another server of the protocol; its passages are still shown.
    return hits, Analyzer()


def show(console, query: str, hits: Sequence[Hit], analyzer: Analyzer) -> None:
  """Prints ranked passages; marks words by colour, else by *stars*."""
  terms, stars = set(analyzer(query)), not console.color_system
  console.print(rich.text.Text(_clean(query), 'bold cyan'))
  if not hits:
    console.print('  no passage has any word of this query')
  for rank, hit in enumerate(hits, 1):
    head = rich.text.Text(f'{rank:3}. ')
    title = hit.title or '(no title)'
    head.append_text(_marked(title, terms, analyzer, stars))
    score = '' if hit.score is None else f'  {hit.score:.3f}'
    head.append(f'{score}  id {_clean(hit.id)}', 'dim')
    console.print(head)
    body = _marked(hit.text, terms, analyzer, stars)
    console.print(rich.padding.Padding(body, (0, 0, 0, 5)))
  console.print()


def _marked(text: str, terms: set[str], analyzer, stars: bool):
  text = _clean(text)
  out, last = rich.text.Text(), 0
  for start, end in analyzer.spans(text, terms):
    out.append(text[last:start])
    word = text[start:end]
    out.append(f'*{word}*' if stars else word, 'bold yellow')
    last = end
  out.append(text[last:])
  return out


def _clean(text: str) -> str:
  text = text.encode('utf-8', 'replace').decode()
  return _CONTROL.sub('\ufffd', text)


def main(argv: Sequence[str]) -> int:
  args, queries = flags.FLAGS, argv[1:]

  def run() -> None:
    if not queries:
      raise ValueError('give at least one "query" in quotes')
    server.check(args, ('url', *server.SOURCES))
    if args.url:
      found, analyzer = search_server(args.url, queries, args.topk)
    else:
      found, analyzer = search_here(args, queries)
    console = rich.console.Console(highlight=False, soft_wrap=False)
    for query, hits in zip(queries, found, strict=True):
      show(console, query, hits, analyzer)

  return files.run_command('retrieval.search', (), run)


if __name__ == '__main__':
  server.define_flags()
  flags.DEFINE_string('url', None, 'A running server: http://host:port.')
  absl_app.run(main)
