"""JSON lines in four layouts, and everything that can be wrong with them."""

import bz2
import gzip
import json
import lzma
import math

import pytest

from searchrl_jax.data import jsonl
from searchrl_jax.data.checks import DataError
from tests.conftest import shared_data

FLASHRAG = {
  'id': 'test_0',
  'question': 'who wrote it ',
  'golden_answers': ['Ann', 'A'],
  'metadata': {'level': 'hard'},
}
OURS = {
  'id': 'nq_1',
  'question': 'when',
  'golden_answers': ['1900'],
  'supporting_ids': ['7', '9'],
  'source': 'nq',
  'hops': 2,
  'split': 'dev',
}


def write(path, *rows):
  path.write_text(
    ''.join((r if isinstance(r, str) else json.dumps(r)) + '\n' for r in rows)
  )
  return str(path)


def test_flashrag_and_our_fields(tmp_path):
  a, b = jsonl.load(write(tmp_path / 'x.jsonl', FLASHRAG, '', OURS))
  assert (a.id, a.text, a.answers) == ('test_0', 'who wrote it', ('Ann', 'A'))
  assert a.meta == {'level': 'hard'} and a.messages == ()
  assert (b.supporting, b.source, b.hops) == (('7', '9'), 'nq', 2)
  assert b.meta == {'split': 'dev'}


def test_gzip_is_told_by_content_and_arrays_load(tmp_path):
  plain = jsonl.load(write(tmp_path / 'x.jsonl', FLASHRAG, OURS))
  named_wrong = tmp_path / 'y.jsonl'
  named_wrong.write_bytes(gzip.compress((tmp_path / 'x.jsonl').read_bytes()))
  array = write(tmp_path / 'z.json', json.dumps([FLASHRAG, OURS]))
  assert jsonl.load(str(named_wrong)) == plain == jsonl.load(array)


def test_lists_that_a_table_wrote_as_text(tmp_path):
  rows = [
    {'id': '1', 'question': 'q', 'golden_answers': '["a", "b"]'},
    {'id': '2', 'question': 'q', 'answers': "['a', 'b']"},
    {'id': '3', 'question': 'q', 'answer': '[-2, 7]'},  # one answer
    {'id': '4', 'question': 'q', 'golden_answers': [1995.0]},
    {'id': '5', 'question': 'q', 'metadata': '{"level": "hard"}'},
  ]
  found = jsonl.load(write(tmp_path / 'x.jsonl', *rows))
  assert [q.answers for q in found] == [
    ('a', 'b'), ('a', 'b'), ('[-2, 7]',), ('1995',), (),
  ]  # fmt: skip
  assert found[-1].meta == {'level': 'hard'}


def test_of_several_columns_of_answers_the_empty_ones_do_not_count(tmp_path):
  """As merged sets have them."""
  asked = {'question': 'q', 'answer': 'Paris'}
  rows = [
    {'id': '1', 'golden_answers': None, **asked},
    {'id': '2', 'golden_answers': [], 'answers': '', **asked},
    {'id': '3', 'golden_answers': ['Lutetia'], **asked},
    {'id': '4', 'question': 'q', 'golden_answers': []},
  ]
  found = jsonl.load(write(tmp_path / 'x.jsonl', *rows))
  assert [q.answers for q in found] == [
    ('Paris',), ('Paris',), ('Lutetia',), (),
  ]  # fmt: skip


def test_line_separators_inside_strings(tmp_path):
  odd = {**FLASHRAG, 'question': 'a\u2028b\x85c'}
  path = tmp_path / 'x.jsonl'
  path.write_text(json.dumps(odd, ensure_ascii=False) + '\r\n')
  assert jsonl.load(str(path))[0].text == 'a\u2028b\x85c'


