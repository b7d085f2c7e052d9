"""Real server processes of a hub, on one PostgreSQL, as `skyward hub serve` starts them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from skyward.hub.services.hub import Hub
from skyward.hub.store.database import Database

LIMIT_S = 60.0


def free_port() -> int:
    """Find a port that the kernel gives to no connection: one would hold it while a server restarts.

    A client that tries again and again is even connected to itself, if it happens to get the port that it calls.
    """
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are in use")


def owner_token(database_url: str) -> str:
    """Make the first user of a database, and a token."""

    async def make() -> str:
        hub = Hub(Database(database_url), None)
        await hub.start()
        try:
            actor = await hub.access.actor_named("owner", None)
            return (await hub.people.create_token(actor, "of a test")).text
        finally:
            await hub.close()

    return asyncio.run(make())


def environment_of(database_url: str, folder: Path, port: int) -> dict[str, str]:
    """Return the environment that configures a server."""
    return {
        **os.environ,
        "SKYWARD_HUB_SERVER_PORT": str(port),
        "SKYWARD_HUB_DATABASE_URL": database_url,
        "SKYWARD_HUB_STORAGE_FOLDER": str(folder / "blobs"),
    }


class ServerProcess:
    """`skyward hub serve`, configured by its environment. Leaving the block kills it."""

    def __init__(self, database_url: str, folder: Path, **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment: Mapping[str, str] = {**environment_of(database_url, folder, self.port), **environment}
        self.log = folder / f"log-{self.port}"

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "skyward", "hub", "serve"]
        with self.log.open("wb") as log:
            return subprocess.Popen(command, env=dict(self._environment), stderr=log)

    def __enter__(self) -> Self:
        self.process = self.start()
        until(self.is_ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def children(self) -> list[int]:
        """Return the ids of its server processes."""
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)
