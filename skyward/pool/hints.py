"""Checks that values from a TOML file fit the annotations of the arguments they are for."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
}


def _arms(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(arm for member in get_args(hint) for arm in _arms(member))
    return (hint,)


def illegal(value: Any, hint: Any) -> str:
    """Describe the legal values if this one is illegal; "" if it is legal, or if only its class can tell."""
    refusals = [_illegal_for(value, arm) for arm in _arms(hint) if arm is not type(None)]
    return "" if not all(refusals) else " or ".join(dict.fromkeys(refusals))


def _illegal_for(value: Any, arm: Any) -> str:  # a table
    origin = get_origin(arm) or arm
    if origin is Literal:
        legal = get_args(arm)
        return "" if value in legal else f"one of {', '.join(map(repr, legal))}"
    if arm in _PLAIN:
        classes, words = _PLAIN[arm]
        fits = isinstance(value, classes) and (arm is bool or not isinstance(value, bool))
        return "" if fits else words
    if not isinstance(origin, type) or origin is object:
        return ""
    if issubclass(origin, Mapping):
        fits = isinstance(value, dict) and not any(
            illegal(item, element_of(arm)) for item in value.values() if not is_reference(item)
        )
        return "" if fits else f"a table of {_words(element_of(arm))}"
    if issubclass(origin, os.PathLike):
        return "" if isinstance(value, str) else "text"
    if origin in (list, tuple, set, frozenset) or issubclass(origin, Iterable):
        fits = isinstance(value, list) and _all_fit(value, element_of(arm))
        return "" if fits else f"a list of {_words(element_of(arm))}"
    if dataclasses.is_dataclass(origin):
        return "" if isinstance(value, dict) else "a table"
    return f"a {origin.__name__}"  # no file can hold one


def _all_fit(values: Iterable[Any], hint: Any) -> bool:
    return not any(illegal(value, hint) for value in values if not is_reference(value))


def is_reference(value: Any) -> bool:
    """Return whether a value is `{ env = "NAME" }`, which stands for an environment variable."""
    return isinstance(value, dict) and set(value) == {"env"} and isinstance(value["env"], str)


def _words(hint: Any) -> str:
    known = [_PLAIN[arm][1] for arm in _arms(hint) if arm in _PLAIN]
    return " or ".join(known) or "values"


def element_of(hint: Any) -> Any:
    """Return the annotation of the elements of a list or table."""
    for arm in _arms(hint):
        args = [a for a in get_args(arm) if a is not Ellipsis]
        if args and get_origin(arm) is not Literal:
            return args[-1]  # our unions put the widest arm first
    return Any


def class_in(hint: Any) -> Callable[..., Any] | None:
    """Return the dataclass that a table stands for, or None."""
    return next((arm for arm in _arms(hint) if dataclasses.is_dataclass(arm) and isinstance(arm, type)), None)


def takes(hint: Any, kind: type) -> bool:
    """Return whether an annotation names exactly this class."""
    return any(arm is kind for arm in _arms(hint))


def is_table(hint: Any) -> bool:
    """Return whether a table may stand for a dataclass or a mapping, so that `env` could be one of its keys."""
    return class_in(hint) is not None or any(
        isinstance(get_origin(arm), type) and issubclass(get_origin(arm), Mapping) for arm in _arms(hint)
    )
