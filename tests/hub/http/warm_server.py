"""`skyward hub serve`, forked from a process that has imported it: a start takes a fifth of a fresh process's.

Run: `python -m tests.hub.http.warm_server LOG`. Each line on its standard input kills the server with SIGKILL, if one
runs, and forks the next one; its process id comes back as a line. At the end of the input, the last one is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import httpx

from .server_processes import environment_of, free_port, until


class WarmServer:
    """A server that can be killed and started again quickly. Leaving the block kills it.

    Args:
        database_url: Its database.
        folder: Its blobs are in `folder/blobs`, its log is `folder/log`.
    """

    def __init__(self, database_url: str, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self._environment: Mapping[str, str] = environment_of(database_url, folder, port)

    def __enter__(self) -> Self:
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tests.hub.http.warm_server", str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(self._environment),
            text=True,
        )
        self.restart()
        until(self.is_ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._warm:
            self.kill()

    def restart(self) -> None:
        """Kill the server, if it runs, and start the next one."""
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        print(file=self._warm.stdin, flush=True)
        self._pid = int(self._warm.stdout.readline())

    def kill(self) -> None:
        """Kill the server. No other follows."""
        assert self._warm.stdin is not None
        self._warm.stdin.close()
        self._warm.wait(60)

    def is_running(self) -> bool:
        state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"

    def is_ready(self) -> bool:
        assert self.is_running(), self.log.read_text()
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False


def _serve(log: str) -> NoReturn:
    """Run a server in this process, which was just forked."""
    from skyward.cli import main

    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        status = main(["hub", "serve"])
    finally:
        os._exit(status)


def _end(pid: int) -> None:
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _main(log: str) -> None:
    import psycopg  # noqa: F401
    import sqlalchemy.dialects.postgresql.psycopg
    import sqlalchemy.dialects.sqlite  # noqa: F401

    import skyward.cli.hub
    import skyward.hub.http.serve
    import skyward.hub.http.table
    import skyward.hub.services.hub  # noqa: F401

    server = 0
    for _ in sys.stdin:
        _end(server)
        server = os.fork() or _serve(log)
        print(server, flush=True)
    _end(server)


if __name__ == "__main__":
    _main(sys.argv[1])
