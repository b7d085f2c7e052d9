"""Program half of `tunnel`: it sends a task's requests on to the program's hub.

It does so with the program's own token, which no node ever sees, and it accepts only requests that log to a run or
work on the trials of a sweep.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from typing import Any

from ...errors import HubUnreachable
from ...wire.task_channel import TaskChannel
from .connection import HubConnection
from .fluent import current_address, current_experiment
from .tunnel import PIECE_BYTES

_IN_MEMORY = 4 << 20
_ALLOWED = re.compile(
    r"POST /v1/runs/[0-9a-f]{32}/batches|PUT /v1/blobs/[0-9a-f]{64}\?run=[0-9a-f]{32}"
    r"|GET /v1/sweeps\?name=[^&]*|GET /v1/sweeps/\d+|GET /v1/sweeps/\d+/(trials\?since|silent\?silent_s)=\d+"
    r"|POST /v1/sweeps/\d+/trials|(GET|PATCH) /v1/trials/\d+|POST /v1/trials/\d+/heartbeat",
    re.ASCII,
)


def serve(channel: TaskChannel) -> None:
    """Send a task's requests on to the program's hub, until the channel ends."""
    address = current_address()
    told: dict[str, str | None] = {"url": None}
    if address is not None:
        told = {"url": address.url, "project": address.project, "experiment": current_experiment()}
    connection = None if address is None else HubConnection(address)
    try:
        for message in channel:
            head = json.loads(message)
            if "hello" in head:
                channel.send(json.dumps(told).encode())
            else:
                _answer(channel, *_forwarded(channel, connection, head))
    except (BrokenPipeError, EOFError):  # the task has ended
        return
    finally:
        if connection is not None:
            connection.close()


def _forwarded(channel: TaskChannel, connection: HubConnection | None, head: Mapping[str, Any]) -> tuple[int, bytes]:
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as body:
        while body.tell() < head["size"]:
            body.write(channel.receive())
        body.seek(0)
        wanted = f"{head['method']} {head['target']}"
        if not _ALLOWED.fullmatch(wanted):
            return _refusal(403, f"{wanted:.200}: is not possible from a task; do it in the pool's program")
        if connection is None:
            return _refusal(503, "the pool's program has no hub any more; call hub.connect there")
        headers = {"Content-Type": head["type"], "Content-Length": str(head["size"])}
        try:
            return connection.exchange(head["method"], head["target"], body, headers)
        except HubUnreachable as error:
            return _refusal(503, str(error))


def _refusal(status: int, message: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": {"code": "UNAVAILABLE", "message": message}}).encode()


def _answer(channel: TaskChannel, status: int, body: bytes) -> None:
    channel.send(json.dumps({"status": status, "size": len(body)}).encode())
    for at in range(0, len(body), PIECE_BYTES):
        channel.send(body[at : at + PIECE_BYTES])
