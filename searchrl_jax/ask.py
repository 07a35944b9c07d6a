"""Asks one question and prints thoughts, searches, passages and the answer.

  python -m searchrl_jax.ask --workdir=runs/quickstart "What is the ...?"
  python -m searchrl_jax.ask \\
    --config=configs/wiki_nq.py:model=/path/to/checkpoint "who wrote ...?"

Without a question it reads questions from standard input, one per line.
"""

import sys

from absl import flags
from rich import console
from rich import text as rich_text

from retrieval.files import printable
from searchrl_jax.evaluate import play
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rollout.core import RolloutError
from searchrl_jax.run import command
from searchrl_jax.types import SearchError, SearchResult, Segment

# Of kinds of segments; those of other blocks of a template have OTHER.
STYLES = {
  'think': 'dim italic',
  'search': 'bold cyan',
  'information': 'green',
  'answer': 'bold yellow',
  'other': '',
}
OTHER = 'magenta'


def printer(tok, out: console.Console):
  """Returns an `on_event` for `play` that prints every event."""

  def show(name: str, event) -> None:
    del name
    if isinstance(event, Segment) and event.author != 'prompt':
      shown = printable(tok.decode(event.ids))
      if event.author == 'policy' or event.kind != 'information':
        out.print(rich_text.Text(shown, STYLES.get(event.kind, OTHER)), end='')
    elif isinstance(event, SearchResult):
      out.print()
      for i, p in enumerate(event.passages, 1):
        title, body = printable(p.title), printable(p.text)
        line = rich_text.Text(f'  [{i}] ', 'green').append(title, 'bold green')
        body = body if len(body) <= 300 else f'{body[:300]}...'
        out.print(line.append(f'  {body}', 'green'))
      if event.text:
        out.print(rich_text.Text(f'  {printable(event.text)}', 'green'))
    elif isinstance(event, SearchError):
      out.print(rich_text.Text(f'\n  search failed: {event.message}', 'red'))

  return show


def main():
  out = console.Console()
  show = lambda text, style: out.print(rich_text.Text(text, style))
  about = _CONFIG.value, _WORKDIR.value or '', _CHECKPOINT.value
  with play.opened(*about) as player:
    tell = printer(player.have.tok, out)
    given = _QUESTION.value
    if not given:
      out.print('One question per line; Ctrl-D ends.')
    for n, line in enumerate([given] if given else sys.stdin):
      text = line.strip()
      if not text:
        continue
      show(f'\n{text}', 'bold')
      try:
        played = player.play(text, tell, f'ask-{n}')
        found = player.have.opener.loop.run(played)
      except (ValueError, RolloutError) as e:
        if given:
          raise
        # It was too long or its search failed; continue with the next line.
        show(f'\n{e}', 'bold red')
        continue
      answer = player.env.answer(found)
      missing = f'no answer ({found.end})'
      show(f'\nanswer: {answer}' if answer else f'\n{missing}', 'bold yellow')


if __name__ == '__main__':
  _CONFIG, _WORKDIR = evaluate.define_config_and_workdir()
  _QUESTION = flags.DEFINE_string('question', '', 'The question.')
  _CHECKPOINT = command.define_checkpoint()
  command.run(main, positional=_QUESTION)
