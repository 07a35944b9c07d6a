"""Two evaluations, question by question."""

import dataclasses
import json
import math

import pytest

from searchrl_jax.evaluate import compare, files, grading
from searchrl_jax.rewards import scores as metrics
from tests import test_commands
from tests.evaluate.test_files import manifest
from tests.evaluate.test_grading import sets


def command(*args, **kw):
  return test_commands.command('evaluate.compare', *args, **kw)


def rows(em, name='a', hops=lambda i: 1 + i % 2):
  """One row for each question of a set; None = it failed."""
  nothing = dict.fromkeys(grading.SCORES, 0.0)
  return [
    grading.Row(**nothing | dict(
      set=name, question=f'q{i:03}', source='nq', hops=hops(i), sample=0,
      failed=v is None, vote=None, em=math.nan if v is None else float(v),
    )) for i, v in enumerate(em)
  ]  # fmt: skip


def found(a, b, **kw):
  fields = dict(scores=('em',), resamples=500, seed=0)
  return compare.compare(a, b, **fields | kw)['em']


def test_figures_of_a_pair():
  # Won: q0, q1, q2, q4, q6. Lost: q3. Even questions have one hop.
  a, b = [0, 0, 0, 1, 0, 1, 0, 0], [1, 1, 1, 0, 1, 1, 1, 0]
  slices = found(rows(a), rows(b))
  assert list(slices) == ['all', 'hops=1', 'hops=2']
  whole = slices['all']
  assert (whole['a'], whole['b'], whole['difference']) == (0.25, 0.75, 0.5)
  assert (whole['wins'], whole['losses'], whole['ties']) == (5, 1, 2)
  assert whole['p'] == 2 * (1 + 6) / 64  # two-sided binomial, 1 of 6
  assert whole['low'] < 0.5 < whole['high'] and whole['n'] == 8
  one = slices['hops=1']
  assert (one['n'], one['wins'], one['losses'], one['difference']) == (
    4,
    4,
    0,
    1.0,
  )
  assert slices['hops=2']['difference'] == 0.0


def test_equal_samples_in_another_order_are_a_tie():
  """0.3 + 0.2 + 0.1 is not 0.1 + 0.2 + 0.3 in floating point."""
  a, b = (
    [dataclasses.replace(rows([v])[0], sample=n) for n, v in enumerate(values)]
    for values in ([0.3, 0.2, 0.1], [0.1, 0.2, 0.3])
  )
  whole = found(a, b)['all']
  assert (whole['wins'], whole['losses'], whole['ties']) == (0, 0, 1)


def test_a_pair_turned_round_is_its_mirror():
  a, b = rows([0, 1, 0, 1, 1, 0]), rows([1, 1, 0, 0, 1, 1])
  one, other = found(a, b)['all'], found(b, a)['all']
  assert one['difference'] == -other['difference'] != 0
  assert (one['wins'], one['losses']) == (other['losses'], other['wins'])
  assert one['p'] == other['p']


def test_pairing_sees_what_the_means_apart_do_not():
  """50 of 60 answers are the same; the two intervals overlap."""
  a = [i % 2 for i in range(60)]
  b = [1 if i < 20 else v for i, v in enumerate(a)]
  pair = found(rows(a), rows(b))['all']
  assert pair['low'] > 0 and pair['p'] < 0.01
  apart = [metrics.bootstrap(x, resamples=500, seed=0) for x in (a, b)]
  assert apart[0].high > apart[1].low


def test_a_question_that_failed_on_one_side_is_told_and_left_out():
  whole = found(rows([0, 1, None, None, 1]), rows([1, None, 1, None, 1]))['all']
  assert (whole['n'], whole['unpaired']) == (2, 2)
  assert (whole['wins'], whole['ties']) == (1, 1)


@pytest.mark.parametrize('mine, theirs', [(5, 2), (2, 5)])
def test_questions_of_one_side_alone_are_told(mine, theirs):
  whole = found(rows([1] * mine), rows([1] * theirs))['all']
  assert (whole['n'], whole['unpaired']) == (2, 3)


