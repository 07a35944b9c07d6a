"""TTRL's recipe: its config, its worlds, its controls, and that golds are for
metrics alone, to the last bit of the parameters."""

import asyncio
import dataclasses
import functools
import json
import re

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest

from configs import ttrl
from experiments.ttrl import arithmetic, mathematics, planted, rows, start
from searchrl_jax import checks, sft, train
from searchrl_jax.data import core as data
from searchrl_jax.data.checks import DataError
from searchrl_jax.models import parameters
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rewards import equivalence
from searchrl_jax.run import build
from searchrl_jax.store import records
from searchrl_jax.types import Question
from searchrl_jax.worlds import microtraces, microworld
from tests.fakes import make_env, run_script

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('programs')]

MATH = 'experiments.ttrl.mathematics.equal'
WORLD = dict(train=60, heldout=20, relations=4)


# ---- The config.


@pytest.mark.parametrize(
  'arg, votes, trained, match',
  [
    ('', 16, 8, 'text'),
    ('base=ssrl', 16, 8, 'text'),
    ('base=math', 16, 8, MATH),
    ('label=golds', 16, 8, 'text'),
    ('label=random,seed=2', 16, 8, 'text'),
    ('planted=0.15', 16, 8, 'text'),
    ('label=found', 16, 8, 'text'),
    ('label=covered', 16, 8, 'text'),
    ('label=restrain', 16, 8, 'text'),
    ('base=atlas,label=covered', 16, 8, 'text'),
    ('base=math,label=restrain', 16, 8, MATH),
    ('model=m,label=found', 64, 32, 'text'),
    ('model=m,base=math,path=x,label=restrain,start=y', 64, 32, MATH),
    ('algorithm=ppo', 16, 8, 'text'),
    ('model=m,base=math,path=AIME-TTT', 64, 32, MATH),
    ('model=m,base=search', 64, 32, 'text'),
    ('model=m,base=ssrl', 64, 32, 'text'),
    ('model=m,base=math,path=x,algorithm=reinforce', 64, 32, MATH),
  ],
)
def test_every_form_is_one_that_can_run(arg, votes, trained, match):
  c = ttrl.get_config(arg)
  checks.check(c)
  vote = c.reward.vote
  assert (vote.votes, vote.train, vote.match) == (votes, trained, match)
  start = {'start_votes': dict(label='x', share=0.5, searches=1.0)}
  golds = [Question('q', 'who?', ('x',), meta=start)]
  rewards.check(c, golds)
  if vote.fn == 'vote.majority':
    rewards.check(c, [dataclasses.replace(golds[0], answers=())])
  # By reference: to ask for other votes is to sample so many.
  c.rollout.group = 2 * votes
  rewards.check(c, golds)


@pytest.mark.parametrize(
  'arg, says',
  [
    ('base=maths', "base='maths'.*search, ssrl, math"),
    ('label=gold', "label='gold'.*golds"),
    ('model=m,base=math', "path=''"),
    ('path=x', "path='x'"),
    ('planted=0.1,base=math', 'planted=0.1'),
    ('heldout=AMC', "heldout='AMC'"),
    ('base=math,label=found', 'label=found with base=math'),
    ('base=ssrl,label=found', 'label=found with base=ssrl'),
    ('model=m,label=covered', "label=covered with base=search, model='m'"),
    ('base=math,label=covered', 'label=covered with base=math'),
    ('label=restrain,algorithm=ppo', 'label=restrain with algorithm=ppo'),
  ],
)
def test_arguments_that_cannot_be_are_named(arg, says):
  with pytest.raises(ValueError, match=says):
    ttrl.get_config(arg)


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'rollout.group': 1}, 'rollout.group=1'),
    ({'reward.vote.train': 17}, 'train=17.*votes=16'),
  ],
)
def test_what_no_vote_can_be_is_refused_before_anything_is_written(
  fields, says, tmp_path
):
  c = ttrl.get_config('base=math')
  if 'algorithm.advantage' in fields:
    c.algorithm.advantage_kw = ConfigDict()  # GRPO's own
  c.update_from_flattened_dict(fields)
  with pytest.raises(ValueError, match=says):
    train.train(c, str(tmp_path))
  assert not (tmp_path / 'config.json').exists()


