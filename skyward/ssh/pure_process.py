"""Process that holds a paramiko connection and runs commands on it, for the relays of `pure`.

It prints its pid on standard output when it is ready, or the reason why it is not, and then goes into the background.
It exits after a while without users, and when the machine has been silent for too long.
"""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time

import paramiko

from ..errors import SkywardError
from .login import Login
from .pure import receive, send
from .target import SSHTarget

_PERSIST_S = 20.0
_ALIVE_S = 3.0
_SILENT_S = 12.0
"""Seconds of silence, despite a request every 3 seconds, after which a machine counts as gone."""
_PIECE = 256 * 1024
_LOOK_S = 0.5


def main(folder: str, target: SSHTarget, _: str) -> None:
    ready, report = os.pipe()
    if os.fork():  # before any thread starts: fork copies only the calling thread
        os.close(report)
        with open(ready, "rb") as pipe:
            text = pipe.read()
        os.write(1, text)
        sys.exit(0 if text and not text.startswith(b"error") else 1)
    os.close(ready)
    try:
        login = Login(target)
        login.connect()
        server = _Server(folder, login)
    except SkywardError as error:
        os.write(report, b"error " + base64.b64encode(pickle.dumps(error)))
        os._exit(1)
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.write(report, str(os.getpid()).encode())
    os.close(report)
    server.serve()
    os._exit(0)  # not sys.exit: threads may still wait on descriptors of users


class _Server:
    def __init__(self, folder: str, login: Login) -> None:
        self._login = login
        self._path = os.path.join(folder, "p.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        self._listener.bind(self._path)
        os.umask(old_mask)
        self._listener.listen(64)
        self._lock = threading.Lock()
        self._users = 0
        self._last_use = time.monotonic()

    def serve(self) -> None:
        """Serve until there was no user for a while, or the connection is gone."""
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        threading.Thread(target=self._keep_alive, daemon=True).start()
        self._listener.settimeout(_LOOK_S)
        while self._login.is_active and not self._is_idle():
            with contextlib.suppress(TimeoutError):  # no user came; check the connection again
                user, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(user,), daemon=True).start()
        self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # a successor has already removed it
            os.unlink(self._path)
        self._login.close()
        os._exit(0)

    def _is_idle(self) -> bool:
        with self._lock:
            return not self._users and time.monotonic() - self._last_use > _PERSIST_S

    def _keep_alive(self) -> None:
        """Leave when the machine is silent: paramiko ignores lost keepalives, so a cut link would live for minutes."""
        asking = threading.Event()

        def ask() -> None:
            while self._login.is_active:
                self._login.ask()
                asking.wait(_ALIVE_S)

        threading.Thread(target=ask, daemon=True).start()
        while time.monotonic() - self._login.heard < _SILENT_S:
            time.sleep(_LOOK_S)
        self._leave()

    def _serve(self, user: socket.socket) -> None:
        with self._lock:
            self._users += 1
        fds: list[int] = []
        try:
            with user:
                request, fds = receive(user)
                if "command" in request:
                    self._run(request["command"], fds, user)
                elif "port" in request:
                    self._connect(request["port"], user)
                else:
                    send(user, {"pid": os.getpid() if self._login.is_active else 0})
        except (OSError, EOFError):
            return  # the user is gone
        finally:
            for fd in fds:
                os.close(fd)
            with self._lock:
                self._users -= 1
                self._last_use = time.monotonic()

    def _connect(self, port: int, user: socket.socket) -> None:
        """Move bytes between the user's socket and a port of the machine, until both directions have ended."""
        try:
            channel = self._login.open_port(port)
        except (paramiko.SSHException, EOFError, OSError):  # the user sees a connection that is closed
            return
        user.sendall(b"\1")
        down = threading.Thread(target=_down, args=(channel, user), daemon=True)
        down.start()
        try:
            while piece := user.recv(_PIECE):
                channel.sendall(piece)
            channel.shutdown_write()
        except (OSError, EOFError):  # one of the two is gone
            channel.close()
        down.join()
        channel.close()

    def _run(self, command: str, fds: list[int], user: socket.socket) -> None:
        try:
            channel = self._login.open_session()
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            send(user, {"error": f"no session: {error}", "has_begun": False})
            return
        _Session(channel, fds, user).run()


class _Session:
    """One command: moves its streams between the channel and the user's descriptors until either side ends."""

    def __init__(self, channel: paramiko.Channel, fds: list[int], user: socket.socket) -> None:
        self._channel = channel
        self._fds = fds
        self._user = user

    def run(self) -> None:
        channel = self._channel
        stdin, stdout, stderr = self._fds
        pumps = [
            threading.Thread(target=self._up, args=(stdin,), daemon=True),
            threading.Thread(target=self._down, args=(channel.recv, stdout), daemon=True),
            threading.Thread(target=self._down, args=(channel.recv_stderr, stderr), daemon=True),
        ]
        watch = threading.Thread(target=self._watch, daemon=True)
        for thread in (*pumps, watch):
            thread.start()
        for thread in pumps[1:]:
            thread.join()
        code = channel.recv_exit_status()
        channel.close()
        pumps[0].join()
        with contextlib.suppress(OSError):  # the user is gone
            send(self._user, {"code": code} if code >= 0 else {"error": "the connection was lost"})
            self._user.shutdown(socket.SHUT_RDWR)
        watch.join()

    def _watch(self) -> None:
        """Close the channel when the user is killed: that ends the command's input, and nobody reads its output."""
        with contextlib.suppress(OSError):  # the user is gone
            self._user.recv(1)
        self._channel.close()

    def _up(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        channel = self._channel
        try:
            while not channel.closed:
                if not poll.poll(_LOOK_S * 1000):
                    continue
                try:
                    piece = os.read(fd, _PIECE)
                except BlockingIOError:  # nothing to read after all
                    continue
                if not piece:
                    break
                channel.sendall(piece)
        except OSError:
            return  # the command has closed its input
        finally:
            with contextlib.suppress(OSError, EOFError):  # the connection is gone, and the command's input with it
                channel.shutdown_write()

    def _down(self, receive_piece: object, fd: int) -> None:
        assert callable(receive_piece)
        try:
            while piece := receive_piece(_PIECE):
                _write_all(fd, piece)
        except OSError:
            return  # the output has no reader; `_watch` notices when the user is gone


def _down(channel: paramiko.Channel, user: socket.socket) -> None:
    try:
        while piece := channel.recv(_PIECE):
            user.sendall(piece)
        user.shutdown(socket.SHUT_WR if not channel.closed else socket.SHUT_RDWR)
    except OSError:  # the user is gone
        channel.close()


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
