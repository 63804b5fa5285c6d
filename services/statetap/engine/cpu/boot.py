"""Makes ``import sglang`` work on a host without CUDA: stand-ins for the packages whose wheels need a GPU.

Import this before anything of sglang and in every process (a spawned child imports the main module again). Invariant: a package that
is really installed is never replaced, and *calling* into a stand-in that is not a decorator is an error, so nothing is computed
wrongly by one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

PACKAGES = ("triton", "torchvision", "sgl_kernel")
_DECORATORS = "triton"  # @triton.jit and its like are used at import time and must give the function back


class _StandIn(types.ModuleType):
    """A module in which every name exists: classes for capitalised names, modules for the others."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__file__ = __file__
        self.__package__ = name
        self.__spec__ = importlib.machinery.ModuleSpec(name, _FINDER, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *args, **kwargs: None})
        else:
            full = f"{self.__name__}.{name}"
            value = sys.modules.setdefault(full, _StandIn(full))
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__name__.partition(".")[0] != _DECORATORS:
            raise RuntimeError(f"{self.__name__} was called, but this host has only a stand-in for it")
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function: function

    def __bool__(self) -> bool:
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self) -> None:
        self.packages: frozenset[str] = frozenset()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules.get(spec.name) or _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


_FINDER = _Finder()


def _ask_transformers_first() -> None:
    """transformers remembers whether torchvision is installed: let it ask while the true answer is still no."""
    from transformers.utils import import_utils

    for name in ("is_torchvision_available", "is_torchvision_v2_available", "is_torchaudio_available"):
        probe: Callable[[], bool] | None = getattr(import_utils, name, None)
        if probe is not None:
            probe()


def install() -> None:
    """Put the stand-ins in place, and the environment that SGLang's CPU mode needs. Idempotent."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missing = frozenset(p for p in PACKAGES if p not in sys.modules and importlib.util.find_spec(p) is None)
    if not missing or _FINDER.packages:
        return
    if "torchvision" in missing:
        _ask_transformers_first()
    _FINDER.packages = missing
    sys.meta_path.append(_FINDER)
    if "triton" in missing:
        _complete_triton()


def _complete_triton() -> None:
    import triton
    import triton.language as tl

    class constexpr:  # noqa: N801  (triton's name)
        def __init__(self, value: Any = None) -> None:
            self.value = value

    triton.__version__ = "3.0.0"
    triton.cdiv = lambda a, b: -(a // -b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
    tl.constexpr = constexpr
