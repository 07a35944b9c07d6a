"""The configs of changing contexts."""

import pytest

from configs.methods import contexts
from searchrl_jax import checks


@pytest.mark.parametrize('kind', contexts.KINDS)
@pytest.mark.parametrize(
  'base', ['atlas', 'search_r1,model=qwen2.5-3b', 'hard,model=qwen2.5-3b']
)
def test_every_kind_has_room_for_its_contexts(kind, base):
  c = contexts.get_config(f'base={base},kind={kind}')
  checks.check(c)
  assert (c.env.max_contexts, c.env.attempts) == (4, 1 + (kind == 'attempts'))


def test_an_unknown_kind_is_named():
  with pytest.raises(ValueError, match="kind='forget'.*summary"):
    contexts.get_config('kind=forget')


def test_attempts_in_one_context_pack_as_ever():
  c = contexts.get_config('kind=attempts,contexts=1,attempts=3')
  checks.check(c)
  assert (c.env.max_contexts, c.env.attempts, c.batch.tokens) == (1, 3, 512)
