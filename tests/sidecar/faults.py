"""Runs inside vLLM: the plugin, with a way to load badly."""

from searchrl_jax.engines.vllm import plugin as vllm_plugin
from searchrl_jax.engines.weights import published


class Worker(vllm_plugin.Worker):
  def fault_load_without(self, path: str, name: str) -> list[str]:
    """Loads a publication except one tensor, as vLLM alone would."""
    weights = published.open_published(path)
    model = self.model_runner.get_model()
    tensors = vllm_plugin._torch_tensors(weights, vllm_plugin._tied(model))
    loaded = []

    def others():
      for key, tensor in tensors:
        if key != name:
          loaded.append(key)
          yield key, tensor

    self.reload_weights(weights_iterator=others())
    self._searchrl_published = weights
    return loaded

  def fault_no_reload(self) -> None:
    """From now on vLLM cannot load a checkpoint."""
    self.reload_weights = None