def test_what_is_trained_on_is_what_is_tested_and_held_out_is_not():
  for arg in ('', 'base=ssrl', 'base=math'):
    c = ttrl.get_config(arg)
    (trained,) = data.load_sets(c.data.train, c.data).values()
    sets = data.load_sets(c.data.eval, c.data)
    assert {q.text for q in trained} == {q.text for q in sets['test']}
    assert not {q.text for q in trained} & {q.text for q in sets['heldout']}


def test_at_full_size_ttrls_files_are_read_and_another_set_is_held_out(
  tmp_path,
):
  for folder, answer in (('AIME', '033'), ('AMC', '4')):
    (tmp_path / folder).mkdir()
    for name in ('train', 'test'):
      (tmp_path / folder / f'{name}.json').write_text(
        json.dumps(
          [
            {
              'prompt': f'{folder}?',
              'answer': answer,
              'source': folder,
              'id': '0',
            }
          ]
        )
      )
  c = ttrl.get_config('model=m,base=math,path=AIME,heldout=AMC')
  c.data.dir = str(tmp_path)
  (q,) = data.load_sets(c.data.train, c.data)['test']
  assert (q.text, q.answers) == ('AIME?', ('033',))
  found = data.load_sets(c.data.eval, c.data)
  assert {name: [q.text for q in qs] for name, qs in found.items()} == {
    'test': ['AIME?'],
    'heldout': ['AMC?'],
  }
  assert c.data.prompt == 'as_is'
  assert q.messages == ({'role': 'user', 'content': 'AIME?'},)


def test_the_rows_are_those_of_the_config():
  for arm in rows.ROW.arms:
    for seed in arm.seeds:
      checks.check(arm.config(seed))
      assert arm.config(seed).seed == seed


# ---- The planted passages.


@pytest.fixture(scope='module')
def world():
  return planted.generate(3, asked=40, share=0.15, **WORLD)


def test_a_search_for_the_name_finds_the_planted_passage_first(world):
  true = microworld.generate(3, **WORLD)
  assert world.corpus[: len(true.corpus)] == true.corpus
  assert world.questions == true.questions and world.facts == true.facts
  search = microtraces.searcher(world)
  new = world.corpus[len(true.corpus) :]
  names = [row['contents'].split('"')[1] for row in new]
  for row, (top,) in zip(new, search(names, 1), strict=True):
    assert top.id == row['id']
  others = sorted(
    set(true.facts)
    & {q.meta['path'][0] for q in true.questions['train']} - set(names)
  )
  for name, (top,) in zip(others, search(others, 1), strict=True):
    assert top.title == name


def test_as_many_questions_are_contradicted_as_asked_for(world):
  said = {}
  for row in world.corpus[80:]:
    name, facts = re.match(
      r'"(.+)"\n\1: (.*)\.$', row['contents'], re.DOTALL
    ).groups()
    said[name] = dict(fact.split(' ', 1) for fact in facts.split('; '))
  questions = microworld.pick(world, 'train', 40)
  wrong = 0
  for q in questions:
    facts = planted.facts_of(world, q)
    assert world.facts[facts[-1][0]][facts[-1][1]] == q.answers[0]
    # What it reads is stated, truly or not; whoever is named exists.
    for name, relation in facts:
      value = said.get(name, world.facts[name])[relation]
      assert value in world.facts or relation not in microworld.LINKS
    wrong += any(said[n][r] != world.facts[n][r] for n, r in facts if n in said)
  assert 6 <= wrong <= 8  # 15 % of 40; one passage can mislead several
  assert (
    planted.generate(3, asked=40, share=0.0, **WORLD).corpus
    == (world.corpus[:80])
  )
  with pytest.raises(DataError, match='share=1.5'):
    planted.generate(3, asked=40, share=1.5, **WORLD)


# ---- The sums.


