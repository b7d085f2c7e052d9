"""The way of a client from a head that was killed to the process that goes on for it.

The session goes on, but its link is new: the new process has none of the former's counts, functions or blobs.
So everything that a channel would repeat is either told again here, or is lost with the head, and whoever waits for it
gets an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from ..errors import NodeLost
from .dialler import Dialler
from .head.requests import Requests
from .head_link import HeadLink, HeadRepair
from .hosted_calls import HostedCalls
from .hosted_frames import HostedFrames
from .hosted_parts import HostedChannels
from .hosted_values import HostedValues
from .ledger import Ledger
from .link_times import LINK_TIMES

_log = logging.getLogger(__name__)


class _Linked(Protocol):
    """Part of the engine that sends frames."""

    link: HeadLink | None


class NextHead:
    """Successor of a killed head.

    Args:
        ledger: Shared state of the client's engine.
        requests: Requests to the head.
        repair: Watches the link.
        calls: Open calls.
        frames: Handlers of the head's frames.
        values: References to values that stay on nodes.
        channels: Channels that tasks have opened.
        linked: All parts that send frames.
        dialler: Returns a dialler that continues the session.
        told: Tells the head what this client wants to hear.
        lost: Called with the reason if it cannot go on.
    """

    def __init__(
        self,
        ledger: Ledger,
        requests: Requests,
        repair: HeadRepair,
        *,
        calls: HostedCalls,
        frames: HostedFrames,
        values: HostedValues,
        channels: HostedChannels,
        linked: Iterable[_Linked],
        dialler: Callable[[], Dialler],
        told: Callable[[], object],
        lost: Callable[[str], object],
    ) -> None:
        self._ledger = ledger
        self._requests = requests
        self._repair = repair
        self._calls = calls
        self._frames = frames
        self._values = values
        self._channels = channels
        self._linked = tuple(linked)
        self._dialler = dialler
        self._told = told
        self._lost = lost

    def go_on(self, before: HeadLink, deadline: float) -> None:
        """Dial the next head until `deadline` (monotonic), and go on there. Raises the errors of `Dialler.dial`."""
        dialler = self._dialler()
        ends, facts = dialler.dial_until(deadline, LINK_TIMES)
        with self._ledger:
            if not self._ledger.is_open:
                self._ledger.after.append(ends.close)
                return
            dialler.channel.attach(ends, facts["received"])
            link = HeadLink(facts, dialler)
            link.named_by = self._values.named
            for part in self._linked:
                part.link = link
            error = _lost_with_head()
            self._calls.end_again(before, link)
            self._requests.ask_again(error)
            self._calls.go_on(link, lambda failure: self._lost(f"it cannot go on: {failure}"))
            self._frames.forget_pieces()
            self._values.lose(error)
            self._channels.end_open("the head of the pool was killed")
            self._told()
            self._repair.watch(link)
        before.close()
        self._ledger.watcher.wake()
        _log.warning("head of the pool: was killed and has begun again; calls go on")


def _lost_with_head() -> NodeLost:
    return NodeLost(
        "head of the pool: was killed before it answered; actors, channels and values that stay on nodes are lost with "
        "it",
        node=0,
    )
