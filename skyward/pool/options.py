"""The options of a pool: other spellings that users know, and checks that name the field, the value and the range."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ..accelerators import Accelerator
from ..core.bounds import is_positive
from ..core.spellings import foreign
from ..errors import UsageError
from ..values.allocation import validate_allocation
from ..values.image import Image
from ..values.machine import LogSink

__all__ = ["ALIASES", "PoolAliases", "check_nodes", "check_options", "check_roles", "is_pool_name"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,59}")
_CHOICES: dict[str, tuple[object, ...]] = {
    "executor": ("process", "thread"),
    "architecture": (None, "x86_64", "arm64"),
    "console": (None, True, False),
}
_ABOVE_ZERO = {
    "memory_gib": "GiB",
    "max_hourly_cost": "USD per hour",
    "budget_usd": "USD",
    "default_timeout_s": "seconds",
    "provision_timeout_s": "seconds",
}

ALIASES = {
    "memory_gb": "memory_gib",
    "logging": "logs",
    "default_compute_timeout": "default_timeout_s",
    "provision_timeout": "provision_timeout_s",
}
"""Other names of options, in Python and in files."""


class PoolAliases(TypedDict, total=False):
    """The other names with their types, for type checkers."""

    memory_gb: float | None
    logging: bool | LogSink
    default_compute_timeout: float | None
    provision_timeout: float


def is_pool_name(name: str) -> bool:
    """Whether a pool may be called so: 1 to 60 letters, digits, '-', '_' and '.', a letter first."""
    return _NAME.fullmatch(name) is not None


def check_options(options: Mapping[str, Any]) -> None:
    """All arguments of a ComputePool, by name. Raises UsageError for the first that is not legal."""
    for field in ("nodes", "concurrency"):
        _check_count(field, options[field])
    for field in ("max_inflight", "vcpus"):
        if options[field] is not None:
            _check_count(field, options[field])
    for field, choices in _CHOICES.items():
        if options[field] not in choices:
            legal = ", ".join(map(repr, choices))
            raise UsageError(f"{field}: {options[field]!r}; it is one of {legal}", field=field)
    for field, unit in _ABOVE_ZERO.items():
        if options[field] is not None and not is_positive(options[field]):
            raise UsageError(f"{field}: {options[field]!r}; it is a number of {unit} > 0", field=field)
    for field, (is_legal, legal) in _RULES.items():
        if not is_legal(options[field]):
            raise UsageError(f"{field}: {options[field]!r}{legal}", field=field)
    validate_allocation(options["allocation"])


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = f"; {foreign('skyward', 'Nodes')}" if isinstance(value, tuple | list | dict) else ""
        raise UsageError(
            f"{field}: {value!r}; it is a whole number >= 1{hint if field == 'nodes' else ''}", field=field
        )


def _are_names(value: Any) -> bool:
    return not isinstance(value, str) and all(isinstance(name, str) for name in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "provider": (
        lambda v: hasattr(v, "launch") and not isinstance(v, type),  # a class has all methods, and no object for them
        " is not a provider; give sky.Local(), for example",
    ),
    "initializer": (lambda v: v is None or callable(v), " is not a function"),
    "initargs": (lambda v: isinstance(v, tuple | list), "; it is a tuple of the initializer's arguments"),
    "logs": (
        lambda v: isinstance(v, bool) or callable(v),
        "; it is True, False, sky.LogFiles(folder) or a function of a LogLine",
    ),
    "image": (lambda v: v is None or isinstance(v, Image), " is not a sky.Image"),
    "accelerator": (
        lambda v: v is None or isinstance(v, str | Accelerator),
        "; it is one name, or one value of sky.accelerators",
    ),
    "cancel_grace_s": (lambda v: is_positive(v, or_zero=True), "; it is a number of seconds >= 0"),
    "preload": (_are_names, "; it is a list of names of modules"),
    "name": (
        lambda v: v is None or (isinstance(v, str) and is_pool_name(v)),
        "; it is 1 to 60 letters, digits, '-', '_' and '.', a letter first",
    ),
}
"""Field -> (what is legal, how the sentence about what is not goes on)."""


def check_nodes(field: str, numbers: Iterable[int], count: int) -> tuple[int, ...]:
    """Return the numbers if they are nodes of a pool of `count`. Raises UsageError, which names the field."""
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise UsageError(f"{field}: {numbers!r}; it is a list of numbers of nodes, such as [0, 2]", field=field)
    chosen = tuple(numbers)
    if not chosen:
        raise UsageError(f"{field}: {numbers!r}; name at least one node", field=field)
    for number in chosen:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            there = "node 0 only" if count == 1 else f"nodes 0 to {count - 1}"
            raise UsageError(f"{field}: there is no node {number!r}; the pool has {there}", field=field)
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{field}: {list(chosen)!r}; a node is named twice", field=field)
    return chosen


def check_roles(roles: Mapping[str, Sequence[int]] | None, count: int) -> dict[str, tuple[int, ...]]:
    """Return which nodes of a pool of `count` are kept for which role. Raises UsageError."""
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise UsageError(f"roles: {roles!r}; it is a dict from names to numbers of nodes", field="roles")
    checked: dict[str, tuple[int, ...]] = {}
    role_of: dict[int, str] = {}
    for name, numbers in roles.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"roles: {name!r}; the name of a role is text that is not empty", field="roles")
        checked[name] = check_nodes(f"roles[{name!r}]", numbers, count)
        for number in checked[name]:
            if number in role_of:
                raise UsageError(
                    f"roles: node {number} is in {role_of[number]!r} and in {name!r}; a node has one role",
                    field="roles",
                )
            role_of[number] = name
    if len(role_of) == count:
        raise UsageError(
            f"roles: all {count} nodes have one, so none is left for ordinary calls (`>> pool`, map); "
            "leave one out, or make more nodes",
            field="roles",
        )
    return checked
