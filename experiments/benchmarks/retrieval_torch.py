"""The peers of `retrieval`, run by a Python with torch (requirements-parity).

    retrieval_torch.py encode MODEL THREADS
    retrieval_torch.py serve SERVER.PY MODEL INDEX CORPUS PORT

`encode` is sentence-transformers: each line of stdin is a JSON list of texts,
each line of stdout the seconds that `encode` took. `serve` runs Search-R1's own
retrieval_server.py, unchanged, on a machine without a GPU: `.cuda()` and
`.half()` leave what they are called on as it is (16-bit floats would only slow
it down on a CPU), and it binds 127.0.0.1 and PORT in place of what it names.
"""

import json
import runpy
import sys
import time


def encode(path: str, threads: int) -> None:
  from sentence_transformers import SentenceTransformer
  import torch

  torch.set_num_threads(threads)
  model = SentenceTransformer(path, device='cpu')
  for line in sys.stdin:
    texts = json.loads(line)
    start = time.perf_counter()
    model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    print(json.dumps(time.perf_counter() - start), flush=True)


def serve(server: str, model: str, index: str, corpus: str, port: int) -> None:
  import torch
  import uvicorn

  for kind in (torch.nn.Module, torch.Tensor):
    kind.cuda = lambda self, *_, **__: self
    kind.half = lambda self, *_, **__: self
  run = uvicorn.run
  uvicorn.run = lambda app, **_: run(
    app, host='127.0.0.1', port=port, log_level='warning'
  )
  sys.argv = [
    server,
    f'--index_path={index}',
    f'--corpus_path={corpus}',
    '--topk=3',
    '--retriever_name=minilm',
    f'--retriever_model={model}',
  ]
  runpy.run_path(server, run_name='__main__')


if __name__ == '__main__':
  if sys.argv[1] == 'encode':
    encode(sys.argv[2], int(sys.argv[3]))
  else:
    serve(*sys.argv[2:6], int(sys.argv[6]))
