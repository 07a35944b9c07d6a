"""Tests run on CPU, as eight devices, and promote types only on purpose."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ['WANDB_MODE'] = 'disabled'
_FLAG = '--xla_force_host_platform_device_count'
if _FLAG not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {_FLAG}=8'

import ast  # noqa: E402
import atexit  # noqa: E402
import faulthandler  # noqa: E402
import gc  # noqa: E402
import pathlib  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402

# In the background of a shell a suite ignores SIGINT; what it starts must not.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Suites whose tests are in files that contain `mark.NAME`.
_SUITES = 'parity agents sidecar aot cluster runbook notebook'.split()
# The temporary directory of the session and all its processes, which must be
# empty at the end. pytest's own folders stay where they are.
_WORKER = 'PYTEST_XDIST_WORKER' in os.environ
if not _WORKER:
  os.environ.setdefault('PYTEST_DEBUG_TEMPROOT', tempfile.gettempdir())
  os.environ['TMPDIR'] = tempfile.tempdir = tempfile.mkdtemp(prefix='searchrl_')
  atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)
# Several tests train the same tiny model: all workers compile it once, and all
# suites if the folder is given. JAX would keep only what takes a second, as
# little here does on a quiet machine.
_COMPILED = 'compiled_'
if not _WORKER and not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
  os.environ['JAX_COMPILATION_CACHE_DIR'] = tempfile.mkdtemp(prefix=_COMPILED)
# Where Python may not write bytecode (containers often ask for this), each
# process compiles all that it imports: importing JAX takes 4 s instead of 1 s,
# and the tests 25 s instead of 10 s. Theirs stays for the next time.
if sys.dont_write_bytecode:
  sys.dont_write_bytecode = False
  kept = pathlib.Path(__file__).resolve().parent.parent / '.pytest_cache'
  sys.pycache_prefix = os.environ['PYTHONPYCACHEPREFIX'] = f'{kept}/bytecode'
  os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
# Where each operation of a program was written takes 6 % of the time to note.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile('untimed', deadline=None)
hypothesis.settings.load_profile('untimed')

# Tracing makes many objects and little garbage: looking for it less often
# saves 7 % of all the time.
gc.set_threshold(50_000, 20, 20)

if sys.version_info < (3, 11, 8):
  # What a collection of garbage runs (callbacks, finalizers, then any thread)
  # must not parse while ast.parse does: SystemError, python/cpython#106905.
  # hypothesis and pytest parse source whenever they show some.
  _parse = ast.parse

  def _parse_alone(*args, **kwargs):
    enabled = gc.isenabled()
    gc.disable()
    try:
      return _parse(*args, **kwargs)
    finally:
      if enabled:
        gc.enable()

  ast.parse = _parse_alone

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Models and losses must not mix dtypes by accident.
STRICT = (
  'tests/methods',
  'tests/models',
  'tests/learn/test_losses',
  'tests/learn/test_update',
  'tests/learn/test_advantages',
  'tests/engines',
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes():
  from xdist import workermanage

  # At its end a worker removes what libraries keep as long as it runs (the
  # fork server's socket). xdist kills it after 10 s, which can be too early on
  # a busy machine.
  workermanage.NodeManager.EXIT_TIMEOUT = 120


def pytest_ignore_collect(collection_path, config):
  """Files that are deselected as a whole are not imported."""
  if not collection_path.match('test_*.py'):
    return None
  asked, text = config.option.markexpr, collection_path.read_text()
  if asked in _SUITES and f'mark.{asked}' not in text:
    return True
  left_out = re.findall(r'not (\w+)', asked)
  whole = re.search(r'^pytestmark = (\[[^]]*\]|.*)', text, re.MULTILINE)
  marks = re.findall(r'mark\.(\w+)', whole[1]) if whole else ()
  return True if {*left_out} & {*marks} else None


def pytest_collection_finish():
  gc.freeze()  # what was imported stays


def pytest_collection_modifyitems(items):
  """Slow files come first: what is left for the end is short."""
  items.sort(key=lambda item: item.get_closest_marker('slow') is None)
  for item in items:
    if item.get_closest_marker('sidecar'):
      # Beside other processes, vLLM takes minutes to start.
      item.add_marker(pytest.mark.timeout(900))


def pytest_runtest_setup(item):
  """A time limit of its own takes the place of faulthandler_timeout."""
  if item.get_closest_marker('timeout'):
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)  # the workers have ended
def pytest_sessionfinish(session, exitstatus):
  left = [
    path
    for path in sorted(pathlib.Path(tempfile.gettempdir()).iterdir())
    # Without workers, some libraries have theirs until Python exits.
    if not re.match(rf'{_COMPILED}|pymp-|.*wandb-', path.name)
  ]
  # torch and vLLM, which the other suites run, keep caches there.
  ours = re.search('not parity|long|exact', session.config.option.markexpr)
  if left and ours and not _WORKER and exitstatus == 0:
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin('terminalreporter')
    reporter.write_line(
      f'\nFAILED: the tests left {", ".join(path.name for path in left)} in '
      'the temporary directory; use tmp_path, or remove it',
      red=True,
    )


def shared_data() -> pathlib.Path | None:
  """The real data, where it is at hand (never part of the project)."""
  for path in (os.environ.get('SEARCHRL_DATA'), ROOT.parent / 'shared/data'):
    if path and pathlib.Path(path).is_dir():
      return pathlib.Path(path)
  return None


@pytest.fixture(scope='session')
def data_dir() -> pathlib.Path:
  path = shared_data()
  if path is None:
    pytest.skip('no real data: set SEARCHRL_DATA or put it in ../shared/data')
  return path


@pytest.fixture(scope='session')
def url(tmp_path_factory):
  """A real retrieval server over the world of tests/tiny.py."""
  from retrieval import process
  from searchrl_jax.worlds import microworld
  from tests import tiny

  folder = tmp_path_factory.mktemp('world')
  world = microworld.generate(3, **tiny.WORLD)
  corpus = microworld.write(world, folder)['corpus']
  with process.start_server(corpus, log_path=folder / 'log') as server:
    yield server.url


# Parts of a config that no compiled update depends on.
_NOT_COMPILED = (
  'name', 'source', 'checkpoint', 'eval', 'log', 'data', 'engine', 'env',
  'reward', 'seed', 'sft', 'judge', 'tools',
)  # fmt: skip
_PROGRAMS: dict = {}  # of all modules that a process tests


@pytest.fixture(scope='module')
def programs():
  """Lets the runs of such modules share the compiled updates of equal configs.

  Tracing them takes half of the time of a run of a few steps. `.clear()` makes
  the next run compile its own.
  """
  from searchrl_jax.learn import learner, objectives

  kept, make = _PROGRAMS, learner.Learner.__init__

  def read(config):
    fields = config.to_dict().items()
    found = {k: v for k, v in fields if k not in _NOT_COMPILED}
    found['rollout'] = config.rollout.temperature
    found['contexts'] = config.env.max_contexts
    if config.optim.schedule == 'constant':  # of whatever number of updates
      found['train'] = None
    return found

  def init(self, config, cfg, mesh, *, roles=None, supervised=None):
    make(self, config, cfg, mesh, roles=roles, supervised=supervised)
    parts = [(role, read(c)) for role, c in (roles or {}).items()]
    key = repr((read(config), parts, supervised))
    own = self._updaters, self._critic
    found = kept.setdefault((key, cfg, mesh, objectives.policy), own)
    self._updaters, self._critic = found
    roles = [role for role in self._updaters if role != 'critic']
    self.updater = self._updaters[roles[-1]]

  with pytest.MonkeyPatch.context() as m:
    m.setattr(learner.Learner, '__init__', init)
    yield kept


@pytest.fixture(autouse=True)
def _strict_promotion(request):
  where = request.node.nodeid
  if not where.startswith(STRICT):
    yield
    return
  import jax

  with jax.numpy_dtype_promotion('strict'):
    yield
