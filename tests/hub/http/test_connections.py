"""Clients that send too little, too slowly or too much: the hub answers others in time and keeps its memory."""

from __future__ import annotations

import gzip
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest

from tests.hub.http.watched import WatchedServer
from tests.waiting import until

PATIENCE_S = 4.0
IDLE = 10_000
GIB = 1024**3


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    with WatchedServer(tmp_path_factory.mktemp("hub"), PATIENCE_S) as server:
        yield server


@pytest.fixture
def many_files() -> Iterator[int]:
    """Raise this process's limit of open files, and return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield min(IDLE, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(watched: WatchedServer) -> socket.socket:
    return socket.create_connection(watched.address, timeout=60)


def head(watched: WatchedServer, length: str, method: str = "POST", path: str = "/v1/experiments") -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {watched.token}",
        "Content-Type: application/json",
        length,
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def rest(connection: socket.socket) -> bytes:
    """Read until the server closes."""
    pieces = []
    try:
        while piece := connection.recv(65_536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def test_ten_thousand_idle_connections_hold_nobody_up_and_are_closed(watched: WatchedServer, many_files: int) -> None:
    before = watched.memory_mib(reset=True)
    with ExitStack() as held:
        idle = [held.enter_context(closing(connect(watched))) for _ in range(many_files)]
        assert httpx.get(f"{watched.url}/v1/me", headers=watched.headers, timeout=60).status_code == 200
        for connection in idle:
            assert rest(connection) == b""
    assert watched.memory_mib() - before < 300


def test_heads_and_bodies_that_trickle_are_cut(watched: WatchedServer) -> None:
    slow_head, slow_body, silent = connect(watched), connect(watched), connect(watched)
    with slow_head, slow_body, silent:
        slow_head.sendall(b"GET /alive HTTP/1.1\r\nHost: localhost\r\n")
        slow_body.sendall(head(watched, "Content-Length: 1000"))
        for connection in (slow_head, slow_body):
            connection.settimeout(PATIENCE_S / 10)
        began, open_ones = time.monotonic(), {slow_head: b"X-A: b\r\n", slow_body: b" "}
        while open_ones:
            assert time.monotonic() - began < 60, "a slow client was kept"
            for connection, piece in list(open_ones.items()):
                try:
                    connection.sendall(piece)
                    if connection.recv(100) == b"":
                        del open_ones[connection]
                except TimeoutError:
                    continue
                except OSError:
                    del open_ones[connection]
        assert rest(silent) == b""


def test_answer_that_nobody_reads_is_dropped(watched: WatchedServer) -> None:
    with httpx.Client(base_url=watched.url, headers=watched.headers) as client:
        run = client.post("/v1/runs", json={}).raise_for_status().json()["id"]
        client.post(f"/v1/runs/{run}/artifacts", params={"key": "big"}, content=bytes(64 * 1024**2)).raise_for_status()
    with connect(watched) as connection:
        connection.sendall(head(watched, "Accept: */*", "GET", f"/v1/runs/{run}/artifacts/big"))
        until(lambda: connection.recv(1, socket.MSG_PEEK), 60)
        assert watched.holds(connection)
        until(lambda: not watched.holds(connection), 60)  # this client reads nothing, and the hub waits no longer
        assert len(rest(connection)) < 64 * 1024**2


def test_connection_that_asks_in_time_is_kept(watched: WatchedServer) -> None:
    with httpx.Client(base_url=watched.url, headers=watched.headers) as client:
        for _ in range(3):
            client.get("/v1/me").raise_for_status()
            time.sleep(PATIENCE_S / 2)  # not for luck: together longer than the hub waits for one head
        request = client.build_request(
            "POST", "/v1/experiments", content=(piece for piece in pieces_of(b'{"name": "x"}'))
        )
        request.headers["Content-Type"] = "application/json"
        assert client.send(request).status_code == 201


def pieces_of(body: bytes) -> Iterator[bytes]:
    yield body[:5]
    time.sleep(PATIENCE_S / 4)  # short of the limit also where the rest is sent late
    yield body[5:]


def test_head_that_never_ends_is_refused(watched: WatchedServer) -> None:
    with connect(watched) as connection:
        connection.sendall(b"GET /alive HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"X-Long: " + b"a" * 60_000 + b"\r\n")
    with connect(watched) as connection:
        connection.sendall(b"GET /alive HTTP/1.1\r\nX: " + b"a" * 66_000)
        assert b"431 Request Header Fields Too Large" in rest(connection)
    with connect(watched) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert b'{"error":{"code":"invalid"' in rest(connection)


def test_body_of_two_gigabytes_is_refused_early_and_never_held(watched: WatchedServer) -> None:
    before = watched.memory_mib(reset=True)
    with connect(watched) as connection:
        connection.sendall(head(watched, f"Content-Length: {2 * GIB}"))
        assert b" 413 " in rest(connection).partition(b"\r\n")[0]
    with connect(watched) as connection:
        connection.sendall(head(watched, "Transfer-Encoding: chunked"))
        piece = b"100000\r\n" + bytes(0x100000) + b"\r\n"
        sent = 0
        with pytest.raises(ConnectionError):
            while sent < 2 * GIB:
                connection.sendall(piece)
                sent += 0x100000
        assert sent < 200 * 1024**2
    assert watched.memory_mib() - before < 64


def test_artifact_is_streamed_whatever_its_size(watched: WatchedServer) -> None:
    with httpx.Client(base_url=watched.url, headers=watched.headers, timeout=60) as client:
        run = client.post("/v1/runs", json={}).raise_for_status().json()["id"]
        before = watched.memory_mib(reset=True)
        pieces = (bytes(1024**2) for _ in range(256))
        made = client.post(f"/v1/runs/{run}/artifacts", params={"key": "big"}, content=pieces).raise_for_status()
        assert made.json()["size"] == 256 * 1024**2
        with client.stream("GET", f"/v1/runs/{run}/artifacts/big") as answer:
            assert sum(len(piece) for piece in answer.iter_raw()) == 256 * 1024**2
    assert watched.memory_mib() - before < 64


def test_compressed_body_is_never_unpacked(watched: WatchedServer) -> None:
    bomb = gzip.compress(bytes(64 * 1024**2))
    before = watched.memory_mib(reset=True)
    headers = {**watched.headers, "Content-Type": "application/json", "Content-Encoding": "gzip"}
    with httpx.Client(base_url=watched.url, headers=headers) as client:
        answer = client.post("/v1/experiments", content=bomb)
        assert (answer.status_code, answer.json()["error"]["field"]) == (415, "content-encoding")
        metric = client.post("/api/2.0/mlflow/runs/log-metric", content=bomb)
        assert (metric.status_code, metric.json()["error_code"]) == (415, "INVALID_PARAMETER_VALUE")
        run = httpx.post(f"{watched.url}/v1/runs", json={}, headers=watched.headers).json()["id"]
        client.post(f"/v1/runs/{run}/artifacts", params={"key": "a.gz"}, content=bomb).raise_for_status()
        stored = client.get(f"/v1/runs/{run}/artifacts/a.gz")
        assert stored.content == bomb
    assert watched.memory_mib() - before < 32
