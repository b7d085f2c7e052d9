"""From what a user gives as `compute` to where evaluations run."""

from __future__ import annotations

from types import ModuleType
from typing import Any, cast

from ....calls.active import resolve_target
from ....errors import UsageError
from ..dispatcher import Dispatcher

__all__ = ["as_dispatcher"]

_CHOICES = (
    "None (threads of this process), 'subprocess', a pool, a node or role of one (pool.node(1)), an "
    "AdaptiveCompute, or any Dispatcher"
)


def as_dispatcher(compute: Any = None, *, field: str = "compute") -> Dispatcher:
    """Where evaluations run, of what a user gave.

    A Dispatcher is given back as it is, and is its owner's to close; what is made here is the caller's to close.

    Args:
        compute: None or "in-process": threads of this process. "subprocess": a process of ours beside it. A pool, or
            a node or role of one: anything with `run` and `submit` of pending calls. `sky`: the pool that is open here.
        field: how errors name it.

    Raises: UsageError, naming `field`.
    """
    if compute is None or (isinstance(compute, str) and compute == "in-process"):
        from .in_process import InProcessDispatcher

        return InProcessDispatcher()
    if isinstance(compute, str) and compute == "subprocess":
        from .subprocesses import SubprocessDispatcher

        return SubprocessDispatcher()
    if _is_address(compute):
        raise UsageError(
            f"{field}: {compute!r} is an address; workers are not reached by address here: open a pool "
            "(sky.ComputePool(provider=sky.SSH(hosts=[...])), say) and give the pool, or a node of it: pool.node(1)"
        )
    if isinstance(compute, (str, type)):
        raise UsageError(f"{field}: {compute!r}; it is {_CHOICES}")
    if callable(getattr(compute, "submit", None)) and callable(getattr(compute, "pressure", None)):
        return cast(Dispatcher, compute)
    if isinstance(compute, ModuleType) and compute.__name__ == "skyward":
        compute = resolve_target(compute)
    if callable(getattr(compute, "submit", None)) and callable(getattr(compute, "run", None)):
        from .remote import PoolDispatcher

        return PoolDispatcher(compute)
    raise UsageError(f"{field}: {compute!r}; it is {_CHOICES}")


def _is_address(compute: Any) -> bool:
    text = compute if isinstance(compute, str) else getattr(compute, "uri", None)
    return isinstance(text, str) and (compute is not text or "://" in text)
