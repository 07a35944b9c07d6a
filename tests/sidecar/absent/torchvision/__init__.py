"""Stands in for torchvision, which vLLM's module of Qwen3.5 imports for images.

Its modules have every name, and nothing behind it: text needs none. The real
one has no build for CPUs on PyPI.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = '0.28.0'
_MODES = 'NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS'.split()


class _Module(types.ModuleType):
  __path__ = ()

  def __getattr__(self, name):
    if name.startswith('__'):
      raise AttributeError(name)
    if name.islower() and '_' not in name:  # a module within it
      return importlib.import_module(f'{self.__name__}.{name}')
    return type(name, (), dict.fromkeys(_MODES))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  def find_spec(self, name, path=None, target=None):
    if name.startswith(f'{__name__}.'):
      return importlib.machinery.ModuleSpec(name, self, is_package=True)

  def create_module(self, spec):
    return _Module(spec.name)

  def exec_module(self, module):
    pass


sys.meta_path.insert(0, _Finder())
