"""Functions and classes that travel by value, as the process that receives them makes them.

cloudpickle writes them into the pickle, and numbers each class, so that a process has it once. Two things differ here
from its own loading. A class that was defined in this process stays as it is: cloudpickle would fill it again with what
comes back with any of its instances, and its methods would no longer see the globals of their script. And a node, whose
`__main__` is not the user's script, has a module that stands in for it: what pickles a function or class by its name
finds it there, as process pools and `torch.save` do.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

_LIBRARY = "cloudpickle.cloudpickle"
_MARK = _LIBRARY.encode()
_SCRIPT = "__main__"
_MOST_WRAPPERS = 100
"""Most wrappers of a function that are opened: one may wrap itself."""

_received = weakref.WeakSet[type]()
"""Classes that a pickle has brought into this process."""
_published = weakref.WeakValueDictionary[str, Any]()
"""Functions and classes of the user's script by name: weak, so that what they refer to goes with them."""
_running: Callable[[], Any] = lambda: None  # noqa: E731  # a weak reference later
"""Returns the function of the script that this process has run last, unless it is gone."""


def loads(data: Any, buffers: Iterable[Any] = (), *, refills: bool = True) -> Any:
    """Unpickle a value that may hold functions and classes.

    Args:
        data: The pickle: bytes, or a view of them.
        buffers: Its buffers.
        refills: Whether a class that an earlier pickle has brought gets what this one says, as its sender may have
            changed it since.

    Raises:
        Exception: Anything that the unpickling raises.
    """
    whole = data.obj if isinstance(data, memoryview) else data  # a view cannot be searched
    if isinstance(whole, bytes | bytearray | mmap.mmap) and whole.find(_MARK) < 0:
        return pickle.loads(data, buffers=buffers)
    return _Unpickler(io.BytesIO(data), refills=refills, buffers=buffers).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, source: io.BytesIO, *, refills: bool, buffers: Iterable[Any]) -> None:
        super().__init__(source, buffers=buffers)
        made = set[type]()
        # Functions that know only `made`: a bound method would make a cycle, and keep the value alive.
        self._ours: dict[str, Callable[..., Any]] = {
            "_make_skeleton_class": lambda *arguments: _make("_make_skeleton_class", made, arguments),
            "_make_skeleton_enum": lambda *arguments: _make("_make_skeleton_enum", made, arguments),
            "_class_setstate": lambda kind, state: _fill(kind, state, _received if refills else made),
            "_function_setstate": _complete,
        }

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._ours.get(name, found) if module == _LIBRARY else found


def _make(name: str, made: set[type], arguments: tuple[Any, ...]) -> Any:
    """Make a class, empty so far, or return the one of this process that has its number."""
    library = sys.modules[_LIBRARY]
    *_, number, _ = arguments
    known = library._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)
    if known is not None:  # a second one, which nobody needs, would also be told to its bases
        return known
    kind = getattr(library, name)(*arguments)
    made.add(kind)
    _received.add(kind)
    return kind


def _fill(kind: type, state: Any, fillable: Container[type]) -> None:
    """Give a class its attributes, unless it has those with which it was defined here."""
    if kind in fillable:
        sys.modules[_LIBRARY]._class_setstate(kind, state)
        _publish(kind)


def _complete(function: types.FunctionType, state: Any) -> None:
    """Give a function its globals and the values of its closure."""
    sys.modules[_LIBRARY]._function_setstate(function, state)
    _publish(function)


# The user's script, on a node ----------------------------------------------------------------------------------------


class _Script(types.ModuleType):
    """Module that stands in for the user's script. Its names are those of the function that runs, and of what came."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # the file of the script is not here
            for names in (getattr(_running(), "__globals__", {}), _published):
                with contextlib.suppress(KeyError):
                    return names[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def stand_in_for_script() -> None:
    """Let functions and classes of the user's script be found by name in this process, which does not run it."""
    sys.modules[_SCRIPT] = _Script(_SCRIPT)


def set_running(function: Any) -> None:
    """Note the function that runs, whose globals are those of its script."""
    global _running
    for _ in range(_MOST_WRAPPERS):
        # Only functions are asked: other callables may have any name, and so no last `__wrapped__`.
        if not isinstance(function, types.FunctionType) or "__wrapped__" not in vars(function):
            break
        function = vars(function)["__wrapped__"]
    if isinstance(function, types.FunctionType) and function.__module__ == _SCRIPT:
        _running = weakref.ref(function)


def _publish(made: Any) -> None:
    if made.__module__ == _SCRIPT and type(sys.modules.get(_SCRIPT)) is _Script:
        _published[made.__qualname__] = made
