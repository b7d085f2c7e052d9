"""Frames, the units that cross a channel, and the parser that finds them in a byte stream.

A frame is a 16-byte header and a body of at most `MAX_BODY` bytes:

    0        4      5       6       8                16
    | length | kind | flags | lane  | ident          | body ...
      u32      u8     u8      u16     u64              `length` bytes

`ident` is the task that the frame is about (0: none). `lane` is a small number that means something else for each
kind: a slot, a rank, a stream argument. All numbers are little-endian. Anything larger than a body travels as a blob.
HELLO carries the protocol version; a reader of version N accepts N and N-1.
"""

from __future__ import annotations

import struct
from enum import IntEnum, unique
from typing import Final, NamedTuple

from ..errors import InternalError

PROTOCOL_VERSION = 1
HEADER = struct.Struct("<IBBHQ")
_HEADER_SIZE = HEADER.size
_unpack_header = HEADER.unpack_from
INLINE_LIMIT = 256 * 1024
"""Bytes. Larger payloads travel as blobs, so that no frame delays the frames behind it for long."""
MAX_BODY = INLINE_LIMIT + 64 * 1024
"""Bytes: a payload of `INLINE_LIMIT` plus its references. A longer frame comes from a broken or foreign peer."""


@unique
class FrameKind(IntEnum):
    """Purpose of a frame, and who sends it to whom (C: client, A: agent, S: slot, K: keeper)."""

    # Session.
    HELLO = 1  # C,K > A  json: version, role, pool; on a client's stream also the fields of `engine.dialler`
    WELCOME = 2  # A > C    json: node facts
    LEASE = 3  # K > A    renews the lease
    SHUTDOWN = 4  # C,K > A  end now
    GOODBYE = 5  # A > C,K  json: why the agent ends
    ATTACH = 6  # stub > A  a descriptor of a stream for a session; lane 0: to read from, 1: to write to
    PING = 7  # body: any; ident: number of frames received
    PONG = 8  # body: that of the PING; ident: number of frames received
    ACK = 9  # ident: number of frames received

    TURN = 14  # the sender continues on the next stripe of the link; see `wire.ends.Stripes`

    # Prerequisites of tasks.
    FUNCTION = 10  # C > A > S  digest, pickled function; kept until the process ends
    BLOB = 11  # C > A > S and back; digest, size, offset, and either a file descriptor or a piece
    DROP_BLOB = 12  # C > A  digest; u32: how often it was added, if more than once. A > S  digest: unmap it
    DROP_FUNCTION = 13  # C > A > S  digest; no open task uses it
    FETCH = 15  # C > A, S > A  digest of a blob; the answers are BLOB and FETCHED, with this `ident`. lane 1: no BLOB
    FETCHED = 16  # A > C, A > S  digest; lane 1, or no BLOB for a slot: it is not there; lane 2: it cannot be sent now
    OFFER = 17  # C > A  json: digest, secret; send a blob to another node. The answer is OFFERED
    OFFERED = 18  # A > C  lane: port; 0: the agent cannot send it
    PULL = 19  # C > A  json: address, port, secret, digest, size; get a blob from another node. The answer is PULLED
    PULLED = 56  # A > C  lane 1: it did not come, body: why
    GRANT = 47  # C > A  packed Grant of the task whose TASK follows; without one, the task has the share of a slot

    # Tasks.
    TASK = 20  # C > A > S
    CANCEL = 21  # C > A  stop it: SIGINT, a grace period, SIGKILL
    RECALL = 22  # C > A  give it back if it has not begun; the answer is RECALLED
    RANK = 23  # C > A  pickled RankOrder: start a new process for this task
    RESERVE_PORT = 24  # C > A
    RELEASE_PORT = 25  # C > A  lane: port
    TAKE_STACK = 26  # C > A  send the stack of the task's process as STACK; lane 1: of all its threads

    # The direct line between client and slot (TASK and RESULT travel on it too).
    LINE = 27  # A > C  the line's descriptor; ident: its number; body: number of the actor, empty for a slot
    HOLD = 28  # C > A  a task is on the line; body: number of the line
    UNHOLD = 29  # C > A  that task has ended

    # Outcomes and output of tasks. After a final frame, no other frame is about that task.
    RESULT = 31  # S > A > C  final
    ERROR = 32  # S > A > C  final
    PART = 33  # S > A > C  results of a part of a chunk
    LOST = 34  # A > C  json: the process died; final
    RECALLED = 35  # A > C  the task never began; final
    SETTLED = 68  # C > A  pairs of u64 and u32: a task, and the number of its further frames that are written down
    PORT = 36  # A > C  lane: port
    LOG = 37  # S > A > C  lane: stream; lines of text
    DISPLAY = 30  # S > A > C  a piece of rich output, see `wire.displays`
    STACK = 38  # A > C  json: stack, state; lane 1: unasked, because the rank has stopped (stopped_s)
    ELSEWHERE = 39  # S > C  on the line: the outcome of the task comes through the agent
    COPIED = 48  # C > S  on the line: the value in the slot's memory was copied; lane 1: it cannot be, send it

    # Streams.
    ITEM = 40  # S > A > C  one yielded value
    CREDIT = 41  # C > A > S  body u32: number of further items that the slot may send
    CLOSE = 42  # C > A > S  the consumer is gone
    IN_ITEM = 43  # C > A > S  lane: argument; one value of an input stream
    IN_END = 44  # C > A > S
    IN_ERROR = 45  # C > A > S  the input iterator raised
    IN_CREDIT = 46  # S > A > C

    # Slot housekeeping.
    READY = 50  # S > A
    SLOT_CONFIG = 51  # A > S  pickled SlotConfig

    NOTICE = 55  # A > C  the provider takes this machine back; body: its announcement

    # Monitoring.
    USAGE = 60  # C > A  lane: interval of the answers in tenths of a second, 0: stop. A > C  json: one answer

    # Objects that live on a node; ident: number of the actor.
    START_ACTOR = 65  # C > A  pickled ActorOrder: start a process for it
    END_ACTOR = 66  # C > A  kill its process
    ACTOR_GONE = 67  # A > C  json: how its process died, like LOST; its calls were reported before

    # Questions to a running call. An 8-byte number precedes each question and its answer.
    ASK = 61  # C > A > S
    ANSWER = 62  # S > A > C  lane: 0 answered, 1 no handler, 2 too many open questions, 3 answer too large

    # Calls from inside a task to other nodes; ident, also of their blobs: number of the call, see `nested_calls`.
    CALL = 70  # S > A > C  payload: NestedCall
    UNCALL = 71  # S > A > C  nobody waits for it any longer, or refers to what was in its outcome
    OUTCOME = 72  # C > A > S  payload: NestedOutcome

    # Channels between a task and the client; ident: number of the channel, see `task_channel`.
    CHANNEL = 80  # S > A > C  json: name, rank
    MESSAGE = 81  # both ways  a message or a piece of one
    TAKEN = 82  # both ways  u64: bytes of all messages that were received
    END_CHANNEL = 83  # both ways; A > C for a task that is gone

    # Between a client and the head that hosts its scheduler (H); see `engine.head.messages`. CALL, UNCALL and OUTCOME
    # are between these two as well, and most kinds of tasks: to its client a head is as an agent.
    SENT = 90  # H > C  the task is on its way to a node
    HELD = 91  # H > C  references to values on nodes, which the client has from now on
    UNHELD = 92  # C > H  ident: number of a reference that is gone
    EVENT = 93  # H > C  pickled event
    FACTS = 94  # H > C  json: facts of the nodes that are up
    REQUEST = 95  # both ways  pickled verb and arguments; ident: number of the request
    REPLY = 96  # both ways
    LEND = 97  # H > C  lane: node; let the head have a channel to it. ident, also below: number of the stream
    LENT_BYTES = 98  # both ways
    LENT_TAKEN = 99  # both ways  u32: further bytes that were passed on
    END_LENT = 100  # both ways  C > H json: how the command of the channel ended
    TASK_EVENTS = 101  # H > C  pickled list, for each event of a task: whether the task has ended, and the fields


