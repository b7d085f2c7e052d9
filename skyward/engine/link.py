"""The client's side of one node: its channel, and what the node has."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..core import interrupts
from ..wire.blobs import Blob, default_limit, has_room_for_files
from ..wire.channel import BLOBS, Channel, ChannelClosed
from ..wire.frames import Frame, FrameKind, pack
from ..wire.nested_calls import IS_NESTED
from ..wire.payloads import Encoded
from ..wire.stream import StreamChannel
from ..wire.tasks import Mode, pack_task, parse
from .dialler import Dialler
from .tasks import Received, Task, WireFunction

__all__ = ["LEAD_S", "AnyChannel", "DirectLine", "NodeLink", "Readable"]

AnyChannel = Channel | StreamChannel

_BLOB_BODY_TAIL = bytes(8)
_LOADED_SIZE = 4 << 20
"""Bytes. Smaller results are copied out of their file: a thousand arrays must not be a thousand open descriptors. So
are larger ones, where many descriptors are open."""
LEAD_S = 0.02
"""Seconds that a caller reads its node's channel itself. For longer calls a change of thread is nothing."""
_LINE_WAIT = struct.pack("@ll", 0, int(LEAD_S * 1e6))  # a timeval
_SPIN_NS = 70_000
"""Nanoseconds that a caller looks for its answer before it sleeps, while answers are that quick: waking up a thread on
a core that fell idle takes about as long as such a call does."""
_LINE_LIMIT = 64 * 1024
"""Bytes of function and arguments that go on the line: with the frames' heads they fit an empty socket."""
_FUNCTION_COUNT = 256
"""Functions that a node remembers; those that open tasks use come on top."""
_BLOB_COUNT = 512
"""Blobs that stay on a node beyond their calls, at most: each is a descriptor there."""
_FILES_PER_BLOB = 8
"""Of the files that a node's agent may open: it needs more of them for slots, output and what is on its way."""
_FEW_FILES = 1024
"""An agent of the version before does not say how many it may open."""


@dataclass
class _Function:
    """One that the node knows, and how many open tasks use it."""

    blobs: tuple[Blob, ...]
    users: int = 0


class Readable:
    """What the I/O thread, or a caller in its place, reads frames from. Used under the engine's lock."""

    def __init__(self, node: int, channel: AnyChannel) -> None:
        self.node = node
        self.channel = channel
        self.is_blocked = False
        self.pongs = 0
        """Of its channel, as far as the scheduler was told of the round trip."""
        self.is_watched = False
        """Set by the watcher that waits for its channel."""
        self.is_led = False
        """A caller reads the channel itself; see `engine.leader`."""
        self.reading = threading.Lock()
        self.is_narrow = False
        """More channels would bring more, once there is much to bring."""
        self.waits_apart = False
        """What says that its channel takes more is another descriptor, which is then readable."""
        self._poll = select.poll()
        self.follow()

    def follow(self) -> None:
        """Its channel has another descriptor than before."""
        self._poll = select.poll()
        self._poll.register(self.channel.fileno(), select.POLLIN)
        self.waits_apart = self.channel.write_fileno() != self.channel.fileno()

    def receive(self) -> Iterable[Frame]:
        """Frames of one read. Raises ChannelClosed, or BlockingIOError where there is nothing to read."""
        return self.channel.receive()

    def received(self, frame: Frame) -> Received:
        """The payload of a result with its blobs."""
        return Received(parse(frame.body), ())

    def wait_readable(self, timeout_s: float) -> bool:
        """False: nothing came. A signal's handler may raise here."""
        return interrupts.waiting(self._poll_once, timeout_s)

    def _poll_once(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(max(1, int(timeout_s * 1000))))

    def flush(self) -> None:
        """Send what the socket takes; `is_blocked` says whether something is left. Raises ChannelClosed."""
        self.is_blocked = not self.channel.flush()


