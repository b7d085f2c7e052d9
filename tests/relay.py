"""A line that can be made long, narrow, stopped and broken, in a separate process: of TCP, or around a command.

Bytes arrive `delay_s` after they were sent, in both directions, so a round trip takes twice that.

For TCP, `Relay` starts it. Opening a connection takes no delay, because the relay's own kernel accepts at once. With
`has_handshakes` the first bytes wait for the round trip that opening would have taken.

Around a command, it passes on the command's standard input and output:

    python relay.py <folder> <delay in seconds> <command> ...

Its process id is the name of a file in the folder while it runs. A test breaks the line by killing the relay, and
stalls the line by stopping it. While there is a file "cut" in the folder the relay does not start, and while there is a
file "hang" it does nothing.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Relay"]

ROOT = Path(__file__).parent.parent
_PIECE = 256 * 1024
_ON_THE_WAY = 64 * 2**20  # bytes in one direction: enough for 1 GB/s and a round trip of 100 ms
_PACKET = 1500  # bytes
_PIECE_S, _QUEUE_S = 0.005, 0.1  # of a narrow line: time of one piece, which arrives whole, and of those that wait


class Relay:
    """A relay in front of `target`: connect to `host` and `port` instead. It needs no root. `close` ends it.

    Args:
        target: Host and port that it connects to.
        delay_s: See `set_delay`.
        bytes_per_s: Bytes per second in each direction, which all connections share; 0: unlimited.
        has_handshakes: Whether the first bytes of a connection wait for a round trip.
        listen: Address to listen on.
        port: Port to listen on; 0: any free one.
    """

    def __init__(
        self,
        target: tuple[str, int],
        *,
        delay_s: float = 0.0,
        bytes_per_s: float = 0.0,
        has_handshakes: bool = False,
        listen: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.relay", json.dumps([listen, *target, port])],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.host = listen
        self.port = int(self.process.stdout.readline())
        self.set_delay(delay_s)
        self._tell("bytes_per_s", bytes_per_s)
        self._tell("has_handshakes", has_handshakes)

    def set_delay(self, delay_s: float) -> None:
        """Set how long bytes travel in one direction, for later bytes."""
        self._tell("delay_s", delay_s)

    def stall(self) -> None:
        """Let nothing through, without any sign of it.

        New connections open and stay silent. A cut link behaves like that.
        """
        self._tell("is_stalled", True)

    def resume(self) -> None:
        """Undo `stall`: bytes sent meanwhile arrive."""
        self._tell("is_stalled", False)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Stall the line for the length of the block."""
        self.stall()
        try:
            yield
        finally:
            self.resume()

    def reset(self) -> None:
        """Break all connections. Both ends notice it, and bytes in flight are lost."""
        self._tell("reset", True)

    def refuse(self) -> None:
        """Refuse new connections. Open ones stay."""
        self._tell("is_open", False)

    def accept(self) -> None:
        """Undo `refuse`."""
        self._tell("is_open", True)

    def count(self) -> int:
        """Return the number of open connections."""
        return self._tell("count", True)

    def count_bytes(self) -> int:
        """Return the number of bytes so far, in both directions."""
        return self._tell("bytes", True)

    def close(self) -> None:
        """End the relay and all its connections. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _tell(self, what: str, value: object) -> int:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([what, value]).encode() + b"\n")
        stdin.flush()
        return int(stdout.readline())  # the answer means that it is done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Wire:
    """One direction of a line, which all connections share."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.bytes_per_s = 0.0
        self.carried = 0
        self._is_free_at = 0.0

    def arrival(self, size: int, not_before: float) -> float:
        """Take in bytes, and return when they arrive."""
        self.carried += size
        begin = max(time.monotonic(), not_before)
        if self.bytes_per_s:
            self._is_free_at = begin = max(begin, self._is_free_at) + size / self.bytes_per_s
        return begin + self.delay_s

    @property
    def piece(self) -> int:
        """Most bytes of one piece."""
        return min(_PIECE, int(_PACKET + self.bytes_per_s * _PIECE_S)) if self.bytes_per_s else _PIECE

    @property
    def on_the_way(self) -> int:
        """Most bytes of one connection."""
        narrow = _PACKET + self.bytes_per_s * (self.delay_s + _QUEUE_S)
        return min(_ON_THE_WAY, int(narrow)) if self.bytes_per_s else _ON_THE_WAY


