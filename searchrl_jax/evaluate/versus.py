"""Compares policies of any recipes on one manifest.

  python -m searchrl_jax.evaluate.versus runs/search_r1/arms/grpo/0/run \\
    runs/ssrl/arms/grpo/0/run --out=runs/versus [--on=RUN]

Every run folder is evaluated on the held-out questions, the corpus and the
config.eval of the first (or of --on); then each is compared with the first,
question by question (evaluate/compare.py). A run keeps its own model,
tokenizer, template, limits and number of passages per query; its judge is left
out, and an engine in process stands for servers that it named. All searches are
real, also those of policies that write their own information (SSRL) or that
were trained with a simulator (ZeroSearch). --own_searches lets SSRL's policies
write their information as in training. Questions without a corpus (TTRL's
mathematics) are answered without searches.

The vocabulary of a small policy is that of its own world. The recipes' worlds
share some names; a policy cannot answer questions with words that it cannot
read.
"""

from collections.abc import Sequence
import re

from absl import flags

from searchrl_jax import lookup
from searchrl_jax.evaluate import compare, files
from searchrl_jax.evaluate import policy as evaluate
from searchrl_jax.run import build, command, services
from searchrl_jax.store import records

# Fields of config.data that determine questions and corpus.
ASKED = ('dir', 'world_module', 'world_seed', 'world', 'eval')


def config_for(workdir: str, on, own_searches: bool):
  """The config of a run, with the questions of the config `on`."""
  config = build.load_config(workdir)
  build.any_mesh(config)
  for name in ASKED:
    config.data[name] = on.data[name]
  config.eval = on.eval
  for name in ('module', 'url', 'corpus', 'dials'):
    config.source[name] = on.source[name]
  # em and f1 need no judge. Servers that it named may serve a run, or be gone.
  config.judge.url = ''
  if config.engine.url:
    config.engine.update(module='jax', url='', sync='full')
  if config.source.module == 'none':
    config.env.max_turns = 0
  elif config.env.information == 'policy' and not own_searches:
    config.env.real_searches = -1
  return config


def versus(
  workdirs: Sequence[str], on: str, out: str, own_searches: bool, url: str
) -> list[str]:
  """Evaluates run folders on the questions of `on`; returns OUT's folders.

  url: of a server of that corpus; '' starts one for all folders.
  """
  asked = build.load_config(on).copy_and_resolve_references()
  asked.source.url = url or asked.source.url
  searched = asked.source.url or asked.source.corpus
  asked.source.module = 'service' if searched else 'none'
  folders = []
  with services.retrieval(asked, out) as served:
    asked.source.url = served
    for n, workdir in enumerate(workdirs):
      name = re.sub(r'\W+', '_', workdir).strip('_')
      folders.append(f'{out}/{n}_{name}')
      print(f'[{n + 1}/{len(workdirs)}] {workdir}', flush=True)
      evaluate.evaluate(
        config_for(workdir, asked, own_searches),
        workdir,
        folders[-1],
        manifest=f'{folders[0]}/{files.MANIFEST}' if n else '',
      )
  return folders


def main():
  workdirs = _RUNS.value
  lookup.require(
    len(workdirs) >= 2,
    'give two or more run folders; the first is the baseline',
  )
  on, out = _ON.value or workdirs[0], _OUT.value
  folders = versus(workdirs, on, out, _OWN.value, _URL.value)
  how = {'scores': ('em', 'f1'), 'resamples': 10_000, 'seed': 0}
  found = compare.against(folders, **how)
  for comparison in found:
    compare.show(comparison)
  records.write_json(f'{out}/versus.json', found)


if __name__ == '__main__':
  _RUNS = flags.DEFINE_list(
    'runs', [], 'Run folders; the flag name is optional. First: the baseline.'
  )
  _ON = flags.DEFINE_string(
    'on', '', 'Run folder whose questions are used; default: the first.'
  )
  _OUT = flags.DEFINE_string('out', None, 'Folder to write.', required=True)
  _URL = flags.DEFINE_string('url', '', 'A server of that corpus, if one runs.')
  _OWN = flags.DEFINE_bool(
    'own_searches', False, "SSRL's policies write their own information."
  )
  command.define_data_dir()
  command.run(main, positional=_RUNS)
