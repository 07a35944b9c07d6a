"""Guide: where every attempt fails, sample again with a hint, train without it.

arXiv 2506.13923; vaskar-open-source-research/guide_rl. A question without a
success is asked again, as often, with a text of the data in its prompt. The new
attempts are a group of their own, and are trained behind the plain prompt.
Their log-probs stay those of the hinted prompt, so the truncated importance
weight (config.algorithm.tis) is that of the plain policy to the hinted one.
Arguments:

  key      of Question.meta, where the text is; '' = hint, or in a generated
           world queries: a wording for each look-up, and so, from the second
           on, what the one before it finds
  cap      of the weight, for each token

Departs from the release: it shapes the ratio by r / (r + g), g the 90th
percentile of a microbatch, padding included, and does not clip it; it asks all
questions again if none passes its filter. A group that is all right or all
wrong with the hint has no gradient here either way. A hint without room is left
out, as are attempts with several contexts (`rollout/hints_left_out` counts
questions, `rollout/hinted` attempts with a hint). What the first round sampled
is not kept, and what is logged of rewards has the second. Rewards that take the
weights of the step cannot be given between rounds.
"""

from collections.abc import Sequence
import functools

from configs.methods import core
from searchrl_jax import lookup
from searchrl_jax.learn import advantages, teacher
from searchrl_jax.types import Group, Question

LEAST = 1e-3  # a return above it is a success


def get_config(arg=None):
  return core.on_base(arg, change, key='', cap=2.0)


def change(c, a):
  c.name = 'guide'
  core.set_algorithm(c, core.GRPO)
  c.algorithm.tis, c.algorithm.tis_cap = 'token', a.cap
  c.rollout.sampler = 'configs.methods.guide.guided'
  c.rollout.hint_key = a.key or ('hint' if c.model.path else 'queries')
  c.rollout.hint_frame = '{text} {hint}'
  c.rollout.mismatch_alarm = 0.0  # the two prompts differ by more


async def guided(
  questions: Sequence[Question], services, *, hint_key: str, hint_frame: str
) -> list[Group]:
  """The sampler; see the module. `meta['hinted']` says who had the hint.

  Args:
    questions, services: see `rollout.core`.
    hint_key: of Question.meta.
    hint_frame: the question's text with the hint.
  """
  attempt = functools.partial(services.fresh, services.slots())

  async def told(question, samples) -> list:
    """Attempts with the hint; none if it is left out."""
    hint = teacher.told_by(question, hint_key)
    try:
      asked = teacher.hinted(question, hint, hint_frame)
      start = services.env.reset(asked, services.role)
    except ValueError:  # it is too long
      return []
    found = await services.gather(attempt(start, n, ['hint']) for n in samples)
    # Those of several contexts have no other prompt.
    return [] if any(t.contexts for t in found) else found

  async def group(question, plain, samples) -> None:
    found = await services.gather(attempt(plain, n) for n in samples)
    earned = await services.reward([tuple(found)])
    won = advantages.returns(earned.value)[earned.valid] > LEAST
    if won.size and not won.any():  # a failed service is no failure
      again = await told(question, samples)
      counts = dict(hinted=len(again), hints_left_out=not again)
      services.count((question.id, samples[0]), **counts)
      if again:
        found = [teacher.plainly(t, question, plain[0]) for t in again]
    services.record(*found)

  return await services.whole(questions, group)


def _check(config):
  lookup.require(
    not config.mismatch_alarm,
    f'config.rollout.mismatch_alarm={config.mismatch_alarm} with the sampler '
    "'guided': log-probs under two prompts differ; use 0",
  )


guided.check = _check
guided.needs = lambda fields: (f'meta.{fields["hint_key"]}',)
