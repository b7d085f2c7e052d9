"""Nodes on the own machine that have a login: heads run beside them as on a host, without a host of the test bed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

import skyward as sky
from skyward.bootstrap.scripts import VARIABLE, undo
from skyward.core.process import PACKAGE_ROOT
from skyward.errors import Unreachable
from skyward.events import Emit, ignore
from skyward.node.agent import attach
from skyward.node.agent.outside import reply_of
from skyward.ssh.command import SSHResult
from skyward.values.image import Image
from skyward.values.machine import Machine, Offer, PoolSpec

_BOOT = "import sys; sys.path[:] = sys.argv[1:2]; from skyward.{module} import {name}; sys.exit({name}())"


class OwnLogin:
    """Login on this machine. It has no environments, so there is no Ray."""

    watchdog = 0
    started = ""

    def __init__(self) -> None:
        self.refuses = threading.Event()
        """Set while nothing can be started."""
        self.breaks = threading.Event()
        """Set while the connection breaks before a start has answered."""
        self.heads: list[int] = []
        """Outermost processes of the heads that were started."""

    def run(
        self,
        module: str,
        name: str,
        arguments: Sequence[str] = (),
        *,
        input: bytes | None = None,  # noqa: A002  # as in subprocess.run
        timeout_s: float,
        mark: str = "",
        stop: threading.Event | None = None,
    ) -> SSHResult:
        if self.refuses.is_set():
            return SSHResult(code=1, stdout=b"", stderr=b"no room")
        path = [PACKAGE_ROOT, *[folder for folder in sys.path if folder]]
        boot = _BOOT.format(module=module, name=name).replace("[1:2]", f"[1:{len(path) + 1}]")
        argv = [sys.executable, "-S", "-E", "-s", "-c", boot, *path, *arguments]
        env = {**os.environ, **({VARIABLE: mark} if mark else {})}
        done = subprocess.run(argv, input=input or b"", capture_output=True, timeout=timeout_s, check=False, env=env)
        if name == "start" and not done.returncode:
            self.heads.append(reply_of(done.stdout.decode())["pid"])
            if self.breaks.is_set():
                raise Unreachable("the connection broke", node=None)
        return SSHResult(code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def prepare(self, image: Image, folder: str, *, stop: threading.Event) -> tuple[str, str]:
        raise NotImplementedError

    def channel_to(self, socket_path: str) -> tuple[str, ...]:
        return attach.command(sys.executable, PACKAGE_ROOT, socket_path)

    def undo(self, mark: str) -> None:
        undo(_run_in_shell, [mark])


def _run_in_shell(
    command: str,
    *,
    input: bytes | BinaryIO | None = None,  # noqa: A002  # as in subprocess.run
    timeout_s: float,
    on_line: Callable[[str], None] | None = None,
) -> SSHResult:
    assert isinstance(input, bytes)
    done = subprocess.run(["sh", "-c", command], input=input, capture_output=True, timeout=timeout_s, check=False)
    return SSHResult(code=done.returncode, stdout=done.stdout, stderr=done.stderr)


@dataclass(frozen=True, kw_only=True)
class OwnHosts(sky.Local):
    """Provider of nodes on this machine with a login.

    Args:
        refusals: Errors of the next launches, in their order.
        begins: Set by each launch.
        gate: A launch waits until it is set.
        stillborn: The next launches leave a node without an agent, one for each entry.
        login: Login of all nodes.
    """

    refusals: list[Exception] = field(default_factory=list)
    begins: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    stillborn: list[bool] = field(default_factory=list)
    login: OwnLogin = field(default_factory=OwnLogin)

    def launch(self, spec: PoolSpec, offers: list[Offer], pool: str, nodes: list[int], emit: Emit) -> list[Machine]:
        self.begins.set()
        assert self.gate.wait(60.0)
        if self.refusals:
            raise self.refusals.pop(0)
        machines = super().launch(spec, offers, pool, nodes, emit)
        if self.stillborn:
            self.stillborn.pop()
            for machine in machines:
                os.kill(machine.pid, signal.SIGKILL)
        return [replace(machine, login=self.login) for machine in machines]

    def reach(self, description: dict[str, Any], emit: Emit = ignore) -> Machine:
        raise NotImplementedError  # only detached pools are reached again
