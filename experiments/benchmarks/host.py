"""Host time, memory and disk of a training step at full size.

  python -m experiments.benchmarks.host --out=host.json

Everything that a step of searchrl_jax/train.py does outside the model runs
here by the same functions, in the same order: rollouts (environment, parser,
observations), rewards, batches, advantages, signs of collapse, records. Only
the model and the retrieval server are scripts: the engine hands out
completions made beforehand, the source passages chosen beforehand, and the
trainer's log-probs are the engine's with the noise of bfloat16. The sizes are
those of configs/search_r1.py:version=v0.2 (512 questions x 5 trajectories of
about 4k tokens, of which the policy writes half).

Text is real where the data folder exists (`--data_dir`, SEARCHRL_DATA or
../shared/data): thoughts are cut from its passages at random places, and each
search finds three passages that hardly another search finds, which is the
worst case for the disk. Else it is generated, and `host_bytes_per_token` says
nothing about real text.

CPU seconds are of all threads and of the whole step (`host_seconds`). What the
loop waits for (`host_wait_seconds`) is the wall time between the end of the
rollouts and the next step's, without the model: neither what the environment
does for a trajectory while the others are sampled, nor what the writer's
thread does meanwhile. Memory is the largest resident size of the step beyond
that after the rollouts, when all trajectories are there.
"""

from collections.abc import Iterator
import contextlib
import pathlib
import tempfile
import time

from absl import flags
from ml_collections import ConfigDict
import numpy as np

from configs import search_r1
from experiments import common
from experiments.benchmarks import harness, memory
from retrieval import corpus as corpora
from searchrl_jax.data import core as data
from searchrl_jax.devices.signals import Loop
from searchrl_jax.engines.core import Completion
from searchrl_jax.evaluate import health
from searchrl_jax.learn import batching, credit
from searchrl_jax.rewards import core as rewards
from searchrl_jax.rollout import collector
from searchrl_jax.rollout.chains import rollout
from searchrl_jax.rollout.core import trajectory_seed
from searchrl_jax.run import command
from searchrl_jax.store.writer import Writer
from searchrl_jax.text import prompts, tokenizer
from searchrl_jax.text.env import SearchEnv
from searchrl_jax.types import Passage, Question, SearchResult

SEARCHES = 5  # of each trajectory
THOUGHT = 280, 440  # tokens of a thought, from and to


def load_passages(folder: pathlib.Path | None) -> list[tuple[str, str]]:
  """(title, text) of the data folder's corpus, or of random words.

  Of at most 100 words, as wiki-18 has them.
  """
  if folder is not None:
    found = corpora.iter_documents(folder / 'corpus.jsonl.gz')
    return [
      (title, ' '.join(words[at : at + 100]))
      for title, text in (corpora.split_contents(p.contents) for p in found)
      for words in [text.split()]
      for at in range(0, len(words), 100)
    ]
  rng = np.random.default_rng(0)
  letters = np.array(list('abcdefghijklmnopqrstuvwxyz'))
  words = [''.join(rng.choice(letters, n)) for n in rng.integers(2, 10, 20000)]
  order = (rng.zipf(1.3, (20000, 100)) - 1) % len(words)
  return [
    (' '.join(words[i] for i in row[:3]), ' '.join(words[i] for i in row))
    for row in order
  ]


class Script:
  """What the policy says, what is found, and what the trainer scores."""

  def __init__(self, tok, template, passages, questions, group):
    rng = self._rng = np.random.default_rng(0)
    words = ' '.join(text for _, text in passages).split()
    ids = np.array(tok.encode(' '.join(words)), np.int32)
    self._passages = [
      Passage(str(i), title, text, 1.0)
      for i, (title, text) in enumerate(passages)
    ]
    self.questions, self._turns, self._found = [], {}, {}

    think = tok.encode_template(template.think[0])

    def some(n):
      at = int(rng.integers(len(words) - n))
      return ' '.join(words[at : at + n])

    for q in range(questions):
      answer = some(2)
      self.questions.append(Question(f'q{q}', some(12), (answer,), 'benchmark'))
      for sample in range(group):
        said = []
        for turn in range(SEARCHES + 1):
          n = int(rng.integers(*THOUGHT))
          at = int(rng.integers(len(ids) - n))
          last = turn == SEARCHES
          opening, closing = template.answer if last else template.search
          act = some(2 if last else 8)
          if last and rng.random() < 0.4:
            act = answer
          end = f'{template.think[1]}\n{opening}{act}{closing}'
          parts = think, ids[at : at + n], tok.encode_template(end)
          said.append((np.concatenate(parts).astype(np.int32), closing))
          self._found[f'q{q}/solver/{sample}', turn] = rng.integers(
            len(passages), size=3
          )
        name = trajectory_seed(0, 0, f'q{q}', 'solver', sample)
        self._turns[name] = [
          Completion(x, self._logps(len(x)), stop, np.zeros(len(x), np.int32))
          for x, stop in said
        ]

  def _logps(self, n: int) -> np.ndarray:
    """Most tokens are all but certain, some are not."""
    return (
      -np.exp(self._rng.normal(-3.0, 2.5, n)).clip(0, 20).astype(np.float32)
    )

  def outputs(self, batches) -> list[list[np.ndarray]]:
    """The engine's log-probs with the noise of another program."""
    return [
      [
        np.where(
          b.mask, b.behaviour_logps * self._rng.normal(1, 0.02, b.mask.shape), 0
        ).astype(np.float32)
        for b in mini
      ]
      for mini in batches
    ]

  # The contracts of an engine and of a source.

  def open(self, prompt):
    del prompt
    return [0]

  def fork(self, handle):
    return list(handle)

  def capacity(self, tokens):
    del tokens
    return len(self._turns)  # all trajectories

  def append(self, handle, ids):
    pass

  def close(self, handle):
    pass

  async def generate(self, handle, sampling):
    handle[0] += 1
    said, n = self._turns[sampling.seed][handle[0] - 1], sampling.max_tokens
    if len(said.ids) <= n:
      return said
    return Completion(said.ids[:n], said.logps[:n], 'length', said.versions[:n])

  async def search(self, requests):
    return [
      SearchResult(
        r, tuple(self._passages[i] for i in self._found[r.trajectory, r.turn])
      )
      for r in requests
    ]


