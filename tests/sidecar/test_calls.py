"""vLLM's own reader of Qwen3.5's calls, in its environment but no server."""

import json
import random
import subprocess

import pytest

from tests.conftest import ROOT
from tests.text.test_calls import ANY, argument, of_xml

pytestmark = pytest.mark.sidecar

READER = """
import json, sys
from vllm.entrypoints.openai.chat_completion import protocol
from vllm.parser.qwen3 import Qwen3Parser

class Tokenizer:
  get_vocab = dict

said = json.load(sys.stdin)
request = protocol.ChatCompletionRequest(messages=[], tools=said['tools'])
for text in said['texts']:
  off = {'enable_thinking': False}
  reader = Qwen3Parser(Tokenizer(), request.tools, chat_template_kwargs=off)
  found = reader.extract_tool_calls(text, request).tool_calls
  print(json.dumps([(f.function.name, f.function.arguments) for f in found]))
"""
VALUES = [
  '', 'Ann', ' x\n\ny ', '7', '-2.5', '2.0', '1e-07', 'true', 'False', 'null',
  '[1, "x"]', '{"s": [null]}', '"Ann"', 'a < b', '<b>x</b>', '日本', '\n', '\\',
]  # fmt: skip


def test_what_is_read_is_what_vllm_reads():
  """But for what stands in no form, which it takes, and values that no type of
  their schema is sure of: None as a text, or 2.0 as an integer or a text."""
  rng = random.Random(0)
  texts = [argument(n, v) for n in 's i n b a o any'.split() for v in VALUES]
  texts += [argument('maybe', v) for v in ('7', '2.0', 'null')]
  texts += [argument('either', v) for v in VALUES if v != '2.0']
  good = [text for text in texts if of_xml(text).status == 'ok']
  inner = lambda x: x.removeprefix('<function=f>').removesuffix('</function>')
  for _ in range(200):
    several = ''.join(map(inner, rng.sample(good, 3)))
    texts.append(f'<function=f>{several}</function>')
  calls = [of_xml(text) for text in texts]
  said = {
    'tools': [ANY],
    'texts': [f'<tool_call>\n{t}\n</tool_call>' for t in texts],
  }
  done = subprocess.run(
    [ROOT / '.venv-sidecar/bin/python', '-c', READER],
    input=json.dumps(said),
    capture_output=True,
    text=True,
    check=True,
  )
  read = [*map(json.loads, done.stdout.splitlines()[-len(texts) :])]
  assert sum(call.status == 'ok' for call in calls) > 200
  for call, found in zip(calls, read, strict=True):
    if call.status != 'ok':
      continue
    [(name, arguments)] = found
    assert (name, json.loads(arguments)) == ('f', json.loads(call.arguments))
