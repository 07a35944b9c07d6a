"""Proposals that are asked for a number of hops, and the path as a teacher."""

import collections
import dataclasses
import hashlib
import json
import math
import types

import numpy as np
import pytest

from configs import ssp
from experiments import table
from experiments.arena import arms, selfplay
from experiments.arena import run as arena
from experiments.ssp import game, start
from experiments.ssp import oracle as oracles
from experiments.ssp import traces as scripts
from experiments.ssp import world as worlds
from experiments.ssp.hops import rows
from experiments.ssp.pool import Pool
from searchrl_jax import lookup, sft
from searchrl_jax.checks import ConfigError
from searchrl_jax.data.checks import DataError, require_needs
from searchrl_jax.learn import advantages, batching, teacher
from searchrl_jax.sweep import core, figures
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.types import Question, Rewards
from searchrl_jax.worlds import atlas
from tests.experiments.ssp_fakes import (
  ANSWER,
  GOOD,
  ask,
  config,
  env,
  search,
  standing,
)
from tests.fakes import run_script
from tests.methods import group as hand

BRIEF = '{answer} {searches}'


def asking(**hops):
  """A config whose briefs ask for hops."""
  return config(brief=BRIEF, hops=dict(asked='drawn') | hops)


def numbered(n, t, counts=None):
  """A proposal that was asked for n hops, of which `counts` count."""
  question = dataclasses.replace(t.question, meta={'asked': n})
  meta = {'asked': n if counts is None else counts}
  return dataclasses.replace(t, question=question, meta=meta)


def proposed(n, *turns, c, counts=None):
  one = env(c)
  t = run_script([*turns, *[''] * 5], env=one, question=ANSWER, passage='p q')
  return game.read(numbered(n, t, counts), one, c, 7)


class Hops:
  """An oracle that knows how many hops every question has; 0 = not valid."""

  def __init__(self, hops):
    self.hops = hops

  def judge(self, text, answers):
    del answers
    hops = self.hops[text.split()[-1]]
    return oracles.Verdict(True, hops > 0, True, hops, 'x')


# ---- The number.


def test_a_number_depends_on_run_step_and_answer_alone():
  c = asking()
  answers = [Question(f'a{i}', f'x{i}', (f'x{i}',)) for i in range(2000)]
  told = game.briefs(answers, c, 3)
  numbers = [q.meta['asked'] for q in told]
  # The order of arrival cannot show.
  again = game.briefs(answers[::-7], c, 3)
  assert [q.meta['asked'] for q in again] == numbers[::-7]
  assert told[5].text == f'x5 {numbers[5]}' and told[5].answers == ('x5',)
  later = [q.meta['asked'] for q in game.briefs(answers, c, 4)]
  c.seed = 1
  other = [q.meta['asked'] for q in game.briefs(answers, c, 3)]
  assert numbers != later and numbers != other
  counts = collections.Counter(numbers)
  for n, share in enumerate((0.4, 0.3, 0.2, 0.1), 1):
    assert counts[n] / 2000 == pytest.approx(share, abs=0.04)


def test_without_hops_a_brief_is_what_it_was():
  meta = {'search_turns': 3}
  listed = Question('l', 'x', ('Hahn',), meta=meta)
  (told,) = game.briefs([listed], config(brief='{answer}, {searches}'), 0)
  assert told.text == 'Hahn, 3' and told.meta == meta
  groups = [(standing(1)[0].trajectory,)]
  assert game.numbered(groups, config(), None) is groups


def test_a_number_of_the_data():
  c = asking(asked='search_turns', searched=True)  # of 4 turns
  listed = Question('l', 'x', ('Hahn',), meta={'search_turns': '03'})
  (told,) = game.briefs([listed], c, 0)
  assert told.text == 'Hahn 3' and told.meta['asked'] == 3
  for value, message in (
    ('0', "'l'.*search_turns.*'0'.*no number"),
    ('two', "'two'.*selfplay.hops.asked"),
    (5, "'5'.*env.max_turns=4"),
  ):
    bad = dataclasses.replace(listed, meta={'search_turns': value})
    with pytest.raises(DataError, match=message):
      game.briefs([bad], c, 0)
  with pytest.raises(DataError, match="'a' has no meta.*search_turns"):
    needs = ('self-play', game.briefs, c.selfplay.hops)
    require_needs([needs], [ANSWER])
  drawn = ('self-play', game.briefs, asking().selfplay.hops)
  require_needs([drawn], [ANSWER])


