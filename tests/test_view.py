"""The page of trajectories: its files, and what Chromium makes of them."""

import dataclasses
import http.client
import json
import pathlib
import re
import shutil
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest

from searchrl_jax import read, view
from searchrl_jax.store.records import RunError
from searchrl_jax.types import Passage, SearchRequest, SearchResult
from tests import browsers, here, viewed

pytestmark = pytest.mark.slow

BIDI = '\u202eevil\u2066'
SCRIPT = '</script><script>window.owned=1</script><img src=x onerror=owned=1>'
HOSTILE = f'{SCRIPT}{BIDI}\u2028-->\u2029{{{{nonce}}}}'

# Hops, end and searches of trajectories.
KINDS = [(1, 'answer', 1), (2, 'turns', 3), (2, 'answer', 2), (3, 'tokens', 1)]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Two runs that asked the same questions, and one of hostile text."""
  folder = tmp_path_factory.mktemp('view')
  for name, seed in (('one', 0), ('two', 1)):
    viewed.write_run(folder / name, steps=3, count=4, group=4, seed=seed)
  tok, made = viewed.write_run(folder / 'bad', steps=0, open_=True)
  rng = np.random.default_rng(0)
  q, p = viewed.questions(1)[0]
  q = dataclasses.replace(q, text=f'who? {HOSTILE}', answers=(HOSTILE,))
  t = viewed.attempt(tok, q, p, rng, padding=HOSTILE)
  long = Passage('p\u202e', HOSTILE, 'x' * (1 << 20) + HOSTILE, None)
  t = dataclasses.replace(
    t, searches=(SearchResult(SearchRequest(HOSTILE, 1), (long,)),)
  )
  made.trajectories(0, [(t,)])
  made.write(0, {f'reward/{HOSTILE}': 1.0})
  made.close()
  tok, made = viewed.write_run(folder / 'kinds', steps=0, open_=True)
  groups = []
  for (q, p), (hops, end, n) in zip(viewed.questions(4), KINDS):
    t = viewed.attempt(tok, dataclasses.replace(q, hops=hops), p, rng)
    groups.append((dataclasses.replace(t, end=end, searches=t.searches * n),))
  made.trajectories(0, groups)
  made.close()
  return folder


def script(path: pathlib.Path) -> list:
  """The values that a script file hands to the page."""
  text = path.read_text()
  assert text.isascii() and '<' not in text
  call = re.fullmatch(r'searchrl\.(\w+)\((.*)\);\n', text, re.S)
  return json.loads(f'[{call[2]}]')


def test_the_index_and_the_tokens_are_those_of_the_run(folder, tmp_path):
  page = view.write(str(folder / 'one'), tmp_path / 'a' / 'report.html')
  files = page.with_name('report_files')
  (index,) = script(files / 'index.js')
  rows = [dict(zip(index['columns'], row)) for row in index['rows']]
  frame = read.run(folder / 'one').trajectories()
  assert len(rows) == len(frame) == 48
  for name in ('step', 'sample', 'end', 'reward', 'em', 'tokens', 'answer'):
    assert [r[name] for r in rows] == frame[name].tolist(), name
  texts = [index['questions'][r['question']][1] for r in rows]
  assert texts == frame.question.tolist()
  assert index['runs'][0]['metrics']['eval/em'] == [
    [-1, 0, 1, 2],
    [0.25, 0.3, 0.4, 0.5],
  ]
  tokens = read.run(folder / 'one').tokens().set_index(['step', 'id'])
  for row in rows[::7]:
    _, shown = script(files / f'{row["file"]}.js')
    (segments,) = shown[row['at']]['sequences']
    q = index['questions'][row['question']][0]
    wanted = tokens.loc[(row['step'], f'{q}/solver/{row["sample"]}')]
    assert sum((s['text'] for s in segments), []) == wanted.text.tolist()


def test_groups_are_whole_and_spread_over_the_steps(folder, tmp_path):
  def groups(trajectories):
    page = view.write(
      str(folder / 'one'), tmp_path / 'r.html', trajectories=trajectories
    )
    (index,) = script(page.with_name('r_files') / 'index.js')
    found = {}
    for row in index['rows']:
      row = dict(zip(index['columns'], row))
      found.setdefault((row['step'], row['question']), []).append(row['sample'])
    return found

  mine = tmp_path / 'r_files' / 'chart_2.js'
  mine.parent.mkdir()
  mine.write_text('mine')
  few, left = groups(13), {*tmp_path.glob('r_files/*')}
  assert [*few.values()] == [[0, 1, 2, 3]] * 3 and {s for s, _ in few} == {
    0,
    1,
    2,
  }
  assert [*groups(1).values()] == [
    [0, 1, 2, 3]
  ] * 2  # the first and the last step
  assert len({*tmp_path.glob('r_files/*')}) < len(left)  # none is left behind
  assert mine.exists()
  assert len(groups(2000)) == 12


def test_a_long_run_shows_every_nth_step():
  steps = lambda n, most: [
    s for _, s, _ in view._chosen(_Listed(n, 4), 4 * most)
  ]
  assert steps(5, 10) == [0, 1, 2, 3, 4]
  assert steps(10, 4) == [0, 4, 8, 9] and steps(11, 4) == [0, 4, 8, 10]
  assert len(steps(5000, 10_000)) <= view._STEPS + 1


class _Listed:
  """A run of n steps."""

  def __init__(self, n, group):
    self.parts = {read.TRAIN: [*range(n)]}
    self.config = viewed.config(group=group)


@pytest.mark.long
def test_the_index_of_2000_trajectories_is_small(tmp_path):
  run = tmp_path / 'run'
  viewed.write_run(run, steps=5, count=50, group=8)
  index = (
    view.write(str(run), tmp_path / 'r.html').with_name('r_files') / 'index.js'
  )
  assert len(script(index)[0]['rows']) == 2000
  assert index.stat().st_size < 1 << 20  # 5 MB are promised


def test_runs_that_cannot_be_compared(folder, tmp_path):
  out = tmp_path / 'r.html'
  changed = [
    (dataclasses.replace(q, answers=('else',)), p)
    for q, p in viewed.questions(4)
  ]
  viewed.write_run(tmp_path / 'world', steps=1, count=2, asked=changed)
  with pytest.raises(RunError, match='micro-3'):
    view.write(str(folder / 'one'), out, against=str(tmp_path / 'world'))
  viewed.write_run(
    tmp_path / 'other', steps=1, count=2, asked=viewed.questions(9)[5:]
  )
  with pytest.raises(RunError, match='--trajectories'):
    view.write(str(folder / 'one'), out, against=str(tmp_path / 'other'))
  viewed.write_run(tmp_path / 'none', steps=0)
  with pytest.raises(RunError, match='trajectories_every'):
    view.write(str(tmp_path / 'none'), out)
  # A run that was stopped at once: the step has a file without rows.
  (tmp_path / 'none' / 'trajectories').mkdir(exist_ok=True)
  one = folder / 'one' / 'trajectories' / 'step_00000000.parquet'
  empty = pq.read_table(one).slice(0, 0)
  pq.write_table(empty, tmp_path / 'none' / 'trajectories' / one.name)
  with pytest.raises(RunError, match='not finished a step'):
    view.write(str(tmp_path / 'none'), out)
  assert not out.exists()


def test_the_command_prints_the_page_or_one_sentence(folder, tmp_path):
  command = 'searchrl_jax.view', f'--workdir={folder / "one"}'
  done = here.run(
    *command, f'--out={tmp_path}/r.html', f'--against={folder}/two'
  )
  assert (done.stdout.strip(), done.returncode) == (f'{tmp_path}/r.html', 0)
  assert (tmp_path / 'r.html').read_text().count('{{') == 0
  done = here.run(*command, f'--out={tmp_path}/r')
  assert '.html' in done.stderr and done.returncode == 2
  done = here.run('searchrl_jax.view', f'--workdir={tmp_path}')
  assert done.stderr.startswith('error: ') and done.stderr.count('\n') == 1
  assert 'no config.json' in done.stderr


# In Chromium.


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
  if browsers.missing():
    pytest.skip(browsers.missing())
  with browsers.chromium(tmp_path_factory.mktemp('profile')) as browser:
    browser.set_script_timeout(20)
    yield browser


@pytest.fixture
def opened(browser, folder, tmp_path):
  """A function (runs) -> a `Page`, read from disk."""

  def go(*runs, **options):
    runs = [str(folder / run) for run in runs]
    path = view.write(
      runs[0], tmp_path / 'r.html', against=''.join(runs[1:]), **options
    )
    return Page(browser, path.as_uri())

  yield go
  # Nothing was refused by the policy, and nothing failed.
  assert [x['message'] for x in browser.get_log('browser')] == []


_SET = """
const e = document.getElementById(arguments[0]);
e.value = arguments[1];
for (const kind of ['input', 'change']) {
  e.dispatchEvent(new Event(kind, {bubbles: true}));
}
"""


class Page(browsers.Page):
  shown = '.segment, .error'

  def set(self, id, value):
    self._browser.execute_script(_SET, id, value)

  def press(self, key):
    self.js(
      "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
      '{key: arguments[0], bubbles: true, cancelable: true}))', key,
    )  # fmt: skip

  @property
  def hash(self):
    return self.js('decodeURIComponent(location.hash.slice(1))')


@pytest.mark.long
def test_the_page_shows_what_was_sampled(opened, folder, browser):
  browser.get_log('performance')
  page = opened('one')
  run = read.run(folder / 'one')
  first = run.trajectories().iloc[0]
  assert page.texts('main h2') == [first.question]
  segments = run.segments(steps=[0])
  wanted = segments[segments.id == first.id]
  assert page.texts('.text') == wanted.text.tolist()
  assert [t.split('policy')[0] for t in page.texts('.who b')][0] == 'prompt'
  tokens = run.tokens(steps=[0])
  tokens = tokens[tokens.id == first.id]
  assert page.texts('.text .t') == tokens.text.tolist()
  # Everything comes from disk.
  log = [json.loads(x['message']) for x in browser.get_log('performance')]
  events = [x['message']['params'] for x in log]
  urls = [
    x['request']['url']
    for x in events
    if x.get('documentURL', '').startswith('file:') and 'request' in x
  ]
  assert len(urls) == 3 and all(u.startswith('file:') for u in urls)
  # Text can be selected and copied, token numbers cannot get into it.
  page._browser.execute_script(
    'getSelection().selectAllChildren(document.querySelectorAll(".text")[1])'
  )
  copied = page.js('String(getSelection())')
  assert copied.strip() == wanted.text.tolist()[1].strip()


def test_tokens_are_coloured_by_what_is_recorded(opened, folder):
  page = opened('one')
  run = read.run(folder / 'one')
  tokens = run.tokens(steps=[0])
  tokens = tokens[tokens.id == run.trajectories().id[0]]

  def classes(key):
    page.press(key)
    return page.js(
      "[...document.querySelectorAll('.text .t')].map(x => x.className)"
    )

  assert [c.split()[2] for c in classes('1')] == [
    f'a-{a}' for a in tokens.author
  ]
  assert [c.split()[2] for c in classes('2')] == [f'k-{k}' for k in tokens.kind]
  assert ['fill' in c for c in classes('3')] == tokens.in_loss.tolist()
  signs = {'pos': 1, 'neg': -1, 'dim': np.nan}
  found = [signs[c.split()[1]] for c in classes('4')]
  wanted = np.sign(tokens.advantage)
  # White, for 0, is a weakest positive.
  np.testing.assert_array_equal(found, np.where(wanted == 0, 1, wanted))
  level = lambda c: int(c.split()[2][1:]) if c.split()[1] != 'dim' else np.nan
  found = [level(c) for c in classes('5')]
  np.testing.assert_allclose(
    found, np.minimum(8, -8 * tokens.logp / 5), atol=0.51
  )
  gap = tokens.trainer_logp - tokens.logp
  found = [level(c) for c in classes('6')]
  np.testing.assert_allclose(found, gap.abs() / gap.abs().max() * 8, atol=0.51)
  assert ['ver' in c for c in classes('7')] == tokens.version.notna().tolist()
  assert 'one version' in page.texts('.legend')[0]


def test_filters_and_order(opened, folder):
  page = opened('one')
  frame = read.run(folder / 'one').trajectories()
  listed = lambda: page.js('shown.map(row => [row.step, row.reward])')
  page.set('f-reward-low', '1')
  assert len(listed()) == (frame.reward == 1).sum()
  page.set('f-step-low', '1')
  page.set('f-step-high', '1')
  assert (
    listed() == [[1, 1.0]] * ((frame.reward == 1) & (frame.step == 1)).sum()
  )
  assert page.texts('#count')[0].endswith(' of 48')
  page.press('c')
  page.set('sort', 'score')
  rewards = [r for _, r in listed()]
  assert rewards == sorted(rewards) and len(rewards) == 48
  page.js("document.getElementById('direction').click()")
  assert [r for _, r in listed()] == sorted(rewards, reverse=True)
  page.set('f-text', frame.question[0][:-1])
  assert len(listed()) == (frame.question == frame.question[0]).sum()
  page.set('f-text', 'nothing has this')
  assert 'No trajectory' in page.texts('#list')[0]


def test_filters_by_hops_end_and_searches(opened):
  page = opened('kinds')
  for i, field in enumerate(('hops', 'end', 'searches')):
    column = [row[i] for row in KINDS]
    for value in {*column}:
      page.set(f'f-{field}', f'{value}')
      found = page.js(f'shown.map(row => row.{field})')
      assert found == [value] * column.count(value)
    page.press('c')
    assert page.js('shown.length') == len(KINDS)
  page.set('f-hops', '2')
  page.set('f-end', 'answer')
  assert page.js('shown.map(row => row.searches)') == [2]


def test_siblings_side_by_side_and_keys(opened, folder):
  page = opened('one')
  frame = read.run(folder / 'one').trajectories()
  group = frame[(frame.step == 0) & (frame.question_id == frame.question_id[0])]
  shown = page.texts('.sibling .top b')
  assert [*map(float, shown)] == group.reward.tolist()
  page.press('s')
  page.wait("document.querySelectorAll('.column').length == 4")
  assert page.texts('.column .chip') == [f'{r:g}' for r in group.reward]
  page.press('l')
  page.wait("location.hash.endsWith('1')")
  assert (
    page.js(
      "document.querySelector('.sibling[aria-current=true] .top').textContent"
    )[:2]
    == '#1'
  )
  page.press('s')
  page.wait("document.querySelectorAll('.column').length == 1")
  before = page.hash
  page.press('j')
  page.wait(f'decodeURIComponent(location.hash.slice(1)) != {before!r}')
  page.press('k')
  page.wait(f'decodeURIComponent(location.hash.slice(1)) == {before!r}')
  page.press('e')
  page.wait("document.querySelectorAll('.column').length == 3")
  page.press('?')
  assert page.js("document.getElementById('keys').open")


def test_the_same_question_in_two_runs(opened, folder):
  page = opened('one', 'two')
  runs = [read.run(folder / name).trajectories() for name in ('one', 'two')]
  page.press('o')
  page.wait("document.querySelectorAll('.column').length > 4")
  assert page.texts('.column .run')[:5] == ['A', 'B', 'B', 'B', 'B']
  a, b = (
    f[(f.step == 0) & (f.question_id == runs[0].question_id[0])] for f in runs
  )
  answers = page.texts('.column .says')
  assert answers[0] == a.answer.iloc[0] and answers[1:5] == b.answer.tolist()
  assert len(page.js("[...document.querySelectorAll('#curve .line')]")) == 2
  page.set('f-run', '1')
  assert page.js('shown.every(row => row.run == 1) && shown.length') == 48


def test_the_step_is_marked_in_the_curve(opened):
  page = opened('one')
  page.set('metric', 'eval/em')
  at = lambda: float(
    page.js("document.querySelector('#curve .now').getAttribute('x1')")
  )
  first = at()
  assert 'step 1: 0.3' in page.texts('#value')[0]
  page.set('f-step-low', '2')
  page.press('j')
  page.wait("document.getElementById('value').textContent.includes('step 3')")
  assert at() > first and 'step 3: 0.5' in page.texts('#value')[0]


def test_words_of_the_answer_are_marked_where_they_come_from(opened, folder):
  page = opened('one')
  frame = read.run(folder / 'one').trajectories()
  right = frame[frame.em == 1].iloc[0]
  page.set('f-reward-low', '1')
  page.press('j')
  page.wait(
    f"document.querySelector('main h2').textContent == {right.question!r}"
  )
  marked = ''.join(page.texts('.a-environment .copied')).split()
  assert {*marked} == {*right.answer.split()}
  assert {*page.texts('.passage .copied')} == {*right.answer.split()}
  assert (
    ''.join(page.texts('.a-policy .copied')).split() == right.answer.split()
  )


def test_hostile_text_remains_text(opened):
  page = opened('bad')
  assert page.js('window.owned') is None
  assert page.texts('main h2') == [f'who? {HOSTILE}']
  assert SCRIPT in page.texts('.text')[3]
  assert page.texts('.passage h4')[0].startswith(HOSTILE)
  assert (
    page.js("document.querySelectorAll('main img, main script').length") == 0
  )
  # One megabyte waits for a click, and comes whole.
  assert len(page.texts('.passage')[0]) < 4000
  page.js("document.querySelector('.passage .more').click()")
  assert page.texts('.passage > div')[0] == 'x' * (1 << 20) + HOSTILE
  # Marks of direction are named, and what follows stays where it is.
  marks = "[...document.querySelectorAll('main h2 .hidden-character')]"
  names = page.js(f'{marks}.map(x => x.dataset.name)')
  assert names == ['U+202E', 'U+2066', 'U+2028', 'U+2029']
  left = page.js(f'{marks}.map(x => x.getBoundingClientRect().left)')
  assert left[0] < left[1]  # 'evil' between them was not turned around
  # Neither this page nor a script of its own may make markup of text.
  with pytest.raises(Exception, match='TrustedHTML'):
    page.js("(document.querySelector('main h2').innerHTML = '<b>x</b>')")
  page._browser.get_log('browser')  # of that attempt


def test_light_and_dark(opened, browser):
  page = opened('one')
  color = lambda what: page.js(f"getComputedStyle(document.body)['{what}']")
  found = {}
  for theme in ('light', 'dark'):
    browser.execute_cdp_cmd(
      'Emulation.setEmulatedMedia',
      {'features': [{'name': 'prefers-color-scheme', 'value': theme}]},
    )
    found[theme] = [
      np.array([*map(int, re.findall(r'\d+', color(x))[:3])])
      for x in ('backgroundColor', 'color')
    ]
  (light, ink), (dark, chalk) = found['light'], found['dark']
  assert (
    light.min() > 200 > 100 > ink.max() and dark.max() < 60 < 180 < chalk.min()
  )
  page.press('t')
  np.testing.assert_array_equal(
    [*map(int, re.findall(r'\d+', color('backgroundColor'))[:3])], light
  )
  browser.execute_cdp_cmd('Emulation.setEmulatedMedia', {'features': []})
  page.js("localStorage.removeItem('theme')")


def test_a_page_without_its_folder_says_so(opened, browser, tmp_path):
  page = opened('one')
  shutil.move(tmp_path / 'r_files', tmp_path / 'elsewhere')
  page = Page(browser, (tmp_path / 'r.html').as_uri())
  assert (
    'r_files/index.js cannot be read. Keep this folder'
    in page.texts('.error')[0]
  )
  browser.get_log('browser')  # the missing file


@pytest.fixture
def serving(tmp_path):
  """A run that is being written, and the server of its page."""
  tok, made = viewed.write_run(tmp_path / 'run', steps=1, count=2, open_=True)
  out = tmp_path / 'p' / 'report.html'

  def write():
    return view.write(str(tmp_path / 'run'), out, live=True)

  write()
  server = view.serve(out, 0)
  yield tok, made, server.server_port, write
  server.shutdown()
  server.server_close()
  made.close()


@pytest.mark.long
def test_a_live_page_follows_the_run(serving, browser, monkeypatch):
  tok, made, port, write = serving
  page = Page(browser, f'http://127.0.0.1:{port}/')
  assert page.texts('#count') == ['8 trajectories']
  page.press('j')
  page.press('5')
  before = page.hash
  viewed.add_step(made, tok, 1, 2, 4)
  write()
  page.wait("document.getElementById('count').textContent == '16 trajectories'")
  assert page.hash == before  # what was being read stays
  assert page.js("document.querySelectorAll('.text .seq').length") > 0
  browser.get_log('browser')  # a page icon, which is not there


def test_a_server_gives_the_page_and_nothing_else(serving, tmp_path):
  _, _, port, _ = serving
  (tmp_path / 'p' / 'secret.txt').write_text('x')

  def get(path, host='127.0.0.1'):
    client = http.client.HTTPConnection('127.0.0.1', port)
    client.request('GET', path, headers={'Host': f'{host}:{port}'})
    answer = client.getresponse()
    answer.read()
    return answer.status, answer.headers['Cross-Origin-Resource-Policy']

  assert get('/') == get('/report_files/index.js') == (200, 'same-origin')
  assert get('/secret.txt')[0] == get('/report_files/../secret.txt')[0] == 404
  assert get('/report_files/')[0] == get('/../run/config.json')[0] == 404
  assert get('/', host='evil.example')[0] == 404


def test_a_run_is_followed_from_before_its_first_step(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(view, '_SECONDS', 0.01)
  _, made = viewed.write_run(tmp_path / 'run', steps=0, open_=True)
  seen = threading.Event()
  found = []

  def write():
    seen.set()
    return view.write(str(tmp_path / 'run'), tmp_path / 'r.html', live=True)

  def look():
    found.append(next(view.follow(write, [str(tmp_path / 'run')])))

  thread = threading.Thread(target=look)
  thread.start()
  assert seen.wait(20)
  viewed.add_step(made, read.run(tmp_path / 'run', True).tokenizer, 0, 2, 4)
  thread.join(20)
  made.close()
  assert found == [tmp_path / 'r.html'] and found[0].exists()
  assert 'waiting: ' in capsys.readouterr().out
