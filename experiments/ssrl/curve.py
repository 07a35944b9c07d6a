"""Repeated sampling: pass@k and maj@k, a scaling law, and what guessing gives.

`measure` is an evaluation of the table (experiments/rows.py). The figure:

  python -m experiments.ssrl.curve experiments/ssrl/results.json

pass@k is the unbiased estimator over N samples, so it never falls with k (the
paper's plotted curves do, which no set of nested samples can). The law is the
paper's, c = exp(a k^b) (Brown et al. 2024, arXiv 2407.21787, section 3).
"""

import collections
from collections.abc import Mapping, Sequence
import json
import pathlib

from absl import app
import numpy as np

from searchrl_jax.data import core as data
from searchrl_jax.evaluate import policy as evaluate

N = 64
KS = (1, 2, 4, 8, 16, 32, 64)
QUESTIONS = 150


def fit(ks: Sequence[int], shares: Sequence[float]) -> dict[str, float]:
  """{'a', 'b', 'mae'} of c = exp(a k^b), by least squares in c.

  Args:
    ks: numbers of samples.
    shares: pass@k, each within 0..1.

  Raises:
    ValueError: fewer than two shares strictly between 0 and 1.
  """
  import scipy.optimize

  k, c = np.asarray(ks, float), np.asarray(shares, float)
  inside = (0 < c) & (c < 1)
  if inside.sum() < 2:
    raise ValueError(
      f'pass@k={list(shares)}: a curve needs two values between 0 and 1; '
      'sample more, or ask harder or easier questions'
    )
  # ln(-ln c) = ln(-a) + b ln k is a line: where the search starts.
  b, ln = np.polyfit(np.log(k[inside]), np.log(-np.log(c[inside])), 1)
  (a, b), _ = scipy.optimize.curve_fit(law, k, c, p0=(-np.exp(ln), b))
  mae = np.abs(law(k, a, b) - c).mean()
  return {'a': float(a), 'b': float(b), 'mae': float(mae)}


def law(k, a, b):
  return np.exp(a * k**b)


def guessing(questions, k: int) -> float:
  """pass@k of k draws from the golden answers to questions like this one.

  questions: the whole split: of a few, each question's own answer is too
  large a share.

  Alike are questions that ask for the same relation: so it is a guess by one
  who knows all answers there are and not whose they are.
  """
  pairs = [(q.meta['path'][-1], q.answers) for q in questions]
  same = collections.Counter(pairs)
  alike = collections.Counter(relation for relation, _ in pairs)
  chances = [same[pair] / alike[pair[0]] for pair in pairs]
  return float(np.mean(1 - (1 - np.array(chances)) ** k))


def measure(config, workdir: str, out: str) -> dict[str, float]:
  """pass@k and maj@k on held-out people, the law, and guessing."""
  c = config.copy_and_resolve_references()
  c.data.eval = {'heldout': c.data.eval.heldout}
  c.eval.questions = QUESTIONS
  c.eval.n, c.eval.k, c.eval.temperature = N, KS, config.rollout.temperature
  values = evaluate.evaluate(c, workdir, out)
  found = fit(KS, [values[f'eval/pass@{k}'] for k in KS])
  c.data.eval.heldout.n = 0
  (questions,) = data.load_sets(c.data.eval, c.data).values()
  return {
    **{name: values[f'eval/{name}'] for name in shown('pass', 'maj')},
    **{f'guess@{k}': guessing(questions, k) for k in KS},
    **found,
  }


def shown(*kinds: str) -> list[str]:
  return [f'{kind}@{k}' for kind in kinds for k in KS]


SCORES = (*shown('pass', 'maj', 'guess'), 'a', 'b', 'mae')


def plot(arms: Mapping[str, dict], path: pathlib.Path) -> None:
  """pass@k with its law and maj@k of each arm; guessing."""
  # Not the backend that a notebook has set.
  from matplotlib.figure import Figure

  figure = Figure(figsize=(5, 3.4))
  axis = figure.subplots()
  smooth = np.geomspace(KS[0], KS[-1], 50)
  for n, (name, arm) in enumerate(arms.items()):
    mean = {k: v['mean'] for k, v in arm['mean']['curve'].items()}
    passed, voted, guessed = (
      [mean[score] for score in shown(kind)]
      for kind in ('pass', 'maj', 'guess')
    )
    line = law(smooth, mean['a'], mean['b'])
    votes = dict(markersize=3, linewidth=1, label=f'{name}, maj@k')
    axis.plot(KS, passed, 'o', color=f'C{n}', label=f'{name}, pass@k')
    axis.plot(smooth, line, color=f'C{n}', linewidth=1)
    axis.plot(KS, voted, 's--', color=f'C{n}', **votes)
  if arms:
    axis.plot(KS, guessed, color='0.6', label='guessing')
  axis.set_xscale('log', base=2)
  axis.set(xlabel='samples k', ylabel='held-out questions right', ylim=(0, 1))
  axis.spines[['top', 'right']].set_visible(False)
  axis.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  figure.savefig(path, dpi=80)


def main(argv: Sequence[str]) -> None:
  path = pathlib.Path(argv[1])
  arms = json.loads(path.read_text())['arms']
  plot(
    {name: a for name, a in arms.items() if 'curve' in a['mean']},
    path.with_name('scaling.png'),
  )


if __name__ == '__main__':
  app.run(main)
