"""Hooks that run once a module has been imported, for libraries that most tasks never import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # `importlib.abc` imports pathlib, urllib and tempfile
    from importlib.abc import Loader

Hook = Callable[[ModuleType], object]


def call_after_import(name: str, hook: Hook) -> None:
    """Call `hook` with the module as soon as it has been imported; now, if it has been imported before."""
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
    else:
        sys.meta_path.insert(0, _Finder(name, hook))


class _Finder:
    """Finder of one module. It lets the other finders find it, and leaves when it was found."""

    def __init__(self, name: str, hook: Hook) -> None:
        self._name = name
        self._hook = hook
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _Loader(spec.loader, self._hook))
            sys.meta_path.remove(self)
        return spec


class _Loader:
    def __init__(self, loader: Loader, hook: Hook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Before it runs: a module may look for its files by its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._hook(module)
