"""Streams of bytes that numbered batches carry between two processes. Both sides use the same class.

A batch is what one actor call brings. Calls may overtake each other, so each batch has a number, and is taken in its
turn. It holds pieces of several streams, one after another:

    | stream u64 | kind u8 | length u32 | bytes |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Final, NamedTuple, NoReturn

BATCH_BYTES: Final = 64 * 1024
"""Most bytes of a batch. Ray keeps larger arguments in its object store, which takes longer."""
_WAITING_BYTES: Final = 4 * BATCH_BYTES
"""Bytes that may wait to be given before nothing more is read."""
_LITTLE_BYTES: Final = BATCH_BYTES // 4
_FEW: Final = 2
_FEW_S: Final = 0.01
"""Seconds in which a side gives no more than `_FEW` batches of little. A batch costs both processes almost a
millisecond. Calls that follow on each other need one of each side.
"""
_BRIEF_S: Final = 1.0
"""Who waits for less than this goes before others, which have more time."""
_OPEN_S: Final = 2.0
"""Longest time for the other side to open a stream. It is short: there is another way, and leases go on."""
_PIECE: Final = "<QBI"  # not a Struct, which Ray could not copy to its nodes


class _Kind(IntEnum):
    OPEN = 1
    """A stream begins. The body names what it leads to, if there is a choice."""
    OPENED = 2
    """The answer to OPEN of a side that has its end of the stream."""
    BYTES = 3
    END_OF_INPUT = 4
    """One direction has ended: no bytes follow."""
    END = 5
    """The stream is over in both directions. The body is why, as JSON."""


class Ended(NamedTuple):
    """End of a stream.

    Attributes:
        code: Exit code that a command in its place would have: 0 at its end, 69 without an agent, None if it broke.
        said: Further facts in words.
    """

    code: int | None = 0
    said: str = ""


class StreamBatch(NamedTuple):
    """Bytes of several streams; `number` counts the batches of a direction from 1. 0: there was nothing to give."""

    number: int
    body: bytes


NOTHING: Final = StreamBatch(0, b"")


class Opened(NamedTuple):
    """A stream's end outside; `close` is called when the stream is over.

    `ended`, if given, returns how it ended: the stream is over then, and once all is read. Without it, the stream is
    over when both directions have ended.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    close: Callable[[], object]
    ended: Callable[[], Awaitable[Ended]] | None = None


Open = Callable[[bytes], Awaitable[Opened]]
"""Opens the end outside of a stream that the other side has begun, by the body of its OPEN. Raises OSError,
ConnectionRefusedError if there is nobody.
"""
NO_AGENT: Final = 69
"""Exit code of the stub on a node without an agent."""


class _CarriedStream:
    def __init__(self, number: int, outside: Opened) -> None:
        self.number, self.outside = number, outside
        self.reading: asyncio.Task[None] | None = None
        self.waiting: asyncio.Task[None] | None = None
        self.has_read_all = self.has_written_all = False
        self.is_open = False
        self.has_word = outside.ended is not None
        """Whether its end comes in words, from one side to the other."""
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()


async def _nowhere(_: bytes) -> NoReturn:
    raise ConnectionRefusedError("the other side opens no streams")  # words: ok, of no one's call


