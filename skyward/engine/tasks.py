"""The client's record of a task, by kind. The engine calls the `on_` methods, never under its lock."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from ..calls.futures import Future, Undecoded, refuse_to_wait
from ..calls.options import CallOptions
from ..core import interrupts
from ..core.limits import file_limit, memory_bytes
from ..core.printable import printable_lines
from ..core.user_lines import drop_our_frames
from ..errors import NodeError, NodeLost, Preempted, ResultNotPicklable, SlotLost, UsageError
from ..wire.blobs import Blob
from ..wire.failures import EncodedFailure, decode_failure
from ..wire.payloads import Encoded, decode
from ..wire.pull import PullRefused
from ..wire.tasks import Parsed, TaskHead
from .absent import advise

__all__ = [
    "CallTask",
    "Loss",
    "Received",
    "PulledTask",
    "ResultStream",
    "StreamTask",
    "Task",
    "TaskFailure",
    "WireFunction",
    "cannot_send",
    "loss_error",
]

T = TypeVar("T")

TAIL_LINES = 20
"""Lines of a task's output that are kept for its error."""


@dataclass(frozen=True, slots=True)
class Received:
    """A payload that arrived, with its blobs; nothing is unpickled yet."""

    parsed: Parsed
    blobs: tuple[Blob, ...]

    def decode(self) -> Any:
        """Raises whatever the unpickling raises, but nothing that would end a thread or the process."""
        try:
            return decode(self.parsed, self.blobs)
        except Exception:
            raise
        except BaseException as error:
            if interrupts.is_from_handler(error):
                raise
            raise ResultNotPicklable(
                f"a value cannot be loaded here: its unpickling raised {type(error).__name__}: {error}; "
                "return plain data or arrays"
            ) from error

    @property
    def elapsed_ns(self) -> int:
        return self.parsed.elapsed_ns


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A failure that arrived, with where it happened."""

    failure: EncodedFailure
    where: str
    node: int
    task: str
    log_tail: str
    is_elsewhere: bool = False
    """The node has packages and files of its own."""

    def error(self) -> BaseException:
        error = decode_failure(self.failure, where=self.where, node=self.node, task=self.task, log_tail=self.log_tail)
        if self.is_elsewhere and (advice := advise(error, self.node)):
            error.add_note(advice)
        return error

    def raise_it(self) -> Any:
        raise self.error()


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The death of a process or node under a task."""

    node: int
    signal: int | None = None
    exit_code: int | None = None
    started: bool | None = None
    index: int | None = None
    is_node: bool = False
    is_preempted: bool = False
    """Of a node: its provider took the machine back."""
    at: float = 0.0
    """When it crashed, or else when the node saw that it was gone, by the node's clock, in seconds since the epoch; 0:
    the node is gone itself."""
    stack: str = ""
    """Where its Python code crashed."""
    why: str = ""
    """Why its process could not be started; empty: it was."""


@dataclass(frozen=True, slots=True)
class WireFunction:
    """A function ready to travel; `digest` names its payload."""

    digest: bytes
    payload: Encoded


