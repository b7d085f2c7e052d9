"""Where the ranks of a gang meet: rank 0 listens at `head_addr:head_port`, the others come when it does."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from errno import EADDRINUSE, EADDRNOTAVAIL

from ..errors import RendezvousFailed
from ..values.topology import Rank

__all__ = ["MEETING_LIMIT_S", "listen_at_head", "past_the_proxy", "wait_for_head"]

MEETING_LIMIT_S = 300.0
"""Seconds that a rank waits for the others to come: the first call on a node pays for importing a framework from a
disk that may be cold. The same as torch's and JAX's own limits."""
_MAX_PAUSE_S = 0.05
"""Seconds between two looks whether rank 0 listens."""
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy")


def listen_at_head(rank: Rank) -> socket.socket:
    """For rank 0: listen at the meeting place, on the pool's private address only.

    Raises:
        RendezvousFailed: the port is taken. The engine starts the gang once more, on another port.
    """
    family = socket.AF_INET6 if ":" in rank.local_addr else socket.AF_INET
    try:
        return socket.create_server((rank.local_addr, rank.head_port), family=family)
    except OSError as error:
        if error.errno == EADDRNOTAVAIL:  # translated on its way here: no interface of this machine has the address
            return socket.create_server(("", rank.head_port))
        if error.errno != EADDRINUSE:
            raise
        raise RendezvousFailed(
            f"another process listens on {rank.local_addr}:{rank.head_port}, where the ranks were to meet"
        ) from error


def wait_for_head(rank: Rank) -> None:
    """For the others: return when rank 0 listens. Clients of the frameworks, refused once, come again only after up to
    a second.

    Raises:
        RendezvousFailed: it did not within `MEETING_LIMIT_S`.
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
        f"rank {rank.rank} of {rank.world_size} could not reach rank 0 at {rank.head_addr}:{rank.head_port} "
        f"within {MEETING_LIMIT_S:.0f} s"
    )


def past_the_proxy(addresses: Iterable[str]) -> dict[str, str]:
    """Variables for gRPC, which takes the way through a proxy even to a neighbour; none where there is no proxy."""
    if not any(name in os.environ or name.upper() in os.environ for name in _PROXIES):
        return {}
    names = ("no_grpc_proxy", "no_proxy", "NO_PROXY")  # the first that is set is the one that gRPC reads
    direct = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return {"no_grpc_proxy": ",".join([*([direct] if direct else []), *dict.fromkeys(addresses)])}
