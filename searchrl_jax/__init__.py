"""searchrl_jax: language models that learn to search, in JAX."""

import os
import sys

# XLA takes the temporary memory of an update from malloc and gives it back
# each time. In pages of 4 KB the kernel then spends a good part of an update
# on a CPU clearing them; glibc can ask for huge ones (trials:
# experiments/LOG.md).
HUGE_PAGES = {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}


def _again_with_huge_pages() -> None:
  """Starts this command anew: glibc reads its tunables at the start alone."""
  if sys.platform == 'linux' and HUGE_PAGES.keys().isdisjoint(os.environ):
    os.execve(sys.executable, sys.orig_argv, os.environ | HUGE_PAGES)


# What stands there while `python -m searchrl_jax.NAME` looks for NAME, so not
# for a program or a notebook that imports the package.
if sys.argv[:1] == ['-m']:
  _again_with_huge_pages()
