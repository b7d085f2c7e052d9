"""Frameworks as they are on a machine without the libraries that they import only because these are installed.

Keras, for one, imports pandas, matplotlib, scikit-learn and IPython, and so it takes twice the processor time. No test
whose processes have this folder on their path needs them there. Others leave it out: they run with all that is
installed.

The folder has a module for each framework. It hides the companions, then becomes the real framework. Other importers
find the companions: they are hidden from the packages below only.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType

_OF_KERAS = ("IPython", "matplotlib", "orbax", "pandas", "sklearn")
_OTHER_BACKENDS = () if os.environ.get("KERAS_BACKEND") == "jax" else ("jax",)
_OF_TRANSFORMERS = ("datasets", "peft", "scipy", "sklearn")
_OF_TORCHMETRICS = ("matplotlib", "scipy", "transformers")
HIDDEN: dict[str, tuple[str, ...]] = {
    "keras": (*_OTHER_BACKENDS, *_OF_KERAS),
    "tensorflow": ("jax", *_OF_KERAS),
    "sklearn": ("pandas",),
    "transformers": _OF_TRANSFORMERS,
    "lightning": _OF_TORCHMETRICS,
    "lightning_utilities": _OF_TORCHMETRICS,
    "torchmetrics": _OF_TORCHMETRICS,
}
"""By the package that imports, what it does not find."""
STAND_INS = (
    {}
    if "REAL_COMPILER" in os.environ
    else {"torch._dynamo": "without_compiler.py", "torch._meta_registrations": "without_meta_kernels.py"}
)
"""By module, the file of this folder that is imported in its place."""


def become(name: str) -> None:
    """Import the framework of this name in place of the module of this folder that calls."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path[sys.meta_path.index(PathFinder)] = _Finder()
    # A job has a copy of this folder on its path, too.
    others = [path for path in sys.path if not os.path.exists(os.path.join(path, os.path.basename(__file__)))]
    spec = PathFinder.find_spec(name, others)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    # The modules stay. Looking through them for garbage, over and over, is a twelfth of the time of their import.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        spec.loader.exec_module(module)
    finally:
        if was_enabled:
            gc.freeze()
            gc.enable()


class _Finder:
    """The usual finder of modules and distributions, except those that are hidden from the package that asks."""

    def __init__(self) -> None:
        self._stand_ins = dict(STAND_INS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _is_hidden(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and fullname in self._stand_ins:
            file = os.path.join(os.path.dirname(__file__), self._stand_ins.pop(fullname))
            folders = spec.submodule_search_locations
            spec = importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)
        return spec

    def find_distributions(self, context: DistributionFinder.Context) -> Iterable[Distribution]:
        return () if _is_hidden(context.name) else PathFinder.find_distributions(context)

    def invalidate_caches(self) -> None:
        PathFinder.invalidate_caches()


def _is_hidden(name: str | None) -> bool:
    if name is None or not any(name in names for names in HIDDEN.values()):
        return False
    frame = sys._getframe(2)
    while frame.f_back is not None and _package(frame.f_globals) in ("importlib", "_frozen_importlib"):
        frame = frame.f_back
    return name in HIDDEN.get(_package(frame.f_globals), ())


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__")).partition(".")[0]
