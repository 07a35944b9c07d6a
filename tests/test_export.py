"""What an exported folder says to transformers: the prompt, how to sample."""

import pytest
import transformers

from searchrl_jax import export, schema
from searchrl_jax.run import build
from searchrl_jax.types import Question
from tests import scripted

QUESTIONS = (
  'Who wrote "Faust"',
  '  what is a \\n {{ brace }} and é 漢 ?  ',
  "it's {% if %}\n\ntwo lines",
)


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
