"""The incremental parser against a whole-text reading of the same rules."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from searchrl_jax.text import parser as parsing
from searchrl_jax.text import prompts

TAGS = parsing.tags_of(prompts.load('base'))
# Whole tags, halves of tags, text, merged tokens, and b'' (a control token).
PIECES = (
  b'<think>', b'</think>', b'<search>', b'</search>', b'<answer>', b'</answer>',
  b'<information>', b'</information>', b'<', b'</', b'sea', b'rch', b'rch>',
  b'>', b'>\n', b'></', b'>.', b'<answ', b'er>x</', b'answer', b'think>', b'\n',
  b'a', b' b', b'', b'<sea', b'<s', b'\xe6\x97', b'\xa5', b'x<', b'<<think>>',
)  # fmt: skip


def reference(pieces, block='other', tags=TAGS):
  """Labels every byte of the whole text, then reads kinds off first bytes."""
  data = b''.join(pieces)
  label, after, at, found, inner, begin = [], [], 0, [], b'', block
  while at < len(data):
    if block == 'other':
      tag = next((t for t in tags.open if data.startswith(t, at)), None)
      if tag:
        if inner.strip():
          found.append(('other', inner, True))
        block, inner = tags.open[tag], b''
        label += [block] * len(tag)
        after += [block] * len(tag)
        at += len(tag)
        continue
    elif data.startswith(tags.wanted[block][0], at):
      n = len(tags.wanted[block][0])
      label += [block] * n
      after += [block] * (n - 1) + ['other']
      found.append((block, inner, True))
      block, inner, at = 'other', b'', at + n
      continue
    label.append(block)
    after.append(block)
    inner += data[at : at + 1]
    at += 1
  if block != 'other':
    found.append((block, inner, False))
  elif inner.strip():
    found.append(('other', inner, True))
  kinds, at = [], 0
  for piece in pieces:
    if piece:
      kinds.append(label[at])
    else:
      kinds.append(after[at - 1] if at else begin)
    at += len(piece)
  return kinds, found


def run(chunks):
  parser, kinds, found = parsing.Parser(TAGS), [], []
  for chunk in chunks:
    before = parser
    parser, more, blocks = parser.feed(chunk)
    assert before.feed(chunk) == (parser, more, blocks)  # nothing in place
    kinds += more
    found += blocks
  parser, more, blocks = parser.finish()
  assert parser == parsing.Parser(TAGS)
  return kinds + more, found + blocks


@settings(max_examples=150, deadline=None)
@given(
  st.lists(st.sampled_from(PIECES), max_size=24),
  st.lists(st.integers(1, 5), min_size=24, max_size=24),
)
def test_any_chunking_gives_the_reading_of_the_whole(pieces, sizes):
  expected = reference(pieces)
  chunks, at = [], 0
  for size in sizes:
    chunks.append(pieces[at : at + size])
    at += size
  assert run(chunks) == expected
  assert run([pieces]) == expected
  assert run([[p] for p in pieces]) == expected


def kinds(*pieces):
  return run([list(pieces)])[0]


def test_a_token_that_straddles_belongs_to_the_earlier():
  # First bytes: 'x' outside; 'search>' in the tag; '>\n' in the closing tag.
  assert kinds(b'x<', b'search>', b'q</search', b'>\n', b'y') == [
    'other', 'search', 'search', 'search', 'other',
  ]  # fmt: skip
  assert kinds(b'<answer>a</answer></', b'think>') == ['answer', 'other']


def test_a_control_token_belongs_to_the_block_it_stands_in():
  assert kinds(b'<think>', b'', b'a</think>', b'') == [
    'think', 'think', 'think', 'other',
  ]  # fmt: skip
  assert kinds(b'', b'<think>') == ['other', 'think']


def test_only_top_level_blocks_are_blocks():
  found = run([[b'<think><search>a</search></think><search>b</search>']])[1]
  assert found == [
    ('think', b'<search>a</search>', True),
    ('search', b'b', True),
  ]
  found = run([[b'<information><answer>a</answer></information>']])[1]
  assert found == [('information', b'<answer>a</answer>', True)]
  found = run([[b'<search>a<search>b</search>']])[1]
  assert found == [('search', b'a<search>b', True)]
  found = run([[b'<think>never closed <search>a</search>']])[1]
  assert found == [('think', b'never closed <search>a</search>', False)]


@pytest.mark.parametrize(
  'text', [b'<Search>a</Search>', b'< search>a</search>', b'a</search>', b'<s']
)
def test_tags_are_exact(text):
  assert run([[text]])[1] == [('other', text, True)]


def test_a_prompt_may_open_the_thought():
  opened = parsing.start(TAGS, 'assistant\n<think>\n')
  assert opened.feed([b'a</think>', b'b'])[1] == ['think', 'other']
  assert parsing.start(TAGS, '<think> x').block == 'other'
  assert parsing.start(TAGS, 'between <answer>').block == 'other'


@pytest.mark.parametrize(
  'before, begun, block',
  [
    ('user\n<think>\n', 'Let me', 'think'),
    ('user\n<think>\n', 'no</think> So ', 'other'),
    ('user\n<think>\n', 'no</think><search>', 'search'),
    ('user\n', 'Let me', 'other'),
    ('user\n', '<think>\n', 'think'),
    ('user\n', '<answer>', 'answer'),
  ],
)
def test_a_reply_begins_in_the_block_that_was_opened_before_it(
  before, begun, block
):
  assert parsing.start(TAGS, before + begun, begun).block == block


def test_tokens_inside_a_block_are_certain_at_once():
  parser, sure, _ = parsing.Parser(TAGS).feed([b'<think>', b'a</th'])
  assert sure == ['think', 'think']
  parser, sure, blocks = parser.feed([b'ink', b'>', b'<', b'x'])
  assert sure == ['think', 'think', 'other', 'other']
  assert blocks == [('think', b'a', True)]
  assert parser.feed([b'<sea'])[1] == []


@pytest.mark.parametrize(
  'text, found',
  [
    (r'so \boxed{5}.', '5'),
    (r'\boxed{1} then \boxed {2 }', '2'),
    (r'\boxed{\frac{14}{3}}', r'\frac{14}{3}'),
    (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
    (r'\boxed{\left\{ x \right.} y', r'\left\{ x \right.'),
    (r'\boxed{\boxed{7}}', '7'),
    (r'\boxed{3} and \boxed{4', '3'),  # the last whose braces balance
    (r'} { \boxed{3}', '3'),
    (r'\boxed{}', ''),
    (r'\boxed 5', None),
    (r'\fbox{5}', None),
    ('5', None),
    ('', None),
  ],
)
def test_the_last_box_whose_braces_balance(text, found):
  assert parsing.boxed(text) == found


def test_a_thousand_open_boxes_are_read_in_one_pass():
  began = time.thread_time()
  assert parsing.boxed(r'\boxed{' * 100_000 + '}') == ''
  assert parsing.boxed(r'\boxed{1} ' + r'\boxed{' * 100_000) == '1'
  assert time.thread_time() - began < 2


@pytest.mark.parametrize('size', [1, 2, 3, 50])
def test_a_block_without_a_closing_tag_ends_with_the_turn(size):
  """A call of Llama's: its opening tag is a part of it."""
  tags = parsing.tags_of(prompts.load('llama_tools'))
  data = b'<think>{"</think>so {"name": "<answer>"} x'
  pieces = [bytes([b]) for b in data] + [b'']  # eos has no bytes
  parser, kinds, found = parsing.Parser(tags), [], []
  for at in range(0, len(pieces), size):
    parser, more, blocks = parser.feed(pieces[at : at + size])
    kinds, found = kinds + more, found + blocks
  parser, more, blocks = parser.finish()
  assert found + blocks == [
    ('think', b'{"', True),
    ('other', b'so ', True),
    ('tool_call', b'{"name": "<answer>"} x', True),
  ]
  assert kinds + more == ['think'] * 17 + ['other'] * 3 + ['tool_call'] * 23
