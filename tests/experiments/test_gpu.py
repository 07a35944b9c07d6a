"""The GPU hour: its plan, what is run again, and what its table says."""

import dataclasses
import json
import sys
import time

import pytest

from experiments import common
from experiments.gpu import run

DONE = {
  'model': 'qwen2.5-3b',
  'status': 'done',
  'small': False,
  'seconds': 3.0,
  'bars': [common.bar('update_mfu', 0.5, 0.45) | {'goal': 0.5}],
}
STAGES = run.Stage('update'), run.Stage('search'), run.Stage('grpo')


@dataclasses.dataclass(frozen=True)
class Script(run.Stage):
  """A stage that runs a line of Python instead."""

  code: str = ''

  def command(self, out, small):
    return [sys.executable, '-c', self.code.format(path=out / self.name)]


def test_every_stage_has_a_function_and_the_time_of_all_suffices():
  source = (run.common.ROOT / 'experiments/gpu/stages.py').read_text()
  plan = run.plan(small=False)
  for stage in plan:
    assert f'def {stage.of or stage.name}(config, out, small)' in source
  assert plan[0].name == 'update' and run.LIMIT <= 480
  command = plan[-1].command('out', small=True)
  assert '--set=engine.module=vllm' in command and '--small' in command


def test_stages_that_are_done_are_not_run_again(tmp_path):
  (tmp_path / 'update.json').write_text(json.dumps(DONE))
  other = json.dumps(DONE | {'model': 'qwen2.5-1.5b'})
  (tmp_path / 'search.json').write_text(other)
  (tmp_path / 'grpo.json').write_text('{"status": "failed", "reason": "x"}')
  ran = []

  def start(stage, out, small, limit):
    ran.append((stage.name, round(limit)))
    return DONE | {'bars': []}

  records = run.run_all(STAGES, tmp_path, False, 600, start)
  assert ran == [('search', 480), ('grpo', 480)]
  assert list(records) == ['update', 'search', 'grpo']
  assert run.failed(records) == []


def test_a_stage_without_time_is_not_started_and_is_named(tmp_path):
  started = []

  def start(stage, out, small, limit):
    started.append(limit)
    time.sleep(0.2)
    return {'status': 'skipped', 'reason': 'no such field'}

  seconds = run.LEAST + 0.1
  records = run.run_all(STAGES, tmp_path, False, seconds, start)
  assert len(started) == 1 and started[0] <= seconds
  assert run.failed(records) == ['search', 'grpo']
  table = run.rows(records)
  assert [r['verdict'] for r in table] == [
    'skipped', 'not started', 'not started'
  ]  # fmt: skip
  assert table[0]['reason'] == 'no such field'


def test_the_table_has_a_row_for_each_bar():
  missed = common.bar('decode', 0.3, 0.4)
  step = {'figure': 'seconds of a step', 'value': 12.5}
  table = run.rows(
    {
      'update': DONE | {'bars': [*DONE['bars'], missed]},
      'grpo': DONE | {'bars': [], 'figure': step},
      'small': DONE | {'small': True},
    }
  )
  assert [(r['stage'], r['value'], r['verdict']) for r in table] == [
    ('update', 0.5, 'holds'),
    ('update', 0.3, 'MISSED'),
    ('grpo', 12.5, 'done'),
    ('small', 0.5, 'tried'),
  ]
  assert 'seconds of a step' in common.table(table)


WRITES = 'open(r"{path}.json", "w").write(\'{{"status": "done"}}\')'


@pytest.mark.parametrize(
  'code, limit, status, reason',
  [
    (WRITES, 60, 'done', ''),
    ('raise SystemExit("no memory")', 60, 'failed', 'exit status 1'),
    ('import time; time.sleep(60)', 1, 'failed', 'stopped after 1 s'),
  ],
)
def test_a_stage_is_a_process_whose_end_is_recorded(
  tmp_path, code, limit, status, reason
):
  (tmp_path / 'a.json').write_text('{"status": "failed"}')  # an earlier one
  found = run.run(Script('a', code=code), tmp_path, True, limit)
  assert found['status'] == status
  assert found.get('reason', '') == reason
  kept = json.loads((tmp_path / 'a.json').read_text())
  assert kept['status'] == status
  if status == 'failed':
    assert kept['log'].strip() == ('' if limit == 1 else 'no memory')
