"""Starts and stops `watched_server`, and reads what it left on record."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class WatchedServer:
    """A hub in a process of its own, see `watched_server`.

    Args:
        folder: Its data are in `folder/data`.
        patience_s: See `ServerSettings`.

    Attributes:
        url: Its address.
        token: Token of the owner.
        code: Code that signs the owner in once.
    """

    def __init__(self, folder: Path, patience_s: float = 20.0) -> None:
        self.folder = folder
        self._patience_s = patience_s

    def __enter__(self) -> Self:
        with (self.folder / "log").open("wb") as log:
            command = [sys.executable, "-m", "tests.hub.http.watched_server", str(self.folder), str(self._patience_s)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log()
        greeting = json.loads(line)
        self.url: str = greeting["url"]
        self.token: str = greeting["token"]
        self.code: str = greeting["code"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._process:
            if self._process.poll() is not None:
                return  # killed
            self._process.send_signal(signal.SIGTERM)
            status = self._process.wait(60)
        assert status == 0, self.log()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def events(self) -> list[tuple[str, str]]:
        """Return the events that were recorded, each with its first argument."""
        return [tuple(json.loads(line)) for line in (self.folder / "events").read_text().splitlines()]

    def holds(self, connection: socket.socket) -> bool:
        """Report whether it has its end of a connection still open."""
        ends = (self.address[1], connection.getsockname()[1])
        for line in Path(f"/proc/{self._process.pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if tuple(int(fields[at].rpartition(":")[2], 16) for at in (1, 2)) == ends:
                return fields[9] != "0"  # the kernel may go on to send what it has
        return False

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def memory_mib(self, *, reset: bool = False) -> float:
        """Return the greatest memory that the process has held since the last reset."""
        process = Path(f"/proc/{self._process.pid}")
        if reset:
            (process / "clear_refs").write_text("5")
        return int((process / "status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
