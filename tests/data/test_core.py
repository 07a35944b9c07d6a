"""Sets, paths, ids, the stream."""

import json
import math

import hypothesis
import hypothesis.strategies as st
from ml_collections import ConfigDict
import numpy as np
import pytest

from searchrl_jax import schema
from searchrl_jax.data import checks, core
from searchrl_jax.types import Passage, Question
from searchrl_jax.worlds import microworld

pytestmark = pytest.mark.slow


def data_config(**fields):
  data = schema.base().data
  data.update(fields)
  return data


def questions(*ids):
  return [Question(i, f'what is {i}?') for i in ids]


def write(path, *rows):
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
  return str(path)


def row(i, **more):
  return {'id': i, 'question': f'q {i}', 'golden_answers': ['a'], **more}


def ids(found):
  return [q.id for q in found]


# -- sets -------------------------------------------------------------------


def test_sets_load_by_module_and_field(tmp_path):
  write(tmp_path / 'a.jsonl', row('1', hops=1), row('2', hops=2))
  data = data_config(dir=str(tmp_path))
  data.train = ConfigDict(
    {'a': {'module': 'jsonl', 'path': 'a.jsonl', 'hops': 2}}
  )
  found = core.load_sets(data.train, data)
  assert ids(found['a']) == ['2']
  assert found['a'][0].source == 'a'  # the file names none


def test_a_set_of_the_world_that_is_served_has_its_size():
  data = data_config(world_module='searchrl_jax.worlds.microworld')
  data.world = ConfigDict({'train': 40, 'heldout': 40})
  module = data.world_module
  sets = {name: {'module': module, 'split': name} for name in data.world}
  found = core.load_sets(sets, data)
  world = microworld.generate(data.world_seed, **data.world)
  for name, questions in found.items():
    assert {q.id for q in questions} <= {q.id for q in world.questions[name]}
  sets['train']['train'] = 60  # its own field takes precedence
  assert len(core.load_sets(sets, data)['train']) > len(found['train'])


def test_an_id_of_two_sets_gets_the_sets_name(tmp_path):
  """Search-R1 groups by `index`, which collides when sets are merged."""
  write(tmp_path / 'a.jsonl', row('train_0'), row('train_1'))
  write(tmp_path / 'b.jsonl', row('train_0'), row('train_2'))
  sets = {n: {'module': 'jsonl', 'path': f'{n}.jsonl'} for n in ('a', 'b')}
  found = core.load_sets(sets, data_config(dir=str(tmp_path)))
  assert ids(found['a']) == ['a/train_0', 'train_1']
  assert ids(found['b']) == ['b/train_0', 'train_2']


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'module': 'jsonl', 'pth': 'a'}, "'pth'.*'path'"),
    ({'module': 'jsnl'}, "'jsnl'.*'jsonl'"),
    ({'path': 'a'}, 'field module'),
    ({'module': 'jsonl'}, "'jsonl'.*'path'"),
    ({'module': 'jsonl', 'path': 'none.jsonl'}, 'none.jsonl'),
    ({'module': 'parquet', 'path': 'lfs.parquet'}, 'LFS'),
    ({'module': 'jsonl', 'path': 'a.jsonl', 'layout': 'flash'}, 'flashrag'),
    ({'module': 'jsonl', 'path': 'a.jsonl', 'n': 9}, 'n=9'),
    ({'module': 'jsonl', 'path': 'a.jsonl', 'source': 'x'}, "source='x'"),
  ],
)
def test_a_bad_set_names_the_fix(tmp_path, fields, says):
  write(tmp_path / 'a.jsonl', row('1', source='nq'))
  pointer = 'version https://git-lfs.github.com/spec/v1\n'
  (tmp_path / 'lfs.parquet').write_text(pointer)
  with pytest.raises(ValueError, match=says):
    core.load_sets({'s': fields}, data_config(dir=str(tmp_path)))


def test_no_set():
  with pytest.raises(core.DataError, match='config.data.train'):
    core.load_sets({}, data_config())


def test_as_is_needs_messages(tmp_path):
  write(tmp_path / 'a.jsonl', row('1'))
  sets = {'s': {'module': 'jsonl', 'path': 'a.jsonl'}}
  with pytest.raises(core.DataError, match=r"\['1'\]"):
    core.load_sets(sets, data_config(dir=str(tmp_path), prompt='as_is'))


# -- paths ------------------------------------------------------------------


