"""A head whose nodes are simulated, for `head.py`: the real process, which dials the sockets of `simulated_nodes.py`.

They stand for the sockets of Ray's driver, which carry the same frames.
"""

from __future__ import annotations

import socket
import sys

from skyward.engine.dialler import DialledEnds
from skyward.engine.head.main import main
from skyward.engine.head.node_ways import NodeWays
from skyward.values.machine import Machine


class SocketEnds(DialledEnds):
    """Connection to a simulated node, which never breaks."""

    def __init__(self, path: str) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
        fd = sock.detach()
        super().__init__(fd, fd)

    def said(self) -> str:
        return ""

    def exit_code(self, limit_s: float) -> int | None:
        return None

    def kill(self) -> None:
        self.close()


def _dial(self: NodeWays, machine: Machine) -> DialledEnds:
    return SocketEnds(f"{machine.socket_path}.streams")


if __name__ == "__main__":
    NodeWays._lend = _dial  # type: ignore[method-assign]  # in the place of channels that the client lends
    sys.exit(main())
