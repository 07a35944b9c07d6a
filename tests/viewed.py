"""Run folders as training leaves them, without a model: for read and view."""

import io
import pathlib

import numpy as np

from searchrl_jax.rewards import scores
from searchrl_jax.store import records, writer
from searchrl_jax.text import tokenizer as tokenizers
from searchrl_jax.types import (
  Passage,
  Question,
  Rewards,
  SearchRequest,
  SearchResult,
  Segment,
  Trajectory,
)
from searchrl_jax.worlds import microworld
from tests import tiny

SEED = 3


def config(**rollout):
  c = tiny.config()
  c.rollout.update(rollout)
  return c


def questions(count: int) -> list[tuple[Question, Passage]]:
  """Questions of a generated world, each with a passage that answers it."""
  world = microworld.generate(SEED, **tiny.WORLD)
  by_id = {p['id']: p['contents'].split('\n') for p in world.corpus}
  out = []
  for q in world.questions['train'][:count]:
    title, text = by_id[q.supporting[-1]]
    out.append((q, Passage(q.supporting[-1], title.strip('"'), text, 1.5)))
  return out


def tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
  """A byte-level BPE, which any text can be encoded with."""
  texts = [f'Question: {q.text}\n{p.text}' for q, p in questions(30)]
  return tokenizers.train_bpe(texts, 600, folder / records.TOKENIZER)


def segments(tok, parts, rng, version: int = 0) -> tuple[Segment, ...]:
  """Segments of (author, kind, text); eos after the last of the policy's."""
  out = []
  for n, (author, kind, text) in enumerate(parts, 1):
    ids = tok.encode(text) + [*tok.eos_ids[:1]] * (n == len(parts))
    ids, own = np.array(ids, np.int32), author == 'policy'
    sampled = dict(
      train=True,
      logps=-rng.gamma(0.4, 1.0, len(ids)).astype(np.float32),
      versions=np.full(len(ids), version, np.int32),
    )
    out.append(Segment(ids, author, kind, **(sampled if own else {})))
  return tuple(out)


def attempt(tok, question, passage, rng, *, sample=0, version=0, padding=''):
  """A trajectory that searches once; half of them answer right.

  padding: further text of the observation.
  """
  name = question.text.split(' of ')[-1].strip(' ?')
  right = rng.random() < 0.5
  answer = question.answers[0] if right else 'nobody knows'
  parts = (
    ('prompt', 'other', f'Question: {question.text}\n'),
    ('policy', 'think', f'<think> find {name} </think>'),
    ('policy', 'search', f'<search> {name} </search>'),
    (
      'environment',
      'information',
      f'\n<information> {passage.text}{padding} </information>\n',
    ),
    ('policy', 'think', '<think> the passage says it </think>'),
    ('policy', 'answer', f'<answer> {answer} </answer>'),
  )
  request = SearchRequest(name, 1, question, turn=0)
  return Trajectory(
    question,
    segments(tok, parts, rng, version),
    (SearchResult(request, (passage,), 0.02),),
    'answer',
    sample,
    turns=2,
    seconds=0.5,
  )


def write_run(
  folder: pathlib.Path,
  *,
  steps=3,
  count=4,
  group=4,
  seed=0,
  asked=None,
  padding='',
  open_=False,
):
  """Writes a run; returns its tokenizer, or (open_) also the open writer.

  Args:
    folder: of the run.
    steps: with trajectories and metrics.
    count, group: questions of each step, samples of each question.
    seed: of what was sampled.
    asked: questions with passages; default: `questions`.
    padding: see `attempt`.
    open_: leaves the run as if it were being written.
  """
  tok = tokenizer(folder)
  made = writer.Writer(
    folder, config(questions=count, group=group), out=io.StringIO()
  )
  made.write(-1, {'eval/em': 0.25, 'eval/em/low': 0.2, 'eval/em/high': 0.3})
  for step in range(steps):
    add_step(made, tok, step, count, group, seed, asked, padding)
  made.flush()
  if open_:
    return tok, made
  made.close()
  return tok


def add_step(made, tok, step, count, group, seed=0, asked=None, padding=''):
  """Writes one more step of a run: `count` questions, the same at each step."""
  rng = np.random.default_rng([seed, step])
  groups = [
    tuple(
      attempt(tok, q, p, rng, sample=i, version=step, padding=padding)
      for i in range(group)
    )
    for q, p in (asked or questions(count))[:count]
  ]
  flat = [t for g in groups for t in g]
  em = np.array([float(answered(tok, t)) for t in flat], np.float32)
  centred = [
    v - em[i // group * group : i // group * group + group].mean()
    for i, v in enumerate(em)
  ]
  made.trajectories(
    step,
    groups,
    Rewards(em, np.ones(len(flat), bool), parts={'em': em}),
    kept=np.ones(len(flat), bool),
    advantages=[np.full(len(t), a) for t, a in zip(flat, centred)],
    trainer_logps=[engine(t) + rng.normal(0, 0.02, len(t)) for t in flat],
  )
  metrics = {'reward': em.mean(), 'train/loss': -0.1 * step}
  made.write(step, metrics | {'eval/em': 0.3 + 0.1 * step})
  made.flush()


def answered(tok, trajectory) -> float:
  text = tok.decode(trajectory.segments[-1].ids)
  found = text.split('<answer>')[1].split('</answer>')[0]
  return scores.exact_match(found, trajectory.question.answers)


def engine(trajectory) -> np.ndarray:
  """The engine's log-probs of all tokens, 0 where there are none."""
  return np.concatenate(
    [
      np.zeros(len(s.ids)) if s.logps is None else s.logps
      for s in trajectory.segments
    ]
  )
