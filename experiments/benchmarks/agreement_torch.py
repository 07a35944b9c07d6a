"""Greedy continuations by transformers, for `agreement`; runs under torch.

python agreement_torch.py CHECKPOINT PROMPTS.json NEW OUT.json
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

folder, prompts, new, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
with open(prompts) as f:
  ids = torch.tensor(json.load(f))
with torch.no_grad():
  found = model.generate(
    ids,
    attention_mask=torch.ones_like(ids),
    do_sample=False,
    max_new_tokens=int(new),
    min_new_tokens=int(new),
    pad_token_id=0,
    eos_token_id=None,
  )
with open(out, 'w') as f:
  json.dump(found[:, ids.shape[1] :].tolist(), f)
