"""Calls from a running task to nodes of its pool; `handle` is the user's side.

The client places these calls like all others. A slot reads its own socket only between calls. So a calling task gets
its own connection to the node's agent, with one thread that reads it and one that writes. The main thread does neither,
because a signal may interrupt it anywhere, and a frame must not be cut in two.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from ...calls.actor_handle import ActorMethod
from ...calls.futures import Future, refuse_to_wait, this_thread, value_of, values_of
from ...calls.graphs import Graphs
from ...calls.named_options import pack_options
from ...calls.pending import PendingCompute
from ...calls.undecoded import Undecoded
from ...core import interrupts
from ...core.by_value import loads
from ...errors import ArgumentNotPicklable, PoolClosed, RemoteError, UsageError
from ...values.launch import RankValues
from ...values.launch_facts import LaunchFacts
from ...values.pinned import refuse_to_keep
from ...values.ref import Ref, splice
from ...wire.blobs import Blob
from ...wire.channel import ChannelClosed
from ...wire.failures import decode_failure, explain_result_error, is_fault_of_value
from ...wire.frames import IN_ORDER, Frame, FrameKind
from ...wire.nested_calls import IS_NESTED, NestedCall, NestedOutcome, TaskRequest, message_of, packed, payload_in
from ...wire.payloads import Encoded, decode, encode
from ...wire.tasks import CallKind, parse
from .far_values import FarBlob, TaskHold, ended, unknown, with_bytes
from .link import connect_task, read_blob_body
from .runtime import RunningCall, call_endings

_JOIN_S = 1.0

_open: dict[int, Caller] = {}
"""Callers by task."""
_lock = threading.Lock()


def caller_of(call: RunningCall) -> Caller:
    """Return the caller of a running task. Raises PoolClosed if its agent cannot be reached."""
    with _lock:
        caller = _open.get(call.task)
        if caller is None:
            try:
                caller = Caller(call.agent, call.task, call.names)
            except OSError as error:
                raise PoolClosed(f"agent of this node: cannot be reached ({error}); reopen the pool") from error
            _open[call.task] = caller
            call_endings.setdefault(call.task, []).append(_end)
        return caller


def _end(task: int) -> None:
    """Cancel the open calls of an ended task."""
    with _lock:
        caller = _open.pop(task, None)
    if caller is not None:
        caller.close()


class Caller:
    """Open calls of one task. Any thread may call.

    Args:
        agent: Path of the socket of the node's agent.
        task: Number of the task.
        names: Names of the blobs among its arguments.

    Raises:
        OSError: The agent cannot be reached.
    """

    def __init__(self, agent: str, task: int, names: frozenset[bytes]) -> None:
        self._task = task
        self._names = names
        self._link = connect_task(agent, task, "caller")
        self.graphs = Graphs()
        self._until_end: list[Blob] = []
        """Blobs of references in the task's value: the client must not drop them before it has the value."""
        self._futures: dict[int, Future[Any]] = {}
        self._arrived: dict[int, dict[bytes, Blob]] = {}
        self._outbox: queue.SimpleQueue[tuple[int, int, int, Encoded | None]] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=run, name=f"skyward-calls-{direction}", daemon=True)
            for direction, run in (("in", self._read), ("out", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, pending: PendingCompute[Any], where: list[dict[str, Any]]) -> list[Future[Any]]:
        """Send the call once per entry of `where`: fields of NestedCall that choose the nodes and the kind.

        Raises:
            ArgumentNotPicklable: the function or an argument cannot be sent.
            UsageError: a reference belongs to a task that has ended.
        """
        function, arguments = _payloads(pending)
        blobs = (*function.blobs, *self._unknown(arguments.blobs))
        is_gang = pending.fn.launch.is_gang or pending.options.nodes is not None
        launch = pickle.dumps(pending.fn.launch) if is_gang else b""
        facts = pickle.dumps(LaunchFacts.of(pending.fn.launch)) if is_gang else b""
        options = pack_options(pending.options)
        futures = []
        for place in where:
            call = NestedCall(
                parent=self._task,
                name=pending.name,
                function=function.body,
                arguments=arguments.body,
                options=options,
                launch=launch,
                launch_facts=facts,
                is_kept=pending.is_kept,
                **place,
            )
            futures.append(self._send(call, blobs))
        return futures

    def find_actor(self, name: str) -> Future[Any]:
        """Ask the client for the handle of a named actor."""
        return self._send(NestedCall(self._task, name, b"", b"", b"", b"", TaskRequest.FIND_ACTOR, None))

    def _unknown(self, blobs: tuple[Blob, ...]) -> list[Blob]:
        """Return the blobs that must travel with a call."""
        far = [blob for blob in blobs if isinstance(blob, FarBlob)]
        if any(blob.hold.caller is not self for blob in far):
            raise ended()
        return list(unknown((blob for blob in blobs if blob not in far), self._names))

    def _begin(self) -> tuple[int, Future[Any]]:
        number = int.from_bytes(os.urandom(8), "little") | IS_NESTED
        future: Future[Any] = Future(lambda _: self._cancel(number))
        self._futures[number] = future
        if self._is_closed:  # `close` may have run since the future was registered
            self._give_up()
        return number, future

    def _send(self, call: NestedCall, blobs: Iterable[Blob] = (), kept: tuple[Blob, ...] = ()) -> Future[Any]:
        message = packed(call, blobs)
        number, future = self._begin()
        if kept:
            self._outbox.put((FrameKind.BLOB, 0, number, Encoded(b"", kept)))
        # Duplicates, because a sent blob is closed, and one blob may go to several nodes.
        copies = tuple(Blob(blob.digest, blob.size, os.dup(blob.open())) for blob in message.blobs)
        flags = IN_ORDER if call.kind == CallKind.ACTOR else 0
        self._outbox.put((FrameKind.CALL, flags, number, Encoded(message.body, copies)))
        future.set_running()
        return future

    # Values that stay -----------------------------------------------------------------------------------------------

    def put(self, value: Any, nodes: tuple[int, ...]) -> Ref[Any]:
        """Keep a value on the node of this task, send it to other nodes, and return a reference.

        Raises:
            ArgumentNotPicklable: the value cannot be pickled.
        """
        try:
            payload = encode(value, Blob.kept)
            kept = tuple(with_bytes(payload.blobs))
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            raise ArgumentNotPicklable(
                f"put(): a {type(value).__qualname__} cannot be kept: {type(error).__name__}: {error}; pass plain data",
                argument="value",
            ) from error
        refuse_to_keep(payload.pinned)
        ref: Ref[Any] = value_of(self._send(self._request(TaskRequest.PUT, payload.body, nodes), kept=kept))
        return ref

    def fetch(self, blobs: Sequence[Blob]) -> list[Blob]:
        """Get the bytes of blobs: from this node, from another one, or through the client. See `far_values`."""
        refuse_to_wait("ref.get()")
        if self._is_closed:
            raise ended()
        here = self._ask_agent(blob.digest for blob in blobs)
        digests = {blob.digest for blob in blobs}
        for request in (TaskRequest.BRING, TaskRequest.GET):
            if missing := digests - here.keys():
                here |= value_of(self._send(self._request(request, b"".join(missing))))
            # Other nodes have sent the rest to this one. If it has dropped a blob since, that comes through the client.
            if missing := digests - here.keys():
                here |= self._ask_agent(missing)
        return [here[blob.digest] for blob in blobs]

    def _ask_agent(self, digests: Iterable[bytes]) -> dict[bytes, Blob]:
        """Get those blobs that this node has and can pass on."""
        asked: dict[bytes, Future[Blob | None]] = {}
        for digest in digests:
            number, asked[digest] = self._begin()
            self._outbox.put((FrameKind.FETCH, 0, number, Encoded(digest)))
        found = zip(asked, values_of(list(asked.values())), strict=True)
        return {digest: blob for digest, blob in found if blob is not None}

    def _request(self, kind: TaskRequest, arguments: bytes, nodes: tuple[int, ...] = ()) -> NestedCall:
        return NestedCall(self._task, kind.name, b"", arguments, b"", b"", kind, nodes)

    def until_end(self, blob: Blob) -> None:
        if self._is_closed:
            raise ended()
        self._until_end.append(blob)

    def forget(self, number: int) -> None:
        if not self._is_closed:  # otherwise the client knows
            self._outbox.put((FrameKind.UNCALL, 0, number, None))

    # The end --------------------------------------------------------------------------------------------------------

    def _cancel(self, number: int) -> None:
        if self._futures.pop(number, None) is not None:
            self._outbox.put((FrameKind.UNCALL, 0, number, None))

    def close(self) -> None:
        """Cancel the open calls; when this returns nobody waits for one. The agent notifies the client."""
        self._is_closed = True
        self._give_up()
        self.graphs.close()
        self._outbox.put((0, 0, 0, None))
        self._link.shut_down()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._until_end.clear()

    def _give_up(self, error: BaseException | None = None) -> None:
        for number in reversed(list(self._futures)):  # newest first, so that no waiting call replaces a stopped one
            future = self._futures.pop(number, None)
            if future is not None and error is not None:
                future.settle_error(error)
            elif future is not None:
                future.cancel()

    # Threads --------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            kind, flags, number, message = self._outbox.get()
            if not kind:
                return
            try:
                if message is None:
                    self._link.send(kind, number)
                elif kind == FrameKind.FETCH:
                    self._link.send(kind, number, message.body)
                elif kind == FrameKind.BLOB:
                    self._link.keep(number, message.blobs)
                else:
                    self._link.send_payload(kind, number, message, flags=flags)
            except OSError:
                return  # the reading thread meets the error too
            except BaseException as error:
                self._is_closed = True
                self._give_up(error)
                return

    def _read(self) -> None:
        this_thread.brings_values = True
        with contextlib.closing(self._link):
            try:
                while True:
                    self._on_frame(self._link.receive())
            except (ChannelClosed, OSError):
                self._is_closed = True
                self._give_up(
                    PoolClosed("agent of this node: is gone, and with it the calls of this task; reopen the pool")
                )
            except BaseException as error:
                self._is_closed = True
                self._give_up(error)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.BLOB:
            digest, size, _, _ = read_blob_body(frame.body)
            self._arrived.setdefault(frame.ident, {})[digest] = Blob(digest, size, frame.fd)
        elif frame.kind == FrameKind.OUTCOME:
            blobs = self._arrived.pop(frame.ident, {})
            future = self._futures.pop(frame.ident, None)
            if future is not None:
                outcome = NestedOutcome(*message_of(frame.body, blobs))
                _settle(future, outcome, blobs, TaskHold(self, frame.ident) if outcome.is_held else None)
        elif frame.kind == FrameKind.FETCHED:
            fetched = self._arrived.pop(frame.ident, {})
            future = self._futures.pop(frame.ident, None)
            if future is not None:
                future.settle(next(iter(fetched.values()), None))


def _payloads(pending: PendingCompute[Any]) -> tuple[Encoded, Encoded]:
    function = pending.fn.fn if isinstance(pending.fn, ActorMethod) else pending.fn
    parts: list[tuple[str, Any]] = [
        (f"the function {pending.name!r}", function),
        (f"an argument of {pending.name}()", splice(pending.args, pending.kwargs)),
    ]
    encoded = []
    for subject, value in parts:
        try:
            encoded.append(encode(value, Blob.snapshot))
        except Exception as error:
            if interrupts.is_from_handler(error):
                raise
            raise ArgumentNotPicklable(
                f"{subject} cannot be sent: {type(error).__name__}: {error}; send plain data, arrays or paths",
                argument=pending.name,
            ) from error
    code, arguments = encoded
    if any(blob.here() is None for blob in code.blobs):
        raise UsageError("ref: used without being an argument; pass it as one")
    return code._replace(blobs=tuple(with_bytes(code.blobs))), arguments


def _settle(future: Future[Any], outcome: NestedOutcome, blobs: dict[bytes, Blob], hold: TaskHold | None) -> None:
    """Settle a future. The thread that reads the value unpickles it."""

    def absent(digest: bytes, size: int) -> Blob:
        return Blob(digest, size, -1) if hold is None else FarBlob(digest, size, hold)

    def value(payload: bytes) -> Any:
        received = payload_in(payload, blobs, absent)
        try:
            return decode(parse(received.body), received.blobs)
        except Exception as error:
            if not is_fault_of_value(error):
                raise
            raise explain_result_error(error) from error

    def error() -> None:
        try:
            original = loads(outcome.payloads[0])
        except Exception as why:  # its class is unknown here
            raise RemoteError(
                f"a call: failed with an error that cannot be rebuilt here ({why}); install the module of its class "
                "on this node"
            ) from why
        raise original

    readers: dict[str, Callable[[], Any]] = {
        "blobs": lambda: blobs,
        "value": lambda: value(outcome.payloads[0]),
        "values": lambda: [value(payload) for payload in outcome.payloads],
        "ranks": lambda: RankValues(chain.from_iterable(map(value, outcome.payloads))),
    }
    if outcome.status in readers:
        future.settle(Undecoded(readers[outcome.status]))
    elif outcome.status == "cancelled":
        future.cancel()
    else:
        future.settle_error(Undecoded(partial(_raise_failed, outcome) if outcome.status == "failed" else error))


def _raise_failed(outcome: NestedOutcome) -> NoReturn:
    failure, where, node, task, log_tail, *notes = pickle.loads(outcome.payloads[0])
    error = decode_failure(failure, where=where, node=node, task=task, log_tail=log_tail)
    for note in notes:
        error.add_note(note)
    raise error


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _open.clear()  # the connections, and the threads that wait on them, belong to the parent


os.register_at_fork(after_in_child=_forget_in_child)
