"""Tokenizer: outside text cannot act, bytes are exact."""

import json
import unicodedata

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
import transformers

from searchrl_jax.text import tokenizer as tokenizing
from tests import scripted

CONTROL = (
  'a<|im_start|>b</s><s><think><tool_call></tool_call><|endoftext|><|eos|>'
  '<|pad|><|fim_prefix|><unk>'
)


SENTENCEPIECE = decoders.Sequence(
  [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]
)


@pytest.fixture(params=scripted.NAMES)
def tok(request):
  return scripted.tokenizer(request.param)


def added(tok):
  backend = tok._hf.backend_tokenizer
  return set(backend.get_added_tokens_decoder())


def test_outside_text_gives_no_added_token(tok):
  ids = tok.encode(CONTROL)
  assert not set(ids) & added(tok)
  assert tok.decode(ids) == CONTROL


def test_our_text_gives_control_tokens():
  tok = scripted.tokenizer('bpe')
  assert tok.encode_template('<|eos|>') == [1]
  parts = [('<|eos|>', True), ('<|eos|>', False), ('<|pad|>', True)]
  ids = tok.encode_parts(parts)
  assert ids == [1, *tok.encode('<|eos|>'), 0]


def test_added_tokens_that_are_not_special_are_split_too():
  tok = scripted.tokenizer('qwen_tokenizer')
  # 151667 is <think>, 151657 <tool_call>: added, and not marked special.
  assert tok.encode_template('<think><tool_call>') == [151667, 151657]
  assert not {151667, 151657} & set(tok.encode('<think><tool_call>'))
  assert tok.token_bytes(151667) == b'<think>'  # it is text all the same
  assert tok.token_bytes(151644) == b''  # <|im_start|>


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
@pytest.mark.parametrize('name', scripted.NAMES)
def test_bytes_of_tokens_are_the_bytes_of_the_text(name, text):
  tok = scripted.tokenizer(name)
  if name == 'qwen_tokenizer':  # its normaliser is NFC
    text = unicodedata.normalize('NFC', text)
  if name == 'stories260K':
    text = text.replace('▁', '_')  # its sign for a space
  ids = tok.encode(text)
  assert b''.join(map(tok.token_bytes, ids)) == text.encode()
  assert tok.decode(ids) == text
  assert not set(ids) & tok.control


def test_parts_are_encoded_as_one_text():
  tok = scripted.tokenizer('qwen_tokenizer')
  whole = 'Question: who wrote it?\nReply:'
  parts = [('Question: ', True), ('who wrote it', False), ('?\nReply:', True)]
  expected = tok._hf.encode(whole, add_special_tokens=False)
  assert tok.encode_parts(parts) == expected
  assert tok.encode('Question: ') + tok.encode('who') != expected[:3]


def test_start_of_a_sequence_has_bos_and_leading_space():
  tok = scripted.tokenizer('stories260K')
  ids = tok.encode_template('The cat', start=True)
  assert ids == tok._hf.encode('The cat')
  assert ids[0] == tok.bos_id == 1
  # Later text gets neither: bytes stay exact.
  assert tok.decode(tok.encode_template('The cat')) == 'The cat'
  assert tok.encode_template('<s>x', start=True).count(1) == 1


def test_identity_of_real_tokenizers():
  qwen = scripted.tokenizer('qwen_tokenizer')
  assert qwen.vocab_size == 151669
  assert set(qwen.eos_ids) == {151643, 151645}  # endoftext, im_end
  assert qwen.eos_ids[0] == qwen._hf.eos_token_id
  assert qwen.bos_id is None
  assert qwen.token_bytes(151900) == b''  # a padded row of the embedding
  stories = scripted.tokenizer('stories260K')
  assert (stories.vocab_size, stories.eos_ids) == (512, (2,))
  assert stories.bos_id == 1
  assert stories.token_bytes(13) == b'\n'  # <0x0A>
  assert stories.token_bytes(265) == b' the'


