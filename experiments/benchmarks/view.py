"""Writes the page of 2,000 trajectories of 2,000 tokens; times it in Chromium.

  python -m experiments.benchmarks.view --out=view.json

Needs chromium and chromium-driver (Debian). The run is one that
tests/viewed.py writes: 250 groups of 8. Bars: seconds of `view`; milliseconds
from the start of the navigation to the first paint, and until the first
trajectory is drawn; milliseconds from an input to the filters until the list
is painted; bytes of the index. The page is opened and filtered --reps times;
its bars take the slowest.
"""

import functools
import pathlib
import tempfile
import time

from experiments import common
from experiments.benchmarks import harness
from searchrl_jax import lookup, read, view
from tests import browsers, viewed

STEPS, QUESTIONS, GROUP = 5, 50, 8
TOKENS = 2000

# The time of an input's effect: the frame after the one that it is drawn in.
_FILTER = """
const [id, value, done] = arguments, input = document.getElementById(id);
input.value = value;
const begin = performance.now();
input.dispatchEvent(new Event('input', {bubbles: true}));
requestAnimationFrame(() => setTimeout(() => done(performance.now() - begin)));
"""
_INPUTS = (
  ('f-text', 'the'),
  ('f-reward-low', '1'),
  ('f-step-low', '2'),
  ('f-text', ''),
  ('f-reward-low', ''),
)


def make(folder: pathlib.Path) -> None:
  """A run with trajectories of about TOKENS tokens."""
  tok = viewed.tokenizer(folder / 'words')
  asked = viewed.questions(QUESTIONS)
  text, n = ' '.join(p.text for _, p in asked), TOKENS
  # Observations are filled up to the length.
  ids = tok.encode(f' {text}' * (1 + n // len(tok.encode(text))))
  padding = tok.decode(ids[: n - 140])
  viewed.write_run(
    folder, steps=STEPS, count=QUESTIONS, group=GROUP, asked=asked,
    padding=padding,
  )  # fmt: skip


def opened(browser, page: pathlib.Path) -> dict[str, float]:
  """Milliseconds of one load of the page and of each filter."""
  browser.get('about:blank')
  browser.get(page.as_uri())
  browser.execute_async_script(
    'const done = arguments[0];(function look() { performance.getEntriesByName('
    "'drawn').length ? done() : setTimeout(look, 10); })()"
  )
  paint, drawn = browser.execute_script(
    "return [performance.getEntriesByName('first-contentful-paint')[0],"
    "performance.getEntriesByName('drawn')[0]].map(x => x.startTime)"
  )
  filters = [browser.execute_async_script(_FILTER, *x) for x in _INPUTS]
  return dict(first_paint_ms=paint, drawn_ms=drawn, filter_ms=max(filters))


def measure() -> list[dict]:
  lookup.require(not browsers.missing(), browsers.missing())
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    make(folder / 'run')
    tokens = read.run(folder / 'run').trajectories().tokens
    begin, cpu = time.monotonic(), time.process_time()
    page = view.write(str(folder / 'run'), folder / 'report.html')
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    files = folder / 'report_files'
    with browsers.chromium(folder / 'profile') as browser:
      opening = functools.partial(opened, browser, page)
      rows = harness.turns({'opened': opening})['opened']
      version = browser.capabilities['browserVersion']
    index = (files / view.INDEX).stat().st_size
    size = sum(path.stat().st_size for path in files.iterdir())
  about = {'trajectories': len(tokens), 'mean_tokens': float(tokens.mean())}
  about |= {'write_seconds': seconds, 'cpu_seconds': cpu}
  about |= {'index_mb': index / 1e6, 'mb': size / 1e6, 'chromium': version}
  return [about, *rows]


def bars(rows) -> list[dict]:
  about, *loads = rows
  worst = {name: max(row[name] for row in loads) for name in loads[0]}
  bar = functools.partial(common.bar, at_most=True)
  return [
    bar('view_seconds', about['write_seconds'], 20),
    bar('view_first_paint_ms', worst['first_paint_ms'], 1000),
    bar('view_drawn_ms', worst['drawn_ms'], 1000),
    bar('view_filter_ms', worst['filter_ms'], 100),
    bar('view_index_mb', about['index_mb'], 5),
  ]


if __name__ == '__main__':
  harness.run('view', measure, bars, reps=5)
