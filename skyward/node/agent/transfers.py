"""Blobs on their way from this node to another one, or from another one here, without the client in between.

The client makes a secret for each transfer and tells both nodes. The sender listens for one transfer, at its address
in the pool's network and never at a public one:

    receiver > sender    proof: HMAC-SHA256 of a label, by the secret
    sender > receiver    the bytes of the blob, then their HMAC-SHA256

So the secret never travels between the nodes, and nobody else can ask for a blob or forge one. The receiver also
verifies the blob's name, which is the digest of its content.

All of it is inside TLS if the client made keys for the pool: the sender has the key of the one certificate that the
receiver trusts. The bytes then need no HMAC, which would take longer than the encryption. A client without
`cryptography` makes no keys, and bytes are not encrypted then, as in the process groups of a gang.

All of it is non-blocking, in the agent's loop: one piece of a blob at a time. The client hears of failures, and
then carries the blob itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from ...errors import InternalError
from ...wire.blobs import Blob, BlobWriter
from ...wire.frames import HAS_FD, Frame, FrameKind
from ...wire.spares import new_file
from ..slot.link import blob_body
from .loop import EventLoop, Timer

PROOF_SIZE = 32
_CONNECT_S = 4.0
"""Longest time until the two nodes are connected; a firewall may drop packets silently."""
_STALL_S = 10.0
"""Longest time without a byte."""
_PIECE = 256 * 1024
_RECORDS = 16
"""Most reads or writes in one turn. TLS takes at most 16 KiB at a time."""
_LATER = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_GUESTS = 8
"""Most connections to a listener that have not proved themselves."""
_SHARED = ipaddress.ip_network("100.64.0.0/10")
"""Addresses that overlay networks and carriers use among themselves (RFC 6598)."""


def proof_of(secret: bytes) -> bytes:
    """Return the proof that a receiver knows the secret."""
    return hmac.digest(secret, b"skyward blob, please", "sha256")


def is_internal(address: str) -> bool:
    """Return whether an address belongs to a private network, so that the internet does not reach it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if parsed.is_unspecified or parsed.is_multicast:
        return False
    return parsed.is_private or (parsed.version == 4 and parsed in _SHARED)


def sender_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the TLS settings of a node that sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    fd = new_file("keys")  # Python reads keys from files only
    try:
        os.write(fd, (certificate + key).encode())
        context.load_cert_chain(f"/dev/fd/{fd}")
    finally:
        os.close(fd)
    return context


