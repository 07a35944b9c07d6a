"""Which questions are covered, what the start made of them, what labels were,
and what a bar and an alarm say of runs."""

import dataclasses
import io
import json
import types

import numpy as np
import pandas as pd
import pytest

from configs import ttrl
from experiments.ttrl import coverage, guards, labels, start
from searchrl_jax import read, sft
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import DataError
from searchrl_jax.data.core import Trace
from searchrl_jax.lookup import ConfigError
from searchrl_jax.run import build
from searchrl_jax.store import records, writer
from searchrl_jax.sweep import core
from searchrl_jax.types import Passage
from searchrl_jax.worlds import atlas, microworld

SMALL = dict(train=60, heldout=40, known=20)
SEED = 3


@pytest.fixture(scope='module')
def world():
  return atlas.generate(SEED, **SMALL)


@pytest.fixture(scope='module')
def passages(world):
  """(person, section) -> its passage."""
  out = {}
  for row in world.corpus:
    title, text = row['contents'].split('\n')
    title = title.strip('"')
    out[tuple(title.split(', '))] = Passage(row['id'], title, text)
  return out


def of_kind(world, kind):
  return [q for q in world.questions['heldout'] if q.source == kind]


def support(question, passages):
  by_id = {p.id: p for p in passages.values()}
  return [by_id[i] for i in question.supporting]


# ---- Coverage.


def test_golden_share():
  text = "What is Mira Dok's teacher's rival's home?"
  school = Passage('1', 'Mira Dok, school', 'school of Mira Dok: mentor Kova '
                   'Len, ally Tusa Bal.')  # fmt: skip
  court = Passage('2', 'Kova Len, court', 'Kova Len has opponent Bodu Gor, '
                  'sponsor Mira Dok; court.')  # fmt: skip
  life = Passage('3', 'Bodu Gor, life', 'Bodu Gor, life: Sormar is origin, '
                 'Tenwick is dwelling.')  # fmt: skip
  # A person and three relations.
  assert coverage.share(text, [school]) == 2 / 4
  assert coverage.share(text, [school, court]) == 3 / 4
  assert coverage.share(text, [life, court, school]) == 1  # in any order
  assert coverage.share(text, [court, life]) == 0  # whose rival is not known
  assert coverage.share(text, [school, life]) == 2 / 4
  # The friend, whom the first passage names too, is as good: see the module.
  friend = dataclasses.replace(court, title='Tusa Bal, court')
  assert coverage.share(text, [school, friend, life]) == 1


@pytest.mark.parametrize('kind', atlas.KINDS)
def test_the_needed_passages_cover_a_question_and_fewer_do_not(
  world, passages, kind
):
  for q in of_kind(world, kind)[:40]:
    whole = support(q, passages)
    assert coverage.share(q.text, whole) == 1
    # A search that stops early, which an intermediate answer comes from.
    for n in range(len(whole)):
      assert coverage.share(q.text, whole[:n]) < 1


def test_what_repeats_a_question_or_does_not_follow_it_covers_nothing(
  world, passages
):
  for q in of_kind(world, '3hop')[:40]:
    person = q.meta['path'][0]
    # All sections of the person that it starts from.
    own = [p for (who, _), p in passages.items() if who == person]
    asked = passages[person, atlas.ASKED]
    assert all(f' {r}' in asked.text for r in q.meta['path'][1:])
    assert coverage.share(q.text, [asked]) == 1 / 4  # the person alone
    assert coverage.share(q.text, own) <= 2 / 4
    later = support(q, passages)[1:]
    assert coverage.share(q.text, later) == 0


def test_the_small_forms_questions_are_read_too():
  small = microworld.generate(SEED, train=60, heldout=20)
  found = {
    row['id']: Passage(row['id'], *row['contents'].replace('"', '').split('\n'))
    for row in small.corpus
  }
  for q in small.questions['train'][:200]:
    whole = [found[i] for i in q.supporting]
    assert (
      coverage.share(q.text, whole) == 1 > coverage.share(q.text, whole[1:])
    )


