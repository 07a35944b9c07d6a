"""Runs whose policy calls tools by JSON, end to end."""

import json

import numpy as np
import pytest

from searchrl_jax import train
from searchrl_jax.learn import batching
from searchrl_jax.sources.core import SEARCH_SCHEMA
from searchrl_jax.store import records
from searchrl_jax.text import prompts
from searchrl_jax.text import tokenizer as tokenizing
from searchrl_jax.text.calls import Call
from searchrl_jax.text.env import SearchEnv
from tests import scripted, tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]
TEMPLATE = {
  'prompt': [{'role': 'user', 'content': 'Question: {question}'}],
  'no_results': 'nothing',
  'max_queries': 1,
  'invalid': 'Call a tool.',
  'last_turn': 'Answer now.',
}


class Acts(SearchEnv):
  """Each turn that may calls a tool, whatever it says."""

  def __init__(self, *args):
    super().__init__(*args)
    query = json.dumps({'query': 'who'})
    self._calls.read = lambda blocks: (Call('search', query),)


def config(url, folder):
  """The tiny config with a tokenizer that has a chat template."""
  texts = [scripted.HERMES, json.dumps(SEARCH_SCHEMA), json.dumps(TEMPLATE)]
  plain = tokenizing.train_bpe(texts * 4, 600, folder / 'plain')
  hf = plain._hf
  _, special = scripted.CHATS['hermes']
  hf.add_special_tokens({'additional_special_tokens': [*special]})
  hf.chat_template = scripted.HERMES
  hf.save_pretrained(folder / 'chat')
  data = json.loads((prompts.TEMPLATES / 'qwen_tools.json').read_text())
  (folder / 'own.json').write_text(json.dumps(data | TEMPLATE))
  c = tiny.config(url)
  c.model.tokenizer = str(folder / 'chat')
  c.env.module = f'{__name__}.Acts'
  c.env.update(template=str(folder / 'own.json'), max_observation_tokens=160)
  c.env.max_tokens, c.engine.max_len = 640, 640
  c.batch.lengths, c.batch.tokens = (640,), 2560
  c.source.k, c.train.steps, c.eval.every = 1, 2, 0
  c.reward = dict(odd=dict(fn='tests.tiny.odd', weight=1.0))
  c.algorithm.epochs = 2  # so that the trainer scores what was sampled
  return c


@pytest.mark.long
def test_a_run_with_calls_trains_what_was_sampled(url, tmp_path):
  c = config(url, tmp_path)
  train.train(c, str(tmp_path / 'run'))
  tok = tokenizing.load(tmp_path / 'chat')
  found = [*records.read(tmp_path / 'run/trajectories')]
  assert len(found) == 2 * 4 * 2
  for r in found:
    t = r.trajectory
    assert [s.request.query for s in t.searches] == ['who']
    own = [s for s in t.segments if s.author == 'policy']
    (parts,) = batching.tokens_of(0, t)
    trained = parts.ids[parts.mask].tolist()
    assert trained == [i for s in own for i in s.ids.tolist()]
    mask = batching.masks([t])[0]
    engine = np.concatenate([s.logps for s in own])
    np.testing.assert_allclose(r.trainer_logps[mask], engine, atol=2e-2)
    # The chat is whole, however the turn ended.
    ids = np.concatenate([s.ids for s in t.segments]).tolist()
    text = scripted.shown(tok, ids)
    assert text.count('<tool_response>') == 1 and 'Answer now.' in text
    seen = [s for s in t.segments if s.kind == 'information']
    assert [s.author for s in seen] == ['environment']
