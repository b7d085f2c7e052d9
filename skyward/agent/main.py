"""Entry of an agent: it reads its NodeConfig from standard input, listens on a socket in its folder, says so.

    python -c "...main()" < pickled NodeConfig

The socket is in a folder that only this user can enter. Standard output gets one line, the path of the socket, once
it can be connected to.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys

from ..wire.tasks import NodeConfig
from .agent import Agent
from .watchdog import Lease, guard

__all__ = ["SOCKET_NAME", "main"]

SOCKET_NAME = "agent.sock"


def main() -> int:
    config: NodeConfig = pickle.loads(sys.stdin.buffer.read())
    os.makedirs(config.folder, mode=0o700, exist_ok=True)
    path = os.path.join(config.folder, SOCKET_NAME)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_mask = os.umask(0o177)
    listener.bind(path)
    os.umask(old_mask)
    listener.listen(8)
    listener.setblocking(False)
    print(path, flush=True)
    lease = Lease(config.lease_s)
    return guard(lambda: Agent(config, lease, listener).run(), lease, config.folder)
