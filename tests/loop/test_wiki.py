"""Real input: the Wikipedia recipe on a Hugging Face checkpoint, and parquet.

The checkpoint is generated (Qwen2.5's layout and tokenizer, weights at
random); the passages, questions and tokenizer are those of the data folder.
"""

import gzip
import itertools
import json

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs import wiki_nq
from retrieval import process
from searchrl_jax import export, schema, train
from searchrl_jax.data.checks import DataError
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.run import build
from searchrl_jax.store import records
from tests import tiny
from tests.test_commands import command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]

# Qwen2.5-0.5B's config.json with small sizes. Its embedding has more rows
# (padding) than the tokenizer has entries, 151,665.
QWEN = dict(
  model_type='qwen2',
  architectures=('Qwen2ForCausalLM',),
  vocab_size=151936,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  intermediate_size=64,
  rope_theta=1000000.0,
  rms_norm_eps=1e-6,
  tie_word_embeddings=True,
  hidden_act='silu',
  max_position_embeddings=32768,
)
IM_START = 151644  # opens each turn of its chat template
# What makes a run of the recipe small; as flags, `evaluate` takes them too.
SMALL = {
  'mesh.data': 1,
  'model.dtype': 'float32',
  'model.remat': 'none',
  'engine.dtype': 'float32',
  'engine.slots': 4,
  'engine.max_len': 320,
  'engine.chunk': 4,
  'engine.prefill_rows': 4,
  'engine.canary_tolerance': 1e-3,
  'env.max_turns': 1,
  'env.max_turn_tokens': 8,
  'env.max_tokens': 320,
  'env.max_observation_tokens': 64,
  'eval.questions': 2,
  'eval.bootstrap': 50,
  'log.tensorboard': False,
  'log.progress': False,
}


@pytest.fixture(scope='module')
def checkpoint(data_dir, tmp_path_factory):
  cfg = pretrained.decoder_config(QWEN, dtype='float32')
  params = decoder.init_params(
    cfg, jax.random.key(0), scale=0.02, embed_scale=0.02
  )
  path = tmp_path_factory.mktemp('checkpoints') / 'qwen'
  pretrained.save(path, cfg, params, data_dir / 'qwen_tokenizer')
  return path


@pytest.fixture(scope='module')
def corpus(data_dir, tmp_path_factory):
  """The first passages of the real corpus."""
  path = tmp_path_factory.mktemp('corpus') / 'corpus.jsonl'
  with gzip.open(data_dir / 'corpus.jsonl.gz', 'rt') as lines:
    path.write_text(''.join(itertools.islice(lines, 200)))
  return path


@pytest.fixture(scope='module')
def server(corpus):
  with process.start_server(corpus, log_path=corpus.parent / 'log') as server:
    yield server


def small(checkpoint, server):
  """The recipe as a user asks for it: wiki_nq.py:model=PATH, one step."""
  c = wiki_nq.get_config(f'model={checkpoint},template=chat')
  with c.unlocked():
    c.update_from_flattened_dict(SMALL)
  c.source.url = server.url
  c.data.train.nq.n = 4
  c.rollout.questions = c.rollout.group = 2
  c.algorithm.minibatches = 2
  c.batch.lengths = (320,)
  c.batch.tokens = 640
  c.batch.head_chunk = 64
  # Random weights earn no exact match: this differs between samples.
  c.reward = schema.ConfigDict(
    dict(
      em=dict(fn='answer.em', weight=1.0),
      length=dict(fn='tests.tiny.shortness', weight=1.0),
    )
  )
  c.optim.lr = 1e-3
  c.optim.warmup = 0
  c.train.steps = 1
  c.eval.every = 0
  c.checkpoint.every = 1
  return c


def lines(path):
  return [json.loads(line) for line in path.open()]


@pytest.mark.long
def test_the_recipe_trains_a_hugging_face_checkpoint(
  checkpoint, server, tmp_path
):
  config = small(checkpoint, server)
  metrics = train.train(config, str(tmp_path / 'run'))
  assert metrics['train/grad_norm'] > 0
  assert abs(metrics['train/kl_ref']) < 1e-2  # the reference: the checkpoint

  kept = [*records.read(tmp_path / 'run' / 'trajectories')]
  assert len(kept) == 4
  tok = build.tokenizer(config, str(tmp_path / 'run'))
  for t in (r.trajectory for r in kept):
    ids = t.segments[0].ids
    prompt = tok.decode(ids)
    # Its own chat template, once, around our instructions. (Control tokens
    # have no text.)
    assert prompt.count('user\n') == 1
    assert ids[0] == IM_START
    assert t.question.text in prompt
    assert max(s.ids.max() for s in t.segments) < 151936

  # What was trained leaves as a checkpoint of the same layout.
  out = tmp_path / 'exported'
  export.export(str(tmp_path / 'run'), str(out), 'latest', 'float32')
  was, now = pretrained.read_json(checkpoint), pretrained.read_json(out)
  assert {k: now[k] for k in QWEN if k != 'architectures'} == {
    k: was[k] for k in QWEN if k != 'architectures'
  }
  cfg, before = pretrained.load(checkpoint)
  _, after = pretrained.load(out, cfg=cfg)
  assert any(
    (a != b).any()
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
  )


