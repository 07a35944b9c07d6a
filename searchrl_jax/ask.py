"""Ask one question and watch: thoughts, searches, passages, answer.

  python -m searchrl_jax.ask --workdir=runs/quickstart "What is the ...?"
  python -m searchrl_jax.ask \\
    --config=configs/wiki_nq.py:model=/path/to/checkpoint "who wrote ...?"

Without a question it reads questions line by line.
"""

import re
import sys
import tempfile

from absl import flags
from rich import console
from rich import text as rich_text

from searchrl_jax import evaluate
from searchrl_jax.learn import checks
from searchrl_jax.rollout.chains import RolloutError, evaluation, rollout
from searchrl_jax.run import build, command
from searchrl_jax.types import Question, SearchError, SearchResult, Segment

STYLES = {
  'think': 'dim italic',
  'search': 'bold cyan',
  'information': 'green',
  'answer': 'bold yellow',
  'other': '',
}
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f]')


def printable(text: str) -> str:
  """Without what a terminal would obey: a passage may hold anything."""
  return _CONTROL.sub('\N{REPLACEMENT CHARACTER}', text)


def printer(tok, out: console.Console):
  """on_event for a rollout: prints each thing once, as it comes."""

  def show(name: str, event) -> None:
    del name
    if isinstance(event, Segment) and event.author != 'prompt':
      shown = printable(tok.decode(event.ids))
      if event.author == 'policy' or event.kind != 'information':
        out.print(rich_text.Text(shown, STYLES[event.kind]), end='')
    elif isinstance(event, SearchResult):
      out.print()
      for i, p in enumerate(event.passages, 1):
        title, body = printable(p.title), printable(p.text)
        body = body if len(body) <= 300 else f'{body[:300]}...'
        line = rich_text.Text(f'  [{i}] ', 'green')
        line.append(title, 'bold green').append(f'  {body}', 'green')
        out.print(line)
    elif isinstance(event, SearchError):
      out.print(rich_text.Text(f'\n  search failed: {event.message}', 'red'))

  return show


def main():
  config, workdir = evaluate_config(), _WORKDIR.value
  out = console.Console()
  with (
    tempfile.TemporaryDirectory() as scratch,
    evaluate.loaded(config, workdir, workdir or scratch, _CHECKPOINT.value) as (
      tok,
      engine,
      source,
      run,
      *_,
    ),
  ):
    env = build.environment(config, tok)
    asked = _QUESTION.value
    lines = [asked] if asked else sys.stdin
    if not asked:
      out.print('One question a line; Ctrl-D ends.')
    for n, line in enumerate(lines):
      if not line.strip():
        continue
      question = Question(
        id=f'ask-{n}',
        text=line.strip(),
        messages=({'role': 'user', 'content': line.strip()},),
      )
      out.print(rich_text.Text(f'\n{question.text}', 'bold'))
      try:
        (group,), _ = run(
          rollout(
            [question],
            env=env,
            engine=engine,
            source=source,
            config=evaluation(config),
            seed=config.eval.seed,
            step=0,
            on_event=printer(tok, out),
          )
        )
      except (ValueError, RolloutError) as e:
        if asked:
          raise
        # Too long, or its search failed: the next line may fare better.
        out.print(rich_text.Text(f'\n{e}', 'bold red'))
        continue
      found = env.answer(group[0])
      out.print()
      out.print(
        rich_text.Text(
          f'answer: {found}' if found else f'no answer ({group[0].end})',
          'bold yellow' if found else 'bold red',
        )
      )


def evaluate_config():
  config = _CONFIG.value
  if config is None:
    raise checks.ConfigError('give --workdir=RUN, or --config=FILE')
  config = config.copy_and_resolve_references()
  config.eval.n = 1
  # One sequence at a time needs one slot.
  config.engine.slots = config.engine.prefill_rows = 1
  return config


if __name__ == '__main__':
  _CONFIG = evaluate.define_config_or_run()
  _WORKDIR = command.define_workdir(required=False)
  _QUESTION = flags.DEFINE_string('question', '', 'The question.')
  _CHECKPOINT = flags.DEFINE_string(
    'checkpoint', 'latest', 'latest, best, or a step'
  )
  command.run(main, positional=_QUESTION)
