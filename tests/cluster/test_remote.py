"""A run at gs://, of processes that share no disk (make test-cluster)."""

import json
import pathlib
import shutil
import signal
import time

import pytest

from searchrl_jax.store import records, remote
from tests import gcs
from tests.cluster import launch
from tests.cluster import test_processes as local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), gcs.needed]

WORKDIR = f'gs://{gcs.BUCKET}/runs/tiny'
STEPS = 3
# Metrics of what one start measured.
MEASURED = 'time/', 'rollout/', 'sync/', 'second', 'mfu', 'memory'


@pytest.fixture(scope='module')
def bucket():
  with gcs.emulator():
    yield


def caches(folder: pathlib.Path) -> dict[int, dict]:
  """A folder of its own for each of two processes."""
  return {rank: {remote.CACHE: str(folder / f'disk_{rank}')} for rank in (0, 1)}


def computed(workdir) -> list[dict]:
  lines = (pathlib.Path(workdir) / 'metrics.jsonl').read_text().splitlines()
  measured = lambda name: any(part in name for part in MEASURED)
  return [
    {k: v for k, v in json.loads(line).items() if not measured(k)}
    for line in lines
  ]


def test_a_killed_run_goes_on_from_empty_disks(
  bucket, tmp_path, url, monkeypatch
):
  with launch.train(2, tmp_path / 'whole', url, steps=STEPS) as processes:
    local.end(processes)

  start = lambda: launch.train(
    2, tmp_path, url, f'--workdir={WORKDIR}', steps=STEPS, own=caches(tmp_path)
  )
  fs, root = remote._open(WORKDIR)
  with start() as processes:
    end = time.monotonic() + local.START_S
    while not fs.exists(f'{root}/checkpoints/00000001/commit_success.txt'):
      assert time.monotonic() < end and processes.running[0].poll() is None, (
        processes.said(0)[-2000:]
      )
      time.sleep(0.1)
    processes.send(1, signal.SIGKILL)
    processes.wait(local.START_S)
  for disk in tmp_path.glob('disk_*'):
    shutil.rmtree(disk)
  with start() as processes:
    local.end(processes)
  # The second process has neither the metrics nor the first one's files.
  assert not [*(tmp_path / 'disk_1').rglob('step_*_p000.parquet')]

  monkeypatch.setenv(remote.CACHE, str(tmp_path / 'reader'))
  run = remote.open_run(WORKDIR, steps=True)
  assert computed(run) == computed(tmp_path / 'whole' / 'run')
  want = local.params(tmp_path / 'whole' / 'run')
  for name, value in local.params(run).items():
    assert value.tobytes() == want[name].tobytes(), name
  names = sorted(p.name for p in (pathlib.Path(run) / 'trajectories').iterdir())
  parts = [f'step_{i:08d}_p00{j}.parquet' for i in range(STEPS) for j in (0, 1)]
  assert names == parts
  ours = [r.reward for r in records.read(pathlib.Path(run) / 'trajectories')]
  assert len(ours) == 12 * STEPS


def test_commands_read_it(bucket, tmp_path, url):
  """The run of the test above."""
  own = {0: {remote.CACHE: str(tmp_path / 'disk')}}
  args = [f'--workdir={WORKDIR}', f'--config.source.url={url}']
  args.append('--config.data.eval.micro.n=4')
  commands = {
    'evaluate': args,
    'export': [args[0], f'--out={tmp_path}/exported'],
    'view': [args[0], f'--out={tmp_path}/page.html'],
  }
  for name, given in commands.items():
    module = f'searchrl_jax.{name}'
    with launch.start(1, tmp_path, module, *given, own=own) as processes:
      local.end(processes)
  assert (tmp_path / 'exported' / 'model.safetensors').exists()
  assert (tmp_path / 'page.html').stat().st_size > 10_000
  fs, root = remote._open(WORKDIR)
  (found,) = fs.glob(f'{root}/evaluate_*/eval.json')
  assert json.loads(fs.cat_file(found))['eval/em/n'] == 4


def test_a_bucket_that_does_not_exist_is_one_line(bucket, tmp_path, url):
  own = {0: {remote.CACHE: str(tmp_path / 'disk')}}
  where = '--workdir=gs://none_such/run'
  with launch.train(1, tmp_path, url, where, own=own) as processes:
    assert processes.wait(local.START_S) == [2]
    said = processes.said(0)
  assert 'gs://none_such/run' in said
  assert 'credentials' in said and 'Traceback' not in said
