"""The commands as a user runs them: what they print, write and refuse."""

import importlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import httpx
import jax
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file

from configs import algorithms
from experiments.quickstart import run as quickstart
from searchrl_jax import ask, checks, export, schema, sft, train
from searchrl_jax.aot import costs
from searchrl_jax.data import core as data
from searchrl_jax.devices import sharding
from searchrl_jax.engines.jax import device
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.models import decoder, parameters, pretrained
from searchrl_jax.run import build
from searchrl_jax.run import command as commands
from searchrl_jax.sources.core import SourceError
from searchrl_jax.sources.service import ServiceSource
from searchrl_jax.store import records
from searchrl_jax.store.checkpoint import CheckpointError
from searchrl_jax.types import Passage, Question
from tests import here, tiny
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

CONFIGS = sorted(
  p.stem
  for p in (ROOT / 'configs').glob('*.py')
  if p.stem not in ('__init__', 'algorithms', 'machines')
)


def command(module, *args, status=0, stdin=''):
  """Runs `python -m searchrl_jax.MODULE ...`; returns (stdout, stderr)."""
  done = here.run(f'searchrl_jax.{module}', *args, stdin=stdin)
  assert done.returncode == status, done.stdout + done.stderr
  return done.stdout, done.stderr


def process(module, *args):
  """The same as a process of its own: (exit status, stdout, stderr)."""
  done = subprocess.run(
    [sys.executable, '-m', f'searchrl_jax.{module}', *map(str, args)],
    cwd=ROOT,
    env=dict(os.environ, XLA_FLAGS=''),
    capture_output=True,
    text=True,
    timeout=240,
  )
  return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A tiny quickstart: its folder and summary."""
  folder = tmp_path_factory.mktemp('quick')
  config = tiny.config()
  config.source.corpus = 'world'
  config.reward = schema.ConfigDict(dict(em=dict(fn='answer.em', weight=1.0)))
  config.sft.data.update(dict(n=40, worlds=2, train=40, relations=3))
  config.env.max_turns = 2
  config.env.max_turn_tokens = 24
  config.env.max_tokens = config.engine.max_len = 192
  config.batch.lengths = (192,)
  config.sft.steps = 4
  config.sft.rows = 8
  config.sft.warmup = 1
  config.train.steps = 1
  config.eval.every = 1
  summary = quickstart.quickstart(config, str(folder), controls=True)
  return folder, summary


@pytest.mark.long
def test_quickstart_writes_what_it_promises(run):
  folder, summary = run
  for name in (
    'em_before',
    'em_after',
    'ci95_before',
    'ci95_after',
    'em_one_hop',
    'em_two_hop',
    'em_sft_only',
    'em_no_search',
    'em_shuffled_passages',
    'em_majority_answer',
    'parse_rate_before',
    'n_eval',
    'searches_per_question',
    'seconds_total',
    'bars',
  ):
    assert summary[name] is not None, name
  assert json.loads((folder / 'summary.json').read_text()) == summary
  assert (folder / 'learning_curve.png').read_bytes()[:4] == b'\x89PNG'
  assert (folder / 'report_files' / 'index.js').stat().st_size
  assert (folder / 'report.html').exists()
  shown = {bar['name'] for bar in summary['bars']}
  assert shown == {name for name, *_ in quickstart.BARS}


@pytest.mark.long
def test_evaluate_on_a_run_and_on_another_world(run):
  folder, _ = run
  out, _ = command(
    'evaluate',
    f'--workdir={folder}',
    '--config.data.world_seed=9',
    '--config.data.eval.micro.n=2',
  )
  assert '│ em ' in out and 'real_searches' in out
  where = pathlib.Path(out.rsplit('trajectories and figures: ')[1].strip())
  record = next(records.read(where / 'eval'))
  assert record.trajectory.question.id.startswith('micro-9-heldout')
  assert json.loads((where / 'eval_ids.json').read_text())


@pytest.mark.long
def test_ask_prints_the_answer(run):
  folder, _ = run
  out, _ = command(
    'ask', f'--workdir={folder}', 'What is the craft of Nobody Here?'
  )
  assert 'What is the craft of Nobody Here?' in out
  assert 'answer' in out


@pytest.mark.long
def test_serve_answers_until_it_is_interrupted(run):
  folder, _ = run
  command = [sys.executable, '-m', 'searchrl_jax.serve', '--port=0']
  command += [f'--workdir={folder}', f'--beside={folder}', '--slots=2']
  how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  how |= dict(cwd=ROOT, env=dict(os.environ, XLA_FLAGS=''))
  with subprocess.Popen(command, **how) as server:
    try:
      lines = []
      while not (lines and lines[-1].startswith('# models')):
        lines.append(server.stdout.readline().strip())
        assert server.poll() is None, server.stderr.read()
      names = [folder.name, f'{folder.name}-beside']
      assert lines[-1] == f'# models: {", ".join(names)}'
      given = [line[7:].split('=', 1) for line in lines if 'export ' in line]
      url, key = (dict(given)[f'OPENAI_{x}'] for x in ('BASE_URL', 'API_KEY'))
      assert f'{url.removesuffix("v1")}#{key}' in ' '.join(lines)
      question = 'What is the craft of Nobody Here?'
      asked = {'messages': [{'role': 'user', 'content': question}]}
      with openai.OpenAI(base_url=url, api_key=key) as client:
        for name in names:
          ask = client.chat.completions.create
          chunks = [*ask(model=name, max_tokens=9, stream=True, **asked)]
          assert chunks[-1].choices[0].finish_reason in ('length', 'stop')
          whole = ask(model=name, max_tokens=9, **asked).choices[0].message
          # Greedy, as the evaluation; in pieces, and at once.
          texts = [c.choices[0].delta.content or '' for c in chunks]
          assert ''.join(texts) == whole.content
      played = httpx.post(
        url.replace('/v1', '/ask'),
        json={'model': names[1], 'question': question},
        headers={'Authorization': f'Bearer {key}'},
        timeout=60,
      )
      *_, last, done = (line for line in played.text.split('\n') if line)
      assert done == 'data: [DONE]' and '"answer"' in last
      server.send_signal(signal.SIGINT)
      out, err = server.communicate(timeout=60)
      assert server.returncode == 0 and 'Traceback' not in err
    finally:
      server.kill()
  assert (folder / 'serve').is_dir() and (folder / 'serve_beside').is_dir()


def test_what_a_terminal_would_obey_is_not_printed():
  hostile = 'a\x1b]0;owned\x07\x1b[2Jb\x9b1mc\tand\nlines'
  shown = ask.printable(hostile)
  assert not {'\x1b', '\x07', '\x9b'} & set(shown)
  assert shown.endswith('c?and\nlines')


def test_export_loads_back(run, tmp_path):
  folder, _ = run
  export.export(str(folder), f'{tmp_path}/hf', 'latest', 'float32')
  with pytest.raises(checks.ConfigError, match='stacked_experts: .* has none'):
    export.export(
      str(folder), f'{tmp_path}/x', 'latest', 'float32', stacked=True
    )
  cfg, params = pretrained.load(f'{tmp_path}/hf')
  config = build.load_config(str(folder))
  mine = parameters.restore(config, str(folder), cfg, build.mesh(config))
  for (path, a), b in zip(
    sorted(decoder.flatten(params).items()),
    (v for _, v in sorted(decoder.flatten(mine).items())),
  ):
    np.testing.assert_array_equal(a, b, err_msg=path)
  assert 'model.embed_tokens.weight' in load_file(
    f'{tmp_path}/hf/model.safetensors'
  )
  assert build.tokenizers.load(f'{tmp_path}/hf').vocab_size == cfg.vocab_size
  generation = json.loads((tmp_path / 'hf/generation_config.json').read_text())
  assert generation['stop_strings'] == ['</search>', '</answer>']
  assert not generation['do_sample']  # as the evaluation
  (out,) = folder.glob('evaluation_*')
  em = json.loads((out / 'eval.json').read_text())['eval/em']
  card = (tmp_path / 'hf' / 'README.md').read_text()
  assert f'| {out.name} | micro | 1 | {em:.3f} |' in card
  assert 'while it trained' in card and 'answer.em' in card
  assert f'from `{folder}/warm`' in card


def test_help_helps():
  for name in ('train', 'sft', 'doctor'):
    # absl exits with 1 after --help.
    out, _ = command(name, '--help', status=1)
    assert {'--workdir', '--config'} <= {
      *re.findall(r'^  (--\w+): ', out, re.M)
    }
  for name in (
    'searchrl_jax.train',
    'searchrl_jax.sft',
    'searchrl_jax.evaluate',
    'searchrl_jax.ask',
    'searchrl_jax.doctor',
    'searchrl_jax.export',
    'searchrl_jax.view',
    'searchrl_jax.serve',
    'experiments.quickstart.run',
  ):
    package = importlib.util.find_spec(name).submodule_search_locations
    module = importlib.import_module(f'{name}.__main__' if package else name)
    assert f'python -m {name}' in module.__doc__


@pytest.mark.long
@pytest.mark.parametrize(
  'args, message',
  [
    (['--config.optim.lrr=1'], 'Did you mean "lr"'),
    (['--config.optm.lr=1'], 'Did you mean "optim"'),
    (['--config.optim.lr=fast'], 'fast'),
    (['--config.models.lora.rank=1'], 'config.model.lora'),
    (['--config.rollout.group=1'], 'rollout.group'),
    (
      ['--config.model.path=/nowhere', '--config.model.tokenizer='],
      "'/nowhere': ",
    ),
    (['--config.model.path=/nowhere'], 'model.tokenizer='),
    (['--config.train.init=runs/wram'], "config.train.init='runs/wram'"),
    (['--config.source.url=http://127.0.0.1:80OO'], 'config.source.url'),
    (['--config.source.module=dials'], "source.module='dials'"),
    (
      ['--config.source.url=http://127.0.0.1:9', '--config.source.attempts=1'],
      '127.0.0.1:9',
    ),
    (['--config.data.train.micro.spilt=x'], 'spilt'),
    (['--config.engine.module=jaxx'], "did you mean 'jax'"),
    (['--config=configs/quickstar.py'], "'configs/quickstart.py'"),
    (['--config=configs/quickstart.py:sed=1'], "'seed'"),
    (['--config.reward.em.fn=answer.emm'], "'em'"),
    (['--config.reward.more.fn=answer.emm'], "'em'"),
    (['--config.reward.em.wieght=2'], 'wieght'),
    (['--dry_run'], 'searchrl_jax.doctor'),
    (['--topology=h200:1x8'], 'searchrl_jax.doctor'),
    (['--workdr=x'], 'workdir'),
    (['--workdir=s3://bucket/run'], 'gs://BUCKET/FOLDER'),
    (['--workdir='], 'name a folder'),
    (['stray'], "'stray'"),
  ],
)
def test_errors_are_one_line_that_names_the_fix(tmp_path, args, message):
  # In whatever order: a field may stand before --config.
  if not args[0].startswith('--config='):
    args = [*args, '--config=configs/quickstart.py']
  _, err = command('train', f'--workdir={tmp_path}', *args, status=2)
  assert message in err and len(err.splitlines()) == 1, err
  assert not [*tmp_path.glob('tokenizer.*')]


def test_a_stopped_run_exits_as_a_signal_does(tmp_path):
  with mock.patch.object(
    checks, 'check', side_effect=commands.Stopped('saved')
  ):
    _, err = command(
      'train',
      '--config=configs/quickstart.py',
      f'--workdir={tmp_path}',
      status=143,
    )
  assert err == 'saved\n'


def test_the_notes_of_an_error_are_printed(tmp_path):
  error = records.RunError('the first error')
  error.add_note('what closing raised')
  with mock.patch.object(checks, 'check', side_effect=error):
    _, err = command(
      'train',
      '--config=configs/quickstart.py',
      f'--workdir={tmp_path}',
      status=2,
    )
  assert err == 'error: the first error\nwhat closing raised\n'


def test_a_table_for_each_evaluation(capsys):
  def score(value, n):
    return {'': value, '/low': value, '/high': value, '/n': n}

  values = {
    f'{label}/{name}{part}': v
    for label, n in (
      ('eval', 4),
      ('eval/hops=1', 2),
      ('eval/hops=2', 2),
      ('eval/source=one', 2),
      ('shuffled', 4),
    )
    for name, value in (
      ('em', 0.5 + 0.25 * label.endswith('2')),
      ('tokens', 23.456),
    )
    for part, v in score(value, n).items()
  }
  values['eval/hops=1/em'] = values['eval/source=one/em'] = 0.25
  evaluate.show(values)
  shown = capsys.readouterr().out
  assert 'eval (95%' in shown and 'shuffled (95%' in shown
  # The source holds the questions of one hop: one column for both.
  assert ('hops=1' in shown) + ('source=one' in shown) == 1
  assert 'hops=2' in shown and '0.750' in shown and '23.5' in shown


@pytest.mark.long
def test_a_process_exits_with_two(tmp_path):
  status, out, err = process(
    'sft',
    '--config=configs/quickstart.py',
    f'--workdir={tmp_path}',
    '--config.env.template=nowhere',
  )
  assert status == 2 and not out
  assert err.startswith('error: ') and len(err.splitlines()) == 1
  assert 'nowhere' in err


def test_which_errors_are_the_users():
  def caught(fn):
    try:
      fn()
    except Exception as e:
      return e

  def ours():
    build.prompts.load('nowhere')

  def numpys():
    # Called from our code, and no message of ours.
    build.lookup.near('x', [1, 'a'])

  def pythons():
    decoder.nest({1: 2})

  assert commands.is_user_error(caught(ours))
  assert commands.is_user_error(caught(lambda: open('/nowhere')))
  assert not commands.is_user_error(caught(numpys))
  assert not commands.is_user_error(caught(pythons))
  assert not commands.is_user_error(caught(lambda: np.zeros(3).reshape(2)))
  assert not commands.is_user_error(caught(lambda: int('x')))


def test_evaluate_without_a_run_says_so(tmp_path):
  _, err = command('evaluate', f'--workdir={tmp_path}', status=2)
  assert f'--workdir={tmp_path}' in err


@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_passes_its_checks(name):
  module = importlib.import_module(f'configs.{name}')
  config = module.get_config()
  checks.check(config)
  assert 'python -m searchrl_jax' in module.__doc__


def report(config) -> dict[str, str]:
  """Names and values of a run's costs, without those of compiled programs."""
  cfg, mesh = parameters.model_config(config, 700), build.mesh(config)
  needs = costs.of_run(config, cfg, mesh, working=0)
  lines = map(str.split, costs.render(config, cfg, mesh, needs).splitlines())
  return {' '.join(words[:-1]): words[-1] for words in lines if words}


