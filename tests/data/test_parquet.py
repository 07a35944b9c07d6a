"""Search-R1's parquet and its relatives, read unchanged."""

import json

import numpy as np
import pandas as pd
import pytest

from searchrl_jax import schema
from searchrl_jax.data import core, parquet
from searchrl_jax.data.checks import DataError

PROMPT = [{'role': 'user', 'content': 'Answer, and search. Question: who?\n'}]


def row(source='nq', index=0, prompt=PROMPT, target=('Ann', 'A. N.'), **more):
  return {
    'data_source': source,
    'prompt': prompt,
    'ability': 'fact-reasoning',
    'reward_model': {'style': 'rule', 'ground_truth': {'target': list(target)}},
    'extra_info': {'split': 'train', 'index': index},
    **more,
  }


def merged(i, source='nq', **more):
  """A row of the published merged sets, which carry FlashRAG's columns."""
  return row(
    source,
    id=f'train_{i}',
    question='who?',
    golden_answers=['Ann', 'A. N.'],
    **more,
  )


def write(tmp_path, rows, name='train.parquet'):
  path = tmp_path / name
  pd.DataFrame(rows).to_parquet(path)
  return str(path)


def test_as_is_keeps_the_prompt(tmp_path):
  path = write(tmp_path, [row(index=3)])
  (q,) = parquet.load(path, prompt='as_is')
  assert q.messages == (
    {'role': 'user', 'content': 'Answer, and search. Question: who?\n'},
  )
  assert q.text == 'Answer, and search. Question: who?'
  assert (q.id, q.source, q.answers) == ('nq/3', 'nq', ('Ann', 'A. N.'))
  assert q.meta == {'split': 'train'}


def test_template_takes_the_question_alone(tmp_path):
  path = write(tmp_path, [merged(0)])
  (q,) = parquet.load(path, prompt='template')
  assert (q.text, q.messages) == ('who?', ())  # nothing is wrapped twice
  (q,) = parquet.load(path, prompt='as_is')
  assert q.text == 'who?' and q.messages[0]['content'].startswith('Answer')


def test_template_without_a_question_says_what_to_do(tmp_path):
  path = write(tmp_path, [row()])
  with pytest.raises(
    DataError, match=r"train\.parquet.*'question'.*data\.prompt='as_is'"
  ):
    parquet.load(path, prompt='template')
  path = write(tmp_path, [{'id': '1', 'question': 'q'}], 'b.parquet')
  with pytest.raises(DataError, match=r"b\.parquet.*'prompt'"):
    parquet.load(path, prompt='as_is')


def test_merged_sets_count_each_source_from_zero(tmp_path):
  """Search-R1's uid is the index: nq's 0 and hotpotqa's 0 are one group."""
  rows = [row('nq', 0), row('hotpotqa', 0)]
  found = parquet.load(write(tmp_path, rows), prompt='as_is')
  assert [q.id for q in found] == ['nq/0', 'hotpotqa/0']
  rows = [merged(0), merged(0, source='hotpotqa')]
  found = parquet.load(write(tmp_path, rows), prompt='template')
  assert [q.id for q in found] == ['nq/train_0', 'hotpotqa/train_0']
  with pytest.raises(DataError, match=r"row 1: id 'nq/0' .* row 0"):
    parquet.load(write(tmp_path, [row(), row()]), prompt='as_is')


@pytest.mark.parametrize(
  'truth, want',
  [
    ({'target': 'Ann'}, ('Ann',)),
    ({'target': ['Ann', 'B']}, ('Ann', 'B')),
    ({'target': np.array(['Ann'])}, ('Ann',)),
    ('Ann', ('Ann',)),
    (['Ann', 'B'], ('Ann', 'B')),
    # As text, which pandas writes for lists and objects.
    ({'target': '["Ann", "B"]'}, ('Ann', 'B')),
    ({'target': '[0, 1]'}, ('[0, 1]',)),  # an interval
    ("['Ann', 'B']", ('Ann', 'B')),
    ('{"target": ["Ann", "B"]}', ('Ann', 'B')),
    ('[-2, 7]', ('[-2, 7]',)),  # an interval
  ],
)
def test_targets(tmp_path, truth, want):
  """SSRL writes a string or a list; verl the answer itself."""
  rows = [{**row(), 'reward_model': {'style': 'rule', 'ground_truth': truth}}]
  (q,) = parquet.load(write(tmp_path, rows), prompt='as_is')
  assert q.answers == want