SETTLED_KINDS: Final = frozenset(
    (FrameKind.PART, FrameKind.ITEM, FrameKind.RESULT, FrameKind.ERROR, FrameKind.LOST),
)
"""Kinds of frames that SETTLED counts: those that bring values of a task, and its end."""
SETTLED_PAIR: Final = struct.Struct("<QI")

UNCOUNTED_KINDS: Final = frozenset(
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
"""Frames about the link itself. Streams neither count them nor repeat them after a reconnect."""


class Frame(NamedTuple):
    kind: int
    flags: int
    lane: int
    ident: int
    body: bytes
    fd: int = -1
    """File descriptor that came with the frame, owned by the receiver.

    -1 without `HAS_FD`: there is none. -1 with `HAS_FD`: this process had no free descriptor to receive it.
    """


_new_frame = tuple.__new__
"""Does the same as `Frame(...)` in half the time. Every frame passes here."""

HAS_FD = 0x80
"""Flag: one file descriptor accompanies this frame (only on channels that can pass one)."""


def pack(kind: int, ident: int = 0, body: bytes = b"", *, flags: int = 0, lane: int = 0) -> bytes:
    """Return the bytes of a frame."""
    return HEADER.pack(len(body), kind, flags, lane, ident) + body


QUIET = 0x40
"""Flag of a slot's last frame for a task: the task wrote no output, so the agent need not look for any."""


ON_SHELF = 0x20
"""Flag of a task that is sent to a busy slot. The slot must take it from its shelf, by the number in `lane`, before it
begins it; see `slot.shelf`.
"""


IN_ORDER = 0x08
"""Flag of a CALL that none of the sender's later calls may overtake: it goes to an actor."""

PERMITTED = 0x20
"""Flag of a client's CALL that may begin before the client knows where; see `engine.head.start_gate`."""

NO_RENEWAL = 0x01
"""Flag of a PING that does not renew the receiver's lease: a head sends it while its client is away."""

KEPT = 0x10
"""Flag of a slot's RESULT and its BLOBs: the value stays on the node. The agent keeps the blobs, and sends the rest."""


class FrameParser:
    """Parser of a byte stream that arrives in pieces. Not thread-safe: one reader owns it."""

    def __init__(self) -> None:
        self._rest = b""
        self._fds: list[int] = []

    def add_fds(self, fds: list[int]) -> None:
        """Add file descriptors that arrived with, or before, the next piece. -1: one that could not be received."""
        self._fds.extend(fds)

    def feed(self, piece: bytes) -> list[Frame]:
        """Return the frames that `piece` completes, in order.

        Raises:
            InternalError: The bytes are not a frame, or its file descriptor is missing.
        """
        data = self._rest + piece if self._rest else piece
        end = len(data)
        at = 0
        frames = []
        while end - at >= _HEADER_SIZE:
            length, kind, flags, lane, ident = _unpack_header(data, at)
            if length > MAX_BODY:
                raise InternalError(
                    f"wire: frame of {length} bytes (kind {kind}) exceeds the limit of {MAX_BODY}; report this bug"
                )
            stop = at + _HEADER_SIZE + length
            if stop > end:
                break
            fd = self._next_fd() if flags & HAS_FD else -1
            frames.append(_new_frame(Frame, (kind, flags, lane, ident, data[at + _HEADER_SIZE : stop], fd)))
            at = stop
        self._rest = data[at:]
        return frames

    def _next_fd(self) -> int:
        if not self._fds:
            raise InternalError("wire: frame arrived without its file descriptor; report this bug")
        return self._fds.pop(0)

    @property
    def is_mid_frame(self) -> bool:
        """Return whether the stream so far ends inside a frame."""
        return bool(self._rest)
