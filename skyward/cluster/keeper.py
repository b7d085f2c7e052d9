"""The keeper: one small process beside the client that renews the leases of its nodes, and ends them when it dies.

It is not the client, so a client that holds its GIL for an hour keeps its nodes; and it watches the client by pidfd,
so a client that is killed loses them at once. It leads a session of its own: a Ctrl-C at the terminal and a kill of
the client's process group pass it by. The nodes' own watchdogs are behind it: without a sign of it for `lease_s`
they end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import Any

from ..machine import Machine

__all__ = ["Keeper"]

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_END_LIMIT_S = 3.0
_BOOT = """
import sys
sys.path[:] = sys.argv[2:]
from skyward.cluster.keeper_process import main
main(int(sys.argv[1]))
"""


class Keeper:
    """The client's handle of its keeper process; one for each client process, started with the first pool.

    Thread-safe. A keeper that dies is started again.
    """

    _instance: Keeper | None = None
    _instance_lock = threading.Lock()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[str, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    @classmethod
    def of_this_process(cls) -> Keeper:
        with cls._instance_lock:
            if cls._instance is None or cls._instance._owner != os.getpid():
                cls._instance = Keeper()
            return cls._instance

    def watch(self, machine: Machine) -> None:
        """From now on the node's lease is renewed, and the node ended when this process dies."""
        order = {
            "op": "watch",
            "socket": machine.socket_path,
            "folder": machine.folder,
            "pid": machine.pid,
            "lease_s": machine.lease_s,
        }
        with self._lock:
            self._watched[machine.socket_path] = order
            self._tell(order)

    def forget(self, machine: Machine) -> None:
        """The node was ended by its pool. The keeper ends with its last node."""
        with self._lock:
            if self._watched.pop(machine.socket_path, None) is None:
                return
            if self._process is not None:
                self._write({"op": "forget", "socket": machine.socket_path})
            if not self._watched and self._process is not None:
                process, self._process = self._process, None
                assert process.stdin is not None
                # Closing the pipe would not do: a process that the client forked may hold its other end too.
                with contextlib.suppress(OSError):
                    process.stdin.write(b'{"op": "end"}\n')
                    process.stdin.close()
                try:
                    process.wait(_END_LIMIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def _tell(self, order: dict[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
            return  # `_start` tells it everything
        self._write(order)

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it died: the next order, or `_restart`, starts another
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        if self._process is not None:
            _close_input(self._process)
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-s", "-c", _BOOT, str(os.getpid()), _PACKAGE_ROOT, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        for order in self._watched.values():
            self._write(order)
        threading.Thread(target=self._restart, args=(self._process,), name="skyward-keeper", daemon=True).start()

    def _restart(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._lock:
            if self._process is process and self._watched:
                self._start()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it died with an order unread
        process.stdin.close()
