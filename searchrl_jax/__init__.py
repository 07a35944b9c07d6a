"""searchrl_jax: language models that learn to search, in JAX."""
