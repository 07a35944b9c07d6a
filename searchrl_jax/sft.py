"""Supervised warm start on scripted traces: the loop of train.py, simpler.

    traces -> trajectories (through the environment) -> batch -> update

  python -m searchrl_jax.sft --config=configs/quickstart.py --workdir=runs/warm

A trace has contents without layout; the environment renders them, so a warm
start and the rollouts after it share layout and parser. Everything that the
policy will write is in the loss, including information that it writes itself.
Tags are tokenised as the policy would sample them (Qwen3 has one token for
`<think>`); contents are always tokenised as text.
"""

import collections
from collections.abc import Callable, Sequence
import contextlib
import functools
import hashlib
import math
import sys
import time

import numpy as np

from retrieval import files
from searchrl_jax import checks, lookup, types
from searchrl_jax.data import core as data
from searchrl_jax.devices import cluster
from searchrl_jax.evaluate import grading
from searchrl_jax.learn import batching, optim
from searchrl_jax.learn.learner import Learner, own_optim
from searchrl_jax.models import parameters
from searchrl_jax.rewards import scores as metrics
from searchrl_jax.rollout.traces import block, turns, written
from searchrl_jax.run import build, command, services
from searchrl_jax.run.session import Session
from searchrl_jax.sources import simulated
from searchrl_jax.sources.core import SourceError
from searchrl_jax.store import folders, progress
from searchrl_jax.text import prompts
from searchrl_jax.text.env import Done, Search, SearchEnv

# Among the contents of a run (`Writer`).
_TRACES = 'the traces: config.sft.data, and what config.source found for it'


def render(trace: data.Trace, env: SearchEnv, sample: int):
  """The trajectory of the environment along a trace; None if it does not fit.

  Raises:
    ValueError: the trace does not follow the protocol.
  """
  recall = env.observation if env.config.information == 'policy' else None
  if trace.question is None:
    ((parts, _),) = turns(trace, env.template, env.observation)
    ids = np.asarray(env.tokenizer.encode_parts(parts), np.int32)
    if len(ids) > env.config.max_tokens:
      return None
    whole = (types.Segment(ids, 'teacher', 'other', train=True),)
    nobody = types.Question('text', '')
    return types.Trajectory(nobody, whole, (), 'answer', sample)
  state, action = env.reset(trace.question)
  notes = iter(trace.notes)
  for parts, passages in turns(trace, env.template, recall):
    if isinstance(action, Done):
      break
    completion = written(parts, env, action)
    if completion is None:
      return None
    state, action = env.step(state, completion)
    if passages is not None and not isinstance(action, Done):
      if state.asked:  # there is no room for what it found
        return None
      if not isinstance(action, Search):
        raise ValueError(
          f'trace of {trace.question.id}: passages after '
          f'{"".join(text for text, _ in parts)!r}, which the environment does '
          'not take for a search'
        )
      # What a trace reads: passages, or the text of a tool.
      text = ''.join(x for x in passages if isinstance(x, str))
      found = () if text else tuple(passages)
      # As if the first of several queries had found all of it.
      first, *others = action.requests
      answers = [types.SearchResult(first, found, text=text)]
      answers += [types.SearchResult(r, ()) for r in others]
      state, action = env.step(state, answers)
      note = next(notes, None)
      if state.asked:
        what = f'trace of {trace.question.id}: the environment asks for '
        lookup.require(
          note, f'{what}{state.asked!r}, and it has no notes', ValueError
        )
        parts = block(state.asked, note, env.template)
        completion = written(parts, env, action)
        if completion is None:
          return None
        state, action = env.step(state, completion)
  if not isinstance(action, Done):
    raise ValueError(f'trace of {trace.question.id} does not end')
  return env.trajectory(state, sample) if action.end == 'answer' else None


def searcher(source, run: Callable):
  """(queries, k) -> passages of each, through the run's own source.

  run: runs a coroutine to its end and returns its result.
  """

  def search(queries: Sequence[str], k: int):
    requests = [types.SearchRequest(q, k) for q in queries]
    found = run(source.search(requests))
    for answer in found:
      if isinstance(answer, types.SearchError):
        raise SourceError(f'{answer.request.query!r}: {answer.message}')
    return [answer.passages for answer in found]

  return search


