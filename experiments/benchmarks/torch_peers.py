"""The peers in torch, on CPU; `harness.torch_peer` starts them.

    .venv-parity/bin/python torch_peers.py NAME FIELDS

Run by a Python that has torch, transformers and sentence-transformers
(requirements-parity.txt), and nothing of ours. NAME is a function of this file,
FIELDS a JSON object of its arguments and `threads`. It prints a JSON line about
itself, then answers each JSON line of stdin with one. Models are those of
`models.py`: Qwen2 in float32 with sdpa attention.
"""

import json
import pathlib
import sys
import time

import torch
import transformers


def qwen2(model: dict, **fields):
  """A model of random weights, and what there is to say about it."""
  config = transformers.Qwen2Config(
    vocab_size=model['vocab_size'],
    hidden_size=model['d_model'],
    num_hidden_layers=model['n_layers'],
    num_attention_heads=model['n_heads'],
    num_key_value_heads=model['n_kv_heads'],
    intermediate_size=model['d_ff'],
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    attn_implementation='sdpa',
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    **fields,
  )
  made = transformers.Qwen2ForCausalLM(config).float()
  return made, {
    'parameters': sum(p.numel() for p in made.parameters()),
    'torch': torch.__version__,
    'transformers': transformers.__version__,
  }


def generate(model: dict, rows: int, prompt: int, new: int):
  """The peer of `sampler`: the seconds of one batch with log-probs.

  Its own (dynamic) cache, no stop id, temperature 1, the whole vocabulary.
  """
  made, about = qwen2(model)
  made.eval()

  def batch(_) -> float:
    ids = torch.randint(0, model['vocab_size'], (rows, prompt))
    start = time.perf_counter()
    with torch.inference_mode():
      out = made.generate(
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
      logps = made.compute_transition_scores(
        out.sequences, out.scores, normalize_logits=True
      )
    seconds = time.perf_counter() - start
    assert logps.shape == (rows, new) and bool((logps < 0).all())
    return seconds

  return about, batch


def update(model: dict, rows: int, length: int, gathered=False, **unused):
  """The peer of `update`: seconds of n updates, and the peak of the memory.

  The logits of the whole batch through the full head, as users of a Hugging
  Face model do, then the loss positions alone and cross_entropy on them for the
  log-probs; clipped policy loss, backward, clipped gradient norm, fused AdamW.
  With `gathered` the hidden states of loss positions are picked before the
  head, which is what a careful user would write.
  """
  made, about = qwen2(model, use_cache=False)
  made.train()
  optimizer = torch.optim.AdamW(
    made.parameters(), lr=1e-5, weight_decay=0.0, fused=True
  )
  B, T = rows, length

  def once() -> float:
    ids = torch.randint(0, model['vocab_size'], (B, T))
    # Half of the positions, a different half in each row.
    mask = torch.rand(B, T - 1).argsort(1) < T // 2
    advantages = torch.randn(B, 1).expand(B, T - 1)[mask]
    behaviour = torch.full(advantages.shape, -8.0)
    start = time.perf_counter()
    targets = ids[:, 1:][mask]
    if gathered:
      hidden = made.model(ids).last_hidden_state[:, :-1][mask]
      logits = made.lm_head(hidden)
    else:
      logits = made(ids).logits[:, :-1][mask]
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
    torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    return time.perf_counter() - start

  def updates(n: int) -> dict:
    seconds = [once() for _ in range(n)]
    status = pathlib.Path('/proc/self/status').read_text()
    peak = int(status.partition('VmHWM:')[2].split()[0]) << 10
    return {'seconds': seconds, 'peak_bytes': peak, **about}

  return about, updates


def encode(model: str):
  """A peer of `retrieval`: seconds of sentence-transformers for some texts."""
  from sentence_transformers import SentenceTransformer

  made = SentenceTransformer(model, device='cpu')

  def encoded(texts: list[str]) -> float:
    start = time.perf_counter()
    made.encode(texts, normalize_embeddings=True, show_progress_bar=False)
    return time.perf_counter() - start

  return {}, encoded


def main(name: str, fields: str) -> None:
  arguments = json.loads(fields)
  torch.set_num_threads(arguments.pop('threads'))
  torch.manual_seed(0)
  about, answer = globals()[name](**arguments)
  print(json.dumps(about), flush=True)
  for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
