"""Ports of nodes on this machine's loopback: a listener here, and a connection of the node for each of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from ..core.process import is_readable
from ..errors import SkywardError, UsageError

_LOOPBACK = "127.0.0.1"
_PIECE = 64 * 1024
_LAST_PORT = 65535
_LOOK_S = 0.2
_MOST = 256
"""Most connections at once; further ones wait in the listener's queue."""


class ForwardedPort:
    """A node's port on this machine's loopback. Made by `pool.forward`; ends with `close`, its block, or the pool.

    Thread-safe. Nobody outside of this machine can connect, but every user of this machine can.

    Example:
        with pool.forward(6006) as port:
            print(port.url)  # http://127.0.0.1:6006
    """

    def __init__(
        self,
        dial: Callable[[int], socket.socket],
        remote: int,
        local: int | None,
        on_close: Callable[[ForwardedPort], None],
    ) -> None:
        self._dial = dial
        self._remote = remote
        self._on_close = on_close
        self._listener = _listener(remote, local)
        self._lock = threading.Lock()
        self._open: set[tuple[socket.socket, socket.socket]] = set()
        self._room = threading.BoundedSemaphore(_MOST)
        self._closing = threading.Event()
        self.port: int = self._listener.getsockname()[1]
        """Port on this machine."""
        self._thread = threading.Thread(target=self._accept, name=f"skyward-port-{self.port}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Address on this machine, for `socket.create_connection`."""
        return _LOOPBACK, self.port

    @property
    def url(self) -> str:
        """URL of the port for a browser."""
        return f"http://{_LOOPBACK}:{self.port}"

    def close(self) -> None:
        """Close the port and its connections. Idempotent."""
        self._on_close(self)
        self.end(None)

    def end(self, reason: SkywardError | None) -> None:
        """Close the port because its pool ends. Idempotent."""
        self._closing.set()
        with self._lock:
            for ends in self._open:
                _shut(*ends)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<port {self._remote} of a node at {_LOOPBACK}:{self.port}>"

    def _accept(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                if not is_readable(self._listener, _LOOK_S) or not self._room.acquire(timeout=_LOOK_S):
                    continue
                try:
                    near, _ = self._listener.accept()
                except OSError:  # the program that connected has given up
                    self._room.release()
                    continue
                threading.Thread(target=self._serve, args=(near,), name="skyward-port", daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        """Connect to the node's port, and move bytes both ways until both directions have ended."""
        with near, contextlib.suppress(OSError, SkywardError):  # the program here sees a connection that is closed
            try:
                with self._dial(self._remote) as far:
                    self._relay(near, far)
            finally:
                self._room.release()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        ends = (near, far)
        with self._lock:
            self._open.add(ends)
        try:
            up = threading.Thread(target=_pump, args=ends, name="skyward-port-up", daemon=True)
            up.start()
            if self._closing.is_set():
                _shut(*ends)
            _pump(far, near)
            up.join()
        finally:
            with self._lock:
                self._open.discard(ends)


def check_port(field: str, port: object) -> int:
    """Return a TCP port. Raises UsageError."""
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= _LAST_PORT:
        text = f"{field}={port!r}: is not a TCP port; pass a number from 1 to {_LAST_PORT}"
        raise UsageError(text, field=field, value=port)
    return port


def _listener(remote: int, local: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((_LOOPBACK, remote if local is None else local))
        except OSError:  # in use, or for root alone
            if local is not None:
                raise
            listener.bind((_LOOPBACK, 0))
    except OSError as error:
        listener.close()
        text = f"local={local}: cannot be used here: {error.strerror}; leave it out for a free port"
        raise UsageError(text, field="local", value=local) from error
    listener.listen(128)
    return listener


def _pump(source: socket.socket, to: socket.socket) -> None:
    """Move bytes until the source ends, and pass that end on: the other direction may go on. Errors end both."""
    try:
        while piece := source.recv(_PIECE):
            to.sendall(piece)
        to.shutdown(socket.SHUT_WR)
    except OSError:  # one of the two is gone
        _shut(source, to)


def _shut(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):  # not connected anymore
            one.shutdown(socket.SHUT_RDWR)
