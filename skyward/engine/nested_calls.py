"""Calls that tasks make (see `skyward.node.slot.handle`): each becomes a task or a gang, and its outcome is sent back.

The I/O thread only takes the frames. A separate thread does everything that takes time or unpickles the user's values.

A call lives in `_calls` from its CALL frame to its one OUTCOME. `_take` removes it under the ledger's lock, and only
the thread that got it from there sends an outcome. So a value, a cancellation and a lost node may race, and the caller
still gets exactly one of them.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from ..calls.futures import joined
from ..core.records import dataclass
from ..errors import InternalError, RefLost, SkywardError, UsageError
from ..schedule.actions import Refuse
from ..wire.blobs import DIGEST_SIZE, Blob, blob_digest, content_digest
from ..wire.channel import BLOBS, CONTROL
from ..wire.failures import encode_exception
from ..wire.frames import Frame, FrameKind
from ..wire.nested_calls import NestedCall, NestedOutcome, TaskRequest, message_of, packed, payload_in
from ..wire.payloads import Encoded, encode
from ..wire.tasks import HEAD, PICKLE_IS_BLOB, REFERENCE, CallKind, Mode
from .actors import Actors
from .builder import PackedCall, TaskBuilder
from .gang import Gang, RankTask
from .gangs import Gangs
from .kept_received import KeptReceived
from .kept_values import KeptBlob, KeptValues
from .ledger import Ledger
from .link import NodeLink, Readable
from .task_dispatcher import TaskDispatcher
from .task_values import TaskValues
from .tasks import Received, Task, TaskFailure, WireFunction, cannot_send
from .threads import in_words, start_thread
from .waiting_circles import refuse_circle

_log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(eq=False, kw_only=True)
class _OpenCall:
    """Open call. `node` runs the task that made it, and `child` is the task or gang that it became."""

    number: int
    node: int
    parent: int = 0
    child: int = 0
    is_gang: bool = False
    is_cancelled: bool = False


@dataclass(eq=False, kw_only=True)
class _NestedTask(Task):
    """Task of a nested call. It passes its outcome to the thread that sends it back."""

    is_nested = True

    call_number: int
    report: Callable[[int, str, Any], None]

    def on_result(self, received: Received) -> None:
        self.report(self.call_number, "value", received)

    def on_error(self, failed: TaskFailure) -> None:
        self.report(self.call_number, "failed", failed)

    def on_failed(self, error: BaseException) -> None:
        self.report(self.call_number, "error", error)


class NestedCalls:
    """Open calls of tasks: each becomes a task or gang, whose outcome is sent back."""

    def __init__(
        self,
        ledger: Ledger,
        dispatcher: TaskDispatcher,
        gangs: Gangs,
        actors: Actors,
        builder: TaskBuilder,
        values: KeptValues,
    ) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._gangs = gangs
        self._actors = actors
        self._builder = builder
        self._values = values
        self.held = TaskValues(ledger, dispatcher)
        """Values that tasks have references to."""
        self.finds_apart = False
        """Whether a named actor is found by another process, which takes time."""
        dispatcher.handlers[Refuse] = self._refuse
        dispatcher.on_cancelled.append(self._ended)
        self._calls: dict[int, _OpenCall] = {}
        self._by_parent: dict[int, dict[int, None]] = {}
        """Numbers of open calls by calling task, in the order of the calls."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # With the ledger locked -----------------------------------------------------------------------------------------

    def on_call(self, link: Readable, frame: Frame) -> None:
        """Take the CALL frame of a task."""
        if not isinstance(link, NodeLink):
            return
        blobs = link.blobs_of_call(frame.ident)
        call = self._calls[frame.ident] = _OpenCall(number=frame.ident, node=link.node)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="skyward-nested", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # this process cannot start another thread, so this call fails
                self._take(frame.ident)
                self._reply(call, _message("error", _cannot_begin(str(error))))
                return
            self._thread = thread
        self._inbox.put(lambda: self._begin(call, frame.body, blobs))

    def on_uncall(self, link: Readable, frame: Frame) -> None:
        """Stop a call whose caller no longer waits for it, or forget the references of its outcome."""
        if not isinstance(link, NodeLink):
            return
        link.blobs_of_call(frame.ident)  # drops them
        call = self._take(frame.ident)
        if call is not None:
            self._stop(call)
        else:  # behind the calls that took these references along
            self._inbox.put(lambda: self._release(frame.ident))

    def _ended(self, parent: int) -> None:
        """Cancel the calls of a task that has ended or is being stopped, and report that to it."""
        if parent in self._by_parent:
            self._cancel_each(self._by_parent[parent])

    def node_lost(self, node: int) -> None:
        self._cancel_each(number for number, call in self._calls.items() if call.node == node)

    def _refuse(self, action: Refuse) -> None:
        """Fail a call that could never start."""
        nodes = ", ".join(map(str, sorted(action.nodes)))
        task, gang = self._ledger.tasks.get(action.call), self._ledger.gangs.get(action.call)
        name = task.name if task is not None else gang.name if gang is not None else "?"
        why = (
            f"could never run, because all its possible slots (node {nodes}) are held by tasks that wait for calls, "
            "one of them for this call; send it to another node, reserve a node for it with roles={...}, or give the "
            "pool more slots with concurrency="
        )
        error = UsageError(f"{name!r}: {action.why or why}")  # words: ok, schedule/reasons.py says what to do
        if task is not None:
            self._dispatcher.forget(task)
            self._ledger.after.append(lambda: task.on_failed(error))
        elif gang is not None:
            self._gangs.drop(gang)
            self._ledger.after.append(lambda: gang.future.settle_error(error))

    def close(self) -> None:
        self._inbox.put(None)

    def join(self) -> None:
        """Wait for the thread. Call it without the ledger's lock, which the thread may need for its last work."""
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
        """Cancel the newest calls first, so that none of them starts in the slot of one that was cancelled before."""
        for number in reversed(list(numbers)):
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        call = self._take(number)
        if call is not None:
            self._reply(call, packed(NestedOutcome("cancelled"), ()))
            self._stop(call)

    def _stop(self, call: _OpenCall) -> None:
        """Stop the task or gang of a call at the end of this block of the ledger.

        Not at once: this may run while the dispatcher is changing the very tables that a cancel changes.
        """
        call.is_cancelled = True
        if call.child:
            self._ledger.after.append(lambda: self._cancel_child(call.child, is_gang=call.is_gang))

    def _cancel_child(self, child: int, *, is_gang: bool) -> None:
        with self._ledger:
            (self._gangs if is_gang else self._dispatcher).cancel(child)

    def _reply(self, call: _OpenCall, message: Encoded, priority: int = CONTROL) -> None:
        link = self._ledger.links.get(call.node)
        if link is None:
            return
        kept = [blob for blob in message.blobs if isinstance(blob, KeptBlob)]
        if kept:
            self.held.hold(call.parent, call.number, kept)
        try:
            for blob in message.blobs:
                if isinstance(blob, KeptBlob):
                    continue
                body = blob.digest + blob.size.to_bytes(8, "little") + bytes(8)
                link.channel.queue(FrameKind.BLOB, call.number, body, blob=blob, priority=BLOBS)
        except OSError as error:  # this call gets an error instead of its value; others are not affected
            message = _message("error", cannot_send("value of a call", error))
        link.channel.queue(FrameKind.OUTCOME, call.number, message.body, priority=priority)
        self._ledger.dirty.add(link)

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._inbox.get()) is not None:
            try:
                work()
            except BaseException as error:  # fails one call; the thread must go on for the others
                _log.error("call made by a task: %s", in_words(error))
            del work  # it may hold large arrays while the thread waits for the next

    def _begin(self, call: _OpenCall, body: bytes, blobs: Mapping[bytes, Blob]) -> None:
        try:
            request = NestedCall(*message_of(body, blobs))
            if request.kind == TaskRequest.FIND_ACTOR:
                self._find(call, request.name)
                return
            if request.kind in (TaskRequest.PUT, TaskRequest.GET, TaskRequest.BRING):
                (self._put if request.kind == TaskRequest.PUT else self._get)(call, request)
                return
            named = partial(self._named, request.parent)
            from ..calls.named_options import unpack_options  # programs without calls in tasks do without

            packed_call = PackedCall(
                request.name,
                WireFunction(content_digest(request.function), payload_in(request.function, blobs, named)),
                payload_in(request.arguments, blobs, named),
                unpack_options(request.options),
            )
            make = self._gang_of if request.kind == CallKind.GANG else self._task_of
            submit = make(call, request, packed_call)
            # Check and submit under one lock: the caller may have gone while its call was unpickled.
            with self._ledger:
                if self._adopt(call, request.parent):
                    submit()
        except SkywardError as error:
            self._settle(call.number, "error", error)
        except BaseException as error:  # unpickling the user's values can raise anything
            self._settle(call.number, "error", _cannot_begin(in_words(error)))

    def _find(self, call: _OpenCall, name: str) -> None:
        """Answer with the handle of a named actor."""

        def find() -> None:
            self._settle(call.number, "packed", self._actors.find(name))

        if self.finds_apart:
            failed = partial(self._settle, call.number, "error")
            start_thread(find, name="skyward-find", failed=failed)
        else:
            find()

    def _adopt(self, call: _OpenCall, parent: int) -> bool:
        """Tie a call to the task that made it. Return False if nobody waits for it any longer."""
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

    def _task_of(self, call: _OpenCall, request: NestedCall, packed_call: PackedCall) -> Callable[[], None]:
        task = self._builder.task(
            _NestedTask,
            self._builder.next_id(),
            packed_call,
            request.kind,
            (request.part, request.parts, request.first_node),
            mode=_mode_of(request),
            call_number=call.number,
            report=self._report,
        )
        if request.kind == CallKind.ACTOR:
            task.actor = task.head.actor

        def submit() -> None:
            call.child = task.id
            if task.actor:
                refuse_circle(self._ledger, task, self._made_by)
            self._dispatcher.submit(task, request.nodes, parent=self._holder(call.parent))

        return submit

    def _gang_of(self, call: _OpenCall, request: NestedCall, packed_call: PackedCall) -> Callable[[], None]:
        gang = self._builder.gang(
            packed_call,
            pickle.loads(request.launch_facts),
            request.launch,
            nodes=request.nodes if request.is_on_all else None,
            some_of=None if request.is_on_all else request.nodes,
            mode=_mode_of(request),
            is_nested=True,
        )

        def ended(future: concurrent.futures.Future[Any]) -> None:
            if not future.cancelled():
                self._report(call.number, "gang", gang)

        def submit() -> None:
            call.child, call.is_gang = gang.id, True
            gang.parent = self._holder(call.parent)
            gang.future.add_done_callback(ended)
            self._gangs.submit(gang)

        return submit

    def _holder(self, parent: int) -> int:
        """Return the holder of a calling task's slots: the task itself, or the gang whose rank it is.

        An actor holds none. Its call may keep a task waiting that does, and that one is the holder.
        """
        for task in self._callers(parent):
            if isinstance(task, RankTask):
                return task.gang.id
            if not task.actor:
                return task.id
        return parent

    def _callers(self, task_id: int) -> Iterator[Task]:
        """Yield a task, the task that called it, and so on."""
        while (task := self._ledger.tasks.get(task_id)) is not None:
            yield task
            call = self._calls.get(task.call_number) if isinstance(task, _NestedTask) else None
            if call is None:
                return
            task_id = call.parent

    def _made_by(self, call: int) -> Iterator[int]:
        """Yield the open calls that a task has made, or the ranks of a gang."""
        makers = [call]
        if call in self._ledger.gangs:
            ranks = ((number, self._ledger.tasks.get(number)) for number in self._by_parent)
            makers = [number for number, rank in ranks if isinstance(rank, RankTask) and rank.gang.id == call]
        for maker in makers:
            yield from (self._calls[number].child for number in self._by_parent.get(maker, ()))

    # References ------------------------------------------------------------------------------------------------------

    def _named(self, parent: int, digest: bytes, _: int) -> Blob:
        """Return a blob that a task names. Raises RefLost."""
        with self._ledger.lock:
            blob = self.held.named(parent, digest)
        if blob is None:
            raise RefLost("ref: its value is gone, because its task has dropped it; keep the Ref while calls use it")
        return blob

    def _release(self, number: int) -> None:
        with self._ledger:
            self.held.release(number)

    def _put(self, call: _OpenCall, request: NestedCall) -> None:
        """Make a reference of a value whose bytes the node of the task keeps."""
        with self._ledger:
            link = self._ledger.links.get(call.node)
            if link is None:
                return
            # Before the check: if nobody waits, the reference dies at once, and the node drops the bytes.
            value = self._values.kept_on(link, request.arguments)
            if self._adopt(call, request.parent):
                self._values.hold(value.blobs, request.nodes or ())
        self._settle(call.number, "value", value)

    def _get(self, call: _OpenCall, request: NestedCall) -> None:
        """Get the bytes of blobs that do not lie on the node of the task, or let it have them from another node."""
        digests = [request.arguments[at : at + DIGEST_SIZE] for at in range(0, len(request.arguments), DIGEST_SIZE)]
        blobs = tuple(self._named(request.parent, digest, 0) for digest in digests)
        with self._ledger:
            if not self._adopt(call, request.parent):
                return
        to = call.node if request.kind == TaskRequest.BRING else None
        future = joined(self._values.begin_fetch(blobs, to))
        future.add_done_callback(lambda _: self._report(call.number, "blobs", future))

    # Outcomes --------------------------------------------------------------------------------------------------------

    def _report(self, number: int, status: str, outcome: Any) -> None:
        self._inbox.put(lambda: self._settle(number, status, outcome))

    def _settle(self, number: int, status: str, outcome: Any) -> None:
        if number not in self._calls:  # only saves the packing; `_take` below decides
            return
        try:
            message = _message(status, outcome)
        except BaseException as error:  # such as no room for a copy
            told = f"value of a call: cannot be passed on ({in_words(error)}); free memory here, or report this bug"
            message = _message("error", InternalError(told))
        with self._ledger:
            call = self._take(number)
            if call is not None and self._ledger.is_open:
                # Some bytes may be on their way to the node: the task asks for them when it has this answer.
                self._reply(call, message, BLOBS if message.blobs or status == "blobs" else CONTROL)


