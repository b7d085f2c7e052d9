"""Client's side of one node: its channel, its direct lines, and a record of the functions and blobs that it has."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..core import interrupts
from ..core.records import dataclass
from ..values.devices import Device, NodeResources
from ..wire.blobs import Blob, has_room_for_files
from ..wire.channel import BLOBS, Channel, ChannelClosed
from ..wire.frames import Frame, FrameKind, pack
from ..wire.nested_calls import IS_NESTED
from ..wire.payloads import Encoded
from ..wire.tasks import Mode, has_references, pack_task, references
from .blob_record import BlobRecord
from .tasks import Received, Task, WireFunction

if TYPE_CHECKING:
    from ..wire.stream import StreamChannel
    from .dialler import Dialler

    AnyChannel = Channel | StreamChannel

_LOADED_SIZE = 4 << 20
"""Bytes. Smaller results are copied out of their file, because a thousand arrays must not hold a thousand descriptors
open. Larger ones are copied too when many descriptors are in use.
"""
LEAD_S = 0.02
"""Seconds for which a caller reads its node's channel itself. For longer calls a thread switch costs little."""
_LINE_WAIT = struct.pack("@ll", 0, int(LEAD_S * 1e6))  # a timeval
_SPIN_NS = 70_000
"""Nanoseconds for which a caller spins before it sleeps, if the last answer came that quickly. Waking a thread on an
idle core takes about as long as such a call.
"""
_LINE_LIMIT = 64 * 1024
"""Most bytes of function and arguments for the line. With the frame headers they fit into an empty socket buffer."""
_FUNCTION_COUNT = 256
"""Functions that a node remembers, beyond those that open tasks use."""


@dataclass
class _Function:
    """Function that the node knows, with the number of open tasks that use it."""

    blobs: tuple[Blob, ...]
    users: int = 0


def resources_of(facts: dict[str, Any]) -> NodeResources:
    """Return what the calls of a node share, from the facts that its agent announces."""
    devices = tuple(Device(**device) for device in facts.get("devices", ()))
    return NodeResources(devices=devices, cpus=facts.get("cpus", 1), memory_gib=facts.get("memory_gib", 0.0))


