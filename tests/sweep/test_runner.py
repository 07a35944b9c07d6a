"""A sweep that is killed, an arm that fails, and SLURM's arrays."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

import pytest

from searchrl_jax.lookup import ConfigError
from searchrl_jax.store import records
from searchrl_jax.sweep import core, stages
from searchrl_jax.sweep import runner as sweep
from tests import here
from tests.conftest import ROOT
from tests.sweep import tiny_sweep

pytestmark = pytest.mark.slow

SPEC = 'tests.sweep.tiny_sweep'


def start(folder: pathlib.Path, *flags: str) -> subprocess.Popen:
  command = [sys.executable, '-m', 'searchrl_jax.sweep', f'--sweep={SPEC}']
  return subprocess.Popen(
    [*command, f'--workdir={folder}', *flags],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def command(folder: pathlib.Path, *flags: str) -> subprocess.CompletedProcess:
  """The same in this process; its stages have theirs."""
  where = f'--sweep={SPEC}', f'--workdir={folder}'
  return here.run('searchrl_jax.sweep', *where, *flags)


def lines(path: pathlib.Path) -> list[dict]:
  return [json.loads(x) for x in path.open()] if path.exists() else []


def kill_when(process: subprocess.Popen, condition) -> None:
  end = time.monotonic() + 400
  while not condition():
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < end, 'waited in vain'
    time.sleep(0.02)
  process.kill()
  process.communicate()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_sweep_killed_in_a_warm_start_goes_on_and_an_arm_fails(tmp_path):
  """tests/experiments/test_rows.py kills one in an arm."""
  about = tmp_path / 'warm/warm/0/run/environment.json'
  kill_when(start(tmp_path, '--parallel=2'), about.exists)
  # At once: what the killed sweep has started is still saving.
  done = command(tmp_path, '--parallel=2')
  assert done.returncode == 2
  assert '1 of 4' in done.stderr
  assert 'Traceback' not in done.stderr
  assert "arms/broken/0: error: set 'micro': n=1000000" in done.stderr
  assert f'{tmp_path}/logs/arms_broken_0.txt' in done.stderr
  assert '[1/4] warm/warm/0' in done.stdout
  assert len(json.loads(about.read_text())['starts']) == 2
  table = (tmp_path / 'table.md').read_text()
  assert table in done.stdout
  arms = [line.split(' | ')[0] for line in table.splitlines()[2:]]
  assert arms == ['| base', '| kl']
  assert len(lines(tmp_path / 'arms/kl/0/run/metrics.jsonl')) == 1 + 5


def test_a_stage_of_another_config_is_refused_before_any_runs(
  tmp_path, monkeypatch
):
  begun = []
  monkeypatch.setattr(sweep, 'run', lambda *_, **__: begun.append(1))
  stage = 'arms/base/0'
  tiny_sweep.complete(tiny_sweep.get_sweep(), tmp_path, stage, 0.25, 0.5)
  path = tmp_path / stage / 'done.json'
  about = json.loads(path.read_text())
  about['config']['optim']['lr'] = 2.0
  records.write_json(path, about)
  done = command(tmp_path)
  assert done.returncode == 2 and not begun
  assert 'optim.lr' in done.stderr and stage in done.stderr


def test_what_needs_a_failed_warm_start_fails_with_its_name(
  tmp_path, monkeypatch
):
  made = core.sweep(tiny_sweep.config, [('a', {}), ('b', {})], seeds=(0, 1))
  # The process that would warm-start seed 0 ends at once.
  fake = 'import sys; print("error: no luck"); sys.exit(2)'
  begun = []

  def spawn(spec, stage, folder, url, slot, slots):
    begun.append((stage, slot))
    log = sweep.log_of(folder, stage)
    log.parent.mkdir(exist_ok=True)
    code = fake if stage == 'warm/warm/0' else 'pass'
    with log.open('w') as out:
      return subprocess.Popen(
        [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=out
      )

  monkeypatch.setattr(sweep, 'spawn', spawn)
  monkeypatch.setattr(stages.Servers, 'url', lambda *_: 'http://127.0.0.1:9')
  with pytest.raises(sweep.SweepError, match='3 of 6') as error:
    sweep.run(SPEC, made, core.plan(made, made.arms), tmp_path, parallel=2)
  assert 'warm/warm/0: error: no luck (' in str(error.value)
  assert 'arms/a/0: it needs warm/warm/0' in str(error.value)
  names = [stage for stage, _ in begun]
  assert sorted(names[:2]) == ['warm/warm/0', 'warm/warm/1']
  assert sorted(names[2:]) == ['arms/a/1', 'arms/b/1']
  assert {slot for _, slot in begun} == {0, 1}


@pytest.mark.parametrize('given, seen', [('0,1,2,3', '1,3'), ('0', '0')])
def test_processes_share_out_the_gpus_that_are_named(
  given, seen, tmp_path, monkeypatch
):
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', given)
  monkeypatch.setattr(sys, 'executable', str(tmp_path / 'show'))
  (tmp_path / 'show').write_text('#!/bin/sh\ncat\necho $CUDA_VISIBLE_DEVICES')
  (tmp_path / 'show').chmod(0o755)
  process = sweep.spawn(SPEC, 'arms/a/0', tmp_path, '', 1, 2)
  process.stdin.close()
  assert process.wait() == 0
  assert sweep.log_of(tmp_path, 'arms/a/0').read_text() == f'{seen}\n'


@pytest.mark.parametrize('given', [None, 'glibc.malloc.check=0'])
def test_processes_ask_for_huge_pages_unless_told(given, tmp_path, monkeypatch):
  monkeypatch.delenv('GLIBC_TUNABLES', raising=False)
  if given:
    monkeypatch.setenv('GLIBC_TUNABLES', given)
  started = mock.Mock()
  monkeypatch.setattr(subprocess, 'Popen', started)
  sweep.spawn(SPEC, 'arms/a/0', tmp_path, '', 0, 1)
  asked = started.call_args.kwargs['env']['GLIBC_TUNABLES']
  assert asked == (given or 'glibc.malloc.hugetlb=1')


@pytest.mark.parametrize(
  'cores, slots, shares',
  [
    ({4, 5, 8, 9}, 2, [[4, 5], [8, 9]]),
    # As many for all: equal bits whichever slot a stage has when it goes on.
    ({0, 1, 2}, 2, [[0], [1]]),
    ({7}, 2, []),
    ({0, 1}, 1, []),
  ],
)
def test_processes_share_out_cores(cores, slots, shares, tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: cores, raising=False)
  monkeypatch.setattr(
    os, 'sched_setaffinity', lambda _, own: seen.append(own), raising=False
  )
  monkeypatch.setattr(subprocess, 'Popen', mock.Mock())
  for slot in range(slots):
    sweep.spawn(SPEC, 'arms/a/0', tmp_path, '', slot, slots)
  assert seen == shares


SBATCH = """#!/bin/bash
echo "$@" >> {folder}/asked
[ -z "$REFUSE" ] || {{ echo "no such partition" >&2; exit 1; }}
echo "$((100 + $(wc -l < {folder}/asked)));cluster"
"""


def test_slurm_gets_warm_starts_first(tmp_path, monkeypatch):
  made = core.sweep(tiny_sweep.config, [('a', {}), ('b', {})], seeds=(0, 1))
  planned = core.plan(made, made.arms)
  monkeypatch.setenv('PATH', str(tmp_path))
  with pytest.raises(ConfigError, match='--slurm'):
    sweep.submit(SPEC, made, planned, tmp_path)
  (tmp_path / 'sbatch').write_text(SBATCH.format(folder=tmp_path))
  (tmp_path / 'sbatch').chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
  plain = records.plain(stages.config_of(made, 'warm/warm/1', tmp_path))
  records.write_json(
    tmp_path / 'warm/warm/1/done.json', {'config': plain, 'contents': {}}
  )
  jobs = sweep.submit(SPEC, made, planned, tmp_path, ['--time=5'])
  assert jobs == ['101', '102']
  first, second = (tmp_path / 'asked').read_text().splitlines()
  # Those of seed 1 have their warm start already.
  assert '--array=0-2 ' in first and '--dependency' not in first
  assert '--array=0-1 ' in second and '--dependency=afterany:101' in second
  assert '--time=5 experiments/cluster/sweep.sbatch' in second
  assert (ROOT / sweep.SBATCH).exists()
  listed = (tmp_path / 'slurm/stages_1.txt').read_text().split()
  assert listed == ['arms/a/0', 'arms/b/0']
  monkeypatch.setenv('REFUSE', '1')
  with pytest.raises(ConfigError, match='sbatch: no such partition'):
    sweep.submit(SPEC, made, planned, tmp_path)


def test_a_task_of_an_array_runs_the_stage_of_its_number(tmp_path):
  (tmp_path / 'srun').write_text('#!/bin/bash\necho "$@"\n')
  (tmp_path / 'srun').chmod(0o755)
  (tmp_path / 'stages').write_text('warm/warm/0\narms/a/0\n')
  env = os.environ | {
    'PATH': f'{tmp_path}:/usr/bin:/bin',
    'SLURM_ARRAY_TASK_ID': '1',
    'SLURM_SUBMIT_DIR': str(ROOT),
    'PYTHON': 'python',
  }
  done = subprocess.run(
    ['bash', sweep.SBATCH, str(tmp_path / 'stages'), '--sweep=x'],
    cwd=ROOT,
    env=env,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip().endswith(
    'python -m searchrl_jax.sweep --stage=arms/a/0 --sweep=x'
  )


def test_flags_that_name_nothing_are_refused():
  made = tiny_sweep.get_sweep()
  assert sweep.chosen(made, ['kl'], ['7']) == ['warm/warm/7', 'arms/kl/7']
  with pytest.raises(ConfigError, match="'bse'.*'base'"):
    sweep.chosen(made, ['bse'], [])
  with pytest.raises(ConfigError, match='--seeds=1,one'):
    sweep.chosen(made, [], ['1', 'one'])


def test_the_table_tells_how_far_each_stage_is(tmp_path):
  made = core.sweep(
    tiny_sweep.config, [('a', {})], seeds=(0,), tuning_seeds=(5,)
  )
  planned = [*core.plan(made, made.arms), *core.plan(made, made.arms, (5,))]
  plain = records.plain(stages.config_of(made, 'warm/warm/0', tmp_path))
  records.write_json(
    tmp_path / 'warm/warm/0/done.json', {'config': plain, 'contents': {}}
  )
  board = sweep.Board(made, planned, tmp_path)
  assert board.left == planned[1:]
  text = '\n'.join(f'{{"step": {n}, "eval/em": 0.5}}' for n in range(-1, 2))
  for stage in ('arms/a/0', 'warm/warm/5'):
    records.write_text(tmp_path / stage / 'run/metrics.jsonl', f'{text}\n')
  board.started('arms/a/0')
  table = board.table()
  cells = [[*column.cells] for column in table.columns]
  assert [str(c.header) for c in table.columns] == [
    '',
    '0 (report)',
    '5 (tuning)',
  ]
  assert cells == [
    ['warm/warm', 'arms/a'], ['done', '2/5'], ['stopped after 2', '']
  ]  # fmt: skip


def test_a_sweep_may_have_no_curves(tmp_path):
  made = core.sweep(tiny_sweep.config, [('a', {})], seeds=(0,), warm=False)
  made = dataclasses.replace(made, curves={})
  tiny_sweep.complete(made, tmp_path, 'arms/a/0', 0.25, 0.5)
  board = sweep.Board(made, ['arms/a/0'], tmp_path)
  board.ended('arms/a/0')
  assert [*board.table().columns[1].cells] == ['done']


def test_ctrl_c_lets_processes_save(tmp_path, monkeypatch):
  made = core.sweep(tiny_sweep.config, [('a', {})], seeds=(0,), warm=False)
  saves = 'import sys; sys.stdin.read(); open(sys.argv[1], "w").close()'

  def spawn(*_):
    command = [sys.executable, '-c', saves, str(tmp_path / 'saved')]
    return subprocess.Popen(command, stdin=subprocess.PIPE)

  def interrupt(seconds):
    raise KeyboardInterrupt

  monkeypatch.setattr(sweep, 'spawn', spawn)
  monkeypatch.setattr(stages.Servers, 'url', lambda *_: 'http://127.0.0.1:9')
  monkeypatch.setattr(sweep.time, 'sleep', interrupt)
  with pytest.raises(KeyboardInterrupt):
    sweep.run(SPEC, made, core.plan(made, made.arms), tmp_path)
  assert (tmp_path / 'saved').exists()
