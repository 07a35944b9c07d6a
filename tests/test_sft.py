"""A warm start teaches the tokens that the policy would sample."""

import numpy as np
import pytest

from searchrl_jax import sft
from searchrl_jax.data.core import Trace
from searchrl_jax.lookup import ConfigError
from searchrl_jax.text.tokenizer import load, train_bpe
from searchrl_jax.types import Passage
from tests import scripted

ADDED = ('<think>', '</think>', '<tool_call>')
FOUND = (Passage('1', 'The book', 'Ann wrote it.'),)


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  """As Qwen3's: the tags of thoughts are added tokens, and not special."""
  folder = tmp_path_factory.mktemp('tokenizer')
  hf = train_bpe(scripted.TEXTS, 330, folder)._hf
  hf.add_tokens(list(ADDED))
  hf.save_pretrained(folder)
  return load(folder)


def trace(thought, answer):
  return Trace(
    scripted.QUESTION,
    (
      ('think', thought),
      ('search', 'the book'),
      ('information', FOUND),
      ('answer', answer),
    ),
  )


def written(trajectory):
  return [
    (s.kind, s.ids.tolist())
    for s in trajectory.segments
    if s.author == 'policy'
  ]


def test_a_line_says_what_the_traces_teach(tok):
  env = scripted.make(tok, max_turns=4, train_information=False)
  elsewhere = (Passage('2', 'Another book', 'Nobody knows.'),)

  def about(passages, answer):
    actions = ('search', 'the book'), ('information', passages)
    actions = actions if passages else ()
    return Trace(scripted.QUESTION, (*actions, ('answer', answer)))

  (right, *_), wrong = scripted.QUESTION.answers, 'nothing of the kind'
  traces = [about(FOUND, right)] * 3 + [
    about(FOUND, wrong),
    about(elsewhere, right),
    about((), right),
  ]
  taught = [sft.render(t, env, i) for i, t in enumerate(traces)]
  assert sft.kinds(taught, env) == (
    '6 traces, 3 search and answer right with what they found, 2 answer '
    'blindly, with nothing that they found, 1 answer without a search'
  )


@pytest.mark.parametrize('recalls', [False, True])
def test_tags_are_taught_as_a_policy_samples_them(tok, recalls):
  env = scripted.make(
    tok,
    information='policy' if recalls else 'source',
    max_turns=0 if recalls else 4,
    train_information=recalls,
  )
  taught = sft.render(trace('I look it up', 'Ann'), env, 0)
  # A policy that says the same in the tokens of running text.
  turns = [
    '<think> I look it up </think>\n<search> the book </search>',
    '<answer> Ann </answer>',
  ]
  if recalls:
    turns.insert(1, env.observation(FOUND).strip())
    turns = ['\n'.join(turns)]
  natural = [tok._hf.encode(t, add_special_tokens=False) for t in turns]
  assert tok._hf.convert_tokens_to_ids('<think>') in natural[0]
  state, _ = scripted.play(env, natural, FOUND)
  assert written(taught) == written(env.trajectory(state))
  assert [kind for kind, _ in written(taught)][0] == 'think'


def test_contents_are_text_whatever_they_spell(tok):
  spelt = f'{"".join(ADDED[::2])} <|eos|> <answer>'
  taught = sft.render(trace(spelt, 'Ann'), scripted.make(tok), 0)
  kind, thought = written(taught)[0]
  once = [tok._hf.convert_tokens_to_ids(t) for t in ADDED[:2]]
  added = set(tok._hf.backend_tokenizer.get_added_tokens_decoder())
  assert kind == 'think' and [i for i in thought if i in added] == once
  assert spelt in tok.decode(thought)
  assert taught.end == 'answer' and np.all(
    [s.train for s in taught.segments if s.author == 'policy']
  )


def test_updates_take_all_traces_of_an_epoch():
  lengths = np.array([9, 1, 8, 2, 7, 3, 6, 4])
  given = sft.order(lengths, 3, 4, seed=0, kind='given')
  assert given.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 0], [1, 2, 3]]
  for epoch in np.split(sft.order(lengths, 4, 4, seed=0), 2):
    short, long = sorted(epoch.tolist(), key=lambda row: lengths[row].sum())
    assert {*short} == {1, 3, 5, 7} and {*long} == {0, 2, 4, 6}
  # Of ten, two updates of four take eight, in each epoch others.
  epochs = sft.order(np.ones(10), 4, 40, seed=0).reshape(20, 8).tolist()
  assert {len({*taken}) for taken in epochs} == {8}
  assert {i for taken in epochs for i in taken} == {*range(10)}
  with pytest.raises(ConfigError, match="order='size'.*: given, len"):
    sft.order(lengths, 4, 4, seed=0, kind='size')