def test_a_shuffled_number_is_another_s_and_the_brief_keeps_its_own():
  base = standing(1)[0].trajectory
  groups = [
    (dataclasses.replace(base, question=q),)
    for q in game.briefs(
      [Question(f'a{i}', '', ('x',)) for i in range(40)], asking(), 0
    )
  ]

  def numbers(c):
    found = game.numbered(groups, c, game.rng(c, 0, 'hops0'))
    told = [t.question.meta['asked'] for (t,) in found]
    return told, [t.meta['asked'] for (t,) in found]

  told, counts = numbers(asking())
  assert told == counts
  again, dealt = numbers(asking(shuffled=True))
  assert again == told and sorted(dealt) == sorted(told)
  assert sum(a != b for a, b in zip(told, dealt)) > 10
  assert numbers(asking(shuffled=True)) == (again, dealt)  # after a resume


# ---- What it counts for.


@pytest.mark.parametrize(
  'n, counts, reason',
  [(2, 2, ''), (3, 3, 'searches'), (3, 1, ''), (1, 3, 'searches')],
)
def test_a_proposal_needs_as_many_searches(n, counts, reason):
  turns = search('a'), search('b'), ask(GOOD)
  c = asking(searched=True)
  assert proposed(n, *turns, c=c, counts=counts).reason == reason
  c.selfplay.hops.searched = False
  assert proposed(n, *turns, c=c, counts=counts).reason == ''


def test_the_hop_term():
  # Both make two searches, and two of four solvers are right. For n hops:
  # 4 x 1/2 x 1/2 + 1/2 min(2 / n, 1); by the oracle, of one hop and of none,
  # 1 + 1/2 min(1 / n, 1), and 1.
  proposals = standing(2)
  assert len(proposals[0].trajectory.searches) == 2
  shares = {'q0': 0.5, 'q1': 0.5}
  for term, n, expected in (
    ('searches', 1, [1.5, 1.5]),
    ('searches', 2, [1.5, 1.5]),
    ('searches', 4, [1.25, 1.25]),
    ('oracle', 1, [1.5, 1.0]),
    ('oracle', 4, [1.125, 1.0]),
    ('', 4, [1.0, 1.0]),
  ):
    c = asking(term=term)
    c.selfplay.reward = 'intermediate_difficulty'
    own = [
      dataclasses.replace(p, trajectory=numbered(n, p.trajectory))
      for p in proposals
    ]
    found = game.opposed(own, shares, c, Hops({'0': 1, '1': 0}))
    assert found.value == pytest.approx(expected), (term, n)


def test_hops_that_are_not_there_are_searched_for_and_not_found():
  """Dr. Zero asks for hops and checks none: searches are as good."""
  turns = search('a'), search('b'), search('c'), ask(f'{GOOD} 0')
  earned = {}
  for term in ('searches', 'oracle'):
    c = asking(term=term)
    p = proposed(3, *turns, c=c)
    assert p.reason == ''
    h = c.selfplay.hops
    earned[term] = [game.hop_term(p, h, Hops({'0': n})) for n in (1, 3)]
  assert earned['searches'] == [0.5, 0.5]
  assert earned['oracle'] == pytest.approx([0.5 / 3, 0.5])


def test_a_proposal_that_does_not_stand_earns_no_hops():
  c = asking(term='searches')
  c.selfplay.penalty = -0.25
  (bad,) = standing(1, 'leak')
  bad = dataclasses.replace(bad, trajectory=numbered(1, bad.trajectory))
  assert game.opposed([bad], {}, c).value == pytest.approx([-0.25])
  # Nor does one whose solvers all failed, which counts for nothing.
  (lost,) = standing(1)
  lost = dataclasses.replace(lost, trajectory=numbered(1, lost.trajectory))
  found = game.opposed([lost], {}, c)
  assert (found.value[0], found.valid[0]) == (0.0, False)


