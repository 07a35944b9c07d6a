"""The world of self-search: what may be known of whom, and what is taught."""

import collections
import inspect
import json

import pytest
import transformers

from configs import ssrl
from experiments.ssrl import closedbook
from searchrl_jax import sft
from searchrl_jax.data import core
from searchrl_jax.data.checks import DataError
from searchrl_jax.text import prompts
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Question

MIX = dict(direct=0.1, poor=0.4, tilt=0.9, again=0.3, short=0.3)
TEXTS = dict(queries=100, recalls=200, passages=200, pack=3)


@pytest.fixture(scope='module')
def world():
  return closedbook.generate(3)


@pytest.fixture(scope='module')
def traces():
  return closedbook.traces(world_seed=3, n=1200, **TEXTS, **MIX)


@pytest.fixture(scope='module')
def env(tmp_path_factory):
  folder = closedbook.tokenizer(tmp_path_factory.mktemp('tok') / 'tokenizer')
  c = ssrl.get_config()
  c.env.train_information = True
  return SearchEnv(
    tokenizers.load(folder), prompts.load(c.env.template), c.env, 'template', 1
  )


def people(world, split):
  return {q.meta['path'][0] for q in world.questions[split]}


@pytest.mark.parametrize('seed', [0, 1, 12345])
def test_splits_share_nobody_and_no_answer_is_worth_guessing(seed):
  world = closedbook.generate(seed)
  assert world == closedbook.generate(seed) != closedbook.generate(seed + 1)
  everyone = [n for s in closedbook.SPLITS for n in people(world, s)]
  assert len(everyone) == len(set(everyone)) == len(world.facts) == 580
  assert len(world.corpus) == 580
  for split in closedbook.SPLITS:
    there = people(world, split)
    for relation in closedbook.RELATIONS:
      values = collections.Counter(
        world.facts[name][relation] for name in there
      )
      assert len(values) >= 80
      assert max(values.values()) <= -(-len(there) // 80)
    for q in world.questions[split]:  # nobody of another split on the way
      name, *path = q.meta['path']
      for relation in path:
        assert name in there
        name = world.facts[name][relation]
      assert (name,) == q.answers


def test_nothing_of_the_unseen_is_taught_and_nobody_else_is_asked_about(
  world, traces
):
  unseen, warm = people(world, 'unseen'), people(world, 'warm')
  told = collections.Counter()
  for trace in traces:
    if trace.question is not None:
      assert trace.question.meta['path'][0] in warm
    for kind, payload in trace.actions:
      texts = [p.text for p in payload] if kind == 'information' else [payload]
      assert not any(name in text for name in unseen for text in texts)
      if trace.question is None and 'Question' not in texts[0]:
        told.update(t.partition(':')[0] for t in texts if ':' in t)
  # Everybody else is, and evenly: twice 600 passages of 500 people.
  assert set(told) == set(world.facts) - unseen
  assert set(told.values()) <= {2, 3, 4}


def test_passages_are_those_of_the_corpus(world, traces):
  """What is recalled is to the letter what a real search would find."""
  texts = {
    row['id']: row['contents'].partition('\n')[2] for row in world.corpus
  }
  found = [
    p
    for t in traces
    for kind, payload in t.actions
    if kind == 'information'
    for p in payload
  ]
  assert found and all(texts[p.id] == p.text for p in found)


def test_the_mix_is_what_was_asked_for(traces):
  asked = [t for t in traces if t.question is not None]
  hops = collections.Counter(t.question.hops for t in asked)
  assert hops[1] == pytest.approx(600, abs=30)

  def share(picked, of):
    return sum(map(picked, of)) / len(of)

  def poor(t):
    queries = [payload for kind, payload in t.actions if kind == 'search']
    return bool(queries) and len(queries[0].split()) == 1

  def direct(t):
    return not any(kind == 'search' for kind, _ in t.actions)

  # 1,200 draws of 0.1 and 300 of the others: within four deviations.
  assert share(direct, asked) == pytest.approx(0.1, abs=0.035)
  for place, relation in enumerate(closedbook.RELATIONS):
    part = [t for t in asked if t.question.meta['path'][-1] == relation]
    want = 0.4 * (1 + 0.9 * (2 * place / 3 - 1))
    assert share(poor, part) == pytest.approx(want, abs=0.12)
  for t in asked:
    right = t.actions[-1] == ('answer', t.question.answers[0])
    assert right or not t.good
    assert t.actions[-1][1] in t.actions[-2][1]  # the answer was read


def test_a_poor_search_is_as_well_formed_as_a_good_one(env, traces):
  from experiments.ssrl import reward as rewards

  for i, t in enumerate(t for t in traces if t.question is not None):
    found = sft.render(t, env, i)
    searched = any(kind == 'search' for kind, _ in t.actions)
    assert rewards.format_score(found, env) == (1.0 if searched else 0.5)


def test_the_policy_is_taught_what_it_is_to_write(env, traces):
  """Information is its own here: in the loss, and laid out as observed."""
  trace = next(
    t for t in traces if t.question and t.actions[2][0] == 'information'
  )
  found = sft.render(trace, env, 0)
  written = [s for s in found.segments if s.author == 'policy']
  assert all(s.train for s in written)
  information = next(s for s in written if s.kind == 'information')
  text = trace.actions[2][1][0].text
  assert env.tokenizer.decode(information.ids).strip() == (
    f'<information> {text} </information>'
  )
  observed = env.observation(trace.actions[2][1])
  whole = env.tokenizer.decode([i for s in written for i in s.ids])
  assert f'</search>{observed}<think>' in whole
  assert not any(
    i in env.tokenizer.encode('<|unk|>') for s in found.segments for i in s.ids
  )


def test_plain_text_has_no_prompt_and_is_all_in_the_loss(env, traces):
  texts = [t for t in traces if t.question is None][:400]
  for trace in texts:
    (segment,) = sft.render(trace, env, 0).segments
    assert (segment.author, segment.train) == ('teacher', True)
    text = env.tokenizer.decode(segment.ids)
    assert 'Question' not in text and text.count('birthplace') == 3
  assert text.startswith('<search>') and text.count('<information>') == 3


def test_queries_are_for_people_of_whom_there_is_nothing(world, env, traces):
  asked = [
    t
    for t in traces
    if t.question is None and t.actions[1:2] and t.actions[1][0] == 'think'
  ]
  assert len(asked) == 100
  for trace in asked:
    (segment,) = sft.render(trace, env, 0).segments
    query = trace.actions[-1][1]
    text = env.tokenizer.decode(segment.ids)
    question = text.partition('\n')[0].removeprefix('Question: ')
    assert question[:-1].rpartition(' of ')[2] not in world.facts
    assert query in question
    # The prompt of such a question, and the beginning of a trace.
    prompt = env.reset(Question('q', question))[1].prompt.ids
    assert tuple(segment.ids[: len(prompt)]) == prompt
    assert text.endswith(
      f'<think> find {query} </think>\n<search> {query} </search>'
    )
  poor = sum(len(t.actions[-1][1].split()) == 1 for t in asked)
  assert 20 <= poor <= 60  # 40 expected: as in the traces


def test_shuffled_golds_are_all_wrong_and_each_still_somebodys():
  kw = dict(world_seed=3, split='rl')
  true, dealt = closedbook.load(**kw), closedbook.load(**kw, shuffled=True)
  assert [q.id for q in true] == [q.id for q in dealt]
  assert all(a.answers != b.answers for a, b in zip(true, dealt))
  for relation in closedbook.RELATIONS:
    a, b = (
      sorted(q.answers for q in qs if q.meta['path'][-1] == relation)
      for qs in (true, dealt)
    )
    assert a == b  # guessing one answer is worth what it was


def test_load_alternates_hops_and_says_what_is_wrong():
  found = closedbook.load(world_seed=3, split='heldout', n=300)
  assert [q.hops for q in found[:4]] == [1, 2, 1, 2] and len(found) == 300
  for fields, message in (
    (dict(split='train'), "split='train'.*heldout"),
    (dict(split='rl', hops=(3,)), 'hops='),
    (dict(split='rl', rl=79), 'rl=79 .*80'),
    (dict(split='rl', rl=10_000), '10000 names'),
    (dict(split='rl', n=9999), 'n=9999'),
  ):
    with pytest.raises(DataError, match=message):
      closedbook.load(world_seed=3, **fields)
  with pytest.raises(DataError, match='direct . poor'):
    closedbook.traces(world_seed=3, n=1, **TEXTS, **(MIX | {'direct': 0.3}))


def test_every_word_is_in_the_vocabulary(world, env):
  tok = transformers.AutoTokenizer.from_pretrained(env.tokenizer.path)
  for text in (
    *(row['contents'].partition('\n')[2] for row in world.corpus),
    *(q.text for qs in world.questions.values() for q in qs),
  ):
    assert tok.unk_token_id not in tok(text)['input_ids']


def test_the_config_states_every_field_of_the_world():
  """One world for questions, traces and the server's corpus."""
  c = ssrl.get_config('seed=2')
  known = inspect.signature(closedbook.generate).parameters
  assert set(c.data.world) == set(known) - {'seed'}
  c.data.world.rl = 200
  for fields in (c.data.train.rl, c.data.eval.heldout, c.sft.data):
    assert fields.rl == 200
  sets = core.load_sets(c.data.eval, c.data)
  assert json.dumps(sets['heldout'][0].id).startswith('"closed-2-heldout')
