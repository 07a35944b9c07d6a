import json
import math

import pytest

from searchrl_jax.data.checks import DataError
from searchrl_jax.evaluate import files, grading
from searchrl_jax.text import prompts
from searchrl_jax.types import Question
from tests.evaluate.test_grading import ENV, config, evaluator, question, sets
from tests.fakes import run_script

IDENTITY = {'corpus': {'count': 2, 'sha256': 'ab'}, 'index': {'kind': 'bm25'}}


def manifest(given=None, **kw):
  fields = dict(
    template=prompts.load('base'),
    identity=IDENTITY,
    checkpoint='runs/a',
    commit='c0ffee',
  )
  return files.manifest(given or sets(), config(), **fields | kw)


def test_a_manifest_says_what_was_evaluated(tmp_path):
  made = manifest()
  (tmp_path / 'm.json').write_text(json.dumps(made))
  assert files.read_manifest(tmp_path / 'm.json') == made  # plain JSON
  assert made['sets']['a']['ids'] == ['q4', 'q9']
  assert made['corpus'] == IDENTITY['corpus']
  assert made['index'] == {'index': {'kind': 'bm25'}}
  assert made['sampling'] == {
    'n': 3,
    'temperature': 1.0,
    'top_p': 1.0,
    'seed': 0,
    'match': 'text',
  }
  assert made['source'] == 'service'
  assert made['judge'] == {'url': '', 'model': ''}
  assert (
    made['template'] != manifest(template=prompts.load('search_r1'))['template']
  )
  assert 'corpus' in IDENTITY  # the caller's own is left alone


def test_exactly_the_questions_of_a_manifest_are_evaluated():
  made = manifest({'b': sets()['b'][1:3]})
  found = files.frozen(sets(), made, 'm.json')
  assert {k: [q.id for q in v] for k, v in found.items()} == {'b': ['q0', 'q1']}
  assert manifest(found)['sets'] == made['sets']


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda s: {'a': s['a']}, "m.json .*'b'"),
    (lambda s: s | {'a': s['a'][:1]}, "'a', 1 of 2 .*'q9'"),
    (
      lambda s: s | {'a': [s['a'][0], Question('q9', 'number 9', ('no',))]},
      "'a', 0 of 2 ",
    ),
  ],
)
def test_other_questions_than_the_manifests_are_refused(change, message):
  with pytest.raises(DataError, match=message):
    files.frozen(change(sets()), manifest(), 'm.json')


def test_another_corpus_is_refused_and_both_are_named(caplog):
  files.check_corpus(manifest(), IDENTITY, 'm.json')
  assert not caplog.records
  other = {'corpus': {'count': 3, 'sha256': 'cd'}}
  with pytest.raises(DataError, match="'ab'.*'cd'"):
    files.check_corpus(manifest(), other, 'm.json')
  files.check_corpus(manifest(), {}, 'm.json')
  assert 'm.json' in caplog.text


def test_rows_come_back_as_they_were(tmp_path):
  found = evaluator(config()).collect(0)
  assert any(row.failed for row in found.rows)
  files.write_rows(tmp_path, {'eval': found, 'no_search': found})
  lines = (tmp_path / 'rows.jsonl').read_text().splitlines()
  assert len(lines) == 36 and 'NaN' not in lines[-1]
  back = files.read_rows(tmp_path, 'no_search')
  assert list(map(repr, back)) == list(map(repr, found.rows))  # NaN too
  with pytest.raises(DataError, match="'shuffled'.*'no_search'"):
    files.read_rows(tmp_path, 'shuffled')


def test_rows_of_before_a_score_are_read(tmp_path):
  found = evaluator(config()).collect(0)
  files.write_rows(tmp_path, {'eval': found})
  path = tmp_path / 'rows.jsonl'
  lines = [json.loads(x) for x in path.read_text().splitlines()]
  for line in lines:
    del line['f1']
  path.write_text(''.join(json.dumps(x) + '\n' for x in lines))
  for row, before in zip(files.read_rows(tmp_path), found.rows, strict=True):
    assert math.isnan(row.f1)
    assert row.em == before.em or row.failed


def test_damaged_files_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='rows.jsonl'):
    files.read_rows(tmp_path)
  (tmp_path / 'rows.jsonl').write_text('{"evaluation": "eval", "em": 1}\n')
  with pytest.raises(DataError, match='rows.jsonl:1'):
    files.read_rows(tmp_path)
  with pytest.raises(FileNotFoundError, match='manifest.json'):
    files.read_manifest(tmp_path / 'manifest.json')
  for text in ('[]', '{"sets": {}}', '{'):
    (tmp_path / 'manifest.json').write_text(text)
    with pytest.raises(DataError, match='manifest.json'):
      files.read_manifest(tmp_path / 'manifest.json')


def test_every_token_and_query_is_accounted_for():
  found = evaluator(config()).collect(0)
  values = dict(files.costs(found, 'eval'))
  flat = [t for group in found.groups for t in group]
  kinds = ('sampled', 'prompt', 'observation')
  assert sum(values[f'eval/cost/{k}_tokens'] for k in kinds) == sum(
    map(len, flat)
  )
  rows = [r for r in found.rows if not r.failed]
  failed = [t for t in flat if t.failed]
  assert values['eval/cost/sampled_tokens'] == sum(
    r.tokens for r in rows
  ) + sum(
    len(s.ids) for t in failed for s in t.segments if s.author == 'policy'
  )
  # q9 alone searches; its searches fail, and were asked all the same.
  assert values['eval/cost/searches'] == 3 == len(failed)
  assert values['eval/set=a/cost/searches'] == 3
  assert values['eval/set=b/cost/searches'] == 0
  for what in ('searches', 'trajectories', 'sampled_tokens'):
    assert values[f'eval/cost/{what}'] == sum(
      values[f'eval/set={s}/cost/{what}'] for s in 'ab'
    )


def test_an_observation_is_no_part_of_the_prompt():
  turns = ('<search>ann</search>', '<answer>Ann</answer>')
  trajectory = run_script(turns, env=ENV, question=question())
  found = grading.Evaluation(
    [(trajectory,)], grading.score([trajectory], ENV, 'a'), [], 0.0
  )
  values = dict(files.costs(found, 'eval'))
  prompt, *_ = trajectory.segments
  # One token a byte.
  assert values['eval/cost/sampled_tokens'] == sum(map(len, turns))
  assert values['eval/cost/prompt_tokens'] == len(prompt.ids)
  assert values['eval/cost/observation_tokens'] > len('id-ann')
  assert values['eval/cost/searches'] == 1


def test_costs_of_one_set_are_not_repeated():
  found = evaluator(config(), {'b': sets()['b']}).collect(0)
  assert not any('=' in name for name, _ in files.costs(found, 'eval'))
  assert isinstance(found, grading.Evaluation) and found.seconds > 0
