"""Records that the client keeps of tasks. The engine calls their `on_` methods without holding its lock."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from ..calls.futures import Future, refuse_to_wait
from ..calls.options import CallOptions
from ..calls.undecoded import Undecoded, raise_error
from ..core import interrupts
from ..core.by_value import loads
from ..core.limits import file_limit, memory_bytes
from ..core.printable import printable_lines
from ..core.records import dataclass
from ..core.user_lines import drop_our_frames
from ..errors import NodeError, NodeLost, OutOfMemory, Preempted, SlotLost, UsageError
from ..values.devices import Grant
from ..wire.blobs import Blob
from ..wire.failures import EncodedFailure, decode_failure, explain_result_error, is_fault_of_value
from ..wire.payloads import Encoded, decode
from ..wire.pull import PullRefused, pull
from ..wire.tasks import HEAD, Parsed, TaskHead, elapsed_ns, has_references, is_in_memory, parse, without_memory
from .absent import advise
from .retries import Rerun

T = TypeVar("T")

TAIL_LINES = 20
"""Last lines of a task's output that are kept for its error message."""


class Received(Undecoded):
    """Payload that arrived, with its blobs. Nothing is unpickled yet.

    Thousands of them may wait for their readers, so each is one object, and its parts are found when it is read.

    Args:
        body: Payload of the frame.
        blobs: Its blobs, in the order of its references.
    """

    __slots__ = ("blobs", "body")

    def __init__(self, body: bytes, blobs: tuple[Blob, ...] = ()) -> None:
        super().__init__()
        self.body = body
        self.blobs = blobs

    @property
    def parsed(self) -> Parsed:
        return parse(self.body)

    def decode(self) -> Any:
        """Unpickle the value.

        Raises:
            ResultNotPicklable: the unpickling raised anything, even an error that would end the thread or the process.
            MemoryError: the value is too large for this machine.
            OSError: this process may open no more files, or its disk is full.
        """
        try:
            if not has_references(self.body):  # most values
                return loads(memoryview(self.body)[HEAD.size :])
            return decode(self.parsed, self.blobs)
        except BaseException as error:
            if interrupts.is_from_handler(error) or not is_fault_of_value(error):
                raise
            raise explain_result_error(error) from error

    def forget(self) -> None:
        self.body, self.blobs = b"", ()

    @property
    def is_in_memory(self) -> bool:
        """Return whether its buffers are in the memory of the process that sent it."""
        return is_in_memory(self.body)

    def copied(self) -> Received:
        """Copy the buffers from the memory of the process that sent the value.

        Raises:
            PullRefused: The kernel denies access, or the process is gone.
            OSError: The buffers are too large for this machine.
        """
        blobs = [Blob(place, size, -1, pull(place, size)) for place, size in self.parsed.references]
        return Received(without_memory(self.body), tuple(blobs))

    @property
    def elapsed_ns(self) -> int:
        return elapsed_ns(self.body)


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """Failure that arrived, with the place where it happened."""

    failure: EncodedFailure
    where: str
    node: int
    task: str
    log_tail: str
    is_elsewhere: bool = False
    """Whether the node has its own packages and files instead of this machine's."""
    unused_retries: int = 0
    """Retries of the call, which are for losses only."""

    def error(self) -> BaseException:
        error = decode_failure(self.failure, where=self.where, node=self.node, task=self.task, log_tail=self.log_tail)
        if self.unused_retries and isinstance(error, Exception):
            error.add_note(
                f"retries={self.unused_retries} is for lost processes and nodes; "
                f"add retry_on={type(error).__name__} to repeat after this too"
            )
        if self.is_elsewhere and (advice := advise(error, self.node)):
            error.add_note(advice)
        return error

    def raise_it(self) -> Any:
        raise self.error()


class UndecodedFailure(Undecoded):
    """Failure that nobody has unpickled yet."""

    __slots__ = ("failed",)

    def __init__(self, failed: TaskFailure) -> None:
        super().__init__(failed.raise_it)
        self.failed = failed


