"""PINGs: they find dead links, and renew the leases of nodes."""

from __future__ import annotations

import contextlib
import itertools
import socket

from skyward.engine.link import NodeLink
from skyward.engine.liveness import Liveness
from skyward.wire.ends import Ends
from skyward.wire.stream import StreamChannel


def test_a_busy_link_is_pinged_four_times_within_a_lease() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        fd = ours.detach()
        channel = StreamChannel(checks_blobs=False)
        channel.attach(Ends(fd, fd), 0)
        link = NodeLink(0, channel, {})
        liveness = Liveness()
        liveness.watch(link, 8.0, 0.0)
        interval_s = liveness.interval_s
        assert interval_s is not None
        pinged_at, now = [0.0], 0.0
        while now < 32.0:
            now += interval_s / 2
            channel.heard_at = now  # it is busy
            pinged, dead = liveness.check(now)
            assert not dead
            pinged_at += [now] * len(pinged)
        gaps = [later - earlier for earlier, later in itertools.pairwise(pinged_at)]
        assert max(gaps) <= 8.0 / 4
        ends = channel.release()
        assert ends is not None
        ends.close()


def test_pings_renew_no_lease_while_the_owner_of_the_nodes_is_silent() -> None:
    """A head whose client is away looks after its links, but its nodes end as if it was not there."""
    ours, theirs = socket.socketpair()
    agent, channel = StreamChannel(checks_blobs=False), StreamChannel(checks_blobs=False)
    agent.attach(Ends(theirs.fileno(), theirs.fileno()), 0)
    channel.attach(Ends(ours.fileno(), ours.fileno()), 0)
    liveness, heard_at, renewed = Liveness(), 20.0, list[float]()
    liveness.was_heard = lambda since: heard_at >= since
    liveness.watch(NodeLink(0, channel, {}), 60.0, 0.0)
    for now in range(1, 60):
        before, channel.heard_at = agent.pings, float(now)
        assert liveness.check(float(now))[1] == []
        channel.flush()
        with contextlib.suppress(BlockingIOError):
            list(agent.receive())
        renewed += [now] * (agent.pings > before)
    assert renewed[0] <= 5.0
    assert 20.0 <= renewed[-1] <= 25.0
    for sock in (ours, theirs):
        sock.close()
