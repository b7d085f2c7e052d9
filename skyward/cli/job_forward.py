"""`skyward job forward`: a port of a running job's node on this machine's loopback."""

from __future__ import annotations

import argparse
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..state.live import LivePool

_LOOK_S = 1.0
_END_S = 5.0
_RELAY = """
import os, socket, sys, threading
try:
    port = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
except OSError as error:
    sys.exit(f"port {sys.argv[1]} of the node: {error.strerror or error}")
def up():
    try:
        while piece := os.read(0, 65536):
            port.sendall(piece)
        port.shutdown(socket.SHUT_WR)
    except OSError:
        pass
threading.Thread(target=up, daemon=True).start()
with open(1, "wb", buffering=0, closefd=False) as out:
    while piece := port.recv(65536):
        while piece:
            piece = piece[out.write(piece):]
"""
"""Program on the node that connects its standard input and output to a port there. Each connection has its own."""


def run(arguments: argparse.Namespace) -> int:
    """Forward the port until Ctrl-C, or until the job's machines are gone."""
    from ..hub.client.jobs import job_row
    from ..pool.forwarding import ForwardedPort, check_port

    pool = pool_of(job_row(arguments.id), "forward a port")
    remote = check_port("port", arguments.port)
    local = None if arguments.local is None else check_port("local", arguments.local)
    dialer = Dialer(pool, arguments.node)
    with ForwardedPort(dialer.dial, remote, local, lambda _: dialer.close()) as port:
        print(f"{port.url} is port {remote} of node {arguments.node} of job {arguments.id}; Ctrl-C ends it", flush=True)
        while is_open(pool):
            time.sleep(_LOOK_S)
    print(f"job {arguments.id}: has no machines anymore")
    return 0


def pool_of(row: dict[str, Any], wish: str) -> LivePool:
    """Return the open pool of a running job.

    Args:
        row: The job, as the hub shows it.
        wish: Verb phrase of the user's wish, for errors.

    Raises:
        UsageError: The job does not run, or its pool is one of another machine or user.
    """
    from ..errors import UsageError
    from ..state.live import find

    running = [attempt for attempt in row["attempts"] if attempt["began_at"] and not attempt["ended_at"]]
    if not running:
        raise UsageError(f"job={row['id']}: is {row['status']} and has no machines; {wish} while it runs")
    try:
        return find(running[-1]["pool"])
    except UsageError:
        raise UsageError(
            f"job={row['id']}: its machines are reached only from the machine of its launcher, by the launcher's user; "
            f"{wish} there"
        ) from None


def is_open(pool: LivePool) -> bool:
    """Return whether a pool is still open."""
    from ..state.live import live_pools

    return any(one.pool == pool.pool and one.is_alive for one in live_pools())


class Dialer:
    """Connections to ports of a node: direct for a node on this machine, and otherwise by its login.

    Args:
        pool: The open pool.
        node: Number of the node.

    Raises:
        UsageError: The pool has no such node, or skyward cannot log in to it.
    """

    def __init__(self, pool: LivePool, node: int) -> None:
        from .shell import terminal_of

        is_here = pool.provider == "local" and any(one.node == node for one in pool.nodes)
        self._login = [] if is_here else terminal_of(pool, node)
        self._lock = threading.Lock()
        self._relays: list[subprocess.Popen[bytes]] = []
        self._is_closed = False

    def dial(self, port: int) -> socket.socket:
        """Return a connection to a port of the node."""
        import shlex

        if not self._login:
            return socket.create_connection(("127.0.0.1", port))
        near, far = socket.socketpair()
        with far:
            argv = [*self._login, shlex.join(["python3", "-c", _RELAY, str(port)])]
            relay = subprocess.Popen(argv, stdin=far.fileno(), stdout=far.fileno(), start_new_session=True)
        with self._lock:
            self._relays = [one for one in self._relays if one.poll() is None] + [relay]
            if self._is_closed:
                relay.terminate()
        return near

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            self._is_closed = True
            relays, self._relays = self._relays, []
        for relay in relays:
            relay.terminate()
        for relay in relays:
            try:
                relay.wait(_END_S)
            except subprocess.TimeoutExpired:
                relay.kill()
                relay.wait()
