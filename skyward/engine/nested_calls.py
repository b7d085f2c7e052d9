"""Calls that tasks make (see `skyward.node.slot.handle`): each becomes a task or a gang, and its outcome is sent back.

The I/O thread only takes the frames; another thread does what takes time, or unpickles what users made.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InternalError, SkywardError, UsageError
from ..schedule.scheduler import Refuse
from ..wire.blobs import Blob, blob_digest, content_digest
from ..wire.channel import BLOBS, CONTROL
from ..wire.failures import encode_exception
from ..wire.frames import Frame, FrameKind
from ..wire.nested_calls import NestedCall, NestedOutcome, message_of, packed, payload_in
from ..wire.payloads import Encoded
from ..wire.tasks import HEAD, PICKLE_IS_BLOB, REFERENCE, CallKind
from .builder import PackedCall, TaskBuilder
from .gang import Gang, RankTask
from .gangs import Gangs
from .ledger import Ledger
from .link import NodeLink, Readable
from .task_dispatcher import TaskDispatcher
from .tasks import Received, Task, TaskFailure, WireFunction, cannot_send
from .threads import in_words

__all__ = ["NestedCalls"]

_log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(eq=False, kw_only=True)
class _OpenCall:
    """An open call. `node`: where the task that made it runs. `child`: the task or gang that it became."""

    number: int
    node: int
    parent: int = 0
    child: int = 0
    is_gang: bool = False
    is_cancelled: bool = False


@dataclass(eq=False, kw_only=True)
class _NestedTask(Task):
    """Task of a nested call: passes its outcome to the thread that sends it back."""

    is_nested = True

    call_number: int
    told: Callable[[int, str, Any], None]

    def on_result(self, received: Received) -> None:
        self.told(self.call_number, "value", received)

    def on_error(self, failed: TaskFailure) -> None:
        self.told(self.call_number, "failed", failed)

    def on_failed(self, error: BaseException) -> None:
        self.told(self.call_number, "error", error)


class NestedCalls:
    """Make tasks and gangs of the calls that tasks make, and send back what comes of them."""

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher, gangs: Gangs, builder: TaskBuilder) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._gangs = gangs
        self._builder = builder
        dispatcher.handlers[Refuse] = self._refuse
        dispatcher.on_cancelled.append(self._ended)
        self._calls: dict[int, _OpenCall] = {}
        self._by_parent: dict[int, dict[int, None]] = {}
        """In the order of the calls."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # With the ledger locked -----------------------------------------------------------------------------------------

    def on_call(self, link: Readable, frame: Frame) -> None:
        """Take a call that a task makes."""
        if not isinstance(link, NodeLink):
            return
        blobs = link.blobs_of_call(frame.ident)
        call = self._calls[frame.ident] = _OpenCall(number=frame.ident, node=link.node)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="skyward-nested", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: this call fails
                self._take(frame.ident)
                self._reply(call, _message("error", UsageError(f"the call cannot be made: {error}")))
                return
            self._thread = thread
        self._inbox.put(lambda: self._begin(call, frame.body, blobs))

    def on_uncall(self, link: Readable, frame: Frame) -> None:
        """Stop a call whose caller no longer waits for it."""
        if not isinstance(link, NodeLink):
            return
        link.blobs_of_call(frame.ident)  # what came for it is dropped
        call = self._take(frame.ident)
        if call is not None:
            self._stop(call)

    def _ended(self, parent: int) -> None:
        """Cancel the calls of a task that has ended or is being stopped, and send it that outcome."""
        if parent in self._by_parent:
            self._cancel_each(self._by_parent[parent])

    def node_lost(self, node: int) -> None:
        self._cancel_each(number for number, call in self._calls.items() if call.node == node)

    def _refuse(self, action: Refuse) -> None:
        """Fail a call that could never start."""
        nodes = ", ".join(map(str, sorted(action.nodes)))
        task, gang = self._ledger.tasks.get(action.call), self._ledger.gangs.get(action.call)
        name = task.name if task is not None else gang.name if gang is not None else "?"
        error = UsageError(
            f"{name!r} could never run: all slots that it may go to (of node {nodes}) are held by tasks that wait for "
            "calls of their own, and one of those for this one; send it to another node, keep one for it by "
            "roles={...}, or give the pool more slots (concurrency=)"
        )
        if task is not None:
            self._dispatcher.forget(task)
            self._ledger.after.append(lambda: task.on_failed(error))
        elif gang is not None:
            self._gangs.drop(gang)
            self._ledger.after.append(lambda: gang.future.settle_error(error))

    def close(self) -> None:
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the thread. Call it without the lock, which the last work of the thread may need."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _take(self, number: int) -> _OpenCall | None:
        call = self._calls.pop(number, None)
        if call is not None:
            siblings = self._by_parent.get(call.parent, {})
            siblings.pop(number, None)
            if not siblings:
                self._by_parent.pop(call.parent, None)
        return call

    def _cancel_each(self, numbers: Iterable[int]) -> None:
        """Cancel the newest calls first, so that no waiting one begins in the place of one that was stopped."""
        for number in reversed(list(numbers)):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        call = self._take(number)
        if call is not None:
            self._reply(call, packed(NestedOutcome("cancelled"), ()))
            self._stop(call)

    def _stop(self, call: _OpenCall) -> None:
        """Stop the task or gang of a call, once the ledger is closed and everything queued has been sent."""
        call.is_cancelled = True
        if call.child:
            self._ledger.after.append(lambda: self._cancel_child(call.child, is_gang=call.is_gang))

    def _cancel_child(self, child: int, *, is_gang: bool) -> None:
        with self._ledger:
            (self._gangs if is_gang else self._dispatcher).cancel(child)

    def _reply(self, call: _OpenCall, message: Encoded) -> None:
        link = self._ledger.links.get(call.node)
        if link is None:
            return
        try:
            for blob in message.blobs:
                body = blob.digest + blob.size.to_bytes(8, "little") + bytes(8)
                link.channel.queue(FrameKind.BLOB, call.number, body, blob=blob, priority=BLOBS)
        except OSError as error:  # this call gets no value; the others go on
            message = _message("error", cannot_send("its value", error))
        link.channel.queue(FrameKind.OUTCOME, call.number, message.body, priority=BLOBS if message.blobs else CONTROL)
        self._ledger.dirty.add(link)

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            try:
                work()
            except BaseException as error:  # of one call; the others go on
                _log.error("a call of a task: %s", in_words(error))
            del work  # it holds arrays

    def _begin(self, call: _OpenCall, body: bytes, blobs: Mapping[bytes, Blob]) -> None:
        try:
            asked = NestedCall(*message_of(body, blobs))
            packed_call = PackedCall(
                asked.name,
                WireFunction(content_digest(asked.function), payload_in(asked.function, blobs)),
                payload_in(asked.arguments, blobs),
                pickle.loads(asked.options),
            )
            make = self._gang_of if asked.kind == CallKind.GANG else self._task_of
            submit = make(call, asked, packed_call)
            with self._ledger:
                if self._adopt(call, asked.parent):
                    submit()
        except SkywardError as error:
            self._settle(call.number, "error", error)
        except BaseException as error:  # unpickling what the user gave: any exception can come
            self._settle(call.number, "error", UsageError(f"the call cannot be made: {in_words(error)}"))

    def _adopt(self, call: _OpenCall, parent: int) -> bool:
        """Tie a call to the task that made it. False: nobody wants it any longer."""
        task = self._ledger.tasks.get(parent)
        if call.is_cancelled or call.number not in self._calls or not self._ledger.is_open:
            return False
        if task is None or task.is_cancelled:
            self._cancel(call.number)
            return False
        call.parent = parent
        self._by_parent.setdefault(parent, {})[call.number] = None
        self._dispatcher.on_ended[parent].add(self._ended)
        return True

    def _task_of(self, call: _OpenCall, asked: NestedCall, packed_call: PackedCall) -> Callable[[], None]:
        task = self._builder.task(
            _NestedTask,
            self._builder.next_id(),
            packed_call,
            asked.kind,
            (asked.part, asked.parts, asked.first_node),
            call_number=call.number,
            told=self._told,
        )

        def submit() -> None:
            call.child = task.id
            self._dispatcher.submit(task, asked.nodes, parent=self._holder(call.parent))

        return submit

    def _gang_of(self, call: _OpenCall, asked: NestedCall, packed_call: PackedCall) -> Callable[[], None]:
        gang = self._builder.gang(
            packed_call,
            pickle.loads(asked.launch),
            asked.launch,
            nodes=asked.nodes if asked.is_on_all else None,
            one_of=None if asked.is_on_all else asked.nodes,
            is_nested=True,
        )

        def ended(future: concurrent.futures.Future[Any]) -> None:
            if not future.cancelled():
                self._told(call.number, "gang", gang)

        def submit() -> None:
            call.child, call.is_gang = gang.id, True
            gang.parent = self._holder(call.parent)
            gang.future.add_done_callback(ended)
            self._gangs.submit(gang)

        return submit

    def _holder(self, parent: int) -> int:
        """Return what holds the slots of a calling task: the task itself, or the gang whose rank it is."""
        task = self._ledger.tasks[parent]
        return task.gang.id if isinstance(task, RankTask) else parent

    # What comes of them ----------------------------------------------------------------------------------------------

    def _told(self, number: int, what: str, came: Any) -> None:
        self._inbox.put(lambda: self._settle(number, what, came))

    def _settle(self, number: int, what: str, came: Any) -> None:
        if number not in self._calls:
            return
        try:
            message = _message(what, came)
        except BaseException as error:  # no room for a copy, say
            message = _message("error", InternalError(f"a value could not be passed on: {in_words(error)}"))
        with self._ledger:
            call = self._take(number)
            if call is not None and self._ledger.is_open:
                self._reply(call, message)