@pytest.mark.parametrize(
  'bad, says',
  [
    ('{"id": "1", ', r'x\.jsonl:2.*jq -c'),
    ('[1, ', r'x\.jsonl:2.*\(.*\)$'),
    ('id,question', r'x\.jsonl:2.*read_csv'),
    ('version https://git-lfs.github.com/spec/v1', 'x.jsonl:2:.*git lfs pull'),
    ('[1]', r'x\.jsonl:2.*list'),
    ({'id': '1'}, r"x\.jsonl:2.*'question'.*'id'"),
    ({'question': 'q'}, r"x\.jsonl:2.*'id'"),
    ({'id': '1', 'question': ' '}, r"x\.jsonl:2.*'1'.*text"),
    ({'id': '1', 'question': 5}, r"x\.jsonl:2.*'1'.*text"),
    ({'id': True, 'question': 'q'}, r'x\.jsonl:2.*id.*True'),
    ({'id': '', 'question': 'q'}, r"x\.jsonl:2.*id.*''"),
    (
      {**FLASHRAG, 'id': '1', 'golden_answers': {'a': 1}},
      r"x\.jsonl:2.*answers.*'1'",
    ),
    (
      {**FLASHRAG, 'id': '1', 'golden_answers': [{'answer': 'x'}]},
      r"x\.jsonl:2.*answers.*'1'",
    ),
    (
      {**FLASHRAG, 'id': '1', 'golden_answers': [math.nan]},
      r"x\.jsonl:2.*answers.*'1'.*nan",
    ),
    (
      {**FLASHRAG, 'id': '1', 'golden_answers': "['a' 'b']"},
      r"x\.jsonl:2.*answers.*'1'",
    ),
    ({**FLASHRAG, 'id': '1', 'metadata': 'x'}, r'x\.jsonl:2.*metadata'),
    ({**FLASHRAG, 'id': '1', 'hops': 'two'}, r'x\.jsonl:2.*hops'),
    (FLASHRAG, r"x\.jsonl:2.*'test_0'.*x\.jsonl:1"),
  ],
)
def test_bad_lines_name_file_and_line(tmp_path, bad, says):
  with pytest.raises(DataError, match=says):
    jsonl.load(write(tmp_path / 'x.jsonl', FLASHRAG, bad))


def test_bad_files(tmp_path):
  with pytest.raises(DataError, match='none.jsonl'):
    jsonl.load(str(tmp_path / 'none.jsonl'))
  with pytest.raises(DataError, match='e.jsonl.*question'):
    jsonl.load(write(tmp_path / 'e.jsonl'))
  cut = tmp_path / 'cut.jsonl.gz'
  cut.write_bytes(gzip.compress(json.dumps(OURS).encode())[:-9])
  with pytest.raises(DataError, match='cut.jsonl.gz.*end-of-stream'):
    jsonl.load(str(cut))
  latin = tmp_path / 'latin.jsonl'
  latin.write_bytes(b'{"id": "1", "question": "caf\xe9"}\n')
  with pytest.raises(DataError, match=r'latin\.jsonl:1.*UTF-8'):
    jsonl.load(str(latin))
  latin.write_bytes(b'PK\x03\x04\x14\0\0\0')
  with pytest.raises(DataError, match=r'latin\.jsonl:1.*unpack'):
    jsonl.load(str(latin))


def legacy(data):
  return lzma.compress(data, lzma.FORMAT_ALONE)


@pytest.mark.parametrize(
  'pack, encoding',
  [(bz2.compress, 'utf-8'), (lzma.compress, 'utf-16'), (legacy, 'utf-8')],
)
def test_packed_files_and_utf_16(tmp_path, pack, encoding):
  path = tmp_path / 'x'
  path.write_bytes(pack(f'{json.dumps(OURS)}\n'.encode(encoding)))
  (found,) = jsonl.load(str(path))
  assert found.text == OURS['question']


def test_filters(tmp_path):
  rows = [
    {**OURS, 'id': str(i), 'source': s, 'hops': h, 'split': p}
    for i, (s, h, p) in enumerate(
      [('nq_a', 1, 'dev'), ('nq_b', 1, 'train'), ('hotpot', 2, 'dev')]
    )
  ]
  path = write(tmp_path / 'x.jsonl', *rows)
  found = lambda **kw: [q.id for q in jsonl.load(path, **kw)]
  assert found(source='nq*') == ['0', '1']
  assert found(source='hotpot') == ['2']
  assert found(hops=1, split='dev') == ['0']
  assert len(found(n=2, seed=1)) == 2
  # Each source counts from 0: ids differ among those that a filter leaves.
  same = write(tmp_path / 'y.jsonl', *({**row, 'id': '0'} for row in rows))
  (q,) = jsonl.load(same, source='hotpot')
  assert (q.id, q.source) == ('0', 'hotpot')
  with pytest.raises(DataError, match=r"y\.jsonl:2: id '0' .*y\.jsonl:1$"):
    jsonl.load(same, source='nq*')
  for kw, says in (
    ({'source': 'hotpt'}, "'hotpt'.*'hotpot'"),
    ({'hops': 3}, r'hops=3.*1, 2'),
    ({'split': 'deb'}, "'deb'.*'dev'"),
    ({'n': -1}, 'n=-1'),
  ):
    with pytest.raises(DataError, match=says):
      found(**kw)