def test_why_one_hop_and_why_not():
  """Expected rewards of a question that a solver gets right with p, of four.

  4 s (1 - s): 3 p (1 - p) = .74 at .45, .55 at .76, .38 at .15. Linear:
  4/3 (1 - p - (1 - p)^4) = .32 at .76, .44 at .15: two hops at .15 are worth
  more than one hop at .76.
  """

  def expected(how, p):
    c = config(reward=how)
    assert c.rollout.group == 4
    chance = [math.comb(4, k) * p**k * (1 - p) ** (4 - k) for k in range(5)]
    return sum(x * game.earned(k / 4, c) for k, x in enumerate(chance))

  found = [expected('intermediate_difficulty', p) for p in (0.45, 0.76, 0.15)]
  assert found == pytest.approx([0.7425, 0.5472, 0.3825])
  found = [expected('linear_difficulty', p) for p in (0.76, 0.15)]
  assert found == pytest.approx([0.3156, 0.4373], abs=1e-4)


def test_proposals_are_compared_with_those_of_as_many_hops():
  # One hop: .9 .6 .3 less the means .45 .6 .75 of the others; two: .5 0 less
  # 0 .5; the only one of three has none to be compared with. The last failed.
  values = np.array([0.9, 0.5, 0.6, 0.0, 0.3, 0.8, 9.0], np.float32)
  valid = np.array([1, 1, 1, 1, 1, 1, 0], bool)
  asked = [1, 2, 1, 2, 1, 3, 1]
  trajectories = [types.SimpleNamespace(meta={'asked': n}) for n in asked]
  rows_ = types.SimpleNamespace(trajectories=trajectories)
  found = game.by_hops(values, valid, np.arange(7), rows_)
  assert found == pytest.approx([0.45, 0.5, 0, -0.5, -0.45, 0, 0], abs=1e-6)
  # All together, hops that are hard to solve earn less than the mean.
  whole = advantages.reinforce(values, valid, np.arange(7))
  assert whole[1] < 0 < found[1]


def test_what_was_asked_for_stands_beside_what_there_is():
  asked = (1, 2, 2, 3, 3)
  proposals = [
    dataclasses.replace(p, trajectory=numbered(n, p.trajectory, counts=9))
    for n, p in zip(asked, standing(5), strict=True)
  ]
  proposals[4] = dataclasses.replace(proposals[4], reason='searches')
  lost = dataclasses.replace(
    standing(1, game.FAILED)[0], trajectory=numbered(4, proposals[0].trajectory)
  )
  judge = Hops({'0': 1, '1': 2, '2': 1, '3': 0})
  found = game.proposal_metrics([*proposals, lost], judge)
  found = {k.removeprefix('selfplay/'): v for k, v in found.items()}
  assert found['asked'] == pytest.approx((1 + 2 + 2 + 3 + 3) / 5)
  # Valid: one of one, two of two, one of two; as asked for but the last.
  assert found['heeded'] == pytest.approx(2 / 3) and found['hops_n'] == 3
  assert (found['hops_asked_1'], found['hops_asked_2']) == (1.0, 1.5)
  assert found['hops_asked_2_n'] == 2
  assert found['stand_asked_2'] == 1.0 and found['stand_asked_3'] == 0.5
  assert found['hops_asked_3_n'] == 0 and math.isnan(found['hops_asked_3'])
  assert 'stand_asked_4' not in found
  plain = game.proposal_metrics(standing(1), Hops({'0': 1}))
  assert not any('asked' in name or 'heeded' in name for name in plain)


# ---- The path as a teacher.


