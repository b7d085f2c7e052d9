"""Nodes that a keeper watches: local ones by their socket, remote ones by the command that reaches them.

Nothing here blocks, so that no node delays the lease of another.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

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


class KeptNode(Protocol):
    """Node as the keeper sees it. Times are monotonic."""

    def fileno(self) -> int:
        """Return the descriptor to poll for input; -1: none."""
        ...

    def read(self, now: float) -> None:
        """Read input. Call it when `fileno` is readable."""
        ...

    def tick(self, now: float) -> float:
        """Renew the lease if it is time. Return when to call this again."""
        ...

    def end(self) -> None:
        """Request the node to end."""
        ...

    @property
    def has_ended(self) -> bool: ...

    def kill(self) -> None:
        """Kill whatever of the node is reachable from this machine, after its time to end is over."""
        ...

    def close(self) -> None:
        """Release the resources for the node, which goes on."""
        ...


def node_of(order: dict[str, Any]) -> KeptNode:
    """Create the node of a "watch" order.

    Raises:
        OSError: The node has ended already.
    """
    if order["channel"]:
        return RemoteNode(order["channel"], order["lease_s"])
    return LocalNode(order["socket"], order["folder"], order["pid"], order["lease_s"])


def _hello() -> bytes:
    hello = {"version": PROTOCOL_VERSION, "role": "keeper", "pool": "", "pid": os.getpid()}
    return pack(FrameKind.HELLO, body=json.dumps(hello).encode())


class LocalNode:
    """Node on this machine. If it does not answer, its own watchdog has to stop it."""

    def __init__(self, socket_path: str, folder: str, pid: int, lease_s: float) -> None:
        self._socket_path = socket_path
        self._folder = folder
        self._interval_s = lease_s / 4
        self._sock: socket.socket | None = None
        self._renewed = 0.0
        self._pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else os.open("/dev/null", os.O_RDONLY)

    def fileno(self) -> int:
        return -1

    def read(self, now: float) -> None:
        """Do nothing: a local node sends nothing that matters here."""

    def tick(self, now: float) -> float:
        if now >= self._renewed + self._interval_s:
            self._renewed = now
            self._send(FrameKind.LEASE)
        return self._renewed + self._interval_s

    def _send(self, kind: FrameKind) -> None:
        with contextlib.suppress(OSError):  # the agent is gone (`has_ended` will tell) or busy (retried next time)
            self._connected().send(pack(kind), socket.MSG_DONTWAIT)

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.connect(self._socket_path)
                sock.send(_hello())
            except OSError:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def end(self) -> None:
        self._send(FrameKind.SHUTDOWN)

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        if hasattr(signal, "pidfd_send_signal"):
            with contextlib.suppress(ProcessLookupError):  # the node has ended
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        import shutil  # only here: it imports every compression

        shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        os.close(self._pidfd)


class RemoteNode:
    """Node behind a command. A link that does not answer a PING in time is killed, and dialled again."""

    def __init__(self, argv: Sequence[str], lease_s: float) -> None:
        self._argv = tuple(argv)
        self._interval_s = min(lease_s / 4, _RENEW_S)
        self._dead_s = min(lease_s / 3, _DEAD_S)
        self._ends: CommandEnds | None = None
        self._failures = 0
        self._next_at = 0.0
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
        from .dialler import CommandEnds  # imported late: a keeper of local nodes starts faster without it

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

    def kill(self) -> None:
        """Close the link. A node that could not be reached ends with its lease."""
        self.close()

    def close(self) -> None:
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close()
