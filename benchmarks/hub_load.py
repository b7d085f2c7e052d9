"""Load: requests over kept connections, each of which waits for its answer before it sends the next."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

ANSWER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """The result of a load.

    Attributes:
        seconds: Time from the first request to the last answer.
        latencies_s: Seconds of each request, in ascending order.
    """

    seconds: float
    latencies_s: list[float]

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    @property
    def p99_s(self) -> float:
        return self.latencies_s[int(0.99 * (len(self.latencies_s) - 1))]


def drive(
    port: int,
    headers: Mapping[str, str],
    path: str,
    body: Callable[[int], bytes],
    *,
    connections: int,
    seconds: float,
) -> Load:
    """POST `body(n)` for n = 0, 1, ... until the time is over. An answer other than 200 ends the benchmark.

    The load and the servers share the machine. Where the servers' own rate counts, `body` returns JSON made before.
    """
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n{lines}Content-Length: "
    )

    def request(number: int) -> bytes:
        data = body(number)
        return f"{head}{len(data)}\r\n\r\n".encode() + data

    selector = selectors.DefaultSelector()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
    sent: dict[socket.socket, float] = {}
    latencies: list[float] = []
    began = time.perf_counter()
    number = 0
    for connection in sockets:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(connection, selectors.EVENT_READ, bytearray())
        sent[connection] = time.perf_counter()
        connection.sendall(request(number))
        number += 1
    while sent:
        ready = selector.select(ANSWER_S)
        if not ready:
            raise SystemExit(f"{path}: no answer in {ANSWER_S:g} s")
        for key, _ in ready:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            key.data.extend(connection.recv(65536))
            if not _is_whole(key.data):
                continue
            key.data.clear()
            now = time.perf_counter()
            latencies.append(now - sent.pop(connection))
            if now - began < seconds:
                sent[connection] = now
                connection.sendall(request(number))
                number += 1
    spent = time.perf_counter() - began
    selector.close()
    for connection in sockets:
        connection.close()
    return Load(seconds=spent, latencies_s=sorted(latencies))


def _is_whole(answer: bytearray) -> bool:
    head, separator, rest = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"a request was refused: {bytes(answer[:2000])!r}")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(rest) >= int(length.split(b":")[1])
