"""Hard questions: several hops, or many documents to find.

  python -m searchrl_jax.evaluate --out=runs/tau2 \\
    --config=configs/hard.py:questions=tau2,model=/path/to/hf
  python -m searchrl_jax.train --workdir=runs/hops --config=configs/methods/\\
contexts.py:base=hard,model=/path/to/hf,kind=summary,limit=2048

for a model that follows instructions. docs/hard_questions.md tells of each set,
and of its baselines; nothing was trained at this size here. No checkpoint is
selected. Arguments:

  questions  hops: HotpotQA, 2WikiMultihopQA and MuSiQue, 2 to 4 hops, of
             qa_train.jsonl.gz and qa_dev.jsonl.gz in config.data.dir
             tau2: the documents that a bank's customer needs; to evaluate
             browsecomp: BrowseComp-Plus; to evaluate
  folder     of browsecomp: a clone with decrypted questions and corpus.jsonl
  model, template, size  see configs/wiki_nq.py
"""

import pathlib

from configs import wiki_nq
from configs.methods import core
from searchrl_jax import schema
from searchrl_jax.text import prompts

_HARD = pathlib.Path(__file__).parents[1] / 'experiments/hard'
TEMPLATE = _HARD / 'browsecomp.json'


def get_config(arg=None):
  kinds = {'hops': _hops, 'tau2': _tau2, 'browsecomp': _browsecomp}
  usual = dict(questions='hops', folder='', model='', template='', size='')
  a = schema.parse_arg(arg, **usual)
  c = wiki_nq.get_config(f'model={a.model},template={a.template},size={a.size}')
  c.name = 'hard'
  core.chosen('questions', a.questions, kinds)(c, a)
  c.env.template = a.template or c.env.template
  return c


def _hops(c, a):
  fields = c.data.train.nq.to_dict()

  def sets(path, names):
    return {n: dict(fields, path=path, source=f'{n}*') for n in names}

  c.data.train = sets('qa_train.jsonl.gz', ('hotpot', 'musique'))
  c.data.eval = sets('qa_dev.jsonl.gz', ('hotpot', '2wiki', 'musique'))
  c.env.max_turns = 6
  c.rollout.questions = min(c.rollout.questions, 64)  # of 200


def _tau2(c, a):
  tasks = dict(path='tau2_banking_tasks.jsonl.gz', layout='tau2', n=0)
  _evaluated(c, 'tau2', dict(tasks, module='jsonl'))
  c.source.corpus = 'tau2_banking_corpus.jsonl.gz'
  c.env.template = 'documents'
  most = prompts.load(a.template or c.env.template).max_queries
  what = f'config argument template={a.template!r}: {most} searches in a turn'
  schema.lookup.require(most == 1, f'{what}, env.max_turns is no budget; use 1')
  c.env.max_turns, c.env.max_turn_tokens = 8, 256
  c.env.max_observation_tokens = 1024
  c.env.max_tokens = c.engine.max_len = 16_384


def _browsecomp(c, a):
  schema.lookup.require(a.folder, 'config argument folder: of BrowseComp-Plus')
  folder = str(pathlib.Path(a.folder).expanduser().resolve())
  asked = dict(module='experiments.hard.browsecomp', path=folder, n=0)
  _evaluated(c, 'browsecomp', asked)
  corpus = f'{folder}/corpus.jsonl'
  c.source.update(module='experiments.hard.search', corpus=corpus, k=5)
  c.tools.get_document = dict(module='open', found=False, chars=4000)
  c.env.template = str(TEMPLATE)
  c.env.max_turns, c.env.max_turn_tokens = 30, 1024
  c.env.max_observation_tokens = 3072
  c.env.max_tokens = c.engine.max_len = 32_768


def _evaluated(c, name, fields):
  c.data.train, c.data.eval = {}, {name: fields}
  c.engine.slots = 16  # sequences are long
