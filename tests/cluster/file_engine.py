"""The in-process engine, which reads its weights from files as servers do."""

import jax
import numpy as np

from searchrl_jax.engines.core import WeightsUpdate
from searchrl_jax.engines.jax import engine
from searchrl_jax.engines.weights import published
from searchrl_jax.models import decoder


class FileEngine(engine.JaxEngine):
  def __init__(self, model_cfg, params, *args):
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params)
    super().__init__(model_cfg, nothing, *args)

  async def sync(self, update):
    files = published.open_published(update.params)
    assert files.version == update.version
    flat = {
      k: np.zeros(shape, files.dtype) for k, shape in files.shapes.items()
    }
    for name, tensor in files.table.items():
      ours = flat[tensor.path]
      ours = ours if tensor.layer is None else ours[tensor.layer]
      ours[...] = tensor.to_ours(files.read(name))
    return await super().sync(WeightsUpdate(decoder.nest(flat), update.version))


make, capacity = FileEngine, engine.capacity
