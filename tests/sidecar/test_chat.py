"""A real vLLM server as judge, as the reader of self-play, as a simulator.

Its model is a table: each character has the one that follows it. So what it
says is known, and with a schema the server's grammar decides the rest.
"""

import asyncio
import json

from flax import traverse_util
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.ssp.verify import Reader
from searchrl_jax import schema
from searchrl_jax.engines.vllm.launcher import start_sidecar
from searchrl_jax.models import decoder, pretrained
from searchrl_jax.rewards import judge
from searchrl_jax.sources.chat import Chat, ChatError
from searchrl_jax.sources.core import SourceError
from searchrl_jax.sources.simulated import SimulatedSource
from searchrl_jax.text import tokenizer
from searchrl_jax.types import Question, SearchRequest
from tests.sidecar.conftest import FLAGS

pytestmark = pytest.mark.sidecar

TEMPLATE = (
  "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
  '{% if add_generation_prompt %}>{% endif %}'
)
# After a prompt, which ends with >; then the end. No character stands twice.
SAYS = 'Doc: xylem'
# In JSON: a string begins with i, and one that may be anything ends there.
AFTER = dict(zip('>' + SAYS[:-1], SAYS)) | {'"': 'i', 'i': '!', '!': '"'}
CFG = decoder.DecoderConfig(
  vocab_size=258,
  d_model=320,
  n_layers=1,
  n_heads=10,
  n_kv_heads=2,
  head_dim=32,
  d_ff=96,
  family='qwen2',
  tied=False,
)


def write(folder):
  tok = tokenizer.train_bpe(['>'], CFG.vocab_size, folder / 'tokenizer')
  path = folder / 'tokenizer' / 'tokenizer_config.json'
  path.write_text(
    json.dumps(json.loads(path.read_text()) | {'chat_template': TEMPLATE})
  )
  id_of = lambda text: tok.encode(text)[0]
  head = np.zeros((CFG.d_model, CFG.vocab_size), np.float32)
  follows = {id_of(a): id_of(b) for a, b in AFTER.items()}
  for i in range(CFG.vocab_size):
    head[i, follows.get(i, tok.eos_ids[0])] = 10.0
  flat = {
    name: jnp.zeros(shape)
    for name, (shape, _) in decoder.param_table(CFG).items()
  } | {
    'embed': jnp.eye(CFG.vocab_size, CFG.d_model),
    'final_norm': jnp.ones(CFG.d_model),
    'head': jnp.asarray(head),
  }
  params = traverse_util.unflatten_dict(flat, sep='/')
  pretrained.save(
    folder / 'model',
    CFG,
    params,
    folder / 'tokenizer',
    like={'model_type': 'qwen2', 'eos_token_id': tok.eos_ids[0]},
  )
  return folder / 'model'


@pytest.fixture(scope='module')
def url(tmp_path_factory):
  folder = tmp_path_factory.mktemp('chat')
  flags = FLAGS | dict(max_model_len=2048)
  with start_sidecar(
    write(folder), log_file=folder / 'vllm.log', **flags
  ) as sidecar:
    yield sidecar.url


def judging(url, **changed):
  out = schema.base().judge
  out.update(dict(url=url) | changed)
  return out


def run(make, use):
  async def go():
    one = make()
    try:
      return await use(one)
    finally:
      await one.close()

  return asyncio.run(go())


def test_it_says_what_its_table_says(url):
  messages = [{'role': 'user', 'content': 'Who?'}]
  chat = lambda: Chat(judging(url))
  assert SAYS == run(
    chat, lambda c: c.reply(messages, max_tokens=32, temperature=1.0, seed=1)
  )
  with pytest.raises(ChatError, match='within 4 tokens.*length'):
    run(chat, lambda c: c.reply(messages, max_tokens=4, temperature=0.0))
  with pytest.raises(ChatError, match="'nobody'.*policy"):
    run(lambda: Chat(judging(url, model='nobody')), lambda c: c.check())


def test_a_schema_makes_a_verdict_of_whatever_it_would_say(url):
  items = [(f'Who is {i}?', ('Mira',), 'Mira') for i in range(8)]
  found = run(
    lambda: judge.Judge(judging(url)), lambda one: one.verdicts(items)
  )
  # Its strings begin with i: "incorrect", though the answer is the gold.
  assert found == [False] * 8


def test_a_reader_s_answer_is_what_it_says(url, tmp_path):
  questions = [
    Question(str(i), f'passage {i}\nQuestion: who?') for i in range(4)
  ]
  found = run(
    lambda: Reader(judging(url), tmp_path / 'readings.jsonl'),
    lambda one: one.answers(questions),
  )
  assert found == ['i!'] * 4


def search(url, n=4, check=True, **changed):
  c = schema.base().source
  c.simulator.update(
    dict(url=url, useful='Find {query}', noisy='Find {query}', max_tokens=32)
    | changed
  )
  requests = [
    SearchRequest(f'query {i}', 1, question=Question('q', 'Who?', ('Mira',)))
    for i in range(n)
  ]
  made = lambda: SimulatedSource(c, 0, writer=None)
  who = check and run(made, lambda source: source.check())
  return who, run(made, lambda source: source.search(requests))


def test_it_simulates_a_search_engine(url):
  who, found = search(url, document='Doc: (.+)')
  assert who == {'identity': {'simulator': 'policy'}}
  assert [[p.text for p in f.passages] for f in found] == [['xylem']] * 4


@pytest.mark.parametrize(
  'changed',
  [
    dict(document='Text: (.+)'),
    dict(document='Doc: (.+)', max_tokens=6),
    dict(document='Doc: (.+)', useful='x ' * 10_000 + '{query}'),
  ],
)
def test_a_server_that_writes_no_document_for_any_query(url, changed):
  """Without one in the reply, cut, too long for its context: all the same."""
  _, found = search(url, n=2, check=False, **changed)
  assert [f.kind for f in found] == ['rejected'] * 2
  with pytest.raises(SourceError, match='no document'):
    search(url, **changed)
