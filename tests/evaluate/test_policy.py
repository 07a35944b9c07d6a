"""The evaluate and compare commands on an untrained policy."""

import dataclasses
import json
import pathlib
import shutil

import pytest

from searchrl_jax import checks, lookup
from searchrl_jax.data.checks import DataError
from searchrl_jax.evaluate import files
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.run import build, services
from searchrl_jax.store.progress import Progress
from searchrl_jax.store.records import RunError
from searchrl_jax.text import prompts
from tests import tiny
from tests.test_commands import command

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def url(tmp_path_factory):
  folder = tmp_path_factory.mktemp('retrieval')
  with services.retrieval(tiny.config(), str(folder)) as found:
    yield found


def config(url, **fields):
  c = tiny.config(url)
  c.eval.n, c.eval.temperature, c.eval.k = 3, 1.0, (1, 2)
  c.update_from_flattened_dict(fields)
  return c


@pytest.fixture(scope='module')
def done(url, tmp_path_factory):
  """An evaluation with everything: (folder, what it returned)."""
  out = tmp_path_factory.mktemp('evaluations') / 'a'
  c = config(url)
  return out, evaluate.evaluate(c, '', str(out), with_controls=True)


def read(folder, name):
  return json.loads((folder / name).read_text())


@pytest.mark.long
def test_what_selected_a_checkpoint_does_not_report_on_it(url, tmp_path):
  c = config(url, **{'checkpoint.best': 'eval/set=micro/em', 'eval.k': ()})
  c.data.eval.other = dict(c.data.eval.micro, split='train')
  evaluate.evaluate(c, '', str(tmp_path / 'e'), which='best')
  assert {
    row['set'] for row in map(json.loads, (tmp_path / 'e/rows.jsonl').open())
  } == {'other'}


def test_every_long_phase_is_told(url, tmp_path, monkeypatch, capsys):
  for name in ('every', 'tick'):  # so that a phase of 10 ms is a long one
    monkeypatch.setattr(Progress, name, 0.001)
  c = config(url, **{'log.progress': True})
  evaluate.evaluate(c, '', str(tmp_path / 'e'))
  told = capsys.readouterr().err
  for name in ('model and services', 'eval'):
    assert f'\n{name}: ' in f'\n{told}', name


def test_fields_are_checked_before_data_are_read(url, tmp_path):
  c = config(url, **{'data.prompt': 'other'})
  c.data.eval.micro = dict(module='parquet', path=str(tmp_path))
  with pytest.raises(checks.ConfigError, match="config.data.prompt='other'"):
    evaluate.evaluate(c, '', str(tmp_path / 'e'))


def test_what_an_evaluation_leaves(done, url):
  folder, values = done
  manifest, kept = read(folder, 'manifest.json'), read(folder, 'eval.json')
  [ids] = [s['ids'] for s in manifest['sets'].values()]
  assert len(ids) == manifest['sets']['micro']['n'] == 4
  assert len(manifest['corpus']['sha256']) == 64
  assert manifest['sampling']['n'] == 3
  assert kept['eval/cost/seconds'] > 0
  repeatable = {k: v for k, v in kept.items() if not k.endswith('/seconds')}
  assert repeatable == values
  for name in ('eval', 'shuffled', 'random', 'empty', 'no_search'):
    rows = files.read_rows(folder, name)
    assert [r.question for r in rows] == [i for i in ids for _ in range(3)]
    tokens = sum(r.tokens for r in rows)
    assert values[f'{name}/cost/sampled_tokens'] == tokens > 0
    assert {
      f'{name}/{x}@{k}' for x in ('pass', 'maj') for k in (1, 2)
    } <= values.keys()
  assert values['no_search/cost/searches'] == 0


def test_another_evaluation_does_not_replace_one(done, url, tmp_path):
  folder, _ = done
  before = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
  message = 'another content of --controls: True there and False now'
  with pytest.raises(RunError, match=message):
    evaluate.evaluate(config(url), '', str(folder))
  kept = {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}
  assert kept.keys() == before.keys()
  assert all(kept[p] == before[p] for p in kept if p.suffix != '.log')