@pytest.mark.parametrize(
  'text',
  ['Who wrote it?', "What is Mira Dok's shoe size?", "What is Mira Dok's age?"],
)
def test_other_questions_are_not_read(text):
  assert coverage.chains(text) is None and coverage.share(text, []) is None


# ---- What a run has recorded.


@pytest.fixture(scope='module')
def config():
  c = ttrl.get_config(f'base=atlas,seed={SEED}')
  c.data.world.update(SMALL)
  c.log.tensorboard = c.log.progress = False
  return c


@pytest.fixture
def write(config, tmp_path):
  """Writes {step: groups} as a part of a run folder; returns the folder."""

  def made(steps, part='trajectories'):
    build.tokenizer(config, str(tmp_path))
    with writer.Writer(tmp_path, config, out=io.StringIO()) as out:
      for step, groups in steps.items():
        out.trajectories(step, groups, name=part)
        out.flush()
    return tmp_path

  return made


@pytest.fixture(scope='module')
def env(config, tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokens')
  return build.environment(config, build.tokenizer(config, str(folder)))


def attempt(env, question, read, answer, sample=0):
  """A trajectory that finds these passages, one a search, then answers or,
  with None, leaves it out."""
  actions = []
  for passage in read:
    actions.append(('search', passage.title.replace(',', '')))
    actions.append(('information', (passage,)))
  actions.append(('answer', answer or 'none'))
  made = sft.render(Trace(question, (*actions,)), env, sample)
  kept = [s for s in made.segments if answer or s.kind != 'answer']
  return dataclasses.replace(made, segments=(*kept,))


def group(env, question, passages, *made):
  """made: (passages of the support that are found, answer) of each sample."""
  whole = support(question, passages)
  return tuple(
    attempt(env, question, whole[:n], answer, i)
    for i, (n, answer) in enumerate(made)
  )


def test_what_labels_were(write, env, world, passages):
  q, p = of_kind(world, '3hop')[:2]
  both = of_kind(world, 'comparison')[0]
  start_votes = {'label': q.answers[0].lower(), 'share': 0.5, 'searches': 3.0}
  q = dataclasses.replace(q, meta={**q.meta, 'start_votes': start_votes})
  gold, (way, second, _) = q.answers[0], [f[2] for f in q.meta['facts']]
  right, early, guess = (3, gold), (2, second), (0, gold)
  other = next(
    name for name in world.facts if all(name not in f for f in p.meta['facts'])
  )
  steps = {
    0: [group(env, q, passages, right, right, guess, early)],
    # Asked twice in one step (Stream.next names the second so), then again.
    1: [
      group(env, q, passages, early, early, early, right),
      group(env, dataclasses.replace(q, id=f'{q.id}#2'), passages,
            *[(1, way)] * 4),
    ],
    2: [
      group(env, p, passages, *[(3, other)] * 3, (0, p.answers[0])),
      group(env, both, passages, *[(1, both.meta['path'][0])] * 4),
    ],
  }  # fmt: skip
  found = labels.rows(read.run(write(steps)))
  kinds = [next(k for k in labels.KINDS if row[k]) for row in found]
  way_ = 'intermediate'
  assert kinds == ['right', way_, way_, 'else', way_]
  first, second_, third, fourth, last = found
  assert (first['agreement'], first['distinct']) == (3 / 4, 2)
  assert first['searches'] == (3 + 3 + 0 + 2) / 4
  # Searches of the three that are right, 3 3 0, less those of the other.
  assert first['ahead'] == pytest.approx(2 - 2)
  # Of the three, one has found nothing.
  assert first['found'] == first['covered'] == pytest.approx(2 / 3)
  # The early stop's answer stands in what it found, and does not cover.
  assert (second_['found'], second_['covered']) == (1, 0)
  assert [row['flipped'] for row in found[:3]] == [0, 1, 1]
  assert np.isnan([fourth['flipped'], last['flipped']]).all()
  again = [row['revisit_flipped'] for row in found]
  assert again[1:3] == [1, 1] and np.isnan(again[0])
  assert third['distinct'] == 1 and np.isnan(third['ahead'])
  means = labels.kinds(found)
  assert means['whole']['hard']['n'] == 4 and means['whole']['all']['n'] == 5
  assert means['whole']['hard'][way_] == 2 / 4
  assert means['first']['hard']['right'] == 1  # of three steps, the first
  assert means['last'].keys() == {'3hop', 'comparison', 'hard', 'all'}


def test_labels_are_written_with_a_figure(
  write, env, world, passages, tmp_path
):
  q = of_kind(world, '4hop')[0]
  gold = q.answers[0]
  steps = {n: [group(env, q, passages, (4, gold), (0, None))] for n in range(6)}
  folder = write(steps)
  out = tmp_path / 'labels.json'
  labels.write({'seed 0': str(folder)}, str(out))
  written = json.loads(out.read_text())['seed 0']
  assert written['whole']['4hop']['right'] == 1
  assert written['whole']['4hop']['flipped'] is None  # nothing of the start
  assert out.with_suffix('.png').stat().st_size > 1000
  values = labels.measured(None, str(folder), str(tmp_path / 'out'))
  assert values['last/hard/right'] == values['last/all/right'] == 1
  assert len(json.loads((tmp_path / 'out/labels.json').read_text())) == 6


def test_a_run_without_paths_is_named(write, env, world, passages):
  q = dataclasses.replace(of_kind(world, '1hop')[0], meta={})
  folder = write({0: [group(env, q, passages, (1, 'home'))]})
  with pytest.raises(ConfigError, match=f'{q.id}.*no meta.path'):
    labels.rows(read.run(folder))


# ---- The votes of the start.


def asked(n):
  return dict(
    module='searchrl_jax.worlds.atlas',
    split='heldout',
    kinds=('3hop',),
    n=n,
    **SMALL,
  )


def load(c, n, folder):
  fields = dict(module=start.MODULE, of=asked(n), votes=str(folder))
  return data.load_sets({'test': fields}, c.data)['test']


def test_questions_get_the_votes_of_the_start(
  config, write, env, world, passages
):
  q, p = data.load_sets({'test': asked(2)}, config.data)['test']
  other = q.meta['facts'][0][2]
  groups = [
    group(
      env, q, passages, (3, q.answers[0]), (1, other), (1, other), (0, None)
    ),
    group(env, p, passages, (0, None), (0, None)),
  ]
  failed = dataclasses.replace(groups[0][0], end='failed', sample=4)
  folder = write({0: [(*groups[0], failed), groups[1]]}, part='eval')
  found = load(config, 2, folder)
  # Two of four samples that did not fail; 3 + 1 + 1 + 0 searches.
  want = {'label': other.lower(), 'share': 2 / 4, 'searches': 5 / 4}
  assert found[0].meta['start_votes'] == want
  silent = {'label': None, 'share': 0.0, 'searches': 0.0}
  assert found[1].meta['start_votes'] == silent
  # All else of a question stays.
  assert [dataclasses.replace(x, meta={}) for x in found] == [
    dataclasses.replace(x, meta={}) for x in (q, p)
  ]
  with pytest.raises(DataError, match='no samples of question'):
    load(config, 3, folder)


def test_one_sample_is_no_vote(config, write, env, passages):
  (q,) = data.load_sets({'test': asked(1)}, config.data)['test']
  folder = write({0: [group(env, q, passages, (0, 'home'))]}, part='eval')
  with pytest.raises(DataError, match='one sample of question.*eval.n=16'):
    load(config, 1, folder)


def test_arms_of_a_start_share_its_votes(config, monkeypatch, tmp_path):
  sampled, trained = [], []

  def evaluate(c, run, out):
    sampled.append((c, run))
    (tmp_path / 'votes' / 'eval.json').write_text('{}')
    plain = json.dumps(records.plain(c))
    (tmp_path / 'votes' / 'config.json').write_text(plain)

  monkeypatch.setattr(start.evaluate, 'evaluate', evaluate)
  monkeypatch.setattr(start.run, 'train', lambda c, out: trained.append(c))
  for _ in range(2):
    c = config.copy_and_resolve_references()
    c.train.init = str(tmp_path)
    start.train(c, str(tmp_path / 'arm'))
  ((c, run),) = sampled
  assert run == str(tmp_path) and (c.eval.n, c.eval.temperature) == (16, 1.0)
  assert c.data.eval.to_dict() == {'test': config.data.train.test.to_dict()}
  for c in trained:
    fields = c.data.train.test
    assert fields.votes == str(tmp_path / 'votes')
    assert fields.of.to_dict() == config.data.train.test.to_dict()
  c = config.copy_and_resolve_references()
  c.train.init, c.rollout.group = str(tmp_path), 8
  with pytest.raises(ConfigError, match=r'others of eval\.n; remove'):
    start.train(c, str(tmp_path / 'arm'))


# ---- The rows.


def test_the_rows_are_those_of_the_config():
  core.check(guards.ROW)
  assert guards.ROW.needs('arms/covered/7') == {'train.init': 'warm/skills/7'}
  for name in guards.ARMS:
    arm, small = guards.ROW.arm(name), guards.ROW.arm(f'small-{name}')
    assert len(arm.seeds) == 8 and small.seeds == (0, 1, 2)
    c, other = arm.config(5), small.config(1)
    assert c.reward.vote.fn == other.reward.vote.fn == ttrl.LABELS[name]
    assert (c.rollout.questions, c.rollout.group, c.train.steps) == (8, 16, 40)
    assert c.seed == c.data.world_seed == 5


def test_the_bar():
  runs = {str(n): {guards.BEFORE: 0.2, guards.HARD: 0.4} for n in range(8)}
  two_lost = runs | {n: {guards.BEFORE: 0.2, guards.HARD: 0.0} for n in '35'}
  found = guards.verdict(runs, two_lost)
  assert found['holds'] and found['lowest'] == 0.4
  assert found['gain']['mean'] == pytest.approx(0.2)
  # None of eight: up to 1 - .025^(1/8). .4 more in two of eight. Two seeds
  # fail in one arm only, always that one: 2 x .5^2.
  assert found['failed'] == [0, 0.0, pytest.approx(1 - 0.025 ** (1 / 8))]
  than = found['than_majority']
  assert than['difference']['mean'] == pytest.approx(0.1) and than['p'] == 0.5
  assert not guards.verdict(two_lost, two_lost)['holds']  # whatever the mean
  assert guards.verdict(two_lost, two_lost)['than_majority']['p'] is None
  flat = {n: own | {guards.HARD: 0.25} for n, own in runs.items()}
  assert not guards.verdict(flat, runs)['holds']
  seven = {n: own for n, own in runs.items() if n != '7'}
  assert not guards.verdict(seven, runs)['holds']


def frame(alarm_at=None, lost=0.1, steps=20):
  """Metrics of steps, and of the evaluation before them."""
  on = [np.nan, *(float(alarm_at is not None and t >= alarm_at)
                  for t in range(steps))]  # fmt: skip
  values = {guards.ALARM: on, 'reward/vote/lost': [np.nan, *[lost] * steps]}
  return pd.DataFrame(values, index=range(-1, steps))


def test_the_alarm_has_to_name_the_failed_and_no_others():
  metrics = {
    'a/0': frame(),
    'a/1': frame(9, lost=0.5),
    'a/2': frame(lost=0.2),
    'a/3': frame(4, lost=0.4),
  }
  failed = {'a/1', 'a/3'}
  found = guards.alarm(metrics, failed)
  assert found['holds'] and found['failed'] == ['a/1', 'a/3']
  assert found['named'] == {'a/0': None, 'a/1': 9, 'a/2': None, 'a/3': 4}
  # Of these metrics the alarm says nothing without `gained`.
  assert found['now'] == dict.fromkeys(metrics)
  assert found['peaks'] == pytest.approx(
    {'a/0': 0.1, 'a/1': 0.5, 'a/2': 0.2, 'a/3': 0.4}
  )
  gaining = {
    k: f.assign(**{'reward/vote/gained': 0.1}) for k, f in metrics.items()
  }
  gaining['a/1'].loc[:9, guards.LOST] = 0.1
  again = guards.alarm(gaining, failed)['now']
  # Three of the five steps up to the 12th are above the limit.
  assert again == {'a/0': None, 'a/1': 12, 'a/2': None, 'a/3': None}
  lost = found['signals']['reward/vote/lost']
  np.testing.assert_allclose(lost.pop('failed'), [0.4, 0.5])
  np.testing.assert_allclose(lost.pop('others'), [0.1, 0.2])
  assert lost == {'separates': True, 'by_chance': 1.0}
  # Of the 45 ways to choose two of ten, the two lowest or the two highest, by
  # any of ten signals; not of several arms, whose runs of a seed fail together.
  more = metrics | {f'a/{n}': frame() for n in range(4, 10)}
  for several in (False, True):
    found_ = guards.alarm(more, failed, several)['signals']['reward/vote/lost']
    assert found_['separates']
    assert found_.get('by_chance') == (None if several else 2 * 10 / 45)
  assert found['signals']['health/searches'] == {'separates': None}
  # One that did not fail is named, even late; one that did is named too late.
  assert not guards.alarm(metrics | {'a/0': frame(19)}, failed)['holds']
  assert not guards.alarm(metrics | {'a/3': frame(10)}, failed)['holds']
  # A false alarm where none failed.
  assert guards.alarm({'a/1': frame(9)}, set())['holds'] is False
  mixed = guards.alarm(metrics | {'a/0': frame(lost=0.45)}, failed)
  assert mixed['signals']['reward/vote/lost']['separates'] is False


def test_what_is_complete_is_judged(monkeypatch, tmp_path):
  good = {guards.HARD: 0.4, guards.BEFORE: 0.2}
  seeds = {
    name: {'seeds': {'0': {'values': {'after': values}}}}
    for name, values in (
      ('majority', good | {guards.HARD: 0.0}),
      ('covered', good),
      ('small-found', {'eval/em': 0.5}),
    )
  }
  monkeypatch.setattr(guards.figures, 'collect', lambda *_: seeds)
  of = {'majority': frame(3), 'covered': frame()}
  monkeypatch.setattr(
    guards.read,
    'run',
    lambda path: types.SimpleNamespace(metrics=of[path.split('/')[-3]]),
  )
  shown = []
  monkeypatch.setattr(guards.labels, 'write', lambda *a: shown.append(a))
  (tmp_path / 'results.json').write_text('{"arms": 1}')
  guards.conclude(tmp_path / 'sweep', tmp_path)
  record = json.loads((tmp_path / 'results.json').read_text())
  assert record['arms'] == 1 and {*record['verdicts']} == {
    'majority',
    'covered',
  }
  assert {*record['alarm']} == {'majority', 'covered', 'all'}
  assert record['alarm']['all']['failed'] == ['majority/0']
  assert record['alarm']['all']['holds'] is True
  assert record['alarm']['covered']['holds'] is None  # nothing to name
  ((runs, out),) = shown
  folder = tmp_path / 'sweep/arms/majority/0/run'
  assert runs == {'majority/0': str(folder)}
  assert out == str(tmp_path / 'labels.json')


def test_config_dicts_of_the_data_are_kept_by_reference():
  c = ttrl.get_config('base=atlas,label=restrain,start=runs/votes')
  assert c.data.train.test.module == start.MODULE
  c.data.world.heldout = 60
  assert c.data.train.test.of.heldout == 60