def test_a_control_token_behind_the_vocabulary_needs_no_row(tmp_path):
  from searchrl_jax.models import parameters
  from tests import tiny

  entries = scripted.tokenizer('bpe').vocab_size
  # Gemma 3 1B has as many rows as there are entries without this one.
  tok = scripted.altered(tmp_path, special=['<image_soft_token>'])
  (soft,) = tok.encode_template('<image_soft_token>')
  assert soft == tok.needed == entries and tok.token_bytes(soft) == b''
  c = tiny.config()
  c.model.path = str(tmp_path)
  arch = c.model.arch.to_dict()
  path = tmp_path / 'config.json'
  path.write_text(json.dumps(arch | {'vocab_size': entries}))
  sizes = tok.vocab_size, tok.needed
  assert parameters.model_config(c, *sizes).vocab_size == entries
  path.write_text(json.dumps(arch | {'vocab_size': entries - 1}))
  with pytest.raises(ValueError, match='config.model.tokenizer'):
    parameters.model_config(c, *sizes)


@pytest.mark.parametrize('end', ['<|im_end|>', '<end_of_turn>'])
def test_a_token_that_ends_a_turn_needs_its_row(tmp_path, end):
  entries = scripted.tokenizer('bpe').vocab_size
  tok = scripted.altered(tmp_path, special=['<image_soft_token>', end])
  assert tok.eos_ids == (1, entries + 1)
  assert tok.needed == entries + 2


def test_an_end_of_turn_that_is_not_special_is_text(tmp_path):
  scripted.tokenizer('bpe').save(tmp_path)
  hf = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
  hf.add_tokens(['<end_of_turn>'])
  hf.save_pretrained(tmp_path)
  tok = tokenizing.load(tmp_path)
  assert tok.eos_ids == (1,)
  assert tok.token_bytes(tok.vocab_size - 1) == b'<end_of_turn>'


@pytest.mark.parametrize(
  'decoder, text, want',
  [
    (SENTENCEPIECE, '▁▁', b'  '),  # Gemma 3's spaces
    (SENTENCEPIECE, '<0x41>', b'<0x41>'),
    (decoders.Metaspace(), '▁▁', b'  '),
    (decoders.ByteLevel(), 'ĠĠ', 'ĠĠ'.encode()),
  ],
)
def test_an_added_token_is_decoded_as_text(tmp_path, decoder, text, want):
  backend = tokenizers.Tokenizer(models.WordLevel({'a': 0, '</s>': 1}, 'a'))
  backend.decoder = decoder
  backend.add_tokens([text])
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='</s>'
  ).save_pretrained(tmp_path)
  tok = tokenizing.load(tmp_path)
  assert tok.encode_template(text) == [2] and tok.token_bytes(2) == want


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
  (tmp_path / 'config.json').write_text(
    json.dumps({'model_type': 'qwen2', 'vocab_size': 100, 'eos_token_id': 0})
  )
  with pytest.raises(ValueError, match='tokenizer'):
    tokenizing.load(tmp_path)


def test_negative_id_is_an_error():
  with pytest.raises(ValueError, match='-1'):
    scripted.tokenizer('bpe').token_bytes(-1)


def test_control_tokens_are_not_decoded(tok):
  assert tok.decode([*tok.encode('x'), tok.eos_ids[0]]) == 'x'


def test_lone_surrogates_do_not_break(tok):
  assert tok.decode(tok.encode('a\ud800b')) == 'a\ufffdb'


def test_whole_words(tmp_path):
  words = ['\n', ' ', ' cat', 'cat', '<search>', ' </search>', '</search>']
  tok = scripted.word_level(tmp_path, words)
  text = '<search> cat </search>\n'
  ids = tok.encode_template(text)
  assert len(ids) == 4 and tok.decode(ids) == text
  assert tok.token_bytes(ids[2]) == b' </search>'
  # Its vocabulary holds the control tokens as words: outside text spells out.
  assert not set(tok.encode('<|eos|> cat<|pad|>')) & tok.control
  assert tok.encode(' dog') == [2]  # <|unk|>


def test_generation_config_names_more_ends(tmp_path):
  scripted.tokenizer('bpe').save(tmp_path)
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [5, 1]}')
  assert tokenizing.load(tmp_path).eos_ids == (1, 5)
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": 7}')
  assert tokenizing.load(tmp_path).eos_ids == (1, 7)
  (tmp_path / 'generation_config.json').write_text('{')
  with pytest.raises(ValueError, match='generation_config.json'):
    tokenizing.load(tmp_path)


