"""Alarms name collapses, and nothing else."""

import json
import logging
import math

import numpy as np
import pytest

from searchrl_jax.store import alarms
from searchrl_jax.store.writer import Writer
from tests import tiny
from tests.conftest import ROOT

HEALTHY = {
  'train/entropy': 0.6,
  'health/tokens': 400.0,
  'health/truncated': 0.02,
  'health/repetition': 0.1,
  'health/thoughts_repeated': 0.02,
  'health/valid_format': 0.9,
  'health/logp_right': -0.25,
}
# What goes wrong from step 40 on -> (its metric, its values, what is said).
COLLAPSES = {
  'entropy': ('train/entropy', lambda t: 0.6 * 0.7**t, 'fell'),
  'entropy rises': ('train/entropy', lambda t: 0.6 + 0.3 * t, 'rose'),
  'length': ('health/tokens', lambda t: max(400 - 40 * t, 20), 'fell'),
  'length rises': ('health/tokens', lambda t: 400 * 1.2**t, 'rose'),
  'length is cut': ('health/truncated', lambda t: 0.05 * t, 'rose'),
  'repetition': ('health/repetition', lambda t: 0.1 + 0.05 * t, 'rose'),
  'repetition of thoughts': (
    'health/thoughts_repeated',
    lambda t: 0.05 * t,
    'rose',
  ),
  'format': ('health/valid_format', lambda t: 0.9 - 0.05 * t, 'fell'),
  'likelihood': ('health/logp_right', lambda t: -0.25 - 0.1 * t, 'fell'),
}


def history(steps, seed=0, **changed):
  """Metrics of steps with noise of 10 %; changed: metric -> values from 40."""
  rng = np.random.default_rng(seed)
  for step in range(steps):
    found = {'step': step}
    for name, value in HEALTHY.items():
      if name in changed and step >= 40:
        value = changed[name](step - 40)
      found[name] = value * rng.normal(1, 0.1)
    yield found


def run(lines, watch=None):
  """[(step, sentence)] and the flags of each step."""
  watch = watch or alarms.Alarms()
  begun, flags = [], []
  for metrics in lines:
    raised, texts = watch(metrics['step'], metrics)
    begun += [(metrics['step'], text) for text in texts]
    flags.append(raised)
  return begun, flags


@pytest.mark.parametrize('name', COLLAPSES)
@pytest.mark.parametrize('seed', range(3))
def test_a_collapse_is_named_as_it_begins(name, seed):
  metric, values, change = COLLAPSES[name]
  begun, flags = run(history(60, seed, **{metric: values}))
  (step, text), *_ = begun
  alarm = f'alarm/{name.split()[0]}'
  assert 40 < step <= 55
  assert text.startswith(f'{alarm} at step {step}: {metric} {change} from ')
  assert f'(steps {step - 4} to {step})' in text
  assert all(x.startswith(alarm) for _, x in begun)
  assert [f.get(alarm) for f in flags[:10]] == [None] * 9 + [0.0]
  assert flags[39][alarm] == 0.0 and flags[step][alarm] == 1.0
  others = {k: v for f in flags for k, v in f.items() if k != alarm}
  assert set(others.values()) == {0.0}


@pytest.mark.long
@pytest.mark.parametrize('seed', range(5))
def test_noise_and_slow_change_are_no_collapse(seed):
  slow = {
    'train/entropy': lambda t: 0.6 * math.exp(-t / 300),
    'health/tokens': lambda t: 400 * math.exp(t / 300),
    'health/logp_right': lambda t: -0.25 * math.exp(-t / 300),
  }
  assert run(history(1000, seed, **slow))[0] == []


def test_the_quickstart_raises_no_alarm():
  series = json.loads((ROOT / 'tests/golden/quickstart_signs.json').read_text())
  lines = [
    {'step': step} | dict(zip(series, values))
    for step, values in enumerate(zip(*series.values()))
  ]
  begun, flags = run(lines)
  assert begun == [] and len(flags) == 60
  assert set(flags[-1]) == {
    f'alarm/{x}'
    for x in ('entropy', 'length', 'repetition', 'format', 'likelihood')
  }


def test_groups_that_teach_nothing_are_named_once():
  lines = [
    {'step': t, 'train/gradient_groups': 0.2 if 6 <= t < 14 else 0.5}
    for t in range(20)
  ]
  begun, flags = run(lines)
  ((step, text),) = begun
  # The third of five values below the limit moves their median.
  assert step == 8 and 'train/gradient_groups is 0.2' in text
  assert [f.get('alarm/groups') for f in flags[:5]] == [None] * 4 + [0.0]
  on = [t for t, f in enumerate(flags) if f.get('alarm/groups')]
  assert on == list(range(8, 16))


