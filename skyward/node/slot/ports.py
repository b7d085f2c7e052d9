"""Rendezvous ports: outside the range that the kernel gives to clients, and locked on this machine while in use."""

from __future__ import annotations

import fcntl
import os
import random
import socket

from ...core.ownership import runtime_folder
from ...errors import RendezvousFailed, UsageError

__all__ = ["PortLocks", "port_behind"]

_FIRST, _LAST = 20_000, 29_999
"""Below 32768, where Linux's ephemeral ports begin by default: no client of anybody's gets one of these by chance."""
_TRIES = 200
_FOLDER = "skyward-ports"
"""Of the lock files, below the temporary folder."""


def port_behind(port: int, steps: int) -> int:
    """The port that lies `steps` behind `port`, in the range of rendezvous ports and around its end. A framework that
    needs a port for each rank counts them from the gang's own, so that every rank knows all of them.
    """
    return _FIRST + (port - _FIRST + steps) % (_LAST - _FIRST + 1)


class PortLocks:
    """The ports this process holds. The lock file makes processes of one machine avoid each other's."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: dict[int, int] = {}

    def reserve(self) -> int:
        """Lock a free port and return it.

        Raises:
            RendezvousFailed: none is free, or no lock can be made, and why.
        """
        why = ""
        for _ in range(_TRIES):
            port = random.randint(_FIRST, _LAST)
            try:
                if not self._lock(port):
                    continue
                if self._is_free(port):
                    return port
            except (OSError, RendezvousFailed) as error:
                why = f"; the last try: {error}"
            self.release(port)
        raise RendezvousFailed(f"no free port between {_FIRST} and {_LAST} after {_TRIES} tries{why}")

    def hold(self, port: int) -> None:
        """Lock this very port until `release` or the end of the process.

        Raises:
            RendezvousFailed: another process holds it, or the lock cannot be made. The gang is then started on other
                ports.
        """
        if not self._lock(port):
            raise RendezvousFailed(f"port {port} of {self._address} is held for another gang")

    def _lock(self, port: int) -> bool:
        """False: another process has it."""
        fd = -1
        try:
            path = os.path.join(runtime_folder(_FOLDER), str(port))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except (OSError, UsageError) as error:
            # Full or read-only disks, no descriptors, a hostile neighbour: this gang cannot meet, others may go on.
            if fd >= 0:
                os.close(fd)
            raise RendezvousFailed(f"port {port} of {self._address} cannot be locked: {error}") from error
        self._held[port] = fd
        return True

    def _is_free(self, port: int) -> bool:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._address, port))
            except OSError:  # taken
                return False
        return True

    def release(self, port: int) -> None:
        fd = self._held.pop(port, None)
        if fd is not None:
            # The file stays: who opened it before an unlink would hold a lock that nobody else sees.
            os.close(fd)

    def release_all(self) -> None:
        for port in list(self._held):
            self.release(port)
