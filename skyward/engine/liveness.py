"""Detection of dead remote links.

A cut network reports nothing. So a link that has been silent for `ping_s` gets a PING, and one that stays silent for
`dead_s` counts as dead.

The client itself may have paused: it held its GIL, was stopped, or its machine slept. Then it has heard nothing either,
although the links are fine. So a late check declares no link dead. It looks for unread input and gives each link the
full time to answer again.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from ..core.records import dataclass
from .link import NodeLink
from .link_times import LINK_TIMES, LinkTimes


@dataclass(slots=True)
class _State:
    ping_s: float
    dead_s: float
    measure_s: float
    pinged_at: float
    renewed_at: float
    """Time of the last PING that renews the lease."""
    asked_at: float | None = None
    """Time of the oldest PING without an answer; None: there is none."""


class Liveness:
    """Detector for one engine's remote links, used by its I/O thread under the ledger's lock. Times are monotonic."""

    def __init__(self, times: LinkTimes = LINK_TIMES) -> None:
        self.times = times
        self._links: dict[NodeLink, _State] = {}
        self.interval_s: float | None = None
        """Interval of `check` in seconds; None: there is no remote link. Readable without the lock, as is `is_due`."""
        self._checked_at = 0.0
        self.was_heard: Callable[[float], bool] = lambda since: True
        """Returns whether the owner of the nodes was heard since a time (monotonic). Otherwise PINGs renew no lease, or
        nodes would outlive it by the lease of whoever pings them. A head sets it."""

    def watch(self, link: NodeLink, lease_s: float, now: float) -> None:
        """Check a link from now on, until `forget`, and measure its round trip at once."""
        dead_s = min(self.times.dead_s, lease_s / 2)
        # A PING renews the lease, and on a busy link nothing else does.
        measure_s = min(self.times.measure_s, lease_s / 4)
        self._links[link] = _State(min(self.times.ping_s, dead_s / 4), dead_s, measure_s, now, now)
        link.channel.ping()
        self._set_interval()

    def forget(self, link: NodeLink) -> None:
        self._links.pop(link, None)
        self._set_interval()

    def _set_interval(self) -> None:
        self.interval_s = min((state.ping_s for state in self._links.values()), default=None)

    def is_due(self, now: float) -> bool:
        interval_s = self.interval_s
        return interval_s is not None and now - self._checked_at >= interval_s / 2

    def check(self, now: float) -> tuple[list[NodeLink], list[NodeLink]]:
        """Ping silent links. Return the links that were pinged and need a flush, and the links that are dead."""
        interval_s = self.interval_s or 0.0
        # This process did not run for a while, so the silence may be its own.
        is_late = now - self._checked_at > 2 * interval_s
        self._checked_at = now
        pinged, dead = [], []
        for link, state in self._links.items():
            heard_at = link.channel.heard_at
            # Unread input is a sign of life too: the answer may be there, but nobody has had the time to read it.
            if state.asked_at is not None and (heard_at >= state.asked_at or _is_readable(link)):
                state.asked_at = None
            if state.asked_at is not None and is_late:
                state.asked_at = now
            elif state.asked_at is not None and now - state.asked_at >= state.dead_s - state.ping_s:
                dead.append(link)
                continue
            silent_s = now - heard_at
            if now - state.pinged_at >= (state.ping_s if silent_s >= state.ping_s else state.measure_s):
                state.pinged_at = now
                state.asked_at = state.asked_at or now
                renews = self.was_heard(state.renewed_at)
                if renews:
                    state.renewed_at = now
                link.channel.ping(renews=renews)
                pinged.append(link)
        return pinged, dead


def _is_readable(link: NodeLink) -> bool:
    poll = select.poll()
    poll.register(link.channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))
