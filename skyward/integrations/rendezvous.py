"""Rendezvous of a gang: rank 0 listens at `head_addr:head_port`, and the other ranks connect once it does."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from errno import EADDRINUSE, EADDRNOTAVAIL

from ..errors import RendezvousFailed
from ..values.topology import Rank

MEETING_LIMIT_S = 300.0
"""Seconds that a rank waits for the others. The first call on a node may import a framework from a cold disk. The
limits of torch and JAX are the same."""
OPEN_PORTS = "open the TCP ports between the nodes, and read the output of the other ranks"
_MAX_PAUSE_S = 0.05
"""Longest pause, in seconds, between two attempts to reach rank 0."""
_NUMBER = struct.Struct("!I")
"""What a rank says at its end: its number."""
_LEAVING_LIMIT_S = 60.0
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


def listen_at_head(rank: Rank) -> socket.socket:
    """Listen at the rendezvous address as rank 0, on the pool's private address only.

    Raises:
        RendezvousFailed: the port is taken. The engine then retries the gang once on another port.
    """
    family = socket.AF_INET6 if ":" in rank.local_addr else socket.AF_INET
    try:
        return socket.create_server((rank.local_addr, rank.head_port), family=family)
    except OSError as error:
        # The address is translated on its way here (NAT): no interface of this machine has it.
        if error.errno == EADDRNOTAVAIL:
            return socket.create_server(("", rank.head_port))
        if error.errno != EADDRINUSE:
            raise
        raise RendezvousFailed(
            f"rank 0: cannot listen on {rank.local_addr}:{rank.head_port}, because another process uses this port; set "
            "max_restarts=1 or more for another port"
        ) from error


def wait_for_head(rank: Rank) -> None:
    """Wait until rank 0 listens. All other ranks call this before their framework's client connects.

    The clients of the frameworks back off for up to a second after the first refused connection; this loop looks again
    within 50 ms.

    Raises:
        RendezvousFailed: rank 0 did not listen within `MEETING_LIMIT_S`.
    """
    deadline = time.monotonic() + MEETING_LIMIT_S
    pause_s = 0.001
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((rank.head_addr, rank.head_port), timeout=left_s).close()
        except OSError:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        else:
            return
    raise RendezvousFailed(
        f"rank {rank.rank} of {rank.world_size}: could not reach rank 0 at {rank.head_addr}:{rank.head_port} "
        f"within {MEETING_LIMIT_S:.0f} s; {OPEN_PORTS}"
    )


@contextmanager
def leaving_together(rank: Rank, *, is_needed: Callable[[], bool], limit_s: float = _LEAVING_LIMIT_S) -> Iterator[None]:
    """Return from the block on each rank when all are at its end, for a framework that does not see to it.

    A rank whose process exits closes its connections, from which a slower one may still read the last message. Rank 0
    listens at `rank.head_port` from the beginning. A block that raises does not wait: the engine then stops the others.

    Args:
        rank: Rank of this process, with a port of its own for this.
        is_needed: Asked at the end: whether this rank was connected to the others.
        limit_s: Longest wait in seconds. A rank that works on for longer reads nothing from those that have ended.

    Raises:
        RendezvousFailed: At the beginning: the port is taken. The engine then retries the gang once on another port.
    """
    if rank.rank:
        yield
        if is_needed():
            with suppress(OSError):  # rank 0 has gone
                _leave_with_head(rank, limit_s)
        return
    with listen_at_head(rank) as listener:
        listener.listen(rank.world_size)
        yield
        if is_needed():
            with suppress(OSError):  # a rank takes longer
                _leave_with_others(rank, listener, limit_s)


def _leave_with_head(rank: Rank, limit_s: float) -> None:
    """Say that this rank is at its end, and wait for the word of rank 0, or for its end. Raises OSError."""
    with socket.create_connection((rank.head_addr, rank.head_port), timeout=limit_s) as head:
        head.sendall(_NUMBER.pack(rank.rank))
        head.recv(1)


def _leave_with_others(rank: Rank, listener: socket.socket, limit_s: float) -> None:
    """Wait for all ranks, which go on once their connections are closed. Raises OSError."""
    deadline = time.monotonic() + limit_s
    missing = set(range(1, rank.world_size))
    with ExitStack() as links:
        while missing:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            link = links.enter_context(listener.accept()[0])
            link.settimeout(max(0.001, deadline - time.monotonic()))
            said = link.recv(_NUMBER.size, socket.MSG_WAITALL)
            if len(said) == _NUMBER.size:  # else it was a stranger
                missing.discard(*_NUMBER.unpack(said))


def past_the_proxy(addresses: Iterable[str]) -> dict[str, str]:
    """Return variables that make gRPC connect directly: it would use a proxy even to reach a neighbour.

    The result is empty if no proxy is configured.
    """
    if not any(name in os.environ or name.upper() in os.environ for name in _PROXIES):
        return {}
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")  # gRPC reads only the first of these that is set
    direct = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return {"no_grpc_proxy": ",".join([*([direct] if direct else []), *dict.fromkeys(addresses)])}
