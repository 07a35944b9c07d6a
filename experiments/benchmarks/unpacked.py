"""The plugin in a vLLM on a CPU that does not pack its matrices.

On a GPU vLLM computes with the matrices as they were loaded. On a CPU it packs
them for oneDNN unless its build has none, and small ones of 16 bits for AMX
unless the CPU has none, which this module pretends.
"""

from vllm import _custom_ops
from vllm.model_executor.layers import utils

from searchrl_jax.engines.vllm.plugin import Worker as Worker

_custom_ops._supports_onednn = False
utils.check_cpu_sgl_kernel = lambda *unused: False
