"""Public names of a module that are loaded when they are first used, so that importing it imports nothing heavy."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import FrameType, FunctionType

_tables: dict[str, dict[str, str]] = {}
"""By public module: its names, and where each comes from."""


def lazy_names(
    module: str,
    file: str,
    *,
    apart: Collection[str] = (),
    extra: str | Mapping[str, str] | None = None,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make a module's `__getattr__`, `__dir__` and `__all__` (PEP 562) from the stub beside it.

    The stub is what checkers and editors read anyway, and the one list of the names: a line for each, such as
    `from .calls import compute as compute`, or `from . import errors as errors` for a module that is public itself.

    module: its `__name__`. file: its `__file__`. apart: names that a star import leaves out, as each would import a
    framework. extra: what to install where a name needs a package that is not there; or that by name, for those whose
    extra is not called as they are.
    """
    sources = _tables[module] = _read_stub(f"{file}i")
    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
    public = sorted(sources)

    def get(name: str) -> object:
        if name not in sources:
            raise _unknown(module, name, public, sys._getframe(1))
        source = sources[name]
        if source == ".":
            return import_module(f".{name}", package)
        try:
            value = getattr(import_module(source, package), name)
        except ModuleNotFoundError as error:
            if extra is None or (error.name or "skyward").partition(".")[0] == "skyward":
                raise
            raise _missing(name, error, extra if isinstance(extra, str) else extra.get(name, name)) from error
        _publish(name, value, module)
        setattr(sys.modules[module], name, value)  # found without us from now on, also where a module has this name
        return value

    return get, lambda: list(public), [name for name in public if name not in apart]


def _read_stub(path: str) -> dict[str, str]:
    """The module that each name comes from. By words, not by `ast`: every `import skyward` waits for it."""
    with open(path, encoding="utf-8") as stub:
        imports = [line.split() for line in stub if line.startswith("from ")]
    return {words[-1]: words[1] for words in imports}


def _publish(name: str, value: object, asked: str) -> None:
    """Let a class or function report its public module, so that pickles, reprs and docs survive moves.

    It is the nearest one above the module that defines it, whichever was asked first; else the one that was asked.
    The price: `inspect.getsource` does not find a class, because it looks into the module that the class reports.
    """
    if not isinstance(value, type | FunctionType) or value.__qualname__ != name:
        return
    home = value.__module__
    if home in _tables or not home.startswith("skyward."):  # it says so itself, or is not ours
        return
    package, _, last = home.rpartition(".")
    while package and name not in _tables.get(package, {}):
        if _tables.get(package, {}).get(last) == ".":  # a module that is public itself
            return
        package, _, last = package.rpartition(".")
    if isinstance(value, type):
        _bind_annotations(value)
    value.__module__ = package or asked


def _bind_annotations(cls: type) -> None:
    """Let `typing.get_type_hints` look up the annotations where they were written. A function knows its globals."""
    from typing import ForwardRef  # `import skyward` needs no typing

    annotations = vars(cls).get("__annotations__", {})
    for field, hint in annotations.items():
        if isinstance(hint, str):
            annotations[field] = ForwardRef(hint, module=cls.__module__, is_class=True)


def _missing(name: str, error: ModuleNotFoundError, extra: str) -> ImportError:
    from .errors import MissingDependency

    text = f"{name}: it needs {error.name}, which is not installed here; pip install 'skyward[{extra}]'"
    return MissingDependency(text, name=error.name)


def _unknown(module: str, name: str, public: Collection[str], caller: FrameType) -> Exception:
    from opcode import opmap  # only for a message

    hint = _hint(module, name, public)
    code, at = caller.f_code.co_code, caller.f_lasti
    # `from module import name` replaces an AttributeError by an ImportError without the hint, but passes others on.
    if 0 <= at < len(code) and code[at] == opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {module!r}{hint}", name=name)
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")


def _hint(module: str, name: str, public: Collection[str]) -> str:
    from .core.spellings import foreign, suggestion  # only for a message

    near = None if name.startswith("_") else suggestion(name, public)
    text = foreign(module.rpartition(".")[2], name) or (f"did you mean {near}?" if near else "")
    return f"; {text}" if text else ""
