import dataclasses
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import rows, table
from searchrl_jax.checks import ConfigError
from searchrl_jax.store import records
from searchrl_jax.sweep import core, figures, stages
from tests import here
from tests.conftest import ROOT
from tests.experiments import tiny_row
from tests.sweep.tiny_sweep import complete

pytestmark = pytest.mark.slow

MODULE = 'tests.experiments.tiny_row'


def arm(name, warm='', seeds=(0, 1)):
  return rows.Arm(name, tiny_row.config, warm, seeds=seeds)


def row_of(*arms, warm=()):
  return dataclasses.replace(tiny_row.ROW, arms=arms, warm=dict(warm))


def test_seeds_come_one_after_another_and_share_their_starts():
  row = row_of(
    arm('a', 'late'),
    arm('b', 'late', seeds=(0,)),
    arm('c'),
    warm={
      'early': rows.Start(tiny_row.config),
      'late': rows.Start(tiny_row.config, 'early'),
    },
  )
  first = ['warm/early/0', 'warm/late/0', 'arms/a/0', 'arms/b/0', 'arms/c/0']
  second = ['warm/early/1', 'warm/late/1', 'arms/a/1', 'arms/c/1']
  assert core.plan(row, row.arms, ()) == first + second
  assert core.plan(row, row.arms, (1,)) == second
  assert core.plan(row, [row.arm('c')], ()) == ['arms/c/0', 'arms/c/1']


def test_a_shared_start_is_made_once_and_told_to_every_seed(tmp_path):
  row = row_of(
    arm('a', 'late'),
    arm('b', 'own', seeds=(1,)),
    warm={
      'early': rows.Start(tiny_row.config, shared=True),
      'late': rows.Start(tiny_row.config, 'early', shared=True),
      'own': rows.Start(tiny_row.config, 'early'),
    },
  )
  assert core.plan(row, row.arms, ()) == [
    'warm/early/0',
    'warm/late/0',
    'arms/a/0',
    'arms/a/1',
    'warm/own/1',
    'arms/b/1',
  ]
  assert core.plan(row, [row.arm('a')], (1,)) == [
    'warm/early/0',
    'warm/late/0',
    'arms/a/1',
  ]
  for stage, start in (
    ('arms/a/1', 'late/0'),
    ('warm/late/0', 'early/0'),
    ('warm/own/1', 'early/0'),
    ('arms/b/1', 'own/1'),
  ):
    config = stages.config_of(row, stage, tmp_path)
    assert config.train.init == str(tmp_path / 'warm' / start / 'run')


def test_folders_of_other_starts_are_made_before_and_told(tmp_path):
  start = rows.Start(tiny_row.config)
  row = row_of(
    rows.Arm(
      'a',
      tiny_row.config,
      'policy',
      seeds=(1,),
      folders={'critic.path': 'other'},
    ),
    warm={
      'base': start,
      'policy': start,
      'other': rows.Start(tiny_row.config, folders={'model.path': 'base'}),
    },
  )
  assert core.plan(row, row.arms, ()) == [
    'warm/policy/1',
    'warm/base/1',
    'warm/other/1',
    'arms/a/1',
  ]
  config = stages.config_of(row, 'arms/a/1', tmp_path)
  assert config.train.init == str(tmp_path / 'warm/policy/1/run')
  assert config.critic.path == str(tmp_path / 'warm/other/1/run')
  other = stages.config_of(row, 'warm/other/1', tmp_path)
  assert other.model.path == str(tmp_path / 'warm/base/1/run')


def loop(config, workdir):
  pathlib.Path(workdir).mkdir(parents=True)
  (pathlib.Path(workdir) / 'name').write_text(config.name)


def test_an_arm_may_have_a_loop_of_its_own(tmp_path):
  row = row_of(
    rows.Arm(
      'a',
      tiny_row.config,
      seeds=(0,),
      loop=f'{__name__}.loop',
      evaluations={
        'after': lambda config, run, out: {
          'eval/em': len((pathlib.Path(run) / 'name').read_text())
        }
      },
    )
  )
  stages.run_stage(row, 'arms/a/0', tmp_path, 'http://127.0.0.1:9')
  values = json.loads((tmp_path / 'arms/a/0/after/values.json').read_text())
  assert values == {'eval/em': len(tiny_row.config(0).name)}
  assert stages.done(row, 'arms/a/0', tmp_path)


