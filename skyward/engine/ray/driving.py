"""The driver's process, as the head keeps it: started, awaited, and started again while Ray lives."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...core.process import PACKAGE_ROOT, is_readable
from ...core.records import dataclass
from ..threads import in_words, start_thread
from .links import RayWays
from .settings import FILES, ray_variables

_LISTEN_S: Final = 45.0
"""Longest wait in seconds for the driver to listen. Without the right certificate it would wait for minutes."""
_TRIES: Final = 3
_LOOK_S: Final = 0.1
_AFTER_RAY_S: Final = 3.0
"""Seconds until Ray's folder is gone after Ray's processes: a driver that dies of that needs no other."""
_SOCKET: Final = "driver.sock"


@dataclass(frozen=True, kw_only=True)
class DriverOrder:
    """Settings of a driver.

    Attributes:
        python: Interpreter that has Ray.
        folder: Folder of the Ray on this machine, which goes with it.
        here: Address of this machine in Ray.
        address: Address of the cluster.
        pool: Name of the pool.
    """

    python: str
    folder: str
    here: str
    address: str
    pool: str


class RayDriver:
    """Owner of the driver's process. Thread-safe.

    Args:
        ways: Learns where the driver listens, and that it is gone.
        on_lost: Called with the folder of Ray and the reason when there is no driver anymore, and will be none.
    """

    def __init__(self, ways: RayWays, on_lost: Callable[[str, str], object]) -> None:
        self._ways, self._on_lost = ways, on_lost
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()

    def start(self, order: DriverOrder) -> None:
        """Start a driver in place of the one before. Returns at once."""
        self.stop()
        with self._lock:
            stop = self._stop = threading.Event()
        start_thread(
            lambda: self._keep(order, stop),
            name="skyward-driver",
            failed=lambda error: self._on_lost(order.folder, in_words(error)),
        )

    def stop(self) -> None:
        """End the driver, and use Ray no more. Idempotent."""
        with self._lock:
            self._stop.set()
            process, self._process = self._process, None
        if process is not None:
            process.kill()
        self._ways.is_down()

    def _keep(self, order: DriverOrder, stop: threading.Event) -> None:
        why, tries = "", _TRIES
        while tries and not stop.is_set():
            if why := why_unreadable(order.folder):
                break
            stood, why = self._drive(order, stop)
            if stop.is_set():
                return
            self._ways.is_down()
            tries = _TRIES - 1 if stood else tries - 1
            if _is_gone(order.folder, stop):
                why = "Ray on the head's machine has ended"
                break
        if not stop.is_set():
            self._on_lost(order.folder, why)

    def _drive(self, order: DriverOrder, stop: threading.Event) -> tuple[bool, str]:
        """Run a driver until it ends. Return whether it listened, and why it ended."""
        path = os.path.join(order.folder, _SOCKET)
        with contextlib.suppress(FileNotFoundError):  # of a driver before
            os.unlink(path)
        with Path(order.folder, "driver.log").open("ab") as log:
            process = subprocess.Popen(
                [order.python, "-m", "skyward.engine.ray.driver"],
                env=ray_variables(order.folder, PACKAGE_ROOT, os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
            )
        with self._lock:
            if stop.is_set():
                process.kill()
            else:
                self._process = process
        with process:  # waits for its end, and closes the pipes
            try:
                if not _listens(process, order, path):
                    return False, f"the driver did not listen within {_LISTEN_S:g} s; see its log"
                if not stop.is_set():
                    self._ways.stands(path)
                code = process.wait()
                return True, f"the driver ended with code {code}"
            finally:
                process.kill()


def why_unreadable(folder: str) -> str:
    """Return why Ray's token, key or certificates cannot be read; empty: they can.

    A driver without them would say nothing for half a minute, in each try.
    """
    for name in FILES:
        path = Path(folder, name)
        try:
            path.read_bytes()
        except OSError as error:
            return f"{path}: cannot be read ({(error.strerror or str(error)).lower()})"
    return ""


def _listens(process: subprocess.Popen[bytes], order: DriverOrder, path: str) -> bool:
    assert process.stdin is not None
    assert process.stdout is not None
    told = {"address": order.address, "pool": order.pool, "socket": path, "here": order.here}
    with contextlib.suppress(BrokenPipeError):  # it has died; its output ends
        process.stdin.write(json.dumps(told).encode() + b"\n")
        process.stdin.flush()
    deadline = time.monotonic() + _LISTEN_S
    while time.monotonic() < deadline and os.path.isdir(order.folder):  # without Ray it would try for half a minute
        if is_readable(process.stdout, _LOOK_S):
            return bool(process.stdout.readline())
    return False


def _is_gone(folder: str, stop: threading.Event) -> bool:
    """Wait a moment, and return whether Ray's folder has gone with Ray."""
    deadline = time.monotonic() + _AFTER_RAY_S
    while os.path.isdir(folder) and time.monotonic() < deadline and not stop.wait(_LOOK_S):
        continue
    return not os.path.isdir(folder)