def test_samples_of_a_question_are_averaged_first():
  a = rows([0, 1]) + [
    dataclasses.replace(r, sample=1, em=1.0) for r in rows([0, 1])
  ]
  whole = found(a, rows([1, 0]))['all']
  assert (whole['n'], whole['a'], whole['b']) == (2, 0.75, 0.5)
  assert (whole['wins'], whole['losses']) == (1, 1)


def test_the_same_question_in_two_sets_is_two_pairs():
  a = rows([0, 0]) + rows([1, 1], 'b')
  b = rows([1, 1]) + rows([0, 0], 'b')
  slices = found(a, b)
  assert slices['set=a']['difference'] == 1 == -slices['set=b']['difference']
  assert slices['all']['n'] == 4


def test_equal_slices_are_told_once():
  one = [
    dataclasses.replace(r, source=f's{r.hops}') for r in rows([0, 1, 1, 0])
  ]
  assert list(found(one, one)) == ['all', 'source=s1', 'source=s2']


@pytest.fixture
def folder(tmp_path):
  def make(name, em, **kw):
    out = tmp_path / name
    out.mkdir()
    (out / 'manifest.json').write_text(json.dumps(manifest(**kw)))
    (out / 'rows.jsonl').write_text(
      ''.join(
        json.dumps(
          files.records.plain({'evaluation': 'eval'} | dataclasses.asdict(r))
        )
        + '\n'
        for r in rows(em)
      )
    )
    return out

  return make


def test_each_folder_is_held_against_the_first(folder, tmp_path):
  a, b = folder('a', [0, 0, 1]), folder('b', [1, 0, 1], commit='beef')
  c = folder('c', [1, 1, 1], checkpoint='runs/c')
  out, _ = command(a, b, c, f'--out={tmp_path}/c.json')
  assert "commit: 'c0ffee' -> 'beef'" in out
  assert "'runs/a' -> 'runs/c'" in out and out.count(' em: B - A') == 2
  kept = json.loads((tmp_path / 'c.json').read_text())
  assert [x['b'] for x in kept['comparisons']] == [str(b), str(c)]
  assert [x['scores']['em']['all']['wins'] for x in kept['comparisons']] == [
    1,
    2,
  ]
  out, _ = command(f'{a}:eval', b)  # no --config, whatever the colon
  assert f'A = {a}:eval' in out


OTHER = sets() | {'a': sets()['a'][:1]}


@pytest.mark.parametrize(
  'change, message',
  [
    (dict(given=OTHER), "sets.a.ids: 2 ids ('q9'"),
    (dict(identity={'corpus': {'count': 2, 'sha256': 'cd'}}), 'corpus.sha256'),
  ],
)
def test_evaluations_of_other_things_are_refused(folder, change, message):
  a, b = folder('a', [0, 1]), folder('b', [1, 1], **change)
  _, err = command(a, b, status=2)
  assert message in err and len(err.splitlines()) == 1
  part = message.split('.')[0]
  assert f'--allow={part}' in err
  out, _ = command(a, b, f'--allow={part}')
  assert part in out  # it is told all the same


@pytest.mark.parametrize(
  'args, message',
  [
    (('a',), 'two or more'),
    (('a', '/nowhere'), '/nowhere/manifest.json'),
    (('a', 'a:shuffled'), "'shuffled'"),
    (('a', 'a', '--scores=sub'), "'sub_em'"),
    (('a', 'a', '--allow=set'), "'sets'"),
    (('a', 'a', '--resamples=0'), '--resamples=0'),
  ],
)
def test_what_cannot_be_compared_is_one_line(folder, args, message):
  a = folder('a', [0, 1])
  args = [
    x.replace('a', str(a), 1) if x in ('a', 'a:shuffled') else x for x in args
  ]
  _, err = command(*args, status=2)
  assert message in err and len(err.splitlines()) == 1, err
