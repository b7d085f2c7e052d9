"""A channel over a byte stream that may break, such as the pipes of an ssh process.

Delivery: each counted frame arrives exactly once and in order, over any number of links.

- Both sides count the frames they receive. Sequence numbers are implicit: the n-th counted frame is frame n.
- A sender keeps each frame in `_unacked` until the peer has acknowledged it. Acknowledgements are cumulative counts.
- On a reconnect, HELLO and WELCOME exchange the counts. The sender then repeats everything after the peer's count.
- A frame that the old link delivered only in part does not count. The receiver drops that part, the sender repeats it.

Frames about the link itself (HELLO, WELCOME, PING, PONG, ACK, TURN and a few more) are neither counted nor repeated.

A sender that cannot write takes nothing out of its queues, so `_unacked` holds at most what the link has in flight.
File descriptors cannot travel on a stream. A blob is sent in pieces, kept as references to its file until they are
acknowledged, and the receiver writes them to a new file.

Threads: one thread may receive while another sends; neither takes a lock. So the receiving side never touches
`_unacked`: it only raises `_acked`, and the sending side drops the frames up to it. `_uncounted` is a deque that the
receiving side may append to (PONG) and only the sending side drains. `_ack` says how `_owes_ack` is handed over.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from ..errors import InternalError
from .blobs import Blob, BlobWriter
from .channel import CONTROL, ChannelClosed
from .ends import Ends, Stripes
from .frames import HAS_FD, HEADER, MAX_BODY, NO_RENEWAL, UNCOUNTED_KINDS, Frame, FrameKind, pack
from .pieces import PIECE_HEAD, FrameSource, SentFrame

MAGIC: Final = b"\0skyward stream\n"
"""First bytes that an agent writes. Everything before them is output of the user's shell, such as a greeting."""

_READ_SIZE = 64 * 1024
_LARGE_READ_SIZE = 64 * 1024 + 2 * (MAX_BODY + HEADER.size)
"""Size of the read buffer in bytes once large frames arrive: room for two pieces."""
_BATCH_BYTES = 128 * 1024
_BATCH_FRAMES = 64
_ACK_FRAMES = 64
_ACK_BYTES = 1 << 20
_ACK_S = 0.5
"""Longest time in seconds between two acknowledgements while bytes arrive, even if no frame is complete. A PING queues
behind the sender's own data, so on a slow link only acknowledgements show in time that the receiver is alive.
"""
_PIGGYBACK_FRAMES = 16
"""Unreported frames from which an acknowledgement joins outgoing frames. Without any, it waits for `_ACK_FRAMES`."""
_PING = struct.Struct("<d")
_TURN = pack(FrameKind.TURN)
_ROUND_TRIPS = 8


