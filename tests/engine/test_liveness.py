"""PINGs: they find dead links, and renew the leases of nodes."""

from __future__ import annotations

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