def _message(what: str, came: Any) -> Encoded:
    if what == "value":
        return _of_values("value", [came])
    if what == "gang":
        return _of_gang(came)
    if what == "failed":
        fields = (came.failure, came.where, came.node, came.task, came.log_tail)
        return packed(NestedOutcome("failed", (pickle.dumps(fields),)), ())
    data, reason = encode_exception(came)
    if data is None:
        data, _ = encode_exception(InternalError(f"{type(came).__name__}: {came} (it cannot be sent: {reason})"))
    return packed(NestedOutcome("error", (data or b"",)), ())


def _of_gang(gang: Gang) -> Encoded:
    try:
        if gang.future.has_failed:
            gang.future.result()
    except BaseException as error:  # the error of the gang: the caller of the gang gets it
        return _message("error", error)
    values = [gang.values[rank] for rank in sorted(gang.values)]
    return _of_values("value" if gang.nodes is None else "values", values[:1] if gang.nodes is None else values)


def _of_values(status: str, values: list[Received]) -> Encoded:
    passed = [_passed_on(value) for value in values]
    return packed(NestedOutcome(status, tuple(p.body for p in passed)), [blob for p in passed for blob in p.blobs])


def _passed_on(value: Received) -> Encoded:
    """Return the payload unchanged, with blobs named by content, because a slot names its results by number only."""
    if not value.blobs:
        return Encoded(HEAD.pack(0, 0, 0) + bytes(value.parsed.pickle))
    blobs = tuple(_named(blob) for blob in value.blobs)
    names = b"".join(REFERENCE.pack(blob.digest, blob.size) for blob in blobs)
    flags = PICKLE_IS_BLOB if value.parsed.pickle_is_blob else 0
    return Encoded(HEAD.pack(flags, len(blobs), 0) + names + bytes(value.parsed.pickle), blobs)


def _named(blob: Blob) -> Blob:
    if blob.is_loaded:
        return Blob.snapshot(memoryview(blob.map()))
    with memoryview(blob.map()) as view:
        return Blob(blob_digest(view), blob.size, os.dup(blob.fd))
