"""A Python process of ours beside this one, seen from here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ....errors import SlotLost
from ....wire.payloads import encode
from .arena import Arena
from .channel import MessageKind, readable, receive, send
from .packed import PackedJob

__all__ = ["WorkerProcess"]

_BOOT = """
import json, os, sys
sys.path[:] = json.loads(os.environ.pop("SKYWARD_EVALUATION_PATH"))
from skyward.training.evaluation.dispatchers.process_main import main
main()
"""
_LARGE_BYTES = 16 << 20
"""Contents are sent once: the pages of those that are larger are not kept for the next states."""
_LOOK_S = 0.2
"""Seconds between two looks whether it lives, where the system cannot tell when it ends."""


class WorkerProcess:
    """Started at once; imports what this process can import. Used by one thread; any thread may `kill` it.

    It is a session of its own: Ctrl-C in the terminal does not reach it, and its end is that of all that it started.
    """

    def __init__(self, name: str) -> None:
        """Raises OSError: the system gives no more processes or descriptors."""
        self.known: set[str] = set()
        """Digests of the contents that it has, as far as is known here."""
        self._name = name
        self._arena = Arena()
        self._had_large_contents = False
        self._sock, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), str(self._arena.fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._arena.fd),
                start_new_session=True,
                env={**os.environ, "SKYWARD_EVALUATION_PATH": json.dumps([str(each) for each in sys.path])},
            )
        except BaseException:
            self._sock.close()
            self._arena.close()
            raise
        finally:
            theirs.close()
        self._pidfd = -1
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        if self._pidfd < 0:
            return self._process.poll() is None
        return not readable([self._pidfd], 0)

    def send_job(self, state: Any, packed: PackedJob, contents: Mapping[str, bytes]) -> None:
        """Copies the state's large buffers to memory that both see, and the rest over the socket.

        Raises: SlotLost; OSError: there is no memory; what pickling the state raises.
        """
        self._arena.begin(keep=not self._had_large_contents)
        self._had_large_contents = sum(map(len, contents.values())) > _LARGE_BYTES
        body = encode((state, packed, dict(contents)), self._arena.put).body
        try:
            send(self._sock, MessageKind.JOB, body)
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> tuple[MessageKind, bytes]:
        """Its next answer; waits for it. Raises: SlotLost: it has died, or was killed."""
        sock = self._sock.fileno()
        ends = [sock] if self._pidfd < 0 else [sock, self._pidfd]
        while True:
            # Not the socket alone: what the process started may hold the other end, and outlive it.
            if sock in readable(ends, _LOOK_S if self._pidfd < 0 else None):
                frame = receive(self._sock)
                if frame is None:
                    raise self._lost()
                return frame
            if not self.is_alive:
                raise self._lost()

    def kill(self) -> None:
        """Ends it and all that it started, now. Any thread; idempotent. What waits for it gets SlotLost."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kills it and waits until it has gone. Nobody may wait for its answers any more. Idempotent."""
        self.kill()
        self._process.wait()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._sock.fileno() >= 0:
            self._sock.close()
            self._arena.close()

    def _lost(self) -> SlotLost:
        self.kill()
        code = self._process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return SlotLost(
            f"{self._name}: its process {self._process.pid} ended {how} during an evaluation; nothing is known of that "
            "evaluation, and the next one gets a new process",
            signal=-code if code < 0 else None,
            exit_code=code if code >= 0 else None,
        )
