"""Writes a page that shows the trajectories of a run, for a browser.

  python -m searchrl_jax.view --workdir=runs/quickstart --out=report.html
  python -m searchrl_jax.view --workdir=runs/a --against=runs/b --out=ab.html
  python -m searchrl_jax.view --workdir=runs/quickstart --serve

The page opens from disk, without network. The folder beside it (report_files)
has an index and the tokens as script files, since browsers do not let a page
read local files; both go where the page goes. --serve shows a run that is
still being written, on this machine alone, and updates the page.

Text from trajectories reaches the page inside JSON of ASCII characters, in
which no markup can form, and view.html makes text nodes of it.
"""

import base64
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import functools
import html
import http.server
import json
import pathlib
import re
import secrets
import threading
import time
from typing import Any
import urllib.parse

from absl import flags
import numpy as np

from searchrl_jax import lookup, read
from searchrl_jax.run import command
from searchrl_jax.store import records
from searchrl_jax.store.records import Record, RunError
from searchrl_jax.types import SEARCH, Context, SearchError

PAGE = pathlib.Path(__file__).with_suffix('.html')
INDEX, LIVE = 'index.js', 'live.js'
_STEPS = 64  # of a part, about this many are shown at most
_POINTS = 400  # of a metric
_FILE = 60_000  # tokens, after which another script file begins
_QUESTION, _ANSWER = 240, 120  # characters in the index
_SECONDS = 3.0  # between looks at a run that is being written
# Of a row of the index; with `question`, the number of one in its list.
COLUMNS = (
  'run', 'part', 'step', 'question', 'role', 'sample', 'end', 'reward', 'em',
  'valid', 'kept', 'searches', 'turns', 'tokens', 'sampled', 'advantage',
  'answer', 'file', 'at',
)  # fmt: skip


def write(
  workdir: str,
  out: str | pathlib.Path,
  *,
  against: str = '',
  trajectories: int = 2000,
  live: bool = False,
) -> pathlib.Path:
  """Writes the page and its folder; returns the path of the page.

  Args:
    workdir: folder of a run, or one that `evaluate` wrote.
    out: the page; replaced if it exists.
    against: another run, to compare what both did with the same questions.
    trajectories: how many of each run, about: whole groups, spread evenly over
      parts, steps and the questions of a step.
    live: the runs may be being written, and the page looks for changes.

  Raises:
    RunError: a run cannot be read, has no trajectories, or the questions of the
      two are not of one world.
  """
  out = pathlib.Path(out)
  folder = out.with_name(f'{out.stem}_files')
  runs = [read.run(w, live) for w in (workdir, against) if w]
  rows: list[dict[str, Any]] = []
  for n, run in enumerate(runs):
    found = [
      {'run': n} | row
      for part, step, count in _chosen(run, trajectories)
      for row in _step(run, part, step, count, folder / f'{n}_{part}_{step}')
    ]
    records.require(
      found,
      f'{run.folder} has no trajectories: it has not finished a step, or '
      'config.log.trajectories_every is 0',
    )
    rows += found
  if len(runs) > 1:
    _require_comparable(runs, rows)
  questions: dict[tuple, int] = {}
  for row in rows:
    row['question'] = questions.setdefault(row['asked'], len(questions))
  revision = f'{time.time_ns():x}'
  index = {
    'live': _SECONDS if live else 0,
    'revision': revision,
    'runs': [_about(run) for run in runs],
    'controls': {
      i: run.tokenizer.control_name(i)
      for run in runs
      for i in sorted(run.tokenizer.control)
    },
    'questions': [*questions],
    'columns': COLUMNS,
    'rows': [[row[name] for name in COLUMNS] for row in rows],
  }
  _script(folder / INDEX, 'index', records.plain(index))
  _script(folder / LIVE, 'revision', revision)
  used = {INDEX, LIVE, *(f'{r["file"]}.js' for r in rows)}
  # Of a page that was here before.
  ours = re.compile(rf'\d+_({"|".join(records.PARTS)})_-?\d+_\d+\.js')
  for path in folder.glob('*.js'):
    if path.name not in used and ours.fullmatch(path.name):
      path.unlink()
  text = PAGE.read_text('utf-8')
  text = text.replace('{{nonce}}', secrets.token_urlsafe(16))
  name = html.escape(urllib.parse.quote(folder.name))
  records.write_text(out, text.replace('{{files}}', name))
  return out