def examples(config, env, search) -> list[types.Trajectory]:
  """The rendered traces, without those that exceed the limits of config.env.

  env: of config.env; a trace with another template, or another number of
    attempts, gets another one.

  Raises:
    ValueError: more than a tenth does not fit.
  """
  traces = data.load_traces(config.sft.data, config.data, search)
  if config.sft.good_only:
    traces = [t for t in traces if t.good]
  good = ' that is good (config.sft.good_only)' * config.sft.good_only
  lookup.require(traces, f'config.sft.data gives no trace{good}')
  envs = {('', env.config.attempts): env}
  for name, attempts in {(t.template, t.attempts) for t in traces} - {*envs}:
    template = prompts.load(name) if name else env.template
    fields = env.config.copy_and_resolve_references()
    fields.attempts = attempts
    if attempts == 1:
      one_attempt(fields)
    envs[name, attempts] = type(env)(
      env.tokenizer, template, fields, env.prompt_mode, env.k, env.functions
    )
  rendered = []
  with files.progress(len(traces), 'traces', unit='trace') as bar:
    for i, trace in enumerate(traces):
      own = envs[trace.template, trace.attempts]
      rendered.append(render(trace, own, i))
      bar.update()
  fitting = [t for t in rendered if t is not None]
  lookup.require(
    len(fitting) >= 0.9 * len(traces),
    f'{len(traces) - len(fitting)} of {len(traces)} traces do not fit '
    'config.env (max_turns, max_turn_tokens, max_tokens): raise these',
  )
  return fitting


def kinds(trajectories: Sequence[types.Trajectory], env: SearchEnv) -> str:
  """A line that says what the traces teach.

  A blind answer follows a search and is stated by nothing that was found: it
  teaches to guess.
  """
  counts = collections.Counter[str]()
  for t, row in zip(trajectories, grading.score(trajectories, env)):
    searched = t.calls(types.SEARCH)
    found = [s for s in searched if isinstance(s, types.SearchResult)]
    texts = [f'{p.title}\n{p.text}' for s in found for p in s.passages]
    read = metrics.states('\n'.join(texts), [env.answer(t) or ''])
    if not row.searches:
      counts['answer without a search'] += 1
    elif not texts:
      counts['read no passage'] += 1  # of a tool, or of the policy itself
    elif not read:
      counts['answer blindly, with nothing that they found'] += 1
    else:
      right = {0.0: ' otherwise', 1.0: ' right'}.get(row.em, '')
      counts[f'search and answer{right} with what they found'] += 1
  parts = [f'{count} {what}' for what, count in counts.most_common()]
  return ', '.join([f'{len(trajectories)} traces', *parts])


def digest(trajectories: Sequence[types.Trajectory]) -> str:
  """Names the traces, by all token ids."""
  ids = (s.ids.tobytes() for t in trajectories for s in t.trained)
  return hashlib.sha256(b''.join(ids)).hexdigest()[:16]


