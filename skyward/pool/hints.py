"""Whether a value of a TOML file fits the annotation of the argument that it is for; what would, in words."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

__all__ = ["class_in", "element_of", "illegal", "is_reference", "is_table", "takes"]

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
    """What would be legal, in words, where the value is not; "" where it is, or only its maker can tell."""
    said = [_illegal_for(value, arm) for arm in _arms(hint) if arm is not type(None)]
    return "" if not all(said) else " or ".join(dict.fromkeys(said))


def _illegal_for(value: Any, arm: Any) -> str:  # a table
    origin = get_origin(arm) or arm
    if origin is Literal:
        legal = get_args(arm)
        return "" if value in legal else f"one of {', '.join(repr(one) for one in legal)}"
    if arm in _PLAIN:
        classes, words = _PLAIN[arm]
        fits = isinstance(value, classes) and (arm is bool or not isinstance(value, bool))
        return "" if fits else words
    if not isinstance(origin, type) or origin is object:
        return ""
    if issubclass(origin, Mapping):
        fits = isinstance(value, dict) and not any(
            illegal(one, element_of(arm)) for one in value.values() if not is_reference(one)
        )
        return "" if fits else f"a table of {_words(element_of(arm))}"
    if issubclass(origin, os.PathLike):
        return "" if isinstance(value, str) else "text"
    if origin in (list, tuple, set, frozenset) or issubclass(origin, Iterable):
        fits = isinstance(value, list) and _all_fit(value, element_of(arm))
        return "" if fits else f"a list of {_words(element_of(arm))}"
    if dataclasses.is_dataclass(origin):
        return "" if isinstance(value, dict) else "a table"
    return f"a {origin.__name__}"  # which no file can hold


def _all_fit(values: Iterable[Any], hint: Any) -> bool:
    return not any(illegal(value, hint) for value in values if not is_reference(value))


def is_reference(value: Any) -> bool:
    """Whether it is `{ env = "NAME" }`: the value of a variable of the environment."""
    return isinstance(value, dict) and set(value) == {"env"} and isinstance(value["env"], str)


def _words(hint: Any) -> str:
    known = [_PLAIN[arm][1] for arm in _arms(hint) if arm in _PLAIN]
    return " or ".join(known) or "values"


def element_of(hint: Any) -> Any:
    """What a list or table of this hint consists of."""
    for arm in _arms(hint):
        args = [a for a in get_args(arm) if a is not Ellipsis]
        if args and get_origin(arm) is not Literal:
            return args[-1]  # the first arm that has any: it is the widest, where there are several
    return Any


def class_in(hint: Any) -> Callable[..., Any] | None:
    """The class of ours, if there is one, that a table stands for."""
    return next((arm for arm in _arms(hint) if dataclasses.is_dataclass(arm) and isinstance(arm, type)), None)


def takes(hint: Any, kind: type) -> bool:
    """Whether a value of that very class may stand there."""
    return any(arm is kind for arm in _arms(hint))


def is_table(hint: Any) -> bool:
    """Whether a table may stand there for a value of ours or a mapping, one of whose keys is `env`."""
    return class_in(hint) is not None or any(
        isinstance(get_origin(arm), type) and issubclass(get_origin(arm), Mapping) for arm in _arms(hint)
    )