def test_the_table_has_the_first_score_of_everything_and_of_slices():
  names = 'eval/em', 'eval/f1', 'eval/hops=1/em'
  arms = {
    'a': {'mean': {'after': dict.fromkeys(names[:2]), 'gain': {'eval/em': 0}}},
    'b': {'mean': {'after': dict.fromkeys(names)}},
    'untrained': {'mean': {'before': dict.fromkeys(names)}},
  }
  row = dataclasses.replace(tiny_row.ROW, scores=('em', 'f1'))
  found = rows.columns(row, arms)
  assert found == ['after:eval/em', 'after:eval/hops=1/em']


def test_names_that_do_not_exist_are_told_with_near_ones():
  row = row_of(arm('ppo', 'wram'), warm={'warm': rows.Start(tiny_row.config)})
  with pytest.raises(ConfigError, match="'pop'.*ppo"):
    row.arm('pop')
  with pytest.raises(ConfigError, match="'wram'.*warm"):
    core.plan(row, row.arms, ())


def test_what_was_done_with_another_config_is_refused_by_field(tmp_path):
  row, stage = row_of(arm('a')), 'arms/a/0'
  assert not stages.done(row, stage, tmp_path)
  config = records.plain(stages.config_of(row, stage, tmp_path))
  del config['rollout']['refill']  # a field of the schema that came later
  records.write_json(
    tmp_path / stage / 'done.json', {'config': config, 'contents': {}}
  )
  assert not stages.done(row, stage, tmp_path)  # its evaluation is missing
  records.write_json(tmp_path / stage / 'after' / 'values.json', {})
  assert stages.done(row, stage, tmp_path)
  config['optim']['lr'], config['source']['url'] = 7.0, 'http://elsewhere'
  records.write_json(
    tmp_path / stage / 'done.json', {'config': config, 'contents': {}}
  )
  with pytest.raises(ConfigError, match='optim.lr .*7.0.*0.0003'):
    stages.done(row, stage, tmp_path)


def test_what_was_measured_or_trained_otherwise_is_refused(tmp_path):
  def row_with(em: str, **fields):
    measure = {'after': rows.evaluation({'eval.match': em})}
    return row_of(dataclasses.replace(arm('a'), evaluations=measure, **fields))

  row, stage = row_with('em'), tmp_path / 'arms/a/0'
  config = records.plain(stages.config_of(row, 'arms/a/0', tmp_path))
  about = {'config': config, 'contents': {}, 'loop': row.arms[0].loop}
  records.write_json(stage / 'done.json', about)
  records.write_json(stage / 'after' / 'values.json', {})
  # By a module that was loaded from its file, as processes of stages do it.
  of = core.named(row.arms[0].evaluations['after'], packages=False)
  assert of[0] == 'core._evaluate'
  records.write_json(stage / 'after' / stages.EVALUATION, of)
  assert stages.done(row, 'arms/a/0', tmp_path)
  for other, named in (
    (row_with('text'), 'after has the values of another evaluation.*text'),
    (row_with('em', loop='experiments.ssp.train.train'), 'trained by .*ssp'),
  ):
    with pytest.raises(ConfigError, match=named):
      stages.done(other, 'arms/a/0', tmp_path)
  config['train']['seconds'] = 5.0  # it may have ended a run
  records.write_json(stage / 'done.json', about)
  with pytest.raises(ConfigError, match='train.seconds was 5.0'):
    stages.done(row, 'arms/a/0', tmp_path)


def test_no_stage_starts_from_one_that_is_not_complete(tmp_path):
  """As in a queue, where the warm start was cancelled and has saved."""
  row = row_of(
    arm('a', 'warm', seeds=(0,)), warm={'warm': rows.Start(tiny_row.config)}
  )
  records.write_text(tmp_path / 'warm/warm/0/run/checkpoints/1/x', 'half')
  with pytest.raises(
    ConfigError, match='starts from warm/warm/0, which is not'
  ):
    stages.run_stage(row, 'arms/a/0', tmp_path, '')
  assert not (tmp_path / 'arms/a/0/run').exists()