class _Direction:
    """Bytes on their way from one descriptor to another, each piece with the time when it is due.

    `shut` is called when the source has ended and all bytes have arrived.
    """

    def __init__(
        self, source: int, sink: int, shut: Callable[[], object], wire: _Wire, *, opens_at: float = 0.0
    ) -> None:
        self.source, self.sink, self._wire, self._opens_at = source, sink, wire, opens_at
        self.pieces: deque[tuple[float, memoryview]] = deque()  # an empty piece: the source has ended
        self.size = 0
        self.has_ended = False
        self.is_done = False
        self._shut = shut

    def read(self) -> None:
        piece = os.read(self.source, self._wire.piece)
        self.has_ended = not piece
        self.size += len(piece)
        self.pieces.append((self._wire.arrival(len(piece), self._opens_at), memoryview(piece)))

    def write(self) -> None:
        """Pass on the due pieces, as far as the sink takes them."""
        while self.pieces and self.pieces[0][0] <= time.monotonic():
            due, piece = self.pieces[0]
            if not piece:
                self.is_done = True
                self._shut()
                self.pieces.clear()
                return
            sent = os.write(self.sink, piece)
            self.size -= sent
            if sent == len(piece):
                self.pieces.popleft()
            else:
                self.pieces[0] = (due, piece[sent:])

    @property
    def takes_more(self) -> bool:
        return not self.has_ended and self.size < self._wire.on_the_way

    def due(self) -> float:
        """Return when the next piece is due; infinite if there is none."""
        return self.pieces[0][0] if self.pieces else float("inf")


class _Connection:
    """Two directions that end at once. With `is_reset`, both ends see a reset."""

    def __init__(self, directions: tuple[_Direction, _Direction], end: Callable[[bool], object]) -> None:
        self.directions = directions
        self.end = end


def _of_sockets(near: socket.socket, far: socket.socket, wires: tuple[_Wire, _Wire], opens_at: float) -> _Connection:
    def end(is_reset: bool) -> None:
        for each in (near, far):
            if is_reset:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            each.close()

    for each in (near, far):
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, home = wires
    there = _Direction(near.fileno(), far.fileno(), lambda: far.shutdown(socket.SHUT_WR), out, opens_at=opens_at)
    back = _Direction(far.fileno(), near.fileno(), lambda: near.shutdown(socket.SHUT_WR), home)
    return _Connection((there, back), end)


