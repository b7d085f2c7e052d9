"""Nodes on other machines that a keeper watches, each by the command that reaches it.

Nothing here blocks, so that no node delays the lease of another.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import Unreachable
from ..wire.frames import PROTOCOL_VERSION, FrameKind, pack

if TYPE_CHECKING:
    from .dialler import CommandEnds

_RENEW_S = 15.0
"""Longest time in seconds between two renewals. Short leases need more of them."""
_DEAD_S = 8.0
_DIAL_S = 30.0
"""Timeout in seconds of a command that has to reach its node."""
_BACKOFF_S = 0.25, 5.0


class RemoteNode:
    """Node behind a command. A link that does not answer a PING in time is killed, and dialled again.

    Args:
        argv: The command.
        lease_s: Lease of the node in seconds.
        is_fresh: Whether the lease begins now. The first link waits then: it would delay the first call of the client.
    """

    def __init__(self, argv: Sequence[str], lease_s: float, *, is_fresh: bool = False) -> None:
        self._argv = tuple(argv)
        self._interval_s = min(lease_s / 4, _RENEW_S)
        self._dead_s = min(lease_s / 3, _DEAD_S)
        self._ends: CommandEnds | None = None
        self._failures = 0
        self._next_at = time.monotonic() + self._interval_s if is_fresh else 0.0
        self._asked_at: float | None = None
        """Time since which the link owes an answer; None: it owes none."""
        self._has_spoken = False
        self._is_ending = False
        self.has_ended = False

    def fileno(self) -> int:
        return -1 if self._ends is None else self._ends.read_fd

    def read(self, now: float) -> None:
        if self._ends is None:
            return
        try:
            data = os.read(self._ends.read_fd, 65536)
        except BlockingIOError:  # nothing to read
            return
        except OSError:  # treat a broken link like one that ended
            data = b""
        if data:
            self._asked_at = None
            self._has_spoken = True
            self._failures = 0
        else:
            # The agent answers SHUTDOWN by ending the stream. A link that never reached the agent ends in the same way,
            # so the end counts only if the agent has answered on this link before.
            self.has_ended = self._is_ending and self._has_spoken
            self._drop(now)

    def tick(self, now: float) -> float:
        if self._ends is not None and self._asked_at is not None:
            dead_at = self._asked_at + (self._dead_s if self._has_spoken else _DIAL_S)
            if now >= dead_at:
                self._drop(now)
        if now >= self._next_at:
            if self._ends is None:
                self._dial(now)
            else:
                self._send(pack(FrameKind.LEASE), now)
        if self._asked_at is None:
            return self._next_at
        return min(self._next_at, self._asked_at + (self._dead_s if self._has_spoken else _DIAL_S))

    def forgive(self, now: float) -> None:
        """Ignore the silence so far, because this process did not run and could not read."""
        if self._asked_at is not None:
            self._asked_at = now

    def _dial(self, now: float) -> None:
        from .dialler import CommandEnds  # imported late: the keeper reads its other orders sooner

        try:
            self._ends = CommandEnds(self._argv)
        except (Unreachable, OSError):  # retried after a pause, until the client forgets the node
            self._back_off(now)
            return
        self._has_spoken = False
        self._send(_hello() + pack(FrameKind.SHUTDOWN if self._is_ending else FrameKind.LEASE), now)

    def _send(self, frames: bytes, now: float) -> None:
        """Send frames and a PING. If the socket is full, the node has not read for long, so drop the link."""
        assert self._ends is not None
        self._next_at = now + self._interval_s
        if self._asked_at is None:
            self._asked_at = now
        frames += pack(FrameKind.PING)
        try:
            if os.write(self._ends.write_fd, frames) < len(frames):
                self._drop(now)
        except OSError:  # the link broke, and `tick` dials again
            self._drop(now)

    def _drop(self, now: float) -> None:
        ends, self._ends = self._ends, None
        self._asked_at = None
        if ends is not None:
            ends.close()
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        first_s, most_s = _BACKOFF_S
        self._next_at = now + min(most_s, first_s * 2 ** min(self._failures, 10))
        self._failures += 1

    def end(self) -> None:
        self._is_ending = True
        now = time.monotonic()
        if self._ends is None:
            self._dial(now)
        else:
            self._send(pack(FrameKind.SHUTDOWN), now)

    def close(self) -> None:
        """Close the link. A node that could not be reached ends with its lease."""
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close()


def _hello() -> bytes:
    """Return the first frame of a keeper's link."""
    body = {"version": PROTOCOL_VERSION, "role": "keeper", "pool": "", "pid": os.getpid()}
    return pack(FrameKind.HELLO, body=json.dumps(body).encode())
