"""Opens the searcher that the flags of a server name.

Libraries of other indexes are not imported.
"""

from collections.abc import Callable
import functools
import pathlib
import time

from retrieval import files
from retrieval.core import LocalSearcher, Searcher
from retrieval.corpus import MOST, read_corpus
from retrieval.index import bm25
from retrieval.serve import gpu_memory
from retrieval.web.cache import Recorded

_FAISS = {'nprobe': 'nprobe', 'ef_search': 'ef_search', 'gpu': 'faiss_gpu'}
# Kind of index -> option -> flag.
_OPTIONS = {'dense_jax': {'precision': 'precision'}, 'dense_faiss': _FAISS}
_OPTIONS['milvus'] = {'uri': 'milvus_uri'}
# Values of topk, besides --topk, whose programs compile before the server is
# ready. They cover every topk up to 16 (see `dense_jax`).
_WARM_TOPK = (1, 3, 5, 10)


Programs = list[Callable[[], None]]
say = functools.partial(files.say, 'retrieval.server')


def open_searcher(args) -> tuple[Searcher, LocalSearcher | None, Programs]:
  """Returns the searcher, the local searcher in it, and what to compile.

  Raises:
    ValueError, OSError, RuntimeError: it cannot be used; the message says why.
  """
  if args.replay:
    return Recorded(None, args.replay, args.replay_identity or ''), None, []
  if args.web:
    searcher, local, programs = _web(args), None, []
  else:
    local, programs = _corpus(args) if args.corpus else _folder(args)
    searcher = local
  # Paid answers are kept even if their client is gone.
  if args.record or args.web:
    searcher = Recorded(searcher, args.record or '')
  return searcher, local, programs


def _web(args) -> Searcher:
  from retrieval.web.searcher import WebSearcher

  if args.web_max_calls is None and args.web_max_cost is None:
    say('WARNING: web searches cost money; --web_max_calls bounds them.')
  names = 'mode rate concurrency max_calls max_cost price ledger'.split()
  return WebSearcher(args.web, **{n: args[f'web_{n}'].value for n in names})


def _folder(args) -> tuple[LocalSearcher, Programs]:
  from retrieval.index import folder as folders

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
  usage = {'dtype': args.dtype, 'query_length': args.query_length}
  for kind, name in zip(kinds, args.index):
    options = {n: args[f].value for n, f in _OPTIONS.get(kind, {}).items()}
    options = {n: value for n, value in options.items() if value is not None}
    if kind != 'bm25' and args.encoder:
      stated = repr(folders.stated_encoder(folder, name))
      if stated not in encoders:  # indexes of one encoder share it
        opened = folders.open_encoder(folder, name, args.encoder, **usage)
        encoders[stated] = opened
      options['encoder'] = encoders[stated]
    indexes.append(folders.open_index(folder, name, **options))
  # The values of k in calls of the indexes.
  ks = {k for k in (*_WARM_TOPK, args.topk) if k <= args.max_topk}
  index, programs = indexes[0], []
  if args.rerank:
    ks = {args.rerank_n}
  if len(indexes) > 1:
    from retrieval.index.hybrid import Hybrid

    index = Hybrid(indexes)
    ks = {index.depth}
  for kind, part in zip(kinds, indexes):
    if kind == 'dense_jax':
      programs += part.programs(args.max_batch, ks)
  if {*kinds} - {'bm25', 'dense_jax'}:  # these search with encoded queries
    for encoder in encoders.values():
      programs += encoder.programs(args.max_batch)
  if args.rerank:
    from retrieval.index.rerank import CrossEncoder, Rerank

    model = CrossEncoder(args.rerank, dtype=args.rerank_dtype)
    index = Rerank(index, folder.corpus.contents, model, args.rerank_n)
    programs += model.programs(args.max_batch * args.rerank_n)
  say(f'{len(index)} passages of {args.index_folder}: {index.name}')
  return LocalSearcher(folder.corpus, index), programs


def _bytes(args, folder, kinds: list[str]) -> tuple[int, int]:
  """Bytes of vectors on all GPUs together, and of models on each."""
  vectors = 0
  if folder.vectors is not None:
    width = {'float32': 4, 'int8': 1}.get(args.precision, 2)
    vectors = kinds.count('dense_jax') * folder.vectors.size * width
  models = [pathlib.Path(p) for p in (args.encoder, args.rerank) if p]
  weights = [file for path in models for file in path.glob('*.safetensors')]
  return vectors, sum(file.stat().st_size for file in weights)


def _corpus(args) -> tuple[LocalSearcher, list]:
  corpus = read_corpus(args.corpus, MOST)
  begun = time.time()
  index = bm25.BM25Index(corpus.contents, **bm25.options(args))
  seconds = time.time() - begun
  say(f'{len(corpus)} passages of {args.corpus} indexed in {seconds:.1f} s')
  return LocalSearcher(corpus, index), []
