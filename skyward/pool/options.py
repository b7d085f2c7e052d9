"""Options of a pool: aliases that users know, and checks whose messages name field, value and range."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from ..accelerators import Accelerator
from ..core.bounds import is_positive
from ..errors import UsageError
from ..values.allocation import validate_allocation
from ..values.image import Image
from ..values.machine import LogSink
from ..values.nodes import Nodes

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,59}")
_CHOICES: dict[str, tuple[object, ...]] = {
    "executor": ("process", "thread"),
    "architecture": (None, "x86_64", "arm64"),
    "console": (None, True, False),
    "direct_transfers": (True, False),
    "on_idle": ("rest", "close"),
    "engine": ("auto", "direct", "ray"),
}
_MAX_GRACE_S = 6500
"""A cancel has 16 bits for tenths of a second."""
_ABOVE_ZERO = {
    "memory_gib": "GiB",
    "max_hourly_cost": "USD per hour",
    "budget_usd": "USD",
    "default_timeout_s": "seconds",
    "provision_timeout_s": "seconds",
    "idle_timeout_s": "seconds",
    "detached_for_s": "seconds",
}

ALIASES = {
    "memory_gb": "memory_gib",
    "logging": "logs",
    "default_compute_timeout": "default_timeout_s",
    "provision_timeout": "provision_timeout_s",
}
"""Aliases of options, in Python and in files."""


class PoolAliases(TypedDict, total=False):
    """Types of the aliases, for type checkers."""

    memory_gb: float | None
    logging: bool | LogSink
    default_compute_timeout: float | None
    provision_timeout: float


def is_pool_name(name: str) -> bool:
    """Return whether a pool may have this name: 1 to 60 letters, digits, '-', '_' and '.', a letter first."""
    return _NAME.fullmatch(name) is not None


def check_options(options: Mapping[str, Any]) -> None:
    """Check all arguments of a ComputePool, by name. Raises UsageError for the first illegal one."""
    _check_count("concurrency", options["concurrency"])
    _check_idle(Nodes.of(options["nodes"]), options["idle_timeout_s"], options["on_idle"])
    for field in ("max_inflight", "vcpus"):
        if options[field] is not None:
            _check_count(field, options[field])
    for field, choices in _CHOICES.items():
        if options[field] not in choices:
            legal = ", ".join(map(repr, choices))
            raise _refusal(field, options[field], f"not supported; use one of {legal}")
    for field, unit in _ABOVE_ZERO.items():
        if options[field] is not None and not is_positive(options[field]):
            raise _refusal(field, options[field], f"must be a number of {unit} > 0; pass a positive number or omit it")
    for field, (is_legal, problem, advice) in _RULES.items():
        if not is_legal(options[field]):
            raise _refusal(field, options[field], f"{problem}; {advice}")
    validate_allocation(options["allocation"])


def _refusal(field: str, value: object, problem: str) -> UsageError:
    return UsageError(f"{field}={value!r}: {problem}", field=field, value=value)


def _check_count(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(field, value, f"must be a whole number >= 1; set {field}=1 or more")


def _check_idle(nodes: Nodes, idle_timeout_s: float | None, on_idle: str) -> None:
    if on_idle == "close" and idle_timeout_s is None and nodes.is_fixed:
        raise _refusal("on_idle", on_idle, "needs a timeout; set idle_timeout_s=600 too")


def check_scale(value: object, nodes: Nodes) -> None:
    """Raise UsageError unless an elastic pool of these bounds can have this number of nodes."""
    if nodes.is_fixed:
        raise _refusal(
            "scale.nodes", value, f"the pool has a fixed size of {nodes.max}; open it with nodes=(min, max) to scale it"
        )
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and nodes.min <= value <= nodes.max):
        return
    raise _refusal("scale.nodes", value, f"must be a whole number from {nodes.min} to {nodes.max}; pass one, or None")


def _are_names(value: Any) -> bool:
    return not isinstance(value, str) and all(isinstance(name, str) for name in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "provider": (
        lambda v: v is None or (hasattr(v, "launch") and not isinstance(v, type)),  # a class is not an instance
        "not a provider",
        "pass an instance, such as sky.Local()",
    ),
    "initializer": (lambda v: v is None or callable(v), "not a function", "pass a function or None"),
    "initargs": (lambda v: isinstance(v, tuple | list), "not a tuple", "pass the initializer's arguments"),
    "logs": (
        lambda v: isinstance(v, bool) or callable(v),
        "not supported",
        "pass True, False, sky.LogFiles(folder) or a function of a LogLine",
    ),
    "image": (lambda v: v is None or isinstance(v, Image), "not an image", "pass a sky.Image(...) or None"),
    "accelerator": (
        lambda v: all(
            isinstance(one, str | Accelerator) for one in (v if isinstance(v, list | tuple) else (v,) * (v is not None))
        ),
        "not an accelerator",
        "pass a name, a value of sky.accelerators, or a list of them",
    ),
    "cancel_grace_s": (
        lambda v: is_positive(v, or_zero=True) and v <= _MAX_GRACE_S,
        f"must be a number of seconds from 0 to {_MAX_GRACE_S}",
        "pass 0 to kill cancelled calls at once",
    ),
    "preload": (_are_names, "not a list of module names", 'pass a list such as ["torch"]'),
    "name": (
        lambda v: v is None or (isinstance(v, str) and is_pool_name(v)),
        "not a valid name",
        "use 1 to 60 letters, digits, '-', '_' and '.', with a letter first",
    ),
}
"""Field -> (check, problem, what to do)."""


def check_nodes(field: str, numbers: Iterable[int], count: int) -> tuple[int, ...]:
    """Return the numbers if each is a node of a pool of `count`. Raises UsageError, which names the field."""
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Iterable):
        raise _refusal(field, numbers, "not a list of node numbers; pass a list such as [0, 2]")
    chosen = tuple(numbers)
    if not chosen:
        raise _refusal(field, numbers, "empty; name at least one node")
    for number in chosen:
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            nodes = "node 0, the only one" if count == 1 else f"nodes 0 to {count - 1}"
            raise _refusal(field, number, f"no such node; use {nodes}")
    if len(set(chosen)) < len(chosen):
        raise _refusal(field, list(chosen), "repeats a node; name each node once")
    return chosen


def check_roles(roles: Mapping[str, Sequence[int]] | None, count: int) -> dict[str, tuple[int, ...]]:
    """Return the nodes of each role in a pool with always `count` nodes or more. Raises UsageError."""
    if roles is None:
        return {}
    if not isinstance(roles, Mapping):
        raise _refusal("roles", roles, 'not a dict; pass names with node numbers, such as {"evaluation": [2]}')
    if roles and not count:
        raise _refusal("roles", dict(roles), "the pool may have no nodes; set min=1 or more, above the nodes of roles")
    checked: dict[str, tuple[int, ...]] = {}
    role_of: dict[int, str] = {}
    for name, numbers in roles.items():
        if not isinstance(name, str) or not name:
            raise UsageError(f"roles: {name!r} is not a role name; use text that is not empty", field="roles")
        checked[name] = check_nodes(f"roles[{name!r}]", numbers, count)
        for number in checked[name]:
            if number in role_of:
                raise UsageError(
                    f"roles: node {number} is in {role_of[number]!r} and in {name!r}; give each node one role",
                    field="roles",
                )
            role_of[number] = name
    if len(role_of) == count:
        raise UsageError(
            f"roles: all {count} nodes have a role, so none is left for ordinary calls (`>> pool`, map); "
            "leave one out, or add nodes",
            field="roles",
        )
    return checked
