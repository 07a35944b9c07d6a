"""The experiment with a real model: its questions, starts, arms and report."""

import collections
import gzip
import json
import re
import shutil

import pytest

from experiments.gemma import documents, questions, results, rows, selfplay
from experiments.ssp import game, start
from searchrl_jax import lookup
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import DataError
from searchrl_jax.run import build
from searchrl_jax.sources import simulated
from searchrl_jax.sweep import core
from searchrl_jax.text import prompts
from searchrl_jax.types import Passage
from tests import fakes
from tests.conftest import ROOT

N = 120


def passage(i):
  # The passages of every third question state no answer.
  mayor = f'Mayor John Gray{i}' if i % 3 else 'A mayor'
  return f'"Town {i}"\nTown {i} is a small town . {mayor} opened it .'


@pytest.fixture
def folder(tmp_path):
  corpus = [{'id': str(i), 'contents': passage(i)} for i in range(N)]
  asked = [
    {
      'id': f'q{i}',
      'question': f'who is the mayor of Town {i}',
      'golden_answers': [f'John Gray{i}'],
      'supporting_ids': [str(i)],
      'source': 'nq_train',
    }
    for i in range(N)
  ]
  for name, lines in (('corpus', corpus), ('qa_train', asked)):
    with gzip.open(tmp_path / f'{name}.jsonl.gz', 'wt') as file:
      file.writelines(json.dumps(line) + '\n' for line in lines)
  book = ({'id': f'q{i}', 'answer': f'Ann{i}'} for i in range(N))
  text = ''.join(json.dumps(line) + '\n' for line in book)
  (tmp_path / 'book.jsonl').write_text(text)
  return tmp_path


def search(queries, k):
  """The town that a query names."""
  out = []
  for query in queries:
    (i, *_) = re.findall(r'\d+', query) or ['0']
    title, text = passage(int(i)).split('\n')
    out.append([Passage(i, title.strip('"'), text)][:k])
  return out


def load(folder, **fields):
  path = str(folder / 'qa_train.jsonl.gz')
  return questions.load(path, str(folder), **fields)


def test_parts_share_no_question(folder):
  train, tune, whole = (
    {q.id for q in load(folder, part=part)} for part in ('train', 'tune', '')
  )
  assert train | tune == whole and not train & tune and tune
  assert {q.id for q in load(folder, short=True)} == {
    f'q{i}' for i in range(N) if i % 3
  }
  drawn = [q.id for q in load(folder, part='train', n=5, seed=1)]
  assert len(drawn) == 5 and {*drawn} <= train


def test_some_questions_do_not_find_their_passage(folder):
  """'mayor' finds the shortest passage, which states none, and 'zzzz' none.

  The answer to the latter stands in the last passage.
  """
  path = folder / 'qa_train.jsonl.gz'
  lines = [json.loads(line) for line in gzip.open(path)]
  lines[1]['question'] = 'who is the mayor'
  lines[2] |= {
    'question': 'zzzz',
    'golden_answers': [f'John Gray{N - 1}'],
    'supporting_ids': [str(N - 1)],
  }
  with gzip.open(path, 'wt') as file:
    file.writelines(json.dumps(line) + '\n' for line in lines)
  short, found = (
    {q.id for q in load(folder, **{way: True})} for way in ('short', 'found')
  )
  assert short - found == {'q1', 'q2'} and found < short


@pytest.mark.parametrize('ways', [{}, {'short': True}, {'found': True}])
def test_a_corpus_of_other_questions_is_refused(folder, ways):
  with gzip.open(folder / 'corpus.jsonl.gz', 'wt') as file:
    file.write(json.dumps({'id': 'x', 'contents': '"A"\nb'}) + '\n')
  with pytest.raises(DataError, match='corpus.jsonl.gz .*passages'):
    load(folder, **ways)


def traces(folder, **fields):
  path = str(folder / 'qa_train.jsonl.gz')
  return questions.traces(path, search, str(folder), seed=0, **fields)