def receiver_context(certificate: str) -> ssl.SSLContext:
    """Return the TLS settings of a node that receives. No names count: only the pool has the key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.load_verify_locations(cadata=certificate)
    return context


class BlobExchange:
    """Transfers of blobs between this node and others. Only the agent's thread uses it.

    Args:
        loop: The agent's loop.
        address: Address of this node for other nodes.
        blob: Function that returns a blob of this node.
        add: Function that takes a BLOB frame with the descriptor of a blob that has arrived.
        send: Function that sends a frame to the client.
    """

    def __init__(
        self,
        loop: EventLoop,
        address: str,
        *,
        blob: Callable[[bytes], Blob | None],
        add: Callable[[Frame], object],
        send: Callable[..., object],
    ) -> None:
        self._loop = loop
        self._address = address
        self._blob = blob
        self._add = add
        self._send = send
        self._open: set[_Exchange] = set()

    def on_offer(self, frame: Frame) -> None:
        """Listen for the node that needs a blob, and tell the client the port. 0: this node cannot send it."""
        order = json.loads(frame.body)
        port = 0
        blob = self._blob(bytes.fromhex(order["digest"]))
        if blob is not None and blob.fd >= 0 and is_internal(self._address):
            with contextlib.suppress(OSError):  # no free descriptor, or not an address of this machine
                tls = sender_context(*keys) if (keys := order.get("keys")) else None
                secret = bytes.fromhex(order["secret"])
                port = _BlobSender(self._loop, self._open, self._address, blob, secret, tls).port
        self._send(FrameKind.OFFERED, frame.ident, lane=port)

    def on_pull(self, frame: Frame) -> None:
        """Get a blob from another node, and tell the client the outcome."""
        order = json.loads(frame.body)
        digest, size = bytes.fromhex(order["digest"]), order["size"]

        def ended(fd: int, why: str) -> None:
            if fd >= 0:
                self._add(Frame(FrameKind.BLOB, HAS_FD, 0, 0, blob_body(digest, size), fd))
            self._send(FrameKind.PULLED, frame.ident, why.encode(), lane=int(fd < 0))

        try:
            _BlobReceiver(self._loop, self._open, order, ended)
        except OSError as error:
            ended(-1, error.strerror or str(error))

    def close(self) -> None:
        for transfer in list(self._open):
            transfer.close()


class _Exchange:
    """Sockets of one transfer, with a deadline for its next step."""

    def __init__(self, loop: EventLoop, transfers: set[_Exchange]) -> None:
        self._loop = loop
        self._transfers = transfers
        self._sockets: list[socket.socket] = []
        self._timer: Timer | None = None
        self._due = 0.0
        self._give_up: Callable[[], object] = self.close
        transfers.add(self)

    def _within(self, limit_s: float, give_up: Callable[[], object]) -> None:
        """Give up unless the next step comes within `limit_s`."""
        due, before = time.monotonic() + limit_s, self._due
        self._due, self._give_up = due, give_up
        # A timer that is due earlier looks again then: a value has thousands of steps.
        if self._timer is None or due < before:
            self._arm(limit_s)

    def _arm(self, left_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(left_s, self._look)

    def _look(self) -> None:
        self._timer = None
        left_s = self._due - time.monotonic()
        if left_s > 0:
            self._arm(left_s)
        else:
            self._give_up()

    def _own(self, sock: socket.socket) -> socket.socket:
        sock.setblocking(False)
        self._sockets.append(sock)
        return sock

    def _encrypt(self, sock: socket.socket, tls: ssl.SSLContext, *, sends: bool) -> socket.socket:
        """Return a connected socket inside TLS, in place of this one. Its first reads and writes do the handshake."""
        self._loop.forget(sock)
        self._sockets.remove(sock)
        return self._own(tls.wrap_socket(sock, server_side=sends, do_handshake_on_connect=False))

    def _drop(self, sock: socket.socket) -> None:
        self._loop.forget(sock)
        self._sockets.remove(sock)
        sock.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for sock in list(self._sockets):
            self._drop(sock)
        self._transfers.discard(self)


class _BlobSender(_Exchange):
    """Listener that sends one blob to the first peer that proves itself."""

    def __init__(
        self,
        loop: EventLoop,
        transfers: set[_Exchange],
        address: str,
        blob: Blob,
        secret: bytes,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(loop, transfers)
        self._secret, self._tls = secret, tls
        self._size = blob.size
        self._fd = -1
        self._guests: dict[socket.socket, bytes] = {}
        try:
            self._fd = os.dup(blob.fd)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = self._own(socket.socket(family, socket.SOCK_STREAM))
            self._listener.bind((address, 0))
            self._listener.listen(_GUESTS)
        except OSError:
            self.close()
            raise
        self.port: int = self._listener.getsockname()[1]
        self._at = 0
        self._rest = memoryview(b"")
        self._mac = hmac.new(secret, digestmod=hashlib.sha256)
        self._has_ended = False
        loop.watch(self._listener, self._accept)
        self._within(_CONNECT_S + _STALL_S, self.close)

    def _accept(self) -> None:
        try:
            guest, _ = self._listener.accept()
        except OSError:  # it is gone again, or there is no free descriptor
            return
        if len(self._guests) == _GUESTS:
            guest.close()
            return
        peer = self._own(guest)
        if self._tls is not None:
            try:
                peer = self._encrypt(peer, self._tls, sends=True)
            except OSError:  # it is gone again
                return
        self._guests[peer] = b""
        self._loop.watch(peer, lambda: self._read_proof(peer))

    def _read_proof(self, guest: socket.socket) -> None:
        try:
            data = guest.recv(PROOF_SIZE - len(self._guests[guest]))
        except _LATER:  # nothing to read after all, or the handshake goes on
            return
        except OSError:
            data = b""
        proof = self._guests[guest] + data
        if data and len(proof) < PROOF_SIZE:
            self._guests[guest] = proof
            return
        del self._guests[guest]
        if not hmac.compare_digest(proof, proof_of(self._secret)):
            self._drop(guest)
            return
        for other in [self._listener, *self._guests]:
            self._drop(other)
        self._guests.clear()
        self._loop.watch(guest, lambda: self._read_end(guest), lambda: self._send(guest))
        self._within(_STALL_S, self.close)

    def _send(self, peer: socket.socket) -> None:
        try:
            for _ in range(_RECORDS if self._tls else 1):
                if not self._rest:
                    self._fill()
                if not self._rest:  # all is sent; the peer hangs up
                    self._loop.watch(peer, self.close)
                    return
                self._rest = self._rest[peer.send(self._rest) :]
        except _LATER:  # the socket is full after all
            pass
        except OSError:
            self.close()
            return
        self._within(_STALL_S, self.close)

    def _fill(self) -> None:
        """Read the next piece; behind the last one, the digest of all."""
        if self._has_ended:
            return
        piece = os.pread(self._fd, min(_PIECE, self._size - self._at), self._at)
        self._at += len(piece)
        if self._tls is None:
            self._mac.update(piece)
        if not piece or self._at == self._size:
            self._has_ended = True
            piece += self._mac.digest()
        self._rest = memoryview(piece)

    def _read_end(self, peer: socket.socket) -> None:
        try:
            if peer.recv(1):
                return
        except _LATER:  # nothing to read after all
            return
        except OSError:
            pass
        self.close()

    def close(self) -> None:
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _BlobReceiver(_Exchange):
    """Connection that gets one blob. `ended` is called once, with its descriptor, or with -1 and the reason."""

    def __init__(
        self,
        loop: EventLoop,
        transfers: set[_Exchange],
        order: dict[str, Any],
        ended: Callable[[int, str], object],
    ) -> None:
        super().__init__(loop, transfers)
        secret = bytes.fromhex(order["secret"])
        self._tls = receiver_context(certificate) if (certificate := order.get("certificate")) else None
        self._is_encrypted = False
        self._size: int = order["size"]
        self._ended = ended
        self._unsent = proof_of(secret)
        self._mac = hmac.new(secret, digestmod=hashlib.sha256)
        self._end = b""
        self._at = 0
        self._buffer = bytearray(_PIECE)
        self._writer = BlobWriter(bytes.fromhex(order["digest"]), self._size, is_named_by_content=True)
        family = socket.AF_INET6 if ":" in order["address"] else socket.AF_INET
        try:
            self._sock = self._own(socket.socket(family, socket.SOCK_STREAM))
            with contextlib.suppress(BlockingIOError):  # it connects in the background
                self._sock.connect((order["address"], order["port"]))
        except OSError:
            self.close()
            raise
        loop.watch(self._sock, self._read, self._prove)
        self._within(_CONNECT_S, lambda: self._finish(-1, f"no answer within {_CONNECT_S:g} s"))

    def _prove(self) -> None:
        try:
            if self._tls is not None and not self._is_encrypted:
                if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                self._sock = self._encrypt(self._sock, self._tls, sends=False)
                self._is_encrypted = True
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except _LATER:  # the handshake goes on, or the socket is full after all
            is_full = self._tls is None
            self._loop.watch(self._sock, self._prove, self._prove if is_full else None)
            return
        except OSError as error:
            self._fail(error)
            return
        if not self._unsent:
            self._loop.watch(self._sock, self._read)
            self._within_stall()

    def _within_stall(self) -> None:
        self._within(_STALL_S, lambda: self._finish(-1, f"silent for {_STALL_S:g} s"))

    def _read(self) -> None:
        left = self._size - self._at
        view = memoryview(self._buffer)[: min(_PIECE, left) if left else PROOF_SIZE - len(self._end)]
        try:
            count = self._receive_into(view)
        except _LATER:  # nothing to read after all
            return
        except OSError as error:
            self._fail(error)
            return
        if not count:
            self._finish(-1, "the other node hung up")
            return
        self._within_stall()
        if left:
            if self._tls is None:
                self._mac.update(view[:count])
            self._writer.write(self._at, view[:count])
            self._at += count
        else:
            self._end += view[:count]
        if len(self._end) == PROOF_SIZE:
            self._check()
        elif isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():  # nothing would tell of it later
            self._read()

    def _receive_into(self, view: memoryview) -> int:
        """Receive some bytes: all that have come, or that fit. 0: the other node hung up."""
        count = self._sock.recv_into(view)
        with contextlib.suppress(*_LATER):
            while self._is_encrypted and 0 < count < len(view):
                more = self._sock.recv_into(view[count:])
                if not more:  # the next call sees it again
                    break
                count += more
        return count

    def _check(self) -> None:
        if not hmac.compare_digest(self._end, self._mac.digest()):
            self._finish(-1, "the bytes are not those of the other node")
            return
        try:
            fd = self._writer.finish()
        except InternalError as error:
            self._finish(-1, str(error))
            return
        self._finish(fd, "" if fd >= 0 else "no room for the value")

    def _fail(self, error: OSError) -> None:
        self._finish(-1, error.strerror or str(error))

    def _finish(self, fd: int, why: str) -> None:
        self.close()
        self._ended(fd, why)
