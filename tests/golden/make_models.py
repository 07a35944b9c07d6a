"""Makes models.npz and stories260K.json with torch and transformers.

    .venv-parity/bin/python -m tests.golden.make_models

The weights are those of tests/golden/models.py, so that only logits and ids
are committed. `tests/parity` compares the same live.
"""

import contextlib
import json
import pathlib
import tempfile
from unittest import mock

import numpy as np
import torch
import transformers

from tests import conftest
from tests.golden import models

HERE = pathlib.Path(__file__).resolve().parent
PROMPT = 'Once upon a time'
NEW_TOKENS = 200


def reference(folder, dtype=torch.float32):
  return transformers.AutoModelForCausalLM.from_pretrained(
    folder,
    dtype=dtype,
    attn_implementation='eager',
    experts_implementation='eager',  # the other has no float64
  ).eval()


def exact(folder) -> torch.nn.Module:
  """In float64: float32 kernels of two CPUs differ by 2e-5 in these logits.

  What transformers computes in float32 whatever the dtype is (norms, delta
  nets) is in float64 too.
  """
  model = reference(folder, torch.float64)
  forward = model.forward

  def without_float32(*args, **kwargs):
    with contextlib.ExitStack() as stack:
      for owner, name, other in (
        (torch, 'float32', torch.float64),
        (torch, 'float', torch.float64),
        (torch.Tensor, 'float', torch.Tensor.double),
      ):
        stack.enter_context(mock.patch.object(owner, name, other))
      return forward(*args, **kwargs)

  model.forward = without_float32
  return model


@torch.no_grad()
def unpadded(model, rows) -> list[np.ndarray]:
  """Logits [T, V] of each row alone, in the model's dtype."""
  return [model(torch.tensor(row)[None]).logits[0].numpy() for row in rows]


@torch.no_grad()
def padded(model, rows, side: str) -> list[np.ndarray]:
  """The same from one batch, padded on the `side`."""
  T = max(map(len, rows))
  ids = np.zeros((len(rows), T), np.int64)
  mask = np.zeros_like(ids)
  for b, row in enumerate(rows):
    at = slice(0, len(row)) if side == 'right' else slice(T - len(row), T)
    ids[b, at] = row
    mask[b, at] = 1
  positions = np.maximum(mask.cumsum(-1) - 1, 0)
  out = model(
    torch.tensor(ids),
    attention_mask=torch.tensor(mask),
    position_ids=torch.tensor(positions),
  ).logits.numpy()
  return [out[b][mask[b] == 1] for b in range(len(rows))]


@torch.no_grad()
def greedy(model, ids, n: int) -> tuple[list[int], float]:
  """n greedy tokens after `ids`, and the smallest lead of a choice."""
  past, step, out, lead = None, torch.tensor([ids]), [], float('inf')
  for _ in range(n):
    got = model(step, past_key_values=past, use_cache=True)
    past = got.past_key_values
    best = torch.topk(got.logits[0, -1], 2)
    lead = min(lead, float(best.values[0] - best.values[1]))
    out.append(int(best.indices[0]))
    step = torch.tensor([out[-1:]])
  return out, lead


def main():
  arrays = {}
  for name in models.CONFIGS:
    with tempfile.TemporaryDirectory() as tmp:
      model = exact(models.write(tmp, name))
    logits = np.concatenate(unpadded(model, models.inputs(name)))
    arrays[name] = logits.astype(np.float32)
    print(f'{name}: logits {arrays[name].shape}, std {arrays[name].std():.3f}')
  np.savez_compressed(HERE / 'models.npz', **arrays)
  folder = conftest.shared_data() / 'stories260K'
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  prompt = [1, *tokenizer.encode(PROMPT, add_special_tokens=False)]
  ids, lead = greedy(reference(folder), prompt, NEW_TOKENS)
  value = {
    'transformers': transformers.__version__,
    'torch': torch.__version__,
    'prompt': prompt,
    'continuation': ids,
    'smallest_lead': lead,
  }
  print(tokenizer.decode(ids), lead)
  (HERE / 'stories260K.json').write_text(json.dumps(value) + '\n')


if __name__ == '__main__':
  main()
