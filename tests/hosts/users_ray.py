"""A user's own Ray on hosts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.base import users_python
from tests.hosts.host import Host

__all__ = ["UsersRay"]

_MARK = "USERS_RAY=1"
"""Variable of all its processes."""
_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class UsersRay:
    """Ray on hosts that have `layers_of_ray`: the first is the head. As far as Ray knows, each has an accelerator."""

    hosts: Sequence[Host]
    version: str

    @property
    def python(self) -> str:
        """Interpreter of it on the hosts."""
        return users_python(self.version)

    def start(self) -> None:
        """Start it, two processors on each host. If that fails, `stop` it too."""
        for host in self.hosts:
            is_head = host is self.hosts[0]
            role = ["--head", "--include-dashboard=false"] if is_head else [f"--address={self.hosts[0].address}:6379"]
            sizes = ["--num-cpus=2", "--num-gpus=1", "--object-store-memory=80000000"]
            more = [f"--node-ip-address={host.address}", "--include-log-monitor=false", "--disable-usage-stats"]
            self.run(host, "-m", "ray.scripts.scripts", "start", *role, *sizes, *more, '--resources={"mine": 1}')

    def run(self, host: Host, *arguments: str) -> str:
        """Run its Python, and return the output."""
        return host.run("env", _MARK, self.python, *arguments, timeout_s=_LIMIT_S).stdout

    def processes(self, host: Host) -> set[int]:
        """Return its processes on a host, as seen from here. Some overwrite their variables."""
        found: set[int] = set()
        for process in host.started_processes():  # parents first
            folder = Path(f"/proc/{process.outside_pid}")
            with contextlib.suppress(OSError):  # has ended
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent in found or _MARK.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(process.outside_pid)
        return found

    def stop(self) -> None:
        """Kill it, and remove its files. Idempotent."""
        for host in self.hosts:
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            host.run("rm", "-rf", "/tmp/ray")
