"""MLflow's server and a hub, each in a folder, with the processor time, memory and bytes that they use."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

import httpx
import processes

ROOT = Path(__file__).resolve().parent.parent
MLFLOW = ROOT / ".make" / "mlflow-3.17.2" / "bin"
READY_S, END_S = 120.0, 30.0


class Server(ABC):
    """A server in a process group of its own. Leaving the `with` block ends the whole group."""

    name: str
    database: Path

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.token = ""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def command(self) -> list[str]: ...

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def start(self) -> None:
        log = open(self.folder / "log", "ab")  # noqa: SIM115  (the process keeps it)
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        environment |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "SKYWARD_HUB_METRICS_PORT": "0"}
        self._process = subprocess.Popen(
            self.command(), stdout=log, stderr=log, cwd=self.folder, start_new_session=True, env=environment
        )
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not start: {(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        self.token = self.read_token()

    def read_token(self) -> str:
        return ""

    def stop(self) -> None:
        pids = self.pids()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_S)
        finally:
            for pid in pids:  # job runners of MLflow outlive their parent
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def pids(self) -> list[int]:
        return [self._process.pid, *processes.descendants(self._process.pid)]

    def cpu_s(self) -> float:
        return processes.cpu_seconds(self.pids())

    def memory_mib(self) -> float:
        return processes.pss_mib(self.pids())

    def bytes_used(self) -> int:
        """Return the size of the database's pages in use, whether they are in the file or still in its log."""
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as connection:
            pages, free, size = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_count", "freelist_count", "page_size")
            )
        return int((pages - free) * size)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/2.0/mlflow", headers=self.headers, timeout=120)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


class MlflowServer(Server):
    """`mlflow server` with its defaults: 4 workers, SQLite, no authentication."""

    name = "mlflow"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.database = folder / "mlflow.db"

    def command(self) -> list[str]:
        database, artifacts = f"sqlite:///{self.database}", str(self.folder / "artifacts")
        where = ["--backend-store-uri", database, "--artifacts-destination", artifacts]
        return [str(MLFLOW / "mlflow"), "server", "--port", str(self.port), *where]


class HubProcess(Server):
    """`skyward hub up` with its defaults: one process, SQLite, tokens, validation and audit."""

    name = "hub"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.database = folder / "hub.db"

    def command(self) -> list[str]:
        up = ["hub", "up", "--data", str(self.folder), "--port", str(self.port), "--json"]
        return [sys.executable, "-m", "skyward", *up]

    def read_token(self) -> str:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            for line in (self.folder / "log").read_text().splitlines():
                if line.startswith("{") and "token" in line:
                    return str(json.loads(line)["token"])
            time.sleep(0.05)
        raise SystemExit("the hub printed no token")
