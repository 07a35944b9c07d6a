"""The seven sets, in every layout, are the same questions."""

import json

import grain
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs import seven
from searchrl_jax import schema
from searchrl_jax.data import core, jsonl
from tests.conftest import shared_data
from tests.data import array_records
from tests.test_commands import command


def facts(*titles):
  return {'title': list(titles), 'sent_id': [0] * len(titles)}


CONTEXT = {'title': ['A', 'B'], 'sentences': [['x' * 200], ['y' * 200]]}


def step(i):
  return {
    'id': i,
    'question': f'step {i}',
    'answer': 'a',
    'support_paragraph': {'title': 'T', 'paragraph_text': 'z' * 200},
  }


# What each set's FlashRAG records hold beside id, question, golden_answers.
METADATA = {
  'nq': [None, None],
  'triviaqa': [None, None],
  'popqa': [{'subj': 'S', 'prop': 'capital', 's_pop': 7}] * 2,
  'hotpotqa': [
    {
      'type': kind,
      'level': 'hard',
      'supporting_facts': facts('A', 'A', 'B'),
      'context': CONTEXT,
    }
    for kind in ('bridge', 'comparison')
  ],
  '2wikimultihopqa': [
    {
      'type': kind,
      'supporting_facts': facts('A', 'B'),
      'evidences': {'fact': ['A'], 'relation': ['r'], 'entity': ['B']},
      'context': CONTEXT,
    }
    for kind in ('compositional', 'bridge_comparison')
  ],
  'musique': [
    {'question_decomposition': [step(i) for i in range(n)]} for n in (2, 3)
  ],
  'bamboogle': [None, None],
}
HOPS = {'hotpotqa': [2, 2], '2wikimultihopqa': [2, 4], 'musique': [2, 3]}


def written(name):
  split = seven.SPLITS[name][-1]
  out = []
  for i, metadata in enumerate(METADATA[name]):
    record = {
      'id': f'{split}_{i}',
      'question': f'what {name} {i}?',
      'golden_answers': [f'{name} {i}', 'é'],
    }
    out.append(record | ({'metadata': metadata} if metadata else {}))
  return out


def real(name, folder):
  """Real records as FlashRAG has them; None where there are none at hand."""
  if name == 'bamboogle':
    return read(folder / 'bamboogle_test.jsonl')
  if name == 'popqa':
    return read(folder / 'popqa_test_1000.jsonl')
  if name == 'nq':
    records = [
      r
      for _, r in jsonl.read(str(folder / 'qa_dev.jsonl.gz'))
      if r['source'].startswith('nq')
    ]
    return [
      {
        'id': f'test_{i}',
        'question': r['question'],
        'golden_answers': r['golden_answers'],
      }
      for i, r in enumerate(records[:20])
    ]
  if name == 'triviaqa':
    return None
  file = {'hotpotqa': 'hotpotqa_dev_200_distractor'}.get(
    name, f'{name}_dev_200'
  )
  out = []
  for i, r in enumerate(read(folder / f'multihop/{file}.json')):
    if name == 'musique':
      metadata = {'question_decomposition': r['question_decomposition']}
    else:
      titles, sentences = zip(*r['supporting_facts'], strict=True)
      metadata = {
        'type': r['type'],
        'supporting_facts': {'title': list(titles), 'sent_id': list(sentences)},
      }
    out.append(
      {
        'id': f'dev_{i}',
        'question': r['question'],
        'golden_answers': [r['answer']],
        'metadata': metadata,
      }
    )
  return out


def read(path):
  return [r for _, r in jsonl.read(str(path))][:20]


def lay_out(folder, records):
  """Writes all sets as FlashRAG, Search-R1 and TFDS would; data.dir."""
  rows = []
  for name, found in records.items():
    split = seven.SPLITS[name][-1]
    (folder / name).mkdir()
    path = folder / name / f'{split}.jsonl'
    path.write_text(''.join(json.dumps(r) + '\n' for r in found))
    array_records.build(path, folder / 'arrays', name=name, split=split)
    rows += [
      r
      | {
        'data_source': name,
        'ability': 'fact-reasoning',
        'prompt': [{'role': 'user', 'content': f'Search. {r["question"]}'}],
        'reward_model': {
          'style': 'rule',
          'ground_truth': {'target': r['golden_answers']},
        },
        'extra_info': {'split': split, 'index': i},
      }
      for i, r in enumerate(found)
    ]
  # One schema over all sets, absent fields null, as `datasets` merges them.
  (folder / 'merged').mkdir()
  pq.write_table(
    pa.Table.from_pylist(
      [dict.fromkeys(rows[3]) | {'metadata': None} | r for r in rows]
    ),
    folder / 'merged/test.parquet',
  )
  return folder


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  records = {name: written(name) for name in seven.SPLITS}
  return lay_out(tmp_path_factory.mktemp('seven'), records)


def load(folder, layout, prompt='template', **kw):
  c = schema.base()
  c.data.dir, c.data.prompt = str(folder), prompt
  where = {'search_r1': 'merged/', 'tfds': 'arrays/'}.get(layout, '')
  return core.load_sets(seven.sets(layout, folder=where, **kw), c.data)


def bare(questions):
  return [(q.text, q.answers, q.hops) for q in questions]


def key(name):
  return {'2wikimultihopqa': 'two_wiki'}.get(name, name)