def test_the_manifest_of_something_else_stays(url, tmp_path):
  path = tmp_path / 'manifest.json'
  path.write_text('{"index": "bm25"}')
  with pytest.raises(RunError, match=f'{path} is in the way: no evaluation'):
    evaluate.evaluate(config(url), '', str(tmp_path))
  assert path.read_text() == '{"index": "bm25"}'


def test_a_killed_evaluation_leaves_no_scores(done, url, tmp_path, monkeypatch):
  folder, _ = done
  again = tmp_path / 'again'
  shutil.copytree(folder, again)

  def killed(evaluator, step):
    raise KeyboardInterrupt

  monkeypatch.setattr(evaluate.grading.Evaluator, 'collect', killed)
  with pytest.raises(KeyboardInterrupt):
    evaluate.evaluate(config(url), '', str(again), with_controls=True)
  assert not any((again / name).exists() for name in evaluate.RESULTS)


def test_what_decides_an_evaluation_is_in_the_name_of_its_folder(
  url, tmp_path, monkeypatch
):
  monkeypatch.setattr(evaluate.checkpoint.Checkpointer, 'resolve', lambda *_: 7)
  c = config(url, **{'checkpoint.best': 'eval/set=micro/em'})
  c.data.eval.other = dict(c.data.eval.micro, split='train')
  template = tmp_path / 'mine.json'
  base = json.loads((prompts.TEMPLATES / 'base.json').read_text())
  template.write_text(json.dumps(base))
  c.env.template = str(template)
  run = str(tmp_path)
  name = lambda **how: evaluate.default_out(
    c, run, evaluate.asked(c, run, **how)
  )
  # One folder cannot take a run and then another model.
  assert {*evaluate.asked(c, run).about} == {*evaluate.asked(c, '').about}
  names = [name(), name(which='best'), name(with_controls=True)]
  assert name() == names[0] and 'evaluate_7_' in names[0]
  with monkeypatch.context() as m:  # another process has another URL, say
    first = lambda what, work: 'of_process_0' if what == 'folder' else work()
    m.setattr(evaluate.cluster, 'first', first)
    assert name().endswith('evaluate_7_of_process_0')
  template.write_text(json.dumps(base | {'invalid': 'No.'}))
  names.append(name())
  template.write_text(json.dumps(base))
  # Another code of the world: equal ids, another answer.
  real = evaluate.data.load_sets

  def changed(*args):
    found = real(*args)
    first, *others = found['micro']
    found['micro'] = [dataclasses.replace(first, answers=('x',)), *others]
    return found

  monkeypatch.setattr(evaluate.data, 'load_sets', changed)
  names.append(name())
  assert len({*names}) == 5


def test_best_needs_a_set_that_did_not_choose_it(url, tmp_path):
  c = config(url, **{'checkpoint.best': 'eval/set=micro/em'})
  with pytest.raises(checks.ConfigError, match="best leaves out the set 'micr"):
    evaluate.evaluate(c, '', str(tmp_path / 'e'), which='best')
  assert not (tmp_path / 'e').exists()


def test_a_manifest_fixes_the_questions(done, url, tmp_path):
  folder, values = done
  c = config(url, **{'eval.questions': 2})  # the manifest's four all the same
  found = evaluate.evaluate(
    c, '', str(tmp_path / 'b'), manifest=str(folder / 'manifest.json')
  )
  assert found['eval/em/n'] == 4
  assert found['eval/tokens'] == values['eval/tokens']  # the same samples
  same = read(tmp_path / 'b', 'manifest.json')
  assert lookup.differences(read(folder, 'manifest.json'), same) == {}


