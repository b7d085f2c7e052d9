"""Main program of the keeper; see `keeper`. It lives as long as the client's pools, and never waits for a single node.

When the client dies, the keeper requests all nodes to end. Then it runs the guarded commands of the pools, which return
rented machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself would take a tenth of this process's memory
    import subprocess
    from typing import Any

    from .keeper_links import RemoteNode

_END_LIMIT_S = 6.0
"""Seconds in which nodes are requested to end after the client's death. Those that cannot be reached have leases."""
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 2.0
"""Excess time of a wait in seconds from which this process or its machine must have been stopped."""
_REAP_TRIES = 3
_REAP_AGAIN_S = 5.0


class _Guarded:
    """Command to run after the client's death."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.argv: list[str] = order["argv"]
        self.log_path: str = order["log_path"]
        self.cwd: str = order["cwd"]
        self.env: dict[str, str] = order["env"]
        self.limit_s: float = order["limit_s"]


class _Keeper:
    def __init__(self, client: int) -> None:
        self._client = client
        self._client_fd = _pidfd(client)
        self._nodes: dict[str, RemoteNode] = {}
        self._guarded: dict[str, _Guarded] = {}
        self._rest = b""
        self._is_over = False

    def run(self, first: int) -> None:
        """Work until the client dies or ends the keeper. `first` is the descriptor of a file with the first orders."""
        with open(first, "rb") as file:
            file.seek(0)  # the descriptor shares its position with the client's, which wrote the file
            for line in file:
                self._obey(json.loads(line))
        next_at = 0.0
        while not self._is_over:
            wait_s = max(0.0, min(_LONGEST_WAIT_S, next_at - time.monotonic()))
            began = time.monotonic()
            ready = _poll([0, self._client_fd, *(node.fileno() for node in self._nodes.values())], wait_s)
            now = time.monotonic()
            has_died = self._client_fd in ready or (self._client_fd < 0 and os.getppid() != self._client)
            if 0 in ready or has_died:  # read again at its death: the last order may have come after the poll
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
            node.forgive(now)

    def _read_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):  # everything that arrived is read
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
                from .keeper_links import RemoteNode  # here, because a keeper that only guards does not need it

                self._nodes[order["key"]] = node = RemoteNode(
                    order["channel"], order["lease_s"], is_fresh=order["is_fresh"]
                )
                node.tick(time.monotonic())
            case "forget":
                if order["key"] in self._nodes:
                    self._nodes.pop(order["key"]).close()
            case "guard":
                self._guarded[order["name"]] = _Guarded(order)
            case "release":
                self._guarded.pop(order["name"], None)


def main(client: int, first: int) -> None:
    """Run the keeper of the process `client`. `first` is the descriptor of a file with the first orders."""
    # A client that ignores SIGCHLD passes that on, and then the kernel drops the exit codes of our commands.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.set_blocking(0, False)
    _Keeper(client).run(first)


def _pidfd(pid: int) -> int:
    if not hasattr(os, "pidfd_open"):  # macOS: `run` compares the parent's process id instead
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:  # the client died already; `run` then reads its last orders and stops its nodes
        return -1


def _poll(fds: list[int], wait_s: float) -> set[int]:
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(wait_s * 1000)}


def _end_all(nodes: list[RemoteNode]) -> None:
    for node in nodes:
        node.end()
    deadline = time.monotonic() + _END_LIMIT_S
    while (open_nodes := [node for node in nodes if not node.has_ended]) and time.monotonic() < deadline:
        ready = _poll([node.fileno() for node in open_nodes], 0.25)
        now = time.monotonic()
        for node in open_nodes:
            if node.fileno() in ready:
                node.read(now)
            else:
                node.tick(now)
    for node in nodes:
        node.close()


def _reap_all(guarded: list[_Guarded]) -> None:
    """Run the commands in parallel. Retry those that fail, because a network outage may be short."""
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
    except OSError:  # the command must run even if nobody can read its output
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
        os.write(log, f"skyward: cannot run {guarded.argv[0]}: {error.strerror}\n".encode())
        return None
    finally:
        os.close(log)


def _succeeds(process: subprocess.Popen[bytes], deadline: float) -> bool:
    import subprocess

    try:
        return process.wait(max(0.0, deadline - time.monotonic())) == 0
    except subprocess.TimeoutExpired:  # counts as a failure, and must leave no process behind
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