HOTPOT = {
  '_id': 'h',
  'question': 'q',
  'answer': 'yes',
  'type': 'bridge',
  'supporting_facts': [['T', 0], ['T', 2], ['U', 1]],
  'context': [],
}
MUSIQUE = {
  'id': '3hop1__1_2_3',
  'question': 'q',
  'answer': 'A',
  'answer_aliases': ['B'],
  'answerable': True,
  'paragraphs': [
    {'title': 'T', 'is_supporting': True},
    {'title': 'U', 'is_supporting': False},
  ],
}


def test_multihop_layouts(tmp_path):
  (q,) = jsonl.load(
    write(tmp_path / 'h.json', json.dumps([HOTPOT])), layout='hotpotqa'
  )
  assert (q.id, q.answers, q.hops) == ('h', ('yes',), 2)
  assert q.meta['supporting_titles'] == ['T', 'U']
  two = {**HOTPOT, 'type': 'bridge_comparison'}
  (q,) = jsonl.load(write(tmp_path / 'w.jsonl', two), layout='2wiki')
  assert (q.source, q.hops) == ('2wikimultihopqa', 4)
  (q,) = jsonl.load(write(tmp_path / 'm.jsonl', MUSIQUE), layout='musique')
  assert (q.answers, q.hops) == (('A', 'B'), 3)
  assert q.meta['supporting_titles'] == ['T']
  with pytest.raises(DataError, match=r"m\.jsonl:1.*'_id'"):
    jsonl.load(str(tmp_path / 'm.jsonl'), layout='hotpotqa')


@pytest.mark.parametrize('form', [json.dumps, lambda facts: facts])
@pytest.mark.parametrize(
  'facts',
  [
    HOTPOT['supporting_facts'],
    {'title': ['T', 'T', 'U'], 'sent_id': [0, 2, 1]},  # `datasets` has these
  ],
)
def test_forms_of_supporting_facts(tmp_path, facts, form):
  row = HOTPOT | {'supporting_facts': form(facts)}
  for layout in ('hotpotqa', '2wiki'):
    (q,) = jsonl.load(write(tmp_path / 'x.jsonl', row), layout=layout)
    assert q.meta['supporting_titles'] == ['T', 'U']


def test_paragraphs_that_a_table_wrote_as_text(tmp_path):
  row = MUSIQUE | {'paragraphs': json.dumps(MUSIQUE['paragraphs'])}
  (q,) = jsonl.load(write(tmp_path / 'x.jsonl', row), layout='musique')
  assert q.meta['supporting_titles'] == ['T']


@pytest.mark.parametrize(
  'layout, field, value',
  [
    *(
      ('hotpotqa', 'supporting_facts', value)
      for value in (5, 'T', ['T'], [['T']], '[["T", 0]', {'sent_id': [0]})
    ),
    *(
      ('musique', 'paragraphs', value)
      for value in (5, 'T', ['T'], [{'is_supporting': True}], {'title': ['T']})
    ),
  ],
)
def test_supporting_texts_of_another_form_are_named(
  tmp_path, layout, field, value
):
  row = {'hotpotqa': HOTPOT, 'musique': MUSIQUE}[layout] | {field: value}
  name = field.removesuffix('s')  # also of one of them
  with pytest.raises(DataError, match=rf'x\.jsonl:1: .*{name}'):
    jsonl.load(write(tmp_path / 'x.jsonl', row), layout=layout)


@pytest.mark.skipif(shared_data() is None, reason='no real data at hand')
@pytest.mark.parametrize(
  'name, layout, count',
  [
    ('qa_train.jsonl.gz', 'flashrag', 7347),
    ('qa_dev.jsonl.gz', 'flashrag', 1247),
    ('bamboogle_test.jsonl', 'flashrag', 125),
    ('popqa_test_1000.jsonl', 'flashrag', 1000),
    ('multihop/hotpotqa_dev_200_distractor.json', 'hotpotqa', 200),
    ('multihop/2wikimultihopqa_dev_200.json', '2wiki', 200),
    ('multihop/musique_dev_200.json', 'musique', 200),
  ],
)
def test_real_files(name, layout, count):
  found = jsonl.load(str(shared_data() / name), layout=layout)
  assert len(found) == count and all(q.answers for q in found)