@dataclass(eq=False, kw_only=True)
class Task:
    """One unit of work for one node."""

    id: int
    name: str
    head: TaskHead
    function: WireFunction
    payload: Encoded
    options: CallOptions
    rank: int | None = None
    tail: deque[str] | tuple[()] = ()
    """The last lines that it printed."""
    shown: Callable[[], None] | None = None
    """Waits until the last line that it printed is shown; None: it has printed nothing. Always returns soon."""
    is_cancelled: bool = False
    timeout_s: float | None = None
    expected_ns: float | None = None
    """How long it will take, where that is known; else it is taken for one like those before it."""
    attempt: int = 0
    """How often it was sent."""
    may_move: bool = True
    """False: what goes with it (input, items that were delivered) cannot be had twice, so it is sent once."""

    handles_loss: ClassVar[bool] = False
    """Whether it is told of the loss of its process by `on_lost`, and is then finished for the engine."""

    is_nested: ClassVar[bool] = False
    """Whether a task has called it."""

    def keep_line(self, line: str) -> None:
        """Add a line to `tail`."""
        if not self.tail:  # most tasks print nothing, and an empty deque takes 600 bytes
            self.tail = deque(maxlen=TAIL_LINES)
        self.tail.append(line)

    def after_output(self, decode: Callable[[], T]) -> Callable[[], T]:
        """`decode`, which first waits until what the task has printed so far is shown."""
        shown = self.shown
        if shown is None:
            return decode

        def wait_and_decode() -> T:
            shown()
            return decode()

        return wait_and_decode

    @property
    def calls(self) -> int:
        """How many calls of the user's it is."""
        return 1

    @property
    def call(self) -> tuple[int, int]:
        """The number of the call that it is part of, and how often that was started again."""
        return self.id, 0

    def on_sent(self) -> None:
        """It is on its way to a node."""

    def on_result(self, received: Received) -> None:
        raise NotImplementedError

    def on_error(self, failed: TaskFailure) -> None:
        self.on_failed(failed.error())

    def on_failed(self, error: BaseException) -> None:
        """It failed here: the node was lost, the time was up."""
        raise NotImplementedError

    def on_part(self, received: Received) -> None:
        """Part of the results of a chunk."""

    def on_item(self, received: Received) -> None:
        """One item of a stream."""

    def on_input_credit(self, lane: int) -> None:
        """The node took an item of an input stream."""

    def on_lost(self, loss: Loss) -> None:
        """Its process died; see `handles_loss`."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class CallTask(Task):
    """A plain call with one value."""

    future: Future[Any]

    def on_sent(self) -> None:
        self.future.set_running()

    def on_result(self, received: Received) -> None:
        self.future.shown = self.shown
        self.future.settle(Undecoded(received.decode))

    def on_error(self, failed: TaskFailure) -> None:
        self.future.shown = self.shown
        self.future.settle_error(Undecoded(failed.raise_it))

    def on_failed(self, error: BaseException) -> None:
        self.future.shown = self.shown
        self.future.settle_error(error)


@dataclass(eq=False, kw_only=True)
class PulledTask(CallTask):
    """A call whose buffers stay in the caller's memory while it waits.

    It is sent once, and on a direct line only. Where that does not work out, whoever waits for its value makes the
    call again, with its buffers as blobs: packing them takes time, and only that thread may be sure of their memory.
    """

    handles_loss = True

    call_again: Callable[[], Any]
    """Makes the call anew and waits for its value."""
    stop_pulling: Callable[[], None]
    """Called if the slot was refused to read this process's memory."""

    def send_again(self) -> None:
        """Let the thread that asks for the value make the call anew."""
        self.future.settle(Undecoded(self.call_again))

    def on_error(self, failed: TaskFailure) -> None:
        if failed.failure.type_name.rpartition(".")[2] == PullRefused.__name__:
            self.stop_pulling()
            self.send_again()
        else:
            super().on_error(failed)

    def on_lost(self, loss: Loss) -> None:
        if loss.started is False:
            self.send_again()
        else:
            self.on_failed(loss_error(loss, self.name, self.tail))