def _cannot_begin(reason: str) -> UsageError:
    return UsageError(f"call made by a task: cannot start: {reason}; check its function, arguments and options")


def _mode_of(request: NestedCall) -> Mode:
    return Mode.KEEP if request.is_kept else Mode.CALL


def _message(status: str, outcome: Any) -> Encoded:
    if status == "value":
        return _of_values("value", [outcome])
    if status == "packed":
        return packed(NestedOutcome("value", (outcome.body,)), outcome.blobs)
    if status == "gang":
        return _of_gang(outcome)
    if status == "blobs":
        return _of_fetch(outcome)
    if status == "failed":
        return _of_failure(outcome)
    data, reason = encode_exception(outcome)
    if data is None:
        told = f"{type(outcome).__name__}: {outcome} (cannot be sent: {reason})"
        data, _ = encode_exception(InternalError(told))  # words: ok, the user's own error
    return packed(NestedOutcome("error", (data or b"",)), ())


def _of_failure(failed: TaskFailure, notes: Iterable[str] = ()) -> Encoded:
    fields = (failed.failure, failed.where, failed.node, failed.task, failed.log_tail, *notes)
    return packed(NestedOutcome("failed", (pickle.dumps(fields),)), ())


def _of_gang(gang: Gang) -> Encoded:
    if gang.failures:
        _, cause = gang.cause()
        if isinstance(cause, TaskFailure):
            return _of_failure(cause, gang.notes())
    try:
        if gang.future.has_failed:
            gang.future.result()
    except BaseException as error:  # the caller of the gang gets its error
        return _message("error", error)
    values = [gang.values[rank] for rank in sorted(gang.values)]
    if gang.launch.returns == "ranks":
        return _of_values("ranks", values)
    return _of_values("value" if gang.is_on_one else "values", values)


