"""Shared state of a pool in its program: requests of tasks and of the program itself reach one store.

Tasks send requests over channels of a reserved name (`skyward.node.slot.shared`). The thread that reads the frame also
carries out the request and queues the answer, so a request costs no thread switch here. The store is used under the
ledger's lock. The order in which the lock is taken is the order of all operations.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..calls.futures import refuse_to_wait
from ..core import interrupts
from ..errors import InternalError, PoolClosed
from ..shared.messages import (
    FORGET,
    LEAVE,
    REQUEST,
    VALUE_LIMIT,
    WITHDRAW,
    StoreAnswer,
    StoreRequest,
    pack_message,
    unpack_message,
)
from ..wire.frames import FrameKind
from ..wire.task_channel import MessagePieces, Tell, pieces_of
from .ledger import Ledger

if TYPE_CHECKING:
    from ..shared.store import HandedOver, Store

_PROGRAM: Final = 0
"""Owner of the leases that the program itself takes. Channels have large random numbers."""

_Outcome = tuple[int, Any]
OutcomeFuture = concurrent.futures.Future[_Outcome]
"""Future of the status and value of an answer."""


class SharedRequests:
    """Requests of the program that opened the pool. `ask` and `ask_async` are thread-safe."""

    def begin(self, request: StoreRequest) -> tuple[int, OutcomeFuture]:
        """Send a request. Return the number of its session, and the future of its answer. Raises PoolClosed."""
        raise NotImplementedError

    def withdraw(self, session: int) -> None:
        """Ask for an answer now, whatever has happened."""
        raise NotImplementedError

    def forget(self, session: int) -> None:
        """Undo a request whose answer nobody reads."""
        raise NotImplementedError

    def end(self, session: int) -> None:
        """End a session."""
        raise NotImplementedError

    def ask(self, request: StoreRequest) -> Any:
        """Carry out a request of the program, and return its value.

        Raises:
            TimeoutError: It could not be done in time, and was not.
            PoolClosed: The pool was closed.
            Exception: The error of the request.
        """
        session, future = self.begin(request)
        try:
            if not future.done():
                refuse_to_wait(f"{request.kind}.{request.verb}")
                self._wait(future, request.timeout_s)
            if not future.done():
                self.withdraw(session)
        except BaseException:
            self.forget(session)
            raise
        finally:
            self.end(session)
        return request.result(*future.result())

    async def ask_async(self, request: StoreRequest) -> Any:
        """Carry out a request of the program while the event loop does other work; see `ask`."""
        import asyncio  # loaded already; plain programs do without

        session, future = self.begin(request)
        try:
            if not future.done():
                await asyncio.wait([asyncio.wrap_future(future)], timeout=request.timeout_s)
            if not future.done():
                self.withdraw(session)
        except BaseException:
            self.forget(session)
            raise
        finally:
            self.end(session)
        return request.result(*future.result())

    def _wait(self, future: OutcomeFuture, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s

        def is_over(slice_s: float | None) -> bool:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return True
            limits = [limit for limit in (slice_s, left_s) if limit is not None]
            concurrent.futures.wait([future], min(limits, default=None))
            return future.done()

        interrupts.wait_for(is_over)


class SharedState(SharedRequests):
    """Shared state of one pool. Channels of tasks need the ledger's lock; everything else is thread-safe.

    Args:
        ledger: Shared state of the engine.
        make_store: Makes the store; None: one that begins empty and ends with this process.
    """

    def __init__(self, ledger: Ledger, make_store: Callable[[], Store] | None = None) -> None:
        self._ledger = ledger
        self._made: Store | None = None
        self._channels: dict[int, tuple[Tell, MessagePieces]] = {}
        self._waiting: dict[int, OutcomeFuture] = {}
        """Requests of the program that wait, by session."""
        self._sessions = itertools.count(1)
        self._is_closed = False
        self._make_store = make_store

    @property
    def _store(self) -> Store:
        """The store, made at its first use: most pools have no shared state."""
        if self._made is None:
            from ..shared.store import Store

            self._made = (self._make_store or Store)()
            self._made.open(_PROGRAM, _PROGRAM)
        return self._made

    # Another head, with the ledger locked -----------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return 0 if self._made is None else self._made.used_bytes

    def hand_over(self) -> HandedOver | None:
        """Return what another store goes on with; None: nothing was ever shared. Then nothing may use this one."""
        return None if self._made is None else self._made.hand_over()

    def take_over(self, things: HandedOver) -> None:
        """Go on for another store. Nothing has used this one."""
        self._store.take_over(things)

    # Channels of tasks, with the ledger locked ------------------------------------------------------------------------

    def on_open(self, number: int, fields: dict[str, Any], tell: Tell) -> None:
        self._channels[number] = tell, MessagePieces(VALUE_LIMIT)
        self._store.open(number, int(fields["owner"]))

    def on_frame(self, number: int, kind: int, body: bytes, lane: int) -> None:
        channel = self._channels.get(number)
        if channel is None:
            return
        if kind == FrameKind.END_CHANNEL:
            self.on_end(number)
        elif kind == FrameKind.MESSAGE:
            try:
                message = channel[1].add(body, lane)
                if message is not None:
                    self._on_message(number, *unpack_message(message))
            except (InternalError, ValueError, EOFError, TypeError):  # not one of our messages
                self.on_end(number)
                channel[0](FrameKind.END_CHANNEL, b"", 0)

    def on_end(self, number: int) -> None:
        """Free what a channel stands for: a request, or the leases of a call."""
        if self._channels.pop(number, None) is not None:
            self._store.close(number)
            self._answer()

    def _on_message(self, session: int, kind: int, number: int, *fields: Any) -> None:
        if kind == REQUEST:
            self._store.request(session, number, fields)
        elif kind == WITHDRAW:
            self._store.withdraw(session, number)
        elif kind == FORGET:
            self._store.forget(session, number)
        elif kind == LEAVE:
            self._store.leave(session, number, is_well=bool(fields[0]))
        self._answer()

    def _answer(self) -> None:
        """Send the answers that there are now."""
        answers, self._store.answers = self._store.answers, []
        for answer in answers:
            future = self._waiting.pop(answer.session, None)
            if future is not None:
                self._ledger.after.append(partial(future.set_result, (answer.status, answer.value)))
            elif answer.session in self._channels:
                self._send(answer)

    def _send(self, answer: StoreAnswer) -> None:
        tell, _ = self._channels[answer.session]
        body = pack_message(answer.number, answer.status, answer.value)
        for lane, piece in pieces_of(body):
            tell(FrameKind.MESSAGE, piece, lane)

    def close(self) -> None:
        """End all waits, because the engine ends."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            self._ledger.after.append(partial(future.set_exception, _closed()))
        self._channels.clear()
        self._made = None

    # For the program --------------------------------------------------------------------------------------------------

    def begin(self, request: StoreRequest) -> tuple[int, OutcomeFuture]:
        return self.begin_fields(request.fields())

    def begin_fields(self, fields: tuple[Any, ...]) -> tuple[int, OutcomeFuture]:
        """Begin a request of the program, as its fields."""
        future: OutcomeFuture = concurrent.futures.Future()
        with self._ledger:
            if self._is_closed:
                raise _closed()
            session = next(self._sessions)
            self._store.open(session, _PROGRAM)
            self._waiting[session] = future
            self._store.request(session, 1, fields)
            self._answer()
        return session, future

    def withdraw(self, session: int) -> None:
        with self._ledger:
            self._store.withdraw(session, 1)
            self._answer()

    def forget(self, session: int) -> None:
        with self._ledger:
            self._waiting.pop(session, None)
            self._store.forget(session, 1)
            self._answer()

    def end(self, session: int) -> None:
        with self._ledger:
            self._store.close(session)
            self._answer()


def _closed() -> PoolClosed:
    return PoolClosed("shared state: the pool was closed; use it inside the `with` block")
