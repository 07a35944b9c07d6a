"""One real vLLM server for every test here: it takes half a minute to start.

Tests that need other weights load them and leave the server serving.
"""

import dataclasses
import pathlib

import httpx
import jax
import pytest

from searchrl_jax.engines.vllm.launcher import Sidecar, start_sidecar
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.text import tokenizer
from tests.conftest import ROOT

FLAGS = dict(
  cpu=True,
  dtype='float32',
  max_model_len=513,
  max_num_seqs=32,
  block_size=32,
  kv_cache_gib=0.25,
  enforce_eager=True,
  max_restarts=20,  # tests kill it
)
# Tied, which is what a reload gets wrong; a vocabulary that vLLM has to pad.
CFG = decoder.DecoderConfig(
  vocab_size=300,
  d_model=128,
  n_layers=2,
  n_heads=4,
  n_kv_heads=2,
  head_dim=32,
  d_ff=96,
  family='qwen2',
  tied=True,
)


@dataclasses.dataclass(frozen=True)
class Served:
  """What the server was started with."""

  sidecar: Sidecar
  folder: pathlib.Path  # the checkpoint
  cfg: decoder.DecoderConfig
  params: dict
  tokenizer: tokenizer.Tokenizer

  def post(self, path: str, body=None, **query) -> httpx.Response:
    return httpx.post(
      self.sidecar.url + path,
      json=body,
      params=query,
      timeout=60,
      trust_env=False,
    )

  def rpc(self, method: str, **kwargs):
    """The answer of each worker."""
    answer = self.post('/collective_rpc', dict(method=method, kwargs=kwargs))
    assert answer.status_code == 200, answer.text
    return answer.json()['results']

  def complete(self, ids, **sampling) -> dict:
    """The one choice of /v1/completions."""
    answer = self.post(
      '/v1/completions',
      dict(
        dict(
          model='policy',
          prompt=list(ids),
          logprobs=0,
          return_token_ids=True,
          max_tokens=8,
          temperature=0.0,
        ),
        **sampling,
      ),
    )
    assert answer.status_code == 200, answer.text
    return answer.json()['choices'][0]


def write_model(folder, cfg=CFG, seed=0):
  """A checkpoint with random weights; returns them and the tokenizer."""
  texts = ['what is the name of the river ? <search> </search> <answer>'] * 2
  tok = tokenizer.train_bpe(texts, cfg.vocab_size, folder / 'tokenizer')
  params = decoder.init_params(cfg, jax.random.key(seed), scale=0.25)
  pretrained.save(
    folder / 'model',
    cfg,
    params,
    folder / 'tokenizer',
    like={'model_type': 'qwen2', 'eos_token_id': tok.eos_ids[0]},
  )
  return params, tok


@pytest.fixture(scope='session')
def served(tmp_path_factory):
  if not (ROOT / '.venv-sidecar').exists():
    pytest.fail('vLLM is not installed; run `make test-sidecar`')
  folder = tmp_path_factory.mktemp('served')
  params, tok = write_model(folder)
  with start_sidecar(
    folder / 'model', log_file=folder / 'vllm.log', **FLAGS
  ) as sidecar:
    yield Served(sidecar, folder / 'model', CFG, params, tok)