class CarriedStreams:
    """One side's end of the streams between two processes, in one event loop.

    Args:
        open_stream: Opens this side's end of a stream that the other side has begun.
    """

    def __init__(self, open_stream: Open = _nowhere) -> None:
        self._open_stream = open_stream
        self._streams: dict[int, _CarriedStream] = {}
        self._pieces: deque[tuple[int, _Kind, bytes]] = deque()
        self._waiting_bytes = 0
        self._given = 0
        self._given_at: deque[float] = deque(maxlen=_FEW)
        """Times of the last batches."""
        self._brief = 0
        """Calls that wait for less than `_BRIEF_S`."""
        self._has_pieces, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._taken = 0
        self._early: dict[int, asyncio.Future[None]] = {}

    # For its owner --------------------------------------------------------------------------------------------------

    async def carry(
        self,
        number: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        to: bytes = b"",
        open_s: float = _OPEN_S,
    ) -> Ended:
        """Carry a stream until it is over on both sides, or `close`, or the other side does not open it in time.

        `to` names what it leads to. The other side then says how that has ended.
        """
        self._say(number, _Kind.OPEN, to)
        stream = self._begin(number, Opened(reader, writer, writer.close))
        stream.has_word = bool(to)
        limit = asyncio.get_running_loop().call_later(open_s, self._end_unless_open, stream)
        try:
            return await stream.ended
        finally:
            limit.cancel()
            self._forget(stream)

    async def give(self, wait_s: float) -> StreamBatch:
        """Return what is to be sent, after at most `wait_s` seconds. A busy side waits for more, if it has little.

        Of several calls, one that waits for less than a second gets it first.
        """
        if wait_s > 0:
            self._brief += wait_s < _BRIEF_S
            try:
                await self._gather(wait_s)
            finally:
                self._brief -= wait_s < _BRIEF_S
        if not self._pieces:
            return NOTHING
        parts: list[bytes] = []
        size = 0
        while self._pieces and (not parts or size + len(self._pieces[0][2]) <= BATCH_BYTES):
            number, kind, body = self._pieces.popleft()
            parts += (struct.pack(_PIECE, number, kind, len(body)), body)
            size += len(body)
            self._waiting_bytes -= len(body)
        if not self._pieces:
            self._has_pieces.clear()
        if self._waiting_bytes < _WAITING_BYTES:
            self._has_room.set()
        self._given += 1
        self._given_at.append(asyncio.get_running_loop().time())
        return StreamBatch(self._given, b"".join(parts))

    async def _gather(self, wait_s: float) -> None:
        """Wait until there is something to give, and while there is little of it after a few other batches."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadline = now + wait_s
        while now < deadline:
            soon = self._given_at[0] + _FEW_S if len(self._given_at) == _FEW else now
            if not self._pieces:  # another call may have taken those that have come
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._has_pieces.wait(), deadline - now)
                if self._brief and wait_s >= _BRIEF_S:
                    await asyncio.sleep(0)  # the brief ones wake after this one, and take what there is
            elif self._waiting_bytes < _LITTLE_BYTES and soon > now:
                await asyncio.sleep(soon - now)
            else:
                return
            now = loop.time()

    async def take(self, batch: StreamBatch) -> None:
        """Pass on what the other side has given, in its turn. Returns when there is room for more."""
        if not batch.number:
            return
        if batch.number > self._taken + 1:
            turn = self._early[batch.number] = asyncio.get_running_loop().create_future()
            await turn
        at = 0
        while at < len(batch.body):
            number, kind, length = struct.unpack_from(_PIECE, batch.body, at)
            at += struct.calcsize(_PIECE)
            await self._pass_on(number, _Kind(kind), batch.body[at : at + length])
            at += length
        self._taken = batch.number
        if (following := self._early.pop(batch.number + 1, None)) is not None:
            following.set_result(None)

    def close(self, said: str) -> None:
        """Break all streams on this side. The other side is not told."""
        for stream in list(self._streams.values()):
            self._end(stream, Ended(None, said))

    # Between the two ------------------------------------------------------------------------------------------------

    def _say(self, number: int, kind: _Kind, body: bytes = b"") -> None:
        self._pieces.append((number, kind, body))
        self._waiting_bytes += len(body)
        self._has_pieces.set()
        if self._waiting_bytes >= _WAITING_BYTES:
            self._has_room.clear()

    def _begin(self, number: int, outside: Opened) -> _CarriedStream:
        stream = self._streams[number] = _CarriedStream(number, outside)
        stream.reading = asyncio.ensure_future(self._read(stream))
        return stream

    async def _read(self, stream: _CarriedStream) -> None:
        with contextlib.suppress(OSError):  # reset by its process: no more comes
            while data := await stream.outside.reader.read(BATCH_BYTES):
                self._say(stream.number, _Kind.BYTES, data)
                await self._has_room.wait()
        self._say(stream.number, _Kind.END_OF_INPUT)
        stream.has_read_all = True
        self._end_if_done(stream)

    async def _pass_on(self, number: int, kind: _Kind, body: bytes) -> None:
        if kind is _Kind.OPEN:
            await self._open(number, body)
            return
        stream = self._streams.get(number)
        if stream is None:
            return  # over on this side
        stream.is_open = True
        if kind is _Kind.END:
            self._end(stream, Ended(*json.loads(body)))
            return
        if kind is _Kind.OPENED:
            return
        with contextlib.suppress(OSError):  # its process has left; reading says so
            if kind is _Kind.BYTES:
                stream.outside.writer.write(body)
                await stream.outside.writer.drain()
            else:
                stream.outside.writer.write_eof()
        if kind is _Kind.END_OF_INPUT:
            stream.has_written_all = True
            self._end_if_done(stream)

    async def _open(self, number: int, to: bytes) -> None:
        try:
            outside = await self._open_stream(to)
        except OSError as error:
            code = NO_AGENT if isinstance(error, ConnectionRefusedError | FileNotFoundError) else None
            self._say(number, _Kind.END, json.dumps(Ended(code, str(error))).encode())
            return
        self._say(number, _Kind.OPENED)
        stream = self._begin(number, outside)
        stream.ended.add_done_callback(lambda _: self._forget(stream))
        if outside.ended is not None:
            stream.waiting = asyncio.ensure_future(self._until_over(stream, outside.ended()))

    async def _until_over(self, stream: _CarriedStream, ending: Awaitable[Ended]) -> None:
        ended = await ending
        if stream.reading:
            await stream.reading
        self._say(stream.number, _Kind.END, json.dumps(ended).encode())
        self._end(stream, ended)

    def _end_unless_open(self, stream: _CarriedStream) -> None:
        if not stream.is_open:
            self._end(stream, Ended(None, "nobody answered"))

    def _end_if_done(self, stream: _CarriedStream) -> None:
        if stream.has_read_all and stream.has_written_all and not stream.has_word:
            self._end(stream, Ended())

    def _end(self, stream: _CarriedStream, ended: Ended) -> None:
        if not stream.ended.done():
            stream.ended.set_result(ended)

    def _forget(self, stream: _CarriedStream) -> None:
        del self._streams[stream.number]
        if stream.reading:
            stream.reading.cancel()
        stream.outside.close()
