"""The peer of `sampler`: transformers' generate in torch, on CPU.

Run by a Python of its own (`.venv-parity/bin/python sampler_torch.py CASE
THREADS`, CASE a JSON object), torch and transformers only. Each line read from
stdin is one batch: `generate` samples it with log-probs, and a JSON line
{seconds, tokens} comes back. Qwen2 in float32 with sdpa attention, its own
(dynamic) cache, no stop id, temperature 1, the whole vocabulary.
"""

import json
import sys
import time

import torch
import transformers


def main():
  case, threads = json.loads(sys.argv[1]), int(sys.argv[2])
  torch.set_num_threads(threads)
  torch.manual_seed(0)
  config = transformers.Qwen2Config(
    vocab_size=case['vocab_size'],
    hidden_size=case['d_model'],
    num_hidden_layers=case['n_layers'],
    num_attention_heads=case['n_heads'],
    num_key_value_heads=case['n_kv_heads'],
    intermediate_size=case['d_ff'],
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    attn_implementation='sdpa',
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
  )
  model = transformers.Qwen2ForCausalLM(config).float().eval()
  print(
    json.dumps(
      {
        'parameters': sum(p.numel() for p in model.parameters()),
        'torch': torch.__version__,
        'transformers': transformers.__version__,
      }
    ),
    flush=True,
  )
  rows, prompt, new = case['rows'], case['prompt'], case['new']
  for _ in sys.stdin:
    ids = torch.randint(0, case['vocab_size'], (rows, prompt))
    start = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        min_new_tokens=new,
        output_scores=True,
        return_dict_in_generate=True,
      )
      logps = model.compute_transition_scores(
        out.sequences, out.scores, normalize_logits=True
      )
    seconds = time.perf_counter() - start
    assert logps.shape == (rows, new) and bool((logps < 0).all())
    print(json.dumps({'seconds': seconds, 'tokens': rows * new}), flush=True)


if __name__ == '__main__':
  main()