@pytest.mark.parametrize('role', ['train', 'solver'])
def test_a_mean_kl_of_engine_and_trainer_above_the_limit_is_named(role):
  metric = f'{role}/mismatch_kl'
  lines = [
    {'step': t, metric: 0.0021 if 6 <= t < 14 else 0.0019} for t in range(20)
  ]
  begun, flags = run(lines)
  ((step, text),) = begun
  assert step == 8 and f'{metric} is 0.0021' in text and ' 0.002:' in text
  on = [t for t, f in enumerate(flags) if f.get('alarm/mismatch')]
  assert on == list(range(8, 16))


VOTES = {
  # What was before alone, and what the start made of the same questions.
  'of the run': ('reward/vote/agreement', 'health/searches', (0.4, 3.0)),
  'of the start': ('reward/vote/gained', 'reward/vote/lost', (0.0, 0.0)),
}


@pytest.mark.parametrize('name', VOTES)
def test_agreement_that_rises_as_searches_fall_is_named(name):
  agreement, searches, (a, b) = VOTES[name]
  down = -1 if 'lost' in searches else 1

  def lines(agrees: float, loses: float):
    """Steps from 10 on change by so much each."""
    for t in range(24):
      n = max(t - 9, 0)
      yield {
        'step': t,
        agreement: a + agrees * n,
        searches: b - down * loses * n,
      }

  begun, flags = run(lines(0.03, 0.1))
  ((step, text),) = begun
  assert 10 < step < 22 and text.startswith(f'alarm/votes at step {step}: ')
  assert f'{agreement} ' in text and f', and {searches} ' in text
  on = [t for t, f in enumerate(flags) if f.get('alarm/votes')]
  assert on == list(range(step, 24))
  # Either alone is what learning does.
  assert run(lines(0.03, 0.0))[0] == [] and run(lines(0.0, 0.1))[0] == []
  # A step that lacks one of the two says nothing, and is not half remembered.
  gaps = [{'step': t, agreement: 0.9} for t in range(24)]
  assert run(gaps) == ([], [{}] * 24)


def test_the_start_shows_it_within_the_first_steps():
  """There is no earlier step that the votes of the start have to wait for."""
  lines = [
    {'step': t, 'reward/vote/gained': 0.2, 'reward/vote/lost': 0.5}
    for t in range(8)
  ]
  begun, _ = run(lines)
  assert [step for step, _ in begun] == [alarms.WINDOW - 1]


def test_steps_without_a_value_are_skipped():
  """No trajectory was right, or the mean is not finite."""
  lines = [*history(60, **{'health/logp_right': lambda t: -0.25 - 0.1 * t})]
  gaps = [{'step': -1, 'eval/em': 0.5}]
  for line in lines:
    gaps += [line | {'step': 2 * line['step']}]
    gaps += [{'step': 2 * line['step'] + 1, 'health/logp_right': math.nan}]
  ((step, _),), ((after, _),) = run(lines)[0], run(gaps)[0]
  assert after == 2 * step


@pytest.mark.parametrize('stop', [5, 30, 44, 47, 58])
def test_a_resumed_run_goes_on_with_the_same_alarms(stop, tmp_path, caplog):
  """Through metrics.jsonl, which it cuts to the steps of the checkpoint."""
  config = tiny.config()
  lines = [*history(60, **{'train/entropy': lambda t: 0.6 * 0.7**t})]
  lines[20]['health/logp_right'] = math.nan  # null in the file

  def write(folder, first, last):
    with Writer(folder, config, step=first) as writer:
      return [
        writer.write(x['step'], {k: v for k, v in x.items() if k != 'step'})
        for x in lines[first:last]
      ]

  def flags(found):
    return [{k: v for k, v in f.items() if 'alarm/' in k} for f in found]

  whole = flags(write(tmp_path / 'whole', 0, 60))
  (said,) = [r.message for r in caplog.records if 'alarm/' in r.message]
  caplog.clear()
  with caplog.at_level(logging.WARNING):
    write(tmp_path / 'cut', 0, min(stop + 2, 60))  # two steps are not saved
    resumed = write(tmp_path / 'cut', stop, 60)
  assert flags(resumed) == whole[stop:]
  assert {r.message for r in caplog.records} == {said}
  written = [json.loads(x) for x in (tmp_path / 'cut' / 'metrics.jsonl').open()]
  assert flags(written) == whole
