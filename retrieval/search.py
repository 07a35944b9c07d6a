"""Asks for passages from the command line; matched words are marked.

  python -m retrieval.search --url=http://127.0.0.1:8000 "who wrote hamlet"
  python -m retrieval.search --corpus=corpus.jsonl.gz "who wrote hamlet"
  python -m retrieval.search --index_folder=wiki --index=dense_faiss:HNSW64 \\
    --encoder=e5-base-v2 "who wrote hamlet"

With --corpus a BM25 index is built here, with --index_folder one is opened
(`retrieval.build_index` makes it); no server is needed.
"""

import re
import sys
from collections.abc import Sequence

import rich.console
import rich.padding
import rich.text
from absl import app as absl_app
from absl import flags

from retrieval.bm25 import STEMMERS, STOP_WORDS, Analyzer, BM25Index
from retrieval.client import Hit, RetrievalError, health_sync, retrieve_sync
from retrieval.core import Index, LocalSearcher
from retrieval.corpus import Corpus, read_corpus, split_contents
from retrieval.folder import open_encoder, open_folder, open_index

# Passages come from outside: an escape sequence must not reach a terminal.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')
_MARK = 'bold yellow'


def search_corpus(
  path: str, queries: Sequence[str], k: int, **parameters: object
) -> tuple[list[list[Hit]], Analyzer]:
  """Indexes a corpus and ranks its passages: hits [Q][<= k], best first.

  Raises:
    CorpusError: the corpus cannot be used.
  """
  corpus = read_corpus(path)
  index = BM25Index(corpus.contents, **parameters)
  return _hits(corpus, index, queries, k), index.analyzer


def search_folder(
  path: str, name: str, queries: Sequence[str], k: int,
  encoder: str | None = None, query_length: int | None = None,
  **options: object,
) -> tuple[list[list[Hit]], Analyzer]:
  """Asks an index of a folder; `encoder` is the model of a dense one.

  It reads the first `query_length` tokens of a query; None: see `Encoder`.
  `options` are those of the index, see `open_index`.

  Raises:
    ValueError, RuntimeError, OSError: the folder cannot be used; says why.
  """
  folder = open_folder(path)
  if name != 'bm25':
    encoder = open_encoder(folder, name, encoder, query_length=query_length)
  index = open_index(folder, name, encoder=encoder, **options)
  hits = _hits(folder.corpus, index, queries, k)
  return hits, getattr(index, 'analyzer', None) or Analyzer()


def _hits(
  corpus: Corpus, index: Index, queries: Sequence[str], k: int
) -> list[list[Hit]]:
  return [
    [Hit(f.id, f.contents, *split_contents(f.contents), f.score) for f in row]
    for row in LocalSearcher(corpus, index).search(queries, k)
  ]


def search_server(
  url: str, queries: Sequence[str], k: int
) -> tuple[list[list[Hit]], Analyzer]:
  """Asks a server; the analyzer marks words as the server compares them.

  Raises:
    RetrievalError: it gave no usable answer.
  """
  hits = retrieve_sync(url, queries, k, retries=1)
  try:
    index = health_sync(url, retries=0).get('index')
    return hits, Analyzer(index['stemmer'], index['stop_words'])
  except (RetrievalError, KeyError, TypeError, ValueError):
    # Another server of the protocol: the passages are what was asked for.
    return hits, Analyzer()


def show(
  console: rich.console.Console,
  query: str,
  hits: Sequence[Hit],
  analyzer: Analyzer,
) -> None:
  """Prints ranked passages; marks by colour, by *stars* where there is none."""
  terms, stars = set(analyzer(query)), not console.color_system
  console.print(rich.text.Text(_clean(query), 'bold cyan'))
  if not hits:
    console.print('  no passage has any word of this query')
  for rank, hit in enumerate(hits, 1):
    head = rich.text.Text(f'{rank:3}. ')
    title = hit.title or '(no title)'
    head.append_text(_marked(title, terms, analyzer, stars))
    head.append(f'  {hit.score:.3f}  id {_clean(hit.id)}', 'dim')
    console.print(head)
    body = _marked(hit.text, terms, analyzer, stars)
    console.print(rich.padding.Padding(body, (0, 0, 0, 5)))
  console.print()


def _marked(
  text: str, terms: set[str], analyzer: Analyzer, stars: bool
) -> rich.text.Text:
  text = _clean(text)
  out, last = rich.text.Text(), 0
  for start, end in analyzer.spans(text, terms):
    out.append(text[last:start])
    word = text[start:end]
    out.append(f'*{word}*' if stars else word, _MARK)
    last = end
  out.append(text[last:])
  return out


def _clean(text: str) -> str:
  text = text.encode('utf-8', 'replace').decode()
  return _CONTROL.sub('\ufffd', text)


def define_flags() -> None:
  """Defines the command's flags; not on import, since others import this."""
  flags.DEFINE_string('url', None, 'A running server: http://host:port.')
  flags.DEFINE_string('corpus', None, 'Corpus to search instead, with BM25.')
  flags.DEFINE_string('index_folder', None, 'Index folder to search instead.')
  flags.DEFINE_string('index', 'bm25', 'Which index of --index_folder.')
  flags.DEFINE_string('encoder', None, 'Model folder, for its dense indexes.')
  flags.DEFINE_integer(
    'query_length', None, 'Tokens that it reads; 256, or all that it can.', 3
  )
  flags.DEFINE_bool('faiss_gpu', False, 'FAISS on all GPUs, in float16.')
  flags.DEFINE_integer('topk', 3, 'Passages for each query.', 1)
  flags.DEFINE_float('k1', 1.2, 'BM25, with --corpus.', 0)
  flags.DEFINE_float('b', 0.75, 'BM25, with --corpus.', 0, 1)
  flags.DEFINE_enum('stemmer', 'english', STEMMERS, 'With --corpus.')
  flags.DEFINE_enum(
    'stop_words', 'english', [*STOP_WORDS], 'With --corpus.'
  )
  flags.mark_flags_as_mutual_exclusive(
    ['url', 'corpus', 'index_folder'], required=True
  )


def main(argv: Sequence[str]) -> int:
  args, queries = flags.FLAGS, argv[1:]
  if not queries:
    print('error: give at least one "query" in quotes', file=sys.stderr)
    return 2
  try:
    if args.url:
      found, analyzer = search_server(args.url, queries, args.topk)
    elif args.index_folder:
      options = {'gpu': True} if args.faiss_gpu else {}
      if options and not args.index.startswith('dense_faiss:'):
        raise ValueError(
          f'--faiss_gpu is of dense_faiss, not of --index={args.index}'
        )
      found, analyzer = search_folder(
        args.index_folder, args.index, queries, args.topk, args.encoder,
        args.query_length, **options,
      )
    else:
      found, analyzer = search_corpus(
        args.corpus,
        queries,
        args.topk,
        k1=args.k1,
        b=args.b,
        stemmer=args.stemmer,
        stop_words=args.stop_words,
      )
  except (RuntimeError, ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  console = rich.console.Console(highlight=False, soft_wrap=False)
  for query, hits in zip(queries, found, strict=True):
    show(console, query, hits, analyzer)
  return 0


if __name__ == '__main__':
  define_flags()
  absl_app.run(main)
