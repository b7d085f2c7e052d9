"""Whether remote links live, and how long their nodes may be waited for.

A cut network says nothing: a link that has been silent is asked for a sign of life, and one that does not answer is
dead. A client that did not run (it held its GIL, it was stopped, its machine slept) has heard nothing either, so
before a link is given up it is looked at once more, with the time to answer that it did not have.
"""

from __future__ import annotations

import select
from dataclasses import dataclass

from .dialler import LINK_TIMES, LinkTimes
from .link import NodeLink

__all__ = ["Liveness"]


@dataclass(slots=True)
class _State:
    ping_s: float
    dead_s: float
    pinged_at: float
    asked_at: float | None = None
    """When the ping was sent that has had no answer."""


class Liveness:
    """Of one engine's remote links; used by its I/O thread, under its lock. Times are monotonic."""

    def __init__(self, times: LinkTimes = LINK_TIMES) -> None:
        self.times = times
        self._links: dict[NodeLink, _State] = {}
        self.interval_s: float | None = None
        """How often to call `check`; None: there is no remote link. It, and `is_due`, may be asked without the lock."""
        self._checked_at = 0.0

    def watch(self, link: NodeLink, lease_s: float, now: float) -> None:
        """From now on, until `forget`; its round trip is measured at once."""
        dead_s = min(self.times.dead_s, lease_s / 2)
        self._links[link] = _State(min(self.times.ping_s, dead_s / 4), dead_s, now)
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
        """(links that were pinged and are to be flushed, links that are dead)"""
        interval_s = self.interval_s or 0.0
        is_late = now - self._checked_at > 2 * interval_s
        self._checked_at = now
        pinged, dead = [], []
        for link, state in self._links.items():
            heard_at = link.channel.heard_at
            if state.asked_at is not None and (heard_at >= state.asked_at or _is_readable(link)):
                state.asked_at = None
            if state.asked_at is not None and is_late:
                state.asked_at = now
            elif state.asked_at is not None and now - state.asked_at >= state.dead_s - state.ping_s:
                dead.append(link)
                continue
            silent_s = now - heard_at
            if now - state.pinged_at >= (state.ping_s if silent_s >= state.ping_s else self.times.measure_s):
                state.pinged_at = now
                state.asked_at = state.asked_at or now
                link.channel.ping()
                pinged.append(link)
        return pinged, dead


def _is_readable(link: NodeLink) -> bool:
    poll = select.poll()
    poll.register(link.channel.fileno(), select.POLLIN)
    return bool(poll.poll(0))
