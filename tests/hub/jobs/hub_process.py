"""A hub in a process of its own, with its launcher inside, as `skyward hub up` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from tests.few_modules import LEAN
from tests.hub.http.server_processes import free_port
from tests.waiting import until

LIMIT_S = 60.0


class HubProcess:
    """`skyward hub up` in a folder. It can be killed and started again on its port. Leaving the block ends it."""

    def __init__(self, data: Path) -> None:
        self.data, self.port = data, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(LIMIT_S)
        for pid in self.runner_pids():  # of a test that failed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        command = [sys.executable, "-m", "skyward", "hub", "up", "--data", str(self.data), "--port", str(self.port)]
        path = os.pathsep.join(filter(None, (str(LEAN), os.environ.get("PYTHONPATH"))))
        with (self.data.parent / "hub.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--json"],
                env={**os.environ, "PYTHONPATH": path},  # of jobs on this machine, too
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.token = json.loads(output.readline())["token"]

    def kill(self) -> None:
        """Kill server, scheduler and launcher at once."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """End it as an upgrade does, and start it with the variables of this process. Its runners go on."""
        self.process.terminate()
        self.process.wait(LIMIT_S)
        self.start()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60)

    def runner_pids(self) -> list[int]:
        """Return the ids of the runners that live."""
        folders = (self.data / "launcher" / "attempts").glob("*/pid")
        pids = []
        for path in folders:
            with contextlib.suppress(FileNotFoundError, ValueError):  # it has just ended, or begins
                pids.append(int(path.read_text()))
        return [pid for pid in pids if is_runner(pid)]

    def end_runners(self) -> None:
        """Tell the runners that live to end, as those do whose machines wait for a job."""
        for pid in self.runner_pids():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGTERM)

    def until_clean(self) -> None:
        """Wait until no runner and no folder of one is left."""
        until(lambda: not self.runner_pids() and not list((self.data / "launcher" / "attempts").iterdir()), 90)


def is_runner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return "skyward.hub.runner" in command and state != "Z"
