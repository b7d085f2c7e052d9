"""A channel over a byte stream that may break, such as the pipes of an ssh process.

Frames are counted in both directions. Each side keeps what it has written until the other has acknowledged it, and
when a new link has taken the place of a broken one the rest is sent again: what is above the channel sees each frame
once, in order, and nothing of the break. HELLO and WELCOME, with which both say how many frames they have, and PING,
PONG, ACK and TURN are about the link and not counted.

What is kept is bounded by what the link holds on its way: a side that cannot write keeps no more. A descriptor cannot
travel, so a blob is sent as pieces, which are kept as references to its file, and is a file again at the other end.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from ..errors import InternalError
from .blobs import DIGEST_SIZE, Blob, BlobWriter
from .channel import CONTROL, ChannelClosed
from .ends import Ends, Stripes
from .frames import HAS_FD, HEADER, MAX_BODY, Frame, FrameKind, pack

__all__ = ["MAGIC", "PIECE_SIZE", "StreamChannel"]

MAGIC: Final = b"\0skyward stream\n"
"""What an agent writes first: all before it was printed by the user's shell."""
PIECE_SIZE: Final = 256 * 1024
"""Bytes of a blob in one frame: what is more urgent waits for no more than that."""

_READ_SIZE = 64 * 1024
_LARGE_READ_SIZE = 64 * 1024 + 2 * (MAX_BODY + HEADER.size)
"""Bytes, once a blob has come: room for two pieces."""
_BATCH_BYTES = 128 * 1024
_BATCH_FRAMES = 64
_ACK_FRAMES = 64
_ACK_BYTES = 1 << 20
_ACK_S = 0.5
"""A slow link that is busy must not look dead to who sends: its pings stand behind what it sends."""
_ACK_BESIDE = 16
"""Frames after which an acknowledgement goes along with whatever is sent; alone it goes after `_ACK_FRAMES`."""
_PIECE_HEAD = struct.Struct(f"<{DIGEST_SIZE}sQQ")
_PING = struct.Struct("<d")
_ABOUT_THE_LINK = frozenset(
    (
        FrameKind.HELLO,
        FrameKind.WELCOME,
        FrameKind.GOODBYE,
        FrameKind.ATTACH,
        FrameKind.PING,
        FrameKind.PONG,
        FrameKind.ACK,
        FrameKind.TURN,
    )
)
_TURN = pack(FrameKind.TURN)
_ROUND_TRIPS = 8


class _FrameSource:
    """A blob that is being sent; kept until its last piece need not be sent again."""

    __slots__ = ("_held", "blob", "digest", "flags", "ident", "lane", "offset", "size")

    def __init__(self, blob: Blob, ident: int, body: bytes, flags: int, lane: int, held: list[int]) -> None:
        self.blob = blob
        self.digest, self.size, _ = _PIECE_HEAD.unpack_from(body)
        self._held = held
        held[0] += self.size
        self.offset = 0
        self.ident = ident
        self.flags = flags
        self.lane = lane

    def write_to(self, fd: int, at: int, end: int) -> int:
        """Write some of its bytes, and say how many. Raises OSError."""
        data = self.blob.in_memory()
        return os.sendfile(fd, self.blob.fd, at, end - at) if data is None else os.write(fd, data[at:end])

    def next_piece(self) -> _Sent:
        length = min(PIECE_SIZE, self.size - self.offset)
        head = HEADER.pack(_PIECE_HEAD.size + length, FrameKind.BLOB, self.flags, self.lane, self.ident)
        piece = head + _PIECE_HEAD.pack(self.digest, self.size, self.offset), self, self.offset, length
        self.offset += length
        return piece

    def __del__(self) -> None:
        self._held[0] -= self.size


_Sent = tuple[bytes, _FrameSource | None, int, int]
"""A frame as it goes out: its bytes and, of a piece, the file, offset and length of the rest."""