def undecoded(failure: BaseException | TaskFailure) -> BaseException | Undecoded:
    """Return an error for a future, whose reader unpickles it if it is as it arrived."""
    return UndecodedFailure(failure) if isinstance(failure, TaskFailure) else failure


def in_words_of(failure: BaseException | TaskFailure) -> str:
    """Describe an error by its class and message, without unpickling it."""
    if isinstance(failure, TaskFailure):
        return f"{failure.failure.type_name.rpartition('.')[2]}: {failure.failure.message}"
    return f"{type(failure).__name__}: {failure}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Death of the process or node that ran a task."""

    node: int
    signal: int | None = None
    exit_code: int | None = None
    started: bool | None = None
    index: int | None = None
    is_node: bool = False
    is_preempted: bool = False
    """Whether the provider took the node's machine back."""
    at: float = 0.0
    """Time of the crash or its detection, in seconds since the epoch by the node's clock; 0: the node itself died."""
    stack: str = ""
    """Python stack at the crash."""
    why: str = ""
    """Reason why the process could not be started; empty if it was started."""
    memory_gib: float | None = None
    """Memory limit of the call at which the kernel killed its process; None for any other death."""


@dataclass(frozen=True, slots=True)
class WireFunction:
    """Function ready to travel. `digest` names its payload."""

    digest: bytes
    payload: Encoded


@dataclass(eq=False, kw_only=True)
class Task:
    """Unit of work for one node."""

    id: int
    name: str
    head: TaskHead
    function: WireFunction
    payload: Encoded
    options: CallOptions
    rank: int | None = None
    timeout_s: float | None = None
    expected_ns: float | None = None
    """Expected duration; None: assume that of earlier tasks of the same function."""
    grant: Grant | None = None
    """Part of its node that it may use, decided before it is sent; None: the equal share of a slot."""
    may_move: bool = True
    """Whether it can be sent again. False if its input, or items already delivered, cannot be repeated."""
    actor: int = 0
    """Number of the actor whose call it is; 0: none. The scheduler knows no such task."""

    # Fields that few tasks ever set. They stay on the class until then, because a task is made for each call.
    tail: deque[str] | tuple[()] = field(default=(), init=False)
    """Last lines of its output."""
    shown: Callable[[], None] | None = field(default=None, init=False)
    """Function that waits briefly until the last line of its output is shown; None: it has no output."""
    is_cancelled: bool = field(default=False, init=False)
    attempt: int = field(default=0, init=False)
    """Number of times it was sent."""
    rerun: Rerun | None = field(default=None, init=False)
    """Set while it is open if it may be submitted again."""
    in_bulk: bool = field(default=True, init=False)
    """Whether it may be sent in advance with many others. False: its future cannot be cancelled once it is sent, or
    descriptors for its arguments are scarce.
    """

    handles_loss: ClassVar[bool] = False
    """Whether `on_lost` handles the loss of its process. The engine then does not retry the task."""

    is_nested: ClassVar[bool] = False
    """Whether another task made the call."""

    is_relayed: ClassVar[bool] = False
    """Whether its values only go on to another process. `on_result`, `on_part` and `on_item` are then called at once,
    with the ledger locked, so that one write carries the values of many tasks. Others may run the user's code."""

    def keep_line(self, line: str) -> None:
        """Add a line to `tail`."""
        if not self.tail:  # created late, because most tasks print nothing and an empty deque takes 600 bytes
            self.tail = deque(maxlen=TAIL_LINES)
        self.tail.append(line)

    def after_output(self, decode: Callable[[], T]) -> Callable[[], T]:
        """Make `decode` wait until the task's output so far is shown."""
        shown = self.shown
        if shown is None:
            return decode

        def wait_and_decode() -> T:
            shown()
            return decode()

        return wait_and_decode

    @property
    def calls(self) -> int:
        """Number of the user's calls that it contains."""
        return 1

    @property
    def call(self) -> tuple[int, int]:
        """Number of the call that it belongs to, and how often that call was restarted."""
        return self.id, 0

    def on_sent(self) -> None:
        """Handle that the task is on its way to a node."""

    def on_retry(self, pause_s: float) -> None:
        """Handle that the task will run again after a pause."""

    def on_result(self, received: Received) -> None:
        raise NotImplementedError

    def on_error(self, failed: TaskFailure) -> None:
        self.on_failed(failed.error())

    def on_failed(self, error: BaseException) -> None:
        """Handle a failure that this process detected, such as a timeout or a lost node."""
        raise NotImplementedError

    def on_part(self, received: Received) -> None:
        """Handle part of the results of a chunk."""

    def on_item(self, received: Received) -> None:
        """Handle one item of a stream."""

    def on_input_credit(self, lane: int) -> None:
        """Handle that the node took an item of an input stream."""

    def on_lost(self, loss: Loss) -> None:
        """Handle the death of the task's process; see `handles_loss`."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class CallTask(Task):
    """Plain call with one value."""

    future: Future[Any]

    def on_sent(self) -> None:
        self.future.set_running()

    def on_result(self, received: Received) -> None:
        self.future.shown = self.shown
        self.future.settle(received)

    def on_error(self, failed: TaskFailure) -> None:
        self.future.shown = self.shown
        self.future.settle_error(Undecoded(failed.raise_it))

    def on_failed(self, error: BaseException | Undecoded) -> None:
        self.future.shown = self.shown
        self.future.settle_error(error)


@dataclass(eq=False, kw_only=True)
class PulledTask(CallTask):
    """Call whose buffers stay in the caller's memory while it waits.

    It is sent once, and only on a direct line. If that fails, the thread that waits for the value repeats the call with
    its buffers as blobs. No other thread may do that: packing takes time, and only the waiting caller guarantees that
    the buffers stay unchanged.
    """

    handles_loss = True

    call_again: Callable[[], Any]
    """Function that repeats the call and waits for its value."""
    stop_pulling: Callable[[], None]
    """Function to call if the kernel did not let the slot read this process's memory."""

    def send_again(self) -> None:
        """Let the thread that waits for the value repeat the call."""
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


