"""Frames over real sockets with small buffers."""

from __future__ import annotations

import gc
import os
import random
import resource
import socket
from collections.abc import Iterator

import pytest

from skyward.wire.channel import BLOBS, CONTROL, RESULTS, Channel, ChannelClosed
from skyward.wire.frames import Frame, FrameKind, pack

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return two channels whose sockets buffer as little as the kernel allows."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    made = Channel(ours), Channel(theirs)
    yield made
    for channel in made:
        channel.close()


def receive_some(channel: Channel) -> list[Frame]:
    try:
        return list(channel.receive())
    except BlockingIOError:
        return []


def transfer(sender: Channel, receiver: Channel) -> list[Frame]:
    got: list[Frame] = []
    while not sender.flush():
        got += receive_some(receiver)
    while more := receive_some(receiver):
        got += more
    return got


def test_frames_larger_than_the_sockets_buffer_arrive_whole(ends: Ends) -> None:
    ours, theirs = ends
    bodies = [os.urandom(random.Random(n).choice([0, 1, 15, 5000, 200_000])) for n in range(60)]
    for number, body in enumerate(bodies):
        ours.queue(FrameKind.TASK, number, body)
    got = transfer(ours, theirs)
    assert [(f.ident, f.body) for f in got] == list(enumerate(bodies))
    assert not ours.has_output


def test_send_and_queue_keep_the_order_however_little_the_socket_takes(ends: Ends) -> None:
    ours, theirs = ends
    got: list[Frame] = []
    chosen = random.Random(5)
    for number in range(500):
        body = bytes(chosen.choice([0, 10, 3000, 50_000]))
        if chosen.random() < 0.5:
            ours.send(pack(FrameKind.TASK, number, body))
        else:
            ours.queue(FrameKind.TASK, number, body)
        if chosen.random() < 0.3:
            got += receive_some(theirs)
    got += transfer(ours, theirs)
    assert [f.ident for f in got] == list(range(500))


def test_a_full_socket_is_reported_and_loses_nothing(ends: Ends) -> None:
    ours, theirs = ends
    ours.queue(FrameKind.TASK, 1, bytes(300_000))
    assert not ours.flush()
    assert ours.has_output
    assert len(transfer(ours, theirs)) == 1


def test_control_overtakes_results_and_results_overtake_blobs(ends: Ends) -> None:
    ours, theirs = ends
    ours.queue(FrameKind.TASK, 1, bytes(300_000), priority=BLOBS)
    ours.flush()  # it is already on its way, and a frame is never split
    for ident, priority in enumerate((BLOBS, RESULTS, CONTROL), 2):
        ours.queue(FrameKind.TASK, ident, b"", priority=priority)
    assert [f.ident for f in transfer(ours, theirs)] == [1, 4, 3, 2]


def test_descriptors_arrive_with_their_frames_through_a_full_socket(ends: Ends) -> None:
    ours, theirs = ends
    for number in range(40):
        fd = os.memfd_create("test")
        os.write(fd, b"%d" % number)
        ours.queue(FrameKind.BLOB, number, bytes(20_000), fd=fd)
        os.close(fd)  # the channel has its own
        ours.queue(FrameKind.TASK, 1000 + number, bytes(9000))
    got = transfer(ours, theirs)
    assert [f.ident for f in got] == [n for number in range(40) for n in (number, 1000 + number)]
    for frame in got:
        assert (frame.fd >= 0) == (frame.kind == FrameKind.BLOB)
        if frame.fd >= 0:
            assert os.pread(frame.fd, 10, 0) == b"%d" % frame.ident
            assert not os.get_inheritable(frame.fd)
            os.close(frame.fd)


def test_closing_also_closes_unsent_descriptors(ends: Ends) -> None:
    ours, _ = ends
    gc.collect()  # leftovers of other tests do not count
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("test")
    for _ in range(5):
        ours.queue(FrameKind.BLOB, 1, b"", fd=fd)
    os.close(fd)
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_sender_and_reader_learn_that_the_peer_is_gone(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        list(ours.receive())
    ours.queue(FrameKind.TASK, 1, b"x")
    with pytest.raises(ChannelClosed):
        ours.flush()
    with pytest.raises(ChannelClosed):
        ours.send(pack(FrameKind.TASK, 2, b"x"))


def test_frames_sent_before_the_peer_left_are_read_first(ends: Ends) -> None:
    ours, theirs = ends
    theirs.queue(FrameKind.SHUTDOWN)
    ours.queue(FrameKind.TASK, 1, b"never read")
    assert theirs.flush()
    ours.flush()
    theirs.close()
    assert [f.kind for f in ours.receive()] == [FrameKind.SHUTDOWN]


def test_queued_descriptors_are_sent_when_there_is_room_for_no_more() -> None:
    ours, theirs = map(Channel, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    fd = os.memfd_create("test")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)
    os.close(last)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 2, before[1]))  # room for two
    try:
        for ident in range(10):
            ours.queue(FrameKind.BLOB, ident, b"", fd=fd)
        assert ours.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(fd)
    got = transfer(ours, theirs)
    assert [(frame.ident, frame.fd >= 0) for frame in got] == [(ident, True) for ident in range(10)]
    for frame in got:
        os.close(frame.fd)
    ours.close()
    theirs.close()


def test_a_descriptor_that_exceeds_the_limit_is_missing_in_its_own_frame_only(ends: Ends) -> None:
    ours, theirs = ends
    fd = os.memfd_create("test")
    for ident in (1, 2):
        ours.queue(FrameKind.BLOB, ident, b"", fd=fd)
        ours.queue(FrameKind.TASK, 10 + ident)
    os.close(fd)
    assert ours.flush()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    last = os.dup(0)
    os.close(last)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, before[1]))
    try:
        got = transfer(ours, theirs)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [frame.ident for frame in got] == [1, 11, 2, 12]
    assert [frame.fd >= 0 for frame in got] == [True, False, False, False]
    os.close(got[0].fd)