def test_who_wrote_a_manifest_decides_nothing(done, url, tmp_path):
  manifest = read(done[0], 'manifest.json')

  def about(**changed):
    path = tmp_path / 'manifest.json'
    path.write_text(json.dumps(manifest | changed))
    return evaluate.asked(config(url), '', manifest=str(path)).about

  judge = {'url': 'http://127.0.0.1:9', 'model': ''}
  there = dict(commit='another', checkpoint='elsewhere', judge=judge)
  assert about() == about(**there)
  assert about()['--manifest'] != about(corpus=None)['--manifest']


def test_another_corpus_than_the_manifests_is_refused(done, url, tmp_path):
  folder, _ = done
  manifest = read(folder, 'manifest.json')
  manifest['corpus']['sha256'] = 'f' * 64
  (tmp_path / 'm.json').write_text(json.dumps(manifest))
  with pytest.raises(DataError, match='another corpus: .*fff.* on the server'):
    evaluate.evaluate(
      config(url), '', str(tmp_path / 'c'), manifest=str(tmp_path / 'm.json')
    )


def test_what_cannot_be_is_refused_before_any_model_loads(
  url, tmp_path, monkeypatch
):
  monkeypatch.setattr(build, 'tokenizer', None)
  c, message = config(url, **{'eval.k': (4,)}), 'eval.k=.4,. needs numbers'
  with pytest.raises(ValueError, match=message):
    evaluate.evaluate(c, '', str(tmp_path))
  with pytest.raises(ValueError, match=message):
    checks.check(c)


@pytest.mark.parametrize(
  'field, value, message',
  [
    ('env.search_when', 'entropi', "did you mean 'entropy'"),
    ('engine.max_len', 8, 'raise the latter'),
  ],
)
def test_ask_and_evaluate_check_the_config(
  url, tmp_path, monkeypatch, field, value, message
):
  monkeypatch.setattr(build, 'tokenizer', None)
  c = config(url, **{field: value})
  with pytest.raises(checks.ConfigError, match=f'config.{field}=.*{message}'):
    with evaluate.loaded(c, '', str(tmp_path)):  # what `ask` opens
      pass
  with pytest.raises(checks.ConfigError, match=f'config.{field}=.*{message}'):
    evaluate.evaluate(c, '', str(tmp_path / 'out'))
  assert not (tmp_path / 'out').exists()


def test_the_command_prints_scores_and_costs(url, tmp_path):
  out, _ = command(
    'evaluate',
    '--config=configs/quickstart.py',
    f'--out={tmp_path / "o"}',
    *flags(url),
    '--config.eval.n=2',
    '--config.eval.temperature=1.0',
    '--config.eval.k=2',
  )
  for text in (
    'maj@2',
    'costs, as sums',
    'searches',
    'sampled_tokens',
    'seconds',
  ):
    assert text in out, out


def flags(url):
  c, base = tiny.config(url), tiny.quickstart.get_config()
  now, before = (
    dict(walk(x.to_dict(preserve_field_references=False))) for x in (c, base)
  )
  return [
    f'--config.{k}={",".join(map(str, v)) if isinstance(v, tuple) else v}'
    for k, v in now.items()
    if k in before and v != before[k] and k != 'name'
  ]


def walk(tree, at=''):
  for name, value in tree.items():
    if isinstance(value, dict):
      yield from walk(value, f'{at}{name}.')
    else:
      yield f'{at}{name}', value


def test_two_evaluations_are_compared(done, url, tmp_path):
  folder, values = done
  out, _ = command(
    'evaluate.compare',
    folder,
    f'{folder}:no_search',
    f'--out={tmp_path / "c.json"}',
    '--scores=em,tokens',
  )
  assert 'em: B - A' in out and 'tokens: B - A' in out
  [found] = read(tmp_path, 'c.json')['comparisons']
  figures = found['scores']['tokens']['all']
  assert figures['a'] == pytest.approx(values['eval/tokens'])
  assert figures['b'] == pytest.approx(values['no_search/tokens'])
  assert figures['difference'] == pytest.approx(figures['b'] - figures['a'])
  assert figures['wins'] + figures['losses'] + figures['ties'] == 4
  assert pathlib.Path(found['a']) == folder