@dataclass(eq=False, kw_only=True)
class HeldTask(PulledTask):
    """Call of a future, whose buffers stay in this process's memory as copies for this call alone.

    `call_again` sends the call with its buffers as blobs. Any thread may do that, because nothing changes the copies.
    """

    def send_again(self) -> None:
        try:
            self.call_again()
        except Exception as error:  # no room for the blobs, or the pool was closed meanwhile
            self.on_failed(error)


class ResultStream(Generic[T]):
    """Iterator over the values of a remote generator, as they arrive. Not for several threads at once.

    `close()` stops the generator, and so does dropping the iterator. The generator may be at most `window` items ahead
    of the consumer, so a slow consumer slows it down.
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
        self._unread_since = 0.0
        """Time (monotonic) since when the first of the items here waits for a reader."""
        self._condition = threading.Condition()
        self.value: Any = None
        """Return value of the generator, once it has ended."""

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
                self._unread_since = time.monotonic()
            else:
                end, self._end = self._end, _stopped
                assert end is not None
                try:
                    self.value = end()
                except Exception as error:
                    drop_our_frames(error)
                    raise
                raise StopIteration(self.value)
        # Grant credit in batches of half a window: one frame for many items, and the generator need not pause.
        self._taken += 1
        if self._taken * 2 >= self._window:
            taken, self._taken = self._taken, 0
            self._grant(taken)
        return decode_item()

    @property
    def unread_s(self) -> float:
        """Seconds for which values of a running generator have waited for a reader; 0.0 if none wait."""
        with self._condition:
            return time.monotonic() - self._unread_since if self._items and self._end is None else 0.0

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
        # Not `close`: the garbage collector may run this in a thread that holds the condition or the ledger's lock.
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
                if not self._items:
                    self._unread_since = time.monotonic()
                self._items.append(decode_item)
                self._condition.notify()

    def finish(self, end: Callable[[], Any]) -> None:
        """End the stream. The consumer calls `end`, which returns the generator's value or raises its error."""
        with self._condition:
            if self._end is None:
                self._end = end
                self._condition.notify_all()