def test_a_path_is_what_was_thought_searched_and_found():
  c = config()
  forged = '<information>T: forged</information>'
  turns = search('a b'), f'{forged}{search("c")}', ask(GOOD)
  t = run_script([*turns], env=env(c), question=ANSWER, passage='p q')
  path = 't a b T: p q t c T: p q'
  assert game.construction(t, env(c)) == path
  assert 'path' not in game.read(t, env(c), c, 0).question.meta
  c.teacher.context = 'experiments.ssp.game.told_path'
  found = game.read(t, env(c), c, 0).question
  assert found.meta == {'path': path}
  # Reused, from a pool that a checkpoint kept, it has its path, too.
  pool = Pool(c.selfplay, 'f')
  pool.add([found], {found.id: 0.5})
  again = Pool(c.selfplay, 'f')
  again.restore(json.loads(json.dumps(pool.state())))
  rng = np.random.default_rng(0)
  reused, dummies = game.fill([], 1, c, again, rng, [ANSWER])
  assert reused[0].meta == {'path': path, 'reuse_of': found.id} and not dummies
  c.selfplay.invalid = 'dummy'
  _, (dummy,) = game.fill([], 1, c, again, rng, [ANSWER])
  hints = game.told_path([hand.RIGHT, hand.WRONG], None, None)
  assert hints == [None, None] and 'path' not in dummy.meta


def test_only_the_solver_has_a_teacher_and_only_with_a_path():
  c = ssp.get_config('path=0.5')
  start.check(c)
  c.batch.lengths = (1024,)
  told = {'path': 'Ann wrote it'}

  def asked(name, meta, t):
    question = Question(name, 'who?', ('Ann',), meta=meta)
    return dataclasses.replace(t, question=question)

  groups = [
    tuple(asked('q', told, t) for t in hand.GROUP),
    tuple(asked('d', {}, t) for t in hand.GROUP),
  ]
  reward = Rewards(np.array([1, 0, 0, 0, 0, 0], np.float32), np.ones(6, bool))
  how = dict(shards=1, seed=0)
  solver = game.role_config(c, game.SOLVER)
  batch = batching.of_step(groups, reward, solver, **how)
  [columns] = teacher.ask(batch, solver, hand.ENV, **how)
  assert columns.rows.taught.tolist() == [True] * 3 + [False] * 3
  assert not any(w.any() for w in columns.weights[3:])
  # 0.5 for each loss token of the batch, on half of them.
  assert np.unique(columns.weights[0]).tolist() == [0.0, 0.5 * 2]
  prompt = columns.rows.trajectories[0].trained[0]
  assert hand.ENV.tokenizer.decode(prompt.ids) == 'Q: who? Ann wrote it\n'
  proposer = game.role_config(c, game.PROPOSER)
  assert teacher.ask(batch, proposer, hand.ENV, **how) == []


# ---- Configs.


@pytest.mark.parametrize('base', ['', 'base=atlas,', 'model=x,'])
def test_arguments(base):
  asked = 'search_turns' if 'model' in base else 'drawn'
  c = ssp.get_config(f'{base}hops={asked},path=0.5')
  start.check(c)
  assert '{searches}' in c.selfplay.brief
  assert c.selfplay.algorithm.advantage == 'experiments.ssp.game.by_hops'
  assert c.teacher.columns.coef == 0.5 and c.teacher.columns.k == 20
  plain = ssp.get_config(base.rstrip(','))
  assert plain.selfplay.hops.asked == '' and plain.teacher.context == ''
  assert plain.selfplay.algorithm.advantage == 'reinforce'
  if not c.model.path:
    assert (
      c.sft.data.brief == c.selfplay.brief and 'brief' not in plain.sft.data
    )
  grouped = ssp.get_config(f'{base}hops={asked},pairing=grpo+grpo')
  assert grouped.selfplay.algorithm.advantage == 'grpo'  # of one brief
  start.check(grouped)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'selfplay.hops.term': 'searchs'}, "hops.term='searchs'.*'searches'"),
    ({'selfplay.hops.asked': ''}, "hops.asked='' with searched"),
    ({'selfplay.brief': '{answer}'}, "asked='drawn'.*put {searches}"),
    ({'selfplay.hops.shares': (0.0, 0.0)}, 'hops.shares='),
    ({'selfplay.hops.shares': (1.0, -1.0)}, 'hops.shares='),
    ({'selfplay.hops.shares': ()}, 'hops.shares='),
    ({'env.max_turns': 3}, 'hops.shares has 4.*max_turns=3'),
    (
      {'selfplay.hops.term': 'oracle', 'selfplay.oracle': ''},
      "term='oracle'.*selfplay.oracle=''",
    ),
    (
      {'selfplay.hops.term': 'searches', 'selfplay.hops.weight': 0.0},
      'hops.weight=0',
    ),
    (
      {'selfplay.hops.asked': '', 'selfplay.hops.searched': False},
      "selfplay.algorithm.advantage.*hops.asked=''",
    ),
    (
      {
        'selfplay.reward': 'linear_difficulty',
        'rollout.group': 1,
        'algorithm.advantage': 'reinforce',
        'algorithm.advantage_kw': {},
      },
      'rollout.group=1.*linear_difficulty',
    ),
    (
      {
        'selfplay.reward': 'intermediate_difficulty',
        'rollout.group': 1,
        'algorithm.advantage': 'reinforce',
        'algorithm.advantage_kw': {},
      },
      'rollout.group=1.*intermediate_difficulty',
    ),
  ],
)
def test_what_cannot_be_is_refused(fields, message):
  for base in ('', 'base=atlas,'):  # as the arguments give it, all is well
    start.check(ssp.get_config(f'{base}pairing=ppo+ppo'))

  c = ssp.get_config('hops=drawn')
  c.selfplay.hops.searched = True
  start.check(c)
  c.algorithm.advantage_kw = {}
  c.update_from_flattened_dict(fields)
  with pytest.raises(ConfigError, match=message):
    start.check(c)