def test_more_tokens_than_a_model_was_trained_on_are_warned_of(caplog):
  config = tiny.config()
  config.model.arch.max_position_embeddings = 96
  parameters.model_config(config, 700)
  assert not caplog.records
  config.model.arch.max_position_embeddings = 95
  parameters.model_config(config, 700)
  [warned] = caplog.messages
  assert 'max_position_embeddings=95' in warned


def test_costs_count_a_critic():
  """Parameters, gradients and two moments, as the policy has them."""
  config = tiny.config('http://127.0.0.1:9')
  without = report(config)
  config.algorithm.update(algorithms.PPO)
  config.critic.lr = 1e-5
  size = (
    parameters.model_config(config, 700).n_params + 32 + 1
  )  # the value head
  assert report(config)['critic: parameters, optimizer, gradients'] == (
    f'{4 * 4 * size / 2**20:,.1f}'
  )
  assert not any('critic' in name for name in without)


def test_costs_count_the_engine_as_it_lies_on_the_mesh():
  if jax.device_count() < 8:
    pytest.skip('needs eight devices')
  config = tiny.config('http://127.0.0.1:9')
  config.model.arch.hidden_size = 2048  # MiB, nearly all embeddings
  config.engine.update(slots=64, max_len=2048)
  one = report(config)
  config.mesh.update(data=2, fsdp=2, tensor=2)
  many = report(config)

  def ratio(name):
    return float(many[name]) / float(one[name])

  # Cut along `tensor` alone; the rows of the cache lie with data and fsdp.
  assert ratio('engine: weights') == pytest.approx(1 / 2, rel=0.05)
  assert ratio('parameters (float32)') == pytest.approx(1 / 4, rel=0.05)
  assert ratio('engine: cache, 64 slots x 2048 tokens') == pytest.approx(
    1 / 8, rel=0.05
  )


