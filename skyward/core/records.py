"""`dataclass` whose methods are made at their first use. A pool starts faster with it.

The standard decorator compiles up to seven functions for each class. A pool's start imports 140 data classes, and that
was half of the client's processor time for it, and 1 MiB of its memory. Most of these classes are values that a program
rarely or never makes. Here the standard decorator finds the fields, and makes a method when it is first looked up. So
the methods are the standard ones, and no call is slower but the first.

Type checkers see the standard decorator.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414  # exported
else:

    def dataclass(cls=None, /, **options):
        """Decorate a class as `dataclasses.dataclass` does, with the options that `_decorate` has."""
        return (lambda cls: _decorate(cls, **options)) if cls is None else _decorate(cls, **options)


def make_constructors(*classes: type) -> None:
    """Make the constructors of data classes now. Processes that are forked later share them."""
    for cls in classes:
        vars(cls)["__init__"].__get__(None, cls)


def _decorate(
    cls: type[T],
    *,
    init: bool = True,
    repr: bool = True,  # noqa: A002  # as the standard decorator names it
    eq: bool = True,
    frozen: bool = False,
    kw_only: bool = False,
    slots: bool = False,
) -> type[T]:
    own, text = set(vars(cls)), cls.__doc__
    has_hash = "__hash__" in own and not (cls.__hash__ is None and "__eq__" in own)
    # The standard decorator refuses a class whose base is frozen differently.
    inherits = any(map(dataclasses.is_dataclass, cls.__mro__[1:]))
    cls.__doc__ = text or cls.__name__  # without one, the standard decorator writes the signature
    cls = dataclasses.dataclass(
        init=False, repr=False, eq=False, frozen=frozen and inherits, kw_only=kw_only, slots=slots
    )(cls)
    cls.__doc__ = text
    if frozen and not inherits:
        _freeze(cls, slots=slots)
    made = {"__init__": init, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen and not has_hash}
    for name, is_wanted in made.items():
        if is_wanted and (name not in own or name == "__hash__"):
            setattr(cls, name, _Unmade(cls, name, is_frozen=frozen, has_slots=slots))
    if eq and not frozen and not has_hash:
        cls.__hash__ = None  # type: ignore[assignment]
    return cls


class _Unmade:
    """A method of a data class that nobody has called yet.

    Args:
        cls: The class.
        name: Name of the method.
        is_frozen: Whether the class is frozen.
        has_slots: Whether the class has slots, so that its instances do not find the fields' defaults in it.
    """

    __slots__ = ("_cls", "_has_slots", "_is_frozen", "_name")

    def __init__(self, cls: type, name: str, *, is_frozen: bool, has_slots: bool) -> None:
        self._cls, self._name, self._is_frozen, self._has_slots = cls, name, is_frozen, has_slots

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self._make().__get__(instance, owner)

    def _make(self) -> Any:
        """Put the method in its place, and return it. Threads that do so at once do the same."""
        cls = self._cls
        fields = {field.name: field for field in dataclasses.fields(cls)}
        namespace: dict[str, Any] = {
            "__annotations__": {name: field.type for name, field in fields.items()},
            "__doc__": cls.__name__,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            **{name: _copied(field) for name, field in fields.items()},
        }
        if hasattr(cls, "__post_init__"):
            namespace["__post_init__"] = cls.__post_init__
        is_init = self._name == "__init__"
        made: type = dataclasses.dataclass(
            init=is_init,
            repr=self._name == "__repr__",
            eq=self._name in ("__eq__", "__hash__"),
            frozen=self._is_frozen and (is_init or self._name == "__hash__"),
            slots=self._has_slots and is_init,
        )(type(cls.__name__, (), namespace))
        method = vars(made)[self._name]
        setattr(cls, self._name, method)
        return method


def _copied(field: dataclasses.Field[Any]) -> Any:
    """Return a field of the same meaning: one that has been given to a class knows its name and place."""
    names = ("default", "default_factory", "init", "repr", "hash", "compare", "metadata", "kw_only")
    return dataclasses.field(**{name: getattr(field, name) for name in names})


# Frozen classes ------------------------------------------------------------------------------------------------------


def _freeze(cls: type, *, slots: bool) -> None:
    cls.__dataclass_params__.frozen = True  # type: ignore[attr-defined]  # for classes below it
    cls.__setattr__ = _refuse_change  # type: ignore[method-assign,assignment]
    cls.__delattr__ = _refuse_deletion  # type: ignore[method-assign,assignment]
    if slots:
        for name, method in ("__getstate__", _fields_of), ("__setstate__", _set_fields):
            if name not in vars(cls):
                setattr(cls, name, method)


def _refuse_change(self: Any, name: str, value: object) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
    object.__setattr__(self, name, value)


def _refuse_deletion(self: Any, name: str) -> None:
    if _is_fixed(self, name):
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
    object.__delattr__(self, name)


def _is_fixed(instance: Any, name: str) -> bool:
    """Return whether an attribute is frozen. A class below that is no data class has attributes of its own."""
    return "__dataclass_params__" in vars(type(instance)) or name in instance.__dataclass_fields__


def _fields_of(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_fields(self: Any, values: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), values, strict=True):
        object.__setattr__(self, field.name, value)
