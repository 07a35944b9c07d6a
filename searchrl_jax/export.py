"""Writes the weights of a run as a Hugging Face checkpoint.

  python -m searchrl_jax.export --workdir=runs/mine --out=exported

transformers, vLLM and --config.model.path can load the folder. Adapters
(config.model.lora) are merged into the weights; with --adapter they are
written alone, for PEFT, vLLM and --config.model.lora.path. The chat template
renders one message, a question, as the prompts of the run; where env.template
has calls it is the tokenizer's own, with tools. generation_config
has what an evaluation samples with; README.md is a model card with the figures
that the run folder holds.
"""

import json
import pathlib

from absl import flags

from searchrl_jax import checks, lookup
from searchrl_jax.evaluate import files
from searchrl_jax.models import lora, parameters, pretrained
from searchrl_jax.run import build, command
from searchrl_jax.sources import simulated
from searchrl_jax.store import checkpoint, records
from searchrl_jax.text import untrusted
from searchrl_jax.types import Question

# Stands for the question; no text has it.
_SLOT = '\ue002'
_CHAT = """\
{{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}}
{{{{- raise_exception('The template takes one message, of the user: a question.\
') -}}}}
{{%- endif -%}}
{{%- set question = messages[0]['content'] | trim -%}}
{{{{- {before} + question + {mark} + {after} -}}}}"""
_CARD = """\
---
library_name: {library}
{base}tags:
- searchrl_jax
- reinforcement-learning
- search
---

# {name}

A policy that answers questions with searches, trained by searchrl_jax (commit
{commit}): recipe `{name}`, checkpoint of step {step}, from {start}. Loss
`{loss}`, advantages `{advantage}`, reward `{reward}`. Training data: {data}.
Searches in training: `{source}`.

Exact match with 95 % bootstrap intervals, from the run folder:

| evaluation | sets | step | exact match | interval | questions |
|---|---|---|---|---|---|
{figures}

The model needs a loop that answers its searches, by the search that it was
trained with: `python -m searchrl_jax.evaluate --config.model.path=FOLDER ...`
is such a loop. Without one it guesses. The chat template {chat}, and a
generation ends at one of the `stop_strings` in `generation_config.json` (for
vLLM `stop`, with `include_stop_str_in_output`).

Other questions, corpora and retrievers were not measured. It repeats what
passages say, wrong ones too: treat passages and answers as untrusted text. The
licences of the base model and of the data apply.
"""


def export(
  workdir: str,
  out: str,
  which: str,
  dtype: str,
  adapter: bool = False,
  stacked: bool = False,
) -> None:
  """Exports checkpoint `which` ('latest', 'best' or a step) in `dtype`.

  Args:
    adapter: its adapters alone, as PEFT stores them.
    stacked: see `pretrained.save`.

  Raises:
    ConfigError: the run has no adapters, or no experts to stack.
    FileExistsError: `out` exists.
  """
  config = build.load_config(workdir)
  tok = build.tokenizer(config, workdir)
  cfg = parameters.model_config(config, tok.vocab_size, tok.needed)
  # Of a run that goes on, 'latest' may change meanwhile.
  step = checkpoint.of_run(config, workdir).resolve(which)
  message = f'--stacked_experts: {workdir} has none, or --adapter omits them'
  lookup.require(cfg.moe and not adapter or not stacked, message)
  mesh = build.any_mesh(config)
  params = parameters.restore(config, workdir, cfg, mesh, str(step))
  card = {'README.md': model_card(config, workdir, step, adapter, which)}
  if adapter:
    message = f'--adapter: {workdir} has none (config.model.lora.rank=0)'
    lookup.require(cfg.lora, message)
    adapters, _ = lora.split(cfg, params)
    # What the adapters belong to: a run that it started from, or the model.
    model = config.train.init or config.model.path
    kw = dict(dtype=dtype, model=model, files=card)
    known = model and model == config.model.path
    base = parameters.local(model) if known else model
    about = pathlib.Path(base, 'config.json')
    if model and about.is_file():  # that of a run has no model_type
      found = json.loads(about.read_text())
      kw['wrapped'] = found.get('model_type') == 'gemma3'
    lora.save(out, cfg, adapters, **kw)
    return
  cfg, params = lora.base(cfg), lora.merge(cfg, params)
  if config.model.path:
    like = pretrained.read_json(parameters.local(config.model.path))
  else:
    like = {**config.model.arch.to_dict(), 'eos_token_id': tok.eos_ids[0]}
  generation = {
    'eos_token_id': tok.eos_ids,
    'do_sample': config.eval.temperature > 0,
    'max_new_tokens': config.env.max_turn_tokens,
    'stop_strings': list(build.template(config).stops),
  }
  if generation['do_sample']:
    names = ('temperature', 'top_p')
    generation |= {name: config.eval[name] for name in names}
    generation['top_k'] = 0  # none; transformers has 50 without it
  files = card | {'generation_config.json': json.dumps(generation, indent=2)}
  chat = chat_template(config, tok)
  if config.data.prompt == 'template' and chat:
    files['chat_template.jinja'] = chat
  folder = f'{workdir}/{records.TOKENIZER}'
  pretrained.save(
    out,
    cfg,
    params,
    folder,
    dtype=dtype,
    like=like,
    files=files,
    stacked=stacked,
  )