def test_costs_count_the_engine_of_one_of_several_processes():
  if jax.device_count() < 8:
    pytest.skip('needs eight devices')
  config = tiny.config('http://127.0.0.1:9')
  config.engine.slots = 64
  config.mesh.update(data=4, fsdp=2)
  one = report(config)

  def own(mesh):  # of four processes
    return sharding.make_mesh(devices=list(mesh.devices.flat[:2]))

  with mock.patch.object(sharding, 'own_mesh', own):
    many = report(config)
  name = 'engine: cache, 64 slots x 96 tokens'
  assert float(many[name]) == pytest.approx(4 * float(one[name]), rel=0.01)
  assert many['parameters (float32)'] == one['parameters (float32)']
  name = 'trajectories in flight in a process, at most'
  assert (one[name], many[name]) == ('8', '2')  # of one question


def test_costs_count_host_memory_and_what_is_in_flight():
  config = tiny.config('http://127.0.0.1:9')
  config.engine.slots = 2
  size = 96 * device.bytes_per_token(parameters.model_config(config, 700))
  config.engine.host_gib = 4 * size / 2**30
  lines = report(config)
  # Two in slots, three paused, and room for a call that one of them waits for.
  assert lines['trajectories in flight in a process, at most'] == '5'
  (name,) = [n for n in lines if n.startswith('engine: 3 paused sequences')]
  assert lines[name] == f'{3 * size / 2**20:,.1f}'
  config.rollout.concurrency = 4
  assert report(config)['trajectories in flight in a process, at most'] == '4'
  config.engine.update(module='vllm', slots=1, device='gpus:0;1')
  config.rollout.concurrency = 0
  lines = report(config)
  assert (
    lines['trajectories in flight in a process, at most'] == '4'
  )  # 2 servers x 2
  assert not any('paused' in name for name in lines)


