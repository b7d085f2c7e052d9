"""A run's HTTP: one thread, one event loop, beside training. What clients do, or fail to do, costs training nothing.

Every connection brings one request, within a deadline, of bounded size, and is closed behind the answer. There are so
many connections at once; when one more comes, the one that has not brought its request for longest makes room, so
clients that are slow on purpose keep nobody out. Requests that wait do so in a few threads, which sleep.

Who may ask: first the Host header must name this machine by address, as "localhost" or as it was bound, and an Origin
its own, so that no web page reaches a run through a browser (DNS rebinding); then comes the bearer token, before
anything that a request says is looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import ipaddress
import json
import logging
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from urllib.parse import unquote_to_bytes

from ...errors import UsageError
from .api import BODY_LIMIT, Answer, Request, answer
from .commands import Books

__all__ = ["FIRST_PORT", "ControlServer", "bind", "is_loopback"]

FIRST_PORT = 8900
"""The first that is tried, and 99 after it."""
_PORTS = 100
MAX_CONNECTIONS = 32
MAX_WAITING = 8
"""Requests that wait at once; one more is answered at once."""
REQUEST_S = 10.0
"""Seconds in which a whole request must be here."""
ANSWER_S = 10.0
"""Seconds in which the whole answer must be taken."""
DRAIN_S = 1.0
LAST_WORDS_S = 2.0
"""Seconds for the answers that are on their way when the run ends."""
_HEAD_LIMIT = 16 * 1024
_MAX_HEADERS = 64
_START_S = 10.0

_log = logging.getLogger(__name__)


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens there, on the port given (0: any that is free), or on the first free one from 8900 on.

    Raises: UsageError.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"host: {host!r} is no address of this machine: {error}") from error
    for tried in range(FIRST_PORT, FIRST_PORT + _PORTS) if port is None else (port,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address[0], tried))
            sock.listen(MAX_CONNECTIONS)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            raise UsageError(f"port: cannot listen on {host} port {tried}: {error.strerror}") from error
        return sock
    raise UsageError(f"port: {host} has no free port from {FIRST_PORT} to {FIRST_PORT + _PORTS - 1}; give one, or 0")


class ControlServer:
    """Answers for `runs` on a socket that listens, from `start` to `close`.

    token: what a request must bring; None: nothing.
    """

    def __init__(self, runs: Iterable[Books], sock: socket.socket, *, host: str, token: str | None) -> None:
        self._runs = list(runs)
        self._sock = sock
        self._host = host.lower()
        self._token = None if token is None else token.encode()
        self._loop = asyncio.new_event_loop()
        self._open: dict[_Connection, None] = {}
        self._waiting = 0
        self._stop = asyncio.Event()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyward-control", daemon=True)

    @property
    def port(self) -> int:
        return int(self._sock.getsockname()[1])

    def start(self) -> None:
        """Returns when requests are answered. Raises: UsageError."""
        self._thread.start()
        if not self._is_up.wait(_START_S):
            raise UsageError(f"port: nothing answers on port {self.port} after {_START_S:g} s")

    def close(self) -> None:
        """Gives answers that are on their way a moment, then closes everything. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(LAST_WORDS_S + 5)

    # The thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        self._is_up.set()
        await self._stop.wait()
        accepting.cancel()
        # A fork of the run, a loader's worker say, may hold the socket too: closed alone, it would still listen.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for connection in list(self._open):
            if not connection.is_wanted:
                connection.task.cancel()
        tasks = [connection.task for connection in self._open]
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        for task in (*tasks, accepting):
            task.cancel()
        await asyncio.gather(*tasks, accepting, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:  # no descriptors are left, or the peer has gone again
                if self._sock.fileno() < 0:
                    return
                _log.debug("control: a connection was not taken: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._open) >= MAX_CONNECTIONS:
                slowest = next((each for each in self._open if not each.is_wanted), None)
                if slowest is None:
                    sock.close()
                    continue
                slowest.task.cancel()
                self._open.pop(slowest, None)
            sock.setblocking(False)
            connection = _Connection(sock)
            self._open[connection] = None
            connection.task = asyncio.create_task(self._talk(connection))
            # Not within the task: one that is cancelled before it begins runs nothing.
            connection.task.add_done_callback(partial(self._forget, connection))

    async def _talk(self, connection: _Connection) -> None:
        try:
            try:
                async with asyncio.timeout(REQUEST_S):
                    said = await self._hear(connection)
            except TimeoutError:
                said = _error(408, "the request did not come in time")
            connection.is_wanted = isinstance(said, Request)
            reply = await self._answered(said) if isinstance(said, Request) else said
            async with asyncio.timeout(ANSWER_S):
                await self._loop.sock_sendall(connection.sock, _as_http(reply))
            connection.is_wanted = False
            async with asyncio.timeout(DRAIN_S):
                await self._drain(connection)
        except (OSError, TimeoutError, EOFError):
            pass  # the client went, or reads nothing
        except Exception:
            _log.exception("control: a request failed; training goes on")

    def _forget(self, connection: _Connection, _: object) -> None:
        self._open.pop(connection, None)
        connection.sock.close()

    async def _drain(self, connection: _Connection) -> None:
        """What the client still sends is read away, a little: closed over it, the answer would be lost too."""
        connection.sock.shutdown(socket.SHUT_WR)
        for _ in range(8):
            if not await self._loop.sock_recv(connection.sock, 1 << 16):
                return

    # One request ----------------------------------------------------------------------------------------------------

    async def _hear(self, connection: _Connection) -> Request | Answer:
        """The request, or why it is refused."""
        head = await self._head(connection)
        if isinstance(head, Answer):
            return head
        refused = self._refused(head)
        if refused is not None:
            return refused
        body = b""
        size = head.body_size
        if isinstance(size, Answer):
            return size
        if size:
            if head.values("expect"):
                await self._loop.sock_sendall(connection.sock, b"HTTP/1.1 100 Continue\r\n\r\n")
            while len(connection.data) < size:
                await self._more(connection, size - len(connection.data))
            body = bytes(connection.data[:size])
        path, _, query = head.target.partition("?")
        # A path that is no UTF-8 names nothing here, and is a 404.
        return Request(
            method=head.method, path=unquote_to_bytes(path).decode("utf-8", "replace"), query=query, body=body
        )

    async def _head(self, connection: _Connection) -> _Head | Answer:
        data = connection.data
        while (end := data.find(b"\r\n\r\n")) < 0:
            if len(data) > _HEAD_LIMIT:
                return _error(431, f"the head of a request is at most {_HEAD_LIMIT} bytes")
            await self._more(connection, _HEAD_LIMIT)
        lines = bytes(data[:end]).split(b"\r\n")
        del data[: end + 4]
        return _parsed(lines)

    async def _more(self, connection: _Connection, at_most: int) -> None:
        piece = await self._loop.sock_recv(connection.sock, min(at_most, 1 << 16) or 1)
        if not piece:
            raise EOFError
        connection.data += piece

    def _refused(self, head: _Head) -> Answer | None:
        hosts = head.values("host")
        if len(hosts) != 1:
            return _error(400, "one Host header is needed")
        if not self._is_ours(hosts[0]):
            return _error(403, "the Host header does not name this machine; use its address, or localhost")
        if any(origin.partition(b"://")[2] != hosts[0] for origin in head.values("origin")):
            return _error(403, "requests of other sites are refused")
        if self._token is None:
            return None
        scheme, _, given = (head.values("authorization") or [b""])[0].partition(b" ")
        is_right = hmac.compare_digest(given.strip(), self._token)  # any bytes; the time says nothing of them
        if is_right and scheme.lower() == b"bearer" and len(head.values("authorization")) == 1:
            return None
        return Answer(
            status=401,
            body={"error": "the run's token is needed: Authorization: Bearer TOKEN"},
            headers=(("WWW-Authenticate", 'Bearer realm="skyward"'),),
        )

    def _is_ours(self, host: bytes) -> bool:
        """An address cannot be rebound; a name can, but for those that we know."""
        name = host.decode("latin-1").lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        names = {"localhost", self._host}
        if not is_loopback(self._host):
            names |= {socket.gethostname().lower()}
        return name in names

    async def _answered(self, request: Request) -> Answer:
        """Here at once, or, where it waits, by a thread that may sleep."""
        now = answer(self._runs, request, may_wait=False)
        if now.status != HTTPStatus.ACCEPTED or "wait=" not in request.query or self._waiting >= MAX_WAITING:
            return now
        if request.method == "POST":  # it is entered; what is left is to wait for it
            path = f"/jobs/{request.path.split('/')[2]}/commands/{now.body['request_id']}"
            request = Request(method="GET", path=path, query=request.query)
        self._waiting += 1
        try:
            return await self._in_a_thread(request)
        finally:
            self._waiting -= 1

    async def _in_a_thread(self, request: Request) -> Answer:
        """A daemon, unlike those of an executor: a run that ends by an exception does not wait for it."""
        done: asyncio.Future[Answer] = self._loop.create_future()

        def wait() -> None:
            reply = answer(self._runs, request)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(reply))

        threading.Thread(target=wait, name="skyward-control-wait", daemon=True).start()
        return await done


@dataclass(eq=False)
class _Connection:
    """`is_wanted`: its request is here, may be made, and is not answered yet."""

    sock: socket.socket
    data: bytearray = field(default_factory=bytearray)
    is_wanted: bool = False
    task: asyncio.Task[None] = field(init=False)


@dataclass(frozen=True, kw_only=True)
class _Head:
    """A request's first line and its headers; names in lower case, values as they came."""

    method: str
    target: str
    headers: tuple[tuple[str, bytes], ...]

    def values(self, name: str) -> list[bytes]:
        return [value for each, value in self.headers if each == name]

    @property
    def body_size(self) -> int | Answer:
        if self.values("transfer-encoding"):
            return _error(501, "a body needs a Content-Length")
        sizes = set(self.values("content-length"))
        if not sizes:
            return 0
        size = sizes.pop()
        if sizes or not size.isdigit() or len(size) > 18:
            return _error(400, "Content-Length is not a number of bytes")
        if int(size) > BODY_LIMIT:
            return _error(413, f"a body is at most {BODY_LIMIT} bytes")
        return int(size)


def _parsed(lines: list[bytes]) -> _Head | Answer:
    parts = lines[0].split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1.") or not parts[0].isalpha():
        return _error(400, "this is no HTTP/1.1 request")
    if len(lines) - 1 > _MAX_HEADERS:
        return _error(431, f"a request has at most {_MAX_HEADERS} headers")
    headers = []
    for line in lines[1:]:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip() or b"\n" in line or b"\r" in line or b"\0" in line:
            return _error(400, "a header is not one")
        headers.append((name.decode("latin-1").lower(), value.strip(b" \t")))
    return _Head(method=parts[0].decode("ascii"), target=parts[1].decode("latin-1"), headers=tuple(headers))


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
