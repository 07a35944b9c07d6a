"""The seven sets that Search-R1 evaluates on, for any checkpoint.

  python -m searchrl_jax.evaluate --out=runs/seven \\
    --config=configs/seven.py:model=/path/to/hf,layout=flashrag \\
    --data_dir=FOLDER --config.source.url=http://127.0.0.1:8000

evaluates 51,713 questions, greedily; `n=500` draws 500 questions from each set.
The server holds the passages (retrieval/README.md). Arguments:

  model     a Hugging Face folder or name; '' = configs/wiki_nq.py's small one
  template  see configs/wiki_nq.py
  layout    flashrag   NAME/SPLIT.jsonl, as FlashRAG publishes them
            hub        the same files, from the Hugging Face hub
            search_r1  Search-R1's test.parquet or train.parquet
            tfds       NAME/1.0.0, ArrayRecord that TFDS prepared
  folder    their path below the data folder ('a/b/')
  split     '' = test if it exists, else dev, as in Search-R1; train, dev, test:
            only the sets that have this split
  n         questions drawn from each set; 0 = all

2WikiMultihopQA is the set `two_wiki`, because the name of a flag cannot begin
with a digit: --config.data.eval.two_wiki.n=100. The number of hops is known for
HotpotQA, 2WikiMultihopQA and MuSiQue, whose records contain it.
docs/evaluation.md explains the figures. This config trains nothing, and
no checkpoint is selected.
"""

from ml_collections import ConfigDict

from configs import wiki_nq
from searchrl_jax import schema

# Splits that FlashRAG publishes; the last is the one evaluated on.
SPLITS = {
  'nq': ('train', 'dev', 'test'),
  'triviaqa': ('train', 'dev', 'test'),
  'popqa': ('test',),
  'hotpotqa': ('train', 'dev'),
  '2wikimultihopqa': ('train', 'dev'),
  'musique': ('train', 'dev'),
  'bamboogle': ('test',),
}
SMALLEST = {'bamboogle': 125}  # questions, where `n` may be more
HUB = 'hf://datasets/RUC-NLPIR/FlashRAG_datasets/'


def get_config(arg=None):
  a = schema.parse_arg(
    arg, model='', template='', layout='flashrag', folder='', split='', n=0
  )
  c = wiki_nq.get_config(f'model={a.model},template={a.template}')
  c.name = 'seven'
  c.source.corpus = ''
  c.data.train = ConfigDict()
  c.data.eval = sets(a.layout, a.split, folder=a.folder, n=a.n)
  return c


def sets(
  layout: str, split: str = '', *, names=tuple(SPLITS), folder='', n: int = 0
) -> ConfigDict:
  """config.data.eval (or train) for sets of the seven, all fields written.

  Args:
    layout, split, folder, n: see the top of this file.
    names: which, as in SPLITS; with a split, those of them that have it.

  Raises:
    ValueError: an unknown layout or split, or none of the sets has it.
  """
  if layout not in LAYOUTS:
    raise ValueError(f'layout={layout!r}: one of {", ".join(LAYOUTS)}')
  known = SPLITS
  if layout == 'search_r1' and split != 'train':  # its file has the last ones
    known = {name: every[-1:] for name, every in SPLITS.items()}
  out = ConfigDict(
    {
      'two_wiki' if name == '2wikimultihopqa' else name: dict(
        LAYOUTS[layout](folder, name, split or SPLITS[name][-1]),
        n=min(n, SMALLEST.get(name, n)),
        seed=0,
      )
      for name in names
      if not split or split in known[name]
    }
  )
  if not out:
    raise ValueError(
      f'split={split!r}: none of {", ".join(names)} has it; train, dev, test '
      "or ''"
    )
  return out


def _flashrag(folder, name, split):
  return dict(
    module='jsonl',
    path=f'{folder}{name}/{split}.jsonl',
    layout='flashrag',
    source='',
    hops=0,
    split='',
  )


def _search_r1(folder, name, split):
  # One file contains all test questions, whatever split they came from.
  file = 'train' if split == 'train' else 'test'
  return dict(
    module='parquet',
    path=f'{folder}{file}.parquet',
    source=name,
    hops=0,
    split='',
  )


def _tfds(folder, name, split):
  return dict(
    module='tfds', path=f'{folder}{name}/1.0.0', split=split, layout='flashrag'
  )


LAYOUTS = {
  'flashrag': _flashrag,
  'hub': lambda folder, *names: _flashrag(HUB + folder, *names),
  'search_r1': _search_r1,
  'tfds': _tfds,
}
