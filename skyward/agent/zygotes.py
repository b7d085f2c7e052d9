"""The agent's side of zygotes: one for each preload list, started when first needed, restarted when it dies."""

from __future__ import annotations

import pickle
import socket
import subprocess
from collections.abc import Callable
from typing import Any

from ..slot.zygote import ForkOrder, ZygoteConfig
from ..wire.tasks import NodeConfig
from .loop import Loop

__all__ = ["Zygote"]

_PACKET = 1 << 20
_BOOT = """
import sys
sys.path[:] = sys.argv[2:]
from skyward.slot.zygote import main
main(int(sys.argv[1]))
"""


class Zygote:
    """A running zygote process.

    `on_event` gets what it says: `("forked", number, pid)`, `("exited", pid, status)`, `("failed", number, text)`,
    and `("gone",)` once, when the zygote itself has died.
    """

    def __init__(
        self, loop: Loop, node: NodeConfig, preload: tuple[str, ...], on_event: Callable[[Zygote, Any], None]
    ) -> None:
        self._loop = loop
        self._on_event = on_event
        self.preload = preload
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [node.python, "-c", _BOOT, str(theirs.fileno()), *node.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=node.cwd,
                env=dict(node.env),
                start_new_session=True,
            )
        self._sock.send(pickle.dumps(ZygoteConfig(path=node.path, preload=preload)))
        loop.watch(self._sock, self._read)

    def fork(self, order: ForkOrder, fds: list[int]) -> None:
        """Ask for a process; the descriptors may be closed when this returns."""
        socket.send_fds(self._sock, [pickle.dumps(order)], fds)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_PACKET)
        except ConnectionError:
            data = b""
        if data:
            self._on_event(self, pickle.loads(data))
            return
        self.close()
        self._on_event(self, ("gone",))

    def close(self) -> None:
        """End it; its children end with it."""
        if self._sock.fileno() < 0:
            return
        self._loop.forget(self._sock)
        self._sock.close()
        self.process.kill()
        self.process.wait()