def test_what_was_done_with_other_contents_is_refused_by_field(tmp_path):
  row = row_of(
    arm('a', 'warm', seeds=(0,)), warm={'warm': rows.Start(tiny_row.config)}
  )
  warm, stage = 'warm/warm/0', 'arms/a/0'
  weights = tmp_path / warm / 'run' / 'model.safetensors'
  records.write_text(weights, 'weights')
  found = stages.contents(row, stage, tmp_path)
  assert {*found} == {
    'config.env.template', 'config.data.train', 'config.data.eval'
  }  # fmt: skip
  records.write_json(tmp_path / warm / 'done.json', {})
  content = {
    'config': records.plain(stages.config_of(row, stage, tmp_path)),
    'contents': stages.contents(row, stage, tmp_path),
  }
  assert content['contents'].items() > found.items()
  records.write_json(tmp_path / stage / 'done.json', content)
  records.write_json(tmp_path / stage / 'after' / 'values.json', {})
  assert stages.done(row, stage, tmp_path)
  records.write_text(weights, 'others')
  with pytest.raises(ConfigError, match='config.train.init'):
    stages.done(row, stage, tmp_path)
  weights.unlink()  # gone: not compared
  assert stages.done(row, stage, tmp_path)
  content['contents']['config.data.eval'] = 'before'
  records.write_json(tmp_path / stage / 'done.json', content)
  with pytest.raises(ConfigError, match='config.data.eval: before'):
    stages.done(row, stage, tmp_path)


def test_a_warm_start_stays_when_only_what_comes_after_it_changes(tmp_path):
  row = row_of(
    arm('a', 'warm', seeds=(0,)), warm={'warm': rows.Start(tiny_row.config)}
  )
  for stage in ('warm/warm/0', 'arms/a/0'):
    config = records.plain(stages.config_of(row, stage, tmp_path))
    config['train']['steps'] += 1
    records.write_json(
      tmp_path / stage / 'done.json', {'config': config, 'contents': {}}
    )
  assert stages.done(row, 'warm/warm/0', tmp_path)
  with pytest.raises(ConfigError, match='train.steps'):
    stages.done(row, 'arms/a/0', tmp_path)
  config['sft']['steps'] += 1
  records.write_json(tmp_path / 'warm/warm/0/done.json', {'config': config})
  with pytest.raises(ConfigError, match='sft.steps'):
    stages.done(row, 'warm/warm/0', tmp_path)


def test_an_arm_of_another_start_is_not_done(tmp_path):
  row = row_of(
    arm('a', 'warm', seeds=(1,)),
    warm={'warm': rows.Start(tiny_row.config, shared=True)},
  )
  stage = tmp_path / 'arms/a/1'
  config = records.plain(stages.config_of(row, 'arms/a/1', tmp_path))
  records.write_json(stage / 'after' / 'values.json', {})
  # The table's folder may have moved since.
  config['train']['init'] = '/elsewhere/warm/warm/0/run'
  records.write_json(stage / 'done.json', {'config': config, 'contents': {}})
  assert stages.done(row, 'arms/a/1', tmp_path)
  config['train']['init'] = str(tmp_path / 'warm/warm/1/run')
  records.write_json(stage / 'done.json', {'config': config, 'contents': {}})
  with pytest.raises(ConfigError, match='train.init .*warm/1/run'):
    stages.done(row, 'arms/a/1', tmp_path)
  # Nor is a start told that no arm goes on from.
  for seed in '01':
    folder = tmp_path / 'warm/warm' / seed
    records.write_json(folder / 'done.json', {'commit': seed, 'code': 'c'})
    records.write_json(folder / 'seconds.json', {})
  assert figures.starts(row, tmp_path) == {
    'warm': {'0': {'seconds': {}, 'commit': '0', 'code': 'c'}}
  }


def test_seeds_that_the_table_does_not_list_replicate_it_beside(tmp_path):
  row = row_of(arm('trained', seeds=(0,)))
  bar = table.Bar('em', lambda at: at('trained', 'after', 'eval/em').mean, 0.5)
  row = dataclasses.replace(row, bars=[bar])
  assert core.plan(row, row.arms, (11,)) == ['arms/trained/11']
  complete(row, tmp_path, 'arms/trained/0', 0.0, 0.75)
  found = rows.write(row, tmp_path, '', {})
  assert 'replication' not in found and found['bars'][0]['holds']
  complete(row, tmp_path, 'arms/trained/11', 0.0, 0.25)
  found = rows.write(row, tmp_path, '', {})
  assert [*found['arms']['trained']['seeds']] == ['0']
  assert [b['value'] for b in found['bars']] == [0.75]
  again = found['replication']
  assert [*again['arms']['trained']['seeds']] == ['11']
  assert [(b['value'], b['holds']) for b in again['bars']] == [(0.25, False)]


