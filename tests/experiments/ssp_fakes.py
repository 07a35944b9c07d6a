"""Proposals that a script made, for tests of self-play."""

from configs import ssp
from experiments.ssp import game
from experiments.ssp.game import Proposal
from searchrl_jax.text import prompts
from searchrl_jax.types import Question
from tests.fakes import TEMPLATE, ByteTokenizer, run_script

ANSWER = Question('a', 'Mira', ('Mira', 'Mira Dok'))
GOOD = 'Who taught the one whose home is the old mill by the river?'


def config(**fields):
  c = ssp.get_config()
  c.env.update(dict(max_turns=4, max_turn_tokens=200, max_tokens=2000))
  c.selfplay.update(dict(min_words=10, max_chars=150, reward='1-acc') | fields)
  return c


def env(c, role=game.PROPOSER, **fields):
  template = TEMPLATE | fields
  if role == game.PROPOSER:
    template |= dict(
      answer=['<question>', '</question>'], stops=['</search>', '</question>']
    )
  budgets = c.env.copy_and_resolve_references()
  if role == game.VERIFIER:
    budgets.max_turns = 0
  return game.RoleEnv(
    ByteTokenizer(),
    prompts.parse(template, 'test', 'here'),
    budgets,
    'template',
    1,
  )


def search(query):
  return f'<think>t</think><search>{query}</search>'


def ask(text):
  return f'<question>{text}</question>'


def proposal(*turns, c=None, question=ANSWER, **fields):
  c = c or config(**fields)
  one = env(c)
  turns = [*turns, *[''] * 5]  # says nothing more
  trajectory = run_script(turns, env=one, question=question, passage='p q')
  return game.read(trajectory, one, c, 7)


def standing(n=4, reason=''):
  base = proposal(search('a'), search('b'), ask(GOOD))
  return [
    Proposal(
      base.trajectory,
      Question(f'q{i}', f'{GOOD} {i}', ('x',)),
      (f'evidence {i}',),
      reason,
    )
    for i in range(n)
  ]