def _of_values(status: str, values: list[Received]) -> Encoded:
    payloads = [_forwarded(value) for value in values]
    blobs = [blob for payload in payloads for blob in payload.blobs]
    # Bytes win over a reference to the same bytes, which arrives with them then.
    blobs.sort(key=lambda blob: not isinstance(blob, KeptBlob))
    is_held = any(isinstance(blob, KeptBlob) for blob in blobs)
    return packed(NestedOutcome(status, tuple(p.body for p in payloads), is_held), blobs)


def _of_fetch(future: concurrent.futures.Future[tuple[Blob | None, ...]]) -> Encoded:
    try:
        return packed(NestedOutcome("blobs"), [blob for blob in future.result() if blob is not None])
    except concurrent.futures.CancelledError:
        return packed(NestedOutcome("cancelled"), ())
    except Exception as error:
        return _message("error", error)


def _forwarded(value: Received) -> Encoded:
    """Return the payload unchanged, with blobs named by content, because a slot names its results by number only."""
    if isinstance(value, KeptReceived):
        return encode(value.decode(), Blob.snapshot)
    if not value.blobs:
        return Encoded(HEAD.pack(0, 0, 0) + bytes(value.parsed.pickle))
    blobs = tuple(_named(blob) for blob in value.blobs)
    names = b"".join(REFERENCE.pack(blob.digest, blob.size) for blob in blobs)
    flags = PICKLE_IS_BLOB if value.parsed.pickle_is_blob else 0
    return Encoded(HEAD.pack(flags, len(blobs), 0) + names + bytes(value.parsed.pickle), blobs)


def _named(blob: Blob) -> Blob:
    if isinstance(blob, KeptBlob):
        return blob
    if blob.is_loaded:
        return Blob.snapshot(memoryview(blob.map()))
    with memoryview(blob.map()) as view:
        return Blob(blob_digest(view), blob.size, os.dup(blob.fd))
