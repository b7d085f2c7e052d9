"""Times for links to nodes."""

from __future__ import annotations

from ..core.records import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkTimes:
    """Times for links in seconds. A short lease shortens `ping_s` and `dead_s`."""

    ping_s: float = 2.0
    """Silence after which a link gets a PING."""
    dead_s: float = 8.0
    """Silence after which a link is dead."""
    measure_s: float = 5.0
    """Interval of round-trip measurements on a busy link."""
    dial_s: float = 20.0
    """Timeout of one attempt to reach a node."""
    backoff_s: float = 0.1
    """Pause before the second attempt. It doubles with each further one, up to `most_backoff_s`."""
    most_backoff_s: float = 5.0
    margin_s: float = 2.0
    """Time beyond the lease until a node counts as lost, for its watchdog's reaction and for clocks that drift."""


LINK_TIMES = LinkTimes()
