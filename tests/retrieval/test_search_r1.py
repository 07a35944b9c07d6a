"""What Search-R1's generation loop sends, and what it makes of the answers.

Its loop waits for all trajectories of a batch, then posts the queries of those
that searched as one request, without a deadline, retries or a token. It does
so in every turn, also where nobody searched, and takes `result` from whatever
comes back: one status other than 200 ends the run.
"""

import random
import re

import requests

GROUPS, ROLLOUTS, TURNS, TOPK = 512, 5, 2, 3
ACTION = re.compile(r'<(search|answer)>(.*?)</\1>', re.DOTALL)


def shown(row):
  """Passages as the policy reads them: the title is the first line."""
  text = ''
  for number, item in enumerate(row, 1):
    title, _, rest = item['document']['contents'].partition('\n')
    text += f'Doc {number}(Title: {title}) {rest}\n'
  return text


class Loop:
  """The requests of one batch; `completions` writes a turn of a trajectory."""

  def __init__(self, url, completions):
    self._url, self._completions = url, completions
    self.posted = []  # the queries of each turn

  def run(self, count):
    """The observations of each trajectory, in order."""
    observations = [[] for _ in range(count)]
    active = list(range(count))
    for turn in range(TURNS + 1):
      actions = {}
      for i in active:
        found = ACTION.search(self._completions(i, turn))
        actions[i] = (found[1], found[2].strip()) if found else (None, '')
      searching = [i for i in active if actions[i][0] == 'search']
      if turn == TURNS:  # one more turn, in which a search is not answered
        return observations
      results = self._post([actions[i][1] for i in searching])
      for i in active:
        if actions[i][0] == 'search':
          observations[i].append(shown(results.pop(0)))
        elif actions[i][0] is None:
          observations[i].append('invalid')
      assert not results
      active = [i for i in active if actions[i][0] != 'answer']
    return observations

  def _post(self, queries):
    self.posted.append(queries)
    body = {'queries': queries, 'topk': TOPK, 'return_scores': True}
    answer = requests.post(self._url, json=body).json()['result']
    assert len(answer) == len(queries)
    for row in answer:
      assert len(row) <= TOPK
      for item in row:
        assert set(item) == {'document', 'score'}
        assert isinstance(item['score'], float)
        assert set(item['document']) == {'id', 'contents'}
    return answer


def test_its_whole_batch_searches_in_one_request(server):
  rng = random.Random(0)
  asked = ['hamlet prince', 'same words', 'who wrote Henry V?', '東京']
  # What a policy may write: nothing, no word, 500 of the longest tokens.
  odd = ['', '   ', '?!', '-' * 32_000, 'same ' * 500, '\x00', '\u2028']

  def write(i, turn):
    if turn == 0:
      return f'<think>x</think><search> {(asked + odd)[i % 11]}\n</search>'
    return rng.choice(
      ['<search>denmark</search>', '<answer>Shakespeare</answer>', 'lost']
    )

  loop = Loop(f'{server.url}/retrieve', write)
  observations = loop.run(GROUPS * ROLLOUTS)
  assert [len(queries) for queries in loop.posted][0] == 2560
  first = observations[0][0]
  assert first.startswith('Doc 1(Title: "Denmark") Denmark is a country.')
  assert first.count('Doc ') == 2
  assert observations[1][0].count('Doc ') == 3  # the twins
  assert observations[8][0] == observations[1][0]  # cut, and searched
  assert [observations[i][0] for i in (4, 5, 6, 7, 9, 10)] == [''] * 6
  assert all(
    row[0] == observations[i % 11][0] for i, row in enumerate(observations)
  )


def test_turns_in_which_nobody_searches(server):
  loop = Loop(
    f'{server.url}/retrieve',
    lambda i, turn: 'lost' if turn == 0 else '<answer>x</answer>',
  )
  assert loop.run(8) == [['invalid']] * 8
  assert loop.posted == [[], []]


def test_more_than_the_limit_is_told_by_its_flag(server):
  limit = requests.get(f'{server.url}/health').json()['limits']['max_queries']
  answer = requests.post(
    f'{server.url}/retrieve', json={'queries': ['x'] * (limit + 1)}
  )
  assert limit >= 2560 and answer.status_code == 422
  assert f'{limit + 1} queries; send at most {limit} (--max_queries)' in (
    answer.text
  )
