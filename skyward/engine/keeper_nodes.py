"""Nodes that a keeper watches, and those of this machine, which it reaches by their sockets.

Nothing here blocks, so that no node delays the lease of another. Nothing here imports `typing`, the frames or the
errors: they would take a sixth of the keeper's memory. So the client packs the frames for a local node.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

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

        def forgive(self, now: float) -> None:
            """Ignore the silence so far, because this process did not run and could not read."""
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
        from .keeper_links import RemoteNode  # here, because it takes memory

        return RemoteNode(order["channel"], order["lease_s"])
    frames = {name: text.encode("latin-1") for name, text in order["frames"].items()}
    return LocalNode(order["socket"], order["folder"], order["pid"], order["lease_s"], frames)


class LocalNode:
    """Node on this machine. If it does not answer, its own watchdog has to stop it.

    `frames` are the frames that it needs, by name: "hello", "lease" and "shutdown".
    """

    def __init__(self, socket_path: str, folder: str, pid: int, lease_s: float, frames: dict[str, bytes]) -> None:
        self._frames = frames
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
            self._send("lease")
        return self._renewed + self._interval_s

    def _send(self, frame: str) -> None:
        with contextlib.suppress(OSError):  # the agent is gone (`has_ended` will tell) or busy (retried next time)
            self._connected().send(self._frames[frame], socket.MSG_DONTWAIT)

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                sock.connect(self._socket_path)
                sock.send(self._frames["hello"])
            except OSError:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def forgive(self, now: float) -> None:
        """Do nothing: a local node is not expected to answer."""

    def end(self) -> None:
        self._send("shutdown")

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
