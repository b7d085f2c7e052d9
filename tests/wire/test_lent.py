"""Streams of bytes that a channel carries: bytes, windows and ends, over a channel that delivers in order."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from skyward.wire.frames import FrameKind
from skyward.wire.lent import WINDOW_BYTES, LentStreams

_LIMIT_S = 60.0


class _Pair:
    """Two sides of a channel. Each has a socket for stream 1, and the test has the other ends of these."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[tuple[int, int, int, bytes] | None] = queue.SimpleQueue()
        self.sides = [LentStreams(self._teller(1), "side-0"), LentStreams(self._teller(0), "side-1")]
        self.ended = [threading.Event(), threading.Event()]
        self.ends: list[socket.socket] = []
        self.carried = 0
        self._inner: list[socket.socket] = []
        self.going = threading.Event()
        self.going.set()
        for number, side in enumerate(self.sides):
            outer, inner = socket.socketpair()
            inner.setblocking(False)
            outer.settimeout(_LIMIT_S)
            self.ends.append(outer)
            self._inner.append(inner)
            side.open(1)
            assert side.bind(1, inner.fileno(), self._ender(number))
        self._thread = threading.Thread(target=self._deliver, daemon=True)
        self._thread.start()

    def _teller(self, to: int) -> Callable[[int, int, bytes], None]:
        return lambda kind, number, body: self._frames.put((to, kind, number, body))

    def _ender(self, number: int) -> Callable[[], None]:
        def ended() -> None:
            self._teller(1 - number)(FrameKind.END_LENT, 1, b"")
            self._inner[number].close()
            self.ended[number].set()

        return ended

    def _deliver(self) -> None:
        while (frame := self._frames.get()) is not None:
            self.going.wait()
            to, kind, number, body = frame
            if kind == FrameKind.LENT_BYTES:
                self.carried += len(body)
                self.sides[to].on_bytes(number, body)
            elif kind == FrameKind.LENT_TAKEN:
                self.sides[to].on_taken(number, body)
            else:
                self.sides[to].on_end(number)

    def close(self) -> None:
        for side in self.sides:
            side.close()
            side.join()
        self._frames.put(None)
        self._thread.join(_LIMIT_S)
        for end in self.ends:
            end.close()


@pytest.fixture
def pair() -> Iterator[_Pair]:
    pair = _Pair()
    yield pair
    pair.close()


def _read(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece
        data += piece
    return bytes(data)


def test_bytes_arrive_in_order_both_ways(pair: _Pair) -> None:
    sent = os.urandom(10 << 20)
    writers = [threading.Thread(target=end.sendall, args=(sent,)) for end in pair.ends]
    for writer in writers:
        writer.start()
    received: dict[int, bytes] = {}
    readers = [
        threading.Thread(target=lambda n=n: received.__setitem__(n, _read(pair.ends[n], len(sent)))) for n in (0, 1)
    ]
    for reader in readers:
        reader.start()
    for thread in [*writers, *readers]:
        thread.join(_LIMIT_S)
    assert received == {0: sent, 1: sent}


def test_a_reader_that_does_not_read_holds_up_its_sender(pair: _Pair) -> None:
    pair.ends[0].settimeout(0.5)
    with pytest.raises(TimeoutError):
        pair.ends[0].sendall(bytes(8 * WINDOW_BYTES))
    assert pair.carried <= 2 * WINDOW_BYTES
    pair.ends[0].settimeout(_LIMIT_S)
    assert _read(pair.ends[1], WINDOW_BYTES) == bytes(WINDOW_BYTES)


def test_the_end_of_one_side_comes_behind_its_bytes(pair: _Pair) -> None:
    pair.going.clear()
    pair.ends[0].sendall(b"last words")
    pair.ends[0].close()
    assert pair.ended[0].wait(_LIMIT_S)
    pair.going.set()
    assert _read(pair.ends[1], 10) == b"last words"
    assert pair.ends[1].recv(1) == b""
    assert pair.ended[1].wait(_LIMIT_S)


def test_bytes_that_come_before_the_descriptor_are_kept() -> None:
    side = LentStreams(lambda kind, number, body: None, "side")
    side.open(7)
    side.on_bytes(7, b"early ")
    side.on_bytes(7, b"bytes")
    outer, inner = socket.socketpair()
    inner.setblocking(False)
    outer.settimeout(_LIMIT_S)
    ended = threading.Event()
    assert side.bind(7, inner.fileno(), ended.set)
    assert _read(outer, 11) == b"early bytes"
    side.on_end(7)
    assert ended.wait(_LIMIT_S)
    assert not side.bind(7, inner.fileno(), ended.set)
    side.close()
    side.join()
    outer.close()
    inner.close()


def test_an_idle_stream_costs_no_time(pair: _Pair) -> None:
    pair.ends[0].sendall(b"x")
    assert _read(pair.ends[1], 1) == b"x"
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.2


def test_streams_end_when_their_thread_raises_and_the_next_one_gets_another(pair: _Pair) -> None:
    side = pair.sides[0]
    real = side._readable  # no input can make the thread raise

    def fail(fd: int) -> None:
        raise MemoryError

    side._readable = fail  # type: ignore[method-assign]
    pair.ends[0].sendall(b"x")
    assert pair.ended[0].wait(_LIMIT_S)
    assert pair.ended[1].wait(_LIMIT_S)
    side._readable = real  # type: ignore[method-assign]
    outer, inner = socket.socketpair()
    inner.setblocking(False)
    outer.settimeout(_LIMIT_S)
    side.open(2)
    assert side.bind(2, inner.fileno(), inner.close)
    side.on_bytes(2, b"more")
    assert _read(outer, 4) == b"more"
    outer.close()