@pytest.mark.parametrize('memory, poor', [(0, 0), (0.5, 0.25), (0.3, 0)])
def test_shares_are_those_of_the_traces(folder, memory, poor):
  """Also where questions are passed over, and none answers blindly."""
  fields = dict(n=40, memory=memory, poor=poor)
  fields['closed_book'] = str(folder / 'book.jsonl')
  made = traces(folder, **fields)
  kinds = collections.Counter()
  for trace in made:
    searches = [x for kind, x in trace.actions if kind == 'search']
    *_, (_, answer) = trace.actions
    if not searches:
      kinds['memory'] += 1
      assert answer == f'Ann{trace.question.id[1:]}' and not trace.good
    else:
      kinds['poor' if len(searches) == 2 else 'good'] += 1
      (*_, (_, found), _) = trace.actions
      assert answer in found[0].text and trace.good == (len(searches) == 1)
  assert kinds['memory'] == 40 * memory and kinds['poor'] == 40 * poor
  assert made == traces(folder, **fields)


def test_half_of_a_start_reads_what_a_teacher_is_told(folder):
  """The hints of its traces are the demonstrations of training questions."""
  asked = dict(part='train', found=True)
  told, own, others, plain = (
    {q.id: q for q in load(folder, **asked, told=told)}
    for told in ('meta', 'own', 'others', '')
  )
  for i, q in told.items():
    n = i[1:]
    hint = q.meta['demonstration']
    assert f'Town {n} is a small' in hint and f'is John Gray{n}.' in hint
    assert q.text == plain[i].text and not plain[i].meta.get('demonstration')
    assert own[i].text == f'{q.text} {hint}'
    assert others[i].text.startswith(q.text) and hint not in others[i].text
  fields = dict(n=40, memory=0.5, poor=0.25, hinted=0.5)
  made = traces(folder, **fields, closed_book=str(folder / 'book.jsonl'))
  behind = [t for t in made if 'Hint: ' in t.question.text]
  assert [t.question.text for t in behind] == [
    own[t.question.id].text for t in behind
  ]
  assert len(behind) == 20 and all(t.good for t in behind)
  assert sum(t.good for t in made) == 25  # a quarter of the other 20
  with pytest.raises(DataError, match='told'):
    load(folder, told='own')


def test_memory_answers_some_kinds_of_questions(folder):
  fields = dict(n=20, memory=0.5, closed_book=str(folder / 'book.jsonl'))
  assert traces(folder, known=('who',), **fields) == traces(folder, **fields)
  with pytest.raises(DataError, match='1 attempts'):
    traces(folder, known=('when',), **fields)


def test_answers_from_memory_have_to_be_there(folder):
  with pytest.raises(DataError, match='experiments.gemma.run'):
    traces(folder, n=4, memory=0.5)


def test_a_simulator_is_asked_as_it_learned(folder):
  """Every other document is useful, and only these state the answer."""
  path = str(folder / 'qa_train.jsonl.gz')
  made = documents.traces(path, search, str(folder), n=20, seed=0)
  for i, trace in enumerate(made):
    ((_, text),) = trace.actions
    useful = i % 2 == 0
    assert ('John Gray' in text) == useful
    for prompt, told in (
      (documents.USEFUL, useful),
      (documents.NOISY, not useful),
    ):
      assert trace.question.text.endswith(prompt.rpartition('\n')[2]) == told
  config = rows.get_sweep('model=small').arm('zerosearch').config(0)
  fields = config.source.simulator
  simulated.check(fields)
  template = prompts.load(documents.TEMPLATE)
  assert template.prompt.format(question=documents.USEFUL) == fields.useful
  opened, closed = template.answer
  found = re.search(fields.document, f'{opened} {text} {closed}')
  assert f'{found["title"]} : {found["text"]}' == text


def test_roles_of_self_play_take_turns(folder):
  path = str(folder / 'qa_train.jsonl.gz')
  made = selfplay.traces(path, search, str(folder), n=21, seed=0)
  templates = {'': 0, selfplay.TEMPLATE: 1, documents.TEMPLATE: 2}
  answers = {q.text: q for q in selfplay.load(path, str(folder))}
  for i, trace in enumerate(made):
    assert templates[trace.template] == i % 3
    question, (*_, (_, answer)) = trace.question, trace.actions
    if i % 3 == 1:  # asks what its passage answers, and does not tell it
      ((_, query), (_, (passage,)), _) = trace.actions
      assert query == question.text in passage.text
      assert question.text in answers and query not in answer
    elif i % 3 == 2:
      first, second, asked = question.text.split('\n')
      assert (answer in first) != (answer in second)
      assert asked.startswith('Question: who is the mayor')
  assert all(q.answers[0] == text for text, q in answers.items())