class DirectLine(Readable):
    """The direct line to a node's first slot: one short call at a time goes there with no agent in between.

    The agent learns of the call only when it must (HOLD): when another task comes to the node, when the call is
    cancelled, when the slot is gone.
    """

    def __init__(self, node: int, channel: Channel, number: int) -> None:
        super().__init__(node, channel)
        # It blocks, but not for long: one system call then waits and reads.
        channel.sock.setblocking(True)
        channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LINE_WAIT)
        self.number = number
        self._may_spin = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False
        self._is_quick = False
        self._functions: set[bytes] = set()

    def wait_readable(self, timeout_s: float) -> bool:
        """At once: `receive` waits, `LEAD_S` at most. A signal's handler runs after that."""
        return True

    def receive(self) -> Iterable[Frame]:
        began = time.perf_counter_ns()
        if self._is_quick:
            poll, limit = self._poll.poll, began + _SPIN_NS
            while not poll(0) and time.perf_counter_ns() < limit:
                pass
        try:
            return self.channel.receive()
        finally:
            self._is_quick = self._may_spin and time.perf_counter_ns() - began < 2 * _SPIN_NS

    def takes(self, task: Task) -> bool:
        """Whether it can go this way: a plain call, for no frame may follow, that fits the socket's buffer at once."""
        if task.head.mode != Mode.CALL or task.head.inputs:
            return False
        function = task.function
        size = len(task.payload.body)
        if function.digest not in self._functions:
            size += len(function.payload.body)
        return size <= _LINE_LIMIT and not (task.payload.blobs or function.payload.blobs)

    def send_task(self, task: Task) -> None:
        """Raises ChannelClosed: nothing was sent."""
        digest = task.function.digest
        frame = pack(FrameKind.TASK, task.id, pack_task(task.head, task.payload.body))
        if digest not in self._functions:
            self._functions.add(digest)
            frame = pack(FrameKind.FUNCTION, body=digest + task.function.payload.body) + frame
            if len(self._functions) > _FUNCTION_COUNT:  # all of them: the agent decides which it keeps
                dropped = [known for known in self._functions if known != digest]
                self._functions = {digest}
                frame = b"".join(pack(FrameKind.DROP_FUNCTION, body=known) for known in dropped) + frame
        self.is_blocked = not self.channel.send(frame)