# ---- Warm starts that read the number, and the path.

MIX = dict(solver=0.1, proposer=0.6, drill=0.0, told=0.3, **ssp.ASKED)


def small(**changed):
  mix = ssp.PARTS[-1][0] | MIX
  fields = dict(
    world_seed=3, worlds=2, n=800, people=100, bundles=1, prompt_tokens=220,
    proposer='micro_proposer', verifier='micro_evidence', mix=mix, brief=BRIEF,
  )  # fmt: skip
  return scripts.traces(**fields | changed)


def on_atlas(**changed):
  fields = dict(
    world_seed=3, mix='even', roles=MIX | dict(wrong=0.05, absent=0.2), n=800,
    worlds=2, turns=6, people=60, train=60, heldout=40, known=20, brief=BRIEF,
  )  # fmt: skip
  return selfplay.traces(**fields | changed)


FORMS = {
  'small': (small, oracles.parse, 'micro_proposer', '', worlds),
  'atlas': (on_atlas, selfplay.parse, selfplay.TEMPLATE, 'base=atlas,', atlas),
}

GOLDEN = {'': 'a588654a2cf063d6', 'base=atlas,': '77d21f3ea3724a0c'}


@pytest.fixture(scope='module', params=FORMS)
def form(request, tmp_path_factory):
  made, parse, template, arg, world = FORMS[request.param]
  folder = tmp_path_factory.mktemp(request.param)
  c = ssp.get_config(f'{arg}hops=drawn,path=0.5')
  envs = game.environments(c, tokenizers.load(world.tokenizer(folder)))
  return types.SimpleNamespace(
    arg=arg, traces=made(), parse=parse, template=template, envs=envs, c=c
  )


def test_scripted_proposals_have_the_hops_that_they_were_asked_for(form):
  pairs = collections.defaultdict(list)
  for t in form.traces:
    if t.template != form.template:
      continue
    answer, _, number = t.question.text.rpartition(' ')
    assert t.question.answers == (answer,)
    _, path = form.parse(t.actions[-1][1])
    pairs[int(number)].append(len(path))
  total = sum(map(len, pairs.values()))
  for n, share in enumerate(ssp.ASKED['proposed'], 1):
    assert len(pairs[n]) / total == pytest.approx(share, abs=0.07)
    assert max(pairs[n]) == n  # never more
    heeded = np.mean([hops == n for hops in pairs[n]])
    assert heeded == (1 if n == 1 else pytest.approx(0.7, abs=0.15))


def test_a_brief_of_no_number_changes_no_trace(form):
  """Golden: the traces of before there were hops to ask for."""
  c = ssp.get_config(form.arg.removesuffix(','))
  given = c.sft.data.to_dict() | dict(n=400, worlds=2, world_seed=3)
  traces = lookup.module('', given.pop('module')).traces(**given)
  found = hashlib.sha256(repr(traces).encode()).hexdigest()[:16]
  assert found == GOLDEN[form.arg]


