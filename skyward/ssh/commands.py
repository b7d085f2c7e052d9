"""Connection by a local command that runs a line of sh on a machine, such as `kubectl exec -i POD -- sh -c LINE`."""

from __future__ import annotations

import math
import socket
import subprocess
import threading
from collections.abc import Callable

from .connection import Connection, in_sh
from .target import SSHTarget


class CommandConnection(Connection):
    """Connection without a process that holds it: each command goes its own way.

    Args:
        name: Name of the machine, for messages.
        way: Returns the local command for a line of sh.
        by: Name of the way, for messages.
        dialled: Returns the line of sh whose input and output are a connection to a port there.
    """

    def __init__(
        self,
        name: str,
        way: Callable[[str], list[str]],
        *,
        by: str,
        dialled: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(_NoHolder(SSHTarget(host=name), way, dialled), "", by=by)
        self._way = way

    def argv(self, command: str) -> list[str]:
        """Return a local command line that runs `command` there; see `Connection.argv`."""
        return self._way(in_sh(command))


class _NoHolder:
    folder = ""

    def __init__(
        self, target: SSHTarget, way: Callable[[str], list[str]], dialled: Callable[[int], str] | None
    ) -> None:
        self.target = target
        self._way, self._dialled = way, dialled

    def ensure(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        """Do nothing: a command that does not get there says so."""

    def command(self, command: str) -> list[str]:
        return self._way(command)

    def dial(self, port: int) -> socket.socket:
        if self._dialled is None:
            raise ConnectionError(f"{self.target}: its ports cannot be reached from here; use its shell")
        ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                self._way(self._dialled(port)),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return ours

    def is_alive(self) -> bool:
        return True

    def end(self) -> None:
        """Do nothing: a command ends with its own process."""
