"""The plugin in a vLLM on a CPU that does not pack its matrices.

On a GPU vLLM computes with the matrices as they were loaded. On a CPU it packs
them for oneDNN unless its build has none, which this module pretends.
"""

from vllm import _custom_ops

from searchrl_jax.engines.vllm.plugin import Worker as Worker

_custom_ops._supports_onednn = False