class _Lines:
    """Connections, and the loop that moves their bytes."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.wires = _Wire(delay_s), _Wire(delay_s)
        self.connections: set[_Connection] = set()

    def register(self, selector: selectors.BaseSelector) -> float | None:
        """Register the descriptors to wait for. Returns the time to wait, in seconds."""
        now = time.monotonic()  # one for all: a piece that fell due between two looks would be seen by neither
        wanted: dict[int, tuple[int, _Connection]] = {}
        next_due = float("inf")
        for connection in self.connections:
            for direction in connection.directions:
                if direction.takes_more:
                    events = wanted.get(direction.source, (0,))[0]
                    wanted[direction.source] = events | selectors.EVENT_READ, connection
                if (due := direction.due()) <= now:
                    events = wanted.get(direction.sink, (0,))[0]
                    wanted[direction.sink] = events | selectors.EVENT_WRITE, connection
                else:
                    next_due = min(next_due, due)
        for fd, (events, connection) in wanted.items():
            selector.register(fd, events, connection)
        return None if next_due == float("inf") else next_due - now

    def move(self, connection: _Connection, fd: int, events: int) -> None:
        if connection not in self.connections:
            return
        try:
            for direction in connection.directions:
                if events & selectors.EVENT_READ and direction.source == fd:
                    with suppress(BlockingIOError):
                        direction.read()
                # Even without a delay the piece goes out in the next round, which costs microseconds.
                if events & selectors.EVENT_WRITE and direction.sink == fd:
                    with suppress(BlockingIOError):
                        direction.write()
            if all(direction.is_done for direction in connection.directions):
                self.end(connection)
        except OSError:
            self.end(connection, is_reset=True)

    def end(self, connection: _Connection, *, is_reset: bool = False) -> None:
        self.connections.discard(connection)
        connection.end(is_reset)


class _Tcp:
    """The process: one thread, which moves the bytes and obeys the lines on standard input."""

    def __init__(self, listen: str, host: str, target_port: int, port: int) -> None:
        self.listen, self.target = listen, (host, target_port)
        self.lines = _Lines()
        self.is_stalled = self.has_handshakes = False
        self.listener: socket.socket | None = None
        self.port = port
        self.open()

    def open(self) -> None:
        if self.listener is None:
            self.listener = socket.create_server((self.listen, self.port), backlog=128)
            self.listener.setblocking(False)
            self.port = self.listener.getsockname()[1]

    def shut(self) -> None:
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def run(self) -> None:
        print(self.port, flush=True)
        while True:
            with selectors.DefaultSelector() as selector:  # made again each time: simple, and there are few sockets
                selector.register(sys.stdin, selectors.EVENT_READ, None)
                if self.listener is not None:
                    selector.register(self.listener, selectors.EVENT_READ, None)
                ready = selector.select(None if self.is_stalled else self.lines.register(selector))
            for key, events in ready:
                if key.data is not None:
                    self.lines.move(key.data, key.fd, events)
                elif key.fileobj is self.listener:
                    self._accept()
                elif not self._obey(sys.stdin.readline()):
                    return

    def _accept(self) -> None:
        assert self.listener is not None
        near, _ = self.listener.accept()
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        round_trip_s = sum(wire.delay_s for wire in self.lines.wires) if self.has_handshakes else 0.0
        connection = _of_sockets(near, far, self.lines.wires, time.monotonic() + round_trip_s)
        far.connect_ex(self.target)
        self.lines.connections.add(connection)

    def _obey(self, line: str) -> bool:
        if not line:
            return False
        what, value = json.loads(line)
        if what == "is_open":
            (self.open if value else self.shut)()
        elif what == "reset":
            for connection in list(self.lines.connections):
                self.lines.end(connection, is_reset=True)
        elif what in ("delay_s", "bytes_per_s"):
            for wire in self.lines.wires:
                setattr(wire, what, value)
        elif what in ("is_stalled", "has_handshakes"):
            setattr(self, what, value)
        carried = sum(wire.carried for wire in self.lines.wires)
        print(carried if what == "bytes" else len(self.lines.connections), flush=True)
        return True


def _around(folder: str, delay_s: float, command: list[str]) -> int:
    """Run a relay around a command. Returns its exit code."""
    path = os.path.join(folder, str(os.getpid()))
    with open(path, "w"):
        pass
    if os.path.exists(os.path.join(folder, "cut")):  # after the name: a test that cuts sees one or the other
        return 1
    while os.path.exists(os.path.join(folder, "hang")):
        time.sleep(0.05)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    lines = _Lines(delay_s)
    there = _Direction(0, process.stdin.fileno(), process.stdin.close, lines.wires[0])
    back = _Direction(process.stdout.fileno(), 1, lambda: os.close(1), lines.wires[1])
    lines.connections.add(_Connection((there, back), lambda is_reset: is_reset and os._exit(1)))
    for fd in (there.source, there.sink, back.source, back.sink):
        os.set_blocking(fd, False)
    while not back.is_done:
        with selectors.DefaultSelector() as selector:
            ready = selector.select(lines.register(selector))
        for key, events in ready:
            lines.move(key.data, key.fd, events)
    os.unlink(path)
    try:
        return process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 1


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _Tcp(*json.loads(sys.argv[1])).run()
    else:
        sys.exit(_around(sys.argv[1], float(sys.argv[2]), sys.argv[3:]))
