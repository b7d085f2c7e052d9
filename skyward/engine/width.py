"""Number of channels of a remote link: over a long distance, one ssh channel is slow however fast the network is.

OpenSSH allows 2 MiB in flight per channel and direction. With a round trip of 100 ms, that is 20 MB/s. So a distant
link that carries much data gets more channels of the same connection, and uses them in turn (`wire.ends.Stripes`).
Near links, and links that carry little, keep one channel.
"""

from __future__ import annotations

import logging
import math
from typing import Final

from ..errors import Unreachable
from ..wire.ends import CAN_STRIPE, Ends
from .ledger import Ledger
from .link import NodeLink, Readable
from .link_times import LINK_TIMES
from .task_dispatcher import TaskDispatcher
from .threads import in_words, start_thread

_log = logging.getLogger(__name__)

MOST_CHANNELS: Final = 6
"""Most channels of one link. sshd allows 10 sessions per connection (MaxSessions); the keeper and commands use some."""
_WINDOW: Final = 2 * 2**20
"""Bytes in flight per channel and direction. Source: CHAN_SES_WINDOW_DEFAULT of OpenSSH."""
_RATE: Final = 125e6
"""Target rate in bytes per second: 1 Gbit/s is worth a further process on each side."""
_MEASURED = 5
"""Pings to measure before a link counts as distant. Under load some pings of a near link wait long, but not all."""
_MUCH: Final = 2**20
"""Bytes that a link must have carried before it gets more channels."""


def channels_for(round_trip_s: float) -> int:
    """Return the number of channels that carry 1 Gbit/s with this round trip: 1 to `MOST_CHANNELS`."""
    return max(1, min(MOST_CHANNELS, math.ceil(round_trip_s * _RATE / _WINDOW)))


class Width:
    """Measurement of links, and more channels for those that need them. Call its methods with the ledger locked."""

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher

    def measured(self, link: Readable) -> None:
        """Record a round trip that the link's channel has measured."""
        link.pongs = link.channel.pongs
        round_trip_ns = (link.channel.round_trip_s + getattr(link, "start_delay_s", 0.0)) * 1e9
        self._dispatcher.perform(self._ledger.scheduler.set_round_trip(link.node, round_trip_ns))
        if not isinstance(link, NodeLink) or not link.may_widen or not CAN_STRIPE:
            return
        assert link.dialler is not None
        channel = link.dialler.channel
        link.stripes = channels_for(channel.round_trip_s)
        if link.stripes > 1 and channel.pongs < _MEASURED:
            channel.ping()
            self._ledger.dirty.add(link)
            return
        link.is_narrow = link.stripes > 1

    def consider(self, link: Readable) -> None:
        """Give a narrow link more channels once it has carried enough data."""
        assert isinstance(link, NodeLink)
        assert link.dialler is not None
        if link.dialler.channel.carried < _MUCH:
            return
        link.is_narrow = link.may_widen = False
        start_thread(
            lambda: self._widen(link),
            name="skyward-widen",
            failed=lambda error: _log.warning("node %d: could not open more channels: %s", link.node, in_words(error)),
        )

    def _widen(self, link: NodeLink) -> None:
        """Open more channels, in a separate thread. The link continues unchanged if that fails."""
        dialler = link.dialler
        assert dialler is not None
        channel, number = dialler.channel, dialler.link
        try:
            more: list[Ends] = dialler.widen(link.stripes, LINK_TIMES.dial_s)
        except Unreachable:  # the link keeps its one channel and its speed
            return
        # `reading` keeps readers out, because `StreamChannel.widen` must not run during a receive. It comes first, as
        # the lock order demands.
        with link.reading, self._ledger:
            is_there = self._ledger.is_open and self._ledger.links.get(link.node) is link and channel.is_attached
            if not is_there or dialler.link != number:  # the link broke meanwhile; the channels belong to the old one
                self._ledger.after.append(lambda: _close_each(more))
                return
            self._ledger.watcher.remove(link)
            try:
                channel.widen(more, turns=True)
            except OSError:  # no free descriptors for the epolls
                self._ledger.after.append(lambda: _close_each(more))
            link.follow()
            self._ledger.watcher.add(link)
            self._ledger.watcher.update(link)
            self._ledger.dirty.add(link)
        self._ledger.watcher.wake()


def _close_each(several: list[Ends]) -> None:
    for ends in several:
        ends.close()