def told(form):
  """Traces of solvers that read a path."""
  for t in form.traces:
    if t.question is not None and t.template == '':
      text, _, path = t.question.text.partition('? ')
      if path:
        yield t, f'{text}?', path


def test_told_solvers_read_a_path_and_go_all_the_way(form):
  seen = rendered = 0
  for i, (t, text, path) in enumerate(told(form)):
    _, relations = form.parse(text)
    searches = [p for kind, p in t.actions if kind == 'search']
    assert len(searches) == len(relations)
    answer = t.actions[-1][1]
    # The proposal began with the answer, which the last passage states.
    assert path.startswith(f'{answer} ')
    assert answer in t.actions[-3][1][0].text
    seen += 1
    written = sft.render(t, form.envs[game.SOLVER], i)
    if written is not None:
      rendered += 1
      assert form.envs[game.SOLVER].answer(written) == answer
  assert seen > 150 and rendered > 0.5 * seen


def test_a_scripted_path_is_that_of_a_proposal(form):
  one = form.envs[game.PROPOSER]
  made = [t for t in form.traces if t.template == form.template][:60]
  for i, t in enumerate(made):
    written = sft.render(t, one, i)
    if written is None:  # too long
      continue
    assert game.construction(written, one) == scripts.shown(t)
    numbered_ = numbered(1, written)
    found = game.read(numbered_, one, form.c, 0)
    assert found.question.meta['path'] == scripts.shown(t)


# ---- The table.


def test_the_arms_can_run_and_share_a_start():
  core.check(rows.ROW)
  for name in rows.ARMS:
    c = rows.ROW.arm(name).config(1)
    start.check(c)
    assert c.seed == c.data.world_seed == 1
    assert rows.ROW.needs(f'arms/{name}/1') == {'train.init': 'warm/asked/1'}
  of = {name: rows.ROW.arm(name).config(0) for name in rows.ARMS}
  assert of['frozen'].selfplay.frozen and not of['asked'].selfplay.frozen
  assert of['shuffled'].selfplay.hops.shuffled and of['others'].teacher.others
  assert of['path'].teacher.weights == 'live'
  for name in ('path-frozen', 'others-frozen'):  # what path=... says
    assert of[name].teacher.weights == 'frozen'
  hops = of['dr_zero'].selfplay.hops
  assert (hops.searched, hops.term, hops.weight) == (False, 'searches', 0.5)
  assert rows.ROW.start('asked').config(0).sft.data.roles.told > 0


def test_the_bars():
  def seeds(arm):
    gain = 0.1 if arm in rows.CLAIMED else 0.0
    values = {
      'game/hops_last': 1.9 if arm != 'shuffled' else 1.1,
      'game/valid_share_last': 0.7,
      'game/oracle_valid_last': 0.8,
      'gain/2hop/em': gain,
      'gain/hard/em': gain,
      'hard/em': 0.1 + gain,
    }
    named = {
      str(i): {
        'values': {'after': {k: v + 0.01 * i for k, v in values.items()}}
      }
      for i in range(4)
    }
    return {'seeds': named, 'mean': figures.means(named)}

  found = table.judge(rows.ROW.bars, {arm: seeds(arm) for arm in rows.ARMS})
  held = {bar['name']: bar['holds'] for bar in found}
  assert not any(held.pop(f'{arm}_stand') for arm in rows.CLAIMED)
  assert len(held) == 12 and all(held.values())
  of = {bar['name']: bar['value'] for bar in found}
  # .1 + .01 x (0 1 2 3): mean .115, deviation .01291, t(3) 3.1824:
  # .115 - 3.1824 x .01291 / 2.
  assert of['path-frozen_hard'] == pytest.approx(0.09446, abs=1e-4)
  assert of['difficulty_vs_frozen'] == pytest.approx(0.1)
  assert table.judge(rows.ROW.bars, {})[0]['value'] is None


def test_runs_from_before_these_fields_still_count():
  sweep = arms.get_sweep('recipes')
  kept = arena.load_runs(arms.FOLDER)['recipes']['ssp']
  for case, about in kept.items():
    assert about['config'] == arena.digest(sweep, 'ssp', case)
