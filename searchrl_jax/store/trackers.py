"""What shows a run's metrics besides metrics.jsonl: TensorBoard, wandb."""

from collections.abc import Callable, Mapping
import contextlib
import os
import pathlib
import secrets
import textwrap
import time
from typing import NamedTuple

from searchrl_jax import lookup
from searchrl_jax.store import records


class Tracker(NamedTuple):
  """write: takes a step and its finite metrics. show: takes a step, a name and
  a text; None if it shows no texts."""

  write: Callable[[int, Mapping[str, float]], None]
  show: Callable[[int, str, str], None] | None = None


def trackers(folder: pathlib.Path, config, step: int, stack) -> list[Tracker]:
  """Opens what config.log asks for; `stack` (an ExitStack) closes it.

  step: the first one of this start; points from it on are written again.

  Raises:
    RunError: wandb is missing, or refuses.
  """
  found = []
  if config.log.tensorboard:
    found.append(_tensorboard(folder / 'tensorboard', step, stack))
  # The variable of the machine's owner takes precedence over the config.
  mode = os.environ.get('WANDB_MODE') or config.log.wandb
  if mode != 'disabled':
    found.append(_wandb(folder, config, mode, stack))
  return found


def _tensorboard(folder: pathlib.Path, step: int, stack) -> Tracker:
  """Writes TensorBoard's event file without TensorFlow or torch."""
  # Imported here because a run without TensorBoard need not install it.
  from tensorboard.compat.proto import event_pb2, summary_pb2
  from tensorboard.plugins.text import summary_v2
  from tensorboard.summary.writer.event_file_writer import EventFileWriter

  writer = stack.enter_context(contextlib.closing(EventFileWriter(str(folder))))

  def add(step, **event):
    event = event_pb2.Event(wall_time=time.time(), step=step, **event)
    with records.explained(folder):
      writer.add_event(event)
      writer.flush()

  def write(step, values):
    value = summary_pb2.Summary.Value
    values = [value(tag=k, simple_value=v) for k, v in values.items()]
    add(step, summary=summary_pb2.Summary(value=values))

  def show(step, name, text):
    # It is read as Markdown: as a code block, tags stay text.
    add(step, summary=summary_v2.text_pb(name, textwrap.indent(text, ' ' * 4)))

  # Tells TensorBoard to drop points of steps >= `step` seen before.
  begin = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  add(step, session_log=begin)
  return Tracker(write, show)


def _wandb(folder: pathlib.Path, config, mode: str, stack) -> Tracker:
  """Writes to the wandb run of the folder.

  Raises:
    RunError: the package is missing, or refuses (no key, no network).
  """
  where = f'config.log.wandb={mode!r}', records.RunError
  with lookup.of(*where, ImportError):
    import wandb
  name = folder / 'wandb_id.txt'
  if not name.exists():
    records.write_text(name, secrets.token_hex(4) + '\n')
  with lookup.of(*where, wandb.errors.Error):
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
  stack.callback(run.finish)
  # Our step is the axis: wandb's own counter cannot go back on a resume.
  run.define_metric('*', step_metric='step')
  return Tracker(lambda step, values: run.log({'step': step, **values}))