class Stages:
  """CPU and wall seconds by name, and the peak of the resident memory.

  Attributes:
    rows: of each stage, in order; blocks of one name add up.
  """

  def __init__(self):
    self.rows = {}
    memory.restart_peak()

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    wall, cpu = time.monotonic(), time.process_time()
    yield
    blank = {'stage': name, 'cpu_seconds': 0.0, 'wall_seconds': 0.0}
    row = self.rows.setdefault(name, blank)
    row['cpu_seconds'] += time.process_time() - cpu
    row['wall_seconds'] += time.monotonic() - wall

  def total(self, what: str) -> float:
    return sum(row[what] for row in self.rows.values())


def step(config, env, tok, script, questions, writer, loop) -> dict:
  """One step, as searchrl_jax/train.py does it around the model."""
  stage = Stages()
  with stage('rollout'):
    groups, stats = loop.run(
      rollout(
        questions,
        env=env,
        engine=script,
        source=script,
        config=config.rollout,
        seed=0,
        step=0,
      )
    )
  held = memory.of('VmRSS')
  with stage('reward'):
    context = rewards.RewardContext(0, env, tok)
    reward = loop.run(rewards.combine(config.reward, groups, context))
  with stage('batch'):
    batch = batching.of_step(groups, reward, config, shards=1, seed=(0, 0))
  batches = batch.minibatches
  old = script.outputs(batches)
  with stage('credit'):
    ref = [None] * len(batches)
    given = credit.assign(
      config, batch, old=old, ref=ref, values=None, greedy=None
    )
  for mini in batches:
    with stage('advantages'):
      batching.set_advantages(mini, given.advantages)
  with stage('health'):
    metrics = {
      **stats.metrics(),
      **health.signs(
        groups, env, batch.returns, reward.valid, match=config.eval.match
      ),
      **collector.staleness(groups, 0, 0),
    }
  with stage('write'):
    writer.trajectories(
      0,
      groups,
      reward,
      kept=batch.kept,
      advantages=given.advantages,
      trainer_logps=batching.unpacked(batches, old, batch.masks),
      every=config.log.trajectories_every,
    )
    writer.write(0, metrics)
  waited = stage.total('wall_seconds') - stage.rows['rollout']['wall_seconds']
  with stage('background'):
    writer.close()
  tokens = sum(len(t) for t in batch.trajectories)
  files = writer.folder.glob('trajectories*/*')
  return {
    'stages': list(stage.rows.values()),
    'trajectories': len(batch.trajectories),
    'tokens': tokens,
    'policy_tokens': sum(
      len(s.ids)
      for t in batch.trajectories
      for s in t.segments
      if s.author == 'policy'
    ),
    'cpu_seconds': stage.total('cpu_seconds'),
    'wait_seconds': waited,
    'memory_bytes': max(memory.of('VmHWM') - held, 0),
    'disk_bytes': sum(f.stat().st_size for f in files),
    'health': {k: v for k, v in metrics.items() if k.startswith('health/')},
  }


def measure() -> list[dict]:
  config = search_r1.get_config('model=none,version=v0.2')
  config.model.path = ''
  config.log.tensorboard = False
  config.env.max_turns = SEARCHES
  config.rollout.questions = _QUESTIONS.value
  config.algorithm.kl = 'none'  # the reference is the model's matter
  folder = data.data_dir(config.data)
  config.data.train = config.data.eval = ConfigDict()
  passages = load_passages(pathlib.Path(folder) if folder else None)
  with tempfile.TemporaryDirectory() as scratch:
    if folder:
      tok = tokenizer.load(f'{folder}/qwen_tokenizer')
    else:
      texts = (text for _, text in passages)
      tok = tokenizer.train_bpe(texts, 32000, f'{scratch}/bpe')
    template = prompts.load(config.env.template)
    env = SearchEnv(tok, template, config.env, 'template', config.source.k)
    script = Script(
      tok, template, passages, _QUESTIONS.value, config.rollout.group
    )
    # One question first: what is imported once is not a step's matter.
    for questions in script.questions[:1], script.questions:
      writer = Writer(f'{scratch}/{len(questions)}', config, step=0, steps=1)
      with Loop() as loop:
        found = step(config, env, tok, script, questions, writer, loop)
  print(common.table(found['stages']))
  return [{'text': 'real' if folder else 'generated', **found}]


def bars(rows) -> list[dict]:
  [row] = rows
  return [
    common.bar(f'host_{name}', value, bar, at_most=True)
    for name, value, bar in (
      ('seconds', row['cpu_seconds'], 20),
      ('wait_seconds', row['wait_seconds'], 5),
      ('memory_gb', row['memory_bytes'] / 1e9, 1),
      ('bytes_per_token', row['disk_bytes'] / row['tokens'], 5),
    )
  ]


if __name__ == '__main__':
  command.define_data_dir()
  _QUESTIONS = flags.DEFINE_integer(
    'questions', 512, 'Questions of the step, 5 trajectories each.', 1
  )
  harness.run('host', measure, bars)
