"""What an exported folder says: the prompt to transformers, the figures."""

import json

import pytest
import transformers

from searchrl_jax import export, schema
from searchrl_jax.run import build
from searchrl_jax.store import records
from searchrl_jax.types import Question
from tests import scripted, tiny

QUESTIONS = (
  'Who wrote "Faust"',
  '  what is a \\n {{ brace }} and é 漢 ?  ',
  "it's {% if %}\n\ntwo lines",
)


@pytest.mark.long
@pytest.mark.parametrize('template', ['base', 'chat', 'boxed', 'plain'])
@pytest.mark.parametrize('name', ['bpe', 'qwen_tokenizer', 'stories260K'])
def test_the_chat_template_renders_the_prompts_of_training(
  name, template, tmp_path
):
  tok = scripted.tokenizer(name)
  if template in ('chat', 'boxed') and not tok.has_chat:
    pytest.skip('its messages need a chat template')
  config = schema.base()
  config.env.template = template
  env = build.environment(config, tok)
  tok.save(tmp_path)
  (tmp_path / 'chat_template.jinja').write_text(
    export.chat_template(config, tok)
  )
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in QUESTIONS:
    state, _ = env.reset(Question('q', text, ()))
    message = [{'role': 'user', 'content': text}]
    given = theirs.apply_chat_template(message, return_dict=False)
    assert list(state.segments[0].ids) == given
  with pytest.raises(Exception, match='one message'):
    theirs.apply_chat_template(2 * message)


def test_a_template_with_calls_keeps_the_chat_template_of_the_tokenizer(run):
  config = schema.base()
  config.env.template = 'qwen_tools'
  assert export.chat_template(config, scripted.chatting('hermes')) == ''
  card = export.model_card(config, str(run), 2, False)
  assert 'the prompt of `qwen_tools` and the tools' in card


@pytest.fixture
def run(tmp_path):
  """A run that was killed in a line, with two evaluations of its step 2."""
  em = {'eval/em': 0.5, 'eval/em/low': 0.25, 'eval/em/high': 0.75}
  em['eval/em/n'] = 4.0
  line = json.dumps({'step': 1} | em)
  (tmp_path / 'metrics.jsonl').write_text(f'{line}\n{{"step": 2, "eval/')
  about = {'starts': [{'commit': 'c'}]}
  records.write_json(tmp_path / 'environment.json', about)
  for name, source in ('real', 'service'), ('told', 'simulated'):
    manifest = {'sets': {'a': {}, 'b': {}}, 'corpus': None, 'sampling': {}}
    manifest['source'] = source
    records.write_json(tmp_path / name / 'manifest.json', manifest)
    records.write_json(tmp_path / name / 'eval.json', em | {'checkpoint': 2})
  return tmp_path


@pytest.mark.parametrize('source', ['service', 'simulated'])
def test_the_card_has_the_figures_of_real_searches(run, source):
  """A simulated search engine reads the golden answers of the question."""
  config = tiny.config()
  config.source.module = source
  card = export.model_card(config, str(run), 2, False)
  _, *rows = [line for line in card.splitlines() if line.startswith('| ')]
  figures = '| 2 | 0.500 | 0.250 to 0.750 | 4 |'
  trained, measured = f'| micro {figures}', f'| real | a, b {figures}'
  trained = [f'| while it trained {trained}'] * (source == 'service')
  assert rows == [*trained, measured]


def test_the_card_of_the_best_has_nothing_that_chose_it(run):
  """Neither the evaluations of training nor others of the set."""
  config, other = tiny.config(), run / 'other'
  config.checkpoint.best = 'eval/set=a/em'
  manifest = {'sets': {'b': {}}, 'source': 'service', 'corpus': None}
  records.write_json(other / 'manifest.json', manifest | {'sampling': {}})
  values = json.loads((run / 'real' / 'eval.json').read_text())
  records.write_json(other / 'eval.json', values)
  card = export.model_card(config, str(run), 2, False, 'best')
  _, *rows = [line for line in card.splitlines() if line.startswith('| ')]
  assert rows == ['| other | b | 2 | 0.500 | 0.250 to 0.750 | 4 |']
