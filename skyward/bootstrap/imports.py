"""Imports of the program's functions on the nodes, found in modules and functions without calling any."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType

from ..calls.pending import ComputeFunction
from .code import Code
from .roots import is_installed

_NOTHING = ModuleType("nothing")


def imported_there(code: Code, modules: Mapping[str, object]) -> dict[str, str]:
    """Return the packages that are imported when the program's `@compute` functions are loaded, with their importers.

    It considers functions of the main module, and of the user's modules that the main module names, because the program
    is unlikely to call others. Imports inside functions and in `try` do not count, nor does the standard library.
    """
    local = _Local(code)
    needed: dict[str, str] = {}
    for function in _functions(modules, local):
        for integration in function.launch.integrations:
            for name in getattr(integration, "packages", ()):
                needed.setdefault(name, f"the integration of {function.__name__}()")
        # A function of the main module travels by value and needs the modules that it names. Any other travels by its
        # name and needs its module.
        travels_by_name = function.__module__ != "__main__"
        for name in [function.__module__] if travels_by_name else _named_by(function.fn):
            _add(needed, local, name, f"{function.__name__}()")
    return {name: user for name, user in needed.items() if name not in sys.stdlib_module_names}


def left_behind(code: Code, modules: Mapping[str, object]) -> dict[str, str]:
    """Return modules of the program's functions that are neither installed nor sent, each with one of its functions."""
    local = _Local(code)
    behind: dict[str, str] = {}
    for function in _functions(modules, local):
        module = modules.get(function.__module__)
        file = getattr(module, "__file__", None)
        # Lambdas, nested functions and functions of the main module travel by value.
        by_value = function.__module__ == "__main__" or "<" in getattr(function, "__qualname__", "<")
        if by_value or not isinstance(file, str) or is_installed(os.path.dirname(os.path.realpath(file))):
            continue
        if not local.files_of(function.__module__):
            behind[function.__module__] = function.__name__
    return behind


def _functions(modules: Mapping[str, object], local: _Local) -> Iterator[ComputeFunction[..., object]]:
    for value in list(vars(modules.get("__main__", _NOTHING)).values()):
        if isinstance(value, ComputeFunction):
            yield value
        elif isinstance(value, ModuleType) and local.files_of(value.__name__):
            yield from (var for var in list(vars(value).values()) if isinstance(var, ComputeFunction))


def _add(needed: dict[str, str], local: _Local, name: str, user: str) -> None:
    """Add a module. If it is the user's own, add its imports instead."""
    files = local.files_of(name)
    if not files:
        needed.setdefault(name.partition(".")[0], user)
    for file in files:
        local.follow(file, needed)


def _named_by(function: object) -> set[str]:
    """Return the modules that a function's code names, and the modules of other objects that it names."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, FunctionType):
        return set()
    names: set[str] = set()
    for name in _names_in(function.__code__):
        value = function.__globals__.get(name)
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(module, str) and module != "__main__":
            names.add(module)
    return names


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


class _Local:
    """Local files of the user's own modules."""

    def __init__(self, code: Code) -> None:
        self._sources = code.sources
        self._roots = code.path
        self._files = {os.path.realpath(source) for source in code.sources.values()}
        self._followed: set[str] = set()

    def has(self, file: str) -> bool:
        return file in self._files

    def files_of(self, name: str) -> list[str]:
        """Return the files that an import of this module runs: its packages, then itself. Empty if it is not local."""
        parts = name.split(".")
        for root in self._roots:
            files = []
            for count in range(1, len(parts) + 1):
                path = "/".join([root, *parts[:count]])
                files += [
                    os.path.realpath(self._sources[place])
                    for place in (f"{path}/__init__.py", f"{path}.py")
                    if place in self._sources
                ]
            if files:
                return files
        return []

    def follow(self, file: str, needed: dict[str, str]) -> None:
        """Add the imports of the module in this file, and those of the user's modules that it imports."""
        if file in self._followed:
            return
        self._followed.add(file)
        for name in _imports_of(file):
            if name.startswith(os.sep):
                for path in (f"{name}.py", os.path.join(name, "__init__.py")):
                    if self.has(path):
                        self.follow(path, needed)
            else:
                _add(needed, self, name, os.path.relpath(file))


def _imports_of(file: str) -> Iterator[str]:
    """Yield the names of imported modules. For a relative import, yield the path of its file without the suffix."""
    try:
        with open(file, "rb") as source:
            statements = ast.parse(source.read()).body
    except (OSError, SyntaxError, ValueError):  # a file that cannot be parsed cannot be imported either
        return
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            yield statement.module or ""
        elif isinstance(statement, ast.ImportFrom):
            folder = file
            for _ in range(statement.level):
                folder = os.path.dirname(folder)
            path = os.path.join(folder, *(statement.module or "").split("."))
            yield path.rstrip(os.sep)
            yield from (os.path.join(path, alias.name) for alias in statement.names)
