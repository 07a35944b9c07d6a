"""An agent of somebody's own: OpenAI's client, a loop, searches over HTTP.

`rows.py` trains the policy behind it; docs/agents.md goes through it. It writes
the text that the quickstart's template (micro.json) writes, so that it can go
on from the quickstart's warm start.
"""

import re
import ssl

import httpx
import openai

BLOCK = re.compile(r'<(think|search|information|answer)>(.*?)(</\1>|\Z)', re.S)
SEARCHES, TOKENS = 3, 24  # turns that may search; sampled tokens of a turn
# Read once: it takes longer than a request does. A client of its own for each
# session: httpx goes through all connections of a client for each request.
CERTIFICATES = ssl.create_default_context()


def play(base_url: str, api_key: str, question) -> float:
  """Answers a question; 1 if the answer is right, else 0."""
  with httpx.Client(timeout=600, verify=CERTIFICATES) as http:
    client = openai.OpenAI(base_url=base_url, api_key=api_key, http_client=http)
    text, chat = f'Question: {question.text}\n', []
    for turn in range(SEARCHES + 1):
      last = turn == SEARCHES
      text += ' last turn answer now\n' * last
      chat.append({'role': 'user', 'content': text})
      reply = client.chat.completions.create(
        model='policy',
        messages=chat,
        max_tokens=TOKENS,
        stop=['</answer>'] if last else ['</search>', '</answer>'],
        extra_body={'include_stop_str_in_output': True},
      )
      said = reply.choices[0].message.content
      chat.append({'role': 'assistant', 'content': said})
      kind, inner = action(said, last)
      if kind == 'answer':
        return float(inner in question.answers)
      text = '\n invalid action\n'
      if kind == 'search':
        text = search(client, http, inner)
  return 0.0


def action(said: str, last: bool) -> tuple[str, str]:
  """The first search or answer in a turn and its text; ('', '') if none."""
  for kind, inner, closed in BLOCK.findall(said):
    acts = kind == 'answer' or kind == 'search' and inner.strip() and not last
    if closed and acts:
      return kind, inner.strip()
  return '', ''


def search(client: openai.OpenAI, http: httpx.Client, query: str) -> str:
  """What the policy reads of a search."""
  found = http.post(
    str(client.base_url.join('/retrieve')),
    json={'queries': [query], 'topk': 1},
    headers={'Authorization': f'Bearer {client.api_key}'},
  )
  passage = 'no passage found'
  for hit in found.raise_for_status().json()['result'][0]:
    _, _, passage = hit['document']['contents'].partition('\n')
  return f'\n<information> {passage} </information>\n'
