"""Public names of a package that are loaded when they are first used, so that importing it imports nothing heavy."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str,
    modules: Mapping[str, Collection[str]],
    submodules: Collection[str] = (),
    *,
    apart: Collection[str] = (),
    extra: str | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Gives a package's `__getattr__`, `__dir__` and `__all__` (PEP 562).

    package: its `__name__`. modules: public names, by the module that has them: one below the package, or elsewhere,
    written with dots as in an import from the package. submodules: modules below it that are public themselves. apart:
    names that a star import leaves out, as each would import a framework. extra: what to install where a name needs a
    package that is not there.
    """
    where = {name: module for module, names in modules.items() for name in names}
    public = sorted((*where, *submodules))

    def get(name: str) -> Any:
        if name in submodules:
            return import_module(f"{package}.{name}")
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(package, name, public)}")
        module = where[name]
        try:
            value = getattr(import_module(module if module.startswith(".") else f".{module}", package), name)
        except ModuleNotFoundError as error:
            if extra is None or (error.name or "skyward").partition(".")[0] == "skyward":
                raise
            raise _missing(name, error, extra) from error
        setattr(sys.modules[package], name, value)  # found without us from now on, also where a module has this name
        return value

    return get, lambda: list(public), [name for name in public if name not in apart]


def _missing(name: str, error: ModuleNotFoundError, extra: str) -> ImportError:
    from .errors import MissingDependency

    text = f"{name}: it needs {error.name}, which is not installed here; pip install 'skyward[{extra}]'"
    return MissingDependency(text, name=error.name)


def _hint(package: str, name: str, public: Collection[str]) -> str:
    from .spellings import foreign, suggestion  # only for a message

    near = None if name.startswith("_") else suggestion(name, public)
    text = foreign(package, name) or (f"did you mean {near}?" if near else "")
    return f"; {text}" if text else ""