def test_costs_count_the_weights_of_a_teacher():
  config = tiny.config('http://127.0.0.1:9')
  config.teacher.context = 'own'
  config.algorithm.advantage = 'distilled'
  size = parameters.model_config(config, 700).n_params
  for weights in ('ema', 'copy'):
    config.teacher.weights = weights
    told = report(config)["teacher's parameters"]
    assert told == f'{4 * size / 2**20:,.1f}'
  config.teacher.weights = 'live'
  assert "teacher's parameters" not in report(config)


def test_costs_count_a_step():
  config = tiny.config('http://127.0.0.1:9')
  cfg, mesh = parameters.model_config(config, 700), build.mesh(config)
  needs = costs.of_run(config, cfg, mesh)
  text = costs.render(config, cfg, mesh, needs)
  assert f'{cfg.n_params:,} parameters' in text
  # 4 questions x 2 trajectories in microbatches of 384 / 96 = 4 rows.
  lines = {
    ' '.join(words[:-1]): words[-1]
    for words in map(str.split, text.splitlines())
    if words
  }
  assert lines['trajectories'] == '8'
  assert lines['microbatches per update most'] == '2'
  assert lines['updates in the run'] == '3'
  assert f'{4 * cfg.n_params / 2**20:,.1f}' in text


def test_unknown_config_arguments_are_refused():
  with pytest.raises(ValueError, match="'sed'.*'seed'"):
    schema.parse_arg('sed=1', seed=0)
  with pytest.raises(ValueError, match="seed='x'.*int"):
    schema.parse_arg('seed=x', seed=0)
  for arg in ('seed', 'lr'):  # a flag without a value
    with pytest.raises(ValueError, match=f'{arg}=True'):
      schema.parse_arg(arg, seed=0, lr=0.1)
  assert schema.parse_arg('lr=1,name=a=b', lr=0.1, name='').lr == 1.0


