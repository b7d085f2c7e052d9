"""The frame: the unit that crosses a channel, and the parser that finds frames in a byte stream.

A frame is a 16-byte header and a body of at most `MAX_BODY` bytes:

    0        4      5       6       8                16
    | length | kind | flags | lane  | ident          | body ...
      u32      u8     u8      u16     u64              `length` bytes

`ident` is the task the frame is about (0: none), `lane` a small number whose meaning belongs to the kind (the number
of a slot, a rank, a stream argument). All numbers are little-endian. Whatever is larger than a body travels as a
blob. The version is spoken once, in HELLO; a reader of version N accepts N and N-1.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from ..errors import InternalError

__all__ = [
    "HEADER",
    "HAS_FD",
    "ON_SHELF",
    "INLINE_LIMIT",
    "MAX_BODY",
    "PROTOCOL_VERSION",
    "QUIET",
    "Frame",
    "FrameParser",
    "FrameKind",
    "pack",
]

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<IBBHQ")
_HEADER_SIZE = HEADER.size
_unpack_header = HEADER.unpack_from
INLINE_LIMIT = 256 * 1024
"""Bytes. What is larger goes out of band as a blob: one frame must not hold up the frames behind it."""
MAX_BODY = INLINE_LIMIT + 64 * 1024
"""An inline payload of `INLINE_LIMIT` plus its references; a longer length is a broken or foreign peer."""


class FrameKind(IntEnum):
    """What a frame is for. C: client, A: agent, S: slot, K: keeper."""

    # Session.
    HELLO = 1  # C,K > A  json: version, role, pool; on a stream of a client also what `engine.dialler` says
    WELCOME = 2  # A > C    json: node facts
    LEASE = 3  # K > A    renews the lease
    SHUTDOWN = 4  # C,K > A  end now
    GOODBYE = 5  # A > C,K  json: why the agent ends
    ATTACH = 6  # stub > A  a descriptor of a stream for a session; lane 0: to read from, 1: to write to
    PING = 7  # body: any; ident: frames received
    PONG = 8  # body: that of the PING; ident: frames received
    ACK = 9  # ident: frames received

    TURN = 14  # what is sent after this goes the next way of the link; see `wire.ends.Stripes`

    # What tasks stand on.
    FUNCTION = 10  # C > A > S  digest, pickled function; kept until the process ends
    BLOB = 11  # C > A > S and back; digest, size, offset, and either a file descriptor or a piece
    DROP_BLOB = 12  # C > A  digest
    DROP_FUNCTION = 13  # C > A > S  digest; no task that uses it is open

    # Tasks.
    TASK = 20  # C > A > S
    CANCEL = 21  # C > A  stop it: SIGINT, a grace, SIGKILL
    RECALL = 22  # C > A  give it back if it has not begun; the answer is RECALLED
    RANK = 23  # C > A  pickled RankOrder: make a new process for this task
    RESERVE_PORT = 24  # C > A
    RELEASE_PORT = 25  # C > A  lane: port
    TAKE_STACK = 26  # C > A  of the process that runs a task; lane 1: of all its threads. The answer is STACK

    # The direct line between client and slot (TASK and RESULT travel on it too).
    LINE = 27  # A > C  a descriptor; ident: number of the line
    HOLD = 28  # C > A  a task is on the line; body: number of the line
    UNHOLD = 29  # C > A  that task has ended

    # What comes of them.
    RESULT = 31  # S > A > C  final
    ERROR = 32  # S > A > C  final
    PART = 33  # S > A > C  results of a part of a chunk
    LOST = 34  # A > C  json: the process died; final
    RECALLED = 35  # A > C  final: it never began
    PORT = 36  # A > C  lane: port
    LOG = 37  # A > C  lane: stream and rank; lines of text
    STACK = 38  # A > C  json: stack, state; lane 1: unasked, for the rank has stopped (stopped_s)
    ELSEWHERE = 39  # S > C  on the line: what comes of the task comes through the agent

    # Streams.
    ITEM = 40  # S > A > C  one yielded value
    CREDIT = 41  # C > A > S  body u32: so many more items may come
    CLOSE = 42  # C > A > S  the consumer is gone
    IN_ITEM = 43  # C > A > S  lane: argument; one value of an input stream
    IN_END = 44  # C > A > S
    IN_ERROR = 45  # C > A > S  the input iterator raised
    IN_CREDIT = 46  # S > A > C

    # Slot housekeeping.
    READY = 50  # S > A
    SLOT_CONFIG = 51  # A > S  pickled SlotConfig

    NOTICE = 55  # A > C  the provider takes this machine back; body: what it said

    # Looking on.
    USAGE = 60  # C > A  lane: tenths of a second between two answers, 0: no more. A > C  json: one of them

    # Questions to a call that runs; in front of each, and of its answer, stands its number (8 bytes).
    ASK = 61  # C > A > S
    ANSWER = 62  # S > A > C  lane: 0 answered, 1 nobody answers there, 2 too many are open, 3 the answer is too large

    # Calls that a task makes of other nodes; ident: the number of the call, see `nested_calls`. So have their blobs.
    CALL = 70  # S > A > C  payload: NestedCall
    UNCALL = 71  # S > A > C  nobody waits for it any more
    OUTCOME = 72  # C > A > S  payload: Outcome


class Frame(NamedTuple):
    kind: int
    flags: int
    lane: int
    ident: int
    body: bytes
    fd: int = -1
    """A file descriptor that came with the frame; the receiver owns it. -1: none, or, with the flag `HAS_FD`, it could
    not be received."""


HAS_FD = 0x80
"""Flag: one file descriptor rides on this frame (only on channels that can pass one)."""


def pack(kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> bytes:
    return HEADER.pack(len(body), kind, flags, lane, ident) + body


QUIET = 0x40
"""Flag of a slot's last frame of a task: the task wrote no output, so the agent need not look for any."""


ON_SHELF = 0x20
"""Flag of a task that is sent to a busy slot: it begins it only if it has it, by the number in `lane`; see
`slot.shelf`."""


class FrameParser:
    """Finds frames in the pieces of a byte stream. Not thread-safe: one reader owns it."""

    def __init__(self) -> None:
        self._rest = b""
        self._fds: list[int] = []

    def add_fds(self, fds: list[int]) -> None:
        """File descriptors that arrived with, or before, the next piece. -1: one that could not be received."""
        self._fds.extend(fds)

    def feed(self, piece: bytes) -> list[Frame]:
        """Frames completed by `piece`, in order. Raises InternalError on what cannot be a frame."""
        data = self._rest + piece if self._rest else piece
        end = len(data)
        at = 0
        frames = []
        while end - at >= _HEADER_SIZE:
            length, kind, flags, lane, ident = _unpack_header(data, at)
            if length > MAX_BODY:
                raise InternalError(f"wire: a frame of {length} bytes (kind {kind}); the limit is {MAX_BODY}")
            stop = at + _HEADER_SIZE + length
            if stop > end:
                break
            fd = self._next_fd() if flags & HAS_FD else -1
            frames.append(Frame(kind, flags, lane, ident, data[at + _HEADER_SIZE : stop], fd))
            at = stop
        self._rest = data[at:]
        return frames

    def _next_fd(self) -> int:
        if not self._fds:
            raise InternalError("wire: a frame came without the file descriptor that belongs to it")
        return self._fds.pop(0)

    @property
    def is_mid_frame(self) -> bool:
        """Whether the stream would end within a frame if it ended now."""
        return bool(self._rest)
