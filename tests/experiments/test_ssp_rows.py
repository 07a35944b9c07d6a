"""Self-play's table: what is read from a run's log."""

import json

import pytest

from experiments import table
from experiments.ssp import rows
from searchrl_jax.sweep import figures


def log(folder, steps):
  with (folder / 'metrics.jsonl').open('w') as file:
    for i, step in enumerate(steps):
      file.write(
        json.dumps(
          {'step': i}
          | {f'selfplay/{name}': value for name, value in step.items()}
        )
        + '\n'
      )


def test_means_are_over_what_they_are_of(tmp_path):
  first = dict(
    stand=4, proposals=8, valid_share=0.5, oracle_valid=0.75, hops=1.0, hops_n=3
  )
  last = dict(
    stand=1,
    proposals=8,
    valid_share=0.125,
    oracle_valid=1.0,
    hops=2.0,
    hops_n=1,
  )
  log(tmp_path, [first] * 4 + [last] * 2)
  found = rows.game(None, str(tmp_path), '')
  # Four steps of four questions, two of one: (16 x 0.75 + 2) / 18.
  assert found['game/oracle_valid'] == pytest.approx(14 / 18)
  # The first five steps have 12 valid questions of one hop, 1 of two; the
  # last five 9 and 2.
  assert found['game/hops_first'] == pytest.approx(14 / 13)
  assert found['game/hops_last'] == pytest.approx(13 / 11)
  assert found['game/hops_gain'] == pytest.approx(13 / 11 - 14 / 13)
  assert found['game/valid_share_last'] == pytest.approx(
    (3 * 0.5 + 2 * 0.125) / 5
  )


def test_a_run_whose_last_questions_are_all_wrong_has_no_gain(tmp_path):
  good = dict(stand=4, oracle_valid=1.0, hops=1.0, hops_n=4)
  bad = dict(stand=4, oracle_valid=0.0, hops=None, hops_n=0)
  log(tmp_path, [good] * 5 + [bad] * 5)
  found = rows.game(None, str(tmp_path), '')
  assert found['game/hops_first'] == 1.0
  assert 'game/hops_last' not in found and 'game/hops_gain' not in found
  assert found['game/oracle_valid'] == 0.5


def test_intervals_apart_are_measured_from_end_to_end():
  def seeds(*values):
    named = {
      str(i): {'values': {'after': {f'{rows.MULTI}/em': v}}}
      for i, v in enumerate(values)
    }
    return {'seeds': named, 'mean': figures.means(named)}

  bar = [b for b in rows.ROW.bars if b.name == 'ssp_vs_frozen']
  arms = {'ssp': seeds(0.8, 0.9, 1.0), 'frozen': seeds(0.5, 0.5, 0.5)}
  # Student's 95% of 0.8, 0.9, 1.0: 0.9 - 4.3027 x 0.1 / sqrt(3).
  (found,) = table.judge(bar, arms)
  assert found['value'] == pytest.approx(0.9 - 0.24841 - 0.5, abs=1e-4)
  assert found['holds']
  arms['frozen'] = seeds(0.7, 0.7, 0.7)
  (found,) = table.judge(bar, arms)
  assert not found['holds']
  arms['frozen'] = seeds(0.1)
  assert table.judge(bar, arms)[0]['value'] is None  # one seed tells nothing
