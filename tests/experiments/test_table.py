import pytest

from experiments import table


def test_the_interval_over_seeds_is_students():
  # t(0.975, 2) = 4.302653, s = 1: 4.302653 / sqrt(3) = 2.484138.
  found = table.interval([1.0, 2.0, 3.0])
  assert found == pytest.approx((2.0, -0.484138, 4.484138, 3), abs=1e-6)
  assert table.interval([0.5]) == (0.5, None, None, 1)


def means(**scores):
  return {
    'a': {
      'mean': {
        'gain': {
          name: table.interval(values)._asdict()
          for name, values in scores.items()
        }
      }
    }
  }


def test_a_bar_is_judged_by_its_interval_and_absent_arms_hold_nothing():
  def low(at):
    return at('a', 'gain', 'em').low

  bars = (
    table.Bar('gain', low, 0.0, strict=True),
    table.Bar('other', lambda at: at('b', 'gain', 'em').mean, 0.0),
  )
  wide, narrow = means(em=[0.0, 0.1, 0.9]), means(em=[0.3, 0.3, 0.4])
  assert [b['holds'] for b in table.judge(bars, wide)] == [False, False]
  gain, other = table.judge(bars, narrow)
  assert gain['holds'] and gain['value'] == pytest.approx(0.1899, abs=1e-4)
  assert other == {'name': 'other', 'value': None, 'bar': 0.0, 'holds': False}
  # One seed has no interval.
  assert table.judge(bars, means(em=[0.9]))[0]['value'] is None


def found(after, curve=()):
  return {
    'seeds': {'0': {'values': {'after': after}, 'curve': {'em': list(curve)}}},
    'mean': table.means({'0': {'values': {'after': after}}}),
  }


def test_scores_that_a_seed_lacks_have_no_mean():
  seeds = {
    '0': {'values': {'after': {'em': 0.25, 'f1': 1.0}}},
    '1': {'values': {'after': {'em': 0.75}}},
  }
  (after,) = table.means(seeds).values()
  assert list(after) == ['em'] and after['em']['mean'] == 0.5


def test_the_table_shows_what_is_asked_for_and_leaves_the_rest_blank():
  arms = {'a': found({'em': 0.5, 'f1': 0.25}), 'b': found({'f1': 0.75})}
  arms['b']['mean']['after']['f1'] = table.interval([1.0, 2.0, 3.0])._asdict()
  assert table.show(arms, ['after:f1', 'after:em', 'gain:em']).splitlines() == [
    '| arm | seeds | after:f1 | after:em | gain:em |',
    '| --- | --- | --- | --- | --- |',
    '| a | 1 | 0.250 | 0.500 |  |',
    '| b | 1 | 2.000 ± 2.484 |  |  |',
  ]


def test_curves_are_a_small_picture(tmp_path):
  arms = {
    **{
      f'arm {i}': found({'em': 0.5}, [[s, i * s / 900] for s in range(60)])
      for i in range(9)
    },
    'untrained': found({'em': 0.1}),
  }
  names = {'em': 'exact match', 'other': 'never measured'}
  table.plot(names, arms, tmp_path / 'curves.png')
  assert 5_000 < (tmp_path / 'curves.png').stat().st_size < 60_000
