"""Writes the weights of a run as a Hugging Face checkpoint.

  python -m searchrl_jax.export --workdir=runs/mine --out=exported

transformers, vLLM and --config.model.path can load the folder. Adapters
(config.models.lora) are merged into the weights; with --adapter they are
written alone, for PEFT, vLLM and --config.models.lora.path.
"""

from absl import flags

from searchrl_jax.models import lora, pretrained
from searchrl_jax.run import build, command, lookup, parameters


def export(
  workdir: str, out: str, which: str, dtype: str, adapter: bool = False
) -> None:
  """Exports checkpoint `which` ('latest', 'best' or a step) in `dtype`.

  adapter: its adapters alone, as PEFT stores them.

  Raises:
    ConfigError: the run has no adapters.
    FileExistsError: `out` exists.
  """
  config = build.load_config(workdir)
  tok = build.tokenizer(config, workdir)
  cfg = parameters.model_config(config, tok.vocab_size)
  params = parameters.restore(config, workdir, cfg, build.mesh(config), which)
  if adapter:
    message = f'--adapter: {workdir} has none (config.models.lora.rank=0)'
    lookup.require(cfg.lora, message)
    adapters, _ = lora.split(cfg, params)
    # What the adapters belong to: a run that it started from, or the model.
    model = config.train.init or config.model.path
    lora.save(out, cfg, adapters, dtype=dtype, model=model)
    return
  cfg, params = lora.base(cfg), lora.merge(cfg, params)
  if config.model.path:
    like = pretrained.read_json(parameters.local(config.model.path))
  else:
    like = {**config.model.arch.to_dict(), 'eos_token_id': tok.eos_ids[0]}
  pretrained.save(
    out, cfg, params, f'{workdir}/{build.TOKENIZER}', dtype=dtype, like=like
  )


def main():
  which, dtype = _CHECKPOINT.value, _DTYPE.value
  export(_WORKDIR.value, _OUT.value, which, dtype, _ADAPTER.value)
  print(_OUT.value)


if __name__ == '__main__':
  _WORKDIR = command.define_workdir(opens={})
  _OUT = flags.DEFINE_string(
    'out', None, 'Folder to write; it must not exist.', required=True
  )
  _CHECKPOINT = command.define_checkpoint()
  _DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of the tensors.'
  )
  _ADAPTER = flags.DEFINE_bool(
    'adapter', False, 'Write the adapters alone, as PEFT stores them.'
  )
  command.run(main)