TTRL = (
  {
    'prompt': 'What is $1+1$? ',
    'answer': r'\frac{14}{3}',
    'source': 'math',
    'id': 'test/algebra/1.json',
  },  # MATH-500
  {'prompt': 'Find n.', 'answer': '033', 'source': 'AIME2024', 'id': 60},
  {'prompt': 'Find m.', 'answer': 142.0, 'source': 'AMC', 'id': '0'},
  {'prompt': 'Which? A) x B) y', 'answer': 'B', 'source': 'gpqa', 'id': 'g'},
  {
    'prompt': 'And?',
    'unique_id': 'test/geometry/2.json',
    'subject': 'g',
    'solution': r'$\boxed{1}$, so \boxed{\frac12}.',
  },  # MATH-L1 to L5
)


def test_ttrls_json_is_read_unchanged(tmp_path):
  path = write(tmp_path / 'test.json', json.dumps(list(TTRL)))
  found = jsonl.load(path, layout='ttrl')
  assert [(q.id, q.source, q.answers) for q in found] == [
    ('test/algebra/1.json', 'math', (r'\frac{14}{3}',)),
    ('60', 'AIME2024', ('033',)),
    ('0', 'AMC', ('142',)),
    ('g', 'gpqa', ('B',)),
    ('test/geometry/2.json', '', (r'\frac12',)),
  ]
  assert found[0].text == 'What is $1+1$?'
  # As they are, their prompts are a chat of one message.
  assert found[0].messages == ({'role': 'user', 'content': TTRL[0]['prompt']},)
  bare = {k: v for k, v in TTRL[0].items() if k != 'answer'}
  (q,) = jsonl.load(write(tmp_path / 'x.jsonl', bare), layout='ttrl')
  assert q.answers == ()  # votes need none


@pytest.mark.parametrize('lacking', ['id', 'prompt'])
def test_ttrls_json_without_a_field_names_it(tmp_path, lacking):
  record = {k: v for k, v in TTRL[0].items() if k != lacking}
  named = {'id': 'unique_id'}.get(lacking, lacking)
  with pytest.raises(DataError, match=rf"x\.jsonl:1.*'{named}'"):
    jsonl.load(write(tmp_path / 'x.jsonl', record), layout='ttrl')


def test_math_500_as_ttrl_has_it(data_dir):
  found = jsonl.load(str(data_dir / 'math500.json'), layout='ttrl')
  assert len(found) == 500
  assert found[0].answers == (r'\left( 3, \frac{\pi}{2} \right)',)


SSP = {
  'ground_truth': 'Otto Hahn',
  'search_turns': 3,
  'sys_question_example': '1. Who? {a}\n2. <search> What?',
}


def test_answers_to_ask_about_are_read_as_ssp_has_them(tmp_path):
  lists = SSP | {
    'ground_truth': ['Hahn', 'Otto Hahn'],
    'search_turns': '2',
    'sys_question_example': ['Who?', 'What?'],
  }
  path = write(tmp_path / '7.jsonl', SSP, '', lists)
  a, b = jsonl.load(path, layout='ssp')
  assert (a.text, a.answers) == ('Otto Hahn', ('Otto Hahn',))
  assert a.meta == {'search_turns': 3, 'examples': SSP['sys_question_example']}
  assert (b.text, b.answers) == ('Hahn', ('Hahn', 'Otto Hahn'))
  assert b.meta == {'search_turns': '2', 'examples': 'Who?\nWhat?'}
  assert (a.id, b.id) == ('ssp-1', 'ssp-3')  # their lines


@pytest.mark.parametrize(
  'changed, says',
  [
    ({'ground_truth': None}, "no 'ground_truth'"),
    ({'ground_truth': []}, 'text'),
    ({'ground_truth': ' '}, 'text'),
    ({'search_turns': None}, "no 'search_turns'"),
    ({'search_turns': 0}, 'search_turns=0'),
    ({'search_turns': 'three'}, "search_turns='three'"),
    ({'search_turns': [3]}, 'search_turns=.3.'),
    ({'search_turns': True}, 'search_turns=True'),
  ],
)
def test_an_answer_that_is_absent_is_an_error(tmp_path, changed, says):
  path = write(tmp_path / 'x.jsonl', SSP | changed)
  with pytest.raises(DataError, match=f'x.jsonl:1.*{says}'):
    jsonl.load(path, layout='ssp')
