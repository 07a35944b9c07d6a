"""The peer of `update`: the same policy update in plain torch, on CPU.

Run by a Python of its own (`.venv-parity/bin/python update_torch.py CASE
THREADS`, CASE a JSON object), torch and transformers only. Reads lines from
stdin: a number n runs n updates, and a JSON line {seconds, peak_bytes} comes
back.

transformers' Qwen2ForCausalLM in float32 with sdpa attention; the logits of
the whole batch through the full head, as users of a Hugging Face model do,
then the loss positions alone and cross_entropy on them for the log-probs;
clipped policy loss, backward, clipped gradient norm, fused AdamW. With
`gathered` the hidden states of loss positions are picked before the head,
which is what a careful user would write: reported beside, for honesty.
"""

import json
import sys
import time


def peak_bytes() -> int:
  """The largest resident size of this process so far (Linux)."""
  with open('/proc/self/status') as f:
    for line in f:
      if line.startswith('VmHWM:'):
        return int(line.split()[1]) * 1024
  raise RuntimeError('/proc/self/status has no VmHWM')


def main():
  # Here, so that the other side may import this file for `peak_bytes`.
  import torch
  import transformers

  case, threads = json.loads(sys.argv[1]), int(sys.argv[2])
  torch.set_num_threads(threads)
  torch.manual_seed(0)
  config = transformers.Qwen2Config(
    vocab_size=case['vocab'],
    hidden_size=case['d_model'],
    num_hidden_layers=case['layers'],
    num_attention_heads=case['heads'],
    num_key_value_heads=case['kv_heads'],
    intermediate_size=case['d_ff'],
    max_position_embeddings=case['length'],
    tie_word_embeddings=True,
    attn_implementation='sdpa',
    use_cache=False,
  )
  model = transformers.Qwen2ForCausalLM(config).float().train()
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-5, weight_decay=0.0, fused=True
  )
  B, T = case['rows'], case['length']

  def update():
    ids = torch.randint(0, case['vocab'], (B, T))
    # Half of the positions, a different half in each row.
    mask = torch.rand(B, T - 1).argsort(1) < T // 2
    advantages = torch.randn(B, 1).expand(B, T - 1)[mask]
    behaviour = torch.full(advantages.shape, -8.0)
    start = time.perf_counter()
    targets = ids[:, 1:][mask]
    if case['gathered']:
      hidden = model.model(ids).last_hidden_state[:, :-1][mask]
      logits = model.lm_head(hidden)
    else:
      logits = model(ids).logits[:, :-1][mask]
    logps = -torch.nn.functional.cross_entropy(
      logits, targets, reduction='none'
    )
    old = logps.detach()
    ratio = torch.exp(logps - old)
    weight = torch.exp(old - behaviour).clamp(max=2.0)
    loss = -(
      weight
      * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    ).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    return time.perf_counter() - start

  for line in sys.stdin:
    seconds = [update() for _ in range(int(line))]
    out = {
      'seconds': seconds,
      'peak_bytes': peak_bytes(),
      'parameters': sum(p.numel() for p in model.parameters()),
      'version': f'torch {torch.__version__}, transformers '
      f'{transformers.__version__}',
    }
    print(json.dumps(out), flush=True)


if __name__ == '__main__':
  main()