def test_bars_of_a_replication_compare_the_same_seeds(tmp_path):
  row = row_of(arm('trained', seeds=(0,)), arm('random', seeds=(0,)))
  em = lambda at, name: at(name, 'after', 'eval/em').mean
  gain = lambda at: em(at, 'trained') - em(at, 'random')
  row = dataclasses.replace(row, bars=[table.Bar('gain', gain, 0.0)])
  for stage in 'trained/11', 'trained/12', 'random/11':
    complete(row, tmp_path, f'arms/{stage}', 0.0, 0.5)
  values = lambda: [
    (bar['value'], bar['holds'])
    for bar in rows.write(row, tmp_path, '', {})['replication']['bars']
  ]
  assert values() == [(None, False)]
  complete(row, tmp_path, 'arms/random/12', 0.0, 0.25)
  assert values() == [(0.125, True)]


def test_a_table_runs_in_pieces_of_its_json(tmp_path):
  def of(**fields):
    later = lambda seed: core.changed(tiny_row.config, fields, seed)
    return row_of(arm('a', 'warm'), warm={'warm': rows.Start(later)})

  row, out = of(), tmp_path / 'results.json'
  none = {'arms': {}, 'again': {}, 'stale': [], 'warm': {}}
  assert rows.earlier(row, str(out)) == rows.earlier(row, '') == none
  complete(row, tmp_path / 'here', 'arms/a/0', 0.0, 0.75)
  rows.write(row, tmp_path / 'here', str(out), {})
  known = rows.earlier(row, str(out))
  assert {arm: [*own] for arm, own in known['arms'].items()} == {'a': ['0']}
  assert core.needed(row, core.plan(row, row.arms), {'arms/a/0'}) == [
    'warm/warm/1',
    'arms/a/1',
  ]
  complete(row, tmp_path / 'there', 'arms/a/1', 0.0, 0.25)
  found = rows.write(row, tmp_path / 'there', str(out), {}, known=known)
  assert [*found['arms']['a']['seeds']] == ['0', '1']
  assert found['arms']['a']['mean']['after']['eval/em']['mean'] == 0.5
  # Seeds that the table does not list, and warm starts, are carried on too.
  complete(row, tmp_path / 'third', 'arms/a/11', 0.0, 0.5)
  complete(row, tmp_path / 'third', 'warm/warm/11', 0.0, 0.5)
  for folder in ('third', 'fourth'):
    known = rows.earlier(row, str(out))
    found = rows.write(row, tmp_path / folder, str(out), {}, known=known)
    assert [*found['arms']['a']['seeds']] == ['0', '1']
    assert [*found['replication']['arms']['a']['seeds']] == ['11']
  again = rows.earlier(row, str(out))
  assert again['arms']['a'] == found['arms']['a']['seeds']
  assert again['stale'] == []
  # From another warm start, or evaluated otherwise, a run is another.
  again = rows.earlier(of(**{'sft.steps': 3}), str(out))
  assert again['arms'] == {}
  assert again['stale'] == [f'arms/a/{seed}' for seed in (0, 1, 11)]
  short = {'after': rows.evaluation({'env.max_turn_tokens': 4})}
  asked = dataclasses.replace(row.arms[0], evaluations=short)
  asked = dataclasses.replace(row, arms=(asked,))
  assert rows.earlier(asked, str(out))['arms'] == {}
  unnamed = dataclasses.replace(
    row.arms[0], evaluations={'after': lambda *_: {}}
  )
  with pytest.raises(ConfigError, match='its name does not say'):
    rows.earlier(dataclasses.replace(row, arms=(unnamed,)), str(out))


def test_what_a_table_is_to_keep_and_cannot_is_named(tmp_path):
  out = tmp_path / 'results.json'
  runs = {
    'seeds': {'0': {'seconds': {}, 'values': {'after': {'eval/em': 1.0}}}}
  }
  records.write_json(out, {'arms': {'trained': runs}})
  flags = f'--row={MODULE}', f'--workdir={tmp_path / "runs"}', f'--out={out}'
  done = here.run('experiments.rows', *flags, '--keep')
  assert done.returncode == 2, done.stderr
  assert f'--keep: {out} has runs' in done.stderr and 'trained/0' in done.stderr
  assert json.loads(out.read_text()) == {'arms': {'trained': runs}}


