"""Calls that an earlier client of a detached pool has made, as this one follows them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

from ..calls.futures import Future
from ..calls.options import CallOptions
from ..values.launch import Returns
from ..values.launch_facts import LaunchFacts
from ..wire.payloads import NO_ARGUMENTS
from ..wire.tasks import CallKind, Mode, TaskHead
from .gang import Gang
from .head.kept_calls import CallFacts
from .retries import Retries
from .tasks import CallTask, ResultStream, StreamTask, Task, WireFunction

_NOTHING = WireFunction(b"", NO_ARGUMENTS)
"""Function of a followed call: the head has the real one."""


class SessionNumbers(Iterator[int]):
    """Even numbers for the calls of one session with a head. Thread-safe."""

    def __init__(self) -> None:
        self._count = itertools.count(2, 2)

    def begin(self, first: int) -> None:
        """Go on with numbers that no earlier client has used."""
        self._count = itertools.count(first, 2)

    def __next__(self) -> int:
        return next(self._count)


class Follower(Protocol):
    """Engine of the client, as far as a followed call needs it."""

    @property
    def streams(self) -> Any: ...
    def cancel(self, task_id: int) -> None: ...
    def cancel_gang(self, gang_id: int) -> None: ...
    def abandon(self, task_id: int) -> None: ...


def follow_up(facts: CallFacts, engine: Follower) -> tuple[Future[Any], Task | Gang]:
    """Make the future of a call, and the task or gang that settles it when the head's frames come."""
    if facts.form == "gang":
        return _gang(facts, engine.cancel_gang)
    future: Future[Any] = Future(engine.cancel, call_id=facts.number)
    if facts.form == "value":
        return future, CallTask(**_fields(facts, Mode.CALL), future=future)
    number = facts.number
    stream: ResultStream[Any] = ResultStream(
        lambda count: engine.streams.grant(number, count),
        lambda: engine.streams.close(number),
        lambda: engine.abandon(number),
        2,  # each item is told, as in every stream of a detached pool
    )
    future.settle(stream)
    return future, StreamTask(**_fields(facts, Mode.STREAM), stream=weakref.ref(stream), may_move=False)


def _fields(facts: CallFacts, mode: Mode) -> dict[str, Any]:
    return {
        "id": facts.number,
        "name": facts.name,
        "head": TaskHead(_NOTHING.digest, mode, CallKind.PLAIN, 0, 0),
        "function": _NOTHING,
        "payload": NO_ARGUMENTS,
        "options": CallOptions(name=facts.name),
    }


def _gang(facts: CallFacts, cancel: Callable[[int], None]) -> tuple[Future[Any], Gang]:
    options = CallOptions(name=facts.name)
    launch = LaunchFacts(
        is_gang=True,
        ranks_per_node=1,
        returns=cast(Returns, facts.returns),
        sees_neighbours=False,
        preload=(),
    )
    future: Future[Any] = Future(cancel, call_id=facts.number)
    gang = Gang(
        **{**_fields(facts, Mode.CALL), "options": options},
        launch=launch,
        launch_bytes=b"",
        nodes=None,
        count=None if facts.is_on_one else 1,
        ranks_per_node=1,
        future=future,
        retries=Retries(options),
    )
    return future, gang