def test_data_dir_order(tmp_path, monkeypatch):
  first, second, third = (tmp_path / n for n in '123')
  for folder in (first, second, third):
    folder.mkdir()
  monkeypatch.setattr(core, 'SHARED', third)
  monkeypatch.setenv('SEARCHRL_DATA', str(second))
  assert core.data_dir(data_config(dir=str(first))) == str(first)
  assert core.data_dir(data_config()) == str(second)
  monkeypatch.delenv('SEARCHRL_DATA')
  assert core.data_dir(data_config()) == str(third)
  third.rmdir()
  assert core.data_dir(data_config()) == ''
  with pytest.raises(core.DataError, match='SEARCHRL_DATA'):
    core.resolve('x.jsonl', data_config())
  with pytest.raises(core.DataError, match='config.data.dir'):
    core.data_dir(data_config(dir=str(third)))


def test_hub_path_errors_name_the_mirror(monkeypatch):
  with pytest.raises(core.DataError, match='OWNER/NAME/FILE'):
    core.resolve('hf://datasets/a/b', data_config())
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
  with pytest.raises(core.DataError, match='HF_ENDPOINT'):
    core.resolve('hf://datasets/no/such/train.parquet', data_config())


# -- checks -----------------------------------------------------------------


@pytest.mark.parametrize(
  'value, want',
  [
    (None, ()),
    ('a', ('a',)),
    (['a', 'b'], ('a', 'b')),
    ((), ()),
    (np.array(['a', 'b']), ('a', 'b')),
    (np.array(['a'], object), ('a',)),
    ([1, 2.5], ('1', '2.5')),
    ([1995.0, np.float32(7), -0.0], ('1995', '7', '0')),
    # Lists as the text that a table has of them.
    ('["a", "b\'s"]', ('a', "b's")),
    (" ['a', \"b's\", 1995.0]\n", ('a', "b's", '1995')),
    ("('a', 'b')", ('a', 'b')),
    ('[1995, 2.5]', ('1995', '2.5')),
    ('[]', ()),
    (['["a", "b"]', 'c'], ('a', 'b', 'c')),
    ("['a','b',]", ('a', 'b')),
    (r"['it\'s', 1.50]", ("it's", '1.5')),
    ('\ufeff["a"]', ('a',)),
    (json.dumps('["a", "b"]'), ('a', 'b')),
    (json.dumps("['a', 'b']"), ('a', 'b')),
    # An empty cell is no answer.
    ('', ()),
    (['', 'a', ' \n'], ('a',)),
    # Texts that are none.
    (['[-2, 7]', '[]'], ('[-2, 7]', '[]')),
    ('(1, 2)', ('(1, 2)',)),
    ('[sic] "a"', ('[sic] "a"',)),
    ('"Heroes"', ('"Heroes"',)),
    (r'(-\infty, 3]', (r'(-\infty, 3]',)),
    ('["Weird Al" Yankovic]', ('["Weird Al" Yankovic]',)),
    ("['Til Tuesday]", ("['Til Tuesday]",)),
    ('"[REC]" (film)', ('"[REC]" (film)',)),
    ('{x}', ('{x}',)),
  ],
)
def test_strings(value, want):
  assert checks.strings(value, 'x') == want


@pytest.mark.parametrize(
  'value',
  [
    {'a': 1},
    3,
    [['a']],
    [None],
    b'a',
    [True],
    math.nan,
    ['a', math.nan],
    [np.float32('inf')],
    '["a", NaN]',
    '["a", null]',
    '[["a"]]',
    '[{"a": "b"}]',
    [{'answer': 'a'}],
    '{"value": "a"}',
    "{'a', 'b'}",
    "['a' 'b']",  # NumPy's form, which Python reads as ['ab']
    "array(['a'], dtype=object)",
    ["['a'\n 'b']"],
    "['a' 'b',]",
    "[np.str_('a'), np.str_('b')]",
    "{'text': array(['a'], dtype=object), 'answer_start': array([1])}",
    "['a', nan]",
    "[nan, 'a']",
    "['a', 'b'",  # a cell that was cut
    json.dumps("['a' 'b']"),
  ],
)
def test_strings_refuses(value):
  with pytest.raises(core.DataError, match='f:3: the answers'):
    checks.strings(value, 'f:3: the answers')


def test_what_functions_need_of_a_question():
  def plain():
    """Needs nothing."""

  def by_field():
    """Needs what its fields say."""

  by_field.needs = lambda fields: ('supporting',) if fields['oracle'] else ()

  def known():
    """Needs two things."""

  known.needs = ('answers', 'meta.known')
  bare = Question('q-7', 'q', ('a',))
  full = Question('q-8', 'q', ('a',), supporting=('p',), meta={'known': False})
  users = [
    ('config.reward.a', plain, {}),
    ('config.algorithm.loss', by_field, {'oracle': True}),
    ('config.algorithm.advantage', known, {}),
  ]
  checks.require_needs(users, [full])  # False is a value
  checks.require_needs([('f', by_field, {'oracle': False})], [bare])
  with pytest.raises(
    core.DataError, match="'q-7'.*supporting.*config.algorithm.loss.*_ids"
  ):
    checks.require_needs(users, [full, bare])
  with pytest.raises(
    core.DataError, match=r"meta\['known'\].*config.algorithm.advantage"
  ):
    checks.require_needs(users[2:], [bare])


