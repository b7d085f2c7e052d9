"""Handlers of the frames by which a head tells its client what comes of its calls."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..calls.undecoded import Undecoded, raise_error
from ..console.logs import Part
from ..errors import InternalError
from ..events import Emit, TaskEnded, TaskSent
from ..wire.frames import KEPT, Frame, FrameKind
from ..wire.task_channel import MessagePieces
from .gang import Gang
from .head.plain import load_plain
from .head_link import HeadLink
from .hosted_values import HostedValues
from .ledger import Ledger
from .link import Readable
from .tasks import CallTask, Received, StreamTask, Task, TaskFailure
from .threads import in_words, report

if TYPE_CHECKING:
    from .log_router import LineSink

_MESSAGE_LIMIT = 256 << 20


class Came(Protocol):
    """Counts a frame of a call; see `HostedCalls.came`."""

    def __call__(self, number: int, *, is_value: bool = False) -> object: ...


Handler = Callable[[Readable, Frame], Any]
PlainHandler = Callable[[Frame], Any]


class _EndsCall(Protocol):
    def __call__(self, call: Task | Gang, *, ok: bool) -> object: ...


class HostedFrames:
    """Table of handlers by kind of frame. They are called with the ledger locked.

    Args:
        ledger: Shared state of the client's engine.
        values: References to values that stay on nodes.
        lines: Destination of the calls' output.
        emit: Takes events.
        end: Removes a call that has ended from the ledger.
        on_facts: Takes the facts of the nodes.
        came: Called with the number of a call for each of its frames that the head counts; see `head.kept_calls`.
        sent: Called with the number of each task that is on its way to a node.
        took_input: Called with the number of a call and of an argument for each item that the call has taken.
        read: Called with the number of a call once its outcome was read, which another client could otherwise take.
            None: no other client can.
        plain: Further handlers that need the frame only, by kind.
        others: Further handlers, by kind.
    """

    def __init__(
        self,
        ledger: Ledger,
        values: HostedValues,
        *,
        lines: LineSink | None,
        emit: Emit,
        end: _EndsCall,
        on_facts: Callable[[bytes], object],
        came: Came,
        sent: Callable[[int], object],
        took_input: Callable[[int, int], object],
        read: Callable[[int], object] | None = None,
        plain: Mapping[int, PlainHandler],
        others: Mapping[int, Handler],
    ) -> None:
        self._ledger = ledger
        self._values = values
        self._lines = lines
        self._emit = emit
        self._end = end
        self._on_facts = on_facts
        self._came = came
        self._sent = sent
        self._took_input = took_input
        self._read = read
        self._shown: dict[int, Callable[[], None]] = {}
        """Functions that wait until the last line of a gang is shown, by gang."""
        self._pieces: dict[tuple[int, int], MessagePieces] = {}
        without_link: dict[int, PlainHandler] = {
            FrameKind.SENT: self._on_sent,
            FrameKind.IN_CREDIT: self._on_input_credit,
            FrameKind.HELD: self._on_held,
            FrameKind.LOG: self._on_line,
            FrameKind.EVENT: self._on_event,
            FrameKind.TASK_EVENTS: self._on_task_events,
            FrameKind.FACTS: self._on_facts_frame,
            **plain,
        }
        self.handlers: dict[int, Handler] = {
            **{kind: partial(_without_link, handle) for kind, handle in without_link.items()},
            FrameKind.RESULT: self._on_value,
            FrameKind.PART: self._on_value,
            FrameKind.ITEM: self._on_value,
            FrameKind.OUTCOME: self._on_outcome,
            **others,
        }
        """Handlers by kind of frame. Frames of other kinds are ignored, because newer heads may send them."""

    def give_up(self, link: Readable, frame: Frame, error: BaseException) -> None:
        """Fail the task of a frame whose handler raised, so that its caller does not wait forever."""
        report(error)
        task = self._ledger.tasks.get(frame.ident)
        if task is None:
            return
        failure = InternalError(f"{task.name!r}: its outcome could not be handled, {in_words(error)}; report this bug")
        failure.__cause__ = error
        self._end(task, ok=False)
        self._later(lambda: task.on_failed(failure))

    def forget_pieces(self, *, are_counted: bool) -> None:
        """Forget messages whose last pieces were lost with a head. `are_counted`: outcomes go on by their pieces."""
        kept = FrameKind.OUTCOME if are_counted else None
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key[0] == kept}

    # Calls ----------------------------------------------------------------------------------------------------------

    def _on_held(self, frame: Frame) -> None:
        self._came(frame.ident)
        self._values.on_held(frame)

    def _on_sent(self, frame: Frame) -> None:
        task, gang = self._ledger.tasks.get(frame.ident), self._ledger.gangs.get(frame.ident)
        if task is not None:
            task.attempt += 1
            task.on_sent()
            self._sent(frame.ident)
        elif gang is not None:
            gang.future.set_running()

    def _on_value(self, link: Readable, frame: Frame) -> None:
        """Take a value, a part of one, or an item. It is received even if nobody waits for it, with its blobs."""
        assert isinstance(link, HeadLink)
        self._came(frame.ident, is_value=frame.kind != FrameKind.RESULT)
        received = self._values.received(link, frame) if frame.flags & KEPT else link.received(frame)
        self._values.taken(frame.ident)
        task, gang = self._ledger.tasks.get(frame.ident), self._ledger.gangs.get(frame.ident)
        if gang is not None:
            gang.values[frame.lane] = received
        if frame.kind == FrameKind.RESULT:
            link.take_blobs(frame.ident)
        if task is None:
            return
        if frame.kind == FrameKind.RESULT:
            if self._read is not None and not task.handles_loss:
                received = _ToldValue(received, partial(self._read, frame.ident))
            self._later(partial(task.on_result, received))
            self._end(task, ok=True)
        else:
            self._later(partial(task.on_part if frame.kind == FrameKind.PART else task.on_item, received))

    def _on_input_credit(self, frame: Frame) -> None:
        task = self._ledger.tasks.get(frame.ident)
        if task is not None:
            self._took_input(frame.ident, frame.lane)
            self._later(lambda: task.on_input_credit(frame.lane))

    def _on_outcome(self, link: Readable, frame: Frame) -> None:
        """Take any other end of a call than its value."""
        assert isinstance(link, HeadLink)
        self._came(frame.ident)
        message = self._whole(frame)
        if message is None:
            return
        link.take_blobs(frame.ident)
        status, content = load_plain(message)
        task, gang = self._ledger.tasks.get(frame.ident), self._ledger.gangs.get(frame.ident)
        if task is not None:
            self._end(task, ok=False)
            self._later(partial(self._end_task, task, status, content))
        elif gang is not None:
            self._end(gang, ok=status == "gang")
            gang.future.shown = self._shown.pop(gang.id, None)
            self._later(partial(self._end_gang, gang, status, content))

    def _end_task(self, task: Task, status: str, content: Any) -> None:
        if status == "failed":
            failed = self._with_place(content)
            task.on_error(failed if self._read is None else _told_failure(failed, partial(self._read, task.id)))
        elif status == "lost":
            task.on_lost(content)
        elif self._read is not None and isinstance(task, CallTask | StreamTask):
            task.on_failed(Undecoded(self._told(task.id, partial(raise_error, _error(content)))))
        else:
            task.on_failed(_error(content))
            if self._read is not None:
                self._read(task.id)

    def _end_gang(self, gang: Gang, status: str, content: Any) -> None:
        if status == "gang":
            gang.future.settle(Undecoded(self._told(gang.id, gang.value)))
        elif status == "gang failed":
            failures, gang.past, gang.world_size = content
            gang.failures = [(at, rank, self._failure(failure)) for at, rank, failure in failures]
            gang.future.settle_error(Undecoded(self._told(gang.id, gang.raise_error)))
        else:
            gang.future.settle_error(Undecoded(self._told(gang.id, partial(raise_error, _error(content)))))

    def _told(self, number: int, decode: Callable[[], Any]) -> Callable[[], Any]:
        """Let the head know when an outcome is decoded."""
        read = self._read
        return decode if read is None else partial(_decode_and_tell, decode, partial(read, number))

    def _failure(self, failure: TaskFailure | bytes) -> TaskFailure | BaseException:
        return self._with_place(failure) if isinstance(failure, TaskFailure) else _error(failure)

    def _with_place(self, failed: TaskFailure) -> TaskFailure:
        """Note whether the node has files and packages of its own, which only this process knows."""
        machine = self._ledger.machines.get(failed.node)
        return dataclasses.replace(failed, is_elsewhere=machine is not None and bool(machine.channel))

    # Everything else --------------------------------------------------------------------------------------------------

    def _on_line(self, frame: Frame) -> None:
        message = self._whole(frame)
        if message is None or self._lines is None:
            return
        line, part = load_plain(message)
        shown = self._lines.put(line, Part[part])
        task = self._ledger.tasks.get(line.call)
        if task is not None:
            task.shown = shown
        elif line.call in self._ledger.gangs:
            self._shown[line.call] = shown

    def _on_event(self, frame: Frame) -> None:
        message = self._whole(frame)
        if message is not None:
            event = load_plain(message)
            self._later(lambda: self._emit(event))

    def _on_task_events(self, frame: Frame) -> None:
        message = self._whole(frame)
        if message is not None:
            self._later(partial(self._emit_each, load_plain(message)))

    def _emit_each(self, events: list[tuple[bool, dict[str, Any]]]) -> None:
        for has_ended, fields in events:
            self._emit(TaskEnded(**fields) if has_ended else TaskSent(**fields))

    def _on_facts_frame(self, frame: Frame) -> None:
        message = self._whole(frame)
        if message is not None:
            self._on_facts(message)

    def _whole(self, frame: Frame) -> bytes | None:
        """Return a message once its last piece is here."""
        key = frame.kind, frame.ident
        message = self._pieces.setdefault(key, MessagePieces(_MESSAGE_LIMIT)).add(frame.body, frame.lane)
        if message is not None:
            del self._pieces[key]
        return message

    def _later(self, action: Callable[[], object]) -> None:
        """Call a function at the end of this block of the ledger, without the lock."""
        self._ledger.after.append(action)


def _decode_and_tell(decode: Callable[[], Any], tell: Callable[[], object]) -> Any:
    try:
        return decode()
    finally:
        tell()


class _ToldValue(Received):
    """Value that tells when it is read."""

    __slots__ = ("_inner", "_tell")

    def __init__(self, inner: Received, tell: Callable[[], object]) -> None:
        super().__init__(inner.body, inner.blobs)
        self._inner = inner
        self._tell = tell

    def decode(self) -> Any:
        return _decode_and_tell(self._inner.decode, self._tell)

    def forget(self) -> None:
        super().forget()
        self._inner.forget()


class _ToldFailure(TaskFailure):
    """Failure that tells when it is read."""

    __slots__ = ("tell",)
    tell: Callable[[], object]

    def error(self) -> BaseException:
        self.tell()
        return TaskFailure.error(self)


def _told_failure(failed: TaskFailure, tell: Callable[[], object]) -> TaskFailure:
    told = _ToldFailure(**{field.name: getattr(failed, field.name) for field in dataclasses.fields(failed)})
    object.__setattr__(told, "tell", tell)  # frozen, as its base
    return told


def _without_link(handle: PlainHandler, _: Readable, frame: Frame) -> None:
    handle(frame)


def _error(data: bytes) -> BaseException:
    """Return an error that the head has made, of one of skyward's classes."""
    error: BaseException = pickle.loads(data)
    return error
