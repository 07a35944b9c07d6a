"""Losses against torch, live, and against TRL's own code."""

import collections
import types

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='torch is not installed')

from tests.conftest import ROOT  # noqa: E402
from tests.golden import algorithms, make_algorithms  # noqa: E402
from tests.learn import test_algorithms as ours  # noqa: E402

pytestmark = pytest.mark.parity


@pytest.mark.parametrize('name', algorithms.CASES)
def test_loss_and_gradient_are_the_formulas(name):
  want = make_algorithms.reference(name)
  loss, grad = ours.case_loss(name, algorithms.inputs(name))
  assert ours.far(loss, want['loss']) <= 1e-5
  assert ours.far(grad, want['grad']) <= 1e-5


def test_golden_values_are_current():
  with np.load(ROOT / 'tests/golden/algorithms.npz') as golden:
    for name in algorithms.CASES:
      for k, v in make_algorithms.reference(name).items():
        np.testing.assert_allclose(golden[f'{name}/{k}'], v, rtol=1e-9)


# What TRL calls them. DAPO's mean over tokens is its 'bnpo' where a batch is
# not cut; PPO's loss is that with an advantage for each token.
TRL = {
  'ppo': dict(loss_type='bnpo'),
  'ppo_dual': dict(loss_type='bnpo', delta=algorithms.DUAL),
  'grpo': dict(loss_type='grpo', beta=0.04),
  'dr_grpo': dict(loss_type='dr_grpo'),
  'dapo': dict(loss_type='dapo', epsilon_high=0.28),
  'gspo': dict(
    loss_type='grpo',
    importance_sampling_level='sequence',
    epsilon_low=3e-4,
    epsilon_high=4e-4,
  ),
  'cispo': dict(loss_type='cispo', epsilon_high=5.0),
  'rloo': {},
}


def of_trl(name: str):
  """Loss and gradient of TRL's trainer, given log-probs and advantages."""
  trl = pytest.importorskip('trl', reason='trl is not installed')
  x = make_algorithms.tensors(name)
  mask = x['mask'].double()
  base = trl.RLOOTrainer if name == 'rloo' else trl.GRPOTrainer

  class Trainer(base):
    """Only what its loss reads: no model, no data."""

    def __init__(self, **fields):
      vars(self).update(fields)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
      return x['logps'], torch.zeros_like(x['logps']), None

  fields = (
    dict(
      importance_sampling_level='token',
      epsilon_low=0.2,
      epsilon_high=0.2,
      beta=0.0,
      loss_type='',
      delta=None,
    )
    | TRL[name]
  )
  trainer = Trainer(
    **fields,
    args=types.SimpleNamespace(
      delta=fields['delta'],
      use_bias_correction_kl=False,
      steps_per_generation=1,
    ),
    model=torch.nn.Identity(),
    accelerator=types.SimpleNamespace(
      num_processes=1,
      gather=lambda x: x,
      gather_for_metrics=lambda x: x,
      reduce=lambda x, **kwargs: x,
    ),
    max_completion_length=algorithms.HORIZON,
    top_entropy_quantile=1.0,
    off_policy_mask_threshold=None,
    tools=None,
    use_vllm=False,
    current_gradient_accumulation_steps=1,
    aux_loss_enabled=False,
    _entropy_bonus_enabled=False,
    _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
  )
  A = torch.tensor(ours.case_advantages(name, algorithms.inputs(name)))
  ids = torch.zeros(mask.shape, dtype=torch.long)
  old = torch.where(x['mask'], x['old_logps'], 0.0)
  loss = trainer._compute_loss(
    trainer.model,
    {
      'prompt_ids': ids[:, :1],
      'prompt_mask': ids[:, :1] + 1,
      'completion_ids': ids,
      'completion_mask': mask,
      'advantages': (A if A.shape[1] > 1 else A[:, 0]).double(),
      'old_per_token_logps': x['old_logps'],
      'old_logps': old.sum(1),
      'ref_per_token_logps': x['ref_logps'],
      'num_items_in_batch': mask.sum(),
    },
  )
  [grad] = torch.autograd.grad(loss, x['logps'])
  return loss.detach(), grad


@pytest.mark.parametrize('name', TRL)
def test_loss_and_gradient_are_those_of_trl(name):
  loss, grad = ours.case_loss(name, algorithms.inputs(name))
  their_loss, their_grad = of_trl(name)
  assert ours.far(loss, their_loss) <= 1e-5
  assert ours.far(grad, their_grad) <= 1e-5