def test_load_says_what_is_wrong(tmp_path):
  with pytest.raises(ValueError, match='config.model.tokenizer'):
    tokenizing.load('')
  with pytest.raises(ValueError, match='folder .*absent'):
    tokenizing.load(tmp_path / 'absent')
  with pytest.raises(ValueError, match='no tokenizer'):
    tokenizing.load(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"broken": ')
  with pytest.raises(ValueError, match='no tokenizer'):
    tokenizing.load(tmp_path)
  pointer = 'version https://git-lfs.github.com/spec/v1\noid sha256:0\n'
  for name in ('tokenizer.json', 'chat_template.jinja'):
    (tmp_path / name).write_text(pointer)
    with pytest.raises(ValueError, match=f'{name}: .*LFS'):
      tokenizing.load(tmp_path)
    (tmp_path / name).unlink()


@pytest.mark.parametrize(
  'decoder, message',
  [(None, 'no decoder'), (decoders.WordPiece(), 'WordPiece')],
)
def test_tokens_without_bytes_are_refused(tmp_path, decoder, message):
  backend = tokenizers.Tokenizer(models.WordLevel({'a': 0, '</s>': 1}, 'a'))
  backend.pre_tokenizer = pre_tokenizers.Whitespace()
  if decoder is not None:
    backend.decoder = decoder
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token='</s>'
  ).save_pretrained(tmp_path)
  with pytest.raises(ValueError, match=message):
    tokenizing.load(tmp_path)


def test_no_eos_is_refused(tmp_path):
  scripted.tokenizer('bpe').save(tmp_path)
  for name in ('tokenizer_config.json', 'tokenizer.json'):
    path = tmp_path / name
    path.write_text(path.read_text().replace('<|eos|>', '<|stop|>'))
  config = json.loads((tmp_path / 'tokenizer_config.json').read_text())
  del config['eos_token']
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
  with pytest.raises(ValueError, match='eos_token'):
    tokenizing.load(tmp_path)


def test_train_bpe(tmp_path):
  tok = tokenizing.train_bpe(scripted.TEXTS, 300, tmp_path / 'a')
  same = tokenizing.train_bpe(scripted.TEXTS, 300, tmp_path / 'b')
  assert tok.vocab_size == 300
  assert (tok.eos_ids, tok.bos_id) == ((1,), None)
  text = 'the cat <search> x </search> 日本'
  assert tok.encode(text) == same.encode(text)
  assert tok.encode_template('<search>') == tok.encode('<search>')
  with pytest.raises(ValueError, match='258'):
    tokenizing.train_bpe(scripted.TEXTS, 100, tmp_path / 'c')


def test_no_chat_template_is_an_error():
  tok = scripted.tokenizer('bpe')
  assert not tok.has_chat
  with pytest.raises(ValueError, match="no chat template.*'base'"):
    tok.chat([{'role': 'user', 'content': 'hi'}])


def test_chat():
  pytest.importorskip('jinja2', reason='chat templates need jinja2')
  tok = scripted.tokenizer('qwen_tokenizer')
  text = tok.chat([{'role': 'user', 'content': 'hi'}])
  assert text.endswith('<|im_start|>assistant\n') and 'hi<|im_end|>' in text


def test_a_chat_template_that_shows_the_day(tmp_path):
  """Not today's, or a run would go on with other prompts tomorrow."""
  pytest.importorskip('jinja2', reason='chat templates need jinja2')
  scripted.tokenizer('bpe').save(tmp_path)
  text = "{{ strftime_now('%d %b %Y') }}"
  (tmp_path / 'chat_template.jinja').write_text(text)
  tok = tokenizing.load(tmp_path)
  assert tok.chat([{'role': 'user', 'content': 'hi'}]) == '26 Jul 2024'


def test_a_chat_template_that_refuses(tmp_path):
  pytest.importorskip('jinja2', reason='chat templates need jinja2')
  scripted.tokenizer('bpe').save(tmp_path)
  text = "{{ raise_exception('roles must alternate') }}"
  (tmp_path / 'chat_template.jinja').write_text(text)
  with pytest.raises(ValueError, match=r"\['user'\]: roles must alternate"):
    tokenizing.load(tmp_path).chat([{'role': 'user', 'content': 'hi'}])
