"""The model and the data of the experiment in a folder that can be carried.

  python -m experiments.gemma.carry --pack=runs/gemma/carried --gguf=FILE \\
    --small=runs/gemma/small
  python -m experiments.gemma.carry --unpack=runs/gemma/carried --out=FOLDER

A machine without network gets the small version as the GGUF file quantises it:
the blocks of its layers, and the rows of its embedding that `prune` kept (107
MB in place of 531). `unpack` makes the Hugging Face folder that `fetch` and
`prune` make, bit for bit. The weights are two files, a.safetensors and
b.safetensors of at most 60 MB, which may travel apart.
"""

import json
import pathlib
import shutil

from absl import flags
import numpy as np
import safetensors
import safetensors.numpy

from searchrl_jax import lookup, prune, schema
from searchrl_jax.data import core as data
from searchrl_jax.models import gguf, pretrained
from searchrl_jax.run import command
from searchrl_jax.store import folders

HALVES = 'a.safetensors', 'b.safetensors'
DATA = 'corpus.jsonl.gz', 'qa_train.jsonl.gz', 'qa_dev.jsonl.gz'
CLOSED_BOOK = 'closed_book.jsonl'  # of experiments.gemma.run, if it is given
_MODEL = 'model'  # the small version's files but its weights


def pack(
  file: str,
  small: pathlib.Path,
  folder: str,
  out: pathlib.Path,
  closed_book: str = '',
) -> None:
  """Writes the folder.

  Args:
    file: GGUF, of the whole model.
    small: its small version, by `prune`.
    folder: of the data.
    closed_book: answers from memory, which start=hesitant needs; '' = none.

  Raises:
    ConfigError: the two do not belong together.
  """
  lookup.require(not out.exists(), f'{out} exists; remove it')
  ids = np.array(json.loads((small / prune.KEPT).read_text())['ids'])
  _, tensors = gguf.read(pathlib.Path(file))
  sizes = [0, 0]
  halves: tuple[dict[str, np.ndarray], ...] = ({}, {})
  kinds: tuple[dict[str, str], ...] = ({}, {})
  for name, tensor in sorted(tensors.items(), key=lambda x: -x[1].n_bytes):
    raw = np.asarray(tensor.data)
    raw = raw[ids] if name == gguf.EMBEDDING else raw
    half = int(sizes[1] < sizes[0])
    kinds[half][name] = json.dumps([int(tensor.tensor_type), str(raw.dtype)])
    halves[half][name] = np.ascontiguousarray(raw).view(np.uint8)
    sizes[half] += raw.nbytes
  with folders.beside(out) as part:
    shutil.copytree(
      small, part / _MODEL, ignore=shutil.ignore_patterns('*.safetensors')
    )
    for name, own, about in zip(HALVES, halves, kinds):
      safetensors.numpy.save_file(own, part / name, about)
    for name in DATA:
      shutil.copy(pathlib.Path(folder) / name, part / name)
    if closed_book:
      shutil.copy(closed_book, part / CLOSED_BOOK)
    part.rename(out)


def unpack(folder: pathlib.Path, out: pathlib.Path) -> None:
  """Writes the small version's Hugging Face folder.

  Raises:
    FileNotFoundError: one of the halves did not arrive.
    FileExistsError: `out` exists.
  """
  stored = {}
  for name in HALVES:
    lookup.require(
      (folder / name).is_file(),
      f'{folder / name} is missing: bring both halves',
      FileNotFoundError,
    )
    file = safetensors.safe_open(folder / name, 'np')
    for key, about in file.metadata().items():
      stored[key] = file, *json.loads(about)
  cfg = pretrained.read_config(folder / _MODEL)
  table = pretrained.tensor_table(cfg)

  def read(name: str) -> np.ndarray:
    theirs = gguf.name_of(table[name])
    file, kind, dtype = stored[theirs]
    raw = file.get_tensor(theirs).view(dtype)
    return gguf.weights(cfg, table[name], raw, kind)

  def write(target: pathlib.Path) -> None:
    shutil.copytree(folder / _MODEL, target, dirs_exist_ok=True)

  config = pretrained.read_json(folder / _MODEL)
  pretrained.write_folder(out, config, table, read, 'float32', write)


def main():
  if _PACK.value:
    folder = data.data_dir(schema.base().data)
    small = pathlib.Path(_SMALL.value)
    out = pathlib.Path(_PACK.value)
    pack(_GGUF.value, small, folder, out, _CLOSED_BOOK.value)
    size = sum(x.stat().st_size for x in out.rglob('*') if x.is_file())
    print(f'{_PACK.value}: {size / 1e6:.0f} MB')
  if _UNPACK.value:
    unpack(pathlib.Path(_UNPACK.value), pathlib.Path(_OUT.value))


if __name__ == '__main__':
  command.define_data_dir()
  _PACK = flags.DEFINE_string('pack', '', 'The folder to write.')
  _GGUF = flags.DEFINE_string('gguf', '', 'The whole model.')
  _SMALL = flags.DEFINE_string('small', '', 'Its small version.')
  _CLOSED_BOOK = flags.DEFINE_string(
    'closed_book', '', 'Answers from memory, for start=hesitant.'
  )
  _UNPACK = flags.DEFINE_string('unpack', '', 'The folder to read.')
  _OUT = command.define_out('', 'The Hugging Face folder to write.')
  command.run(main)
