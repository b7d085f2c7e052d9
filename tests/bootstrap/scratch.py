"""A node in a folder of this machine, with its own home, environment and shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from skyward.bootstrap.uv import client_uv
from skyward.events import Event
from skyward.ssh import SSHResult

__all__ = ["ScratchNode", "phases_of"]


@dataclass
class ScratchNode:
    """Node that runs commands as sshd does: by `sh -c`, in their own session, without this process's environment.

    It has a uv, unless `is_bare`. A bare node gets the client's uv, and unpacking that takes half a second.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    is_bare: bool = False
    commands: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    """Bytes of input, for each command."""

    def __post_init__(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.bin.mkdir(exist_ok=True)
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        link = self.bin / f"python{minor}"
        if not link.exists():
            link.symlink_to(os.path.realpath(sys._base_executable))  # type: ignore[attr-defined]
            uv = client_uv()
            if uv is not None and not self.is_bare:
                (self.bin / "uv").symlink_to(uv.path)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "skyward"

    @property
    def platform(self) -> Path:
        (found,) = (path for path in self.cache.iterdir() if path.name not in ("tmp", "code", "client"))
        return found

    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": f"{self.bin}:/usr/bin:/bin", **self.variables}

    def __call__(
        self,
        command: str,
        *,
        input: bytes | BinaryIO | None = None,  # noqa: A002
        timeout_s: float,
        on_line: Callable[[str], None] | None = None,
    ) -> SSHResult:
        self.commands.append(command)
        data = input if isinstance(input, bytes) or input is None else input.read()
        self.sent.append(len(data or b""))
        with tempfile.TemporaryFile() as fed, tempfile.TemporaryFile() as errors:
            fed.write(data or b"")
            fed.seek(0)
            process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=fed,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=self.environment(),
                cwd=self.home,
                start_new_session=True,
            )
            out, is_late = _read(process, timeout_s, on_line)
            if is_late:
                raise TimeoutError(f"not within {timeout_s} s")
            errors.seek(0)
            return SSHResult(code=process.wait(), stdout=out, stderr=errors.read())


def _read(
    process: subprocess.Popen[bytes], timeout_s: float, on_line: Callable[[str], None] | None
) -> tuple[bytes, bool]:
    late = threading.Event()

    def kill() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout_s, kill)
    timer.start()
    out = []
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            out.append(line)
            if on_line is not None:
                on_line(line.decode(errors="replace").rstrip("\n"))
    timer.cancel()
    timer.join()
    return b"".join(out), late.is_set()


def phases_of(events: list[Event], kind: type[Event]) -> list[str]:
    return [event.phase for event in events if isinstance(event, kind)]  # type: ignore[attr-defined]