def chat_template(config, tok) -> str:
  """Jinja that renders a question as the prompts of a run of `config`; '' where
  env.template has calls, whose chats need the tokenizer's own."""
  template = build.template(config)
  if template.calls:
    return ''
  parts = untrusted.prompt_parts(
    template, Question('', _SLOT, ()), 'template', tok
  )
  text = ''.join(part for part, _ in parts)
  # Before the first token of a text, which transformers does not add here.
  if tok.encode_parts(parts, start=True)[:1] == [tok.bos_id]:
    bos = tok.control_name(tok.bos_id)
    text = bos + text.removeprefix(bos)
  before, _, after = text.partition(template.question(_SLOT))
  mark = "('' if question.endswith('?') else '?')"
  literal = lambda x: json.dumps(x, ensure_ascii=False)
  return _CHAT.format(
    before=literal(before),
    mark=mark if template.question_mark else "''",
    after=literal(after),
  )


def model_card(
  config, workdir: str, step: int, adapter: bool, which: str = 'latest'
) -> str:
  """What a model is, what it was trained on and how well it does.

  which: of the checkpoints; what 'best' was selected by is not reported.
  """
  c, folder = config, pathlib.Path(workdir)
  base = c.model.path
  start = c.train.init or base
  values = []
  # Without the last line, which may be cut off.
  *lines, _ = (folder / 'metrics.jsonl').read_text('utf-8').split('\n')
  for line in map(json.loads, lines):
    if 'eval/em/low' in line and line['step'] < step:
      values = [('while it trained', line['step'] + 1, c.data.eval, line)]
  selected = checks.selecting(c) if which == 'best' else ''
  if c.source.module == simulated.SIMULATED or selected:
    values = []  # its searches were told the golden answers, or chose the step
  for path in sorted(folder.glob('*/eval.json')):
    found = json.loads(path.read_text())
    if found.get('checkpoint') != step:
      continue
    about = files.read_manifest(path.with_name(files.MANIFEST))
    clean = about.get('source') != simulated.SIMULATED
    if clean and selected not in about['sets']:
      values.append((path.parent.name, step, about['sets'], found))
  figures = [
    f'| {name} | {", ".join(asked)} | {at} | {v["eval/em"]:.3f} | '
    f'{v["eval/em/low"]:.3f} to {v["eval/em/high"]:.3f} | '
    f'{v["eval/em/n"]:.0f} |'
    for name, at, asked, v in values
    if 'eval/em/low' in v
  ]
  chat = 'renders one user\nmessage, the question, as in training'
  if build.template(c).calls:
    chat = f"is the\ntokenizer's: give it the prompt of `{c.env.template}` and "
    chat += 'the tools'
  started = json.loads((folder / 'environment.json').read_text())['starts'][-1]

  def sets(part):
    return ', '.join(f'`{k}` ({v.module})' for k, v in part.items()) or 'none'

  return _CARD.format(
    library='peft' if adapter else 'transformers',
    base=f'base_model: {base}\n' if base else '',
    name=c.name,
    step=step,
    start=f'`{start}`' if start else 'random parameters',
    loss=c.algorithm.loss,
    advantage=c.algorithm.advantage,
    reward=', '.join(part.fn for part in c.reward.values()),
    data=sets(c.data.train),
    source=c.source.module,
    chat=chat,
    figures='\n'.join(figures) or '| none in the run folder | | | | | |',
    commit=started['commit'],
  )


def main():
  which, dtype = _CHECKPOINT.value, _DTYPE.value
  adapter, stacked = _ADAPTER.value, _STACKED.value
  export(_WORKDIR.value, _OUT.value, which, dtype, adapter, stacked)
  print(_OUT.value)


if __name__ == '__main__':
  _WORKDIR = command.define_workdir(opens={})
  _OUT = command.define_out(
    None, 'Folder to write; it must not exist.', required=True
  )
  _CHECKPOINT = command.define_checkpoint()
  _DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of the tensors.'
  )
  _ADAPTER = flags.DEFINE_bool(
    'adapter', False, 'Write the adapters alone, as PEFT stores them.'
  )
  _STACKED = flags.DEFINE_bool(
    'stacked_experts',
    False,
    'Write all experts of a layer as one tensor, as transformers 5 holds them; '
    'vLLM may not load these.',
  )
  command.run(main)
