"""What a pool, or a part of it, becomes in a task: a target of calls that goes by the task's own node to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ..active import Dispatcher, open_pools
from ..calls import PendingCompute, PendingComputeGroup, pending_of
from ..errors import PoolClosed, UsageError
from ..futures import Future
from ..operands import TargetOperators
from ..waiting import joined, streamed, value_of, values_of
from ..wire.tasks import CallKind
from .nested import Caller, caller_of
from .runtime import current_call

__all__ = ["TargetHandle"]

T = TypeVar("T")


class TargetHandle(TargetOperators):
    """A pool, or some of its nodes, that was passed to a task of that pool, as an argument or in a closure.

    There it is a target again: `f(x) > target` gives a future, `f(x) >> target` the value, `@` one value for each of
    the nodes, and `&` joins calls. Any thread of the task may use it (in `executor="thread"` the task's own thread
    only), and any rank of a gang.

    - The calls go through the client, which places them before all that waits, and back. Arrays and tensors travel
      as blobs, behind all other frames. Generator functions and iterators as arguments are refused with UsageError.
    - When the task ends or fails, or is cancelled, what it has called and has not ended is cancelled.
    - Errors come back as themselves.
    - The task keeps its slot while it waits. A call is refused with UsageError if it could never start, because all
      the slots that it may go to are held by tasks that wait for such calls.

    In the process that opened the pool a handle means the pool itself. Elsewhere, and once the pool is closed, its use
    raises PoolClosed; in a task of another pool UsageError.
    """

    def __init__(self, pool: str, nodes: tuple[int, ...], is_whole: bool, label: str, total_slots: int) -> None:
        """`is_whole`: ordinary calls to the whole pool. `label`: how it is called in messages."""
        self._pool = pool
        self._nodes = nodes
        self._is_whole = is_whole
        self._label = label
        self._total_slots = total_slots

    @property
    def node_numbers(self) -> tuple[int, ...]:
        """The nodes that calls go to: `@` sends to each of them, in this order."""
        return self._nodes

    @property
    def total_slots(self) -> int:
        """Plain calls that run there at once, those of others and the task's own included."""
        return self._total_slots

    def run(self, call: PendingCompute[T] | Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """The call's value: `pending >> target`. Raises what the call raised, as itself.

        Like a pool's, it takes a pending call, or a function and its arguments.
        """
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        there = self._there()
        return value_of(self._submit(there, pending)) if isinstance(there, Caller) else there.run(pending)

    def submit(self, call: PendingCompute[T] | Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A future of the call's value: `pending > target`."""
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        there = self._there()
        if isinstance(there, Caller):
            return self._submit(there, pending)
        return there.submit(pending)  # type: ignore[return-value]  # a pool's are ours

    def broadcast(self, call: PendingCompute[T] | Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """One value for each of the nodes, in their order: `pending @ target`."""
        pending: PendingCompute[T] = pending_of(call, args, kwargs)
        there = self._there()
        if not isinstance(there, Caller):
            return there.broadcast(pending)
        _refuse_streams(pending)
        if pending.fn.launch.is_gang:
            (future,) = there.submit(pending, [{"kind": int(CallKind.GANG), "nodes": self._nodes, "is_on_all": True}])
            values: list[T] = value_of(future)
            return values
        shared = {"kind": int(CallKind.BROADCAST), "parts": len(self._nodes), "first_node": self._nodes[0]}
        where = [{**shared, "nodes": (node,), "part": part} for part, node in enumerate(self._nodes)]
        return values_of(there.submit(pending, where))

    def run_group(self, group: PendingComputeGroup) -> Any:
        """The calls in parallel: a tuple of values, or an iterator if the group streams."""
        futures = [self.submit(pending) for pending in group]
        if group.stream:
            return streamed(futures, ordered=group.ordered)
        return tuple(values_of(futures))

    def submit_group(self, group: PendingComputeGroup) -> Future[tuple[Any, ...]]:
        """A future of the tuple of values. Cancelling it cancels all calls."""
        return joined([self.submit(pending) for pending in group])

    async def run_async(
        self, call: PendingCompute[T] | PendingComputeGroup | Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> Any:
        """`run` for asyncio: cancelling the await stops the call."""
        future: Future[Any]
        if isinstance(call, PendingComputeGroup):
            future = self.submit_group(call)
        else:
            future = self.submit(pending_of(call, args, kwargs))
        return await asyncio.wrap_future(future)

    def _submit(self, caller: Caller, pending: PendingCompute[T]) -> Future[T]:
        _refuse_streams(pending)
        kind = int(CallKind.GANG if pending.fn.launch.is_gang else CallKind.PLAIN)
        (future,) = caller.submit(pending, [{"kind": kind, "nodes": None if self._is_whole else self._nodes}])
        return future

    def _there(self) -> Caller | Dispatcher:
        call = current_call()
        if call is not None and call.info.job_id == self._pool:
            return caller_of(call)
        for pool in open_pools():
            if getattr(pool, "job_id", None) == self._pool:
                return pool if self._is_whole else pool.nodes(self._nodes)  # type: ignore[attr-defined]
        if call is not None:
            raise UsageError(
                f"{self!r} is of another pool than this task ({call.info.job_id}); a task can call its own pool only"
            )
        raise PoolClosed(
            f"{self!r}: its pool is not open here; a pool that was passed on can be used in the pool's own tasks, "
            "and in the process that opened it while it is open"
        )

    def __repr__(self) -> str:
        return f"<{self._label} of pool {self._pool}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TargetHandle) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((self._pool, self._nodes, self._is_whole))


def _refuse_streams(pending: PendingCompute[Any]) -> None:
    if pending.fn.is_generator:
        raise UsageError(
            f"{pending.name!r} is a generator function, whose values cannot be streamed to a task; return a list"
        )
    if pending.fn.iterator_parameters:
        names = ", ".join(pending.fn.iterator_parameters)
        raise UsageError(
            f"{pending.name!r} takes an iterator ({names}), which cannot be streamed from a task; pass a list to "
            "a parameter that is not annotated Iterator"
        )
