"""How many channels a remote link has: over a distance one of ssh is narrow, whatever the line could carry.

OpenSSH lets 2 MiB be on their way in each channel and direction, so one carries 20 MB/s where a round trip takes
100 ms. A link that is as long as that, once it carries much, gets some more channels of the same connection, and
uses them in turn (`wire.ends.Stripes`). Near ones, and those that carry little, stay as they are.
"""

from __future__ import annotations

import logging
import math
from typing import Final

from ..errors import Unreachable
from ..wire.ends import CAN_STRIPE, Ends
from ..wire.stream import StreamChannel
from .dialler import LINK_TIMES
from .ledger import Ledger
from .link import NodeLink, Readable
from .task_dispatcher import TaskDispatcher
from .threads import in_words, start_thread

__all__ = ["MOST_CHANNELS", "Width", "channels_for"]

_log = logging.getLogger(__name__)

MOST_CHANNELS: Final = 6
"""Of one link. sshd allows 10 sessions of a connection (MaxSessions); the keeper has one, commands have some."""
_WINDOW: Final = 2 * 2**20
"""Bytes that may be on their way in one channel and direction. Source: CHAN_SES_WINDOW_DEFAULT of OpenSSH."""
_RATE: Final = 125e6
"""Bytes per second that are worth a process on each side: 1 Gbit/s."""
_MEASURED = 5
"""Pings that tell how far a link is: under load a few of a near one wait long for a processor, but not all."""
_MUCH: Final = 2**20
"""Bytes that a link has carried before it gets more channels."""


def channels_for(round_trip_s: float) -> int:
    """Return how many channels carry 1 Gbit/s over this distance: 1 to `MOST_CHANNELS`."""
    return max(1, min(MOST_CHANNELS, math.ceil(round_trip_s * _RATE / _WINDOW)))


class Width:
    """Measure links, and give them more channels. Everything but its thread is called with the ledger locked."""

    def __init__(self, ledger: Ledger, dispatcher: TaskDispatcher) -> None:
        self._ledger = ledger
        self._dispatcher = dispatcher

    def measured(self, link: Readable) -> None:
        """Take note of a round trip that its channel has measured."""
        link.pongs = link.channel.pongs
        round_trip_ns = link.channel.round_trip_s * 1e9
        self._dispatcher.perform(self._ledger.scheduler.set_round_trip(link.node, round_trip_ns))
        if not isinstance(link, NodeLink) or not link.may_widen or not CAN_STRIPE:
            return
        assert isinstance(link.channel, StreamChannel)
        link.stripes = channels_for(link.channel.round_trip_s)
        if link.stripes > 1 and link.channel.pongs < _MEASURED:
            link.channel.ping()
            self._ledger.dirty.add(link)
            return
        link.is_narrow = link.stripes > 1

    def consider(self, link: Readable) -> None:
        """Give a narrow link more channels once it has carried enough data."""
        assert isinstance(link, NodeLink)
        assert isinstance(link.channel, StreamChannel)
        if link.channel.carried < _MUCH:
            return
        link.is_narrow = link.may_widen = False
        start_thread(
            lambda: self._widen(link),
            name="skyward-widen",
            failed=lambda error: _log.warning("node %d: its link stays narrow: %s", link.node, in_words(error)),
        )

    def _widen(self, link: NodeLink) -> None:
        """Open more channels, in a separate thread. The link goes on unchanged if none can be opened."""
        channel, dialler = link.channel, link.dialler
        assert isinstance(channel, StreamChannel)
        assert dialler is not None
        number = dialler.link
        try:
            more: list[Ends] = dialler.widen(link.stripes, LINK_TIMES.dial_s)
        except Unreachable:  # the link is as fast as it was
            return
        with link.reading, self._ledger:
            is_there = self._ledger.is_open and self._ledger.links.get(link.node) is link and channel.is_attached
            if not is_there or dialler.link != number:  # the link broke meanwhile
                self._ledger.after.append(lambda: _close_each(more))
                return
            self._ledger.watcher.remove(link)
            try:
                channel.widen(more, turns=True)
            except OSError:  # no descriptors are left
                self._ledger.after.append(lambda: _close_each(more))
            link.follow()
            self._ledger.watcher.add(link)
            self._ledger.watcher.update(link)
            self._ledger.dirty.add(link)
        self._ledger.watcher.wake()


def _close_each(several: list[Ends]) -> None:
    for ends in several:
        ends.close()
