"""Lazy loading of a module's public names, so that importing the module imports nothing heavy."""

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import FrameType, FunctionType

_tables: dict[str, dict[str, str]] = {}
"""Public module -> its names -> the module that defines each."""


def lazy_names(
    module: str,
    file: str,
    *,
    apart: Collection[str] = (),
    extra: str | Mapping[str, str] | None = None,
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Make a module's `__getattr__`, `__dir__` and `__all__` (PEP 562) from the stub beside it.

    The stub is the only list of the names, and type checkers read it anyway. It has one line per name, such as
    `from .calls import compute as compute`, or `from . import errors as errors` for a public module.

    Args:
        module: The module's `__name__`.
        file: The module's `__file__`.
        apart: Names that a star import skips, because each would import a framework
            or hide a builtin.
        extra: Extra to install when a name needs a missing package. A mapping gives the extra by name, for names whose
            extra is called differently.
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
        # The next access finds the attribute without __getattr__, even if a submodule has the same name.
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: list(public), [name for name in public if name not in apart]


def _read_stub(path: str) -> dict[str, str]:
    """Return the module that defines each name. Splits words instead of using `ast`: every import waits for this."""
    with open(path, encoding="utf-8") as stub:
        imports = [line.split() for line in stub if line.startswith("from ")]
    return {words[-1]: words[1] for words in imports}


def _publish(name: str, value: object, requested: str) -> None:
    """Let a class or function report its public module, so that pickles, reprs and docs survive moves.

    The public module is the nearest one above the defining module, whichever was accessed first; otherwise the accessed
    one. The price: `inspect.getsource` does not find such a class, because it searches the reported module.
    """
    if not isinstance(value, type | FunctionType) or value.__qualname__ != name:
        return
    home = value.__module__
    if home in _tables or not home.startswith("skyward."):  # already public, or not from skyward
        return
    package, _, last = home.rpartition(".")
    while package and name not in _tables.get(package, {}):
        if _tables.get(package, {}).get(last) == ".":  # the module itself is public
            return
        package, _, last = package.rpartition(".")
    if isinstance(value, type):
        _bind_annotations(value)
    value.__module__ = package or requested


def _bind_annotations(cls: type) -> None:
    """Let `typing.get_type_hints` resolve a class's annotations in the module that defines it."""
    from typing import ForwardRef  # `import skyward` needs no typing

    annotations = vars(cls).get("__annotations__", {})
    for field, hint in annotations.items():
        if isinstance(hint, str):
            annotations[field] = ForwardRef(hint, module=cls.__module__, is_class=True)


def _missing(name: str, error: ModuleNotFoundError, extra: str) -> ImportError:
    from .errors import MissingDependency

    text = f"{name}: requires {error.name}, which is not installed here; pip install 'skyward[{extra}]'"
    return MissingDependency(text, name=error.name)


def _unknown(module: str, name: str, public: Collection[str], caller: FrameType) -> Exception:
    from opcode import opmap  # only for a message

    hint = _hint(module, name, public)
    code, at = caller.f_code.co_code, caller.f_lasti
    # `from module import name` replaces an AttributeError with an ImportError that lacks the hint. Other errors pass.
    if 0 <= at < len(code) and code[at] == opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from {module!r}{hint}", name=name)
    # Without `obj`, Python adds no suggestion of its own behind ours.
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=None)


def _hint(module: str, name: str, public: Collection[str]) -> str:
    from .core.spellings import foreign, suggestion  # only for a message

    near = None if name.startswith("_") else suggestion(name, public)
    text = foreign(module.rpartition(".")[2], name) or (f"did you mean {near}?" if near else "")
    return f"; {text}" if text else ""
