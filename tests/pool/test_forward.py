"""Ports of nodes on this machine's loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

import skyward as sky
from skyward.errors import PoolClosed, UsageError
from tests.ssh.server import free_port
from tests.waiting import until

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool(sky_pools: Callable[..., sky.ComputePool]) -> sky.ComputePool:
    return sky_pools(logs=False)


@contextlib.contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve each connection on a port of the loopback, which is that of each node of this machine, too."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(LIMIT_S)
            answer(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def echo_after_the_end(connection: socket.socket) -> None:
    connection.sendall(read_all(connection)[::-1])


def say_goodbye_and_read(connection: socket.socket) -> None:
    connection.sendall(b"bye")
    connection.shutdown(socket.SHUT_WR)
    got.append(read_all(connection))


got: list[bytes] = []


def connect(port: sky.ForwardedPort) -> socket.socket:
    return socket.create_connection(port.address, LIMIT_S)


def is_ended(connection: socket.socket) -> bool:
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def check_all_ways(pool: sky.ComputePool) -> None:
    """Check many connections, the end of either direction, a port where nobody listens, and the end of the port."""
    with listening(echo_after_the_end) as remote, pool.forward(remote) as port:
        assert port.port != remote  # taken by the server itself
        connections = [connect(port) for _ in range(20)]
        for number, connection in enumerate(connections):
            connection.sendall(bytes([number]) * 100_000 + b"end")
            connection.shutdown(socket.SHUT_WR)
        for number, connection in enumerate(connections):
            assert read_all(connection) == b"dne" + bytes([number]) * 100_000
            connection.close()
        left = connect(port)
        left.sendall(b"x")
    assert is_ended(left), "the port is closed, and its connections with it"
    with pytest.raises(ConnectionRefusedError):
        connect(port)
    with listening(say_goodbye_and_read) as remote, pool.forward(remote) as port, connect(port) as connection:
        got.clear()
        assert read_all(connection) == b"bye"
        connection.sendall(b"and this")
        connection.shutdown(socket.SHUT_WR)
        until(lambda: got == [b"and this"])
    with pool.forward(free_port(), local=free_port()) as port:
        assert is_ended(connect(port)), "nobody listens there"


def test_connections_work_in_both_directions(pool: sky.ComputePool) -> None:
    check_all_ways(pool)


def test_a_port_ends_with_its_pool() -> None:
    with listening(echo_after_the_end) as remote:
        with sky.ComputePool(sky.Local(), logs=False) as pool:
            port = pool.forward(remote)
            connection = connect(port)
            connection.sendall(b"x")
        assert is_ended(connection)
        with pytest.raises(ConnectionRefusedError):
            connect(port)
        port.close()
    with pytest.raises(PoolClosed):
        pool.forward(remote)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("skyward-port")])


def test_wrong_ports_are_named(pool: sky.ComputePool) -> None:
    with pytest.raises(UsageError, match="port=0: is not a TCP port"):
        pool.forward(0)
    with pytest.raises(UsageError, match="node=3: no such node"):
        pool.forward(80, node=3)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"local={number}: cannot be used here: Address already in use"):
            pool.forward(80, local=number)