def test_choose_draws_by_seed_in_file_order():
  qs = [('f', q) for q in questions(*map(str, range(50)))]
  a = checks.choose(qs, path='f', n=10, seed=1)
  assert ids(a) == ids(checks.choose(qs, path='f', n=10, seed=1))
  assert ids(a) != ids(checks.choose(qs, path='f', n=10, seed=2))
  assert [int(q.id) for q in a] == sorted(int(q.id) for q in a)
  # A longer draw with the same seed keeps the shorter one.
  assert set(ids(a)) < set(ids(checks.choose(qs, path='f', n=20, seed=1)))


def test_traces_are_checked():
  q = questions('1')[0]
  trace = core.Trace(
    q,
    (
      ('search', 'x'),
      ('information', (Passage('1', 't', 'x'),)),
      ('answer', 'y'),
    ),
  )
  assert trace.good
  with pytest.raises(ValueError, match="'reply'"):
    core.Trace(q, (('reply', 'x'),))
  with pytest.raises(ValueError, match="'information'.*tuple"):
    core.Trace(q, (('information', 'x'),))


# -- the stream -------------------------------------------------------------


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(
  sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
  seed=st.integers(0, 5),
  shuffle=st.booleans(),
  step=st.integers(1, 7),
)
def test_every_question_once_an_epoch(sizes, seed, shuffle, step):
  sets = {
    f's{i}': questions(*(f'{i}.{j}' for j in range(size)))
    for i, size in enumerate(sizes)
  }
  stream = core.Stream(sets, seed=seed, shuffle=shuffle)
  total = sum(sizes)
  drawn = []
  while len(drawn) < 3 * total:
    got = stream.next(step)
    assert len(set(ids(got))) == step  # groups go by id
    drawn += [q.id.partition('#')[0] for q in got]
  everything = sorted(q.id for qs in sets.values() for q in qs)
  for epoch in range(3):
    part = drawn[epoch * total : (epoch + 1) * total]
    assert sorted(part) == everything
    if not shuffle:
      assert part == [q.id for qs in sets.values() for q in qs]


@pytest.mark.long
@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(before=st.integers(0, 30), after=st.integers(1, 30))
def test_resume_is_exact(before, after):
  sets = {'a': questions(*'abcdefg'), 'b': questions(*'vwxyz')}
  make = lambda: core.Stream(sets, seed=1, shuffle=True)
  stream = make()
  if before:
    stream.next(before)
  state = json.loads(json.dumps(stream.state()))
  want = [ids(stream.next(after)), ids(stream.next(3))]
  other = make()
  other.restore(state)
  assert [ids(other.next(after)), ids(other.next(3))] == want


def test_seeds_differ_and_shuffle_shuffles():
  qs = questions(*map(str, range(100)))
  first = {
    seed: ids(core.Stream({'a': qs}, seed=seed, shuffle=True).next(100))
    for seed in (0, 1)
  }
  assert first[0] != first[1]
  stream = core.Stream({'a': qs}, seed=0, shuffle=True)
  assert ids(stream.next(100)) == first[0] != ids(stream.next(100))


@pytest.mark.parametrize(
  'change',
  [
    {'seed': 2},
    {'shuffle': False},
    {'sets': {'a': questions(*'abd')}},
    {'sets': {'b': questions(*'abc')}},
  ],
)
def test_a_cursor_of_other_data_is_refused(change):
  fields = {'sets': {'a': questions(*'abc')}, 'seed': 1, 'shuffle': True}
  make = lambda sets, **kw: core.Stream(sets, **kw)
  state = make(**fields).state()
  make(**fields).restore(state)
  with pytest.raises(core.DataError, match='data position'):
    make(**{**fields, **change}).restore(state)


def test_open_stream(tmp_path):
  write(tmp_path / 'a.jsonl', *(row(f'a{i}') for i in range(4)))
  write(tmp_path / 'b.jsonl', *(row(f'b{i}') for i in range(2)))
  data = data_config(dir=str(tmp_path), shuffle=False)
  data.train = ConfigDict(
    {
      'a': {'module': 'jsonl', 'path': 'a.jsonl'},
      'b': {'module': 'jsonl', 'path': 'b.jsonl'},
    }
  )
  stream = core.open_stream(data, seed=0)
  assert ids(stream.next(6)) == ['a0', 'a1', 'a2', 'a3', 'b0', 'b1']
