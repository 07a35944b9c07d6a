"""Makes encoders.npz with torch and transformers.

    .venv-parity/bin/python -m tests.golden.make_encoders

The weights are those of tests/golden/encoders.py, so that only vectors and
logits are committed. `tests/parity` compares the same live.
"""

import pathlib
import tempfile

import numpy as np
import torch
import transformers

from tests.golden import encoders

HERE = pathlib.Path(__file__).resolve().parent
# By the models' cards, not by the package's table.
BGE = 'Represent this sentence for searching relevant passages: '
PREFIXES = {'e5': ('query: ', 'passage: '), 'bge': (BGE, '')}


@torch.no_grad()
def vectors(folder, family: str, texts, kind: str, length: int) -> np.ndarray:
  """float32 [N, D], each text encoded alone."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.BertModel.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  prefix = PREFIXES.get(family, ('', ''))[kind == 'passage']
  out = []
  for text in texts:
    batch = tokenizer(
      prefix + text,
      truncation=True,
      max_length=length,
      padding=False,
      return_tensors='pt',
    )
    x = model(**batch).last_hidden_state[0]
    x = x[0] if family == 'bge' else x.mean(0)
    if family != 'contriever':
      x = torch.nn.functional.normalize(x, dim=0)
    out.append(x.numpy())
  return np.stack(out)


@torch.no_grad()
def logits(folder, pairs, length: int) -> np.ndarray:
  """float32 [N], each pair alone, the passage cut."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  model = transformers.BertForSequenceClassification.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  assert model.config.num_labels == 1
  return np.array(
    [
      # Lists: without them an empty passage would be none.
      model(
        **tokenizer(
          [query],
          [passage],
          truncation='only_second',
          max_length=length,
          padding=False,
          return_tensors='pt',
        )
      ).logits.item()
      for query, passage in pairs
    ],
    np.float32,
  )


def values(parent) -> dict[str, np.ndarray]:
  out = {}
  for name, (family, _) in encoders.CHECKPOINTS.items():
    folder = encoders.write(parent, name)
    out[f'{name}/queries'] = vectors(
      folder, family, encoders.QUERIES, 'query', encoders.QUERY_LENGTH
    )
    out[f'{name}/passages'] = vectors(
      folder, family, encoders.PASSAGES, 'passage', encoders.PASSAGE_LENGTH
    )
  folder = encoders.write(parent, encoders.RERANKER)
  out['logits'] = logits(folder, encoders.PAIRS, encoders.PAIR_LENGTH)
  return out


def main():
  with tempfile.TemporaryDirectory() as tmp:
    arrays = values(tmp)
  for name, array in arrays.items():
    print(f'{name}: {array.shape}, std {array.std():.3f}')
  np.savez_compressed(HERE / 'encoders.npz', **arrays)


if __name__ == '__main__':
  main()