def _script(path: pathlib.Path, name: str, *values: Any) -> None:
  """Writes a call of the page's function `name`.

  JSON in ASCII, without '<': no text in it can end the script, or become a line
  or a direction of its own.
  """
  given = ','.join(json.dumps(v).replace('<', '\\u003c') for v in values)
  records.write_text(path, f'searchrl.{name}({given});\n')


def _chosen(run: read.Run, trajectories: int) -> list[tuple[str, int, int]]:
  """What to show: parts, steps and how many trajectories of each.

  Steps are every n-th, with n a power of two: a page of a run that goes on
  shows the same ones for long.
  """
  parts, out = run.parts, []
  for part, steps in parts.items():
    share, stride = trajectories // len(parts), 1
    group = run.config.rollout.group if part == read.TRAIN else 1
    while len(steps) > stride * max(1, min(_STEPS, share // group)):
      stride *= 2
    some = sorted({*steps[::stride], steps[-1]})
    out += [(part, step, max(1, share // len(some))) for step in some]
  return out


def _step(
  run: read.Run, part: str, step: int, count: int, stem: pathlib.Path
) -> Iterator[dict[str, Any]]:
  """Writes script files of about `count` trajectories; yields their rows."""
  groups: dict[tuple, list[Record]] = collections.defaultdict(list)
  for record in run.records(part, [step]):
    t = record.trajectory
    groups[t.question.id, t.role].append(record)
  if not (every := [*groups.values()]):
    return  # it was stopped before any had ended
  n = max(1, count * len(every) // sum(map(len, every)))
  places = np.linspace(0, len(every) - 1, min(n, len(every)))
  some = [every[i] for i in places.round().astype(int)]
  files, tokens, shown = 0, 0, []
  for number, group in enumerate(some, 1):
    name = f'{stem.name}_{files}'
    for record in group:
      row = run.row(record)
      question = row['question_id'], _cut(row['question'], _QUESTION)
      golds = tuple(_cut(a, _ANSWER) for a in row['answers'][:8])
      asked = *question, golds, row['source'], row['hops']
      yield row | {
        'asked': asked,
        'part': part,
        'answer': row['answer'] and _cut(row['answer'], _ANSWER),
        'file': name,
        'at': len(shown),
      }
      shown.append(_trajectory(run, record, row))
      tokens += row['tokens']
    if tokens > _FILE or number == len(some):
      _script(stem.with_name(f'{name}.js'), 'bundle', name, shown)
      files, tokens, shown = files + 1, 0, []


def _trajectory(run: read.Run, record: Record, row: Mapping) -> dict[str, Any]:
  """What a script file has of a trajectory, all text in full."""
  t = record.trajectory
  contexts = (False,) if t.train_context is None else (False, True)
  return {
    **{name: row[name] for name in ('question', 'answers', 'answer')},
    'rewards': dict(record.rewards),
    'seconds': round(t.seconds, 3),
    'invalid': t.invalid_actions,
    'sequences': [[*_segments(run, record, trained)] for trained in contexts],
    'searches': [searched(s, t.question.supporting) for s in t.searches],
  }


def _segments(run: read.Run, record: Record, trained: bool) -> Iterator[dict]:
  """The segments of a sequence; see `_column` for what is by token."""
  whole, end = trained or record.trajectory.train_context is None, 0
  contexts = [*record.trajectory.contexts]
  for n, (s, logps, advantages) in enumerate(read.by_segment(record, trained)):
    while contexts and contexts[0].start <= end:
      yield _context(run, contexts.pop(0))
    begin, end, earned = end, end + len(s.ids), None
    if whole and record.earned is not None:
      by_token = slice(begin, end) if record.earned_at == 'token' else n
      earned = float(record.earned[by_token].sum())
    yield {
      **{name: getattr(s, name) for name in ('author', 'kind', 'agent')},
      'train': s.train,
      'earned': earned,
      'text': run.pieces(s.ids),
      'ids': _base64(s.ids, '<i4'),
      'logps': _column(s.logps),
      'trainer': _column(logps),
      'advantages': _column(advantages),
      'versions': _column(s.versions, '<i4'),
    }


def _context(run: read.Run, context: Context) -> dict[str, Any]:
  """What a context began with, as a segment that stands before it."""
  none = dict.fromkeys(('earned', 'logps', 'trainer', 'advantages', 'versions'))
  return none | {
    'author': 'prompt',
    'kind': f'context_{context.reason}',
    'agent': '',
    'train': False,
    'text': run.pieces(context.prompt),
    'ids': _base64(context.prompt, '<i4'),
  }


def _column(values: np.ndarray | None, kind: str = '<f2') -> Any:
  """None, a number that all tokens have, or the array in base 64.

  Half precision, as records store them, or int32 for `kind` '<i4'.
  """
  if values is None or not len(values) or np.isnan(values).all():
    return None
  same = (values == values[0]).all()
  return values[0].item() if same else _base64(values, kind)


def _base64(values: np.ndarray, kind: str) -> str:
  return base64.b64encode(np.asarray(values, kind).tobytes()).decode()


def searched(found, supporting: Sequence[str] = ()) -> dict[str, Any]:
  """What a page shows of a search, or of another tool's call."""
  out = {k: getattr(found.request, k) for k in ('query', 'tool', 'turn')}
  if isinstance(found, SearchError):
    return out | {'error': f'{found.kind}: {found.message}'}
  golds = supporting if found.request.tool == SEARCH else ()
  passages = [vars(p) | {'gold': p.id in golds} for p in found.passages]
  seconds = round(found.seconds, 3)
  return out | {'passages': passages, 'seconds': seconds, 'text': found.text}


def _require_comparable(
  runs: Sequence[read.Run], rows: Sequence[Mapping]
) -> None:
  """Raises RunError unless equal ids are equal questions, and there are any."""
  names = ' and '.join(str(run.folder) for run in runs)
  a, b = (
    {r['asked'][0]: r['asked'] for r in rows if r['run'] == n} for n in (0, 1)
  )
  for id in a.keys() & b.keys():
    records.require(
      a[id][:3] == b[id][:3],
      f'{names} are of two worlds: question {id!r} is {a[id][1:3]} in one and '
      f'{b[id][1:3]} in the other; compare runs on the same data',
    )
  records.require(
    a.keys() & b.keys(),
    f'{names} share no question among those shown; compare runs on the same '
    'data, or show more (--trajectories)',
  )


def _about(run: read.Run) -> dict[str, Any]:
  """What the head of the page says of a run, and its metrics."""
  config, starts, frame = run.config, run.starts or [{}], run.metrics
  metrics = {}
  for name in frame:
    values = frame[name].dropna()
    at = np.linspace(0, len(values) - 1, min(_POINTS, len(values)))
    values = values.iloc[at.round().astype(int)]
    short = [float(f'{v:.6g}') for v in values]
    metrics[name] = [values.index.tolist(), short]
  model = config.model.path or config.model.arch.get('model_type', '')
  facts = {
    'recipe': config.name,
    'model': pathlib.Path(model).name,
    'advantage': config.algorithm.advantage,
    'learning rate': f'{config.optim.lr:g}',
    'batch': f'{config.rollout.questions} x {config.rollout.group}',
    'seed': config.seed,
    'steps': int(frame.index.max()) + 1 if len(frame) else 0,
    'started': str(starts[0].get('time', ''))[:16].replace('T', ' '),
    'commit': str(starts[-1].get('commit') or '')[:7],
  }
  name = run.folder.absolute().name
  return {'name': name, 'facts': facts, 'metrics': metrics}


def _cut(text: str, limit: int) -> str:
  return text if len(text) <= limit else f'{text[: limit - 1]}…'


# A page of a run that is being written.


class _Handler(http.server.SimpleHTTPRequestHandler):
  """Serves the page and its scripts, and nothing else of their folder."""

  def __init__(self, *args, page: pathlib.Path, **kwargs):
    self._page = page
    super().__init__(*args, directory=str(page.parent), **kwargs)

  def send_head(self):
    # Pages of other sites can neither ask by a name of theirs, nor (below)
    # include the scripts.
    host = self.headers.get('Host', '').rpartition(':')[0]
    if self.path == '/':
      self.path = f'/{urllib.parse.quote(self._page.name)}'
    path = pathlib.Path(self.translate_path(self.path))
    scripts = self._page.with_name(f'{self._page.stem}_files')
    known = path == self._page or path.parent == scripts
    if not known or host not in ('127.0.0.1', 'localhost'):
      self.send_error(http.HTTPStatus.NOT_FOUND)
      return None
    return super().send_head()

  def end_headers(self):
    self.send_header('Cross-Origin-Resource-Policy', 'same-origin')
    self.send_header('Cache-Control', 'no-cache')
    super().end_headers()

  def log_message(self, *args):
    """Prints nothing."""


def serve(page: pathlib.Path, port: int) -> http.server.ThreadingHTTPServer:
  """Serves the page at 127.0.0.1 from a thread, until `shutdown`.

  port: 0 = any free one.
  """
  handler = functools.partial(_Handler, page=page.absolute())
  server = http.server.ThreadingHTTPServer(('127.0.0.1', port), handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  return server


def follow(
  write_page: Callable[[], pathlib.Path], runs: Sequence[str]
) -> Iterator[pathlib.Path]:
  """Calls `write_page` when a file of the runs has changed; yields its result.

  It rests three times as long as it wrote: the run needs the processor too.
  """
  seen: Any = None
  folders = [*map(pathlib.Path, runs)]
  while True:
    files = [p for run in folders for p in run.glob('*/step_*.parquet')]
    files += [run / 'metrics.jsonl' for run in folders]
    begin = time.monotonic()
    try:
      now = {p: p.stat().st_mtime_ns for p in files if p.exists()}
      if now != seen:
        yield write_page()
        seen = now
    except (RunError, FileNotFoundError) as e:
      # No step yet; or a resumed run dropped a file that was listed.
      print(f'waiting: {e}', flush=True)
    time.sleep(max(_SECONDS, 3 * (time.monotonic() - begin)))


def main():
  runs = [w for w in (_WORKDIR.value, _AGAINST.value) if w]
  out = pathlib.Path(_OUT.value or pathlib.Path(runs[0]) / 'report.html')
  lookup.require(out.suffix == '.html', f'--out={out}: name a .html file')
  how = {'against': _AGAINST.value, 'trajectories': _TRAJECTORIES.value}
  page = functools.partial(write, runs[0], out, live=_SERVE.value, **how)
  if not _SERVE.value:
    print(page())
    return
  server = serve(out, _PORT.value)
  url = f'http://127.0.0.1:{server.server_port}/  (Ctrl-C ends)'
  with contextlib.suppress(KeyboardInterrupt):
    for n, _ in enumerate(follow(page, runs)):
      if not n:
        print(url, flush=True)


if __name__ == '__main__':
  _WORKDIR = command.define_workdir(opens={'steps': True})
  _OUT = command.define_out('', 'The page; default: report.html in --workdir.')
  _AGAINST = flags.DEFINE_string(
    'against', '', 'Another run, which asked the same questions.'
  )
  _TRAJECTORIES = flags.DEFINE_integer(
    'trajectories', 2000, 'How many of a run, about, spread evenly.', 1
  )
  _SERVE = flags.DEFINE_bool(
    'serve', False, 'Show a run that is being written, at 127.0.0.1.'
  )
  _PORT = flags.DEFINE_integer('port', 0, 'Of --serve; 0: any free one.')
  command.run(main)