def trace():
  # In the words of a generated world, which the tokenizer knows.
  question = Question('q', 'Who ?', ('drummer',))
  passage = Passage('1', 'craft', 'craft drummer .')
  return data.Trace(
    question,
    (
      ('think', 'find'),
      ('search', 'craft'),
      ('information', (passage,)),
      ('think', 'craft drummer'),
      ('answer', 'drummer'),
    ),
  )


def test_a_warm_start_without_traces_says_so(run, tmp_path):
  folder, _ = run
  config = build.load_config(str(folder))
  config.sft.good_only = True
  config.sft.data.update(dict(good=0.0, poor=0.5, guess=0.5))
  with pytest.raises(checks.ConfigError, match='config.sft.good_only'):
    sft.sft(config, str(tmp_path))
  config.sft.warmup = config.sft.steps
  with pytest.raises(checks.ConfigError, match='config.sft.warmup'):
    sft.sft(config, str(tmp_path))


def test_a_folder_keeps_to_its_stage(run, tmp_path):
  folder, _ = run
  config = build.load_config(str(folder / 'warm'))
  with pytest.raises(CheckpointError, match="stage: 'sft'.*'train'"):
    train.train(config, str(folder / 'warm'))


def test_evaluation_leaves_a_runs_logs_alone(run, tmp_path):
  folder, _ = run
  before = (folder / 'metrics.jsonl').read_text()
  _, err = command(
    'evaluate', f'--workdir={folder}', f'--out={folder}', status=2
  )
  assert f'--out={folder}' in err
  assert (folder / 'metrics.jsonl').read_text() == before


def test_a_warm_start_of_another_model_is_refused(run):
  folder, _ = run
  config = build.load_config(str(folder))
  config.model.arch.rope_theta = 123.0
  tok = build.tokenizer(config, str(folder))
  cfg = parameters.model_config(config, tok.vocab_size)
  with pytest.raises(CheckpointError, match='rope_theta: 100.0.*123.0'):
    parameters.restore(config, str(folder), cfg, build.mesh(config))


