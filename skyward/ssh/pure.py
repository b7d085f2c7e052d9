"""The paramiko transport: SSH in Python, for machines without an OpenSSH client. A small process holds the connection.

`argv` yields a relay. It passes its standard streams to that process, by SCM_RIGHTS over a socket in the connection's
folder, and waits for the exit code. So data moves directly between the user's descriptors and the connection.
    | length u32 | JSON |   in both directions; the request {"command": ...} carries three descriptors
After the request {"port": ...} and one byte in answer, the socket itself is the connection to that port there.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import math
import os
import pickle
import socket
import struct
import sys
import threading
import time
from typing import Any

from ..errors import MissingDependency, SkywardError, Unreachable
from . import launch
from .command import run_process
from .connection import Connection
from .folder import close_folder, connecting, kill_process, make_folder, record_process
from .target import SSHTarget

_CHECK_S = 8.0
"""Seconds after which a holder that does not answer is replaced, with all its commands: a busy machine can be slow."""
_NO_CONNECTION = 255
_TRIES = 3
_PAUSE_S = 0.1
_LENGTH = struct.Struct("<I")


def pure(target: SSHTarget) -> Connection:
    """Build a Connection through paramiko. Raises MissingDependency; UsageError if the key file does not exist."""
    if importlib.util.find_spec("paramiko") is None:
        raise MissingDependency(
            "transport='paramiko': paramiko, which replaces `ssh`, is not installed; run `pip install 'skyward[ssh]'`",
            name="paramiko",
        )
    target.check_key_file()
    return Connection(ParamikoHolder(target, make_folder()), __name__)


class ParamikoHolder:
    """Holder that runs `skyward.ssh.pure_process`, whose socket the relays use."""

    def __init__(self, target: SSHTarget, folder: str) -> None:
        self.target = target
        self.folder = folder
        self.socket_path = os.path.join(folder, "p.sock")

    def ensure(self, stop: threading.Event | None = None, timeout_s: float = math.inf) -> None:
        limit_s = min(timeout_s, self.target.connect_timeout_s)
        with connecting(self.target, self.folder, limit_s):
            if not self._pid():
                kill_process(self.folder)
                with contextlib.suppress(FileNotFoundError):  # no socket remained
                    os.unlink(self.socket_path)
                self._start(stop, limit_s)

    def command(self, command: str) -> list[str]:
        return launch.argv(__name__, self.folder, self.target, command)

    def dial(self, port: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.socket_path)
            send(connection, {"port": port})
            connection.recv(1)  # the holder is ready for our bytes, or has closed the connection
        except OSError:
            connection.close()
            raise
        return connection

    def is_alive(self) -> bool:
        return self._pid() != 0

    def end(self) -> None:
        close_folder(self.folder, self._pid)

    def _start(self, stop: threading.Event | None, limit_s: float) -> None:
        target = self.target
        argv = launch.argv("skyward.ssh.pure_process", self.folder, target, "")
        done = run_process(argv, timeout_s=limit_s, stop=stop)
        if done.code:
            raise _error_of(target, done.text, done.error_text)
        record_process(self.folder, int(done.text))

    def _pid(self) -> int:
        """Return the pid of a process that answers, or 0."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_CHECK_S)
                sock.connect(self.socket_path)
                send(sock, {})
                answer, _ = receive(sock)
                return int(answer.get("pid", 0))
        except (OSError, EOFError):  # a holder that does not answer is as good as none
            return 0


def _error_of(target: SSHTarget, text: str, stderr: str) -> SkywardError:
    """Read the error that the process sent before it gave up. Unpickling is safe: only we write to that pipe."""
    if text.startswith("error "):
        error: SkywardError = pickle.loads(base64.b64decode(text.split()[1]))
        return error
    why = stderr or "could not connect"
    advice = "check that the machine is on, and that `ssh` reaches it from here"
    return Unreachable(f"ssh {target}: {why}; {advice}", host=str(target), is_final=False)


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    socket.send_fds(sock, [_LENGTH.pack(len(data)) + data], list(fds))


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and its descriptors. Raises EOFError."""
    data, fds, _, _ = socket.recv_fds(sock, 65536, 3)
    while len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]:
        piece = sock.recv(65536)
        if not piece:
            raise EOFError("the peer is gone")
        data += piece
    return json.loads(data[_LENGTH.size :]), fds


def main(folder: str, target: SSHTarget, command: str) -> None:
    """Relay a command to the holder and exit with its code."""
    holder = ParamikoHolder(target, folder)
    answer: dict[str, Any] = {"has_begun": False}
    for _ in range(_TRIES):
        holder.ensure()
        answer = _run(holder, command)
        if answer.get("has_begun", True):
            break  # a command that may have begun must not run twice
        time.sleep(_PAUSE_S)  # the holder has just lost its connection and is exiting
    if "error" in answer:
        sys.stderr.write(f"skyward: ssh {target}: {answer['error']}\n")
    sys.exit(answer.get("code", _NO_CONNECTION))


def _run(holder: ParamikoHolder, command: str) -> dict[str, Any]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(holder.socket_path)
            except OSError as error:  # reported by the return value
                return {"error": str(error), "has_begun": False}
            send(sock, {"command": command}, (0, 1, 2))
            answer, _ = receive(sock)
            return answer
    except (OSError, EOFError):  # reported by the return value
        return {"error": "the connection was lost"}