def same(folder):
  """All layouts hold the same questions; returns FlashRAG's."""
  found = load(folder, 'flashrag')
  assert sorted(found) == sorted(map(key, seven.SPLITS))
  for layout in ('search_r1', 'tfds'):
    other = load(folder, layout)
    assert {k: bare(v) for k, v in other.items()} == {
      k: bare(v) for k, v in found.items()
    }, layout
  return found


def test_seven_sets_in_three_layouts(folder):
  found = same(folder)
  for name in seven.SPLITS:
    questions = found[key(name)]
    assert [q.text for q in questions] == [f'what {name} {i}?' for i in (0, 1)]
    assert [q.answers for q in questions] == [
      (f'{name} {i}', 'é') for i in (0, 1)
    ]
    assert [q.hops for q in questions] == HOPS.get(name, [0, 0])
    assert {q.source for q in questions} == {key(name)}


def test_passages_stay_out_of_what_a_trajectory_logs(folder):
  for layout in ('flashrag', 'search_r1'):
    for questions in load(folder, layout).values():
      assert all(len(json.dumps(dict(q.meta))) < 300 for q in questions)
  assert load(folder, 'flashrag')['popqa'][0].meta['s_pop'] == 7


def test_search_r1s_own_prompts_are_kept(folder):
  found = load(folder, 'search_r1', prompt='as_is')
  for name in seven.SPLITS:
    q, _ = found[key(name)]
    assert (q.source, q.id) == (name, f'{name}/{seven.SPLITS[name][-1]}_0')
    assert q.messages == (
      {'role': 'user', 'content': f'Search. what {name} 0?'},
    )


@pytest.mark.skipif(shared_data() is None, reason='no real data at hand')
def test_real_records_in_three_layouts(tmp_path):
  records = {
    name: real(name, shared_data()) or written(name) for name in seven.SPLITS
  }
  found = same(lay_out(tmp_path, records))
  for name in seven.SPLITS:
    assert [q.text for q in found[key(name)]] == [
      r['question'].strip() for r in records[name]
    ]
    assert all(q.answers for q in found[key(name)])
  assert {q.hops for q in found['hotpotqa']} == {2}
  assert {q.hops for q in found['two_wiki']} <= {2, 4}
  assert {q.hops for q in found['musique']} <= {2, 3, 4}


def test_grain_reads_the_array_records(folder):
  import tensorflow_datasets

  builder = tensorflow_datasets.builder_from_directory(
    str(folder / 'arrays/musique/1.0.0')
  )
  rows = grain.MapDataset.source(builder.as_data_source('dev'))
  rows = rows.seed(0).shuffle().repeat(2)
  assert len(rows) == 4
  assert {rows[i]['question'].decode() for i in range(2)} == {
    'what musique 0?',
    'what musique 1?',
  }
  c = schema.base()
  c.data.dir = str(folder)
  c.data.train = seven.sets('tfds', folder='arrays/')
  drawn = core.open_stream(c.data, seed=0).next(14)
  assert len({q.id for q in drawn}) == 14


def test_splits_and_numbers():
  assert set(seven.sets('flashrag', 'train')) == {
    'nq',
    'triviaqa',
    'hotpotqa',
    'two_wiki',
    'musique',
  }
  assert seven.sets('search_r1', 'train')['nq'].path == 'train.parquet'
  assert seven.sets('hub', 'dev', names=('musique',))['musique'].path == (
    'hf://datasets/RUC-NLPIR/FlashRAG_datasets/musique/dev.jsonl'
  )
  with pytest.raises(ValueError, match='flashrag, hub'):
    seven.sets('flash')
  with pytest.raises(ValueError, match='bamboogle'):
    seven.sets('flashrag', 'train', names=('bamboogle',))
  # Its file test.parquet has the last split of each set: of NQ, no dev.
  found = seven.sets('search_r1', 'dev')
  assert set(found) == {'hotpotqa', 'two_wiki', 'musique'}
  # Bamboogle has no more.
  drawn = seven.get_config('n=500').data.eval
  assert {name: x.n for name, x in drawn.items()} == (
    dict.fromkeys(map(key, seven.SPLITS), 500) | {'bamboogle': 125}
  )
  c = seven.get_config('layout=tfds,n=5')
  assert {s.n for s in c.data.eval.values()} == {5}


@pytest.mark.parametrize('absent', map(key, seven.SPLITS))
def test_a_flag_reaches_every_set(tmp_path, absent):
  paths = {}
  for name in map(key, seven.SPLITS):
    paths[name] = tmp_path / f'my_{name}.jsonl'
    if name != absent:
      paths[name].write_text('{"id": "a", "question": "who?"}\n')
  _, err = command(
    'evaluate',
    '--config=configs/seven.py',
    f'--out={tmp_path / "o"}',
    *(f'--config.data.eval.{k}.path={v}' for k, v in paths.items()),
    status=2,
  )
  assert f'my_{absent}.jsonl' in err


def test_hops_choose_questions_of_a_parquet(folder):
  c = schema.base()
  c.data.dir = str(folder)
  sets = seven.sets('search_r1', folder='merged/', names=('musique',))
  sets.musique.hops = 3
  [q] = core.load_sets(sets, c.data)['musique']
  assert q.text == 'what musique 1?'