class StreamChannel:
    """Frames over links that come and go, with the interface of `Channel`.

    `attach` sets the link and `detach` removes it. Without a link, `queue` and `send` only store frames, and `flush`
    does nothing. Not thread-safe, except that one thread may call `receive` while another calls other methods.

    Args:
        checks_blobs: Whether incoming blobs are named by their content, so that the content can be verified.
    """

    passes_fds = False

    def __init__(self, *, checks_blobs: bool) -> None:
        self._checks_blobs = checks_blobs
        self._ends: Ends | None = None
        # Going out.
        self._out: tuple[deque[bytes | FrameSource], ...] = (deque(), deque(), deque())
        self._uncounted: deque[bytes] = deque()
        # Counted frames that were taken from `_out` and may have to be repeated, oldest first.
        self._unacked: deque[SentFrame] = deque()
        # Acknowledged frames that left `_unacked`: its first entry is frame number `_dropped`, counted from 0.
        self._dropped = 0
        # Entries of `_unacked` that this link has not carried yet. They go before anything new, to keep the order.
        self._resend: deque[SentFrame] = deque()
        # Rest of the batch that is being written. Nothing else may go out before it.
        self._partial: memoryview | None = None
        # Rest of the piece whose head ended that batch, as source, offset and end.
        self._file: tuple[FrameSource, int, int] | None = None
        # Bytes of all blobs in `_out` and `_unacked`, in a list so that `FrameSource` can update it.
        self._held = [0]
        # Whether `_partial` is a TURN frame.
        self._is_partial_turn = False
        # Coming in.
        self._buffer = bytearray(_READ_SIZE)
        self._view = memoryview(self._buffer)
        self._filled = 0
        # Incomplete blobs by digest. They survive a reconnect, because their pieces are counted frames.
        self._incoming: dict[bytes, BlobWriter] = {}
        # Frames that the peer says it has. Only ever grows: an old count may arrive after a newer one.
        self._acked = 0
        # Frames of the peer that the last acknowledgement or greeting reported.
        self._reported = 0
        self._reported_at = 0.0
        self._unreported_bytes = 0
        self._owes_ack = False
        self._broken: InternalError | OSError | None = None
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self.pings = 0
        """Pings received from the peer that renew a lease."""
        self.pongs = 0
        """Pings that the peer has answered."""
        self.received = 0
        """Counted frames received over all links."""
        self._confirmed = -1
        """Frames that the owner has handled, if only these are acknowledged; -1: all that were received."""
        self.carried = 0
        """Bytes that this link has carried in both directions."""
        self.heard_at = time.monotonic()
        """Time of the last received byte, by the monotonic clock."""

    # Links ----------------------------------------------------------------------------------------------------------

    def attach(self, ends: Ends, peer_received: int) -> None:
        """Continue over a new link.

        Args:
            ends: The descriptors of the link. The channel owns them from now on.
            peer_received: Number of counted frames that the peer reported in its greeting.
        """
        self.detach()
        # Everything after the peer's count is repeated. That includes the frames which the old link may have carried
        # just before it broke: whether they arrived is known only from the count.
        self._acked = max(self._acked, peer_received)
        self._forget_acked()
        self._resend = deque(self._unacked)
        self._owes_ack = False
        self._reported = self.received  # our greeting carried this count
        self.heard_at = time.monotonic()
        self.carried = 0
        self._ends = ends

    def confirm(self) -> None:
        """Acknowledge the frames that were received so far, and from now on only those before the last call of this.

        Only the receiving thread may call it. The peer then keeps each frame until its receiver has handled it.
        """
        self._confirmed = self.received

    @property
    def _acknowledged(self) -> int:
        """Number of frames that the peer may forget."""
        return self.received if self._confirmed < 0 else self._confirmed

    def widen(self, more: Sequence[Ends], *, turns: bool) -> None:
        """Add stripes to the link. This changes `fileno`, and no thread may be inside `receive`.

        Args:
            more: The descriptors of the new stripes.
            turns: Whether to send on all stripes from now on. Otherwise wait for the peer's first TURN, which proves
                that the peer has the stripes too.
        """
        assert self._ends is not None
        self._ends = Stripes([self._ends, *more])
        self._ends.turns = turns

    def detach(self) -> None:
        """Close the link, if there is one. Keep unacknowledged frames for the next link."""
        ends = self.release()
        if ends is not None:
            ends.close()

    def release(self) -> Ends | None:
        """Detach the link without closing it, and return it. The caller closes it."""
        ends, self._ends = self._ends, None
        # Drop everything that belongs to the old link: a half-written batch (`attach` repeats its frames), a half-read
        # frame (the peer repeats it), and frames about the link, which mean nothing on the next one.
        self._partial = self._file = None
        self._is_partial_turn = False
        self._filled = 0
        self._broken = None
        self._uncounted.clear()
        self._resend.clear()
        return ends

    @property
    def is_attached(self) -> bool:
        return self._ends is not None

    def fileno(self) -> int:
        """Return the descriptor to poll for input; -1 without a link."""
        return -1 if self._ends is None else self._ends.fileno()

    def write_fileno(self) -> int:
        """Return the descriptor to poll after `flush` returned False: for output, or for input if it is an epoll."""
        return -1 if self._ends is None else self._ends.write_fileno()

    def close(self) -> None:
        self.detach()
        for lane in self._out:
            lane.clear()
        self._unacked.clear()
        self._incoming.clear()

    def finish(self, deadline: float) -> None:
        """Wait, before `close`, until the link has delivered what was flushed, or `deadline` (monotonic) has passed."""
        if self._ends is not None:
            self._ends.finish(deadline)

    def close_in_child(self) -> None:
        """Close this process's copy of the link after a fork. The parent's link stays open."""
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close_in_child()

    # Going out ------------------------------------------------------------------------------------------------------

    def queue(
        self,
        kind: int,
        ident: int = 0,
        body: bytes = b"",
        *,
        flags: int = 0,
        lane: int = 0,
        fd: int = -1,
        blob: Blob | None = None,
        priority: int = CONTROL,
    ) -> None:
        """Queue a frame. A BLOB frame takes its content from `blob`, or from `fd`, which is duplicated (OSError)."""
        flags &= ~HAS_FD
        if fd >= 0 and kind == FrameKind.BLOB:
            digest, size, _ = PIECE_HEAD.unpack_from(body)
            blob = Blob(digest, size, os.dup(fd))
        if blob is not None:
            self._out[priority].append(FrameSource(blob, ident, body, flags, lane, self._held))
        elif fd < 0:
            self._out[priority].append(HEADER.pack(len(body), kind, flags, lane, ident) + body)
        else:
            raise InternalError(f"wire: a stream cannot carry a file descriptor (kind {kind}); report this bug")

    def greet(self, frame: bytes) -> None:
        """Queue a frame about the link, ahead of all counted frames."""
        self._uncounted.append(frame)

    def ping(self, *, renews: bool = True) -> None:
        """Queue a PING. The answer updates `round_trip_s` and `heard_at`. `renews`: whether it renews a lease."""
        flags = 0 if renews else NO_RENEWAL
        self._uncounted.append(pack(FrameKind.PING, self._acknowledged, _PING.pack(time.monotonic()), flags=flags))

    def unacknowledged(self, kind: int) -> list[tuple[int, bytes]]:
        """Return number and body of the frames of a kind, without blobs, that the peer may not have. Oldest first."""
        self._forget_acked()
        waiting = [entry for lane in self._out for entry in lane if isinstance(entry, bytes)]
        frames = [frame for frame, source, _, _ in self._unacked if source is None] + waiting
        heads = [(HEADER.unpack_from(frame), frame) for frame in frames]
        return [(head[4], frame[HEADER.size :]) for head, frame in heads if head[1] == kind and head[3] == 0]

    def take_unsent(self, kind: int) -> list[tuple[int, int, bytes]]:
        """Take the frames of a kind, without blobs, that no link has carried: number, lane and body. Oldest first."""
        taken: list[tuple[int, int, bytes]] = []
        for queue in self._out:
            frames = [(HEADER.unpack_from(entry), entry) for entry in queue if isinstance(entry, bytes)]
            taken += [(head[4], head[3], frame[HEADER.size :]) for head, frame in frames if head[1] == kind]
        return taken

    @property
    def held_bytes(self) -> int:
        """Total size of blobs that are queued or not yet acknowledged."""
        return self._held[0]

    @property
    def round_trip_s(self) -> float:
        """Shortest of the last few round trips in seconds; 0 while unknown."""
        return min(tuple(self._round_trips), default=0.0)

    @property
    def has_output(self) -> bool:
        return bool(self._partial or self._file or self._resend or self._uncounted or any(self._out))

    @property
    def needs_flush(self) -> bool:
        """Return whether received frames call for an answer of the channel's own (an acknowledgement or a PONG)."""
        return self._owes_ack or bool(self._uncounted)

    def send(self, frame: bytes, priority: int = CONTROL) -> bool:
        """Queue one packed frame and flush."""
        self._out[priority].append(frame)
        return self.flush()

    def flush(self) -> bool:
        """Send as much as the link takes without blocking.

        Returns:
            False if the link is full and output remains. True if all is sent, or if there is no link.

        Raises:
            ChannelClosed: The link is broken. Unacknowledged frames stay for the next link.
        """
        ends = self._ends
        if ends is None:
            return True
        try:
            while self._partial is not None or self._file is not None or self._next():
                sent = self._write(ends.write_fd)
                self.carried += sent
                if isinstance(ends, Stripes):
                    self._take_turns(ends, sent)
        except BlockingIOError:
            if isinstance(ends, Stripes):
                ends.await_room()
            return False
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        return True

    def _write(self, fd: int) -> int:
        if self._partial is not None:
            sent = os.write(fd, self._partial)
            self._partial = self._partial[sent:] if sent < len(self._partial) else None
            return sent
        assert self._file is not None
        source, at, end = self._file
        sent = source.write_to(fd, at, end)
        if not sent:
            raise InternalError(
                f"wire: blob {source.digest.hex()} ends before its {source.size} bytes; report this bug"
            )
        at += sent
        self._file = (source, at, end) if at < end else None
        return sent

    def _take_turns(self, ends: Stripes, sent: int) -> None:
        """Switch to the next stripe once this one has carried enough.

        A switch takes two steps. First a TURN goes out on the current stripe, as the last frame of its turn. Only when
        all of it is written does sending move on: the peer reads no other stripe before it has the whole TURN.
        """
        is_due = ends.wrote(sent)
        # A frame must not be split over two stripes: the peer reads each stripe from a frame's first byte.
        if self._partial is not None or self._file is not None:
            return
        if self._is_partial_turn:
            self._is_partial_turn = False
            ends.turn_writing()
        elif is_due:
            self._is_partial_turn = True
            self._partial = memoryview(_TURN)

    def _next(self) -> bool:
        """Choose the next batch and put it into `_partial` and `_file`. Return False if there is nothing to send.

        The order is: acknowledgement, frames about the link, repeated frames, new frames by priority. A piece ends the
        batch, because its data follows from a file.
        """
        frames: list[bytes] = []
        size = 0
        self._forget_acked()
        while self._uncounted:
            frames.append(self._uncounted.popleft())
        while size < _BATCH_BYTES and len(frames) < _BATCH_FRAMES and self._file is None:
            sent = self._resend.popleft() if self._resend else self._take()
            if sent is None:
                break
            frame, source, offset, length = sent
            frames.append(frame)
            size += len(frame)
            if source is not None and length:
                self._file = source, offset, offset + length
        if self._owes_ack or (frames and self.received - self._reported >= _PIGGYBACK_FRAMES):
            frames.insert(0, self._ack())
        if frames:
            self._partial = memoryview(b"".join(frames))
        return bool(frames)

    def _take(self) -> SentFrame | None:
        """Take the next new frame out of the queues, and keep it in `_unacked` until it is acknowledged.

        The order of these calls numbers the frames. A blob that waits between two pieces is no obstacle to more urgent
        frames, because its next piece gets its number only here.
        """
        for lane in self._out:
            if lane:
                first = lane[0]
                if isinstance(first, FrameSource):
                    sent = first.next_piece()
                    if first.offset >= first.size:
                        lane.popleft()
                else:
                    sent = first, None, 0, 0
                    lane.popleft()
                self._unacked.append(sent)
                return sent
        return None

    def _ack(self) -> bytes:
        # Clear the flag before reading the count. A frame that arrives in between sets the flag again, which costs one
        # superfluous acknowledgement. In the other order its acknowledgement would be forgotten.
        self._owes_ack = False
        self._unreported_bytes = 0
        self._reported = self._acknowledged
        self._reported_at = time.monotonic()
        return pack(FrameKind.ACK, self._reported)

    def _forget_acked(self) -> None:
        while self._dropped < self._acked and self._unacked:
            self._unacked.popleft()
            self._dropped += 1

    # Coming in ------------------------------------------------------------------------------------------------------

    def receive(self) -> list[Frame]:
        """Read once and return the complete frames. A blob is one frame, with the descriptor of its file.

        Raises:
            ChannelClosed: The link has ended.
            BlockingIOError: There is nothing to read.
            InternalError: The bytes are not a frame.
            OSError: There is no room for a blob.
        """
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        ends = self._ends
        if ends is None:
            raise BlockingIOError
        try:
            count = os.readv(ends.read_fd, [self._view[self._filled :]])
        except BlockingIOError:
            if isinstance(ends, Stripes):
                ends.check()
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not count:
            raise ChannelClosed("end of stream")
        now = self.heard_at = time.monotonic()
        self._filled += count
        self.carried += count
        self._unreported_bytes += count
        frames: list[Frame] = []
        try:
            self._parse(frames, ends)
        except (InternalError, OSError) as error:
            if not frames:
                raise
            # The frames before the bad one are counted, so the peer will never repeat them: hand them over first.
            self._broken = error
        # A blob can keep the link busy for seconds within one frame, so bytes count as well as frames.
        unreported = self.received - self._reported
        is_time = now - self._reported_at >= _ACK_S and (unreported > 0 or self._filled > 0)
        if is_time or unreported >= _ACK_FRAMES or self._unreported_bytes >= _ACK_BYTES:
            self._owes_ack = True
        return frames

    def _parse(self, frames: list[Frame], ends: Ends) -> None:
        at, have = 0, self._filled
        while have - at >= HEADER.size:
            length, kind, flags, lane, ident = HEADER.unpack_from(self._buffer, at)
            if length > MAX_BODY:
                raise InternalError(
                    f"wire: frame of {length} bytes (kind {kind}) exceeds the limit of {MAX_BODY}; report this bug"
                )
            stop = at + HEADER.size + length
            if stop > have:
                break
            body = self._view[at + HEADER.size : stop]
            at = stop
            if kind in UNCOUNTED_KINDS:
                if kind == FrameKind.TURN:
                    # The bytes behind a TURN belong to this stripe's next turn. Go on parsing the next stripe's bytes.
                    at, have = 0, self._switch_stripe(at, have, ends)
                elif not self._handle_uncounted(kind, flags, ident, body):
                    frames.append(Frame(kind, flags, lane, ident, bytes(body)))
                continue
            if kind == FrameKind.BLOB:
                blob = self._take_piece(ident, flags, lane, body)
                if blob is not None:
                    frames.append(blob)
            else:
                frames.append(Frame(kind, flags, lane, ident, bytes(body)))
            self.received += 1
        self._keep_partial_frame(at, have)
        if isinstance(ends, Stripes):
            ends.await_input()

    def _switch_stripe(self, at: int, have: int, ends: Ends) -> int:
        """Read from the next stripe from now on. Return how many of its bytes had arrived before."""
        if not isinstance(ends, Stripes):
            raise InternalError("wire: TURN frame on a link with one stripe; report this bug")
        ends.turns = True  # the peer has the stripes too, so this side may use them
        rest = ends.turn_reading(bytes(self._view[at:have]))
        self._view[: len(rest)] = rest
        return len(rest)

    def _keep_partial_frame(self, at: int, have: int) -> None:
        # Copy before the buffer is replaced or overwritten: source and target overlap.
        rest = bytes(self._view[at:have])
        if len(rest) >= HEADER.size and len(self._buffer) < _LARGE_READ_SIZE:
            length = HEADER.unpack_from(rest)[0]
            if HEADER.size + length > _READ_SIZE // 2:
                self._buffer = bytearray(_LARGE_READ_SIZE)
                self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._filled = len(rest)

    def _handle_uncounted(self, kind: int, flags: int, ident: int, body: memoryview) -> bool:
        """Handle an ACK, PING or PONG. Return False for frames that the channel's owner handles.

        PING and PONG carry the count of received frames too, so an idle link needs no separate acknowledgements.
        """
        if kind == FrameKind.ACK:
            self._acked = max(self._acked, ident)
        elif kind == FrameKind.PING:
            self._acked = max(self._acked, ident)
            self.pings += not flags & NO_RENEWAL
            self._uncounted.append(pack(FrameKind.PONG, self._acknowledged, bytes(body)))
        elif kind == FrameKind.PONG:
            self._acked = max(self._acked, ident)
            self.pongs += 1
            self._round_trips.append(max(0.0, time.monotonic() - _PING.unpack(body)[0]))
        else:
            return False
        return True

    def _take_piece(self, ident: int, flags: int, lane: int, body: memoryview) -> Frame | None:
        """Store a piece of a blob. Return the BLOB frame once the blob is complete."""
        digest, size, offset = PIECE_HEAD.unpack_from(body)
        blob = self._incoming.get(digest)
        if blob is None:
            blob = self._incoming[digest] = BlobWriter(digest, size, is_named_by_content=self._checks_blobs)
        blob.write(offset, body[PIECE_HEAD.size :])
        if not blob.is_complete:
            return None
        del self._incoming[digest]
        self._owes_ack = True  # at once: the sender keeps the whole file until then
        return Frame(FrameKind.BLOB, flags | HAS_FD, lane, ident, PIECE_HEAD.pack(digest, size, 0), blob.finish())
