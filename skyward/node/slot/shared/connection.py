"""Connections of a task to the store of its pool, which is in the program (`skyward.shared.store`).

They are channels of the task (`wire.task_channel`) without the window, because a request is sent only when the one
before it has its answer. The calling thread writes and reads itself: a request costs no thread switch here. Each
request that is on the way has a connection of its own, and a connection is used again.

When the head of a detached pool was killed, all connections end. A request that it has not answered is sent again over
a new one: the next head knows which state is lost.

A connection beside these stands for the call as the owner of leases. It carries nothing but the end of the call. The
agent reports the end of a call that cannot.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Final

from ....errors import PoolClosed, UsageError
from ....shared.messages import (
    CHANNEL,
    FORGET,
    LEAVE,
    REQUEST,
    VALUE_LIMIT,
    WITHDRAW,
    StoreRequest,
    pack_message,
    unpack_message,
)
from ....wire.channel import ChannelClosed
from ....wire.frames import Frame, FrameKind
from ....wire.task_channel import LOST_CLIENT, MessagePieces, pieces_of
from ..link import connect_task
from ..runtime import RunningCall, call_endings, leases

_SETTLE_S: Final = 1.0
"""Longest wait for the answer to WITHDRAW and LEAVE. Only a broken link takes that long."""
_SLICE_S = 1.0
"""Longest wait in one system call. A cancel of a thread slot is noticed only between two of them."""
_SMALL = 16 * 1024
"""Bytes that a socket takes or refuses as a whole, so that no signal cuts them in two."""

_open: dict[int, TaskStore] = {}
"""Stores by task."""
_lock = threading.Lock()
_connections: weakref.WeakSet[_StoreConnection] = weakref.WeakSet()


def store_of(call: RunningCall) -> TaskStore:
    """Return the way of a running task to the store of its pool. Raises PoolClosed if its agent cannot be reached."""
    store = _open.get(call.task)
    if store is None:
        with _lock:
            store = _open.get(call.task)
            if store is None:
                store = _open[call.task] = TaskStore(call)
                call_endings.setdefault(call.task, []).append(_end)
    return store


def _end(task: int) -> None:
    """Close the connections of an ended task."""
    with _lock:
        store = _open.pop(task, None)
    if store is not None:
        store.close()


class TaskStore:
    """Store of the pool, as one task sees it. Any thread of the task may use it."""

    def __init__(self, call: RunningCall) -> None:
        self._call = call
        self._owner = _StoreConnection(call, 0)
        self._idle: list[_StoreConnection] = []

    def ask(self, request: StoreRequest) -> Any:
        """Carry out a request, and return its value; see `_ask`."""
        try:
            return self._ask(request)
        except _LostClient:
            return self._next().ask(request)

    async def ask_async(self, request: StoreRequest) -> Any:
        """Carry out a request while the event loop does other work; see `_ask`."""
        try:
            return await self._ask_async(request)
        except _LostClient:
            return await self._next().ask_async(request)

    def _next(self) -> TaskStore:
        """Return the way to the store of the next head."""
        with _lock:
            if _open.get(self._call.task) is self:
                del _open[self._call.task]
                leases.pop(self._call.task, None)  # the killed one had them
        self.close()
        return store_of(self._call)

    def _ask(self, request: StoreRequest) -> Any:
        """Carry out a request, and return its value.

        Raises:
            TimeoutError: It could not be done in time, and was not.
            PoolClosed: The program or the agent is gone.
            Exception: The error of the request.
        """
        with self._connection(request) as there:
            deadline = there.send_request(request)
            answer = there.receive(deadline)
            if answer is None:
                there.send(WITHDRAW)
                answer = there.receive(time.monotonic() + _SETTLE_S)
            if answer is None:
                raise _Unanswered
        return request.result(*answer)

    async def _ask_async(self, request: StoreRequest) -> Any:
        with self._connection(request) as there:
            deadline = there.send_request(request)
            answer = await there.receive_async(deadline)
            if answer is None:
                there.send(WITHDRAW)
                answer = await there.receive_async(time.monotonic() + _SETTLE_S)
            if answer is None:
                raise _Unanswered
        return request.result(*answer)

    @contextlib.contextmanager
    def _connection(self, request: StoreRequest) -> Iterator[_StoreConnection]:
        """Lend a connection. If the wait ends early, undo the request, and drop the connection with its answer."""
        if request.is_lease:
            leases[self._call.task] = self._leave
        there = self._take()
        try:
            yield there
        except BaseException as error:
            there.give_up()
            if isinstance(error, _Unanswered):
                raise request.timed_out() from None
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise _gone(error) from error
            raise
        self._idle.append(there)

    def _take(self) -> _StoreConnection:
        try:
            return self._idle.pop()
        except IndexError:  # all are in use
            return _StoreConnection(self._call, self._owner.number)

    def _leave(self, is_well: bool) -> None:
        """Free the leases of the call that ends now, and wait until they are, unless the link is broken."""
        # Then the agent is gone, and the program frees them; or its head is, and has lost them.
        with contextlib.suppress(OSError, _LostClient):
            self._owner.send(LEAVE, is_well)
            self._owner.receive(time.monotonic() + _SETTLE_S)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        self._owner.close()


class _LostClient(Exception):
    """The process with the store was killed, and another one goes on for it."""


class _Unanswered(Exception):
    """The answer did not come in time."""


def _gone(error: BaseException) -> PoolClosed:
    return PoolClosed(f"shared state: the pool's program cannot be reached ({error}); use it while the pool is open")


class _StoreConnection:
    """One connection. One thread at a time uses it. `owner` is the number of another one; 0: this one is an owner."""

    def __init__(self, call: RunningCall, owner: int) -> None:
        self.number = int.from_bytes(os.urandom(8), "little") >> 1
        self._requests = 0
        self._pieces = MessagePieces(VALUE_LIMIT)
        self._arrived: list[tuple[int, int, Any]] = []
        try:
            self._link = connect_task(call.agent, call.task, "channels")
            rank = None if call.rank is None else call.rank.rank
            hello = {"name": CHANNEL, "rank": rank, "owner": owner or self.number}
            self._link.send(FrameKind.CHANNEL, self.number, json.dumps(hello).encode())
        except OSError as error:
            raise _gone(error) from error
        self._poll = select.poll()
        self._poll.register(self._link.fileno(), select.POLLIN)
        _connections.add(self)

    def send_request(self, request: StoreRequest) -> float | None:
        """Send a request. Return the time at which the wait for its answer ends; None for no limit."""
        body = pack_message(REQUEST, self._requests + 1, *request.fields())
        if len(body) > VALUE_LIMIT:
            raise UsageError(
                f"{request.kind}={request.name!r}: {request.verb} of {len(body)} bytes exceeds the limit of "
                f"{VALUE_LIMIT}; pass large data as an argument, or in a file"
            )
        self._requests += 1
        if request.may_park and request.timeout_s is not None:
            deadline: float | None = time.monotonic() + request.timeout_s
        else:
            deadline = None
        self._send(body)
        return deadline

    def send(self, kind: int, *fields: Any) -> None:
        """Send a message about the last request."""
        if kind == LEAVE:
            self._requests += 1
        self._send(pack_message(kind, self._requests, *fields))

    def _send(self, body: bytes) -> None:
        if len(body) <= _SMALL or threading.current_thread() is not threading.main_thread():
            for lane, piece in pieces_of(body):
                self._link.send(FrameKind.MESSAGE, self.number, piece, lane=lane)
            return
        # A signal whose handler raises must not cut the message in two.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            for lane, piece in pieces_of(body):
                self._link.send(FrameKind.MESSAGE, self.number, piece, lane=lane)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def receive(self, deadline: float | None) -> tuple[int, Any] | None:
        """Wait for the answer to the last request, its status and value. Return None at the deadline."""
        while True:
            answer = self._answer()
            if answer is not None:
                return answer
            left_s = _SLICE_S if deadline is None else min(_SLICE_S, deadline - time.monotonic())
            if left_s < 0:
                return None
            if self._poll.poll(left_s * 1000):
                self._take_frames()

    async def receive_async(self, deadline: float | None) -> tuple[int, Any] | None:
        import asyncio  # loaded already; plain programs do without

        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._link.fileno(), readable.set)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                while (answer := self._answer()) is None:
                    await readable.wait()
                    readable.clear()
                    self._take_frames()
                return answer
        except TimeoutError:
            return self._answer()
        finally:
            loop.remove_reader(self._link.fileno())

    def _take_frames(self) -> None:
        for frame in self._link.waiting():
            self._on_frame(frame)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.END_CHANNEL:
            if frame.lane == LOST_CLIENT:
                raise _LostClient
            raise ChannelClosed("the pool was closed")
        if frame.kind == FrameKind.MESSAGE:
            body = self._pieces.add(frame.body, frame.lane)
            if body is not None:
                self._arrived.append(unpack_message(body))

    def _answer(self) -> tuple[int, Any] | None:
        while self._arrived:
            number, status, value = self._arrived.pop(0)
            if number == self._requests:
                return status, value
        return None

    def give_up(self) -> None:
        """Undo the last request, whose answer nobody reads, and end the connection."""
        with contextlib.suppress(OSError):  # the agent is gone; the program has withdrawn the request
            self.send(FORGET)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the agent is gone
            self._link.send(FrameKind.END_CHANNEL, self.number)
        self._link.shut_down()
        self._link.close()

    def close_in_child(self) -> None:
        """Close the descriptor only: the connection belongs to the parent, and must end with it."""
        self._link.close()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _open.clear()  # the child opens its own
    for connection in list(_connections):
        connection.close_in_child()
    _connections.clear()


os.register_at_fork(after_in_child=_forget_in_child)
