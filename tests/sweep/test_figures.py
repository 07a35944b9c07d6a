import csv
import itertools

import numpy as np
import pyarrow.parquet as pq
import pytest

from searchrl_jax.lookup import ConfigError
from searchrl_jax.store import records
from searchrl_jax.sweep import core, figures
from tests import tiny
from tests.sweep.tiny_sweep import complete


def test_the_interval_over_seeds_is_students():
  # t(0.975, 2) = 4.302653, s = 1: 4.302653 / sqrt(3) = 2.484138.
  found = figures.interval([1.0, 2.0, 3.0])
  assert found == pytest.approx((2.0, -0.484138, 4.484138, 3), abs=1e-6)
  assert figures.interval([0.5]) == (0.5, None, None, 1)


def test_paired_runs_have_the_interval_of_their_differences():
  a = {'0': 0.5, '1': 0.75, '2': 0.625, '4': 0.0}
  b = {'0': 0.375, '1': 0.5, '2': 0.625, '3': 0.9}
  # Differences of the cases of both: 1/8, 2/8, 0. Mean 1/8, s = 1/8, and
  # 4.302653 / 8 / sqrt(3) = 0.310517. Unpaired, the scores spread more.
  found = figures.paired(a, b)
  assert found == pytest.approx((0.125, -0.185517, 0.435517, 3), abs=1e-6)
  assert figures.paired({'0': 1.0}, {'1': 1.0}) is None


def test_intervals_over_worlds_cover_the_mean_over_worlds():
  """Worlds that differ as much as seeds; each effect is 0 in the mean."""
  rng = np.random.default_rng(0)
  covered = []
  for _ in range(300):
    runs = rng.normal(size=(3, 1)) + rng.normal(size=(3, 4))
    a = {f'{w}-{s}': runs[w, s] for w in range(3) for s in range(4)}
    found = figures.paired(a, dict.fromkeys(a, 0.0))
    assert found.n == 3 and found.mean == pytest.approx(runs.mean())
    covered.append(found.low < 0 < found.high)
  # As independent, the 12 runs cover in 3 of 4 cases.
  assert 0.92 < np.mean(covered) < 0.98
  means = figures.means({k: {'values': {'after': {'x': a[k]}}} for k in a})
  assert means['after']['x'] == found._asdict()
  # Seeds of one world, or without a world's name, are what there is.
  one = {'5-0': 1.0, '5-1': 2.0, '5-2': 3.0}
  assert figures.over_worlds(one) == figures.interval([1.0, 2.0, 3.0])


def test_the_interquartile_mean_resamples_within_worlds():
  # Of 0.1, 0.3, 0.5, 0.9 the middle two. All 2^2 x 2^2 resamples of two runs
  # of each world are equally likely.
  worlds = [[0.1, 0.5], [0.3, 0.9]]
  every = [
    np.mean(sorted([*a, *b])[1:3])
    for a in itertools.product(worlds[0], repeat=2)
    for b in itertools.product(worlds[1], repeat=2)
  ]
  low, high = np.quantile(every, (0.025, 0.975))
  # Resampling all four together would have 0.1 and 0.9 as bounds.
  assert (low, high) == pytest.approx((0.2, 0.7))
  found = figures.interquartile(worlds)
  assert found == pytest.approx((0.4, low, high, 4))
  assert found == figures.interquartile(worlds)  # no chance in it


def test_the_interquartile_mean_is_that_of_a_bootstrap_by_hand():
  rng = np.random.default_rng(7)
  worlds = rng.normal([[0.2], [0.5], [0.8]], 0.1, (3, 8)).tolist()
  means = []
  for _ in range(20_000):
    runs = sorted(v for world in worlds for v in rng.choice(world, 8))
    means.append(np.mean(runs[6:18]))  # without a quarter of 24 on each side
  found = figures.interquartile(worlds)
  assert found.mean == pytest.approx(np.mean(sorted(sum(worlds, []))[6:18]))
  assert found[1:3] == pytest.approx(
    np.quantile(means, (0.025, 0.975)), abs=4e-3
  )
  assert figures.interquartile([[0.1, 0.2], [0.3]])[1:] == (None, None, 3)


def found(after, curve=()):
  return {
    'seeds': {'0': {'values': {'after': after}, 'curve': {'em': list(curve)}}},
    'mean': figures.means({'0': {'values': {'after': after}}}),
  }


def test_scores_that_a_seed_lacks_have_no_mean():
  seeds = {
    '0': {'values': {'after': {'em': 0.25, 'f1': 1.0}}},
    '1': {'values': {'after': {'em': 0.75}}},
  }
  (after,) = figures.means(seeds).values()
  assert list(after) == ['em'] and after['em']['mean'] == 0.5


def test_the_table_shows_what_is_asked_for_and_leaves_the_rest_blank():
  arms = {'a': found({'em': 0.5, 'f1': 0.25}), 'b': found({'f1': 0.75})}
  arms['b']['mean']['after']['f1'] = figures.interval([1.0, 2.0, 3.0])._asdict()
  names = ['after:f1', 'after:em', 'gain:em']
  assert figures.show(arms, names).splitlines() == [
    '| arm | seeds | after:f1 | after:em | gain:em |',
    '| --- | --- | --- | --- | --- |',
    '| a | 1 | 0.250 | 0.500 |  |',
    '| b | 1 | 2.000 ± 2.484 |  |  |',
  ]


