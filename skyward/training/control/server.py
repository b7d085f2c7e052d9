"""HTTP server of a run, on the standard library's parser. One thread accepts, and each connection has one that answers.

Its clients are processes of one user on one machine, by a socket in a private folder. If a port is enabled, everyone
who reaches it can connect. Each connection carries one request, of bounded size and within a deadline, and is closed
after the answer. The number of connections is bounded: beyond it the slowest is dropped, so that slow clients keep
nobody out. `http.server.ThreadingHTTPServer` bounds none of this, so only its request parser is used. A server
package was rejected: every run would depend on it for five routes.

At a port, the Host header must name this machine: by an address, as "localhost", or by the bound name. An Origin must
match it. Otherwise a web page could reach a run through a browser (DNS rebinding). Then the bearer token is checked.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from email.message import Message
from http import HTTPStatus
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote_to_bytes

from ...core.ownership import runtime_folder
from ...errors import UsageError
from .api import BODY_LIMIT, Answer, ControlRequest, answer
from .commands import ControlledRun

FIRST_PORT = 8900
"""First port to try; 99 more follow."""
_PORTS = 100
MAX_CONNECTIONS = 32
MAX_WAITING = 8
"""Number of requests that may wait at the same time. Further ones are answered without a wait."""
REQUEST_S = 10.0
"""Deadline for receiving a whole request, in seconds."""
ANSWER_S = 10.0
"""Deadline for sending a whole answer, in seconds."""
DRAIN_S = 1.0
LAST_WORDS_S = 2.0
"""Time for unfinished answers when the run ends, in seconds."""
_REQUEST_LIMIT = 16 * 1024 + BODY_LIMIT
_LOOK_S = 1.0
"""Longest pause between two checks whether the run has ended, in seconds; `close` wakes `accept` earlier."""

_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name instead of an address
        return host == "localhost"


def bind(host: str, port: int | None, *, first: int = FIRST_PORT) -> socket.socket:
    """Return a listening socket.

    Args:
        host: address to bind.
        port: port to bind, 0 for any free one; None: the first free one from `first` on.
        first: first port to try.

    Raises:
        UsageError: the address or the port cannot be bound.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host={host!r}: not an address of this machine: {error}; set host='127.0.0.1'") from error
    for candidate in range(first, first + _PORTS) if port is None else (port,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address[0], candidate))
            sock.listen(MAX_CONNECTIONS)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"host={host!r}: not an address of this machine; set one of its own, or host='127.0.0.1'"
                ) from error
            raise UsageError(
                f"port={candidate}: cannot listen on {host}: {error.strerror}; set another port, or 0"
            ) from error
        return sock
    raise UsageError(
        f"port=None: {host} has no free port from {first} to {first + _PORTS - 1}; set port=, or 0 for any"
    )


