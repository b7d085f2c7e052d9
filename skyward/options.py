"""The options of a pool: other spellings that users know, and checks that name the field, the value and the range."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from .calls import is_seconds
from .errors import UsageError

__all__ = ["check_above_zero", "check_choice", "check_count", "translated"]

_ALIASES = {
    "memory_gb": "memory_gib",
    "logging": "logs",
    "default_compute_timeout": "default_timeout_s",
    "provision_timeout": "provision_timeout_s",
}
_REFUSED = {
    "ttl": "leases replace it: nodes end when the `with` block or this process ends, and never by the clock, "
    "so a ten-hour run lives and a forgotten machine dies in minutes",
}


def translated(aliases: dict[str, Any], given: dict[str, Any], defaults: Mapping[str, Parameter]) -> dict[str, Any]:
    """Arguments by their proper names; `given` are those that came by them already. Raises UsageError."""
    for name in aliases:
        if name in _REFUSED:
            raise UsageError(f"{name}: not an option; {_REFUSED[name]}")
        if name not in _ALIASES:
            raise UsageError(f"{name}: not an option of ComputePool; see help(sky.ComputePool)")
        proper = _ALIASES[name]
        if given[proper] != defaults[proper].default:
            raise UsageError(f"{name}: given twice ({proper} is the same option)")
    return {_ALIASES[name]: value for name, value in aliases.items()}


def check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{field}: {value!r}; it is a whole number >= 1")


def check_above_zero(field: str, value: float | None, unit: str) -> None:
    if value is not None and not is_seconds(value):
        raise UsageError(f"{field}: {value!r}; it is a number of {unit} > 0")


def check_choice(field: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{field}: {value!r}; it is one of {', '.join(repr(c) for c in choices)}")
