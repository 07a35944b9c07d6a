"""Asks one question and prints thoughts, searches, passages and the answer.

  python -m searchrl_jax.ask --workdir=runs/quickstart "What is the ...?"
  python -m searchrl_jax.ask \\
    --config=configs/wiki_nq.py:model=/path/to/checkpoint "who wrote ...?"

Without a question it reads questions from standard input, one per line.
"""

import contextlib
import os
import sys
import tempfile

from absl import flags
from rich import console
from rich import text as rich_text

from retrieval.files import printable
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.rollout.chains import evaluation, rollout
from searchrl_jax.rollout.core import RolloutError
from searchrl_jax.run import build, command
from searchrl_jax.types import Question, SearchError, SearchResult, Segment

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
  """Returns an `on_event` for `rollout` that prints every event."""

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
  config = _CONFIG.value.copy_and_resolve_references()
  # There is one sequence at a time.
  config.eval.n = config.engine.slots = config.engine.prefill_rows = 1
  out = console.Console()
  show = lambda text, style: out.print(rich_text.Text(text, style))
  with contextlib.ExitStack() as stack:
    workdir = _WORKDIR.value
    if workdir:  # apart from what a run writes, which may be under way
      folder = f'{workdir}/ask'
      os.makedirs(folder, exist_ok=True)
    else:
      folder = stack.enter_context(tempfile.TemporaryDirectory())
    model = evaluate.loaded(config, workdir, folder, _CHECKPOINT.value)
    tok, opener, *_ = stack.enter_context(model)
    env = build.environment(config, tok)
    given = _QUESTION.value
    if not given:
      out.print('One question per line; Ctrl-D ends.')
    for n, line in enumerate([given] if given else sys.stdin):
      text = line.strip()
      if not text:
        continue
      messages = ({'role': 'user', 'content': text},)
      show(f'\n{text}', 'bold')
      question = Question(f'ask-{n}', text, messages=messages)
      result = rollout(
        [question],
        env=env,
        engine=opener.engine,
        source=opener.source,
        config=evaluation(config),
        seed=config.eval.seed,
        step=0,
        on_event=printer(tok, out),
      )
      try:
        (group,), _ = opener.loop.run(result)
      except (ValueError, RolloutError) as e:
        if given:
          raise
        # It was too long or its search failed; continue with the next line.
        show(f'\n{e}', 'bold red')
        continue
      answer = env.answer(group[0])
      missing = f'no answer ({group[0].end})'
      show(f'\nanswer: {answer}' if answer else f'\n{missing}', 'bold yellow')


if __name__ == '__main__':
  _CONFIG, _WORKDIR = evaluate.define_config_and_workdir()
  _QUESTION = flags.DEFINE_string('question', '', 'The question.')
  _CHECKPOINT = command.define_checkpoint()
  command.run(main, positional=_QUESTION)
