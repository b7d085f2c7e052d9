"""Programs of the locked environments of MLflow: its server, its client, its command line."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.hub.http.server_processes import free_port

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = "2.22.0", "3.17.2"
READY_S, END_S, SCRIPT_S = 240.0, 30.0, 180.0


def program(version: str, name: str) -> str:
    """Return the path of a program of an environment, or skip the test where it is not made."""
    folder = ROOT / ".make" / f"mlflow-{version}"
    if not list(folder.glob(".ready-*")):
        pytest.skip(f"MLflow {version} is not here: `make mlflow` makes its environment")
    return str(folder / "bin" / name)


def quiet(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program of MLflow, without settings of the user."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "SKYWARD_"))}
    return kept | {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "GIT_PYTHON_REFRESH": "quiet", **more}


@contextmanager
def mlflow_server(folder: Path, version: str = NEW, store: str | None = None) -> Iterator[str]:
    """Run MLflow's own server in a folder with one worker, and with workspaces where it has them. Yields its address.

    Args:
        folder: Where it keeps its log and the files of runs.
        version: Version of MLflow.
        store: Address of its database, or its `mlruns` folder. None: a database in `folder`.
    """
    port = free_port()
    where = ["--backend-store-uri", store or f"sqlite:///{folder}/mlflow.db"]
    where += ["--artifacts-destination", str(folder / "artifacts")]
    options = [*(["--enable-workspaces"] if version == NEW else []), "--workers", "1", "--port", str(port), *where]
    command = [program(version, "mlflow"), "server", *options]
    environment = quiet({"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True
        )  # fmt: skip
        try:
            _wait_until_ready(process, f"http://127.0.0.1:{port}", folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(END_S)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise AssertionError(f"mlflow server did not start: {log.read_text()[-3000:]}")


class Scripts:
    """Scripts of MLflow's clients, each in a fork of a process of its version that has imported MLflow.

    No plugin is in these processes: an MLflow finds its plugins when it is imported.
    """

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def run(self, version: str, path: Path, folder: Path, environment: Mapping[str, str], *arguments: str) -> str:
        """Run a script in a folder to its end and return its output."""
        process = self._process(version)
        assert process.stdin is not None
        assert process.stdout is not None
        output = folder / f"{path.stem}.out"
        job = {"path": str(path), "folder": str(folder), "environment": dict(environment), "output": str(output)}
        print(json.dumps(job | {"arguments": arguments}), file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], READY_S)[0]:
            self.close()
        code = process.stdout.readline().strip()
        printed = output.read_text() if output.exists() else ""
        assert code == "0", f"{path.name} ended with {code or 'no code'}: {printed[-6000:]}"
        return printed

    def close(self) -> None:
        """End the processes, and what runs in them."""
        for process in self._processes.values():
            os.killpg(process.pid, signal.SIGKILL)
            with process:
                pass
        self._processes.clear()

    def _process(self, version: str) -> subprocess.Popen[str]:
        if version not in self._processes:
            self._processes[version] = subprocess.Popen(
                [program(version, "python"), str(Path(__file__).with_name("scripts") / "warm.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=quiet({}),
                text=True,
                start_new_session=True,
            )
        return self._processes[version]


def run_program(version: str, arguments: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a program of an environment to its end and return its output."""
    command = [program(version, arguments[0]), *arguments[1:]]
    ended = subprocess.run(
        command, cwd=folder, env=quiet(environment), capture_output=True, text=True, timeout=SCRIPT_S, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    return ended.stdout
