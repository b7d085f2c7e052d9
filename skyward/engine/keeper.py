"""Keeper: a small process beside the client that renews the leases of its nodes and stops them when the client dies.

It is a process of its own, so a client that holds its GIL for an hour keeps its nodes. It watches the client by pidfd,
so the nodes of a killed client stop at once. It reaches a node as the client does, by a separate link through the
machine's `channel`. Nodes on its own machine watch the client themselves. The keeper leads its own session, so neither
Ctrl-C at the terminal nor a kill of the client's process group reaches it. If the keeper dies too, the watchdogs of the
nodes stop them after `lease_s`.

The client keeps all orders in tables (`_watched`, `_guarded`). A keeper that died is replaced, and the new one gets the
whole tables, so no order depends on which keeper received it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, Any, Protocol

from ..core.process import PACKAGE_ROOT

_END_LIMIT_S = 3.0
_REAP_LIMIT_S = 600.0
_RESTART_PAUSE_S = 0.5
_BOOT = """
import sys
sys.path[:] = sys.argv[3:]
from skyward.engine.keeper_process import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


class Leased(Protocol):
    """Process on another machine whose lease needs renewals: a node's agent, or a head."""

    @property
    def socket_path(self) -> str: ...
    @property
    def channel(self) -> tuple[str, ...]: ...
    @property
    def lease_s(self) -> float: ...


class Keeper:
    """Client's handle of its keeper process: one for each client process, started with its first order. Thread-safe.

    A keeper that dies is restarted.
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

    def watch(self, machine: Leased, *, is_fresh: bool = False) -> None:
        """Renew the node's lease from now on, and stop the node when this process dies.

        Args:
            machine: The node.
            is_fresh: Whether the lease begins now, so that the first renewal has time.
        """
        order = {
            "op": "watch",
            "key": _key(machine),
            "channel": machine.channel,
            "lease_s": machine.lease_s,
            "is_fresh": is_fresh,
        }
        with self._lock:
            self._watched[_key(machine)] = order
            self._tell(order)

    def forget(self, machine: Leased) -> None:
        """Stop watching a node that its pool has stopped. The keeper ends with the last of its orders."""
        with self._lock:
            if self._watched.pop(_key(machine), None) is not None:
                self._drop({"op": "forget", "key": _key(machine)})

    def guard(
        self, name: str, argv: Sequence[str], *, log_path: str = os.devnull, limit_s: float = _REAP_LIMIT_S
    ) -> None:
        """Register a command to run when this process dies, after its nodes have ended.

        Call it before anything is rented. A command that fails is retried twice.

        Args:
            name: Name of the pool.
            argv: The command.
            log_path: File to which its output is appended.
            limit_s: Seconds after which it is killed.
        """
        order = {
            "op": "guard",
            "name": name,
            "argv": list(argv),
            "log_path": log_path,
            "cwd": _working_folder(),
            "env": dict(os.environ),  # the current one: the variables of the cloud account may be newer than the keeper
            "limit_s": limit_s,
        }
        with self._lock:
            self._guarded[name] = order
            self._tell(order)

    def release(self, name: str) -> None:
        """Remove the command of a pool whose rented machines have all been returned. Idempotent."""
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
            # Closing the pipe is not enough: a process that the client forked may hold its other end open too.
            with contextlib.suppress(OSError):  # the keeper has ended already
                process.stdin.write(b'{"op": "end"}\n')
                process.stdin.close()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:  # it has no orders left, so killing it harms nothing
                process.kill()
                process.wait()

    def _tell(self, order: dict[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()  # sends all orders, this one included
            return
        self._write(order)

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the keeper died: the next order or `_restart` starts another
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        if self._process is not None:
            _close_input(self._process)
        # The first orders travel in a file, not in the pipe. If the client dies right after the start, the keeper has
        # all of them; a pipe might have taken only some.
        with _file_in_memory() as first:
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
        with contextlib.suppress(RuntimeError):  # without a thread, the next order still notices a dead keeper
            threading.Thread(target=self._restart, args=(self._process,), name="skyward-keeper", daemon=True).start()

    def _restart(self, process: subprocess.Popen[bytes]) -> None:
        """Restart a keeper that died, in a separate thread, until one runs. Without one, the leases of nodes expire."""
        process.wait()
        while True:
            try:
                with self._lock:
                    if self._process is process and (self._watched or self._guarded):
                        self._start()
                return
            except OSError:  # no free descriptor, process or memory right now
                time.sleep(_RESTART_PAUSE_S)


def _key(machine: Leased) -> str:
    """Return a key for a machine. The path of its socket is not enough, because hosts may use the same path."""
    return "\0".join((machine.socket_path, *machine.channel))


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder was removed
        return "/"


def _file_in_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("skyward-keeper", os.MFD_CLOEXEC), "w+b")
    import tempfile  # macOS

    return tempfile.TemporaryFile()


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # the keeper died before it read an order
        process.stdin.close()


def _let_go_in_child() -> None:
    """Drop the keeper's input in a forked child.

    The keeper takes the end of its input for the end of the client. A child that outlives the client must not hold it
    open. The descriptor is replaced instead of closed, because its file object may be in use at the moment of the fork.
    """
    Keeper._instance_lock = threading.Lock()
    keeper = Keeper._instance
    if keeper is None or keeper._process is None or keeper._process.stdin is None:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: already closed
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, keeper._process.stdin.fileno(), inheritable=False)
        os.close(null)


os.register_at_fork(after_in_child=_let_go_in_child)