def test_runs_by_different_code_are_named():
  one = dict(commit='0123456789', code='a')
  runs = {'a/0': one, 'a/1': {'commit': 'before the code was named'}}
  assert figures.versions(runs) == ''
  moved = {'c/0': one | {'commit': 'another'}}  # the same code
  assert figures.versions(runs | moved) == ''
  assert figures.versions(runs | {'b/0': one | {'code': 'b'}}) == (
    'Made by different code. a (commit 01234567): a/0; b (commit 01234567): b/0'
  )


def test_curves_are_a_small_picture(tmp_path):
  arms = {
    **{
      f'arm {i}': found({'em': 0.5}, [[s, i * s / 900] for s in range(60)])
      for i in range(9)
    },
    'untrained': found({'em': 0.1}),
  }
  names = {'em': 'exact match', 'other': 'never measured'}
  figures.plot(names, arms, tmp_path / 'curves.png')
  assert 5_000 < (tmp_path / 'curves.png').stat().st_size < 60_000


# ---- Of run folders, written by hand.


def config(seed):
  c = tiny.config()
  c.seed = seed
  return c


def test_a_gain_is_of_the_same_questions(tmp_path):
  made = core.sweep(config, [('base', {})], seeds=(0,), warm=False)
  stage = tmp_path / 'arms/base/0'
  complete(made, tmp_path, 'arms/base/0', 0.25, 0.75)

  def gain(**asked):
    for part, ids in asked.items():
      content = {'sets': {'dev': {'ids': ids}}}
      records.write_json(stage / part / 'eval_ids.json', content)
    found = figures.of_run(made, made.arm('base'), stage)['values']
    assert found['before']['eval/em'] == 0.25
    return found.get('gain', {}).get('eval/em')

  assert gain() == 0.5  # neither says what it asked
  assert gain(run=['a', 'b'], after=['a', 'b']) == 0.5
  assert gain(after=['c']) is None


def test_a_tidy_file_and_a_table_keep_purposes_apart(tmp_path):
  made = core.sweep(
    config,
    [('base', {}), ('fast', {'optim.lr': 1.0})],
    seeds=(0, 1),
    worlds=(5, 7),
    tuning_seeds=(100,),
    warm=False,
  )
  em = {
    'base': {'5-0': 0.25, '5-1': 0.5, '7-0': 0.5, '7-1': 0.75, '5-100': 1.0},
    'fast': {'5-0': 0.5, '5-1': 0.75, '7-0': 0.75, '7-1': 1.0, '7-11': 0.0},
  }
  for arm, runs in em.items():
    for case, value in runs.items():
      complete(made, tmp_path, f'arms/{arm}/{case}', 0.0, value)
  (tmp_path / 'arms/base/5-1.old').mkdir()  # someone's copy
  complete(made, tmp_path, 'arms/base/9-0', 0.0, 9.0)  # a world of before
  text = figures.write(made, tmp_path)
  # Student's t over the worlds' 0.375 and 0.625: 12.706 * 0.177 / 1.414. The
  # least of 16 resamples is 0.25 twice and 0.5 twice, whose middle is 0.375.
  *lines, empty, note = text.splitlines()[2:]
  assert lines == [
    '| base | report | 5-0 7-0 5-1 7-1 | 0.500 ± 1.588 (2 worlds) | 0.500 '
    '[0.375, 0.625] |  |',
    '| fast | report | 5-0 7-0 5-1 7-1 | 0.750 ± 1.588 (2 worlds) | 0.750 '
    '[0.625, 0.875] | 0.250 ± 0.000 (2 worlds) |',
    '| fast | replication | 7-11 | 0.000 (1 world) | 0.000 |  |',
    '| base | tuning | 5-100 | 1.000 (1 world) | 1.000 |  |',
  ]
  assert not empty and note.startswith('± of several worlds')
  assert (tmp_path / 'table.md').read_text() == f'{text}\n'
  with (tmp_path / 'results.csv').open() as lines:
    rows = [*csv.DictReader(lines)]
  # Of each run EM before, after and the gain; in curves 2 EMs and 2 rewards.
  assert len(rows) == 10 * (3 + 4)
  of = [r for r in rows if (r['arm'], r['seed']) == ('fast', '11')]
  assert {(r['purpose'], r['world']) for r in of} == {('replication', '7')}
  assert [
    (r['evaluation'], r['metric'], r['step'], float(r['value'])) for r in of
  ] == [
    ('before', 'eval/em', '', 0.0),
    ('after', 'eval/em', '', 0.0),
    ('gain', 'eval/em', '', 0.0),
    ('curve', 'eval/em', '0', 0.0),
    ('curve', 'eval/em', '2', 0.0),
    ('curve', 'reward', '1', 0.5),
    ('curve', 'reward', '2', 1.0),
  ]
  stored = pq.read_table(tmp_path / 'results.parquet').to_pylist()
  assert [str(r['value']) for r in stored] == [
    str(float(r['value'])) for r in rows
  ]
  # A run of another config is refused by its field.
  made = core.sweep(
    config, [('base', {'optim.lr': 2.0})], seeds=(0,), worlds=(5,), warm=False
  )
  with pytest.raises(ConfigError, match='optim.lr .*0.0003.*2.0'):
    figures.write(made, tmp_path)