def bind_local() -> socket.socket:
    """Return a listening socket for processes of this user on this machine, mode 0600 in a folder of mode 0700.

    Raises:
        UsageError: the socket cannot be created.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path = os.path.join(runtime_folder("skyward-jobs"), secrets.token_hex(8))
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(MAX_CONNECTIONS)
    except OSError as error:
        sock.close()
        raise UsageError(f"control socket: cannot be created: {error}; set TMPDIR to a folder of yours") from error
    except UsageError:
        sock.close()
        raise
    return sock


@dataclass(frozen=True, kw_only=True)
class AccessCheck:
    """Access rules of a port: the bound `host`, and the `token` that requests need; None: no token."""

    host: str
    token: str | None = field(repr=False)

    def refusal(self, headers: Message) -> Answer | None:
        """Return the refusal of a request, or None. Only its headers have been parsed so far."""
        hosts = _values(headers, "host")
        if len(hosts) != 1:
            return _error(400, "Host: exactly one such header is required; send it once")
        if not self._is_ours(hosts[0]):
            return _error(403, "Host: does not name this machine; use its address, or localhost")
        if any(origin.partition("://")[2] != hosts[0] for origin in _values(headers, "origin")):
            return _error(403, "Origin: requests from other sites are refused; send them from a program")
        if self.token is None:
            return None
        values = _values(headers, "authorization")
        scheme, _, token = (values or [""])[0].partition(" ")
        # The token can be any bytes. The comparison takes constant time, so its duration reveals nothing.
        is_right = hmac.compare_digest(token.strip().encode("utf-8", "replace"), self.token.encode())
        if is_right and scheme.lower() == "bearer" and len(values) == 1:
            return None
        return Answer(
            status=401,
            body={"error": "Authorization: the run's token is required; send Authorization: Bearer TOKEN"},
            headers=(("WWW-Authenticate", 'Bearer realm="skyward"'),),
        )

    def _is_ours(self, host: str) -> bool:
        """Return whether a Host header names this machine. DNS can rebind a name, but not an address."""
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        with contextlib.suppress(ValueError):  # a name, checked below
            ipaddress.ip_address(name)
            return True
        bound = self.host.lower()
        return name in {"localhost", bound} or (not is_loopback(bound) and name == socket.gethostname().lower())


class ControlServer:
    """Answer for `runs` on a listening socket, from `start` to `close`.

    Args:
        runs: runs that it answers for.
        sock: the listening socket; the server closes it.
        gate: access rules; None: everyone who reaches the socket may ask.
    """

    def __init__(self, runs: Iterable[ControlledRun], sock: socket.socket, *, gate: AccessCheck | None = None) -> None:
        self.runs = list(runs)
        self.gate = gate
        self.waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._sock = sock
        self._address: Any = sock.getsockname()
        self._open: dict[_Connection, None] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="skyward-control", daemon=True)

    @property
    def host(self) -> str:
        """Address of the port."""
        return str(self._address[0])

    @property
    def port(self) -> int:
        return int(self._address[1])

    @property
    def path(self) -> str:
        """Path of a local socket."""
        return str(self._address)

    def start(self) -> None:
        """Start answering requests."""
        self._sock.settimeout(_LOOK_S)
        self._thread.start()

    def close(self) -> None:
        """Give unfinished answers a moment, then close everything. Idempotent."""
        self._stop.set()
        with contextlib.suppress(OSError), socket.socket(self._sock.family) as waker:  # wakes `accept`
            waker.settimeout(_LOOK_S)
            waker.connect(self._address)
        # A fork of the run, such as a data loader's worker, may hold the socket too. Without the shutdown, closing it
        # here would leave it listening.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join(_LOOK_S + 5)
        self._sock.close()
        if self._sock.family == socket.AF_UNIX:
            with contextlib.suppress(FileNotFoundError):  # someone cleared the folder
                os.unlink(self.path)
        # No connection is added from here on. Those without an accepted request end at once; the others may still
        # deliver their answers, such as the end of the run that a client waits for.
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            if not connection.is_wanted:
                connection.give_up()
        deadline = time.monotonic() + LAST_WORDS_S
        for connection in connections:
            connection.thread.join(max(0.0, deadline - time.monotonic()))
        for connection in connections:
            connection.give_up()
            connection.thread.join(1.0)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:  # check whether the run has ended
                continue
            except OSError as error:  # out of descriptors, or the client is gone, or the run ends
                if not self._stop.wait(0.1):
                    _log.debug("control: could not accept a connection: %s", error)
                continue
            if self._stop.is_set():
                sock.close()
                return
            connection = _Connection(sock)
            connection.thread = threading.Thread(
                target=self._talk, args=(connection,), name="skyward-control-request", daemon=True
            )
            if not self._admit(connection):
                sock.close()
                continue
            try:
                connection.thread.start()
            except RuntimeError as error:  # out of threads: this request gets no answer, but later ones may
                _log.warning("control: could not answer a request: %s", error)
                self._drop(connection)

    def _admit(self, connection: _Connection) -> bool:
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                slowest = next((other for other in self._open if not other.is_wanted), None)
                if slowest is None:
                    return False
                slowest.give_up()
                del self._open[slowest]
            self._open[connection] = None
            return True

    def _talk(self, connection: _Connection) -> None:
        try:
            _Handler(self, connection).answer()
        except (OSError, EOFError):
            pass  # the client is gone, or does not read
        except Exception:
            _log.exception("control: a request failed; training continues")
        finally:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        with self._lock:
            self._open.pop(connection, None)
        connection.sock.close()


@dataclass(eq=False)
class _Connection:
    """One connection. `is_wanted`: its request has arrived, is allowed, and is not answered yet."""

    sock: socket.socket
    is_wanted: bool = False
    thread: threading.Thread = field(init=False)

    def give_up(self) -> None:
        """End whatever its thread waits for."""
        with contextlib.suppress(OSError):  # the client has closed it already
            self.sock.shutdown(socket.SHUT_RDWR)


class _BoundedReader(io.RawIOBase):
    """Reader of a socket with a deadline and a limit of `_REQUEST_LIMIT` bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._deadline = time.monotonic() + REQUEST_S
        self._left = _REQUEST_LIMIT

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            raise HTTPException("too large")
        self._sock.settimeout(max(0.001, self._deadline - time.monotonic()))
        count = self._sock.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    """One request. The library parses its head; this class reads, refuses and answers within the bounds."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.1"  # so that garbage gets an answer with headers too

    def __init__(self, server: ControlServer, connection: _Connection) -> None:
        self._control = server
        self._connection = connection
        self.rfile = io.BufferedReader(_BoundedReader(connection.sock))

    def answer(self) -> None:
        """Read the request and answer it. Raise OSError or EOFError if the client is gone or does not read."""
        try:
            received = self._receive()
        except TimeoutError:
            received = _error(408, "request: did not arrive in time; send it again")
        except HTTPException:
            received = _error(431, f"request: its headers have more than {_REQUEST_LIMIT} bytes; send fewer")
        if received is None:
            return
        self._connection.is_wanted = isinstance(received, ControlRequest)
        self._send(_as_http(self._answered(received) if isinstance(received, ControlRequest) else received))
        self._connection.is_wanted = False
        self._drain()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send a refusal of the library."""
        self._send(_as_http(_error(code, (message or HTTPStatus(code).phrase)[:200])))
        self._drain()

    def handle_expect_100(self) -> bool:
        self._send(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _receive(self) -> ControlRequest | Answer | None:
        """Return the request, or its refusal; None: the library has refused it already."""
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline:
            raise EOFError
        if not self.parse_request():
            return None
        gate = self._control.gate
        refused = None if gate is None else gate.refusal(self.headers)
        size = _body_size(self.headers) if refused is None else refused
        if isinstance(size, Answer):
            return size
        body = self.rfile.read(size)
        if len(body) < size:
            raise EOFError
        path, _, query = self.path.partition("?")
        # A path that is not UTF-8 matches nothing here and becomes a 404.
        return ControlRequest(
            method=self.command, path=unquote_to_bytes(path).decode("utf-8", "replace"), query=query, body=body
        )

    def _answered(self, request: ControlRequest) -> Answer:
        if "wait=" not in request.query or not self._control.waiting.acquire(blocking=False):
            return answer(self._control.runs, request, may_wait=False)
        try:
            return answer(self._control.runs, request)
        finally:
            self._control.waiting.release()

    def _send(self, data: bytes) -> None:
        self._connection.sock.settimeout(ANSWER_S)
        self._connection.sock.sendall(data)

    def _drain(self) -> None:
        """Read a little of what the client still sends: closing earlier resets the connection and loses the answer."""
        sock = self._connection.sock
        sock.shutdown(socket.SHUT_WR)
        sock.settimeout(DRAIN_S)
        for _ in range(8):
            if not sock.recv(1 << 16):
                return


def _values(headers: Message, name: str) -> list[str]:
    return [str(value).strip() for value in headers.get_all(name, [])]


def _body_size(headers: Message) -> int | Answer:
    if _values(headers, "transfer-encoding"):
        return _error(501, "Content-Length: a body requires it; send the number of bytes")
    sizes = set(_values(headers, "content-length")) or {"0"}
    size = sizes.pop()
    if sizes or not (size.isascii() and size.isdigit()) or len(size) > 18:
        return _error(400, "Content-Length: is not a number of bytes; send one")
    if int(size) > BODY_LIMIT:
        return _error(413, f"body: has more than {BODY_LIMIT} bytes; send less")
    return int(size)


def _error(status: int, message: str) -> Answer:
    return Answer(status=status, body={"error": message})


def _as_http(reply: Answer) -> bytes:
    body = json.dumps(reply.body, allow_nan=False).encode()
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(f"{name}: {value}" for name, value in reply.headers),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
