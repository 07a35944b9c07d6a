import pytest

from experiments import table
from searchrl_jax.sweep import figures


def means(**scores):
  return {
    'a': {
      'mean': {
        'gain': {
          name: figures.interval(values)._asdict()
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