class Readable:
    """Source of frames for the I/O thread, or for a caller in its place. Used under the ledger's lock."""

    def __init__(self, node: int, channel: AnyChannel) -> None:
        self.node = node
        self.channel = channel
        self.is_blocked = False
        self.pongs = 0
        """Number of the channel's PONGs that the scheduler's round trip accounts for."""
        self.is_watched = False
        """Whether the watcher waits for its channel. Set by the watcher."""
        self.is_led = False
        """Whether a caller reads the channel itself; see `engine.leader`."""
        self.reading = threading.Lock()
        """Lock of the thread that reads and handles frames. Taken before the ledger's lock, never after it."""
        self.is_narrow = False
        """Whether more channels would speed it up, once there is much to send."""
        self.waits_apart = False
        """Whether a separate descriptor becomes readable when its channel takes more output."""
        self._poll = select.poll()
        self.follow()

    def follow(self) -> None:
        """Follow the channel to its new descriptor, if it has one."""
        self._poll = select.poll()
        fd = self.channel.fileno()
        if fd >= 0:
            self._poll.register(fd, select.POLLIN)
        self.waits_apart = self.channel.write_fileno() != fd

    def receive(self) -> Iterable[Frame]:
        """Read once and return the complete frames.

        Raises:
            ChannelClosed: The channel has ended.
            BlockingIOError: There is nothing to read.
        """
        return self.channel.receive()

    def handled(self, frames: Sequence[Frame]) -> None:
        """Note that these frames were handled, with everything that follows from them at once. Called without lock."""

    def broke(self) -> bool:
        """Handle the end of the channel, without the ledger's lock. Return False to leave that to the reader."""
        return False

    def received(self, frame: Frame) -> Received:
        """Return the payload of a result with its blobs."""
        has_references(frame.body)  # raises here, where the call of the frame is known, if it is no payload
        return Received(frame.body)

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait for input. Return False on timeout. The only place where a leading caller lets signal handlers run."""
        return interrupts.waiting(self._poll_once, timeout_s)

    def _poll_once(self, timeout_s: float) -> bool:
        return bool(self._poll.poll(max(1, int(timeout_s * 1000))))

    def flush(self) -> None:
        """Send as much as the socket takes. `is_blocked` then says whether output is left.

        Raises:
            ChannelClosed: The channel has ended.
        """
        self.is_blocked = not self.channel.flush()


class LineEnd:
    """Place that a direct line may lead to, and the open call on that line: the first slot of a node, or an actor."""

    def __init__(self) -> None:
        self.line: DirectLine | None = None
        self.on_line: int = 0
        """Open task that was sent on a line; 0: none."""
        self._its_line = 0
        """Number of the line that carries it. The line itself may be gone by now."""
        self.is_held = False
        """Whether the agent knows of that task."""

    def tell_agent(self, kind: int, ident: int, body: bytes = b"") -> None:
        """Queue a frame for the agent of the node."""
        raise NotImplementedError

    def send_on_line(self, task: Task) -> bool:
        """Send a task on the direct line, and return True, if there is a free line that takes it.

        Raises:
            ChannelClosed: The line is gone, and nothing was sent.
        """
        line = self.line
        if line is None or self.on_line or line.is_blocked or not line.takes(task):
            return False
        line.send_task(task)
        self.on_line, self._its_line = task.id, line.number
        return True

    def hold(self) -> None:
        """Report the task on the line to the agent, if there is one, so that it counts the slot as busy."""
        if self.on_line and not self.is_held:
            self.is_held = True
            self.tell_agent(FrameKind.HOLD, self.on_line, self._its_line.to_bytes(8, "little"))

    def free_line(self, task: Task) -> bool:
        """Free the line of a task that has ended. Return False if the task was not on the line."""
        if task.id != self.on_line:
            return False
        if self.is_held:
            self.tell_agent(FrameKind.UNHOLD, task.id)
        self.on_line, self.is_held = 0, False
        return True


class DirectLine(Readable):
    """Direct line to a node's first slot, or to an actor: it carries one short call at a time, without the agent.

    The agent learns of the call (HOLD) only when it has to act: another task comes to the node, the call is cancelled,
    or the slot is gone.
    """

    def __init__(self, node: int, channel: Channel, number: int, end: LineEnd) -> None:
        super().__init__(node, channel)
        self.end = end
        # A blocking socket with a short timeout: one system call waits and reads.
        channel.sock.setblocking(True)
        channel.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _LINE_WAIT)
        self.number = number
        self._may_spin = len(os.sched_getaffinity(0)) > 1 if hasattr(os, "sched_getaffinity") else False
        self._is_quick = False
        self._functions: set[bytes] = set()

    def wait_readable(self, timeout_s: float) -> bool:
        """Return at once, because `receive` waits, for at most `LEAD_S`. Signal handlers run after that."""
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
        """Tell whether a task can take this line.

        It must be a plain call, because nothing may follow it on the line. It must fit into the socket's buffer,
        because a blocked line would need somebody to send the rest.
        """
        if task.head.mode != Mode.CALL or task.head.inputs or task.grant is not None:
            return False
        function = task.function
        size = len(task.payload.body)
        if function.digest not in self._functions:
            size += len(function.payload.body)
        return size <= _LINE_LIMIT and not (task.payload.blobs or function.payload.blobs)

    def send_task(self, task: Task) -> None:
        """Send a task that `takes` allows.

        Raises:
            ChannelClosed: The slot is gone, and nothing was sent.
        """
        digest = task.function.digest
        frame = pack(FrameKind.TASK, task.id, pack_task(task.head, task.payload.body))
        if digest not in self._functions:
            self._functions.add(digest)
            frame = pack(FrameKind.FUNCTION, body=digest + task.function.payload.body) + frame
            # Drop all others at once, without a record of their use. The slot keeps those that the agent sent it too.
            if len(self._functions) > _FUNCTION_COUNT:
                dropped = [known for known in self._functions if known != digest]
                self._functions = {digest}
                frame = b"".join(pack(FrameKind.DROP_FUNCTION, body=known) for known in dropped) + frame
        self.is_blocked = not self.channel.send(frame)


class NodeLink(Readable, LineEnd, BlobRecord):
    """Frames to one agent, and a record of what was sent to it. Used under the ledger's lock."""

    def __init__(
        self,
        node: int,
        channel: AnyChannel,
        facts: dict[str, Any],
        dialler: Dialler | None = None,
    ) -> None:
        Readable.__init__(self, node, channel)
        LineEnd.__init__(self)
        BlobRecord.__init__(self, facts)
        self.facts = facts
        self.resources = resources_of(facts)
        self.dialler = dialler
        """Dialler that reconnects its channel; None: the channel is a socket on this machine."""
        self.stripes = 1
        """Number of channels that its link should have; see `engine.width`."""
        self.may_widen = dialler is not None and bool(facts.get("can_stripe"))
        self.settle: Callable[[Sequence[Frame]], object] | None = None
        """Function that tells the agent that these frames need not come again; None: nobody would want them."""
        self.start_delay_s = 0.0
        """Seconds that a task waits here before it is sent."""
        self.has_notice = False
        """Whether the provider announced that it will take the machine back."""
        self._functions: OrderedDict[bytes, _Function] = OrderedDict()
        self._arrived: dict[bytes, Blob] = {}
        self._of_calls: dict[int, dict[bytes, Blob]] = {}
        """Blobs of nested calls that arrived before the call itself, by the number of the call."""
        self.named_by: Callable[[int, bytes], Blob | None] = lambda task, digest: None
        """Function that returns a blob that a task may name; see `engine.task_values`."""

    def send(self, kind: int, ident: int = 0, body: bytes = b"", *, lane: int = 0) -> None:
        self.channel.queue(kind, ident, body, lane=lane)

    def tell_agent(self, kind: int, ident: int, body: bytes = b"") -> None:
        self.channel.queue(kind, ident, body)

    @property
    def unsent(self) -> int:
        """Number of tasks that wait here before they are sent."""
        return 0

    def send_task(self, task: Task) -> None:
        """Send a task, preceded by the function and blobs that the node does not have.

        Raises:
            OSError: There is no room to send a blob, and the task was not sent.
        """
        if self.on_line:  # before the task: otherwise the agent would give the slot of the line to this task too
            self.hold()
        self.send_parts(task.function, task.payload)
        if task.grant is not None:
            self.channel.queue(FrameKind.GRANT, task.id, task.grant.pack())
        self.channel.queue(FrameKind.TASK, task.id, pack_task(task.head, task.payload.body))

    def send_parts(self, function: WireFunction, payload: Encoded) -> None:
        """Send the function and blobs that the node does not have, and hold them until `release`.

        Raises:
            OSError: There is no room to send a blob, and nothing is held.
        """
        self._send_function(function)
        if payload.blobs:
            try:
                self._hold_blobs(payload.blobs)
            except OSError:
                self._functions[function.digest].users -= 1
                raise

    def _send_function(self, function: WireFunction) -> None:
        known = self._functions.get(function.digest)
        if known is None:
            # Held as long as the node knows the function: slots that start later need the blobs too.
            self._hold_blobs(function.payload.blobs)
            self.channel.queue(FrameKind.FUNCTION, body=function.digest + function.payload.body)
            known = self._functions[function.digest] = _Function(function.payload.blobs)
        known.users += 1
        if len(self._functions) > 1:
            self._functions.move_to_end(function.digest)

    def release(self, task: Task) -> bool:
        """Release the function and blobs of a task that has ended or goes to another node.

        Returns whether frames may have been queued for the node.
        """
        return True if self.free_line(task) else self.release_parts(task.function, task.payload)

    def release_parts(self, function: WireFunction, payload: Encoded) -> bool:
        """Release what `send_parts` has sent. Returns whether frames may have been queued for the node."""
        if payload.blobs:
            self.release_blobs(payload.blobs)
        known = self._functions.get(function.digest)
        if known is not None:
            known.users -= 1
        if len(self._functions) <= _FUNCTION_COUNT:
            return False
        self._drop_function()
        return True

    def _drop_function(self) -> None:
        """Drop the least recently used function: a loop that creates closures must not fill the nodes."""
        for digest, function in self._functions.items():
            if not function.users:
                del self._functions[digest]
                self.release_blobs(function.blobs)
                self.channel.queue(FrameKind.DROP_FUNCTION, body=digest)
                return

    def send_stream_item(self, ident: int, lane: int, item: Encoded) -> None:
        """Send an item behind its blobs. All frames of a stream have the priority of blobs, to keep their order.

        Raises:
            OSError: There is no room to send a blob, and nothing was sent.
        """
        self._hold_blobs(item.blobs, is_from_here=True)
        self._queue_item(ident, lane, item)

    def _queue_item(self, ident: int, lane: int, item: Encoded) -> None:
        """Send an item whose blobs are held."""
        self.channel.queue(FrameKind.IN_ITEM, ident, item.body, lane=lane, priority=BLOBS)
        # Released at once: a DROP_BLOB has the same priority, so it reaches the agent behind the item.
        self.release_blobs(item.blobs)

    def end_stream(self, kind: int, ident: int, lane: int, why: str = "") -> None:
        """Send the end of an input stream. `kind` is IN_END or IN_ERROR; `why` says it if the client cannot."""
        self.channel.queue(kind, ident, why.encode(), lane=lane, priority=BLOBS)

    # Its end --------------------------------------------------------------------------------------------------------

    def finish(self, deadline: float) -> None:
        """Send waiting output until `deadline` (monotonic) at most, and close the link."""
        with contextlib.suppress(ChannelClosed):  # the node is gone
            while not self.channel.flush() and (left_s := deadline - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self.channel.write_fileno(), select.POLLIN if self.waits_apart else select.POLLOUT)
                poll.poll(left_s * 1000)
            self.channel.finish(deadline)
        self.close()

    def close(self) -> None:
        """Close the link for good."""
        if self.dialler is not None:
            self.dialler.close()
        self.channel.close()

    # Coming in ------------------------------------------------------------------------------------------------------

    def handled(self, frames: Sequence[Frame]) -> None:
        if self.settle is not None and frames:
            self.settle(frames)

    def receive(self) -> Iterator[Frame]:
        """Read once and yield the frames, except blobs: those are kept for the frame that needs them."""
        for frame in self.channel.receive():
            if frame.kind == FrameKind.BLOB:
                size = int.from_bytes(frame.body[16:24], "little")
                is_of_call = frame.ident & IS_NESTED
                arrived = self._of_calls.setdefault(frame.ident, {}) if is_of_call else self._arrived
                arrived[frame.body[:16]] = Blob(frame.body[:16], size, frame.fd)
            else:
                yield frame

    def blobs_of_call(self, number: int) -> dict[bytes, Blob]:
        """Hand over the blobs that arrived for a nested call."""
        return self._of_calls.pop(number, {})

    def take_arrived(self, digest: bytes) -> Blob | None:
        """Hand over a blob that was fetched from the node; None if it did not arrive."""
        return self._arrived.pop(digest, None)

    def _blob_for(self, task: int, digest: bytes) -> Blob | None:
        """Return a blob of a task's value: one that arrived before it, or one that it may name."""
        return self.take_arrived(digest) or self.named_by(task, digest)

    def received(self, frame: Frame) -> Received:
        if not has_references(frame.body):
            return Received(frame.body)
        blobs = tuple(
            self._blob_for(frame.ident, digest) or Blob(digest, size, -1) for digest, size in references(frame.body)
        )
        for blob in blobs:
            if blob.fd >= 0 and (blob.size < _LOADED_SIZE or not has_room_for_files()):
                blob.load()
        return Received(frame.body, blobs)