@pytest.mark.parametrize(
  'truth',
  [
    {'value': 'Ann'},
    '{"value": "Ann"}',
    "['Ann' 'B']",
    "{'target': array(['Ann', 'B'], dtype=object)}",
  ],
)
def test_a_ground_truth_of_another_form_is_not_dropped(tmp_path, truth):
  rows = [{**row(), 'reward_model': {'ground_truth': truth}}]
  with pytest.raises(DataError, match=r'train\.parquet row 0: .*ground_truth'):
    parquet.load(write(tmp_path, rows), prompt='as_is')
  rows[0]['golden_answers'] = ['Ann']
  if 'value' in truth:
    (q,) = parquet.load(write(tmp_path, rows), prompt='as_is')
    assert q.answers == ('Ann',)


def test_golden_answers_where_there_is_no_reward_model(tmp_path):
  path = write(
    tmp_path, [{'id': 'a', 'question': 'q', 'golden_answers': ['x', 'y']}]
  )
  (q,) = parquet.load(path, prompt='template')
  assert (q.id, q.answers, q.source) == ('a', ('x', 'y'), '')


def test_golden_answers_that_are_objects_name_the_row(tmp_path):
  rows = [{'id': 'a', 'question': 'q', 'golden_answers': [{'answer': 'x'}]}]
  with pytest.raises(DataError, match=r'train\.parquet row 0: .*answers'):
    parquet.load(write(tmp_path, rows), prompt='template')


@pytest.mark.parametrize('form', [lambda metadata: metadata, json.dumps, str])
def test_hops_of_metadata_that_is_an_object_or_its_text(tmp_path, form):
  facts = {'title': ['T', 'U'], 'sent_id': [0, 1]}
  metadata = {'type': 'bridge_comparison', 'supporting_facts': facts}
  path = write(tmp_path, [merged(0, metadata=form(metadata))])
  for prompt in ('template', 'as_is'):
    (q,) = parquet.load(path, prompt=prompt)
    assert (q.hops, q.meta) == (4, {'split': 'train'})


@pytest.mark.parametrize(
  'prompt',
  [
    [],
    [{'role': 'system', 'content': 'x'}],
    [{'role': 'user'}],
    '[{"role": "user"}]',
    "[{'role': 'user', 'content': 'x'}\n {'role': 'user', 'content': 'y'}]",
  ],
)
def test_bad_prompts_name_the_row(tmp_path, prompt):
  good = [{'role': 'user', 'content': 'x', 'other': 'y'}]
  good = json.dumps(good) if isinstance(prompt, str) else good
  path = write(tmp_path, [row(prompt=good), row(index=1, prompt=prompt)])
  with pytest.raises(DataError, match=r"train\.parquet row 1: 'prompt'"):
    parquet.load(path, prompt='as_is')


def test_a_plain_string_is_the_users_turn(tmp_path):
  for text in ('hi', '[1, 2] is a list', '{"a": 1}'):
    (q,) = parquet.load(write(tmp_path, [row(prompt=text)]), prompt='as_is')
    assert q.messages == ({'role': 'user', 'content': text},)


@pytest.mark.parametrize('form', [json.dumps, str])
def test_messages_that_a_table_wrote_as_text(tmp_path, form):
  path = write(tmp_path, [row(prompt=form(PROMPT))])
  (q,) = parquet.load(path, prompt='as_is')
  assert q.messages == tuple(PROMPT)


def test_filters_and_bad_files(tmp_path):
  path = write(tmp_path, [row('nq', i) for i in range(9)] + [row('pop', 9)])
  ids = lambda **kw: [q.id for q in parquet.load(path, prompt='as_is', **kw)]
  assert ids(source='pop') == ['pop/9'] and len(ids(n=4, seed=1)) == 4
  other = row('nq', 0)
  other['extra_info'] = {'split': 'test', 'index': 0}
  both = write(tmp_path, [row('nq', 0), other], 'both.parquet')
  for split in ('train', 'test'):
    (q,) = parquet.load(both, prompt='as_is', split=split)
    assert (q.id, q.meta) == ('nq/0', {'split': split})
  with pytest.raises(DataError, match="'trian'.*'train'"):
    ids(split='trian')
  cut = tmp_path / 'cut.parquet'
  cut.write_bytes(open(path, 'rb').read()[:-20])
  with pytest.raises(DataError, match='cut.parquet'):
    parquet.load(str(cut), prompt='as_is')


def test_through_load_sets_the_prompt_is_the_configs(tmp_path):
  write(tmp_path, [merged(0)])
  data = schema.base().data
  data.dir = str(tmp_path)
  sets = {'a': {'module': 'parquet', 'path': 'train.parquet'}}
  assert core.load_sets(sets, data)['a'][0].messages == ()
  data.prompt = 'as_is'
  assert core.load_sets(sets, data)['a'][0].messages != ()
  sets['a']['prompt'] = 'template'
  with pytest.raises(DataError, match="not config.data.prompt='as_is'"):
    core.load_sets(sets, data)
