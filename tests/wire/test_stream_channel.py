"""Channels over links that break: each frame arrives once and in order."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import socket
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyward.errors import InternalError
from skyward.wire.blobs import Blob
from skyward.wire.channel import BLOBS, CONTROL, RESULTS, ChannelClosed
from skyward.wire.ends import Ends, Stripes
from skyward.wire.frames import HAS_FD, Frame, FrameKind, pack
from skyward.wire.pieces import PIECE_SIZE
from skyward.wire.stream import StreamChannel

_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)


def pipes() -> tuple[Ends, Ends]:
    """Return a link of two small pipes, so that most writes are partial."""
    (a, b), (c, d) = os.pipe(), os.pipe()
    for fd in (b, d):
        fcntl.fcntl(fd, _F_SETPIPE_SZ, 4096)
    return Ends(a, d), Ends(c, b)


def sockets() -> tuple[Ends, Ends]:
    ends = []
    for sock in socket.socketpair():
        fd = sock.detach()
        ends.append(Ends(fd, fd))
    return ends[0], ends[1]


def stripes() -> tuple[Ends, Ends]:
    """Return a link of four pipes."""
    parts = [*(pipes() for _ in range(3)), sockets()]
    both = Stripes([left for left, _ in parts]), Stripes([right for _, right in parts])
    both[0].turns = True
    return both


class Pair:
    """Two channels, and the links between them."""

    def __init__(self, make: Callable[[], tuple[Ends, Ends]]) -> None:
        self.left = StreamChannel(checks_blobs=True)
        self.right = StreamChannel(checks_blobs=True)
        self.arrived: dict[StreamChannel, list[Frame]] = {self.left: [], self.right: []}
        self._make = make
        self.connect()

    def connect(self) -> None:
        """Connect as HELLO and WELCOME do: both sides report what they have received."""
        ends, other_ends = self._make()
        received = self.left.received
        self.left.detach()
        self.right.attach(other_ends, received)
        self.left.attach(ends, self.right.received)

    def read(self, channel: StreamChannel) -> bool:
        try:
            self.arrived[channel] += channel.receive()
        except (BlockingIOError, ChannelClosed):
            return False
        return True

    def settle(self) -> None:
        """Run until nothing is left to send or read."""
        for _ in range(100_000):
            quiet = all([channel.flush() and not channel.needs_flush for channel in self.arrived])  # noqa: C419
            if not any([self.read(channel) for channel in self.arrived]) and quiet:  # noqa: C419
                return
        raise AssertionError("it never ended")

    def close(self) -> None:
        for channel, frames in self.arrived.items():
            channel.close()
            for frame in frames:
                if frame.fd >= 0:
                    os.close(frame.fd)


def blob(size: int, seed: int = 0) -> Blob:
    return Blob.snapshot(memoryview(bytes((i * 31 + seed) % 251 for i in range(997)) * (size // 997 + 1))[:size])


def send_blob(channel: StreamChannel, sent: Blob) -> None:
    body = sent.digest + sent.size.to_bytes(8, "little") + bytes(8)
    channel.queue(FrameKind.BLOB, 7, body, fd=sent.fd, priority=BLOBS)


def content(frame: Frame) -> bytes:
    assert frame.flags & HAS_FD
    size = int.from_bytes(frame.body[16:24], "little")
    return os.pread(frame.fd, size, 0)


_STEPS = st.one_of(
    st.tuples(st.just("send"), st.booleans(), st.integers(0, 3000)),
    st.tuples(st.just("blob"), st.booleans(), st.integers(1, 3 * PIECE_SIZE)),
    st.tuples(st.sampled_from(["flush", "read", "ping"]), st.booleans(), st.just(0)),
    st.tuples(st.sampled_from(["connect", "detach"]), st.booleans(), st.just(0)),
)


@pytest.mark.parametrize("make", [pipes, sockets, stripes])
@settings(deadline=None, max_examples=150)
@given(steps=st.lists(_STEPS, max_size=60))
def test_each_frame_arrives_once_and_in_order_whatever_happens(
    make: Callable[[], tuple[Ends, Ends]], steps: list[tuple[str, bool, int]]
) -> None:
    pair = Pair(make)
    sent: dict[StreamChannel, list[int]] = {pair.left: [], pair.right: []}
    blobs: dict[StreamChannel, list[bytes]] = {pair.left: [], pair.right: []}
    number = 0
    try:
        for what, is_left, size in steps:
            channel = pair.left if is_left else pair.right
            number += 1
            with contextlib.suppress(ChannelClosed):
                if what == "send":
                    sent[channel].append(number)
                    channel.send(pack(FrameKind.RESULT, number, bytes(size)), RESULTS)
                elif what == "blob":
                    made = blob(size, number)
                    if made.digest not in blobs[channel]:
                        blobs[channel].append(made.digest)
                        send_blob(channel, made)
                elif what == "connect":
                    pair.connect()
                elif what == "detach":
                    channel.detach()
                elif what == "read":
                    pair.read(channel)
                elif what == "ping":
                    channel.ping()
                else:
                    channel.flush()
        pair.connect()
        pair.settle()
        for channel, other in ((pair.left, pair.right), (pair.right, pair.left)):
            frames = pair.arrived[other]
            assert [f.ident for f in frames if f.kind == FrameKind.RESULT] == sent[channel]
            assert [f.body[:16] for f in frames if f.kind == FrameKind.BLOB] == blobs[channel]
    finally:
        pair.close()


def test_a_blob_arrives_as_a_separate_file() -> None:
    pair = Pair(pipes)
    made = blob(5 * PIECE_SIZE + 123)
    send_blob(pair.left, made)
    pair.settle()
    (frame,) = pair.arrived[pair.right]
    assert frame.ident == 7
    assert content(frame) == os.pread(made.fd, made.size, 0)
    pair.close()


def test_control_frames_overtake_a_blob() -> None:
    pair = Pair(pipes)
    send_blob(pair.left, blob(20 * PIECE_SIZE))
    pair.left.flush()
    pair.left.queue(FrameKind.CANCEL, 9, priority=CONTROL)
    pair.settle()
    assert [f.kind for f in pair.arrived[pair.right]] == [FrameKind.CANCEL, FrameKind.BLOB]
    pair.close()


def test_a_blob_that_does_not_match_its_name_is_refused() -> None:
    pair = Pair(pipes)
    made = blob(2 * PIECE_SIZE)
    made.digest = bytes(16)
    send_blob(pair.left, made)
    with pytest.raises(InternalError, match="was damaged on its way"):
        pair.settle()
    pair.close()


def test_acknowledged_frames_are_dropped() -> None:
    pair = Pair(sockets)
    gc.collect()  # leftovers of other tests do not count
    before = len(os.listdir("/proc/self/fd"))
    made = blob(4 * PIECE_SIZE)
    for number in range(1000):
        pair.left.queue(FrameKind.TASK, number)
    send_blob(pair.left, made)
    made.close()
    pair.settle()
    pair.left.ping()
    pair.settle()
    assert not pair.left._unacked  # whatever stays by mistake costs only memory
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the blob that arrived
    pair.close()


def test_a_ping_measures_the_round_trip() -> None:
    pair = Pair(sockets)
    assert pair.left.round_trip_s == 0.0
    pair.left.ping()
    pair.settle()
    assert 0.0 < pair.left.round_trip_s < 1.0
    pair.close()


def test_bytes_that_are_no_frame_are_an_error() -> None:
    pair = Pair(sockets)
    os.write(pair.left.write_fileno(), b"\xff" * 64)
    with pytest.raises(InternalError, match="limit"):
        pair.right.receive()
    pair.close()


def test_a_descriptor_that_is_no_blob_cannot_be_sent() -> None:
    channel = StreamChannel(checks_blobs=False)
    with pytest.raises(InternalError, match="cannot carry a file descriptor"):
        channel.queue(FrameKind.LINE, 1, fd=0)


def test_frames_before_an_invalid_frame_are_delivered() -> None:
    pair = Pair(sockets)
    os.write(pair.left.write_fileno(), pack(FrameKind.RESULT, 1) + b"\xff" * 64)
    assert [frame.ident for frame in pair.right.receive()] == [1]
    with pytest.raises(InternalError, match="limit"):
        pair.right.receive()
    assert pair.right.received == 1
    pair.close()
