"""A Ray cluster on this machine: a raylet for each node, whose address is one of the loopback's."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from skyward.core.process import processes_below, start_time
from tests.stand_in_gpus import Gpu, install_smi
from tests.waiting import until

LEAN = Path(__file__).parent.parent / "lean"
"""Path of a module that spares each process of Ray a second of work."""
HEAD = ("--head", "--port=0", "--include-dashboard=false", "--no-monitor")
ACCELERATOR = "GeForce-RTX-4090"
"""Type of the accelerators, as Ray names it."""
LIMIT_S = 60.0


class Raylets:
    """A cluster whose nodes tests start and kill. Owns its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        health = {"RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000"}
        reports = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_failure_threshold": "3"}
        modules = folder / "modules"  # plain Ray brings no grpc, with which its head would start a server for clients
        modules.mkdir()
        (modules / "grpc.py").write_text("raise ModuleNotFoundError\n")
        self.environment = token | health | reports | {"PYTHONPATH": f"{modules}:{LEAN}"}
        self.environment["XDG_CACHE_HOME"] = str(folder / "cache")
        self.address = ""

    def start(self, *nodes: int) -> None:
        """Start nodes. The first one has two accelerators, as far as Ray and the programs there know."""
        own = self.folder / "r"  # Ray opens it to everybody
        tools = self.folder / "tools"
        tools.mkdir()
        install_smi(tools, [Gpu("NVIDIA GeForce RTX 4090", 24564)] * 2)
        self.environment["PATH"] = f"{tools}:{os.environ['PATH']}"
        self.start_node(0, *HEAD, f"--temp-dir={own}")
        self.address = (own / "ray_current_cluster").read_text().strip()
        for node in nodes:
            self.start_node(node)

    def start_node(self, node: int, *options: str) -> None:
        """Start a node with one processor."""
        gpus = 0 if node else 2
        options = options or (f"--address={self.address}",)
        sizes = (
            "--num-cpus=1",
            f"--num-gpus={gpus}",
            f"--object-store-memory={80 << 20}",
            "--include-log-monitor=false",
        )
        ports = (f"--node-ip-address=127.0.0.{node + 1}", "--min-worker-port=0", "--max-worker-port=0")
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *sizes, *ports]
        resources = {f"node-{node}": 1} | ({f"accelerator_type:{ACCELERATOR}": 1} if gpus else {})
        command += ["--resources", json.dumps(resources)]
        own = f"node-{node}" if self.address else ""
        start_ray(command, os.environ | self.environment, clear=lambda: self.end(own))

    def end_node(self, node: int) -> None:
        """Kill the raylet of a node. Its workers end too."""
        (raylet,) = self.processes(f'"node-{node}"') or self.processes(f"node-{node},1")
        os.kill(raylet, signal.SIGKILL)

    def named(self, pool: str) -> str:
        """Return the name of a pool as no other run of the tests has it. Folders begin with up to 12 characters of it.

        `pool` has up to six of them.
        """
        return pool + self.environment["RAY_AUTH_TOKEN"][:6]

    def shell(self, **variables: str) -> list[str]:
        """Return a command that runs the command behind it as a login on a machine of the cluster would."""
        return ["env", *(f"{name}={value}" for name, value in (self.environment | variables).items())]

    def processes(self, name: str) -> list[int]:
        """Return the processes of this cluster whose command line has a text."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # has ended
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if name in command and self.environment["RAY_AUTH_TOKEN"].encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def end(self, name: str = "") -> None:
        """Kill the processes of this cluster whose command line has a text, with all below them."""
        # The agents are known by their raylet only: their titles have overwritten their variables.
        while pids := {process for pid in self.processes(name) for process in (pid, *processes_below(pid))}:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda pids=pids: not any(map(start_time, pids)), within_s=LIMIT_S)  # type: ignore[misc]


def start_ray(command: list[str], environment: Mapping[str, str], clear: Callable[[], object]) -> None:
    """Run `ray start`, again if it gave up: on a busy machine it does after 30 s, a limit of its own.

    `clear` ends what the first try has left.
    """
    done = _run(command, environment)
    if "Deadline Exceeded" in done.stdout + done.stderr:
        clear()
        done = _run(command, environment)
    assert done.returncode == 0, done.stdout + done.stderr


def _run(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