def order(
  lengths: np.ndarray, rows: int, steps: int, seed: int, kind: str = 'length'
) -> np.ndarray:
  """int [steps, rows]: which traces each update takes.

  kind: 'given': each epoch takes all traces in their order. 'length': in a new
  order, in which traces of similar length (in tokens) share an update, which
  saves padding: windows of 16 updates are sorted by length, then the updates
  are shuffled. An epoch has whole updates: it leaves out the last len % rows
  traces of its order, others in each epoch.

  Raises:
    ConfigError: there is no such kind.
  """
  kinds = 'length', 'given'
  lookup.require(
    kind in kinds, f'config.sft.order={kind!r}: {lookup.near(kind, kinds)}'
  )
  if kind == 'given':
    return np.resize(np.arange(len(lengths)), (steps, rows))
  updates, out = max(len(lengths) // rows, 1), []  # of an epoch
  for epoch in range(math.ceil(steps / updates)):
    rng = np.random.default_rng((seed, epoch))
    every = np.resize(rng.permutation(len(lengths)), updates * rows)
    for window in np.split(every, range(16 * rows, len(every), 16 * rows)):
      window[:] = window[np.argsort(lengths[window], kind='stable')]
    out.append(rng.permutation(every.reshape(-1, rows)))
  return np.concatenate(out)[:steps]


def sft(config, workdir: str) -> dict[str, float]:
  """Warm-starts for config.sft.steps updates; returns the last metrics.

  Raises:
    ConfigError, DataError, ...: before anything is trained.
    NonFinite: the loss is not finite; the batch is in the run folder.
    Stopped: by a signal; the run is saved.
  """
  checks.check_engine(config)
  batching.check(config)
  c = config.sft
  lookup.require(
    config.source.module != simulated.SIMULATED,
    "config.source.module='simulated': a warm start reads real passages; give "
    '--config.source.module=service',
  )
  lookup.require(
    c.steps > 0, f'config.sft.steps={c.steps}: there is nothing to train'
  )
  optim.schedule(c, c.steps, 'config.sft')
  with folders.locked_once(workdir):
    return _sft(config, workdir)


def one_attempt(env) -> None:
  """Changes `config.env` so that the first answer is the last word."""
  if not env.on_answer:
    return
  env.update(attempts=1, on_answer='')
  if not env.on_full:  # nothing else asks for notes
    env.max_note_tokens = 0
    if not env.keep_observations:
      env.max_contexts = 1


def _sft(config, workdir: str) -> dict[str, float]:
  """`sft`, in a folder that this process has."""
  c = config.sft
  build.require_same_run(config)
  tok = build.tokenizer(config, workdir)
  taught = config.copy_and_resolve_references()
  taught.env.train_information = True
  taught.env.train_observations = False  # the policy is not to write them
  env = build.environment(taught, tok)
  with contextlib.ExitStack() as stack:
    with progress.phase('retrieval server', config.log.progress):
      have = stack.enter_context(services.opened(config, workdir))
    search = searcher(have.open_source(), have.loop.run)
    make = functools.partial(examples, config, env, search)
    trajectories = cluster.agree('traces', make)
  if config.log.progress and cluster.main():
    print(kinds(trajectories, env), file=sys.stderr, flush=True)
  traces = digest(trajectories)
  # Each process has searched by itself.
  cluster.require_agreement(functools.partial(dict, traces=traces))

  mesh = build.mesh(config)
  cfg = parameters.model_config(config, tok.vocab_size, tok.needed)
  supervised = own_optim(config, c), c.steps
  learner = Learner(config, cfg, mesh, supervised=supervised)
  lengths = np.array([len(t) for t in trajectories])
  rows = order(lengths, c.rows, c.steps, config.seed, c.order)
  with Session(
    config,
    workdir,
    'sft',
    learner,
    limits=(c.steps, c.seconds, c.save_every),
    contents=build.contents(config, {}) | {_TRACES: traces},
  ) as run:
    run.searched(have.identity)
    run.begin()
    while not run.done:
      begin = time.monotonic()
      with run.writer.timer('update'):
        part = [trajectories[i] for i in rows[run.step]]
        kept, groups = np.ones(len(part), bool), np.arange(len(part))
        how = dict(shards=learner.shards, contexts=config.env.max_contexts)
        (mini,) = batching.make(part, kept, groups, config.batch, **how)
        learned = learner.step(mini)
      seconds = time.monotonic() - begin
      run.check_finite(learned, mini)
      tokens = sum(int(b.lengths.sum()) for b in mini)
      learned = {**learned, 'tokens_per_second': tokens / seconds}
      shown = {'loss': 'sft/nll', 'tok_s': 'sft/tokens_per_second'}
      run.end_step(
        {f'sft/{k}': v for k, v in learned.items()},
        **(shown if (run.step + 1) % max(c.steps // 50, 1) == 0 else {}),
      )
  return run.metrics


def main():
  sft(_CONFIG.value, _WORKDIR.value)


if __name__ == '__main__':
  _CONFIG = command.define_config()
  _WORKDIR = command.define_workdir(opens={'writes': True})
  command.define_cluster()
  command.run(main)
