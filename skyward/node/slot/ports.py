"""Rendezvous ports: outside the kernel's ephemeral range, and locked on this machine while in use."""

from __future__ import annotations

import fcntl
import os
import socket

from ...core.ownership import runtime_folder
from ...errors import RendezvousFailed, UsageError

PORTS = range(20_000, 30_000)
"""Rendezvous ports. Linux's ephemeral ports start at 32768 by default, so no client gets one of these by chance."""
_TRIES = 200
_FOLDER = "skyward-ports"
"""Folder of the lock files, below the temporary folder."""


def port_behind(port: int, steps: int) -> int:
    """Return the port `steps` behind `port`, wrapping around within the range of rendezvous ports.

    Frameworks that need one port per rank count from the gang's own, so that every rank knows all ports.
    """
    return PORTS[(port - PORTS.start + steps) % len(PORTS)]


class PortLocks:
    """Ports that this process holds. Lock files keep processes of one machine off each other's ports."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: dict[int, int] = {}

    def reserve(self) -> int:
        """Lock a free port and return it.

        Raises:
            RendezvousFailed: no port is free or can be locked; the message has the last reason.
        """
        import random  # only gangs need a port

        why = ""
        for _ in range(_TRIES):
            port = random.choice(PORTS)
            try:
                if not self._lock(port):
                    continue
                if self._is_free(port):
                    return port
            except (OSError, RendezvousFailed) as error:
                why = f" (last: {error})"
            self.release(port)
        raise RendezvousFailed(
            f"ports {PORTS[0]} to {PORTS[-1]}: none was free in {_TRIES} tries{why}; "
            "check which programs listen on this node"
        )

    def hold(self, port: int) -> None:
        """Lock this port until `release` or the end of the process.

        Raises:
            RendezvousFailed: another process holds it, or it cannot be locked. The gang then restarts on other ports.
        """
        if not self._lock(port):
            raise RendezvousFailed(
                f"port {port}: is locked by another gang on {self._address}; set max_restarts=1 for another port"
            )

    def _lock(self, port: int) -> bool:
        """Lock a port; return False if another process holds it."""
        fd = -1
        try:
            path = os.path.join(runtime_folder(_FOLDER), str(port))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except (OSError, UsageError) as error:
            # A full or read-only disk, no descriptors, or a hostile neighbour: only this gang fails.
            if fd >= 0:
                os.close(fd)
            raise RendezvousFailed(
                f"port {port}: cannot be locked on {self._address} ({error}); free disk space and descriptors there"
            ) from error
        self._held[port] = fd
        return True

    def _is_free(self, port: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._address, port))
            except OSError:  # in use
                return False
        return True

    def release(self, port: int) -> None:
        fd = self._held.pop(port, None)
        if fd is not None:
            # Keep the file: after an unlink, a process that already has it open would hold a lock nobody else sees.
            os.close(fd)

    def release_all(self) -> None:
        for port in list(self._held):
            self.release(port)