def test_a_verifier_reads_what_it_learned_to_read(folder):
  """Its prompt in a game is that of its traces."""
  path = str(folder / 'qa_train.jsonl.gz')
  trace = selfplay.traces(path, search, str(folder), n=3, seed=0)[2]
  sweep, tok = rows.get_sweep('model=small'), fakes.ByteTokenizer()
  asked = []
  for config in (sweep.start('roles').config(0), sweep.arm('ssp').config(0)):
    config.env.max_tokens = 2048
    config.env.template = documents.TEMPLATE
    env = build.environment(config, tok)
    if 'selfplay' in config:
      config.env.template = 'plain'
      env = game.environments(config, tok)[game.VERIFIER]
    _, action = env.reset(trace.question)
    asked.append(action.prompt.ids)
  assert asked[0] == asked[1]


def test_every_arm_can_run(folder, monkeypatch):
  """Its config holds, and so do the questions and traces that it asks for."""
  for name in ('closed_book.json', 'rag.json'):  # of `baselines.few_shot`
    shutil.copy(ROOT / 'experiments/gemma/rag.json', folder / name)
  shutil.copy(folder / 'book.jsonl', folder / 'closed_book.jsonl')
  with gzip.open(folder / 'qa_train.jsonl.gz', 'rt') as file:
    lines = [json.loads(line) for line in file]
  with gzip.open(folder / 'qa_dev.jsonl.gz', 'wt') as file:
    # As the data has them.
    for source in ('nq_qed', 'hotpot', '2wiki', 'musique'):
      for n, line in enumerate(2 * lines):  # more than are drawn
        about = {'id': f'{source}{n}', 'source': f'{source}_dev200'}
        file.write(json.dumps(line | about) + '\n')
  monkeypatch.setenv(data.ENV_DIR, str(folder))
  sweep = rows.get_sweep(f'model=small,made={folder},method=opsd-frozen')
  core.check(sweep)
  asked = []

  def evaluate(config, *_, **__):
    asked.extend(data.load_sets(config.data.eval, config.data))

  monkeypatch.setattr(rows.evaluate, 'evaluate', evaluate)
  for arm in sweep.arms:
    if arm.loop == 'experiments.ssp.train.train':
      start.check(arm.config(0))
      stream = data.open_stream(arm.config(0).data, 0)
      assert game.briefs(stream.questions, arm.config(0), 0)
    for run in arm.evaluations.values():
      run(arm.config(0), '', '')
  assert {*asked} == {*rows.SETS} - {'train'}
  config = sweep.arm('method_opsd-frozen').config(0)
  assert config.algorithm.advantage_kw.outcome == 1.0
  for question in data.open_stream(config.data, 0).questions:
    assert question.meta[config.teacher.context_kw.key]
  for warm in sweep.warm.values():
    fields = warm.config(0).sft.data
    fields.n = 10
    assert len(data.load_traces(fields, warm.config(0).data, search)) == 10


def test_only_seed_0_has_the_long_evaluations(tmp_path, monkeypatch):
  """Of the trained arms; what the others lack is no entry of the results."""
  values = {'eval/em': 1.0}
  monkeypatch.setattr(rows.evaluate, 'evaluate', lambda *_, **__: values)
  monkeypatch.setattr(rows.data, 'resolve', lambda path, _: path)
  sweep = rows.get_sweep('model=small')
  for name in results.TRAINED:
    arm = sweep.arm(name)
    assert {*rows.POLICY, 'controls'} < {*arm.evaluations}
    for evaluation, run in arm.evaluations.items():
      assert run(arm.config(0), '', '') == values
      both = evaluation in rows.POLICY
      assert run(arm.config(1), '', '') == (values if both else {})
  (tmp_path / 'values.json').write_text('{}')
  assert results.entries(arm, '1', 'gold', tmp_path, set()) == []


def test_a_gain_is_paired_by_question():
  """Two seeds against one start, of three questions that all have.

  Differences: q1 (1 + 0) / 2 - 0 = 0.5, q2 1 - 1 = 0, q3 1 - 0 = 1; the mean
  is 0.5.
  """
  ours = {'q1': 1, 'q2': 1, 'q3': 1}, {'q1': 0, 'q2': 1, 'q3': 1, 'q4': 1}
  found = results.gain(ours, [{'q1': 0, 'q2': 1, 'q3': 0}])
  assert (found['gain'], found['n'], found['seeds']) == (0.5, 3, 2)
  assert (found['wins'], found['losses']) == (2, 0)
  assert 0 <= found['interval'][0] <= 0.5 <= found['interval'][1] <= 1


