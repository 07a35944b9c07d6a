"""What a config names, where it names something else."""

import pytest

from searchrl_jax import schema
from searchrl_jax.lookup import ConfigError
from searchrl_jax.run import build


def test_a_folder_without_a_model_is_named(tmp_path):
  model = tmp_path / 'adapter'
  model.mkdir()
  (model / 'adapter_config.json').write_text('{}')
  config = schema.base()
  config.model.path = str(model)
  named = f"config.model.path='{model}'"
  with pytest.raises(ConfigError, match=named) as error:
    build.tokenizer(config, str(tmp_path / 'run'))
  for words in 'config.model.lora.path', str(model / 'config.json'):
    assert words in str(error.value)
  for words in 'written', 'disk':
    assert words not in str(error.value)


def test_processes_agree_on_all_but_where_they_run(monkeypatch):
  def compared(**fields):
    found = []
    read = lambda facts: found.append(facts())
    monkeypatch.setattr(build.cluster, 'require_agreement', read)
    config = schema.base()
    config.update_from_flattened_dict(fields)
    build.require_same_run(config)
    return found

  one = compared()
  for field, value in (
    ('sft.save_every', 7),
    ('checkpoint.every', 7),
    ('judge.max_tokens', 7),
    ('judge.url', 'http://judge'),
  ):
    assert compared(**{field: value}) != one, field
  for field in ('source.url', 'engine.url', 'data.dir'):
    assert compared(**{field: 'here'}) == one, field
  assert compared(**{'source.timeout': 7.0}) == one