class NodeLink(Readable):
    """Frames to one agent, and the record of what was sent to it. Used under the engine's lock.

    Blobs stay on the node for the next call that needs them, up to `blob_limit` bytes; those of calls that have not
    ended are never dropped.
    """

    def __init__(
        self,
        node: int,
        channel: AnyChannel,
        facts: dict[str, Any],
        blob_limit: int | None = None,
        dialler: Dialler | None = None,
    ) -> None:
        super().__init__(node, channel)
        self.facts = facts
        self.dialler = dialler
        """What makes its channel anew; None: a socket of this machine."""
        self.stripes = 1
        """How many channels its link should have; see `engine.width`."""
        self.may_widen = dialler is not None and bool(facts.get("can_stripe"))
        self.line: DirectLine | None = None
        self.on_line: int = 0
        """The task that was sent on a line and has not ended; 0: none."""
        self._its_line = 0
        self.is_held = False
        """The agent knows of it."""
        self._functions: OrderedDict[bytes, _Function] = OrderedDict()
        self._blobs: OrderedDict[bytes, list[int]] = OrderedDict()  # digest -> [size, calls that need it]
        self._blob_bytes = 0
        # In the node's memory and as much again in its folder; see `agent.blobs`.
        self._blob_limit = blob_limit or int(facts.get("memory_bytes", 0)) // 2 or 2 * default_limit()
        self._blob_count = min(_BLOB_COUNT, int(facts.get("files", _FEW_FILES)) // _FILES_PER_BLOB)
        self._arrived: dict[bytes, Blob] = {}
        self._of_calls: dict[int, dict[bytes, Blob]] = {}
        """Blobs of calls that tasks make, by the number of the call, until that comes."""

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        self.channel.queue(kind, ident, body, lane=lane)

    def send_on_line(self, task: Task) -> bool:
        """Whether the task could go that way. Raises ChannelClosed: it could not, and the line is gone."""
        line = self.line
        if line is None or self.on_line or line.is_blocked or not line.takes(task):
            return False
        line.send_task(task)
        self.on_line, self._its_line = task.id, line.number
        return True

    def hold(self) -> None:
        """Tell the agent of the task that is on a line, if there is one."""
        if self.on_line and not self.is_held:
            self.is_held = True
            self.channel.queue(FrameKind.HOLD, self.on_line, self._its_line.to_bytes(8, "little"))

    def send_task(self, task: Task) -> None:
        """The task and what it stands on that is not there yet. Raises OSError: it was not sent, for want of room."""
        self.hold()
        self._send_function(task.function)
        try:
            self._hold_blobs(task.payload.blobs)
        except OSError:
            self._functions[task.function.digest].users -= 1
            raise
        self.channel.queue(FrameKind.TASK, task.id, pack_task(task.head, task.payload.body))

    def _hold_blobs(self, blobs: tuple[Blob, ...]) -> None:
        """All of them, or, where that raises OSError, none."""
        for count, blob in enumerate(blobs):
            try:
                self.hold_blob(blob)
            except OSError:
                self.release_blobs(blobs[:count])
                raise

    def _send_function(self, function: WireFunction) -> None:
        known = self._functions.get(function.digest)
        if known is None:
            self._hold_blobs(function.payload.blobs)  # as long as it is known: slots that start later need them too
            self.channel.queue(FrameKind.FUNCTION, body=function.digest + function.payload.body)
            known = self._functions[function.digest] = _Function(function.payload.blobs)
        known.users += 1
        self._functions.move_to_end(function.digest)

    def release(self, task: Task) -> None:
        """The task has ended, or goes elsewhere: what it stood on may be dropped."""
        if task.id == self.on_line:
            if self.is_held:
                self.channel.queue(FrameKind.UNHOLD, task.id)
            self.on_line, self.is_held = 0, False
            return
        if task.payload.blobs:
            self.release_blobs(task.payload.blobs)
        known = self._functions.get(task.function.digest)
        if known is not None:
            known.users -= 1
        if len(self._functions) > _FUNCTION_COUNT:
            self._drop_function()

    def _drop_function(self) -> None:
        """The one that was used longest ago: a loop over closures must not fill the nodes."""
        for digest, function in self._functions.items():
            if not function.users:
                del self._functions[digest]
                self.release_blobs(function.blobs)
                self.channel.queue(FrameKind.DROP_FUNCTION, body=digest)
                return

    def send_stream_item(self, ident: int, lane: int, item: Encoded) -> None:
        """Send an item behind its blobs, in its turn: all of a stream has the priority of blobs. Raises OSError."""
        self._hold_blobs(item.blobs)
        self.channel.queue(FrameKind.IN_ITEM, ident, item.body, lane=lane, priority=BLOBS)
        self.release_blobs(item.blobs)  # the agent has passed them on before it can be told to drop them

    def end_stream(self, kind: int, ident: int, lane: int) -> None:
        """`kind`: IN_END or IN_ERROR."""
        self.channel.queue(kind, ident, lane=lane, priority=BLOBS)

    def hold_blob(self, blob: Blob) -> None:
        """Send the blob unless it is there, and keep it there until it is released. Raises OSError."""
        entry = self._blobs.get(blob.digest)
        if entry is not None:
            entry[1] += 1
            self._blobs.move_to_end(blob.digest)
            return
        body = blob.digest + blob.size.to_bytes(8, "little") + _BLOB_BODY_TAIL
        self.channel.queue(FrameKind.BLOB, 0, body, blob=blob, priority=BLOBS)
        self._blobs[blob.digest] = [blob.size, 1]
        self._blob_bytes += blob.size
        self._drop_oldest()

    def release_blobs(self, blobs: tuple[Blob, ...]) -> None:
        """A call that needed them has ended."""
        for blob in blobs:
            entry = self._blobs.get(blob.digest)
            if entry is not None:
                entry[1] -= 1

    def _drop_oldest(self) -> None:
        if self._is_within_limits():
            return
        for digest, (size, users) in list(self._blobs.items()):
            if self._is_within_limits():
                return
            if not users:
                del self._blobs[digest]
                self._blob_bytes -= size
                self.channel.queue(FrameKind.DROP_BLOB, body=digest, priority=BLOBS)

    def _is_within_limits(self) -> bool:
        return self._blob_bytes <= self._blob_limit and len(self._blobs) <= self._blob_count

    # Its end --------------------------------------------------------------------------------------------------------

    def finish(self, deadline: float) -> None:
        """Send what is waiting, until `deadline` (monotonic) at most, and close it."""
        with contextlib.suppress(ChannelClosed):  # the node is gone, and takes nothing more
            while not self.channel.flush() and (left_s := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self.channel.write_fileno(), select.POLLIN if self.waits_apart else select.POLLOUT)
                poll.poll(left_s * 1000)
            self.channel.finish(deadline)
        self.close()

    def close(self) -> None:
        """Make no more links either."""
        if self.dialler is not None:
            self.dialler.close()
        self.channel.close()

    # What arrives ---------------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame]:
        """Frames of one read; blobs are put aside for the frame that needs them."""
        for frame in self.channel.receive():
            if frame.kind == FrameKind.BLOB:
                size = int.from_bytes(frame.body[16:24], "little")
                is_of_call = frame.ident & IS_NESTED
                arrived = self._of_calls.setdefault(frame.ident, {}) if is_of_call else self._arrived
                arrived[frame.body[:16]] = Blob(frame.body[:16], size, frame.fd)
            else:
                yield frame

    def blobs_of_call(self, number: int) -> dict[bytes, Blob]:
        """What came for a call that a task makes; they are the caller's now."""
        return self._of_calls.pop(number, {})

    def received(self, frame: Frame) -> Received:
        parsed = parse(frame.body)
        blobs = tuple(self._arrived.pop(digest) for digest, _ in parsed.references)
        for blob in blobs:
            if blob.fd >= 0 and (blob.size < _LOADED_SIZE or not has_room_for_files()):
                blob.load()
        return Received(parsed, blobs)