def test_sums_have_golds_in_lowest_terms_and_no_trace_asks_them():
  questions = [
    q
    for split in arithmetic.SPLITS
    for q in arithmetic.load(world_seed=1, split=split, n=400)
  ]
  asked = set()
  for q in questions:
    asked.add(tuple(map(int, re.findall(r'\d+', q.text)))[:2])
  for q in questions[::20]:
    a, b, divisor = map(int, re.findall(r'\d+', q.text))
    assert equivalence.correct(
      rf'\frac{{{a + b}}}{{{divisor}}}', q.answers, MATH
    )
    assert not equivalence.correct(
      rf'\frac{{{a + b + 1}}}{{{divisor}}}', q.answers, MATH
    )
  assert len(asked) == 800
  for t in arithmetic.traces(world_seed=1, n=3000, slip=0.3, hasty=0.3):
    a, b, _ = map(int, re.findall(r'\d+', t.question.text))
    assert (a, b) not in asked


def test_traces_of_sums_are_right_where_they_say_so():
  env = make_env(answer='boxed', max_turns=0)
  found = arithmetic.traces(world_seed=1, n=300, slip=0.3, hasty=0.3)
  for t in found:
    a, b, divisor = map(int, re.findall(r'\d+', t.question.text))
    ((_, text),) = t.actions
    box = re.search(r'boxed\{(.*)\}$', text)[1]
    assert t.good == mathematics.equal(box, f'{a + b}/{divisor}')
    written = sft.render(t, env, 0)
    assert (env.answer(written), written.end) == (box, 'answer')
    assert written.segments[-1].ids[-1] == env.tokenizer.eos_ids[0]
  assert 0.3 < np.mean([t.good for t in found]) < 0.7
  exact = arithmetic.traces(world_seed=1, n=100, slip=0, hasty=0)
  assert all(t.good for t in exact)
  with pytest.raises(DataError, match='hasty=0.9'):
    arithmetic.traces(world_seed=1, n=1, slip=0, hasty=0.9)
  with pytest.raises(DataError, match="split='dev'"):
    arithmetic.load(world_seed=1, split='dev', n=1)
  with pytest.raises(DataError, match='n=401'):
    arithmetic.load(world_seed=1, split='test', n=401)


# ---- The controls.


ENV = make_env(max_turns=0)


@functools.cache
def group(answers):
  question = Question('q', 'how many?', ('3',))
  return tuple(
    dataclasses.replace(
      run_script([f'<answer>{a}</answer>'], env=ENV, question=question),
      sample=i,
    )
    for i, a in enumerate(answers)
  )


def voted(label, answers, step=0):
  config = ConfigDict(
    dict(
      v=dict(
        fn=ttrl.LABELS[label],
        weight=1.0,
        votes=len(answers),
        train=len(answers),
        match='text',
        max_abstained=1.0,
      )
    )
  )
  return asyncio.run(
    rewards.combine(config, [group(answers)], rewards.RewardContext(step, ENV))
  )


def test_golds_as_labels_are_the_ceiling():
  found = voted('golds', '1131')
  assert found.value.tolist() == [0, 0, 1, 0]
  assert found.parts['v/label_accuracy'].tolist() == [1] * 4
  assert not voted('golds', '1121').valid.any()


@pytest.mark.parametrize(
  'label, shares',
  [
    ('random', (100, 100, 100)),  # each of three answers, of 300 draws
    ('random_vote', (180, 60, 60)),  # 3, 1 and 1 of five votes
  ],
)
def test_a_random_label_is_drawn_among_the_answers_or_the_votes(label, shares):
  counts = dict.fromkeys('123', 0)
  again = voted(label, '11123', step=7).value
  for step in range(300):
    found = voted(label, '11123', step=step)
    if step == 7:
      np.testing.assert_array_equal(found.value, again)
    (drawn,) = {a for a, v in zip('11123', found.value, strict=True) if v}
    counts[drawn] += 1
  for n, share in zip(counts.values(), shares, strict=True):
    assert abs(n - share) < 30, counts
  assert voted(label, ('', '', '')).valid.sum() == 0


# ---- Golds are for metrics alone.


def load(*, world_seed, golds, n=8):
  """Questions of the test-time set, their golds as they are, dealt to others,
  or absent."""
  found = arithmetic.load(world_seed=world_seed, split='test', n=n)
  dealt = {'own': 0, 'shuffled': 1}.get(golds)
  return [
    dataclasses.replace(
      q, answers=() if dealt is None else found[(i + dealt) % n].answers
    )
    for i, q in enumerate(found)
  ]


