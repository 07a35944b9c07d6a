"""Copies metrics to TensorBoard and wandb."""

from collections.abc import Mapping
import os
import pathlib
import secrets
import time
from typing import Any

from ml_collections import ConfigDict

from searchrl_jax.run import records

_WANDB_MODES = ('disabled', 'offline', 'online')


class TensorBoard:
  """Writes TensorBoard's event file without TensorFlow or torch."""

  def __init__(self, folder: pathlib.Path, step: int):
    # Imported here because a run without TensorBoard need not install it.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._path = folder / 'tensorboard'
    with records.explained(self._path):
      self._writer = EventFileWriter(str(self._path))
      # Tells TensorBoard to drop points of steps >= `step` seen before.
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._writer.add_event(
        self._event(wall_time=time.time(), step=step, session_log=start)
      )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    value = self._summary.Value
    summary = self._summary(
      value=[value(tag=k, simple_value=v) for k, v in values.items()]
    )
    event = self._event(wall_time=time.time(), step=step, summary=summary)
    with records.explained(self._path):
      self._writer.add_event(event)
      self._writer.flush()

  def close(self) -> None:
    with records.explained(self._path):
      self._writer.close()


def wandb_run(folder: pathlib.Path, config: ConfigDict) -> Any:
  """Opens the wandb run of config.log; None if it is disabled.

  Raises:
    RunError: an unknown mode, or wandb is missing or fails.
  """
  where = f'config.log.wandb={config.log.wandb!r}'
  if config.log.wandb not in _WANDB_MODES:
    raise records.RunError(f'{where} must be one of {_WANDB_MODES}')
  # The variable of the machine's owner takes precedence over the config.
  mode = os.environ.get('WANDB_MODE') or config.log.wandb
  if mode == 'disabled':
    return None
  try:
    import wandb
  except ImportError as error:
    raise records.RunError(
      f'{where} needs the package wandb: pip install wandb'
    ) from error
  name = folder / 'wandb_id.txt'
  if not name.exists():
    records.write_text(name, secrets.token_hex(4) + '\n')
  try:
    run = wandb.init(
      project=config.log.project,
      name=config.name,
      id=name.read_text().strip(),
      resume='allow' if mode == 'online' else None,
      dir=str(folder),
      mode=mode,
      config=records.plain(config),
      settings=wandb.Settings(silent=True),
    )
  except wandb.errors.Error as error:
    raise records.RunError(
      f"{where}: {error}. Use 'offline' or 'disabled'"
    ) from error
  # Our step is the axis: wandb's own counter cannot go back on a resume.
  run.define_metric('*', step_metric='step')
  return run
