"""The relay: a line that is long, stops, breaks, and refuses."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.hosts.fixtures import NewRelay
from tests.relay import ROOT, Relay
from tests.waiting import until


@pytest.fixture
def echo() -> Iterator[int]:
    """Return the port of a server that echoes its input."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while piece := connection.recv(1 << 20):
                    connection.sendall(piece)
            except ConnectionError:
                return

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=[connection], daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join()


def _connect(relay: Relay) -> socket.socket:
    connection = socket.create_connection((relay.host, relay.port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _round_trip_s(connection: socket.socket) -> float:
    begun = time.perf_counter()
    connection.sendall(b"hello")
    assert connection.recv(99) == b"hello"
    return time.perf_counter() - begun


def test_a_round_trip_takes_twice_the_delay(relay: NewRelay, echo: int) -> None:
    line = relay("127.0.0.1", echo, delay_s=0.2)
    with _connect(line) as connection:
        assert 0.4 <= min(_round_trip_s(connection) for _ in range(5)) < 0.75  # twice as long would be 0.8
        line.set_delay(0)
        assert min(_round_trip_s(connection) for _ in range(20)) < 0.05


def test_a_narrow_line_takes_its_time_for_each_byte_and_counts_them(echo: int) -> None:
    with Relay(("127.0.0.1", echo), bytes_per_s=250_000) as line, _connect(line) as connection:
        begun = time.perf_counter()
        connection.sendall(bytes(50_000))
        received = 0
        while received < 50_000:
            received += len(connection.recv(1 << 20))
        assert time.perf_counter() - begun >= 0.2
        assert line.count_bytes() == 100_000


def test_opening_takes_a_round_trip_on_request(echo: int) -> None:
    with (
        Relay(("127.0.0.1", echo), delay_s=0.1, has_handshakes=True) as line,
        _connect(line) as connection,
    ):
        assert _round_trip_s(connection) >= 0.3


def test_a_long_line_is_not_a_narrow_one(relay: NewRelay, echo: int) -> None:
    size = 64 * 2**20

    def bytes_per_s(connection: socket.socket) -> float:
        begun = time.perf_counter()
        sender = threading.Thread(target=connection.sendall, args=[bytes(size)])
        sender.start()
        received = 0
        while received < size:
            received += len(connection.recv(1 << 20))
        sender.join()
        return size / (time.perf_counter() - begun)

    with _connect(relay("127.0.0.1", echo, delay_s=0.05)) as connection:
        # A narrow line is never faster, and a busy machine is at times.
        until(lambda: bytes_per_s(connection) > 50e6)


def test_a_stalled_line_is_silent_and_loses_nothing(relay: NewRelay, echo: int) -> None:
    line = relay("127.0.0.1", echo)
    with _connect(line) as connection:
        _round_trip_s(connection)
        with line.stalled():
            connection.sendall(b"meanwhile")
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.recv(99)
        connection.settimeout(60)
        assert connection.recv(99) == b"meanwhile"


def test_a_reset_line_is_noticed_at_both_ends(relay: NewRelay, echo: int) -> None:
    line = relay("127.0.0.1", echo)
    with _connect(line) as connection:
        _round_trip_s(connection)
        line.reset()
        with pytest.raises(ConnectionResetError):
            connection.recv(99)
    until(lambda: line.count() == 0)
    with _connect(line) as connection:
        _round_trip_s(connection)


def test_a_line_that_refuses_keeps_open_connections(relay: NewRelay, echo: int) -> None:
    line = relay("127.0.0.1", echo)
    with _connect(line) as connection:
        _round_trip_s(connection)
        line.refuse()
        with pytest.raises(ConnectionRefusedError):
            _connect(line)
        _round_trip_s(connection)
        line.accept()
        _connect(line).close()


def test_an_end_of_file_passes_and_the_connection_ends(relay: NewRelay, echo: int) -> None:
    line = relay("127.0.0.1", echo, delay_s=0.01)
    with _connect(line) as connection:
        connection.sendall(b"last")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(99) == b"last"
        assert connection.recv(99) == b""
    until(lambda: line.count() == 0)


def test_a_missing_target_breaks_the_connection(relay: NewRelay) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    line = relay("127.0.0.1", port)
    with pytest.raises(ConnectionResetError), _connect(line) as connection:  # in the one or the other: it is a race
        connection.recv(99)


def test_a_relay_ends_with_the_process_that_made_it(echo: int) -> None:
    code = f"from tests.relay import Relay\nr = Relay(('127.0.0.1', {echo}))\nprint(r.port, flush=True)\n"
    code += "import os; os._exit(0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    def is_gone() -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(done.stdout)), timeout=5).close()
        except ConnectionRefusedError:
            return True
        return False

    until(is_gone)
