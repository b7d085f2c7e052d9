"""Waiting for a condition, in tests and in the tasks they send, never by sleeping for luck."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["lines_of", "open_files", "prepare_httpx", "until", "until_text"]


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Return when `condition()` is true. Raises AssertionError at the deadline.

    The deadline ends a hang, and a busy machine takes long to start processes. It looks again 0.005 s later at first
    and up to 0.1 s later in a long wait, because many looks ask a server.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within_s, f"not within {within_s:g} s"
        time.sleep(min(max(0.005, waited / 20), 0.1))


def until_text(path: Path, within_s: float = 60.0) -> str:
    """Return the text of a file that another process writes, once there is some.

    A file exists before its text does. Raises AssertionError at the deadline.
    """
    until(lambda: path.exists() and path.read_text(), within_s)
    return path.read_text()


def prepare_httpx() -> None:
    """Let httpx wait a minute for an answer, and read the certificates of authorities once.

    By itself it waits five seconds, and a busy machine can take longer. Each client reads the certificates, also for
    a hub without TLS: 0.02 s of processor time, and tests make thousands of clients.
    """
    import httpx
    from httpx._config import create_ssl_context
    from httpx._transports import default

    limits: httpx.Timeout = inspect.signature(httpx.Client).parameters["timeout"].default
    limits.connect = limits.read = limits.write = limits.pool = 60.0
    vars(default)["create_ssl_context"] = functools.cache(create_ssl_context)


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file that tasks append to, or none if it does not exist yet."""
    return path.read_text().splitlines() if path.exists() else []


def open_files(pid: int) -> list[str]:
    """Return the paths of the files that a process has open now."""
    paths = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            paths.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return paths