class StreamChannel:
    """Frames over links that come and go, with the interface of `Channel`.

    `attach` gives it a link, `detach` takes it away. Without one `queue` and `send` only keep what they are given, and
    `flush` has nothing to do. One thread may call `receive` while another calls the rest; apart from that not
    thread-safe. `checks_blobs`: those that come are named by their content.
    """

    passes_fds = False

    def __init__(self, *, checks_blobs: bool) -> None:
        self._checks_blobs = checks_blobs
        self._ends: Ends | None = None
        # Going out.
        self._out: tuple[deque[bytes | _FrameSource], ...] = (deque(), deque(), deque())
        self._beside: deque[bytes] = deque()
        self._unacked: deque[_Sent] = deque()
        self._dropped = 0
        self._resend: deque[_Sent] = deque()
        self._partial: memoryview | None = None
        self._file: tuple[_FrameSource, int, int] | None = None
        self._held = [0]
        self._is_turn_told = False
        """`_partial` is a TURN."""
        # Coming in.
        self._buffer = bytearray(_READ_SIZE)
        self._view = memoryview(self._buffer)
        self._have = 0
        self._incoming: dict[bytes, BlobWriter] = {}
        self._acked = 0
        self._told = 0
        self._told_at = 0.0
        self._untold_bytes = 0
        self._owes_ack = False
        self._broken: InternalError | OSError | None = None
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self.pings = 0
        """That came from the other side."""
        self.pongs = 0
        """Pings of this side that were answered."""
        self.received = 0
        """Frames that have come, over all links."""
        self.carried = 0
        """Bytes that went over this link, both ways."""
        self.heard_at = time.monotonic()
        """When anything came last."""

    # Links ----------------------------------------------------------------------------------------------------------

    def attach(self, ends: Ends, peer_received: int) -> None:
        """Go on over this link. `peer_received`: the frames that the other side said it has."""
        self.detach()
        self._acked = max(self._acked, peer_received)
        self._forget_acked()
        self._resend = deque(self._unacked)
        self._owes_ack = False
        self._told = self.received  # the greeting says it
        self.heard_at = time.monotonic()
        self.carried = 0
        self._ends = ends

    def widen(self, more: Sequence[Ends], *, turns: bool) -> None:
        """Use further ways beside the one that the link has; `fileno` is another then. Nobody may be in `receive`.

        `turns`: what is sent goes on all of them from now on; else once the other side does the same.
        """
        assert self._ends is not None
        self._ends = Stripes([self._ends, *more])
        self._ends.turns = turns

    def detach(self) -> None:
        """Give up the link, if there is one. What was not acknowledged is kept for the next."""
        ends = self.release()
        if ends is not None:
            ends.close()

    def release(self) -> Ends | None:
        """`detach`, and the caller closes the link."""
        ends, self._ends = self._ends, None
        self._partial = self._file = None
        self._is_turn_told = False
        self._have = 0
        self._broken = None
        self._beside.clear()
        self._resend.clear()
        return ends

    @property
    def is_attached(self) -> bool:
        return self._ends is not None

    def fileno(self) -> int:
        """What to wait for where nothing is there to read; -1 without a link."""
        return -1 if self._ends is None else self._ends.fileno()

    def write_fileno(self) -> int:
        """What to wait for after `flush` has said False. It can be written, or, if it is not `fileno`, read."""
        return -1 if self._ends is None else self._ends.write_fileno()

    def close(self) -> None:
        self.detach()
        for lane in self._out:
            lane.clear()
        self._unacked.clear()
        self._incoming.clear()

    def finish(self, deadline: float) -> None:
        """Before `close`, where all was flushed: wait until the link has brought it there."""
        if self._ends is not None:
            self._ends.finish(deadline)

    def close_in_child(self) -> None:
        """After a fork: the parent's link goes on."""
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
        """`blob`, or `fd`, which is then duplicated: what a BLOB frame is about. Raises OSError, with `fd` only."""
        flags &= ~HAS_FD
        if fd >= 0 and kind == FrameKind.BLOB:
            digest, size, _ = _PIECE_HEAD.unpack_from(body)
            blob = Blob(digest, size, os.dup(fd))
        if blob is not None:
            self._out[priority].append(_FrameSource(blob, ident, body, flags, lane, self._held))
        elif fd < 0:
            self._out[priority].append(HEADER.pack(len(body), kind, flags, lane, ident) + body)
        else:
            raise InternalError(f"wire: a descriptor cannot travel on a stream (kind {kind})")

    def greet(self, frame: bytes) -> None:
        """Send a frame about the link, before all that is counted."""
        self._beside.append(frame)

    def ping(self) -> None:
        """Ask for a sign of life; `round_trip_s` and `heard_at` tell of the answer."""
        self._beside.append(pack(FrameKind.PING, self.received, _PING.pack(time.monotonic())))

    @property
    def held_bytes(self) -> int:
        """Of blobs that are to be sent, or that may have to be sent again."""
        return self._held[0]

    @property
    def round_trip_s(self) -> float:
        """The shortest of the last few pings and their answers; 0: not known yet."""
        return min(tuple(self._round_trips), default=0.0)

    @property
    def has_output(self) -> bool:
        return bool(self._partial or self._file or self._resend or self._beside or any(self._out))

    @property
    def needs_flush(self) -> bool:
        """Whether what was received calls for an answer."""
        return self._owes_ack or bool(self._beside)

    def send(self, frame: bytes, priority: int = CONTROL) -> bool:
        """`queue` and `flush` of one packed frame, at less cost where nothing is waiting."""
        self._out[priority].append(frame)
        return self.flush()

    def flush(self) -> bool:
        """Send what the link takes. True: it takes more, or there is no link. Raises ChannelClosed."""
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
            raise InternalError(f"wire: blob {source.digest.hex()} is shorter than its {source.size} bytes")
        at += sent
        self._file = (source, at, end) if at < end else None
        return sent

    def _take_turns(self, ends: Stripes, sent: int) -> None:
        """Between two frames: when enough went one way the other side is told, and the next goes another."""
        is_due = ends.wrote(sent)
        if self._partial is not None or self._file is not None:
            return
        if self._is_turn_told:
            self._is_turn_told = False
            ends.turn_writing()
        elif is_due:
            self._is_turn_told = True
            self._partial = memoryview(_TURN)

    def _next(self) -> bool:
        """Choose what is written next. False: there is nothing."""
        frames: list[bytes] = []
        size = 0
        self._forget_acked()
        while self._beside:
            frames.append(self._beside.popleft())
        while size < _BATCH_BYTES and len(frames) < _BATCH_FRAMES and self._file is None:
            sent = self._resend.popleft() if self._resend else self._take()
            if sent is None:
                break
            frame, source, offset, length = sent
            frames.append(frame)
            size += len(frame)
            if source is not None and length:
                self._file = source, offset, offset + length
        if self._owes_ack or (frames and self.received - self._told >= _ACK_BESIDE):
            frames.insert(0, self._ack())
        if frames:
            self._partial = memoryview(b"".join(frames))
        return bool(frames)

    def _take(self) -> _Sent | None:
        """The next frame that was never sent, from now on kept until it is acknowledged."""
        for lane in self._out:
            if lane:
                first = lane[0]
                if isinstance(first, _FrameSource):
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
        self._owes_ack = False
        self._untold_bytes = 0
        self._told = self.received
        self._told_at = time.monotonic()
        return pack(FrameKind.ACK, self._told)

    def _forget_acked(self) -> None:
        while self._dropped < self._acked and self._unacked:
            self._unacked.popleft()
            self._dropped += 1

    # Coming in ------------------------------------------------------------------------------------------------------

    def receive(self) -> list[Frame]:
        """Frames of one read; a blob is one frame, with the descriptor of its file.

        Raises ChannelClosed at the end of the link, BlockingIOError when there is nothing to read, InternalError on
        what cannot be a frame, OSError when there is no room for a blob.
        """
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        ends = self._ends
        if ends is None:
            raise BlockingIOError
        try:
            count = os.readv(ends.read_fd, [self._view[self._have :]])
        except BlockingIOError:
            if isinstance(ends, Stripes):
                ends.check()
            raise
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not count:
            raise ChannelClosed("end of stream")
        now = self.heard_at = time.monotonic()
        self._have += count
        self.carried += count
        self._untold_bytes += count
        frames: list[Frame] = []
        try:
            self._parse(frames, ends)
        except (InternalError, OSError) as error:
            if not frames:
                raise
            self._broken = error  # those that were counted are handed over first
        untold = self.received - self._told
        is_time = now - self._told_at >= _ACK_S and (untold > 0 or self._have > 0)
        if is_time or untold >= _ACK_FRAMES or self._untold_bytes >= _ACK_BYTES:
            self._owes_ack = True
        return frames

    def _parse(self, frames: list[Frame], ends: Ends) -> None:
        at, have = 0, self._have
        while have - at >= HEADER.size:
            length, kind, flags, lane, ident = HEADER.unpack_from(self._buffer, at)
            if length > MAX_BODY:
                raise InternalError(f"wire: a frame of {length} bytes (kind {kind}); the limit is {MAX_BODY}")
            stop = at + HEADER.size + length
            if stop > have:
                break
            body = self._view[at + HEADER.size : stop]
            at = stop
            if kind in _ABOUT_THE_LINK:
                if kind == FrameKind.TURN:
                    at, have = 0, self._turn(at, have, ends)
                elif not self._is_ours(kind, ident, body):
                    frames.append(Frame(kind, flags, lane, ident, bytes(body)))
                continue
            if kind == FrameKind.BLOB:
                blob = self._take_piece(ident, flags, lane, body)
                if blob is not None:
                    frames.append(blob)
            else:
                frames.append(Frame(kind, flags, lane, ident, bytes(body)))
            self.received += 1
        self._keep_rest(at, have)
        if isinstance(ends, Stripes):
            ends.await_input()

    def _turn(self, at: int, have: int, ends: Ends) -> int:
        """What follows comes another way. Returns how many of its bytes are there."""
        if not isinstance(ends, Stripes):
            raise InternalError("wire: a turn on a link that has one way")
        ends.turns = True  # who takes turns can be answered so
        rest = ends.turn_reading(bytes(self._view[at:have]))
        self._view[: len(rest)] = rest
        return len(rest)

    def _keep_rest(self, at: int, have: int) -> None:
        rest = bytes(self._view[at:have])
        if len(rest) >= HEADER.size and len(self._buffer) < _LARGE_READ_SIZE:
            length = HEADER.unpack_from(rest)[0]
            if HEADER.size + length > _READ_SIZE // 2:
                self._buffer = bytearray(_LARGE_READ_SIZE)
                self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._have = len(rest)

    def _is_ours(self, kind: int, ident: int, body: memoryview) -> bool:
        """Whether it is for the channel itself."""
        if kind == FrameKind.ACK:
            self._acked = max(self._acked, ident)
        elif kind == FrameKind.PING:
            self._acked = max(self._acked, ident)
            self.pings += 1
            self._beside.append(pack(FrameKind.PONG, self.received, bytes(body)))
        elif kind == FrameKind.PONG:
            self._acked = max(self._acked, ident)
            self.pongs += 1
            self._round_trips.append(max(0.0, time.monotonic() - _PING.unpack(body)[0]))
        else:
            return False
        return True

    def _take_piece(self, ident: int, flags: int, lane: int, body: memoryview) -> Frame | None:
        """The BLOB frame, once its last piece is there."""
        digest, size, offset = _PIECE_HEAD.unpack_from(body)
        blob = self._incoming.get(digest)
        if blob is None:
            blob = self._incoming[digest] = BlobWriter(digest, size, is_named_by_content=self._checks_blobs)
        blob.write(offset, body[_PIECE_HEAD.size :])
        if not blob.is_complete:
            return None
        del self._incoming[digest]
        self._owes_ack = True  # the other side keeps its file until then
        return Frame(FrameKind.BLOB, flags | HAS_FD, lane, ident, _PIECE_HEAD.pack(digest, size, 0), blob.finish())
