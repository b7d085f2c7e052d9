"""Checks of evaluation options, with the same messages wherever an option is accepted."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, get_args

from ...core.spellings import advice
from ...errors import UsageError, WrongArguments


def check_one_of(field: str, value: object, kind: Any) -> None:
    """Raise UsageError unless `value` is one of the Literal `kind`."""
    if value not in get_args(kind):
        raise UsageError(f"{field}={value!r}: unknown value; use one of {', '.join(map(repr, get_args(kind)))}")


def check_at_least(field: str, value: object, least: int) -> None:
    """Raise UsageError unless `value` is a whole number >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{field}={value!r}: must be a whole number >= {least}; set {field}={least} or more")


def check_names(place: str, names: Iterable[str], known: Collection[str]) -> None:
    """Check options that a class passes on; raise WrongArguments with the nearest known name."""
    for name in names:
        if name not in known:
            raise WrongArguments(f"{name}: not an option of {place}; {advice(place, name, known)}", field=name)