class ResultStream(Generic[T]):
    """The values that a remote generator yields, as they come.

    An iterator with `close()`, which stops the generator; closing also happens when it is dropped. At most a window
    of items is on its way: a slow consumer slows the generator down. Not for several threads at once.
    """

    def __init__(
        self, grant: Callable[[int], None], close: Callable[[], None], abandon: Callable[[], None], window: int
    ) -> None:
        self._end: Callable[[], Any] | None = None
        self._grant = grant
        self._close = close
        self._abandon = abandon
        self._window = window
        self._items: deque[Callable[[], T]] = deque()
        self._taken = 0
        self._condition = threading.Condition()
        self.value: Any = None
        """What the generator returned, once it has ended."""

    def __repr__(self) -> str:
        state = "open" if self._end is None else "ended"
        return f"<ResultStream {state}, {len(self._items)} values here; iterate over it>"

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._items and self._end is None:
            refuse_to_wait("next()")
        interrupts.wait_for(self._wait_ready)
        with self._condition:
            if self._items:
                decode_item = self._items.popleft()
            else:
                end, self._end = self._end, _stopped
                assert end is not None
                try:
                    self.value = end()
                except Exception as error:
                    drop_our_frames(error)
                    raise
                raise StopIteration(self.value)
        self._taken += 1
        if self._taken * 2 >= self._window:
            taken, self._taken = self._taken, 0
            self._grant(taken)
        return decode_item()

    def _wait_ready(self, timeout_s: float | None) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._items) or self._end is not None, timeout_s)

    def close(self) -> None:
        """Stop the remote generator and forget what it has sent. Idempotent."""
        with self._condition:
            was_open = self._end is None
            self._end = _stopped
            self._items.clear()
            self._condition.notify_all()
        if was_open:
            self._close()

    def __del__(self) -> None:
        # Not `close`: a finalizer may run within anything of ours, and must not touch its state.
        if self._end is None:
            self._end = _stopped
            self._abandon()

    def __enter__(self) -> ResultStream[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def put(self, decode_item: Callable[[], T]) -> None:
        with self._condition:
            if self._end is None:
                self._items.append(decode_item)
                self._condition.notify()

    def finish(self, end: Callable[[], Any]) -> None:
        """`end` is called by the consumer: it returns the generator's value or raises its error."""
        with self._condition:
            if self._end is None:
                self._end = end
                self._condition.notify_all()


def _stopped() -> None:
    return None


@dataclass(eq=False, kw_only=True)
class StreamTask(Task):
    """A generator. The consumer holds the stream, which must not be kept alive from here: `stream` is a weak call."""

    stream: Callable[[], ResultStream[Any] | None]
    inputs: tuple[Callable[[], None], ...] = ()

    def on_item(self, received: Received) -> None:
        stream = self.stream()
        if stream is not None:
            stream.put(self.after_output(received.decode))

    def on_result(self, received: Received) -> None:
        stream = self.stream()
        if stream is not None:
            stream.finish(self.after_output(received.decode))

    def on_error(self, failed: TaskFailure) -> None:
        stream = self.stream()
        if stream is not None:
            stream.finish(self.after_output(failed.raise_it))

    def on_failed(self, error: BaseException) -> None:
        def fail() -> None:
            raise error

        stream = self.stream()
        if stream is not None:
            stream.finish(self.after_output(fail))


def cannot_send(what: str, error: OSError) -> UsageError:
    """The error of a call that this machine has no room to send."""
    return UsageError(
        f"{what} cannot be sent: {error.strerror or error}; this process may open {file_limit()} files (ulimit -n) and "
        f"use {memory_bytes() / 2**30:.1f} GiB of memory: free some, or raise the limit"
    )


def loss_error(loss: Loss, name: str, tail: Iterable[str] = (), *, again: str = "retries=1") -> NodeError:
    """The error of a call whose process died, with the last lines of its output. `again`: the option that helps."""
    error = _loss_error(loss, name, again)
    if loss.stack:
        error.add_note(f"Where its Python code stood:\n{loss.stack}")
    for note in output_notes(tail):
        error.add_note(note)
    return error


def output_notes(tail: Iterable[str]) -> list[str]:
    """Give the note about the last lines that a task printed; none if it printed nothing."""
    text = printable_lines("".join(tail)).rstrip()
    return [f"Last output of the task:\n{text}"] if text else []


def _loss_error(loss: Loss, name: str, again: str) -> NodeError:
    if loss.is_node:
        state = {True: "had begun", False: "had not begun", None: "had been sent; whether it had begun is not known"}
        kind, what = (Preempted, "taken back by its provider") if loss.is_preempted else (NodeLost, "lost")
        return kind(
            f"node {loss.node} was {what}; the call {name!r} {state[loss.started]}. "
            f"Give the call {again} (or more) if it may be run again",
            node=loss.node,
            started=loss.started,
        )
    return SlotLost(
        f"the process that ran {name!r} on node {loss.node} {_death(loss)}. "
        f"The pool goes on; give the call {again} (or more) if it may be run again",
        node=loss.node,
        started=True,
        signal=loss.signal,
        exit_code=loss.exit_code,
    )


def _death(loss: Loss) -> str:
    if loss.why:
        return f"could not be started: {loss.why}"
    if loss.signal is None:
        return f"exited with code {loss.exit_code} (os._exit, or a crash while it started)"
    try:
        name = signal.Signals(loss.signal).name
    except ValueError:  # a real-time signal has no name
        name = "unknown"
    hint = {
        "SIGKILL": "; nobody but the kernel's out-of-memory killer usually sends that: see if the memory ran out",
        "SIGSEGV": "; a C extension crashed",
        "SIGABRT": "; a C extension gave up",
    }.get(name, "")
    return f"was killed by signal {loss.signal} ({name}){hint}"
