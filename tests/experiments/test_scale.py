import jax
import numpy as np
import pytest

from experiments.benchmarks import generated, scale
from retrieval.index.dense_jax import DenseJax


def row(step, count, **values):
  return {'step': step, 'passages': count, **values}


def test_a_line_through_two_sizes_is_followed_to_21_million():
  few = [row('store', 250, disk_bytes=5 * 250 + 100, seconds=9.0)]
  many = [row('store', 1000, disk_bytes=5 * 1000 + 100, seconds=8.0)]
  disk, seconds = scale.extrapolate(few, many)
  assert disk['at_21M'] == pytest.approx(5 * scale.WIKI + 100)
  assert disk['per_million'] == pytest.approx(5e6)
  assert seconds['at_21M'] == 8.0  # faster for more: noise, nothing shrinks


def test_the_plan_states_each_step_in_gigabytes_and_hours():
  steps = ('generate', 'store', 'bm25', 'search', 'vectors', 'flat', 'ivf')
  assert scale.STEPS == steps
  values = dict(
    disk_bytes=0,
    temporary_bytes=0,
    peak_bytes=7e9,
    seconds=3600.0,
    work_s=1800.0,
  )
  lines = scale.extrapolate(
    *(
      [row(step, count, **values | {'disk_bytes': count}) for step in steps]
      for count in (250, 1000)
    )
  )
  plan = {
    line['step']: line
    for line in scale.plan(
      lines,
      {'peak_bytes': 1e9, 'passages_per_s': 10.0, 'tokens_per_passage': 99.0},
      {'passages': 1000, 'disk_bytes': 5000, 'work_s': 36.0},
      1000,
    )
  }
  assert plan['bm25'] == {
    'step': 'bm25',
    'disk_GB': pytest.approx(scale.WIKI / 1e9),
    'temporary_GB': 0,
    'memory_GB': 7.0,
    'served_GB': pytest.approx(scale.WIKI / 1e9),
    'hours': 1.0,
    'from': '250 and 1,000 passages',
  }
  assert plan['dense_faiss Flat']['hours'] == 0.5
  (encoded,) = [line for name, line in plan.items() if 'encoded' in name]
  assert encoded['hours'] == pytest.approx(583.76, abs=0.01)  # WIKI / 36,000
  graph = plan['dense_faiss HNSW64']
  assert graph['disk_GB'] == graph['memory_GB'] == 5 * scale.WIKI / 1e9
  # 36 s, WIKI / 1000 times, and log(WIKI) / log(1000).
  assert graph['hours'] == pytest.approx(512.9, abs=0.1)
  text = scale.markdown(list(plan.values())).splitlines()
  assert {line.count('|') for line in text} == {8}
  assert len(text) == len(plan) + 2


def test_resident_bytes_told_from_shapes_are_those_of_the_index():
  lines = scale.extrapolate(
    *(
      [
        row(
          step,
          count,
          disk_bytes=0,
          temporary_bytes=0,
          peak_bytes=0,
          seconds=0,
          work_s=0,
        )
        for step in scale.STEPS
      ]
      for count in (1, 2)
    )
  )
  plan = scale.plan(
    lines,
    {'peak_bytes': 0, 'passages_per_s': 1.0, 'tokens_per_passage': 1.0},
    {'passages': 2, 'disk_bytes': 0, 'work_s': 0},
    4,
  )
  vectors = generated.Generated().encode_passages([''] * 64 * 3)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('data',))
  for line in plan[-2:]:
    index = DenseJax(
      vectors, None, precision=line['step'].split()[1], mesh=mesh
    )
    size = sum(x.nbytes for x in index._corpus.values())
    of_one = line['served_GB'] * 1e9 / scale.WIKI
    assert of_one == pytest.approx(size / len(vectors), rel=1e-9)


def test_generated_vectors_have_length_one_and_are_around_centres():
  encoder = generated.Generated()
  vectors = encoder.encode_passages([''] * 500)
  assert vectors.shape == (500, 768) and vectors.dtype == np.float32
  np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
  nearest = (vectors @ encoder._centres.T).max(1)
  assert nearest.min() > 0.5  # cos of 45 degrees is 0.71, of strangers 0.15
