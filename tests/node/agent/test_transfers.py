"""BlobExchange between agents: who may get a blob, which bytes are taken, and where an agent listens."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.engine.transfers import Keys, make_keys
from skyward.node.agent.loop import EventLoop
from skyward.node.agent.transfers import PROOF_SIZE, BlobExchange, is_internal, proof_of, receiver_context
from skyward.wire.blobs import Blob
from skyward.wire.frames import Frame, FrameKind

CONTENT = os.urandom(1 << 20)
SECRET = bytes(range(32))


def some_keys() -> Keys:
    keys = make_keys()
    assert keys is not None
    return keys


KEYS, OTHER_KEYS = some_keys(), some_keys()


class Node:
    """BlobExchange of one node, with an event loop in a thread. `sent` and `added` have what it told and got."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.blob = Blob.kept(memoryview(CONTENT))
        self.added: list[Blob] = []
        self.sent: list[tuple[int, int, bytes, int]] = []
        self._told = threading.Condition()
        self._loop = EventLoop()
        self._orders: list[tuple[int, dict[str, Any]]] = []
        self._reads, self._writes = os.pipe()
        self.transfers = BlobExchange(
            self._loop,
            address,
            blob=lambda digest: self.blob if digest == self.blob.digest else None,
            add=lambda frame: self.added.append(Blob(frame.body[:16], len(CONTENT), frame.fd)),
            send=self._send,
        )
        self._loop.watch(self._reads, self._take)
        self._thread = threading.Thread(target=self._loop.run)
        self._thread.start()

    def _send(self, kind: int, ident: int, body: bytes = b"", *, lane: int = 0) -> None:
        with self._told:
            self.sent.append((kind, ident, body, lane))
            self._told.notify_all()

    def _take(self) -> None:
        if os.read(self._reads, 1) == b"x":
            self.transfers.close()
            self._loop.stop()
            return
        kind, order = self._orders.pop(0)
        handle = self.transfers.on_offer if kind == FrameKind.OFFER else self.transfers.on_pull
        handle(Frame(kind, 0, 0, 7, json.dumps(order).encode()))

    def order(self, kind: int, **order: Any) -> tuple[int, bytes]:
        """Give an order, and return lane and body of the answer."""
        self._orders.append((kind, {"digest": self.blob.digest.hex(), "secret": SECRET.hex(), **order}))
        with self._told:
            count = len(self.sent)
            os.write(self._writes, b"o")
            assert self._told.wait_for(lambda: len(self.sent) > count, 60)
            return self.sent[-1][3], self.sent[-1][2]

    def pull(self, port: int, **order: Any) -> tuple[int, bytes]:
        return self.order(FrameKind.PULL, address="127.0.0.1", port=port, **{"size": len(CONTENT), **order})

    def close(self) -> None:
        os.write(self._writes, b"x")
        self._thread.join(60)
        os.close(self._reads)
        os.close(self._writes)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()
    assert not node.transfers._open


