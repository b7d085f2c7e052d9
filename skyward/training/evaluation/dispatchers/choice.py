"""Conversion of a user's `compute` argument to a dispatcher."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

from ....calls.active import resolve_target
from ....errors import UsageError
from ..dispatcher import Dispatcher

_CHOICES = (
    "None (threads of this process), 'subprocess', a pool, a node or role of one (pool.node(1)), an "
    "AdaptiveCompute, or any Dispatcher"
)


def as_dispatcher(compute: Any = None, *, field: str = "compute") -> Dispatcher:
    """Return the dispatcher for a user's `compute` argument.

    A Dispatcher is returned as it is and stays its owner's to close. The caller closes any other result.

    Args:
        compute: None or "in-process" for threads of this process; "subprocess" for a process beside it; a pool, or a
            node or role of one (anything with `run` and `submit` of pending calls); `sky` for the pool open here.
        field: name of the argument, for errors.

    Raises:
        UsageError: `compute` is none of these.

    Example:
        >>> as_dispatcher("subprocess").name
        'subprocess'
    """
    if compute is None or (isinstance(compute, str) and compute == "in-process"):
        from .in_process import InProcessDispatcher

        return InProcessDispatcher()
    if isinstance(compute, str) and compute == "subprocess":
        from .subprocesses import SubprocessDispatcher

        return SubprocessDispatcher()
    if _is_address(compute):
        raise UsageError(
            f"{field}={compute!r}: is an address, and workers are not reached by address; open a pool, such as "
            "sky.ComputePool(provider=sky.SSH(hosts=[...])), and pass it or one of its nodes, pool.node(1)"
        )
    if isinstance(compute, (str, type)):
        raise UsageError(f"{field}={compute!r}: unknown place for evaluations; use {_CHOICES}")
    if callable(getattr(compute, "submit", None)) and callable(getattr(compute, "pressure", None)):
        return cast(Dispatcher, compute)
    if isinstance(compute, ModuleType) and compute.__name__ == "skyward":
        compute = resolve_target(compute)
    if callable(getattr(compute, "submit", None)) and callable(getattr(compute, "run", None)):
        from .remote import PoolDispatcher

        return PoolDispatcher(compute)
    raise UsageError(f"{field}={compute!r}: unknown place for evaluations; use {_CHOICES}")


def _is_address(compute: Any) -> bool:
    text = compute if isinstance(compute, str) else getattr(compute, "uri", None)
    return isinstance(text, str) and (compute is not text or "://" in text)
