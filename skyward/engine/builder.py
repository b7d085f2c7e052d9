"""Tasks and gangs made from packed calls, alike for calls of the client and for calls from inside a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..calls.futures import Future
from ..calls.options import CallOptions
from ..errors import UsageError
from ..values.launch import ProcessLaunch
from ..wire.payloads import Encoded
from ..wire.tasks import CallKind, Mode, TaskHead
from .gang import Gang
from .tasks import Task, WireFunction

__all__ = ["PackedCall", "Place", "TaskBuilder", "refuse_gang_options"]

TaskT = TypeVar("TaskT", bound=Task)

Place = tuple[int, int, int]
"""Of a broadcast: (this part, number of parts, number of the first node)."""

_ALONE: Place = (0, 1, 0)

_LAUNCH_LIMIT = 64 * 1024
"""Bytes: an order to fork is one packet."""


class PackedCall(NamedTuple):
    """One call, ready to travel."""

    name: str
    function: WireFunction
    payload: Encoded
    options: CallOptions


class TaskBuilder:
    """Make the tasks and gangs of one engine. Thread-safe.

    Args:
        next_id: returns a number that no other task or gang has.
        ranks_per_node: returns how many ranks of a launch one node runs.
        cancel_gang: stops the gang of that number.
        default_timeout_s: for calls that set no `timeout_s`; None: no limit.
    """

    def __init__(
        self,
        next_id: Callable[[], int],
        ranks_per_node: Callable[[ProcessLaunch], int],
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
        """Make the task of a plain call or of one part of a broadcast.

        Args:
            inputs: number of iterators among the arguments that the client feeds.
            window: items of a stream that may be on their way.
            fields: what only this class of tasks has.

        Raises:
            UsageError: the call has options that only ranks can have.
        """
        name, function, payload, options = call
        if options.max_restarts or options.hang_timeout_s:
            refuse_gang_options(options, name)
        timeout_s = options.timeout_s
        return task_class(
            id=task_id,
            name=name,
            head=TaskHead(function.digest, mode, kind, inputs, window, *place),
            function=function,
            payload=payload,
            options=options,
            timeout_s=self._default_timeout_s if timeout_s is None else timeout_s,
            **fields,
        )

    def gang(
        self,
        call: PackedCall,
        launch: ProcessLaunch,
        launch_bytes: bytes,
        *,
        nodes: tuple[int, ...] | None,
        one_of: tuple[int, ...] | None,
        is_nested: bool = False,
    ) -> Gang:
        """Make the gang of a call under an integration, on all of `nodes` or on one of `one_of`; see `Gang`.

        Raises:
            UsageError: the options of the integrations are too large.
        """
        if len(launch_bytes) > _LAUNCH_LIMIT:
            names = ", ".join(integration.name for integration in launch.integrations)
            raise UsageError(
                f"the options of the integration ({names}) are {len(launch_bytes)} bytes; the limit is "
                f"{_LAUNCH_LIMIT}. Pass large things as arguments of the function"
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
            head=TaskHead(call.function.digest, Mode.CALL, CallKind.GANG, 0, 0),
            options=options,
            nodes=nodes,
            one_of=one_of,
            ranks_per_node=self._ranks_per_node(launch),
            future=Future(self._cancel_gang, call_id=gang_id),
            retries_left=options.retries,
            restarts_left=options.max_restarts,
            is_nested=is_nested,
        )


def refuse_gang_options(options: CallOptions, name: str) -> None:
    """Raise UsageError if a plain call has options that only ranks can have."""
    for field in ("max_restarts", "hang_timeout_s"):
        if getattr(options, field):
            raise UsageError(
                f"{field}: {name!r} is under no integration, so it has no ranks; for a plain call there are "
                "retries=, retry_on= and timeout_s="
            )
