"""The keeper's own process; see keeper. It imports as little as it can: it lives as long as the client's pools."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from ..wire.frames import PROTOCOL_VERSION, Kind, pack

__all__ = ["main"]

_END_LIMIT_S = 6.0
"""Seconds a node gets to end by itself when the client died; then its watchdog is killed, and all with it."""


@dataclass
class _Node:
    socket_path: str
    folder: str
    lease_s: float
    pidfd: int
    sock: socket.socket | None = None
    renewed: float = field(default=0.0)

    def renew(self) -> None:
        """Send a sign of life if it is time. A node that does not answer is left to its own watchdog."""
        now = time.monotonic()
        if now - self.renewed < self.lease_s / 4:
            return
        self.renewed = now
        with contextlib.suppress(OSError):
            self._connected().send(pack(Kind.LEASE), socket.MSG_DONTWAIT)

    def _connected(self) -> socket.socket:
        if self.sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(2)
                sock.connect(self.socket_path)
                hello = {"version": PROTOCOL_VERSION, "role": "keeper", "pool": "", "pid": os.getpid()}
                sock.sendall(pack(Kind.HELLO, body=json.dumps(hello).encode()))
            except OSError:
                sock.close()
                raise
            self.sock = sock
        return self.sock

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._connected().send(pack(Kind.SHUTDOWN), socket.MSG_DONTWAIT)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
        os.close(self.pidfd)


def main(client: int) -> None:
    """Until the client dies, or says that its last pool is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nodes: dict[str, _Node] = {}
    client_fd = _pidfd(client)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if client_fd >= 0:
        poll.register(client_fd, select.POLLIN)
    rest = b""
    while True:
        wait_s = min((node.lease_s / 4 for node in nodes.values()), default=1.0)
        ready = {fd for fd, _ in poll.poll(min(wait_s, 1.0) * 1000)}
        if 0 in ready:
            piece = os.read(0, 65536)
            *lines, rest = (rest + piece).split(b"\n")
            orders = [json.loads(line) for line in lines]
            for order in orders:
                _obey(order, nodes)
            if not piece or any(order["op"] == "end" for order in orders):
                break
        if client_fd in ready or (client_fd < 0 and os.getppid() != client):
            break
        for node in nodes.values():
            node.renew()
    _end_all(list(nodes.values()))


def _pidfd(pid: int) -> int:
    if not hasattr(os, "pidfd_open"):  # macOS: the parent's number tells
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # it died already; the orders it left are still obeyed, and then its nodes ended
        return -1


def _obey(order: dict[str, Any], nodes: dict[str, _Node]) -> None:
    if order["op"] == "end":
        return
    path = order["socket"]
    if order["op"] == "forget":
        node = nodes.pop(path, None)
        if node is not None:
            node.close()
        return
    with contextlib.suppress(OSError):  # it has ended already
        pidfd = os.pidfd_open(order["pid"]) if hasattr(os, "pidfd_open") else os.open("/dev/null", os.O_RDONLY)
        nodes[path] = _Node(path, order["folder"], order["lease_s"], pidfd)
        nodes[path].renew()


def _end_all(nodes: list[_Node]) -> None:
    for node in nodes:
        node.end()
    deadline = time.monotonic() + _END_LIMIT_S
    for node in nodes:
        if not _has_ended(node, deadline) and hasattr(signal, "pidfd_send_signal"):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(node.pidfd, signal.SIGKILL)
        shutil.rmtree(node.folder, ignore_errors=True)


def _has_ended(node: _Node, deadline: float) -> bool:
    poll = select.poll()
    poll.register(node.pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
