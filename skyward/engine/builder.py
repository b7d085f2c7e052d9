"""Construction of tasks and gangs from packed calls, both those of the client and those made inside tasks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..calls.futures import Future
from ..calls.options import CallOptions
from ..errors import UsageError
from ..schedule.resources import UNIT
from ..wire.payloads import Encoded
from ..wire.tasks import CallKind, Mode, TaskHead
from .gang import Gang
from .retries import Retries
from .tasks import Task, WireFunction

if TYPE_CHECKING:
    from ..values.launch import ProcessLaunch
    from ..values.launch_facts import GangLaunch, LaunchFacts

TaskT = TypeVar("TaskT", bound=Task)

Place = tuple[int, int, int]
"""Place of a task in a broadcast: (this part, number of parts, number of the first node)."""

_ALONE: Place = (0, 1, 0)

_HEADS = 256
"""Heads to remember. Most open calls differ only in their arguments."""

_LAUNCH_LIMIT = 64 * 1024
"""Bytes. The agent sends the order to start a rank to the zygote in one packet."""


class PackedCall(NamedTuple):
    """Call that is ready to travel."""

    name: str
    function: WireFunction
    payload: Encoded
    options: CallOptions


class TaskBuilder:
    """Builder of the tasks and gangs of one engine. Thread-safe.

    Args:
        next_id: Returns a number that no other task or gang has.
        ranks_per_node: Returns how many ranks of a launch one node runs.
        cancel_gang: Stops the gang of the given number.
        default_timeout_s: Timeout of calls without `timeout_s`; None: no limit.
    """

    def __init__(
        self,
        next_id: Callable[[], int],
        ranks_per_node: Callable[[GangLaunch], int],
        cancel_gang: Callable[[int], None],
        default_timeout_s: float | None,
    ) -> None:
        self.next_id = next_id
        self._ranks_per_node = ranks_per_node
        self._cancel_gang = cancel_gang
        self._default_timeout_s = default_timeout_s

    def task(
        self,
        task_class: type[TaskT],
        task_id: int,
        call: PackedCall,
        kind: int,
        place: Place = _ALONE,
        *,
        mode: int = Mode.CALL,
        inputs: int = 0,
        window: int = 0,
        **fields: Any,
    ) -> TaskT:
        """Build the task of a plain call or of one part of a broadcast.

        Args:
            task_class: Class of the task.
            task_id: Number of the task.
            call: The packed call.
            kind: Kind of the call, a `CallKind`.
            place: Place of the task in a broadcast.
            mode: Form of the payload, a `Mode`.
            inputs: Number of iterators among the arguments that the client feeds.
            window: Number of items of a stream that may be in flight.
            **fields: Further fields of `task_class`.

        Raises:
            UsageError: The call has options that only gangs support.
        """
        name, function, payload, options = call
        if options.max_restarts or options.hang_timeout_s:
            refuse_gang_options(options, name)
        timeout_s = options.timeout_s
        task = task_class(
            id=task_id,
            name=name,
            head=_head(function.digest, mode, kind, inputs, window, place),
            function=function,
            payload=payload,
            options=options,
            timeout_s=self._default_timeout_s if timeout_s is None else timeout_s,
            **fields,
        )
        if payload.blobs and any(blob.in_memory() is not None for blob in payload.blobs):
            task.in_bulk = False  # descriptors are scarce, and each of these takes some once it is sent
        return task

    def gang(
        self,
        call: PackedCall,
        launch: ProcessLaunch | LaunchFacts,
        launch_bytes: bytes,
        *,
        nodes: tuple[int, ...] | None,
        some_of: tuple[int, ...] | None,
        mode: int = Mode.CALL,
        is_nested: bool = False,
    ) -> Gang:
        """Build the gang of a call under an integration, on `nodes` or on some of `some_of`; see `Gang`.

        Raises:
            UsageError: The options of the integrations are too large.
        """
        if len(launch_bytes) > _LAUNCH_LIMIT:
            names = ", ".join(launch.names)
            raise UsageError(
                f"integration options ({names}): {len(launch_bytes)} bytes exceed the limit of {_LAUNCH_LIMIT}; "
                "pass large objects as arguments of the function"
            )
        options = call.options
        if options.timeout_s is None and self._default_timeout_s is not None:
            options = dataclasses.replace(options, timeout_s=self._default_timeout_s)
        gang_id = self.next_id()
        return Gang(
            id=gang_id,
            name=call.name,
            launch=launch,
            launch_bytes=launch_bytes,
            function=call.function,
            payload=call.payload,
            head=TaskHead(call.function.digest, mode, CallKind.GANG, 0, 0),
            options=options,
            nodes=nodes,
            some_of=some_of,
            count=options.nodes if nodes is None else None,
            ranks_per_node=self._ranks(launch, options),
            future=Future(self._cancel_gang, call_id=gang_id),
            retries=Retries(options),
            restarts_left=options.max_restarts,
            is_nested=is_nested,
        )

    def _ranks(self, launch: ProcessLaunch | LaunchFacts, options: CallOptions) -> int:
        """Return the number of ranks per node. "auto" counts the devices that the call books, if it says a number."""
        devices = options.need.devices if options.need is not None else None
        if launch.ranks_per_node == "auto" and devices is not None:
            return max(1, devices // UNIT)
        return self._ranks_per_node(launch)


@functools.lru_cache(maxsize=_HEADS)
def _head(digest: bytes, mode: int, kind: int, inputs: int, window: int, place: Place) -> TaskHead:
    """Return the head of a task. Calls share it, because the garbage collector visits all objects of open calls."""
    return TaskHead(digest, mode, kind, inputs, window, *place)


def refuse_gang_options(options: CallOptions, name: str) -> None:
    """Raise UsageError if a plain call has options that only gangs support."""
    for field in ("max_restarts", "hang_timeout_s"):
        if value := getattr(options, field):
            raise UsageError(
                f"{field}={value!r}: {name!r} uses no integration, so it has no ranks; "
                "use retries=, retry_on= or timeout_s= for a plain call"
            )
