"""A hook of mkdocs: the site has the files of the repository at their paths.

A link that leads to a file in a checkout so leads to it in the site, and pages
outside docs/ need no copy. What pages link to and is no page (a config, a
script, a picture) is copied.
"""

import pathlib
import re
from urllib.parse import unquote

import griffe
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r'\]\(([^)\s#]+)')


def pages() -> list[pathlib.Path]:
  folders = ('docs', 'experiments', 'retrieval')
  below = (p for folder in folders for p in (ROOT / folder).rglob('*.md'))
  return [*ROOT.glob('*.md'), *below]


def on_files(files: Files, config) -> Files:
  """Replaces the files of docs/ by those of the repository."""
  found = {*pages(), *(ROOT / 'docs').rglob('*')}
  for page in pages():
    for link in LINK.findall(page.read_text()):
      if ':' not in link:
        found.add((page.parent / unquote(link)).resolve())
  theme = [f for f in files if f.src_dir != config.docs_dir]
  named = {p.relative_to(ROOT).as_posix(): p for p in found if p.is_file()}
  return Files(
    theme
    + [
      File.generated(config, name, abs_src_path=str(named[name]))
      for name in sorted(named)
    ]
  )


class Examples(griffe.Extension):
  """Markdown wants four spaces before an example; our docstrings have two."""

  def on_instance(self, *, obj: griffe.Object, **_) -> None:
    if obj.docstring:
      obj.docstring.value = re.sub(
        r'(?<=\n\n)(?:  .*(?:\n|$))+',
        lambda example: (
          re.sub('^', '  ', example[0].rstrip(), flags=re.M) + '\n'
        ),
        obj.docstring.value,
      )
