"""Stands in for torch._meta_registrations in processes that need no more kernels of the device "meta" than C++ has.

The others work out the shapes of results in Python, and the reference implementations that they are made from come with
them. Without them torch takes 0.8 s of processor time to import, not 1.05 s. FakeTensors need them, and import them.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import Any

import torch
from torch._opaque_base import OpaqueBaseMeta
from torch._subclasses.fake_tensor import FakeTensorMode


def _become_real() -> None:
    """Execute the real module in the place of this one. Others may hold this one already."""
    if globals().pop("__getattr__", None) is not None:
        spec = PathFinder.find_spec(__name__, torch.__path__)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(sys.modules[__name__])


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    _become_real()
    return globals()[name]


def _import_and_initialize(mode: FakeTensorMode, *args: Any, **options: Any) -> None:
    _become_real()
    _initialize(mode, *args, **options)


_initialize = FakeTensorMode.__init__
FakeTensorMode.__init__ = _import_and_initialize  # type: ignore[assignment, method-assign]
torch._C._set_generator_metaclass(OpaqueBaseMeta)  # as torch._prims.rng_prims does, which the real module imports
