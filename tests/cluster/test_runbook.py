"""The runbook of docs/cluster.md at small size: experiments/cluster/seven.sh.

A local server stands for the hub. It has a checkpoint, questions of the seven
sets, a corpus, its vectors in two parts, and their encoder.
"""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time

import faiss
import jax
import pytest

from configs import seven
from retrieval.index.encoder import Encoder
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.text import tokenizer
from tests.cluster import launch
from tests.conftest import ROOT
from tests.golden import encoders
from tests.loop.test_wiki import QWEN
from tests.retrieval.conftest import write_corpus
from tests.retrieval.test_download import Server, hub

pytestmark = [pytest.mark.runbook, pytest.mark.timeout(1800)]

STEP_S = 600  # of a step, on a busy machine
PEOPLE = [f'king{i}' for i in range(40)]
# Sets of different sizes: the table shows columns of equal figures once.
SIZES = {name: 3 + i for i, name in enumerate(seven.SPLITS)}
STEPS = 'fetch', 'index', 'serve', 'doctor', 'train', 'evaluate', 'stop'


def records(name: str, split: str) -> bytes:
  rows = [
    dict(id=f'{split}_{i}', question=f'where was {who} born ?')
    | dict(golden_answers=[f'city{i}'])
    for i, who in enumerate(PEOPLE[: 8 if split == 'train' else SIZES[name]])
  ]
  return ''.join(json.dumps(row) + '\n' for row in rows).encode()


def contents(folder) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture(scope='module')
def stand_in(tmp_path_factory):
  """The address of a hub that has what the runbook fetches."""
  folder = tmp_path_factory.mktemp('hub')
  passages = [
    (str(i), who, f'{who} was born in city{i}.') for i, who in enumerate(PEOPLE)
  ]
  corpus = write_corpus(folder / 'corpus.jsonl', passages)
  with pytest.MonkeyPatch.context() as m:
    m.setitem(encoders.CONFIG, 'max_position_embeddings', 512)
    encoder = encoders.write(folder, 'e5-tiny-v2')
  texts = [json.loads(line)['contents'] for line in corpus.open()]
  vectors = Encoder(encoder).encode_passages(texts)
  index = faiss.index_factory(
    vectors.shape[1], 'Flat', faiss.METRIC_INNER_PRODUCT
  )
  index.add(vectors)
  whole = faiss.serialize_index(index).tobytes()
  vocab = tokenizer.train_bpe(texts, 320, folder / 'tokenizer')
  cfg = pretrained.decoder_config(
    QWEN | dict(vocab_size=vocab.vocab_size), dtype='float32'
  )
  params = decoder.init_params(cfg, jax.random.key(0), scale=0.02)
  pretrained.save(folder / 'model', cfg, params, folder / 'tokenizer')
  questions = {
    f'{name}/{split}.jsonl': records(name, split)
    for name, splits in seven.SPLITS.items()
    for split in splits
  }
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    own = dict(repo_type='models')
    hub(server, 'tiny/model', contents(folder / 'model'), **own)
    hub(server, 'tiny/e5-tiny-v2', contents(encoder), **own)
    hub(server, 'RUC-NLPIR/FlashRAG_datasets', questions)
    packed = {'wiki-18.jsonl.gz': gzip.compress(corpus.read_bytes())}
    hub(server, 'PeterJinGo/wiki-18-corpus', packed)
    parts = {'part_aa': whole[:4000], 'part_ab': whole[4000:]}
    hub(server, 'PeterJinGo/wiki-18-e5-index', parts)
    yield server
    server.shutdown()
    thread.join()


def test_the_runbook_leads_to_the_table(stand_in, tmp_path):
  config = ROOT / 'tests/cluster/seven_small.py'
  env = os.environ | {
    'DIR': str(tmp_path),
    'MODEL': 'tiny/model',
    'ENCODER': 'tiny/e5-tiny-v2',
    'CONFIG': f'{config}:layout=flashrag,model={tmp_path}/model',
    'TRAIN_FLAGS': '--config.mesh.fsdp=1',
    'PORT': str(launch.free_port()),
    'PYTHON': sys.executable,
    # Programs of the dense index compile for a minute before it is served.
    'SEARCH_FLAGS': '--index=bm25',
    'XLA_FLAGS': '--xla_backend_optimization_level=0',  # and one device
    'HF_ENDPOINT': stand_in.url,
    'HF_HUB_OFFLINE': '0',
    'EVALUATE_FLAGS': '--config.eval.bootstrap=50',
  }
  said, training = {}, None

  def start(*steps):
    log = open(tmp_path / 'log', 'w')
    with log:
      return subprocess.Popen(
        ['sh', 'experiments/cluster/seven.sh', *steps],
        cwd=ROOT,
        env=env,
        start_new_session=True,
        stdout=log,
        stderr=log,
      )

  def take(step):
    begin = time.monotonic()
    status = start(step).wait(STEP_S)
    said[step] = (tmp_path / 'log').read_text()
    print(f'{said[step]}({step}: {time.monotonic() - begin:.1f} s)')
    return status

  try:
    for step in STEPS[:4]:
      assert take(step) == 0, said[step]
    sent = stand_in.sent
    assert take('fetch') == 0 and stand_in.sent == sent  # all is there
    assert 'PROBLEM' not in said['doctor'] and 'skipped' not in said['doctor']

    # A signal to the whole group, as a scheduler sends it; then it resumes.
    training = start('train')
    saved = tmp_path / 'run' / 'checkpoints' / '00000001'
    limit = time.monotonic() + STEP_S
    while not saved.exists():
      assert time.monotonic() < limit and training.poll() is None
      time.sleep(0.05)
    os.killpg(training.pid, signal.SIGUSR1)
    assert training.wait(STEP_S) == 143
    assert take('train') == 0, said['train']
    lines = (tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in lines] == [0, 1, 2]

    assert take('evaluate') == 0, said['evaluate']
    values = json.loads((tmp_path / 'table' / 'eval.json').read_text())
    for name, count in SIZES.items():
      name = 'two_wiki' if name == '2wikimultihopqa' else name
      assert values[f'eval/set={name}/em/n'] == count
      assert f'set={name}' in said['evaluate']
    assert values['eval/em/n'] == sum(SIZES.values())
  finally:
    if training:  # has ended, unless the test failed
      with contextlib.suppress(ProcessLookupError):
        os.killpg(training.pid, signal.SIGKILL)
    status = take('stop')
  assert status == 0
  assert not (
    tmp_path / 'nodes' / os.uname().nodename / 'retrieval.pid'
  ).exists()