def connect(port: int, proof: bytes) -> bytes:
    """Return everything that a sender sends to the peer with this proof."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(proof)
        received = b""
        while piece := sock.recv(1 << 16):
            received += piece
        return received


def test_a_blob_arrives_and_the_port_closes(node: Node) -> None:
    port, _ = node.order(FrameKind.OFFER)
    assert node.pull(port) == (0, b"")
    assert bytes(node.added[0].map()) == CONTENT
    with pytest.raises(ConnectionRefusedError):
        connect(port, proof_of(SECRET))
    refused, why = node.pull(port)
    assert (refused, why) == (1, b"Connection refused")


def test_a_peer_without_the_secret_gets_nothing_and_is_in_nobodys_way(node: Node) -> None:
    port, _ = node.order(FrameKind.OFFER)
    silent = socket.create_connection(("127.0.0.1", port))
    assert connect(port, bytes(PROOF_SIZE)) == b""
    assert node.pull(port) == (0, b"")
    assert silent.recv(1) == b""
    silent.close()
    port, _ = node.order(FrameKind.OFFER)
    assert node.pull(port, secret=bytes(32).hex()) == (1, b"the other node hung up")


def test_with_keys_all_of_it_is_encrypted(node: Node) -> None:
    for _ in range(3):
        port, _ = node.order(FrameKind.OFFER, keys=KEYS)
        with socket.create_server(("127.0.0.1", 0)) as server:
            seen: list[bytes] = []
            thread = threading.Thread(target=pass_on, args=(server, port, seen))
            thread.start()
            assert node.pull(server.getsockname()[1], certificate=KEYS.certificate) == (0, b"")
            thread.join(60)
        assert bytes(node.added.pop().map()) == CONTENT
        passed = b"".join(seen)
        assert len(passed) > len(CONTENT)
        assert proof_of(SECRET) not in passed
        assert not any(CONTENT[at : at + 64] in passed for at in range(0, len(CONTENT), 1000))


def pass_on(server: socket.socket, port: int, seen: list[bytes]) -> None:
    """Be the line between two nodes, for one connection, and note what passes."""
    peer, _ = server.accept()
    with peer, socket.create_connection(("127.0.0.1", port)) as sender:
        poll = {peer: sender, sender: peer}
        while True:
            for sock in select.select(list(poll), [], [], 60)[0]:
                data = sock.recv(5000)
                seen.append(data)
                if not data:
                    return
                poll[sock].sendall(data)


@pytest.mark.parametrize("keys", [OTHER_KEYS, None], ids=["other keys", "no keys"])
def test_bytes_of_a_node_without_the_key_are_refused(node: Node, keys: Any) -> None:
    port, _ = node.order(FrameKind.OFFER, keys=keys)
    lane, why = node.pull(port, certificate=KEYS.certificate)
    assert (lane, bool(why)) == (1, True)
    assert not node.added


def test_with_keys_a_peer_without_the_secret_gets_nothing(node: Node) -> None:
    port, _ = node.order(FrameKind.OFFER, keys=KEYS)
    with contextlib.suppress(ConnectionResetError):
        assert connect(port, bytes(PROOF_SIZE)) == b""  # it speaks no TLS
    sock = socket.create_connection(("127.0.0.1", port), timeout=60)
    with receiver_context(KEYS.certificate).wrap_socket(sock) as peer:
        peer.sendall(bytes(PROOF_SIZE))
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert peer.recv(1) == b""
    assert node.pull(port, certificate=KEYS.certificate) == (0, b"")


@pytest.mark.parametrize("has_mac", [True, False])
def test_forged_bytes_are_refused(node: Node, has_mac: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as forger:

        def forge() -> None:
            peer, _ = forger.accept()
            with peer:
                peer.recv(PROOF_SIZE)
                peer.sendall(CONTENT[:-1] + b"?" if has_mac else CONTENT)
                peer.sendall(bytes(PROOF_SIZE))

        thread = threading.Thread(target=forge)
        thread.start()
        assert node.pull(forger.getsockname()[1]) == (1, b"the bytes are not those of the other node")
        thread.join(60)
    assert not node.added


def test_a_digest_that_does_not_fit_is_refused(node: Node) -> None:
    port, _ = node.order(FrameKind.OFFER)
    lane, why = node.order(FrameKind.PULL, address="127.0.0.1", port=port, size=len(CONTENT), digest=bytes(16).hex())
    assert lane == 1
    assert b"was damaged on its way" in why
    assert not node.added


def test_a_sender_that_dies_is_noticed(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def die() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(PROOF_SIZE)
                peer.sendall(CONTENT[:1000])

        thread = threading.Thread(target=die)
        thread.start()
        assert node.pull(server.getsockname()[1]) == (1, b"the other node hung up")
        thread.join(60)


def test_a_node_listens_in_private_networks_only() -> None:
    assert all(map(is_internal, ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.9", "fd00::1"]))
    assert not any(map(is_internal, ["", "0.0.0.0", "8.8.8.8", "54.1.2.3", "224.0.0.1", "::", "2600::1", "host"]))
    public = Node("8.8.8.8")
    try:
        assert public.order(FrameKind.OFFER) == (0, b"")
    finally:
        public.close()


def test_a_blob_that_is_gone_is_not_offered(node: Node) -> None:
    assert node.order(FrameKind.OFFER, digest=bytes(16).hex()) == (0, b"")
