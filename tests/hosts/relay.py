"""A TCP relay whose line can be made long, stopped and broken: `Relay` starts it, as a process of its own.

Bytes arrive `delay_s` after they were sent, in both directions, so a round trip takes twice that. Opening a
connection takes no delay: the relay's own kernel says yes at once.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["Relay"]

ROOT = Path(__file__).parent.parent.parent
_PIECE = 256 * 1024
_ON_THE_WAY = 64 * 2**20  # bytes in one direction: enough for 1 GB/s and a round trip of 100 ms


class Relay:
    """A relay in front of `target`: connect to `host` and `port` instead. Needs no root. `close` ends it."""

    def __init__(self, target: tuple[str, int], *, delay_s: float = 0.0, listen: str = "127.0.0.1") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.hosts.relay", json.dumps([listen, *target])],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.host = listen
        self.port = int(self.process.stdout.readline())
        self.set_delay(delay_s)

    def set_delay(self, delay_s: float) -> None:
        """How long bytes are on the way, one way, for those that come from now on."""
        self._tell("delay_s", delay_s)

    def stall(self) -> None:
        """Nothing comes through, and nobody is told; new connections open and stay silent. A cut link is like that."""
        self._tell("is_stalled", True)

    def resume(self) -> None:
        """Undo `stall`: what was sent meanwhile arrives."""
        self._tell("is_stalled", False)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """`stall` for the length of the block."""
        self.stall()
        try:
            yield
        finally:
            self.resume()

    def reset(self) -> None:
        """Break all connections: both ends are told. What was on the way is lost."""
        self._tell("reset", True)

    def refuse(self) -> None:
        """Refuse new connections; those that are open stay."""
        self._tell("is_open", False)

    def accept(self) -> None:
        """Undo `refuse`."""
        self._tell("is_open", True)

    def count(self) -> int:
        """How many connections are open."""
        return self._tell("count", True)

    def close(self) -> None:
        """End it, and all its connections. Idempotent."""
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
        return int(stdout.readline())  # when the answer is here, it is so

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Direction:
    """Bytes on their way from one socket to the other, each piece with the time when it is due."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source, self.sink = source, sink
        self.pieces: deque[tuple[float, memoryview]] = deque()  # an empty piece: the source has ended
        self.size = 0
        self.has_ended = False
        self.is_done = False

    def read(self, delay_s: float) -> None:
        piece = self.source.recv(_PIECE)
        self.has_ended = not piece
        self.size += len(piece)
        self.pieces.append((time.monotonic() + delay_s, memoryview(piece)))

    def write(self) -> None:
        """Pass on what is due, as far as the sink takes it."""
        while self.pieces and self.pieces[0][0] <= time.monotonic():
            due, piece = self.pieces[0]
            if not piece:
                self.is_done = True
                self.sink.shutdown(socket.SHUT_WR)
                self.pieces.clear()
                return
            sent = self.sink.send(piece)
            self.size -= sent
            if sent == len(piece):
                self.pieces.popleft()
            else:
                self.pieces[0] = (due, piece[sent:])


class _Connection:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.sockets = (near, far)
        self.directions = (_Direction(near, far), _Direction(far, near))

    def wanted(self, number: int, now: float) -> int:
        """What to wait for on socket `number`: to read from it, or to write what is due."""
        out, back = self.directions[number], self.directions[1 - number]
        events = selectors.EVENT_READ if not out.has_ended and out.size < _ON_THE_WAY else 0
        is_due = bool(back.pieces) and back.pieces[0][0] <= now
        return events | (selectors.EVENT_WRITE if is_due else 0)

    def due(self, now: float) -> float:
        """When the next piece is due, of those that are not due yet."""
        return min((d.pieces[0][0] for d in self.directions if d.pieces and d.pieces[0][0] > now), default=float("inf"))


class _Loop:
    """The process: one thread, which moves the bytes and obeys the lines on standard input."""

    def __init__(self, listen: str, host: str, port: int) -> None:
        self.listen, self.target = listen, (host, port)
        self.delay_s, self.is_stalled = 0.0, False
        self.connections: set[_Connection] = set()
        self.listener: socket.socket | None = None
        self.port = 0
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
            with selectors.DefaultSelector() as selector:  # made anew each time: simple, and there are few sockets
                selector.register(sys.stdin, selectors.EVENT_READ, None)
                if self.listener is not None:
                    selector.register(self.listener, selectors.EVENT_READ, None)
                ready = selector.select(None if self.is_stalled else self._register(selector))
            for key, events in ready:
                if key.data is not None:
                    connection, number = key.data
                    self._move(connection, number, events)
                elif key.fileobj is self.listener:
                    self._accept()
                elif not self._obey(sys.stdin.readline()):
                    return

    def _register(self, selector: selectors.BaseSelector) -> float | None:
        """Register what to wait for; returns how long, in seconds."""
        now = time.monotonic()  # one for all: a piece that fell due between two looks would be seen by neither
        for connection in self.connections:
            for number, end in enumerate(connection.sockets):
                if events := connection.wanted(number, now):
                    selector.register(end, events, (connection, number))
        due = min((connection.due(now) for connection in self.connections), default=float("inf"))
        return None if due == float("inf") else due - now

    def _move(self, connection: _Connection, number: int, events: int) -> None:
        if connection not in self.connections:
            return
        try:
            if events & selectors.EVENT_READ:
                with suppress(BlockingIOError):
                    connection.directions[number].read(self.delay_s)
            # Also without a delay the piece goes out in the next round: that costs microseconds.
            if events & selectors.EVENT_WRITE:
                with suppress(BlockingIOError):
                    connection.directions[1 - number].write()
            if all(direction.is_done for direction in connection.directions):
                self._end(connection)
        except OSError:
            self._end(connection, is_reset=True)

    def _accept(self) -> None:
        assert self.listener is not None
        near, _ = self.listener.accept()
        far = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far.connect_ex(self.target)
        self.connections.add(_Connection(near, far))

    def _end(self, connection: _Connection, *, is_reset: bool = False) -> None:
        self.connections.discard(connection)
        for end in connection.sockets:
            if is_reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            end.close()

    def _obey(self, line: str) -> bool:
        if not line:
            return False
        what, value = json.loads(line)
        if what == "is_open":
            (self.open if value else self.shut)()
        elif what == "reset":
            for connection in list(self.connections):
                self._end(connection, is_reset=True)
        elif what != "count":
            setattr(self, what, value)
        print(len(self.connections), flush=True)
        return True


if __name__ == "__main__":
    _Loop(*json.loads(sys.argv[1])).run()