def test_a_bar_needs_all_seeds(tmp_path):
  bar = table.Bar('em', lambda at: at('a', 'after', 'eval/em').mean, 0.5)
  row = dataclasses.replace(row_of(arm('a', seeds=(0, 1))), bars=[bar])
  for seed, value in ((0, None), (1, 0.75)):
    complete(row, tmp_path, f'arms/a/{seed}', 0.0, 0.75)
    (found,) = rows.write(row, tmp_path, '', {})['bars']
    assert (found['value'], found['holds']) == (value, value is not None)


def free(folder: pathlib.Path) -> bool:
  """Whether no process writes a run folder."""
  with open(folder / '.lock') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return False
  return True


def wait(condition, seconds=400.0):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, 'waited in vain'
    time.sleep(0.05)


def lines(path):
  return [json.loads(x) for x in path.open()] if path.exists() else []


@pytest.mark.long
def test_a_killed_table_goes_on_and_says_all(tmp_path):
  folder, out = tmp_path / 'runs', tmp_path / 'out' / 'results.json'
  flags = f'--row={MODULE}', f'--workdir={folder}', f'--out={out}'
  command = [sys.executable, '-m', 'experiments.rows', *flags]
  with (tmp_path / 'log').open('w') as log:
    killed = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
  trained = folder / 'arms/trained/0'
  try:
    # After the third update, which is evaluated: a stop within an update leaves
    # its evaluation out.
    wait(
      lambda: (
        killed.poll() is not None
        or len(lines(trained / 'run/metrics.jsonl')) >= 4
      )
    )
  finally:
    killed.send_signal(signal.SIGKILL)
  assert killed.wait() == -signal.SIGKILL, (tmp_path / 'log').read_text()
  # Its child minds that it is alone: it saves and ends.
  wait(lambda: free(trained / 'run'))
  assert not (trained / 'done.json').exists()
  seen = json.loads(out.read_text())  # what was done is told already
  assert list(seen['arms']) == ['untrained']
  assert [b['value'] for b in seen['bars']] == [None, None]

  done = here.run('experiments.rows', *flags)
  assert done.returncode == 0, done.stderr
  # What was whole was left alone; the rest went on from its checkpoint.
  assert '[1/1] arms/trained/0' in done.stdout
  for run, starts in (('warm/warm/0/run', 1), ('arms/trained/0/run', 2)):
    about = json.loads((folder / run / 'environment.json').read_text())
    assert len(about['starts']) == starts
  steps = lines(trained / 'run/metrics.jsonl')
  assert [s['step'] for s in steps] == [-1, *range(12)]

  found = json.loads(out.read_text())
  assert found['command'].startswith('python -m experiments.rows --row=')
  assert list(found['arms']) == ['untrained', 'trained']
  one = found['arms']['trained']
  (seed,) = one['seeds'].values()
  assert seed['values']['before']['eval/em'] == steps[0]['eval/em']
  assert seed['values']['short']['eval/tokens'] <= 16  # four turns of four
  assert seed['values']['gain']['eval/tokens'] == pytest.approx(
    seed['values']['after']['eval/tokens']
    - seed['values']['before']['eval/tokens']
  )
  assert set(seed['values']['after']) == {
    f'eval{part}/{score}'
    for part in ('', '/hops=1', '/hops=2')
    for score in ('em', 'tokens')
  } | {
    f'eval/source=micro_{n}hop/{score}'
    for n in (1, 2)
    for score in ('em', 'tokens')
  }
  assert seed['seconds']['train'] > 0 and seed['commit']
  # Before (step 0) and every third of 12 updates.
  assert [x for x, _ in seed['curve']['eval/em']] == [0, 3, 6, 9, 12]
  assert len(seed['curve']['reward']) == 12
  assert one['mean']['after']['eval/em']['n'] == 1
  assert [b['holds'] for b in found['bars']] == [True, True]
  assert 1000 < os.path.getsize(out.with_name('curves.png')) < 60_000
  assert '| trained | 1 |' in done.stdout
