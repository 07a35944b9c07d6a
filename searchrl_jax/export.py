"""Writes the weights of a run as a Hugging Face checkpoint.

  python -m searchrl_jax.export --workdir=runs/mine --out=exported

transformers, vLLM and --config.model.path can load the folder.
"""

from absl import flags

from searchrl_jax.models import pretrained
from searchrl_jax.run import build, command


def export(workdir: str, out: str, which: str, dtype: str) -> None:
  """Exports checkpoint `which` ('latest', 'best' or a step) in `dtype`."""
  config = build.load_config(workdir)
  tok = build.tokenizer(config, workdir)
  cfg = build.model_config(config, tok.vocab_size)
  params = build.restore_params(config, workdir, cfg, build.mesh(config), which)
  if config.model.path:
    like = pretrained.read_json(build.local(config.model.path))
  else:
    like = {**config.model.arch.to_dict(), 'eos_token_id': tok.eos_ids[0]}
  pretrained.save(
    out, cfg, params, f'{workdir}/{build.TOKENIZER}', dtype=dtype, like=like
  )


def main():
  export(_WORKDIR.value, _OUT.value, _CHECKPOINT.value, _DTYPE.value)
  print(_OUT.value)


if __name__ == '__main__':
  _WORKDIR = command.define_workdir()
  _OUT = flags.DEFINE_string(
    'out', None, 'Folder to write; it must not exist.', required=True
  )
  _CHECKPOINT = command.define_checkpoint()
  _DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of the tensors.'
  )
  command.run(main)
