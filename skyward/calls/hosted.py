"""Object that lives in an actor's process, and the functions that travel there: construct it, call it, end it.

Each function is pickled as a class of this module and plain data. So a call costs no more than a call of a function.
"""

from __future__ import annotations

from typing import Any

from ..core.records import dataclass

_objects: list[Any] = []
"""The object of this process, once it was constructed."""


def hosted() -> Any:
    """Return the object that lives in this process; None in every other process."""
    return _objects[0] if _objects else None


@dataclass(frozen=True)
class Construct:
    """Constructs the object of a process, and enters it if its class has `__enter__`.

    Args:
        cls: Class of the object, as `@actor` made it.
    """

    cls: Any

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        made = self.cls.local(*args, **kwargs)
        enter = getattr(type(made), "__enter__", None)
        if enter is not None:
            enter(made)
        _objects[:] = [made]


@dataclass(frozen=True)
class CallMethod:
    """Calls a method of the object of this process."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(_objects[0], self.name)(*args, **kwargs)


@dataclass(frozen=True)
class EndObject:
    """Exits the object of this process, if its class has `__exit__`."""

    def __call__(self) -> None:
        made = _objects.pop()
        leave = getattr(type(made), "__exit__", None)
        if leave is not None:
            leave(made, None, None, None)
