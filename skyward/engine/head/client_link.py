"""Head's side of its client: the channel, and the functions and blobs that the client has sent.

To its client a head is as an agent to its head: functions and blobs are sent once, and stay until they are dropped.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import InternalError
from ...events import Event, TaskEnded, TaskSent
from ...wire.blobs import DIGEST_SIZE, Blob
from ...wire.channel import BLOBS, CONTROL, RESULTS
from ...wire.ends import Ends
from ...wire.frames import Frame, FrameKind
from ...wire.payloads import Encoded
from ...wire.stream import StreamChannel
from ...wire.task_channel import pieces_of
from ...wire.tasks import references
from ..ledger import Ledger
from ..link import Readable
from ..tasks import WireFunction, cannot_send
from .plain import dump_plain
from .references import ClientReferences

NO_NODE = -1
_LENT = frozenset({FrameKind.LENT_BYTES, FrameKind.LENT_TAKEN, FrameKind.END_LENT})
"""Frames by which the head reaches nodes."""


class ClientLink(Readable):
    """Link to the client. Used under the ledger's lock, except `tell`.

    Args:
        ledger: Shared state of the head's engine.
        channel: The channel, with its first link.
        references: The client's references to blobs that lie on nodes.
        waits: Whether frames wait until `go_on`, except those of the channels that the client lends.
    """

    channel: StreamChannel

    def __init__(
        self, ledger: Ledger, channel: StreamChannel, references: ClientReferences, *, waits: bool = False
    ) -> None:
        super().__init__(NO_NODE, channel)
        self._ledger = ledger
        self._references = references
        self._functions: dict[bytes, bytes] = {}
        self._blobs: dict[bytes, tuple[Blob, int]] = {}
        """Blobs with the number of times that the client has sent them."""
        self._bulky: set[int] = set()
        """Tasks that have sent a blob: their next frames must stay behind it."""
        self._waiting: list[Frame] | None = [] if waits else None
        """Frames that wait; None: they are handled as they come."""
        self._task_events: list[tuple[bool, dict[str, Any]]] = []
        """Events of tasks in this block of the ledger: whether the task has ended, and the fields."""
        channel.confirm()

    # Links ----------------------------------------------------------------------------------------------------------

    def attach(self, ends: Ends, received: int) -> None:
        """Continue over a new link of the client."""
        self.channel.attach(ends, received)
        self.follow()
        self._ledger.watcher.add(self)
        self._ledger.dirty.add(self)

    def detach(self) -> Ends | None:
        """Leave a link that has ended, and return it; None if there is none."""
        if not self.channel.is_attached:
            return None
        self.is_blocked = False
        self._ledger.watcher.remove(self)
        self._ledger.dirty.discard(self)
        return self.channel.release()

    def broke(self) -> bool:
        """Wait for the client to come back over another link."""
        with self._ledger:
            ends = self.detach()
        if ends is not None:
            ends.close()
        return True

    def handled(self, frames: Sequence[Frame]) -> None:
        """Acknowledge frames to the client only now: their calls are in the journal, or were taken out of it."""
        if self._waiting is None:
            self.channel.confirm()

    # Coming in ------------------------------------------------------------------------------------------------------

    def receive(self) -> Iterator[Frame]:
        """Read once and yield the frames, except functions and blobs: those are kept."""
        for frame in self.channel.receive():
            if self._waiting is not None and frame.kind not in _LENT:
                self._waiting.append(frame)
            elif not self._keep(frame):
                yield frame

    def go_on(self) -> list[Frame]:
        """Return the frames that have waited. Needs `reading`."""
        waiting, self._waiting = self._waiting or [], None
        return [frame for frame in waiting if not self._keep(frame)]

    def _keep(self, frame: Frame) -> bool:
        """Keep a function or a blob, or drop one. Return whether the frame was about one."""
        if frame.kind == FrameKind.BLOB:
            self._keep_blob(frame)
        elif frame.kind == FrameKind.DROP_BLOB:
            self._drop_blob(frame.body)
        elif frame.kind == FrameKind.FUNCTION:
            self._functions[frame.body[:DIGEST_SIZE]] = frame.body[DIGEST_SIZE:]
        elif frame.kind == FrameKind.DROP_FUNCTION:
            self._functions.pop(frame.body, None)
        else:
            return False
        return True

    def _keep_blob(self, frame: Frame) -> None:
        digest = frame.body[:DIGEST_SIZE]
        size = int.from_bytes(frame.body[DIGEST_SIZE : DIGEST_SIZE + 8], "little")
        blob, times = self._blobs.get(digest, (None, 0))
        # A blob that is there stays: calls refer to that object. The new file closes with its object.
        arrived = Blob(digest, size, frame.fd)
        self._blobs[digest] = blob if blob is not None and blob.fd >= 0 else arrived, times + 1

    def _drop_blob(self, body: bytes) -> None:
        digest, times = body[:DIGEST_SIZE], int.from_bytes(body[DIGEST_SIZE:], "little") or 1
        blob, there = self._blobs.get(digest, (None, 0))
        if blob is not None and there > times:
            self._blobs[digest] = blob, there - times
        else:
            self._blobs.pop(digest, None)

    def blob(self, digest: bytes) -> Blob | None:
        """Return a blob that the client has sent."""
        return self._blobs.get(digest, (None, 0))[0]

    def payload(self, body: bytes) -> Encoded:
        """Return a payload with its blobs: those that the client has sent, and those that lie on nodes.

        Raises:
            RefLost: One was lost with a head that was killed.
            InternalError: One is not there.
        """
        return Encoded(body, tuple(self._blob_of(digest, size) for digest, size in references(body)))

    def _blob_of(self, digest: bytes, size: int) -> Blob:
        blob = self.blob(digest) or self._references.named(digest)
        if blob is None:
            raise self._references.missing(digest, f"blob {digest.hex()} of {size} bytes")
        if blob.here() is blob and blob.fd < 0 and not blob.is_loaded:
            raise cannot_send("an argument", OSError(errno.EMFILE, "the head had no room for it"))
        return blob

    def function(self, digest: bytes) -> WireFunction:
        """Return a function that the client has sent. Raises InternalError."""
        body = self._functions.get(digest)
        if body is None:
            raise InternalError(f"head: has no function {digest.hex()}; report this bug")
        return WireFunction(digest, self.payload(body))

    # Going out ------------------------------------------------------------------------------------------------------

    def tell(self, kind: int, number: int, body: bytes = b"", lane: int = 0, priority: int = CONTROL) -> None:
        """Send a frame. Any thread may call it, with or without the ledger's lock."""
        with self._ledger:
            self.channel.queue(kind, number, body, lane=lane, priority=priority)
            self._ledger.dirty.add(self)

    def tell_in_pieces(self, kind: int, number: int, message: bytes, priority: int = CONTROL) -> None:
        """Send a message of any length. The pieces of two messages do not mix."""
        with self._ledger:
            for lane, piece in pieces_of(message):
                self.tell(kind, number, piece, lane, priority)

    def tell_event(self, event: Event) -> None:
        """Send an event, behind all earlier ones. Each call has two, so those of a block of the ledger go together."""
        with self._ledger:
            if isinstance(event, TaskSent | TaskEnded):
                self._task_events.append((isinstance(event, TaskEnded), vars(event)))
                self._ledger.dirty.add(self)
            else:
                self._tell_task_events()
                self.tell_in_pieces(FrameKind.EVENT, 0, dump_plain(event))

    def _tell_task_events(self) -> None:
        if self._task_events:
            events, self._task_events = self._task_events, []
            self.tell_in_pieces(FrameKind.TASK_EVENTS, 0, dump_plain(events))

    def flush(self) -> None:
        self._tell_task_events()
        super().flush()

    def tell_of_task(
        self,
        kind: int,
        task: int,
        body: bytes = b"",
        blobs: tuple[Blob, ...] = (),
        *,
        lane: int = 0,
        flags: int = 0,
        is_last: bool = False,
    ) -> None:
        """Send a frame of a task behind all earlier ones, with its blobs if it has some.

        Frames of other tasks overtake those that wait for a blob.

        Raises:
            OSError: There is no room to send a blob.
        """
        with self._ledger:
            if blobs:
                self._bulky.add(task)
            for blob in blobs:
                head = blob.digest + blob.size.to_bytes(8, "little") + bytes(8)
                self.channel.queue(FrameKind.BLOB, task, head, blob=blob, priority=BLOBS)
            priority = BLOBS if task in self._bulky else RESULTS
            self.channel.queue(kind, task, body, lane=lane, flags=flags, priority=priority)
            if is_last:
                self._bulky.discard(task)
            self._ledger.dirty.add(self)