def test_ttrl_is_compared_where_its_start_was_asked_the_same():
  """Of q1, which it was asked, 1 - 0; of q2, which it was not, 0 - 1."""
  marks = {
    ('good', 'after'): {'0': {'q1': 0.0, 'q2': 1.0}},
    ('ttrl', 'asked'): {'0': {'q1': 1.0}},
    ('ttrl', 'after'): {'0': {'q2': 0.0}},
  }
  found = {
    g['evaluation']: (g['before'], g['gain'], g['n'])
    for g in results.compare([], marks)
  }
  assert found == {'asked': (0.0, 1.0, 1), 'after': (1.0, -1.0, 1)}


def test_runs_of_other_folders_stay_if_asked(tmp_path, monkeypatch):
  """And those that were made again are replaced; gains are of both folders."""
  sweep = rows.get_sweep('model=small')

  def finish(folder, *runs, em, keep=True, vocabulary=3):
    """The workdir of runs that are done, whose answers are all worth `em`."""
    monkeypatch.setattr(results, 'hits', lambda _: {'q1': em, 'q2': em})
    monkeypatch.setattr(
      results,
      'complete',
      lambda *_: [(sweep.arm(a), c, 'after', folder) for a, c in runs],
    )
    monkeypatch.setattr(
      results,
      'entries',
      lambda arm, case, name, *_: [
        dict(arm=arm.name, seed=int(case), set='dev', evaluation=name, em=em)
      ],
    )
    monkeypatch.setattr(results.figures, 'curve', lambda *_: {})
    about, out = {'vocabulary': vocabulary}, tmp_path / 'out'
    return results.write(sweep, folder, out, about, set(), keep)

  (tmp_path / 'out').mkdir()
  start = ('good', '0'), ('grpo_good', '0')
  finish(tmp_path / 'one', *start, em=0.0)
  again = ('grpo_good', '0'), ('grpo_good', '1')
  found = finish(tmp_path / 'two', *again, em=1.0)
  told = [(a['arm'], a['seed'], a['em']) for a in found['arms']]
  assert told == [('good', 0, 0), ('grpo_good', 0, 1), ('grpo_good', 1, 1)]
  (gain,) = found['gains']
  assert (gain['arm'], gain['seeds'], gain['gain']) == ('grpo_good', 2, 1.0)
  with pytest.raises(lookup.ConfigError, match='this one has 4; give another'):
    finish(tmp_path / 'three', *start, em=1.0, vocabulary=4)
  alone = finish(tmp_path / 'three', *start, em=1.0, keep=False)
  assert [(a['arm'], a['seed']) for a in alone['arms']] == [
    ('good', 0),
    ('grpo_good', 0),
  ]


def test_bars_hold_by_the_interval_too():
  def one(gain, low, seeds=2):
    found = {'arm': 'grpo_hesitant', 'start': 'hesitant', 'evaluation': 'after'}
    return found | {'gain': gain, 'interval': [low, 1], 'seeds': seeds}

  for given, holds in (
    ([one(0.09, 0.01)], True),
    ([one(0.09, -0.01)], False),
    ([one(0.07, 0.01)], False),
    ([one(0.09, 0.01, seeds=1)], False),
    ([], False),
  ):
    (first, *others) = results.judge(given, [])
    assert first['holds'] == holds
    assert not any(bar['holds'] for bar in others)
  blind = [
    {'arm': arm, 'set': 'dev', 'evaluation': 'no_search', 'em': 0.01}
    for arm in ('grpo_good', 'grpo_hesitant')
  ]
  for em, holds in ((0.04, True), (0.06, False)):
    *_, bar, _ = results.judge([], [blind[0] | {'em': em}, *blind[1:]])
    assert (bar['value'], bar['holds']) == (em, holds)
  *_, bar, _ = results.judge([], blind[1:])  # of one arm there is none yet
  assert not bar['holds']


def test_supervised_arms_are_chosen_on_tuning_questions():
  def of(arm, where, em):
    return {'arm': arm, 'set': where, 'em': em}

  arms = [of('more_good_512', 'tune', 0.2), of('more_good_2048', 'tune', 0.3)]
  arms += [of('more_good_512', 'dev', 0.9), of('more_hesitant_512', 'tune', 1)]
  assert results.chosen('more_good', arms) == 'more_good_2048'
  assert results.chosen('rag_fine_tuned', arms) == 'rag_fine_tuned'
