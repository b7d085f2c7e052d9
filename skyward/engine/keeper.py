"""The keeper: one small process beside the client that renews the leases of its nodes, and ends them when it dies.

It is not the client, so a client that holds its GIL for an hour keeps its nodes; and it watches the client by pidfd,
so a client that is killed loses them at once. It reaches a node as the client does: by its socket, or by a link of its
own that the machine's `channel` makes. It leads a session of its own: a Ctrl-C at the terminal and a kill of the
client's process group pass it by. The nodes' own watchdogs are behind it: without a sign of it for `lease_s` they end
by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from ..core.process import PACKAGE_ROOT
from ..values.machine import Machine

__all__ = ["Keeper"]

_END_LIMIT_S = 3.0
_REAP_LIMIT_S = 600.0
_RESTART_PAUSE_S = 0.5
_BOOT = """
import sys
sys.path[:] = sys.argv[3:]
from skyward.engine.keeper_process import main
main(int(sys.argv[1]), int(sys.argv[2]))
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
        self._guarded: dict[str, dict[str, Any]] = {}
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
            "key": _key(machine),
            "socket": machine.socket_path,
            "channel": machine.channel,
            "folder": machine.folder,
            "pid": machine.pid,
            "lease_s": machine.lease_s,
        }
        with self._lock:
            self._watched[_key(machine)] = order
            self._tell(order)

    def forget(self, machine: Machine) -> None:
        """The node was ended by its pool. The keeper ends with the last that it has to do."""
        with self._lock:
            if self._watched.pop(_key(machine), None) is not None:
                self._drop({"op": "forget", "key": _key(machine)})

    def guard(
        self, name: str, argv: Sequence[str], *, log_path: str = os.devnull, limit_s: float = _REAP_LIMIT_S
    ) -> None:
        """From now on the command is run when this process dies, behind the end of its nodes.

        Call it before anything is rented. `name` is the pool's; `log_path`: the file that what it prints is added to;
        `limit_s`: seconds after which it is killed. One that fails is tried again, twice.
        """
        order = {
            "op": "guard",
            "name": name,
            "argv": list(argv),
            "log_path": log_path,
            "cwd": _working_folder(),
            "env": dict(os.environ),  # of now: the keeper may be older than what names the account
            "limit_s": limit_s,
        }
        with self._lock:
            self._guarded[name] = order
            self._tell(order)

    def release(self, name: str) -> None:
        """All that was rented has been given back: there is nothing to run. Idempotent."""
        with self._lock:
            if self._guarded.pop(name, None) is not None:
                self._drop({"op": "release", "name": name})

    def _drop(self, order: dict[str, Any]) -> None:
        if self._process is None:
            return
        self._write(order)
        if not self._watched and not self._guarded:
            process, self._process = self._process, None
            assert process.stdin is not None
            # Closing the pipe would not do: a process that the client forked may hold its other end too.
            with contextlib.suppress(OSError):  # it has ended already
                process.stdin.write(b'{"op": "end"}\n')
                process.stdin.close()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:  # it watches over nothing any longer, so it may be killed
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
        with _file_in_memory() as first:  # whenever we die from here on, it has its orders
            for order in [*self._guarded.values(), *self._watched.values()]:
                first.write(json.dumps(order).encode() + b"\n")
            first.flush()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-S", "-E", "-s", "-c", _BOOT),
                    *(str(os.getpid()), str(first.fileno()), PACKAGE_ROOT, *sys.path),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[first.fileno()],
                cwd="/",
                start_new_session=True,
            )
        with contextlib.suppress(RuntimeError):  # no more threads: the next order sees whether it lives
            threading.Thread(target=self._restart, args=(self._process,), name="skyward-keeper", daemon=True).start()

    def _restart(self, process: subprocess.Popen[bytes]) -> None:
        """In a thread of its own: nodes end when nobody renews their leases, so it tries until there is a keeper."""
        process.wait()
        while True:
            try:
                with self._lock:
                    if self._process is process and (self._watched or self._guarded):
                        self._start()
                return
            except OSError:  # no descriptor, no process, no memory: perhaps in a moment
                time.sleep(_RESTART_PAUSE_S)


def _key(machine: Machine) -> str:
    """Two hosts may use the same path."""
    return "\0".join((machine.socket_path, *machine.channel))


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return "/"


def _file_in_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("skyward-keeper", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # it died with an order unread
        process.stdin.close()


def _let_go_in_child() -> None:
    """A fork of the client holds the keeper's input no longer than the client, which may end by becoming another
    program. The descriptor is replaced, not closed: its file object may be in use at the moment of the fork.
    """
    Keeper._instance_lock = threading.Lock()
    keeper = Keeper._instance
    if keeper is None or keeper._process is None or keeper._process.stdin is None:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, keeper._process.stdin.fileno(), inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