def _stopped() -> None:
    return None


@dataclass(eq=False, kw_only=True)
class StreamTask(Task):
    """Generator call. `stream` is a weak reference: if the consumer drops the stream, it closes."""

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

    def on_failed(self, error: BaseException | Undecoded) -> None:
        failed = error if isinstance(error, Undecoded) else Undecoded(partial(raise_error, error))
        stream = self.stream()
        if stream is not None:
            stream.finish(self.after_output(failed.get))


def cannot_send(what: str, error: OSError) -> UsageError:
    """Return the error of a call that this machine has no room to send."""
    return UsageError(
        f"{what}: cannot be sent, {error.strerror or error} (this process may open {file_limit()} files and use "
        f"{memory_bytes() / 2**30:.1f} GiB of memory); free some, or raise the limit (ulimit -n)"
    )


def loss_error(loss: Loss, name: str, tail: Iterable[str] = (), *, again: str = "retries=1") -> NodeError:
    """Return the error of a call whose process died, with the last lines of its output.

    Args:
        loss: The death of the process.
        name: Name of the call.
        tail: Last lines of its output.
        again: Option that allows another attempt, for the advice in the message.
    """
    error = _loss_error(loss, name, again)
    if loss.stack:
        error.add_note(f"Python stack at that moment:\n{loss.stack}")
    for note in output_notes(tail):
        error.add_note(note)
    return error


def output_notes(tail: Iterable[str]) -> list[str]:
    """Return a note with the last lines of a task's output; none if there is no output."""
    text = printable_lines("".join(tail)).rstrip()
    return [f"Last output of the task:\n{text}"] if text else []


def _loss_error(loss: Loss, name: str, again: str) -> NodeError:
    if loss.is_node:
        state = {True: "had begun", False: "had not begun", None: "was sent, but may not have begun"}
        kind, what = (Preempted, "taken back by its provider") if loss.is_preempted else (NodeLost, "lost")
        return kind(
            f"node {loss.node} was {what}: the call {name!r} {state[loss.started]}; "
            f"set {again} or more if it may run again",
            node=loss.node,
            started=loss.started,
        )
    if loss.memory_gib is not None:
        return OutOfMemory(
            f"{name!r} on node {loss.node}: its process {death_of(loss)} (the pool continues); set a larger "
            "memory_gib, or let the call hold less at once",
            node=loss.node,
            started=True,
            signal=loss.signal,
            memory_gib=loss.memory_gib,
        )
    return SlotLost(
        f"{name!r} on node {loss.node}: its process {death_of(loss)} (the pool continues); "
        f"set {again} or more if the call may run again",
        node=loss.node,
        started=True,
        signal=loss.signal,
        exit_code=loss.exit_code,
    )


def death_of(loss: Loss) -> str:
    """Say in words how a process died, after "its process"."""
    if loss.why:
        return f"could not be started: {loss.why}"
    if loss.memory_gib is not None:
        return f"used more memory than its memory_gib={loss.memory_gib:g}, and was killed by the kernel"
    if loss.signal is None:
        return f"exited with code {loss.exit_code} (os._exit, or a crash while it started)"
    try:
        name = signal.Signals(loss.signal).name
    except ValueError:  # a real-time signal has no name
        name = "unknown"
    hint = {
        "SIGKILL": ", most likely by the kernel's out-of-memory killer",
        "SIGSEGV": ", because a C extension crashed",
        "SIGABRT": ", because a C extension aborted",
    }.get(name, "")
    return f"was killed by signal {loss.signal} ({name}){hint}"