@pytest.mark.long
def test_a_warm_start_keeps_to_its_corpus_and_traces(
  run, tmp_path, monkeypatch
):
  folder, _ = run
  shutil.copytree(folder / 'warm', tmp_path / 'warm')
  config = build.load_config(str(tmp_path / 'warm'))
  with monkeypatch.context() as m:
    m.setattr(sft, 'digest', lambda traces: 'other')
    with pytest.raises(records.RunError, match='sft.data, .*other'):
      sft.sft(config, str(tmp_path / 'warm'))
  real = ServiceSource.check

  async def moved(self):
    said = dict(await real(self))
    return said | {'identity': said['identity'] | {'corpus': 'another'}}

  monkeypatch.setattr(ServiceSource, 'check', moved)
  with pytest.raises(SourceError, match="corpus: .* before, 'another' now"):
    sft.sft(config, str(tmp_path / 'warm'))


def test_another_tokenizer_in_the_folder_of_a_run_is_not_read(run, tmp_path):
  folder, _ = run
  shutil.copytree(folder, tmp_path / 'run')
  config = build.load_config(str(tmp_path / 'run'))
  file = tmp_path / 'run' / records.TOKENIZER / 'tokenizer_config.json'
  file.write_text(file.read_text() + '\n')
  _, err = command(
    'export', f'--workdir={tmp_path}/run', f'--out={tmp_path}/hf', status=2
  )
  assert "tokenizer: '" in err
  with pytest.raises(CheckpointError, match="tokenizer: '"):
    train.train(config, str(tmp_path / 'run'))


def test_a_folder_where_the_tokenizer_is_to_be_stays(tmp_path):
  config = tiny.config()
  mine = tmp_path / 'run' / 'tokenizer'
  build.tokenizer(config, str(tmp_path / 'other'))
  shutil.copytree(tmp_path / 'other' / 'tokenizer', mine)
  (mine / '.made').unlink()
  (mine / 'notes.txt').write_text('mine')
  config.model.tokenizer = str(mine)
  with pytest.raises(records.RunError, match=f'{mine} is in the way'):
    build.tokenizer(config, str(tmp_path / 'run'))
  assert (mine / 'notes.txt').read_text() == 'mine'
  assert build.tokenizers.load(mine).vocab_size


def test_the_control_goes_on_when_started_again(run):
  folder, summary = run
  config = build.load_config(str(folder / 'sft_only'))
  again = quickstart._sft_only(
    config, folder, {'reinforcement_learning': 99.0, 'warm_start': 1.0}
  )
  assert again['eval/em'] == summary['em_sft_only']


def test_a_trace_becomes_what_the_environment_would_have_seen(tmp_path):
  config = tiny.config()
  config.env.max_turns = 2
  config.env.max_turn_tokens = config.env.max_tokens = 96
  env = build.environment(config, build.tokenizer(config, str(tmp_path)))
  made = sft.render(trace(), env, 3)
  assert made.end == 'answer' and made.sample == 3
  assert [(s.author, s.kind) for s in made.segments] == [
    ('prompt', 'other'),
    ('policy', 'think'),
    ('policy', 'other'),
    ('policy', 'search'),
    ('environment', 'information'),
    ('policy', 'think'),
    ('policy', 'other'),
    ('policy', 'answer'),
  ]
  assert env.answer(made) == 'drummer'
  assert all(s.train == (s.author == 'policy') for s in made.segments)
  config.env.max_turn_tokens = 4
  env = build.environment(config, env.tokenizer)
  assert sft.render(trace(), env, 0) is None


def test_the_order_of_traces():
  lengths = np.random.default_rng(0).integers(10, 200, 1000)
  a = sft.order(lengths, 8, 125, 1)
  assert a.shape == (125, 8)
  assert sorted(a.ravel()) == list(range(1000))  # an epoch takes all
  np.testing.assert_array_equal(a[:60], sft.order(lengths, 8, 60, 1))
  assert (a != sft.order(lengths, 8, 125, 2)).any()
  # Rows of an update are of like length: far less padding than at random.
  padded = lengths[a].max(1).sum() * 8 / lengths[a].sum()
  assert padded < 1.15
  assert sft.order(lengths[:3], 8, 5, 1).shape == (5, 8)
  # As many as asked for, also where each epoch leaves some traces out.
  assert sft.order(lengths[:63], 32, 100, 1).shape == (100, 32)
