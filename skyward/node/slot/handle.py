"""Handle that a pool, or a part of it, becomes in a task: it sends calls through the task's node to the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from ...calls.active import PoolLike, open_pools
from ...calls.actor_handle import ActorMethod, actor_of_call, refuse_broadcast
from ...calls.futures import Future, followed, value_of, values_of
from ...calls.graphs import has_calls
from ...calls.pending import PendingCompute, PendingComputeGroup
from ...calls.target import CallTarget
from ...core.records import dataclass
from ...errors import PoolClosed, UsageError
from ...values.ref import Ref
from ...wire.tasks import CallKind, actor_place
from .caller import Caller, caller_of
from .runtime import current_call

T = TypeVar("T")


class TargetHandle(CallTarget):
    """A pool, or some of its nodes, as an argument or in a closure of one of the pool's tasks.

    In the task it is a target again. `f(x) > target` returns a future, `f(x) >> target` the value, `f(x) @ target` one
    value per node, and `&` joins calls. The handle of an actor works there too, and `actor(name)` finds one. Every
    thread of the task may use it, and every rank of a gang. With `executor="thread"` only the task's own thread may.

    - Calls travel through the client, which places them ahead of all waiting calls. Arrays and tensors travel as
      blobs, behind all other frames. UsageError refuses generator functions, and iterators as arguments.
    - When the task ends, fails or is cancelled, its open calls are cancelled.
    - Errors arrive as themselves.
    - Graphs run as in the program: `f(g(x)) >> target` runs `g` first, near `f`.
    - `f(x).keep() >> target` and `pool.put(value)` return references. They end with the task, unless it returns
      them. `put` keeps the bytes on the task's own node, and nowhere else unless a call takes them there.
    - The task keeps its slot while it waits. UsageError refuses a call that could never start because waiting tasks
      hold all of its slots.

    In the process that opened the pool, the handle stands for the pool itself. In other processes, and once the pool
    is closed, using it raises PoolClosed. In a task of another pool it raises UsageError.

    Example:
        @sky.compute
        def total(numbers, pool):
            futures = [square(n) > pool for n in numbers]
            return sum(future.result() for future in futures)

        with sky.ComputePool(nodes=2, concurrency=2) as pool:
            print(total([1, 2, 3], pool) >> pool)
    """

    _sender: TaskSender

    def __init__(self, pool: str, nodes: tuple[int, ...], is_whole: bool, label: str, total_slots: int) -> None:
        """Create a handle. `is_whole`: it stands for the whole pool. `label`: its name in messages."""
        self._sender = TaskSender(pool=pool, numbers=nodes, is_whole=is_whole, label=label, slots=total_slots)

    def actor(self, name: str) -> Any:
        """Return the handle of the actor with that name.

        Args:
            name: Name of an actor that lives in the pool.

        Raises:
            UsageError: There is none.
            PoolClosed: The pool is not open.
        """
        return self._sender.find_actor(name)

    def put(self, value: T, *, nodes: Iterable[int] | None = None) -> Ref[T]:
        """Keep a value on the node of this task, and return a reference that calls take instead of the value.

        Args:
            value: Any picklable value.
            nodes: Nodes without a role to send it to at once.

        Raises:
            ArgumentNotPicklable: The value cannot be pickled.
            UsageError: There is no such node, or this is a part of a pool.
        """
        return self._sender.put(value, nodes)

    def _submit_parts(self, group: PendingComputeGroup) -> list[Future[Any]]:
        return self._sender.submit_parts(group.items)

    def __repr__(self) -> str:
        return str(self._sender)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TargetHandle) and other._sender == self._sender

    def __hash__(self) -> int:
        return hash(self._sender)


@dataclass(frozen=True, kw_only=True)
class TaskSender:
    """Sends calls through the node's agent of the task that runs in this thread; see `Sender`.

    In the process that opened the pool, it sends them to the pool itself.
    """

    pool: str
    numbers: tuple[int, ...]
    is_whole: bool
    label: str
    slots: int

    def __str__(self) -> str:
        return f"<{self.label} of pool {self.pool}>"

    def run(self, pending: PendingCompute[T]) -> T:
        there = self._there()
        value: T = value_of(self._send(there, pending)) if isinstance(there, Caller) else there.run(pending)
        return value

    def submit(self, pending: PendingCompute[T]) -> Future[T]:
        there = self._there()
        if isinstance(there, Caller):
            return self._send(there, pending)
        return there.submit(pending)

    submit_part = submit

    def submit_parts(self, pendings: Sequence[PendingCompute[Any]]) -> list[Future[Any]]:
        """Send the calls of a group. Calls among their arguments run once for the whole group."""
        there = self._there()
        if isinstance(there, Caller) and any(map(_has_calls, pendings)):
            return self._graph(there, pendings)
        return [self.submit(pending) for pending in pendings]

    def put(self, value: T, nodes: Iterable[int] | None) -> Ref[T]:
        if not self.is_whole:
            raise UsageError(f"{self}: a part of a pool has no put(); pass the pool itself to the task")
        there = self._there()
        chosen = () if nodes is None else tuple(nodes)
        for node in chosen:
            if node not in self.numbers:
                places = ", ".join(map(str, self.numbers))
                raise UsageError(f"nodes={node!r}: not a node of {self}; use {places}", field="nodes", value=node)
        if isinstance(there, Caller):
            return there.put(value, chosen)
        ref: Ref[T] = there.put(value, nodes=nodes)  # type: ignore[attr-defined]
        return ref

    def broadcast(self, pending: PendingCompute[T]) -> list[T]:
        there = self._there()
        if not isinstance(there, Caller):
            return there.broadcast(pending)
        if isinstance(pending.fn, ActorMethod):
            refuse_broadcast(pending.name)
        _refuse_streams(pending)
        if _has_calls(pending):
            (resolved,) = there.graphs.resolve((pending,), partial(self._send_one, there))
            pending = value_of(resolved)
        if pending.options.nodes is not None:
            future: Future[Any] = self._send(there, pending)
            chosen: list[T] = value_of(future)
            return chosen
        if pending.fn.launch.is_gang:
            (of_gang,) = there.submit(pending, [{"kind": int(CallKind.GANG), "nodes": self.numbers, "is_on_all": True}])
            values: list[T] = value_of(of_gang)
            return values
        shared = {"kind": int(CallKind.BROADCAST), "parts": len(self.numbers), "first_node": self.numbers[0]}
        where = [{**shared, "nodes": (node,), "part": part} for part, node in enumerate(self.numbers)]
        return values_of(there.submit(pending, where))

    def find_actor(self, name: str) -> Any:
        """Return the handle of a named actor. Raises UsageError."""
        there: Any = self._there()
        if isinstance(there, Caller):
            return value_of(there.find_actor(name))
        return getattr(there, "pool", there).actor(name)  # a part of a pool has its pool

    def failures(self) -> None:
        """Report nothing: only a pool counts failures, to report those that nobody has read."""

    def _send(self, caller: Caller, pending: PendingCompute[T]) -> Future[T]:
        if _has_calls(pending):
            (future,) = self._graph(caller, (pending,))
            return future
        return self._send_one(caller, pending)

    def _graph(self, caller: Caller, pendings: Sequence[PendingCompute[Any]]) -> list[Future[Any]]:
        """Send calls once the calls among their arguments have run."""
        send = partial(self._send_one, caller)
        return [followed(future, send) for future in caller.graphs.resolve(pendings, send)]

    def _send_one(self, caller: Caller, pending: PendingCompute[T]) -> Future[T]:
        _refuse_streams(pending)
        if isinstance(pending.fn, ActorMethod):
            part, parts, first = actor_place(actor_of_call(pending.fn, pending.options, self.pool))
            place = {"kind": int(CallKind.ACTOR), "nodes": None, "part": part, "parts": parts, "first_node": first}
            (of_actor,) = caller.submit(pending, [place])
            return of_actor
        is_gang = pending.fn.launch.is_gang or pending.options.nodes is not None
        kind = int(CallKind.GANG if is_gang else CallKind.PLAIN)
        (future,) = caller.submit(pending, [{"kind": kind, "nodes": None if self.is_whole else self.numbers}])
        return future

    def _there(self) -> Caller | PoolLike:
        call = current_call()
        if call is not None and call.info.job_id == self.pool:
            return caller_of(call)
        for pool in open_pools():
            if getattr(pool, "job_id", None) == self.pool:
                return pool if self.is_whole else pool.nodes(self.numbers)  # type: ignore[attr-defined]
        if call is not None:
            raise UsageError(
                f"{self}: belongs to another pool than this task ({call.info.job_id}); call only the task's own pool"
            )
        raise PoolClosed(
            f"{self}: its pool is not open here; use it in tasks of that pool, or in the process that opened it while "
            "it is open"
        )


def _has_calls(pending: PendingCompute[Any]) -> bool:
    return has_calls((pending.args, pending.kwargs))


def _refuse_streams(pending: PendingCompute[Any]) -> None:
    if pending.fn.is_generator:
        raise UsageError(
            f"{pending.name}: a generator function, whose values cannot be streamed to a task; return a list"
        )
    if pending.fn.iterator_parameters:
        names = ", ".join(pending.fn.iterator_parameters)
        raise UsageError(
            f"{pending.name}: takes an iterator ({names}), which cannot be streamed from a task; pass a list to a "
            "parameter that is not annotated Iterator"
        )
