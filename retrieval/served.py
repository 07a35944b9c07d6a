"""What a server serves, by its flags: a searcher, and what it compiles.

Libraries of indexes that the flags do not name are not imported.
"""

from collections.abc import Callable
import pathlib
import sys
import time

from retrieval import bm25, gpu_memory
from retrieval.core import LocalSearcher, Searcher
from retrieval.corpus import MOST, read_corpus

_OPTIONS = {  # kind of index -> its options, and their flags
  'dense_jax': {'precision': 'precision'},
  'dense_faiss': {
    'nprobe': 'nprobe',
    'ef_search': 'ef_search',
    'gpu': 'faiss_gpu',
  },
  'milvus': {'uri': 'milvus_uri'},
}
# With --topk, the topk whose programs compile before the server is ready.
# Of 16 or fewer all have the programs of one of these (see `dense_jax`).
_WARM_TOPK = (1, 3, 5, 10)


def say(message: str) -> None:
  """A line on stderr."""
  # A file's name or a service's error may hold an escape sequence.
  shown = ''.join(c if c.isprintable() or c == '\n' else '?' for c in message)
  print(f'retrieval.server: {shown}', file=sys.stderr, flush=True)


def open_searcher(
  args,
) -> tuple[Searcher, LocalSearcher | None, list[Callable[[], None]]]:
  """What the flags name, the corpus and index behind it, its programs.

  Raises:
    ValueError, OSError, RuntimeError: it cannot be used; the message says why.
  """
  if args.replay:
    from retrieval.cache import Recorded

    identity = args.replay_identity
    return Recorded(None, args.replay, identity=identity), None, []
  local, programs = None, []
  if args.web:
    searcher = _web(args)
  else:
    local, programs = _corpus(args) if args.corpus else _folder(args)
    searcher = local
  # What was paid for is not asked again because its client has gone.
  if args.record or args.web:
    from retrieval.cache import Recorded

    searcher = Recorded(searcher, args.record or '')
  return searcher, local, programs


def _web(args) -> Searcher:
  from retrieval.web import WebSearcher

  if args.web_max_calls is None and args.web_max_cost is None:
    say(
      'WARNING: web searches cost money, and neither --web_max_calls nor '
      '--web_max_cost bounds them.'
    )
  return WebSearcher(
    args.web,
    mode=args.web_mode,
    rate=args.web_rate,
    concurrency=args.web_concurrency,
    max_calls=args.web_max_calls,
    max_cost=args.web_max_cost,
    price=args.web_price,
    ledger=args.web_ledger,
  )


def _folder(args) -> tuple[LocalSearcher, list[Callable[[], None]]]:
  from retrieval import folder as folders

  kinds = [name.partition(':')[0] for name in args.index]
  for kind, options in _OPTIONS.items():
    for flag in options.values():
      if args[flag].present and kind not in kinds:
        raise ValueError(f'--{flag} is of {kind}, which no --index names')
  folder = folders.open_folder(args.index_folder)
  if args.rerank or args.encoder and {*kinds} != {'bm25'}:
    if said := gpu_memory.limit(*_bytes(args, folder, kinds)):
      say(said)
    from retrieval.devices import keep_programs

    try:
      keep_programs(args.compile_cache)
    except (OSError, RuntimeError) as error:
      say(f'WARNING: programs are not kept (--compile_cache): {error}')
  indexes, encoders = [], {}
  for kind, name in zip(kinds, args.index):
    options = {
      n: args[flag].value
      for n, flag in _OPTIONS.get(kind, {}).items()
      if args[flag].value is not None
    }
    encoder = None
    if kind != 'bm25' and args.encoder:
      stated = repr(folders.stated_encoder(folder, name))
      if stated not in encoders:  # one for all indexes that it made
        encoders[stated] = folders.open_encoder(
          folder,
          name,
          args.encoder,
          dtype=args.dtype,
          query_length=args.query_length,
        )
      encoder = encoders[stated]
    indexes.append(folders.open_index(folder, name, encoder=encoder, **options))
  # What is asked of an index, and so of its programs.
  ks = {k for k in (*_WARM_TOPK, args.topk) if k <= args.max_topk}
  index, programs = indexes[0], []
  if args.rerank:
    ks = {args.rerank_n}
  if len(indexes) > 1:
    from retrieval.hybrid import Hybrid

    index = Hybrid(indexes)
    ks = {index.depth}
  for kind, part in zip(kinds, indexes):
    if kind == 'dense_jax':
      programs += part.programs(args.max_batch, ks)
  if {*kinds} - {'bm25', 'dense_jax'}:  # they search with ready vectors
    for encoder in encoders.values():
      programs += encoder.programs(args.max_batch)
  if args.rerank:
    from retrieval.rerank import CrossEncoder, Rerank

    model = CrossEncoder(args.rerank, dtype=args.rerank_dtype)
    index = Rerank(index, folder.corpus.contents, model, args.rerank_n)
    programs += model.programs(args.max_batch * args.rerank_n)
  say(f'{len(index)} passages of {args.index_folder}: {index.name}')
  return LocalSearcher(folder.corpus, index), programs


def _bytes(args, folder, kinds: list[str]) -> tuple[int, int]:
  """Of vectors on all GPUs together, and of models on each."""
  vectors = 0
  if folder.vectors is not None:
    width = {'float32': 4, 'int8': 1}.get(args.precision, 2)
    vectors = kinds.count('dense_jax') * folder.vectors.size * width
  return vectors, sum(
    file.stat().st_size
    for path in (args.encoder, args.rerank)
    if path
    for file in pathlib.Path(path).glob('*.safetensors')
  )


def _corpus(args) -> tuple[LocalSearcher, list]:
  corpus = read_corpus(args.corpus, MOST)
  begun = time.time()
  index = bm25.BM25Index(corpus.contents, **bm25.options(args))
  seconds = time.time() - begun
  say(f'{len(corpus)} passages of {args.corpus} indexed in {seconds:.1f} s')
  return LocalSearcher(corpus, index), []
