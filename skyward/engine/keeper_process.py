"""The keeper's own process; see keeper. It lives as long as the client's pools, and nothing in it waits for one node.

When the client dies: nodes are told to end, those that do not are killed where that is possible, and then the commands
of the pools it guards are run, which end what was rented.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .keeper_nodes import KeptNode, LocalNode, RemoteNode, node_of

if TYPE_CHECKING:
    import subprocess

__all__ = ["main"]

_END_LIMIT_S = 6.0
"""Seconds a node gets to end by itself when the client died; then its watchdog is killed, and all with it."""
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 2.0
"""A wait that took so much longer: this process, or the machine, was stopped."""
_REAP_TRIES = 3
_REAP_AGAIN_S = 5.0


@dataclass(frozen=True)
class _Guarded:
    """What to run when the client died."""

    argv: list[str]
    log_path: str
    cwd: str
    env: dict[str, str]
    limit_s: float


class _Keeper:
    def __init__(self, client: int) -> None:
        self._client = client
        self._client_fd = _pidfd(client)
        self._nodes: dict[str, KeptNode] = {}
        self._guarded: dict[str, _Guarded] = {}
        self._rest = b""
        self._is_over = False

    def run(self, first: int) -> None:
        """Until the client dies, or says that its last pool is closed. `first`: a file with the first orders."""
        with open(first, "rb") as file:
            file.seek(0)  # the writer's position is ours
            for line in file:
                self._obey(json.loads(line))
        next_at = 0.0
        while not self._is_over:
            wait_s = max(0.0, min(_LONGEST_WAIT_S, next_at - time.monotonic()))
            began = time.monotonic()
            ready = _poll([0, self._client_fd, *(node.fileno() for node in self._nodes.values())], wait_s)
            now = time.monotonic()
            has_died = self._client_fd in ready or (self._client_fd < 0 and os.getppid() != self._client)
            if 0 in ready or has_died:  # its last order may have come between the looks at the two
                self._read_orders()
            if has_died:
                break
            self._read_nodes(ready, now)
            if now - began > wait_s + _PAUSE_S:
                self._forgive(now)
            next_at = min((node.tick(now) for node in self._nodes.values()), default=now + _LONGEST_WAIT_S)
        _end_all(list(self._nodes.values()))
        _reap_all(list(self._guarded.values()))

    def _read_nodes(self, ready: set[int], now: float) -> None:
        for node in self._nodes.values():
            if node.fileno() in ready:
                node.read(now)

    def _forgive(self, now: float) -> None:
        for node in self._nodes.values():
            if isinstance(node, RemoteNode):
                node.forgive(now)

    def _read_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):  # all that came is read
            while piece := os.read(0, 65536):
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._is_over = True

    def _obey(self, order: dict[str, Any]) -> None:
        match order["op"]:
            case "end":
                self._is_over = True
            case "watch":
                with contextlib.suppress(OSError):  # it has ended already
                    self._nodes[order["key"]] = node_of(order)
                    self._nodes[order["key"]].tick(time.monotonic())
            case "forget":
                node = self._nodes.pop(order["key"], None)
                if node is not None:
                    node.close()
            case "guard":
                self._guarded[order["name"]] = _Guarded(
                    order["argv"], order["log_path"], order["cwd"], order["env"], order["limit_s"]
                )
            case "release":
                self._guarded.pop(order["name"], None)


def main(client: int, first: int) -> None:
    """Until the client dies, or says that its last pool is closed. `first`: a file with its first orders."""
    # A client that ignores it passes that on: no exit code would be known.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_blocking(0, False)
    _Keeper(client).run(first)


def _pidfd(pid: int) -> int:
    if not hasattr(os, "pidfd_open"):  # macOS: the parent's number tells
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # it died already; the orders it left are still obeyed, and then its nodes ended
        return -1


def _poll(fds: list[int], wait_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(wait_s * 1000)}


def _end_all(nodes: list[KeptNode]) -> None:
    for node in nodes:
        node.end()
    deadline = time.monotonic() + _END_LIMIT_S
    while (open_nodes := [node for node in nodes if not node.has_ended]) and time.monotonic() < deadline:
        local = any(isinstance(node, LocalNode) for node in open_nodes)
        ready = _poll([node.fileno() for node in open_nodes], 0.02 if local else 0.25)
        now = time.monotonic()
        for node in open_nodes:
            if node.fileno() in ready:
                node.read(now)
            elif isinstance(node, RemoteNode):
                node.tick(now)
    for node in nodes:
        node.kill()


def _reap_all(guarded: list[_Guarded]) -> None:
    """Run the commands, side by side; one that fails again, for networks come back."""
    for attempt in range(_REAP_TRIES):
        if attempt:
            time.sleep(_REAP_AGAIN_S)
        started = [(one, _start(one)) for one in guarded]
        deadline = time.monotonic() + max((one.limit_s for one in guarded), default=0.0)
        guarded = [one for one, process in started if process is None or not _succeeds(process, deadline)]
        if not guarded:
            return


def _start(guarded: _Guarded) -> subprocess.Popen[bytes] | None:
    import subprocess  # most keepers never need it

    try:
        log = os.open(guarded.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:  # nobody will read why, but it must run
        log = os.open(os.devnull, os.O_WRONLY)
    try:
        cwd = guarded.cwd if os.path.isdir(guarded.cwd) else "/"
        return subprocess.Popen(
            guarded.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env=guarded.env,
            start_new_session=True,
        )
    except OSError as error:
        os.write(log, f"skyward: {guarded.argv[0]} cannot be run: {error.strerror}\n".encode())
        return None
    finally:
        os.close(log)


def _succeeds(process: subprocess.Popen[bytes], deadline: float) -> bool:
    import subprocess

    try:
        return process.wait(max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:  # counts as a failure, and leaves no process behind
        with contextlib.suppress(ProcessLookupError):  # it ended this very moment
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
