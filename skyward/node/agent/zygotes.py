"""The agent's side of zygotes: one for each preload list, started when first needed, restarted when it dies."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Any

from ...wire.tasks import NodeConfig
from ..slot.zygote import ForkOrder, ZygoteConfig, send_order
from .loop import EventLoop

__all__ = ["Zygote"]

_PACKET = 1 << 20
_BOOT = """
import sys
sys.path[:] = sys.argv[2:]
from skyward.node.slot.zygote import main
main(int(sys.argv[1]))
"""


class Zygote:
    """A running zygote process.

    `on_event` gets what it says: `("forked", number, pid)`, `("exited", pid, status)`, `("failed", number, text)`,
    and `("gone",)` once, when the zygote itself has died.
    """

    def __init__(
        self,
        loop: EventLoop,
        node: NodeConfig,
        preload: tuple[str, ...],
        on_event: Callable[[Zygote, Any], None],
        *,
        is_for_ranks: bool,
    ) -> None:
        self._loop = loop
        self._on_event = on_event
        self.preload = preload
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(self._sock.close)
            self.process = subprocess.Popen(
                [node.python, "-c", _BOOT, str(theirs.fileno()), *node.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=node.cwd,
                env=dict(node.env),
                start_new_session=True,
            )
            undo.pop_all()
        self._sock.send(pickle.dumps(ZygoteConfig(path=node.path, preload=preload, is_for_ranks=is_for_ranks)))
        self._sock.setblocking(False)
        self._orders: deque[tuple[int, bytes, list[int]]] = deque()
        loop.watch(self._sock, self._read)

    def fork(self, order: ForkOrder, fds: list[int]) -> None:
        """Ask for a process; the descriptors may be closed when this returns."""
        self._orders.append((order.number, pickle.dumps(order), [os.dup(fd) for fd in fds]))
        self._send_orders()

    def _send_orders(self) -> None:
        """Those that the socket takes: a zygote that imports something for minutes does not read."""
        while self._orders:
            number, order, fds = self._orders[0]
            failed = ""
            try:
                send_order(self._sock, order, fds)
            except BlockingIOError:
                self._loop.watch(self._sock, self._read, self._send_orders)
                return
            except ConnectionError:  # it is gone, and `_read` will say so
                return
            except OSError as error:
                failed = f"{type(error).__name__}: {error}"
            self._orders.popleft()
            _close_all(fds)
            if failed:
                self._on_event(self, ("failed", number, failed))
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, self._read)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_PACKET)
        except BlockingIOError:  # nothing to read after all
            return
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
        for _, _, fds in self._orders:
            _close_all(fds)
        self._orders.clear()
        self.process.kill()
        self.process.wait()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):  # closed already
            os.close(fd)
