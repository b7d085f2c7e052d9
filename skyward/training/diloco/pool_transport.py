"""Requests of a task to a server in its pool's program, by the pool's own channels. Nothing listens on a port.

Each request has a channel of its own, as it has a connection by HTTP. It is one message of JSON with the size of its
body, and then the body in messages of at most 256 KiB. So is its answer. `pool_servers` is the program's half.

A task holds a *seat* at the server while it may have requests. The server ends with the last seat.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote, unquote

from ...errors import PoolClosed, UsageError
from ...node.slot.channels import channel_of
from ...node.slot.groups import group_rank
from ...node.slot.runtime import current_call
from ...values.topology import Rank
from ...wire.task_channel import TaskChannel
from .downloads import Download, download_for
from .frames import size_of
from .transport import SHORT_S, ServerUnreachable

SCHEME = "pool://"
CHANNEL = "skyward.diloco"
"""Name of the channels. A number behind a slash tells those of one task apart."""
PIECE_BYTES = 256 * 1024
ENDED = "the server in the pool's program has ended; call the function again"


def address_of(server: str) -> str:
    """Return the address of a server by its name.

    Example:
        >>> address_of("__main__.train")
        'pool://__main__.train'
    """
    return SCHEME + quote(server, safe="")


def refuse(channel: TaskChannel, status: int, message: str) -> None:
    """Answer a request with words. A worker of a 503 tries again later."""
    body = json.dumps({"kind": "", "message": message}).encode()
    channel.send(json.dumps({"status": status, "size": len(body)}).encode())
    channel.send(body)


class PoolTransport:
    """Requests to a server in the program.

    Args:
        server_addr: Address of the server, `pool://NAME`.

    Raises:
        UsageError: This code runs in no task.
    """

    def __init__(self, server_addr: str) -> None:
        if current_call() is None:
            raise UsageError(
                f"server_addr={server_addr!r}: names a server in a pool's program, and this code runs in no task; call "
                "the function with `@ pool`, or use host:port"
            )
        self.name = server_addr
        self._server = unquote(server_addr.removeprefix(SCHEME))

    def request(
        self,
        method: str,
        path: str,
        pieces: Sequence[memoryview] | None,
        *,
        timeout_s: float,
        download: Download | None = None,
    ) -> tuple[int, bytearray]:
        """Send one request; see `ServerTransport`."""
        size = size_of(pieces or ())
        head = {"server": self._server, "method": method, "target": path, "size": size, "workers": _workers()}
        try:
            with _channel() as channel:
                # It may have refused the request before it had read all of it, and said why.
                with contextlib.suppress(BrokenPipeError):
                    channel.send(json.dumps(head).encode(), timeout_s)
                    for piece in pieces or ():
                        for at in range(0, piece.nbytes, PIECE_BYTES):
                            channel.send(bytes(piece[at : at + PIECE_BYTES]), timeout_s)
                return _received(channel, timeout_s, download)
        except (OSError, EOFError, PoolClosed) as error:
            raise ServerUnreachable(
                f"{self.name} does not answer: {type(error).__name__}: {error}; see the log of the pool's program, "
                "which may be busy or gone"
            ) from error


@contextmanager
def seated(server: str, rank: Rank) -> Iterator[str]:
    """Hold a seat at a server in the program, and yield the name of this rank as a worker.

    An exception leaves the seat without a goodbye: the server then waits for a restart of the call.

    Raises:
        UsageError: The program has no such server.
    """
    call = current_call()
    pool = "" if call is None else call.info.job_id
    gang = f"{pool} {rank.head_addr} {rank.head_port} {rank.restart_count}"
    hello = {
        "server": server,
        "gang": gang,
        "rank": rank.rank,
        "ranks": rank.world_size,
        "restart": rank.restart_count,
    }
    with _channel() as channel:
        try:
            answer = _told(channel, hello)
        except (OSError, EOFError, PoolClosed) as error:
            raise UsageError(
                f"server={server!r}: the pool's program does not answer: {error}; use the same version of skyward there"
            ) from error
        if "error" in answer:
            raise UsageError(answer["error"])
        yield answer["worker"]
        # The next call then finds another server, whatever is still on its way.
        with contextlib.suppress(OSError, EOFError):
            _told(channel, {"goodbye": 1})


def _told(channel: TaskChannel, message: dict[str, object]) -> dict[str, str]:
    channel.send(json.dumps(message).encode(), SHORT_S)
    answer: dict[str, str] = json.loads(channel.receive(SHORT_S))
    return answer


def _channel() -> TaskChannel:
    call = current_call()
    if call is None:
        raise PoolClosed("call: has ended; send requests before it does")
    return channel_of(call, f"{CHANNEL}/{os.urandom(8).hex()}")


def _received(channel: TaskChannel, timeout_s: float, download: Download | None) -> tuple[int, bytearray]:
    """Return status and body of an answer."""

    def read_into(memory: memoryview) -> int:
        piece = channel.receive(timeout_s)
        memory[: len(piece)] = piece
        return len(piece)

    head = json.loads(channel.receive(timeout_s))
    status, tag = head["status"], head.get("tag", "")  # older programs send none
    return status, download_for(status, download).receive(read_into, status=status, tag=tag, size=head["size"])


def _workers() -> int:
    """Return the number of workers in this call: its ranks, or its process groups.

    Raises:
        UsageError: The call is split into workers of several ranks, and this one is in no process group.
    """
    call = current_call()
    if call is None or call.rank is None:
        return 1
    group, ranks = group_rank(), _ranks_of_process_group()
    if group is not None and group.world_size != ranks:
        raise UsageError(
            f"nodes_per_worker={group.nodes}: the {group.world_size} ranks of a worker need one process group, and "
            f"this rank is in a group of {ranks}; add @sky.integrations.torch to the function"
        )
    return max(1, call.rank.world_size // ranks)


def is_group() -> bool:
    """Return whether this process is one of several ranks of a process group."""
    return _ranks_of_process_group() > 1


def _ranks_of_process_group() -> int:
    dist = sys.modules.get("torch.distributed")
    is_open = dist is not None and dist.is_available() and dist.is_initialized()
    return int(dist.get_world_size()) if dist is not None and is_open else 1
