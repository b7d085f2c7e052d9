"""Links of several connections: their frames arrive in one order, and the end of one connection ends the link."""

from __future__ import annotations

import gc
import os
import select
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyward.wire.channel import ChannelClosed
from skyward.wire.ends import Ends
from skyward.wire.frames import FrameKind, pack
from skyward.wire.pieces import PIECE_SIZE
from skyward.wire.stream import StreamChannel
from tests.wire.test_stream_channel import Pair, blob, content, pipes, send_blob, sockets

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="links of several ways need epoll")


def widen(pair: Pair, count: int, make: Callable[[], tuple[Ends, Ends]] = sockets) -> list[tuple[Ends, Ends]]:
    """Widen the link as client (left) and agent do."""
    more = [make() for _ in range(count - 1)]
    pair.right.widen([right for _, right in more], turns=False)
    pair.left.widen([left for left, _ in more], turns=True)
    return more


def is_ready(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


@pytest.mark.parametrize("make", [pipes, sockets])
def test_a_link_in_use_gets_further_connections(make: Callable[[], tuple[Ends, Ends]]) -> None:
    pair = Pair(make)
    numbers = iter(range(10_000))
    sent: dict[StreamChannel, list[int]] = {pair.left: [], pair.right: []}

    def say(channel: StreamChannel, count: int) -> None:
        for _ in range(count):
            sent[channel].append(next(numbers))
            channel.send(pack(FrameKind.RESULT, sent[channel][-1], bytes(20_000)))

    for channel in sent:
        say(channel, 50)  # more than is taken at once
    pair.read(pair.right)
    widen(pair, 3, make)
    for channel in sent:
        say(channel, 100)
    made = blob(20 * PIECE_SIZE + 1)
    send_blob(pair.right, made)
    pair.settle()
    for channel, other in ((pair.left, pair.right), (pair.right, pair.left)):
        assert [f.ident for f in pair.arrived[other] if f.kind == FrameKind.RESULT] == sent[channel]
    assert content(pair.arrived[pair.left][-1]) == os.pread(made.fd, made.size, 0)
    pair.close()


def test_several_connections_have_more_bytes_in_flight_than_one() -> None:
    def on_their_way(ways: int) -> int:
        pair = Pair(sockets)
        widen(pair, ways)
        for number in range(2000):
            pair.left.queue(FrameKind.RESULT, number, bytes(1000))
        assert not pair.left.flush()
        taken = pair.left.carried
        pair.settle()
        assert [frame.ident for frame in pair.arrived[pair.right]] == list(range(2000))
        pair.close()
        return taken

    assert on_their_way(4) > 2.5 * on_their_way(1)


def test_small_frames_stay_on_one_connection() -> None:
    pair = Pair(sockets)
    more = widen(pair, 2)
    for number in range(100):
        pair.left.send(pack(FrameKind.RESULT, number))
    assert not is_ready(more[0][1].read_fd)
    pair.settle()
    pair.close()


def test_a_peer_that_does_not_take_turns_yet_is_understood_too() -> None:
    """The agent takes turns once the client has. Until then the client may not know all connections."""
    pair = Pair(sockets)
    more = widen(pair, 2)
    for number in range(100):
        pair.right.queue(FrameKind.RESULT, number, bytes(10_000))
    pair.right.flush()
    assert not is_ready(more[0][0].read_fd)
    pair.settle()
    assert [frame.ident for frame in pair.arrived[pair.left]] == list(range(100))
    pair.close()


def test_the_next_bytes_go_where_the_link_waits_for_room() -> None:
    pair = Pair(sockets)
    widen(pair, 2)
    for number in range(1000):
        pair.left.queue(FrameKind.RESULT, number, bytes(10_000))
    while not pair.left.flush():
        assert not is_ready(pair.left.write_fileno())
        while not is_ready(pair.left.write_fileno()):
            assert pair.read(pair.right), "there is no room, and nothing to read"
    pair.settle()
    assert [frame.ident for frame in pair.arrived[pair.right]] == list(range(1000))
    pair.close()


@pytest.mark.parametrize("which", [0, 1])
def test_the_end_of_one_connection_ends_the_link_after_the_received_frames(which: int) -> None:
    pair = Pair(sockets)
    first = pair.left._ends  # a channel gives its ends away only by `release`, which ends the link
    assert first is not None
    (more,) = widen(pair, 2)
    pair.left.send(pack(FrameKind.RESULT, 1))
    (first, more[0])[which].close()
    assert is_ready(pair.right.fileno())
    assert [frame.ident for frame in pair.right.receive()] == [1]
    assert is_ready(pair.right.fileno())
    with pytest.raises(ChannelClosed):
        pair.right.receive()
    pair.connect()
    pair.settle()
    pair.close()


def test_closing_closes_all_connections() -> None:
    gc.collect()  # leftovers of other tests do not count
    before = len(os.listdir("/proc/self/fd"))
    pair = Pair(sockets)
    widen(pair, 4)
    for number in range(1000):
        pair.left.queue(FrameKind.RESULT, number, bytes(10_000))
    pair.left.flush()
    pair.close()
    pair.left.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (pair.left.fileno(), pair.left.write_fileno()) == (-1, -1)


def test_greeting_that_is_longer_than_a_pipe_is_written_whole_or_not_in_time() -> None:
    left, right = pipes()
    greeting = os.urandom(1 << 20)
    deadline = time.monotonic() + 60.0
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(right.read_exactly, len(greeting), deadline)
        left.write_exactly(greeting, deadline)
        assert read.result(60) == greeting
    with pytest.raises(TimeoutError):
        left.write_exactly(greeting, time.monotonic() + 0.2)
    left.close()
    right.close()