@pytest.mark.long
def test_evaluate_takes_a_hugging_face_checkpoint(checkpoint, server, tmp_path):
  flags = [f'--config.{k}={v}' for k, v in SMALL.items()]
  out, _ = command(
    'evaluate',
    f'--config=configs/wiki_nq.py:model={checkpoint}',
    f'--out={tmp_path}/out',
    f'--config.source.url={server.url}',
    *flags,
  )
  assert 'bootstrap intervals' in out and f'{tmp_path}/out' in out.replace(
    '\n', ''
  )
  scores = json.loads((tmp_path / 'out' / 'eval.json').read_text())
  assert scores['eval/em/n'] == 2
  assert 0 <= scores['eval/f1/low'] <= scores['eval/f1/high'] <= 1
  assert 'eval/recall_any' in scores and 'eval/valid_format' in scores
  assert len([*records.read(tmp_path / 'out' / 'eval')]) == 2


# A row as Search-R1's scripts/data_process/nq_search.py writes it.
INSTRUCTIONS = (
  'Answer the given question. You must conduct reasoning inside <think> and '
  '</think> first every time you get new information. Question: '
)


def parquet(path, n=4, **columns):
  rows = [
    {
      'data_source': 'nq',
      'prompt': [{'role': 'user', 'content': f'{INSTRUCTIONS}who was {i}?\n'}],
      'ability': 'fact-reasoning',
      'reward_model': {'style': 'rule', 'ground_truth': {'target': [f'a{i}']}},
      'extra_info': {'split': 'train', 'index': i},
      **{k: v(i) for k, v in columns.items()},
    }
    for i in range(n)
  ]
  pq.write_table(pa.Table.from_pylist(rows), path)
  return path


def on_parquet(corpus, path, prompt):
  """A small run of its own on the file; its tokenizer has no chat template."""
  c = tiny.config()
  fields = schema.ConfigDict(dict(module='parquet', path=str(path)))
  c.data.prompt = prompt
  c.data.train = schema.ConfigDict(dict(nq=fields))
  c.data.eval = schema.ConfigDict(dict(nq=fields))
  c.model.tokenizer = 'bpe'
  c.model.bpe_vocab = 512
  c.source.corpus = str(corpus)
  c.env.template = 'search_r1'
  c.env.max_tokens = c.engine.max_len = 192
  c.batch.lengths = (192,)
  c.train.steps = 1
  c.eval.every = 0
  return c


@pytest.mark.long
def test_search_r1s_parquet_is_read_as_it_is(corpus, server, tmp_path):
  path = parquet(tmp_path / 'train.parquet')
  config = on_parquet(corpus, path, 'as_is')
  config.source.url = server.url
  train.train(config, str(tmp_path / 'run'))
  found = [*records.read(tmp_path / 'run' / 'trajectories')]
  assert len(found) == 8
  tok = build.tokenizer(config, str(tmp_path / 'run'))
  for r in found:
    question = r.trajectory.question
    i = question.id.removeprefix('nq/')
    prompt = tok.decode(r.trajectory.segments[0].ids)
    assert prompt == f'{INSTRUCTIONS}who was {i}?\n'
    assert question.answers == (f'a{i}',)
    assert np.isfinite(r.reward)


def test_the_template_needs_the_bare_question(corpus, tmp_path):
  path = parquet(tmp_path / 'train.parquet')
  config = on_parquet(corpus, path, 'template')
  with pytest.raises(DataError, match="column 'question'.*as_is"):
    train.train(config, str(tmp_path / 'run'))
  assert [p.name for p in (tmp_path / 'run').iterdir()] == ['.lock']

  path = parquet(tmp_path / 'asked.parquet', question='who was {}?'.format)
  config = on_parquet(corpus, path, 'template')
  config.env.template = 'base'
  config.env.max_tokens = 1024
  env = build.environment(config, build.tokenizer(config, str(tmp_path / 'r')))
  (question, *_) = build.data.load_sets(config.data.train, config.data)['nq']
  state, _ = env.reset(question)
  shown = env.tokenizer.decode(state.segments[0].ids)
  # Our template around the question; the row's own instructions left alone.
  assert shown.count('who was 0?') == 1
  assert INSTRUCTIONS not in shown
