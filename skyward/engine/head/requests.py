"""Requests between a client and its head, in both directions: a verb, its arguments, and one reply."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ...calls.futures import Future, refuse_to_wait
from ...errors import InternalError, PoolClosed
from ...wire.channel import CONTROL
from ...wire.failures import encode_exception
from ...wire.frames import Frame, FrameKind
from ...wire.task_channel import MessagePieces, pieces_of
from ..tasks import TaskFailure, UndecodedFailure
from ..threads import in_words, start_thread
from .plain import dump_plain, load_plain

_ASKED_AGAIN = frozenset(
    {
        *("use", "there", "is_idle", "counts", "why_waiting", "running", "call_named", "actor_work", "calls", "call"),
        *("nodes_of",),
        *("wait_idle", "wait_stopped", "cancel_all", "close_actors", "leave", "close"),
        *("ray_there", "ray_runs", "ray_keys", "ray_ends", "blueprint"),
        *("demand", "node_leaves", "stay", "move_values", "give_back", "refuse_resting"),
        *("shared", "shared_withdraw", "shared_forget"),  # what the killed one did with them is lost with it
    }
)
"""Verbs that may be asked twice, of a head that was killed and of the one after it."""
_LIMIT = 256 << 20
"""Most bytes of a request or a reply."""

Send = Callable[[int, int, bytes, int, int], object]
"""Sends a frame: kind, number, body, lane and priority. Thread-safe."""

Answer = Callable[[str, Any], object]
"""Sends the reply to a request: "ok" and the value, "error" and the exception, or "failed" and the TaskFailure."""


class Requests:
    """Requests of this side that wait for a reply, and verbs that the other side may ask for. Thread-safe.

    Args:
        send: Sends a frame to the other side.
        after: Calls a function where frames are read, without the ledger's lock.
        verbs: Functions that return the value at once. They are called where the frame is read, and must be quick.
        slow: Functions that may take time. Each call of one has a thread of its own.
        later: Functions that get an `Answer` before the arguments, and call it once, whenever they have the value.
        numbers: Source of numbers that no earlier client of the same head has used; None: those from 1.
    """

    def __init__(
        self,
        send: Send,
        after: Callable[[Callable[[], object]], object],
        *,
        verbs: Mapping[str, Callable[..., Any]] | None = None,
        slow: Mapping[str, Callable[..., Any]] | None = None,
        later: Mapping[str, Callable[..., Any]] | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._send = send
        self._after = after
        self._verbs = {**(verbs or {})}
        self._slow = {**(slow or {})}
        self._later = {**(later or {})}
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._open: dict[int, Future[Any]] = {}
        self._asked: dict[int, tuple[bytes, int]] = {}
        """Message and priority of each open request that may be asked again."""
        self._pieces: dict[tuple[int, int], MessagePieces] = {}
        self._lock = threading.Lock()
        self._closed_by: BaseException | None = None

    # This side asks -------------------------------------------------------------------------------------------------

    def begin(self, verb: str, *arguments: Any, priority: int = CONTROL) -> Future[Any]:
        """Send a request, and return the future of its reply."""
        number, future = next(self._numbers), Future[Any]()
        message = dump_plain((verb, arguments))
        with self._lock:
            closed_by = self._closed_by
            if closed_by is None:
                self._open[number] = future
                if verb in _ASKED_AGAIN:
                    self._asked[number] = message, priority
        if closed_by is not None:
            future.settle_error(closed_by)
            return future
        self._tell(FrameKind.REQUEST, number, message, priority)
        return future

    def ask(self, verb: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Send a request and wait for its reply.

        Raises:
            TimeoutError: It did not come in time.
            PoolClosed: The other side is gone.
            Exception: The error that is the reply.
        """
        refuse_to_wait(verb)
        return self.begin(verb, *arguments).result(timeout_s)

    def tell(self, verb: str, *arguments: Any) -> None:
        """Send a request whose reply nobody needs."""
        self._tell(FrameKind.REQUEST, 0, dump_plain((verb, arguments)))

    def close(self, error: BaseException | None = None) -> None:
        """Fail all requests that wait for a reply, and all later ones."""
        with self._lock:
            self._closed_by = self._closed_by or error or PoolClosed("pool: closed; make calls inside its `with` block")
            waiting, self._open, self._asked = list(self._open.values()), {}, {}
        for future in waiting:
            future.settle_error(self._closed_by)

    def fail_open(self, error: BaseException) -> None:
        """Fail the requests that wait for a reply, because the other side is gone, and another takes its place."""
        with self._lock:
            waiting, self._open, self._asked = list(self._open.values()), {}, {}
        for future in waiting:
            self._after(partial(future.settle_error, error))

    def ask_again(self, error: BaseException) -> None:
        """Ask the next process of the other side what the killed one has not answered. Fail what it cannot know."""
        self._pieces.clear()
        with self._lock:
            asked = dict(self._asked)
            failed = [self._open.pop(number) for number in list(self._open) if number not in asked]
        for number, (message, priority) in asked.items():
            self._tell(FrameKind.REQUEST, number, message, priority)
        for future in failed:
            self._after(partial(future.settle_error, error))

    # Frames, where they are read ------------------------------------------------------------------------------------

    def on_frame(self, frame: Frame) -> None:
        key = frame.kind, frame.ident
        message = self._pieces.setdefault(key, MessagePieces(_LIMIT)).add(frame.body, frame.lane)
        if message is None:
            return
        del self._pieces[key]
        if frame.kind == FrameKind.REQUEST:
            self._on_request(frame.ident, message)
        else:
            self._on_reply(frame.ident, message)

    def _on_request(self, number: int, message: bytes) -> None:
        answer: Answer = partial(self._answer, number)
        try:
            verb, arguments = load_plain(message)
            if verb in self._later:
                self._later[verb](answer, *arguments)
            elif verb in self._slow:
                run = partial(self._run, answer, self._slow[verb], arguments)
                start_thread(run, name=f"skyward-{verb}", failed=lambda error: answer("error", error))
            else:
                answer("ok", self._verbs[verb](*arguments))
        except BaseException as error:  # the other side waits for a reply
            answer("error", error)

    @staticmethod
    def _run(answer: Answer, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        answer("ok", function(*arguments))

    def _answer(self, number: int, status: str, value: Any) -> None:
        if not number:
            return
        if status == "error":
            data, reason = encode_exception(value)
            if data is None:
                told = f"{in_words(value)} (cannot be sent: {reason})"
                data, _ = encode_exception(InternalError(told))  # words: ok, the error of another part
            value = data
        self._tell(FrameKind.REPLY, number, dump_plain((status, value)))

    def _on_reply(self, number: int, message: bytes) -> None:
        with self._lock:
            future = self._open.pop(number, None)
            self._asked.pop(number, None)
        if future is None:
            return
        status, value = load_plain(message)
        if status == "ok":
            self._after(partial(future.settle, value))
        elif isinstance(value, TaskFailure):
            self._after(partial(future.settle_error, UndecodedFailure(value)))
        else:
            self._after(partial(future.settle_error, _error_of(value)))

    def _tell(self, kind: int, number: int, message: bytes, priority: int = CONTROL) -> None:
        for lane, piece in pieces_of(message):
            self._send(kind, number, piece, lane, priority)


def _error_of(data: bytes) -> BaseException:
    """Unpickle an error of the other side. A provider of the user's may raise one that only the client can unpickle."""
    try:
        error: BaseException = load_plain(data)
    except Exception as refused:
        text = f"request: failed with an error that cannot be read here ({in_words(refused)})"
        return InternalError(text)  # words: ok, the error of another part
    return error