def tiny(golds):
  c = ttrl.get_config('base=math')
  c.model.arch.update(
    dict(
      hidden_size=32,
      num_hidden_layers=1,
      num_attention_heads=2,
      num_key_value_heads=2,
      head_dim=16,
      intermediate_size=64,
    )
  )
  c.mesh.data = 1
  c.data.train = ConfigDict(
    dict(test=dict(module='tests.experiments.test_ttrl', golds=golds))
  )
  c.data.eval = ConfigDict()
  c.engine.slots, c.engine.prefill_rows = 8, 4
  c.batch.lengths = (80,)
  c.sft.data.update(n=400, hasty=2 / 3)
  c.sft.steps, c.sft.warmup, c.sft.lr = 160, 5, 1e-2
  c.rollout.questions, c.rollout.group, c.reward.vote.train = 4, 4, 2
  c.train.steps = 2
  c.optim.lr = 1e-2
  c.log.tensorboard = c.log.progress = False
  return c


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """{golds: run folder}, all from one warm start."""
  folder = tmp_path_factory.mktemp('ttrl')
  sft.sft(tiny('own'), str(folder / 'warm'))
  for golds in ('own', 'shuffled', 'none'):
    c = tiny(golds)
    c.train.init = str(folder / 'warm')
    train.train(c, str(folder / golds))
  return folder


def updated(c, workdir):
  tok = build.tokenizer(c, str(workdir))
  cfg = parameters.model_config(c, tok.vocab_size)
  return jax.tree.leaves(
    parameters.restore(c, str(workdir), cfg, build.mesh(c))
  )


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize('golds', ['shuffled', 'none'])
def test_golds_change_no_reward_and_no_parameter(runs, golds):
  own, other = (updated(tiny(g), runs / g) for g in ('own', golds))
  for a, b in zip(own, other, strict=True):
    np.testing.assert_array_equal(a, b)
  start = updated(tiny('own'), runs / 'warm')
  assert any((a != b).any() for a, b in zip(own, start, strict=True))
  own, other = (
    [
      (r.trajectory.id, r.step, r.reward)
      for r in records.read(runs / g / 'trajectories')
    ]
    for g in ('own', golds)
  )
  assert own == other and len({r for _, _, r in own}) > 1


@pytest.mark.long
def test_each_step_says_how_good_the_labels_are(runs):
  known = {
    f'reward/vote/{name}'
    for name in (
      'label_accuracy',
      'reward_accuracy',
      'majority_ratio',
      'maj@4',
      'pass@4',
      'pass@2',
      'right',
      'abstained',
      'tie',
    )
  }
  own, none = (
    [s for s in lines(runs / g / 'metrics.jsonl') if s['step'] >= 0]
    for g in ('own', 'none')
  )
  assert len(own) == len(none) == 2
  for step in own:
    assert known <= step.keys()
  for step in none:
    assert step.keys() & known == {
      f'reward/vote/{n}' for n in ('majority_ratio', 'abstained', 'tie')
    }


@pytest.mark.long
def test_restrain_trains_with_the_votes_of_the_start(runs):
  c = tiny('own')
  vote = ttrl.get_config('base=math,label=restrain').reward.vote.to_dict()
  c.reward = ConfigDict(dict(vote=vote | dict(votes=4, train=2, least=2)))
  c.algorithm.advantage, c.algorithm.advantage_kw = 'given', ConfigDict()
  c.train.init = str(runs / 'warm')
  start.train(c, str(runs / 'restrain'))
  asked = c.data.train.test
  known = start.read_votes(asked.votes)
  assert len(known) == 8 and all(0 <= v['share'] <= 1 for v in known.values())
  steps = [s for s in lines(runs / 'restrain/metrics.jsonl') if s['step'] >= 0]
  assert len(steps) == 2
  for step in steps:
    # The first step is the start's own: other samples of the same policy.
    assert {f'reward/vote/{x}' for x in ('gained', 'lost')} <= step.keys()
  # Without them, it does not begin.
  c.data.train = tiny('own').data.train
  with pytest.raises(ValueError, match='start_votes.*config.reward.vote'):
    train.train(c, str(runs / 'other'))
  assert not (runs / 'other' / 'config.json').exists()
